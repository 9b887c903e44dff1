"""How parameters reach a rank's passes: by messages for each pass, or from a replica of the whole model.

The plan's type chooses (``runtime.RESIDENCIES``). A residency handles the parameter actions of the program. ``ParamHooks`` and
``ReplicaHooks`` handle the module.
"""

from collections.abc import Callable
from typing import Any

import torch

from deepspeed_cdp.plan.actions import Action, Kind
from deepspeed_cdp.plan.constants import PERSISTENT
from deepspeed_cdp.plan.replicated import ReplicatedPlan
from deepspeed_cdp.runtime.events import Events
from deepspeed_cdp.runtime.messages import Messages
from deepspeed_cdp.runtime.owner_executor import OwnerExecutor
from deepspeed_cdp.runtime.state import RankState


class Partitioned:
    """ZeRO stage 3: a rank has a unit's parameters for one pass, or from its forward to its backward.

    Attributes:
        params: the flat parameters (uint8, 1-D) of units in use.
        receives: by unit, the message that brought its parameters (or True: C++ has it); None: they are this rank's own.
        actions: handlers by kind.
        by_offset: regions in which every message has one place of its own (``PendingReads``).
        whole_after_flush: whether a flush leaves every parameter whole on every rank.
        idle_state: where parameters are between steps, for errors.
    """

    by_offset: frozenset[str] = frozenset()
    whole_after_flush = False
    idle_state = "with their owners"

    def __init__(self, state: RankState, messages: Messages, owner_executor: OwnerExecutor, events: Events):
        self.state, self.messages, self.owner_executor, self.events = state, messages, owner_executor, events
        self.params: dict[int, torch.Tensor] = {}
        self.actions: dict[Kind, Callable[[Action], None]] = {Kind.WAIT_PARAM: self.wait}
        self.receives: dict[int, Any] = {}

    def begin(self) -> None:
        """After a flush, and at the start."""
        self.params.clear()
        self.receives.clear()

    def sync_replicas(self) -> None:
        """Collective, between steps: update all ranks' replicas from the published copies. Without replicas it does nothing."""

    @property
    def newest(self) -> bool:
        """Whether every parameter of the module has its newest version between steps."""
        return False

    def wait(self, a: Action) -> None:
        """WAIT_PARAM: wait for the unit's parameters; an owner reads its published copy."""
        if a.backward and a.unit in self.params:  # kept since the forward
            return
        self.receives[a.unit] = self.messages.wait(a)
        if a.peer is None:
            self.owner_executor.wait_published(a.unit, a.version, a.region)
        self.params[a.unit] = self.messages.place(a)[1]

    def release(self, a: Action) -> None:
        """RELEASE_PARAM: the pass is over."""
        if self.params.pop(a.unit, None) is not None:
            self.events.params_released(a.unit)
        if self.receives.pop(a.unit, None) is None and (a.backward or a.unit == PERSISTENT):
            self.owner_executor.read_ended()


class Replicated(Partitioned):
    """ZeRO stages 0, 1 and 2: every rank keeps all parameters, and a unit's new version reaches it once a step."""

    by_offset = frozenset("LR")
    whole_after_flush = True
    idle_state = "of several versions"

    def __init__(self, state: RankState, messages: Messages, owner_executor: OwnerExecutor, events: Events):
        super().__init__(state, messages, owner_executor, events)
        assert isinstance(state.plan, ReplicatedPlan)
        self.plan: ReplicatedPlan = state.plan
        self.actions |= {Kind.REFRESH_PARAM: self.refresh, Kind.FORWARD_PARAM: self.forward}
        self._owned = frozenset(state.plan.members(state.owned_stage))

    def begin(self) -> None:
        super().begin()
        assert isinstance(self.state.plan, ReplicatedPlan)
        self.plan = self.state.plan

    def sync_replicas(self) -> None:
        """Collective: broadcast each stage from its owner into every replica."""
        state, plan = self.state, self.plan
        where = f"rank {state.transport.world_rank}, step {state.global_step}, bringing replicas up to date"
        for stage, start in enumerate(plan.replica[1]):
            owner, nbytes = state.schedule.owner(stage), plan.v_layout(stage)[1]
            flat = state.buffers.regions["R"][start : start + nbytes]
            if plan.publishes_separate_copy and owner == state.rank:
                flat.copy_(state.buffers.regions["V0"][:nbytes])
            if state.schedule.ranks * plan.rings > 1 and nbytes:
                state.transport.broadcast(flat, owner, where)

    @property
    def newest(self) -> bool:
        """Right after a flush, or before the first step."""
        return self.state.step == 0

    def refresh(self, a: Action) -> None:
        """REFRESH_PARAM: the next version of a unit lands in the replica, or is copied into it."""
        region, view = self.messages.place(a)
        if a.peer is not None:
            self.receives[a.unit] = self.messages.wait(a)
        else:
            self.owner_executor.wait_published(a.unit, a.version, a.region)
        if region != "R":
            self.messages.wait_readers(a, "R", a.into[1], a.nbytes)
            self.state.buffers.view("R", a.into[1], a.nbytes).copy_(view)
            self.state.transport.work_enqueued()
        if a.peer is None:
            self.owner_executor.read_ended()

    def wait(self, a: Action) -> None:
        if not a.backward:
            if a.unit in self._owned and not self.plan.publishes_separate_copy:
                self.owner_executor.wait_published(a.unit, 0, a.region)  # the owner's stream wrote it in place
            self.params[a.unit] = self.messages.place(a)[1]
        self.messages.post_all(a)

    def forward(self, a: Action) -> None:
        """FORWARD_PARAM: send a new version to the ring neighbour."""
        self.messages.push(a, self.receives.pop(a.unit, None))

    def release(self, a: Action) -> None:
        self.params.pop(a.unit, None)
        self.events.params_released(a.unit)
        if a.unit in self._owned:
            self.owner_executor.read_ended()
