"""How messages travel: one contract (base.py), several transports, and the choice between them (choose.py)."""

import logging

import torch

from deepspeed_cdp import __version__
from deepspeed_cdp.errors import HandoffError

from .base import Transport
from .choose import Facts, choose, observe
from .meeting import Meeting, first_line


def connect(kind: str, rank: int, size: int, timeout_seconds: float, device: torch.device) -> Transport:
    """Collective: the transport that ``cyclic.transport`` asks for, the same on all ranks; rank 0 logs which and why.

    Args:
        kind: "auto" or the name of a transport.
        device: where parameters live.
    Raises:
        ValueError: it cannot work on these devices, or ranks have other versions of this package.
        HandoffError: not all ranks came within ``timeout_seconds``.
    """
    from deepspeed.utils import log_dist

    where = f"rank {rank}, connecting the {size} ranks"
    meeting = Meeting(rank, size, timeout_seconds, None, "deepspeed_cdp_choice", where)
    everyone = meeting.exchange({"version": __version__, **observe(device).as_dict()}, where)
    versions = [there.pop("version", "of before 0.1") for there in everyone]  # first of all: what follows may differ
    other = next((r for r, version in enumerate(versions) if version != __version__), None)
    if other is not None:
        raise ValueError(f"deepspeed_cdp version is {__version__!r} on rank {rank} but {versions[other]!r} on rank {other}; "
                         "start every rank with the same config, model and package versions")
    facts = [Facts(**there) for there in everyone]
    name, reason = choose(kind, facts)
    transport, trouble = None, ""
    if name == "peer":
        transport, trouble = _try_peer(meeting, rank, size, timeout_seconds, device, where)
        if transport is None:
            name, reason = choose(kind, facts, trouble)
    if name == "nccl":
        from .nccl import NcclTransport
        transport = NcclTransport(rank, size, timeout_seconds, device)
    elif name == "gloo":
        from .gloo import GlooTransport
        transport = GlooTransport(rank, size, timeout_seconds)
    meeting.close(None)
    how = {"peer": "peer copies", "nccl": "NCCL", "gloo": "gloo"}[name]
    log_dist(f"hand-offs travel by {how}: {reason}", ranks=[0], level=logging.WARNING)  # below it DeepSpeed shows nothing
    if name == "peer":
        log_dist(f"CUDA streams of hand-offs: {transport.lanes}", ranks=[0])
    return transport


def _try_peer(meeting: Meeting, rank: int, size: int, timeout_seconds: float, device: torch.device,
              where: str) -> tuple[Transport | None, str]:
    """The peer transport if every rank got one, else the first reason why not."""
    transport, trouble = None, ""
    try:
        from .peer import PeerTransport
        transport = PeerTransport(rank, size, timeout_seconds, device)
    except HandoffError as error:  # a peer has failed: it tells why in the exchange, unless it is gone
        trouble = f"~{error}"
    except (ImportError, OSError, RuntimeError) as error:  # no symmetric memory between these GPUs, or an old driver
        trouble = f"rank {rank}: {first_line(error)}"
    troubles = sorted(text for text in meeting.exchange(trouble, where) if text)  # causes before consequences
    if troubles and transport is not None:
        transport.close(False)
    return (None, troubles[0].lstrip("~")) if troubles else (transport, "")
