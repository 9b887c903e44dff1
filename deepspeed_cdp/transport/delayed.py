"""A transport with random delays, so that tests see orders of events that do not occur on an idle machine."""

import random
import time
from collections.abc import Sequence
from typing import Any

import torch

from deepspeed_cdp.transport.base import Edge, Ticket, Transport, Where


class _Late:
    """A ticket whose ``wait`` starts after a delay."""

    __slots__ = ("ticket", "owner")

    def __init__(self, ticket: Ticket, owner: "Delayed"):
        self.ticket, self.owner = ticket, owner

    def wait(self, where: Where) -> None:
        self.owner.delay()
        self.ticket.wait(where)

    def done(self) -> bool:
        return self.ticket.done()

    @property
    def counted(self) -> bool:
        return self.ticket.counted

    @counted.setter
    def counted(self, counted: bool) -> None:
        self.ticket.counted = counted


class Delayed(Transport):
    """Sleeps for a random time before each post, push and wait of ``transport``. Counters are the transport's own.

    Args:
        transport: the transport to slow down.
        seed: of the delays, together with the rank.
        max_seconds: delays are uniform in [0, max_seconds).
    """

    def __init__(self, transport: Transport, seed: int, max_seconds: float):
        # Transport.__init__ is not called: the counters are those of the wrapped transport.
        self.inner, self.name = transport, f"delayed-{transport.name}"
        self.rank, self.size, self.timeout_seconds = transport.rank, transport.size, transport.timeout_seconds
        self.sent, self.bytes_sent = transport.sent, transport.bytes_sent
        self.received, self.bytes_received = transport.received, transport.bytes_received
        self.waited, self.rendezvous = transport.waited, transport.rendezvous
        self.waited_sent, self.host_waits = transport.waited_sent, transport.host_waits
        self._random, self._max_seconds = random.Random(1000003 * seed + transport.rank), max_seconds

    collectives = property(lambda self: self.inner.collectives)

    def delay(self) -> None:
        """Sleep for a random time."""
        time.sleep(self._random.random() * self._max_seconds)

    def post(
        self, stream: str, src: int, into: torch.Tensor, after: Sequence[Ticket] = (), where: Where = "", remote_offset: int = -1
    ) -> _Late:
        self.delay()
        return _Late(self.inner.post(stream, src, into, after, where, remote_offset), self)

    def push(self, stream: str, dst: int, source: torch.Tensor, after: Ticket | None = None, remote_offset: int = -1) -> _Late:
        self.delay()
        return _Late(self.inner.push(stream, dst, source, after, remote_offset), self)

    def prepare(self, edges: Sequence[Edge], deferred: bool) -> None:
        self.inner.prepare(edges, deferred)

    def start_peer(self, stream: str, peer: int, incoming: bool) -> None:
        self.delay()
        self.inner.start_peer(stream, peer, incoming)

    def gather(self, value: Any, where: Where) -> list[Any]:
        return self.inner.gather(value, where)

    def broadcast(self, tensor: torch.Tensor, src: int, where: Where) -> None:
        self.inner.broadcast(tensor, src, where)

    def reset(self, where: Where) -> None:
        self.inner.reset(where)

    def close(self, drain: bool) -> None:
        self.inner.close(drain)
