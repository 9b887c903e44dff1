"""The optimizer that ``deepspeed.initialize`` is given: none (reference models, evaluation), or one with parameters of others."""

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from support import models
from support.engine_work import Job, ds_config, same, start, told, train, whole


def unoptimized(job: Job, world: int, **zero: Any) -> dict[str, Any]:
    """The job's config without an optimizer."""
    config = ds_config(job, world)
    config.pop("optimizer", None)
    config["zero_optimization"] = {**config["zero_optimization"], **zero}
    return config


def preference(rank: int, world: int, job: Job) -> tuple[list[float], list[str]]:
    """A policy and a reference model from one config, with a loss of both."""
    import deepspeed

    config = unoptimized(job, world)
    policy, reference = models.build(job.kind), models.build(job.kind)
    optimizer = torch.optim.AdamW(policy.parameters(), 1e-2)
    engine = deepspeed.initialize(model=policy, optimizer=optimizer, config=config)[0]
    frozen = deepspeed.initialize(model=reference, config=config)[0]
    frozen.eval()
    losses = []
    for step in range(job.steps):
        batch = models.batch(job.kind, step, 0, rank)
        with torch.no_grad():
            before = models.loss(frozen, job.kind, batch)
        loss = nn.functional.softplus(models.loss(engine, job.kind, batch) - before)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    names = [type(engine).__name__, type(frozen).__name__]
    assert config.get("cyclic", {"enabled": True})["enabled"]  # the script's own dict stays as it was
    engine.destroy()
    frozen.destroy()
    return losses, names


@pytest.mark.parametrize("stage", [3, 0])
def test_a_reference_model_beside_the_trained_one(pool, stage):
    zero = {"config": {"zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0}}}
    want = pool.run(2, preference, Job("llama", None, **zero), timeout=120)
    for rule in ("dp", "cdp-v2"):
        for (losses, names), (expected, _) in zip(pool.run(2, preference, Job("llama", rule, **zero), timeout=120), want):
            assert names == ["CyclicEngine", "DeepSpeedEngine"]
            if rule == "dp":
                assert losses == pytest.approx(expected, rel=1e-5)


def evaluations(rank: int, world: int, job: Job, folder: str) -> None:
    """Evaluate only, by a config in a file; train the same model; evaluate it only; train it again."""
    import deepspeed

    def value(engine: Any, batch: int) -> float:
        with torch.no_grad():
            return models.loss(engine, job.kind, models.batch(job.kind, 900 + batch, 0, 0)).item()

    module, plain = models.build(job.kind), models.build(job.kind)
    config = unoptimized(job, world, offload_param={"device": "cpu"})  # refused in training
    file = Path(folder) / f"{rank}.json"
    file.write_text(json.dumps(config))
    first = deepspeed.initialize(args=Namespace(deepspeed_config=str(file)), model=module)[0]
    first.eval()
    plain.eval()
    assert type(first).__name__ == "DeepSpeedEngine" and value(first, 0) == pytest.approx(value(plain, 0), rel=1e-6)
    module.train()
    engine = start(job, world, module)  # destroys the first
    losses = train(engine, job, rank)
    fresh = start(job, world)
    assert train(fresh, job, rank) == losses
    plain.load_state_dict(whole(fresh))
    last = deepspeed.initialize(model=module, config=unoptimized(job, world))[0]  # takes the model from a living engine
    last.eval()
    assert type(last).__name__ == "DeepSpeedEngine" and value(last, 1) == pytest.approx(value(plain, 1), rel=1e-6)
    again = start(job, world, module)
    same(whole(again), plain.state_dict())
    for one in (again, fresh):
        one.destroy()


def test_evaluation_before_and_after_training(pool, tmp_path):
    pool.run(2, evaluations, Job("mlp", "cdp-v2", steps=3), str(tmp_path), timeout=120)


class Criterion(nn.Module):
    def __init__(self):
        super().__init__()
        self.centres, self.temperature = nn.Parameter(torch.randn(5, 8)), nn.Parameter(torch.zeros(1))


def strangers(rank: int, world: int) -> list[str]:
    import deepspeed

    def attempt(module: nn.Module, optimizer: Any) -> str:
        return told(lambda: deepspeed.initialize(model=module, optimizer=optimizer, config=unoptimized(Job("mlp"), world)))

    module, criterion = models.build("mlp"), Criterion()
    groups = [{"params": list(module.parameters())}, {"params": list(criterion.parameters()), "lr": 1.0}]
    texts = [
        attempt(module, torch.optim.AdamW(groups)),
        attempt(module, lambda given: torch.optim.SGD(criterion.parameters(), 0.1)),
    ]
    many = [*module.parameters(), *(nn.Parameter(torch.zeros(n)) for n in range(5))]
    texts.append(attempt(module, torch.optim.SGD(many, 0.1)))
    criterion.requires_grad_(False)  # nobody trains these anyway
    taken = torch.optim.SGD([*module.parameters(), *criterion.parameters()], 0.1)
    engine = deepspeed.initialize(model=module, optimizer=taken, config=unoptimized(Job("mlp"), world))[0]
    train(engine, Job("mlp"), rank, 0, 1)
    engine.destroy()
    texts.append(attempt(module, taken))
    return texts


def test_parameters_that_are_not_the_models_are_named(pool):
    fix = (
        "so the engine cannot train them; make their module (a criterion, say) a submodule of the model, or give it an optimizer"
    )
    for texts in pool.run(2, strangers):
        assert all(text.startswith("ValueError: optimizer ") and "\n" not in text for text in texts), texts
        assert "(group 1, place 0, shape (5, 8); group 1, place 1, shape (1,))" in texts[0] and fix in texts[0]
        assert "(group 0, place 0, shape (5, 8); group 0, place 1, shape (1,))" in texts[1]
        assert "shape (2,) and 2 more)" in texts[2]
        assert "was given to an earlier engine, whose masters it steps; make a new one" in texts[3]
