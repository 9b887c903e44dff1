"""A mistake that one rank's script makes and catches leaves its engine as it was: training goes on, bitwise as without it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from support import models, pipe_work
from support.engine_work import Job, evaluate, pack, start, unpack, whole

ROUNDS = 2


def told(call: Callable[[], Any]) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def train_with_mistakes(rank: int, world: int, job: Job, who: int | None) -> dict[str, Any]:
    """An ordinary loop with an evaluation in it; rank ``who`` makes each mistake once."""
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param

    engine = start(job, world)
    texts: dict[str, str] = {}
    losses: list[float] = []
    spent = [torch.zeros((), requires_grad=True) * 1]

    def gathered() -> None:
        with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
            pass

    def traced() -> None:
        with engine.cyclic_trace("nowhere.json"):
            pass

    def unsynchronized() -> None:
        with engine.no_sync():
            engine.step()

    def first() -> torch.nn.Parameter:
        return next(engine.module.parameters())

    def mistakes(**calls: Callable[[], Any]) -> None:
        if rank == who:
            texts.update({name: told(call) for name, call in calls.items()})

    for step in range(job.steps):
        for m in range(ROUNDS):
            inputs = models.batch(job.kind, step, m, rank)
            if m == 0 and step:
                mistakes(
                    backward_without_forward=lambda: engine.backward(spent[0]),
                    save_nowhere=lambda: engine.save_checkpoint(""),
                    load_own=lambda: engine.load_checkpoint("x", custom_load_fn=print),
                    large_batch=lambda: engine.set_train_batch_size(10**6),
                    closure=lambda: engine.optimizer.step(lambda: 0),
                )
            loss = models.loss(engine, job.kind, inputs)
            mistakes(
                forward_again=lambda inputs=inputs: models.loss(engine, job.kind, inputs),
                many_numbers=lambda loss=loss: engine.backward(loss.expand(2)),
                no_tensor=lambda: engine.backward(1.0),
                no_graph=lambda loss=loss: engine.backward(loss.detach()),
                unknown_argument=lambda loss=loss: engine.backward(loss, keep=True),
                flush_inside=lambda: engine.flush(),
                state_inside=lambda: engine.module_state_dict(),
                save_inside=lambda: engine.save_checkpoint("nowhere"),
                trace_inside=traced,
                gather_inside=gathered,
                read_inside=lambda: safe_get_full_fp32_param(first()),
            )
            if m == ROUNDS - 1:
                mistakes(step_first=lambda: engine.step())
            engine.backward(loss)
            spent[0] = loss
            losses.append(loss.item())
            mistakes(backward_again=lambda loss=loss: engine.backward(loss), step_unsynchronized=unsynchronized)
            if m == 0:
                mistakes(flush_in_step=lambda: engine.flush())
            else:
                mistakes(too_many=lambda inputs=inputs: models.loss(engine, job.kind, inputs))
            engine.step()
        if step in job.eval_after:
            evaluate(engine, job, rank, rank + 1)
    failed, state, norm = engine._failed, whole(engine), engine.get_global_grad_norm()
    engine.destroy()
    return {"texts": texts, "losses": losses, "state": pack(state), "failed": failed, "norm": norm}


WANTED = {
    "backward_without_forward": "without a training forward of its own",
    "save_nowhere": "save_dir is ''",
    "load_own": "custom_load_fn is given",
    "large_batch": "needs more micro-batches per step",
    "closure": "optimizer.step() got a closure",
    "forward_again": "came again before the backward of the forward before it",
    "many_numbers": "is a tensor of shape (2,)",
    "no_tensor": "is a float",
    "no_graph": "has no grad_fn",
    "unknown_argument": "TypeError",
    "flush_inside": "between a forward and its backward",
    "state_inside": "between a forward and its backward",
    "save_inside": "between a forward and its backward",
    "trace_inside": "began in the middle of step",
    "gather_inside": "came between a forward and its backward in step",
    "read_inside": "in the middle of step",
    "step_first": "came before the backward of the last forward",
    "backward_again": "without a training forward of its own",
    "step_unsynchronized": "inside no_sync",
    "flush_in_step": "1 of 2 micro-batches are done",
    "too_many": "micro-batch 3 came before engine.step()",
}


@pytest.mark.parametrize("stage", [3, 2])
@pytest.mark.parametrize("who", [0, 1])
def test_training_goes_on_after_a_caught_mistake(pool, who, stage):
    config = {"zero_optimization": {"stage": stage}}
    # with "auto" the first micro-batch would take some of the mistakes for what all ranks do
    cyclic = {"any_order": False}
    job = Job("mlp", rounds=ROUNDS, steps=5, clip=0.5, eval_after=(1, 3), timeout=20.0, config=config, cyclic=cyclic)
    clean, mistaken = (pool.run(2, train_with_mistakes, job, rank) for rank in (None, who))
    texts = mistaken[who]["texts"]
    assert texts.keys() == WANTED.keys()
    for name, words in WANTED.items():
        if not (stage == 2 and name == "gather_inside"):  # parameters are there
            assert words in texts[name], (name, texts[name])
    for a, b in zip(clean, mistaken):
        assert not b["failed"] and a["losses"] == b["losses"] and a["norm"] == b["norm"]
        want, got = unpack(a["state"]), unpack(b["state"])
        assert want.keys() == got.keys() and all(torch.equal(want[n], got[n]) for n in want)


def pipeline_with_mistakes(rank: int, world: int, job: pipe_work.Job, who: int | None) -> dict[str, Any]:
    """As ``train_with_mistakes``, for a PipelineModule."""
    engine = pipe_work.initialize(job)
    texts: dict[str, str] = {}
    losses: list[float] = []

    def without_gradients() -> None:
        with torch.no_grad():
            engine.train_batch(pipe_work.data(job, 0))

    def mistakes(**calls: Callable[[], Any]) -> None:
        if rank == who:
            texts.update({name: told(call) for name, call in calls.items()})

    mistakes(no_data=lambda: engine.train_batch())
    for step in range(job.steps):
        mistakes(
            exhausted=lambda: engine.train_batch(iter(())),
            without_gradients=without_gradients,
            save_nowhere=lambda: engine.save_checkpoint(""),
            load_own=lambda: engine.load_checkpoint("x", custom_load_fn=print),
            odd_batch=lambda: engine.set_train_batch_size(9),
            sum_of_losses=lambda: engine.eval_batch(iter(()), reduce_output="sum"),
        )
        losses.append(float(engine.train_batch(pipe_work.data(job, step))))
        if step in job.eval_after:
            losses.append(float(engine.eval_batch(pipe_work.data(job, 100))))
    engine.flush()
    state = {n: m.detach().clone() for o in engine._runtime.owners.values() for n, m in o.masters.items()}
    failed = engine._failed
    engine.destroy()
    return {"texts": texts, "losses": losses, "state": pack(state), "failed": failed}


PIPELINE = {
    "no_data": "has no data on rank",
    "exhausted": "StopIteration",
    "without_gradients": "requires gradients enabled",
    "save_nowhere": "save_dir is ''",
    "load_own": "custom_load_fn is given",
    "odd_batch": "takes a multiple of 2 micro-batches",
    "sum_of_losses": "reduce_output is 'sum'",
}


@pytest.mark.parametrize("who", [0, 1])
def test_a_pipeline_goes_on_after_a_caught_mistake(pool, who):
    job = pipe_work.Job(2, clip=0.5, steps=4, eval_after=(1,), timeout=20.0)
    clean, mistaken = (pool.run(2, pipeline_with_mistakes, job, rank) for rank in (None, who))
    texts = mistaken[who]["texts"]
    assert texts.keys() == PIPELINE.keys()
    for name, words in PIPELINE.items():
        assert words in texts[name], (name, texts[name])
    for a, b in zip(clean, mistaken):
        assert not b["failed"] and a["losses"] == b["losses"]
        want, got = unpack(a["state"]), unpack(b["state"])
        assert want.keys() == got.keys() and all(torch.equal(want[n], got[n]) for n in want)
