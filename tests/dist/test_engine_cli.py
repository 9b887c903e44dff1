"""The command line where processes are needed: the doctor's self-test, and a recording of the engine."""

import json
import os
import subprocess
import sys

import pytest

from deepspeed_cdp.cli import doctor
from deepspeed_cdp.cli.main import main
from support.engine_work import Job
from support.patience import patience


def recording(rank: int, world: int, path: str) -> dict:
    """Train a little inside engine.cyclic_trace."""
    import deepspeed

    from support import models

    module = models.build("mlp")
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": {"stage": 3},
        "gradient_clipping": 0,
        "optimizer": {"type": "SGD", "params": {"lr": 0.05}},
        "cyclic": {"enabled": True, "timeout_seconds": Job.timeout},
    }
    engine, *_ = deepspeed.initialize(model=module, model_parameters=module.parameters(), config=config)

    def step(t: int) -> None:
        engine.backward(models.loss(engine, "mlp", models.batch("mlp", t, 0, rank)))
        engine.step()

    step(0)
    with engine.cyclic_trace(path):
        for t in range(1, 4):
            step(t)
    refusal = ""
    loss = models.loss(engine, "mlp", models.batch("mlp", 4, 0, rank))
    try:
        with engine.cyclic_trace(path):
            pass
    except ValueError as error:
        refusal = str(error)
    engine._failed = False  # refusing is no failure
    engine.backward(loss)
    engine.step()
    engine.destroy()
    return {"refusal": refusal}


def test_the_engine_records_and_the_timeline_merges(pool, tmp_path, capsys):
    path = str(tmp_path / "run" / "trace.json")
    results = pool.run(2, recording, path)
    assert all("began in the middle of step 4" in r["refusal"] for r in results)
    files = [str(tmp_path / "run" / f"trace.rank{r}.json") for r in range(2)]
    assert main(["timeline", "--from", *files, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["ranks"] == 2 and found["hosts"] == 1 and [r["steps"] for r in found["per_rank"]] == [3, 3]
    assert found["handoffs"] > 10


@pytest.mark.slow
def test_the_doctor_passes_here(operators, capsys):
    code = main(["doctor", "--json"])
    found = json.loads(capsys.readouterr().out)
    test = found["self_test"]
    assert test["passed"] and test["transport"] == "gloo" and test["ranks"] == 2 and test["difference"] <= 1e-6
    assert test["collectives"] == 0
    assert code == (1 if found["problems"] else 0) and not any("self-test" in p for p in found["problems"])


@pytest.mark.parametrize("how, why", [("RANK_FAILS", "ended with exit code"), ("TOO_LATE", "took too long")])
def test_the_doctor_says_what_failed(how, why, monkeypatch, tmp_path):
    if how == "RANK_FAILS":
        (tmp_path / "deepspeed.py").write_text("raise RuntimeError('no deepspeed for you')\n")
        monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
        monkeypatch.setattr(doctor, "__file__", str(tmp_path / "a" / "b" / "c" / "doctor.py"))  # its root must not come first
    test = doctor.self_test(2, 60 if how == "RANK_FAILS" else 0.2)
    assert not test["passed"] and why in test["why"]


def test_registration_switched_off_is_explained(monkeypatch):
    monkeypatch.setenv("DEEPSPEED_CDP_AUTOLOAD", "0")
    found = doctor.registration()
    assert found["active"] is False and "DEEPSPEED_CDP_AUTOLOAD=0" in found["why"]


def test_the_console_script_is_declared():
    from pathlib import Path

    import tomllib

    scripts = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]["scripts"]
    module, _, function = scripts["deepspeed-cdp"].partition(":")
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; from {module} import {function}; sys.exit({function}(['--version']))"],
        capture_output=True,
        text=True,
        timeout=patience(60),
    )
    assert done.returncode == 0 and done.stdout.startswith("deepspeed-cdp ")
