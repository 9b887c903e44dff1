"""Optimizer offloading (``offload_optimizer: cpu``): masters, optimizer state and update on the CPU.

Per trained parameter that the rank owns, the host keeps an fp32 master, the optimizer's state, a buffer for the averaged gradient
(fp32) and one for the new value (the parameter's dtype). The device keeps the finished sums and the published copies. Ranks that
compute on CPUs make the same copies within host memory.
"""

from collections.abc import Collection, Hashable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch

from deepspeed_cdp.optim.stage_owner import StageOwner

# DeepSpeed's optimizers for CPUs keep their state by parameter, as torch's do, so units can be updated one by one.
PER_UNIT = ("deepspeed.ops.adam.cpu_adam", "deepspeed.ops.adagrad.cpu_adagrad", "deepspeed.ops.lion.cpu_lion")


class OffloadedOwner(StageOwner):
    """Masters of one stage in host memory. The device averages gradients and computes norms, the host steps the optimizer.

    The owner's stream copies a unit's averaged gradients to the host as soon as its sums are finished, and its new parameters
    back after its step. So copies of other units run while the host steps one. The host waits for copies only.
    """

    master_device = torch.device("cpu")
    updates_eagerly = False  # all units' copies start before the first update waits for its copy

    def __init__(self, *, pin: bool = True, **arguments: Any):
        """As ``StageOwner``.

        Args:
            pin: pinned buffers, if the parameters are on a GPU: copies are asynchronous then.
        """
        self._pin = pin
        self._grad_buffers: dict[Hashable, list[torch.Tensor]] = {}
        self._value_buffers: dict[tuple[str, bool], torch.Tensor] = {}  # by name; of the correction?
        self._grads_arrived: dict[Hashable, torch.cuda.Event | None] = {}  # by unit: its gradients are in host memory
        self._value_buffers_read: torch.cuda.Event | None = None  # the value buffers have been read
        self._norm2: torch.Tensor | None = None  # squared norm that clips this step's update, on the host
        super().__init__(**arguments)
        self.updates_per_unit = self.updates_per_unit or type(self.optimizer).__module__ in PER_UNIT

    def _buffer(self, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="cpu", pin_memory=self._pin and self._device.type == "cuda")

    def _record(self) -> torch.cuda.Event | None:
        if self._device.type != "cuda":
            return None
        event = torch.cuda.Event(blocking=True)  # the host sleeps, so that other ranks' updates have the CPU
        event.record()
        return event

    @staticmethod
    def _wait(event: torch.cuda.Event | None) -> None:
        """Block the host until the copies before ``event`` are done.

        The rule that excludes deadlocks (docs/algorithm.md#why-it-cannot-deadlock) allows it: the owner's stream waits before the
        event for finished sums, norms and readers of the old copy, all of earlier logical time than this update. If a peer is
        gone, the transport's watchdog unblocks the device after its timeout, and the next message raises.
        """
        if event is not None:
            event.synchronize()

    @torch.no_grad()
    def publish(self, slot: int, names: Collection[str], ahead: Mapping[str, torch.Tensor] = MappingProxyType({})) -> None:
        """As ``StageOwner``'s; the values are cast on the host, so that only the parameters' own dtype is copied."""
        if len(names) == len(self.masters):  # else other units' buffers may still be read, but not these
            self._wait(self._value_buffers_read)
        super().publish(slot, names, ahead)
        self._value_buffers_read = self._record()

    def _write(self, copy: Mapping[str, torch.Tensor], values: Mapping[str, torch.Tensor], corrected: bool = False) -> None:
        buffers = self._value_buffers
        for name in values:
            if (name, corrected) not in buffers:
                buffers[name, corrected] = self._buffer(copy[name].shape, copy[name].dtype)
        torch._foreach_copy_([buffers[n, corrected] for n in values], list(values.values()))
        for name in values:
            copy[name].copy_(buffers[name, corrected], non_blocking=True)

    @torch.no_grad()
    def average(self, step: int, unit: Hashable, tied: Sequence[Sequence[torch.Tensor]] = (), keep: bool = False) -> torch.Tensor:
        """As ``StageOwner``'s, on the device; starts the copy of the averaged gradients to the host. ``keep`` has no effect."""
        squares = super().average(step, unit, tied)
        grads = self._grads.get(unit)
        if grads:
            if unit not in self._grad_buffers:
                self._grad_buffers[unit] = [self._buffer(g.shape, g.dtype) for g in grads]
            for buffer, grad in zip(self._grad_buffers[unit], grads):
                buffer.copy_(grad, non_blocking=True)
            self._grads[unit] = self._grad_buffers[unit]
            self._grads_arrived[unit] = self._record()
        return squares

    @torch.no_grad()
    def predict(self, step: int, unit: Hashable, copy: int, tied: Sequence[Sequence[torch.Tensor]] = ()) -> None:
        """As ``StageOwner``'s, on the host, which waits for the early sum."""
        self._wait(self._value_buffers_read)
        super().predict(step, unit, copy, tied)
        self._value_buffers_read = self._record()

    @torch.no_grad()
    def update(self, step: int, norm2: torch.Tensor | None = None, unit: Hashable = None, slot: int | None = None) -> None:
        """As ``StageOwner``'s, on the host, after the gradients have arrived there."""
        if norm2 is not None and self.clip > 0:
            if self._norm2 is None:
                self._norm2 = norm2.to(self.master_device)
            norm2 = self._norm2
        for i in [unit] if unit is not None else list(self._grads):
            self._wait(self._grads_arrived.pop(i, None))
        super().update(step, norm2, unit, slot)

    def finish(self, step: int) -> None:
        self._norm2 = None
        super().finish(step)
