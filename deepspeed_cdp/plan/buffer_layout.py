"""One rank's buffer for messages in flight: parameters, running sums and finished sums share it.

Parameters and running sums come once a round, finished sums once a step. An owner has its finished sums from the end of its step
to its update. Meanwhile its own passes are in the next forward, where few sums are in flight. So finished sums fill the gaps.

Under a rule that stalls, an update may come later in a rank's order than the next step's messages. There, finished sums have a
place of their own (``UnitSchedule.sums_in_gaps``). docs/algorithm.md#why-buffers-need-two-positions has the sizes.
"""

from collections.abc import Sequence
from typing import NamedTuple

from deepspeed_cdp.plan.constants import END, PERSISTENT, RELEASES, START
from deepspeed_cdp.plan.interval_alloc import (
    EMPTY,
    Lifetime,
    Lifetimes,
    Stream,
    StreamLayout,
    assign_offsets,
    fill_gaps,
    stream_layouts,
)
from deepspeed_cdp.plan.unit_schedule import UnitSchedule, Visit


class BufferLayout(NamedTuple):
    """Layouts of parameters (p), running sums (g) and finished sums (o; empty if those have a place of their own)."""

    p: StreamLayout
    g: StreamLayout
    o: StreamLayout


def layouts(plan: UnitSchedule) -> tuple[BufferLayout, ...]:
    """The layout of each rank's buffer.

    On two ranks each rank receives one stage only, so each has a layout of its own. On more ranks this would save a tenth of the
    buffer. But credits would come at other times, which simulations show to be slower on slow links. So there all ranks have one.
    """
    ranks = range(plan.schedule.ranks)
    if len(ranks) == 1:
        return (BufferLayout(EMPTY, EMPTY, EMPTY),)
    if len(ranks) == 2:
        return tuple(layout for rank in ranks for layout in _common_layouts(plan, plan.received(rank), [rank]))
    return _common_layouts(plan, plan.messages, ranks)


def _common_layouts(plan: UnitSchedule, messages: tuple[Visit, ...], ranks: Sequence[int]) -> tuple[BufferLayout, ...]:
    """Layouts with the same offsets of parameters and running sums for all ``ranks``, and each rank's finished sums in gaps.

    The better of two candidates: those offsets are searched for alone, or together with the finished sums of the first of the
    ranks, which are in use for longest.
    """
    ticks, streams = 2 * plan.round_ticks, (parameters(plan, messages), running_sums(plan))
    finished = [finished_sums(plan, rank) if plan.sums_in_gaps else Stream({}, ()) for rank in ranks]

    def candidate(*also: Stream) -> tuple[tuple[dict[Visit, int], ...], list[tuple[dict[Visit, int], int]]]:
        offsets = assign_offsets((*streams, *also), ticks)[0][:2]
        return offsets, [fill_gaps(streams, offsets, sums.lifetimes, ticks) for sums in finished]

    candidates = [candidate(), *([candidate(finished[0])] if plan.sums_in_gaps else [])]
    offsets, gaps = min(candidates, key=lambda found: max(nbytes for _, nbytes in found[1]))
    results = []
    for sums, (in_gaps, nbytes) in zip(finished, gaps):
        p, g, o = stream_layouts((*streams, sums), (*offsets, in_gaps), nbytes, RELEASES * len(plan.visits))
        kept = {(i, True): p.offsets[i, False] for i, backward in p.items if not backward and plan.kept(i)}
        results.append(BufferLayout(p._replace(offsets=p.offsets | kept), g, o))
    return tuple(results)


def parameters(plan: UnitSchedule, messages: tuple[Visit, ...]) -> Stream:
    """In use from the sender's push, two positions before the pass, to the end of the pass, or of the backward if kept for it."""
    number = {v: k for k, v in enumerate(plan.visits)}
    last = {v: (v[0], v[1] or plan.kept(v[0])) for v in messages}  # the last pass that uses the message
    lifetimes = {
        v: Lifetime(2 * (plan.spans[v][0] - 2 * plan.scale) + START, 2 * plan.spans[last[v]][1] + END, plan.units[v[0]].p_bytes)
        for v in messages
    }
    return Stream(lifetimes, [RELEASES * number[last[v]] + 1 for v in messages])


def running_sums(plan: UnitSchedule) -> Stream:
    """In use from the end of the neighbour's backward, two positions earlier, to the end of this rank's backward."""
    first = len(plan.units)
    lifetimes = {
        v: Lifetime(2 * (plan.spans[v][1] - 2 * plan.scale) + END, 2 * plan.spans[v][1] + END, plan.units[v[0]].g_bytes)
        for v in plan.visits[first:]
    }
    return Stream(lifetimes, [RELEASES * (first + k) + 2 for k in range(len(lifetimes))])


def finished_sums(plan: UnitSchedule, rank: int) -> Stream:
    """In use from the end of the step to the update, in every round, though they come only once a step.

    A rank grants their credits before its step is over, since a user's barrier between two steps may make it wait for all ranks.
    Rank N-1 finishes the sums of its own stage itself, before the end of its step.
    """
    stage, end_of_step = plan.schedule.owned(rank), plan.schedule.start(1, 0, rank) * plan.scale
    update, visits_before = update_in_round(plan, rank)
    lifetimes: Lifetimes = {}
    for i in reversed(plan.members(stage)):
        if plan.unit(i).g_bytes:
            finished = 0 if i == PERSISTENT else min(plan.sum_finished(0, i) - end_of_step, 0)
            lifetimes[i, True] = Lifetime(2 * finished + END, 2 * update + START, plan.unit(i).g_bytes)
    return Stream(lifetimes, [RELEASES * visits_before] * len(lifetimes))


def update_in_round(plan: UnitSchedule, rank: int) -> tuple[int, int]:
    """Ticks from the start of a step to the update with the step before's sums, and the number of visits that end before it."""
    s = plan.schedule
    ticks = (s.update_time(0, s.owned(rank)) - s.start(1, 0, rank)) * plan.scale
    assert 0 <= ticks < plan.round_ticks, "no rule that does not stall updates later"
    return ticks, sum(plan.spans[v][1] <= ticks for v in plan.visits)
