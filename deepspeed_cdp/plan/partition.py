"""Groups units into stages by their costs.

A stage is a contiguous run of units. Each rank reserves memory for the largest stage, and a pipeline runs at the pace of its
slowest one, so a partition minimizes the largest stage. Among those partitions it is the most even one.
"""

import math
import re
from bisect import bisect_left
from collections.abc import Sequence
from fractions import Fraction
from itertools import pairwise

METHODS = ("parameters", "uniform", "type:REGEX", "flops")


def _exact(costs: Sequence[float]) -> list[int]:
    """The costs times their common denominator: integers, so that sums and comparisons are exact."""
    fractions = [Fraction(cost) for cost in costs]
    scale = math.lcm(*(f.denominator for f in fractions))
    return [int(f * scale) for f in fractions]


def _smallest_maximum(prefix: list[int], first: Sequence[int]) -> list[list[int]]:
    """most[k][j]: the smallest possible largest sum when the first j costs form k+1 parts (j >= first[k + 1]; else 0).

    Args:
        first: by number of parts, their smallest boundary.
    """
    count = len(prefix) - 1
    most = [list(prefix)]
    for k in range(1, len(first) - 1):
        last, row = most[-1], [0] * (count + 1)
        for j in range(first[k + 1], count + 1):
            # last[i] grows with i, prefix[j] - prefix[i] shrinks: the best i is at their crossing, or just before it
            i = bisect_left(range(j), True, first[k], j - 1, key=lambda i: last[i] >= prefix[j] - prefix[i])
            row[j] = max(last[i], prefix[j] - prefix[i])
            if i > first[k]:
                row[j] = min(row[j], max(last[i - 1], prefix[j] - prefix[i - 1]))
        most.append(row)
    return most


def contiguous(costs: Sequence[float], parts: int, least: Sequence[int] = ()) -> tuple[int, ...]:
    """Cuts `costs` into `parts` contiguous non-empty parts with the smallest largest sum, then the smallest sum of squares.

    Args:
        costs: one finite cost >= 0 per item, in order; floats are exact fractions.
        parts: number of parts, >= 1.
        least: boundaries b[1] to b[parts - 1] are at least these, as far as every part can have an item.

    Returns:
        parts + 1 boundaries b: part s holds items b[s] to b[s+1] - 1; b[0] = 0, b[parts] = len(costs).

    Raises:
        ValueError: fewer costs than parts.

    Example: contiguous([1, 1, 1, 3], 2) == (0, 3, 4)

    Time: O(parts * n log n). The second pass relies on the Monge property of a run's squared sum (F. Yao 1980): the best
    last cut moves right as the prefix grows. The property still holds if runs above the allowed maximum cost infinity.
    """
    count = len(costs)
    assert parts >= 1, f"parts is {parts}"
    if count < parts:
        raise ValueError(f"{count} units cannot fill {parts} stages: use at most {count} ranks, or a model with more layers")
    sizes = _exact(costs)
    assert min(sizes) >= 0, "a cost is negative"
    prefix = [0]
    for size in sizes:
        prefix.append(prefix[-1] + size)
    first = [0]  # by number of parts, their smallest boundary
    for k in range(1, parts + 1):
        first.append(max(first[-1] + 1, min(least[k - 1], count - parts + k) if k <= len(least) else 0))
    most = _smallest_maximum(prefix, first)
    limit = most[parts - 1][count]

    # squares[j]: the smallest sum of squares of the first j costs in k+1 parts <= limit; None where there is none
    squares: list[int | None] = [p * p if p <= limit else None for p in prefix]
    cuts: list[list[int]] = []
    for k in range(1, parts):
        above, cut = squares, [0] * (count + 1)
        row: list[int | None] = [None] * (count + 1)
        # feasible prefixes of k parts: first[k] .. reach
        reach = max(i for i in range(first[k], count + 1) if most[k - 1][i] <= limit)
        end = max(j for j in range(first[k + 1], count + 1) if most[k][j] <= limit)
        todo = [(first[k + 1], end, first[k], reach)]  # (begin, last, low, high): prefixes begin..last have their best last cut
        while todo:  # in low..high
            begin, last, low, high = todo.pop()
            if begin > last:
                continue
            j = (begin + last) // 2
            start = max(low, bisect_left(prefix, prefix[j] - limit))
            sums = ((above[i], i) for i in range(start, min(high, j - 1) + 1))
            best, at = min((square + (prefix[j] - prefix[i]) ** 2, i) for square, i in sums if square is not None)
            row[j], cut[j] = best, at
            todo += [(begin, j - 1, low, at), (j + 1, last, at, high)]
        squares = row
        cuts.append(cut)

    bounds = [count]
    for cut in reversed(cuts):
        bounds.append(cut[bounds[-1]])
    return (0, *reversed(bounds)) if parts > 1 else (0, count)


def by_memory(sizes: Sequence[float], work: Sequence[float], parts: int) -> tuple[tuple[int, ...], ...]:
    """Item indices of each stage: the largest stage in memory is as small as possible.

    Ranks of a ring compute all stages, so a stage may take longer than another. But rank r reads stage N-1-r as soon as the rank
    behind it all has ended it, so the first stages must last: any s of them have at least half of s/N of the work.

    Args:
        sizes, work: of each item.
        parts: the number of stages N.

    Raises:
        ValueError: fewer items than stages.
    """
    done, exact = [0], _exact(work)
    for cost in exact:
        done.append(done[-1] + cost)
    least = [bisect_left(done, s * done[-1], key=lambda x: 2 * parts * x) for s in range(1, parts)]
    return tuple(tuple(range(a, b)) for a, b in pairwise(contiguous(sizes, parts, least)))


def assign(names: Sequence[str], costs: Sequence[float], parts: int, method: str) -> tuple[tuple[int, ...], ...]:
    """Item indices of each stage, by one of PipelineModule's methods.

    Args:
        names: class name of each item, for `type:REGEX` (searched case-insensitively).
        costs: of each item, for `parameters` (element counts) and `flops`; `uniform` and `type:` ignore it.
        parts: the number of stages.
        method: `parameters`, `uniform`, `type:REGEX` or `flops`.

    Raises:
        ValueError: unknown method, a REGEX that is invalid or matches nothing, fewer items than stages.
    """
    word, _, pattern = method.partition(":")
    word = word.strip().lower()
    if word == "uniform" and not pattern:
        costs = [1] * len(names)
    elif word == "type" and pattern:
        try:
            expression = re.compile(pattern, re.IGNORECASE)
        except re.error as error:
            raise ValueError(f"cyclic.partition_method is {method!r}, whose REGEX is invalid ({error}): correct it") from None
        costs = [1 if expression.search(name) else 0 for name in names]
        if not any(costs):
            known = ", ".join(sorted(set(names)))
            raise ValueError(f"cyclic.partition_method is {method!r}, which matches no unit: match one of the classes {known}")
    elif word not in ("parameters", "flops") or pattern:
        allowed = ", ".join(("auto", *METHODS))
        raise ValueError(f"cyclic.partition_method is {method!r}, but must be one of {allowed}: use one of these")
    bounds = contiguous(costs, parts)
    return tuple(tuple(range(a, b)) for a, b in pairwise(bounds))


def merged(sizes: Sequence[int], least: int) -> tuple[tuple[int, ...], ...]:
    """Groups of neighbouring items; each group but the last has a total size of at least ``least``."""
    groups: list[list[int]] = []
    total = least
    for i, size in enumerate(sizes):
        if total >= least:
            groups.append([])
            total = 0
        groups[-1].append(i)
        total += size
    return tuple(map(tuple, groups))
