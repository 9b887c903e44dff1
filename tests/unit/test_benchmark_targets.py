"""benchmarks/targets.py: its runs are ones that benchmarks.run takes, and each ends at its time limit."""

import sys
import time

import pytest

from benchmarks import run, targets


@pytest.mark.parametrize("target", targets.RUNS, ids=lambda r: r.name)
def test_the_benchmark_takes_the_arguments(target):
    args = run.parse(target.arguments.split())
    assert args.models and target.seconds > targets.REST


def test_outcomes():
    assert targets._outcome([sys.executable, "-c", ""], 60) == "done"
    assert targets._outcome([sys.executable, "-c", "raise SystemExit(3)"], 60) == "failed"
    assert targets._outcome([sys.executable, "-c", ""], targets.REST - 1) == "no time"


def test_a_run_ends_at_its_limit(tmp_path, monkeypatch):
    """Its child, as torchrun, has time to end its own, although the benchmark itself ends at once."""
    monkeypatch.setattr(targets, "REST", 1)
    ended = tmp_path / "ended"
    child = (
        "import signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: "
        f"(time.sleep(1), open({str(ended)!r}, 'w').close(), sys.exit(1))); time.sleep(100)"
    )
    begun = time.monotonic()
    benchmark = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    assert targets._outcome([sys.executable, "-c", benchmark], 3) == "time limit"
    assert time.monotonic() - begun < 30 and ended.exists()


def test_what_does_not_end_is_killed(monkeypatch):
    monkeypatch.setattr(targets, "REST", 1)
    monkeypatch.setattr(targets, "ENDING", 1)
    deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(100)"
    begun = time.monotonic()
    assert targets._outcome([sys.executable, "-c", deaf], 3) == "time limit"
    assert time.monotonic() - begun < 30


@pytest.mark.parametrize("only", ["70B", "3B,70B"])
def test_an_unknown_run(capsys, only):
    with pytest.raises(SystemExit):
        targets.main(["out", "--only", only])
    assert "--only has '70B', with which no run begins; allowed are beginnings of 1.35B micro-batch 4" in capsys.readouterr().err
