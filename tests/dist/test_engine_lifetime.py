"""The beginning and the end of an engine: the plan's dry-run at ``initialize``; nothing outlives ``destroy``."""

import atexit
import re
from typing import Any

import pytest
import torch

from deepspeed_cdp.model.remains import make_whole
from support import models, pipe_work
from support.engine_work import Job, start, told, train
from support.processes import both_ranks


def names(module: torch.nn.Module) -> dict[str, set[str]]:
    """Attributes of the module, its submodules and parameters, and of all tensors."""
    found = {f"parameter {n}": set(vars(p)) for n, p in module.named_parameters()}
    return found | {f"module {n}": set(vars(m)) for n, m in module.named_modules()} | {"torch.Tensor": set(vars(torch.Tensor))}


class Callbacks:
    """Exit callbacks that are registered and not unregistered again."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.left: list[Any] = []
        register, unregister = atexit.register, atexit.unregister
        monkeypatch.setattr(atexit, "register", lambda f, *a, **k: (self.left.append(f), register(f, *a, **k))[1])
        monkeypatch.setattr(atexit, "unregister", lambda f: (self.left.remove(f) if f in self.left else None, unregister(f))[1])

    def ours(self) -> list[Any]:
        return [f for f in self.left if f.__module__.startswith("deepspeed_cdp.integration")]


def lives_of_engines(rank: int, world: int, stage: int) -> list[Any]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        callbacks = Callbacks(monkeypatch)
        job = Job("mlp", steps=2, config={"zero_optimization": {"stage": stage}})
        modules = [models.build("mlp") for _ in range(2)]
        before, left = [names(m) for m in modules], []
        engines = [start(job, world, m) for m in modules]
        assert len(callbacks.ours()) == 2 and hasattr(torch.Tensor, "ds_status")
        train(engines[0], job, rank)
        for engine, other in zip(engines, reversed(engines)):
            engine.destroy()
            engine.destroy()
            alive = other is engines[1]
            assert hasattr(torch.Tensor, "ds_status") == alive and len(callbacks.ours()) == alive
        for module, had in zip(modules, before):
            make_whole(module)  # under stage 3 the parameters look as after zero.Init, until they are taken over
            left.append({k: v - had[k] for k, v in names(module).items() if v - had[k]})
        return left


@pytest.mark.parametrize("stage", [3, 2])
def test_nothing_outlives_destroy(pool, stage):
    for left in pool.run(2, lives_of_engines, stage):
        assert left == [{}, {}]


def lives_of_pipelines(rank: int, world: int) -> int:
    with pytest.MonkeyPatch.context() as monkeypatch:
        callbacks = Callbacks(monkeypatch)
        engine = pipe_work.initialize(pipe_work.Job(2))
        assert len(callbacks.ours()) == 1
        engine.destroy()
        engine.destroy()
        return len(callbacks.ours())


@pytest.mark.parametrize("world", [1, 2])
def test_no_exit_callback_outlives_a_pipeline(pool, world):
    assert pool.run(world, lives_of_pipelines) == [0] * world


def dry_runs(rank: int, world: int, fails: bool) -> list[str]:
    """What rank 0's dry-run says at initialize, and what each rank does then: a ring, a ring with a warm-up, a pipeline."""
    from deepspeed.utils import logger

    from deepspeed_cdp.verify import check, pipeline
    from deepspeed_cdp.verify.pipeline import ScheduleError
    from deepspeed_cdp.verify.well_formed import PlanError

    def broken(error: type[Exception]) -> Any:
        def run(*_: Any, **__: Any) -> None:
            assert rank == 0, "only rank 0 runs it"
            raise error("rank 1, step 0: broken on purpose")

        return run

    with pytest.MonkeyPatch.context() as monkeypatch:
        said: list[str] = []
        monkeypatch.setattr(logger, "debug", lambda text, *_: said.append(text))
        if fails:
            monkeypatch.setattr(check, "validate", broken(PlanError))
            monkeypatch.setattr(pipeline, "dry_run", broken(ScheduleError))
        texts = []
        for made in (
            lambda: start(Job("mlp"), world),
            lambda: start(Job("mlp", cyclic={"warmup_steps": 2}), world),
            lambda: pipe_work.initialize(pipe_work.Job(2)),
        ):
            try:
                made().destroy()
                texts.append("no error")
            except AssertionError as error:
                texts.append(f"{type(error).__name__}: {error}")
        return [*texts, *(text for text in said if text.startswith("dry-run: "))]


def test_rank_0_dry_runs_the_plan(pool):
    first, second = pool.run(2, dry_runs, False)
    assert first[:3] == second == ["no error"] * 3
    assert len(first) == 6 and all(text.endswith(" s: OK") for text in first[3:])
    actions = [int(text.split()[1].replace(",", "")) for text in first[3:]]
    assert actions[0] < actions[1]  # with a warm-up there are two plans


def test_a_dry_run_that_fails_ends_all_ranks(pool):
    for texts in pool.run(2, dry_runs, True):
        assert len(texts) == 3
        for text in texts:
            assert text.startswith("PlanError: the plan fails its dry-run (rank 1, step 0: broken on purpose); report it")


def long_plans(rank: int, world: int) -> list[str]:
    from deepspeed.utils import logger

    from deepspeed_cdp.integration import engine_base

    with pytest.MonkeyPatch.context() as monkeypatch:
        said: list[str] = []
        monkeypatch.setattr(logger, "debug", lambda text, *_: said.append(text))
        monkeypatch.setattr(engine_base, "AT_START", 100)
        engine = start(Job("mlp"), world)
        train(engine, Job("mlp"), rank, 0, 1)
        engine.destroy()
        return [told(lambda: None), *(text for text in said if text.startswith("dry-run: "))]


def test_a_long_dry_run_is_skipped(pool):
    first, second = pool.run(2, long_plans)
    assert second == ["no error"]
    assert len(first) == 2 and first[1].startswith("dry-run: skipped") and "deepspeed-cdp plan --check" in first[1]


def late_ring(rank: int, world: int) -> str:
    return told(lambda: start(Job("mlp", 3, config={"torch_autocast": {"enabled": True, "dtype": "float16"}}), world))


def test_the_ring_that_auto_has_found_decides_whether_fp16_fits(pool):
    """Rings of two would wait for the norm under K = 3; the four ranks of this host are one ring."""
    for text in pool.run(4, late_ring):
        assert text.startswith("ValueError: torch_autocast.dtype is float16 under cyclic.rule 3: a stage is updated before"), text


@pytest.mark.slow
def test_a_script_that_ends_without_destroy_starts_no_thread(operators):
    """Python 3.12 refuses to; the engine's exit callback then failed, and the process ended only after its timeout."""
    first, second = both_ranks("ending_script", seconds=90)
    for done in (first, second):
        assert done.returncode == 0, done.stdout[-3000:]
        assert "Exception ignored" not in done.stdout and "Error" not in done.stdout, done.stdout[-3000:]
    ended = [float(re.search(r"ends at ([\d.]+)", done.stdout)[1]) for done in (first, second)]
    assert ended[0] < ended[1] - 1.0, "rank 1 took its last messages from a rank whose script had ended"
