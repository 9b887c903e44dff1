"""The settings of docs/performance.md, measured anew on this host's GPUs: ``python -m benchmarks.targets OUT --seconds 1500``.

Each run is one call of ``benchmarks.run`` with a time limit, the most important first. A table of outcomes is printed last. Rows
of all runs go to ``OUT/results.csv``.
"""

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import time
from typing import NamedTuple

REST = 10  # seconds kept for the last table
ENDING = 45  # seconds for torchrun to end its ranks, which it kills after 30


class Run(NamedTuple):
    name: str
    seconds: int  # for all its engines
    arguments: str  # of benchmarks.run


SHORT = "--windows 3 --steps 6"
RUNS = (
    Run(
        "1.35B micro-batch 4",
        220,
        "--models llama-1.3b --windows 3 "
        "--engines compute,fsdp2-prefetch2-symm,zero3-leaf,cdp-v2,ddp,cdp-v2-replicas,cdp-v2-uncorrected,zero3",
    ),
    Run(
        "1.35B micro-batch 1",
        170,
        f"--models llama-1.3b --micro-batch 1 {SHORT} --repeats 2 --engines compute,cdp-v2,fsdp2-prefetch2-symm,zero3-leaf",
    ),
    Run(
        "3B",
        160,
        f"--models llama-3b --micro-batch 2 {SHORT} --engines compute,fsdp2-prefetch2-symm,zero3-leaf,cdp-v2,cdp-v2-uncorrected",
    ),
    Run("8B cdp-v2", 100, f"--models llama-8b --micro-batch 1 {SHORT} --engines cdp-v2-uncorrected"),
    Run("8B FSDP2", 100, f"--models llama-8b --micro-batch 1 {SHORT} --engines fsdp2-prefetch2-symm"),
    Run("8B ZeRO-3", 100, f"--models llama-8b --micro-batch 1 {SHORT} --engines zero3-leaf"),
    Run("delays", 80, f"--models llama-1.3b --jitter-ms 40 {SHORT} --engines compute,cdp-v2,fsdp2-prefetch2-symm"),
    Run(
        "compiled", 240, f"--models llama-1.3b --micro-batch 4,1 --compile {SHORT} --engines compute,cdp-v2,fsdp2-prefetch2-symm"
    ),
    Run(
        "no host synchronization",
        80,
        f"--models llama-1.3b --micro-batch 1 --no-host-sync {SHORT} --engines compute,cdp-v2,cdp-v2-min200,fsdp2-prefetch2-symm",
    ),
    Run("200 small units", 110, f"--models vit-200 --micro-batch 64 {SHORT} --engines compute,cdp-v2,fsdp2-prefetch2-symm"),
    Run(
        "unlike lengths",
        170,
        "--models llama-1.3b --micro-batch 1 --sequence 16384 --lengths 4096:1 --no-host-sync --accumulation 1,4 --windows 3 "
        "--warmup 3 --steps 10 --engines cdp-v2,fsdp2-prefetch2-symm,compute",
    ),
    Run(
        "packed lengths",
        110,
        "--models llama-1.3b --micro-batch 1 --sequence 8192 --lengths 1024:1 --packed --windows 3 --warmup 3 "
        "--engines cdp-v2,fsdp2-prefetch2-symm,compute",
    ),
    Run("DeepCompile", 150, f"--models llama-1.3b {SHORT} --warmup 8 --engines zero3-deepcompile"),
)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.targets", description=__doc__.split("\n")[0])
    parser.add_argument("out", metavar="OUT")
    parser.add_argument("--seconds", type=int, default=1800, help="for all runs")
    parser.add_argument("--ranks", type=int, default=0, help="default: all GPUs")
    parser.add_argument(
        "--only", default="", help="beginnings of names of runs, comma-separated: " + ", ".join(r.name for r in RUNS)
    )
    args = parser.parse_args(argv)
    beginnings = tuple(args.only.split(","))
    for beginning in beginnings:
        if not any(r.name.startswith(beginning) for r in RUNS):
            parser.error(
                f"--only has {beginning!r}, with which no run begins; allowed are beginnings of {', '.join(r.name for r in RUNS)}"
            )
    chosen = [r for r in RUNS if r.name.startswith(beginnings)]
    begun, outcomes = time.monotonic(), []
    for run in chosen:
        before, left = time.monotonic(), args.seconds - REST - (time.monotonic() - begun)
        command = [sys.executable, "-m", "benchmarks.run", "--out", args.out, "--ranks", str(args.ranks), *run.arguments.split()]
        outcomes.append((run.name, _outcome(command, min(run.seconds, left)), time.monotonic() - before))
        print(f"{outcomes[-1][0]}: {outcomes[-1][1]} after {outcomes[-1][2]:.0f} s", flush=True)
    print(*(f"{name:28} {outcome:10} {seconds:5.0f}" for name, outcome, seconds in outcomes), sep="\n")
    return int(any(outcome != "done" for _, outcome, _ in outcomes))


def _outcome(command: list[str], seconds: float) -> str:
    if seconds < REST:
        return "no time"
    process = subprocess.Popen(command, start_new_session=True)
    try:
        return "done" if process.wait(seconds) == 0 else "failed"
    except subprocess.TimeoutExpired:
        return "time limit"
    finally:
        _end(process)


def _end(process: subprocess.Popen) -> None:
    """End the process and its group. Ranks are in sessions of their own, and only torchrun, which is in the group, ends them."""
    until = time.monotonic() + ENDING
    with contextlib.suppress(ProcessLookupError):  # nothing of the group is left
        os.killpg(process.pid, signal.SIGTERM)
        while time.monotonic() < until:
            process.poll()
            os.killpg(process.pid, 0)
            time.sleep(0.1)
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


if __name__ == "__main__":
    sys.exit(main())
