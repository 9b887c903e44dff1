"""The contract that every transport keeps.

A transport moves flat ``uint8`` tensors between ranks. It knows nothing of stages or versions. The plan says which region of
which buffer a message fills, and when that region is free.

An *edge* is a stream name, a sender and a receiver. The n-th ``push`` on the sender matches the n-th ``post`` on the receiver,
with a tensor of the same size. Edges never block one another.

A message is sent in four calls::

    receiver: ticket = post(stream, src, into)     # like irecv: allows the message to land in `into`
    sender:   ticket = push(stream, dst, source)   # like isend: never blocks, and transfers once the receiver has posted
    receiver: ticket.wait(where)                   # the message has landed in `into`
    sender:   ticket.wait(where)                   # `source` may be overwritten

On GPUs the host only enqueues these calls. ``wait`` then makes the current CUDA stream wait, and "landed" and "overwritten" refer
to the order of work on CUDA streams.

Transports that write to, or read from, a peer's memory need the message's offset in the peer's allocation. The plan knows it, and
the caller passes it as ``remote_offset``.
"""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch

from deepspeed_cdp.transport.relay_thread import RelayThread, relaying
from deepspeed_cdp.transport.ring_map import RingMap
from deepspeed_cdp.transport.wait_timing import WaitTiming

Edge = tuple[str, int, int]  # (stream, source, destination)
PULLED = ("P0", "W0", "G0")  # streams whose receiver starts the transfer: the sender only announces what is there


class Where(Protocol):
    """What a rank is doing, for errors: a string, or an object that is formatted only if an error needs it."""

    def __str__(self) -> str: ...


class Ticket(Protocol):
    """One side of one message.

    Attributes:
        counted: a received message is counted already, or elsewhere.
    """

    counted: bool

    def wait(self, where: Where) -> None:
        """Wait until this side is done; idempotent, for one thread at a time.

        Args:
            where: what the rank is doing; the error begins with it ("rank 1, step 7, stage 2, ...").
        Raises:
            HandoffError: the peer is gone, or did not take its part within ``timeout_seconds``.
        """

    def done(self) -> bool:
        """Whether ``wait`` would return at once."""


