"""Makes the transport that the config asks for and the devices allow. All functions are collective."""

import logging
from typing import Any

import torch

from deepspeed_cdp.errors import HandoffError
from deepspeed_cdp.transport.base import Transport
from deepspeed_cdp.transport.choose import DeviceFacts, choose, observe
from deepspeed_cdp.transport.store_exchange import StoreExchange, first_line
from deepspeed_cdp.version import __version__

_LOG_NAMES = {"peer": "peer copies", "nccl": "NCCL", "gloo": "gloo"}


def connect(kind: str, rank: int, size: int, timeout_seconds: float, device: torch.device) -> Transport:
    """Collective: a ring's transport, of the same type on all ranks. Rank 0 logs which and why.

    Args:
        kind: ``cyclic.transport``: "auto" or a transport's name.
        rank, size: this rank and the number of ranks.
        timeout_seconds: how long the transport waits for a peer.
        device: where parameters are.
    Raises:
        ValueError: the transport cannot work on these devices, or ranks have different versions of this package.
        HandoffError: not all ranks called within ``timeout_seconds``, or one could not make its transport.
    """
    from deepspeed.utils import log_dist

    where = f"rank {rank}, connecting the {size} ranks"
    exchange = StoreExchange(rank, size, timeout_seconds, None, "deepspeed_cdp_choice", where)
    try:
        name, reason, transport = _choose_and_make(kind, exchange, device, where)
    finally:
        exchange.close(None)  # if this rank failed, the others need not wait for it
    log_dist(
        f"hand-offs travel by {_LOG_NAMES[name]}: {reason}", ranks=[0], level=logging.WARNING
    )  # DeepSpeed hides lower levels
    if name == "peer":
        peer: Any = transport  # a PeerTransport, which is imported on GPUs only
        log_dist(f"CUDA streams of hand-offs: {peer.stream_report}", ranks=[0])
    return transport


def _choose_and_make(kind: str, exchange: StoreExchange, device: torch.device, where: str) -> tuple[str, str, Transport]:
    """(name, reason, transport)."""
    rank, size, timeout_seconds = exchange.rank, exchange.size, exchange.timeout_seconds
    everyone = exchange.exchange({"version": __version__, **observe(device).as_dict()}, where)
    versions = [there.pop("version", "of before 0.1") for there in everyone]  # first: other versions may observe other facts
    other = next((r for r, version in enumerate(versions) if version != __version__), None)
    if other is not None:
        raise ValueError(
            f"deepspeed_cdp version is {__version__!r} on rank {rank} but {versions[other]!r} on rank {other}; "
            "start every rank with the same config, model and package versions"
        )
    facts = [DeviceFacts(**there) for there in everyone]
    name, reason = choose(kind, facts)
    if name == "peer":
        transport, failure = _try_peer(exchange, device, where)
        if transport is not None:
            return name, reason, transport
        name, reason = choose(kind, facts, failure)
    if name == "nccl":
        from deepspeed_cdp.transport.nccl import NcclTransport

        return name, reason, NcclTransport(rank, size, timeout_seconds, device)
    from deepspeed_cdp.transport.gloo import GlooTransport

    return name, reason, GlooTransport(rank, size, timeout_seconds)


def _try_peer(exchange: StoreExchange, device: torch.device, where: str) -> tuple[Transport | None, str]:
    """Collective: (the peer transport, "") if every rank could make one, else (None, the first rank's reason)."""
    rank, transport, failure = exchange.rank, None, ""
    try:
        from deepspeed_cdp.transport.peer import PeerTransport

        transport = PeerTransport(rank, exchange.size, exchange.timeout_seconds, device)
    except HandoffError as error:  # a consequence: the peer that failed tells the cause below, unless it is gone
        failure = f"~{error}"
    except (ImportError, OSError, RuntimeError) as error:  # these GPUs share no memory, or an old driver
        failure = f"rank {rank}: {first_line(error)}"
    try:
        failures = sorted(text for text in exchange.exchange(failure, where) if text)  # "~" sorts consequences last
    except BaseException:
        if transport is not None:
            transport.close(False)
        raise
    if failures and transport is not None:
        transport.close(False)
    return (None, failures[0].lstrip("~")) if failures else (transport, "")


def connect_pipeline(kind: str, rank: int, size: int, timeout_seconds: float, device: torch.device) -> Transport | None:
    """Collective: a pipeline's transport: gloo on CPUs, NCCL on GPUs; None on one rank, which sends nothing.

    Args:
        kind: ``cyclic.transport``: "auto", or the one that fits the devices.
    Raises:
        ValueError: the transport that ``kind`` names cannot work on these devices.
        HandoffError: not all ranks called within ``timeout_seconds``.
    """
    from deepspeed.utils import log_dist

    if size == 1:
        return None
    if device.type == "cpu":
        if kind == "nccl":
            raise ValueError("cyclic.transport is 'nccl', which cannot work here: the ranks compute on CPUs; use 'auto'.")
        from deepspeed_cdp.transport.gloo import GlooTransport

        transport: Transport = GlooTransport(rank, size, timeout_seconds, name="deepspeed_cdp_pipe")
    else:
        if kind == "gloo":
            raise ValueError("cyclic.transport is 'gloo', which cannot work here: the ranks compute on GPUs; use 'auto'.")
        from deepspeed_cdp.transport.nccl_group import NcclGroupTransport

        transport = NcclGroupTransport(rank, size, timeout_seconds, device)
    log_dist(f"activations, gradients and weights travel by {transport.name}", ranks=[0], level=logging.WARNING)
    return transport
