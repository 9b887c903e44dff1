"""Which transport a pipeline's messages travel by: gloo on CPUs, torch's NCCL groups on GPUs."""

import logging

import torch
import torch.distributed as dist

from deepspeed_cdp.transport.base import Transport

from .schedule import PipeSchedule


def connect(kind: str, timeout_seconds: float, device: torch.device, schedule: PipeSchedule) -> Transport | None:
    """Collective: the transport that ``cyclic.transport`` asks for; None on one rank, which sends nothing.

    Raises:
        ValueError: it cannot work on these devices.
        HandoffError: not all ranks came within ``timeout_seconds``.
    """
    from deepspeed.utils import log_dist

    if schedule.ranks == 1:
        return None
    if device.type == "cpu":
        if kind == "nccl":
            raise ValueError("cyclic.transport is 'nccl', which cannot work here: the ranks compute on CPUs; use 'auto'.")
        from deepspeed_cdp.transport.gloo import GlooTransport
        transport: Transport = GlooTransport(dist.get_rank(), schedule.ranks, timeout_seconds, name="deepspeed_cdp_pipe")
    else:
        if kind == "gloo":
            raise ValueError("cyclic.transport is 'gloo', which cannot work here: the ranks compute on GPUs; use 'auto'.")
        from .nccl import GroupTransport
        transport = GroupTransport(dist.get_rank(), schedule.ranks, timeout_seconds, device)
    log_dist(f"activations, gradients and weights travel by {transport.name}", ranks=[0], level=logging.WARNING)
    return transport
