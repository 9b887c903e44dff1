"""Chains of blocks with activation checkpoints, saved-tensor hooks, in-place changes and boxed outputs."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from support.chains import Box, Boxed, Chain, InPlaceBias, line


class Deep(nn.Module):
    """A unit with an activation of its own; ``inner``: it checkpoints its own second half."""

    def __init__(self, inner: bool = False):
        super().__init__()
        self.first, self.second, self.inner = line(), line(), inner
        self.hidden: list[StorageWeakRef] = []  # of the forwards so far

    def forward(self, x):
        h = torch.tanh(self.first(x))
        self.hidden.append(StorageWeakRef(h.untyped_storage()))
        return checkpoint(self._rest, h, use_reentrant=False) if self.inner else self._rest(h)

    def _rest(self, h):
        return torch.tanh(self.second(h)) * self.second.weight.t().sum()


class Checkpointed(Chain):
    """Each unit in a checkpoint of its own."""

    def __init__(self, *blocks: nn.Module, reentrant: bool):
        super().__init__(*blocks)
        self.reentrant = reentrant

    def forward(self, x):
        x = x.detach().requires_grad_()  # without it a reentrant checkpoint gives its first unit no gradients
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return x


class ChangedOutputs(Chain):
    """The outputs of units are changed in place."""

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
            x *= 1.5
        return x


class Unboxing(nn.Module):
    """Takes an input that is no pytree, and gives a tensor."""

    def __init__(self):
        super().__init__()
        self.linear = line()

    def forward(self, x):
        return torch.tanh(self.linear(x.value if isinstance(x, Box) else x))


class Branch(nn.Module):
    """A unit with a second result, that reads a parameter of its own; ``late``: after the output."""

    def __init__(self, late: bool):
        super().__init__()
        self.linear, self.scale, self.late = line(), nn.Parameter(torch.full((8,), 1.1)), late

    def forward(self, x):
        if self.late:
            y = torch.tanh(self.linear(x))
            self.second = torch.tanh(x) * self.scale
        else:
            self.second = torch.tanh(x) * self.scale
            y = torch.tanh(self.linear(self.second))
        return y


class Branches(Chain):
    """It uses second results for some inputs only, not for the first one."""

    def __init__(self, *blocks: nn.Module, uses: Callable[[torch.Tensor], bool] = lambda x: bool(x.sum() > 0)):
        super().__init__(*blocks)
        self.uses = uses

    def forward(self, x):
        uses = self.uses(x)
        for block in self.blocks:
            x = block(x)
            if uses:
                x = x + block.second.mean()
        return x


class ReturnsInput(nn.Module):
    """Changes its input in place, and returns it."""

    def __init__(self):
        super().__init__()
        self.linear, self.scale = line(), nn.Parameter(torch.full((8,), 1.1))

    def forward(self, x):
        x = x.add_(torch.tanh(self.linear(torch.tanh(x))) * self.scale)
        return x


class Sometimes(nn.Module):
    """A unit that does something else for some inputs, if ``positive`` says so."""

    def __init__(self):
        super().__init__()
        self.linear, self.scale = line(), nn.Parameter(torch.full((8,), 1.1))

    @staticmethod
    def positive(x: torch.Tensor) -> bool:
        return bool(x.sum() > 0)


class SometimesLate(Sometimes):
    """It creates its second result after the output, if at all."""

    def forward(self, x):
        y = torch.tanh(self.linear(x))
        self.second = torch.tanh(x) * self.scale if self.positive(x) else torch.zeros(1)
        return y


class SometimesInput(Sometimes):
    """It changes its input in place and returns it, or does not."""

    def forward(self, x):
        y = torch.tanh(torch.tanh(x) * self.scale) * self.scale + self.linear(torch.tanh(x))
        return x.add_(y) if self.positive(x) else x + y


class HalfBoxed(Sometimes):
    """Its outputs are a tensor and one in a box, of which either is used."""

    def forward(self, x):
        boxed = Box(torch.tanh(self.linear(x) * self.scale))
        return torch.tanh(x * self.scale), boxed


class HalvesBoxed(Chain):
    def forward(self, x):
        for block in self.blocks:
            y, boxed = block(x)
            x = boxed.value if block.positive(x) else y
        return x


class ChangedViews(Chain):
    """The outputs of units are views, and some of their elements are replaced."""

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
            x[:, 0] = 0.5
        return x


class Copies(Chain):
    """Its units own their inputs."""

    def forward(self, x):
        for block in self.blocks:
            x = block(x * 1.0)
        return x


def same(x: torch.Tensor) -> torch.Tensor:
    return x


def as_they_are() -> Any:
    """Saved-tensor hooks that keep tensors as they are (as save_on_cpu does on a CPU)."""
    return saved_tensors_hooks(same, same)


def halved() -> Any:
    """Hooks whose two halves must both be called, once each."""
    return saved_tensors_hooks(lambda x: (x.detach() * 2,), lambda packed: packed[0] / 2)


class Watched(Chain):
    """The user has saved-tensor hooks of their own inside the model."""

    def __init__(self, *blocks: nn.Module, watch: Callable[[], Any]):
        super().__init__(*blocks)
        self.watch = watch

    def forward(self, x):
        with self.watch():
            return super().forward(x)


def deep(count: int = 8) -> list[nn.Module]:
    return [Deep() for _ in range(count)]


MODELS = {
    "plain": lambda: Chain(*deep()),
    "checkpoint": lambda: Checkpointed(*deep(), reentrant=False),
    "reentrant checkpoint": lambda: Checkpointed(*deep(), reentrant=True),
    "checkpoint inside": lambda: Chain(*(Deep(inner=True) for _ in range(8))),
    "boxed": lambda: Chain(*(Boxed() if i % 2 == 0 else Unboxing() for i in range(8))),
    "all boxed": lambda: Chain(*(Boxed() for _ in range(8)), unwrap=True),
    "in place": lambda: Chain(*(line() if i % 2 == 0 else InPlaceBias() for i in range(8))),
    "changed outputs": lambda: ChangedOutputs(*deep()),
    "changed views": lambda: ChangedViews(*(nn.Sequential(nn.Unflatten(0, (2, 2)), line(), nn.Flatten(0, 1)) for _ in range(8))),
    "early branch": lambda: Branches(*(Branch(late=False) for _ in range(8))),
    "late branch": lambda: Branches(*(Branch(late=True) for _ in range(8))),
    "returns its input": lambda: Copies(*(ReturnsInput() for _ in range(8))),
    "late branch at times": lambda: Branches(*(SometimesLate() for _ in range(8)), uses=lambda x: True),
    "returns its input at times": lambda: Copies(*(SometimesInput() for _ in range(8))),
    "half boxed": lambda: HalvesBoxed(*(HalfBoxed() for _ in range(8))),
    "hooks that keep": lambda: Watched(*deep(), watch=as_they_are),
    "hooks that change": lambda: Watched(*deep(), watch=halved),
}
# for the oracle, whose functional_call is over when a checkpoint computes anew
WITHOUT = {"checkpoint": "plain", "reentrant checkpoint": "plain", "checkpoint inside": "plain"}
