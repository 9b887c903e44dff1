"""schedule.py against the paper's brute force (tests/golden) and against the laws it must obey, for every N and K.

An activation is live from the start of its forward to the end of its backward, both positions included. So the ranks hold
N(N+1)/2 stages at every logical time of the steady state.
"""

import csv
from collections import Counter, defaultdict
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from deepspeed_cdp.plan.schedule import Schedule, grid, threshold

GOLDEN = Path(__file__).parent.parent / "golden"
STEPS = 4  # of which the first is not steady
EVERY = [(n, k) for n in range(1, 17) for k in range(2 * n)]


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    ranks = draw(st.integers(1, 64))
    return Schedule(ranks, draw(st.integers(0, 2 * ranks - 1)), draw(st.integers(1, 3 if ranks < 20 else 1)))


@pytest.mark.parametrize("rule", ["cdp-v1", "cdp-v2"])
@pytest.mark.parametrize("ranks", range(1, 9))
def test_equals_the_golden_rows(ranks: int, rule: str) -> None:
    with (GOLDEN / f"schedule_n{ranks}.csv").open() as file:
        rows = list(csv.DictReader(file))
    golden = Counter(
        (*(int(row[k]) for k in ("time", "rank", "stage", "step")), row["pass"], int(row[f"version_{rule[4:]}"])) for row in rows
    )
    steps = 1 + max(int(row["step"]) for row in rows)
    ours = Counter(
        (x.time, x.rank, x.stage, x.step, "FB"[x.backward], x.version)
        for x in Schedule(ranks, threshold(rule, ranks)).reads(steps)
    )
    assert ours == golden
    assert sum(ours.values()) == steps * 2 * ranks * ranks


# ---- laws, each for a schedule ------------------------------------------------------------------------------------------
def each_pass_once(s: Schedule) -> None:
    seen = Counter((x.stage, x.backward, x.round, x.rank, x.step) for x in s.reads(STEPS))
    assert set(seen.values()) == {1} and len(seen) == s.ranks * 2 * s.rounds * s.ranks * STEPS


