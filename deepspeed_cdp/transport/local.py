"""Ranks as threads of one process, for tests: the contract of ``base`` over a lock and copies."""

import json
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch

from deepspeed_cdp.errors import HandoffError
from deepspeed_cdp.transport.base import Ticket, Transport, Where

_WAITING, _DONE, _FAILED = range(3)


class Hub:
    """What ``size`` ranks share; one per test.

    Args:
        size: the number of ranks.
        timeout_seconds: how long to wait for a peer before a HandoffError.
    """

    def __init__(self, size: int, timeout_seconds: float):
        self.size, self.timeout_seconds = size, timeout_seconds
        self.changed = threading.Condition()
        # (epoch, stream, src, dst) -> unmatched posts, and unmatched pushes; an edge never has both
        self.posts: dict[tuple[int, str, int, int], deque[_Ticket]] = {}
        self.pushes: dict[tuple[int, str, int, int], deque[_Ticket]] = {}
        self.values: dict[tuple[int, int], str] = {}  # (number of the collective, rank) -> json
        self.tensors: dict[int, torch.Tensor] = {}  # number of the broadcast -> the source's bytes
        self.closing: set[int] = set()  # these ranks receive nothing more
        self.gone: dict[int, str] = {}  # rank -> why it will never answer

    def fail(self, rank: int, reason: str) -> None:
        """Simulate a crash of ``rank``: peers that wait for it raise HandoffError at once."""
        with self.changed:
            self.closing.add(rank)
            self.gone.setdefault(rank, reason)
            self.changed.notify_all()


class _Ticket:
    """One side of one message; ``state`` is guarded by ``hub.changed``."""

    __slots__ = ("transport", "stream", "peer", "tensor", "receiving", "state", "reason", "counted")

    def __init__(self, transport: "LocalTransport", stream: str, peer: int, tensor: torch.Tensor, receiving: bool):
        self.transport, self.stream, self.peer, self.tensor, self.receiving = transport, stream, peer, tensor, receiving
        self.state = _WAITING if tensor.numel() else _DONE
        self.reason = ""
        self.counted = False

    def done(self) -> bool:
        return self.state != _WAITING

    def wait(self, where: Where) -> None:
        transport, hub = self.transport, self.transport.hub
        with hub.changed:
            if self.state == _WAITING:
                started = time.perf_counter()
                hub.changed.wait_for(lambda: self.state != _WAITING or self.peer in hub.gone, hub.timeout_seconds)
                transport.count_wait((self.stream, self.peer), self.receiving, time.perf_counter() - started)
            if self.state == _FAILED:
                raise HandoffError(f"{where}: {self.reason}")
            if self.state == _WAITING:
                if self.peer in hub.gone:
                    raise HandoffError(f"{where}: stream {self.stream}: rank {self.peer} {hub.gone[self.peer]}")
                missing = "no message" if self.receiving else "nobody took the message"
                who = f"from rank {self.peer}" if self.receiving else f"for rank {self.peer}"
                raise HandoffError(f"{where}: {missing} on stream {self.stream} {who} within {hub.timeout_seconds} s")
            if self.receiving and not self.counted:
                transport.received[self.stream, self.peer] += 1
                transport.bytes_received[self.stream, self.peer] += self.tensor.numel()
            self.counted = True


