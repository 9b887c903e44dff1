"""Cost of ``cyclic.check_divergence``: steps with and without comparisons, on CPUs over gloo.

    python -m benchmarks.divergence --ranks 4 --out benchmarks/results/DATE_cpu_divergence/rows.csv

Both settings, and one ring or rings of two, take turns: each turn makes an engine, warms up, and times a window of steps. Each
row has the processor time per step in rank 0's process, which other jobs affect little, and the wall time per step.
"""

import argparse
import csv
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.processes import spawn

WARM_UP, WIDTH, BLOCKS, BATCH = 4, 256, 8, 64
FIELDS = (
    "ranks",
    "ring_size",
    "check_divergence",
    "turn",
    "steps",
    "parameters",
    "processor_ms",
    "wall_ms",
    "torch",
    "deepspeed",
)


def window(ring_size: int, every: int, steps: int) -> dict[str, Any]:
    """Train one window."""
    import deepspeed

    import deepspeed_cdp

    deepspeed_cdp.register()
    torch.manual_seed(0)
    blocks = (torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh()) for _ in range(BLOCKS))
    model = torch.nn.Sequential(*blocks)
    parameters = list(model.parameters())
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": BATCH,
        "zero_optimization": {"stage": 3},
        "steps_per_print": None,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "cyclic": {"enabled": True, "ring_size": ring_size, "check_divergence": every, "timeout_seconds": 60},
    }
    count = sum(p.numel() for p in parameters)
    engine = deepspeed.initialize(model=model, model_parameters=parameters, config=config)[0]
    x = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(1))
    for step in range(WARM_UP + steps):
        if step == WARM_UP:
            busy, wall = time.process_time(), time.perf_counter()
        engine.backward(engine(x).pow(2).mean())
        engine.step()
    busy, wall = time.process_time() - busy, time.perf_counter() - wall
    engine.destroy()
    return {
        "ring_size": ring_size,
        "check_divergence": every,
        "steps": steps,
        "parameters": count,
        "processor_ms": round(1e3 * busy / steps, 3),
        "wall_ms": round(1e3 * wall / steps, 3),
        "torch": torch.__version__,
        "deepspeed": deepspeed.__version__,
    }


def worker(rank: int, args: argparse.Namespace) -> None:
    import torch.distributed as dist

    rows = []
    for turn in range(-1, args.turns):  # the first turn is not counted
        for ring_size in (args.ranks, 2):
            for every in (0, 1) if turn % 2 else (1, 0):
                dist.barrier()
                row = {"ranks": args.ranks, "turn": turn, **window(ring_size, every, args.steps)}
                rows += [row] if turn >= 0 else []
    if rank == 0:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        with args.out.open("w", newline="") as file:
            writer = csv.DictWriter(file, FIELDS)
            writer.writeheader()
            writer.writerows(rows)
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    spawn(worker, args.ranks, args)


if __name__ == "__main__":
    main()
