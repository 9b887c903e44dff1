"""Where a rank's messages lie: parameters, running sums and finished sums share one buffer (design §7). Pure, no torch.

Parameters and running sums come round with every round. Finished sums come once a step and fill gaps between the others: their
owner has them from the end of its step to its update, while its own passes are in the next forward and few sums are in flight.
Where an update may come later in a rank's order than the next step's messages (rules that stall) they have a place of their own.
"""

from collections.abc import Sequence
from typing import NamedTuple

from deepspeed_cdp.plan.constants import END, PERSISTENT, RELEASES, START
from deepspeed_cdp.plan.interval_alloc import EMPTY, Lifetime, Lives, Stream, StreamLayout, Visit, beside, laid_out, placed
from deepspeed_cdp.plan.unit_schedule import UnitSchedule


class BufferLayout(NamedTuple):
    """One rank's parameters, running sums and (where they lie between those) finished sums."""

    p: StreamLayout
    g: StreamLayout
    o: StreamLayout


def layouts(plan: UnitSchedule) -> tuple[BufferLayout, ...]:
    """Of each rank.

    On two ranks each receives one stage, and its buffer is laid out for that. On more it would save a tenth, and credits that
    come at other times cost some of it where links are slow (simulated), so there all have places for all messages.
    """
    ranks = range(plan.schedule.ranks)
    if len(ranks) == 1:
        return (BufferLayout(EMPTY, EMPTY, EMPTY),)
    if len(ranks) == 2:
        return tuple(found for rank in ranks for found in _fitted(plan, plan.received(rank), [rank]))
    return _fitted(plan, plan.messages, ranks)


def _fitted(plan: UnitSchedule, messages: tuple[Visit, ...], ranks: Sequence[int]) -> tuple[BufferLayout, ...]:
    """Layouts of ranks that have the same places for what comes round, with finished sums in the gaps.

    The better of two: those places are searched for alone, or together with the first of the ranks' finished sums, which are in
    use for longest.
    """
    ticks, streams = 2 * plan.round_ticks, (parameters(plan, messages), running_sums(plan))
    finished = [finished_sums(plan, rank) if plan.sums_between else Stream({}, ()) for rank in ranks]

    def found(*also: Stream) -> tuple[tuple[dict[Visit, int], ...], list[tuple[dict[Visit, int], int]]]:
        places = placed((*streams, *also), ticks)[0][:2]
        return places, [beside(streams, places, sums.lives, ticks) for sums in finished]

    candidates = [found(), *([found(finished[0])] if plan.sums_between else [])]
    places, gaps = min(candidates, key=lambda candidate: max(nbytes for _, nbytes in candidate[1]))
    results = []
    for sums, (where, nbytes) in zip(finished, gaps):
        p, g, o = laid_out((*streams, sums), (*places, where), nbytes, RELEASES * len(plan.visits))
        kept = {(i, True): p.offsets[i, False] for i, backward in p.items if not backward and plan.kept(i)}
        results.append(BufferLayout(p._replace(offsets=p.offsets | kept), g, o))
    return tuple(results)


def parameters(plan: UnitSchedule, items: tuple[Visit, ...]) -> Stream:
    """In use from the sender's push, two positions before the visit, to the end of the visit, or of its backward if kept."""
    number = {v: k for k, v in enumerate(plan.visits)}
    until = {v: (v[0], v[1] or plan.kept(v[0])) for v in items}
    lives = {
        v: Lifetime(2 * (plan.spans[v][0] - 2 * plan.scale) + START, 2 * plan.spans[until[v]][1] + END, plan.units[v[0]].p_bytes)
        for v in items
    }
    return Stream(lives, [RELEASES * number[until[v]] + 1 for v in items])


def running_sums(plan: UnitSchedule) -> Stream:
    """In use from the end of the neighbour's backward, two positions earlier, to the end of this one."""
    first = len(plan.units)
    lives = {
        v: Lifetime(2 * (plan.spans[v][1] - 2 * plan.scale) + END, 2 * plan.spans[v][1] + END, plan.units[v[0]].g_bytes)
        for v in plan.visits[first:]
    }
    return Stream(lives, [RELEASES * (first + k) + 2 for k in range(len(lives))])


def finished_sums(plan: UnitSchedule, rank: int) -> Stream:
    """In use from the end of the step to the update; as if every round had them, those of the round before.

    They come later, but a rank lets its sums in before its step is over: between two steps a user may let all ranks wait for each
    other. Rank N-1 finishes those of its own stage itself, before the end of its step.
    """
    stage, end_of_step = plan.schedule.owned(rank), plan.schedule.start(1, 0, rank) * plan.scale
    at, over = update_in_round(plan, rank)
    lives: Lives = {}
    for i in reversed(plan.members(stage)):
        if plan.unit(i).g_bytes:
            came = 0 if i == PERSISTENT else min(plan.summed(0, i) - end_of_step, 0)
            lives[i, True] = Lifetime(2 * came + END, 2 * at + START, plan.unit(i).g_bytes)
    return Stream(lives, [RELEASES * over] * len(lives))


def update_in_round(plan: UnitSchedule, rank: int) -> tuple[int, int]:
    """Ticks from the beginning of a step to the update with the sums of the step before, and how many visits are over then."""
    s = plan.schedule
    at = (s.update_time(0, s.owned(rank)) - s.start(1, 0, rank)) * plan.scale
    assert 0 <= at < plan.round_ticks, "no rule that does not stall updates later"
    return at, sum(plan.spans[v][1] <= at for v in plan.visits)
