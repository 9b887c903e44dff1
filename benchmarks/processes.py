"""Starts the CPU processes of a benchmark on this machine, in one process group."""

import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def spawn(function: Callable[..., None], ranks: int, *args: Any) -> None:
    """Call ``function(rank, *args)`` in processes with a gloo process group, and wait for all.

    Their store is in this process, so no other process can take its port before they use it.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    mp.spawn(_begin, (function, ranks, store.port, args), nprocs=ranks)


def _begin(rank: int, function: Callable[..., None], ranks: int, port: int, args: tuple) -> None:
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(ranks),
        LOCAL_WORLD_SIZE=str(ranks),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        TORCHELASTIC_USE_AGENT_STORE="True",
        OMP_NUM_THREADS="1",
        DS_ACCELERATOR="cpu",
    )
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    function(rank, *args)
