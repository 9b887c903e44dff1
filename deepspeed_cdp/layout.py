"""Offsets for buffers whose lifetimes repeat: offline storage allocation on a circle (design §7). Pure, no torch."""

from collections.abc import Sequence
from typing import NamedTuple

TRIES, TURNS = 40, 16  # attempts to improve an order of first fit, and about how many places of the circle it may begin at
FEW = 200  # for how many regions at most both are worth the time
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

    The best of first fit by start (from several places of the circle), end, length and size (good for uneven units), each a few
    times over with the region that ended highest placed first; and laps of a ring (good for a sliding window: of n equal regions
    with L live at once it needs room for ceil(n / floor(n / L)), the fewest there can be).

    Args:
        lifetimes: each shorter than ``period``.
    Returns:
        an offset per lifetime, and the size of the buffer.
    """
    assert all(0 <= x.end - x.start < period for x in lifetimes), "a region must be free before its next use"
    items = range(len(lifetimes))
    by_start = sorted(items, key=lambda i: lifetimes[i].start)
    turns = range(0, len(items), len(items) // TURNS + 1) if len(items) <= FEW else ()
    turned = min((by_start[k:] + by_start[:k] for k in turns), default=by_start,
                 key=lambda order: _first_fit(lifetimes, period, order)[1])
    orders = (by_start, turned, sorted(items, key=lambda i: lifetimes[i].end),
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
          period: int = 0, streams: Sequence[int] | None = None) -> tuple[int, ...]:
    """For each item, the release that lets the next message of this item land: its *credit*.

    Items are used in index order, over and over; item i of this repetition is number i, of the one before number i - n. The gate
    of i is the latest release of an earlier item that shares bytes with it (itself one repetition ago at the earliest), made
    monotone so that posts of a stream keep the order of its messages.

    Args:
        releases: when each item is released, as a number in a repetition of ``period`` releases; default: in index order.
        streams: of each item; default: all of one.
    Returns:
        numbers of releases, non-decreasing in each stream, and periodic (gate of i + n is gate of i, plus ``period``).
    """
    n = len(offsets)
    releases, period = (releases, period) if releases is not None else (range(n), n)
    streams = streams if streams is not None else [0] * n
    raw = []
    for i in range(n):
        ends, gate = offsets[i] + aligned(sizes[i]), releases[i] - period
        for j in range(i - n + 1, i):
            k = j % n
            if sizes[i] and sizes[k] and offsets[k] < ends and offsets[i] < offsets[k] + aligned(sizes[k]):
                gate = max(gate, releases[k] - (period if j < 0 else 0))
        raw.append(gate)
    last: dict[int, int] = {}  # by stream, the highest gate so far; at first that of the repetition before
    for stream, gate in zip(streams, raw):
        last[stream] = max(last.get(stream, gate - period), gate - period)
    result = []
    for stream, gate in zip(streams, raw):
        last[stream] = max(last[stream], gate)
        result.append(last[stream])
    return tuple(result)


# ---- buffers of visits ------------------------------------------------------------------------------------------------------
Lives = dict[Visit, Lifetime]  # in the order of a round


class Layout(NamedTuple):
    """Where one stream's messages land, in a buffer whose regions come round with every round.

    Attributes:
        items: the visits whose messages land there, in the order of a round.
        offsets: by visit, where its bytes lie.
        lets: by release, the messages that it lets in: numbers in ``items``, counted on over rounds. The end of visit number v
            has two: 2v, its parameters are out of use, and 2v + 1, its gradient sum is passed on.
        nbytes: of the buffer.
    """

    items: tuple[Visit, ...]
    offsets: dict[Visit, int]
    lets: dict[int, tuple[int, ...]]
    nbytes: int


def laid_out(streams: Sequence[tuple[Lives, Sequence[int]]], ticks: int, releases: int) -> tuple[Layout, ...]:
    """Layouts of streams that share one buffer.

    Args:
        streams: of each, the lifetimes of its messages in the order of a round, and the release in a round that ends each.
        ticks: how long a round is.
        releases: how many a round has.
    """
    found = [(life, number, v, release) for number, (lives, ends) in enumerate(streams)
             for (v, life), release in zip(lives.items(), ends)]
    found.sort(key=lambda x: x[0].start)  # in the order of use, also between streams; stable
    lifetimes = [life for life, *_ in found]
    offsets, _ = allocate(lifetimes, ticks)
    end = max((at + aligned(life.nbytes) for at, life in zip(offsets, lifetimes)), default=0)
    credits = gates(offsets, [life.nbytes for life in lifetimes], [release for *_, release in found], releases,
                    [number for _, number, *_ in found])
    layouts = []
    for number, (lives, _) in enumerate(streams):
        mine = [(v, at, gate) for (_, n, v, _), at, gate in zip(found, offsets, credits) if n == number]
        assert [v for v, *_ in mine] == list(lives), "messages of a stream come in the order of a round"
        lets: dict[int, list[int]] = {}
        for k, (_, _, gate) in enumerate(mine):
            lets.setdefault(gate % releases, []).append(k - (gate // releases) * len(mine))
        layouts.append(Layout(tuple(lives), {v: at for v, at, _ in mine}, {k: tuple(sorted(v)) for k, v in lets.items()}, end))
    return tuple(layouts)
