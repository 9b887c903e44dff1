"""Ranks that freeze (SIGSTOP) in a chosen meeting of all ranks, and what the others say. Runs in worker processes.

A meeting is named by what the rank is doing, which is how errors begin: "flush", "comparing settings between ranks".
"""

import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from deepspeed_cdp.errors import HandoffError
from deepspeed_cdp.transport.gloo import GlooTransport
from deepspeed_cdp.transport.store_exchange import StoreExchange
from support import pipe_work
from support.engine_work import Job, evaluate, start, train
from support.faulty import ready

SECONDS = 4.0  # cyclic.timeout_seconds
LONGEST = 60.0  # until a frozen rank goes on although the others have not ended


def name_of(where: Any) -> str:
    text = re.sub(r"^rank \d+, (step \d+, )?", "", str(where))
    return re.sub(r"[^' ]*/", "", text)  # of a path, its last part


@contextmanager
def watched(met: Callable[[str], None]) -> Iterator[None]:
    """Call ``met`` with the name of each meeting as this rank enters it."""
    exchange, broadcast = StoreExchange.exchange, GlooTransport.broadcast
    connect, stream_number = GlooTransport._connect, GlooTransport._stream_number

    def exchanges(self: StoreExchange, value: Any, where: Any) -> list[Any]:
        met(name_of(where))
        return exchange(self, value, where)

    def broadcasts(self: GlooTransport, tensor: torch.Tensor, src: int, where: Any) -> None:
        met(f"broadcast, {name_of(where)}")
        broadcast(self, tensor, src, where)

    def connects(self: GlooTransport, where: Any) -> None:
        met("gloo's connections")
        connect(self, where)

    def numbers(self: GlooTransport, stream: str) -> int:
        if stream not in self._streams:
            met("a stream's number")
        return stream_number(self, stream)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StoreExchange, "exchange", exchanges)
        patch.setattr(GlooTransport, "broadcast", broadcasts)
        patch.setattr(GlooTransport, "_connect", connects)
        patch.setattr(GlooTransport, "_stream_number", numbers)
        yield


class Resumed(Exception):
    """Raised in the rank that was frozen: alone it would go on, and wait in torch's own set-up."""


def freeze(folder: Path, others: list[int]) -> None:
    """SIGSTOP to this process until all ``others`` have ended. A grandchild wakes it up."""
    pid = os.getpid()
    child = os.fork()
    if child == 0:
        if os.fork() == 0:
            until = time.monotonic() + LONGEST
            while time.monotonic() < until and not all((folder / f"ended-{rank}").exists() for rank in others):
                time.sleep(0.05)
            os.kill(pid, signal.SIGCONT)
        os._exit(0)
    os.waitpid(child, 0)
    (folder / "frozen").write_text(f"{time.monotonic()}")
    os.kill(pid, signal.SIGSTOP)


# ---- jobs with every kind of meeting ----------------------------------------------------------------------------------------
def ring_job(rank: int, world: int, folder: Path, ring: int | None = None) -> Iterator[Any]:
    """Yields the engine first and then after each call."""
    job = Job("mlp", "cdp-v2", timeout=SECONDS, cyclic={"ring_size": ring} if ring else {})
    engine = start(job, world)
    yield engine
    train(engine, job, rank, 0, 2)
    engine.flush()
    train(engine, job, rank, 2, 3)
    evaluate(engine, job, rank, 1)
    train(engine, job, rank, 3, 4)
    engine.module_state_dict()
    engine.save_checkpoint(str(folder / "saved"), tag="good")
    engine.load_checkpoint(str(folder / "saved"))
    engine.report()


def rings_job(rank: int, world: int, folder: Path) -> Iterator[Any]:
    return ring_job(rank, world, folder, 2)


def pipe_job(rank: int, world: int, folder: Path) -> Iterator[Any]:
    job = pipe_work.Job(stages=world, tied=True, timeout=SECONDS)
    engine = pipe_work.initialize(job)
    yield engine
    for step in range(2):
        engine.train_batch(pipe_work.data(job, step))
    engine.eval_batch(pipe_work.data(job, 500))
    engine.save_checkpoint(str(folder / "saved"), tag="good")
    engine.load_checkpoint(str(folder / "saved"))


JOBS = {"ring": ring_job, "rings": rings_job, "pipe": pipe_job}


def meetings(rank: int, world: int, job: str, folder: str) -> list[str]:
    """The names of all meetings of an undisturbed run, in order, each once."""
    names: dict[str, None] = {}
    ready()
    torch.manual_seed(7)
    with watched(lambda name: names.setdefault(name)):
        steps = JOBS[job](rank, world, Path(folder))
        engine = next(steps)
        for _ in steps:
            pass
    engine.destroy()
    return list(names)


def frozen(rank: int, world: int, job: str, guilty: int, meeting: str, folder: str) -> tuple[str, float, float]:
    """Rank ``guilty`` freezes in ``meeting``, half a second after it should have entered it.

    Returns:
        This rank's error; seconds from the fault until it was raised, and until ``destroy`` had returned.
    """
    here, engine, done = Path(folder), None, False

    def met(name: str) -> None:
        nonlocal done
        if rank == guilty and name == meeting and not done:
            done = True
            time.sleep(0.5)
            freeze(here, [r for r in range(world) if r != guilty])
            raise Resumed

    ready()
    torch.manual_seed(7)
    text = "no error"
    try:
        with watched(met):
            steps = JOBS[job](rank, world, here)
            engine = next(steps)
            for _ in steps:
                pass
    except (HandoffError, Resumed) as error:
        text = str(error)
    raised = time.monotonic()
    if engine is not None:
        engine.destroy()
    ended = time.monotonic()
    (here / f"ended-{rank}").touch()
    began = float((here / "frozen").read_text()) if (here / "frozen").exists() else ended
    return text, raised - began, ended - began
