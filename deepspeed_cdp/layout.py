"""Offsets for buffers whose lifetimes repeat: offline storage allocation on a circle (design §7). Pure, no torch."""

from collections.abc import Sequence
from typing import NamedTuple

TRIES, FEW = 40, 200  # attempts to improve an order of first fit, and for how many regions at most they are worth the time
ALIGN = 64  # bytes; a cache line, and enough for any dtype's vector loads


def aligned(nbytes: int) -> int:
    """``nbytes`` rounded up to the alignment of every region."""
    return -(-nbytes // ALIGN) * ALIGN


Visit = tuple[int, bool]  # (unit, backward)


class Lifetime(NamedTuple):
    """A region is in use from ``start`` to ``end``, both included, in every period."""

    start: int
    end: int
    nbytes: int


def overlap_in_time(a: Lifetime, b: Lifetime, period: int) -> bool:
    """Whether the two are ever in use at once, in any of their repetitions."""
    # b repeated by k periods meets a  <=>  some k has b.start + k*period <= a.end and a.start <= b.end + k*period
    lowest = -((b.end - a.start) // period)
    return b.start + lowest * period <= a.end


def allocate(lifetimes: Sequence[Lifetime], period: int) -> tuple[tuple[int, ...], int]:
    """Offsets such that regions in use at the same time never overlap, and the bytes needed.

    The best of first fit by start, end, length and size (good for uneven units), each a few times over with the region that
    ended highest placed first; and laps of a ring (good for a sliding window: of n equal regions with L live at once it needs
    room for ceil(n / floor(n / L)), the fewest there can be).

    Args:
        lifetimes: each shorter than ``period``.
    Returns:
        an offset per lifetime, and the size of the buffer.
    """
    assert all(0 <= x.end - x.start < period for x in lifetimes), "a region must be free before its next use"
    items = range(len(lifetimes))
    by_start = sorted(items, key=lambda i: lifetimes[i].start)
    orders = (by_start, sorted(items, key=lambda i: lifetimes[i].end),
              sorted(items, key=lambda i: (lifetimes[i].start - lifetimes[i].end, lifetimes[i].start)),
              sorted(items, key=lambda i: (-lifetimes[i].nbytes, lifetimes[i].start)))
    best = min((_improved(lifetimes, period, order) for order in orders), key=lambda result: result[1])
    return _laps(lifetimes, period, by_start, best[1]) or best


def _improved(lifetimes: Sequence[Lifetime], period: int, order: Sequence[int]) -> tuple[tuple[int, ...], int]:
    best = _first_fit(lifetimes, period, order)
    offsets, tried = best[0], list(order)
    for _ in range(TRIES if 0 < len(tried) <= FEW else 0):
        top = max(tried, key=lambda i: offsets[i] + aligned(lifetimes[i].nbytes))
        if tried[0] == top:
            break
        tried.remove(top)
        tried.insert(0, top)
        offsets, total = _first_fit(lifetimes, period, tried)
        if total < best[1]:
            best = offsets, total
    return best


def _first_fit(lifetimes: Sequence[Lifetime], period: int, order: Sequence[int]) -> tuple[tuple[int, ...], int]:
    offsets = [0] * len(lifetimes)
    placed: list[int] = []
    total = 0
    for i in order:
        size = aligned(lifetimes[i].nbytes)
        taken = sorted((offsets[j], offsets[j] + aligned(lifetimes[j].nbytes)) for j in placed
                       if overlap_in_time(lifetimes[i], lifetimes[j], period))
        at = 0
        for low, high in taken:
            if at + size <= low:
                break
            at = max(at, high)
        offsets[i] = at
        placed.append(i)
        total = max(total, at + size)
    return tuple(offsets), total


def _laps(lifetimes: Sequence[Lifetime], period: int, order: Sequence[int], below: int) -> tuple[tuple[int, ...], int] | None:
    """One after the other, back to the beginning for each of so many laps of about equal bytes; as many as work."""
    sizes = [aligned(x.nbytes) for x in lifetimes]
    live = max((sum(size for x, size in zip(lifetimes, sizes) if overlap_in_time(x, Lifetime(y.start, y.start, 0), period))
                for y in lifetimes), default=0)
    pairs = [(i, j) for n, i in enumerate(order) for j in order[:n] if overlap_in_time(lifetimes[i], lifetimes[j], period)]
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
        if end < below and all(offsets[i] + sizes[i] <= offsets[j] or offsets[j] + sizes[j] <= offsets[i] for i, j in pairs):
            return tuple(offsets), end
    return None


def gates(offsets: Sequence[int], sizes: Sequence[int], releases: Sequence[int] | None = None,
          period: int = 0) -> tuple[int, ...]:
    """For each item, the release that lets the next message of this item land: its *credit*.

    Items are used in index order, over and over; item i of this repetition is number i, of the one before number i - n. The gate
    of i is the latest release of an earlier item that shares bytes with it (itself one repetition ago at the earliest), made
    monotone so that posts of a stream keep the order of its messages.

    Args:
        releases: when each item is released, as a number in a repetition of ``period`` releases; default: in index order.
    Returns:
        numbers of releases, non-decreasing, and periodic (gate of i + n is gate of i, plus ``period``).
    """
    n = len(offsets)
    releases, period = (releases, period) if releases is not None else (range(n), n)
    raw = []
    for i in range(n):
        ends, gate = offsets[i] + aligned(sizes[i]), releases[i] - period
        for j in range(i - n + 1, i):
            k = j % n
            if sizes[i] and sizes[k] and offsets[k] < ends and offsets[i] < offsets[k] + aligned(sizes[k]):
                gate = max(gate, releases[k] - (period if j < 0 else 0))
        raw.append(gate)
    last = max(raw) - period if raw else 0  # the highest gate of the repetition before
    result = []
    for gate in raw:
        last = max(last, gate)
        result.append(last)
    return tuple(result)


# ---- buffers of visits ------------------------------------------------------------------------------------------------------
Lives = dict[Visit, Lifetime]  # in the order of a round


class Layout(NamedTuple):
    """A buffer whose regions come round with every round.

    Attributes:
        items: the visits whose messages land there, in the order of a round.
        offsets: by visit, where its bytes lie.
        lets: by visit's number in a round, the messages that its end lets in: numbers in ``items``, counted on over rounds.
        nbytes: of the buffer.
    """

    items: tuple[Visit, ...]
    offsets: dict[Visit, int]
    lets: dict[int, tuple[int, ...]]
    nbytes: int


def placed(lives: Lives, period: int) -> dict[Visit, int]:
    """Offsets by visit (``allocate``)."""
    return dict(zip(lives, allocate(tuple(lives.values()), period)[0]))


def laid_out(offsets: dict[Visit, int], lives: Lives, releases: Sequence[int], period: int) -> Layout:
    """A layout from offsets.

    Args:
        releases: the number in a round of the visit whose end releases each item; there are ``period`` visits.
    """
    lets: dict[int, list[int]] = {}
    sizes = [x.nbytes for x in lives.values()]
    for number, gate in enumerate(gates([offsets[v] for v in lives], sizes, releases, period)):
        lets.setdefault(gate % period, []).append(number - (gate // period) * len(lives))
    end = max((offsets[v] + aligned(life.nbytes) for v, life in lives.items()), default=0)
    return Layout(tuple(lives), offsets, {k: tuple(sorted(v)) for k, v in lets.items()}, end)
