"""Cyclic pipelines as threads of one process: the pipe runtime without processes or DeepSpeed; and the oracle."""

import copy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from deepspeed_cdp.analysis import reference
from deepspeed_cdp.pipeline.runtime import PipeRuntime
from deepspeed_cdp.pipeline.state import PipelineStage
from deepspeed_cdp.plan.delay_correction import DelayCorrection
from deepspeed_cdp.plan.pipeline_schedule import PipeSchedule
from support.local_ring import run_ranks
from support.optimizers import two_groups


class Scale(nn.Module):
    """A layer without matrices."""

    def __init__(self, width: int):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return x * self.gain


class Split(nn.Module):
    """Hands on a tuple with a tensor that needs no gradient."""

    def __init__(self, width: int):
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x):
        y, mask = x if isinstance(x, tuple) else (x, torch.arange(x.shape[0]))
        return y + torch.tanh(self.linear(y)), mask


@dataclass
class Model:
    """A sequence of layers cut into stages; ``tied``: the last layer is the transposed first one's weight.

    Attributes:
        layers: by number; bounds: where stages begin, and the end.
    """

    layers: list[nn.Module]
    bounds: list[int]
    tied: bool = False
    frozen: tuple[str, ...] = ()

    def run(self, stage: int, x: Any) -> Any:
        for k in range(self.bounds[stage], self.bounds[stage + 1]):
            x = x @ self.layers[0].weight.t() if self.tied and k == len(self.layers) else self.layers[k](x)
        return x[0] if isinstance(x, tuple) and stage == len(self.bounds) - 2 else x

    def named(self) -> dict[str, nn.Parameter]:
        return {f"{k}.{n}": p for k, layer in enumerate(self.layers) for n, p in layer.named_parameters()}

    def part(self, stage: int, schedule: PipeSchedule) -> PipelineStage:
        own = [(n, p) for n, p in self.named().items() if self.bounds[stage] <= int(n.split(".")[0]) < self.bounds[stage + 1]]
        trained = [(n, p) for n, p in own if n not in self.frozen]
        units = {stage: trained}
        if schedule.ties:
            units[stage] = [(n, p) for n, p in trained if n != "0.weight"]
            if stage in (0, schedule.stages - 1):
                units[schedule.stages] = [("0.weight", self.layers[0].weight)]
        return PipelineStage(lambda x, q: self.run(stage, x), units, {n: p for n, p in own if n in self.frozen})


def build(stages: int, tied: bool = False, width: int = 6, dtype: torch.dtype = torch.float32, split: bool = False) -> Model:
    torch.manual_seed(1)
    count = max(2 * stages, 3)
    layers = [nn.Linear(width, width, bias=not tied)]
    layers += [
        (Split(width) if split else nn.Sequential(nn.Linear(width, width), nn.Tanh())) if k % 3 else Scale(width)
        for k in range(1, count)
    ]
    if split:
        layers = [nn.Linear(width, width), *(Split(width) for _ in range(1, count))]
    total = count + tied
    bounds = [round(total * s / stages) for s in range(stages + 1)]
    return Model([layer.to(dtype) for layer in layers], bounds, tied)


def batch(step: int, q: int, width: int = 6, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + q)
    return (torch.randn(4, width, generator=generator).to(dtype), torch.randn(4, width, generator=generator).to(dtype))


