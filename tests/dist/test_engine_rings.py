"""Rings of rings, real processes over gloo: 2 x 2 and 3 x 2 ranks against the oracle, checkpoints across layouts, evaluation."""

import os

import pytest
import torch

from support.checkpoint_work import resumes
from support.engine_work import Job, evaluate, oracle, pack, run_jobs, same, start, train, unpack, whole


def job(rule, ring: int, **options) -> Job:
    return Job(rule=rule, cyclic={"ring_size": ring, **options.pop("cyclic", {})}, **options)


COVER = {
    4: [
        job("cdp-v2", 2, kind="llama-tied", rounds=2, clip=0.3, schedule="warmup", eval_after=(2,), correction="predict"),
        job("cdp-v1", 2, kind="conv", clip=0.3, optimizer="groups", schedule="lambda", barriers=True, correction="extrapolate"),
        job("dp", 2, kind="mlp", optimizer="sgd", flush_after=(2,)),
        job("cdp-v2", 1, kind="mlp", optimizer="sgd"),
        job("cdp-v2", 2, kind="llama-tied", bf16=True, clip=0.5, cyclic={"warmup_steps": 2}, correction="predict"),
    ],
    6: [
        job("cdp-v2", 2, kind="mlp", optimizer="sgd", clip=0.3, barriers=True),  # three rings of two
        job("cdp-v2", 3, kind="rooted", rounds=2, clip=0.2, optimizer="groups", style="accelerate"),
    ],
}  # two of three


@pytest.mark.sampled(3)
@pytest.mark.parametrize("world", COVER)
def test_every_weight_and_loss_equals_the_oracle(pool, world):
    jobs = COVER[world]
    results = pool.run(world, run_jobs, jobs, timeout=400)
    for at, one in enumerate(jobs):
        ranks = [result[at] for result in results]
        assert len(ranks[0]["stages"]) == one.cyclic["ring_size"]
        want = oracle(one, ranks[0]["stages"], world)
        assert {place: value for r in ranks for place, value in r["losses"].items()} == want.losses, one
        for rank, result in enumerate(ranks):
            same(unpack(result["state"]), {**want.masters, **(want.buffers[rank] if one.kind == "conv" else {})})
        assert all(r["norm"] == pytest.approx(want.norms[-1], rel=1e-5) for r in ranks if r["norm"] == ranks[-1]["norm"])


def test_resuming_is_bitwise_continuing(pool, tmp_path):
    """Batch norm's buffers differ between all four ranks."""
    jobs = [
        job("cdp-v2", 2, kind="conv", clip=0.3, schedule="warmup"),
        job("cdp-v1", 2, kind="mlp", optimizer="sgd", cyclic={"warmup_steps": 4}),
    ]
    pool.run(4, resumes, jobs, str(tmp_path), timeout=240)
    saved = os.listdir(tmp_path / "0" / "global_step3")
    assert sorted(f for f in saved if f.startswith("stage")) == ["stage_000.safetensors", "stage_001.safetensors"]


def save(rank: int, world: int, one: Job, folder: str) -> bytes:
    engine = start(one, world)
    train(engine, one, rank, 0, 3)
    engine.save_checkpoint(folder)
    state = pack(whole(engine))
    engine.destroy()
    return state


def load(rank: int, world: int, jobs: list[Job], folder: str) -> list[tuple[bytes, bytes]]:
    results = []
    for one in jobs:
        engine = start(one, world)
        engine.load_checkpoint(folder)
        loaded = pack(whole(engine))
        train(engine, one, rank, 3, 6)
        results.append((loaded, pack(whole(engine))))
        engine.destroy()
    return results


def test_any_layout_reads_what_rings_have_saved(pool, tmp_path):
    saved = unpack(pool.run(4, save, job("cdp-v2", 2, kind="rooted"), str(tmp_path), timeout=120)[0])
    four = pool.run(4, load, [job("dp", r, kind="rooted") for r in (1, 2, 4)], str(tmp_path), timeout=180)
    two = pool.run(2, load, [job("dp", 2, kind="rooted")], str(tmp_path), timeout=120)
    for results in (*four, *two):
        for loaded, _ in results:
            same(unpack(loaded), saved)
    continued = [unpack(after) for _, after in four[0]]
    for other in continued[1:]:  # under dp the layout changes the order of sums only
        same(other, continued[0], 1e-5, 1e-7)
    assert any(not torch.equal(continued[0][n], saved[n]) for n in saved)


def uses(rank: int, world: int, one: Job) -> dict:
    """What scripts ask for between steps, on every rank; and that a step has no collective."""
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param, safe_set_full_fp32_param

    engine = start(one, world)
    train(engine, one, rank, 0, 3)
    named = dict(engine.module.named_parameters())
    name = "blocks.3.0.weight"
    before = safe_get_full_fp32_param(named[name])
    safe_set_full_fp32_param(named[name], before * 2)
    with deepspeed.zero.GatheredParameters([named[name]], modifier_rank=world - 1):
        seen = named[name].detach().clone()
        if rank == world - 1:
            with torch.no_grad():
                named[name].add_(1)
    after = safe_get_full_fp32_param(named[name])
    values = evaluate(engine, one, rank, rank + 1)
    train(engine, one, rank, 3, 6)
    counted = {"collectives": engine._runtime.counters.collectives(), "traffic": engine._runtime.counters.traffic()}
    metrics, text = engine.cyclic_metrics, engine.report()
    state = pack(whole(engine))
    engine.destroy()
    return {
        "double": torch.equal(seen, before * 2),
        "plus": torch.equal(after, before * 2 + 1),
        "values": len(values),
        "state": state,
        "report": text,
        "loss": metrics["loss"],
        "slowest": metrics["slowest"],
        **counted,
    }


def test_access_metrics_and_report(pool):
    results = pool.run(4, uses, job("cdp-v2", 2, kind="mlp"), timeout=120)
    for rank, r in enumerate(results):
        assert r["double"] and r["plus"] and r["values"] == rank + 1
        assert r["collectives"] == 0 and all(row["counted"] == row["closed form"] for row in r["traffic"].values())
        assert r["traffic"]["X"]["counted"] > 0 and r["loss"] is not None
        assert r["slowest"] in ((0, 1) if rank < 2 else (2, 3)), "ranks of its own ring, by their numbers in the world"
        same(unpack(r["state"]), unpack(results[0]["state"]))
        assert "2 such rings" in r["report"] and "X MiB" in r["report"]


def alone(rank: int, world: int, one: Job) -> str:
    """Rank 3, in ring 1, stops; its ring and the other one find it missing."""
    engine = start(one, world)
    train(engine, one, rank, 0, 2)
    if rank == 3:
        raise RuntimeError("on purpose")
    try:
        train(engine, one, rank, 2, 6)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing happened"


def test_a_rank_that_fails_is_named_by_its_number_in_the_world(pool):
    results = pool.run_failing(4, alone, Job("mlp", "cdp-v2", cyclic={"ring_size": 2}, timeout=5.0), timeout=90)
    texts = [str(r) for r in results[:3]]
    assert all(t.startswith("HandoffError: rank ") for t in texts), texts
    assert all(t.startswith(f"HandoffError: rank {r}, step ") for r, t in enumerate(texts)), texts
    assert any("rank 3 " in t.split(":", 2)[2] for t in texts), texts
