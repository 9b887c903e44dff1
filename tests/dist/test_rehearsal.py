"""The first training forward is compared with the plan. Models that their definition does not explain train with nothing set."""

import logging

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from support import models
from support.engine_work import Job, oracle, pack, same, start, told, train, unpack, whole


class Backwards(models.MLP):
    """Registered first to last, used last to first."""

    def forward(self, x):
        for block in reversed(self.blocks):
            x = x + block(x)
        return x


class Twice(models.MLP):
    """Block 2 runs again after block 3, as the same module."""

    def forward(self, x):
        for at in (0, 1, 2, 3, 2, 4, 5):
            x = x + self.blocks[at](x)
        return x


class Repeats(models.MLP):
    """Block 2 runs twice in a row."""

    def forward(self, x):
        for at in (0, 1, 2, 2, 3, 4, 5):
            x = x + self.blocks[at](x)
        return x


class Everything(models.MLP):
    """Every block runs twice, so that no unit runs once."""

    def forward(self, x):
        for at in (0, 1, 2, 3, 4, 5, 5, 4, 3, 2, 1, 0):
            x = x + self.blocks[at](x)
        return x


class Borrows(models.MLP):
    """The last layer's weight is read by the root, which never calls the layer."""

    def __init__(self):
        super().__init__()
        self.proj = nn.Linear(8, 8, bias=False)

    def forward(self, x):
        return F.linear(super().forward(x), self.proj.weight)


class Siamese(models.MLP):
    """An encoder that runs twice, made after its head."""

    def __init__(self):
        super().__init__()
        self.head = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
        self.encoder = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))

    def forward(self, x):
        return super().forward(self.head(self.encoder(x) - self.encoder(-x)))


class Tower(models.MLP):
    """A tower, made after what follows it, that only some batches need: no forward without values can tell which."""

    def __init__(self):
        super().__init__()
        self.tower = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8))

    def forward(self, x):
        if x.mean().item() > 0:
            x = x + self.tower(x)
        return super().forward(x)


MODELS = (Backwards, Twice, Repeats, Everything, Borrows, Siamese, Tower)


def built(kind: type[nn.Module]) -> nn.Module:
    torch.manual_seed(7)
    return kind()


def jobs(stage: int) -> list[tuple[type[nn.Module], Job]]:
    at = {"config": {"zero_optimization": {"stage": stage}}} if stage < 3 else {}
    return [(kind, Job("mlp", "cdp-v2", 1 + (kind in (Twice, Tower)), correction="predict", **at)) for kind in MODELS]


def trained(rank: int, world: int, stage: int) -> list[tuple]:
    results = []
    for kind, job in jobs(stage):
        engine = start(job, world, built(kind))
        losses = train(engine, job, rank)
        buffers = {n: b.clone() for n, b in engine.module.named_buffers()}
        results.append((pack(whole(engine)), pack(buffers), engine.cyclic_plan.stages, losses))
        engine.destroy()
    return results


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("world", "stage"), [(2, 3), (3, 3), (2, 2)])
def test_they_train_as_the_oracle_does(pool, world, stage):
    """Bitwise, running statistics included: the rehearsal leaves no trace."""
    results = pool.run(world, trained, stage, timeout=400)
    for at, (kind, job) in enumerate(jobs(stage)):
        want = oracle(job, results[0][at][2], world, build=lambda kind=kind: built(kind))
        for rank, (state, buffers, _, _) in enumerate(ranks[at] for ranks in results):
            same(unpack(state), want.masters)
            if want.buffers[rank]:
                same(unpack(buffers), want.buffers[rank])
        assert {place: value for ranks in results for place, value in ranks[at][3].items()} == want.losses, kind


def resumed(rank: int, world: int, folder: str) -> bool:
    job = Job("mlp", "cdp-v2", 1, schedule="warmup", clip=0.3)
    engine = start(job, world, built(Backwards))
    train(engine, job, rank, 0, 3)
    engine.save_checkpoint(folder)
    train(engine, job, rank, 3, 6)
    state = whole(engine)
    engine.destroy()
    other = start(job, world, built(Backwards))
    other.load_checkpoint(folder)
    train(other, job, rank, 3, 6)
    same(whole(other), state)
    other.destroy()
    return True


def test_a_checkpoint_loaded_before_the_first_forward_is_kept(pool, tmp_path):
    assert all(pool.run(2, resumed, str(tmp_path), timeout=120))


def penalty(rank: int, world: int) -> str:
    engine = start(Job("mlp", optimizer="sgd", timeout=10.0), world)
    loss = engine(torch.ones(2, 8)).sum() + sum(p.pow(2).sum() for p in engine.module.parameters())
    text = told(lambda: engine.backward(loss))
    torch.distributed.barrier()
    engine.destroy()
    return text


def frozen_penalty(rank: int, world: int) -> list[str]:
    module = built(models.MLP)
    module.blocks[0].requires_grad_(False)
    engine, told_so = start(Job("mlp", optimizer="sgd", timeout=10.0), world, module), []
    handler = logging.Handler()
    handler.emit = lambda record: told_so.append(record.getMessage())
    logging.getLogger("deepspeed_cdp").addHandler(handler)
    for step in range(5):
        loss = engine(torch.ones(2, 8)).sum()
        loss = loss + sum(p.sum() for p in engine.module.blocks[0].parameters()) if step else loss
        engine.backward(loss)
        engine.step()
    engine.destroy()
    return [text for text in told_so if "frozen" in text]


def test_a_frozen_parameter_read_after_the_forward_is_warned_of(pool):
    for rank, texts in enumerate(pool.run(2, frozen_penalty, timeout=120)):
        (text,) = texts
        assert text.startswith(f"rank {rank}: the loss of step 1 was nan; if the script reads a frozen parameter")


def test_parameters_read_after_the_forward_are_told(pool):
    for text in pool.run(2, penalty, timeout=120):
        assert text.startswith("ValueError: the loss of step 0 is nan, and reads parameter 'blocks.")
