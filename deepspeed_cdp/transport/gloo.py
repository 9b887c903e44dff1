"""Messages between CPUs over gloo: sockets, in a private process group.

Experiments found these properties of gloo, on which the transport relies:

- A send starts only once its receive is posted. Both match by tag per pair of ranks, in order per tag.
- Dropping the Work of a pending send or receive cancels it; the pair of ranks stays usable for other tags.
- ``Work.is_completed`` stays False until ``wait`` was called. A second ``wait`` on a finished Work times out. So tickets remember
  their own state.
- A ``wait`` that times out closes every connection of the process group, here and so for the peers. So polling is impossible, a
  timeout is final, and ``close`` disconnects by a deliberate timeout.
- A message longer than the posted tensor aborts the receiver's process, and a shorter one lands without an error. So tags contain
  a hash of the size: sides that disagree never match, and time out.
"""

import time
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from deepspeed_cdp.errors import WHY_MISSING, HandoffError
from deepspeed_cdp.transport.base import Edge, Ticket, Transport, Where
from deepspeed_cdp.transport.store_exchange import StoreExchange, first_line

# A tag has 31 bits: epoch 5, stream 6, number of the message 8, hash of its size 12.
_EPOCHS, _STREAMS = 1 << 5, 1 << 6
_DISCONNECT_TAG = (1 << 31) - 1  # epoch 31 and stream 63, which no message has
_FLUSH_SECONDS = 0.1  # after the last send: its bytes may still be in the kernel's socket buffers

_PENDING, _DONE, _FAILED = range(3)


class _Edge:
    """One direction between this rank and ``peer`` on ``stream``, since the last reset."""

    __slots__ = ("key", "receiving", "tag", "count", "pending")

    def __init__(self, key: tuple[str, int], receiving: bool, tag: int):
        self.key, self.receiving, self.tag = key, receiving, tag  # key: (stream, peer)
        self.count = 0  # messages posted or pushed so far on this side
        self.pending: dict[int, _Ticket] = {}  # number -> ticket that was not waited for, in order


class _Ticket:
    """One side of one message. ``done`` is False before ``wait``: gloo cannot tell earlier."""

    __slots__ = ("transport", "edge", "number", "tensor", "work", "state", "reason", "counted")

    def __init__(self, transport: "GlooTransport", edge: _Edge, number: int, tensor: torch.Tensor):
        self.transport, self.edge, self.number = transport, edge, number
        self.tensor: Any = tensor  # None once it is done
        self.work: dist.Work | None = None
        self.state, self.reason, self.counted = _PENDING, "", False

    def done(self) -> bool:
        return self.state != _PENDING or self.work is None  # a message of zero bytes has no Work

    def wait(self, where: Where) -> None:
        if self.state == _DONE:
            return
        if self.state == _FAILED:
            raise HandoffError(f"{where}: {self.reason}")
        edge, transport = self.edge, self.transport
        started = time.perf_counter()
        try:
            if self.work is not None:
                self.work.wait(transport.timeout)
        except RuntimeError as error:
            self.fail(transport.explain(error, edge))
            raise HandoffError(f"{where}: {self.reason}") from error
        finally:
            transport.count_wait(edge.key, edge.receiving, time.perf_counter() - started)
        if edge.receiving and not self.counted:
            transport.count(edge.key, self.tensor.numel())
        self.state = _DONE
        self.work = self.tensor = None
        edge.pending.pop(self.number, None)

    def fail(self, reason: str) -> None:
        """Drop the message; dropping the Work cancels it. ``wait`` raises HandoffError with ``reason``."""
        self.state, self.reason = _FAILED, reason
        self.work = self.tensor = None
        self.edge.pending.pop(self.number, None)


def _take_number(number: int, stream: str, store: dist.Store) -> str:
    """The stream that has ``number``: ``stream`` if no other has taken it."""
    return store.compare_set(f"stream/{number}", "", stream).decode()


