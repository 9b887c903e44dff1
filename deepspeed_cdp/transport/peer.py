"""Messages between GPUs of one host that can access each other's memory: copy engines move the bytes, words in memory order them.

Every rank opens the other ranks' buffers and words (peer_memory.py). Each edge has two 32-bit words, one on each side:

  - Pushed streams: the receiver writes the *credit* word on the sender, the number of messages whose region is free. The sender
    copies, and then writes the *arrival* word on the receiver, the number of messages that have landed.
  - Pulled streams (``PULLED``): the sender writes the *arrival* word on the receiver, the number of messages published. The
    receiver copies, and then writes the *credit* word on the sender, the number of messages taken.

The host only enqueues. CUDA streams wait for words (``cuStreamWaitValue32``) in an order without cycles
(docs/algorithm.md#why-it-cannot-deadlock), so the host may run ahead or block anywhere.
"""

from collections import deque
from collections.abc import Sequence
from itertools import product

import torch
import torch.distributed as dist

from deepspeed_cdp.errors import HandoffError
from deepspeed_cdp.transport.base import PULLED, Ticket, Where
from deepspeed_cdp.transport.cuda_common import CudaTransport, EventTicket, StreamTicket, Watchdog
from deepspeed_cdp.transport.peer_memory import PeerMemory
from deepspeed_cdp.transport.store_exchange import StoreExchange
from deepspeed_cdp.transport.stream_selection import select_wait_streams

STREAMS = ("P", "P0", "W0", "G", "G0", "S", "T", "X", "Y")
_CUDA_STREAMS = ("relay", "G", "G0", "P0", "credit", "P")  # names of the CUDA streams; those that wait most come first
CUDA_STREAM_OF = {"P": "P", "P0": "P0", "W0": "P0", "G": "G", "G0": "G0", "S": "S", "T": "S", "X": "X", "Y": "X"}
# Streams whose credits the posting CUDA stream writes itself. So do all posts on the owner's CUDA stream, which delays no other.
CREDIT_ON_CURRENT = ("G", "S", "T", "X", "Y")
_POISON = 1 << 30  # added to a word, so that every wait for it ends


class _WordTicket(StreamTicket):
    """A message that is done once a word of this rank reaches a value."""

    __slots__ = ("address", "value")
    transport: "PeerTransport"

    def __init__(self, transport: "PeerTransport", edge: tuple[str, int], address: int, value: int, nbytes: int):
        super().__init__(transport, edge, nbytes)
        self.address, self.value = address, value

    def enqueue_wait(self, cuda_stream: int) -> None:
        self.transport.driver.wait_value(cuda_stream, self.address, self.value)

    def wait(self, where: Where) -> None:
        self.transport.note_wait(self, where)
        super().wait(where)

    def done(self) -> bool:
        return False  # unknown: asking the device would cost a synchronization


