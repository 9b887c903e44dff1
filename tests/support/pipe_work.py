"""What the pipeline engine's tests run inside worker processes: PipelineModules, an ordinary DeepSpeed loop, the oracle."""

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from deepspeed_cdp.analysis import reference
from deepspeed_cdp.optim.delay_correction import resolve
from deepspeed_cdp.plan.schedule import threshold

WIDTH, WORDS = 8, 12
DEVICE = torch.device("cpu")  # tests/gpu/rank_pipe.py sets another


class Embed(nn.Module):
    """An embedding whose weight the head may share."""

    def __init__(self, words: int = WORDS, width: int = WIDTH):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(words, width) * 0.3)

    def forward(self, x):
        return nn.functional.embedding(x, self.weight)


class Block(nn.Module):
    def __init__(self, width: int = WIDTH):
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x):
        assert self.training == torch.is_grad_enabled(), "a pass of training in evaluation mode, or the other way round"
        return x + torch.tanh(self.linear(self.norm(x)))


class Head(nn.Module):
    def __init__(self, words: int = WORDS, width: int = WIDTH):
        super().__init__()
        self.linear = nn.Linear(width, words)

    def forward(self, x):
        return self.linear(x)


def as_head(embed: Embed, x: torch.Tensor) -> torch.Tensor:
    return x @ embed.weight.t()


def loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten())


def batch(step: int, q: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator("cpu").manual_seed(100 * step + q)
    words = torch.randint(0, WORDS, (3, 6), generator=generator, device="cpu").to(DEVICE)
    return words[:, :-1], words[:, 1:]


@dataclass(frozen=True)
class Job:
    """One training run.

    Attributes:
        rule: None for stock DeepSpeed; save_after: the step after which a checkpoint is saved, and loaded into another engine.
        eval_after: steps at whose end every rank evaluates, -1 before the first; tied: the head is the embedding's.
    """

    stages: int
    rule: str | int | None = "cdp-v2"
    rounds: int = 1
    steps: int = 5
    clip: float = 0.0
    tied: bool = False
    bf16: bool = False
    sum_fp32: bool = False
    warmup: bool = False
    eval_after: tuple[int, ...] = ()
    checkpointing: int = 0
    blocks: int = 4
    pyramid: bool = False
    partition: str = "uniform"
    config: dict[str, Any] = field(default_factory=dict)
    cyclic: dict[str, Any] = field(default_factory=dict)
    timeout: float = 30.0


def specs(job: Job) -> list[Any]:
    from deepspeed.pipe import LayerSpec, TiedLayerSpec

    body = [LayerSpec(Block) for _ in range(job.blocks)]
    if job.tied:
        return [TiedLayerSpec("embed", Embed), *body, TiedLayerSpec("embed", Embed, forward_fn=as_head)]
    return [LayerSpec(Embed), *body, LayerSpec(Head)]


def build(job: Job) -> Any:
    """The PipelineModule as a user's script builds it."""
    import deepspeed
    from deepspeed.pipe import PipelineModule

    import deepspeed_cdp  # noqa: F401, registers
    from deepspeed_cdp.integration.pipe_module import pyramid_topology

    deepspeed.init_distributed(dist_backend="gloo" if DEVICE.type == "cpu" else "nccl")
    place = {"topology": pyramid_topology(job.stages)} if job.pyramid else {"num_stages": job.stages}
    return PipelineModule(
        specs(job),
        loss_fn=loss,
        partition_method=job.partition,
        seed_layers=job.partition == "uniform",
        base_seed=7,
        activation_checkpoint_interval=job.checkpointing,
        **place,
    )


def config(job: Job) -> dict[str, Any]:
    made: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 3,
        "gradient_accumulation_steps": job.stages * job.rounds,
        "steps_per_print": 10**6,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1, "torch_adam": True}},
        "gradient_clipping": job.clip,
        **job.config,
    }
    if job.rule is not None:
        made["cyclic"] = {"enabled": True, "rule": job.rule, "timeout_seconds": job.timeout, **job.cyclic}
    if job.bf16:
        made["bf16"] = {"enabled": True}
    if job.sum_fp32:
        made["data_types"] = {"grad_accum_dtype": "fp32"}
    if job.warmup:
        made["scheduler"] = {
            "type": "WarmupLR",
            "params": {"warmup_min_lr": 1e-3, "warmup_max_lr": 1e-2, "warmup_num_steps": 4, "warmup_type": "linear"},
        }
    return made


def initialize(job: Job) -> Any:
    import deepspeed

    module = build(job)
    for p in module.parameters():
        p.model_parallel = True  # stock DeepSpeed clips fp32 pipelines by the first stage's norm unless parameters say so
    return deepspeed.initialize(
        model=module, model_parameters=[p for p in module.parameters() if p.requires_grad], config=config(job)
    )[0]


def data(job: Job, step: int):
    return iter([batch(step, q) for q in range(job.stages * job.rounds)])


