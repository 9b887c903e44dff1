"""What a walk through a program needs to know: places in it, who owns what, and words for errors."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from .plan import END, HELD, Action

if TYPE_CHECKING:
    from .handoff import Handoff

PASSES = {"READ", "RELAY", "SUM", "DONE", "PASS", "SUM_HELD", "PASS_HELD", "DONE_HELD"}


class Owner(Protocol):
    """Who keeps the owned stage's masters (see optimizer.py).

    Attributes:
        by_unit: whether units can be updated one by one; at_once: and each as soon as its own sum is finished.
    """

    by_unit: bool
    at_once: bool

    def advance(self, step: int, unit: int, slot: int | None) -> torch.Tensor:
        """Average, update and (into copy ``slot``, if one is given) publish a unit; squares as ``average``."""

    def average(self, step: int, unit: int) -> torch.Tensor:
        """Turn the unit's finished sum of ``step`` into averaged gradients; parts of their squared norm (1-D)."""

    def update(self, step: int, norm2: torch.Tensor | None = None, unit: int | None = None, slot: int | None = None) -> None:
        """Apply the update of ``step`` to one unit, or to all that have been averaged, clipped by ``norm2``, and publish."""

    def discard(self) -> None:
        """Forget what has been averaged: the step is skipped."""

    def ring_sums(self, unit: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """A unit's sums over all rings and of the own ring, parameter by parameter, where there are several rings."""

    def finish(self, step: int) -> None:
        """The update of ``step`` is complete."""

    def publish(self, slot: int, unit: int | None = None) -> None:
        """Write the newest version (of one unit, or all) into published copy ``slot``."""


class OutOfOrder(RuntimeError):
    """A unit was used out of the planned order."""


@dataclass
class Program:
    """Actions of one step, with the places that hooks walk to."""

    actions: tuple[Action, ...]
    begun: dict[tuple[int, int, bool], int]  # (round, unit, backward) -> index after the last action that starts this pass
    ended: dict[tuple[int, int, bool], int]  # the same for the last action that ends it
    forwards: dict[int, int]  # round -> index after its last forward
    rounds: dict[int, int]  # round -> index after its last pass

    @classmethod
    def of(cls, actions: tuple[Action, ...]) -> "Program":
        program = cls(actions, {}, {}, {}, {})
        for index, a in enumerate(actions, 1):
            if a.kind in PASSES:
                (program.ended if a.phase == END else program.begun)[a.round, a.unit, a.backward] = index
                program.rounds[a.round] = index
                if a.unit != HELD and not a.backward:
                    program.forwards[a.round] = index
        for visit, index in program.begun.items():
            program.ended.setdefault(visit, index)  # parameters that are kept: their forward ends without an action
        return program


class Place:
    """Where a rank is; becomes text only in an error."""

    __slots__ = ("handoff", "action", "step")

    def __init__(self, handoff: "Handoff", action: Action):
        self.handoff, self.action, self.step = handoff, action, handoff.global_step

    def __str__(self) -> str:
        h, a = self.handoff, self.action
        if a.kind == "LET":
            stage, what = h.plan.schedule.owned(h.rank), "what may come once its update is over"
        elif a.kind in ("AVERAGE", "NORM", "TOTAL", "UPDATE"):
            stage, what = h.plan.schedule.owned(h.rank), f"{a.kind.lower()} of step {self.step + a.version}"
            what += f" for {h.plan.unit(a.unit).name or 'held parameters'}" if a.kind == "AVERAGE" else ""
        else:
            unit = h.plan.unit(a.unit)
            stage, what = unit.stage, f"{'backward' if a.backward else 'forward'} of {unit.name or 'held parameters'}"
            what = f"new version for the {what}" if a.kind == "APPLY" else what
        return f"rank {h.transport.label}, step {self.step}, stage {stage}, {what}"
