"""A rank's messages, addressed as in its program: their places, pending receives, and pending reads of buffers."""

from contextlib import suppress
from typing import Any

import torch

from deepspeed_cdp.errors import HandoffError
from deepspeed_cdp.plan.actions import Action, Kind, Post
from deepspeed_cdp.runtime.program import ActionLocation
from deepspeed_cdp.runtime.state import RankState
from deepspeed_cdp.transport.base import Ticket, Where


class PendingReads:
    """Transfers and copies that still read from this rank's buffers. A write to the same bytes must wait for them."""

    def __init__(self, by_offset: frozenset[str]):
        """
        Args:
            by_offset: regions in which each message has one place of its own, so that ranges need not be compared.
        """
        self._by_offset = by_offset
        self._reading: dict[str, list[tuple[int, int, Any]]] = {}  # region -> (offset, bytes, ticket)

    def clear(self) -> None:
        self._reading.clear()

    def count(self) -> int:
        """How many are remembered."""
        return sum(map(len, self._reading.values()))

    def _key(self, region: str, offset: int) -> str:
        return f"{region}{offset}" if region in self._by_offset else region

    def add(self, region: str, offset: int, nbytes: int, ticket: Any) -> None:
        """Remember that these bytes are read until ``ticket`` (a push, or an event behind a copy) is done."""
        self._reading.setdefault(self._key(region, offset), []).append((offset, nbytes, ticket))

    def take(self, region: str, offset: int, nbytes: int) -> list[Any]:
        """Remove and return the tickets of pending reads of these bytes. The caller waits for them."""
        key = self._key(region, offset)
        reading = self._reading.get(key)
        if not reading:
            return []
        found, left, end = [], [], offset + nbytes
        for entry in reading:
            at, size, ticket = entry
            if at >= end or offset >= at + size:
                left.append(entry)
                continue
            found.append(ticket)
            # the rest of its range may be written from another stream, which would not have waited
            if at < offset:
                left.append((at, offset - at, ticket))
            if end < at + size:
                left.append((end, at + size - end, ticket))
        self._reading[key] = left  # stays short: every place that is read is written again
        return found