def weights(engine: Any) -> dict[str, torch.Tensor]:
    """What this rank has, fp32 masters if it can."""
    if hasattr(engine, "flush"):
        engine.flush()
        return {n: m.detach().clone() for owner in engine._runtime.owners.values() for n, m in owner.masters.items()}
    return {n: p.detach().float().clone() for n, p in engine.module.named_parameters()}


def train(rank: int, world: int, job: Job) -> dict[str, Any]:
    """The loop of a user's script; runs in a worker."""
    engine = initialize(job)
    told, norms = [], []
    evaluated = [float(engine.eval_batch(data(job, 499)))] if -1 in job.eval_after else []
    for step in range(job.steps):
        told.append(float(engine.train_batch(data(job, step))))
        norms.append(engine.get_global_grad_norm())
        if step in job.eval_after:
            evaluated.append(float(engine.eval_batch(data(job, 500 + step))))
    result = {
        "weights": weights(engine),
        "told": told,
        "evaluated": evaluated,
        "norms": norms,
        "class": type(engine).__name__,
        "lr": engine.get_lr()[0],
        "steps": engine.global_steps,
    }
    engine.destroy()
    return result


def resume(rank: int, world: int, job: Job, other: Job, folder: str, at: int, again: bool) -> dict[str, Any]:
    """Save after step ``at``; go on, or load into a new engine of ``other`` and go on there."""
    engine = initialize(job)
    for step in range(at):
        engine.train_batch(data(job, step))
    engine.save_checkpoint(folder, client_state={"at": at})
    if again:
        engine.destroy()
        engine = initialize(other)
        path, client = engine.load_checkpoint(folder)
        assert client == {"at": at} and path.endswith(f"global_step{at}") and engine.global_steps == at
    told = [float(engine.train_batch(data(job, step))) for step in range(at, job.steps)]
    result = {"weights": weights(engine), "told": told, "lr": engine.get_lr()[0]}
    engine.destroy()
    return result


class Whole(nn.Module):
    """The same layers as one module with PipelineModule's names, for the oracle."""

    def __init__(self, job: Job):
        super().__init__()
        from deepspeed.runtime import utils

        layers = []
        for k in range(job.blocks + 2):
            utils.set_random_seed(7 + k)
            layers.append(Embed() if k == 0 else Block() if k <= job.blocks else None if job.tied else Head())
        self.tied = job.tied
        if job.tied:
            self.tied_modules = nn.ModuleDict({"embed": layers[0]})
        for k, layer in enumerate(layers):
            if layer is not None and not (job.tied and k == 0):
                self.add_module(str(k), layer)
        self.count = len(layers)

    def forward(self, x):
        for k in range(self.count):
            embed = self.tied_modules["embed"] if self.tied else None
            x = (
                as_head(embed, x)
                if self.tied and k == self.count - 1
                else embed(x)
                if self.tied and k == 0
                else getattr(self, str(k))(x)
            )
        return x


def oracle(job: Job) -> tuple[dict[str, torch.Tensor], list[float], list[float]]:
    """(masters, mean losses, norms) by the definition."""
    with torch.device("cpu"):  # (where PipelineModule builds layers, and so with the same random numbers)
        module = Whole(job)
    module.to(DEVICE)
    if job.bf16:
        module.to(torch.bfloat16)
    layers = job.blocks + 2
    size, extra = divmod(layers, job.stages)
    from deepspeed.runtime import utils

    bounds = utils.partition_uniform(num_items=layers, num_parts=job.stages)
    assert bounds[-1] == layers and size + bool(extra) >= 1

    def home(name: str) -> int:
        layer = 0 if name.startswith("tied_modules") else int(name.split(".")[0])
        return max(s for s in range(job.stages) if bounds[s] <= layer)

    stages = [[n for n, _ in module.named_parameters() if home(n) == s] for s in range(job.stages)]
    lr = [1e-3 + (1e-2 - 1e-3) * min(1.0, max(0, t - 1) / 4) for t in range(job.steps)]  # WarmupLR's first two are alike

    def on_step(step: int, optimizer: torch.optim.Optimizer) -> None:
        if job.warmup:
            for group in optimizer.param_groups:
                group["lr"] = lr[step]

    def make_optimizer(named: list) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for _, p in named], lr=1e-2, weight_decay=0.1)

    k = threshold(job.rule, job.stages)
    correction = resolve(job.cyclic.get("delay_correction", "auto"), make_optimizer([("", nn.Parameter(torch.ones(1)))]), k)
    result = reference.train(
        module,
        stages,
        k,
        lambda t, m, r: batch(t, m * job.stages + r),
        lambda call, b: loss(call(b[0]), b[1]),
        make_optimizer,
        job.steps,
        rounds=job.rounds,
        clip=job.clip,
        warmup_steps=job.cyclic.get("warmup_steps", 0),
        flush_after=job.eval_after,
        grad_dtype=torch.float32 if job.sum_fp32 else None,
        on_step=on_step,
        delay_correction=correction,
    )
    count = job.rounds * job.stages
    means = [
        math.fsum(result.losses[t, m, r] for m in range(job.rounds) for r in range(job.stages)) / count for t in range(job.steps)
    ]
    return result.masters, means, result.norms
