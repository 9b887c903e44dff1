"""How messages travel: one contract (base.py), several transports."""

import torch

from .base import Transport


def connect(kind: str, rank: int, size: int, timeout_seconds: float, device: torch.device) -> Transport:
    """Collective: the transport that ``cyclic.transport`` asks for.

    Args:
        kind: "auto" or the name of a transport.
        device: where parameters live.
    Raises:
        ValueError: it cannot work on this device.
        HandoffError: not all ranks came within ``timeout_seconds``.
    """
    if kind in ("auto", "gloo") and device.type == "cpu":
        from .gloo import GlooTransport
        return GlooTransport(rank, size, timeout_seconds)
    if kind in ("auto", "peer") and device.type == "cuda":
        from .peer import PeerTransport
        return PeerTransport(rank, size, timeout_seconds, device)
    raise ValueError(f"cyclic.transport is {kind!r}, which does not work on device {device.type!r} in this version; allowed are "
                     "'gloo' on CPUs, 'peer' on GPUs of one host, and 'auto'; use 'auto'")