class GlooTransport(Transport):
    """See the module's docstring. The constructor is collective; all ranks must make those of one ``name`` in the same order.

    The process group is not registered with torch.distributed: ``destroy_process_group`` leaves it alone, and a process may have
    several.

    Args:
        rank, size: this rank and the number of ranks.
        timeout_seconds: how long to wait for a peer before a HandoffError.
        store, name: as ``StoreExchange``.
    Raises:
        HandoffError: not all ranks called, or no connection was made, within ``timeout_seconds``.
    """

    name = "gloo"

    def __init__(
        self, rank: int, size: int, timeout_seconds: float, store: dist.Store | None = None, name: str = "deepspeed_cdp"
    ):
        super().__init__(rank, size, timeout_seconds)
        self.timeout = timedelta(seconds=timeout_seconds)
        self._epoch = 0  # resets so far, the same on all ranks
        self._streams: dict[str, int] = {}
        self._in: dict[tuple[str, int], _Edge] = {}  # (stream, src)
        self._out: dict[tuple[str, int], _Edge] = {}  # (stream, dst)
        self._pg: Any = None  # a ProcessGroupGloo, whose stubs lack recv, send and broadcast
        where = f"rank {rank}, connecting the {size} ranks of {name!r}"
        self._store_exchange = StoreExchange(rank, size, timeout_seconds, store, name, where)
        try:
            self._connect(where)
        except BaseException:
            self._store_exchange.close(None)  # the other ranks need not wait
            raise

    def _connect(self, where: Where) -> None:
        prefix = f"connect/{self._epoch}"

        def make(store: dist.Store) -> Any:
            return dist.ProcessGroupGloo(dist.PrefixStore(prefix, store), self.rank, self.size, self.timeout)

        self._pg = self._store_exchange.ask(make, where, f"no connection within {self.timeout_seconds} s")

    # ---- messages -----------------------------------------------------------------------------------------------------------

    def prepare(self, edges: Sequence[Edge], deferred: bool) -> None:
        for stream in sorted({stream for stream, _, _ in edges}):
            self._stream_number(stream)  # now, since only this thread may ask the store

    def post(
        self, stream: str, src: int, into: torch.Tensor, after: Sequence[Ticket] = (), where: Where = "", remote_offset: int = -1
    ) -> _Ticket:
        for ticket in after:
            ticket.wait(where)
        edge = self._in.get((stream, src)) or self._edge(self._in, stream, src, receiving=True)
        return self._start(edge, into)

    def push(self, stream: str, dst: int, source: torch.Tensor, after: Ticket | None = None, remote_offset: int = -1) -> _Ticket:
        edge = self._out.get((stream, dst)) or self._edge(self._out, stream, dst, receiving=False)
        self.sent[edge.key] += 1
        self.bytes_sent[edge.key] += source.numel()
        return self._start(edge, source)

    def _start(self, edge: _Edge, tensor: torch.Tensor) -> _Ticket:
        number, size = edge.count, tensor.numel()
        edge.count = number + 1
        ticket = _Ticket(self, edge, number, tensor)
        if size == 0:
            if not edge.receiving:
                ticket.state = _DONE
            return ticket  # the receiver's wait counts the message
        edge.pending[number] = ticket
        tag = edge.tag | (number & 0xFF) << 12 | (size * 0x9E3779B1 & 0xFFFFFFFF) >> 20
        try:
            pg = self._pg
            if pg is None:
                ticket.fail(f"rank {self.rank} has closed its transport")
            elif edge.receiving:
                ticket.work = pg.recv([tensor], edge.key[1], tag)
            else:
                ticket.work = pg.send([tensor], edge.key[1], tag)
        except RuntimeError as error:
            ticket.fail(self.explain(error, edge))  # wait raises it, and knows where
        return ticket

    def _edge(self, edges: dict[tuple[str, int], _Edge], stream: str, peer: int, receiving: bool) -> _Edge:
        if not 0 <= peer < self.size or peer == self.rank:
            raise ValueError(f"rank {self.rank} of {self.size}: an edge joins two different ranks, not {peer}")
        tag = (self._epoch % _EPOCHS) << 26 | self._stream_number(stream) << 20
        edge = edges[stream, peer] = _Edge((stream, peer), receiving, tag)
        return edge

    def _stream_number(self, stream: str) -> int:
        """The number of ``stream``, the same on all ranks: the first rank to need it takes the next free one in the store.

        Raises:
            HandoffError: the store is gone or does not answer.
            ValueError: there are too many streams.
        """
        if stream not in self._streams:
            where = f"rank {self.rank}, first message on stream {stream}"
            for number in range(_STREAMS - 1):
                taken = self._store_exchange.ask(partial(_take_number, number, stream), where)
                self._streams.setdefault(taken, number)
                if taken == stream:
                    break
            else:
                raise ValueError(f"more than {_STREAMS - 1} streams")
        return self._streams[stream]

    def explain(self, error: RuntimeError, edge: _Edge) -> str:
        """The message for a gloo error on ``edge``, without ``where``."""
        (stream, peer), text = edge.key, str(error)
        if "Timed out" in text:
            what = "no message" if edge.receiving else "nobody took the message"
            return f"{what} on stream {stream} {'from' if edge.receiving else 'for'} rank {peer} within {self.timeout_seconds} s"
        if "Application timeout" in text:
            return f"stream {stream}: the connection to rank {peer} was given up after an earlier timeout of this rank"
        if any(sign in text for sign in ("Connection closed", "onnection reset", "Broken pipe", "ocket closed")):
            return f"stream {stream}: rank {peer} closed the connection (it crashed or exited; see its log)"
        return f"stream {stream}: hand-off with rank {peer} failed: {first_line(error)}"

    # ---- collectives, none in a training step -------------------------------------------------------------------------------

    def gather(self, value: Any, where: Where) -> list[Any]:
        self.collectives += 1
        return self._store_exchange.exchange(value, where)

    def broadcast(self, tensor: torch.Tensor, src: int, where: Where) -> None:
        self.collectives += 1
        if self.size == 1 or tensor.numel() == 0:
            return
        if self._pg is None:
            raise HandoffError(f"{where}: rank {self.rank} has closed its transport")
        try:
            options = dist.BroadcastOptions()  # torch 2.6 takes the timeout in no other way
            options.rootRank, options.timeout = src, self.timeout
            self._pg.broadcast([tensor], options).wait(self.timeout)
        except RuntimeError as error:
            raise HandoffError(
                f"{where}: broadcast from rank {src} failed within {self.timeout_seconds} s ({WHY_MISSING}): {first_line(error)}"
            ) from error

    def reset(self, where: Where) -> None:
        self.collectives += 1
        counts = {
            side: [[stream, peer, edge.count] for (stream, peer), edge in edges.items()]
            for side, edges in (("posted", self._in), ("pushed", self._out))
        }
        everyone = self._store_exchange.exchange(counts, where)
        for edges, side in ((self._in, "pushed"), (self._out, "posted")):
            for (stream, peer), edge in edges.items():
                there = next((n for s, p, n in everyone[peer][side] if s == stream and p == self.rank), 0)
                for ticket in list(edge.pending.values()):
                    if ticket.number < there:
                        ticket.wait(where)
                    else:
                        ticket.fail(f"message {ticket.number} on stream {stream} was forgotten by a reset")
            edges.clear()
        self._epoch += 1
        if self._epoch % _EPOCHS == 0:  # tags repeat: connections may remember dropped messages, so make new ones
            self._store_exchange.exchange(None, where)  # no rank waits for old messages any more
            self._disconnect()
            self._connect(where)

    # ---- the end ------------------------------------------------------------------------------------------------------------

    def close(self, drain: bool) -> None:
        if self._pg is None:
            self._store_exchange.close()
            return
        deadline = time.monotonic() + self.timeout_seconds
        self._store_exchange.announce([[stream, src, edge.count] for (stream, src), edge in self._in.items()])
        if drain:
            self._drain(deadline)
        self._disconnect()
        self._store_exchange.close()
        for edge in (*self._in.values(), *self._out.values()):
            for ticket in [t for t in edge.pending.values() if t.state == _PENDING]:
                ticket.fail(f"rank {self.rank} has closed its transport")

    def _drain(self, deadline: float) -> None:
        """Wait until peers have received the pushes that they posted for, or are gone; at most until ``deadline``.

        In this thread, since Python 3.12 starts none while it exits. Ranks that close do not wait for each other's posts until
        the deadline: of any two, the later to announce sees here that the earlier is closing, and its disconnecting ends the
        earlier's wait.
        """
        edges = [edge for edge in self._out.values() if edge.pending]
        posted = {edge: self._posted_by_closing(edge) for edge in edges}  # first all: rank 0 may end, and with it the store
        sent = time.monotonic()
        for edge in edges:
            for number, ticket in list(edge.pending.items()):
                left = deadline - time.monotonic()
                if left <= 0 or number >= min(posted[edge], self._posted_by_closing(edge)):
                    break
                try:
                    if ticket.work is not None:
                        ticket.work.wait(timedelta(seconds=max(left, 0.001)))  # 0 ms would mean: without a timeout
                except RuntimeError:
                    break  # the peer is gone, or the time is over
                ticket.state, sent = _DONE, time.monotonic()
        if edges:
            time.sleep(max(sent + _FLUSH_SECONDS - time.monotonic(), 0.0))

    def _posted_by_closing(self, edge: _Edge) -> float:
        """Number of messages of ``edge`` that its peer has posted for, once the peer is closing; infinity before."""
        stream, peer = edge.key
        try:
            posted = self._store_exchange.closing_value(peer)
        except HandoffError:
            posted = None  # the store is gone or frozen; the connection to the peer tells
        if posted is None:
            return float("inf")
        return next((n for s, r, n in posted if s == stream and r == self.rank), 0)

    def _disconnect(self) -> None:
        """Close all connections at once, even if a Work exists, by a deliberate timeout (see the module's docstring)."""
        pg, self._pg = self._pg, None
        for peer in range(self.size):
            if peer != self.rank:
                try:
                    pg.recv([torch.empty(1, dtype=torch.uint8, device="cpu")], peer, _DISCONNECT_TAG).wait(
                        timedelta(milliseconds=1)
                    )
                except RuntimeError:
                    pass
