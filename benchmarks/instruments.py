"""Cost of DeepSpeed's instruments (monitors, flops profiler): steps with and without them, on CPUs over gloo.

    python -m benchmarks.instruments [--ranks 2] [--turns 7] [--steps 12]

It measures this engine and stock ZeRO-3. Engines and settings take turns: each turn makes an engine, warms up, and times a
window of steps on rank 0, which runs the monitors and the flops profiler. It prints two times:

- Processor time per step in rank 0's process: the median over turns of a window's mean, the lowest and highest window, and the
  median ratio to the window without instruments in the same turn. Other jobs on the machine affect it little.
- The fastest quarter of all steps by the wall clock, which other jobs do affect.
"""

import argparse
import contextlib
import io
import logging
import os
import platform
import statistics
import tempfile
import time
from typing import Any

import torch

from benchmarks.processes import spawn

WARM_UP = 4
WIDTH, BLOCKS, BATCH = 128, 6, 64


def settings(folder: str, profile_step: int) -> dict[str, dict[str, Any]]:
    """Additions to the config, by name. With this engine, every step also reads ``cyclic_metrics``."""
    csv = {"csv_monitor": {"enabled": True, "output_path": folder, "job_name": "csv"}}
    return {
        "none": {},
        "steps_per_print 1": {"steps_per_print": 1},
        "csv_monitor": csv,
        "wall_clock_breakdown": {"wall_clock_breakdown": True},
        "flops_profiler, another step": {"flops_profiler": {"enabled": True, "profile_step": 10**6}},
        "flops_profiler, in each window": {
            "flops_profiler": {"enabled": True, "profile_step": profile_step, "output_file": f"{folder}/flops.txt"}
        },
        "comms_logger": {"comms_logger": {"enabled": True, "prof_all": True}},
        "cyclic_metrics": {},
    }


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(WIDTH, 2 * WIDTH), torch.nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


def window(engine_name: str, setting: str, added: dict[str, Any], rank: int, steps: int) -> tuple[float, list[float]]:
    """Processor seconds per step in this process, and wall-clock seconds of each step."""
    import deepspeed

    import deepspeed_cdp

    deepspeed_cdp.register()
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(Block() for _ in range(BLOCKS)))
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": BATCH,
        "zero_optimization": {"stage": 3},
        "steps_per_print": None,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        **added,
    }
    if engine_name != "zero3":
        config["cyclic"] = {"enabled": True, "rule": engine_name, "timeout_seconds": 60}
    engine = deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=config)[0]
    x = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(rank))
    ends = []
    for step in range(WARM_UP + steps):
        if step == WARM_UP:
            busy = time.process_time()
            ends.append(time.perf_counter())
        engine.backward(engine(x).pow(2).mean())
        engine.step()
        if setting == "cyclic_metrics":
            engine.cyclic_metrics  # noqa: B018
        ends.append(time.perf_counter())
    busy = (time.process_time() - busy) / steps
    ends = ends[-steps - 1 :]
    if config.get("comms_logger"):
        deepspeed.comm.configure(enabled=False)  # of the whole process
    engine.destroy()
    return busy, [b - a for a, b in zip(ends, ends[1:])]


def worker(rank: int, args: argparse.Namespace, folder: str) -> None:
    import torch.distributed as dist

    seen: dict[tuple[str, str], list[tuple[float, list[float]]]] = {}
    with contextlib.redirect_stdout(io.StringIO()):  # what the instruments print goes nowhere, but is made
        import deepspeed  # noqa: F401

        logging.getLogger("DeepSpeed").handlers[:] = [logging.StreamHandler(io.StringIO())]
        for turn in range(-1, args.turns):  # the first turn is not counted
            for setting, added in settings(folder, WARM_UP + args.steps // 2).items():
                for engine in args.engines:
                    if engine != "zero3" or setting != "cyclic_metrics":
                        dist.barrier()
                        measured = window(engine, setting, added, rank, args.steps)
                        if turn >= 0:
                            seen.setdefault((engine, setting), []).append(measured)
    if rank == 0:
        print(table(seen, args))
    dist.barrier()
    dist.destroy_process_group()


def table(seen: dict[tuple[str, str], list[tuple[float, list[float]]]], args: argparse.Namespace) -> str:
    """The table as Markdown."""
    lines = [
        "| engine | instruments | processor ms per step | lowest to highest | to none | p25 of steps, ms |",
        "|---|---|---|---|---|---|",
    ]
    for (engine, setting), values in sorted(seen.items(), key=lambda item: args.engines.index(item[0][0])):
        ms = [1e3 * busy for busy, _ in values]
        ratio = statistics.median(v[0] / bare[0] for v, bare in zip(values, seen[engine, "none"]))
        quarter = 1e3 * statistics.quantiles([t for _, steps in values for t in steps], n=4)[0]
        lines.append(
            f"| {engine} | {setting} | {statistics.median(ms):.1f} | {min(ms):.1f} to {max(ms):.1f} | {ratio:.2f} | "
            f"{quarter:.1f} |"
        )
    import deepspeed

    lines += [
        "",
        f"{args.ranks} ranks, {os.cpu_count()} cores ({platform.machine()}), 1 thread each; {args.turns} turns of "
        f"{args.steps} steps; torch {torch.__version__}, deepspeed {deepspeed.__version__}",
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--engines", nargs="+", default=["cdp-v2", "zero3"], choices=["dp", "cdp-v1", "cdp-v2", "zero3"])
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        spawn(worker, args.ranks, args, folder)


if __name__ == "__main__":
    main()
