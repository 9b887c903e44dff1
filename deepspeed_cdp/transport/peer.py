"""Hand-offs between GPUs of one host that reach each other's memory: copy engines move the bytes, words in memory say when.

Every rank's buffers are one symmetric allocation, so an offset names a place on all of them. Each edge has two words, one on
either side. Ring streams are pushed: the receiver's *credit* word on the sender counts regions that are free, the sender's
*arrival* word on the receiver counts messages that have landed. First hops (P0, H0) are pulled by the reader: the owner's
*arrival* word there counts what it has published, the reader's *credit* word on the owner counts what it has taken.

The host only enqueues. All waiting is done by streams, on words (``cuStreamWaitValue32``), in an order that cannot close a cycle
(design §6), so it may run ahead as far as it likes, or block wherever it likes.
"""

from collections import deque
from collections.abc import Sequence

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric

from deepspeed_cdp.errors import HandoffError
from deepspeed_cdp.transport.base import PULLED, Ticket, Where
from deepspeed_cdp.transport.cuda_common import Awaited, CudaTransport, Event, Watch
from deepspeed_cdp.transport.store_exchange import StoreExchange
from deepspeed_cdp.transport.stream_selection import quiet_streams

STREAMS = ("P", "H", "P0", "H0", "G", "GH", "O", "S", "T", "X", "Y")
_STREAMED = ("credit", "G", "P", "O", "P0", "H0")  # CUDA streams, those that wait most first
_LANES = {
    "P": "P",
    "H": "P",
    "G": "G",
    "GH": "G",
    "O": "O",
    "S": "S",
    "T": "S",
    "X": "X",
    "Y": "X",
}  # pushes that share a CUDA stream
_DIRECT = ("S", "T", "X", "Y")  # their credits are given by the stream that posts, as are the owner's, which hold up no others
_POISON = 1 << 30  # added to a word, it lets every wait on it pass


class _Word(Awaited):
    """A message that is there once a word of this rank has reached a value."""

    __slots__ = ("address", "value")

    def __init__(self, transport: "PeerTransport", edge: tuple[str, int], address: int, value: int, nbytes: int):
        super().__init__(transport, edge, nbytes)
        self.address, self.value = address, value

    def enqueue(self, stream: int) -> None:
        self.transport.driver.wait(stream, self.address, self.value)

    def wait(self, where: Where) -> None:
        self.transport.note_wait(self, where)
        super().wait(where)

    def done(self) -> bool:
        return False  # not worth asking the device


