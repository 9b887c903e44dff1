"""One rank of the GPU endurance check: hundreds of steps with random delays and synchronizes equal the undisturbed run, bitwise.

Started by tests/gpu/test_gpu.py, or by hand: torchrun --nproc-per-node N tests/gpu/rank_stress.py [STEPS]
"""

import faulthandler
import os
import random
import sys
from pathlib import Path

import torch

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]
faulthandler.dump_traceback_later(120, exit=True)
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import deepspeed  # noqa: E402
import models  # noqa: E402

import deepspeed_cdp  # noqa: E402, F401


def run(steps: int, disturbed: bool, rank: int) -> tuple[dict, int]:
    """Final weights and the memory allocated at the end."""
    module = models.build("llama").cuda()
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3, foreach=True)
    config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 3}, "steps_per_print": 10 ** 9,
              "cyclic": {"enabled": True, "timeout_seconds": 30}}
    engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=config)
    chance = random.Random(rank)
    for step in range(steps):
        loss = models.loss(engine, "llama", models.batch("llama", step, 0, rank).cuda())
        engine.backward(loss)
        engine.step()
        if disturbed:
            if chance.random() < 0.3:
                torch.cuda._sleep(int(chance.random() * 5e6))
            if chance.random() < 0.1:
                torch.cuda.synchronize()
            if chance.random() < 0.1:
                loss.item()
        if step == steps // 2:
            torch.cuda.synchronize()
            middle = torch.cuda.memory_allocated()
    state = {k: v.clone() for k, v in engine.module_state_dict().items()}
    engine.destroy()
    torch.cuda.synchronize()
    return state, middle


def main() -> None:
    torch.use_deterministic_algorithms(True, warn_only=True)
    deepspeed.init_distributed("nccl")
    rank, steps = int(os.environ["RANK"]), int(sys.argv[1]) if len(sys.argv) > 1 else 500
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    calm, memory = run(steps, False, rank)
    first = torch.cuda.memory_allocated()
    wild, _ = run(steps, True, rank)
    growth = torch.cuda.memory_allocated() - first
    equal = all(torch.equal(calm[n], wild[n]) for n in calm)
    if rank == 0:
        print(f"{steps} steps: disturbed equals undisturbed bitwise: {equal}; allocated {memory} bytes mid-run; a second engine "
              f"left {growth} bytes more than the first", flush=True)
        print("passed" if equal else "failed", flush=True)
    sys.exit(not equal)


if __name__ == "__main__":
    main()
