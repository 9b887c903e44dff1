"""The benchmark suite from end to end on two CPU processes: that everything works, not how fast anything is."""

import functools
import gc
import math
import os
import re
import subprocess
import sys
import weakref
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from benchmarks import engines, models, phases, rows, run, samples
from support import processes

REPOSITORY = Path(__file__).parents[2]


def bench(out: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """``python -m benchmarks.run`` on two ranks."""
    command = [
        sys.executable,
        "-m",
        "benchmarks.run",
        "--cpu",
        "--micro-batch",
        "1",
        "--steps",
        "2",
        "--windows",
        "2",
        "--warmup",
        "1",
        "--out",
        str(out),
        *arguments,
    ]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")])}
    return processes.run(command, 170, environment, cwd=out.parent)


class Done(NamedTuple):
    """A finished run of the benchmark: its folder and process; what was asked for; the loss of a model that knows nothing."""

    out: Path
    process: subprocess.CompletedProcess[str]
    model: str
    engines: list[str]
    sequence: str
    chance: float


@pytest.fixture(
    scope="module",
    params=[
        ("llama-tiny", "compute,ddp,fsdp2,zero3-leaf,cdp-v2,cdp-v1", "16", 256, ["--sequence", "16"]),
        ("vit-tiny", "compute,fsdp2,cdp-v2", "17", 10, []),
    ],
    ids=lambda p: p[0],
)
def done(request, pool, tmp_path_factory):
    """One run of some engines; the pool has built DeepSpeed's operator before."""
    model, names, sequence, classes, options = request.param
    out = tmp_path_factory.mktemp("bench") / "out"
    process = bench(out, "--models", model, *options, "--engines", names, "--no-host-sync")
    return Done(out, process, model, names.split(","), sequence, math.log(classes))


@pytest.mark.slow
def test_rows_table_and_plots(done):
    out, process, names = done.out, done.process, done.engines
    assert process.returncode == 0, process.stdout + process.stderr
    read = rows.read(out / "results.csv")
    assert [(r["engine"], r["window"]) for r in read] == [(n, str(w)) for n in names for w in range(2)]
    assert (out / "results.csv").read_text().splitlines()[0] == ",".join(rows.FIELDS)
    assert len((out / "results.jsonl").read_text().splitlines()) == 2 * len(names)
    for r in read:
        settings = [r[key] for key in ("model", "ranks", "micro_batch", "sequence", "host_sync")]
        assert settings == [done.model, "2", "1", done.sequence, "False"]
        assert float(r["step_ms"]) > 0 and float(r["tokens_per_s_per_gpu"]) > 0
        assert 0 < float(r["p20_ms"]) <= float(r["p80_ms"]) <= float(r["p99_ms"])
        assert all(r[k] for k in ("python", "torch", "deepspeed", "transformers", "commit", "device", "time"))
    table = (out / "table.md").read_text()
    assert table in process.stdout and all(f"\n| {n} | " in table for n in names)
    assert (out / "time.png").read_bytes().startswith(b"\x89PNG") and "cdp-v2" in (out / "time.svg").read_text()


@pytest.mark.slow
def test_engines_learn_alike(done):
    """The same weights and batches: engines that train have nearly the same loss (bytes are counted where they can be)."""
    read = rows.read(done.out / "results.csv")
    losses = {r["engine"]: float(r["loss"]) for r in read if r["window"] == "1"}
    assert abs(losses.pop("compute") - losses["cdp-v2"]) < 0.1
    assert max(losses.values()) - min(losses.values()) < 0.02 and abs(losses["cdp-v2"] - done.chance) < 0.5
    received = {r["engine"]: r["received_mib_per_step"] for r in read}
    assert received["fsdp2"] == "" and float(received["cdp-v2"]) > 1


def steps(rank: int, world: int, name: str, compiled: bool, model: str = "llama-tiny") -> tuple[list[float], int]:
    """Losses of four steps, and how many graphs were compiled."""
    import deepspeed
    from torch._dynamo.utils import counters

    deepspeed.init_distributed("gloo")
    counters.clear()
    plain = torch.compile
    torch.compile = functools.partial(plain, backend="aot_eager")  # all of it but the seconds of the C++ compiler
    try:
        config, cpu = models.configuration(model, host_sync=False), torch.device("cpu")
        step, engine = engines.make(engines.Job(name, config, cpu, torch.float32, 1, compiled))
    finally:
        torch.compile = plain
    losses = [float(step(batch).detach()) for batch in samples.alike(config, 1, 16, 4, rank, cpu)]
    graphs, breaks = counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())
    if engine is not None:
        engine.destroy()
    engines.clean()
    assert not breaks
    return losses, graphs


