"""The engine with ``offload_optimizer: cpu``: against engines without it, their checkpoints, and DeepSpeed's own functions."""

import os
from dataclasses import replace
from typing import Any

import pytest
import torch
from deepspeed import utils
from deepspeed.ops.adam import DeepSpeedCPUAdam

from deepspeed_cdp.optim.offload import OffloadedOwner
from support.engine_work import Job, oracle, pack, same, start, train, unpack, whole

ADAMW = {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}}  # without torch_adam: DeepSpeed chooses


def offloaded(job: Job, **more: Any) -> Job:
    """The same job with the optimizer in host memory."""
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0, "offload_optimizer": {"device": "cpu", **more}}
    return replace(job, config={**job.config, "zero_optimization": zero, "zero_force_ds_cpu_optimizer": False})


EVEN = {"partition_method": "parameters"}  # auto weighs what is on GPUs, so offloading moves units between stages
JOBS = [
    Job("mlp", "cdp-v2", 2, clip=0.3, optimizer="groups", schedule="lambda", flush_after=(2,), correction="predict", cyclic=EVEN),
    Job("llama-tied", "cdp-v1", 1, clip=0.5, bf16=True, style="accelerate", correction="extrapolate"),
    Job("rooted", "dp", 1, optimizer="sgd", eval_after=(1, 3)),
]


def compare(rank: int, world: int, jobs: list[Job], folder: str) -> list[str]:
    """Each job without and with offloading: losses and weights; then a checkpoint of either continued by either."""
    for at, job in enumerate(jobs):
        want, losses = {}, {}
        for way in (job, offloaded(job)):
            engine = start(way, world)
            owner = engine._runtime.owner
            assert isinstance(owner, OffloadedOwner) == (way is not job)
            said = train(engine, way, rank, 0, 3)
            engine.save_checkpoint(os.path.join(folder, f"{at}-{way is job}"))
            said |= train(engine, way, rank, 3, 6)
            state = whole(engine)
            for name, p in engine.module.named_parameters():
                full, local = utils.safe_get_full_fp32_param(p), utils.safe_get_local_fp32_param(p)
                assert full.device == local.device == engine.device
                assert torch.equal(full.to(state[name].dtype), state[name])
                if name in owner.masters:
                    assert torch.equal(local, owner.masters[name]) and local.data_ptr() != owner.masters[name].data_ptr()
            engine.destroy()
            want, losses = want or state, losses or said
            assert said == losses
            same(state, want)
        for way, other in ((job, False), (offloaded(job), True)):  # by an engine of the other way
            engine = start(way, world)
            path, _ = engine.load_checkpoint(os.path.join(folder, f"{at}-{other}"))
            assert path
            now = train(engine, way, rank, 3, 6)
            assert all(losses[place] == value for place, value in now.items())
            same(whole(engine), want)
            engine.destroy()
    return []


def test_the_same_as_without_and_either_continues_the_others_checkpoints(pool, tmp_path):
    pool.run(2, compare, JOBS, str(tmp_path), timeout=240)


def writes(rank: int, world: int, job: Job) -> None:
    """What safe_set_* and GatheredParameters write is in the masters, and in what the next forward reads."""
    from deepspeed.runtime.zero import GatheredParameters

    engine = start(job, world)
    owner = engine._runtime.owner
    train(engine, job, rank, 0, 2)
    name, p = next(iter(engine.module.named_parameters()))
    utils.safe_set_full_fp32_param(p, torch.full(p.ds_shape, 0.25))
    utils.safe_set_full_optimizer_state(p, torch.zeros(p.ds_shape), "exp_avg")
    assert torch.equal(utils.safe_get_full_optimizer_state(p, "exp_avg"), torch.zeros(p.ds_shape))
    assert torch.equal(whole(engine)[name], torch.full(p.ds_shape, 0.25, dtype=p.dtype))
    count = utils.safe_get_local_optimizer_state(p, "step")  # DeepSpeed's own optimizers keep a number
    utils.safe_set_local_optimizer_state(p, torch.full_like(count, 40), "step")
    assert utils.safe_get_full_optimizer_state(p, "step") == 40
    with GatheredParameters([p], modifier_rank=0):
        if rank == 0:
            p.data.fill_(0.125)
    assert torch.equal(whole(engine)[name], torch.full(p.ds_shape, 0.125, dtype=p.dtype))
    if name in owner.masters:
        assert torch.equal(owner.masters[name], torch.full(p.ds_shape, 0.125))
    train(engine, job, rank, 2, 4)
    after = utils.safe_get_full_fp32_param(p)
    assert not torch.equal(after, torch.full(p.ds_shape, 0.125)) and (after - 0.125).abs().max() < 0.1
    assert utils.safe_get_full_optimizer_state(p, "step") == 42
    engine.destroy()


