"""What people reported of ZeRO-3, as small scripts. Each runs in a worker, under stock ZeRO-3 and under the cyclic engine."""

import copy
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from support import models
from support.engine_work import Job, start

Script = Callable[[Job, int, int], list[float]]


class Report(NamedTuple):
    """A public report.

    Attributes:
        source: repository and number.
        asks: in few words.
        script: takes the job (stock or cyclic), the rank and the number of ranks; returns the losses, or other numbers.
        stock: what stock ZeRO-3 does with the script; "" if it runs.
        differs: how the losses under ``dp`` differ from stock's; "" if they do not.
    """

    source: str
    asks: str
    script: Script
    stock: str = ""
    differs: str = ""


def batches(rank: int, steps: int = 4, width: int = 8) -> Iterator[torch.Tensor]:
    for step in range(steps):
        yield models.batch("mlp", step, 0, rank)[:, :width]


def update(engine: Any, loss: torch.Tensor) -> float:
    """One step; returns the loss."""
    engine.backward(loss)
    engine.step()
    return loss.item()


def trained(engine: Any, rank: int, loss: Callable[[Any, torch.Tensor], torch.Tensor] | None = None) -> list[float]:
    """The losses of four steps."""
    return [update(engine, engine(x).pow(2).mean() if loss is None else loss(engine, x)) for x in batches(rank)]


def seeded(build: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(5)
    return build()


# ---- models -------------------------------------------------------------------------------------------------------------
class EmptyLayer(models.MLP):
    """Has a layer with no outputs, whose weight has no elements."""

    def __init__(self) -> None:
        super().__init__()
        self.none = nn.Linear(8, 0, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.none(x).sum()


class LayerDrop(models.MLP):
    """Skips layers that the rank's data choose."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for at, block in enumerate(self.blocks):
            if at % 2 == 0 or float(x[at % 4, at % 8].detach()) > 0:
                x = x + block(x)
        return x


class UnevenHead(models.MLP):
    """Calls its head as often as the data say."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        times = 1 + int(x.abs().sum().item() * 10) % 3
        x = super().forward(x)
        for _ in range(times):
            x = torch.tanh(self.head(x))
        return x


class SiameseCheckpoint(models.MLP):
    """One encoder for two inputs, under activation checkpointing."""

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=False)
        return x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.cosine_similarity(self.encode(x), self.encode(x.flip(0)))


class WeightNorm(models.MLP):
    """A convolution whose weight is replaced by a norm and a direction, as in wav2vec2."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.utils.weight_norm(nn.Conv1d(1, 1, 3, padding=1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.conv(x[:, None])[:, 0])


class Parts(nn.Module):
    """A text encoder and a denoiser that the script calls one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.text, self.denoiser = models.MLP(blocks=3), models.MLP(blocks=3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.denoiser(self.text(x))


class Rows(models.MLP):
    """An embedding of which only some rows are to be trained."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x + self.embedding((x.abs() * 10).long().sum(1) % 16))


# ---- scripts ------------------------------------------------------------------------------------------------------------
def plainly(build: Callable[[], nn.Module]) -> Script:
    def script(job: Job, rank: int, world: int) -> list[float]:
        engine = start(job, world, seeded(build))
        try:
            return trained(engine, rank)
        finally:
            engine.destroy()

    return script


def touch(job: Job, rank: int, world: int) -> list[float]:
    """Reads and touches slices of gathered parameters between steps, without a modifier rank."""
    import deepspeed

    engine, seen = start(job, world), []
    for x in batches(rank):
        seen.append(update(engine, engine(x).pow(2).mean()))
        with deepspeed.zero.GatheredParameters(list(engine.module.parameters())[:3], modifier_rank=None):
            next(iter(engine.module.parameters())).data[0, :].add_(0.0)
    engine.destroy()
    return seen


def switching(job: Job, rank: int, world: int) -> list[float]:
    """Trains one half of the layers after the other, by ``requires_grad``."""
    engine, losses = start(job, world), []
    for step, x in enumerate(batches(rank)):
        for at, block in enumerate(engine.module.blocks):
            block.requires_grad_((at < 3) == (step < 2))
        losses.append(update(engine, engine(x).pow(2).mean()))
    engine.destroy()
    return losses


def distilled(job: Job, rank: int, world: int) -> list[float]:
    """A teacher that the script keeps beside the engine, and calls in each step."""
    teacher = models.build("mlp").requires_grad_(False).eval()
    engine = start(job, world, seeded(models.MLP))

    def loss(engine: Any, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            wanted = teacher(x)
        return F.mse_loss(engine(x), wanted)

    losses = trained(engine, rank, loss)
    engine.destroy()
    return losses


def penalized(job: Job, rank: int, world: int) -> list[float]:
    """A weight's norm in the loss, inside GatheredParameters."""
    import deepspeed

    engine, losses = start(job, world), []
    weights = [block[0].weight for block in engine.module.blocks[1:3]]
    for x in batches(rank):
        value = engine(x).pow(2).mean()
        with deepspeed.zero.GatheredParameters(weights):
            value = value + 0.1 * sum(w.pow(2).sum() for w in weights)
            engine.backward(value)
        engine.step()
        losses.append(value.item())
    engine.destroy()
    return losses


def averaged(job: Job, rank: int, world: int) -> list[float]:
    """Averages the fp32 weights with those of the start, in the middle of training."""
    from deepspeed.utils import safe_get_full_fp32_param, safe_set_full_fp32_param

    engine = start(job, world)
    before = [safe_get_full_fp32_param(p).clone() for p in engine.module.parameters()]
    losses = trained(engine, rank)
    for p, old in zip(engine.module.parameters(), before):
        safe_set_full_fp32_param(p, (safe_get_full_fp32_param(p) + old) / 2)
    losses += trained(engine, rank)
    engine.destroy()
    return losses


def moving_average(job: Job, rank: int, world: int) -> list[float]:
    """An average of the weights over the steps, kept beside the engine."""
    import deepspeed

    module = models.build("mlp")
    average = copy.deepcopy(module)
    engine, norms = start(job, world, module), []
    for x in batches(rank):
        update(engine, engine(x).pow(2).mean())
        with torch.no_grad(), deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
            for p, q in zip(engine.module.parameters(), average.parameters()):
                q.lerp_(p, 0.5)
        norms.append(sum(float(q.pow(2).sum()) for q in average.parameters()))
    engine.destroy()
    return norms


def reloaded(job: Job, rank: int, world: int) -> list[float]:
    """Other weights after ``initialize``, written by one rank."""
    import deepspeed

    engine, other = start(job, world), seeded(models.MLP)
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters()), modifier_rank=0):
        if rank == 0:
            for p, q in zip(engine.module.parameters(), other.parameters()):
                p.data.copy_(q.data)
    engine.eval()
    with torch.no_grad():
        values = [engine(x).pow(2).mean().item() for x in batches(rank)]
    engine.destroy()
    return values


