"""Passes that take a given time and compute next to nothing: no other process on the machine can take it away from them."""

import time
from typing import Any

import torch

CYCLES = 1.7e9  # of a GPU per second, about: measure what a pause came to


def pause(at: torch.Tensor, seconds: float) -> None:
    """Hold up the device of a tensor: the host of a CPU, the current stream of a GPU."""
    if at.device.type == "cuda":
        torch.cuda._sleep(int(seconds * CYCLES))
    else:
        time.sleep(seconds)


class Pause(torch.autograd.Function):
    """``Pause.apply(x, forward, backward)``: the identity, which takes so many seconds in each direction."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, forward: float, backward: float) -> torch.Tensor:
        ctx.seconds = backward
        pause(x, forward)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        pause(gradient, ctx.seconds)
        return gradient, None, None


class SlowLinear(torch.nn.Linear):
    """A small layer that takes as long as a large one: ``seconds`` forwards, ``ratio`` times that backwards."""

    def __init__(self, width: int, seconds: float, ratio: float = 2.0):
        super().__init__(width, width)
        self.seconds, self.ratio = seconds, ratio

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Pause.apply(torch.tanh(super().forward(x)), self.seconds, self.ratio * self.seconds)
