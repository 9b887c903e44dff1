"""Ranks that come to differ while they train are told by all ranks, within two steps; equal ranks never are."""

import time
from typing import Any
from unittest import mock

import pytest
import torch
from deepspeed.accelerator import get_accelerator

from support import pipe_work
from support.engine_work import Job, evaluate, start, train

RULES = ("dp", "cdp-v1", "cdp-v2")


def rings(rule: str | int, ring: int | str = "auto", **options: Any) -> Job:
    cyclic = {"ring_size": ring, **options.pop("cyclic", {})}
    return Job(rule=rule, optimizer=options.pop("optimizer", "groups"), steps=10, cyclic=cyclic, timeout=20.0, **options)


def diverges(rank: int, world: int, jobs: list[Job], who: int, how: str, at: int) -> list[tuple[str, int]]:
    """By job: each rank's error, and in which step it came; rank ``who`` differs from step ``at`` on."""
    results = []
    for job in jobs:
        engine, text = start(job, world), "no error"
        try:
            for step in range(job.steps):
                if rank == who and step == at:
                    disturb(engine, how)
                if rank == world - 1 and step == at + 2:
                    time.sleep(0.4)  # the others are done with the step before this rank takes their messages
                if rank == who and step == at + 1 and how == "one step":
                    engine.optimizer.param_groups[-1]["lr"] /= 2
                train(engine, job, rank, step, step + 1)
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
        results.append((text, step))
        engine.destroy()
    return results


def disturb(engine: Any, how: str) -> None:
    groups = engine.optimizer.param_groups
    if how in ("rate", "one step"):
        groups[-1]["lr"] *= 2
    elif how == "flag":
        groups[0]["maximize"] = True
    else:  # the lowest bit of one number
        master = list(engine._runtime.owner.masters.values())[-1]
        with torch.no_grad():
            master.view(-1).view(torch.int32)[-1] ^= 1


@pytest.mark.parametrize(("world", "who"), [(2, 1), (3, 0), (3, 1), (3, 2), (4, 3)])
def test_a_learning_rate_that_differs_is_told_by_all_ranks_within_two_steps(pool, world, who):
    jobs = [rings(rule) for rule in RULES]
    results = pool.run(world, diverges, jobs, who, "rate", 3, timeout=120)
    for rank, mine in enumerate(results):
        for job, (text, step) in zip(jobs, mine):
            assert text.startswith(f"DivergenceError: rank {rank}, step {step}: lr of group 1 is "), (job.rule, rank, text)
            other = 1 if who == 0 else who
            assert " on rank 0 but " in text and f" on rank {other} in step 3;" in text, (job.rule, rank, text)
            assert step <= 5, (job.rule, rank, step)


def test_a_difference_of_one_step_only_and_of_an_option_without_a_name_in_the_error(pool):
    for how, words in (("one step", "lr of group 1 is "), ("flag", "the digest of all options of the parameter groups is ")):
        for rank, ((text, step),) in enumerate(pool.run(3, diverges, [rings("cdp-v2")], 1, how, 3, timeout=60)):
            assert words in text and "on rank 1 in step 3" in text and step == 5, (how, rank, text)


def loses_a_peer(rank: int, world: int) -> str:
    """Rank 1 diverges in step 3; rank 0 ends before anybody raises for it."""
    engine = start(rings("cdp-v2"), world)
    try:
        for step in range(8):
            if rank == 1 and step == 3:
                disturb(engine, "rate")
            if rank == 0 and step == 5:
                raise RuntimeError("out of luck")
            train(engine, rings("cdp-v2"), rank, step, step + 1)
    except RuntimeError as error:
        text = f"{type(error).__name__}: {error}"
    engine.destroy()
    return text


@pytest.mark.slow
def test_a_rank_whose_peer_is_gone_says_what_it_knows(pool):
    for text in pool.run(3, loses_a_peer, timeout=60)[1:]:
        assert text.startswith("DivergenceError: ") and "lr of group 1 is " in text and "on rank 1 in step 3;" in text, text


def test_it_is_compared_as_often_as_asked_for(pool):
    jobs = [rings("cdp-v2", cyclic={"check_divergence": every}) for every in (4, 0)]
    for (text, step), (silent, last) in pool.run(2, diverges, jobs, 1, "rate", 1, timeout=60):
        assert "on rank 1 in step 4;" in text and step == 6
        assert silent == "no error" and last == 9


