"""What a guilty rank does in the tests of faults, and the jobs in which it does so."""

import os
import resource
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from deepspeed_cdp.checkpoint import saving
from support import engine_work, models
from support.engine_work import Job, pack, start, train, whole

SECONDS = 4.0  # how long ranks wait once the fault comes
PATIENT = 60.0  # cyclic.timeout_seconds before it: a busy machine takes long to start engines
SLACK = 8.0  # closing, on two shared cores
SAVED, BEGIN, END = 2, 4, 6  # steps: when the checkpoint is written, when the fault comes, when a calm run ends


class Faulty(models.MLP):
    """Fails in its forward or backward when told to."""

    forward_fails: Callable[[], None] | None = None
    backward_fails = False

    def forward(self, x):
        if self.forward_fails is not None:
            self.forward_fails()
        y = super().forward(x)
        if self.backward_fails:
            y.register_hook(_refuse)
        return y


def _refuse(*_: Any) -> None:
    raise FloatingPointError("raised on purpose")


class Stubborn(torch.optim.SGD):
    """An optimizer whose step fails when told to."""

    armed = False

    def step(self, closure: Any = None) -> Any:
        if Stubborn.armed:
            _refuse()
        return super().step(closure)


engine_work.CLIENTS["stubborn"] = lambda named: Stubborn([p for _, p in named], lr=0.05, momentum=0.9)


# ---- what a guilty rank does ------------------------------------------------------------------------------------------------
def kill(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stop(seconds: float) -> None:
    """SIGSTOP to this process; a grandchild wakes it up again, so that no child of this one is left."""
    pid = os.getpid()
    child = os.fork()
    if child == 0:
        if os.fork() == 0:
            time.sleep(seconds)
            os.kill(pid, signal.SIGCONT)
        os._exit(0)
    os.waitpid(child, 0)
    os.kill(pid, signal.SIGSTOP)


def exhaust() -> None:
    """Really out of memory: the system refuses the allocator's request (RLIMIT_AS)."""
    limits, pages = resource.getrlimit(resource.RLIMIT_AS), int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * os.sysconf("SC_PAGE_SIZE") + (64 << 20), limits[1]))
    try:
        torch.ones(1 << 28)  # 1 GiB
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


def cut_messages(engine: Any) -> None:
    """Parameters go out one number short, as a peer with another model or version would send them."""
    push = engine._transport.push

    def short(stream: str, dst: int, source: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return push(stream, dst, source[:-4] if stream in ("P", "P0", "W0") else source, *args, **kwargs)

    engine._transport.push = short


def kill_in_save(engine: Any, folder: str) -> None:
    """Die with half a file written."""

    def half(where: str, name: str, *_: Any) -> None:
        Path(where, name).write_bytes(b"half of a file")
        kill()

    saving.save_tensors = half
    engine.save_checkpoint(folder, tag="good")


def act(fault: str, engine: Any, module: Faulty, folder: str) -> None:
    """Begin the fault on this rank."""
    if fault.startswith("killed") and fault != "killed_saving":
        kill()
    elif fault == "stopped":
        stop(SECONDS + 3)
    elif fault == "forward":
        module.forward_fails = _refuse
    elif fault == "backward":
        module.backward_fails = True
    elif fault.startswith("loader"):
        _refuse()
    elif fault == "optimizer":
        Stubborn.armed = True
    elif fault == "memory":
        module.forward_fails = exhaust
    elif fault == "size":
        cut_messages(engine)


def ready() -> None:
    """All ranks have imported DeepSpeed, which takes a fresh process longer than the timeout of these tests."""
    import deepspeed
    import torch.distributed as dist

    deepspeed.init_distributed("gloo")
    dist.barrier()


def impatient(engine: Any) -> None:
    """From now on this rank waits as with ``timeout_seconds`` SECONDS."""
    transport = engine._transport
    transport.timeout_seconds = transport._store_exchange.timeout_seconds = SECONDS
    transport.timeout = timedelta(seconds=SECONDS)


def job_of(fault: str, rule: str, timeout: float = PATIENT) -> Job:
    return Job("mlp", rule, timeout=timeout, optimizer="stubborn" if fault == "optimizer" else "adamw")


def goes_on(rank: int, world: int, fault: str, rule: str, folder: str, saves: bool) -> bytes:
    """To step END, from the start (with the flush of the save) or from the save_load."""
    ready()
    torch.manual_seed(7)
    job = job_of(fault, rule)
    engine = start(job, world, Faulty())
    if saves:
        train(engine, job, rank, 0, SAVED)
        engine.save_checkpoint(folder, tag="good")
    else:
        assert engine.load_checkpoint(folder)[0].endswith("good") and engine.global_steps == SAVED
    train(engine, job, rank, SAVED, END)
    state = pack(whole(engine))
    engine.destroy()
    return state
