"""What a rank does for the stage it owns, as its walk (executor.py) comes to REDUCE_GRAD, GRAD_NORM, SEND_NORM and
OPTIMIZER_STEP (design §9).

All of it runs on the owner's stream, beside the passes. But a stream gets its work only when the host's walk comes to it, and
often the host is not ahead of the passes; so a unit's sum is taken up where it is finished in logical time, not together with the
rest of its stage where these are wanted.
"""

from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from deepspeed_cdp.plan.actions import Action
from deepspeed_cdp.plan.plan import Plan
from deepspeed_cdp.plan.schedule import Schedule
from deepspeed_cdp.runtime.cross_ring import CrossRing
from deepspeed_cdp.runtime.owner_protocol import Owner
from deepspeed_cdp.runtime.program import ActionLocation
from deepspeed_cdp.runtime.step_metrics import StepMetrics
from deepspeed_cdp.transport.base import Ticket, Transport
from deepspeed_cdp.transport.buffers import Buffers


class OwnerExecutor:
    """Part of ``Executor``, which sets what is declared here."""

    plan: Plan
    schedule: Schedule
    rank: int
    transport: Transport
    buffers: Buffers
    scalars: StepMetrics
    owner: Owner | None
    across: CrossRing | None
    on_end: Callable[[int, bool], None]
    step: int
    global_step: int
    skipped: int
    _members: list[int]  # the owned units that have sums
    _frozen: list[int]  # and the others
    together: tuple[int, ...]  # the owned units that GRAD_NORM averages
    _flushing: bool
    _arrivals: dict[tuple, Ticket]
    _norms: dict[int, torch.Tensor]
    _lost: dict[int, tuple[torch.Tensor, int]]
    _kept: deque[tuple[torch.Tensor, Any]]
    _sum_ends: dict[int, Any]
    _published_at: dict[tuple[int, int], Any]
    _step_end: Any
    _own_read_end: Any
    _reading: dict[str, list[tuple[int, int, Ticket]]]
    _sum_places: list[tuple[int, int]]  # offset and bytes of the owned units' finished sums
    _readers: Callable[[str, int, int], list[Ticket]]
    _posts: Callable[[Action], None]

    def _as_owner(self, do: Callable[[Action], None]) -> Callable[[Action], None]:
        def beside(a: Action) -> None:
            with self.transport.owner_stream():
                do(a)

        return beside

    def _average(self, a: Action) -> None:
        """One unit's sum, as soon as it is finished."""
        assert self.owner is not None
        self._summed(a, a.unit)
        if self.owner.updates_eagerly:
            self._free_copy(a, a.unit)
        self._finish(a, a.unit)

    def _summed(self, a: Action, unit: int) -> None:
        """The ring's sum of the unit is there."""
        if self.rank == self.schedule.ranks - 1:
            self.transport.after(self._sum_ends.pop(unit, None))
        else:
            self._arrivals.pop(("O", self.step + a.version, self.schedule.rounds - 1, unit, True)).wait(ActionLocation(self, a))

    def _norm(self, a: Action) -> None:
        assert self.owner is not None
        where, stage = ActionLocation(self, a), self.schedule.owned(self.rank)
        if self.owner.updates_eagerly and self.together:
            self._free_copy(a)

        def ready(i: int) -> int:
            self._summed(a, i)
            return i

        def losses() -> tuple[torch.Tensor, int]:
            self.transport.after(self._step_end)
            return self._lost[self.global_step + a.version]

        across, views = self.across, self.owner.ring_sums
        for i in map(ready, self.together) if across is None else across.exchange(ready, losses, views, where):
            self._finish(a, i)
        if a.peer is not None:
            self.scalars.receive(a.peer, where)
        loss, count = losses() if across is None else across.total
        norms = [self._norms[i] for i in reversed(self._members) if i in self._norms]
        norm2 = torch.cat(norms).sum(dtype=torch.float64) if norms else torch.zeros_like(loss)
        self.scalars.add(stage, norm2, loss, count, self.global_step + a.version)
        self._norms = {}
        self._keep(self._lost.pop(self.global_step + a.version)[0])

    def _keep(self, tensor: torch.Tensor) -> None:
        """Hold on to a tensor of the passes' until the owner's stream, which reads it, has come as far as this. (torch's
        ``record_stream`` would do, but from then on every allocation asks the device whether it has: some microseconds each.)"""
        while self._kept and self._kept[0][1].done():
            self._kept.popleft()
        mark = self.transport.mark()
        if mark is not None:
            self._kept.append((tensor, mark))

    def _finish(self, a: Action, unit: int) -> None:
        """What can be done with a unit's finished sums."""
        assert self.owner is not None
        if self.owner.updates_eagerly:
            slot = None if self._flushing else self._copy(a)
            self._norms[unit] = self.owner.advance(self.global_step + a.version, unit, slot)
            self._published_at[unit, self._copy(a)] = self.transport.mark()
        else:
            self._norms[unit] = self.owner.average(self.global_step + a.version, unit)

    def _copy(self, a: Action) -> int:
        return (self.step + a.version + 1) % self.plan.copies

    def _free_copy(self, a: Action, unit: int | None = None) -> None:
        """Wait until the published copy (of one unit, or all) that is next to be written is not read any more (in a flush none
        is written)."""
        if self._flushing:
            return
        for ticket in self._copy_readers(a, unit):
            ticket.wait(ActionLocation(self, a))
        self.transport.after(self._own_read_end)

    def _copy_readers(self, a: Action, unit: int | None) -> list[Ticket]:
        """Pushes that may still read from that copy; they are the caller's to wait for."""
        offsets, start, nbytes = self.plan.copy_layout(self.schedule.owned(self.rank))
        if unit is not None:
            start, nbytes = offsets[unit], self.plan.unit(unit).p_bytes
        return self._readers(self.plan.copy_region(self.step + a.version + 1), start, nbytes)

    def _total(self, a: Action) -> None:
        self.scalars.send_total()

    def _apply(self, a: Action) -> None:
        assert self.owner is not None
        if a.peer is not None:
            self.scalars.receive_total(ActionLocation(self, a))
        step = self.global_step + a.version
        if self.schedule.exact_norm:  # without the whole step's norm an owner cannot know (cdp-v2)
            overflow = not bool(torch.isfinite(self.scalars.total))
            self.on_end(step, overflow)
            if overflow:
                self.owner.discard()  # as ZeRO-3 does
                self.skipped += 1
        if not self.owner.updates_eagerly:
            self._free_copy(a)
            slot = None if self._flushing else self._copy(a)
            if not self.owner.updates_per_unit:
                self.owner.update(step, self.scalars.total, None, slot)
            for i in self._members:
                if self.owner.updates_per_unit:
                    self.owner.update(step, self.scalars.total, i, slot)
                self._published_at[i, self._copy(a)] = self.transport.mark()
        elif not self.together:  # each unit has been freed by itself; the others are never written, so nobody need wait
            for i in self._frozen:
                self._copy_readers(a, i)
        self.owner.finish(step)
        if self.across and not self._flushing:
            self.across.begin()
        self._sums_used()

    def _sums_used(self) -> None:
        """What lands next where the finished sums lie must wait for what this stream has read of them."""
        mark = self.transport.mark()
        if mark is not None:
            self._reading.setdefault(self.plan.o_region, []).extend((at, nbytes, mark) for at, nbytes in self._sum_places)

    def _update(self, a: Action) -> None:
        self._apply(a)
        self._posts(a)
