"""One rank of a benchmark, started by ``benchmarks.run`` under torchrun: engines one after the other, a CSV row per window."""

import argparse
import csv
import faulthandler
import json
import os
import random
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks import engines, models

PEAK_FLOPS = {"H100": 989e12, "H200": 989e12}  # dense bf16
FIELDS = ("engine", "model", "ranks", "micro_batch", "sequence", "compiled", "jitter_ms", "repeat", "window", "step_ms",
          "p20_ms", "p80_ms", "p99_ms", "tokens_per_s_per_gpu", "mfu", "peak_gib", "received_mib_per_step", "loss", "device",
          "torch", "deepspeed", "commit", "time")


def main() -> None:
    parser = argparse.ArgumentParser()
    for name, kind in (("engines", str), ("model", str), ("micro_batch", int), ("sequence", int), ("steps", int),
                       ("windows", int), ("warmup", int), ("jitter_ms", float), ("repeats", int), ("out", str),
                       ("commit", str), ("seconds", float), ("trace", str)):
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--cpu", action="store_true")
    args = parser.parse_args()
    local = int(os.environ["LOCAL_RANK"])
    device = torch.device("cpu") if args.cpu else torch.device("cuda", local)
    if not args.cpu:
        torch.cuda.set_device(device)
    import deepspeed
    deepspeed.init_distributed("gloo" if args.cpu else "nccl")
    deepspeed.utils.logger.setLevel("ERROR")
    for repeat in range(args.repeats):
        for name in args.engines.split(","):
            faulthandler.dump_traceback_later(args.seconds, exit=True)
            try:
                rows = measure(args, name, repeat, device)
            except torch.OutOfMemoryError as error:
                rows = []
                print(f"{name}: out of memory: {error}".split("\n")[0][:200], flush=True)
                sys.exit(3)  # peers cannot go on
            faulthandler.cancel_dump_traceback_later()
            if dist.get_rank() == 0:
                write(Path(args.out), rows)


