"""Where a host-bound step spends its time: device, host and waits of forward, backward and step, without a profiler.

    torchrun --standalone --nproc-per-node 2 -m benchmarks.phases [--model llama-1.3b] [--micro-batch 1] [--engines cdp-v2]

Each rank prints medians over steps in milliseconds, per engine:

- time on the device, by events; time on the host, by clocks;
- CPU time of the main thread (autograd's thread runs the backward);
- waits of the passes' stream, by message stream and peer;
- "same": a fixed piece of Python after each step. If it differs between engines, the host's speed has changed.

For engines of this package, a second round times the executor, every kind of action that Python does and of driver call that it
makes, on the host. These measurements cost some of the time that they show.
"""

import argparse
import collections
import faulthandler
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from benchmarks import engines, models, samples
from deepspeed_cdp.transport import wait_timing

SETTLE = 6  # steps that are left out at first
PARTS = ("forward", "backward", "step")


class Clock:
    """Calls and seconds by name."""

    def __init__(self) -> None:
        self.calls: collections.Counter[str] = collections.Counter()
        self.seconds: collections.Counter[str] = collections.Counter()

    def around(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The same function, timed. Seconds of functions inside count for both."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            begun = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds[name] += time.perf_counter() - begun
                self.calls[name] += 1

        return timed

    def told(self, steps: int) -> str:
        """Name, calls and milliseconds per step, by descending time."""
        return ", ".join(
            f"{name} {self.calls[name] / steps:.0f} x = {1e3 * s / steps:.2f}" for name, s in self.seconds.most_common()
        )


@contextmanager
def timed_calls(engine: Any, actions: Clock, driver: Clock) -> Iterator[None]:
    """Time the executor, those of its actions that Python does, and the driver calls that Python makes."""
    executor, calls = engine._runtime.executor, getattr(engine._transport, "driver", None)
    names = ("wait_value", "write_value", "copy", "record_event", "wait_event", "event_done", "create_event")
    handlers = dict(executor.actions)
    executor.actions.update({kind: actions.around(str(kind), f) for kind, f in handlers.items()})
    executor._execute, shared = actions.around("all", executor._execute), getattr(executor, "_shared", ())
    executor._shared = tuple(actions.around(x.__name__, x) if callable(x) else x for x in shared)
    for name in names if calls is not None else ():
        setattr(calls, name, driver.around(name, getattr(calls, name)))
    try:
        yield
    finally:
        executor.actions.update(handlers)
        del executor._execute  # the class's own again
        executor._shared = shared
        for name in names if calls is not None else ():
            delattr(calls, name)


@contextmanager
def every_step_timed() -> Iterator[None]:
    """Time GPU waits in every step, not only in one step of eight."""
    usual, wait_timing.EVERY = wait_timing.EVERY, 1
    try:
        yield
    finally:
        wait_timing.EVERY = usual


def the_same() -> float:
    """Seconds of a fixed amount of Python; other processes on the host can double it."""
    begun = time.perf_counter()
    for _ in range(4000):
        pass
    return time.perf_counter() - begun


def steps(
    job: engines.Job, step: Callable[..., Any], engine: Any, batches: Sequence[engines.Batch], count: int
) -> dict[str, Any]:
    """Train ``count`` steps; per step: seconds by part on the device and the host, of the main thread, and waits."""
    cuda, seen = job.device.type == "cuda", collections.defaultdict(list)
    marks: list[list[Any]] = []
    for i in range(count):
        marks.append([])
        clocks, used = [], []

        def note(marks=marks, clocks=clocks, used=used) -> None:
            if cuda:
                marks[-1].append(torch.cuda.Event(enable_timing=True))
                marks[-1][-1].record()
            clocks.append(time.perf_counter())
            used.append(time.thread_time())

        step(batches[i % len(batches)], note)
        seen["same"].append(the_same())
        seen["host"].append([b - a for a, b in zip(clocks, clocks[1:])])
        seen["main"].append([b - a for a, b in zip(used, used[1:])])
        latest = getattr(getattr(getattr(engine, "_transport", None), "timing", None), "latest", None)
        if latest is not None:
            seen["waits"].append(
                {
                    **{f"{s}<{p}": t for (s, p), t in latest.receive_waits.items()},
                    **{f"{s}>{p}": t for (s, p), t in latest.send_waits.items()},
                }
            )
    if cuda:
        torch.cuda.synchronize()
        seen["device"] = [[a.elapsed_time(b) / 1e3 for a, b in zip(m, m[1:])] for m in marks]
        seen["whole"] = [a[0].elapsed_time(b[0]) / 1e3 for a, b in zip(marks[SETTLE:], marks[SETTLE + 1 :])]
    else:
        seen["whole"] = [sum(s) for s in seen["host"][SETTLE:]]
    return seen


def in_parts(job: engines.Job) -> tuple[Callable[..., None], Any]:
    """A step that records the start and end of each part, and the engine."""
    if job.name == "compute":
        model = models.build(job.config, job.device, job.dtype)
        parts = model, lambda loss: loss.backward(), lambda: model.zero_grad(set_to_none=True)
        engine = None
    else:
        _, engine = engines.make(job)
        parts = engine, engine.backward, engine.step

    def step(batch: engines.Batch, note: Callable[[], None]) -> None:
        forward, backward, end = parts
        note()
        loss = engines._loss(forward, batch)
        note()
        backward(loss)
        note()
        end()
        note()

    return step, engine


def line(seen: dict[str, Any]) -> str:
    """A line of medians."""

    def of(columns: list[list[float]]) -> str:
        return " ".join(f"{part} {1e3 * statistics.median(c):.1f}" for part, c in zip(PARTS, zip(*columns[SETTLE:])))

    text = f"step {1e3 * statistics.median(seen['whole']):.1f} (lowest {1e3 * min(seen['whole']):.1f})"
    for name in ("device", "host", "main"):
        text += f" | {name} {of(seen[name])}" if name in seen else ""
    text += f" | same {1e3 * statistics.median(seen['same'][SETTLE:]):.3f}"
    waits = seen.get("waits", [])[SETTLE:]
    edges = sorted({e for w in waits for e in w})
    return text + (
        " | waits " + ", ".join(f"{e} {1e3 * statistics.median(w.get(e, 0.0) for w in waits):.1f}" for e in edges)
        if edges
        else ""
    )


def run(args: argparse.Namespace, device: torch.device) -> list[str]:
    """Measure each engine on this rank; returns the lines to print."""
    rank, lines = dist.get_rank(), []
    config = models.configuration(args.model, host_sync=not args.no_host_sync)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    batches = samples.alike(config, args.micro_batch, args.sequence, 4, rank, device)
    for name in args.engines.split(","):
        job = engines.Job(name, config, device, dtype, args.micro_batch)
        step, engine = in_parts(job)
        with every_step_timed():
            seen = steps(job, step, engine, batches, SETTLE + args.steps)
        lines.append(f"rank {rank} {name}: {line(seen)}")
        if name.startswith("cdp-"):
            actions, driver = Clock(), Clock()
            with timed_calls(engine, actions, driver):
                steps(job, step, engine, batches, args.steps)
            lines.append(f"rank {rank} {name}, actions: {actions.told(args.steps)}")
            if driver.calls:
                lines.append(f"rank {rank} {name}, driver: {driver.told(args.steps)}")
        if engine is not None:
            engine.destroy()
        step = engine = None
        engines.clean()
    return lines


def parser() -> argparse.ArgumentParser:
    new = argparse.ArgumentParser(prog="python -m benchmarks.phases", description=__doc__.split("\n")[0])
    new.add_argument("--model", default="llama-1.3b")
    new.add_argument("--micro-batch", type=int, default=1)
    new.add_argument("--sequence", type=int, default=2048, help="of text; images have their own number of tokens")
    new.add_argument("--steps", type=int, default=24)
    new.add_argument("--engines", default="compute,cdp-v2,compute,cdp-v2", help="compute, or DeepSpeed's (benchmarks.run)")
    new.add_argument("--no-host-sync", action="store_true")
    new.add_argument("--seconds", type=float, default=300, help="for everything")
    new.add_argument("--cpu", action="store_true", help="proves the script without GPUs")
    return new


def main() -> None:
    import deepspeed

    args = parser().parse_args()
    faulthandler.dump_traceback_later(args.seconds, exit=True)
    device = torch.device("cpu") if args.cpu else torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    if not args.cpu:
        torch.cuda.set_device(device)
    deepspeed.init_distributed("gloo" if args.cpu else "nccl")
    deepspeed.utils.logger.setLevel("ERROR")
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, run(args, device))
    if dist.get_rank() == 0:
        print("\n".join(text for of_all in zip(*everyone) for text in of_all))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
