"""Messages whose two sides wait for each other: matching, the right moment to begin, what a reset does. No device code.

Where a send and its receive each hold up a stream until the other has come (NCCL), it matters *when* either begins. Posting a
receive as soon as its region is free would let a rank's device wait for a message of a later logical time, which may need that
rank's own progress: ``torch.cuda.synchronize()`` would hang. So both sides begin a message at one place of one order that all
ranks share (design §6): the place of its *initiator* in (step, after its passes or not, logical time, kind, rank). The pushing
side initiates; offers (P0, H0) are initiated by the reader when it takes them. The other side's program tells it when (kinds
RECEIVE and SEND, plan/program.py), and ``start_peer`` says so here. Then a rank that blocks anywhere waits only for messages
before its
place, and whoever is missing from one of those blocks at an earlier place still: no cycle, even if all streams of a device
shared one queue, or a barrier of the user's stood between two steps.

Before ``prepare(..., deferred=True)``, and for who uses no plan, every message begins when it is named.
"""

from abc import abstractmethod
from collections import Counter, deque
from collections.abc import Sequence
from typing import Any

import torch

from deepspeed_cdp.errors import HandoffError
from deepspeed_cdp.transport.base import PULLED, Edge, Ticket, Transport, Where

_NAMED, _BEGUN, _DONE, _FAILED = range(4)
_REMEMBERED = 256  # messages; the two sides of an edge are never as far apart


class Message:
    """One side of one message.

    Attributes:
        tensor: what is read or filled; after: tickets that come first; point: what ``_point`` gave when it was named.
        handle: what ``_begin`` gave.
    """

    __slots__ = ("transport", "line", "number", "tensor", "after", "point", "handle", "state", "reason", "where", "counted")

    def __init__(
        self,
        transport: "RendezvousTransport",
        line: "Line",
        number: int,
        tensor: torch.Tensor,
        after: Sequence[Ticket],
        point: Any,
        where: Where,
    ):
        self.transport, self.line, self.number, self.tensor = transport, line, number, tensor
        self.after, self.point, self.where = after, point, where
        self.handle: Any = None
        self.state, self.reason, self.counted = _NAMED, "", False

    def wait(self, where: Where) -> None:
        if self.state == _FAILED:
            raise HandoffError(f"{where}: {self.reason}")
        if self.state == _NAMED:
            self.transport.begin_until(self)
        if self.state == _BEGUN:
            self.transport._await(self, where)
        if self.line.incoming and not self.counted:
            self.counted = True
            self.transport.count((self.line.stream, self.line.peer), self.tensor.numel())

    def done(self) -> bool:
        return self.state in (_DONE, _FAILED) or self.state == _BEGUN and self.transport._reached(self)

    def fail(self, reason: str) -> None:
        """Give it up."""
        self.state, self.reason = _FAILED, reason
        self.handle = None


class Line:
    """This rank's side of one edge, since the last reset."""

    __slots__ = ("stream", "peer", "incoming", "named", "begun", "met", "waiting", "open", "sizes")

    def __init__(self, stream: str, peer: int, incoming: bool):
        self.stream, self.peer, self.incoming = stream, peer, incoming
        self.named = self.begun = self.met = 0  # messages named; begun; allowed to begin by `meet`
        self.waiting: deque[Message] = deque()  # named, not begun
        self.open: deque[Message] = deque()  # begun, not known to be done
        # of the latest messages named: NCCL may be done with a send that the peer has not begun to receive
        self.sizes: deque[int] = deque(maxlen=_REMEMBERED)

    def edge(self, rank: int) -> Edge:
        """(stream, source, destination), if this is ``rank``'s side."""
        return (self.stream, self.peer, rank) if self.incoming else (self.stream, rank, self.peer)

    @property
    def initiates(self) -> bool:
        """Whether this side begins its messages by itself, and the other has to be told."""
        return self.incoming == (self.stream in PULLED)


