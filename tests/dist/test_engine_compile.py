"""Compiled blocks train as eager ones do: torch.compile compiles a module's hooks along with it, ours must stay out of that."""

import pytest
import torch

from support import models
from support.engine_work import Job, start, train, whole


def compiled(rank: int, world: int, how: str) -> dict:
    fused = how == "fused blocks"
    job, results = Job("mlp", "cdp-v2", steps=4, cyclic={"gradient_accumulation_fusion": fused}), []
    for compiling in (False, True):
        torch._dynamo.reset()
        module = models.build(job.kind)
        for block in module.blocks if compiling and how != "engine" else ():
            block.compile(backend="aot_eager")
        engine = start(job, world, module)
        if compiling and how == "engine":
            engine.compile(backend="aot_eager")
        losses = train(engine, job, rank)
        results.append((losses, {k: v.tolist() for k, v in whole(engine).items()}))
        engine.destroy()
    if fused:  # what is compiled is not fused: the same to rounding
        (losses, weights), (others, other_weights) = results
        close = all(
            torch.allclose(torch.tensor(v), torch.tensor(other_weights[k]), rtol=1e-5, atol=1e-6) for k, v in weights.items()
        )
        return {"losses": all(abs(v - others[k]) < 1e-5 for k, v in losses.items()), "weights": close}
    return {"losses": results[0][0] == results[1][0], "weights": results[0][1] == results[1][1]}


@pytest.mark.parametrize("how", ["blocks", "fused blocks"])
def test_compiled_blocks(pool, how):
    assert pool.run(2, compiled, how, timeout=170) == 2 * [{"losses": True, "weights": True}]


def test_engine_compile(pool):
    assert pool.run(2, compiled, "engine", timeout=170) == 2 * [{"losses": True, "weights": True}]
