"""Transports whose messages start on both sides together: matching, starting in order, and resets. No device code.

With NCCL, a send kernel and its receive kernel each block a CUDA stream until the other runs, so it matters when either starts.
If a receive started as soon as its region is free, the device might wait for a message of a later logical time, which may need
this rank's own progress: ``torch.cuda.synchronize()`` would then hang.

So both sides start a message at the same place of an order that all ranks share, the place of the message's *initiator*: (step,
after its passes or not, logical time, kind, rank). The sender initiates, except on pulled streams (``PULLED``), where the
receiver does. The other side's program has an action at that place, which calls ``start_peer`` (kinds START_RECV and
START_SEND, plan/program.py).

A rank that blocks then waits only for messages of earlier places. The rank that it waits for may be blocked too, but at a still
earlier place, so no cycle is possible, even if all CUDA streams shared one hardware queue or the script put a barrier between
steps (docs/algorithm.md#why-it-cannot-deadlock).

Before ``prepare(..., deferred=True)``, and without a plan, every message starts when it is posted or pushed.
"""

from abc import abstractmethod
from collections import Counter, deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from deepspeed_cdp.errors import HandoffError
from deepspeed_cdp.transport.base import PULLED, Edge, Ticket, Transport, Where

_ISSUED, _STARTED, _DONE, _FAILED = range(4)
_REMEMBERED = 256  # messages; the two sides of an edge are never that far apart


class Message:
    """One side of one message: issued (posted or pushed), then started, then done.

    Attributes:
        side: this rank's side of the edge; number: of the message on the edge, from 0.
        tensor: uint8, 1-D; read by the sender, filled by the receiver.
        after: tickets that the message waits for.
        point: result of ``_record_point`` when the message was issued.
        work: result of ``_start``.
        awaited: somebody has waited for it.
    """

    __slots__ = (
        "transport",
        "side",
        "number",
        "tensor",
        "after",
        "point",
        "work",
        "state",
        "reason",
        "where",
        "counted",
        "awaited",
    )

    def __init__(
        self,
        transport: "RendezvousTransport",
        side: "EdgeSide",
        number: int,
        tensor: torch.Tensor,
        after: Sequence[Ticket],
        point: Any,
        where: Where,
    ):
        self.transport, self.side, self.number, self.tensor = transport, side, number, tensor
        self.after, self.point, self.where = after, point, where
        self.work: Any = None
        self.state, self.reason, self.counted, self.awaited = _ISSUED, "", False, False

    def wait(self, where: Where) -> None:
        self.awaited = True
        if self.state == _FAILED:
            raise HandoffError(f"{where}: {self.reason}")
        if self.state == _ISSUED:
            self.transport.start_until(self)
        if self.state == _STARTED:
            self.transport._wait_started(self, where)
        if self.side.incoming and not self.counted:
            self.counted = True
            self.transport.count((self.side.stream, self.side.peer), self.tensor.numel())

    def done(self) -> bool:
        return self.state in (_DONE, _FAILED) or self.state == _STARTED and self.transport._is_done(self)

    def fail(self, reason: str) -> None:
        """Drop the message; ``wait`` raises HandoffError with ``reason``."""
        self.state, self.reason = _FAILED, reason
        self.work = None


class EdgeSide:
    """This rank's side of one edge, since the last reset."""

    __slots__ = ("stream", "peer", "incoming", "issued", "started", "allowed", "waiting", "running", "sizes")

    def __init__(self, stream: str, peer: int, incoming: bool):
        self.stream, self.peer, self.incoming = stream, peer, incoming
        self.issued = self.started = self.allowed = 0  # numbers of messages; allowed: to start
        self.waiting: deque[Message] = deque()  # issued, not started
        self.running: deque[Message] = deque()  # started, not known to be done
        # Sizes of the latest messages issued, for a reset: NCCL may finish a send before the peer has started its receive.
        self.sizes: deque[int] = deque(maxlen=_REMEMBERED)

    def edge(self, rank: int) -> Edge:
        """(stream, source, destination), if this is ``rank``'s side."""
        return (self.stream, self.peer, rank) if self.incoming else (self.stream, rank, self.peer)

    @property
    def initiates(self) -> bool:
        """Whether this side starts its messages at once; the other side waits for ``start_peer``."""
        return self.incoming == (self.stream in PULLED)


