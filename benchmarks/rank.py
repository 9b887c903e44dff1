"""One rank of a benchmark, which ``benchmarks.run`` starts under torchrun: engines one after the other, a CSV row per window."""

import argparse
import faulthandler
import os
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
import transformers

from benchmarks import engines, fsdp, lengths, limited, models, rows, samples
from benchmarks.progress import Progress

PEAK_FLOPS = {"H100": 989e12, "H200": 989e12}  # dense bf16


def main() -> None:
    parser = argparse.ArgumentParser()
    for name, kind in (
        ("engines", str),
        ("model", str),
        ("micro_batch", int),
        ("sequence", int),
        ("steps", int),
        ("windows", int),
        ("warmup", int),
        ("jitter_ms", float),
        ("repeats", int),
        ("out", str),
        ("build", str),
        ("commit", str),
        ("seconds", float),
        ("trace", str),
        ("bandwidth_limit", float),
        ("layer_ms", float),
        ("accumulation", int),
        ("lengths", str),
    ):
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind)
    for name in ("compile", "cpu", "no_host_sync", "packed"):
        parser.add_argument(f"--{name.replace('_', '-')}", action="store_true")
    args = parser.parse_args()
    local = int(os.environ["LOCAL_RANK"])
    device = torch.device("cpu") if args.cpu else torch.device("cuda", local)
    if not args.cpu:
        torch.cuda.set_device(device)
    faulthandler.dump_traceback_later(max(args.seconds, 600), exit=True)  # DeepSpeed may build an operator, or wait for who does
    deepspeed.init_distributed("gloo" if args.cpu else "nccl")
    deepspeed.utils.logger.setLevel("ERROR")
    names = args.engines.split(",")
    progress = Progress(args.repeats * len(names) * (1 + args.windows), shown=dist.get_rank() == 0)
    for repeat in range(args.repeats):
        for name in names:
            faulthandler.dump_traceback_later(args.seconds, exit=True)
            try:
                measured = Measurement(args, name, repeat, device, progress).run()
            except torch.OutOfMemoryError as error:
                print(f"{name}: out of memory: {error}".split("\n")[0][:200], flush=True)
                sys.exit(3)  # peers cannot go on
            faulthandler.cancel_dump_traceback_later()
            if dist.get_rank() == 0:
                rows.write(Path(args.out), measured)
    progress.close()