class RendezvousTransport(Transport):
    """See the module's text. Subclasses move the bytes.

    Attributes:
        forced: messages that began because their ticket was waited for, not because the plan said so; none does in a step.
    """

    rendezvous = True

    def __init__(self, rank: int, size: int, timeout_seconds: float, *rest: Any):
        super().__init__(rank, size, timeout_seconds, *rest)
        self._meeting: Any = None  # set by the subclass
        self.forced: Counter[tuple[str, int]] = Counter()
        self._deferred = False
        self._lines: dict[tuple[str, int, bool], Line] = {}
        self._prepared: set[Edge] = set()

    # ---- what subclasses do ---------------------------------------------------------------------------------------------
    @abstractmethod
    def _connect(self, edges: Sequence[Edge], where: Where) -> None:
        """Collective: let these edges, in this order, be used. Every rank gets the same list."""

    @abstractmethod
    def _point(self) -> Any:
        """This point of the current stream's work."""

    @abstractmethod
    def _begin(self, message: Message) -> Any:
        """Enqueue the send or receive, after ``message.after`` and ``message.point`` (None: no such)."""

    @abstractmethod
    def _await(self, message: Message, where: Where) -> None:
        """Let the current stream (without a device: the host) wait for a message that has begun."""

    @abstractmethod
    def _reached(self, message: Message) -> bool:
        """Whether a message that has begun is done."""

    @abstractmethod
    def _drain(self, where: Where) -> None:
        """Wait on the host until all that has begun is done."""

    @abstractmethod
    def _scratch(self, nbytes: int) -> torch.Tensor:
        """Memory for a message that nobody wants."""

    # ---- messages -------------------------------------------------------------------------------------------------------
    def prepare(self, edges: Sequence[Edge], deferred: bool) -> None:
        new = [edge for edge in edges if edge not in self._prepared]
        if new:
            self._connect(new, f"rank {self.rank}, connecting {len(new)} edges")
        self._prepared.update(new)
        self._deferred = deferred

    def _line(self, stream: str, peer: int, incoming: bool) -> Line:
        line = self._lines.get((stream, peer, incoming))
        if line is None:
            if not 0 <= peer < self.size or peer == self.rank:
                raise ValueError(f"rank {self.rank} of {self.size}: an edge joins two different ranks, not {peer}")
            line = self._lines[stream, peer, incoming] = Line(stream, peer, incoming)
        return line

    def post(
        self, stream: str, src: int, into: torch.Tensor, after: Sequence[Ticket] = (), where: Where = "", from_at: int = -1
    ) -> Message:
        return self._name(self._line(stream, src, True), into, tuple(after), self._point(), where)

    def push(self, stream: str, dst: int, source: torch.Tensor, after: Ticket | None = None, into_at: int = -1) -> Message:
        line = self._line(stream, dst, False)
        self.sent[stream, dst] += 1
        self.bytes_sent[stream, dst] += source.numel()
        # what is passed on waits for the current stream too: sooner than its place it would only hold multiprocessors
        return self._name(line, source, () if after is None else (after,), self._point(), "")

    def _name(self, line: Line, tensor: torch.Tensor, after: tuple[Ticket, ...], point: Any, where: Where) -> Message:
        message = Message(self, line, line.named, tensor, after, point, where)
        line.named += 1
        line.sizes.append(tensor.numel())
        line.waiting.append(message)
        if not self._deferred or line.initiates:
            line.met = line.named
        while line.waiting and line.begun < line.met:
            self._begin_next(line)
        return message

    def start_peer(self, stream: str, peer: int, incoming: bool) -> None:
        line = self._line(stream, peer, incoming)
        line.met += 1
        while line.waiting and line.begun < line.met:
            self._begin_next(line)

    def begin_until(self, message: Message) -> None:
        """Begin all messages of its edge up to this one, now that somebody waits for it."""
        line = message.line
        while message.state == _NAMED:
            self.forced[line.stream, line.peer] += 1
            self._begin_next(line)

    def _begin_next(self, line: Line) -> None:
        assert line.edge(self.rank) in self._prepared, f"edge {line.edge(self.rank)} was not prepared"
        message = line.waiting.popleft()
        line.begun += 1
        if message.tensor.numel():
            message.handle = self._begin(message)
            message.state = _BEGUN
        else:
            message.state = _DONE  # both sides know
        while line.open and line.open[0].done():
            line.open.popleft()
        line.open.append(message)

    # ---- collectives ----------------------------------------------------------------------------------------------------
    def reset(self, where: Where) -> None:
        # A message that only one side has begun cannot be called back: the other side plays its part with scratch memory.
        self.collectives += 1
        known = {line.edge(self.rank): (*line.open, *line.waiting) for line in self._lines.values()}
        mine = [
            [line.stream, line.peer, line.incoming, line.named, line.begun, list(line.sizes)] for line in self._lines.values()
        ]
        everyone = self._meeting.exchange(mine, where)
        sides = {(rank, *side[:3]): side[3:] for rank, there in enumerate(everyone) for side in there}
        for stream, src, dst in sorted(
            {(stream, peer, rank) if incoming else (stream, rank, peer) for rank, stream, peer, incoming in sides}
        ):
            if self.rank in (src, dst):
                self._settle(stream, src, dst, sides)
        self._drain(where)
        for line in self._lines.values():
            named, there = (
                sides.get(side, (0,))[0]
                for side in (
                    (self.rank, line.stream, line.peer, line.incoming),
                    (line.peer, line.stream, self.rank, not line.incoming),
                )
            )
            for message in known.get(line.edge(self.rank), ()):  # as it was before the other sides played their parts
                if message.number < min(named, there):
                    message.wait(where)
                else:
                    message.fail(f"message {message.number} on stream {line.stream} was forgotten by a reset")
        self._lines.clear()
        self._meeting.exchange(None, where)  # nobody speaks of old messages any more

    def _settle(self, stream: str, src: int, dst: int, sides: dict[tuple, Sequence]) -> None:
        """Begin what both sides have named, and the other half of what only one side has begun."""
        nothing = (0, 0, ())
        sent, received = sides.get((src, stream, dst, False), nothing), sides.get((dst, stream, src, True), nothing)
        goal = max(min(sent[0], received[0]), sent[1], received[1])
        line = self._line(stream, src if self.rank == dst else dst, self.rank == dst)
        sizes = sent if line.incoming else received  # of the latest that the other side has named
        while line.begun < goal:
            if not line.waiting:
                nbytes = sizes[2][line.begun - sizes[0]]
                line.waiting.append(Message(self, line, line.named, self._scratch(nbytes), (), None, "resetting"))
                line.named += 1
            self._begin_next(line)

    def _fail_all(self, reason: str) -> None:
        for line in self._lines.values():
            for message in (*line.open, *line.waiting):
                if not message.done():
                    message.fail(reason)
