"""What the engine's tests run inside worker processes: jobs as data, an ordinary DeepSpeed training loop, the oracle."""

import io
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from deepspeed_cdp.analysis import reference
from deepspeed_cdp.plan.delay_correction import DelayCorrection
from deepspeed_cdp.plan.schedule import threshold
from support import models
from support.optimizers import adamw, muon, sgd, two_groups

OFF_STEPS = 900  # evaluation batches are numbered from here: never seen in training


@dataclass(frozen=True)
class Job:
    """One training run.

    Attributes:
        kind: of models.build; rule: of the cyclic block, None for stock ZeRO-3; rounds: gradient_accumulation_steps.
        optimizer: a key of CONFIGURED or CLIENTS; schedule: "", "lambda" (the client's) or "warmup" (the config's).
        flush_after, eval_after: steps at whose end engine.flush() is called, or rank r evaluates r + 1 batches.
        style: "engine"; "accelerate" (step() only at boundaries); "loss" (loss.backward()).
        correction: of the cyclic block's delay_correction.
        config, cyclic: added to the config and to its cyclic block.
    """

    kind: str = "mlp"
    rule: str | int | None = "cdp-v2"
    rounds: int = 1
    steps: int = 6
    clip: float = 0.0
    optimizer: str = "adamw"
    schedule: str = ""
    bf16: bool = False
    sum_fp32: bool = False
    flush_after: tuple[int, ...] = ()
    eval_after: tuple[int, ...] = ()
    style: str = "engine"
    barriers: bool = False
    correction: str = "none"
    config: dict[str, Any] = field(default_factory=dict)
    cyclic: dict[str, Any] = field(default_factory=dict)
    timeout: float = 30.0


CONFIGURED = {
    "adamw": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1, "torch_adam": True}},
    "sgd": {"type": "SGD", "params": {"lr": 0.05, "momentum": 0.9}},
}


CLIENTS = {"groups": two_groups, "muon": muon if hasattr(torch.optim, "Muon") else two_groups, "callable": adamw}
ORACLES = {**CLIENTS, "adamw": adamw, "sgd": sgd}
WARMUP = {
    "type": "WarmupLR",
    "params": {"warmup_min_lr": 1e-3, "warmup_max_lr": 1e-2, "warmup_num_steps": 4, "warmup_type": "linear"},
}


def decay(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LambdaLR:
    """A learning rate that moves every step."""
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + 0.3 * step))


def warmup(optimizer: torch.optim.Optimizer) -> Any:
    from deepspeed.runtime.lr_schedules import WarmupLR

    return WarmupLR(optimizer, **WARMUP["params"])


SCHEDULES = {"lambda": decay, "warmup": warmup}


def here() -> torch.device:
    """Where this rank trains."""
    from deepspeed.accelerator import get_accelerator

    return torch.device(get_accelerator().current_device_name())


def ds_config(job: Job, world: int) -> dict[str, Any]:
    """The ds_config.json of a job."""
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": job.rounds,
        "gradient_clipping": job.clip,  # DeepSpeed's default is 1.0
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        "steps_per_print": None,
    }
    if job.rule is None:
        config["zero_allow_untested_optimizer"] = True
    else:
        ours = {"rule": job.rule, "timeout_seconds": job.timeout, "delay_correction": job.correction}
        config["cyclic"] = {"enabled": True, **ours, **job.cyclic}
    if job.bf16:
        config["bf16"] = {"enabled": True}
    if job.sum_fp32:
        config["data_types"] = {"grad_accum_dtype": "fp32"}
    if job.optimizer in CONFIGURED:
        config["optimizer"] = CONFIGURED[job.optimizer]
    if job.schedule == "warmup":
        config["scheduler"] = WARMUP
    return {**config, **job.config}


def start(job: Job, world: int, module: nn.Module | None = None) -> Any:
    """The engine of a job, as any script makes it."""
    import deepspeed

    import deepspeed_cdp

    deepspeed_cdp.register()
    if module is None:
        module = models.build(job.kind).to(here())
    named = [(n, p) for n, p in module.named_parameters() if p.requires_grad]
    given: dict[str, Any] = {"model_parameters": [p for _, p in named]}
    if job.optimizer == "callable":
        given["optimizer"] = lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1)
    elif job.optimizer in CLIENTS:
        given = {"optimizer": CLIENTS[job.optimizer](named)}
        if job.schedule == "lambda":
            given["lr_scheduler"] = decay(given["optimizer"])
    if job.schedule == "lambda":
        given.setdefault("lr_scheduler", decay)
    return deepspeed.initialize(model=module, config=ds_config(job, world), **given)[0]


