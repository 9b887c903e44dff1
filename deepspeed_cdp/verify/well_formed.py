"""Checks of a plan that need no dry-run: each action names an existing unit, an existing rank, and bytes inside its region."""

from collections.abc import Sequence

from deepspeed_cdp.plan.actions import Action, Kind, Post
from deepspeed_cdp.plan.builder import after_passes
from deepspeed_cdp.plan.constants import PERSISTENT
from deepspeed_cdp.plan.plan import Plan

CREDITS = {  # streams of actions with one credit
    Kind.PULL_PARAM: ("P0", "W0"),
    Kind.PULL_GRAD: ("G0",),
    Kind.GRANT_CREDIT: ("G",),
}
OF_PERSISTENT = (Kind.RECV_PERSISTENT_GRAD, Kind.SEND_PERSISTENT_GRAD, Kind.RELEASE_PERSISTENT_PARAM)


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
        sums = x.kind.carries == "grad" if isinstance(x, Action) else x.stream in ("G", "G0")
        nbytes = plan.unit(x.unit).g_bytes if sums else plan.unit(x.unit).p_bytes
        if x.nbytes != nbytes or not 0 <= x.offset <= ends.get(x.region, nbytes) - nbytes:
            raise PlanError(f"{where}: {a}: {x.region}[{x.offset}:{x.offset + x.nbytes}] is not unit {x.unit}, of {nbytes} bytes")

    for post in before:
        check(post, f"rank {r}, step 0", "before the first action")
    for step, program in enumerate(programs):
        where, last = f"rank {r}, step {step}", None  # the last action's key, and itself
        if not program:
            raise PlanError(f"{where}: nothing to do")
        for a in program:
            if not isinstance(a.kind, Kind):
                raise PlanError(f"{where}: {tuple(a)}: there is no such kind")
            if a.peer is not None and a.peer not in range(plan.schedule.ranks):
                raise PlanError(f"{where}: {a}: there is no such rank")
            key = after_passes(plan, r, step, a), *a.key
            if last is not None and key < last[0]:
                raise PlanError(f"{where}: {a}: comes after {last[1]}, which is later in logical time")
            last = key, a
            if a.kind == Kind.REDUCE_GRAD and a.unit not in known:
                raise PlanError(f"{where}: {a}: there is no unit {a.unit}")
            if wrong := _contradiction(a):
                raise PlanError(f"{where}: {a}: {wrong}")
            for x in ((a,) if a.kind.carries else ()) + a.posts:
                check(x, where, a)


def _contradiction(a: Action) -> str:
    """What the action says against itself; empty if nothing."""
    if a.kind in OF_PERSISTENT and (a.unit, a.backward) != (PERSISTENT, True):
        return "persistent parameters have no such pass"
    if a.kind.carries == "grad" and a.version:
        return "sums have no version"
    what = [(x.round, x.unit, x.backward) for x in a.posts]
    if a.kind in CREDITS and (what != [(a.round, a.unit, a.backward)] or a.posts[0].stream not in CREDITS[a.kind]):
        return "grants another credit than it says"
    if a.kind in (Kind.PULL_PARAM, Kind.PULL_GRAD) and (a.stream, a.peer) != (a.posts[0].stream, a.posts[0].src):
        return "grants another credit than it says"
    return ""