def test_writing(pool):
    pool.run(2, writes, offloaded(Job("mlp", "cdp-v2", 1)), timeout=120)


def chosen(rank: int, world: int, job: Job, folder: str) -> dict[str, Any]:
    """Which optimizer DeepSpeed chose, what came of it, and whether its checkpoint continues bit by bit."""
    engine = start(job, world)
    kind = type(engine._runtime.owner.optimizer)
    train(engine, job, rank, 0, 3)
    engine.save_checkpoint(folder)
    train(engine, job, rank, 3, 6)
    state, stages = whole(engine), engine.cyclic_plan.stages
    engine.destroy()
    other = start(job, world)
    other.load_checkpoint(folder)
    train(other, job, rank, 3, 6)
    same(whole(other), state)
    other.destroy()
    return {"chosen": kind is DeepSpeedCPUAdam, "state": pack(state), "stages": stages}


@pytest.mark.slow
def test_adam_in_the_config_is_deepspeeds_for_cpus(pool, tmp_path):
    predicting = Job("mlp", "cdp-v2", 1, clip=0.3, flush_after=(2,), config={"optimizer": ADAMW}, correction="predict")
    job = offloaded(predicting, pin_memory=True)
    results = pool.run(2, chosen, job, str(tmp_path), timeout=240)
    want = oracle(job, results[0]["stages"], 2)
    for result in results:
        assert result["chosen"]
        same(unpack(result["state"]), want.masters, rtol=1e-5, atol=1e-6)


def refused(rank: int, world: int, job: Job) -> str:
    try:
        start(job, world).destroy()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


@pytest.mark.parametrize(
    "zero, words",
    [
        (
            {"offload_optimizer": {"device": "nvme", "nvme_path": "/nowhere"}},
            "ValueError: zero_optimization.offload_optimizer is nvme: not supported in this version; set its device to cpu.",
        ),
        (
            {"offload_optimizer": {"device": "cpu", "ratio": 0.5}},
            "ValueError: zero_optimization.offload_optimizer.ratio is 0.5: an owner updates its stage in one place; "
            "set it to 1.0.",
        ),
        (
            {"offload_optimizer": {"device": "cpu", "super_offload": True}},
            "ValueError: zero_optimization.offload_optimizer.super_offload is",
        ),
        (
            {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}},
            "ValueError: zero_optimization.offload_param is cpu: each rank reads every parameter in every step, so "
            "all of them would cross the bus from host memory; remove it.",
        ),
    ],
)
def test_refusals(pool, zero, words):
    job = Job("mlp", config={"zero_optimization": {"stage": 3, **zero}})
    assert all(text.startswith(words) for text in pool.run(1, refused, job, timeout=60))


def test_a_client_optimizer_needs_deepspeeds_consent(pool):
    """As under ZeRO-3: a torch optimizer of the script's own, unless ``zero_force_ds_cpu_optimizer`` is false."""
    job = offloaded(Job("mlp", optimizer="groups"))
    job.config.pop("zero_force_ds_cpu_optimizer")
    [text] = pool.run(1, refused, job, timeout=60)
    assert "ZeRORuntimeException" in text and "zero_force_ds_cpu_optimizer" in text
