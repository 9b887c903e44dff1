"""Which GPU a rank of the scripts here computes on. There may be more ranks than GPUs: then ranks share them, which shows whether
the code is right and nothing about its speed.

Sharing is permitted only when asked for: ``DEEPSPEED_CDP_SHARE_GPU=1`` (set here) for the peer
transport, ``NCCL_MULTI_RANK_GPU_ENABLE=1`` (NCCL 2.30 or newer; set by whoever has it) for everything over NCCL. Without the
second, torch's own collectives go over gloo.
"""

import os

import torch


def shares_gpu() -> bool:
    """Whether there are more ranks here than GPUs."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"])) > torch.cuda.device_count()


def take_gpu() -> tuple[torch.device, str]:
    """This rank's GPU, made current, and the backend for ``torch.distributed``; call before the process group exists."""
    local, gpus = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
    assert gpus, "no GPU is here"
    shared = shares_gpu()
    if shared:
        os.environ["DEEPSPEED_CDP_SHARE_GPU"] = "1"
    os.environ["LOCAL_RANK"] = str(local % gpus)  # DeepSpeed looks there too
    torch.cuda.set_device(local % gpus)
    over_nccl = not shared or os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"
    return torch.device("cuda", local % gpus), "nccl" if over_nccl else "gloo"
