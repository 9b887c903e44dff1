"""Compiled blocks train as eager ones do: torch.compile compiles a module's hooks along with it, ours must stay out of that."""

import models
import torch
from engine_work import Job, start, train, whole


def compiled(rank: int, world: int, how: str) -> dict:
    job, results = Job("mlp", "cdp-v2", steps=4), []
    for compiling in (False, True):
        torch._dynamo.reset()
        module = models.build(job.kind)
        for block in module.blocks if compiling and how == "blocks" else ():
            block.compile(backend="aot_eager")
        engine = start(job, world, module)
        if compiling and how == "engine":
            engine.compile(backend="aot_eager")
        losses = train(engine, job, rank)
        results.append((losses, {k: v.tolist() for k, v in whole(engine).items()}))
        engine.destroy()
    return {"losses": results[0][0] == results[1][0], "weights": results[0][1] == results[1][1]}


def test_compiled_blocks(pool):
    assert pool.run(2, compiled, "blocks", timeout=170) == 2 * [{"losses": True, "weights": True}]


def test_engine_compile(pool):
    assert pool.run(2, compiled, "engine", timeout=170) == 2 * [{"losses": True, "weights": True}]
