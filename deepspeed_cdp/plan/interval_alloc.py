"""Offsets for buffers whose lifetimes repeat: offline storage allocation on a circle (design §7). Pure, no torch."""

import sys
from collections.abc import Sequence
from typing import NamedTuple

TRIES, TURNS = 40, 16  # attempts to improve an order of first fit, and about how many places of the circle it may begin at
PAIRS = 1_500_000  # of regions that attempts may look at, which keeps them to seconds: many regions get fewer
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
    return (b.start - a.start) % period <= a.end - a.start or (a.start - b.start) % period <= b.end - b.start


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
    items, sizes = range(len(lifetimes)), [aligned(x.nbytes) for x in lifetimes]
    near = [_at_once(x, lifetimes, period, i) for i, x in enumerate(lifetimes)]
    live = max(
        (sizes[i] + sum(sizes[j] for j in near[i] if _in_use(lifetimes[j], x.start, period)) for i, x in enumerate(lifetimes)),
        default=0,
    )  # nothing can be smaller
    by_start = sorted(items, key=lambda i: lifetimes[i].start)
    turns = range(0, len(items), len(items) // (_worthwhile(TURNS, items) + 1) + 1)
    turned = min((by_start[k:] + by_start[:k] for k in turns), default=by_start, key=lambda o: _first_fit(sizes, near, o)[1])
    best: tuple[tuple[int, ...], int] | None = None
    for order in (
        by_start,
        turned,
        sorted(items, key=lambda i: lifetimes[i].end),
        sorted(items, key=lambda i: (lifetimes[i].start - lifetimes[i].end, lifetimes[i].start)),
        sorted(items, key=lambda i: (-lifetimes[i].nbytes, lifetimes[i].start)),
    ):
        if best is None or best[1] > live:
            best = min(best or ((), sys.maxsize), _improved(sizes, near, order, live), key=lambda result: result[1])
    return _laps(sizes, near, live, by_start, best[1]) or best


def _in_use(x: Lifetime, time: int, period: int) -> bool:
    return (time - x.start) % period <= x.end - x.start


def _at_once(x: Lifetime, lifetimes: Sequence[Lifetime], period: int, itself: int) -> list[int]:
    """Those of the others that are ever in use when ``x`` is."""
    return [j for j, y in enumerate(lifetimes) if j != itself and overlap_in_time(x, y, period)]


Near = Sequence[Sequence[int]]  # by region, the others that are ever in use when it is


def _worthwhile(attempts: int, regions: Sequence[int]) -> int:
    return min(attempts, PAIRS // max(len(regions), 1) ** 2)


def _improved(sizes: Sequence[int], near: Near, order: Sequence[int], live: int) -> tuple[tuple[int, ...], int]:
    best = _first_fit(sizes, near, order)
    offsets, tried = best[0], list(order)
    for _ in range(_worthwhile(TRIES, tried) if tried and best[1] > live else 0):
        top = max(tried, key=lambda i: offsets[i] + sizes[i])
        if tried[0] == top:
            break
        tried.remove(top)
        tried.insert(0, top)
        offsets, total = _first_fit(sizes, near, tried)
        if total < best[1]:
            best = offsets, total
    return best


def _first_fit(
    sizes: Sequence[int], near: Near, order: Sequence[int], known: Sequence[tuple[int, int]] = ()
) -> tuple[tuple[int, ...], int]:
    places: list[tuple[int, int] | None] = [*known, *[None] * (len(sizes) - len(known))]  # where each region begins and ends
    total = max((end for _, end in known), default=0)
    for i in order:
        at = 0
        for low, high in sorted(place for j in near[i] if (place := places[j]) is not None):
            if at + sizes[i] <= low:
                break
            at = max(at, high)
        places[i] = at, at + sizes[i]
        total = max(total, at + sizes[i])
    return tuple(place[0] for place in places if place), total


def _laps(sizes: Sequence[int], near: Near, live: int, order: Sequence[int], below: int) -> tuple[tuple[int, ...], int] | None:
    """One after the other, back to the beginning for each of so many laps of about equal bytes; as many as work."""
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
            offsets[i] + sizes[i] <= offsets[j] or offsets[j] + sizes[j] <= offsets[i] for i in order for j in near[i]
        ):
            return tuple(offsets), end
    return None


def gates(
    offsets: Sequence[int],
    sizes: Sequence[int],
    releases: Sequence[int] | None = None,
    period: int = 0,
    streams: Sequence[int] | None = None,
) -> tuple[int, ...]:
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
    raw = [
        max([releases[i] - period, *(releases[j] - (period if j > i else 0) for j in others)])
        for i, others in enumerate(_sharing(offsets, sizes))
    ]
    last: dict[int, int] = {}  # by stream, the highest gate so far; at first that of the repetition before
    for stream, gate in zip(streams, raw):
        last[stream] = max(last.get(stream, gate - period), gate - period)
    result = []
    for stream, gate in zip(streams, raw):
        last[stream] = max(last[stream], gate)
        result.append(last[stream])
    return tuple(result)


def _sharing(offsets: Sequence[int], sizes: Sequence[int]) -> list[list[int]]:
    """By item, the others that lie on some of its bytes."""
    found: list[list[int]] = [[] for _ in offsets]
    below: list[int] = []
    for i in sorted((i for i, size in enumerate(sizes) if size), key=lambda i: offsets[i]):
        below = [j for j in below if offsets[i] < offsets[j] + aligned(sizes[j])]
        for j in below:
            found[i].append(j)
            found[j].append(i)
        below.append(i)
    return found


# ---- buffers of visits ------------------------------------------------------------------------------------------------------
Lives = dict[Visit, Lifetime]  # in the order of a round


class Stream(NamedTuple):
    """Messages of one kind that land in a buffer: their lifetimes, and the release in a round that ends each."""

    lives: Lives
    ends: Sequence[int]


class StreamLayout(NamedTuple):
    """Where one stream's messages land, in a buffer whose regions come round with every round.

    Attributes:
        items: the visits whose messages land there, in the order of a round.
        offsets: by visit, where its bytes lie.
        lets: by release, the messages that it lets in: numbers in ``items``, counted on over rounds. Visit number v has three:
            3v + 1 at its end, its parameters are out of use, and 3v + 2, its gradient sum is passed on; and before these 3v, an
            update that comes before its end has used finished sums.
        nbytes: of the buffer.
    """

    items: tuple[Visit, ...]
    offsets: dict[Visit, int]
    lets: dict[int, tuple[int, ...]]
    nbytes: int


EMPTY = StreamLayout((), {}, {}, 0)


def placed(streams: Sequence[Stream], ticks: int) -> tuple[tuple[dict[Visit, int], ...], int]:
    """Offsets for streams that share one buffer, and its bytes.

    Args:
        ticks: how long a round is.
    """
    every = sorted(((life, n, v) for n, s in enumerate(streams) for v, life in s.lives.items()), key=lambda x: x[0].start)
    lifetimes = [life for life, *_ in every]
    offsets, _ = allocate(lifetimes, ticks)
    places: tuple[dict[Visit, int], ...] = tuple({} for _ in streams)
    for (_, n, v), at in zip(every, offsets):
        places[n][v] = at
    return places, max((at + aligned(life.nbytes) for at, life in zip(offsets, lifetimes)), default=0)


def beside(
    streams: Sequence[Stream], places: Sequence[dict[Visit, int]], more: Lives, ticks: int
) -> tuple[dict[Visit, int], int]:
    """Offsets for more messages, in the gaps between others that stay where they are, and the bytes of all.

    First fit, in the order of use, backwards, and by size, whichever is best.
    """
    fixed = [(life, at[v]) for s, at in zip(streams, places) for v, life in s.lives.items()]
    lifetimes = [life for life, _ in fixed] + list(more.values())
    sizes, new = [aligned(x.nbytes) for x in lifetimes], range(len(fixed), len(lifetimes))
    near = [_at_once(x, lifetimes, ticks, i) if i in new else [] for i, x in enumerate(lifetimes)]
    known = [(at, at + aligned(life.nbytes)) for life, at in fixed]
    orders: list[Sequence[int]] = [new, new[::-1], sorted(new, key=lambda i: -sizes[i])]
    offsets, nbytes = min((_first_fit(sizes, near, order, known) for order in orders), key=lambda result: result[1])
    return dict(zip(more, offsets[len(fixed) :])), nbytes


def laid_out(
    streams: Sequence[Stream], places: Sequence[dict[Visit, int]], nbytes: int, releases: int
) -> tuple[StreamLayout, ...]:
    """Layouts of streams with these places in one buffer: which release lets in what.

    Args:
        releases: how many a round has.
    """
    found = [
        (life, number, v, release)
        for number, (lives, ends) in enumerate(streams)
        for (v, life), release in zip(lives.items(), ends)
    ]
    found.sort(key=lambda x: x[0].start)  # in the order of use, also between streams; stable
    credits = gates(
        [places[number][v] for _, number, v, _ in found],
        [life.nbytes for life, *_ in found],
        [release for *_, release in found],
        releases,
        [number for _, number, *_ in found],
    )
    layouts = []
    for number, (lives, _) in enumerate(streams):
        mine = [(v, gate) for (_, n, v, _), gate in zip(found, credits) if n == number]
        assert [v for v, _ in mine] == list(lives), "messages of a stream come in the order of a round"
        lets: dict[int, list[int]] = {}
        for k, (_, gate) in enumerate(mine):
            lets.setdefault(gate % releases, []).append(k - (gate // releases) * len(mine))
        layouts.append(StreamLayout(tuple(lives), dict(places[number]), {k: tuple(sorted(v)) for k, v in lets.items()}, nbytes))
    return tuple(layouts)
