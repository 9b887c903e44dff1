"""AutoTP training, real processes over gloo: stock DeepSpeed's weights under dp, the whole model's oracle under every rule."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from support.engine_work import farthest, same, unpack
from support.tensor_work import Job, build, oracle, refused, run_jobs, uses

MAIN = "deepspeed_cdp.cli.main"
CLOSE = dict(rtol=1e-5, atol=1e-5)  # parts of a product are added in another order than the whole one


def pair(cyclic: dict | None = None, **options) -> list[Job]:
    """Stock, and the same script with a cyclic block."""
    return [Job(None, steps=4, **options), Job("dp", steps=4, cyclic=cyclic or {}, **options)]


PAIRS = [
    pair(rounds=2, clip=0.3),
    pair(cyclic={"ring_size": 1}),
    pair(stage=1, clip=0.3),
    pair(stage=2, rounds=2),
    pair(stage=0, clip=0.3),
    pair(rounds=2, clip=0.3, init=True),
    pair(model="tied", clip=0.3),
    pair(model="qwen3", clip=0.3),
]


@pytest.mark.sampled(8)
@pytest.mark.parametrize("jobs", PAIRS)
def test_dp_equals_stock_deepspeed(pool, jobs):
    results = pool.run(4, run_jobs, jobs, timeout=120)
    for theirs, ours in results:
        assert (theirs["class"], ours["class"]) == ("DeepSpeedEngine", "CyclicEngine")
        assert ours["losses"] == pytest.approx(theirs["losses"], rel=1e-5)
        assert theirs["batch"] == ours["batch"] and ours["batch"][1] == 2
        assert theirs["shards"] == ours["shards"] and len(ours["shards"]) >= 28
        known = [norm for norm in ours["norms"] if norm == norm]  # the engine tells a norm one step later, or this step's
        if jobs[0].stage:  # stock DeepSpeed tells none under stage 0
            assert known[-1] == pytest.approx(theirs["norms"][len(known) - 1], rel=1e-5)
        same(unpack(ours["state"]), unpack(results[0][0]["state"]), **CLOSE)


COVER = {
    (4, 2): [
        Job("cdp-v2", rounds=2, clip=0.3, optimizer="groups", eval_after=(2,)),
        Job("cdp-v2"),
        Job("cdp-v1", clip=0.3),
        Job("cdp-v2", cyclic={"delay_correction": "predict"}),
        Job("cdp-v2", cyclic={"delay_correction": "extrapolate", "warmup_steps": 2}, clip=0.3),
        Job("cdp-v2", cyclic={"ring_size": 1}, clip=0.3),  # two families of two rings of one rank
        Job("cdp-v2", stage=1, rounds=3, clip=0.3),
        Job("cdp-v2", model="tied", clip=0.3),
        Job("cdp-v2", model="qwen3", clip=0.3),
        Job("cdp-v2", model="biases", clip=0.3),
    ],
    (2, 2): [Job("cdp-v2", clip=0.3)],  # one group: two rings of one rank, which never average
    (6, 2): [Job("cdp-v2", clip=0.3, optimizer="groups"), Job("cdp-v1")],  # rings of three
    (8, 2): [Job("cdp-v2", clip=0.3, cyclic={"ring_size": 2})],  # two families of two rings of two
}


@pytest.mark.sampled(14)
@pytest.mark.parametrize(("world", "tensor", "job"), [(*case, job) for case, jobs in COVER.items() for job in jobs])
def test_every_weight_and_loss_equals_the_oracle(pool, world, tensor, job):
    ranks = [result[0] for result in pool.run(world, run_jobs, [job], timeout=120)]
    stages, size = ranks[0]["stages"], job.cyclic.get("ring_size", world // tensor)
    rings = world // tensor // size
    assert len(stages) == size
    assert [r["rings"] for r in ranks] == [(w // tensor // size, w // tensor % size, rings) for w in range(world)]
    want = oracle(job, stages, world)
    assert {place: loss for r in ranks for place, loss in r["losses"].items()} == pytest.approx(want.losses, rel=1e-5)
    for w, r in enumerate(ranks):
        same(unpack(r["state"]), want.masters, **CLOSE)
        step, mean, norm, slowest = r["metrics"]
        known = [loss for (t, _, _), loss in want.losses.items() if t == step]
        assert mean == pytest.approx(sum(known) / len(known), rel=1e-5) and norm == pytest.approx(want.norms[step], rel=1e-5)
        assert slowest is None or slowest % tensor == w % tensor, "of its own ring"
        assert r["collectives"] == 0 and not r["any_order"]
    assert all(unpack(r["state"])[n].equal(v) for r in ranks for n, v in unpack(ranks[0]["state"]).items())


def test_resuming_is_bitwise_continuing_and_weights_are_whole(pool, tmp_path):
    job = Job("cdp-v2", rounds=2, optimizer="groups", steps=4, clip=0.3, cyclic={"delay_correction": "predict"})
    results = pool.run(4, uses, job, str(tmp_path), timeout=240)
    shapes = {n: p.shape for n, p in build().named_parameters()}
    for r in results:
        assert r["double"] and r["shapes"] == ((16, 16), (16, 16)), "of the shard"
        same(unpack(r["resumed"]), unpack(r["continued"]))
        assert {n: v.shape for n, v in unpack(r["saved"]).items()} == shapes
        mixed, unlike, without = r["refused"]
        assert "has shards of two saves, those of rank 0 and of rank 1; load another tag" in mixed
        assert unlike.startswith("CheckpointError: ") and "CheckpointError: " in without
        assert "has no folder 'tensor_0" in without and "another size" in without
    written = torch.load(tmp_path / "pytorch_model.bin")
    assert all(v.equal(written[n]) for n, v in unpack(results[0]["saved"]).items())
    assert (tmp_path / "latest").read_text() == "global_step2"
    for member in ("tensor_00_of_02", "tensor_01_of_02"):
        files = sorted(f.name for f in (tmp_path / "global_step2" / member).iterdir() if f.name.startswith("stage"))
        assert files == ["stage_000.safetensors", "stage_001.safetensors"]


def planned(folder: Path, model: str) -> subprocess.CompletedProcess:
    config = {"zero_optimization": {"stage": 3}, "optimizer": {"type": "AdamW"}, "tensor_parallel": {"autotp_size": 2}}
    (folder / "ds_config.json").write_text(json.dumps({**config, "cyclic": {"enabled": True}}))
    command = f"plan --model python:support.cli_models:{model} --ranks 4 --config {folder}/ds_config.json --json"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.run([sys.executable, "-m", MAIN, *command.split()], env=env, capture_output=True, timeout=100, text=True)


@pytest.mark.slow
def test_the_command_line_tells_what_deepspeed_cannot_shard(tmp_path):
    said = planned(tmp_path, "mlp")
    error = json.loads(said.stdout)["error"]
    assert said.returncode == 2 and "autotp_size is 2, but DeepSpeed cannot shard Sequential (Not able to determine" in error


@pytest.mark.slow
@pytest.mark.parametrize("model", ["llama", "tied"])
def test_the_command_line_plans_the_same_shards(pool, tmp_path, model):
    said = planned(tmp_path, {"llama": "llama", "tied": "llama_tied"}[model])
    assert (said.returncode, said.stderr) == (0, ""), said.stdout
    plan = json.loads(said.stdout)
    assert (plan["ranks"], plan["rings"], plan["tensor_parallel"]) == (2, 1, 2)
    for result in pool.run(4, run_jobs, [Job("cdp-v2", model=model, steps=1)], timeout=120):
        assert result[0]["units"] == [(u["name"], u["stage"], u["bytes"]) for u in plan["units"]]


def test_what_cannot_be_used_is_refused(pool):
    for rank, (strided, ring, heads, sequence, decoupled) in enumerate(pool.run(4, refused, timeout=120)):
        assert f"the tensor group of rank {rank} is ranks [{rank % 2}, {rank % 2 + 2}]; allowed are 2 consecutive" in strided
        assert "cyclic.ring_size is 4, which does not divide the 2 data-parallel ranks" in ring
        assert "tensor_parallel.autotp_size is 2, which shards " in heads and "unevenly" in heads
        assert "tensor_parallel.autotp_size is 2: a group of ranks shares layers or a sequence" in sequence
        assert "checkpoint.writer.decoupled is true, but the members" in decoupled


def test_rules_and_clipping_differ():
    """Else no test here could see a rule, or a norm, that is not followed."""
    names = [n for n, _ in build().named_parameters()]
    halves = [names[: len(names) // 2], names[len(names) // 2 :]]
    v2 = oracle(Job("cdp-v2", clip=0.3), halves, 4).masters
    assert farthest(oracle(Job("dp", clip=0.3), halves, 4).masters, v2) > 1e-4
    assert farthest(oracle(Job("cdp-v2", clip=0.31), halves, 4).masters, v2) > 1e-4
