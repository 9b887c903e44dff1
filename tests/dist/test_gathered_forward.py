"""GatheredParameters inside a training forward: a function reads a module's parameters in that module's place (fused losses)."""

import pytest
import torch
from torch import nn

from support import models
from support.engine_work import Job, oracle, pack, same, start, train, unpack, whole


class Product(torch.autograd.Function):
    """x @ weight.T, which asks the weight whether it is there, as TRL's fused head does in its backward."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight.T

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        if torch.distributed.is_initialized():
            assert weight.ds_status.name == "AVAILABLE"
        return grad @ weight, grad.T @ x


class Headed(models.MLP):
    """The weight of ``read`` (a block, or the head, which is never called) is read in the forward of the whole, at the end."""

    def __init__(self, fused: bool, read: str, writes: bool):
        super().__init__()
        self.head = nn.Linear(8, 8, bias=False)
        self.fused, self.read, self.writes = fused, read, writes

    def forward(self, x):
        import deepspeed

        x = super().forward(x)
        weight = self.get_submodule(self.read).weight
        with deepspeed.zero.GatheredParameters(weight, modifier_rank=0 if self.writes else None):
            return Product.apply(x, weight) if self.fused else nn.functional.linear(x, weight)


def build(fused: bool, read: str = "head", writes: bool = False) -> nn.Module:
    torch.manual_seed(7)
    return Headed(fused, read, writes)


REPLICAS = {"zero_optimization": {"stage": 1}}
JOBS = [
    Job("mlp", "dp", 2, clip=0.3),
    Job("mlp", "cdp-v1", 2),
    Job("mlp", "cdp-v2", 1, clip=0.3, flush_after=(2,)),
    Job("mlp", "cdp-v1", 2, config=REPLICAS),
    Job("mlp", "cdp-v2", 1, clip=0.3, flush_after=(2,), config=REPLICAS),
]


def run(rank: int, world: int, jobs: list[tuple[Job, bool]]) -> list[dict]:
    results = []
    for job, fused in jobs:
        engine = start(job, world, build(fused))
        losses = train(engine, job, rank)
        results.append({"losses": losses, "stages": engine.cyclic_plan.stages, "state": pack(whole(engine))})
        engine.destroy()
    return results


@pytest.mark.sampled(3)
@pytest.mark.parametrize("world", [2, 3])
def test_equals_the_oracle(pool, world):
    jobs = [(job, fused) for job in JOBS for fused in (False, True)]
    results = pool.run(world, run, jobs)
    for at, (job, fused) in enumerate(jobs):
        want = oracle(job, results[0][at]["stages"], world, build=lambda fused=fused: build(fused))
        assert {k: v for r in results for k, v in r[at]["losses"].items()} == want.losses, (job, fused)
        for result in results:
            same(unpack(result[at]["state"]), want.masters)


@pytest.mark.parametrize("config", [REPLICAS, {}], ids=["replicas", "partitioned"])
def test_a_parameter_is_there_when_its_place_is_past(pool, config):
    """A weight may be read again later: its rank keeps it for the whole micro-batch, as the first batch has shown."""
    job = Job("mlp", "cdp-v2", clip=0.3, config=config)
    results = pool.run(2, again, job)
    want = oracle(job, results[0]["stages"], 2, build=lambda: build(False, "blocks.1.0"))
    assert {k: v for r in results for k, v in r["losses"].items()} == pytest.approx(want.losses, rel=1e-6)
    for result in results:
        assert result["between"] == "NOT_AVAILABLE", "tools that look at it must gather between steps"
        same(unpack(result["state"]), want.masters, 1e-6, 1e-7)  # autograd adds the two in another order


def again(rank: int, world: int, job: Job) -> dict:
    engine = start(job, world, build(False, "blocks.1.0"))
    losses = train(engine, job, rank)
    status = engine.module.blocks[1][0].weight.ds_status.name
    result = {"losses": losses, "stages": engine.cyclic_plan.stages, "state": pack(whole(engine)), "between": status}
    engine.destroy()
    return result


def writing(rank: int, world: int, job: Job) -> None:
    train(start(job, world, build(False, writes=True)), job, rank)


def test_writing_in_a_forward_is_refused(pool):
    errors = pool.run_failing(2, writing, Job("mlp", "cdp-v2"))
    assert any("GatheredParameters of 'head.weight' with a modifier_rank is inside a training forward" in str(e) for e in errors)
