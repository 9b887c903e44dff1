"""The simulation against recorded GPU runs (benchmarks/results): within 10 percent of the measured step, or the reason why not.

Inputs are the compute-only time of the same setting in the same file (without delays), the plan that this package makes for
the benchmark's model, and the constants of ``Hardware``, the same for all rows. One of them depends on the run: before the
third, Adam moved 52 bytes per parameter instead of 28 (docs/log.md). Nothing is fitted.

Not predicted, and said so in docs/cli.md:

- micro-batch 1, where the host is the limit: it enqueues hand-offs slower than the GPU works, which the simulation does not
  know. It is 16 to 49 percent too fast there, and the test holds it to being too fast;
- 8B, which has no compute-only row: from operations at 40 percent of the peak, the default, it is 16 percent too slow;
- the first run's ``cdp-v1``, which came after another engine's leftovers in the same process (that run's README).
"""

import random
import statistics
from functools import cache
from pathlib import Path

import pytest
import torch

from deepspeed_cdp.discover import example_of, find_units
from deepspeed_cdp.runtime import Settings, make_plan
from deepspeed_cdp.simulation.events import simulate
from deepspeed_cdp.simulation.times import Hardware, Work, times

pytest.importorskip("transformers")
from benchmarks import models, rows  # noqa: E402


@cache
def planned(name: str, ranks: int):
    module = models.build(models.configuration(name), torch.device("meta"), torch.bfloat16)
    plan, layouts = make_plan(module, frozenset(n for n, _ in module.named_parameters()), Settings(), ranks)
    found = {u.name: u for u in find_units(module, ranks, example_of(module)).units}
    work = [Work(sum(found[path].flops for path in unit.modules), sum(s.shape.numel() for s in layouts[i].trained))
            for i, unit in enumerate(plan.units)]
    return plan, work, module.config


def recorded() -> list[tuple[str, dict[str, str], float | None, float]]:
    """(run, setting, compute-only seconds without delays, measured seconds of cdp-v2), medians of windows."""
    found = []
    for path in sorted(rows.RESULTS.glob("*/results.csv")):
        compute: dict[tuple, float] = {}
        for values, engines in rows.settings(rows.read(path)).items():
            setting = dict(zip(rows.SETTING, values))
            key = tuple(setting[k] for k in ("model", "ranks", "micro_batch", "host_sync"))
            medians = {e: statistics.median(float(r["step_ms"]) for r in rs) / 1e3 for e, rs in engines.items()}
            if not float(setting["jitter_ms"]) and "compute" in medians:
                compute[key] = medians["compute"]
            if "cdp-v2" in medians:
                found.append((path.parent.name, setting, compute.get(key), medians["cdp-v2"]))
    return found


def predicted(run: str, setting: dict[str, str], compute: float | None) -> float:
    plan, work, config = planned(setting["model"], int(setting["ranks"]))
    if compute is None:
        tokens = int(setting["micro_batch"]) * int(setting["sequence"])
        compute = models.flops_per_token(config, int(setting["sequence"])) * tokens / Hardware().flops
    early = run.startswith(("2026-11-27_4xH100_first", "2026-11-28_4xH100_second"))
    given = times(plan, work, Hardware(update_bytes=52 if early else 28), compute=compute)
    jitter, rng, drawn = float(setting["jitter_ms"]) / 1e3, random.Random(0), {}
    if not jitter:
        return simulate(plan, given).period()
    return simulate(plan, given, 60, lambda rank, step: drawn.setdefault((rank, step), rng.uniform(0, jitter))).period()


ROWS = recorded()
SOUND = [row for row in ROWS if row[1]["micro_batch"] != "1"]
HOST_BOUND = [row for row in ROWS if row[1]["micro_batch"] == "1" and row[2] is not None]
WITHOUT_COMPUTE = [row for row in ROWS if row[2] is None]


def name(row) -> str:
    s = row[1]
    late = f"-late{s['jitter_ms']}" if float(s["jitter_ms"]) else ""
    return f"{Path(row[0]).name}-{s['model']}-{s['ranks']}x{s['micro_batch']}{late}"


def test_the_rows_are_there():
    assert len(SOUND) >= 7 and len(HOST_BOUND) >= 2 and len(WITHOUT_COMPUTE) == 1
    assert {row[1]["ranks"] for row in SOUND} == {"2", "4"} and any(float(row[1]["jitter_ms"]) for row in SOUND)


@pytest.mark.parametrize("row", SOUND, ids=name)
def test_within_ten_percent(row):
    run, setting, compute, measured = row
    assert compute is not None
    assert predicted(run, setting, compute) == pytest.approx(measured, rel=0.10)


def test_better_than_compute_alone():
    """The simulation must earn its keep: its mean error is well below that of saying "as long as the passes"."""
    def errors(guess):
        return statistics.mean(abs(guess(*row[:3]) / row[3] - 1) for row in SOUND)

    assert errors(predicted) < 0.5 * errors(lambda run, setting, compute: compute)


@pytest.mark.parametrize("row", HOST_BOUND, ids=name)
def test_where_the_host_is_the_limit_it_is_too_fast(row):
    run, setting, compute, measured = row
    assert compute < predicted(run, setting, compute) < 0.9 * measured


@pytest.mark.parametrize("row", WITHOUT_COMPUTE, ids=name)
def test_without_a_compute_row_operations_come_within_a_fifth(row):
    run, setting, compute, measured = row
    assert predicted(run, setting, compute) == pytest.approx(measured, rel=0.20)
