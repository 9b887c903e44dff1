"""AutoTP in worker processes: a script for a Llama, the same for stock DeepSpeed and the cyclic engine."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from deepspeed_cdp.analysis import reference
from deepspeed_cdp.plan.delay_correction import DelayCorrection
from deepspeed_cdp.plan.schedule import threshold
from support.engine_work import here, pack, told
from support.sequence_work import LENGTH, OPTIMIZERS, VOCABULARY, Training, labels_of, sequences


@dataclass(frozen=True)
class Job(Training):
    """One training run with tensor groups of ``tensor`` ranks.

    Attributes:
        model: "llama"; "biases": a Llama with biases; "tied": its head is its embedding, so that AutoTP shards the loss, too;
            "qwen3": with norms of sharded heads, whose gradients DeepSpeed adds up.
    """

    tensor: int = 2
    model: str = "llama"
    stage: int = 3


def build(kind: str = "llama", heads: int = 4) -> nn.Module:
    """Four layers, four heads, two heads of keys and values."""
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(7)
    options = dict(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=4,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        max_position_embeddings=LENGTH,
        tie_word_embeddings=kind == "tied",
        pad_token_id=0,
    )
    if kind == "qwen3":
        return Qwen3ForCausalLM(Qwen3Config(head_dim=4, **options))
    model = LlamaForCausalLM(LlamaConfig(attention_bias=kind == "biases", mlp_bias=kind == "biases", **options))
    for name, p in model.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(p, std=0.1)
    return model


@contextmanager
def own_groups() -> Iterator[None]:
    """DeepSpeed's tensor groups are those of the jobs inside."""
    import deepspeed
    from deepspeed.module_inject import set_autotp_mode
    from deepspeed.utils import groups

    def forget() -> None:
        groups.mpu = groups.mesh_device = None
        groups._TENSOR_MODEL_PARALLEL_GROUP = groups._DATA_PARALLEL_GROUP = groups._MODEL_PARALLEL_GROUP = None

    deepspeed.init_distributed("gloo")
    forget()
    try:
        yield
    finally:
        forget()
        set_autotp_mode(training=False)


def batch(job: Job, step: int, rnd: int, group: int) -> torch.Tensor:
    """The sequences on which a tensor group works."""
    return sequences(step * job.rounds + rnd, group)


def run_jobs(rank: int, world: int, jobs: list[Job]) -> list[dict[str, Any]]:
    """Train each job from its start. All have one size of groups."""
    with own_groups():
        return [run(rank, job) for job in jobs]


def run(rank: int, job: Job) -> dict[str, Any]:
    """Train one job; packed whole state (of stock on rank 0 only), losses by (step, round, group), stages, metrics."""
    engine = start(job)
    losses, norms = train(engine, job, rank)
    ours = job.rule is not None
    state = engine.module_state_dict() if ours else engine._consolidated_16bit_state_dict()
    result = {
        "losses": losses,
        "norms": norms,
        "metrics": [engine.cyclic_metrics[key] for key in ("step", "loss", "grad_norm", "slowest")] if ours else [],
        "batch": (engine.train_batch_size(), engine.dp_world_size),
        "state": pack(state) if state else None,
        "class": type(engine).__name__,
        "stages": engine.cyclic_plan.stages if ours else None,
        "units": [(u.name, u.stage, u.p_bytes) for u in engine._runtime.executor.plan.units] if ours else None,
        "rings": (engine._transport.ring, engine._transport.rank, engine._transport.rings) if ours else None,
        "collectives": engine._runtime.counters.collectives() if ours else None,
        "any_order": engine._runtime.param_hooks.any_order if ours else None,
        "shards": [n for n, p in engine.module.named_parameters() if getattr(p, "tensor_model_parallel", False)],
    }
    engine.destroy()
    return result


def start(job: Job, **given: Any) -> Any:
    """The engine, as a script makes it."""
    import deepspeed
    from deepspeed.utils import groups

    import deepspeed_cdp

    deepspeed_cdp.register()
    groups.mpu = None  # of the job before
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": job.rounds,
        "gradient_clipping": job.clip,
        "zero_optimization": {"stage": job.stage, "stage3_param_persistence_threshold": 0},
        "zero_allow_untested_optimizer": True,
        "tensor_parallel": {"autotp_size": job.tensor},
        **job.config,
    }
    if job.rule is not None:
        block = {"rule": job.rule, "timeout_seconds": 30.0, "delay_correction": "none"}
        config["cyclic"] = {"enabled": True, **block, **job.cyclic}
    model = given.pop("model", None) or build(job.model).to(here())
    if job.init:
        deepspeed.zero.Init(module=model, config_dict_or_path=config)
    optimizer = OPTIMIZERS[job.optimizer](list(model.named_parameters()))
    return deepspeed.initialize(model=model, config=config, optimizer=optimizer, **given)[0]


