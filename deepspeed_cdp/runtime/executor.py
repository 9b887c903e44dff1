"""The runtime: walks a rank's program, one action after the other (design §6-8).

The model's hooks say how far to walk (``acquire``, ``release``); what is walked over on the way, because this rank skips a unit
or a whole micro-batch, is received, relayed and passed on all the same. Nothing here reads a clock or meets the other ranks.
"""

from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

from deepspeed_cdp.errors import HandoffError
from deepspeed_cdp.plan.actions import Action, Kind, Post
from deepspeed_cdp.plan.constants import PERSISTENT
from deepspeed_cdp.plan.cross_ring import finishing
from deepspeed_cdp.plan.plan import Plan
from deepspeed_cdp.plan.program import build, edges, initial_posts, with_rendezvous
from deepspeed_cdp.plan.warmup import Phases
from deepspeed_cdp.runtime.cross_ring import CrossRing
from deepspeed_cdp.runtime.owner_executor import OwnerExecutor
from deepspeed_cdp.runtime.owner_protocol import Owner
from deepspeed_cdp.runtime.program import ActionLocation, IndexedProgram, OutOfOrder
from deepspeed_cdp.runtime.step_metrics import StepMetrics
from deepspeed_cdp.transport.base import Ticket, Transport, Where
from deepspeed_cdp.transport.buffers import Buffers


