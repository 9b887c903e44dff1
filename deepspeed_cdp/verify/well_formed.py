"""What can be said of a plan without running it: every action names a unit, a rank and bytes that there are. Pure, no torch."""

from collections.abc import Sequence

from deepspeed_cdp.plan.actions import Action, Kind, Post
from deepspeed_cdp.plan.constants import PERSISTENT
from deepspeed_cdp.plan.plan import Plan


class PlanError(AssertionError):
    """A plan that breaks a rule; the message names rank, step and action."""


def check_form(plan: Plan, r: int, programs: Sequence[Sequence[Action]], before: Sequence[Post]) -> None:
    """Programs are in logical order; bytes are the unit's, inside the buffer.

    Raises:
        PlanError: naming rank, step and action.
    """
    ends = plan.extents(plan.schedule.owned(r))
    known = {*range(len(plan.units)), *([PERSISTENT] if plan.persistent else [])}

    def check(x: Action | Post, where: str, a: Action | str) -> None:
        if x.unit not in known:
            raise PlanError(f"{where}: {a}: there is no unit {x.unit}")
        sums = x.kind.carries == "grad" if isinstance(x, Action) else x.stream in ("G", "GH", "O")
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
            if not isinstance(a.kind, Kind):
                raise PlanError(f"{where}: {tuple(a)}: there is no such kind")
            if a.peer is not None and a.peer not in range(plan.schedule.ranks):
                raise PlanError(f"{where}: {a}: there is no such rank")
            if last is not None and a.key < last.key:
                raise PlanError(f"{where}: {a}: comes after {last}, which is later in logical time")
            last = a
            if a.kind == Kind.REDUCE_GRAD and a.unit not in known:
                raise PlanError(f"{where}: {a}: there is no unit {a.unit}")
            for x in ((a,) if a.kind.carries else ()) + a.posts:
                check(x, where, a)