def train(engine: Any, job: Job, rank: int, first: int = 0) -> tuple[dict[tuple[int, int, int], float], list[float]]:
    """An ordinary loop, in which the members of a group have the same batch.

    Returns:
        losses; gradient norms as the engine tells them after each step, 0 where it tells none.
    """
    losses, norms, group = {}, [], rank // job.tensor
    for step in range(first, job.steps):
        for rnd in range(job.rounds):
            x = batch(job, step, rnd, group).to(here())
            loss = engine(input_ids=x, labels=labels_of(x), use_cache=False).loss
            losses[step, rnd, group] = loss.item()
            engine.backward(loss)
            engine.step()
        norms.append(float(engine.get_global_grad_norm() or 0.0))
        if step in job.eval_after:
            engine.eval()
            with torch.no_grad():
                assert torch.isfinite(engine(input_ids=x, labels=labels_of(x)).loss)
            engine.train()
    return losses, norms


def oracle(job: Job, stages: list[list[str]], world: int) -> reference.Trained:
    """The same job by the single-process reference, of the whole model: a place is a group."""
    return reference.train(
        build(job.model),
        stages,
        threshold(job.rule or "dp", len(stages)),
        lambda step, rnd, group: batch(job, step, rnd, group),
        lambda call, x: call(input_ids=x, labels=labels_of(x), use_cache=False).loss,
        OPTIMIZERS[job.optimizer],
        job.steps,
        rounds=job.rounds,
        clip=job.clip,
        flush_after=job.eval_after,
        warmup_steps=job.cyclic.get("warmup_steps", 0),
        rings=world // job.tensor // len(stages),
        delay_correction=DelayCorrection(job.cyclic.get("delay_correction", "none")),
    )


def uses(rank: int, world: int, job: Job, folder: str) -> dict[str, Any]:
    """A checkpoint, weights for inference, DeepSpeed's functions for parameters, the end, and an engine that continues."""
    import deepspeed
    import torch.distributed as dist
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state, safe_set_full_fp32_param

    with own_groups():
        engine = start(job)
        train(engine, replace(job, steps=2), rank)
        engine.save_checkpoint(folder)
        engine.save_16bit_model(folder)
        saved = pack(engine.module_state_dict())
        train(engine, job, rank, 2)
        continued = pack(engine.module_state_dict())
        p = dict(engine.module.named_parameters())["model.layers.3.mlp.up_proj.weight"]
        before, moments = safe_get_full_fp32_param(p), safe_get_full_optimizer_state(p, "exp_avg")
        safe_set_full_fp32_param(p, before * 2)
        with deepspeed.zero.GatheredParameters([p]):
            double = p.detach().clone()
        train(engine, replace(job, steps=5), rank, 4)
        last, module = safe_get_full_fp32_param(p), engine.module
        engine.destroy()
        with deepspeed.zero.GatheredParameters(list(module.parameters())):
            left = p.detach().clone()
        again = start(job, model=module)
        train(again, replace(job, steps=5), rank, 4)
        again.destroy()
        other = start(job)
        other.load_checkpoint(folder)
        train(other, job, rank, 2)
        resumed = pack(other.module_state_dict())
        other.save_checkpoint(f"{folder}/mixed")
        if rank == 0:
            second = "tensor_01_of_02"
            shutil.rmtree(f"{folder}/mixed/global_step4/{second}")
            shutil.copytree(f"{folder}/global_step2/{second}", f"{folder}/mixed/global_step4/{second}")
        dist.barrier()
        mixed = told(lambda: other.load_checkpoint(f"{folder}/mixed"))
        other.destroy()
        alone = start(replace(job, tensor=1, cyclic={}))
        unlike = told(lambda: alone.load_checkpoint(folder))
        alone.save_checkpoint(f"{folder}/alone")
        alone.destroy()
        third = start(job)
        without = told(lambda: third.load_checkpoint(f"{folder}/alone"))
        third.destroy()
    return {
        "saved": saved,
        "continued": continued,
        "resumed": resumed,
        "shapes": (tuple(before.shape), tuple(moments.shape)),
        "double": torch.equal(double, before * 2) and torch.equal(left, last),
        "refused": (mixed, unlike, without),
    }


def refused(rank: int, world: int) -> list[str]:
    """What engines say of groups and settings that they cannot use."""
    import torch.distributed as dist

    with own_groups():
        strided = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]
        return [
            told(lambda: start(Job(config={"tensor_parallel": {"autotp_size": 2, "tp": {"tp_size": 2, "tp_group": strided}}}))),
            told(lambda: start(Job(cyclic={"ring_size": 4}))),
            told(lambda: start(Job(), model=build(heads=2))),
            told(lambda: start(Job(config={"sequence_parallel_size": 2, "data_parallel_size": 2}))),
            told(lambda: start(Job(config={"checkpoint": {"writer": {"type": "FAST", "decoupled": True}}}))),
        ]
