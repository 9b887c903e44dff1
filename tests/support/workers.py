"""A pool of worker processes that survive from test to test.

Importing torch, DeepSpeed and transformers takes seconds of CPU time, so workers are forked from a server that has imported them
(see preload.py), and kept. The process group and DeepSpeed's globals, which a test must not inherit, are made anew for each call.
A call that does not end in time shows every worker's Python stack and output, and costs the pool its workers; so does a failure.
The next call gets fresh ones.

    def scenario(rank, world, x): ...          # a module-level function: it travels by name
    results = pool.run(2, scenario, 3)         # [scenario(0, 2, 3), scenario(1, 2, 3)]
"""

import contextlib
import faulthandler
import gc
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from typing import Any

from support.patience import Patience, patience
from support.processes import free_port

_GRACE_SECONDS = 10.0  # after one rank has failed, the others may be waiting for it


class RemoteError(AssertionError):
    """A worker raised or died; the message holds each failing rank's traceback and the end of its output."""


class Failure(str):
    """The traceback of a rank that raised, as ``run_failing`` returns it."""


class Pool:
    """Worker processes 0, 1, ...; rank r of a call runs in worker r."""

    def __init__(self) -> None:
        self._workers: list[_Worker] = []

    def run(
        self, world: int, function: Callable[..., Any], *args: Any, timeout: float = 180, env: dict[str, str] | None = None
    ) -> list[Any]:
        """Call ``function(rank, world, *args)`` on ``world`` ranks with a gloo process group.

        Args:
            timeout: seconds, on an idle machine, until all workers are killed and their stacks shown.
            env: added to the workers' environment for this call.
        Returns:
            What each rank returned, in rank order.
        Raises:
            RemoteError: a rank raised, died or did not end in time.
        """
        outcomes = self._call(world, function, args, timeout, env, stop_early=True)
        bad = [rank for rank, outcome in enumerate(outcomes) if outcome[0] not in ("result",)]
        if bad:
            raise RemoteError("\n".join(self._report(rank, outcomes[rank]) for rank in bad))
        return [outcome[1] for outcome in outcomes]

    def run_failing(
        self, world: int, function: Callable[..., Any], *args: Any, timeout: float = 180, env: dict[str, str] | None = None
    ) -> list[Any]:
        """As ``run``, for tests in which ranks fail.

        Returns:
            By rank: its result, or its traceback (a Failure), or its exit code (an int; -9 if killed by signal 9).
        Raises:
            RemoteError: a rank did not end in time.
        """
        outcomes = self._call(world, function, args, timeout, env, stop_early=False)
        late = [rank for rank, outcome in enumerate(outcomes) if outcome[0] == "stopped"]
        if late:
            raise RemoteError("\n".join(self._report(rank, outcomes[rank]) for rank in late))
        return [Failure(value) if kind == "raised" else value for kind, value in outcomes]

    def start(self, world: int, env: dict[int, dict[str, str]]) -> None:
        """Start workers, some of them with an environment of their own from their very beginning (LD_PRELOAD, say)."""
        for rank in range(len(self._workers), world):
            self._workers.append(_Worker(rank, env.get(rank)))

    def close(self) -> None:
        """Kill all workers."""
        for worker in self._workers:
            worker.kill()
        self._workers.clear()

    def _call(
        self, world: int, function: Callable[..., Any], args: tuple, timeout: float, env: dict[str, str] | None, stop_early: bool
    ) -> list[tuple]:
        while len(self._workers) < world:
            self._workers.append(_Worker(len(self._workers)))
        for rank in range(world):
            if not self._workers[rank].process.is_alive():
                self._workers[rank] = _Worker(rank)
        workers, port = self._workers[:world], free_port()
        for worker in workers:  # a fresh worker's imports are not the call's time
            if not worker.hello():
                raise RemoteError(f"worker {worker.rank} did not start\n{worker.output()}")
        for worker in workers:
            worker.begin()
            worker.connection.send(("call", function, args, world, port, env or {}, timeout))
        outcomes = self._collect(workers, Patience(timeout), stop_early)
        self._last_outputs = [worker.output() for worker in workers]
        if all(kind in ("result", "raised") for kind, _ in outcomes):  # a barrier: rank 0 takes its store down with it
            for worker in workers:
                worker.connection.send(("teardown",))
            down = self._collect(workers, Patience(30), stop_early=False)
        else:
            down = []
        clean = all(kind == "result" for kind, _ in outcomes) or not stop_early
        if not clean or not all(kind == "result" for kind, _ in down) or not down:
            for rank, worker in enumerate(workers):
                worker.kill()
                self._workers[rank] = _Worker(rank)
        return outcomes

    @staticmethod
    def _collect(workers: list["_Worker"], limit: Patience, stop_early: bool) -> list[tuple]:
        """One ("result", value), ("raised", traceback), ("exited", code) or ("stopped", stack) per worker."""
        outcomes: dict[int, tuple] = {}
        while len(outcomes) < len(workers) and (left := limit.left()) > 0:
            pending = [worker for worker in workers if worker.rank not in outcomes]
            handles = [worker.connection for worker in pending] + [worker.process.sentinel for worker in pending]
            ready = wait(handles, min(left, 2.0))
            for worker in pending:
                if worker.connection in ready or worker.process.sentinel in ready:
                    outcomes[worker.rank] = worker.outcome()
                    if stop_early and outcomes[worker.rank][0] != "result":
                        limit.shorten(_GRACE_SECONDS)
        late = [worker for worker in workers if worker.rank not in outcomes]
        for worker in late:
            os.kill(worker.process.pid, signal.SIGUSR1)  # faulthandler writes the stacks into the worker's output
        if late:
            time.sleep(0.5)
        for worker in late:
            outcomes[worker.rank] = ("stopped", "did not end in time")
        return [outcomes[worker.rank] for worker in workers]

    def _report(self, rank: int, outcome: tuple) -> str:
        kind, value = outcome
        return f"---- rank {rank} {kind}: {value}\n---- output of rank {rank}:\n{self._last_outputs[rank][-6000:]}"


