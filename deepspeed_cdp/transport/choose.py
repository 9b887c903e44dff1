"""Chooses the transport: each rank observes its device, and a pure function decides from all observations."""

import os
import socket
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

# Environment variables that allow several ranks on one GPU, by transport: ours, and that of NCCL 2.30 or newer.
# They serve trials, not speed.
SHARED_GPU_VARIABLES = {"peer": "DEEPSPEED_CDP_SHARE_GPU", "nccl": "NCCL_MULTI_RANK_GPU_ENABLE"}
ALLOWED = "allowed are 'gloo' on CPUs, 'peer' on GPUs that reach each other's memory, 'nccl' on GPUs, and 'auto'"


@dataclass(frozen=True)
class DeviceFacts:
    """One rank's observation of its host and device.

    Attributes:
        host: the machine's name.
        kind: type of the rank's device, "cpu" or "cuda".
        device: the GPU's UUID; "" on CPUs.
        sees: UUIDs of the GPUs that the process sees.
        reaches: UUIDs of the GPUs whose memory the rank's GPU can access.
        peer_trouble: why the rank cannot share memory with other processes; "" if it can.
        nccl_trouble: why the rank cannot use NCCL; "" if it can.
        permits: transports that the environment allows between ranks on one GPU (SHARED_GPU_VARIABLES).
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


def choose(kind: str, facts: Sequence[DeviceFacts], peer_failure: str = "") -> tuple[str, str]:
    """The transport's name, and the reason for the log. Pure, so all ranks decide alike.

    Args:
        kind: ``cyclic.transport``.
        facts: of all ranks, in rank order.
        peer_failure: why transport "peer", which an earlier call chose, could not be made.
    Raises:
        ValueError: the transport that ``kind`` names cannot work.
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
        for name, variable in SHARED_GPU_VARIABLES.items()
        if shared and not all(name in f.permits for f in facts)
    }
    no_peer = peer_failure or forbidden.get("peer", "") or _no_peer(facts, kind == "peer")
    no_nccl = forbidden.get("nccl", "") or _first(facts, "nccl_trouble")
    if kind in ("auto", "peer") and not no_peer:
        return "peer", _peer_reason(facts)
    if kind == "peer":
        raise _refusal(kind, no_peer, None if forbidden else "auto")
    if not no_nccl:
        return "nccl", no_peer if kind == "auto" else "cyclic.transport asks for it"
    why = no_nccl if kind == "nccl" else f"{no_peer}, and {no_nccl}"
    raise _refusal(kind, why, "peer" if kind == "nccl" and not shared else None)


def _peer_reason(facts: Sequence[DeviceFacts]) -> str:
    if len({f.device for f in facts}) < len(facts):
        return "ranks share GPUs, as the environment permits: slow"
    return "one GPU" if len(facts) == 1 else f"the {len(facts)} GPUs of one host reach each other's memory"


def _first(facts: Sequence[DeviceFacts], trouble: str) -> str:
    return next((f"rank {r}: {getattr(f, trouble)}" for r, f in enumerate(facts) if getattr(f, trouble)), "")


def _no_peer(facts: Sequence[DeviceFacts], asked: bool) -> str:
    """Why GPUs cannot access each other's memory; "" if they can.

    Args:
        asked: the config names transport "peer": then GPUs that a process does not see count as accessible.
    """
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
    """This machine's name, with the kernel's boot id where there is one."""
    name = socket.gethostname()
    try:
        with open("/proc/sys/kernel/random/boot_id") as boot:  # containers on different machines may share a host name
            name += "/" + boot.read().strip()
    except OSError:
        pass
    return name


def observe(device: torch.device) -> DeviceFacts:
    """This rank's observation; on GPUs it shares some memory as a trial."""
    if device.type != "cuda":
        return DeviceFacts(host(), device.type)
    index = device.index if device.index is not None else torch.cuda.current_device()
    names = [
        str(getattr(torch.cuda.get_device_properties(i), "uuid", f"{os.environ.get('CUDA_VISIBLE_DEVICES', '')}:{i}"))
        for i in range(torch.cuda.device_count())
    ]
    reached = [n for i, n in enumerate(names) if i != index and torch.cuda.can_device_access_peer(index, i)]
    permits = [kind for kind, variable in SHARED_GPU_VARIABLES.items() if os.environ.get(variable) == "1"]
    return DeviceFacts(host(), "cuda", names[index], names, reached, _peer_trouble(device), _nccl_trouble(), permits)


def _peer_trouble(device: torch.device) -> str:
    from deepspeed_cdp.transport.cuda_bindings import CudaBindings

    try:
        driver = CudaBindings()
        with torch.cuda.device(device):
            torch.cuda.synchronize()  # makes the context
            nbytes = driver.whole(1)
            address = driver.allocate(nbytes)
            try:
                os.close(driver.share(address))
            finally:
                driver.unmap(address, nbytes)
    except (OSError, AttributeError, RuntimeError) as error:
        return f"no memory shared between processes ({str(error).splitlines()[0]})"
    return ""


def _nccl_trouble() -> str:
    from deepspeed_cdp.transport.nccl_bindings import NcclBindings

    try:
        NcclBindings()
    except (OSError, AttributeError, RuntimeError) as error:
        return f"no NCCL ({str(error).splitlines()[0]})"
    return ""