class Messages:
    """Posts, pushes and waits of one rank, addressed by the plan's regions.

    Attributes:
        reads: pending reads of the buffers.
    """

    def __init__(self, state: RankState, by_offset: frozenset[str] = frozenset()):
        """
        Args:
            by_offset: see ``PendingReads``.
        """
        self.state, self.transport, self.buffers = state, state.transport, state.buffers
        self.reads = PendingReads(by_offset)
        # by stream, step, whether the round is odd (rounds of a program repeat, plan/program.py), unit, backward
        self._arrivals: dict[tuple[str, int, int, int, bool], Ticket] = {}

    def clear(self) -> None:
        """After a reset of the transport: nothing is under way."""
        self._arrivals.clear()
        self.reads.clear()

    def drain(self) -> None:
        """Before closing without a flush: receive the last step's sums, for which their senders may wait."""
        if self.transport.host_waits:  # elsewhere closing waits for all steps of all ranks
            with suppress(HandoffError):  # the peer has failed, and says so itself
                for key in [k for k in self._arrivals if k[0] == "G" and k[1] < self.state.step]:
                    self._arrivals.pop(key).wait(f"rank {self.transport.world_rank}, closing")

    # ---- places ---------------------------------------------------------------------------------------------------------
    def _region(self, region: str, step: int, round: int, version: int) -> str:
        if region == "H":
            return f"H{(step * self.state.schedule.rounds + round) % 2}"
        return self.state.plan.region_of(region, step + version)

    def place(self, a: Action) -> tuple[str, torch.Tensor]:
        """Region and bytes (uint8, 1-D) of the action's unit in this step."""
        region = self._region(a.region, self.state.step, a.round, a.version)
        return region, self.buffers.view(region, a.offset, a.nbytes)

    def _world(self, rank: int) -> int:
        """The rank among all of the job's, by which transports count."""
        return self.transport.world_rank_of(rank)

    # ---- messages -------------------------------------------------------------------------------------------------------
    def post(self, post: Post, where: Where, relayed: bool = False, into: torch.Tensor | None = None) -> None:
        """Grant the credit for one message, which lands after all pending reads of its place.

        Args:
            relayed: beside the passes.
            into: memory of the caller's own in the place of that (uint8, 1-D).
        """
        step = self.state.step + post.ahead
        region = self._region(post.region, step, post.round, 0)
        readers = self.reads.take(region, post.offset, post.nbytes) if into is None else []
        origin = -1
        if post.origin[0]:
            there = self.state.plan.region_of(post.origin[0], step + post.version)
            origin = self.buffers.address(post.src, there, post.origin[1])
        view = self.buffers.view(region, post.offset, post.nbytes) if into is None else into

        def begin() -> Ticket:
            ticket = self.transport.post(post.stream, post.src, view, readers, where, origin)
            ticket.counted = post.stream == "G"  # in ``back``: a relay's wait may come in another step
            return ticket

        edge = post.stream, self._world(post.src), True
        ticket = self.transport.relay(begin, edge) if relayed else begin()
        message = (post.stream, step, post.round % 2, post.unit, post.backward)
        assert message not in self._arrivals, (message, "two messages for one pass")
        self._arrivals[message] = ticket

    def post_all(self, a: Action, relayed: bool = False) -> None:
        """Grant the credits that the action carries."""
        if a.posts:
            where = ActionLocation(self.state, a)
            for post in a.posts:
                self.post(post, where, relayed)

    def offer(self, a: Action, back: Any = None) -> None:
        """Once ``back``, a ticket or an event, is done, and beside the passes: offer the action's bytes to its peer."""
        (region, view), where, peer = self.place(a), ActionLocation(self.state, a), a.peer
        assert peer is not None

        def begin() -> Ticket:
            if back is not None:
                back.wait(where)
            return self.transport.push(a.stream, peer, view)

        ticket = self.transport.relay(begin, (a.stream, self._world(peer), False))
        self.reads.add(region, a.offset, a.nbytes, ticket)

    def push(self, a: Action, after: Ticket | None = None) -> None:
        """Send the action's bytes.

        Args:
            after: the received message, if its bytes are forwarded unchanged.
        """
        region, view = self.place(a)
        assert a.peer is not None
        into = -1
        if a.into[0]:
            into = self.buffers.address(a.peer, self._region(a.into[0], self.state.step, a.into[2], 0), a.into[1])
        ticket = self.transport.push(a.stream, a.peer, view, after, into)
        self.reads.add(region, a.offset, a.nbytes, ticket)

    def start_peer(self, a: Action) -> None:
        """Start this rank's side of a message that the peer initiates."""
        assert a.peer is not None
        self.transport.start_peer(a.stream, a.peer, a.kind == Kind.START_RECV)

    def wait(self, a: Action) -> Ticket | None:
        """Wait for the action's message; None if it has none."""
        if a.peer is None:
            return None
        ticket = self._arrivals.pop(self._name(a))
        ticket.wait(ActionLocation(self.state, a))
        return ticket

    def _name(self, a: Action) -> tuple[str, int, int, int, bool]:
        return a.stream, self.state.step, a.round % 2, a.unit, a.backward

    def wait_ahead(self, a: Action) -> None:
        """Wait for the action's message before the action itself does."""
        self._arrivals[self._name(a)].wait(ActionLocation(self.state, a))

    def back(self, a: Action, unit: int, source: int, round: int) -> Ticket:
        """The message with an owned unit's sum that comes back, of the step that ``a`` is about.

        Args:
            source, round: the sender's rank and round.
        """
        self.transport.count(("G", self._world(source)), self.state.plan.unit(unit).g_bytes)
        return self._arrivals.pop(("G", self.state.step + a.version, round % 2, unit, True))

    def coming_back(self, a: Action, unit: int) -> Ticket | None:
        """The same message of the last round, for somebody else who waits for it too; None if ``back`` has given it away."""
        return self._arrivals.get(("G", self.state.step + a.version, (self.state.schedule.rounds - 1) % 2, unit, True))

    def wait_readers(self, a: Action, region: str, offset: int, nbytes: int) -> None:
        """Wait for the pending reads of these bytes."""
        for ticket in self.reads.take(region, offset, nbytes):
            ticket.wait(ActionLocation(self.state, a))
