"""What test_restarts.py runs under torchrun: trains and saves; in the first attempt rank 1 kills itself, if asked to."""

import os
import signal
import sys

import deepspeed
import torch

STEPS = 3


def main(folder: str, kill: bool) -> None:
    """Train to STEPS steps from the newest checkpoint."""
    deepspeed.init_distributed("gloo")
    torch.manual_seed(0)
    module = torch.nn.Sequential(*[torch.nn.Linear(4, 4) for _ in range(4)])
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 3},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "cyclic": {"enabled": True, "timeout_seconds": 20},
    }
    engine, *_ = deepspeed.initialize(model=module, model_parameters=module.parameters(), config=config)
    engine.load_checkpoint(folder)
    begun, attempt = engine.global_steps, os.environ["TORCHELASTIC_RESTART_COUNT"]
    while engine.global_steps < STEPS:
        engine.backward(engine(torch.ones(1, 4)).sum())
        engine.step()
        if engine.global_steps == 2 and begun == 0:
            engine.save_checkpoint(folder)
            if kill and engine.global_rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
    mapped = {line.split()[-1] for line in open("/proc/self/maps") if "/dev/shm/" in line}
    engine.destroy()
    print(f"rank {engine.global_rank}: attempt {attempt}, begun at {begun}, ended at {engine.global_steps}; {mapped}\n", end="")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2] == "kill")
