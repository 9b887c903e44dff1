"""Executes a rank's program, one action after the other.

The module's hooks say how far (``acquire``, ``release``). On the way the executor also executes actions of units or micro-batches
that this rank skips: it receives and forwards their messages. Nothing here reads a clock or calls a collective, except ``flush``.
"""

from collections.abc import Callable
from typing import Any

import torch

from deepspeed_cdp.errors import class_and_text
from deepspeed_cdp.plan.actions import Action, Kind
from deepspeed_cdp.plan.constants import PERSISTENT
from deepspeed_cdp.plan.plan import Plan
from deepspeed_cdp.plan.program import Program, edges, few_rounds, initial_posts
from deepspeed_cdp.plan.schedule import Schedule
from deepspeed_cdp.plan.warmup import Phases
from deepspeed_cdp.runtime.cross_ring import SumViews
from deepspeed_cdp.runtime.divergence import Divergence
from deepspeed_cdp.runtime.events import Events
from deepspeed_cdp.runtime.messages import Messages
from deepspeed_cdp.runtime.native_messages import NativeMessages, native_transport
from deepspeed_cdp.runtime.owner_executor import OwnerExecutor
from deepspeed_cdp.runtime.owner_protocol import Owner
from deepspeed_cdp.runtime.program import ActionLocation, IndexedProgram, OutOfOrder
from deepspeed_cdp.runtime.residency import Partitioned
from deepspeed_cdp.runtime.state import RankState
from deepspeed_cdp.runtime.step_metrics import StepMetrics
from deepspeed_cdp.transport.buffers import Buffers


