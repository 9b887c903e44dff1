"""plan/interval_alloc.py by brute force: lifetimes on a circle of ticks."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspeed_cdp.plan import interval_alloc
from deepspeed_cdp.plan.interval_alloc import ALIGN, Lifetime, aligned, allocate, overlap_in_time

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
    """Unit i is used at tick 2i and is pulled ``ahead`` units earlier, as windows are."""
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


def up_and_down(sizes: list[int], ahead: int, kept: set[int]) -> tuple[list[Lifetime], int]:
    """Units read up and down again, some kept in between."""
    n = len(sizes)
    reads = [(i, i) for i in range(n)] + [(i, 2 * n - 1 - i) for i in reversed(range(n)) if i not in kept]
    ends = [2 * n - 1 - i if i in kept else at for i, at in reads]
    return [Lifetime(2 * (at - ahead) + 1, 2 * end + 2, sizes[i]) for (i, at), end in zip(reads, ends)], 4 * n


@settings(max_examples=150, derandomize=True, deadline=None)
@given(st.lists(st.integers(0, 500), min_size=2, max_size=9), st.integers(0, 3), st.integers(0, 8))
def test_rounds_with_kept_units_cost_at_most_twice_the_bound(sizes: list[int], ahead: int, kept: int) -> None:
    ahead = min(ahead, 2 * len(sizes) - 2)
    most = (2 * len(sizes) - 1 - ahead) // 2  # units of which the first is still kept for less than a round
    lives, period = up_and_down(sizes, ahead, set(range(len(sizes) - min(kept, most), len(sizes))))
    assert lowest_bound(lives, period) <= allocate(lives, period)[1] <= 2 * lowest_bound(lives, period)


@pytest.mark.parametrize("count", [1, 4, 16])
def test_nested_lifetimes_cost_what_is_live(count: int) -> None:
    """Units that are all kept, freed in the reverse order."""
    lives = [Lifetime(2 * i, 4 * count - 2 * i, 100 + i) for i in range(count)]
    assert allocate(lives, 6 * count)[1] == lowest_bound(lives, 6 * count)


def test_placing_the_highest_first_improves_first_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nested units between sliding ones: found only after some tries."""
    lives, period = up_and_down([64] * 12, 4, {8, 9, 10, 11})

    def units(tries: int) -> float:
        monkeypatch.setattr(interval_alloc, "TRIES", tries)
        return allocate(lives, period)[1] / 64

    assert lowest_bound(lives, period) / 64 < units(40) == 6 < units(0)


def test_where_first_fit_begins_matters_for_uneven_units(monkeypatch: pytest.MonkeyPatch) -> None:
    chance = random.Random(17)
    lives, period = sliding([64 * chance.randint(1, 6) for _ in range(24)], 4)

    def nbytes(turns: int) -> int:
        monkeypatch.setattr(interval_alloc, "TURNS", turns)
        return allocate(lives, period)[1]

    assert nbytes(16) < nbytes(0)


def test_a_lifetime_as_long_as_the_period_is_refused() -> None:
    with pytest.raises(AssertionError):
        allocate([Lifetime(0, 4, 1)], 4)
    with pytest.raises(AssertionError):
        allocate([Lifetime(1, 0, 1)], 4)
