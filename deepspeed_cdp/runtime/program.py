"""A rank's program as the executor runs it: where each pass begins and ends, and words for where a rank is."""

from dataclasses import dataclass

from deepspeed_cdp.plan.actions import Action, Kind
from deepspeed_cdp.plan.constants import END, PERSISTENT
from deepspeed_cdp.runtime.state import RankState


class OutOfOrder(RuntimeError):
    """A unit was used out of the planned order."""


@dataclass
class IndexedProgram:
    """Actions of one step, with the indices that hooks execute to."""

    actions: tuple[Action, ...]
    begun: dict[tuple[int, int, bool], int]  # (round, unit, backward) -> index after the last action that starts this pass
    ended: dict[tuple[int, int, bool], int]  # the same for the last action that ends it
    forwards: dict[int, int]  # round -> index after its last forward
    rounds: dict[int, int]  # round -> index after its last pass

    @classmethod
    def of(cls, actions: tuple[Action, ...]) -> "IndexedProgram":
        program = cls(actions, {}, {}, {}, {})
        for index, a in enumerate(actions, 1):
            if a.kind.of_pass:
                (program.ended if a.phase == END else program.begun)[a.round, a.unit, a.backward] = index
                program.rounds[a.round] = index
                if a.unit != PERSISTENT and not a.backward:
                    program.forwards[a.round] = index
        for visit, index in program.begun.items():
            program.ended.setdefault(visit, index)  # parameters that are kept: their forward ends without an action
        return program


class ActionLocation:
    """Where a rank is; becomes text only in an error."""

    __slots__ = ("state", "action", "step")

    def __init__(self, state: RankState, action: Action):
        self.state, self.action, self.step = state, action, state.global_step

    def __str__(self) -> str:
        h, a = self.state, self.action
        if a.kind == Kind.GRANT_CREDIT:
            stage, what = h.plan.schedule.owned(h.rank), "credits that its update frees"
        elif a.kind.of_owner and not a.kind.carries and a.kind != Kind.PULL_PARAM:
            stage, what = h.plan.schedule.owned(h.rank), f"{a.kind.label} of step {self.step + a.version}"
            what += f" for {h.plan.unit(a.unit).name or 'persistent parameters'}" if a.kind == Kind.REDUCE_GRAD else ""
        else:
            unit = h.plan.unit(a.unit)
            stage, what = unit.stage, f"{'backward' if a.backward else 'forward'} of {unit.name or 'persistent parameters'}"
            what = f"new version for the {what}" if a.kind == Kind.REFRESH_PARAM else what
        return f"rank {h.transport.world_rank}, step {self.step}, stage {stage}, {what}"