class _Counts(NamedTuple):
    """What the ranks tell each other of an edge's side at a reset; see ``EdgeSide``."""

    issued: int = 0
    started: int = 0
    sizes: Sequence[int] = ()


class RendezvousTransport(Transport):
    """See the module's docstring. Subclasses move the bytes.

    Attributes:
        forced: messages by (stream, peer) that started because their ticket was waited for, before the plan's place; a training
            step has none.
    """

    rendezvous = True

    def __init__(self, rank: int, size: int, timeout_seconds: float, *rest: Any):
        super().__init__(rank, size, timeout_seconds, *rest)
        self._store_exchange: Any = None  # set by the subclass
        self.forced: Counter[tuple[str, int]] = Counter()
        self._deferred = False
        self._sides: dict[tuple[str, int, bool], EdgeSide] = {}
        self._prepared: set[Edge] = set()

    # ---- for subclasses -------------------------------------------------------------------------------------------------
    @abstractmethod
    def _connect(self, edges: Sequence[Edge], where: Where) -> None:
        """Collective: connect edges. Every rank passes the same list, in the same order."""

    @abstractmethod
    def _record_point(self) -> Any:
        """An event on the current CUDA stream, for ``_start``; None without a device."""

    @abstractmethod
    def _start(self, message: Message) -> Any:
        """Enqueue the send or receive, behind ``message.after`` and ``message.point`` (unless None); returns ``Message.work``."""

    @abstractmethod
    def _wait_started(self, message: Message, where: Where) -> None:
        """Make the current CUDA stream, or without a device the host, wait for a started message.

        Raises:
            HandoffError: see ``Ticket.wait``.
        """

    @abstractmethod
    def _is_done(self, message: Message) -> bool:
        """Whether a started message is done."""

    @abstractmethod
    def _finish_started(self, where: Where) -> None:
        """Block the host until all started messages are done.

        Raises:
            HandoffError: they are not within ``timeout_seconds``.
        """

    @abstractmethod
    def _scratch(self, nbytes: int) -> torch.Tensor:
        """Memory (uint8, 1-D) for a message that is dropped."""

    # ---- messages -------------------------------------------------------------------------------------------------------
    def prepare(self, edges: Sequence[Edge], deferred: bool) -> None:
        new = [edge for edge in edges if edge not in self._prepared]
        if new:
            self._connect(new, f"rank {self.rank}, connecting {len(new)} edges")
        self._prepared.update(new)
        self._deferred = deferred

    def _side(self, stream: str, peer: int, incoming: bool) -> EdgeSide:
        side = self._sides.get((stream, peer, incoming))
        if side is None:
            if not 0 <= peer < self.size or peer == self.rank:
                raise ValueError(f"rank {self.rank} of {self.size}: an edge joins two different ranks, not {peer}")
            side = self._sides[stream, peer, incoming] = EdgeSide(stream, peer, incoming)
        return side

    def post(
        self, stream: str, src: int, into: torch.Tensor, after: Sequence[Ticket] = (), where: Where = "", remote_offset: int = -1
    ) -> Message:
        return self._issue(self._side(stream, src, True), into, tuple(after), self._record_point(), where)

    def push(self, stream: str, dst: int, source: torch.Tensor, after: Ticket | None = None, remote_offset: int = -1) -> Message:
        side = self._side(stream, dst, False)
        self.sent[stream, dst] += 1
        self.bytes_sent[stream, dst] += source.numel()
        # A forwarded message waits for the current stream, too: started earlier, it would only occupy multiprocessors.
        return self._issue(side, source, () if after is None else (after,), self._record_point(), "")

    def _issue(self, side: EdgeSide, tensor: torch.Tensor, after: tuple[Ticket, ...], point: Any, where: Where) -> Message:
        message = Message(self, side, side.issued, tensor, after, point, where)
        side.issued += 1
        side.sizes.append(tensor.numel())
        side.waiting.append(message)
        if not self._deferred or side.initiates:
            side.allowed = side.issued
        while side.waiting and side.started < side.allowed:
            self._start_next(side)
        return message

    def start_peer(self, stream: str, peer: int, incoming: bool) -> None:
        side = self._side(stream, peer, incoming)
        side.allowed += 1
        while side.waiting and side.started < side.allowed:
            self._start_next(side)

    def start_until(self, message: Message) -> None:
        """Start all messages of the edge up to this one, because its ticket is waited for."""
        side = message.side
        while message.state == _ISSUED:
            self.forced[side.stream, side.peer] += 1
            self._start_next(side)

    def _start_next(self, side: EdgeSide) -> None:
        assert side.edge(self.rank) in self._prepared, f"edge {side.edge(self.rank)} was not prepared"
        message = side.waiting.popleft()
        side.started += 1
        if message.tensor.numel():
            message.work = self._start(message)
            message.state = _STARTED
        else:
            message.state = _DONE  # on both sides: nothing to transfer
        while side.running and side.running[0].done():
            side.running.popleft()
        side.running.append(message)

    # ---- collectives ----------------------------------------------------------------------------------------------------
    def reset(self, where: Where) -> None:
        self.collectives += 1
        known = {side.edge(self.rank): (*side.running, *side.waiting) for side in self._sides.values()}
        mine = [[s.stream, s.peer, s.incoming, s.issued, s.started, list(s.sizes)] for s in self._sides.values()]
        everyone = self._store_exchange.exchange(mine, where)
        sent: dict[Edge, _Counts] = {}  # by the senders
        received: dict[Edge, _Counts] = {}  # by the receivers
        for rank, there in enumerate(everyone):
            for stream, peer, incoming, *counts in there:
                edge = (stream, peer, rank) if incoming else (stream, rank, peer)
                (received if incoming else sent)[edge] = _Counts(*counts)
        for edge in sorted(sent.keys() | received.keys()):
            if self.rank in edge[1:]:
                self._complete(edge, sent.get(edge, _Counts()), received.get(edge, _Counts()))
        self._finish_started(where)
        for edge, messages in known.items():
            both = min(sent.get(edge, _Counts()).issued, received.get(edge, _Counts()).issued)
            for message in messages:
                if message.number < both:
                    message.wait(where)
                else:
                    message.fail(f"message {message.number} on stream {edge[0]} was forgotten by a reset")
        self._sides.clear()
        self._store_exchange.exchange(None, where)  # no rank refers to old messages any more

    def _complete(self, edge: Edge, sent: _Counts, received: _Counts) -> None:
        """Start the messages that both sides have issued, and those that only one side has started.

        A started message cannot be cancelled, so the other side sends or receives it with scratch memory.
        """
        stream, src, dst = edge
        goal = max(min(sent.issued, received.issued), sent.started, received.started)
        side = self._side(stream, src if self.rank == dst else dst, self.rank == dst)
        other = sent if side.incoming else received
        while side.started < goal:
            if not side.waiting:
                nbytes = other.sizes[side.started - other.issued]  # sizes: of the latest messages
                side.waiting.append(Message(self, side, side.issued, self._scratch(nbytes), (), None, "resetting"))
                side.issued += 1
            self._start_next(side)

    def _fail_all(self, reason: str) -> None:
        for side in self._sides.values():
            for message in (*side.running, *side.waiting):
                if not message.done():
                    message.fail(reason)
