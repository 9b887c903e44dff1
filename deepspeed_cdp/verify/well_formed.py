"""Checks of a plan that need no dry-run: each action names an existing unit, an existing rank, and bytes inside its region."""

from collections.abc import Sequence

from deepspeed_cdp.plan.actions import Action, Kind, Post
from deepspeed_cdp.plan.plan import Plan


class PlanError(AssertionError):
    """A plan that breaks a rule. The message names rank, step and action."""


def check_form(plan: Plan, r: int, programs: Sequence[Sequence[Action]], before: Sequence[Post]) -> None:
    """Check rank ``r``: its programs are in logical order, and each message has the unit's size and lies inside its region.

    Args:
        programs: of the first step and of later ones.
        before: the rank's initial posts.
    Raises:
        PlanError: a rule is broken.
    """
    ends = plan.extents(plan.schedule.owned(r))
    known = set(plan.every_unit)

    def check(x: Action | Post, where: str, a: Action | str) -> None:
        if x.unit not in known:
            raise PlanError(f"{where}: {a}: there is no unit {x.unit}")
        sums = x.kind.carries == "grad" if isinstance(x, Action) else x.stream in ("G", "GH", "O", "E")
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
