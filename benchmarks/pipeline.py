"""Idle time of pipelines: stock DeepSpeed's 1F1B and the cyclic engine, compared with the closed forms.

    python -m benchmarks.pipeline [--stages 4] [--rounds 1 2] [--ms 20] [--steps 8] [--out FILE]

Every stage is one layer that sleeps (on GPUs: spins) for ``--ms`` in its forward and again in its backward. So all passes take
the same time and do not compete for cores. A rank's idle fraction is 1 - (its passes' time) / (time of the steady steps); a
row has the mean over ranks. Each engine writes one row as a JSON line. ``--table FILE`` prints a recorded file as in the docs.
"""

import argparse
import json
import os
import platform
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.pauses import SlowLinear, pause
from benchmarks.processes import spawn

WIDTH = 16
WAYS = ("stock", "dp", "1", "cdp-v2", "cdp-v1")


def calibrate(seconds: float, device: torch.device) -> float:
    """The real duration of ``pause``, in seconds."""
    x, took = torch.zeros(1, device=device), []
    for _ in range(9):
        begun = time.perf_counter()
        pause(x, seconds)
        if device.type == "cuda":
            torch.cuda.synchronize()
        took.append(time.perf_counter() - begun)
    return statistics.median(took)


def measure(way: str, stages: int, rounds: int, seconds: float, steps: int, warm: int = 3) -> dict[str, Any]:
    """One row on this rank, in an initialized world; ``way``: "stock", or a rule or K as text."""
    import deepspeed
    import torch.distributed as dist
    from deepspeed.pipe import LayerSpec, PipelineModule

    import deepspeed_cdp  # noqa: F401
    from deepspeed_cdp.plan.pipeline_schedule import PipeSchedule
    from deepspeed_cdp.plan.schedule import threshold

    count = stages * rounds
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": count,
        "steps_per_print": 10**6,
        "optimizer": {"type": "SGD", "params": {"lr": 1e-3}},
    }
    if way != "stock":
        config["cyclic"] = {"enabled": True, "rule": int(way) if way.isdigit() else way, "timeout_seconds": 60}
    layers = [LayerSpec(SlowLinear, WIDTH, seconds, 1.0) for _ in range(stages)]
    module = PipelineModule(layers, num_stages=stages, loss_fn=nn.MSELoss(), partition_method="uniform")
    engine = deepspeed.initialize(model=module, model_parameters=list(module.parameters()), config=config)[0]

    def data():
        while True:
            yield torch.randn(2, WIDTH), torch.randn(2, WIDTH)

    batches = data()
    for _ in range(warm):
        engine.train_batch(batches)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    begun = time.perf_counter()
    for _ in range(steps):
        engine.train_batch(batches)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    wall = time.perf_counter() - begun
    if hasattr(engine, "flush"):
        engine.flush()
    busy = 2 * count * steps * calibrate(seconds, engine.device)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, 1 - busy / wall)
    engine.destroy()
    k = 0 if way == "stock" else threshold(config["cyclic"]["rule"], stages)
    return {
        "engine": "DeepSpeed PipelineEngine" if way == "stock" else "cyclic, " + (f"K = {way}" if way.isdigit() else way),
        "way": way,
        "stages": stages,
        "micro_batches": count,
        "ms_per_pass": seconds * 1000,
        "steps": steps,
        "ms_per_step": wall / steps * 1000,
        "idle": statistics.mean(everyone),
        "idle_by_rank": everyone,
        "closed_form": PipeSchedule(stages, k, rounds).idle,
    }


def rank_main(rank: int, stages: int, args: argparse.Namespace) -> None:
    """One process of the CPU mode."""
    import deepspeed
    from deepspeed.utils import logger

    logger.setLevel("ERROR")
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    with open(os.devnull, "w") as nowhere:
        said, sys.stdout = sys.stdout, nowhere  # DeepSpeed prints the partition
        rows = [measure(way, stages, rounds, args.ms / 1000, args.steps) for rounds in args.rounds for way in args.ways]
        sys.stdout = said
    if rank == 0:
        for row in rows:
            text = json.dumps(
                {
                    **row,
                    "machine": args.machine,
                    "python": platform.python_version(),
                    "torch": torch.__version__,
                    "deepspeed": deepspeed.__version__,
                    "load": round(os.getloadavg()[0], 1),
                }
            )
            print(text, flush=True)
            if args.out:
                with open(args.out, "a") as file:
                    file.write(text + "\n")


def table(path: str | Path) -> str:
    """A recorded file as markdown: medians over its runs."""
    rows: dict[tuple, list[dict[str, Any]]] = {}
    for line in Path(path).read_text().splitlines():
        row = json.loads(line)
        rows.setdefault((row["stages"], row["micro_batches"], row["ms_per_pass"], row["engine"]), []).append(row)
    lines = [
        "| stages | micro-batches per step | ms per pass | engine | ms per step | idle, measured | idle, closed form |",
        "|---|---|---|---|---|---|---|",
    ]
    for (stages, micro, ms, engine), runs in rows.items():
        step, idle = (statistics.median(r[key] for r in runs) for key in ("ms_per_step", "idle"))
        lines.append(f"| {stages} | {micro} | {ms:g} | {engine} | {step:.0f} | {idle:.1%} | {runs[0]['closed_form']:.1%} |")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pipeline", description=__doc__.split("\n")[0])
    parser.add_argument("--stages", type=int, nargs="+", default=[4])
    parser.add_argument("--rounds", type=int, nargs="+", default=[1, 2], help="micro-batches per step, divided by the stages")
    parser.add_argument("--ways", nargs="+", default=list(WAYS), help="stock, dp, cdp-v1, cdp-v2, or K")
    parser.add_argument("--ms", type=float, default=20.0, help="of a pass")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--machine", default="", help="a word for the record")
    parser.add_argument("--out", help="append rows to this file")
    parser.add_argument("--table", help="print this file as a table, and nothing else")
    args = parser.parse_args(argv)
    if args.table:
        print(table(args.table))
        return 0
    for stages in args.stages:
        spawn(rank_main, stages, stages, args)
    return 0


if __name__ == "__main__":
    sys.exit(main())
