"""Passes of a given duration that compute almost nothing, so that other processes on the machine cannot slow them."""

import time
from typing import Any

import torch

CYCLES = 1.7e9  # of a GPU per second, approximately; measure the real duration of a pause


def pause(at: torch.Tensor, seconds: float) -> None:
    """Block the device of a tensor: the host for a CPU, the current stream for a GPU."""
    if at.device.type == "cuda":
        torch.cuda._sleep(int(seconds * CYCLES))
    else:
        time.sleep(seconds)


class Pause(torch.autograd.Function):
    """``Pause.apply(x, forward, backward)``: the identity, which takes ``forward`` and ``backward`` seconds."""

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
    """A small layer with the duration of a large one: ``seconds`` forward, ``ratio`` times as long backward."""

    def __init__(self, width: int, seconds: float, ratio: float = 2.0):
        super().__init__(width, width)
        self.seconds, self.ratio = seconds, ratio

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Pause.apply(torch.tanh(super().forward(x)), self.seconds, self.ratio * self.seconds)
