"""Which transport: every rank says what it sees, and one pure function decides, the same on all ranks."""

import logging
import os
import socket
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from deepspeed_cdp.errors import HandoffError
from deepspeed_cdp.transport.base import Transport
from deepspeed_cdp.transport.store_exchange import StoreExchange, first_line
from deepspeed_cdp.version import __version__

# What lets several ranks compute on one GPU: torch for its symmetric memory, NCCL since 2.30. To try things out, not for speed.
PERMITS = {"peer": "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "nccl": "NCCL_MULTI_RANK_GPU_ENABLE"}
ALLOWED = "allowed are 'gloo' on CPUs, 'peer' on GPUs that reach each other's memory, 'nccl' on GPUs, and 'auto'"


@dataclass(frozen=True)
class Facts:
    """What one rank sees.

    Attributes:
        host: names the machine.
        kind: type of its device, "cpu" or "cuda".
        device: names its GPU, "" on CPUs.
        sees: the GPUs that its process sees; reaches: those whose memory its own GPU reaches.
        peer_trouble: why it cannot have symmetric memory at all, or "".
        nccl_trouble: why it cannot use NCCL, or "".
        permits: transports that its environment permits between ranks on one GPU, see PERMITS.
    """

    host: str
    kind: str
    device: str = ""
    sees: Sequence[str] = field(default=())
    reaches: Sequence[str] = field(default=())
    peer_trouble: str = ""
    nccl_trouble: str = ""
    permits: Sequence[str] = field(default=())

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def choose(kind: str, facts: Sequence[Facts], tried: str = "") -> tuple[str, str]:
    """The transport and why, for the log. Pure.

    Args:
        kind: ``cyclic.transport``.
        facts: of all ranks, in rank order.
        tried: why a transport that this function chose before did not work after all.
    Raises:
        ValueError: what ``kind`` asks for cannot work.
    """
    kinds = sorted({f.kind for f in facts})
    if kinds == ["cpu"]:
        if kind in ("auto", "gloo"):
            return "gloo", "the ranks compute on CPUs"
        raise _refusal(kind, "the ranks compute on CPUs", "auto")
    if kinds != ["cuda"]:
        raise _refusal(
            kind, f"the ranks' devices are of the types {kinds}, and hand-offs travel between CPUs or between GPUs", None
        )
    shared = next(
        (
            (a, b)
            for b in range(len(facts))
            for a in range(b)
            if (facts[a].host, facts[a].device) == (facts[b].host, facts[b].device)
        ),
        None,
    )
    if kind == "gloo":
        raise _refusal(kind, "the ranks compute on GPUs", "auto")
    forbidden = {
        name: f"ranks {shared[0]} and {shared[1]} compute on the same GPU (tried where {variable}=1)"
        for name, variable in PERMITS.items()
        if shared and not all(name in f.permits for f in facts)
    }
    no_peer = tried or forbidden.get("peer", "") or _no_peer(facts, kind == "peer")
    no_nccl = forbidden.get("nccl", "") or _first(facts, "nccl_trouble")
    if kind in ("auto", "peer") and not no_peer:
        return "peer", _praise(facts)
    if kind == "peer":
        raise _refusal(kind, no_peer, None if forbidden else "auto")
    if not no_nccl:
        return "nccl", no_peer if kind == "auto" else "cyclic.transport asks for it"
    why = no_nccl if kind == "nccl" else f"{no_peer}, and {no_nccl}"
    raise _refusal(kind, why, "peer" if kind == "nccl" and not shared else None)


def _praise(facts: Sequence[Facts]) -> str:
    if len({f.device for f in facts}) < len(facts):
        return "ranks share GPUs, as the environment permits: slow"
    return "one GPU" if len(facts) == 1 else f"the {len(facts)} GPUs of one host reach each other's memory"


def _first(facts: Sequence[Facts], trouble: str) -> str:
    return next((f"rank {r}: {getattr(f, trouble)}" for r, f in enumerate(facts) if getattr(f, trouble)), "")


def _no_peer(facts: Sequence[Facts], asked: bool) -> str:
    """Why GPUs do not reach each other's memory, or ""; a GPU that a process does not see is only tried if asked for."""
    other = next((r for r, f in enumerate(facts) if f.host != facts[0].host), None)
    if other is not None:
        return f"ranks 0 and {other} are on different hosts"
    for a, mine in enumerate(facts):
        for b, theirs in enumerate(facts):
            if theirs.device in (mine.device, *mine.reaches) or (asked and theirs.device not in mine.sees):
                continue
            if theirs.device in mine.sees:
                return f"the GPU of rank {a} does not reach the memory of rank {b}'s"
            return f"rank {a} does not see the GPU of rank {b} (CUDA_VISIBLE_DEVICES), so nothing says that they reach each other"
    return _first(facts, "peer_trouble")


def _refusal(kind: str, reason: str, fix: str | None) -> ValueError:
    advice = f"; use {fix!r}" if fix else ""
    return ValueError(f"cyclic.transport is {kind!r}, which cannot work here: {reason}; {ALLOWED}{advice}.")


def host() -> str:
    """Names this machine."""
    name = socket.gethostname()
    try:
        with open("/proc/sys/kernel/random/boot_id") as boot:  # containers of different machines may share a name
            name += "/" + boot.read().strip()
    except OSError:
        pass
    return name


def observe(device: torch.device) -> Facts:
    """What this rank sees; allocates a little symmetric memory to find out whether it can."""
    if device.type != "cuda":
        return Facts(host(), device.type)
    index = device.index if device.index is not None else torch.cuda.current_device()
    names = [
        str(getattr(torch.cuda.get_device_properties(i), "uuid", f"{os.environ.get('CUDA_VISIBLE_DEVICES', '')}:{i}"))
        for i in range(torch.cuda.device_count())
    ]
    reached = [n for i, n in enumerate(names) if i != index and torch.cuda.can_device_access_peer(index, i)]
    permits = [kind for kind, variable in PERMITS.items() if os.environ.get(variable) == "1"]
    return Facts(host(), "cuda", names[index], names, reached, _peer_trouble(device), _nccl_trouble(), permits)


def _peer_trouble(device: torch.device) -> str:
    try:
        import torch.distributed._symmetric_memory as symmetric

        symmetric.empty(1024, dtype=torch.uint8, device=device)
    except (ImportError, AttributeError, RuntimeError) as error:
        return f"no symmetric memory ({str(error).splitlines()[0]})"
    return ""


def _nccl_trouble() -> str:
    from deepspeed_cdp.transport.nccl_bindings import Nccl

    try:
        Nccl()
    except (OSError, AttributeError, RuntimeError) as error:
        return f"no NCCL ({str(error).splitlines()[0]})"
    return ""


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
    meeting = StoreExchange(rank, size, timeout_seconds, None, "deepspeed_cdp_choice", where)
    everyone = meeting.exchange({"version": __version__, **observe(device).as_dict()}, where)
    versions = [there.pop("version", "of before 0.1") for there in everyone]  # first of all: what follows may differ
    other = next((r for r, version in enumerate(versions) if version != __version__), None)
    if other is not None:
        raise ValueError(
            f"deepspeed_cdp version is {__version__!r} on rank {rank} but {versions[other]!r} on rank {other}; "
            "start every rank with the same config, model and package versions"
        )
    facts = [Facts(**there) for there in everyone]
    name, reason = choose(kind, facts)
    transport, trouble = None, ""
    if name == "peer":
        transport, trouble = _try_peer(meeting, rank, size, timeout_seconds, device, where)
        if transport is None:
            name, reason = choose(kind, facts, trouble)
    if name == "nccl":
        from deepspeed_cdp.transport.nccl import NcclTransport

        transport = NcclTransport(rank, size, timeout_seconds, device)
    elif name == "gloo":
        from deepspeed_cdp.transport.gloo import GlooTransport

        transport = GlooTransport(rank, size, timeout_seconds)
    meeting.close(None)
    how = {"peer": "peer copies", "nccl": "NCCL", "gloo": "gloo"}[name]
    log_dist(f"hand-offs travel by {how}: {reason}", ranks=[0], level=logging.WARNING)  # below it DeepSpeed shows nothing
    if name == "peer":
        log_dist(f"CUDA streams of hand-offs: {transport.lanes}", ranks=[0])
    return transport


def _try_peer(
    meeting: StoreExchange, rank: int, size: int, timeout_seconds: float, device: torch.device, where: str
) -> tuple[Transport | None, str]:
    """The peer transport if every rank got one, else the first reason why not."""
    transport, trouble = None, ""
    try:
        from deepspeed_cdp.transport.peer import PeerTransport

        transport = PeerTransport(rank, size, timeout_seconds, device)
    except HandoffError as error:  # a peer has failed: it tells why in the exchange, unless it is gone
        trouble = f"~{error}"
    except (ImportError, OSError, RuntimeError) as error:  # no symmetric memory between these GPUs, or an old driver
        trouble = f"rank {rank}: {first_line(error)}"
    troubles = sorted(text for text in meeting.exchange(trouble, where) if text)  # causes before consequences
    if troubles and transport is not None:
        transport.close(False)
    return (None, troubles[0].lstrip("~")) if troubles else (transport, "")


def connect_pipeline(kind: str, rank: int, size: int, timeout_seconds: float, device: torch.device) -> Transport | None:
    """Collective: the transport that ``cyclic.transport`` asks for; None on one rank, which sends nothing.

    Raises:
        ValueError: it cannot work on these devices.
        HandoffError: not all ranks came within ``timeout_seconds``.
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
        from deepspeed_cdp.transport.nccl_group import GroupTransport

        transport = GroupTransport(rank, size, timeout_seconds, device)
    log_dist(f"activations, gradients and weights travel by {transport.name}", ranks=[0], level=logging.WARNING)
    return transport
