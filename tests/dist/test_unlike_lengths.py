"""Benchmarks with samples of unlike lengths, on two CPU processes over gloo: all engines do the same work and learn alike."""

import argparse
from typing import Any

import pytest
import torch

from benchmarks import engines, models, samples
from benchmarks.lengths import Lengths, computed
from benchmarks.progress import Progress
from benchmarks.rank import Measurement

CPU = torch.device("cpu")


def measured(rank: int, world: int, name: str, accumulation: int, packed: bool) -> tuple[list[dict], list[list[list[int]]]]:
    """The rows of a measurement, and the lengths that this rank drew."""
    import deepspeed

    deepspeed.init_distributed("gloo")
    flags = {"compile": False, "cpu": True, "no_host_sync": not packed, "packed": packed, "jitter_ms": 0.0, "layer_ms": 0.0}
    sizes = {"micro_batch": 1, "sequence": 64, "steps": 3, "windows": 2, "warmup": 2, "accumulation": accumulation}
    others = {"model": "llama-tiny", "lengths": "16:1", "build": "full", "bandwidth_limit": 0.0, "trace": "", "commit": "none"}
    m = Measurement(argparse.Namespace(**flags, **sizes, **others), name, 0, CPU, Progress(3, shown=False))
    return m.run(), m.drawn


@pytest.mark.sampled(2)
@pytest.mark.parametrize("accumulation, packed", [(1, False), (4, True)])
def test_all_engines_do_the_same_work_and_learn_alike(pool, accumulation, packed):
    names = ["ddp", "fsdp2", "fsdp2-prefetch2-keep", "zero3-leaf", "cdp-v2"]
    by_name = {name: pool.run(2, measured, name, accumulation, packed) for name in names}
    drawn = [lengths for _, lengths in by_name["ddp"]]
    first = len(drawn[0]) - 6
    assert drawn[0][first:] != drawn[1][first:] and drawn[0][:first] == drawn[1][:first], "ranks differ, but not in the warm-up"
    windows = {n for of_rank in drawn for step in of_rank[first:] for one in step for n in computed(one, packed)}
    warm = [n for step in drawn[0][:first] for one in step for n in computed(one, packed)]
    assert windows <= set(warm) and warm[0] == 64
    for name, of_ranks in by_name.items():
        assert [lengths for _, lengths in of_ranks] == drawn, name
        for window, row in enumerate(of_ranks[0][0]):
            steps = range(first + 3 * window, first + 3 + 3 * window)
            tokens = [sum(sum(n) for t in steps for n in of_rank[t]) for of_rank in drawn]
            assert row["tokens_by_rank"] == " ".join(map(str, tokens)), name
            assert row["tokens_per_s_per_gpu"] == pytest.approx(sum(tokens) / 2 / (3 * row["step_ms"] / 1000), rel=1e-3, abs=0.06)
            assert row["loss"] == pytest.approx(by_name["ddp"][0][0][window]["loss"], abs=0.01), name
            assert (row["accumulation"], row["lengths"]) == (accumulation, "16:1 packed" if packed else "16:1")


def trained(rank: int, world: int, name: str, accumulation: int) -> tuple[list[float], bool]:
    """Losses of four steps of unlike lengths, and whether a cyclic engine kept the plan that it began with."""
    import deepspeed

    deepspeed.init_distributed("gloo")
    config = models.configuration("llama-tiny", host_sync=False)
    step, engine = engines.make(engines.Job(name, config, CPU, torch.float32, 1, accumulation=accumulation))
    random, drawer = torch.Generator().manual_seed(rank), Lengths(16, 1.0, 64)
    runtime: Any = getattr(engine, "_runtime", None)
    before = runtime and runtime.executor.plan
    losses = []
    for t in range(4):
        lengths = [drawer.draw(rank, t, m) for m in range(accumulation)]
        losses.append(float(step(*(samples.micro_batch(n, False, 256, random) for n in lengths)).detach()))
    kept = runtime is None or runtime.executor.plan is before
    if engine is not None:
        engine.destroy()
    engines.clean()
    return losses, kept


@pytest.mark.slow
@pytest.mark.parametrize("accumulation", [1, 4])
def test_variants_of_fsdp2_train_as_fsdp2_does_and_a_ring_keeps_its_plan(pool, accumulation):
    want = pool.run(2, trained, "fsdp2", accumulation)
    assert want[0][0][0] != want[0][0][3]
    for name in ("fsdp2-prefetch2", "fsdp2-keep", "fsdp2-prefetch2-keep"):
        for (got, _), (plain, _) in zip(pool.run(2, trained, name, accumulation), want):
            assert got == pytest.approx(plain, abs=1e-5), name
    for (got, kept), (plain, _) in zip(pool.run(2, trained, "cdp-v2", accumulation), want):
        assert kept and got[0] == pytest.approx(plain[0], abs=1e-5) and got == pytest.approx(plain, abs=0.01)
