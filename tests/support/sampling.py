"""``make test`` runs a sample of the cases of each test, another one at each commit; ``make test-all`` runs all of them.

``CDP_TEST_SEED`` chooses the sample; without it everything runs. The Makefile sets it to the commit.
"""

import os
import zlib
from collections import defaultdict
from collections.abc import Iterable
from typing import TypeVar

import pytest

Case = TypeVar("Case")
SEED = os.environ.get("CDP_TEST_SEED", "")
MANY = 4  # cases of a test
LESS = {False: 3, True: 6}  # one in so many runs: by whether a test has many


def chosen(case: str, one_in: int) -> bool:
    """Whether the case is in the sample, which is about one case in ``one_in``."""
    return not SEED or _rank(case) % one_in == 0


def some(cases: Iterable[Case], one_in: int, test: str) -> list[Case]:
    """What one run of a test looks at, of cases that share a run: one in ``one_in`` of them, at least one."""
    every = list(cases)
    if not SEED:
        return every
    ranked = sorted(range(len(every)), key=lambda at: _rank(f"{test} {at}"))
    return [every[at] for at in sorted(ranked[: max(1, len(every) // one_in)])]


def examples(count: int) -> int:
    """Of a property test: fewer in a sample."""
    return max(1, count // 4) if SEED else count


def _rank(case: str) -> int:
    return zlib.crc32(f"{SEED} {case}".encode())


def left_out(items: list[pytest.Item]) -> list[pytest.Item]:
    """Cases that are not in the sample: of each test one case in ``n`` stays if it is marked ``sampled(n)``, else one in LESS.

    Of each test at least one case stays.
    """
    families: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items if SEED else []:
        if not item.get_closest_marker("slow"):
            families[item.nodeid.split("[")[0]].append(item)
    out = []
    for cases in families.values():
        marker = cases[0].get_closest_marker("sampled")
        one_in = marker.args[0] if marker else LESS[len(cases) > MANY]
        out += sorted(cases, key=lambda item: _rank(item.nodeid))[max(1, len(cases) // one_in) :]
    return out