class LocalTransport(Transport):
    """One rank of a Hub; used by one thread."""

    name = "local"

    def __init__(self, hub: Hub, rank: int):
        super().__init__(rank, hub.size, hub.timeout_seconds)
        self.hub = hub
        self._epoch = 0  # number of resets; messages of different epochs never match
        self._calls = 0  # number of internal gathers, the same on all ranks
        self._closed = False

    def post(
        self, stream: str, src: int, into: torch.Tensor, after: Sequence[Ticket] = (), where: Where = "", remote_offset: int = -1
    ) -> _Ticket:
        for ticket in after:
            ticket.wait(where)
        ticket = _Ticket(self, stream, self._peer(src), into, receiving=True)
        self._match((self._epoch, stream, src, self.rank), ticket)
        return ticket

    def push(self, stream: str, dst: int, source: torch.Tensor, after: Ticket | None = None, remote_offset: int = -1) -> _Ticket:
        ticket = _Ticket(self, stream, self._peer(dst), source, receiving=False)
        self.sent[stream, dst] += 1
        self.bytes_sent[stream, dst] += source.numel()
        self._match((self._epoch, stream, self.rank, dst), ticket)
        return ticket

    def _peer(self, peer: int) -> int:
        if not 0 <= peer < self.size or peer == self.rank:
            raise ValueError(f"rank {self.rank} of {self.size}: an edge joins two different ranks, not {peer}")
        return peer

    def _match(self, edge: tuple[int, str, int, int], ticket: _Ticket) -> None:
        """Copy the message if the other side has issued it, else queue ``ticket``."""
        hub = self.hub
        own, other = (hub.posts, hub.pushes) if ticket.receiving else (hub.pushes, hub.posts)
        with hub.changed:
            if self._closed:
                ticket.state, ticket.reason = _FAILED, f"rank {self.rank} has closed its transport"
                return
            if not other.get(edge):
                own.setdefault(edge, deque()).append(ticket)
                return
            mate = other[edge].popleft()
            post, push = (ticket, mate) if ticket.receiving else (mate, ticket)
            if post.tensor.numel() == push.tensor.numel():
                post.tensor.copy_(push.tensor)
                post.state = push.state = _DONE
            else:
                _, stream, src, dst = edge
                post.state = push.state = _FAILED
                post.reason = push.reason = (
                    f"stream {stream}: rank {src} pushed {push.tensor.numel()} bytes to rank {dst}, "
                    f"which posted for {post.tensor.numel()} bytes"
                )
            hub.changed.notify_all()

    def _exchange(self, value: Any, where: Where) -> list[Any]:
        hub, call = self.hub, self._calls
        self._calls += 1
        with hub.changed:
            hub.values[call, self.rank] = json.dumps(value)
            hub.changed.notify_all()

            def missing() -> list[int]:
                return [rank for rank in range(self.size) if (call, rank) not in hub.values]

            hub.changed.wait_for(lambda: not missing() or any(rank in hub.gone for rank in missing()), hub.timeout_seconds)
            if late := missing():
                dead = [f"rank {rank} {hub.gone[rank]}" for rank in late if rank in hub.gone]
                raise HandoffError(f"{where}: " + (dead[0] if dead else f"rank(s) {late} missing after {hub.timeout_seconds} s"))
            hub.values.pop((call - 1, self.rank), None)  # all ranks have read the previous call's
            return [json.loads(hub.values[call, rank]) for rank in range(self.size)]

    def gather(self, value: Any, where: Where) -> list[Any]:
        self.collectives += 1
        return self._exchange(value, where)

    def broadcast(self, tensor: torch.Tensor, src: int, where: Where) -> None:
        self.collectives += 1
        call = self._calls
        if self.rank == src:
            with self.hub.changed:
                self.hub.tensors[call] = tensor.clone()
        self._exchange(None, where)
        tensor.copy_(self.hub.tensors[call])
        self._exchange(None, where)
        if self.rank == src:
            del self.hub.tensors[call]

    def reset(self, where: Where) -> None:
        self.collectives += 1
        self._exchange(None, where)
        hub = self.hub
        with hub.changed:  # matched messages were copied at once; queued ones never matched
            for queues, receiving in ((hub.posts, True), (hub.pushes, False)):
                for edge in [e for e in queues if e[0] == self._epoch and e[3 if receiving else 2] == self.rank]:
                    for ticket in queues.pop(edge):
                        if ticket.state == _WAITING:
                            ticket.state, ticket.reason = _FAILED, f"message on stream {edge[1]} was forgotten by a reset"
            self._epoch += 1

    def close(self, drain: bool) -> None:
        hub = self.hub
        with hub.changed:
            if self._closed:
                return
            self._closed = True
            hub.closing.add(self.rank)
            hub.changed.notify_all()

            def taken() -> bool:
                return not any(
                    queue for (_, _, src, dst), queue in hub.pushes.items() if src == self.rank and dst not in hub.closing
                )

            if drain and self.rank not in hub.gone:
                hub.changed.wait_for(taken, hub.timeout_seconds)
        hub.fail(self.rank, "has closed its transport")