def stop_fork_server() -> None:
    """End the process that workers are forked from, once no pool needs it; else it ends with this process."""
    forkserver._forkserver._stop()  # there is no public way


class _Worker:
    """The parent's end of one process."""

    def __init__(self, rank: int, env: dict[str, str] | None = None):
        self.rank = rank
        self.log = tempfile.NamedTemporaryFile(prefix=f"worker{rank}-", suffix=".log")  # noqa: SIM115
        self.start = 0  # where the present call's output starts
        self.ready = False
        self.connection, theirs = multiprocessing.Pipe()
        environment = {**os.environ, **(env or {})}
        with _environment({"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **(env or {})}):
            # the fork server's environment is that of the first start; what begins with another one is spawned
            context = multiprocessing.get_context("spawn" if env else "forkserver")
            multiprocessing.get_context("forkserver").set_forkserver_preload(["support.preload"])
            self.process = context.Process(target=_main, args=(rank, theirs, self.log.name, environment), daemon=True)
            self.process.start()
        theirs.close()

    def hello(self) -> bool:
        """Wait until the process has imported what it needs."""
        if not self.ready and self.connection.poll(patience(120)):
            try:
                self.ready = self.connection.recv() == "hello"
            except EOFError:
                pass
        return self.ready

    def begin(self) -> None:
        self.start = os.path.getsize(self.log.name)

    def outcome(self) -> tuple:
        try:
            if self.connection.poll():
                return self.connection.recv()
        except (EOFError, OSError):
            pass
        self.process.join(10)
        return ("exited", self.process.exitcode)

    def output(self) -> str:
        with open(self.log.name, errors="replace") as log:
            log.seek(self.start)
            return log.read()

    def kill(self) -> None:
        self.process.kill()
        self.process.join(10)
        self.connection.close()


@contextlib.contextmanager
def _environment(changes: dict[str, str]) -> Iterator[None]:
    """What processes started meanwhile inherit."""
    before = dict(os.environ)
    os.environ.update(changes)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _main(rank: int, connection: Connection, log: str, environment: dict[str, str]) -> None:
    """The worker: one call after the other."""
    os.environ.clear()
    os.environ.update(environment)
    descriptor = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w", buffering=1), os.fdopen(2, "w", buffering=1)
    faulthandler.enable(sys.stderr)
    faulthandler.register(signal.SIGUSR1, sys.stderr, all_threads=True)
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import torch

    torch.set_num_threads(1)
    linear = torch.nn.functional.linear  # stock ZeRO-3 leaves its own there, which rounds bf16 otherwise than the oracle
    connection.send("hello")
    base = dict(os.environ)
    while True:
        try:
            _, function, args, world, port, env, timeout = connection.recv()
        except EOFError:
            return
        os.environ.update(
            {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(world),
                "LOCAL_WORLD_SIZE": str(world),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                **env,
            }
        )
        torch.manual_seed(0)
        try:
            _start_group(rank, world, timeout)
            outcome = ("result", function(rank, world, *args))
        except BaseException:
            outcome = ("raised", traceback.format_exc())
        try:
            connection.send(outcome)
        except Exception:  # a result that does not pickle
            connection.send(("raised", traceback.format_exc()))
        del outcome, args
        if connection.recv() == ("teardown",):
            try:
                _stop_group()
                os.environ.clear()
                os.environ.update(base)
                torch.nn.functional.linear = linear
                connection.send(("result", None))
            except BaseException:
                connection.send(("raised", traceback.format_exc()))


def _start_group(rank: int, world: int, timeout: float) -> None:
    from datetime import timedelta

    import torch.distributed as dist

    dist.init_process_group("gloo", rank=rank, world_size=world, timeout=timedelta(seconds=patience(timeout)))


def _stop_group() -> None:
    """Take down the process group and what DeepSpeed remembers of it, so that the next world may have another size."""
    import torch.distributed as dist

    gc.collect()
    comm = sys.modules.get("deepspeed.comm.comm")
    if comm is not None and comm.cdb is not None:
        if comm.cdb.is_initialized():
            comm.destroy_process_group()
        comm.cdb = None
    groups = sys.modules.get("deepspeed.utils.groups")
    if groups is not None:
        groups._release_process_group_references()  # all of them: expert, data, model, sequence groups, the mesh, the mpu
    zero = sys.modules.get("deepspeed.runtime.zero.partition_parameters")
    if zero is not None:
        zero.shutdown_init_context()  # zero.Init left by an error
        zero.zero_init_context, zero.top_level_context = 0, None
        zero.Init.param_id = 0  # ranks compare these numbers, and workers may have different pasts
    offload = sys.modules.get("deepspeed.runtime.zero.parameter_offload")
    if offload is not None:
        offload.FWD_MODULE_STACK.clear()
        offload.DeepSpeedZeRoOffload._register_deepspeed_module.__defaults__[0][0] = 0  # the same for modules
    autocast = sys.modules.get("deepspeed.runtime.torch_autocast")
    if autocast is not None:
        autocast.TORCH_AUTOCAST_INITIALIZED = False
    if dist.is_initialized():
        dist.destroy_process_group()
    gc.collect()
