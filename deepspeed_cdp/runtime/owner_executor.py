"""The owner's actions of a rank's program, from OFFER_GRAD to PUBLISH_PARAM.

OFFER_GRAD and GRANT_CREDIT are relays (``Transport.relay``); the others run on the owner's stream. All are beside the passes.
The owner's stream gets an action only when the executor on the host reaches it, and the host is often not ahead of the passes. So
each unit has its own REDUCE_GRAD, at the logical time at which its sum is finished, instead of one for the stage.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch

from deepspeed_cdp.plan.actions import Action, Kind
from deepspeed_cdp.plan.cross_ring import finishing
from deepspeed_cdp.runtime.cross_ring import CrossRing, SumViews
from deepspeed_cdp.runtime.events import Events
from deepspeed_cdp.runtime.messages import Messages
from deepspeed_cdp.runtime.owner_protocol import Owner
from deepspeed_cdp.runtime.program import ActionLocation
from deepspeed_cdp.runtime.state import RankState
from deepspeed_cdp.runtime.step_metrics import StepMetrics
from deepspeed_cdp.transport.ring_view import RingView


class OwnerExecutor:
    """Executes a rank's actions for the stage it owns.

    Attributes:
        trained: the owned units that have gradient sums, in the order in which they are read; frozen: the others.
        skipped: updates that were not applied because the step's gradient norm was not finite (``dp`` and v1).
        actions: handlers by kind; relayed ones only begin, the others are on the owner's stream.
        published_at, predicted_at: by unit and slot (or copy), the event behind its last write (or prediction).
        added_at: by unit, the event behind the last addition of this rank to its sum; sum_ends: where that finishes the sum.
        own_read_end: the event behind this rank's last read of its own published copies.
        eager: each unit is updated when its own sum is finished.
    """

    def __init__(
        self, state: RankState, messages: Messages, owner: Owner, sum_views: SumViews, metrics: StepMetrics, events: Events
    ):
        self.state, self.messages, self.owner, self.metrics, self.events = state, messages, owner, metrics, events
        self.transport = state.transport
        plan = state.plan
        owned = plan.members(state.owned_stage)
        self.trained, self.frozen = ([i for i in owned if bool(plan.unit(i).g_bytes) == has_sum] for has_sum in (True, False))
        self.skipped = 0
        self.actions: dict[Kind, Callable[[Action], None]] = {
            Kind.PREDICT_PARAM: self.predict,
            Kind.OFFER_GRAD: self.offer,
            Kind.GRANT_CREDIT: self.grant,
            Kind.REDUCE_GRAD: self._on_owner_stream(self.reduce),
            Kind.GRAD_NORM: self._on_owner_stream(self.norm_and_credits),
            Kind.SEND_NORM: self._on_owner_stream(self.send_norm),
            Kind.OPTIMIZER_STEP: self._on_owner_stream(self.step),
            Kind.PUBLISH_PARAM: self.publish,
        }
        self._copies_sums = plan.sums_apart and plan.rings == 1  # from O to X; several rings do so anyway
        self._finishing = finishing(plan, state.rank)
        self._cross_ring: CrossRing | None = None
        if plan.rings > 1:
            assert isinstance(state.transport, RingView)
            self._cross_ring = CrossRing(plan, state.transport, state.buffers, self._finishing, sum_views)
        self._losses: dict[int, tuple[torch.Tensor, int]] = {}  # step -> the sum of its losses, and their number
        self._kept_alive: deque[tuple[torch.Tensor, Any]] = deque()  # such sums, with events behind their last reads
        self._flushing = False

    def _on_owner_stream(self, do: Callable[[Action], None]) -> Callable[[Action], None]:
        def beside_passes(a: Action) -> None:
            with self.transport.owner_stream():
                do(a)

        return beside_passes

    def begin(self) -> None:
        """After a flush, and at the start: nothing is reduced or published yet."""
        state = self.state
        self._reduced_late = () if state.plan.eager_units(state.rank) else self._finishing  # units that GRAD_NORM reduces
        offsets = state.plan.o_layout(state.owned_stage)
        self._slots, self._predictions = state.plan.slots(state.owned_stage), state.plan.corrected_copies(state.owned_stage)
        self._written = [state.plan.written(version, state.owned_stage) for version in range(self._slots)]
        self._sum_places = {i: (offsets[i], state.plan.unit(i).g_bytes) for i in self.trained}
        self.eager = self.owner.updates_eagerly and not state.schedule.exact_norm
        self._step_end = self.own_read_end = self.transport.record_event()
        self.published_at: dict[tuple[int, int], Any] = {}
        self.predicted_at: dict[tuple[int, int], Any] = {}
        self.added_at: dict[int, Any] = {}
        self._norms: dict[int, torch.Tensor] = {}  # squared, of the owned units reduced so far
        self.sum_ends: dict[int, Any] = {}
        self._losses.clear()
        self.metrics.begin()
        if self._cross_ring:
            self._cross_ring.begin()

    def flush(self, actions: tuple[Action, ...]) -> None:
        """Apply the last step's update without publishing it, since ``Runtime.restart`` publishes the masters next.

        Args:
            actions: of the steady program.
        """
        last = {
            Kind.REDUCE_GRAD: self.reduce,
            Kind.GRAD_NORM: self.norm,
            Kind.SEND_NORM: self.send_norm,
            Kind.OPTIMIZER_STEP: self._update,
        }
        self._flushing = True
        with self.transport.owner_stream():
            for a in actions:
                if a.kind in last and a.version == -1:
                    last[a.kind](a)
                    if a.kind == Kind.GRAD_NORM and self.state.rank == 0 and a.peer is not None:
                        self.transport.start_peer("S", a.peer, True)  # the last owner's, who ends the flush with it
        self._flushing = False

    # ---- calls of the passes --------------------------------------------------------------------------------------------
    def end_step(self, losses: torch.Tensor, count: int) -> None:
        """The passes of the step are over.

        Args:
            losses: float64 scalar, the sum over ``count`` micro-batches.
        """
        self._losses[self.state.global_step] = losses.clone(), count
        self._step_end = self.transport.record_event()

    def read_ended(self) -> None:
        """A pass of this rank has read its own published copy for the last time."""
        self.own_read_end = self.transport.record_event()

    def wait_published(self, unit: int, version: int, region: str) -> None:
        """Make the current stream wait until this region has this version (relative to the step) of an owned unit."""
        state = self.state
        if state.plan.predicts and region in ("W", "W0"):
            self.transport.wait_event(self.predicted_at.get((unit, (state.step + version) % self._predictions)))
            return
        self.transport.wait_event(self.published_at.get((unit, (state.step + version) % self._slots)))

    def own_added(self, unit: int) -> None:
        """A pass of this rank has added to an owned unit's sum."""
        self.added_at[unit] = event = self.transport.record_event()
        if self.state.rank == self.state.schedule.ranks - 1:
            self.sum_ends[unit] = event  # finished, if the step is over

    # ---- actions --------------------------------------------------------------------------------------------------------
    def predict(self, a: Action) -> None:
        """PREDICT_PARAM: predict one unit's next version from its running sum; not in the first step since a flush."""
        state, (region, _) = self.state, self.messages.place(a)
        if state.step + a.version == 0:
            return
        readers = self.messages.reads.take(region, a.offset, a.nbytes)
        if a.unit not in self._sum_places:
            return
        waits = [
            self.messages.coming_back(a, a.unit),
            self.added_at.get(a.unit),
            self.published_at.get((a.unit, (state.step + a.version) % self._slots)),  # the update before
            self.own_read_end,
            *readers,
        ]
        self.predict_after(a, [ticket for ticket in waits if ticket is not None])

    def predict_after(self, a: Action, tickets: Sequence[Any] = ()) -> None:
        """PREDICT_PARAM, once these tickets are ready. C++ waits before it calls this."""
        state, where = self.state, ActionLocation(self.state, a)
        copy, step = (state.step + a.version) % self._predictions, state.global_step + a.version

        def begin() -> Any:
            for ticket in tickets:
                ticket.wait(where)
            self.owner.predict(step, a.unit, copy)
            return self.transport.record_event()

        self.predicted_at[a.unit, copy] = predicted = self.transport.relay(begin)
        # until it is made, no gradient is added to the sum, and the update does not take the sum
        self.messages.reads.add("O", *self._sum_places[a.unit], predicted)

    def publish(self, a: Action) -> None:
        """PUBLISH_PARAM: offer a version, or its prediction, to a reader."""
        if a.relayed:
            self.messages.offer(a)
            return
        with self.transport.owner_stream():
            self.messages.push(a)

    def offer(self, a: Action) -> None:
        """OFFER_GRAD: once a unit's sum is back, or this rank has added to it, let the next rank pull it."""
        _, source, round = a.into
        own = source == self.state.rank
        self.messages.offer(a, self.added_at[a.unit] if own else self.messages.back(a, a.unit, source, round))

    def grant(self, a: Action) -> None:
        """GRANT_CREDIT: a rank that has pulled a sum may push it back."""
        self.messages.post_all(a, relayed=True)

    def reduce(self, a: Action) -> None:
        """REDUCE_GRAD: average one unit's finished sum."""
        self._wait_sum(a, a.unit)
        if self.eager:
            self._wait_copy(a, [a.unit])
        self._reduce_unit(a, a.unit)

    def reduce_after_waits(self, a: Action) -> None:
        """REDUCE_GRAD, whose waits C++ has enqueued."""
        with self.transport.owner_stream():
            self._reduce_unit(a, a.unit)

    def _wait_sum(self, a: Action, unit: int) -> int:
        """Wait until the ring's sum of the unit is complete, and nothing is predicted from it any more. Returns the unit."""
        place = self._sum_places[unit]
        self.messages.wait_readers(a, "O", *place)  # first, as in ``Executor._recv_grad``
        if self.state.rank == self.state.schedule.ranks - 1:
            self.transport.wait_event(self.sum_ends.pop(unit, None))
        else:
            s = self.state.schedule
            self.messages.back(a, unit, s.ranks - 1, s.rounds - 1).wait(ActionLocation(self.state, a))
        if self._copies_sums:
            self.state.buffers.view("X", *place).copy_(self.state.buffers.view("O", *place))
        return unit

    def norm_and_credits(self, a: Action) -> None:
        """GRAD_NORM, and the credits for the next step's sums if finished ones are copied."""
        self.norm(a)
        if self.state.plan.sums_apart:  # rank 0 grants none: it starts the next step's sums itself
            self._sums_used()
        self.messages.post_all(a)

    def norm(self, a: Action) -> None:
        """GRAD_NORM: reduce the remaining units, and send the metrics vector on with the stage's squared norm."""
        where, state = ActionLocation(self.state, a), self.state
        step = state.global_step + a.version
        if self.eager and self._reduced_late:
            self._wait_copy(a, self.trained + self.frozen)

        def losses() -> tuple[torch.Tensor, int]:
            self.transport.wait_event(self._step_end)
            return self._losses[step]

        def write_row(row: torch.Tensor) -> None:
            if self.metrics.divergence:
                self.metrics.divergence.write_row(row, step)

        ring = self._cross_ring
        finished = (
            (self._wait_sum(a, i) for i in self._reduced_late)
            if ring is None
            else ring.exchange(lambda i: self._wait_sum(a, i), losses, where, write_row)
        )
        for unit in finished:
            self._reduce_unit(a, unit)
        loss, count = losses() if ring is None else ring.total[:2]
        norms = [self._norms[i] for i in reversed(self.trained) if i in self._norms]
        norm2 = torch.cat(norms).sum(dtype=torch.float64) if norms else torch.zeros_like(loss)
        self.transport.sum_members(norm2, where)
        if a.peer is not None:
            self.metrics.receive(a.peer, where)
        self.metrics.add(state.owned_stage, norm2, loss, count, step, None if ring is None else ring.rows)
        self._norms = {}
        self._keep_alive(self._losses.pop(step)[0])

    def _keep_alive(self, tensor: torch.Tensor) -> None:
        """Hold a reference to a tensor of the passes' stream until the owner's stream has read it.

        ``Tensor.record_stream`` would do, but every later allocation would query the device, which takes microseconds.
        """
        while self._kept_alive and self._kept_alive[0][1].done():
            self._kept_alive.popleft()
        event = self.transport.record_event()
        if event is not None:
            self._kept_alive.append((tensor, event))

    def _reduce_unit(self, a: Action, unit: int) -> None:
        """Average the unit's finished sum; in the eager case also update and publish the unit."""
        step = self.state.global_step + a.version
        if self.eager:
            copy = self._copy(a)
            self._norms[unit] = self.owner.advance(step, unit, None if self._flushing else copy)
            self.published_at[unit, copy] = self.transport.record_event()
        else:
            self._norms[unit] = self.owner.average(step, unit)

    def _copy(self, a: Action) -> int:
        """The slot that the update of the action's step writes: one of ``OwnedStage.published``."""
        return (self.state.step + a.version + 1) % self._slots

    def _wait_copy(self, a: Action, units: list[int]) -> None:
        """Wait for the readers of the published copies that these units' update overwrites. A flush overwrites none."""
        if self._flushing:
            return
        where = ActionLocation(self.state, a)
        for ticket in self._copy_readers(a, units):
            ticket.wait(where)
        self.transport.wait_event(self.own_read_end)

    def _copy_readers(self, a: Action, units: list[int]) -> list[Any]:
        """Tickets of pushes that may still read from those copies; the caller waits for them."""
        plan, take, written = self.state.plan, self.messages.reads.take, self._written[self._copy(a)]
        return [t for i in units for region, offsets in written for t in take(region, offsets[i], plan.unit(i).p_bytes)]

    def send_norm(self, a: Action) -> None:
        """SEND_NORM: the last owner sends the finished norm to all others."""
        self.metrics.send_total()

    def step(self, a: Action) -> None:
        """OPTIMIZER_STEP: do the rest of the step's update, and grant the credits that it frees."""
        self._update(a)
        self.messages.post_all(a)

    def _update(self, a: Action) -> None:
        if a.peer is not None:
            self.metrics.receive_total(ActionLocation(self.state, a))
        step = self.state.global_step + a.version
        if self.state.schedule.exact_norm:  # under cdp-v2 an owner does not know the whole step's norm
            overflow = not bool(torch.isfinite(self.metrics.total))
            self.events.norm_known(step, overflow)
            if overflow:
                self.owner.discard()  # as ZeRO-3 does
                self.skipped += 1
        if not self.eager:
            self._wait_copy(a, self.trained + self.frozen)
            copy = self._copy(a)
            slot = None if self._flushing else copy
            if not self.owner.updates_per_unit:
                self.owner.update(step, self.metrics.total, None, slot)
            for i in self.trained:
                if self.owner.updates_per_unit:
                    self.owner.update(step, self.metrics.total, i, slot)
                self.published_at[i, copy] = self.transport.record_event()
        elif not self._reduced_late:  # REDUCE_GRAD has waited for the units' copies; frozen units are never written
            self._copy_readers(a, self.frozen)
        self.owner.finish(step)
        self.events.step_updated(step)
        if self._cross_ring and not self._flushing:
            self._cross_ring.begin()
        if not self.state.plan.sums_apart:
            self._sums_used()

    def _sums_used(self) -> None:
        """Remember this stream's reads of the finished sums, for messages that land in their place."""
        event = self.transport.record_event()
        if event is not None:
            for offset, nbytes in self._sum_places.values():
                self.messages.reads.add("O", offset, nbytes, event)
