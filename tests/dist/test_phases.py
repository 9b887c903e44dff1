"""Several engines of one model, one after the other: what an engine has trained stays with the model, as under stock ZeRO-3."""

from typing import Any

import pytest

from support import models
from support.engine_work import Job, pack, same, start, told, train, unpack, whole

FIRST = Job("rooted", "cdp-v2", clip=0.3, steps=4)
SECOND = {
    "same": Job("rooted", "cdp-v2", clip=0.3, steps=3),
    "rule": Job("rooted", "dp", 2, optimizer="sgd", steps=3),
    "replicas": Job("rooted", "cdp-v2", steps=3, config={"zero_optimization": {"stage": 2}}),
    "rings": Job("rooted", "cdp-v2", steps=3, cyclic={"ring_size": 1}),
}


def phases(rank: int, world: int, first: Job, seconds: dict[str, Job], how: str) -> dict[str, Any]:
    """Train a model with one engine, then with another; by name of the second: its losses and the state at its end."""
    import deepspeed

    results = {}
    for key, second in seconds.items():
        module = models.build(first.kind)
        engine = start(first, world, module)
        train(engine, first, rank)
        if how == "anew":  # what the others must equal
            state = whole(engine)
            engine.destroy()
            module = models.build(first.kind)
            for name, p in module.named_parameters():
                p.data = state[name].clone()
        elif how == "destroyed":
            engine.destroy()
            parameters = list(module.parameters())
            assert all(p.numel() == 0 for p in parameters) or first.config  # partitioned, as under stock
            with deepspeed.zero.GatheredParameters(parameters):
                assert all(p.numel() and bool(p.isfinite().all()) for p in parameters)
        engine = start(second, world, module)
        losses = train(engine, second, rank)
        results[key] = {"losses": losses, "state": pack(whole(engine))}
        engine.destroy()
    return results


def equal_phases(pool: Any, world: int, first: Job, seconds: dict[str, Job]) -> None:
    want = pool.run(world, phases, first, seconds, "anew", timeout=240)
    for how in ("superseded", "destroyed"):
        got = pool.run(world, phases, first, seconds, how, timeout=240)
        for rank in range(world):
            for name in seconds:
                assert got[rank][name]["losses"] == want[rank][name]["losses"], (how, name)
                same(unpack(got[rank][name]["state"]), unpack(want[rank][name]["state"]))


def test_a_second_engine_goes_on_from_the_first(pool):
    """Frozen and root parameters; another rule, stage, ring size. Without destroy() of the first, and with it: bit by bit."""
    equal_phases(pool, 2, FIRST, SECOND)


@pytest.mark.slow
def test_a_second_engine_of_other_ranks_and_dtypes(pool):
    """Two rings; replicas first; tied parameters; bf16 after fp32, and as it is."""
    rings = {"cyclic": {"ring_size": 2}}
    equal_phases(
        pool, 4, Job("mlp", steps=3, **rings), {"one ring": Job("mlp", steps=2), "rings": Job("mlp", "dp", steps=2, **rings)}
    )
    stage_2 = {"config": {"zero_optimization": {"stage": 2}}}
    equal_phases(
        pool, 2, Job("mlp", steps=3, **stage_2), {"partitioned": Job("mlp", steps=2), "again": Job("mlp", steps=2, **stage_2)}
    )
    equal_phases(pool, 2, Job("llama-tied", steps=2), {"bf16": Job("llama-tied", steps=2, bf16=True)})
    equal_phases(pool, 2, Job("llama-tied", steps=2, bf16=True), {"fp32 config": Job("llama-tied", steps=2)})


def used_afterwards(rank: int, world: int, how: str) -> list[str]:
    """What an engine says that another has followed, or that is destroyed."""
    job, module = Job("mlp", timeout=20.0), models.build("mlp")
    engine = start(job, world, module)
    train(engine, job, rank, 0, 2)
    if how == "destroyed":
        engine.destroy()
    else:
        following = start(job, world, module)
    texts = [
        told(call)
        for call in (
            lambda: models.loss(engine, job.kind, models.batch(job.kind, 2, 0, rank)),
            lambda: engine.module_state_dict(),
            lambda: engine.save_checkpoint("nowhere"),
            lambda: engine.step(),
        )
    ]
    if how != "destroyed":
        train(following, job, rank, 0, 2)  # unharmed
        following.destroy()
    return texts


@pytest.mark.parametrize("how", ["destroyed", "followed"])
def test_an_engine_that_is_destroyed_says_so(pool, how):
    for texts in pool.run(2, used_afterwards, how):
        assert all(text.startswith("ValueError: this engine is destroyed") for text in texts), texts
