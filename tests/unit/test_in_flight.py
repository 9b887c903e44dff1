"""plan/buffer_layout.py: finished sums between parameters and running sums, and what goes wrong if they are there too short."""

from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from deepspeed_cdp.plan import buffer_layout, builder
from deepspeed_cdp.plan.constants import END, PERSISTENT, START
from deepspeed_cdp.plan.interval_alloc import Lifetime, Stream, assign_offsets, fill_gaps, overlap_in_time
from deepspeed_cdp.plan.plan import Plan
from deepspeed_cdp.plan.program import build
from deepspeed_cdp.plan.schedule import Schedule, threshold
from deepspeed_cdp.plan.unit_schedule import Unit
from deepspeed_cdp.verify.check import validate
from deepspeed_cdp.verify.well_formed import PlanError


def make(ranks: int, rule: str | int = "cdp-v2", rounds: int = 1, per_stage: int = 2, persistent: Unit | None = None) -> Plan:
    units = tuple(Unit(f"u{i}", i // per_stage, (f"w{i}",), (), 1024, 1024) for i in range(ranks * per_stage))
    return Plan(Schedule(ranks, threshold(rule, ranks), rounds), units, persistent)


def ticks(plan: Plan, rank: int) -> dict[int, tuple[float, float]]:
    """By unit, positions from the start of the rank's round between which its finished sum is in use."""
    return {
        i: (x.start / 2 / plan.scale, (x.end - START) / 2 / plan.scale)
        for (i, _), x in buffer_layout.finished_sums(plan, rank).lifetimes.items()
    }


def test_lifetimes_by_hand() -> None:
    """Four ranks, two units a stage. The owner of stage s updates at position s of its next round, under v1 at 2s + 1."""
    v2, v1 = make(4), make(4, "cdp-v1")
    assert ticks(v2, 0) == {7: (0, 3), 6: (0, 3)}
    assert ticks(v2, 2) == {3: (0, 1), 2: (0, 1)}
    assert ticks(v2, 3) == {1: (-0.5, 0), 0: (0, 0)}, "its own backward finishes them, its next forward needs the update"
    assert ticks(v1, 0) == {7: (0, 7), 6: (0, 7)} and ticks(v1, 3) == {1: (-0.5, 1), 0: (0, 1)}
    persistent = make(3, persistent=Unit("", 0, ("tied",), (), 64, 64))
    assert ticks(persistent, 2)[PERSISTENT] == (0, 0) and PERSISTENT not in ticks(persistent, 1)


def test_frozen_units_have_none() -> None:
    plan = make(2)
    plan = replace(plan, units=(replace(plan.units[0], g_bytes=0), *plan.units[1:]))
    assert set(ticks(plan, 1)) == {1} and set(plan.o_layout(0)) == {1}


@pytest.mark.parametrize(("rule", "between"), [("cdp-v2", True), ("cdp-v1", True), (4, True), (2, False), ("dp", False)])
def test_rules_that_stall_have_them_behind(rule: str | int, between: bool) -> None:
    plan, apart = make(4, rule), replace(make(4, rule), separate_sums=True)
    validate(plan)
    validate(apart)
    assert plan.sums_in_gaps == between and not apart.sums_in_gaps and apart.regions["PG"] >= plan.regions["PG"]
    for stage in range(4):
        assert min(apart.o_layout(stage).values()) == apart.p_layouts[apart.schedule.owner(stage)].nbytes
        assert between or plan.o_layout(stage) == apart.o_layout(stage)


def test_rules_may_take_turns_only_where_they_lie_behind() -> None:
    with pytest.raises(AssertionError):
        make(3).under(0)
    plan = replace(make(3), separate_sums=True)
    assert plan.under(0).o_layout(1) == plan.o_layout(1)


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    ranks = draw(st.integers(2, 6))
    counts = draw(st.lists(st.integers(1, 3), min_size=ranks, max_size=ranks))
    size = st.integers(1, 9).map(lambda x: 64 * x)
    units = []
    for stage, count in enumerate(counts):
        for _ in range(count):
            units.append(Unit(f"u{len(units)}", stage, ("w",), (), draw(size), draw(st.one_of(st.just(0), size))))
    return Plan(
        Schedule(ranks, draw(st.integers(ranks - 1, 2 * ranks - 1)), draw(st.integers(1, 3))),
        tuple(units),
        None,
        draw(st.booleans()),
    )


@settings(max_examples=40, derandomize=True, deadline=None)
@given(plans())
def test_no_two_in_use_at_once_share_a_byte(plan: Plan) -> None:
    """All three kinds, on every rank; and the whole is no larger than with finished sums behind."""
    for rank, layouts in enumerate(plan.layouts):
        streams = (
            buffer_layout.parameters(plan, layouts.p.items),
            buffer_layout.running_sums(plan),
            buffer_layout.finished_sums(plan, rank),
        )
        found = [(life, layout.offsets[v]) for stream, layout in zip(streams, layouts) for v, life in stream.lifetimes.items()]
        for k, (a, at) in enumerate(found):
            assert at + a.nbytes <= layouts.p.nbytes
            for b, there in found[:k]:
                if overlap_in_time(a, b, 2 * plan.round_ticks):
                    assert at + a.nbytes <= there or there + b.nbytes <= at, (rank, a, b)
    assert plan.regions["PG"] <= replace(plan, separate_sums=True).regions["PG"]


@settings(max_examples=60, derandomize=True, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 19), st.integers(0, 15), st.integers(0, 5)), max_size=8),
    st.lists(st.tuples(st.integers(0, 19), st.integers(0, 15), st.integers(0, 5)), max_size=5),
)
def test_filling_gaps_leaves_the_others_where_they_are(
    fixed: list[tuple[int, int, int]], more: list[tuple[int, int, int]]
) -> None:
    def lives(items: list[tuple[int, int, int]]) -> dict:
        return {(i, True): Lifetime(start, start + length, 64 * n) for i, (start, length, n) in enumerate(items)}

    stream, new = Stream(lives(fixed), [0] * len(fixed)), lives(more)
    places, end = assign_offsets([stream], 20)
    where, nbytes = fill_gaps([stream], places, new, 20)
    assert list(where) == list(new) and nbytes >= end
    every = [(x, places[0][v]) for v, x in stream.lifetimes.items()] + [(x, where[v]) for v, x in new.items()]
    for k, (a, at) in enumerate(every):
        for b, there in every[:k]:
            if overlap_in_time(a, b, 20) and a.nbytes and b.nbytes:
                assert at + a.nbytes <= there or there + b.nbytes <= at
    assume(new)
    assert nbytes == max(end, *(where[v] + x.nbytes for v, x in new.items()))


