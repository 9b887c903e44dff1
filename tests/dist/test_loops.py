"""Shapes of training loops: what DeepSpeed's users write, each equal to the plain loop or refused in one sentence."""

import contextlib
import os
import tempfile
import time
from typing import Any

import pytest
import torch

from support import models
from support.engine_work import OFF_STEPS, Job, evaluate, pack, run_jobs, same, start, told, train, unpack, whole

# ---- accumulation -----------------------------------------------------------------------------------------------------------


def micro(engine: Any, job: Job, step: int, m: int, rank: int) -> torch.Tensor:
    return models.loss(engine, job.kind, models.batch(job.kind, step, m, rank))


def with_no_sync(rank: int, world: int, job: Job) -> tuple[bytes, str]:
    """``no_sync`` around all but the last micro-batch."""
    engine = start(job, world)
    for step in range(job.steps):
        for m in range(job.rounds - 1):
            with engine.no_sync():
                engine.backward(micro(engine, job, step, m, rank))
            engine.step()
        engine.backward(micro(engine, job, step, job.rounds - 1, rank))
        engine.step()
    state = pack(whole(engine))
    try:
        with engine.no_sync():
            engine.step()
        text = "no error"
    except AssertionError as error:
        text = str(error)
    torch.distributed.barrier()
    engine.destroy()
    return state, text


def test_no_sync_accumulates(pool):
    """It once let step() through, which DeepSpeed forbids."""
    for rule in ("dp", "cdp-v2"):
        job = Job("mlp", rule, 3, steps=3)
        want = pool.run(2, run_jobs, [job], timeout=120)[0][0]["state"]
        for state, text in pool.run(2, with_no_sync, job, timeout=120):
            same(unpack(state), unpack(want))
            assert "illegal to call Engine.step() inside no_sync" in text


def unmanaged(rank: int, world: int, job: Job, counts: list[int]) -> tuple[bytes, int, str]:
    engine = start(job, world)
    for step, count in enumerate(counts):
        for m in range(count):
            engine.backward(micro(engine, job, step, m, rank))
        engine.step()
    samples, state = engine.global_samples, pack(whole(engine))

    def too_many() -> None:
        for m in range(job.rounds + 1):
            engine.backward(micro(engine, job, 9, m, rank))

    text = "" if job.rule is None else told(too_many)
    torch.distributed.barrier()
    engine.destroy()
    return state, samples, text


def test_unmanaged_gradient_accumulation_equals_zero3(pool):
    """The script decides when a step is over; steps of 1 to 3 micro-batches, on all ranks alike."""
    config = {"managed_gradient_accumulation": False, "zero_optimization": {"stage": 3, "overlap_comm": False}}
    counts = [3, 1, 2, 3]
    ours, stock = (
        pool.run(2, unmanaged, Job("mlp", rule, 3, config=config, optimizer="sgd"), counts, timeout=120) for rule in ("dp", None)
    )
    for (state, samples, text), (expected, their_samples, _) in zip(ours, stock):
        same(unpack(state), unpack(expected), 1e-5, 1e-7)
        assert samples == their_samples
        assert "micro-batch 4 came before engine.step()" in text


# ---- forwards and losses ----------------------------------------------------------------------------------------------------


def sums_of_losses(rank: int, world: int, job: Job) -> bytes:
    """Two losses of one forward, added before the backward."""
    engine = start(job, world)
    for step in range(job.steps):
        x = models.batch(job.kind, step, 0, rank)
        y = engine(x)
        one, two = (y - x.roll(1, 1)).pow(2).mean() * 0.25, (y - x.roll(1, 1)).pow(2).mean() * 0.75
        engine.backward(one + two)
        engine.step()
    state = pack(whole(engine))
    engine.destroy()
    return state


def test_several_losses_added_up(pool):
    job = Job("mlp", "cdp-v2", optimizer="sgd", steps=4)
    want = unpack(pool.run(2, run_jobs, [job], timeout=120)[0][0]["state"])
    for state in pool.run(2, sums_of_losses, job, timeout=120):
        same(unpack(state), want, 1e-5, 1e-6)


def no_grad_in_train_mode(rank: int, world: int, job: Job) -> tuple[bytes, dict[str, str], list[float]]:
    """A forward under no_grad between steps, in train() mode: collective as an evaluation; inside a step it is refused."""
    engine = start(job, world)
    train(engine, job, rank, 0, 2)
    values = []
    for _ in range(1 + rank):
        with torch.no_grad():
            values.append(micro(engine, job, OFF_STEPS, 0, 0).item())
    train(engine, job, rank, 2, 4)
    state = pack(whole(engine))
    texts = {}
    loss = micro(engine, job, 4, 0, rank)
    with torch.no_grad():
        texts["before the backward"] = told(lambda: micro(engine, job, 4, 0, rank))
    engine.backward(loss)
    with torch.no_grad():
        texts["inside a step"] = told(lambda: micro(engine, job, 4, 0, rank))
    torch.distributed.barrier()
    engine.destroy()
    return state, texts, values


