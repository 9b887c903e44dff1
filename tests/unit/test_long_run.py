"""The judge of the long run sees what grows, and not what only moves."""

import importlib.util
import random
import sys
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def run():
    path = Path(__file__).parents[1] / "long" / "run.py"
    spec = importlib.util.spec_from_file_location("long_run", path)
    module = importlib.util.module_from_spec(spec)
    before = list(sys.path)
    spec.loader.exec_module(module)
    sys.path[:] = before
    return module


def rows(grows: str = "", by: float = 0.0, noise: float = 0.0) -> list[dict[str, str]]:
    chance = random.Random(0)
    return [
        {
            "run": "calm",
            "attempt": "0",
            "rank": "0",
            "step": str(step),
            "seconds": "0",
            **{
                figure: str(1e9 * (figure == "rss") + 50 + by * step * (figure == grows) + noise * chance.gauss(0, 1))
                for figure in ("rss", "fds", "threads")
            },
        }
        for step in range(20, 2001, 20)
    ]


def test_what_grows_is_named(run):
    for figure, by in (("rss", 16e3), ("fds", 0.003), ("threads", 0.003)):  # of 8 MiB, and of 2, over two thirds of 1980 steps
        told, grown = run.judge(rows(figure, by), 100)
        assert len(grown) == 1 and f" {figure}: by" in grown[0].replace("')", ""), (figure, grown, told)


def test_what_does_not_grow_is_not(run):
    told, grown = run.judge(rows(noise=1.0), 100)
    assert not grown and len(told) == 3 and all(t["error"] > 0 for t in told.values())
    assert not run.judge(rows("rss", 1e3), 100)[1], "a kilobyte a step is less than the room in so short a run"
    assert not run.judge(rows("fds", 0.003, noise=30.0), 100)[1], "not beyond the error"


def test_checkpoints_are_compared_bit_by_bit(run, tmp_path):
    import torch
    from safetensors.torch import save_file

    for name, value in (("a", 1.0), ("b", 1.0), ("c", 1.0 + 2**-23)):
        (tmp_path / name).mkdir()
        save_file({"w": torch.tensor([value])}, tmp_path / name / "stage_000.safetensors")
    (tmp_path / "none").mkdir()
    found = {name: run.digests(tmp_path / name) for name in ("a", "b", "c", "none")}
    assert found["a"] == found["b"] != found["c"] and list(found["a"]) == ["stage_000.safetensors w"]
    assert not found["none"]
