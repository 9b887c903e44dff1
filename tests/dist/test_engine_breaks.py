"""What a hostile tester broke in the engine, in real processes."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from support import models
from support.engine_work import Job, run_jobs, same, start, unpack


@pytest.mark.parametrize("rounds", [2, 4])
def test_loss_backward_on_hugging_face_outputs_scales_as_in_zero3(pool, rounds):
    """DeepSpeed divides by the accumulation steps once per output tensor: loss and logits both lie on the way."""
    job = Job("llama", "dp", rounds, steps=3, optimizer="sgd", style="loss")
    results = pool.run(2, run_jobs, [job, replace(job, rule=None), replace(job, style="engine")], timeout=120)
    ours, stock, engine = (unpack(x["state"]) for x in results[0])
    same(ours, stock, 1e-5, 1e-7)
    same(ours, engine, 1e-5, 1e-7)


def raise_batch_size(rank: int, world: int) -> str:
    engine = start(Job("mlp", "cdp-v2", 2), world)
    engine.set_train_batch_size(4 * world)  # lowering it works
    try:
        engine.set_train_batch_size(4 * world * 3)
    except ValueError as error:
        return str(error)
    finally:
        engine.destroy()
    return ""


def test_set_train_batch_size_cannot_go_above_the_timetable(pool):
    assert all("start with a larger gradient_accumulation_steps" in text for text in pool.run(2, raise_batch_size))


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((8,), 1.1))

    def forward(self, x):
        self.inner = torch.tanh(x) * self.scale
        return torch.tanh(self.inner)


class Other(nn.Sequential):
    """From the second forward on, its result comes from inside of a unit, whose output is not used."""

    result = "output"

    def forward(self, x):
        output = super().forward(x)
        result, self.result = self.result, "inner"
        return output if result == "output" else self[2].inner


def change_result(rank: int, world: int, style: str) -> str:
    engine = start(Job(), world, Other(*(Part() for _ in range(8))))
    try:
        for step in range(2):
            loss = engine(models.batch("mlp", step, 0, rank)).pow(2).mean()
            loss.backward() if style == "loss" else engine.backward(loss)
            engine.step()
    except RuntimeError as error:
        return str(error)
    finally:
        dist.barrier()  # the other rank must come to its own error
        engine.destroy()
    return ""


@pytest.mark.parametrize("style", ["engine", "loss"])
def test_a_backward_that_comes_to_no_output_reads_no_absent_parameter(pool, style):
    for said in pool.run(2, change_result, style, env={"DEEPSPEED_CDP_NATIVE": "1"}):
        assert "parameters that are not there" in said