def test_engines_that_keep_all_parameters_learn_as_ddp_does(pool):
    """ZeRO-1 and 2, and the cyclic engine under ZeRO-1: the same first loss, and nearly the same later ones."""
    want = [losses for losses, _ in pool.run(2, steps, "ddp", False)]
    for name in run.REPLICAS:
        for got, plain in zip(pool.run(2, steps, name, False), want):
            assert got[0][0] == pytest.approx(plain[0], abs=1e-6) and got[0] == pytest.approx(plain, abs=0.02), name
    assert want[0][3] != want[0][0]


def test_a_vision_transformer_learns_alike_in_all_engines(pool):
    """The same first loss; later ones as DDP's, nearly so under the cyclic delay. ``compute`` learns nothing, which shows."""
    found = {n: [losses for losses, _ in pool.run(2, steps, n, False, "vit-tiny")] for n in ("ddp", "fsdp2", "cdp-v2", "compute")}
    for rank, want in enumerate(found["ddp"]):
        got = {name: losses[rank] for name, losses in found.items()}
        assert [x[0] for x in got.values()] == pytest.approx([want[0]] * 4, abs=1e-5)
        assert got["fsdp2"] == pytest.approx(want, abs=1e-5) and got["cdp-v2"] == pytest.approx(want, abs=0.01)
        assert got["compute"] != pytest.approx(want, abs=0.01)


def parts_of_steps(rank: int, world: int) -> list[str]:
    import deepspeed

    deepspeed.init_distributed("gloo")
    args = phases.parser().parse_args("--cpu --model llama-tiny --sequence 16 --steps 3 --engines compute,zero3,cdp-v2".split())
    return phases.run(args, torch.device("cpu"))


def test_phases_tell_the_parts_of_a_step_and_of_the_walk(pool):
    for rank, lines in enumerate(pool.run(2, parts_of_steps)):
        assert [x.split(":")[0] for x in lines] == [f"rank {rank} {x}" for x in ("compute", "zero3", "cdp-v2", "cdp-v2, actions")]
        for text in lines[:3]:
            step, host = (list(map(float, re.findall(r"[a-z] (\d+\.\d)", part))) for part in text.split(" | ")[:2])
            assert len(host) == 3 and sum(host) == pytest.approx(step[0], rel=0.5, abs=1.0), text
        counts = dict(re.findall(r"([A-Z_]+) (\d+) x", lines[3]))
        owned = {0: {"REDUCE_GRAD": "4", "PULL_PARAM": "6"}, 1: {"PUBLISH_PARAM": "6"}}[rank]  # rank 1 averages in GRAD_NORM
        assert counts.items() >= {"GRAD_NORM": "1", "OPTIMIZER_STEP": "1", "WAIT_PARAM": "14", **owned}.items()
        assert counts.keys() >= {"RECV_GRAD", "SEND_GRAD"}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("model", ["llama-tiny", "vit-tiny"])
@pytest.mark.parametrize("name", ["cdp-v2", "cdp-v2-replicas", "fsdp2"])
def test_compiled_layers_train_as_eager_ones(pool, name, model):
    eager, compiled = (pool.run(2, steps, name, c, model) for c in (False, True))
    assert [graphs for _, graphs in eager] == [0, 0] and [graphs for _, graphs in compiled] == [1, 1], "one graph for all layers"
    for (a, _), (b, _) in zip(eager, compiled):
        assert a == pytest.approx(b, abs=1e-5)


def sharded(rank: int, world: int, name: str) -> tuple[list[float], bool, bool, list[bool]]:
    """Losses of three steps on one batch, whether torch's own linear is in place before and after cleaning, and whether the
    optimizer is still there before and after."""
    import deepspeed

    gc.unfreeze()  # clean() looks through all objects, and workers begin with those imported frozen
    deepspeed.init_distributed("gloo")
    config = models.configuration("llama-tiny", host_sync=False)
    step, engine = engines.make(engines.Job(name, config, torch.device("cpu"), torch.float32, 1, sharded=True))
    losses = [float(step(torch.arange(16)[None]).detach()) for _ in range(3)]
    left = torch.nn.functional.linear is engines.LINEAR
    optimizer = None
    if engine is not None:
        engine.destroy()
        optimizer = weakref.ref(engine.optimizer)
    step = engine = None
    gc.collect()
    there = [optimizer is not None and optimizer() is not None]
    engines.clean()
    there.append(optimizer is not None and optimizer() is not None)
    return losses, left, torch.nn.functional.linear is engines.LINEAR, there


@pytest.mark.slow
def test_models_built_in_shards_train(pool):
    for name, untouched in (("fsdp2", True), ("zero3-leaf", False)):
        for losses, left, cleaned, there in pool.run(2, sharded, name):
            assert 5 < losses[0] < 6 and losses[2] < losses[0], (name, losses)
            assert left == untouched, "ZeRO-3 leaves torch's own linear alone now, so engines.restore() need not undo it"
            assert cleaned
            assert there == [not untouched, False], "ZeRO-3's memory is free again only after engines.clean()"
