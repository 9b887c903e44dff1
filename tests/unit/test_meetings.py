"""Programs with meetings (program.with_rendezvous): ranks that block at every message until the other side is there finish."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspeed_cdp.plan.actions import Kind
from deepspeed_cdp.plan.plan import Plan
from deepspeed_cdp.plan.program import PULLS, _initiated, build, edges, initial_posts, with_rendezvous
from deepspeed_cdp.plan.replicated import ReplicatedPlan
from support.plans import PERSISTENT_UNIT, make, plans

STEPS = 4


def messages(plan: Plan, rank: int, a) -> list[tuple]:
    """The edges on which this action of ``rank`` begins a message, in order: (edge, whether rank initiates)."""
    if a.kind in (Kind.START_RECV, Kind.START_SEND):
        return [((a.stream, a.peer, rank) if a.kind == Kind.START_RECV else (a.stream, rank, a.peer), False)]
    return [
        ((stream, peer, rank) if a.kind in PULLS else (stream, rank, peer), True) for stream, peer in _initiated(plan, rank, a)
    ]


def run(plan: Plan, barrier: bool, programs_of=with_rendezvous) -> str | None:
    """Walk all ranks; every message holds its host up until both sides are at it. None, or what is stuck."""
    n = plan.schedule.ranks
    programs = [[programs_of(plan, r, first) for first in (True, False)] for r in range(n)]
    at, step, pending = [0] * n, [0] * n, [[] for _ in range(n)]
    named: list[Counter] = [
        Counter() for _ in range(n)
    ]  # by edge: credits that this rank has granted, units that it has published
    met: list[Counter] = [Counter() for _ in range(n)]
    arrived: list[Counter] = [Counter() for _ in range(n)]
    used: list[Counter] = [Counter() for _ in range(n)]
    for r in range(n):
        named[r].update((p.stream, p.src, r) for p in initial_posts(plan, r))
        named[r]["S", (r - 1) % n, r] += 1
        named[r]["T", n - 1, r] += 1
    met[0]["S", n - 1, 0] += 1  # begun by StepMetrics.begin on both sides
    arrived[0]["S", n - 1, 0] += 1

    def use(r: int, edge: tuple, count: int = 1) -> None:
        used[r][edge] += count
        assert used[r][edge] <= arrived[r][edge], f"rank {r} waits for {edge} before it is met"

    def wait(r: int, a) -> None:
        """What this action waits for has been begun before."""
        if (
            a.kind in (Kind.WAIT_PARAM, Kind.REFRESH_PARAM, Kind.RECV_GRAD, Kind.RECV_PERSISTENT_GRAD, Kind.OPTIMIZER_STEP)
            and a.peer is not None
        ):
            use(r, (a.stream, a.peer, r))
        if a.kind == Kind.OFFER_GRAD and a.into[1] != r:
            use(r, ("G", a.into[1], r))
        eager = plan.eager_units(r)
        if a.kind == Kind.REDUCE_GRAD and r < n - 1:
            use(r, ("G", n - 1, r))
        if a.kind == Kind.GRAD_NORM and a.peer is not None:
            use(r, ("S", a.peer, r))
            if r < n - 1:
                late = [i for i in plan.members(plan.schedule.owned(r)) if i not in eager and plan.unit(i).g_bytes]
                use(r, ("G", n - 1, r), len(late))

    def name(r: int, a) -> None:
        for p in a.posts:
            named[r][p.stream, p.src, r] += 1
        if a.kind in (Kind.PUBLISH_PARAM, Kind.OFFER_GRAD):
            named[r][a.stream, r, a.peer] += 1
        if a.kind == Kind.GRAD_NORM and n > 1:
            named[r]["S", (r - 1) % n, r] += 1
        if a.kind == Kind.OPTIMIZER_STEP and a.stream == "T":
            named[r]["T", n - 1, r] += 1

    moved = True
    while moved:
        moved = False
        for r in range(n):
            while True:
                while pending[r]:
                    edge, mine = pending[r][0]
                    other = edge[1] if edge[2] == r else edge[2]
                    if not (pending[other] and pending[other][0][0] == edge):
                        break
                    assert mine != pending[other][0][1], "one side initiates"
                    for rank in (r, other):
                        if not pending[rank][0][1]:  # the side that was told has named its part
                            met[rank][edge] += 1
                            assert met[rank][edge] <= named[rank][edge], f"rank {rank} meets {edge} before it is named"
                        pending[rank].pop(0)
                    arrived[edge[2]][edge] += 1
                    moved = True
                if pending[r]:
                    break
                program = programs[r][step[r] > 0]
                if at[r] == len(program):
                    if step[r] + 1 == STEPS or barrier and min(step) < step[r]:
                        break
                    at[r], step[r] = 0, step[r] + 1
                    moved = True
                    continue
                a = program[at[r]]
                at[r] += 1
                moved = True
                wait(r, a)
                name(r, a)
                pending[r] = messages(plan, r, a)
    stuck = [
        f"rank {r} step {step[r]}: {pending[r] or 'waits at the barrier'}"
        for r in range(n)
        if pending[r] or at[r] < len(programs[r][step[r] > 0]) or step[r] + 1 < STEPS
    ]
    return "; ".join(stuck) or None


@pytest.mark.sampled(12)
@pytest.mark.parametrize("barrier", [False, True])
@pytest.mark.parametrize("rounds", [1, 2])
@pytest.mark.parametrize(("ranks", "k"), [(n, k) for n in range(1, 5) for k in range(2 * n)] + [(5, 3), (6, 4), (8, 6)])
def test_ranks_that_block_at_every_message_finish(ranks, k, rounds, barrier):
    for kind in (Plan, ReplicatedPlan):
        assert run(make(ranks, k, rounds, 1, kind=kind), barrier) is None
        assert run(make(ranks, k, rounds, 2, persistent=PERSISTENT_UNIT, kind=kind), barrier) is None


@settings(max_examples=8, derandomize=True, deadline=None)
@given(plans(st.integers(2, 6)), st.booleans())
def test_random_plans_finish_too(plan, barrier):
    assert run(plan, barrier) is None


def test_the_place_of_a_meeting_matters():
    """Ranks that receive or pull at the beginning or at the end of the step, and block, get stuck. One that pulls behind the
    pass that needs it waits for what it has not begun."""

    def sorted_by(kind: Kind, early: bool):
        return lambda *args: tuple(sorted(with_rendezvous(*args), key=lambda a: (a.kind == kind) != early))

    for kind in (Kind.START_RECV, Kind.START_SEND, Kind.PULL_GRAD):
        for early in (True, False):
            stuck = run(make(3, 2), False, sorted_by(kind, early))
            assert stuck and "rank 0" in stuck and "rank 1" in stuck

    def late(plan: Plan, rank: int, first: bool):
        good = list(with_rendezvous(plan, rank, first))
        wait = next(a for a in good if a.kind == Kind.WAIT_PARAM and a.peer is not None)
        pull = next(a for a in good if a.kind == Kind.PULL_PARAM and (a.unit, a.backward) == (wait.unit, wait.backward))
        good.remove(pull)
        good.insert(good.index(wait) + 1, pull)
        return tuple(good)

    with pytest.raises(AssertionError, match="waits for .* before it is met"):
        run(make(3, 2), False, late)


def test_edges_are_those_of_the_plan():
    assert edges(make(1, 0)) == []
    got = edges(make(3, 2))
    everyone = {(a, b) for a in range(3) for b in range(3) if a != b}
    for stream in ("P0", "G"):
        assert {(a, b) for s, a, b in got if s == stream} == everyone
    assert {(a, b) for s, a, b in got if s == "G0"} == everyone - {(1, 0), (2, 0)}, "rank 0 starts the sums"
    assert {e for e in edges(make(3, 2, 2)) if e[0] == "G0"} == {("G0", *e) for e in everyone}
    assert {e for e in got if e[0] == "S"} == {("S", r, (r + 1) % 3) for r in range(3)}
    assert {s for s, _, _ in got} == {"P0", "G0", "G", "S"}
    assert {e for e in edges(make(3, 5)) if e[0] == "T"} == {("T", 2, 0), ("T", 2, 1)}
    replicas = edges(make(3, 2, kind=ReplicatedPlan))
    assert {e for e in replicas if e[0] == "P"} <= {("P", r, (r + 1) % 3) for r in range(3)} and "P" in {e[0] for e in replicas}


def test_without_meetings_a_program_is_as_it_was():
    plan = make(4, 3, 2, 2, persistent=PERSISTENT_UNIT)
    for r in range(4):
        for first in (True, False):
            assert [a for a in with_rendezvous(plan, r, first) if a.kind not in (Kind.START_RECV, Kind.START_SEND)] == list(
                build(plan, r, first)
            )
