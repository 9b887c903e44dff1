"""Processes that tests start, and the shared memory that they leave: found by an environment variable, and by port.

Every process of a run of the tests inherits ``CDP_TEST_RUN``, the path of the run's temporary folder (see session.py), and every
process of one ``run`` here ``CDP_TEST_LAUNCH`` as well.
"""

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from support.patience import Patience

RUN, LAUNCH = "CDP_TEST_RUN", "CDP_TEST_LAUNCH"
SHARED_MEMORY = Path("/dev/shm")
BUFFERS = f"deepspeed_allreduce_buffer_{os.getuid()}_*"  # under its launcher DeepSpeed makes 66 MiB per rank and removes none


# ---- processes ----------------------------------------------------------------------------------------------------------
def processes(name: str, value: str) -> list[int]:
    """The processes, other than this one, whose environment began with ``name=value``."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            state = (folder / "stat").read_text().rsplit(")", 1)[1].split()[0]
            if state not in "ZX" and f"{name}={value}".encode() in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
    return [pid for pid in found if pid != os.getpid()]


def command_of(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    return ""


def signal_all(pids: list[int], which: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, which)


def run(
    command: list[str], seconds: float, env: dict[str, str] | None = None, merged: bool = False, **options: Any
) -> subprocess.CompletedProcess:
    """As ``subprocess.run`` with captured text, but nothing that the command has started survives it.

    Args:
        seconds: the time limit on an idle machine. When it has passed, processes with faulthandler registered for SIGUSR1 show
            their stacks, all are killed, and ``returncode`` is negative.
        merged: standard error goes to standard output.
    """
    mark, limit = uuid.uuid4().hex, Patience(seconds)
    env = {**(os.environ if env is None else env), LAUNCH: mark}
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process = subprocess.Popen(command, env=env, stdout=out, stderr=out if merged else err, text=True, **options)
        try:
            while process.poll() is None and (left := limit.left()) > 0:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(min(2.0, left))
            if process.poll() is None:
                signal_all(processes(LAUNCH, mark), signal.SIGUSR1)
                time.sleep(1.0)
                (out if merged else err).write(f"\nended after its time limit of {seconds:.0f} s on an idle machine\n")
        finally:
            signal_all(processes(LAUNCH, mark), signal.SIGKILL)
            process.wait()
            remove_unheld_buffers()
        texts = []
        for file in (out, err):
            file.flush()
            file.seek(0)
            texts.append(file.read())
    return subprocess.CompletedProcess(command, process.returncode, *texts)


# ---- ports and shared memory --------------------------------------------------------------------------------------------
def of_two(address: str = "127.0.0.1", **more: str) -> dict[str, str]:
    """The environment of a rank of two on CPUs, but for RANK and LOCAL_RANK: modules of ``support`` run with ``python -m``."""
    tests = Path(__file__).parents[1]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(tests), str(tests.parent)]),
        "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": "cpu",
        "MASTER_ADDR": address,
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        **more,
    }


def both_ranks(script: str, *arguments: str, seconds: float) -> list[subprocess.CompletedProcess]:
    """Run a module of ``support`` as both ranks of two; output and errors are merged."""
    shared = of_two()

    def rank(number: int) -> subprocess.CompletedProcess:
        env = {**shared, "RANK": str(number), "LOCAL_RANK": str(number)}
        return run([sys.executable, "-m", f"support.{script}", *arguments], seconds, env, merged=True)

    with ThreadPoolExecutor(2) as ranks:
        return list(ranks.map(rank, (0, 1)))


def free_port() -> int:
    """A TCP port that nobody listens on, and that no client is given before somebody does: one below those for clients."""
    ports = Path("/proc/sys/net/ipv4/ip_local_port_range")
    below = int(ports.read_text().split()[0]) if ports.exists() else 0
    while True:
        port = random.SystemRandom().randrange(5000, below if below > 6000 else 60000)
        with socket.socket() as listener:
            try:
                listener.bind(("127.0.0.1", port))
            except OSError:
                continue
        if RUN in os.environ:
            with Path(os.environ[RUN], "ports").open("a") as file:
                file.write(f"{port}\n")
        return port


def buffers(port: int | str = "*") -> list[Path]:
    """DeepSpeed's buffers in shared memory that this run has made, of the process groups whose store listens on ``port``."""
    begun, found = Path(os.environ[RUN], "begun").stat().st_mtime, []
    for path in SHARED_MEMORY.glob(f"{BUFFERS}_{port}_*"):
        with contextlib.suppress(FileNotFoundError):  # another worker has removed it
            if path.stat().st_mtime >= begun:
                found.append(path)
    return found


def remove_buffers(port: int | str) -> None:
    """A process that has mapped a buffer keeps it; the memory is free when the last of them ends."""
    for path in buffers(port):
        path.unlink(missing_ok=True)


def remove_unheld_buffers() -> None:
    """Remove the buffers that no process has mapped any more: their makers are dead."""
    unheld = set(buffers())
    for maps in Path("/proc").glob("[0-9]*/maps") if unheld else ():
        with contextlib.suppress(OSError):
            text = maps.read_text()
            unheld = {path for path in unheld if str(path) not in text}
    for path in unheld:
        path.unlink(missing_ok=True)
