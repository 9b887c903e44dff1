"""What people reported of ZeRO-3 runs here, with the same losses under ``dp`` where stock runs."""

import math
from dataclasses import replace

import pytest

from support.engine_work import Job
from support.reports import REPORTS

JOB = Job("mlp", "dp", timeout=20.0)


def run(rank: int, world: int, at: int, rules: list[str | None]) -> list[list[float]]:
    report = REPORTS[at]
    return [report.script(replace(JOB, rule=rule), rank, world) for rule in rules]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("at", range(len(REPORTS)), ids=[x.source for x in REPORTS])
def test_it_runs(pool, at):
    stock = [] if REPORTS[at].stock else [None]
    for first, *others in pool.run(2, run, at, [*stock, "dp", "cdp-v2"], timeout=120):
        assert first and all(map(math.isfinite, sum(others, first)))
        if stock and not REPORTS[at].differs:
            assert others[0] == pytest.approx(first, rel=1e-5, abs=1e-6)
        elif stock:
            assert others[0] != pytest.approx(first, rel=1e-3)
