"""Fixtures for all tests; this folder and the repository's root are importable, here and in the workers."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
for folder in (Path(__file__).parent, Path(__file__).parent.parent):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

import pytest  # noqa: E402
from workers import Pool  # noqa: E402


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Worker processes that tests share (see workers.py)."""
    workers = Pool()
    yield workers
    workers.close()
