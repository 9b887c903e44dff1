"""Rings of rings: several rings train side by side and average each stage's finished gradient (docs/algorithm.md).

World rank w is position w % R of ring w // R. Inside a ring everything is as with one ring of R ranks: ``RingView`` shows it the
transport of all W ranks as if the ring were alone. What is new happens in the owner's NORM: the owners of a stage, one per ring,
add their rings' sums along a chain, unit by unit, ring 0 first (stream X), and the last ring sends the total back along it
(stream Y). So every ring has the same bits, updates its own masters with them, and publishes. No collective is involved, only
messages between two ranks; loss sums travel along as one more, small item.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from .buffers import Buffers
from .chain import PAIR, chain, first_posts
from .layout import aligned
from .plan import ACROSS_BYTES, Plan
from .transport.base import Edge, Ticket, Transport, Where
from .transport.choose import host

_SAME = ("sent", "received", "bytes_sent", "bytes_received", "waited", "waited_sent", "host_waits", "timing", "rendezvous",
         "allocate", "moved_on", "mark", "after", "owner_stream", "count")


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
        blocks = [hosts[at:at + each] for at in range(0, world, each)]
        even = all(len(b) == each and len(set(b)) == 1 for b in blocks) and len({b[0] for b in blocks}) == len(blocks)
        return each if even and each > 1 else world
    if world % int(setting):
        raise ValueError(f"cyclic.ring_size is {setting}, which does not divide the {world} ranks")  # (config.py has more words)
    return int(setting)


def across_bytes(plan: Plan, rank: int, ring: int) -> int:
    """Bytes that the rank at this position receives from other rings in a step: X unless in ring 0, Y unless in the last."""
    stage = plan.schedule.owned(rank)
    item = sum(plan.unit(i).g_bytes for i in plan.members(stage)) + ACROSS_BYTES
    return ((ring > 0) + (ring < plan.rings - 1)) * item


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
    log_dist(f"{transport.size // size} rings of {size} ranks, on {len(set(hosts))} host(s), average their gradients stage by "
             "stage", ranks=[0], level=logging.WARNING)  # below it DeepSpeed shows nothing
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

    def post(self, stream: str, src: int, into: torch.Tensor, after: Sequence[Ticket] = (), where: Where = "",
             from_at: int = -1) -> Ticket:
        return self.inner.post(stream, self._base + src, into, after, where, from_at)

    def push(self, stream: str, dst: int, source: torch.Tensor, after: Ticket | None = None, into_at: int = -1) -> Ticket:
        return self.inner.push(stream, self._base + dst, source, after, into_at)

    def meet(self, stream: str, peer: int, incoming: bool) -> None:
        self.inner.meet(stream, self._base + peer, incoming)

    def gather(self, value, where):
        return self.inner.gather(value, where)

    def broadcast(self, tensor, src, where):
        self.inner.broadcast(tensor, src, where)  # ring 0's owner, to everyone

    def reset(self, where):
        self.inner.reset(where)

    def close(self, linger):
        self.inner.close(linger)


class Across:
    """One owner's end of the chain between rings (chain.py).

    What comes from other rings lands in region ``X``, and at last it holds the total, which the owner averages and updates with.
    Where the own ring's finished sums lie, those of this ring and all before it are added up.

    Attributes:
        total: float64, [2]: loss sum and count over all rings, after ``exchange``.
    """

    def __init__(self, plan: Plan, transport: RingView, buffers: Buffers, order: Sequence[int]):
        """
        Args:
            order: the owned units that have sums, in the order of ``chain.finishing``.
        """
        self.transport, ring = transport.inner, transport.ring
        self._peer = {"X": transport.inner.rank + transport.size, "Y": transport.inner.rank - transport.size}  # to whom
        self._last, self._posts = ring == plan.rings - 1, first_posts(ring, order)
        self._links = chain(ring, plan.rings, order)
        stage = plan.schedule.owned(transport.rank)
        offsets, own = plan.x_layout(stage)[0], plan.o_layout(stage)
        end = plan.regions["X"] - aligned(ACROSS_BYTES)
        self._x, self._o, self._at = {}, {}, {}
        for i, offset, nbytes in [*((i, offsets[i], plan.unit(i).g_bytes) for i in order), (PAIR, end, ACROSS_BYTES)]:
            self._x[i], self._at[i] = buffers.view("X", offset, nbytes), buffers.address("X", offset)
            if i != PAIR:
                self._o[i] = buffers.view(plan.o_region, own[i], nbytes)
        self.total = self._x[PAIR].view(torch.float64)
        self._own = torch.zeros_like(self.total)  # this rank's loss sum and count
        self._o[PAIR] = self._own.view(torch.uint8)
        self._posted: dict[tuple[str, int], Ticket] = {}

    def begin(self) -> None:
        """Region X is free: let the next step's messages in."""
        for stream, i in self._posts:
            self._post(stream, i)

    def _post(self, stream: str, i: int) -> None:
        self._posted[stream, i] = self.transport.post(stream, self._from(stream), self._x[i])

    def _from(self, stream: str) -> int:
        return self._peer["Y" if stream == "X" else "X"]

    def exchange(self, ready: Callable[[int], Any], losses: Callable[[], tuple[torch.Tensor, int]],
                 views: Callable[[int], tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]], where: Where) -> Iterator[int]:
        """Average one step's finished sums; gives each unit when its total is in region X, and nobody else reads it.

        Args:
            ready: waits for a unit's sum of the own ring.
            losses: this rank's loss sum and count of the step.
            views: a unit's sums in region X, and of the own ring, in their own dtypes.
        Raises:
            HandoffError: an owner in another ring is gone or late.
        """
        transport, sent = self.transport, {}
        for _, kind, i, stream in self._links:
            if kind == "READY" and i == PAIR:
                self._own[0], self._own[1] = losses()
            elif kind == "READY":
                ready(i)
            elif kind == "MEET":
                transport.meet(stream, self._from(stream), True)
            elif kind == "RECEIVE":
                self._posted.pop((stream, i)).wait(where)
            elif kind == "ADD":
                total, own = views(i) if i != PAIR else ([self.total], [self._own])
                torch._foreach_add_(*((total, own) if self._last else (own, total)))
            elif kind == "PUSH":
                transport.moved_on()
                sent[stream, i] = transport.push(stream, self._peer[stream], (self._o if stream == "X" else self._x)[i], None,
                                                 self._at[i])
            elif kind == "POST":
                self._post(stream, i)
            elif kind == "SENT":
                sent.pop((stream, i)).wait(where)
            elif i != PAIR:  # DONE
                yield i
