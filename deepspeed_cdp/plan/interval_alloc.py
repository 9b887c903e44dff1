"""Offsets in a buffer whose contents repeat every round: offline storage allocation on a circle. windows.py uses it."""

import sys
from collections.abc import Sequence
from typing import NamedTuple

TRIES, TURNS = 40, 16  # attempts to improve an order of first fit; starting points on the circle to try
PAIRS = 1_500_000  # pairs of regions that attempts may compare, so that a large model takes seconds
ALIGN = 64  # bytes: a cache line, enough for any dtype's vector loads


def aligned(nbytes: int) -> int:
    """``nbytes`` rounded up to the alignment of every region."""
    return -(-nbytes // ALIGN) * ALIGN


class Lifetime(NamedTuple):
    """A region in use from ``start`` to ``end``, both included, in every period."""

    start: int
    end: int
    nbytes: int


def overlap_in_time(a: Lifetime, b: Lifetime, period: int) -> bool:
    """Whether two regions are ever in use at once, in any period."""
    return (b.start - a.start) % period <= a.end - a.start or (a.start - b.start) % period <= b.end - b.start


def allocate(lifetimes: Sequence[Lifetime], period: int) -> tuple[tuple[int, ...], int]:
    """Offsets such that regions in use at the same time never overlap, and the bytes needed.

    The best of two searches. First fit is good for uneven units: by start (from several points of the circle), end, length and
    size, each improved a few times by placing the highest region first. Laps of a ring are good for a sliding window: of n equal
    regions with L live at once they need room for ceil(n / floor(n / L)), the fewest possible.

    Args:
        lifetimes: each shorter than ``period``.
    Returns:
        An offset per lifetime, and the size of the buffer.
    """
    assert all(0 <= x.end - x.start < period for x in lifetimes), "a region must be free before its next use"
    items, sizes = range(len(lifetimes)), [aligned(x.nbytes) for x in lifetimes]
    conflicts = [_conflicting(x, lifetimes, period, i) for i, x in enumerate(lifetimes)]
    live = max(
        (
            sizes[i] + sum(sizes[j] for j in conflicts[i] if _in_use(lifetimes[j], x.start, period))
            for i, x in enumerate(lifetimes)
        ),
        default=0,
    )  # bytes in use at once: a lower bound
    by_start = sorted(items, key=lambda i: lifetimes[i].start)
    turns = range(0, len(items), len(items) // (_worthwhile(TURNS, items) + 1) + 1)
    turned = min((by_start[k:] + by_start[:k] for k in turns), default=by_start, key=lambda o: _first_fit(sizes, conflicts, o)[1])
    best: tuple[tuple[int, ...], int] = (), sys.maxsize
    for order in (
        by_start,
        turned,
        sorted(items, key=lambda i: lifetimes[i].end),
        sorted(items, key=lambda i: (lifetimes[i].start - lifetimes[i].end, lifetimes[i].start)),
        sorted(items, key=lambda i: (-lifetimes[i].nbytes, lifetimes[i].start)),
    ):
        if best[1] > live:
            best = min(best, _improved(sizes, conflicts, order, live), key=lambda result: result[1])
    return _laps(sizes, conflicts, live, by_start, best[1]) or best


def _in_use(x: Lifetime, time: int, period: int) -> bool:
    return (time - x.start) % period <= x.end - x.start


def _conflicting(x: Lifetime, lifetimes: Sequence[Lifetime], period: int, itself: int) -> list[int]:
    """Indices of the other regions that are ever in use together with ``x``."""
    return [j for j, y in enumerate(lifetimes) if j != itself and overlap_in_time(x, y, period)]


Conflicts = Sequence[Sequence[int]]  # by region, the others that are ever in use at the same time


def _worthwhile(attempts: int, regions: Sequence[int]) -> int:
    return min(attempts, PAIRS // max(len(regions), 1) ** 2)


def _improved(sizes: Sequence[int], conflicts: Conflicts, order: Sequence[int], live: int) -> tuple[tuple[int, ...], int]:
    best = _first_fit(sizes, conflicts, order)
    offsets, tried = best[0], list(order)
    for _ in range(_worthwhile(TRIES, tried) if tried and best[1] > live else 0):
        top = max(tried, key=lambda i: offsets[i] + sizes[i])
        if tried[0] == top:
            break
        tried.remove(top)
        tried.insert(0, top)
        offsets, total = _first_fit(sizes, conflicts, tried)
        if total < best[1]:
            best = offsets, total
    return best


def _first_fit(sizes: Sequence[int], conflicts: Conflicts, order: Sequence[int]) -> tuple[tuple[int, ...], int]:
    places: list[tuple[int, int] | None] = [None] * len(sizes)  # (begin, end) of each region
    total = 0
    for i in order:
        at = 0
        for low, high in sorted(place for j in conflicts[i] if (place := places[j]) is not None):
            if at + sizes[i] <= low:
                break
            at = max(at, high)
        places[i] = at, at + sizes[i]
        total = max(total, at + sizes[i])
    return tuple(place[0] for place in places if place), total


def _laps(
    sizes: Sequence[int], conflicts: Conflicts, live: int, order: Sequence[int], below: int
) -> tuple[tuple[int, ...], int] | None:
    """Regions one after the other, starting again at offset 0 for each lap of about equal bytes, with as many laps as fit."""
    total = sum(sizes)
    for laps in range(total // live if live else 0, 1, -1):
        if total >= below * laps:
            break
        offsets, at, before, lap = [0] * len(sizes), 0, 0, 0
        for i in order:
            if before * laps // total > lap:
                at, lap = 0, before * laps // total
            offsets[i], at, before = at, at + sizes[i], before + sizes[i]
        end = max(offset + size for offset, size in zip(offsets, sizes))
        if end < below and all(
            offsets[i] + sizes[i] <= offsets[j] or offsets[j] + sizes[j] <= offsets[i] for i in order for j in conflicts[i]
        ):
            return tuple(offsets), end
    return None