class Transport(ABC):
    """Point-to-point messages between ``size`` ranks; the module's docstring describes them.

    Attributes:
        rank, size: this rank and the number of ranks in the ring.
        world_rank: this rank among all ranks of the job, for messages to people.
        ring, rings: this rank's ring and the number of rings (``RingView``).
        sent, bytes_sent: messages pushed, and their bytes, by (stream, peer).
        received, bytes_received: messages waited for, and their bytes, by (stream, peer).
        waited: seconds that the host was blocked until messages arrived, by (stream, peer); empty unless ``host_waits``.
        waited_sent: seconds that the host was blocked until peers took messages, by (stream, peer).
        collectives: calls of ``gather``, ``broadcast`` and ``reset``; a training step makes none.
        host_waits: the host waits for messages; else a CUDA stream does.
        timing: how long that CUDA stream waits; None if ``host_waits``.
        rendezvous: both sides of a message must start it at the same place of an order that all ranks share.
        native: the extension that has its messages in C++ (transport/peer_native.py), or None.
    """

    name: str
    host_waits = True
    timing: WaitTiming | None = None
    rendezvous = False
    rings, ring = 1, 0
    native: Any = None
    _relay: RelayThread | None = None  # from the first relay on

    def __init__(self, rank: int, size: int, timeout_seconds: float):
        self.rank, self.size, self.timeout_seconds = rank, size, timeout_seconds
        self.sent: Counter[tuple[str, int]] = Counter()
        self.received: Counter[tuple[str, int]] = Counter()
        self.bytes_sent: Counter[tuple[str, int]] = Counter()
        self.bytes_received: Counter[tuple[str, int]] = Counter()
        self.waited: dict[tuple[str, int], float] = Counter()  # type: ignore[assignment]  # typeshed counts in int only
        self.waited_sent: dict[tuple[str, int], float] = Counter()  # type: ignore[assignment]
        self.collectives = 0

    @property
    def world_rank(self) -> int:
        return self.rank

    @property
    def ring_map(self) -> RingMap:
        """Which rank of the job is where."""
        return RingMap(self.size, self.size)

    def world_rank_of(self, rank: int, ring: int | None = None) -> int:
        """The rank among all of the job's, of a rank of this ring, or of another one of ``rings``."""
        return rank

    @property
    def data_rank(self) -> int:
        """This rank's number among those that hold the same parameters; all but with tensor parallelism."""
        return self.world_rank

    def gather_data(self, value: Any, where: Where) -> list[Any]:
        """As ``gather``: values of the ranks that hold the same parameters, by ``data_rank``."""
        return self.gather(value, where)

    def sum_members(self, tensor: torch.Tensor, where: Where) -> None:  # noqa: B027, alone without tensor parallelism
        """Add up ``tensor`` over the members of this rank's tensor group, in place; each has the same sum."""

    def count(self, edge: tuple[str, int], nbytes: int) -> None:
        """Count a received message of ``nbytes`` bytes on ``edge`` (stream, peer)."""
        self.received[edge] += 1
        self.bytes_received[edge] += nbytes

    def count_wait(self, edge: tuple[str, int], receiving: bool, seconds: float) -> None:
        """Count seconds for which this thread has waited on ``edge`` (stream, peer), unless it relays."""
        if not relaying():
            (self.waited if receiving else self.waited_sent)[edge] += seconds

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Collective: zeroed memory (uint8, 1-D) for messages, of the same size on all ranks."""
        return torch.zeros(nbytes, dtype=torch.uint8, device="cpu")

    def work_enqueued(self) -> None:  # noqa: B027, only streams care
        """Tell the transport that work was enqueued on the current CUDA stream: the next message must wait for that work."""

    def prepare(self, edges: Sequence[Edge], deferred: bool) -> None:  # noqa: B027, nothing to do without connections
        """Collective: connect the edges that will be used. Transports without connections per edge do nothing.

        Args:
            edges: all of the ring's, the same list on all ranks.
            deferred: messages that the peer initiates start at ``start_peer``, not at ``post`` or ``push`` (``rendezvous`` only).
        """

    def start_peer(self, stream: str, peer: int, incoming: bool) -> None:  # noqa: B027
        """Start this rank's side of the next message that the peer initiates on this edge (``rendezvous`` only).

        Args:
            incoming: this rank receives; else it sends.
        """

    def record_event(self) -> Any:
        """Record an event on the current CUDA stream, for ``wait_event`` or as a ticket; None if ``host_waits``."""
        return None

    def wait_event(self, event: Any) -> None:
        """Make the current CUDA stream, or the host, wait for an event of ``record_event`` or ``relay``; None: there is none."""
        if event is not None:
            event.wait(f"rank {self.world_rank}")

    def owner_stream(self) -> AbstractContextManager:
        """Context in which a stage owner's update runs: a CUDA stream of its own, beside the passes."""
        return nullcontext()

    def relay(self, work: Callable[[], Ticket | None], edge: tuple[str, int, bool] | None = None) -> Any:
        """Do ``work``, which may wait for other ranks, beside the passes, and in the order of these calls.

        Here a thread does it; on GPUs a CUDA stream of its own.

        Args:
            work: waits, then computes, posts or pushes.
            edge: (stream, peer, whether it receives), for which the host waits if it waits for the work; None: not counted.
        Returns:
            the ticket, or event, that ``work`` returns; done once the work is done, too.
        """
        self._relay = self._relay or RelayThread()

        def count_wait(seconds: float) -> None:
            if edge is not None:
                self.count_wait(edge[:2], edge[2], seconds)

        return self._relay.begin(work, count_wait)

    def finish_relays(self, where: Where) -> None:
        """Wait until all relays so far are done (``host_waits``; on GPUs, streams are waited for).

        Raises:
            HandoffError: one of them failed.
        """
        if self._relay:
            self._relay.begin(lambda: None).begun.wait(where)

    def end_relays(self) -> None:
        """No relay comes any more."""
        if self._relay:
            self._relay.stop()

    @abstractmethod
    def post(
        self, stream: str, src: int, into: torch.Tensor, after: Sequence[Ticket] = (), where: Where = "", remote_offset: int = -1
    ) -> Ticket:
        """Receive the next message of edge (stream, src, this rank) into ``into``.

        Args:
            into: uint8, 1-D, contiguous.
            after: tickets of pushes, and events behind work, that still read ``into``; the message lands after them.
            where: what the rank is doing, for the error if one of these is never done.
            remote_offset: offset of the message in ``src``'s allocation, in bytes; -1: unknown.
        Raises:
            HandoffError: a ticket of ``after`` failed.
            ValueError: ``src`` is not another rank of the ring.
        """

    @abstractmethod
    def push(self, stream: str, dst: int, source: torch.Tensor, after: Ticket | None = None, remote_offset: int = -1) -> Ticket:
        """Send ``source`` as the next message of edge (stream, this rank, dst). Never blocks.

        Args:
            source: uint8, 1-D, contiguous; unchanged until the ticket is done.
            after: ticket of the message that filled ``source``, if it is forwarded unchanged.
            remote_offset: offset in ``dst``'s allocation where the message lands, in bytes; -1: unknown.
        Raises:
            ValueError: ``dst`` is not another rank of the ring.
        """

    @abstractmethod
    def gather(self, value: Any, where: Where) -> list[Any]:
        """Collective: every rank's ``value`` (JSON-serializable), in rank order.

        Raises:
            HandoffError: not all ranks called within ``timeout_seconds``.
        """

    @abstractmethod
    def broadcast(self, tensor: torch.Tensor, src: int, where: Where) -> None:
        """Collective: copy rank ``src``'s ``tensor`` (uint8, 1-D, contiguous) into every rank's that holds the same parameters.

        Raises:
            HandoffError: not all ranks took part within ``timeout_seconds``.
        """

    @abstractmethod
    def reset(self, where: Where) -> None:
        """Collective, between steps: complete the messages that were both posted and pushed, and drop all others.

        A push from before never matches a post from after. With ``rendezvous``, a dropped post's memory may be written to until
        ``reset`` returns.

        Raises:
            HandoffError: not all ranks called, or a message was not completed, within ``timeout_seconds``.
        """

    @abstractmethod
    def close(self, drain: bool) -> None:
        """Free everything; idempotent.

        Args:
            drain: first wait, up to ``timeout_seconds``, until peers have received the messages that they have posted for. A rank
                that finishes early does so, since its peers still need its last messages.
        """
