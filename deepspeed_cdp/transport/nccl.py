"""Hand-offs over NCCL: GPUs that do not reach each other's memory, on one host or several.

Every edge (stream, sender, receiver) has a communicator of two ranks and a CUDA stream of its own, on both sides, so that edges
never hold each other up. The plan says which edges there are (program.edges); they are connected once, in one order on all ranks,
and tried with a message: each rank waits at the first of its edges that is not there yet, so the first one missing anywhere has
both ranks at it. NCCL's memory for each (estimated at 10 to 30 MiB; not measured) is mostly buffers of its channels, which
``_CTAS`` bounds.

A send kernel and its receive kernel hold their multiprocessors until the other has come, so both begin at one place of the order
that all ranks share (rendezvous.py): the side that is early waits with at most ``_CTAS`` multiprocessors per edge, and nobody
waits for what lies ahead. The host only enqueues.

A receive that is given up must not look like one that came. Small messages travel in NCCL's protocol LL, which, given up, stores
what an older message left in its buffer; the other protocol stores nothing. So small messages go by way of longer memory of the
edge's own, too long for LL, and the beginning of every place is marked with nan before its message is received.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist

from deepspeed_cdp.errors import HandoffError
from deepspeed_cdp.transport.base import Edge, Where
from deepspeed_cdp.transport.cuda_common import CudaTransport, Event, Watch
from deepspeed_cdp.transport.nccl_bindings import Nccl
from deepspeed_cdp.transport.rendezvous import Message, RendezvousTransport
from deepspeed_cdp.transport.store_exchange import StoreExchange

_CTAS = 4  # multiprocessors that one message may use at most
_LONG = 1 << 17  # bytes; protocol LL is for at most 16 KiB per multiprocessor (NCCL_P2P_LL_THRESHOLD)
_SPOILERS = 12
_CLOSED, _OPEN = 0, 1


class NcclTransport(RendezvousTransport, CudaTransport):
    """See the module's text. All ranks must make their transports in the same order.

    torch.distributed knows nothing of it: several may live in one process, and ``destroy_process_group`` does not touch them
    (but ``broadcast`` uses the default group).

    Args:
        rank: this rank.
        size: the number of ranks.
        timeout_seconds: how long the device may wait for a peer before this rank ends with an error.
        device: this rank's GPU, another one on every rank.
        store: where ranks meet; default: the store of ``torch.distributed.init_process_group``.
        name: keeps apart the transports that share a store.
    Raises:
        HandoffError: not all ranks came.
        OSError, RuntimeError: no NCCL.
    """

    name = "nccl"

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
        torch.zeros((), device=device)  # the driver's calls need torch's context
        self._nccl = Nccl()
        self._meeting = StoreExchange(
            rank, size, timeout_seconds, store, name, f"rank {rank}, connecting the {size} ranks of {name!r}"
        )
        self._ends: dict[Edge, tuple[int, int]] = {}  # edge -> its communicator and its CUDA stream
        self._longer: dict[Edge, torch.Tensor] = {}  # edge -> memory by way of which its small messages go
        self._lock = threading.Lock()  # one thread at a time in NCCL
        self._order = self.driver.event()  # for one stream to follow another
        self._begun: deque[Message] = deque(maxlen=512)  # the latest, for the watch
        self._memory: torch.Tensor | None = None
        self._sides: list[int] = []  # the watch's streams, see _poison
        # page-locked, so that a thread can write to the device without a stream: a gate, and which of the ``_sides`` are done
        self._words = torch.zeros(1 + _SPOILERS, dtype=torch.int32, device="cpu", pin_memory=True)
        self._words[0] = _OPEN
        self._watch = Watch(self)

    def allocate(self, nbytes: int) -> torch.Tensor:
        memory = torch.zeros(nbytes, dtype=torch.uint8, device=self.device)
        torch.cuda.synchronize(self.device)  # other streams write to it
        self._memory = memory
        return memory

    # ---- connecting -----------------------------------------------------------------------------------------------------
    def _connect(self, edges: Sequence[Edge], where: Where) -> None:
        """Communicators for this rank's edges, each tried with one message."""
        made = {i: self._nccl.new_id().hex() for i, (_, src, _) in enumerate(edges) if src == self.rank}
        ids = {int(i): text for there in self._meeting.exchange(made, where) for i, text in there.items()}
        for i, edge in enumerate(edges):
            stream, src, dst = edge
            if self.rank in (src, dst):
                peer = src if self.rank == dst else dst
                doing = f"{where}: stream {stream} with rank {peer}"
                comm = self._in_time(
                    lambda i=i, dst=dst: self._nccl.connect(bytes.fromhex(ids[i]), int(self.rank == dst), _CTAS), doing
                )
                lane = self.driver.stream()
                self._ends[edge], self._longer[edge] = (comm, lane), self._scratch(_LONG)
                self._in_time(lambda edge=edge: self._try(edge), doing)
        self._meeting.exchange(None, where)

    def _try(self, edge: Edge) -> None:
        """NCCL connects at the first message, which blocks the host: let that be here."""
        word = torch.full((256,), 1 if edge[2] == self.rank else 2, dtype=torch.uint8, device=self.device)
        torch.cuda.current_stream(self.device).synchronize()
        self._carry(edge, word)
        while not self.driver.idle(self._ends[edge][1]):
            time.sleep(0.0005)
        if not bool((word == 2).all()):
            raise RuntimeError("the first message did not arrive whole")

    def _in_time(self, call: Callable[[], int | None], doing: str) -> int:
        """What ``call`` returns, which NCCL may block for as long as it likes; not longer than the timeout."""
        result: list[int | None] = []
        errors: list[BaseException] = []

        def run() -> None:
            torch.cuda.set_device(self.device)
            try:
                result.append(call())
            except BaseException as error:  # told below
                errors.append(error)

        thread = threading.Thread(target=run, daemon=True, name="deepspeed_cdp connect")
        thread.start()
        thread.join(self.timeout_seconds)
        if errors:
            raise HandoffError(f"{doing}: NCCL did not connect: {errors[0]}") from errors[0]
        if not result:
            raise HandoffError(f"{doing}: no connection within {self.timeout_seconds} s")
        return result[0] or 0

    # ---- messages -------------------------------------------------------------------------------------------------------
    def _point(self) -> Event:
        return Event(self, ("", self.rank), self.current(), -1)

    def _begin(self, message: Message) -> Event:
        self.check()
        line, driver = message.line, self.driver
        edge = line.edge(self.rank)
        lane = self._ends[edge][1]
        if message.point is not None:
            message.point.enqueue(lane)
        for ticket in message.after:
            if isinstance(ticket, Message):
                self.begin_until(ticket)  # (it has begun, unless the plan is wrong)
                ticket = ticket.handle
            if ticket is not None:
                ticket.enqueue(lane)
        if not line.initiates:  # begin no sooner on the device either: until the peer comes, it holds multiprocessors
            driver.record(self._order, self.current())
            driver.follow(lane, self._order)
        with self._lock:
            self.check()
            self._carry(edge, message.tensor)
        message.point, message.after = None, ()
        self._begun.append(message)
        return Event(self, (line.stream, line.peer), lane, -1)

    def _carry(self, edge: Edge, tensor: torch.Tensor) -> None:
        """Enqueue one side of a message; see the module's text."""
        (comm, lane), driver, nbytes = self._ends[edge], self.driver, tensor.numel()
        at = place = tensor.data_ptr()
        length, small = nbytes, nbytes < _LONG
        if small:
            place, length = self._longer[edge].data_ptr(), _LONG
        if edge[2] == self.rank:
            driver.fill(lane, place, 0xFF, min(nbytes, _LONG))
            self._nccl.receive(comm, 0, place, length, lane)
            if small:
                driver.copy(lane, at, place, nbytes)
        else:
            if small:
                driver.copy(lane, place, at, nbytes)
            self._nccl.send(comm, 1, place, length, lane)

    def _await(self, message: Message, where: Where) -> None:
        self.check()
        message.where = where
        self.hold(message.handle, (message.line.stream, message.line.peer), message.line.incoming)
        self.driver.wait(self.current(), self._words.data_ptr(), _OPEN)

    def _reached(self, message: Message) -> bool:
        return message.handle is not None and message.handle.done()

    def _scratch(self, nbytes: int) -> torch.Tensor:
        scratch = torch.zeros(nbytes, dtype=torch.uint8, device=self.device)
        torch.cuda.current_stream(self.device).synchronize()
        return scratch

    def _drain(self, where: Where) -> None:
        lanes = [lane for _, lane in self._ends.values()]
        self._synchronize(
            [*(lambda lane=lane: self.driver.idle(lane) for lane in lanes), self._owner.query, torch.cuda.current_stream().query],
            where,
        )
        self._begun.clear()

    # ---- when something is wrong ----------------------------------------------------------------------------------------
    def diagnose(self) -> str:
        """Which of the latest messages holds this rank up: the first one waited for that has not come, else the first of all."""
        late = [m for m in list(self._begun) if m.handle is not None and not m.handle.done()]
        late.sort(key=lambda m: not m.counted)  # stable
        for message in late:
            line = message.line
            broken = self._nccl.error(self._ends[line.edge(self.rank)][0])
            what = (
                f"no message on stream {line.stream} from rank {line.peer}"
                if line.incoming
                else f"nobody took the message on stream {line.stream} for rank {line.peer}"
            )
            return f"{message.where or f'rank {self.rank}'}: {what} within {self.timeout_seconds} s" + (
                f" (NCCL: {broken})" if broken else ""
            )
        return f"rank {self.rank}: the GPU did not finish its work within {self.timeout_seconds} s"

    def give_up(self, reason: str, poison: bool = True) -> None:
        """Called by the watch: end all messages, so that the device goes on, and let the next call raise.

        Args:
            poison: let the streams find nan: what they compute from now on, for messages that did not come, must not look right.
        """
        if self._failure:
            return
        self._failure = reason
        try:
            if poison and self._memory is not None:
                self._words[0] = _CLOSED
                self._aside(self._poison, self._memory).join(1.0)
            held = self._lock.acquire(timeout=1.0)  # a call that blocks inside NCCL is ended by the abort
            # all at once: an abort waits for the device, which another communicator's message may hold
            ends = [self._aside(self._end, comm) for comm, _ in self._ends.values()]
            deadline = time.monotonic() + 1.0
            while self._sides and not self._words[1:].any() and time.monotonic() < deadline:
                time.sleep(0.001)  # and no call of the driver, which the aborts may block
            if poison and self._memory is not None and not self._words[1:].any():
                self._failure += " (and the GPU did not mark what has not come: numbers read after that may be wrong)"
        finally:
            self._words[0] = _OPEN
        deadline = time.monotonic() + self.timeout_seconds
        for end in ends:
            end.join(max(deadline - time.monotonic(), 0.0))
        if held:
            self._lock.release()

    def _aside(self, call: Callable[..., None], *given: Any) -> threading.Thread:
        """Call it in a thread of its own, which nobody need wait for: a driver that is busy may keep it for ever."""

        def run() -> None:
            torch.cuda.set_device(self.device)
            with suppress(Exception):  # what has gone wrong is told by who gave up
                call(*given)

        thread = threading.Thread(target=run, daemon=True, name="deepspeed_cdp giving up")
        thread.start()
        return thread

    def _poison(self, memory: torch.Tensor) -> None:
        """Begin to fill this rank's buffers with nan, on several streams: a device has few queues, so some may be held up until
        the messages have ended. Nobody who waits for a message goes on until one of them is done."""
        for k in range(_SPOILERS):
            side = self.driver.stream(-(2 + k % 4))
            self._sides.append(side)
            self.driver.fill(side, memory.data_ptr(), 0xFF, memory.numel())
            self.driver.write(side, self._words.data_ptr() + 4 * (1 + k), _OPEN)

    def _end(self, comm: int) -> None:
        self._nccl.abort(comm)

    # ---- the end --------------------------------------------------------------------------------------------------------
    def close(self, drain: bool) -> None:
        if self._closed:
            return
        self._closed = True
        self._watch.stop()
        where = f"rank {self.rank}, closing"
        try:
            if drain and not self._failure:
                self.reset(where)  # finish what both sides have named
        except HandoffError:
            pass  # a peer has failed; it tells itself
        self._meeting.close(None)
        reason = f"rank {self.rank} has closed its transport"
        self._fail_all(reason)
        if not self._failure:
            self.give_up(f"{where}: the transport is closed", False)
        torch.cuda.synchronize(self.device)
        for lane in (*(self._sides if self._watch.over else ()), *(lane for _, lane in self._ends.values())):
            self.driver.destroy(lane)
        self._ends.clear()
        self._longer.clear()
        self._memory = None