class Executor:
    """Executes one rank's program.

    Attributes:
        state: the rank's position; phases: which plan each step follows (plan/warmup.py).
        messages, metrics, owner_executor, residency: see their classes.
        params, grad_sums: the flat parameters and gradient sums of units in use (uint8, 1-D), by unit index.
        empty_sums: units whose sums are in use and uninitialized, since this rank starts them.
        actions: handlers by kind.
        failure: the first error of an action, for people; empty if there was none.
    """

    def __init__(
        self,
        state: RankState,
        residency: type[Partitioned],
        owner: Owner,
        sum_views: SumViews,
        events: Events,
        device: torch.device,
        warmup_steps: int = 0,
        divergence: Divergence | None = None,
    ):
        """
        Args:
            residency: how parameters reach passes (residency.py).
            owner: keeps the masters of ``state.owned_stage``.
            sum_views: of an owned unit, its sums over all rings and of the own ring (``CrossRing``).
            device: where losses are summed.
            divergence: compares ranks.
        """
        plan, transport = state.plan, state.transport
        self.state, self.transport, self.events = state, transport, events
        self.phases = Phases(plan, warmup_steps)
        self.metrics = StepMetrics(transport, state.buffers)
        self.metrics.divergence = divergence
        transport.prepare(sorted({edge for p in self.phases.plans for edge in edges(p)}), deferred=True)
        peer = native_transport(state)
        self.messages = NativeMessages(state, peer, residency.by_offset) if peer else Messages(state, residency.by_offset)
        self.owner_executor = OwnerExecutor(state, self.messages, owner, sum_views, self.metrics, events)
        self.residency = residency(state, self.messages, self.owner_executor, events)
        self.params = self.residency.params
        self.grad_sums: dict[int, torch.Tensor] = {}
        self.empty_sums: set[int] = set()
        self._programs = {
            p.schedule: [IndexedProgram(Program(p, state.rank, first, transport.rendezvous)) for first in (True, False)]
            for p in self.phases.plans
        }
        self.actions: dict[Kind, Callable[[Action], None]] = {
            Kind.RECV_GRAD: self._recv_grad,
            Kind.RECV_PERSISTENT_GRAD: self._recv_grad,
            Kind.SEND_GRAD: self._send_grad,
            Kind.SEND_PERSISTENT_GRAD: self._send_grad,
            Kind.RELEASE_PARAM: self._release_param,
            Kind.RELEASE_PERSISTENT_PARAM: self._release_param,
            Kind.PULL_PARAM: self._pull_param,
            Kind.PULL_GRAD: self.messages.post_all,
            Kind.START_RECV: self.messages.start_peer,
            Kind.START_SEND: self.messages.start_peer,
            **self.residency.actions,
            **self.owner_executor.actions,
        }
        self.failure = ""
        self._pulled_ahead: set[int] = set()  # units whose parameters for this round's backward the program pulls later
        self._own_actions = self.actions
        self._shared = self._share_with_native(self.messages) if isinstance(self.messages, NativeMessages) else ()
        self._losses, self._loss_count = torch.zeros((), dtype=torch.float64, device=device), 0

    # ---- position ------------------------------------------------------------------------------------------------------
    @property
    def plan(self) -> Plan:
        return self.state.plan

    @property
    def schedule(self) -> Schedule:
        return self.state.schedule

    @property
    def rank(self) -> int:
        return self.state.rank

    @property
    def buffers(self) -> Buffers:
        return self.state.buffers

    @property
    def global_step(self) -> int:
        """Steps since the start of training."""
        return self.state.global_step

    @global_step.setter
    def global_step(self, step: int) -> None:
        self.state.global_step = step

    @property
    def between_steps(self) -> bool:
        return self._cursor == 0 and self.state.round == 0

    def round_of(self, a: Action) -> int:
        """The round that the action under way belongs to."""
        if a.kind == Kind.REDUCE_GRAD:
            return self.schedule.rounds - 1
        return a.round if a.kind.of_owner else a.round + self._program.actions.skipped_at(self._cursor)

    @property
    def progress(self) -> tuple[int, ...]:
        """Changes with every action, loss and step."""
        return self.state.global_step, self.state.step, self.state.round, self._cursor, self._loss_count

    @property
    def newest(self) -> bool:
        """Whether every parameter of the module has its newest version now."""
        return self.residency.newest and self.between_steps

    # ---- from one flush to the next -------------------------------------------------------------------------------------
    def begin(self) -> None:
        """After a flush, and at the start: every rank reads version 0, which owners have published in copy 0."""
        self.state.follow(self.phases.at(self.state.global_step))
        self._cursor, self._latest = 0, PERSISTENT
        self._program, self._steady = self._programs[self.schedule]
        self.messages.clear()
        self.residency.begin()
        self.grad_sums.clear()
        self.empty_sums.clear()
        self.owner_executor.begin()
        for post in initial_posts(few_rounds(self.plan), self.rank):
            self.messages.post(post, "before the first step")

    def flush(self) -> None:
        """Collective: apply the last step's update and drop all messages under way; ``begin`` comes next.

        Raises:
            ValueError: in the middle of a step.
        """
        where = f"rank {self.transport.world_rank}, step {self.global_step}, flush"
        self.check_between_steps()
        self.transport.finish_relays(where)
        self.owner_executor.flush(self._steady.actions.held if self.state.step else ())
        self.transport.reset(where)

    def check_between_steps(self) -> None:
        """Raises ValueError in the middle of a step."""
        if not self.between_steps:
            raise ValueError(
                f"engine.flush() came in the middle of step {self.global_step}: {self.state.round} of "
                f"{self.schedule.rounds} micro-batches are done; call engine.step() first"
            )

    # ---- executing ------------------------------------------------------------------------------------------------------
    def acquire(self, unit: int, backward: bool) -> None:
        """Execute up to the start of this pass, which receives the unit's parameters, and in the backward its gradient sum.

        Raises:
            OutOfOrder: the program has passed this point already.
            HandoffError: a peer is gone or late.
        """
        index = self._program.pass_start(self.state.round, unit, backward)
        if index <= self._cursor and (unit not in self.params or not backward):
            raise OutOfOrder(self._order_error(unit, backward))
        self._execute(index)
        self._latest = unit

    def _order_error(self, unit: int, backward: bool) -> str:
        name, latest = self.plan.unit(unit).name, self.plan.unit(self._latest).name
        how = f"unit {name!r} was used {'twice' if name == latest else f'after unit {latest!r}'} in the"
        if not backward:
            return f"{how} forward"
        fix = "but the plan has it before; if an activation checkpoint spans several units, checkpoint each by itself"
        return f"{how} backward of step {self.global_step}, {fix}"

    def release(self, unit: int, backward: bool) -> None:
        """Execute up to the end of this pass, which releases its parameters and sends its gradient sum."""
        self._execute(self._program.pass_end(self.state.round, unit, backward))

    def check_round(self) -> None:
        """Raises ValueError if the step has no micro-batch left."""
        if self.state.round >= self.schedule.rounds:
            raise ValueError(
                f"gradient_accumulation_steps is {self.schedule.rounds}, but micro-batch {self.state.round + 1} came "
                f"before engine.step(); call engine.step() after {self.schedule.rounds}, or raise the setting"
            )

    def begin_round(self) -> None:
        """Execute until the persistent parameters have arrived."""
        self.check_round()
        if self.plan.persistent:
            self.acquire(PERSISTENT, False)

    def end_forward(self) -> None:
        """Execute all that comes before the backward, also the passes of units that this rank did not use."""
        self._execute(self._program.forward_end(self.state.round))

    @property
    def in_backward(self) -> bool:
        """Whether a part of this micro-batch's backward has been executed."""
        return self._cursor > self._program.forward_end(self.state.round)

    def pull_backward(self) -> dict[int, torch.Tensor]:
        """After ``end_forward``: the flat parameters (uint8, 1-D) of all units, at once, as this round's backward reads them.

        The program pulls them one after the other into windows. Here each unit has memory of its own. Owners offer what the
        backward reads together with what the forward reads, so this waits for nothing later than the forward does.
        """
        owned, flats = frozenset(self.plan.members(self.state.owned_stage)), {}
        # copies of this rank's own: the script may write to parameters, and others read the published ones
        values = {i: flat.clone() if i in owned else flat for i, flat in self.params.items()}
        backward = self._program.actions.between(self._cursor, self._program.round_end(self.state.round))
        for a in backward:
            if a.kind == Kind.PULL_PARAM and a.backward:
                (post,) = a.posts
                flats[a.unit] = torch.empty(post.nbytes, dtype=torch.uint8, device=self.buffers.arena.device)
                self.messages.post(post, ActionLocation(self.state, a), into=flats[a.unit])
                self._pulled_ahead.add(a.unit)
        for a in backward:
            if a.kind != Kind.WAIT_PARAM or not a.backward or a.unit in values:
                continue
            if a.peer is None:
                self.owner_executor.wait_published(a.unit, a.version, a.region)
                values[a.unit] = self.messages.place(a)[1].clone()
            else:
                self.messages.wait_ahead(a)
                values[a.unit] = flats.get(a.unit, self.messages.place(a)[1])
        return values

    def end_round(self) -> None:
        """Execute up to the end of this micro-batch."""
        self._execute(self._program.round_end(self.state.round))
        self.state.round += 1

    def end_step(self) -> None:
        """Execute up to the end of the step; micro-batches that the caller left out add nothing."""
        self._execute(self._program.round_end(self.schedule.rounds - 1))
        self.owner_executor.end_step(self._losses, self._loss_count)
        self._execute(len(self._program.actions))  # between two steps: a stall's norm needs the losses
        self._losses.zero_()
        self._loss_count = self._cursor = self.state.round = 0
        self._program = self._steady
        self.state.step += 1
        self.state.global_step += 1

    def add_loss(self, loss: torch.Tensor) -> None:
        """Add a micro-batch's loss (one element) to the step's mean."""
        self._losses += loss.detach().to(torch.float64).reshape(())
        self._loss_count += 1

    def _execute(self, index: int) -> None:
        actions = self.actions
        native = self._program.native if actions is self._own_actions else None  # else somebody watches
        try:
            if native is not None:
                self._cursor = native.run(self._cursor, index, self._shared)
                return
            self.transport.work_enqueued()
            for a in self._program.actions.between(self._cursor, index):
                actions[a.kind](a)
                self._cursor += 1
        except BaseException as error:
            if native is not None:
                self._cursor = native.cursor
            self.failure = self.failure or class_and_text(error)
            raise

    def _share_with_native(self, messages: NativeMessages) -> tuple[Any, ...]:
        """Make the programs for C++. Returns what their loop shares with this object (``Shared`` in native/program.h)."""
        plans, passes = {p.schedule: p for p in self.phases.plans}, type(self.residency) is Partitioned
        for schedule, both in self._programs.items():
            for program in both:
                program.native = messages.program(plans[schedule], program.actions, passes)
        owner, events, of_passes = self.owner_executor, self.events, (self.params, self.residency.receives)
        sums = self.grad_sums, self.empty_sums, self._pulled_ahead
        return (messages.native, *of_passes, *sums, owner, events.params_released, events.grads_complete, self.actions)

    # ---- actions of passes ----------------------------------------------------------------------------------------------
    def _pull_param(self, a: Action) -> None:
        if a.backward and a.unit in self._pulled_ahead:
            self._pulled_ahead.discard(a.unit)
        else:
            self.messages.post_all(a)

    def _recv_grad(self, a: Action) -> None:
        region, view = self.messages.place(a)
        first = a.round == self.state.rank == 0  # this micro-batch starts the sum
        if first or region == "O":  # before the message: a prediction may wait for it, too, and one thread at a time may
            self.messages.wait_readers(a, region, a.offset, a.nbytes)
        if a.stream == "G":
            self.messages.back(a, a.unit, *a.into[1:]).wait(ActionLocation(self.state, a))
        else:
            self.messages.wait(a)
        if first:
            self.empty_sums.add(a.unit)
        self.grad_sums[a.unit] = view

    def _add_grads(self, unit: int) -> None:
        """This rank's gradients of the unit are complete: add them to the running sum."""
        view = self.grad_sums.pop(unit, None)
        if view is not None:
            self.events.grads_complete(unit, view, unit in self.empty_sums)
            self.empty_sums.discard(unit)
            self.transport.work_enqueued()

    def _send_grad(self, a: Action) -> None:
        self._add_grads(a.unit)
        if a.peer is None:
            self.owner_executor.own_added(a.unit)
        else:
            self.messages.push(a)

    def _release_param(self, a: Action) -> None:
        self.residency.release(a)
        self.messages.post_all(a)