class PeerTransport(CudaTransport):
    """See the module's docstring. The constructor is collective; all ranks must make their transports in the same order.

    Args:
        rank, size: this rank and the number of ranks: all those of the default process group.
        timeout_seconds: how long the device waits for a peer before this rank raises HandoffError.
        device: this rank's GPU.
        store, name: as ``StoreExchange``.
    Attributes:
        stream_report: how the CUDA streams were selected, for the log.
        why_not_native: why Python enqueues the messages and not C++ (peer_native.py).
    Raises:
        HandoffError: not all ranks called.
        OSError, RuntimeError: the GPUs cannot share memory; transport "nccl" shares none.
    """

    name = "peer"
    why_not_native = "not asked for"

    def __init__(
        self,
        rank: int,
        size: int,
        timeout_seconds: float,
        device: torch.device,
        store: dist.Store | None = None,
        name: str = "deepspeed_cdp",
    ):
        super().__init__(rank, size, timeout_seconds, device)
        self._store_exchange = StoreExchange(
            rank, size, timeout_seconds, store, name, f"rank {rank}, connecting the {size} ranks of {name!r}"
        )
        try:
            self._word_memory = PeerMemory(4 * 2 * len(STREAMS) * size, device, self.driver, self._store_exchange)
            self._words, self._word_bases = self._word_memory.own, self._word_memory.addresses
            streams, self.stream_report = select_wait_streams(len(_CUDA_STREAMS), device, self.driver)
            self._streams = dict(zip(_CUDA_STREAMS, streams))
            self._streams["S"], self._relay_stream = self._owner, self._streams["relay"]
            self._streams["X"] = torch.cuda.Stream(device, priority=-1)  # alone: other rings may be late
            self._handles = {name: stream.cuda_stream for name, stream in self._streams.items()}
            self._point = self.driver.create_event()  # latest point of a CUDA stream that others wait for
            self._point_on: int | None = None  # that stream's handle (the default stream's is 0); None: it has got more work
            self._counts: dict[tuple[str, int, bool], int] = {}  # (stream, peer, incoming) -> messages posted or pushed
            self._waits: deque[tuple[_WordTicket, Where]] = deque(maxlen=512)  # the latest, for ``diagnose``
            self._bases: list[int] = []  # by rank: address of its allocation, as mapped here
            self._memory: PeerMemory | None = None
            self._abort_stream = torch.cuda.Stream(device, priority=-1)  # nothing else uses it, so nothing blocks it
            self._connected()
        except BaseException:
            self._store_exchange.close(None)  # the other ranks need not wait
            raise

    def _connected(self) -> None:
        """The constructor's last part: words and streams are there."""
        self._watchdog = Watchdog(self)

    def allocate(self, nbytes: int) -> torch.Tensor:
        assert self._memory is None, "a transport allocates once"
        self._memory = PeerMemory(nbytes, self.device, self.driver, self._store_exchange)
        self._bases = self._memory.addresses
        return self._memory.own

    # ---- words and counts -----------------------------------------------------------------------------------------------
    def _word(self, at: int, stream: str, peer: int, arrival: bool) -> int:
        """Address of rank ``at``'s word on its edge with ``peer``, as mapped here.

        Args:
            arrival: the arrival word; else the credit word.
        """
        return self._word_bases[at] + 4 * ((STREAMS.index(stream) * self.size + peer) * 2 + arrival)

    def _next(self, stream: str, peer: int, incoming: bool) -> int:
        key = (stream, peer, incoming)
        self._counts[key] = number = self._counts.get(key, 0) + 1
        return number

    def _count(self, stream: str, peer: int, incoming: bool) -> int:
        """Messages posted for, or pushed, so far."""
        return self._counts.get((stream, peer, incoming), 0)

    def _latest_waits(self) -> list[tuple[int, int, tuple[str, int], Where]]:
        """The latest waits for words of this rank, the oldest first: address, value, edge, and what the rank did then."""
        return [(word.address, word.value, word.edge, where) for word, where in list(self._waits)]

    def _forget_messages(self) -> None:
        """All words are zero again."""
        self._counts.clear()
        self._waits.clear()

    def note_wait(self, word: _WordTicket, where: Where) -> None:
        """Note for ``diagnose`` that a CUDA stream is about to wait for ``word``."""
        self._waits.append((word, where))

    # ---- messages -------------------------------------------------------------------------------------------------------
    def _wait_for_current(self, handle: int, current: int) -> None:
        """Make CUDA stream ``handle`` wait for the work of ``current``; one event serves until that stream gets more work."""
        if self._point_on != current:
            self.driver.record_event(self._point, current)
            self._point_on = current
        self.driver.wait_event(handle, self._point)

    def work_enqueued(self) -> None:
        self._point_on = None

    def post(
        self, stream: str, src: int, into: torch.Tensor, after: Sequence[Ticket] = (), where: Where = "", remote_offset: int = -1
    ) -> Ticket:
        number, driver, current = self._next(stream, src, True), self.driver, self.current()
        on_current = stream in CREDIT_ON_CURRENT or current == self._owner.cuda_stream
        handle = current if on_current else self._handles[CUDA_STREAM_OF[stream] if stream in PULLED else "credit"]
        if handle != current:
            self._wait_for_current(handle, current)
        for ticket in after:
            assert isinstance(ticket, StreamTicket)
            ticket.enqueue_wait(handle)
        credit, arrival = self._word(src, stream, self.rank, False), self._word(self.rank, stream, src, True)
        if stream not in PULLED:
            driver.write_value(handle, credit, number)
            return _WordTicket(self, (stream, src), arrival, number, into.numel())
        driver.wait_value(handle, arrival, number)
        driver.copy(handle, into.data_ptr(), self._bases[src] + remote_offset, into.numel())
        driver.write_value(handle, credit, number)
        self._waits.append((_WordTicket(self, (stream, src), arrival, number, -1), where))
        return EventTicket(self, (stream, src), handle, into.numel())

    def push(self, stream: str, dst: int, source: torch.Tensor, after: Ticket | None = None, remote_offset: int = -1) -> Ticket:
        number, driver, edge = self._next(stream, dst, False), self.driver, (stream, dst)
        self.sent[edge] += 1
        self.bytes_sent[edge] += source.numel()
        credit, arrival = self._word(self.rank, stream, dst, False), self._word(dst, stream, self.rank, True)
        if stream in PULLED:
            driver.write_value(self.current(), arrival, number)
            return _WordTicket(self, edge, credit, number, -1)
        handle = self._handles[CUDA_STREAM_OF[stream]]
        if after is not None:
            assert isinstance(after, StreamTicket)
            after.enqueue_wait(handle)
        else:
            current = self.current()
            if handle != current:
                self._wait_for_current(handle, current)
        driver.wait_value(handle, credit, number)
        driver.copy(handle, self._bases[dst] + remote_offset, source.data_ptr(), source.numel())
        driver.write_value(handle, arrival, number)
        return EventTicket(self, edge, handle, -1)

    # ---- collectives, none in a training step ---------------------------------------------------------------------------
    def reset(self, where: Where) -> None:
        self.collectives += 1
        self.raise_failure()
        self._store_exchange.exchange(None, where)  # all ranks have enqueued all of their steps
        self._wait_for_streams([torch.cuda.current_stream()], where)
        self._store_exchange.exchange(None, where)  # all steps are done; only pulls of versions that nobody will publish are left
        self._end_waits(PULLED)
        torch.cuda.synchronize(self.device)
        self._store_exchange.exchange(None, where)  # no rank writes words any more
        self._words.zero_()
        torch.cuda.synchronize(self.device)
        self._forget_messages()
        self._store_exchange.exchange(None, where)

    def _wait_for_streams(self, more: Sequence[torch.cuda.Stream], where: Where) -> None:
        """Block the host until all CUDA streams but those of pulls are idle, for at most ``timeout_seconds``."""
        streams = [stream for name, stream in self._streams.items() if name not in PULLED]
        self._wait_on_host([stream.query for stream in (*streams, *more)], lambda: f"{where}: {self.diagnose()}")

    def _end_waits(self, streams: Sequence[str]) -> None:
        """End this rank's waits for arrivals on these streams."""
        side = self._abort_stream
        for stream in streams:
            for peer in range(self.size):
                number = self._count(stream, peer, True)
                self.driver.write_value(side.cuda_stream, self._word(self.rank, stream, peer, True), number + _POISON)
        side.synchronize()

    # ---- failures --------------------------------------------------------------------------------------------------------
    def diagnose(self) -> str:
        """Which of the latest waits blocks this rank."""
        with torch.cuda.stream(self._abort_stream):
            words = self._words.view(torch.int32).to("cpu", non_blocking=False)
        waits = self._latest_waits()
        for address, value, (stream, peer), where in waits:
            if int(words[(address - self._word_bases[self.rank]) // 4]) < value:
                return f"{where}: no message on stream {stream} from rank {peer} within {self.timeout_seconds} s"
        latest = waits[-1][-1] if waits else f"rank {self.rank}, before the first wait"
        for stream, peer in product(STREAMS, range(self.size)):
            address = self._word(self.rank, stream, peer, False)
            if int(words[(address - self._word_bases[self.rank]) // 4]) < self._count(stream, peer, False):
                return f"{latest}: nobody took the message on stream {stream} for rank {peer} within {self.timeout_seconds} s"
        return f"rank {self.rank}: the GPU did not finish its work within {self.timeout_seconds} s"

    def abort(self, reason: str, poison: bool = True) -> None:
        """End all waits of this rank's CUDA streams, and let the next call raise HandoffError(``reason``).

        A live peer may overwrite a word later, so the watchdog calls this repeatedly until the device is idle.

        Args:
            poison: fill the buffers with 0xFF, which is nan: results computed without the messages must not look valid, here and
                on peers that receive them.
        """
        side, memory = self._abort_stream, self._memory
        if poison and not self._failure and memory is not None:
            self.driver.fill(side.cuda_stream, memory.own.data_ptr(), 0xFF, memory.own.numel())
        self._failure = self._failure or reason
        for stream, peer, incoming in product(STREAMS, range(self.size), (True, False)):
            number = self._count(stream, peer, incoming)
            self.driver.write_value(side.cuda_stream, self._word(self.rank, stream, peer, incoming), number + _POISON)
        side.synchronize()

    # ---- the end --------------------------------------------------------------------------------------------------------
    def close(self, drain: bool) -> None:
        if self._closed:
            return
        self._closed = True
        where, done = f"rank {self.rank}, closing", False
        try:
            try:
                if drain and not self._failure:
                    self._store_exchange.exchange(None, where)  # all ranks have enqueued all of their steps
                    self._wait_for_streams([], where)
                    self._store_exchange.exchange(None, where)  # and finished them
                    done = True
            except HandoffError:
                pass  # a peer has failed, and raises the cause itself
            finally:
                self._store_exchange.close(None)
            self.abort(f"{where}: the transport is closed", not done)
            torch.cuda.synchronize(self.device)  # meanwhile the watchdog repeats the abort
            for memory in (self._memory, self._word_memory):
                if memory:
                    memory.close()
        finally:
            self._watchdog.stop()
            self._memory = None
            self._bases, self._handles, self._streams = [], {}, {}
