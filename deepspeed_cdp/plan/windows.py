"""Windows: where a unit's parameters and its running sum lie while they visit a rank.

A rank pulls a unit ``prefetch_units`` passes before it needs it. Its parameters leave at the end of the pass, its sum one pass
later, when it is on its way back to the owner. So few units are there at once. Lifetimes repeat every round, so offsets are
assigned once (interval_alloc.py). All ranks have the same windows.
"""

from typing import NamedTuple

from deepspeed_cdp.plan.constants import END, START
from deepspeed_cdp.plan.interval_alloc import Lifetime, allocate
from deepspeed_cdp.plan.unit_schedule import UnitSchedule, Visit


class Windows(NamedTuple):
    """Offsets in one region.

    Attributes:
        params: by pass.
        sums: by unit.
        nbytes: size of the region.
    """

    params: dict[Visit, int]
    sums: dict[int, int]
    nbytes: int


def lay_out(plan: UnitSchedule) -> Windows:
    """The windows of a plan."""
    if plan.schedule.ranks == 1:  # its owner has everything
        return Windows(dict.fromkeys(plan.visits, 0), dict.fromkeys(range(len(plan.units)), 0), 0)
    params, sums = parameters(plan), running_sums(plan)
    p_offsets, p_bytes = allocate(list(params.values()), 2 * plan.round_ticks)
    g_offsets, g_bytes = allocate(list(sums.values()), 2 * plan.round_ticks)
    at = dict(zip(params, p_offsets))
    at |= {(i, True): at[i, False] for i, backward in params if not backward and plan.kept(i)}
    return Windows(at, {i: p_bytes + offset for i, offset in zip(sums, g_offsets)}, p_bytes + g_bytes)


def parameters(plan: UnitSchedule) -> dict[Visit, Lifetime]:
    """By pass that pulls: from the pull to the end of the pass, or of the backward if the unit is kept for it."""
    return {
        (i, backward): Lifetime(
            2 * plan.pull_ticks(i, backward) + START, 2 * plan.spans[i, backward or plan.kept(i)][1] + END, plan.units[i].p_bytes
        )
        for i, backward in plan.messages
    }


def running_sums(plan: UnitSchedule) -> dict[int, Lifetime]:
    """By unit: from the pull to the end of the pass after its backward. By then it is on its way to the owner."""
    lifetimes = {}
    for i, backward in plan.visits:
        if backward:
            pull, _, end = plan.grad_ticks(i)
            following = plan.spans[i - 1, True][1] if i else end
            lifetimes[i] = Lifetime(2 * pull + START, 2 * following + END, plan.units[i].g_bytes)
    return lifetimes
