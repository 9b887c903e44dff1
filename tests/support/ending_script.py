"""One rank of two, as a script that ends without ``destroy``: ``python -m support.ending_script``, with RANK and so on set.

Rank 1 comes late to its last backward, which needs messages of rank 0, whose script has come to its end by then. From there on no
thread can start, as under Python 3.12.
"""

import atexit
import threading
import time
from typing import Any

import torch
import torch.distributed as dist

from support import models
from support.engine_work import Job, start, train
from support.faulty import ready


def refuse(*_: Any) -> None:
    raise RuntimeError("can't create new thread at interpreter shutdown")


def main() -> Any:
    torch.set_num_threads(1)
    ready()
    rank, job = dist.get_rank(), Job("mlp", "cdp-v2", timeout=60.0)
    engine = start(job, 2)
    train(engine, job, rank, 0, 2)
    loss = models.loss(engine, job.kind, models.batch(job.kind, 2, 0, rank))
    if rank == 1:
        time.sleep(2.0)
    engine.backward(loss)
    engine.step()
    print(f"rank {rank} ends at {time.monotonic()}", flush=True)
    atexit.register(setattr, threading.Thread, "start", refuse)  # runs before the engine's callback
    return engine


if __name__ == "__main__":
    engine = main()
