"""The event simulation compared with the recorded runs: ``python -m benchmarks.predict`` prints the table of docs/cli.md.

Its inputs are the recorded compute-only time of the same setting (without delays), this package's plan of the benchmark's
model, and the constants of ``Hardware``, the same for all rows. One of them depends on the run: before the third run, Adam
moved 52 bytes per parameter instead of 28 (docs/log.md). Nothing is fitted. The plan is today's, also for runs whose states
travelled from neighbour to neighbour: passes hid their messages, too. Only their buffers and masters are those of that time.
"""

import random
import statistics
from functools import cache
from typing import Any, NamedTuple

import torch

from benchmarks import models, rows
from deepspeed_cdp.analysis.activations import track
from deepspeed_cdp.analysis.timing.events import simulate
from deepspeed_cdp.analysis.timing.times import Hardware, Work, times
from deepspeed_cdp.model.discover import Example, FoundUnits, example_of, find_units
from deepspeed_cdp.model.make_plan import Settings, make_plan
from deepspeed_cdp.plan.plan import Plan

RUNS = (
    "2026-11-27_4xH100_first",
    "2026-11-28_4xH100_second",
    "2026-11-28_4xH100_third",
    "2026-11-28_4xH100_fourth",
    "2026-11-28_4xH100_fifth",
)  # of one ring on H100s; a new run is added here, and docs/make_cli.py run again
BEFORE_ONE_PASS_ADAM = ("2026-11-27_4xH100_first", "2026-11-28_4xH100_second")
BETWEEN_NEIGHBORS = RUNS  # states travelled from neighbour to neighbour, and every rank had room for every message
BY_FLOPS = RUNS  # stages were balanced so
# GiB of each rank's buffers in those runs, as the plan of that time had them
BUFFERS_THEN = {("llama-1.3b", "2"): 9.06, ("llama-1.3b", "4"): 4.19, ("llama-3b", "4"): 9.50, ("llama-8b", "4"): 24.51}


class Recorded(NamedTuple):
    """Medians of one setting's windows: seconds (``compute`` without delays, None if it was not measured), ``peak`` in bytes."""

    run: str
    setting: dict[str, str]
    compute: float | None
    measured: float
    peak: float

    @property
    def name(self) -> str:
        """For tables and test names."""
        s = self.setting
        late = f", late by U(0, {float(s['jitter_ms']):g}) ms" if float(s["jitter_ms"]) else ""
        return f"{s['model'].removeprefix('llama-').upper()}, micro-batch {s['micro_batch']}, {s['ranks']} ranks{late}"


@cache
def found(name: str) -> FoundUnits:
    """The units of a benchmark's model."""
    module = models.build(models.configuration(name), torch.device("meta"), torch.bfloat16)
    return find_units(module, 1, example_of(module))


@cache
def planned(name: str, ranks: int, method: str = "auto", rounds: int = 1, rule: str = "cdp-v2") -> tuple[Plan, list[Work], Any]:
    """The plan of a benchmark's model by a ``partition_method``, the work of its units, and its config."""
    module = models.build(models.configuration(name), torch.device("meta"), torch.bfloat16)
    settings = Settings(rule, method, rounds=rounds)
    plan, layouts = make_plan(module, frozenset(n for n, _ in module.named_parameters()), settings, ranks, found=found(name))
    units = {u.name: u for u in found(name).units}
    work = [
        Work(sum(units[path].flops for path in unit.modules), sum(s.shape.numel() for s in layouts[i].trained))
        for i, unit in enumerate(plan.units)
    ]
    return plan, work, module.config


def recorded() -> list[Recorded]:
    """Every setting of cdp-v2 in RUNS."""
    found = []
    for path in (rows.RESULTS / run / "results.csv" for run in RUNS):
        compute: dict[tuple, float] = {}
        for values, engines in rows.settings(rows.read(path)).items():
            setting = dict(zip(rows.SETTING, values))
            key = tuple(setting[k] for k in ("model", "ranks", "micro_batch", "host_sync"))
            medians = {e: statistics.median(float(r["step_ms"]) for r in rs) / 1e3 for e, rs in engines.items()}
            if not float(setting["jitter_ms"]) and "compute" in medians:
                compute[key] = medians["compute"]
            if "cdp-v2" in medians and not setting["bandwidth_gb_s"] and setting["compiled"] == "False":
                peak = statistics.median(float(r["peak_gib"]) for r in engines["cdp-v2"]) * 2**30
                found.append(Recorded(path.parent.name, setting, compute.get(key), medians["cdp-v2"], peak))
    return found


def method_of(row: Recorded) -> str:
    """The ``partition_method`` of the row's time."""
    return "flops" if row.run in BY_FLOPS else "auto"


def predicted(row: Recorded) -> float:
    """Simulated seconds per step."""
    plan, work, config = planned(row.setting["model"], int(row.setting["ranks"]), method_of(row))
    compute, sequence = row.compute, int(row.setting["sequence"])
    if compute is None:
        compute = models.flops_per_token(config, sequence) * int(row.setting["micro_batch"]) * sequence / Hardware().flops
    early = row.run in BEFORE_ONE_PASS_ADAM
    given = times(plan, work, Hardware(update_bytes=52 if early else 28), compute=compute)
    jitter, rng, drawn = float(row.setting["jitter_ms"]) / 1e3, random.Random(0), {}
    if not jitter:
        return simulate(plan, given).period()
    return simulate(plan, given, 60, lambda rank, step: drawn.setdefault((rank, step), rng.uniform(0, jitter))).period()


@cache
def activations(name: str, micro_batch: int, sequence: int) -> int:
    """Bytes that a micro-batch saves for its backward."""
    module = models.build(models.configuration(name), torch.device("meta"), torch.bfloat16)
    x = torch.zeros(micro_batch, sequence, dtype=torch.long, device="meta")
    return track(module, Example(kwargs={"input_ids": x, "labels": x})).peak


def memory(row: Recorded) -> float:
    """Bytes on the rank with the most: buffers, masters and Adam's state, activations."""
    s = row.setting
    plan, work, _ = planned(s["model"], int(s["ranks"]), method_of(row))
    saved, ranks = activations(s["model"], int(s["micro_batch"]), int(s["sequence"])), range(plan.schedule.ranks)
    owned = [sum(work[i].parameters for i in plan.members(plan.schedule.owned(rank))) for rank in ranks]
    if row.run in BETWEEN_NEIGHBORS:  # with whole masters
        return saved + BUFFERS_THEN[s["model"], s["ranks"]] * 2**30 + 12 * max(owned)
    return saved + max(sum(plan.memory(rank).values()) + 10 * owned[rank] for rank in ranks)


def table() -> str:
    """Markdown: every recorded setting, predicted and measured."""
    lines = [
        "| run | setting | passes alone | predicted | measured | error | memory, predicted | measured |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in recorded():
        guess = predicted(row)
        alone = "not measured" if row.compute is None else f"{row.compute * 1e3:.1f} ms"
        error = f"{100 * (guess / row.measured - 1):+.1f} %"
        both = f"{guess * 1e3:.1f} ms | {row.measured * 1e3:.1f} ms"
        space = f"{memory(row) / 2**30:.1f} GiB | {row.peak / 2**30:.1f} GiB"
        lines.append(f"| {row.run.rpartition('_')[2]} | {row.name} | {alone} | {both} | {error} | {space} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