class Executor(OwnerExecutor):
    """One rank's walk through its program.

    Attributes:
        plan: the one that steps are walked by until the next flush; phases: which one that is (plan/warmup.py).
        step: steps since the last flush; global_step: since the start of training (for messages).
        round: the round of gradient accumulation that is next or under way.
        skipped: updates that were not applied because the step's gradient norm was not finite (dp and v1).
        together: the owned units that GRAD_NORM averages; others have an REDUCE_GRAD each.
        starting: units whose sums are in use and have nothing in them, since this rank starts them.
        params, sums: the flat parameters and gradient sums of units in use (uint8 views), by unit index.
        on_pass: called with a unit's index, its running sum, and whether nothing has been added to this yet, when the unit's
            backward is over, to add this rank's gradients.
        on_release: called with a unit's index when its parameters are about to be freed.
        on_end: called with a step and whether its norm is not finite, when that is known and before its update (dp and v1).
    """

    def __init__(self, plan: Plan, rank: int, transport: Transport, device: torch.device, warmup_steps: int = 0):
        self.plan, self.rank, self.transport = plan, rank, transport
        self.schedule, self.phases = plan.schedule, Phases(plan, warmup_steps)
        self.buffers = Buffers(plan.regions, transport)
        self.scalars = StepMetrics(transport, self.buffers)
        self.owner: Owner | None = None
        self.on_pass: Callable[[int, torch.Tensor, bool], None] = lambda unit, view, first: None
        self.on_release: Callable[[int], None] = lambda unit: None
        self.on_end: Callable[[int, bool], None] = lambda step, overflow: None
        transport.prepare(sorted({edge for p in self.phases.plans for edge in edges(p)}), deferred=True)
        make = with_rendezvous if transport.rendezvous else build
        self._programs = {
            p.schedule: [IndexedProgram.of(make(p, rank, first)) for first in (True, False)] for p in self.phases.plans
        }
        self._do = {
            Kind.WAIT_PARAM: self._read,
            Kind.FORWARD_PARAM: self._relay,
            Kind.RECV_GRAD: self._sum,
            Kind.RELEASE_PARAM: self._done,
            Kind.SEND_GRAD: self._pass,
            Kind.RECV_PERSISTENT_GRAD: self._sum,
            Kind.SEND_PERSISTENT_GRAD: self._pass,
            Kind.RELEASE_PERSISTENT_PARAM: self._done,
            Kind.PUBLISH_PARAM: self._offer,
            Kind.PULL_PARAM: self._posts,
            Kind.GRANT_CREDIT: self._posts,
            Kind.START_RECV: self._start_peer,
            Kind.START_SEND: self._start_peer,
            Kind.REDUCE_GRAD: self._average,
            Kind.GRAD_NORM: self._norm,
            Kind.SEND_NORM: self._total,
            Kind.OPTIMIZER_STEP: self._update,
        }
        self._do |= {
            kind: self._as_owner(self._do[kind])
            for kind in (Kind.REDUCE_GRAD, Kind.GRAD_NORM, Kind.SEND_NORM, Kind.OPTIMIZER_STEP, Kind.PUBLISH_PARAM)
        }
        # the owned units that have sums, in the order in which they are read, and in that in which they are finished
        owned = plan.members(plan.schedule.owned(rank))
        self._members, self._frozen = ([i for i in owned if bool(plan.unit(i).g_bytes) == sums] for sums in (True, False))
        self._finishing = finishing(plan, rank)
        self.across = CrossRing(plan, transport, self.buffers, self._finishing) if plan.rings > 1 else None
        self.params: dict[int, torch.Tensor] = {}
        self.sums: dict[int, torch.Tensor] = {}
        self.global_step = 0
        self.skipped = 0
        self.losses = torch.zeros((), dtype=torch.float64, device=device)
        self.loss_count = 0
        self._lost: dict[int, tuple[torch.Tensor, int]] = {}  # step -> the sum of its losses, and their number
        self._kept: deque[tuple[torch.Tensor, Any]] = deque()  # such sums, and the marks at which they have been read

    # ---- epochs ---------------------------------------------------------------------------------------------------------
    def begin(self) -> None:
        """Start from the published copy in slot 0: version 0, read by everyone (design §10)."""
        self.step = self.round = self._cursor = self._latest = 0
        self.plan = self.phases.at(self.global_step)
        self.schedule = self.plan.schedule
        self._program, self._steady = self._programs[self.schedule]
        self.together = () if self.plan.averaged(self.rank) else self._finishing
        places = self.plan.o_layout(self.schedule.owned(self.rank))
        self._sum_places = [(places[i], self.plan.unit(i).g_bytes) for i in self._members]
        self._arrivals: dict[tuple, Ticket] = {}
        self._reading: dict[str, list[tuple[int, int, Ticket]]] = {}  # region -> pushes, and an owner, that still read from it
        self._read_from: dict[int, Ticket | None] = {}  # unit -> the message that brought its parameters
        self._step_end = self._own_read_end = self.transport.mark()
        self._published_at: dict[tuple[int, int], object] = {}  # unit, copy -> the mark at which what it holds is in place
        self._norms: dict[int, torch.Tensor] = {}  # squared, of the owned units averaged so far
        self.starting: set[int] = set()
        self._sum_ends: dict[int, object] = {}  # unit -> the mark at which its sum, finished on this rank, is in place
        self._flushing = False
        for known in (self.params, self.sums, self._lost):
            known.clear()
        self.scalars.begin()
        if self.across:
            self.across.begin()
        for post in initial_posts(self.plan, self.rank):
            self._post(post, "before the first step")

    def flush(self) -> None:
        """Collective: apply the last step's update and forget all that is on its way; ``begin`` comes next.

        Raises:
            ValueError: in the middle of a step.
        """
        where = f"rank {self.transport.label}, step {self.global_step}, flush"
        if self._cursor or self.round:
            raise ValueError(
                f"engine.flush() came in the middle of step {self.global_step}: {self.round} of "
                f"{self.schedule.rounds} micro-batches are done; call engine.step() first"
            )
        # nobody reads what would be published
        last = {
            Kind.REDUCE_GRAD: self._average,
            Kind.GRAD_NORM: self._norm,
            Kind.SEND_NORM: self._total,
            Kind.OPTIMIZER_STEP: self._apply,
        }
        self._flushing = True
        with self.transport.owner_stream():
            for a in self._steady.actions if self.step else ():
                if a.kind in last and a.version == -1:
                    last[a.kind](a)
                    if a.kind == Kind.GRAD_NORM and self.rank == 0 and a.peer is not None:
                        self.transport.start_peer("S", a.peer, True)  # the last owner's, who ends the flush with it
        self._flushing = False
        self.transport.reset(where)

    def spread(self) -> None:
        """Collective, between steps: bring to all ranks what they keep of the published copies (here: nothing)."""

    def drain(self) -> None:
        """Before the end, without a flush: let the last step's finished sums in, for rank N-1 may wait until they are taken."""
        if self.transport.host_waits:  # else closing waits for all steps of all ranks
            with suppress(HandoffError):  # it has failed, and says so itself
                for key in [k for k in self._arrivals if k[0] == "O" and k[1] < self.step]:
                    self._arrivals.pop(key).wait(f"rank {self.transport.label}, closing")

    @property
    def between_steps(self) -> bool:
        return self._cursor == 0 and self.round == 0

    # ---- walking --------------------------------------------------------------------------------------------------------
    def acquire(self, unit: int, backward: bool) -> None:
        """Walk to the start of this pass: the unit's parameters, and in the backward its gradient sum, are there.

        Raises:
            OutOfOrder: the pass lies behind.
            HandoffError: a peer is gone or late.
        """
        index = self._program.begun[self.round, unit, backward]
        if index <= self._cursor and (unit not in self.params or not backward):
            raise OutOfOrder(self._disorder(unit, backward))
        self._execute(index)
        self._latest = unit

    def _disorder(self, unit: int, backward: bool) -> str:
        name, latest, where = self.plan.unit(unit).name, self.plan.unit(self._latest).name, f"step {self.global_step}"
        when = f"in the {'backward' if backward else 'forward'} of {where}"
        if name == latest:
            return (
                f"unit {name!r} was used twice {when}; list the other modules in cyclic.units and leave it out: "
                f"its parameters are then kept for the whole micro-batch"
            )
        if backward:
            return (
                f"unit {name!r} was used after unit {latest!r} {when}, but the plan has it before; if an activation "
                f"checkpoint spans several units, checkpoint each by itself"
            )
        return (
            f"unit {name!r} was used after unit {latest!r} {when}, but the plan has it before (or it was used twice); "
            f"list the modules in cyclic.units in their order of use, and leave out those that are used more than once"
        )

    def release(self, unit: int, backward: bool) -> None:
        """Walk to the end of this pass: its buffers are free, its gradient sum is on its way."""
        self._execute(self._program.ended[self.round, unit, backward])

    def begin_round(self) -> None:
        """Walk to where the persistent parameters are there."""
        if self.round >= self.schedule.rounds:
            raise ValueError(
                f"gradient_accumulation_steps is {self.schedule.rounds}, but micro-batch {self.round + 1} came "
                f"before engine.step(); call engine.step() after {self.schedule.rounds}, or raise the setting"
            )
        if self.plan.persistent:
            self.acquire(PERSISTENT, False)

    def end_forward(self) -> None:
        """Walk past units that this rank did not use."""
        self._execute(self._program.forwards[self.round])

    def end_round(self) -> None:
        """Walk to the end of this micro-batch."""
        self._execute(self._program.rounds[self.round])
        self.round += 1

    def end_step(self) -> None:
        """Walk to the end of the step; micro-batches that did not come add nothing."""
        self._execute(self._program.rounds[self.schedule.rounds - 1])
        self._lost[self.global_step] = (self.losses.clone(), self.loss_count)
        self._step_end = self.transport.mark()
        if self.schedule.ranks == 1:
            self._sum_ends = dict.fromkeys(self._members, self._step_end)
        self._execute(len(self._program.actions))  # between the steps: a stall's norm needs the losses
        self.losses.zero_()
        self.loss_count = self._cursor = self.round = 0
        self._program = self._steady
        self.step += 1
        self.global_step += 1

    def add_loss(self, loss: torch.Tensor) -> None:
        """Enter a micro-batch's loss, for the step's mean."""
        self.losses += loss.detach().to(torch.float64).reshape(())
        self.loss_count += 1

    def _execute(self, index: int) -> None:
        actions, do = self._program.actions, self._do
        self.transport.moved_on()
        while self._cursor < index:
            a = actions[self._cursor]
            do[a.kind](a)
            self._cursor += 1

    # ---- actions --------------------------------------------------------------------------------------------------------
    def _region(self, region: str, step: int, round: int, version: int) -> str:
        if region == "H":
            return f"H{(step * self.schedule.rounds + round) % 2}"
        return self.plan.copy_region(step + version) if region == "V" else region

    def _place(self, a: Action) -> tuple[str, torch.Tensor]:
        region = self._region(a.region, self.step, a.round, a.version)
        return region, self.buffers.view(region, a.offset, a.nbytes)

    def _readers(self, region: str, offset: int, nbytes: int) -> list[Ticket]:
        """What may still read from these bytes; it is the caller's to wait for."""
        region = self._kept_under(region, offset)
        reading = self._reading.get(region)
        if not reading:
            return []
        found, left, end = [], [], offset + nbytes
        for entry in reading:
            at, size, ticket = entry
            if at >= end or offset >= at + size:
                left.append(entry)
                continue
            found.append(ticket)
            # what else it reads from may be written from another stream, which would not have waited
            if at < offset:
                left.append((at, offset - at, ticket))
            if end < at + size:
                left.append((end, at + size - end, ticket))
        self._reading[region] = left  # not for long: every place that is pushed from, or averaged, is written again
        return found

    def _kept_under(self, region: str, offset: int) -> str:
        """The name under which pushes from here are kept for those who must wait for them."""
        return region

    def _post(self, post: Post, where: Where) -> None:
        step = self.step + post.ahead
        region = self._region(post.region, step, post.round, 0)
        readers = self._readers(region, post.offset, post.nbytes)
        origin = -1
        if post.origin >= 0:
            origin = self.buffers.address(self.plan.copy_region(step + post.version), post.origin)
        view = self.buffers.view(region, post.offset, post.nbytes)
        ticket = self.transport.post(post.stream, post.src, view, readers, where, origin)
        self._arrivals[post.stream, step, post.round, post.unit, post.backward] = ticket

    def _push(self, a: Action, after: Ticket | None = None) -> None:
        region, view = self._place(a)
        into = -1
        if a.into[0]:
            into = self.buffers.address(self._region(a.into[0], self.step, a.into[2], 0), a.into[1])
        ticket = self.transport.push(a.stream, a.peer, view, after, into)
        self._reading.setdefault(self._kept_under(region, a.offset), []).append((a.offset, a.nbytes, ticket))

    def _posts(self, a: Action) -> None:
        if a.posts:
            where = ActionLocation(self, a)
            for post in a.posts:
                self._post(post, where)

    def _await(self, a: Action) -> Ticket | None:
        if a.peer is None:
            return None
        ticket = self._arrivals.pop((a.stream, self.step, a.round, a.unit, a.backward))
        ticket.wait(ActionLocation(self, a))
        return ticket

    def _read(self, a: Action) -> None:
        if a.backward and a.unit in self.params:  # kept since the forward
            return
        self._read_from[a.unit] = self._await(a)
        if a.peer is None:
            self.transport.after(self._published_at.get((a.unit, (self.step + a.version) % self.plan.copies)))
        self.params[a.unit] = self._place(a)[1]

    def _relay(self, a: Action) -> None:
        self._push(a, self._read_from[a.unit])

    def _offer(self, a: Action) -> None:
        self._push(a)

    def _start_peer(self, a: Action) -> None:
        self.transport.start_peer(a.stream, a.peer, a.kind == Kind.START_RECV)

    def _sum(self, a: Action) -> None:
        region, view = self._place(a)
        if a.peer is not None:
            self._await(a)
        elif a.round == 0:  # the first micro-batch of the step starts the sum
            for ticket in self._readers(region, a.offset, a.nbytes):
                ticket.wait(ActionLocation(self, a))
            self.starting.add(a.unit)
        self.sums[a.unit] = view

    def _done(self, a: Action) -> None:
        if self.schedule.ranks == 1 and a.backward:  # summed in place, not passed on
            self._add(a.unit)
        if self.params.pop(a.unit, None) is not None:
            self.on_release(a.unit)
        if self._read_from.pop(a.unit, None) is None and (a.backward or a.unit == PERSISTENT):
            self._own_read_end = self.transport.mark()
        self._posts(a)

    def _add(self, unit: int) -> None:
        """This rank's gradients of the unit's last backward are complete: add them to the sum."""
        view = self.sums.pop(unit, None)
        if view is not None:
            self.on_pass(unit, view, unit in self.starting)
            self.starting.discard(unit)
            self.transport.moved_on()

    def _keep_sum(self, a: Action, view: torch.Tensor) -> None:
        """Copy a finished sum to where the owner, who is this rank, reads it; beside the passes, which need not wait for that."""
        region, at, _ = a.into
        summed = self.transport.mark()
        with self.transport.owner_stream():
            self.transport.after(summed)
            for ticket in self._readers(region, at, a.nbytes):
                ticket.wait(ActionLocation(self, a))
            self.buffers.view(region, at, a.nbytes).copy_(view)
            self._sum_ends[a.unit] = copied = self.transport.mark()
        self.transport.moved_on()
        if copied is not None:
            self._reading.setdefault(self._kept_under(a.region, a.offset), []).append((a.offset, a.nbytes, copied))

    def _pass(self, a: Action) -> None:
        view = self.sums[a.unit]
        self._add(a.unit)
        if a.peer == self.rank:  # the last rank owns stage 0
            self._keep_sum(a, view)
        else:
            self._push(a)
        self._posts(a)