def measure(args: argparse.Namespace, name: str, repeat: int, device: torch.device) -> list[dict]:
    """Warm up, then time windows of steps with one clock read per step and no synchronization inside a window."""
    cuda, rank, size = device.type == "cuda", dist.get_rank(), dist.get_world_size()
    model = models.build(args.model, device, torch.bfloat16 if cuda else torch.float32)
    flops = models.flops_per_token(model, args.sequence)
    vocabulary = model.config.vocab_size
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    free_before = torch.cuda.mem_get_info()[0] if cuda else 0
    step, engine = engines.make(name, model, args.micro_batch, args.compile)
    del model
    generator = torch.Generator().manual_seed(rank)
    late = random.Random(1000 + rank)
    batches = [torch.randint(0, vocabulary, (args.micro_batch, args.sequence), generator=generator).to(device) for _ in range(4)]

    def run(count: int) -> tuple[list[float], torch.Tensor]:
        marks, loss = [], None
        for i in range(count):
            if args.jitter_ms:
                delay = late.uniform(0, args.jitter_ms) / 1000
                if cuda:
                    torch.cuda._sleep(int(delay * 1.75e9))  # on the device, where a late rank is late
                else:
                    time.sleep(delay)
            loss = step(batches[i % len(batches)])
            if cuda:
                event = torch.cuda.Event(enable_timing=True)
                event.record()
                marks.append(event)
            else:
                marks.append(time.perf_counter())
        if cuda:
            torch.cuda.synchronize()
            return [a.elapsed_time(b) for a, b in zip(marks, marks[1:])], loss
        return [1000 * (b - a) for a, b in zip(marks, marks[1:])], loss

    run(args.warmup)
    rows = []
    for window in range(args.windows):
        received = _received(engine)
        begun = time.perf_counter()
        times, loss = run(args.steps)
        took = (time.perf_counter() - begun) * 1000 / args.steps
        mine = {"step_ms": took if len(times) < 2 else statistics.mean(times), "times": times,
                "peak": (torch.cuda.max_memory_allocated() + _outside(engine)) / 2 ** 30 if cuda else 0,
                "received": (_received(engine) - received) / args.steps / 2 ** 20, "loss": float(loss.detach())}
        everyone: list[dict] = [None] * size  # type: ignore[list-item]
        dist.all_gather_object(everyone, mine)
        slowest = max(everyone, key=lambda x: x["step_ms"])
        pooled = sorted(t for x in everyone for t in x["times"])
        tokens = args.micro_batch * args.sequence / slowest["step_ms"] * 1000
        device_name = torch.cuda.get_device_name() if cuda else "CPU"
        peak = next((v for k, v in PEAK_FLOPS.items() if k in device_name), None)
        rows.append({
            "engine": name, "model": args.model, "ranks": size, "micro_batch": args.micro_batch, "sequence": args.sequence,
            "compiled": args.compile, "jitter_ms": args.jitter_ms, "repeat": repeat, "window": window,
            "step_ms": round(slowest["step_ms"], 3), **{f"p{p}_ms": round(pooled[min(len(pooled) * p // 100, len(pooled) - 1)], 3)
                                                        for p in (20, 80, 99)},
            "tokens_per_s_per_gpu": round(tokens, 1), "mfu": round(tokens * flops / peak, 4) if peak else "",
            "peak_gib": round(max(x["peak"] for x in everyone), 3),
            "received_mib_per_step": round(max(x["received"] for x in everyone), 2), "loss": round(mine["loss"], 4),
            "device": device_name, "torch": torch.__version__, "deepspeed": __import__("deepspeed").__version__,
            "commit": args.commit, "time": time.strftime("%Y-%m-%dT%H:%M:%S")})
    if args.trace and name.startswith(args.trace):
        _trace(run, Path(args.out).parent, name)
        _profile(run, Path(args.out).parent, name)
        args.trace = ""  # once is enough
    if rank == 0:
        median = statistics.median(r["step_ms"] for r in rows)
        print(f"{args.model} mbs {args.micro_batch} {name:12} {median:8.1f} ms  {rows[-1]['peak_gib']:.1f} GiB  "
              f"loss {rows[-1]['loss']:.3f}  (init left {free_before / 2 ** 30:.0f} GiB free)", flush=True)
    engines.clean(engine)
    return rows


def _profile(run, folder: Path, name: str) -> None:
    """Where the host's time goes: backward on this thread, too."""
    import cProfile
    import io
    import pstats
    with torch.autograd.set_multithreading_enabled(False):
        run(2)
        profiler = cProfile.Profile()
        profiler.enable()
        run(4)
        profiler.disable()
    if dist.get_rank() == 1:
        text = io.StringIO()
        pstats.Stats(profiler, stream=text).sort_stats("tottime").print_stats(45)
        (folder / f"profile_{name}.txt").write_text(text.getvalue())


def _received(engine: object) -> int:
    transport = getattr(engine, "_transport", None)
    return sum(transport.bytes_received.values()) if transport is not None else 0


def _outside(engine: object) -> int:
    """Bytes of peer buffers that the caching allocator does not count."""
    runtime = getattr(engine, "_runtime", None)
    return runtime.handoff.buffers.nbytes() if runtime is not None else 0


def _trace(run, folder: Path, name: str) -> None:
    from torch.profiler import ProfilerActivity, profile
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiler:
        run(2)
    if dist.get_rank() in (1, dist.get_world_size() - 1):
        profiler.export_chrome_trace(str(folder / f"trace_{name}_rank{dist.get_rank()}.json.gz"))


def write(path: Path, rows: list[dict]) -> None:
    """Append rows; a header first if the file is new."""
    new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, FIELDS)
        if new:
            writer.writeheader()
        writer.writerows(rows)
    with path.with_suffix(".jsonl").open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


if __name__ == "__main__":
    main()
