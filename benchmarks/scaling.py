"""Predictions for 2, 4 and 8 H100s of one host: ``python -m benchmarks.scaling > FILE``.

Passes take as long as ``compute`` did in the newest recorded run on H100s with this setting; ``compute`` communicates nothing, so
the number of GPUs does not matter. For 8B, passes take their operations at ``Hardware().flops``. At micro-batch 1 the host limits
all engines, also ``compute`` (docs/performance.md), so those rows are unreliable. No row has been measured on 8 GPUs.
"""

import random
from typing import NamedTuple

from benchmarks import models, predict
from deepspeed_cdp.analysis.timing import waves
from deepspeed_cdp.analysis.timing.baselines import baselines
from deepspeed_cdp.analysis.timing.events import simulate
from deepspeed_cdp.analysis.timing.times import Hardware, times

SETTINGS = (("llama-1.3b", 4), ("llama-1.3b", 1), ("llama-3b", 2), ("llama-8b", 1))
RANKS = (2, 4, 8)
SEQUENCE, DELAY = 2048, 0.040


class Expected(NamedTuple):
    """Seconds per step, alone and with each rank late by U(0, DELAY); ``memory``: bytes on the rank with the most."""

    name: str
    ranks: str
    passes: float
    step: float
    late: float
    memory: float | None
    others: dict[str, float]


def passes(name: str, micro_batch: int) -> tuple[float, str]:
    """Seconds of a step's passes alone, and their source."""
    for row in reversed(predict.recorded()):
        if (row.setting["model"], row.setting["micro_batch"]) == (name, str(micro_batch)) and row.compute is not None:
            return row.compute, row.run
    config = predict.planned(name, 2)[2]
    return models.flops_per_token(config, SEQUENCE) * micro_batch * SEQUENCE / Hardware().flops, "operations"


def _title(name: str, micro_batch: int, source: str) -> str:
    return f"{name.removeprefix('llama-').upper()}, micro-batch {micro_batch} (passes: {source})"


def expected(name: str, micro_batch: int, ranks: int) -> Expected:
    """One ring."""
    plan, work, _ = predict.planned(name, ranks)
    compute, source = passes(name, micro_batch)
    given, rng, drawn = times(plan, work, Hardware(), compute=compute), random.Random(0), {}
    late = simulate(plan, given, 40, lambda rank, step: drawn.setdefault((rank, step), rng.uniform(0, DELAY))).period()
    setting = {"model": name, "ranks": str(ranks), "micro_batch": str(micro_batch), "sequence": str(SEQUENCE)}
    memory = predict.memory(predict.Recorded("", setting, compute, 0.0, 0.0))
    sizes = [unit.p_bytes for unit in plan.units]
    sums = [unit.g_bytes for unit in plan.units]
    others = {b.name: b.seconds for b in baselines(work, sizes, sums, ranks, Hardware(), compute)}
    return Expected(_title(name, micro_batch, source), str(ranks), compute, simulate(plan, given).period(), late, memory, others)


def two_rings(name: str, micro_batch: int, ring: int = 4) -> Expected:
    """Two rings of 4 on one host: owners exchange over the same links."""
    plan, work, _ = predict.planned(name, ring)
    compute, source = passes(name, micro_batch)
    given, hardware = times(plan, work, Hardware(), compute=compute), Hardware()
    each = [sum(plan.unit(i).g_bytes for i in plan.members(stage)) for stage in range(ring)]
    units = len(plan.units) / ring
    exchange = [waves.chain(2, nbytes, units, hardware.bandwidth, hardware.latency) for nbytes in each]
    step = waves.simulate(plan.schedule, waves.of_plan(plan, given), 24, 2, exchange).period()
    late = waves.simulate(plan.schedule, waves.of_plan(plan, given), 40, 2, exchange, DELAY).period()
    return Expected(_title(name, micro_batch, source), "2 rings of 4", compute, step, late, None, {})


def table() -> str:
    """Markdown."""
    lines = [
        "| setting | ranks | passes alone | cdp-v2 | of compute-only speed | late by U(0, 40) ms | memory per rank | "
        "lower bounds of others |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, micro_batch in SETTINGS:
        rows = [expected(name, micro_batch, ranks) for ranks in RANKS] + [two_rings(name, micro_batch)]
        for r in rows:
            space = f"{r.memory / 2**30:.1f} GiB" if r.memory else ""
            space += " (more than an H100 has)" if r.memory and r.memory > 80 * 2**30 else ""
            others = ", ".join(f"{k} {1e3 * v:.1f}" for k, v in r.others.items())
            late = f"{1e3 * r.late:.1f} ms"
            both = f"{1e3 * r.passes:.1f} ms | {1e3 * r.step:.1f} ms | {r.passes / r.step:.2f}"
            lines.append(f"| {r.name} | {r.ranks} | {both} | {late} | {space} | {others} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
