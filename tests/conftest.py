"""Fixtures for all tests, markers by folder, and the beginning and end of a run."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from support.processes import RUN
from support.session import begin
from support.session import finish as finish_run

if RUN not in os.environ:  # pytest-xdist's workers inherit it
    begin()

import pytest  # noqa: E402

from support import sampling  # noqa: E402
from support.parallel import CLOCKS, place, scheduler  # noqa: E402
from support.patience import patience  # noqa: E402
from support.workers import Pool, stop_fork_server  # noqa: E402

TESTS = Path(__file__).parent
LAYERS = ("unit", "dist", "clients", "gpu")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Which tests run beside each other: see support/parallel.py."""
    return scheduler(config, log)


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    out = set(sampling.left_out(items))
    if out:
        config.hook.pytest_deselected(items=list(out))
        items[:] = [item for item in items if item not in out]
    for item in items:
        if item.path.name in CLOCKS:
            item.add_marker("clock")
        layer = item.path.relative_to(TESTS).parts[0]
        if layer in LAYERS:
            item.add_marker(layer)
    if hasattr(config, "workerinput"):  # of pytest-xdist
        items.sort(key=lambda item: place(item.nodeid))


# ---- the end of a run: nothing is left ----------------------------------------------------------------------------------
left = pytest.StashKey[list[str]]()


@pytest.hookimpl(trylast=True)  # after fixtures and pytest-xdist's workers have ended
def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workerinput"):
        return
    session.config.stash[left] = finish_run()
    if session.config.stash[left] and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    if sampling.SEED:
        terminalreporter.write_line(f"Of each test a sample of its cases has run; CDP_TEST_SEED={sampling.SEED} repeats it.")
    for line in config.stash.get(left, []):
        terminalreporter.write_line(f"LEFT BEHIND by the tests, which fails the run: {line}", red=True)


# ---- fixtures -----------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="session")
def operators() -> None:
    """DeepSpeed's operators are there; ``make`` has built them, else this takes minutes."""
    command = [sys.executable, str(TESTS / "support" / "operators.py")]
    subprocess.run(command, check=True, capture_output=True, timeout=patience(900))


@pytest.fixture(scope="session")
def pool(operators: None) -> Iterator[Pool]:
    """Worker processes that tests share (see support/workers.py)."""
    workers = Pool()
    yield workers
    workers.close()
    stop_fork_server()


@pytest.fixture(params=["Python", "C++"])
def written_in(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Autograd's side of passes in both languages."""
    monkeypatch.setenv("DEEPSPEED_CDP_NATIVE", "1" if request.param == "C++" else "0")
    return request.param
