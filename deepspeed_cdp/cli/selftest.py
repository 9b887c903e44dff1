"""One rank of the doctor's self-test: a tiny model trained by the engine, as a user's script would, and compared with the oracle.

Started as ``python -m deepspeed_cdp.cli.selftest DEVICE RESULT [TRACE]`` with torchrun's environment variables; rank 0 writes
RESULT.
"""

import contextlib
import json
import sys
from collections.abc import Callable

import deepspeed
import torch
import torch.distributed as dist
from torch import nn

from deepspeed_cdp import register
from deepspeed_cdp.analysis import reference
from deepspeed_cdp.plan.schedule import threshold

STEPS, WIDTH, RULE = 6, 16, "cdp-v2"


class Net(nn.Module):
    """A few blocks, at least one for each rank."""

    def __init__(self, blocks: int):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.Tanh(), nn.Linear(4 * WIDTH, WIDTH)) for _ in range(blocks)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


def batch(step: int, rank: int) -> torch.Tensor:
    """The micro-batch of this place."""
    return torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank))


def loss(call: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """Predict the neighbouring feature."""
    return (call(x) - x.roll(1, 1)).pow(2).mean()


def main(kind: str, result: str, trace: str | None = None) -> None:
    """Train, compare, write what was found."""
    deepspeed.init_distributed("gloo" if kind == "cpu" else "nccl")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if kind == "cuda":
        torch.cuda.set_device(rank)
    device = torch.device(kind, rank) if kind == "cuda" else torch.device("cpu")
    register()
    torch.manual_seed(1)
    model = Net(2 * ranks)
    start = Net(2 * ranks)
    start.load_state_dict(model.state_dict())
    config = {
        "train_micro_batch_size_per_gpu": 8,
        "gradient_clipping": 0,
        "zero_optimization": {"stage": 3},
        "log_level": "error",
        "optimizer": {"type": "SGD", "params": {"lr": 0.05, "momentum": 0.9}},
        "cyclic": {"enabled": True, "rule": RULE, "timeout_seconds": 60},
    }
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    with engine.cyclic_trace(trace) if trace else contextlib.nullcontext():
        for step in range(STEPS):
            engine.backward(loss(engine, batch(step, rank).to(device)))
            engine.step()
    name, collectives = engine._transport.name, engine._runtime.counters.collectives()
    state = engine.module_state_dict()
    if rank == 0:
        oracle = reference.train(
            start.to(device),
            engine.cyclic_plan.stages,
            threshold(RULE, ranks),
            lambda step, _, r: batch(step, r).to(device),
            loss,
            lambda named: torch.optim.SGD([p for _, p in named], lr=0.05, momentum=0.9),
            STEPS,
        )
        difference = max(float((state[n].float() - p).abs().max()) for n, p in oracle.masters.items())
        largest = max(float(p.detach().abs().max()) for p in oracle.masters.values())
        with open(result, "w") as file:
            json.dump(
                {"transport": name, "collectives": collectives, "difference": difference, "largest": largest, "steps": STEPS},
                file,
            )
    engine.destroy()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
