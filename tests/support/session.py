"""One run of the tests: the environment that all its processes inherit, and what it must not leave behind."""

import atexit
import os
import shutil
import signal
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

from support.patience import Patience
from support.processes import RUN, buffers, command_of, processes, remove_buffers, remove_unheld_buffers, signal_all

STALE_SECONDS = 600.0  # an older lock of a build of operators belongs to nobody: the longest build takes about 100 s


def begin() -> None:
    """Set the environment; pytest-xdist's workers inherit it."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # another ninja on the path would compile DeepSpeed's operators anew
    os.environ["PATH"] = os.pathsep.join([sysconfig.get_path("scripts"), os.environ["PATH"]])
    if sys.prefix != sys.base_prefix:  # in a virtual environment, which owns what is compiled for it, as in the Makefile
        os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(Path(sys.prefix, "torch_extensions")))
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(Path(sys.prefix, "torchinductor")))
    if "TORCH_EXTENSIONS_DIR" in os.environ:
        remove_stale_locks(Path(os.environ["TORCH_EXTENSIONS_DIR"]))
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())  # pytest keeps the folders of failed tests there
    os.environ[RUN] = os.environ["TMPDIR"] = tempfile.tempdir = tempfile.mkdtemp(prefix="cdp-tests-")
    Path(os.environ[RUN], "begun").touch()
    atexit.register(shutil.rmtree, os.environ[RUN], ignore_errors=True)  # after multiprocessing, which is imported later


def remove_stale_locks(folder: Path) -> list[Path]:
    """Remove the locks that killed builds of operators left: the next build would wait for ever."""
    stale = [lock for lock in folder.glob("**/lock") if time.time() - lock.stat().st_mtime > STALE_SECONDS]
    for lock in stale:
        lock.unlink(missing_ok=True)
    return stale


def finish(seconds: float = 10.0) -> list[str]:
    """End the run and remove what it has left; returns in words the processes and buffers that should have been gone."""
    folder, limit = Path(os.environ[RUN]), Patience(seconds)
    while (pids := _processes()) and limit.left() > 0:
        time.sleep(0.1)
    left = [f"process {pid}: {command_of(pid)}" for pid in pids]
    signal_all(pids, signal.SIGKILL)
    ports = (folder / "ports").read_text().split() if (folder / "ports").exists() else []
    left += [f"shared memory: {path}" for port in ports for path in buffers(port)]
    for port in ports:
        remove_buffers(port)
    remove_unheld_buffers()  # of launchers that choose their ports themselves
    return left


def _processes() -> list[int]:
    """Those of this run; multiprocessing's resource tracker ends with the process that has started it."""
    return [pid for pid in processes(RUN, os.environ[RUN]) if "multiprocessing.resource_tracker" not in command_of(pid)]
