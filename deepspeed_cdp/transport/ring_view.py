"""Several rings: each sees the transport of all ranks as if it were alone (docs/algorithm.md#rings-of-rings).

World rank w is rank w % R of ring w // R, R being the ring size. Streams X and Y connect the ranks of equal number in
neighbouring rings; over them the owners of a stage, one per ring, average its gradient (runtime/cross_ring.py).
"""

import logging
from collections.abc import Sequence

import torch

from deepspeed_cdp.transport.base import Edge, Ticket, Transport, Where
from deepspeed_cdp.transport.choose import host

_FORWARDED = (  # attributes that are those of the inner transport
    "sent",
    "received",
    "bytes_sent",
    "bytes_received",
    "waited",
    "waited_sent",
    "host_waits",
    "timing",
    "rendezvous",
    "allocate",
    "work_enqueued",
    "record_event",
    "wait_event",
    "owner_stream",
    "relay",
    "finish_relays",
    "end_relays",
    "count",
)


def ring_size(setting: str | int, hosts: Sequence[str]) -> int:
    """The number of ranks per ring.

    ``auto``: one ring per host if every host has the same number of consecutive ranks, at least 2; otherwise one ring.

    Args:
        setting: ``cyclic.ring_size``.
        hosts: name of each rank's host, in rank order.
    Raises:
        ValueError: the ring size does not divide the number of ranks.
    """
    world = len(hosts)
    if setting == "auto":
        each = next((r for r in range(world) if hosts[r] != hosts[0]), world)
        blocks = [hosts[at : at + each] for at in range(0, world, each)]
        even = all(len(b) == each and len(set(b)) == 1 for b in blocks) and len({b[0] for b in blocks}) == len(blocks)
        return each if even and each > 1 else world
    if world % int(setting):
        raise ValueError(
            f"cyclic.ring_size is {setting}, which does not divide the {world} ranks"
        )  # integration/config.py says more
    return int(setting)


def rings_of(transport: Transport, setting: str | int) -> Transport:
    """Collective: the transport of this rank's ring; ``transport`` itself if there is one ring.

    Raises:
        ValueError: as ``ring_size``.
    """
    from deepspeed.utils import log_dist

    hosts = transport.gather(host(), f"rank {transport.rank}, looking for rings")
    size = ring_size(setting, hosts)
    if size == transport.size:
        return transport
    log_dist(
        f"{transport.size // size} rings of {size} ranks, on {len(set(hosts))} host(s), average their gradients stage by stage",
        ranks=[0],
        level=logging.WARNING,
    )  # DeepSpeed hides lower levels
    return RingView(transport, size)


class RingView(Transport):
    """The transport of all ranks as one ring sees it: ranks are those of the ring, and collectives are of all ranks.

    Attributes:
        inner: the transport of all ranks; counters are its own, by world rank.
        ring, rings: this rank's ring and the number of rings.
    """

    def __init__(self, inner: Transport, size: int):
        assert inner.size % size == 0, (inner.size, size)
        # Transport.__init__ is not called: the counters are those of ``inner``
        self.inner, self.name, self.size, self.timeout_seconds = inner, inner.name, size, inner.timeout_seconds
        self.ring, self.rank = divmod(inner.rank, size)
        self.rings, self._base = inner.size // size, inner.rank - self.rank
        for name in _FORWARDED:
            setattr(self, name, getattr(inner, name))

    world_rank = property(lambda self: self.inner.rank)
    collectives = property(lambda self: self.inner.collectives)

    def prepare(self, edges: Sequence[Edge], deferred: bool) -> None:
        n, chain = self.size, range(self.inner.size - self.size)
        inside = [(s, c * n + a, c * n + b) for c in range(self.rings) for s, a, b in edges]
        self.inner.prepare(sorted([*inside, *(("X", r, r + n) for r in chain), *(("Y", r + n, r) for r in chain)]), deferred)

    def post(
        self, stream: str, src: int, into: torch.Tensor, after: Sequence[Ticket] = (), where: Where = "", remote_offset: int = -1
    ) -> Ticket:
        return self.inner.post(stream, self._base + src, into, after, where, remote_offset)

    def push(self, stream: str, dst: int, source: torch.Tensor, after: Ticket | None = None, remote_offset: int = -1) -> Ticket:
        return self.inner.push(stream, self._base + dst, source, after, remote_offset)

    def start_peer(self, stream: str, peer: int, incoming: bool) -> None:
        self.inner.start_peer(stream, self._base + peer, incoming)

    def gather(self, value, where):
        return self.inner.gather(value, where)

    def broadcast(self, tensor, src, where):
        self.inner.broadcast(tensor, src, where)  # ``src`` of ring 0, to all ranks

    def reset(self, where):
        self.inner.reset(where)

    def close(self, drain):
        self.inner.close(drain)
