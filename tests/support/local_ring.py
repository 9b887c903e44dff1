"""A ring of threads: the runtime without processes, engine or DeepSpeed's set-up."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch

from deepspeed_cdp.integration.optimizer import CyclicOptimizer
from deepspeed_cdp.model import discover
from deepspeed_cdp.model.make_plan import Settings
from deepspeed_cdp.runtime.runtime import Runtime
from deepspeed_cdp.transport.base import Transport
from deepspeed_cdp.transport.delayed import Delayed
from deepspeed_cdp.transport.local import Hub, LocalTransport
from deepspeed_cdp.transport.ring_view import RingView
from support import models


def run_ranks(
    size: int,
    work: Callable[[int, Any], Any],
    seconds: float = 30.0,
    delay: float = 0.0,
    seed: int = 0,
    connect: Callable[[int], Transport] | None = None,
) -> list[Any]:
    """``work(rank, transport)`` on ``size`` threads, connected by ``connect(rank)`` or a Hub; raises the first error of any."""
    hub = Hub(size, seconds)
    results: list[Any] = [None] * size
    errors: list[BaseException] = []

    def main(rank: int) -> None:
        try:
            transport = connect(rank) if connect else LocalTransport(hub, rank)
            results[rank] = work(rank, Delayed(transport, seed + rank, delay) if delay else transport)
        except BaseException as error:
            errors.append(error)
            hub.fail(rank, repr(error))

    threads = [threading.Thread(target=main, args=(r,), daemon=True) for r in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(seconds * 4)
        assert not thread.is_alive(), "a rank hangs"
    if errors:
        raise errors[0]
    return results


@cache
def _shared(kind: str, dtype: torch.dtype | None) -> Callable[..., discover.Trace | None]:
    """``discover.trace``, once for all threads and trainings of a model: of a tiny Llama it takes longer than they do."""
    trace, lock, known = discover.trace, threading.Lock(), []

    def shared(module: torch.nn.Module, example: discover.Example) -> discover.Trace | None:
        with lock:
            if not known:
                known.append(trace(module, example))
            return known[0]

    return shared


@contextmanager
def traced_once(kind: str, dtype: torch.dtype | None) -> Iterator[None]:
    """Inside, every module is ``models.build(kind)``."""
    before, discover.trace = discover.trace, _shared(kind, dtype)
    try:
        yield
    finally:
        discover.trace = before


def train(
    kind: str,
    size: int,
    settings: Settings,
    make_optimizer,
    steps: int,
    flush_after=(),
    on_step=None,
    dtype=None,
    delay: float = 0.0,
    seed: int = 0,
    change=None,
    connect=None,
    ring_size: int | None = None,
) -> dict[str, Any]:
    """Train ``kind`` as ``models.batch`` gives the data; returns rank 0's whole state, the losses, the runtimes.

    Args:
        make_optimizer: from named parameters.
        on_step: called with (step, optimizer) before ``runtime.step()``.
        ring_size: ranks of each ring; all of them without it.
        change: called with each rank's runtime before the first step (to break something).
    """
    losses: dict[tuple[int, int, int], float] = {}

    def work(rank: int, transport: Any) -> tuple[dict, Runtime]:
        module = built[rank]
        transport = transport if ring_size is None else RingView(transport, ring_size)
        runtime = Runtime(module, make_optimizer(list(module.named_parameters())), settings, transport, torch.device("cpu"))
        runtime.optimizer = CyclicOptimizer(runtime)  # as the engine has it
        if change:
            change(runtime)
        for step in range(steps):
            for m in range(settings.rounds):
                with runtime.forward():
                    value = models.loss(module, kind, models.batch(kind, step, m, rank))
                losses[step, m, rank] = value.item()
                runtime.optimizer.scale_if_loss(value / settings.rounds).backward()
                runtime.end_backward()
            if on_step:
                on_step(step, runtime.optimizer)
            runtime.step()
            if step in flush_after:
                runtime.flush()
        state = {k: v.clone() for k, v in runtime.whole_state().items()}
        runtime.close(True)
        return state, runtime

    built = [models.build(kind) for _ in range(size)]
    if dtype:
        for module in built:
            module.to(dtype)
    with traced_once(kind, dtype):
        results = run_ranks(size, work, delay=delay, seed=seed, connect=connect)
    return {"state": results[0][0], "losses": losses, "runtimes": [r for _, r in results], "states": [s for s, _ in results]}
