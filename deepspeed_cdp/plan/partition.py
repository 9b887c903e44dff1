"""Groups units into stages by their costs.

A stage is a contiguous run of units. The rank that owns the largest stage needs most memory, and a pipeline runs at the pace of
its slowest one, so a partition minimizes the largest stage. Among those partitions it is the most even one.
"""

import math
import re
from bisect import bisect_left
from collections.abc import Sequence
from fractions import Fraction
from itertools import accumulate, pairwise

METHODS = ("parameters", "uniform", "type:REGEX", "flops")


def _exact(costs: Sequence[float]) -> list[int]:
    """The costs times their common denominator: integers, so that sums and comparisons are exact."""
    fractions = [Fraction(cost) for cost in costs]
    scale = math.lcm(*(f.denominator for f in fractions))
    return [int(f * scale) for f in fractions]


def _boundaries(prefix: list[int], first: Sequence[int], weights: Sequence[int], limit: int) -> list[list[bool]]:
    """By number of parts, the boundaries behind which they can end if each has an item and weighs at most ``limit``.

    Args:
        first: by number of parts, their smallest boundary.
        weights: by part.
    """
    count = len(prefix) - 1
    found = [[True] + [False] * count]
    for k, weight in enumerate(weights):
        before, row, last = found[-1], [False] * (count + 1), -1  # the best last cut is the latest one
        for j in range(1, count + 1):
            last = j - 1 if before[j - 1] else last
            row[j] = last >= 0 and j >= first[k + 1] and weight * (prefix[j] - prefix[last]) <= limit
        found.append(row)
    return found


def contiguous(
    costs: Sequence[float], parts: int, least: Sequence[int] = (), weights: Sequence[int] | None = None
) -> tuple[int, ...]:
    """Cuts `costs` into `parts` contiguous non-empty parts with the smallest largest sum, then the smallest sum of squares.

    Args:
        costs: one finite cost >= 0 per item, in order; floats are exact fractions.
        parts: number of parts, >= 1.
        least: boundaries b[1] to b[parts - 1] are at least these, as far as every part can have an item.
        weights: by part, >= 1; the sum of a part counts so often.

    Returns:
        parts + 1 boundaries b: part s holds items b[s] to b[s+1] - 1; b[0] = 0, b[parts] = len(costs).

    Raises:
        ValueError: fewer costs than parts.

    Example: contiguous([1, 1, 1, 3], 2) == (0, 3, 4)

    Time: O(parts * n log(largest)). The last pass relies on the Monge property of a run's squared sum (F. Yao 1980): the best
    last cut moves right as the prefix grows. The property still holds if runs above the allowed maximum cost infinity.
    """
    count = len(costs)
    assert parts >= 1, f"parts is {parts}"
    if count < parts:
        raise ValueError(f"{count} units cannot fill {parts} stages: use at most {count} ranks, or a model with more layers")
    sizes, weights = _exact(costs), weights or [1] * parts
    assert min(sizes) >= 0, "a cost is negative"
    prefix = [0, *accumulate(sizes)]
    first = [0]
    for k in range(1, parts):
        first.append(max(first[-1] + 1, min(least[k - 1], count - parts + k) if k <= len(least) else 0))
    first.append(count)
    low, high = 0, max(weights) * prefix[-1]  # of the smallest largest part
    while low < high:
        limit = (low + high) // 2
        low, high = (low, limit) if _boundaries(prefix, first, weights, limit)[-1][count] else (limit + 1, high)
    possible = _boundaries(prefix, first, weights, high)

    # squares[j]: the smallest sum of squares of the first j costs in k parts; None where there is none
    squares: list[int | None] = [0] + [None] * count
    cuts: list[list[int]] = []
    for k, weight in enumerate(weights):
        above, cut, ends = squares, [0] * (count + 1), [j for j in range(count + 1) if possible[k + 1][j]]
        squares = [None] * (count + 1)
        todo = [(0, len(ends) - 1, 0, count)]  # (begin, last, low, high): ends[begin] to ends[last] have their best last cut
        while todo:  # in low..high
            begin, last, left, right = todo.pop()
            if begin > last:
                continue
            middle = (begin + last) // 2
            j = ends[middle]
            start = max(left, bisect_left(prefix, prefix[j] - high // weight))
            sums = ((above[i], i) for i in range(start, min(right, j - 1) + 1))
            squares[j], cut[j] = min((x + (weight * (prefix[j] - prefix[i])) ** 2, i) for x, i in sums if x is not None)
            todo += [(begin, middle - 1, left, cut[j]), (middle + 1, last, cut[j], right)]
        cuts.append(cut)

    bounds = [count]
    for cut in reversed(cuts):
        bounds.append(cut[bounds[-1]])
    return tuple(reversed(bounds))


def by_memory(
    sizes: Sequence[float], work: Sequence[float], parts: int, weights: Sequence[int] | None = None
) -> tuple[tuple[int, ...], ...]:
    """Item indices of each stage: the owner that needs most memory needs as little as possible.

    Ranks of a ring compute all stages, so a stage may take longer than another. But rank r reads stage N-1-r as soon as the rank
    behind it all has ended it, so the first stages must last: any s of them have at least half of s/N of the work.

    Args:
        sizes, work: of each item.
        parts: the number of stages N.
        weights: by stage, an owner's memory per size, since owners of some stages keep more copies (``Plan.kept_by_owner``).

    Raises:
        ValueError: fewer items than stages.
    """
    done, exact = [0], _exact(work)
    for cost in exact:
        done.append(done[-1] + cost)
    least = [bisect_left(done, s * done[-1], key=lambda x: 2 * parts * x) for s in range(1, parts)]
    return tuple(tuple(range(a, b)) for a, b in pairwise(contiguous(sizes, parts, least, weights)))


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
