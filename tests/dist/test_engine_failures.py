"""Nothing hangs: ranks that differ or stop early end the others in time, with an error that says where they were and for whom.

What fails while it runs is in test_faults.py.
"""

import os
import re
import time
from typing import Any

import pytest

from support import models
from support.engine_work import Job, evaluate, start, train
from support.sampling import some
from support.workers import Failure

SECONDS = 3.0  # cyclic.timeout_seconds
SLACK = 6.0  # closing, on two shared cores


WHERE = re.compile(
    r"HandoffError: rank (\d+), step (\d+), "
    r"(stage (\d+), (forward|backward|norm|update|total)|flush|saving|gather)"
    r".*(stream (\w+)|rank\(s\) \[\d+\] missing|closed)"
)


def check_named(failure: Any, rank: int, world: int) -> None:
    """The last line of the traceback names this rank, its step and stage, a stream and a peer; and it came in time."""
    assert isinstance(failure, Failure), (rank, failure)
    line = [x for x in failure.splitlines() if "HandoffError: " in x][-1]
    found = WHERE.search(line)
    assert found and int(found.group(1)) == rank, line
    assert re.search(r"stream \w+: rank \d|on stream \w+ (from|for) rank \d|stream \w+: the connection to rank \d", line), line
    seconds = float(re.search(r"seconds with destroy: ([\d.]+)", failure).group(1))
    assert seconds < 2 * SECONDS + SLACK, (rank, seconds)


def stops_early(rank: int, world: int, how: str, rule: str) -> float | str:
    """Rank 1 ends after four steps, the others want forty."""
    job = Job("mlp", rule, timeout=SECONDS)
    engine = start(job, world)
    began = time.monotonic()
    try:
        train(engine, job, rank, 0, 4 if rank == 1 else 40)
        if rank == 1 and how == "saves":
            engine.save_checkpoint("/nonexistent/never-written")
        if rank == 1 and how == "evaluates":
            evaluate(engine, job, rank, 1)
        if rank == 1 and how == "returns":
            return "returned"  # the engine is still there; its end is the script's
        engine.destroy()
    except BaseException as error:
        engine.destroy()
        error.add_note(f"seconds with destroy: {time.monotonic() - began:.2f}")
        raise
    return time.monotonic() - began


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "rule"), [("destroys", "cdp-v2"), ("returns", "cdp-v1"), ("evaluates", "cdp-v2"), ("saves", "cdp-v2")]
)
def test_unequal_numbers_of_steps(pool, how, rule):
    outcomes = pool.run_failing(3, stops_early, how, rule, timeout=180)
    for rank in (0, 2):
        check_named(outcomes[rank], rank, 3)
    if how in ("evaluates", "saves"):  # the collective names who is missing
        text = outcomes[1].splitlines()
        assert any("HandoffError: rank 1, step 4, flush" in x for x in text), outcomes[1]


def differs(rank: int, world: int, what: list[str]) -> list[tuple[str, float]]:
    """By mismatch: rank 1 starts with something else than the others; each rank's error and seconds."""
    results = []
    for name in what:
        odd, module = rank == 1, models.MLP()
        job = Job("mlp", "cdp-v2", timeout=SECONDS)
        if name == "rule" and odd:
            job = Job("mlp", "cdp-v1", timeout=SECONDS)
        if name == "rounds" and odd:
            job = Job("mlp", "cdp-v2", 2, timeout=SECONDS)
        if name == "clip" and odd:
            job = Job("mlp", "cdp-v2", clip=0.5, timeout=SECONDS)
        if name == "width" and odd:
            module = models.MLP(width=6)
        if name == "layers" and odd:
            module = models.MLP(blocks=7)
        if name == "dtype" and odd:
            job = Job("mlp", "cdp-v2", bf16=True, timeout=SECONDS)
        began = time.monotonic()
        try:
            start(job, world, module)
            results.append(("no error", 0.0))
        except ValueError as error:
            results.append((str(error), time.monotonic() - began))
    return results


MISMATCHES = {
    "rule": ("cyclic.rule", "'cdp-v2'", "'cdp-v1'"),
    "rounds": ("gradient_accumulation_steps", "1", "2"),
    "clip": ("gradient_clipping", "0.0", "0.5"),
    "width": ("parameter names, shapes and dtypes",),
    "layers": ("number of parameters", "12", "14"),
    "dtype": ("dtypes", "float32", "bfloat16"),
}


def test_configs_and_models_that_differ_between_ranks(pool):
    names = some(MISMATCHES, 3, "mismatches")
    results = pool.run(3, differs, names, timeout=180)
    for rank, mine in enumerate(results):
        for name, (text, seconds) in zip(names, mine):
            words, other = MISMATCHES[name], "on rank 1" if rank != 1 else "on rank 0"
            assert all(w in text for w in words) and f"on rank {rank}" in text and other in text, (rank, name, text)
            assert "same config, model" in text and seconds < SECONDS + SLACK, (rank, name, seconds)


def enabled_on_one(rank: int, world: int, who: int, folder: str) -> None:
    """As a script does that lets the error end it."""
    began = time.monotonic()
    try:
        start(Job("mlp", "cdp-v2" if rank == who else None, timeout=SECONDS), world)
    except Exception as error:
        with open(os.path.join(folder, str(rank)), "w") as file:
            file.write(f"{time.monotonic() - began:.1f} {type(error).__name__}: {error}")
        os._exit(1)


def test_enabled_on_one_rank_only(pool, tmp_path):
    """The rank with the engine says who did not come, and its end is the end of the other's wait in stock DeepSpeed."""
    assert pool.run_failing(2, enabled_on_one, 0, str(tmp_path), timeout=25) == [1, 1]
    seconds, text = (tmp_path / "0").read_text().split(" ", 1)
    assert text.startswith("HandoffError: rank 0, connecting the 2 ranks") and "rank(s) [1] missing after 3.0 s" in text, text
    assert float(seconds) < SECONDS + SLACK and (tmp_path / "1").read_text()


def own_barriers(rank: int, world: int, rules: list[str | int]) -> list[float]:
    results = []
    for rule in rules:
        job = Job("mlp", rule, 1 + (rule == "cdp-v2"), steps=5, barriers=True, timeout=SECONDS * 3)
        engine = start(job, world)
        results.append(sum(train(engine, job, rank).values()))
        engine.destroy()
    return results


@pytest.mark.parametrize("world", [2, 3, 4])
def test_a_users_own_collectives_between_steps(pool, world):
    """HF Trainer gathers losses as it logs: no step may need a neighbour to be in its next one."""
    rules: list[str | int] = ["dp", "cdp-v1", "cdp-v2", *range(1, 2 * world - 1)]
    pool.run(world, own_barriers, rules, timeout=180)