class Measurement:
    """Warm up, then time windows of steps with one clock read per step and no synchronization inside a window.

    Windows follow one another without a pause. With ``--lengths`` ranks have unlike work, so each window is timed from a common
    start, with nothing under way, until all ranks have done all work of its steps, the last update included.
    """

    def __init__(self, args: argparse.Namespace, name: str, repeat: int, device: torch.device, progress: Progress):
        self.args, self.name, self.repeat, self.device, self.progress = args, name, repeat, device, progress
        self.cuda, self.rank, self.size = device.type == "cuda", dist.get_rank(), dist.get_world_size()
        self.config = models.configuration(args.model, host_sync=not args.no_host_sync)
        sharded = engines.can_shard(name) and (args.build == "sharded" or args.build == "auto" and args.model == "llama-8b")
        self.job = engines.Job(
            name,
            self.config,
            device,
            torch.bfloat16 if self.cuda else torch.float32,
            args.micro_batch,
            args.compile,
            sharded,
            args.bandwidth_limit,
            args.layer_ms,
            args.accumulation,
            args.sequence,
        )
        self.drawn: list[list[list[int]]] = []  # [step][micro-batch] -> lengths of its samples
        self.warmup = args.warmup  # steps
        self.batches = self._samples() if args.lengths else self._alike()  # [step], in turns; of each: its micro-batches
        self.late = random.Random(1000 + self.rank)
        self.cycles_per_ms = limited.cycles_per_second(device) / 1000 if self.cuda and args.jitter_ms else 0.0
        self.ends: list[float] = []  # of every step, by a clock that all ranks of one host share (CPU only)
        self.held = 0  # bytes of the device, before the engine is there
        self.step: Any = None
        self.engine: Any = None

    def run(self) -> list[dict]:
        """A row per window, the same on every rank except for the loss."""
        args, name = self.args, self.name
        what = f"{args.model} micro-batch {args.micro_batch}, {name}"
        self.progress.tell(f"{what}: warm-up")
        if self.cuda:
            torch.cuda.reset_peak_memory_stats()
            self.held = torch.cuda.memory_allocated()
        self.step, self.engine = engines.make(self.job)
        measured = self._drained(what) if args.lengths else self._continuous(what)
        self.progress.advance("")
        if args.trace and name.startswith(args.trace):
            self._trace(Path(args.out).parent)
            self._profile(Path(args.out).parent)
            args.trace = ""  # once is enough
        if self.rank == 0:
            median = statistics.median(r["step_ms"] for r in measured)
            memory = f"{measured[-1]['peak_gib']:.1f} GiB  " if self.cuda else ""
            self.progress.print(
                f"{args.model} mbs {args.micro_batch} {name:12} {median:8.1f} ms  {memory}loss {measured[-1]['loss']:.3f}"
            )
        if self.engine is not None:
            self.engine.destroy()
        self.step = self.engine = None  # frees the engine's memory before the next one is made
        engines.clean()
        return measured

    def _alike(self) -> list[list[engines.Batch]]:
        args, count = self.args, self.args.accumulation
        batches = samples.alike(self.config, args.micro_batch, args.sequence, 4 * count, self.rank, self.device)
        return [list(batches[i : i + count]) for i in range(0, len(batches), count)]

    def _samples(self) -> list[list[engines.Batch]]:
        """Micro-batches of all steps; those of the warm-up have every shape that a rank's windows have.

        A process needs a shape's kernels and memory once. Else the first engine would wait for them, and a ring for each rank's.
        """
        args, generator = self.args, torch.Generator().manual_seed(self.rank)
        drawer = lengths.parse(args.lengths, args.sequence, args.packed)
        steps, micro_batches = range(args.warmup, args.warmup + args.windows * args.steps), range(args.accumulation)
        drawn = [[[drawer.draw(r, t, m, args.micro_batch) for m in micro_batches] for t in steps] for r in range(self.size)]
        warmup = lengths.warmup(drawer, args.micro_batch, drawn, args.warmup)
        self.warmup, self.drawn = len(warmup), warmup + drawn[self.rank]
        return [
            [
                {k: v.to(self.device) for k, v in samples.micro_batch(n, args.packed, self.config.vocab_size, generator).items()}
                for n in step
            ]
            for step in self.drawn
        ]

    def _continuous(self, what: str) -> list[dict]:
        """A row per window of steps alike; windows follow one another without a pause."""
        args = self.args
        first_peak, received, waited = 0.0, [0] * (args.windows + 1), [0.0] * (args.windows + 1)

        def between(step: int) -> None:
            """A host clock before a step, without synchronization."""
            nonlocal first_peak
            window, inside = divmod(step - args.warmup, args.steps)
            if window < 0 or inside:
                return
            received[window], waited[window] = self._received(), self._waited()
            if window == 0:
                first_peak = self._peak()
                if self.cuda:
                    torch.cuda.reset_peak_memory_stats()
            if window < args.windows:
                self.progress.advance(f"{what}: window {window + 1} of {args.windows}")

        times, losses = self._steps(args.warmup + args.windows * args.steps, between)
        between(args.warmup + args.windows * args.steps)
        steady, measured = self._peak(), []
        for window in range(args.windows):
            first = args.warmup + window * args.steps  # times[i] is from the end of step i to that of step i + 1
            measured.append(
                self._row(
                    window,
                    {
                        "times": (mine := times[first - 1 : first - 1 + args.steps]),
                        "step_ms": statistics.mean(mine),
                        "tokens": args.micro_batch * args.sequence * args.accumulation * args.steps,
                        "steady": steady,
                        "peak": max(first_peak, steady),
                        "received": (received[window + 1] - received[window]) / args.steps / 2**20,
                        "waited": 1000 * (waited[window + 1] - waited[window]) / args.steps,
                        "ends": self.ends[first : first + args.steps],
                        "loss": float(losses[first + args.steps - 1]),
                    },
                )
            )
        return measured

    def _drained(self, what: str) -> list[dict]:
        """A row per window of unlike steps, each from a common start until all ranks have nothing left to do."""
        args = self.args
        self._steps(self.warmup)
        self._drain()
        first_peak, measured = self._peak(), []
        if self.cuda:
            torch.cuda.reset_peak_memory_stats()
        for window in range(args.windows):
            self.progress.advance(f"{what}: window {window + 1} of {args.windows}")
            first, received, waited = self.warmup + window * args.steps, self._received(), self._waited()
            dist.barrier()
            if self.cuda:
                torch.cuda.synchronize()
            begun = time.perf_counter()
            times, losses = self._steps(args.steps, first=first)
            self._drain()
            took = time.perf_counter() - begun
            steady = self._peak()
            mine = {
                "times": times,
                "step_ms": 1000 * took / args.steps,
                "tokens": sum(sum(n) for step in self.drawn[first : first + args.steps] for n in step),
                "steady": steady,
                "peak": max(first_peak, steady),
                "received": (self._received() - received) / args.steps / 2**20,
                "waited": 1000 * (self._waited() - waited) / args.steps,
                "ends": self.ends,
                "loss": float(losses[-1]),
            }
            measured.append(self._row(window, mine))
        return measured

    def _drain(self) -> None:
        """Wait until this rank's steps are finished, with the updates that a cyclic engine still owes."""
        if self.name.startswith("cdp-"):
            self.engine.flush()
        if self.cuda:
            torch.cuda.synchronize()

    def _row(self, window: int, mine: dict[str, Any]) -> dict[str, Any]:
        """The row of a window, from the figures of all ranks."""
        args = self.args
        everyone: list[dict] = [None] * self.size  # type: ignore[list-item]
        dist.all_gather_object(everyone, mine)
        slowest = max(everyone, key=lambda x: x["step_ms"])
        pooled = sorted(t for x in everyone for t in x["times"])
        tokens = sum(x["tokens"] for x in everyone) / self.size / (slowest["step_ms"] * args.steps) * 1000
        device_name = torch.cuda.get_device_name() if self.cuda else "CPU"
        if args.layer_ms:
            device_name += f" (layers sleep {args.layer_ms:g} and {2 * args.layer_ms:g} ms)"
        peak_flops = next((v for k, v in PEAK_FLOPS.items() if k in device_name), None)
        flops = models.flops_per_token(self.config, args.sequence)
        return {
            "engine": self.name,
            "model": args.model,
            "ranks": self.size,
            "micro_batch": args.micro_batch,
            "sequence": args.sequence,
            "compiled": args.compile,
            "jitter_ms": args.jitter_ms,
            "repeat": self.repeat,
            "window": window,
            "step_ms": round(slowest["step_ms"], 3),
            **{f"p{p}_ms": round(pooled[min(len(pooled) * p // 100, len(pooled) - 1)], 3) for p in (20, 80, 99)},
            "tokens_per_s_per_gpu": round(tokens, 1),
            "mfu": round(tokens * flops / peak_flops, 4) if peak_flops and not args.lengths else "",
            "peak_gib": round(max(x["peak"] for x in everyone), 3) if self.cuda else "",
            "received_mib_per_step": round(max(x["received"] for x in everyone), 2) if self._transport() else "",
            "loss": round(mine["loss"], 4),
            "device": device_name,
            "torch": torch.__version__,
            "deepspeed": deepspeed.__version__,
            "commit": args.commit,
            "time": time.strftime("%Y-%m-%dT%H:%M:%S"),
            "steady_gib": round(max(x["steady"] for x in everyone), 3) if self.cuda else "",
            "host_sync": not args.no_host_sync,
            "bandwidth_gb_s": args.bandwidth_limit or "",
            "build": "sharded" if self.job.sharded else "full",
            "python": platform.python_version(),
            "transformers": transformers.__version__,
            "waited_ms_by_rank": " ".join(f"{x['waited']:.2f}" for x in everyone) if self._host_waits() else "",
            "behind_ms_by_rank": " ".join(_behind(a["ends"], b["ends"]) for a, b in zip(everyone, everyone[1:])),
            "accumulation": args.accumulation,
            "lengths": lengths.parse(args.lengths, args.sequence, args.packed).text if args.lengths else "",
            "tokens_by_rank": " ".join(str(x["tokens"]) for x in everyone),
        }

    def _steps(
        self, count: int, before: Callable[[int], None] = lambda step: None, first: int = 0
    ) -> tuple[list[float], list[torch.Tensor]]:
        """Milliseconds from the end of each step to the end of the next, and every loss.

        There is no synchronization in between: it would drain the ring, which then looks slower than it is.
        """
        marks: list[Any] = []
        losses = []
        for i in range(first, first + count):
            before(i)
            if self.args.jitter_ms:
                delay = self.late.uniform(0, self.args.jitter_ms)
                if self.cuda:
                    torch.cuda._sleep(int(delay * self.cycles_per_ms))  # on the device, where a late rank is late
                else:
                    time.sleep(delay / 1000)
            losses.append(self.step(*self.batches[i % len(self.batches)]).detach().clone())
            if self.cuda:
                marks.append(torch.cuda.Event(enable_timing=True))
                marks[-1].record()
            else:
                marks.append(time.perf_counter())
        if self.cuda:
            torch.cuda.synchronize()
            return [a.elapsed_time(b) for a, b in zip(marks, marks[1:])], losses
        self.ends = marks
        return [1000 * (b - a) for a, b in zip(marks, marks[1:])], losses

    def _peak(self) -> float:
        """GiB above the level before, with buffers that peers write into, which the caching allocator does not count.

        Memory of NCCL and of the driver does not count.
        """
        if not self.cuda:
            return 0.0
        transport = self._transport()
        outside = self.engine._runtime.executor.buffers.nbytes() if transport is not None and transport.name == "peer" else 0
        outside += self.engine.outside_nbytes() if isinstance(self.engine, fsdp.AllGathers) else 0
        return (torch.cuda.max_memory_allocated() - self.held + outside) / 2**30

    def _transport(self) -> Any:
        return getattr(self.engine, "_transport", None)

    def _received(self) -> int:
        transport = self._transport()
        return sum(transport.bytes_received.values()) if transport is not None else 0

    def _host_waits(self) -> bool:
        return getattr(self._transport(), "host_waits", False)

    def _waited(self) -> float:
        """Seconds so far in which messages have blocked this rank's host."""
        transport = self._transport()
        return sum((*transport.waited.values(), *transport.waited_sent.values())) if self._host_waits() else 0.0

    def _profile(self, folder: Path) -> None:
        """Profile the host; the backward runs on this thread too."""
        import cProfile
        import io
        import pstats

        with torch.autograd.set_multithreading_enabled(False):
            self._steps(2)
            profiler = cProfile.Profile()
            profiler.enable()
            self._steps(4)
            profiler.disable()
        if self.rank == 1:
            text = io.StringIO()
            pstats.Stats(profiler, stream=text).sort_stats("tottime").print_stats(45)
            (folder / f"profile_{self.name}.txt").write_text(text.getvalue())

    def _trace(self, folder: Path) -> None:
        from torch.profiler import ProfilerActivity, profile

        with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiler:
            self._steps(2)
        if self.rank in (1, self.size - 1):
            profiler.export_chrome_trace(str(folder / f"trace_{self.name}_rank{self.rank}.json.gz"))


def _behind(a: list[float], b: list[float]) -> str:
    """Median milliseconds from the end of a rank's step to its neighbour's end of the same step; "" without a common clock."""
    return f"{1000 * statistics.median(y - x for x, y in zip(a, b)):.2f}" if a and b else ""


if __name__ == "__main__":
    main()
