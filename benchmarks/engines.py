"""One way of training per engine name. Each gives ``step(*micro_batches) -> loss`` and an object with ``destroy`` (or None).

A micro-batch is ``input_ids``, which are the labels too, or a dict of the model's arguments. The loss is the last one's.
"""

import functools
import gc
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from benchmarks import fsdp, limited, models
from benchmarks.pauses import Pause

LEARNING_RATE = 1e-5
LINEAR = torch.nn.functional.linear  # torch's own
Batch = torch.Tensor | Mapping[str, torch.Tensor]


def can_shard(name: str) -> bool:
    """Whether the engine can build the model in shards."""
    return name.startswith(("fsdp2", "zero3"))


@dataclass(frozen=True)
class Job:
    """A training job.

    Attributes:
        name: compute, ddp, fsdp2 and its variants (benchmarks/fsdp.py), zero1, zero2, zero3, zero3-leaf, zero3-deepcompile,
            cdp-v1, cdp-v2, cdp-K; cdp-...-replicas: every rank keeps all parameters (under ZeRO stage 1); cdp-...-keep: with
            keep_after_forward; cdp-...-minS: with min_unit_mb S; cdp-...-unfused: gradients are added after the products that
            make them; cdp-...-uncorrected: with delay_correction none; cdp-...-nccl: hand-offs over NCCL even where peer
            copies would do; zero3...-offload, cdp-...-offload: with the optimizer in host memory, stepped by DeepSpeedCPUAdam.
        dtype: of the passes.
        compiled: torch.compile every layer.
        sharded: fsdp2 and zero3 build their shards only (of Llamas); their weights are then not those of the other engines.
        layer_ms: how long each layer sleeps in its forward; in its backward twice that (CPU only).
        sequence: tokens of a row that sleeps so long; other lengths sleep in proportion.
        accumulation: micro-batches per step.
        bandwidth: limit in GB/s of each stream of messages; 0: no limit (cdp engines only).
    """

    name: str
    config: models.Config
    device: torch.device
    dtype: torch.dtype
    micro_batch: int
    compiled: bool = False
    sharded: bool = False
    bandwidth: float = 0.0
    layer_ms: float = 0.0
    accumulation: int = 1
    sequence: int = 0


def make(job: Job) -> tuple[Callable[..., torch.Tensor], Any]:
    """The step function, and the engine if it needs ``destroy``."""
    assert torch.nn.functional.linear is LINEAR, "the engine before has left its own"
    if job.name.startswith("fsdp2"):
        return _fsdp2(job)
    if job.name not in ("compute", "ddp"):
        return _deepspeed(job)
    model = models.build(job.config, job.device, job.dtype)
    _slow_down(job, model)
    _compile(job, model)
    return _compute(model) if job.name == "compute" else _ddp(job, model), None


def _compile(job: Job, model: torch.nn.Module) -> None:
    """Compile the computation of a layer without the hooks around it, which run Python between layers in every engine.

    ``layer.compile()`` would trace the hooks too.
    """
    if job.compiled:
        for layer in models.layers(model):
            layer.forward = torch.compile(layer.forward)


def _slow_down(job: Job, model: torch.nn.Module) -> None:
    """Make layers sleep, so that their duration does not depend on other processes."""
    seconds = job.layer_ms / 1000

    def after(layer: torch.nn.Module, args: Any, output: Any) -> Any:
        hidden = output[0] if isinstance(output, tuple) else output
        mine = seconds * hidden.shape[1] / (job.sequence or hidden.shape[1])
        slow = Pause.apply(hidden, mine, 2 * mine)
        return (slow, *output[1:]) if isinstance(output, tuple) else slow

    for layer in models.layers(model) if job.layer_ms else ():
        layer.register_forward_hook(after)


def _loss(model: Callable, batch: Batch) -> torch.Tensor:
    return model(input_ids=batch, labels=batch).loss if isinstance(batch, torch.Tensor) else model(**batch).loss


def _compute(model: torch.nn.Module) -> Callable:
    """No communication and no optimizer: the upper bound of speed."""

    def step(*batches: Batch) -> torch.Tensor:
        for batch in batches:
            loss = _loss(model, batch)
            loss.backward()
        model.zero_grad(set_to_none=True)
        return loss

    return step


def _adamw(model: torch.nn.Module) -> torch.optim.Optimizer:
    fused = next(model.parameters()).device.type == "cuda"
    return torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=fused)


def _ddp(job: Job, model: torch.nn.Module) -> Callable:
    static = job.accumulation == 1  # no_sync leaves the reducer's first iteration of a static graph unfinished
    wrapped = torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True, static_graph=static)
    return _plain(wrapped, _adamw(wrapped), lambda last: nullcontext() if last else wrapped.no_sync())


def _plain(model: Callable, optimizer: torch.optim.Optimizer, before: Callable[[bool], AbstractContextManager]) -> Callable:
    """``before``: makes the context of a micro-batch, from whether it is the step's last."""

    def step(*batches: Batch) -> torch.Tensor:
        for i, batch in enumerate(batches):
            with before(i == len(batches) - 1):
                loss = _loss(model, batch)
                (loss / len(batches)).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss

    return step


