"""Checkpoints of the engine: resuming is bitwise continuing, other rings can read them, damage is named and changes nothing."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from deepspeed_cdp.errors import CheckpointError
from support import models
from support.checkpoint_work import equal, resumes, snapshot
from support.engine_work import Job, pack, same, start, train, unpack, whole

RESUME = [
    Job("mlp", "cdp-v2", 2, optimizer="sgd", schedule="lambda", clip=0.3, correction="predict"),
    Job("conv", "cdp-v1", 1, optimizer="groups", schedule="lambda", clip=0.3, correction="predict"),
    Job("llama-tied", "dp", 1, schedule="warmup", clip=0.3),
    Job("rooted", "cdp-v2", 1, schedule="warmup", clip=0.3),
    Job("llama-tied", "cdp-v1", 2, optimizer="sgd", bf16=True, correction="extrapolate"),
]


def test_resuming_is_bitwise_continuing(pool, tmp_path):
    """Momentum, Adam, schedules, batch norm's buffers, counters, client_state; v1, v2, dp; clipping needs last step's norms."""
    pool.run(3, resumes, RESUME, str(tmp_path), timeout=240)


def save_once(rank: int, world: int, job: Job, folder: str) -> bytes:
    engine = start(job, world)
    train(engine, job, rank, 0, 3)
    engine.save_checkpoint(folder)
    engine.save_checkpoint(folder, tag="named", save_latest=False)
    state = pack(whole(engine))
    engine.destroy()
    return state


def load_elsewhere(rank: int, world: int, jobs: list[Job], folder: str) -> list[tuple[bytes, Any]]:
    results = []
    for job in jobs:
        engine = start(job, world)
        found = engine.load_checkpoint(folder)
        assert found[0] and engine.global_steps == 3
        state, stages = pack(whole(engine)), engine.cyclic_plan.stages
        train(engine, job, rank, 3, 5)
        results.append((state, pack(whole(engine)), stages))
        engine.destroy()
    return results


@pytest.mark.slow
def test_another_ring_rule_or_partition_reads_it(pool, tmp_path):
    job = Job("rooted", "cdp-v2", 1, clip=0.3)
    saved = unpack(pool.run(3, save_once, job, str(tmp_path), timeout=180)[0])
    assert (tmp_path / "latest").read_text() == "global_step3" and (tmp_path / "named").is_dir()
    others = [
        Job("rooted", "cdp-v1", 1, clip=0.3),
        Job("rooted", "dp", 1, clip=0.3),
        Job("rooted", "dp", 1, clip=0.3, cyclic={"units": [f"blocks.{i}" for i in (0, 1, 3, 4)]}),
    ]
    partitions, continued = set(), []
    for world in (2, 3, 4):
        for results in pool.run(world, load_elsewhere, others, str(tmp_path), timeout=180):
            for state, _, stages in results:
                same(unpack(state), saved)
                partitions.add((world, stages))
            continued.append((world, unpack(results[1][1]), unpack(results[2][1])))
    assert len(partitions) > 3
    for _, one, two in continued:  # under dp the partition changes nothing: moments have found their parameters
        same(one, two, 1e-5, 1e-7)


def damaged(rank: int, world: int, job: Job, folder: str) -> dict[str, Any]:
    """Load what is not there, and what is damaged in every way; then the good one."""
    import torch.distributed as dist

    engine = start(job, world)
    train(engine, job, rank, 0, 2)
    engine.flush()
    before, root = snapshot(engine), Path(folder)
    assert engine.load_checkpoint(str(root / "nowhere")) == (None, None)
    with pytest.raises(CheckpointError, match="not-there.*cyclic.json is missing"):  # asked for by name: not silently anew
        engine.load_checkpoint(folder, tag="not-there")
    texts: dict[str, str] = {}
    for name in ("stage_001.safetensors", "buffers_000.safetensors", "client.pt", "cyclic.json"):
        path = root / "global_step3" / name
        good = path.read_bytes()
        flipped = good[: len(good) // 2] + bytes([good[len(good) // 2] ^ 0x10]) + good[len(good) // 2 + 1 :]
        for how, data in (("truncated", good[: len(good) // 2]), ("flipped", flipped), ("missing", None)):
            dist.barrier()
            if rank == 0:
                path.unlink() if data is None else path.write_bytes(data)
            dist.barrier()
            try:
                engine.load_checkpoint(folder)
            except CheckpointError as error:
                texts[f"{name} {how}"] = str(error)
            else:
                texts[f"{name} {how}"] = "loaded"
            dist.barrier()
            if rank == 0:
                path.write_bytes(good)
            dist.barrier()
            assert equal(snapshot(engine), before), (name, how)
    assert engine.load_checkpoint(folder)[0]
    losses = train(engine, job, rank, 3, 5)
    engine.destroy()
    return {"texts": texts, "losses": losses}


def test_damage_is_named_and_changes_nothing(pool, tmp_path):
    job = Job("mlp", "cdp-v2", 1, clip=0.3)
    pool.run(2, save_once, job, str(tmp_path), timeout=180)
    for result in pool.run(2, damaged, job, str(tmp_path), timeout=180):
        assert len(result["texts"]) == 12
        for what, text in result["texts"].items():
            assert what.split()[0] in text and "nothing was changed" in text, (what, text)


def fails_while_saving(rank: int, world: int, job: Job, folder: str) -> str:
    """Rank 1 raises in its second save; all learn of it, training goes on, the first checkpoint is still the one loaded."""
    from deepspeed_cdp.checkpoint import saving

    engine = start(job, world)
    train(engine, job, rank, 0, 2)
    engine.save_checkpoint(folder)
    want = whole(engine)
    train(engine, job, rank, 2, 4)
    stock = saving.save_tensors

    def full(*args: Any) -> dict:
        if rank == 1:
            raise OSError(28, "No space left on device")
        return stock(*args)

    saving.save_tensors = full
    try:
        with pytest.raises(CheckpointError) as caught:
            engine.save_checkpoint(folder)
    finally:
        saving.save_tensors = stock
    train(engine, job, rank, 4, 5)
    path, _ = engine.load_checkpoint(folder)
    assert path.endswith("global_step2")
    same(whole(engine), want)
    engine.destroy()
    return str(caught.value)


def killed_while_saving(rank: int, world: int, job: Job, folder: str) -> None:
    """Rank 1 is killed in the middle of a save over the tag that is there."""
    from deepspeed_cdp.checkpoint import saving

    engine = start(job, world)
    engine.load_checkpoint(folder)
    train(engine, job, rank, 2, 3)
    stock = saving.save_tensors

    def kill(directory: str, name: str, *rest: Any) -> dict:
        if rank == 1 and name.startswith("buffers"):
            os.kill(os.getpid(), signal.SIGKILL)
        return stock(directory, name, *rest)

    saving.save_tensors = kill
    engine.save_checkpoint(folder, tag="global_step2")


def test_a_failed_save_leaves_the_last_good_checkpoint(pool, tmp_path):
    job = Job("mlp", "cdp-v2", 1, optimizer="sgd", timeout=4.0)
    for text in pool.run(2, fails_while_saving, job, str(tmp_path), timeout=180):
        assert "rank 1" in text and "No space left on device" in text and "untouched" in text
    good = {p.name: p.read_bytes() for p in (tmp_path / "global_step2").iterdir()}
    started = time.monotonic()
    left, dead = pool.run_failing(2, killed_while_saving, job, str(tmp_path), timeout=180)
    assert dead == -signal.SIGKILL and ("rank(s) [1] missing" in left or "rank 1" in left) and "saving checkpoint" in left, left
    assert time.monotonic() - started < 30
    assert {p.name: p.read_bytes() for p in (tmp_path / "global_step2").iterdir()} == good
    pool.run(2, loads, job, str(tmp_path), timeout=180)


def loads(rank: int, world: int, job: Job, folder: str) -> None:
    engine = start(job, world)
    assert engine.load_checkpoint(folder)[0].endswith("global_step2")
    train(engine, job, rank, 2, 4)
    engine.save_checkpoint(folder)  # over the remains of the save that was killed
    assert engine.load_checkpoint(folder)[0].endswith("global_step4")
    engine.destroy()


def exports(rank: int, world: int, jobs: list[Job], folder: str) -> None:
    for job in jobs:
        engine = start(job, world)
        train(engine, job, rank, 0, 2)
        path = os.path.join(folder, job.kind)
        engine.save_checkpoint(path)
        state = whole(engine)
        assert engine.save_16bit_model(path, "weights.bin")
        import torch.distributed as dist

        dist.barrier()
        saved = torch.load(os.path.join(path, "weights.bin"), weights_only=True)
        buffers = {n for n, _ in engine.module.named_buffers()} if rank else set()  # rank 0's: each rank has its own batch norm
        assert saved.keys() == state.keys() and all(torch.equal(saved[k], state[k]) for k in state.keys() - buffers), job
        gathered = engine._zero3_consolidated_16bit_state_dict()
        assert (gathered is None) == (rank != 0)
        if rank == 0:
            assert gathered.keys() == state.keys() and all(torch.equal(gathered[k], state[k]) for k in state)
        fresh = models.build(job.kind)
        fresh.load_state_dict(state)  # strict: tied names, frozen ones and buffers are all there
        without = engine.module_state_dict(exclude_frozen_parameters=True)
        frozen = {n for n, p in engine.module.named_parameters() if not p.requires_grad}
        assert state.keys() - without.keys() == frozen and bool(frozen) == (job.kind == "rooted")
        train(engine, job, rank, 2, 3)
        engine.destroy()

        module_only = start(job, world)
        found, _ = module_only.load_checkpoint(path, load_module_only=True)
        assert found and module_only.global_steps == 0 and not module_only._runtime.owner.optimizer.state
        same(whole(module_only), state)
        module_only.destroy()


def test_exports_and_load_module_only(pool, tmp_path):
    gather = {"zero_optimization": {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True}}
    jobs = [Job(kind, "cdp-v2", config=gather, bf16=kind == "llama-tied") for kind in ("rooted", "conv", "llama-tied")]
    pool.run(2, exports, jobs, str(tmp_path), timeout=240)
