"""What can be said of a plan without running it: every action names a unit, a rank and bytes that there are. Pure, no torch."""

from collections.abc import Sequence

from .plan import HELD, ORDER, Action, Plan, Post

SUMS = ("SUM", "SUM_HELD")
PASSES = ("PASS", "PASS_HELD")
OWN = ("AVERAGE", "NORM", "TOTAL", "UPDATE", "OFFER", "TAKE")
MESSAGES = ("READ", "APPLY", "RELAY", "OFFER", *SUMS, *PASSES)  # kinds that name the bytes of a unit


def after_passes(plan: Plan, rank: int, first: bool, a: Action) -> bool:
    """Whether an owner's action comes when its rank's passes of the step are over (``first``: in the first since a flush)."""
    return a.kind in OWN and a.time >= plan.schedule.start(0 if first else 1, plan.schedule.rounds, rank) * plan.scale


class PlanError(AssertionError):
    """A plan that breaks a rule; the message names rank, step and action."""


def check_form(plan: Plan, r: int, programs: Sequence[Sequence[Action]], before: Sequence[Post]) -> None:
    """Programs are in logical order; bytes are the unit's, inside the buffer.

    Raises:
        PlanError: naming rank, step and action.
    """
    ends = plan.extents(plan.schedule.owned(r))
    known = {*range(len(plan.units)), *([HELD] if plan.held else [])}

    def check(x: Action | Post, where: str, a: Action | str) -> None:
        if x.unit not in known:
            raise PlanError(f"{where}: {a}: there is no unit {x.unit}")
        sums = x.kind in SUMS + PASSES if isinstance(x, Action) else x.stream in ("G", "GH", "O")
        nbytes = plan.unit(x.unit).g_bytes if sums else plan.unit(x.unit).p_bytes
        if x.nbytes != nbytes or not 0 <= x.offset <= ends.get(x.region, nbytes) - nbytes:
            raise PlanError(f"{where}: {a}: {x.region}[{x.offset}:{x.offset + x.nbytes}] is not unit {x.unit}, of {nbytes} bytes")

    for post in before:
        check(post, f"rank {r}, step 0", "before the first action")
    for step, program in enumerate(programs):
        where, last = f"rank {r}, step {step}", None
        if not program:
            raise PlanError(f"{where}: nothing to do")
        for a in program:
            if a.kind not in ORDER or a.peer is not None and a.peer not in range(plan.schedule.ranks):
                raise PlanError(f"{where}: {a}: there is no such kind or rank")
            if last is not None and a.key < last.key:
                raise PlanError(f"{where}: {a}: comes after {last}, which is later in logical time")
            last = a
            if a.kind == "AVERAGE" and a.unit not in known:
                raise PlanError(f"{where}: {a}: there is no unit {a.unit}")
            for x in ((a,) if a.kind in MESSAGES else ()) + a.posts:
                check(x, where, a)