def loss(out: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return ((out - labels) ** 2).mean()


def farthest(got: dict, want: dict) -> float:
    """The largest difference between weights of the same names."""
    assert got.keys() == want.keys()
    return max((got[n] - want[n]).abs().max().item() for n in want)


@dataclass
class Case:
    """One run.

    Attributes:
        split: layers hand on tuples; flush_after: steps at whose end the run is flushed.
        infinite: the step whose gradients are not finite.
    """

    stages: int
    threshold: int
    placement: str = "pipeline"
    rounds: int = 1
    tied: bool = False
    clip: float = 0.0
    steps: int = 5
    dtype: torch.dtype = torch.float32
    sum_dtype: torch.dtype | None = None
    split: bool = False
    flush_after: tuple[int, ...] = ()
    frozen: tuple[str, ...] = ()
    delay: float = 0.0
    offload: bool = False
    warmup_steps: int = 0
    infinite: int = -1
    correction: DelayCorrection = DelayCorrection()  # noqa: RUF009  (it is frozen)
    optimizer: Any = two_groups
    change: Any = field(default=None)

    @property
    def schedule(self) -> PipeSchedule:
        exact = self.clip > 0 and self.threshold in (0, 2 * self.stages - 1)
        ties = ((0, self.stages - 1),) if self.tied and self.stages > 1 else ()
        corrections = dict(delay_corrected=bool(self.correction), predicts=self.correction.method == "predict")
        return PipeSchedule(self.stages, self.threshold, self.rounds, self.placement, ties, exact, **corrections)

    def batch(self, step: int, q: int) -> tuple[torch.Tensor, torch.Tensor]:
        inputs, labels = batch(step, q, dtype=self.dtype)
        return inputs, labels * (torch.inf if step == self.infinite else 1.0)


def decay(step: int, optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        group["lr"] = 1e-2 / (1 + step)


def train(case: Case) -> tuple[dict[str, torch.Tensor], list[list[float]], list[PipeRuntime]]:
    """(masters by name, returned losses by rank, runtimes)."""
    schedule = case.schedule
    template = build(case.stages, case.tied, dtype=case.dtype, split=case.split)
    template.frozen = case.frozen

    def work(rank: int, transport: Any) -> tuple[dict, list[float], PipeRuntime]:
        model = copy.deepcopy(template)
        if rank:  # ranks start with the lowest one's values, whatever they had
            for name, p in model.named().items():
                if schedule.placement == "pyramid" and rank not in {schedule.replicas(s)[0] for s in range(case.stages)}:
                    p.data.add_(1.0)
                elif schedule.ties and name == "0.weight":
                    p.data.add_(1.0)
        parts = {s: model.part(s, schedule) for s in schedule.stages_of(rank)}
        named = [(n, p) for part in parts.values() for u in sorted(part.units) for n, p in part.units[u]]
        named = list({id(p): (n, p) for n, p in named}.values())
        runtime = PipeRuntime(
            schedule,
            rank,
            parts,
            loss,
            case.optimizer(named),
            {p: n for n, p in named},
            transport if schedule.ranks > 1 else None,
            torch.device("cpu"),
            case.clip,
            case.sum_dtype,
            warmup_steps=case.warmup_steps,
            offload=case.offload,
            correction=case.correction,
        )
        if case.change:
            case.change(runtime)
        told = []
        for step in range(case.steps):
            decay(step, runtime.user_optimizer)
            told.append(float(runtime.train(case.batch(step, q) for q in range(schedule.micro_batches))))
            if step in case.flush_after:
                runtime.flush()
        runtime.flush()
        masters = {n: m.detach().clone() for owner in runtime.owners.values() for n, m in owner.masters.items()}
        values = {n: p.detach().clone() for unit in runtime.units.values() for n, p in zip(unit.names, unit.params)}
        runtime.close(True)
        return masters, told, runtime, values

    results = run_ranks(schedule.ranks, work, seconds=20.0, delay=case.delay)
    masters = {n: m for result in results for n, m in result[0].items()}
    for _, _, _, values in results:  # every copy is the newest version after a flush
        for name, value in values.items():
            assert torch.equal(value, masters[name].to(value.dtype)), name
    return masters, [r[1] for r in results], [r[2] for r in results]


class Whole(nn.Module):
    """The model as one module, for the oracle."""

    def __init__(self, model: Model):
        super().__init__()
        self.layers = nn.ModuleList(model.layers)
        self.model = [model]

    def forward(self, x):
        for k in range(len(self.layers) + self.model[0].tied):
            x = x @ self.layers[0].weight.t() if k == len(self.layers) else self.layers[k](x)
        return x[0] if isinstance(x, tuple) else x


def oracle(case: Case) -> tuple[dict[str, torch.Tensor], list[float]]:
    """(masters by name, mean loss by step) of the single-process definition."""
    model = build(case.stages, case.tied, dtype=case.dtype, split=case.split)
    names = [
        [n for n in model.named() if model.bounds[s] <= int(n.split(".")[0]) < model.bounds[s + 1]] for s in range(case.stages)
    ]
    whole = Whole(model)
    for name, p in whole.named_parameters():
        p.requires_grad_(name.removeprefix("layers.") not in case.frozen)
    stages = [[f"layers.{n}" for n in stage] for stage in names]
    trained = reference.train(
        whole,
        stages,
        case.threshold,
        lambda t, m, r: case.batch(t, m * case.stages + r),
        lambda call, b: loss(call(b[0]), b[1]),
        case.optimizer,
        case.steps,
        rounds=case.rounds,
        clip=case.clip,
        flush_after=case.flush_after,
        grad_dtype=case.sum_dtype,
        on_step=decay,
        warmup_steps=case.warmup_steps,
        delay_correction=case.correction,
    )
    means = [
        sum(trained.losses[t, m, r] for m in range(case.rounds) for r in range(case.stages)) / (case.rounds * case.stages)
        for t in range(case.steps)
    ]
    return {n.removeprefix("layers."): p for n, p in trained.masters.items()}, means


def told(means: list[float], threshold: int, warmup_steps: int = 0) -> list[float]:
    """What successive calls return: under dp each its own loss, else the first its own and each later one that before."""
    own = max(1, warmup_steps)
    return means if threshold == 0 else [*means[:own], *means[own - 1 : -1]]
