"""``cyclic.warmup_steps`` on real engines: parity with the oracle, resuming before, at and after the switch; the warning."""

import logging

import pytest
import torch

from support.checkpoint_work import resumes
from support.engine_work import Job, oracle, run_jobs, same, start, train, unpack


def job(rule, warmup: int, **options) -> Job:
    return Job(rule=rule, cyclic={"warmup_steps": warmup}, **options)


COVER = {
    2: [
        job("cdp-v1", 2, kind="mlp", rounds=2, optimizer="sgd", eval_after=(0,), correction="extrapolate"),
        job("cdp-v2", 3, kind="llama-tied", clip=0.3, schedule="warmup", correction="predict"),
    ],
    3: [
        job("cdp-v2", 2, kind="rooted", rounds=2, clip=0.3, optimizer="groups", schedule="lambda", flush_after=(4,)),
        job(3, 4, kind="mlp", style="accelerate", barriers=True, correction="predict"),
    ],
}


@pytest.mark.parametrize("world", COVER)
def test_dp_then_the_rule_equals_the_oracle(pool, world):
    jobs = COVER[world]
    results = pool.run(world, run_jobs, jobs, timeout=240)
    for at, one in enumerate(jobs):
        ranks = [result[at] for result in results]
        want = oracle(one, ranks[0]["stages"], world)
        assert {place: value for r in ranks for place, value in r["losses"].items()} == want.losses, one
        for r in ranks:
            same(unpack(r["state"]), want.masters)


# they save after 3 steps and train 6
RESUME = [
    job("cdp-v2", 5, kind="mlp", optimizer="sgd", schedule="lambda", clip=0.3),  # inside the warm-up
    job("cdp-v2", 3, kind="llama-tied", clip=0.3),  # at the switch
    job("cdp-v1", 2, kind="mlp", rounds=2, schedule="warmup", clip=0.3),
]  # after it, from an engine that was inside


def test_resuming_is_bitwise_continuing_on_either_side_of_the_switch(pool, tmp_path):
    pool.run(3, resumes, RESUME, str(tmp_path), timeout=240)


def back_in_time(rank: int, world: int, folder: str) -> None:
    """An engine past its warm-up loads a checkpoint from inside it."""
    one = job("cdp-v2", 3, kind="mlp", optimizer="sgd")
    engine = start(one, world)
    train(engine, one, rank, 0, 2)
    engine.save_checkpoint(folder)
    losses = train(engine, one, rank, 2, 6)
    assert engine._runtime.executor.schedule.threshold == world - 1
    engine.load_checkpoint(folder)
    assert engine._runtime.executor.schedule.threshold == 0
    assert train(engine, one, rank, 2, 6) == losses
    engine.destroy()


def test_going_back_into_the_warm_up(pool, tmp_path):
    pool.run(2, back_in_time, str(tmp_path), timeout=120)


def warnings_of(rank: int, world: int, rules: list) -> list[list[str]]:
    from deepspeed.utils import logger

    found = []
    for rule, rounds in rules:
        texts: list[str] = []

        class Keep(logging.Handler):
            def emit(self, record, texts=texts):
                texts.append(record.getMessage())

        handler = Keep()
        logger.addHandler(handler)
        engine = start(Job("mlp", rule, rounds), world)
        logger.removeHandler(handler)
        found.append([t for t in texts if "cyclic.rule has K" in t])
        engine.destroy()
    torch.distributed.barrier()
    return found


def test_a_rule_that_stalls_is_warned_of_with_the_stall(pool):
    results = pool.run(3, warnings_of, [("dp", 1), (1, 2), ("cdp-v2", 1), ("cdp-v1", 1), (3, 1)], timeout=120)
    dp, one, *others = results[0]
    assert "takes 12 stage times" in dp[0] and "4N-2K = 12" in dp[0] and "instead of 6, 2.00 times" in dp[0]
    assert "takes 16 stage times" in one[0] and "4N-2K = 10" in one[0] and "instead of 12, 1.33 times" in one[0]
    assert others == [[], [], []] and not any(map(any, results[1:])), "rank 0 warns, and only where a step waits"