def parts(job: Job, rank: int, world: int) -> list[float]:
    """The script calls the parts of the model, and never the engine."""
    engine = start(job, world, seeded(Parts))

    def loss(engine: Any, x: torch.Tensor) -> torch.Tensor:
        return engine.module.denoiser(engine.module.text(x)).pow(2).mean()

    try:
        return trained(engine, rank, loss)
    finally:
        engine.destroy()


def rows(job: Job, rank: int, world: int) -> list[float]:
    """A hook on the weight clears the gradients of rows that are to stay."""
    engine = start(job, world, seeded(Rows))
    mask = (torch.arange(16) >= 12).float()[:, None]
    engine.module.embedding.weight.register_hook(lambda grad: grad * mask)
    losses = trained(engine, rank)
    engine.destroy()
    return losses


REPORTS = [
    Report("deepspeedai/DeepSpeed#8375", "a layer without outputs", plainly(EmptyLayer), "an `AssertionError`"),
    Report("deepspeedai/DeepSpeed#7811", "gathered parameters, slices touched in place", touch),
    Report("deepspeedai/DeepSpeed#7998", "a head called another number of times on each rank", plainly(UnevenHead), "hangs"),
    Report("deepspeedai/DeepSpeed#1888", "LayerDrop: ranks skip different layers", plainly(LayerDrop), "a `RuntimeError`"),
    Report("deepspeedai/DeepSpeed#988", "a siamese model under activation checkpointing", plainly(SiameseCheckpoint)),
    Report("deepspeedai/DeepSpeed#5639", "requires_grad switched during training", switching),
    Report("deepspeedai/DeepSpeed#3175", "a teacher beside the trained model", distilled),
    Report("deepspeedai/DeepSpeed#1045", "torch.nn.utils.weight_norm", plainly(WeightNorm)),
    Report("deepspeedai/DeepSpeed#7464", "a weight's norm in the loss", penalized),
    Report(
        "deepspeedai/DeepSpeed#3959",
        "weights averaged with older ones during training",
        averaged,
        differs="the first forward after it reads the new weights; under stock the old ones",
    ),
    Report("deepspeedai/DeepSpeed#2056", "a moving average of the weights", moving_average),
    Report("deepspeedai/DeepSpeed#6411", "weights loaded after initialize", reloaded),
    Report("huggingface/diffusers#3342", "a text encoder and a denoiser, called one by one and not through the engine", parts),
    Report("deepspeedai/DeepSpeed#5041", "only some rows of an embedding are trained", rows),
]
