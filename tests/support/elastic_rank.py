"""What test_elastic.py runs under torchrun: a script that goes on from the newest checkpoint, on as many ranks as there are.

elastic_rank.py FOLDER STEPS [TAG]
"""

import faulthandler
import os
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]
os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed  # noqa: E402
import torch  # noqa: E402

from support.engine_work import Job, pack, start, train, whole  # noqa: E402


def main() -> None:
    faulthandler.dump_traceback_later(30, repeat=True)
    torch.set_num_threads(1)
    deepspeed.init_distributed("gloo")
    folder, steps, tag = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3] if len(sys.argv) > 3 else None
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    job = Job("mlp", "cdp-v2", optimizer="adamw", schedule="warmup", clip=0.3, timeout=10.0)
    engine = start(job, world)
    engine.load_checkpoint(folder, tag=tag)
    begun = engine.global_steps
    for step in range(begun, steps):
        train(engine, job, rank, step, step + 1)
        engine.save_checkpoint(folder / "reference" if tag else folder)  # a save flushes: both runs need the same ones
    state = pack(whole(engine))
    if rank == 0:
        (folder / f"end-{'reference' if tag else 'elastic'}").write_bytes(state)
        (folder / f"how-{'reference' if tag else 'elastic'}").write_text(f"{world} {begun}")
    engine.destroy()
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
