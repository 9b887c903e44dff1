"""The contract that every transport keeps.

A transport moves flat ``uint8`` tensors between ranks. It knows nothing of stages or versions: the plan says which region of
which buffer a message fills, and when that region is free (design: a credit).

Two ranks and a stream name make an *edge*. Messages of one edge are matched in order: the n-th ``push`` on the sender meets the
n-th ``post`` on the receiver, and both name tensors of the same size. Edges never block one another.

Life of a message::

    receiver: ticket = post(stream, src, into)     # the region is free: the message may land in it
    sender:   ticket = push(stream, dst, source)   # never blocks; waits for the post by itself
    receiver: ticket.wait(where)                   # the message has landed in `into`
    sender:   ticket.wait(where)                   # `source` may be overwritten

On a GPU "wait" means that the current stream waits, and "free" and "landed" mean in the order of streams; the host goes on.
One-sided transports also need to know where in the peer's allocation a message lands or lies: the plan tells (``into_at``,
``from_at``).
"""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch

from deepspeed_cdp.transport.wait_timing import DeviceWaits

Edge = tuple[str, int, int]  # (stream, source, destination)
PULLED = ("P0", "H0")  # offers: pushed when published, begun when the reader takes them


class Where(Protocol):
    """What a rank is doing, put into words only when an error needs them; a plain string is one."""

    def __str__(self) -> str: ...


class Ticket(Protocol):
    """One side of one message."""

    def wait(self, where: Where) -> None:
        """Return once this side is done; idempotent.

        Args:
            where: what the rank was doing, put first in the error ("rank 1, step 7, stage 2, ...").
        Raises:
            HandoffError: the peer is gone, or nothing came within ``timeout_seconds``.
        """

    def done(self) -> bool:
        """Whether ``wait`` would return at once."""


class Transport(ABC):
    """Point-to-point messages between ``size`` ranks; see the module's text for the life of a message.

    Attributes:
        rank, size: this rank and the number of ranks in the ring.
        label: this rank's number in the world, for people; rings: how many there are, ring: this rank's (cross_ring.py).
        sent: messages pushed, by (stream, peer).
        received: messages waited for and landed, by (stream, peer).
        bytes_sent, bytes_received: the same in bytes.
        waited: seconds this rank spent blocked in receiving ``Ticket.wait``, by (stream, peer); empty unless ``host_waits``.
        waited_sent: the same in sending ones: until the peer has taken a message, whose memory is needed again.
        collectives: calls of ``gather``, ``broadcast`` and ``reset``; none happens in a training step.
    """

    name: str
    host_waits = True  # whether it is the host that waits for messages; else a stream of the device does
    timing: DeviceWaits | None = None  # how long that stream waits
    rendezvous = False  # whether both sides of a message must begin it at the same place of the ranks' common order
    rings, ring = 1, 0

    def __init__(self, rank: int, size: int, timeout_seconds: float):
        self.rank, self.size, self.timeout_seconds = rank, size, timeout_seconds
        self.sent: Counter[tuple[str, int]] = Counter()
        self.received: Counter[tuple[str, int]] = Counter()
        self.bytes_sent: Counter[tuple[str, int]] = Counter()
        self.bytes_received: Counter[tuple[str, int]] = Counter()
        self.waited: Counter[tuple[str, int]] = Counter()
        self.waited_sent: Counter[tuple[str, int]] = Counter()
        self.collectives = 0

    @property
    def label(self) -> int:
        return self.rank

    def count(self, edge: tuple[str, int], nbytes: int) -> None:
        """A message was received."""
        self.received[edge] += 1
        self.bytes_received[edge] += nbytes

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Collective: zeroed memory (uint8, 1-D) that messages are read from and land in; the same size on all ranks."""
        return torch.zeros(nbytes, dtype=torch.uint8, device="cpu")

    def moved_on(self) -> None:  # noqa: B027, only streams care
        """The current stream has been given work since the last message: what comes next must follow it."""

    def prepare(self, edges: Sequence[Edge], deferred: bool) -> None:  # noqa: B027, nothing to do without connections
        """Collective: these edges will be used. Does nothing on transports that need not know.

        Args:
            edges: all of the ring's, the same list on all ranks.
            deferred: messages that the peer initiates begin at ``start_peer``, not when they are named (only where
                ``rendezvous``).
        """

    def start_peer(self, stream: str, peer: int, incoming: bool) -> None:  # noqa: B027
        """The peer begins its next message on this edge about now, so this rank's side may begin too (``rendezvous`` only).

        Args:
            incoming: this rank receives; else it sends what it has offered.
        """

    def mark(self) -> Any:
        """This point of the current stream's work, for ``after``, and as a ticket of which to wait; None where the host waits."""
        return None

    def after(self, mark: Any) -> None:  # noqa: B027, nothing to wait for on one stream
        """Let the current stream go on only once the mark's point is passed."""

    def owner_stream(self) -> AbstractContextManager:
        """Where the owner's update runs: beside the passes if the device can."""
        return nullcontext()

    @abstractmethod
    def post(
        self, stream: str, src: int, into: torch.Tensor, after: Sequence[Ticket] = (), where: Where = "", from_at: int = -1
    ) -> Ticket:
        """Let the next message of edge (src -> this rank, stream) land in ``into``.

        Args:
            into: uint8, 1-D, contiguous.
            after: pushes that still read from it, and marks behind what an owner has read: it is free when they are done.
            where: for the error, if one of these never is.
            from_at: where in ``src``'s allocation the message lies, if the plan knows.
        """

    @abstractmethod
    def push(self, stream: str, dst: int, source: torch.Tensor, after: Ticket | None = None, into_at: int = -1) -> Ticket:
        """Send ``source`` as the next message of edge (this rank -> dst, stream). Never blocks.

        Args:
            source: uint8, 1-D, contiguous.
            after: the message whose arrival filled ``source``, if it is passed on as it came.
            into_at: where in ``dst``'s allocation it lands, if the plan knows.
        """

    @abstractmethod
    def gather(self, value: Any, where: Where) -> list[Any]:
        """Collective: every rank's ``value`` (plain data that json can carry), in rank order."""

    @abstractmethod
    def broadcast(self, tensor: torch.Tensor, src: int, where: Where) -> None:
        """Collective: fill ``tensor`` (uint8, 1-D, contiguous) on every rank with ``src``'s."""

    @abstractmethod
    def reset(self, where: Where) -> None:
        """Collective: finish the messages that both sides have named, forget the rest, start every edge anew.

        Where ``rendezvous``, a post that only this side has begun may be written to before it returns.
        After it returns, a message pushed before it can never meet a post made after it. Every rank must be between steps.
        """

    @abstractmethod
    def close(self, drain: bool) -> None:
        """Free everything; idempotent.

        Args:
            drain: first wait (up to ``timeout_seconds``) until peers have taken the messages they have posted for: a rank that
                finishes early must not pull the last hand-offs from under its neighbours.
        """
