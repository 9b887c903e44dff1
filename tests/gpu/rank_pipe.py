"""GPU check of pipelines: parity with the oracle for N = 2, 3, 4 (``pipeline``), N = 2 (``pyramid``) and one device, idle time.

    python tests/gpu/rank_pipe.py [--ranks 1 2 3 4] [--cpu] [--ms 4]        # starts the processes itself, a world after the other
    torchrun --nproc-per-node N tests/gpu/rank_pipe.py [--cpu]            # one world

One line per check, "ok" or "FAILED"; the exit status says whether all passed. About 10 s per world on GPUs.
"""

import argparse
import faulthandler
import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT)]
parser = argparse.ArgumentParser()
parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 3, 4])
parser.add_argument("--cpu", action="store_true", help="gloo; proves this script without GPUs")
parser.add_argument("--ms", type=float, default=4.0, help="of a pass, where idle time is measured")
parser.add_argument("--steps", type=int, default=10, help="where idle time is measured")
parser.add_argument("--seconds", type=float, default=150.0, help="after which a process ends, with its stack")


def launch(args: argparse.Namespace) -> int:
    """All worlds, one after the other."""
    worst = 0
    for world in args.ranks:
        began = time.time()
        code = subprocess.run(
            [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}", __file__, *sys.argv[1:]],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        ).returncode
        worst = max(worst, abs(code))
        print(f"{world} ranks: {f'FAILED {code}' if code else 'ok'} in {time.time() - began:.0f} s", flush=True)
    return worst


def check(work, job, rank: int, world: int) -> str:
    """One job against the oracle on this rank's device; what is wrong, or ""."""
    import torch.distributed as dist

    from deepspeed_cdp.plan.schedule import threshold

    result = work.train(rank, world, job)
    everyone = [None] * world
    dist.all_gather_object(everyone, {n: w.cpu() for n, w in result["weights"].items()})
    got = {n: w for there in everyone for n, w in there.items()}
    masters, means, _ = work.oracle(job)
    far = max((got[n] - masters[n].cpu()).abs().max().item() for n in masters)
    told = means if threshold(job.rule, job.stages) == 0 else [means[0], *means[:-1]]
    loss = max(abs(a - b) for a, b in zip(result["told"], told))
    limit = 3e-2 if job.bf16 else 2e-5
    text = f"weights differ by {far:.1e}, losses by {loss:.1e}"
    return text if far <= limit and loss <= limit and got.keys() == masters.keys() else f"FAILED: {text}"


def main(args: argparse.Namespace) -> int:
    faulthandler.dump_traceback_later(args.seconds, exit=True)
    if args.cpu:
        os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed
    import torch
    from deepspeed.utils import logger

    from benchmarks.pipeline import measure
    from support import pipe_work as work
    from support.gpu_places import take_gpu
    from support.pipe_work import Job

    logger.setLevel("ERROR")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device, backend = (torch.device("cpu"), "gloo") if args.cpu else take_gpu()
    work.DEVICE = device
    deepspeed.init_distributed(dist_backend=backend, verbose=False)
    jobs = [
        Job(world, "cdp-v2", tied=True, clip=0.5, warmup=True),
        Job(world, "cdp-v1", clip=0.5, eval_after=(2,)),
        Job(world, "dp", 2),
        Job(world, "cdp-v2", bf16=True, sum_fp32=True),
    ]
    if world == 1:
        jobs = [Job(3, "cdp-v2", tied=True, clip=0.5), Job(2, "cdp-v1"), Job(3, "cdp-v2", bf16=True, sum_fp32=True)]
    if world == 3:
        jobs += [Job(2, "cdp-v2", tied=True, clip=0.5), Job(2, "cdp-v1")]
    bad = 0
    say = (lambda text: print(text, flush=True)) if rank == 0 else (lambda text: None)
    quiet, loud = open(os.devnull, "w"), sys.stdout  # DeepSpeed prints each partition
    for job in jobs:
        began, sys.stdout = time.time(), quiet
        text = check(work, job, rank, world)
        sys.stdout = loud
        bad += text.startswith("FAILED")
        name = "single device" if world == 1 else "pipeline" if world == job.stages else "pyramid"
        say(
            f"{world} ranks, {name} of {job.stages} stages, {job.rule}{', tied' * job.tied}{', bf16' * job.bf16}: {text} "
            f"({time.time() - began:.1f} s)"
        )
    for way in ("stock", "dp", "cdp-v2", "cdp-v1") if world > 1 else ():
        sys.stdout = quiet
        row = measure(way, world, 1, args.ms / 1000, args.steps)
        sys.stdout = loud
        say(
            f"{world} stages, {row['micro_batches']} micro-batches, {row['engine']}: {row['ms_per_step']:.1f} ms per step, idle "
            f"{row['idle']:.1%}, closed form {row['closed_form']:.1%}"
        )
    torch.distributed.barrier()
    if not args.cpu and world > torch.cuda.device_count():
        os._exit(bad)  # NCCL 2.31 does not come back from destroying communicators of ranks that share a GPU
    torch.distributed.destroy_process_group()
    return bad


if __name__ == "__main__":
    ARGS = parser.parse_args()
    sys.exit(main(ARGS) if "RANK" in os.environ else launch(ARGS))
