"""Mixtures of experts held whole: experts that a micro-batch does not use, over gloo, against stock ZeRO-3 and the oracle."""

from typing import Any

import pytest
import torch

from support import models
from support.checkpoint_work import resumes
from support.engine_work import Job, oracle, run_jobs, same, start, train, unpack, whole

KINDS = ("mixtral", "mixtral-eager")


def used(kind: str, rank: int) -> set[int]:
    """Experts of the first layer that a rank's first micro-batch uses."""
    module, seen = models.build(kind), set()
    module.model.layers[0].mlp.gate.register_forward_hook(lambda m, args, out: seen.update(out[2].flatten().tolist()))
    models.loss(module, kind, models.batch(kind, 0, 0, rank))
    return seen


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", KINDS)
def test_experts_that_ranks_do_not_use(pool, kind):
    assert len(used(kind, 0)) < 16 and used(kind, 0) != used(kind, 1), "the test needs unused experts, others on each rank"
    jobs = [
        *(Job(kind, rule, 2, clip=0.3, optimizer="sgd") for rule in (None, "dp")),
        Job(kind, "cdp-v2", 2, clip=0.3, correction="predict"),
        Job(kind, "cdp-v1", optimizer="groups"),
    ]
    results = pool.run(2, run_jobs, jobs, timeout=240)
    for theirs, ours, *_ in results:
        assert ours["losses"] == pytest.approx(theirs["losses"], rel=1e-5)
        same(unpack(ours["state"]), unpack(theirs["state"]), 1e-5, 1e-6)
    for at, job in enumerate(jobs[2:], 2):
        want = oracle(job, results[0][at]["stages"], 2)
        assert {place: loss for r in results for place, loss in r[at]["losses"].items()} == want.losses
        for r in results:
            same(unpack(r[at]["state"]), want.masters)


STAGE2 = {"zero_optimization": {"stage": 2}}


def test_deepspeeds_layer_with_whole_experts(pool):
    """Stock DeepSpeed has it under stages 0 to 2. Stage 3 gives the same."""
    common = {"rounds": 2, "clip": 0.3, "optimizer": "sgd", "steps": 8}
    jobs = [
        Job("moe", None, config=STAGE2, **common),
        Job("moe", "dp", config=STAGE2, **common),
        Job("moe", "dp", **common),
        Job("moe", "cdp-v2", correction="predict"),
    ]
    results = pool.run(2, run_jobs, jobs, timeout=240)
    for theirs, *ours, _ in results:
        assert theirs["class"] == "DeepSpeedEngine"
        for mine in ours:
            assert mine["losses"] == pytest.approx(theirs["losses"], rel=1e-5)
            same(unpack(mine["state"]), unpack(theirs["state"]), 1e-5, 1e-6)
    want = oracle(jobs[-1], results[0][-1]["stages"], 2)
    assert {place: loss for r in results for place, loss in r[-1]["losses"].items()} == want.losses
    for r in results:
        same(unpack(r[-1]["state"]), want.masters)


def test_resuming_deepspeeds_layer_is_bitwise(pool, tmp_path):
    pool.run(2, resumes, [Job("moe", "cdp-v2", correction="predict")], str(tmp_path), timeout=120)


class Skips(models.MLP):
    """Leaves block 2 out while ``skipped``."""

    skipped = False

    def forward(self, x):
        for at, block in enumerate(self.blocks):
            x = x if self.skipped and at == 2 else x + block(x)
        return x


def changes(rank: int, world: int, rule: str | None) -> list[Any]:
    """Of block 2's weight in each step. Steps 2 and 3 leave it out."""
    job = Job("mlp", rule, config={"optimizer": {"type": "SGD", "params": {"lr": 0.05}}})
    torch.manual_seed(7)
    engine = start(job, world, Skips())
    values = [whole(engine)["blocks.2.0.weight"].clone()]
    for step in range(4):
        engine.module.skipped = step > 1
        train(engine, job, rank, step, step + 1)
        values.append(whole(engine)["blocks.2.0.weight"].clone())
    engine.destroy()
    return [(after - before).numpy() for before, after in zip(values, values[1:])]


def test_what_no_rank_uses_is_not_moved_by_an_old_gradient(pool):
    """Stock ZeRO-3 applies the last one again (docs/moving-from-zero3.md)."""
    stock, ours = pool.run(2, changes, None)[0], pool.run(2, changes, "dp")[0]
    assert [abs(x).max() > 0 for x in ours] == [True, True, False, False]
    assert ours[1] == pytest.approx(stock[1], abs=1e-7)
    assert stock[2] == pytest.approx(stock[1], abs=1e-7) and stock[3] == pytest.approx(stock[1], abs=1e-7)