@pytest.mark.parametrize("who", range(4))
@pytest.mark.parametrize("how", ["rate", "bit"])
def test_rings_that_differ_are_told_by_all_ranks_of_all_rings(pool, who, how):
    jobs = [rings("dp", 2), rings("cdp-v2", 2, clip=0.3), rings("cdp-v1", 2), rings("cdp-v2", 1)]
    results = pool.run(4, diverges, jobs, who, how, 3, timeout=150)
    for rank, mine in enumerate(results):
        for job, (text, step) in zip(jobs, mine):
            ring = job.cyclic["ring_size"]
            first, second = (who % ring, who) if who >= ring else (who, who + ring)
            if how == "rate":
                assert text.startswith(f"DivergenceError: rank {rank}, step {step}: lr of group 1 is "), (job, text)
                assert f"on rank {first} but " in text and f"on rank {second} in step" in text, (job, rank, text)
            else:
                stage = ring - 1 - who % ring
                assert f"masters of stage {stage} differ between rank {first} and rank {second} before" in text, (job, rank, text)
            assert step <= 5, (job.rule, rank, step)


def long_run(rank: int, world: int, job: Job, folder: str) -> int:
    """50 steps with all that goes on between steps."""
    with mock.patch.object(type(get_accelerator()), "is_fp16_supported", lambda self: True):
        engine = start(job, world)
    for step in range(50):
        train(engine, job, rank, step, step + 1)
        if step == 20:
            engine.save_checkpoint(folder, "here")
        if step == 30:
            engine.load_checkpoint(folder, "here")
        if step in (10, 33):
            evaluate(engine, job, rank, rank + 1)
        if step in (14, 41):
            engine.flush()
    compared = engine._runtime.divergence
    engine.destroy()
    return -1 if compared is None else len(compared._own)


FP16 = {"fp16": {"enabled": True, "auto_cast": True, "initial_scale_power": 18, "loss_scale_window": 2, "hysteresis": 1}}
EQUAL = {
    1: [rings("cdp-v2", schedule="lambda")],
    2: [
        rings("cdp-v2", schedule="lambda", rounds=2, clip=0.3, cyclic={"warmup_steps": 7}),
        rings("dp", optimizer="adamw", schedule="lambda", config=FP16),
        rings("cdp-v1", optimizer="adamw", schedule="warmup", config={"zero_optimization": {"stage": 2}}),
    ],
    3: [
        rings("dp", schedule="warmup", optimizer="sgd", clip=0.3),
        rings("cdp-v2", optimizer="muon", schedule="lambda", rounds=2),
    ],
    4: [
        rings("cdp-v2", 2, schedule="lambda", clip=0.3, rounds=2, cyclic={"warmup_steps": 5}),
        rings(
            "cdp-v1",
            2,
            optimizer="adamw",
            schedule="warmup",
            config={"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}},
        ),
        rings("cdp-v2", 1, schedule="lambda"),
    ],
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("world", EQUAL)
def test_equal_ranks_raise_nothing_over_fifty_steps(pool, world, tmp_path):
    for number, job in enumerate(EQUAL[world]):
        kept = pool.run(world, long_run, job, str(tmp_path / str(number)), timeout=300)
        assert all(count == (-1 if world == 1 else 16) for count in kept), (job, kept)


def pipeline_diverges(rank: int, world: int, jobs: list[pipe_work.Job], who: int, at: int) -> list[tuple[str, int]]:
    """As ``diverges``, for a PipelineModule; rank -1 is nobody."""
    results = []
    for job in jobs:
        engine, text = pipe_work.initialize(job), "no error"
        try:
            for step in range(job.steps):
                if rank == who and step == at:
                    engine.optimizer.param_groups[0]["lr"] *= 2
                if rank == world - 1 and step == at + 1:
                    time.sleep(0.4)
                engine.train_batch(pipe_work.data(job, step))
                if step == 1:
                    engine.eval_batch(pipe_work.data(job, step))
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
        results.append((text, step))
        engine.destroy()
    return results


@pytest.mark.parametrize(("world", "who"), [(2, 0), (2, 1), (3, 0), (3, 1), (3, 2), (3, -1)])
def test_in_pipelines_too(pool, world, who):
    """Three ranks are a pyramid of two stages, where ranks 0 and 1 have replicas of stage 0."""
    jobs = [pipe_work.Job(2, rule, clip=0.3, warmup=True, steps=8, timeout=10.0) for rule in RULES]
    for rank, mine in enumerate(pool.run(world, pipeline_diverges, jobs, who, 3, timeout=120)):
        for job, (text, step) in zip(jobs, mine):
            if who < 0:
                assert text == "no error" and step == 7, (job.rule, text)
            elif world == 3 and who == 0 and rank != 0:  # rank 0 owns no stage, so only it knows
                assert text.startswith("HandoffError"), (job.rule, rank, text)
            else:
                assert text.startswith(f"DivergenceError: rank {rank}, lr of group 0 is "), (job.rule, rank, text)
                assert step <= 4 and f"on rank {who} " in text and " in step 3;" in text, (job.rule, rank, text)
