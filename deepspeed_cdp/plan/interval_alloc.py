"""Offsets in a buffer whose contents repeat every round: offline storage allocation on a circle.

``allocate`` and ``credit_releases`` know lifetimes only. The rest applies them to the messages of a plan.
"""

import sys
from collections.abc import Sequence
from typing import NamedTuple

from deepspeed_cdp.plan.unit_schedule import Visit

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


def _first_fit(
    sizes: Sequence[int], conflicts: Conflicts, order: Sequence[int], known: Sequence[tuple[int, int]] = ()
) -> tuple[tuple[int, ...], int]:
    places: list[tuple[int, int] | None] = [*known, *[None] * (len(sizes) - len(known))]  # (begin, end) of each region
    total = max((end for _, end in known), default=0)
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


def credit_releases(
    offsets: Sequence[int],
    sizes: Sequence[int],
    releases: Sequence[int] | None = None,
    period: int = 0,
    streams: Sequence[int] | None = None,
) -> tuple[int, ...]:
    """For each item, the release that grants the *credit* for its next message: from then on, the message may land.

    Items are used in index order, over and over: item i of this repetition is number i, item i of the one before is number
    i - n. The next message of item i overwrites everything on its bytes. So its credit comes with the latest release among
    earlier items that share bytes with it (at the earliest, its own release one repetition ago). Credits of a stream are made
    monotone, since they keep the order of its messages.

    Args:
        releases: when each item is released, as a number in a repetition of ``period`` releases; default: in index order.
        streams: the stream of each item; default: the same for all.
    Returns:
        Numbers of releases, non-decreasing in each stream, and periodic: item i + n has that of item i, plus ``period``.
    """
    n = len(offsets)
    releases, period = (releases, period) if releases is not None else (range(n), n)
    streams = streams if streams is not None else [0] * n
    earliest = [
        max([releases[i] - period, *(releases[j] - (period if j > i else 0) for j in others)])
        for i, others in enumerate(_sharing(offsets, sizes))
    ]
    latest: dict[int, int] = {}  # by stream; initially that of the repetition before
    for stream, release in zip(streams, earliest):
        latest[stream] = max(latest.get(stream, release - period), release - period)
    result = []
    for stream, release in zip(streams, earliest):
        latest[stream] = max(latest[stream], release)
        result.append(latest[stream])
    return tuple(result)


def _sharing(offsets: Sequence[int], sizes: Sequence[int]) -> list[list[int]]:
    """By item, the others that share bytes with it."""
    found: list[list[int]] = [[] for _ in offsets]
    below: list[int] = []
    for i in sorted((i for i, size in enumerate(sizes) if size), key=lambda i: offsets[i]):
        below = [j for j in below if offsets[i] < offsets[j] + aligned(sizes[j])]
        for j in below:
            found[i].append(j)
            found[j].append(i)
        below.append(i)
    return found


# ---- messages of a plan -----------------------------------------------------------------------------------------------------
Lifetimes = dict[Visit, Lifetime]  # in the order of a round


class Stream(NamedTuple):
    """Messages of one kind that land in a buffer: their lifetimes, and the release in a round that ends each."""

    lifetimes: Lifetimes
    releases: Sequence[int]


class StreamLayout(NamedTuple):
    """Where one stream's messages land in a buffer that repeats every round.

    Attributes:
        items: the visits that receive a message, in the order of a round.
        offsets: of each visit's bytes.
        credits: by release, the messages that it permits: indices in ``items``, counted on over rounds. Visit number v has three
            releases: 3v (before it: the owner's update has read the finished sums), 3v + 1 (its parameters are out of use), and
            3v + 2 (its gradient sum has been sent).
        nbytes: size of the buffer.
    """

    items: tuple[Visit, ...]
    offsets: dict[Visit, int]
    credits: dict[int, tuple[int, ...]]
    nbytes: int


EMPTY = StreamLayout((), {}, {}, 0)


def assign_offsets(streams: Sequence[Stream], ticks: int) -> tuple[tuple[dict[Visit, int], ...], int]:
    """Offsets for streams that share one buffer, and its size.

    Args:
        ticks: length of a round.
    """
    by_start = sorted(
        ((life, n, v) for n, stream in enumerate(streams) for v, life in stream.lifetimes.items()), key=lambda x: x[0].start
    )
    lifetimes = [life for life, *_ in by_start]
    allocated, _ = allocate(lifetimes, ticks)
    offsets: tuple[dict[Visit, int], ...] = tuple({} for _ in streams)
    for (_, n, v), at in zip(by_start, allocated):
        offsets[n][v] = at
    return offsets, max((at + aligned(life.nbytes) for at, life in zip(allocated, lifetimes)), default=0)


def fill_gaps(
    streams: Sequence[Stream], offsets: Sequence[dict[Visit, int]], more: Lifetimes, ticks: int
) -> tuple[dict[Visit, int], int]:
    """Offsets for more messages in the gaps between ``streams``, whose offsets are given; and the size of the buffer.

    The best first fit of three orders: of use, backwards, and by size.
    """
    fixed = [(life, at[v]) for stream, at in zip(streams, offsets) for v, life in stream.lifetimes.items()]
    lifetimes = [life for life, _ in fixed] + list(more.values())
    sizes, new = [aligned(x.nbytes) for x in lifetimes], range(len(fixed), len(lifetimes))
    conflicts = [_conflicting(x, lifetimes, ticks, i) if i in new else [] for i, x in enumerate(lifetimes)]
    known = [(at, at + aligned(life.nbytes)) for life, at in fixed]
    orders: list[Sequence[int]] = [new, new[::-1], sorted(new, key=lambda i: -sizes[i])]
    found, nbytes = min((_first_fit(sizes, conflicts, order, known) for order in orders), key=lambda result: result[1])
    return dict(zip(more, found[len(fixed) :])), nbytes


def stream_layouts(
    streams: Sequence[Stream], offsets: Sequence[dict[Visit, int]], nbytes: int, releases: int
) -> tuple[StreamLayout, ...]:
    """Layouts of streams that share a buffer of ``nbytes``: their offsets, and which release grants which credits.

    Args:
        releases: number of releases in a round.
    """
    messages = [
        (life, n, v, release)
        for n, (lifetimes, ends) in enumerate(streams)
        for (v, life), release in zip(lifetimes.items(), ends)
    ]
    messages.sort(key=lambda x: x[0].start)  # the order of use over all streams; stable
    granted = credit_releases(
        [offsets[n][v] for _, n, v, _ in messages],
        [life.nbytes for life, *_ in messages],
        [release for *_, release in messages],
        releases,
        [n for _, n, *_ in messages],
    )
    layouts = []
    for number, (lifetimes, _) in enumerate(streams):
        mine = [(v, release) for (_, n, v, _), release in zip(messages, granted) if n == number]
        assert [v for v, _ in mine] == list(lifetimes), "messages of a stream come in the order of a round"
        credits: dict[int, list[int]] = {}
        for k, (_, release) in enumerate(mine):
            credits.setdefault(release % releases, []).append(k - (release // releases) * len(mine))
        layouts.append(
            StreamLayout(tuple(lifetimes), dict(offsets[number]), {k: tuple(sorted(v)) for k, v in credits.items()}, nbytes)
        )
    return tuple(layouts)
