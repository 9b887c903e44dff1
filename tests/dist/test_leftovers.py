"""Killed ranks, launches and builds leave no process, no shared memory and no lock."""

import os
import sys
import time
from pathlib import Path

import pytest

from support import patience, processes
from support.session import STALE_SECONDS, remove_stale_locks
from support.workers import Pool, RemoteError

BUFFER = "import os; open(f'/dev/shm/deepspeed_allreduce_buffer_{os.getuid()}_127.0.0.1_1_0', 'w'); "  # port 1


def test_a_worker_that_is_late_is_ended(pool: Pool) -> None:
    with pytest.raises(RemoteError, match="did not end in time(.|\n)*in sleeps"):
        pool.run(1, sleeps, timeout=0.5)
    (pid,) = pool.run(1, itself)
    assert pid in processes.processes(processes.RUN, os.environ[processes.RUN])


def sleeps(rank: int, world: int) -> None:
    time.sleep(600)


def itself(rank: int, world: int) -> int:
    return os.getpid()


@pytest.mark.slow
def test_a_launch_leaves_nothing(tmp_path: Path) -> None:
    """Not even what it has started in sessions of their own."""
    child = f"import time; {BUFFER}time.sleep(600)"
    parent = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {child!r}], start_new_session=True)"
    done = processes.run([sys.executable, "-c", parent + "; import time; time.sleep(1); print('good')"], 60)
    assert (done.returncode, done.stdout) == (0, "good\n")
    late = processes.run([sys.executable, "-c", parent + "; import time; time.sleep(600)"], 1.0)
    assert late.returncode and "time limit of 1 s" in late.stderr
    assert not [
        pid for pid in processes.processes(processes.RUN, os.environ[processes.RUN]) if "600" in processes.command_of(pid)
    ]
    assert not processes.buffers(1)


def test_only_old_locks_of_builds_are_removed(tmp_path: Path) -> None:
    old, new = tmp_path / "cpu_adam" / "lock", tmp_path / "other" / "lock"
    for lock in (old, new):
        lock.parent.mkdir()
        lock.touch()
    os.utime(old, (0, time.time() - STALE_SECONDS - 1))
    assert remove_stale_locks(tmp_path) == [old] and not old.exists() and new.exists()


def test_limits_grow_with_the_load(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getloadavg", lambda: (3.0 * os.cpu_count(), 0.0, 0.0))
    assert patience.patience(10) >= 30
    limit = patience.Patience(0.2)
    time.sleep(0.3)
    assert limit.left() > 0
    monkeypatch.setattr(os, "getloadavg", lambda: (1e9, 0.0, 0.0))
    assert patience.patience(10) == 10 * patience.MOST