def test_forward_under_no_grad(pool):
    job = Job("mlp", "cdp-v2", 2, steps=4, flush_after=(1,), cyclic={"any_order": False})
    want = unpack(pool.run(2, run_jobs, [job], timeout=120)[0][0]["state"])
    results = pool.run(2, no_grad_in_train_mode, job, timeout=120)
    for state, texts, values in results:
        same(unpack(state), want)
        assert "a forward without gradients came between a forward and its backward in step 4" in texts["before the backward"]
        assert "1 of 2 micro-batches are done; call engine.step() first" in texts["inside a step"]
        assert set(values) == {results[0][2][0]}


# ---- evaluation and generation ----------------------------------------------------------------------------------------------


def evaluates(rank: int, world: int, job: Job, batches: list[int]) -> bytes:
    engine = start(job, world)
    for step in range(job.steps):
        train(engine, job, rank, step, step + 1)
        if step == 1:
            values = evaluate(engine, job, rank, batches[rank])
            assert len(values) == batches[rank] and all(v == v for v in values)
    state = pack(whole(engine))
    engine.destroy()
    return state


def test_a_rank_without_any_batch_to_evaluate(pool):
    """It once went on training while the others waited for it, until the timeout."""
    job = Job("mlp", "cdp-v2", steps=4, timeout=15.0)
    want = unpack(pool.run(3, run_jobs, [Job("mlp", "cdp-v2", steps=4, flush_after=(1,))], timeout=120)[0][0]["state"])
    for batches in ([0, 2, 1], [3, 0, 0], [0, 0, 0]):
        for state in pool.run(3, evaluates, job, batches, timeout=120):
            same(unpack(state), want)


def generates(rank: int, world: int, job: Job) -> bytes:
    """Each rank another prompt and another length, through the module and through the engine; then training goes on."""
    engine = start(job, world)
    for step in range(job.steps):
        train(engine, job, rank, step, step + 1)
        if step in (1, 3):
            plain = models.build(job.kind)
            engine.eval()
            ids = torch.arange(1, 4 + rank)[None]
            lengths = {"max_new_tokens": 2 + 7 * rank, "do_sample": False}
            got = (engine.module if step == 1 else engine).generate(ids, **lengths)
            plain.load_state_dict(engine.module.state_dict())
            plain.eval()
            assert torch.equal(got, plain.generate(ids, **lengths)) and got.shape[1] > ids.shape[1]
            engine.train()
    state = pack(whole(engine))
    engine.destroy()
    return state


def test_generate_with_other_lengths_on_every_rank(pool):
    job = Job("llama", "cdp-v2", steps=5)
    want = unpack(pool.run(2, run_jobs, [Job("llama", "cdp-v2", steps=5, flush_after=(1, 3))], timeout=180)[0][0]["state"])
    for state in pool.run(2, generates, job, timeout=180):
        same(unpack(state), want)


def with_default_device(rank: int, world: int, device: str | None, job: Job) -> tuple[bytes, float]:

    def under() -> contextlib.AbstractContextManager:
        return torch.device(device) if device else contextlib.nullcontext()

    module = models.build(job.kind)
    with under():
        engine = start(job, world, module)
    for step in range(3):
        loss = models.loss(engine, job.kind, models.batch(job.kind, step, 0, rank))
        engine.backward(loss)
        with under():
            engine.step()
    with under():
        engine.flush()
    with tempfile.TemporaryDirectory() if rank == 0 else contextlib.nullcontext() as made:
        import torch.distributed as dist

        box = [made]
        dist.broadcast_object_list(box)
        with under():
            engine.save_checkpoint(os.path.join(box[0], "saved"))
            engine.load_checkpoint(os.path.join(box[0], "saved"))
        dist.barrier()
    state = pack(whole(engine))
    engine.destroy()
    return state, loss.item()


@pytest.mark.parametrize("rule", ["cdp-v2", "dp"])
def test_default_device_of_the_script_is_none_of_ours(pool, rule):
    """Scripts call torch.set_default_device("cuda"); here the default is "meta", where what is made by mistake has no values."""
    job = Job("llama-tied", rule, clip=0.5)
    want, got = pool.run(2, with_default_device, None, job), pool.run(2, with_default_device, "meta", job)
    for (state, loss), (expected, their_loss) in zip(got, want):
        assert loss == their_loss
        same(unpack(state), unpack(expected))


# ---- the end ------------------------------------------------------------------------------------------------------------------
def ends_without_a_flush(rank: int, world: int, rule: str) -> int:
    """Rank 0 is done with its last step, and closes, while the last rank is in its backward; sums exceed what a socket holds."""
    job = Job("mlp", rule, optimizer="sgd", timeout=10.0)
    torch.manual_seed(0)
    engine = start(job, world, models.MLP(width=512, blocks=4))
    for step in range(3):
        loss = engine(torch.randn(4, 512)).pow(2).mean()
        if (rank, step) == (world - 1, 2):
            for watched in (loss, engine.module.blocks[1][0].weight):
                watched.register_hook(lambda gradient: time.sleep(0.7))
        engine.backward(loss)
        engine.step()
    engine.destroy()
    return engine.global_steps


@pytest.mark.parametrize("rule", ["cdp-v2", "cdp-v1", "dp"])
def test_a_script_may_end_without_a_flush_while_others_are_in_their_last_step(pool, rule):
    assert pool.run(2, ends_without_a_flush, rule, timeout=60) == [3, 3]
