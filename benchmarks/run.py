"""Measure engines side by side on this machine: ``python -m benchmarks.run --models llama-1.3b --micro-batch 1,4``.

Each (model, micro-batch) is one torchrun in which the engines take turns, ``--repeats`` times over. Rows go to
``OUT/results.csv`` (one per window), the table of medians to ``OUT/table.md``. ``--cpu`` runs a tiny model over gloo: its numbers
show that everything works, not how fast anything is.
"""

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

from benchmarks import report

ENGINES = ("compute", "ddp", "fsdp2", "zero3", "zero3-leaf", "cdp-v2", "cdp-v1")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.run", description=__doc__.split("\n")[0])
    parser.add_argument("--models", default="llama-1.3b", help="comma-separated; see benchmarks/models.py")
    parser.add_argument("--micro-batch", default="4", help="comma-separated sizes")
    parser.add_argument("--engines", default=",".join(ENGINES), help="comma-separated, of " + ", ".join(ENGINES) + ", cdp-K")
    parser.add_argument("--ranks", type=int, default=0, help="default: all GPUs, or 2 with --cpu")
    parser.add_argument("--sequence", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=8, help="per window")
    parser.add_argument("--windows", type=int, default=5)
    parser.add_argument("--warmup", type=int, default=4, help="steps before the first window")
    parser.add_argument("--repeats", type=int, default=1, help="rounds of all engines")
    parser.add_argument("--jitter-ms", type=float, default=0.0, help="each rank is late by U(0, this) in every step")
    parser.add_argument("--compile", action="store_true", help="torch.compile every decoder layer")
    parser.add_argument("--trace", default="", help="also record a profiler trace of engines whose name starts so")
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--seconds", type=float, default=120, help="no engine may take longer than this")
    parser.add_argument("--out", default="", help="default: benchmarks/results/DATE_run")
    args = parser.parse_args(argv)
    out = Path(args.out or f"benchmarks/results/{time.strftime('%Y-%m-%d')}_run")
    out.mkdir(parents=True, exist_ok=True)
    ranks = args.ranks
    if not ranks:
        import torch
        ranks = 2 if args.cpu else torch.cuda.device_count()
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip() or "unknown"
    failed = 0
    for model in args.models.split(","):
        for micro_batch in args.micro_batch.split(","):
            command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}",
                       "-m", "benchmarks.rank", "--model", model, "--micro-batch", micro_batch, "--out", str(out / "results.csv"),
                       "--commit", os.environ.get("COMMIT", commit)]
            for name in ("engines", "sequence", "steps", "windows", "warmup", "jitter_ms", "repeats", "seconds", "trace"):
                command += [f"--{name.replace('_', '-')}", str(getattr(args, name))]
            command += ["--compile"] * args.compile + ["--cpu"] * args.cpu
            failed |= subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}).returncode
    if (out / "results.csv").exists():
        (out / "table.md").write_text(report.table(out / "results.csv"))
        print((out / "table.md").read_text())
    return failed


if __name__ == "__main__":
    sys.exit(main())
