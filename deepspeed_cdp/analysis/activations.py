"""Activation memory over time (the paper's Figure 4): bytes that autograd saves for the backward, of one worker and of N.

``track`` runs one forward and backward of any model on any device, also on meta, which takes no memory and no arithmetic. It
records the live bytes whenever autograd saves or frees a tensor. ``Profile`` extrapolates to N workers: all at the same time,
or, as under the cyclic schedule, each 1/N of a step after the one before. The sum of the latter is constant for a triangular
curve, and about half for large N (Section 4.1).

Every storage that a saved-tensor hook sees counts once. Parameters, buffers and their views do not count, as they are always
there. Nor do temporary buffers of kernels and gradients.
"""

import time
from bisect import bisect_right
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.flop_counter import FlopCounterMode

from deepspeed_cdp.model.discover import _MORE_FLOPS, Example

POINTS = 2048  # points of a step at which the total of several workers is evaluated


@dataclass(frozen=True)
class Profile:
    """Live activation bytes of one forward and backward of one worker.

    Attributes:
        times: fractions of the forward and backward, ascending from 0 to 1.
        live: bytes from each of these times on; 0 at the end.
        turn: the fraction at which the forward ends.
        clock: the unit of time: "flops" or "seconds".
        total: duration in this unit.
    """

    times: tuple[float, ...]
    live: tuple[int, ...]
    turn: float
    clock: str
    total: float

    @property
    def peak(self) -> int:
        """The most live bytes of one worker."""
        return max(self.live)

    def at(self, x: float) -> int:
        """Live bytes at a fraction of the step; any real number, since steps repeat."""
        return self.live[bisect_right(self.times, x % 1.0) - 1]

    def together(self, workers: int) -> int:
        """The most live bytes of ``workers`` that run at the same time."""
        return workers * self.peak

    def in_turn(self, workers: int) -> list[int]:
        """Live bytes of ``workers``, each 1/N of a step after the one before, at POINTS of a step and at one worker's peak.

        The total repeats every 1/N of a step.
        """
        peak = self.times[self.live.index(self.peak)]
        places = [i / POINTS for i in range(POINTS)] + [peak]
        return [sum(self.at(x + i / workers) for i in range(workers)) for x in places]

    def saving(self, workers: int) -> float:
        """The fraction by which the cyclic schedule lowers the peak."""
        return 1 - max(self.in_turn(workers)) / self.together(workers)


class _Kept:
    """A saved tensor, which calls ``gone`` when autograd frees it."""

    __slots__ = ("tensor", "gone")

    def __init__(self, tensor: torch.Tensor, gone: Callable[[], None]):
        self.tensor, self.gone = tensor, gone

    def __del__(self) -> None:
        self.gone()


class Tracker:
    """Counts the bytes that autograd saves while its hooks are on; events are (clock, live bytes)."""

    def __init__(self, ignore: Iterable[torch.Tensor], clock: Callable[[], float]):
        self.clock, self.live, self.events = clock, 0, [(clock(), 0)]
        self._ignored = {self._key(t): t for t in ignore}
        self._users: dict[int, int] = {}  # storage -> number of saved tensors that use it

    @staticmethod
    def _key(tensor: torch.Tensor) -> int:
        return tensor.untyped_storage()._cdata

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor | _Kept:
        key = self._key(tensor)
        if key in self._ignored:
            return tensor
        nbytes = tensor.untyped_storage().nbytes()
        self._users[key] = self._users.get(key, 0) + 1
        if self._users[key] == 1:
            self._change(nbytes)

        def gone() -> None:
            self._users[key] -= 1
            if not self._users[key]:
                del self._users[key]
                self._change(-nbytes)

        return _Kept(tensor.detach(), gone)

    def _change(self, nbytes: int) -> None:
        self.live += nbytes
        self.events.append((self.clock(), self.live))

    def hooks(self) -> torch.autograd.graph.saved_tensors_hooks:
        """The context in which to run the forward."""
        return torch.autograd.graph.saved_tensors_hooks(self._pack, lambda x: x.tensor if type(x) is _Kept else x)


def loss_of(output: Any) -> torch.Tensor:
    """A scalar to run the backward from: the output's ``loss``, else the sum of its first differentiable tensor.

    Raises:
        ValueError: there is none.
    """
    loss = getattr(output, "loss", None)
    if isinstance(loss, torch.Tensor) and loss.requires_grad:
        return loss.sum()
    for leaf in tree_leaves(dict(output) if hasattr(output, "keys") else output):
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
            return leaf.sum()
    raise ValueError(f"the model's output, {type(output).__name__}, has no tensor that depends on its parameters; return one")


def track(module: torch.nn.Module, example: Example, clock: str = "flops") -> Profile:
    """One forward and backward in training mode; gradients are dropped.

    Args:
        example: arguments on the module's device.
        clock: "flops": operations of matrix products, convolutions and attention so far, the same on every device; "seconds":
            the wall clock, which is slow on a GPU, since each event synchronizes the device.
    Raises:
        ValueError: unknown clock, "seconds" on the meta device, or an output without gradient.
    """
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    devices = {t.device.type for t in tensors.values()}
    if clock not in ("flops", "seconds") or (clock == "seconds" and "meta" in devices):
        raise ValueError(f"clock is {clock!r}, but must be 'flops', or 'seconds' on a device that computes; use 'flops'")
    counter = FlopCounterMode(display=False, custom_mapping=_MORE_FLOPS)

    def seconds() -> float:
        if "cuda" in devices:
            torch.cuda.synchronize()
        return time.perf_counter()

    now = seconds if clock == "seconds" else lambda: float(counter.get_total_flops())
    modes = [(m, m.training) for m in module.modules()]
    module.train()
    args, kwargs = tuple(example.args), dict(example.kwargs)
    try:
        with ExitStack() as stack:
            if "meta" in devices:
                stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
                tensors = {name: _fake(t) for name, t in tensors.items()}
                args, kwargs = tree_map_only(torch.Tensor, _fake, (args, kwargs))
            if clock == "flops":
                stack.enter_context(counter)
            tracker = Tracker(tensors.values(), now)
            with tracker.hooks():
                fake = "meta" in devices
                output = torch.func.functional_call(module, tensors, args, kwargs) if fake else module(*args, **kwargs)
                loss = loss_of(output)
            del output
            turn = now()
            loss.backward()
            del loss
            end = now()
    finally:
        for m, training in modes:
            m.training = training
        for p in module.parameters():
            p.grad = None
    return _profile(tracker.events, turn, end, clock)


def _fake(t: torch.Tensor) -> torch.Tensor:
    """A fake CPU tensor of the same shape: attention takes the fused kernel, as on GPUs, but not on the meta device."""
    made = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="cpu")
    return torch.nn.Parameter(made, t.requires_grad) if isinstance(t, torch.nn.Parameter) else made


def _profile(events: list[tuple[float, int]], turn: float, end: float, clock: str) -> Profile:
    begin, total = events[0][0], end - events[0][0]
    scale = total or 1.0
    steps: dict[float, int] = {}
    for when, live in events:
        steps[min((when - begin) / scale, 1.0)] = live  # the last of several events at one time
    # events before the first matrix product, for instance, share one time; keep the peak among them
    when, live = max(events, key=lambda e: e[1])
    at = min((when - begin) / scale, 1.0)
    steps[at], steps[1.0] = max(steps[at], live), 0
    times = tuple(sorted(steps))
    return Profile(times, tuple(steps[t] for t in times), (turn - begin) / scale, clock, total)
