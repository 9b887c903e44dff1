"""Fixtures for all tests; this folder and the repository's root are importable, here and in the workers."""

import os
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
# where no virtual environment is active, another version of ninja would compile DeepSpeed's op anew, and the launchers' again
os.environ["PATH"] = os.pathsep.join([sysconfig.get_path("scripts"), os.environ["PATH"]])
import pytest  # noqa: E402

from support.workers import Pool  # noqa: E402


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """What pytest-xdist's workers run (make test has two): see tests/parallel.py."""
    from support.parallel import Groups

    return Groups(config, log)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if hasattr(config, "workerinput"):  # of pytest-xdist
        from support.parallel import place

        items.sort(key=lambda item: place(item.nodeid))


@pytest.fixture(scope="session")
def comm_op() -> None:
    """DeepSpeed compiles this op on first use, which may take longer than a test's time limit. A failure shows in the tests."""
    build = (
        "from deepspeed.accelerator import get_accelerator\n"
        "get_accelerator().create_op_builder('ShareMemCommBuilder').load(verbose=False)"
    )
    subprocess.run([sys.executable, "-c", build], env={**os.environ, "DS_ACCELERATOR": "cpu"}, capture_output=True, timeout=600)


@pytest.fixture(scope="session")
def pool(comm_op: None) -> Iterator[Pool]:
    """Worker processes that tests share (see workers.py)."""
    workers = Pool()
    yield workers
    workers.close()