# ---- what must be noticed ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("rounds", [1, 2])
def test_credits_for_sums_only_in_the_next_step_are_refused(rounds: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums arrive in the owner's next round, but a user's barrier between two steps would keep it from granting their credits."""
    true = buffer_layout.finished_sums

    def late(plan: Plan, rank: int) -> Stream:
        lives, ends = true(plan, rank)
        after = plan.schedule.start(1, 0, rank) * plan.scale
        return Stream(
            {v: x._replace(start=min(2 * (plan.sum_finished(0, v[0]) - after) + END, x.end)) for v, x in lives.items()}, ends
        )

    monkeypatch.setattr(buffer_layout, "finished_sums", late)
    with pytest.raises(PlanError):
        validate(make(4, rounds=rounds, per_stage=3))


@pytest.mark.parametrize(("ranks", "rank"), [(3, 1), (4, 1), (5, 1)])
def test_credits_before_the_update_are_refused(ranks: int, rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """By this rank, which grants credits as soon as its finished sums are out of use."""
    true = builder.update_in_round
    monkeypatch.setattr(builder, "update_in_round", lambda p, r: (true(p, r)[0] - (r == rank), true(p, r)[1]))
    with pytest.raises(PlanError, match=r"GRANT_CREDIT \(stream"):
        validate(make(ranks))


def test_they_are_let_in_once_a_step_and_before_it_is_over() -> None:
    for rounds in (1, 3):
        plan = make(4, rounds=rounds)
        for rank in range(4):
            steady = [(a, x) for a in build(plan, rank, False) for x in a.posts if x.stream == "O"]
            first = [(a, x) for a in build(plan, rank, True) for x in a.posts if x.stream == "O"]
            assert [x for _, x in steady] == [x for _, x in first]
            assert [(x.unit, x.round, x.ahead) for _, x in steady] == (
                [(i, rounds - 1, 0) for i in reversed(plan.members(3 - rank))] if rank < 3 else []
            )
