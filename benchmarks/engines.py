"""One way to train per name; each gives ``step(batch) -> loss`` and ``close()``."""

import gc
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

LEARNING_RATE = 1e-5


def make(name: str, model: torch.nn.Module, micro_batch: int,
         compiled: bool) -> tuple[Callable[[torch.Tensor], torch.Tensor], Any]:
    """The step function and an object with ``destroy`` (or None).

    Args:
        name: compute, ddp, fsdp2, zero3, zero3-leaf, cdp-v1, cdp-v2, cdp-K.
    """
    if compiled:
        for layer in model.model.layers:
            layer.compile()
    if name == "compute":
        return _compute(model), None
    if name == "ddp":
        return _ddp(model), None
    if name == "fsdp2":
        return _fsdp2(model), None
    return _deepspeed(name, model, micro_batch)


def _loss(model: Callable, batch: torch.Tensor) -> torch.Tensor:
    return model(input_ids=batch, labels=batch).loss


def _compute(model: torch.nn.Module) -> Callable:
    """No communication, no optimizer: the ceiling."""
    def step(batch: torch.Tensor) -> torch.Tensor:
        loss = _loss(model, batch)
        loss.backward()
        model.zero_grad(set_to_none=True)
        return loss
    return step


def _adamw(model: torch.nn.Module) -> torch.optim.Optimizer:
    fused = next(model.parameters()).device.type == "cuda"
    return torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=fused)


def _ddp(model: torch.nn.Module) -> Callable:
    wrapped = torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True, static_graph=True)
    return _plain(wrapped, _adamw(wrapped))


def _plain(model: Callable, optimizer: torch.optim.Optimizer) -> Callable:
    def step(batch: torch.Tensor) -> torch.Tensor:
        loss = _loss(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss
    return step


def _fsdp2(model: torch.nn.Module) -> Callable:
    """fp32 masters, bf16 passes, reshard after forward: ZeRO-3's memory."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    model.float()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    for layer in model.model.layers:
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    return _plain(model, _adamw(model))


def _deepspeed(name: str, model: torch.nn.Module, micro_batch: int) -> tuple[Callable, Any]:
    import deepspeed

    import deepspeed_cdp  # noqa: F401
    bf16 = next(model.parameters()).dtype == torch.bfloat16
    cuda = next(model.parameters()).device.type == "cuda"
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": micro_batch, "zero_optimization": {"stage": 3}, "bf16": {"enabled": bf16},
        "optimizer": {"type": "AdamW", "params": {"lr": LEARNING_RATE, **({} if cuda else {"torch_adam": True})}},
        "steps_per_print": 10 ** 9,
        "gradient_clipping": 0.0}  # as the others; DeepSpeed's default is 1.0
    if name.startswith("cdp-"):
        rule = name if name in ("cdp-v1", "cdp-v2") else int(name[4:])
        config["cyclic"] = {"enabled": True, "rule": rule, "timeout_seconds": 60}
        config["zero_allow_untested_optimizer"] = True
        optimizer = _adamw(model)
        del config["optimizer"]
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    else:
        if name == "zero3-leaf":
            deepspeed.utils.set_z3_leaf_modules(model, [type(model.model.layers[0])])
        engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)

    def step(batch: torch.Tensor) -> torch.Tensor:
        loss = _loss(engine, batch)
        engine.backward(loss)
        engine.step()
        return loss
    return step, engine


def clean(engine: Any) -> None:
    """Free what an engine held."""
    if engine is not None:
        engine.destroy()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    dist.barrier()