def _fsdp2(job: Job) -> tuple[Callable, Any]:
    """fp32 masters, passes in ``job.dtype``."""
    parts = fsdp.variant(job.name)
    if job.sharded:
        model = models.build(job.config, torch.device("meta"), torch.float32)
    else:
        model = models.build(job.config, job.device, job.dtype).float()
    _slow_down(job, model)
    gather = fsdp.shard(model, list(models.layers(model)), parts, job.dtype)
    if job.sharded:
        rotary = type(model.model.rotary_emb)
        model.to_empty(device=job.device)
        with job.device:
            model.model.rotary_emb = rotary(config=job.config)  # buffers that no checkpoint has: to_empty left them blank
        models.randomize([(p, p.to_local()) for p in model.parameters()], dist.get_rank())
    _compile(job, model)
    return _plain(model, _adamw(model), fsdp.each_micro_batch(model, parts)), gather


def _deepspeed(job: Job) -> tuple[Callable, Any]:
    import deepspeed

    import deepspeed_cdp  # noqa: F401

    name, cuda, offload = job.name.removesuffix("-offload"), job.device.type == "cuda", job.name.endswith("-offload")
    name, over_nccl = name.removesuffix("-nccl"), name.endswith("-nccl")
    name, unfused = name.removesuffix("-unfused"), name.endswith("-unfused")
    name, uncorrected = name.removesuffix("-uncorrected"), name.endswith("-uncorrected")
    if name == "zero3-deepcompile" and not cuda:
        raise ValueError("engine 'zero3-deepcompile' needs CUDA, for which alone DeepSpeed has DeepCompile; use zero3-leaf here")
    cyclic, replicas = name.startswith("cdp-"), name.endswith("-replicas")
    stage = 1 if replicas else int(name[4]) if name.startswith("zero") else 3
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": job.micro_batch,
        "gradient_accumulation_steps": job.accumulation,
        "zero_optimization": {"stage": stage},
        "bf16": {"enabled": job.dtype == torch.bfloat16},
        "optimizer": {"type": "AdamW", "params": {"lr": LEARNING_RATE, **({} if cuda else {"torch_adam": True})}},
        "steps_per_print": 10**9,
        "gradient_clipping": 0.0,
    }  # as the others; DeepSpeed's default is 1.0
    if offload:  # DeepSpeed then takes its Adam for CPUs, and builds it first
        config["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
        config["optimizer"]["params"].pop("torch_adam", None)
    sharded = job.sharded and not cyclic
    with deepspeed.zero.Init(config_dict_or_path=config) if sharded else nullcontext():
        model = models.build(job.config, job.device, job.dtype)
    _slow_down(job, model)
    if sharded:
        models.randomize([(p, p.ds_tensor) for p in model.parameters()], dist.get_rank())
    if cyclic:
        plain, _, merged = name.partition("-min")
        rule = plain.removesuffix("-keep").removesuffix("-replicas")
        config["cyclic"] = {
            "enabled": True,
            "rule": rule if rule in ("cdp-v1", "cdp-v2") else int(rule[4:]),
            "keep_after_forward": plain.endswith("-keep"),
            "min_unit_mb": float(merged or 0),
            "transport": "nccl" if over_nccl else "auto",
            "timeout_seconds": 60,
            "gradient_accumulation_fusion": False if unfused else "auto",
            "delay_correction": "none" if uncorrected else "auto",
        }
        config["zero_allow_untested_optimizer"] = True
        given: dict[str, Any] = {"model_parameters": model.parameters()}
        if not offload:
            del config["optimizer"]
            given = {"optimizer": _adamw(model)}
        with limited.limited(job.bandwidth) if job.bandwidth else nullcontext():
            engine, *_ = deepspeed.initialize(model=model, config=config, **given)
    else:
        if name == "zero3-leaf":
            deepspeed.utils.set_z3_leaf_modules(model, [type(models.layers(model)[0])])
        if name == "zero3-deepcompile":
            config["compile"] = {"deepcompile": True}
        engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    if name == "zero3-deepcompile":
        engine.compile()  # the whole model, whatever ``job.compiled`` says
    else:
        _compile(job, model)

    def step(*batches: Batch) -> torch.Tensor:
        for batch in batches:
            loss = _loss(engine, batch)
            engine.backward(loss)
            engine.step()
        return loss

    return step, engine


def restore() -> None:
    """Undo the changes that engines leave in the process, so that they do not affect the next measurement."""
    torch.nn.functional.linear = LINEAR  # ZeRO-3 puts a slower one there for good ("This will persist unless manually reset")
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()


def clean() -> None:
    """Free the memory of a destroyed engine."""
    restore()
    _forget_zero3()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    dist.barrier()


def _forget_zero3() -> None:
    """Drop the references to its module that ZeRO-3 leaves on a stack and in a cache; they keep all its memory alive."""
    offload = sys.modules.get("deepspeed.runtime.zero.parameter_offload")
    if offload is not None:
        offload.FWD_MODULE_STACK.clear()
    for cached in gc.get_objects():
        if type(cached) is functools._lru_cache_wrapper and cached.__module__.startswith("deepspeed.runtime.zero"):
            cached.cache_clear()
