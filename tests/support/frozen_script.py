"""One rank of two, as a script of a user: ``python -m support.frozen_script HOW FOLDER``, with RANK and so on in the environment.

flushes     rank 0 freezes in a flush; the script ends by the error
destroys    the same, and destroys torch's process group before it ends
ends        rank 0 freezes after its steps, rank 1 ends
loses       rank 1 is in a flush when the test takes the link between the ranks down (file "down"), rank 0 comes later
"""

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from deepspeed_cdp.transport.store_exchange import StoreExchange
from support.engine_work import Job, start, train
from support.faulty import impatient, ready


def wait_for(file: Path) -> None:
    while not file.exists():
        time.sleep(0.05)


def main(how: str, folder: Path) -> None:
    torch.set_num_threads(1)
    ready()
    rank, job = dist.get_rank(), Job("mlp", "cdp-v2", timeout=60.0)
    engine = start(job, 2)
    train(engine, job, rank, 0, 2)
    impatient(engine)
    (folder / f"ready-{rank}").touch()
    if rank == 0:
        wait_for(folder / "ready-1")  # a message of the last step may still be on its way, in a thread of this process
    if rank == 0 and how == "ends":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif rank == 0:
        exchange = StoreExchange.exchange

        def late(self: StoreExchange, value: Any, where: Any) -> list[Any]:
            if how != "loses":
                os.kill(os.getpid(), signal.SIGSTOP)
            wait_for(folder / "down")
            return exchange(self, value, where)

        StoreExchange.exchange = late
    if how == "ends":
        wait_for(folder / "frozen")
        return
    try:
        engine.flush()
        engine.save_checkpoint(str(folder / "saved"))
    finally:
        if how == "destroys":
            dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
