"""Rings of rings: several rings train side by side and average each stage's finished gradient (docs/algorithm.md).

World rank w is position w % R of ring w // R. Inside a ring everything is as with one ring of R ranks: ``RingView`` shows it the
transport of all W ranks as if the ring were alone. What is new happens in the owner's NORM: the owners of a stage, one per ring,
add their rings' sums along a chain, unit by unit, ring 0 first (stream X), and the last ring sends the total back along it
(stream Y). So every ring has the same bits, updates its own masters with them, and publishes. No collective is involved, only
messages between two ranks; loss sums travel along as one more, small item.
"""

import logging
from collections.abc import Sequence

import torch

from deepspeed_cdp.transport.base import Edge, Ticket, Transport, Where
from deepspeed_cdp.transport.choose import host

_SAME = (
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
    "moved_on",
    "mark",
    "after",
    "owner_stream",
    "count",
)


def ring_size(setting: str | int, hosts: Sequence[str]) -> int:
    """R, from ``cyclic.ring_size`` and the names of all ranks' hosts, in rank order.

    ``auto`` is the number of ranks per host where there are several hosts with the same number of two or more ranks, each host's
    ranks one after the other; else all ranks.
    Raises:
        ValueError: R does not divide the number of ranks.
    """
    world = len(hosts)
    if setting == "auto":
        each = next((r for r in range(world) if hosts[r] != hosts[0]), world)
        blocks = [hosts[at : at + each] for at in range(0, world, each)]
        even = all(len(b) == each and len(set(b)) == 1 for b in blocks) and len({b[0] for b in blocks}) == len(blocks)
        return each if even and each > 1 else world
    if world % int(setting):
        raise ValueError(f"cyclic.ring_size is {setting}, which does not divide the {world} ranks")  # (config.py has more words)
    return int(setting)


def rings_of(transport: Transport, setting: str | int) -> Transport:
    """Collective: the transport of this rank's ring; ``transport`` itself where all ranks are one ring.

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
    )  # below it DeepSpeed shows nothing
    return RingView(transport, size)


class RingView(Transport):
    """The transport of all ranks, as this rank's ring sees it: ranks are positions in the ring, collectives are everyone's.

    Attributes:
        inner: the transport; ring: this rank's; rings: how many. Counters are those of ``inner``, with the ranks of the world.
    """

    def __init__(self, inner: Transport, size: int):
        assert inner.size % size == 0, (inner.size, size)
        # Transport.__init__ is not called: the counters are those of the wrapped transport
        self.inner, self.name, self.size, self.timeout_seconds = inner, inner.name, size, inner.timeout_seconds
        self.ring, self.rank = divmod(inner.rank, size)
        self.rings, self._base = inner.size // size, inner.rank - self.rank
        for name in _SAME:
            setattr(self, name, getattr(inner, name))  # (bound: no call in between)

    label = property(lambda self: self.inner.rank)
    collectives = property(lambda self: self.inner.collectives)

    def prepare(self, edges: Sequence[Edge], deferred: bool) -> None:
        n, chain = self.size, range(self.inner.size - self.size)
        inside = [(s, c * n + a, c * n + b) for c in range(self.rings) for s, a, b in edges]
        self.inner.prepare(sorted([*inside, *(("X", r, r + n) for r in chain), *(("Y", r + n, r) for r in chain)]), deferred)

    def post(
        self, stream: str, src: int, into: torch.Tensor, after: Sequence[Ticket] = (), where: Where = "", from_at: int = -1
    ) -> Ticket:
        return self.inner.post(stream, self._base + src, into, after, where, from_at)

    def push(self, stream: str, dst: int, source: torch.Tensor, after: Ticket | None = None, into_at: int = -1) -> Ticket:
        return self.inner.push(stream, self._base + dst, source, after, into_at)

    def start_peer(self, stream: str, peer: int, incoming: bool) -> None:
        self.inner.start_peer(stream, self._base + peer, incoming)

    def gather(self, value, where):
        return self.inner.gather(value, where)

    def broadcast(self, tensor, src, where):
        self.inner.broadcast(tensor, src, where)  # ring 0's owner, to everyone

    def reset(self, where):
        self.inner.reset(where)

    def close(self, drain):
        self.inner.close(drain)