def train(
    engine: Any,
    job: Job,
    rank: int,
    first: int = 0,
    steps: int | None = None,
    losses: dict[tuple[int, int, int], float] | None = None,
) -> dict[tuple[int, int, int], float]:
    """Train steps ``first`` to ``steps`` - 1; returns this rank's losses by (step, round, rank)."""
    import torch.distributed as dist

    losses = {} if losses is None else losses
    for step in range(first, job.steps if steps is None else steps):
        for m in range(job.rounds):
            if job.style == "accelerate":
                engine.set_gradient_accumulation_boundary(is_boundary=m == job.rounds - 1)
            loss = models.loss(engine, job.kind, models.batch(job.kind, step, m, rank).to(here()))
            losses[step, m, rank] = loss.item()
            if job.style == "loss":
                loss.backward()
            else:
                engine.backward(loss)
            if job.style != "accelerate" or m == job.rounds - 1:
                engine.step()
        if job.barriers:
            dist.barrier()
            dist.all_reduce(torch.tensor(loss.item()))
        if step in job.flush_after:
            engine.flush()
        if step in job.eval_after:
            evaluate(engine, job, rank, rank + 1)
    return losses


def evaluate(engine: Any, job: Job, rank: int, batches: int) -> list[float]:
    """As a script does; ranks may run different numbers of batches."""
    engine.eval()
    with torch.no_grad():
        data = (models.batch(job.kind, OFF_STEPS + i, 0, rank).to(here()) for i in range(batches))
        values = [models.loss(engine, job.kind, x).item() for x in data]
    engine.train()
    return values


def run_jobs(rank: int, world: int, jobs: list[Job]) -> list[dict[str, Any]]:
    """Train each job from its start; by job: packed state, losses, stages, the learning rates, the last step's norm."""
    results = []
    for job in jobs:
        engine = start(job, world)
        losses = train(engine, job, rank)
        state = whole(engine)
        results.append(
            {
                "state": pack(state),
                "losses": losses,
                "class": type(engine).__name__,
                "stages": engine.cyclic_plan.stages if job.rule is not None else None,
                "collectives": engine._runtime.counters.collectives() if job.rule is not None else None,
                "fused": engine._runtime.fused if job.rule is not None else None,
                "visited": sorted(engine._runtime.param_hooks.visited) if job.rule is not None else None,
                "norm": engine.get_global_grad_norm(),
            }
        )
        engine.destroy()
    return results


def whole(engine: Any) -> dict[str, torch.Tensor]:
    """The full state dict on every rank, of our engine or of stock ZeRO-3."""
    if hasattr(engine, "cyclic_plan"):
        return engine.module_state_dict()
    import deepspeed

    parameters = dict(engine.module.named_parameters(remove_duplicate=False))
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        state = {n: p.detach().clone() for n, p in parameters.items()}
    return state


def pack(state: dict[str, torch.Tensor]) -> bytes:
    """Tensors as plain bytes: what travels through a pipe by file descriptor dies with its process."""
    file = io.BytesIO()
    torch.save(dict(state), file)
    return file.getvalue()


def unpack(data: bytes) -> dict[str, torch.Tensor]:
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)


def oracle(
    job: Job, stages: Any, world: int, trained: set[str] | None = None, build: Callable[[], nn.Module] | None = None
) -> reference.Trained:
    """The same job by the single-process reference."""
    module = build() if build else models.build(job.kind)
    for p in module.parameters() if job.bf16 else ():  # buffers keep their dtype, as under DeepSpeed
        p.data = p.data.to(torch.bfloat16)
    names = {n for stage in stages for n in stage} if trained is None else trained
    for name, p in module.named_parameters():
        p.requires_grad_(name in names)
    schedulers: list[Any] = []

    def make(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        optimizer = ORACLES[job.optimizer](named)
        if job.schedule:
            schedulers.append(SCHEDULES[job.schedule](optimizer))
        return optimizer

    def on_step(step: int, optimizer: torch.optim.Optimizer) -> None:
        if step and schedulers:
            schedulers[0].step()

    return reference.train(
        module,
        stages,
        threshold(job.rule, len(stages)),
        lambda t, m, r: models.batch(job.kind, t, m, r),
        lambda call, x: models.loss(call, job.kind, x),
        make,
        job.steps,
        rounds=job.rounds,
        clip=job.clip,
        flush_after={*job.flush_after, *job.eval_after},
        on_step=on_step,
        grad_dtype=torch.float32 if job.sum_fp32 else None,
        warmup_steps=job.cyclic.get("warmup_steps", 0),
        rings=world // len(stages),
        delay_correction=explicit(job.correction),
    )


def explicit(method: str) -> DelayCorrection:
    """A correction with the numbers that the engine takes."""
    return DelayCorrection(method, weight=1.5)


def same(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor], rtol: float = 0.0, atol: float = 0.0) -> None:
    """Every entry of ``want`` is in ``got`` and equal, cast to its dtype."""
    assert want
    for name, value in want.items():
        torch.testing.assert_close(got[name], value.to(got[name].dtype), rtol=rtol, atol=atol, msg=lambda m, n=name: f"{n}: {m}")


def told(call: Callable[[], Any]) -> str:
    """The one-line error of a call."""
    try:
        call()
    except (ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def farthest(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """The largest difference between two state dicts with the same names."""
    assert a.keys() == b.keys()
    return max(float((a[n].float() - b[n].float()).abs().max()) for n in a if a[n].is_floating_point())