def a_rank_runs_forwards_up_then_backwards_down(s: Schedule) -> None:
    mine = sorted(x for x in s.reads(STEPS) if x.rank == s.ranks // 2)
    assert len({x.time for x in mine}) == len(mine)
    up = list(range(s.ranks))
    assert [x.stage for x in mine] == (up + up[::-1]) * s.rounds * STEPS
    assert [x.backward for x in mine] == ([False] * s.ranks + [True] * s.ranks) * s.rounds * STEPS


def one_rank_on_a_stage_at_a_time(s: Schedule) -> None:
    busy = defaultdict(list)
    for x in s.reads(STEPS):
        busy[x.time].append(x.stage)
    steady = range(s.period, s.period * STEPS)  # from the start of step 1, until rank 0 ends
    for time, stages in busy.items():
        assert len(set(stages)) == len(stages), (time, stages)
        if not s.stalls and time in steady:
            assert sorted(stages) == list(range(s.ranks)), (time, stages)
    assert s.stalls or all(time in busy for time in steady)


def micro_batches_follow_each_other(s: Schedule) -> None:
    """On each stage, every two positions: so a running sum goes from one to the next. All but the owner's read from the owner."""
    chains = defaultdict(list)
    for x in s.reads(STEPS):
        if x.backward:
            chains[x.stage, x.step].append(x)
    for (stage, step), chain in chains.items():
        chain.sort()
        owner = s.owner(stage)
        assert s.readers(step, stage) == [(x.version, x.round, x.rank) for x in chain if x.rank != owner]
        assert s.neighbor(chain[0].round, chain[0].rank, -1) is s.neighbor(chain[-1].round, chain[-1].rank, 1) is None
        for x, after in zip(chain, chain[1:]):
            assert after.time == x.time + 2
            assert s.neighbor(x.round, x.rank, 1) == (after.round, after.rank)
            assert s.neighbor(after.round, after.rank, -1) == (x.round, x.rank)


def every_version_has_all_readers(s: Schedule) -> None:
    readers = Counter((x.stage, x.backward, x.version) for x in s.reads(STEPS))
    for (stage, backward, version), count in readers.items():
        if 0 < version < STEPS - 1 - (s.threshold == 2 * s.ranks - 1):
            assert count == s.ranks * s.rounds, (stage, backward, version)


def activations_are_constant(s: Schedule) -> None:
    starts = {(x.rank, x.step, x.round, x.stage): x.time for x in s.reads(STEPS) if not x.backward}
    change = Counter()
    for x in s.reads(STEPS):
        if x.backward:
            change[starts[x.rank, x.step, x.round, x.stage]] += 1
            change[x.time + 1] -= 1
    live = 0
    for time in range(s.period * STEPS):
        live += change[time]
        if time >= s.period:
            assert live <= s.ranks * (s.ranks + 1) // 2
            assert s.stalls or live == s.ranks * (s.ranks + 1) // 2, (time, live)


def versions_live_long_enough(s: Schedule) -> None:
    """Read after it is made (strictly, by another rank than the owner), and not after two more updates."""
    for x in s.reads(STEPS):
        assert x.version in (x.step, max(x.step - 1, 0))
        if x.version:
            made = s.update_time(x.version - 1, x.stage)
            assert x.time > made or (x.time == made and x.rank == s.owner(x.stage)), x
        assert x.time < s.update_time(x.version + 1, x.stage), x


def sums_are_finished_before_updates(s: Schedule) -> None:
    last = Counter()
    for x in s.reads(STEPS):
        if x.backward:
            last[x.step, x.stage] = max(last[x.step, x.stage], x.time + 1)
    for (step, stage), end in last.items():
        assert s.norm_time(step, stage) == end
        wait = last[step, 0] + 1 if s.exact_norm and s.ranks > 1 else end
        assert s.update_time(step, stage) == wait


LAWS = [
    each_pass_once,
    a_rank_runs_forwards_up_then_backwards_down,
    one_rank_on_a_stage_at_a_time,
    micro_batches_follow_each_other,
    every_version_has_all_readers,
    activations_are_constant,
    versions_live_long_enough,
    sums_are_finished_before_updates,
]


@pytest.mark.parametrize("law", LAWS)
def test_law_for_every_threshold(law) -> None:
    """N to 16; with accumulation, N to 4."""
    for ranks, k in EVERY:
        for rounds in (1, 2, 3) if ranks <= 4 else (1,):
            law(Schedule(ranks, k, rounds))


@pytest.mark.parametrize("law", LAWS)
@settings(max_examples=6, derandomize=True, deadline=None)
@example(Schedule(64, 63))
@given(schedules())
def test_law_to_64_ranks(law, s: Schedule) -> None:
    law(s)


@pytest.mark.parametrize(("ranks", "k"), EVERY)
def test_rule_by_its_definition(ranks: int, k: int) -> None:
    """Fresh iff r + s >= K in round 0; later rounds fresh, except under v1 (K = 2N-1)."""
    s = Schedule(ranks, k, 2)
    v1 = k == 2 * ranks - 1
    for r in range(ranks):
        assert s.owned(r) == ranks - 1 - r and s.owner(s.owned(r)) == r
        for stage in range(ranks):
            assert [s.version(5, m, r, stage) for m in (0, 1)] == [5 if r + stage >= k else 4, 4 if v1 else 5]
            assert s.version(0, 0, r, stage) == 0


@pytest.mark.parametrize("ranks", range(1, 65))
def test_v2_is_the_smallest_threshold_without_a_stall(ranks: int) -> None:
    """By brute force: with 2N positions a step, no fresh read of step 1 starts before its stage's last backward ends."""

    def runs(k: int) -> bool:
        return all(
            2 * ranks + 2 * r + s >= 2 * (ranks - 1) + (2 * ranks - 1 - s) + 1
            for r in range(ranks)
            for s in range(ranks)
            if r + s >= k
        )

    smallest = min(k for k in range(2 * ranks) if runs(k))
    assert threshold("cdp-v2", ranks) == smallest
    assert all(Schedule(ranks, k).stalls == (not runs(k)) for k in range(2 * ranks))


@pytest.mark.parametrize(
    ("ranks", "periods"), [(1, [2, 2]), (2, [8, 4, 4, 4]), (3, [12, 10, 6, 6, 6, 6]), (4, [16, 14, 12, 8, 8, 8, 8, 8])]
)
def test_period(ranks: int, periods: list[int]) -> None:
    for rounds in (1, 2, 3):
        found = [Schedule(ranks, k, rounds).period for k in range(2 * ranks)]
        assert found == [p + 2 * ranks * (rounds - 1) for p in periods]


def test_exact_norm_where_every_update_waits_for_all() -> None:
    assert [Schedule(4, k).exact_norm for k in range(8)] == [True, False, False, False, False, False, False, True]
    assert {s: Schedule(3, 5).update_time(0, s) for s in range(3)} == {0: 11, 1: 11, 2: 11}
    assert {s: Schedule(3, 2).update_time(0, s) for s in range(3)} == {0: 10, 1: 9, 2: 8}
    assert Schedule(1, 0).update_time(0, 0) == 2


def test_grid() -> None:
    assert grid(Schedule(3, 2)).splitlines() == [
        "rank 0  F0  F1  F2  B2  B1  B0  F0' F1' F2  B2  B1' B0'",
        "rank 1          F0  F1  F2  B2  B1  B0  F0' F1  F2  B2  B1  B0'",
        "rank 2                  F0  F1  F2  B2  B1  B0  F0  F1  F2  B2  B1  B0",
    ]
    assert grid(Schedule(2, 0), steps=2).splitlines() == [
        "rank 0  F0 F1 B1 B0             F0 F1 B1 B0",
        "rank 1        F0 F1 B1 B0             F0 F1 B1 B0",
    ]


def test_threshold() -> None:
    assert [threshold(rule, 4) for rule in ("dp", "cdp-v2", "cdp-v1")] == [0, 3, 7]
    assert [threshold(k, 4) for k in range(8)] == list(range(8))
    assert [threshold(rule, 1) for rule in ("dp", "cdp-v2", "cdp-v1")] == [0, 0, 1]


@pytest.mark.parametrize("rule", ["v2", "", "CDP-V2", "3", -1, 8, True, False, 2.0, None])
def test_threshold_refuses(rule: object) -> None:
    with pytest.raises(
        ValueError,
        match=r"^cyclic\.rule is .*'dp', 'cdp-v1', 'cdp-v2' or an integer K from 0 to 7 with 4 ranks; "
        r"choose one",
    ) as error:
        threshold(rule, 4)  # type: ignore[arg-type]
    assert repr(rule) in str(error.value)


@pytest.mark.parametrize("wrong", [(0, 0, 1), (2, 4, 1), (2, -1, 1), (2, 1, 0)])
def test_schedule_refuses(wrong: tuple[int, int, int]) -> None:
    with pytest.raises(AssertionError):
        Schedule(*wrong)
