"""Several rings: each sees the transport of all ranks as if it were alone (docs/algorithm.md#rings-of-rings).

``RingMap`` says which world rank is where. Streams X and Y connect the ranks of equal number in neighbouring rings; over them the
owners of a stage, one per ring, average its gradient (runtime/cross_ring.py).
"""

import logging
from collections.abc import Callable, Sequence

import torch

from deepspeed_cdp.transport.base import Edge, Ticket, Transport, Where
from deepspeed_cdp.transport.choose import host
from deepspeed_cdp.transport.ring_map import RingMap

SumMembers = Callable[[torch.Tensor, Where], None]
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


def ring_size(setting: str | int, hosts: Sequence[str], members: int = 1) -> int:
    """The number of ranks per ring.

    ``auto``: the ranks of a ring are of one host if every host has the same number of consecutive ranks, and with them at least
    two groups; otherwise a ring has a rank of every group.

    Args:
        setting: ``cyclic.ring_size``.
        hosts: name of each rank's host, in rank order.
        members: ranks per group, of sequence or tensor parallelism.
    Raises:
        ValueError: the ring size does not divide the number of groups.
    """
    world, groups = len(hosts), len(hosts) // members
    if setting == "auto":
        each = next((r for r in range(world) if hosts[r] != hosts[0]), world)
        blocks = [hosts[at : at + each] for at in range(0, world, each)]
        even = all(len(b) == each and len(set(b)) == 1 for b in blocks) and len({b[0] for b in blocks}) == len(blocks)
        return each // members if even and each % members == 0 and each > members else groups
    if groups % int(setting):
        raise ValueError(
            f"cyclic.ring_size is {setting}, which does not divide the {groups} data-parallel ranks"
        )  # integration/config.py says more
    return int(setting)


def rings_of(
    transport: Transport, setting: str | int, sequence: int = 1, tensor: int = 1, sum_members: SumMembers | None = None
) -> Transport:
    """Collective: the transport of this rank's ring; ``transport`` itself if there is one ring.

    Args:
        setting, sequence, tensor: as for ``ring_size`` and ``RingMap``.
        sum_members: as for ``RingView``.
    Raises:
        ValueError: as ``ring_size``.
    """
    from deepspeed.utils import log_dist

    hosts = transport.gather(host(), f"rank {transport.rank}, looking for rings")
    size = ring_size(setting, hosts, sequence * tensor)
    if size == transport.size:
        return transport
    groups = f" ({sequence} ranks work on a sequence)" if sequence > 1 else ""
    groups += f" ({tensor} ranks share the layers, and rings of the same members' ranks average)" if tensor > 1 else ""
    log_dist(
        f"{transport.size // size} rings of {size} ranks, on {len(set(hosts))} host(s), average their gradients stage by stage"
        + groups,
        ranks=[0],
        level=logging.WARNING,
    )  # DeepSpeed hides lower levels
    return RingView(transport, size, sequence, tensor, sum_members)


class RingView(Transport):
    """The transport of all ranks as one ring sees it: ranks are those of the ring, and collectives are of all ranks.

    Attributes:
        inner: the transport of all ranks; counters are its own, by world rank.
        ring, rings: the place of this rank's ring in its family (``RingMap``), and the family's size.
        ring_map: of all ranks.
    """

    def __init__(self, inner: Transport, size: int, sequence: int = 1, tensor: int = 1, sum_members: SumMembers | None = None):
        """
        Args:
            sum_members: as ``Transport.sum_members``; with tensor parallelism only.
        """
        assert inner.size % (size * sequence * tensor) == 0, (inner.size, size, sequence, tensor)
        assert (tensor > 1) == (sum_members is not None), tensor
        # Transport.__init__ is not called: the counters are those of ``inner``
        self.inner, self.name, self.size, self.timeout_seconds = inner, inner.name, size, inner.timeout_seconds
        self._ring_map, self._sum_members = RingMap(inner.size, size, sequence, tensor), sum_members
        self._family, self.rank = self._ring_map.family(inner.rank), self._ring_map.place(inner.rank)
        self.ring, self.rings = self._family.index(self._ring_map.ring(inner.rank)), len(self._family)
        for name in _FORWARDED:
            setattr(self, name, getattr(inner, name))

    world_rank = property(lambda self: self.inner.rank)
    collectives = property(lambda self: self.inner.collectives)
    ring_map = property(lambda self: self._ring_map)

    data_rank = property(lambda self: self.inner.rank // self._ring_map.tensor)

    def world_rank_of(self, rank: int, ring: int | None = None) -> int:
        family = self._family
        return self._ring_map.rank(family.start + family.step * (self.ring if ring is None else ring), rank)

    def prepare(self, edges: Sequence[Edge], deferred: bool) -> None:
        grid = self._ring_map.grid()
        inside = [(s, ring[a], ring[b]) for ring in grid for s, a, b in edges]
        up = [pair for ring, following in zip(grid, grid[self._ring_map.tensor :]) for pair in zip(ring, following)]
        self.inner.prepare(sorted([*inside, *(("X", a, b) for a, b in up), *(("Y", b, a) for a, b in up)]), deferred)

    def post(
        self, stream: str, src: int, into: torch.Tensor, after: Sequence[Ticket] = (), where: Where = "", remote_offset: int = -1
    ) -> Ticket:
        return self.inner.post(stream, self.world_rank_of(src), into, after, where, remote_offset)

    def push(self, stream: str, dst: int, source: torch.Tensor, after: Ticket | None = None, remote_offset: int = -1) -> Ticket:
        return self.inner.push(stream, self.world_rank_of(dst), source, after, remote_offset)

    def start_peer(self, stream: str, peer: int, incoming: bool) -> None:
        self.inner.start_peer(stream, self.world_rank_of(peer), incoming)

    def gather(self, value, where):
        return self.inner.gather(value, where)

    def gather_data(self, value, where):
        return self.inner.gather(value, where)[self._family.start :: self._ring_map.tensor]

    def broadcast(self, tensor, src, where):
        for first in range(self._ring_map.tensor):  # of the first ring of each family, to all ranks
            mine = first == self._family.start
            self.inner.broadcast(tensor if mine else torch.empty_like(tensor), self._ring_map.rank(first, src), where)

    def sum_members(self, tensor, where):
        if self._sum_members is not None:
            self._sum_members(tensor, where)

    def reset(self, where):
        self.inner.reset(where)

    def close(self, drain):
        self.inner.close(drain)
