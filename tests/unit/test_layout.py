"""plan/interval_alloc.py by brute force: lifetimes on a circle of ticks, and runs that post messages at their credits."""

import random

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from deepspeed_cdp.plan import interval_alloc
from deepspeed_cdp.plan.interval_alloc import ALIGN, Lifetime, aligned, allocate, credit_releases, overlap_in_time
from deepspeed_cdp.plan.plan import Plan
from deepspeed_cdp.plan.schedule import Schedule
from deepspeed_cdp.plan.unit_schedule import Unit

PERIODS = st.integers(2, 24)


@st.composite
def circles(draw: st.DrawFn) -> tuple[list[Lifetime], int]:
    period = draw(PERIODS)
    life = st.builds(
        lambda start, length, nbytes: Lifetime(start, start + length, nbytes),
        st.integers(-2 * period, 2 * period),
        st.integers(0, period - 1),
        st.integers(0, 1000),
    )
    return draw(st.lists(life, max_size=14)), period


def ticks(x: Lifetime, period: int) -> set[int]:
    return {t % period for t in range(x.start, x.end + 1)}


def bytes_of(offset: int, nbytes: int) -> range:
    return range(offset // ALIGN, (offset + aligned(nbytes)) // ALIGN)


def lowest_bound(lives: list[Lifetime], period: int) -> int:
    """The most bytes in use at one tick: no layout needs less."""
    return max((sum(aligned(x.nbytes) for x in lives if t in ticks(x, period)) for t in range(period)), default=0)


def sliding(sizes: list[int], ahead: int) -> tuple[list[Lifetime], int]:
    """Unit i is used at tick 2i and lands ``ahead`` units earlier; what the P buffer does."""
    return [Lifetime(2 * (i - ahead) + 1, 2 * i + 2, n) for i, n in enumerate(sizes)], 2 * len(sizes)


def test_aligned() -> None:
    assert [aligned(n) for n in (0, 1, ALIGN - 1, ALIGN, ALIGN + 1)] == [0, ALIGN, ALIGN, ALIGN, 2 * ALIGN]


@settings(max_examples=150, derandomize=True, deadline=None)
@given(circles())
def test_overlap_in_time_as_counted_on_the_circle(circle) -> None:
    lives, period = circle
    for a in lives:
        for b in lives:
            assert overlap_in_time(a, b, period) == bool(ticks(a, period) & ticks(b, period))


@settings(max_examples=150, derandomize=True, deadline=None)
@given(circles())
def test_nothing_overlaps_in_time_and_bytes(circle) -> None:
    lives, period = circle
    offsets, total = allocate(lives, period)
    assert len(offsets) == len(lives)
    for t in range(period):
        used: set[int] = set()
        for x, offset in zip(lives, offsets):
            if t in ticks(x, period):
                blocks = bytes_of(offset, x.nbytes)
                assert offset % ALIGN == 0 and offset >= 0 and offset + aligned(x.nbytes) <= total
                assert used.isdisjoint(blocks)
                used.update(blocks)
    assert lowest_bound(lives, period) <= total


@settings(max_examples=150, derandomize=True, deadline=None)
@given(circles())
def test_random_lifetimes_cost_at_most_twice_the_bound(circle) -> None:
    lives, period = circle
    assert allocate(lives, period)[1] <= 2 * lowest_bound(lives, period)


@pytest.mark.parametrize("count", [8, 15, 16, 33, 64, 128])
@pytest.mark.parametrize("ahead", [1, 3, 7, 16])
def test_equal_units_in_a_sliding_window_cost_the_fewest_there_can_be(count: int, ahead: int) -> None:
    """With L live at once, a slot serves at most floor(n / L) of n units."""
    if ahead < count:
        lives, period = sliding([1024] * count, ahead)
        assert lowest_bound(lives, period) == 1024 * (ahead + 1)
        assert allocate(lives, period)[1] == 1024 * -(-count // (count // (ahead + 1)))


@pytest.mark.parametrize("seed", range(20))
def test_uneven_units_in_a_sliding_window_cost_at_most_half_more_than_live(seed: int) -> None:
    rng = random.Random(seed)
    lives, period = sliding([rng.randint(1, 40) * ALIGN for _ in range(40)], 12)
    assert allocate(lives, period)[1] <= 1.5 * lowest_bound(lives, period)


def test_the_best_order_is_taken() -> None:
    """Each is packed without waste by one way only: by size, by start, around a ring."""
    by_size = [Lifetime(0, 1, 64), Lifetime(1, 3, 128), Lifetime(3, 5, 192), Lifetime(5, 6, 64)]
    assert allocate(by_size, 8)[1] == 320 == lowest_bound(by_size, 8)
    ring, period = sliding([64] * 64, 16)
    assert allocate(ring, period)[1] == 22 * 64


@st.composite
def rounds(draw: st.DrawFn) -> tuple[list[Lifetime], list[int], int]:
    """Units read up and down again, some kept in between: lifetimes in the order of reads, the visits that end them, ticks."""
    sizes = draw(st.lists(st.integers(0, 500), min_size=2, max_size=9))
    n, ahead = len(sizes), draw(st.integers(0, 3))
    kept = {i for i in range(n) if draw(st.booleans()) and 2 * (2 * (n - i) - 1 + ahead) < 4 * n}
    reads = [(i, i) for i in range(n)] + [(i, 2 * n - 1 - i) for i in reversed(range(n)) if i not in kept]
    ends = [2 * n - 1 - i if i in kept else at for i, at in reads]
    return [Lifetime(2 * (at - ahead) + 1, 2 * end + 2, sizes[i]) for (i, at), end in zip(reads, ends)], ends, 4 * n


@settings(max_examples=150, derandomize=True, deadline=None)
@given(rounds())
def test_rounds_with_kept_units_cost_at_most_twice_the_bound(case) -> None:
    lives, _, period = case
    assume(all(x.end - x.start < period for x in lives))
    assert lowest_bound(lives, period) <= allocate(lives, period)[1] <= 2 * lowest_bound(lives, period)


@pytest.mark.parametrize("count", [1, 4, 16])
def test_nested_lifetimes_cost_what_is_live(count: int) -> None:
    """Units that are all kept, freed in the reverse order."""
    lives = [Lifetime(2 * i, 4 * count - 2 * i, 100 + i) for i in range(count)]
    assert allocate(lives, 6 * count)[1] == lowest_bound(lives, 6 * count)


def test_placing_the_highest_first_improves_first_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two nested stages between sliding ones on six ranks (parameters alone): found only after some tries."""

    def stages(tries: int) -> float:
        monkeypatch.setattr(interval_alloc, "TRIES", tries)
        units = tuple(Unit(f"u{i}", i // 8, (), (), 64, 0) for i in range(48))
        return Plan(Schedule(6, 11), units).regions["PG"] / (8 * 64)

    assert stages(40) == 2.625 < stages(0)


def test_where_first_fit_begins_matters_for_uneven_units(monkeypatch: pytest.MonkeyPatch) -> None:
    chance = random.Random(2)
    sizes = [64 * chance.randint(1, 6) for _ in range(32)]

    def nbytes(turns: int) -> int:
        monkeypatch.setattr(interval_alloc, "TURNS", turns)
        return Plan(Schedule(4, 7), tuple(Unit(f"u{i}", i // 8, (), (), s, s) for i, s in enumerate(sizes))).regions["PG"]

    assert nbytes(16) < nbytes(0)


def test_a_lifetime_as_long_as_the_period_is_refused() -> None:
    with pytest.raises(AssertionError):
        allocate([Lifetime(0, 4, 1)], 4)
    with pytest.raises(AssertionError):
        allocate([Lifetime(1, 0, 1)], 4)


# ---- credits ------------------------------------------------------------------------------------------------------------
@st.composite
def laid_out(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    n = draw(st.integers(1, 12))
    blocks = st.lists(st.integers(0, 8), min_size=n, max_size=n)
    return [b * ALIGN for b in draw(blocks)], [50 * b for b in draw(blocks)]


def share(i: int, j: int, offsets: list[int], sizes: list[int]) -> bool:
    n = len(offsets)
    return not set(bytes_of(offsets[i % n], sizes[i % n])).isdisjoint(bytes_of(offsets[j % n], sizes[j % n]))


@settings(max_examples=250, derandomize=True, deadline=None)
@given(laid_out())
def test_credits_over_four_repetitions(case) -> None:
    """Items are released in order. What is posted at its credit meets only free bytes; one release earlier it, or one that is
    to be posted before it, would meet bytes in use."""
    offsets, sizes = case
    n, granted = len(offsets), credit_releases(offsets, sizes)
    assert (
        list(granted) == sorted(granted) and granted[-1] <= granted[0] + n and all(i - n <= g < i for i, g in enumerate(granted))
    )
    in_use: set[int] = set()
    posted = -1
    for released in range(-n - 1, 4 * n):
        in_use.discard(released)
        while granted[(posted + 1) % n] + (posted + 1) // n * n <= released:
            posted += 1
            for other in in_use:
                assert not share(posted, other, offsets, sizes), (posted, other, released)
            in_use.add(posted)
        waiting = range(posted + 1, posted + 1 + n)
        assert (
            any(share(i, released + 1, offsets, sizes) or i == released + 1 + n for i in waiting)
            or granted[(posted + 1) % n] + (posted + 1) // n * n > released + 1
        ), (posted, released)
        assert released + 1 <= posted or released < -1, "an item is posted before it is its turn"


@settings(max_examples=150, derandomize=True, deadline=None)
@given(laid_out())
def test_gates_are_no_later_than_needed(case) -> None:
    """Each credit is the release that this item, or one before it on the stream, needs: of shared bytes, or its own last."""
    offsets, sizes = case
    n, granted = len(offsets), credit_releases(offsets, sizes)
    for i in range(n):
        needs = [
            j
            for j in range(i - n, i + 1)
            if granted[i] == j - n or (j - n < granted[i] < j and share(j, granted[i], offsets, sizes))
        ]
        assert needs, (i, granted[i])


@st.composite
def released(draw: st.DrawFn) -> tuple[list[int], list[int], list[int], int]:
    """Items that are released in any order, among releases of which some are of nothing here."""
    offsets, sizes = draw(laid_out())
    period = len(offsets) + draw(st.integers(0, 4))
    return offsets, sizes, draw(st.permutations(range(period)))[: len(offsets)], period


@settings(max_examples=250, derandomize=True, deadline=None)
@given(released())
def test_gates_with_releases_by_their_definition(case) -> None:
    """Over five repetitions: no message lands before every earlier one that shares its bytes is released, the item's own last one
    too, nor before those ahead of it on the stream; and at the earliest such release."""
    offsets, sizes, releases, period = case
    n, granted = len(offsets), credit_releases(*case)
    number = [releases[x % n] + x // n * period for x in range(5 * n)]
    needs = [max((number[y] for y in range(x) if y == x - n or share(x, y, offsets, sizes)), default=-1) for x in range(5 * n)]
    running = [max(needs[: x + 1]) for x in range(5 * n)]
    for x in range(3 * n, 5 * n):
        assert granted[x % n] + x // n * period == running[x], x
    assert list(granted) == sorted(granted) and granted[-1] <= granted[0] + period
    assert credit_releases(offsets, sizes) == credit_releases(offsets, sizes, range(n), n)


@settings(max_examples=250, derandomize=True, deadline=None)
@given(rounds())
def test_credits_over_rounds_with_kept_units(case) -> None:
    """Laid out by ``allocate``: what is posted at its credit meets only free bytes, and is posted before its lifetime begins."""
    lives, ends, period = case
    assume(all(x.end - x.start < period for x in lives))
    offsets, sizes = allocate(lives, period)[0], [x.nbytes for x in lives]
    n, visits = len(lives), period // 2
    granted = credit_releases(offsets, sizes, ends, visits)
    in_use: set[int] = set()
    posted = -1
    for release in range(-visits, 4 * visits):
        in_use = {x for x in in_use if ends[x % n] + x // n * visits != release}
        while granted[(posted + 1) % n] + (posted + 1) // n * visits <= release:
            posted += 1
            assert not any(share(posted, other, offsets, sizes) for other in in_use), (posted, release)
            assert 2 * release + 2 <= lives[posted % n].start + posted // n * period or not any(sizes), "a credit comes too late"
            in_use.add(posted)
    assert posted >= 3 * n


def test_gates_of_small_cases() -> None:
    assert credit_releases([], []) == ()
    assert credit_releases([0], [64]) == (-1,)  # its own release
    assert credit_releases([0, 0], [64, 64]) == (-1, 0)  # one region: one at a time
    assert credit_releases([0, 64], [64, 64]) == (-2, -1)  # a region each
    assert credit_releases([0, 64, 0], [64, 64, 64]) == (-1, -1, 0)  # 0 waits for 2, and 1 keeps its place behind it
    assert credit_releases([0, 0, 0], [64, 0, 64]) == (-1, -1, 0)  # an empty item waits for nobody but those before it
    assert credit_releases([0, 0, 0], [0, 0, 0]) == (-3, -2, -1)
    # two units up and down, the second kept: reads 0, 1, (1), 0 and their ends 0, 2, 3
    assert credit_releases([0, 64, 0], [64, 64, 64], [0, 2, 3], 4) == (-1, -1, 0)
    assert credit_releases([0, 64, 64], [64, 64, 64], [0, 2, 3], 4) == (-2, -1, 2)  # the last waits for the kept one's end


def test_streams_that_share_a_buffer_wait_for_each_other_and_keep_their_own_order() -> None:
    assert credit_releases([0, 0, 64], [64, 64, 64]) == (-2, 0, 0)  # of one stream: the last keeps its place behind the second
    assert credit_releases([0, 0, 64], [64, 64, 64], streams=[0, 0, 1]) == (-2, 0, -1)  # of another: it waits for itself alone
    assert credit_releases([0, 0, 64], [64, 64, 64], streams=[0, 1, 0]) == (-2, 0, -1)
    assert credit_releases([0, 0, 0, 64], [64] * 4, streams=[0, 1, 0, 1]) == (-2, 0, 1, 0)