class PeerTransport(CudaTransport):
    """See the module's text. All ranks must make their transports in the same order.

    Args:
        rank: this rank.
        size: the number of ranks, all of them in the default process group.
        timeout_seconds: how long the device may wait for a peer before this rank ends with an error.
        device: this rank's GPU.
    Raises:
        HandoffError: not all ranks came.
        OSError, RuntimeError: no symmetric memory between them (``cyclic.transport: "nccl"`` needs none).
    """

    name = "peer"

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
        self._meeting = StoreExchange(
            rank, size, timeout_seconds, store, name, f"rank {rank}, connecting the {size} ranks of {name!r}"
        )
        try:
            self._words, self._word_bases = self._symmetric(4 * 2 * len(STREAMS) * size)
        except RuntimeError:
            self._meeting.close(None)  # the others need not wait
            raise
        self._bases: list[int] = []
        streams, self.lanes = quiet_streams(len(_STREAMED), device, self.driver)
        self._streams = dict(zip(_STREAMED, streams))
        self._streams["S"] = self._owner
        self._streams["X"] = torch.cuda.Stream(device, priority=-1)  # other rings may be late: in nobody's way
        self._lanes = {lane: stream.cuda_stream for lane, stream in self._streams.items()}
        self._point = self.driver.event()  # the latest point of a stream that others follow
        self._point_on: int | None = None  # which stream, while it has not moved on (the default stream's handle is 0)
        self._counts: dict[tuple[str, int, bool], int] = {}  # (stream, peer, incoming) -> messages named
        self._waits: deque[tuple[_Word, Where]] = deque(maxlen=512)
        self._memory: torch.Tensor | None = None
        self._side = torch.cuda.Stream(device, priority=-1)  # for the watch alone: torch's pool would give out a held one again
        self._watch = Watch(self)

    def _symmetric(self, nbytes: int) -> tuple[torch.Tensor, list[int]]:
        memory = symmetric.empty(max(nbytes, 1024), dtype=torch.uint8, device=self.device)
        handle = symmetric.rendezvous(memory, dist.group.WORLD)
        memory.zero_()
        torch.cuda.synchronize(self.device)
        self._meeting.exchange(None, f"rank {self.rank}, allocating")
        return memory, list(handle.buffer_ptrs)

    def allocate(self, nbytes: int) -> torch.Tensor:
        self._memory, self._bases = self._symmetric(nbytes)
        return self._memory[:nbytes]

    # ---- words and counts -----------------------------------------------------------------------------------------------
    def _word(self, at: int, stream: str, peer: int, arrival: bool) -> int:
        """Address, in rank ``at``'s memory, of its word on the edge with ``peer``."""
        return self._word_bases[at] + 4 * ((STREAMS.index(stream) * self.size + peer) * 2 + arrival)

    def _next(self, stream: str, peer: int, incoming: bool) -> int:
        key = (stream, peer, incoming)
        self._counts[key] = number = self._counts.get(key, 0) + 1
        return number

    def note_wait(self, word: _Word, where: Where) -> None:
        """Remember what a stream is about to wait for, for the watch."""
        self._waits.append((word, where))

    # ---- messages -------------------------------------------------------------------------------------------------------
    def _follow(self, lane: int, current: int) -> None:
        if self._point_on != current:
            self.driver.record(self._point, current)
            self._point_on = current
        self.driver.follow(lane, self._point)

    def moved_on(self) -> None:
        self._point_on = None

    def post(
        self, stream: str, src: int, into: torch.Tensor, after: Sequence[Ticket] = (), where: Where = "", from_at: int = -1
    ) -> Ticket:
        number, driver, current = self._next(stream, src, True), self.driver, self.current()
        direct = stream in _DIRECT or current == self._owner.cuda_stream
        lane = current if direct else self._lanes[stream if stream in PULLED else "credit"]
        if lane != current:
            self._follow(lane, current)
        for ticket in after:
            ticket.enqueue(lane)
        credit, arrival = self._word(src, stream, self.rank, False), self._word(self.rank, stream, src, True)
        if stream not in PULLED:
            driver.write(lane, credit, number)
            return _Word(self, (stream, src), arrival, number, into.numel())
        driver.wait(lane, arrival, number)
        driver.copy(lane, into.data_ptr(), self._bases[src] + from_at, into.numel())
        driver.write(lane, credit, number)
        self._waits.append((_Word(self, (stream, src), arrival, number, -1), where))
        return Event(self, (stream, src), lane, into.numel())

    def push(self, stream: str, dst: int, source: torch.Tensor, after: Ticket | None = None, into_at: int = -1) -> Ticket:
        number, driver, edge = self._next(stream, dst, False), self.driver, (stream, dst)
        self.sent[edge] += 1
        self.bytes_sent[edge] += source.numel()
        credit, arrival = self._word(self.rank, stream, dst, False), self._word(dst, stream, self.rank, True)
        if stream in PULLED:
            driver.write(self.current(), arrival, number)
            return _Word(self, edge, credit, number, -1)
        lane = self._lanes[_LANES[stream]]
        if after is not None:
            after.enqueue(lane)
        else:
            current = self.current()
            if lane != current:
                self._follow(lane, current)
        driver.wait(lane, credit, number)
        driver.copy(lane, self._bases[dst] + into_at, source.data_ptr(), source.numel())
        driver.write(lane, arrival, number)
        return Event(self, edge, lane, -1)

    # ---- collectives, none in a training step ---------------------------------------------------------------------------
    def reset(self, where: Where) -> None:
        self.collectives += 1
        self.check()
        self._meeting.exchange(None, where)  # everyone has enqueued all of its steps
        self._synchronize(
            [s.query for lane, s in self._streams.items() if lane not in PULLED] + [torch.cuda.current_stream().query], where
        )
        self._meeting.exchange(None, where)  # all steps are done: only pulls of what nobody will publish are left
        self._poison(PULLED)
        torch.cuda.synchronize(self.device)
        self._meeting.exchange(None, where)  # nobody writes words any more
        self._words.zero_()
        torch.cuda.synchronize(self.device)
        self._counts.clear()
        self._waits.clear()
        self._meeting.exchange(None, where)

    def _poison(self, streams: Sequence[str]) -> None:
        """Let this rank's waits for arrivals on these streams pass, whatever comes."""
        side = self._side
        for stream in streams:
            for peer in range(self.size):
                number = self._counts.get((stream, peer, True), 0)
                self.driver.write(side.cuda_stream, self._word(self.rank, stream, peer, True), number + _POISON)
        side.synchronize()

    # ---- when something is wrong ----------------------------------------------------------------------------------------
    def diagnose(self) -> str:
        """Which of the latest waits holds this rank up."""
        with torch.cuda.stream(self._side):
            words = self._words.view(torch.int32).to("cpu", non_blocking=False)
        for word, where in list(self._waits):
            have = int(words[(word.address - self._word_bases[self.rank]) // 4])
            if have < word.value:
                stream, peer = word.edge
                return f"{where}: no message on stream {stream} from rank {peer} within {self.timeout_seconds} s"
        latest = self._waits[-1][1] if self._waits else f"rank {self.rank}, before the first wait"
        for (stream, peer, incoming), number in list(self._counts.items()):
            address = self._word(self.rank, stream, peer, False)
            if not incoming and int(words[(address - self._word_bases[self.rank]) // 4]) < number:
                return f"{latest}: nobody took the message on stream {stream} for rank {peer} within {self.timeout_seconds} s"
        return f"rank {self.rank}: the GPU did not finish its work within {self.timeout_seconds} s"

    def give_up(self, reason: str, poison: bool = True) -> None:
        """Called by the watch: unblock the device, and let the next call raise.

        A peer that lives may yet overwrite a word, so the watch does this again and again until the device is idle.

        Args:
            poison: let the streams find nan: what they compute now and pass on to peers that live must not look right.
        """
        side, memory = self._side, self._memory
        if poison and not self._failure and memory is not None:
            self.driver.fill(side.cuda_stream, memory.data_ptr(), 0xFF, memory.numel())
        self._failure = self._failure or reason
        for stream in STREAMS:
            for peer in range(self.size):
                for incoming in (True, False):
                    number = self._counts.get((stream, peer, incoming), 0)
                    self.driver.write(side.cuda_stream, self._word(self.rank, stream, peer, incoming), number + _POISON)
        side.synchronize()

    # ---- the end --------------------------------------------------------------------------------------------------------
    def close(self, drain: bool) -> None:
        if self._closed:
            return
        self._closed = True
        where, done = f"rank {self.rank}, closing", False
        try:
            if drain and not self._failure:
                self._meeting.exchange(None, where)  # everyone has enqueued all of its steps
                self._synchronize([s.query for lane, s in self._streams.items() if lane not in PULLED], where)
                self._meeting.exchange(None, where)  # and done them
                done = True
        except HandoffError:
            pass  # a peer has failed; it tells itself
        self._meeting.close(None)
        self.give_up(f"{where}: the transport is closed", not done)
        torch.cuda.synchronize(self.device)  # the watch goes on giving up meanwhile
        self._watch.stop()
        self._memory = None
        self._bases, self._lanes, self._streams = [], {}, {}
