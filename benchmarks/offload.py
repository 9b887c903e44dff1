"""Cost of ``offload_optimizer: cpu`` for an owner, without the ring: ``python -m benchmarks.offload [--cpu] [--threads 16]``.

One rank averages, updates and publishes a stage of ``--layers`` square matrices, over and over. Its masters are on the device
or in host memory, in turns. The device does nothing else, so the result is the whole time of the update. With offloading, the
update blocks the host for all of it; ``benchmarks.run`` (engine ``cdp-v2-offload``) measures how much training hides. The CPU
time is the process's, summed over threads; on a busy machine it is more reliable than the wall clock.
"""

import argparse
import platform
import statistics
import sys
import time

import deepspeed
import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam
from torch import nn

from deepspeed_cdp.model.make_plan import Settings
from deepspeed_cdp.runtime.runtime import Runtime
from deepspeed_cdp.transport.local import Hub, LocalTransport

OPTIMIZERS = {
    "torch AdamW": torch.optim.AdamW,
    "torch AdamW, fused": lambda p, lr: torch.optim.AdamW(p, lr, fused=True),
    "DeepSpeedCPUAdam": DeepSpeedCPUAdam,
}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class OneRank(LocalTransport):
    """No peers; buffers on a device."""

    def __init__(self, device: torch.device):
        super().__init__(Hub(1, 60.0), 0)
        self._at = device

    def allocate(self, nbytes: int) -> torch.Tensor:
        return torch.zeros(nbytes, dtype=torch.uint8, device=self._at)


class Update:
    """An owner of one stage whose sums are always finished."""

    def __init__(self, args: argparse.Namespace, device: torch.device, optimizer: str, offload: bool):
        with device:
            module = nn.Sequential(*(nn.Linear(args.width, args.width, bias=False) for _ in range(args.layers)))
        module.to(DTYPES[args.dtype])
        settings = Settings("cdp-v2", clip=args.clip, offload=offload, pin=not args.pageable)
        self.runtime = Runtime(module, OPTIMIZERS[optimizer](module.parameters(), lr=1e-5), settings, OneRank(device), device)
        self.owner, self.units = self.runtime.owner, self.runtime.executor.owner_executor.trained
        for sums in self.owner._sums.values():
            for total in sums.values():
                total.normal_(std=1e-3)
        self.count, self.cuda = 0, device.type == "cuda"

    def run(self) -> tuple[float, float]:
        """One update; returns milliseconds of wall-clock and of CPU time."""
        owner, step = self.owner, self.count
        self.count += 1
        owner.record(step)
        begun, used = time.perf_counter(), time.process_time()
        if owner.updates_eagerly:
            for unit in self.units:
                owner.advance(step, unit, 0)
        else:
            norm2 = torch.stack([owner.average(step, unit) for unit in self.units]).sum()
            for unit in self.units:
                owner.update(step, norm2, unit, 0)
        self.runtime.scale.end(step, False)
        owner.finish(step)
        self.runtime.scale.finish(step)
        self.runtime.scale.end_step(step)
        if self.cuda:
            torch.cuda.synchronize()
        return (time.perf_counter() - begun) * 1000, (time.process_time() - used) * 1000


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.offload", description=__doc__.split("\n")[0])
    parser.add_argument("--cpu", action="store_true", help="parameters on the CPU too: the copies' cost without a bus")
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--dtype", default="bf16", choices=tuple(DTYPES), help="of parameters and sums")
    parser.add_argument("--clip", type=float, default=0.0, help="gradient_clipping")
    parser.add_argument("--pageable", action="store_true", help="pin_memory: false")
    parser.add_argument("--threads", type=int, default=1, help="of torch and of DeepSpeedCPUAdam")
    parser.add_argument("--repeats", type=int, default=9)
    args = parser.parse_args(argv)
    if not args.cpu and not torch.cuda.is_available():
        print("no GPU is here; use --cpu", file=sys.stderr)
        return 2
    torch.set_num_threads(args.threads)
    device = torch.device("cpu" if args.cpu else "cuda:0")
    ways = [
        ("torch AdamW", False),
        ("torch AdamW, fused", False),
        ("torch AdamW", True),
        ("torch AdamW, fused", True),
        ("DeepSpeedCPUAdam", True),
    ]
    updates = {way: Update(args, device, *way) for way in ways}
    times: dict[tuple[str, bool], list[tuple[float, float]]] = {way: [] for way in ways}
    for repeat in range(args.repeats + 2):
        for way, update in updates.items():
            took = update.run()
            if repeat >= 2:  # state is made in the first
                times[way].append(took)
    count = args.layers * args.width**2
    memory = "" if args.cpu else ", pageable memory" if args.pageable else ", pinned memory"
    print(
        f"{torch.cuda.get_device_name() if not args.cpu else 'CPU'}, {args.threads} thread(s), {count / 1e6:.1f} million "
        f"{args.dtype} parameters, gradient_clipping {args.clip:g}{memory}; python "
        f"{platform.python_version()}, torch {torch.__version__}, deepspeed {deepspeed.__version__}\n"
    )
    print("| optimizer | masters | ms per update: median (lowest to highest; number) | CPU ms: the same |")
    print("|---|---|---|---|")
    for (optimizer, offload), took in times.items():
        clock, used = zip(*took)
        cells = [f"{statistics.median(x):.0f} ({min(x):.0f} to {max(x):.0f}; {len(x)})" for x in (clock, used)]
        print(f"| {optimizer} | {'in host memory' if offload else 'beside the parameters'} | {' | '.join(cells)} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
