"""A rank's program as the executor runs it: the indices at which passes begin and end, and locations for errors."""

from typing import Any

from deepspeed_cdp.plan.actions import Action, Kind
from deepspeed_cdp.plan.constants import END
from deepspeed_cdp.plan.program import Program, backward_end, forward_ends
from deepspeed_cdp.runtime.state import RankState


class OutOfOrder(RuntimeError):
    """A unit was used out of the planned order."""


class IndexedProgram:
    """A rank's program, with the indices that hooks execute to.

    Attributes:
        actions: the program.
        native: the same for C++ (``NativeMessages.program``), or None.
    """

    native: Any = None

    def __init__(self, actions: Program):
        self.actions = actions
        self._pass_starts: dict[tuple[int, int, bool], int] = {}  # (round, unit, backward) -> index in ``actions.held``
        self._pass_ends: dict[tuple[int, int, bool], int] = {}
        self._forward_ends = forward_ends(actions.held)
        self._round_ends: dict[int, int] = {}
        for index, a in enumerate(actions.held, 1):
            if a.kind.of_pass:
                (self._pass_ends if a.phase == END else self._pass_starts)[a.round, a.unit, a.backward] = index
                self._round_ends[a.round] = index
        self._round_ends[max(self._round_ends)] = backward_end(actions.held)
        for visit, index in self._pass_starts.items():
            self._pass_ends.setdefault(visit, index)  # parameters that are kept: their forward ends without an action

    def pass_start(self, round: int, unit: int, backward: bool) -> int:
        """The index after the last action that starts this pass."""
        skipped = self.actions.skipped(round)
        return self._pass_starts[round - skipped, unit, backward] + skipped * self.actions.per_round

    def pass_end(self, round: int, unit: int, backward: bool) -> int:
        """The index after the last action that ends this pass."""
        skipped = self.actions.skipped(round)
        return self._pass_ends[round - skipped, unit, backward] + skipped * self.actions.per_round

    def forward_end(self, round: int) -> int:
        """The index at which the script's code between the round's forward and its backward comes."""
        skipped = self.actions.skipped(round)
        return self._forward_ends[round - skipped] + skipped * self.actions.per_round

    def round_end(self, round: int) -> int:
        """The index after the round's last pass; of the step's last one, see ``backward_end``."""
        skipped = self.actions.skipped(round)
        return self._round_ends[round - skipped] + skipped * self.actions.per_round


class ActionLocation:
    """A rank's position at an action; formatted only if an error needs it."""

    __slots__ = ("state", "action", "step")

    def __init__(self, state: RankState, action: Action):
        self.state, self.action, self.step = state, action, state.global_step

    def __str__(self) -> str:
        state, a, plan = self.state, self.action, self.state.plan
        if a.kind in (Kind.OFFER_GRAD, Kind.GRANT_CREDIT):
            stage, what = state.owned_stage, f"running sum of {plan.unit(a.unit).name or 'persistent parameters'}"
        elif a.kind.of_owner and not a.kind.carries and a.kind != Kind.PULL_PARAM:
            stage, what = state.owned_stage, f"{a.kind.label} of step {self.step + a.version}"
            what += f" for {plan.unit(a.unit).name or 'persistent parameters'}" if a.kind == Kind.REDUCE_GRAD else ""
        else:
            unit = plan.unit(a.unit)
            stage, what = unit.stage, f"{'backward' if a.backward else 'forward'} of {unit.name or 'persistent parameters'}"
            what = f"new version for the {what}" if a.kind == Kind.REFRESH_PARAM else what
            what = f"prediction of {unit.name or 'persistent parameters'}" if a.kind == Kind.PREDICT_PARAM else what
        return f"rank {state.transport.world_rank}, step {self.step}, stage {stage}, {what}"
