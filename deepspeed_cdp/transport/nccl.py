"""Messages over NCCL, for GPUs that cannot access each other's memory, on one host or several. The host only enqueues.

Connections. Every edge has a communicator of two ranks and a CUDA stream of its own, so edges never block each other.
``prepare`` connects the plan's edges once, in the same order on all ranks, and sends one message over each. NCCL's memory per
edge (estimated at 10 to 30 MiB; not measured) is mostly its channels' buffers, which ``_CTAS`` bounds.

Order. A send kernel and its receive kernel occupy multiprocessors until both run. So both sides start a message at the same place
of an order that all ranks share (``rendezvous``). The earlier side waits with at most ``_CTAS`` multiprocessors per edge.

Failures. After an abort, an incomplete receive must not look like a message. NCCL's protocol LL, for small messages, may
deliver what an older message left in its buffer; the other protocols deliver nothing. So small messages pass through a staging
buffer that is too long for LL, and the beginning of every destination is filled with nan before its receive."""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

import torch
import torch.distributed as dist

from deepspeed_cdp.errors import HandoffError
from deepspeed_cdp.transport.base import Edge, Where
from deepspeed_cdp.transport.cuda_common import CudaTransport, EventTicket, StreamTicket, Watchdog
from deepspeed_cdp.transport.deadline import Late, Standby, call_within
from deepspeed_cdp.transport.nccl_bindings import NcclBindings
from deepspeed_cdp.transport.rendezvous import Message, RendezvousTransport
from deepspeed_cdp.transport.store_exchange import StoreExchange

_CTAS = 4  # most multiprocessors that one message uses
_STAGED_BYTES = (
    1 << 17
)  # shorter messages are staged; protocol LL is for at most 16 KiB per multiprocessor (NCCL_P2P_LL_THRESHOLD)
_POISON_STREAMS = 12
_CLOSED, _OPEN = 0, 1  # values of the gate, see _host_words


class NcclTransport(RendezvousTransport, CudaTransport):
    """See the module's docstring. The constructor is collective; all ranks must make their transports in the same order.

    The communicators are not registered with torch.distributed, so ``destroy_process_group`` leaves them alone. ``broadcast``
    uses the default process group.

    Args:
        rank, size: this rank and the number of ranks.
        timeout_seconds: how long the device waits for a peer before this rank raises HandoffError.
        device: this rank's GPU, a different one on every rank.
        store, name: as ``StoreExchange``.
    Raises:
        HandoffError: not all ranks called.
        OSError, RuntimeError: NCCL is missing or too old.
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
        self._nccl = NcclBindings()
        self._store_exchange = StoreExchange(
            rank, size, timeout_seconds, store, name, f"rank {rank}, connecting the {size} ranks of {name!r}"
        )
        try:
            self._connections: dict[Edge, tuple[int, int]] = {}  # edge -> communicator, handle of its CUDA stream
            self._staging: dict[Edge, torch.Tensor] = {}  # edge -> buffer for small messages
            self._lock = threading.Lock()  # one thread at a time calls NCCL
            self._order = self.driver.create_event()  # for one CUDA stream to wait for another
            self._started: deque[Message] = deque(maxlen=512)  # the latest, for ``diagnose``
            self._memory: torch.Tensor | None = None
            self._poison_handles: list[int] = []  # CUDA streams that _poison made
            # Pinned, so that a thread can write what the device reads without using a CUDA stream. Word 0 is a gate that every
            # stream passes after a wait; word 1 + k is _OPEN once poison stream k has filled the buffers.
            self._host_words = torch.zeros(1 + _POISON_STREAMS, dtype=torch.int32, device="cpu", pin_memory=True)
            self._host_words[0] = _OPEN
            self._aborters: dict[int, Standby] = {}  # communicator -> thread to abort it, which the driver may block for ever
            self._poisoner = Standby(device, "deepspeed_cdp poison")
            self._watchdog = Watchdog(self)
        except BaseException:
            self._store_exchange.close(None)  # the other ranks need not wait
            raise

    def allocate(self, nbytes: int) -> torch.Tensor:
        memory = torch.zeros(nbytes, dtype=torch.uint8, device=self.device)
        torch.cuda.synchronize(self.device)  # other streams write to it
        self._memory = memory
        return memory

    # ---- connecting -----------------------------------------------------------------------------------------------------
    def _connect(self, edges: Sequence[Edge], where: Where) -> None:
        """Make a communicator for each of this rank's edges, and send one message over it."""
        made = {i: self._nccl.new_id().hex() for i, (_, src, _) in enumerate(edges) if src == self.rank}
        ids = {int(i): text for there in self._store_exchange.exchange(made, where) for i, text in there.items()}
        for i, edge in enumerate(edges):
            stream, src, dst = edge
            if self.rank in (src, dst):
                peer = src if self.rank == dst else dst
                doing = f"{where}: stream {stream} with rank {peer}"
                comm = self._with_timeout(partial(self._nccl.connect, bytes.fromhex(ids[i]), int(self.rank == dst), _CTAS), doing)
                self._aborters[comm] = Standby(self.device, "deepspeed_cdp abort")
                handle = self.driver.create_stream()
                self._connections[edge], self._staging[edge] = (comm, handle), self._scratch(_STAGED_BYTES)
                self._with_timeout(partial(self._send_first, edge), doing)
        self._store_exchange.exchange(None, where)

    def _send_first(self, edge: Edge) -> None:
        """Send the edge's first message, at which NCCL connects and blocks the host.

        Raises:
            RuntimeError: it arrived damaged.
        """
        word = torch.full((256,), 1 if edge[2] == self.rank else 2, dtype=torch.uint8, device=self.device)
        torch.cuda.current_stream(self.device).synchronize()
        self._enqueue_transfer(edge, word)
        while not self.driver.stream_done(self._connections[edge][1]):
            time.sleep(0.0005)
        if not bool((word == 2).all()):
            raise RuntimeError("the first message did not arrive whole")

    def _with_timeout(self, call: Callable[[], int | None], doing: str) -> int:
        """Run ``call`` in a thread, since NCCL may block without a timeout, and return its result.

        Args:
            doing: what the rank is doing; the error begins with it.
        Raises:
            HandoffError: ``call`` failed, or did not return within ``timeout_seconds``.
        """
        try:
            return call_within(self.timeout_seconds, call, self.device) or 0
        except Late:
            raise HandoffError(f"{doing}: no connection within {self.timeout_seconds} s") from None
        except Exception as error:
            raise HandoffError(f"{doing}: NCCL did not connect: {error}") from error

    # ---- messages -------------------------------------------------------------------------------------------------------
    def _record_point(self) -> EventTicket:
        return EventTicket(self, ("", self.rank), self.current(), -1)

    def _start(self, message: Message) -> EventTicket:
        self.raise_failure()
        side, driver = message.side, self.driver
        edge = side.edge(self.rank)
        handle = self._connections[edge][1]
        if message.point is not None:
            message.point.enqueue_wait(handle)
        for ticket in message.after:
            if isinstance(ticket, Message):
                self.start_until(ticket)  # it has started, unless the plan is wrong
                ticket = ticket.work
            if ticket is not None:
                assert isinstance(ticket, StreamTicket)
                ticket.enqueue_wait(handle)
        if (
            not side.initiates
        ):  # the kernel must not start early on the device either: until the peer starts, it holds multiprocessors
            driver.record_event(self._order, self.current())
            driver.wait_event(handle, self._order)
        with self._lock:
            self.raise_failure()
            self._enqueue_transfer(edge, message.tensor)
        message.point, message.after = None, ()
        self._started.append(message)
        return EventTicket(self, (side.stream, side.peer), handle, -1)

    def _enqueue_transfer(self, edge: Edge, tensor: torch.Tensor) -> None:
        """Enqueue this rank's side of a message, staged and marked with nan as the module's docstring says."""
        (comm, handle), driver, nbytes = self._connections[edge], self.driver, tensor.numel()
        at = place = tensor.data_ptr()
        length, small = nbytes, nbytes < _STAGED_BYTES
        if small:
            place, length = self._staging[edge].data_ptr(), _STAGED_BYTES
        if edge[2] == self.rank:
            driver.fill(handle, place, 0xFF, min(nbytes, _STAGED_BYTES))
            self._nccl.receive(comm, 0, place, length, handle)
            if small:
                driver.copy(handle, at, place, nbytes)
        else:
            if small:
                driver.copy(handle, place, at, nbytes)
            self._nccl.send(comm, 1, place, length, handle)

    def _wait_started(self, message: Message, where: Where) -> None:
        self.raise_failure()
        message.where = where
        self.wait_on_current_stream(message.work, (message.side.stream, message.side.peer), message.side.incoming)
        self.driver.wait_value(self.current(), self._host_words.data_ptr(), _OPEN)

    def _is_done(self, message: Message) -> bool:
        return message.work is not None and message.work.done()

    def _scratch(self, nbytes: int) -> torch.Tensor:
        scratch = torch.zeros(nbytes, dtype=torch.uint8, device=self.device)
        torch.cuda.current_stream(self.device).synchronize()
        return scratch

    def _finish_started(self, where: Where) -> None:
        handles = [handle for _, handle in self._connections.values()]
        queries: list[Callable[[], bool]] = [partial(self.driver.stream_done, handle) for handle in handles]
        queries += [self._owner.query, self._relay_stream.query, torch.cuda.current_stream().query]
        self._wait_on_host(queries, lambda: f"{where}: {self.diagnose()}")
        self._started.clear()

    # ---- failures -------------------------------------------------------------------------------------------------------
    def diagnose(self) -> str:
        """Which message blocks this rank: the first unfinished one that was waited for, else the first unfinished one."""
        late = [m for m in list(self._started) if m.work is not None and not m.work.done()]
        late.sort(key=lambda m: not m.awaited)  # waited for first; the sort is stable
        for message in late:
            side = message.side
            broken = self._nccl.error(self._connections[side.edge(self.rank)][0])
            what = (
                f"no message on stream {side.stream} from rank {side.peer}"
                if side.incoming
                else f"nobody took the message on stream {side.stream} for rank {side.peer}"
            )
            return f"{message.where or f'rank {self.rank}'}: {what} within {self.timeout_seconds} s" + (
                f" (NCCL: {broken})" if broken else ""
            )
        return f"rank {self.rank}: the GPU did not finish its work within {self.timeout_seconds} s"

    def abort(self, reason: str, poison: bool = True) -> None:
        """Abort all communicators, so that the device goes on, and let the next call raise HandoffError(``reason``).

        Args:
            poison: fill the buffers with 0xFF, which is nan: results computed without the messages must not look valid.
        """
        if self._failure:
            return
        self._failure = reason
        try:
            if poison and self._memory is not None:
                self._host_words[0] = _CLOSED
                self._poisoner.begin(partial(self._poison, self._memory))
                with suppress(Exception):  # what follows tells if it failed
                    self._poisoner.result(1.0)
            held = self._lock.acquire(timeout=1.0)  # the abort also ends a call that blocks inside NCCL
            # all at once: each abort waits for the device, which another communicator's message may block
            aborters = dict(self._aborters)
            for comm, aborter in aborters.items():
                aborter.begin(partial(self._nccl.abort, comm))
            deadline = time.monotonic() + 1.0
            while self._poison_handles and not self._host_words[1:].any() and time.monotonic() < deadline:
                time.sleep(0.001)  # no driver call, which the aborts may block
            if poison and self._memory is not None and not self._host_words[1:].any():
                self._failure += " (and the GPU did not mark what has not come: numbers read after that may be wrong)"
        finally:
            self._host_words[0] = _OPEN
        deadline = time.monotonic() + self.timeout_seconds
        for aborter in aborters.values():
            with suppress(Exception):  # abort raises the cause
                aborter.result(max(deadline - time.monotonic(), 0.0))
        if held:
            self._lock.release()

    def _poison(self, memory: torch.Tensor) -> None:
        """Enqueue filling this rank's buffers with nan on several CUDA streams.

        The GPU has few hardware queues, so messages may block some of these streams. One that is done suffices. Until then the
        gate blocks every CUDA stream that has waited for a message.
        """
        for k in range(_POISON_STREAMS):
            handle = self.driver.create_stream(-(2 + k % 4))
            self._poison_handles.append(handle)
            self.driver.fill(handle, memory.data_ptr(), 0xFF, memory.numel())
            self.driver.write_value(handle, self._host_words.data_ptr() + 4 * (1 + k), _OPEN)

    # ---- the end --------------------------------------------------------------------------------------------------------
    def close(self, drain: bool) -> None:
        if self._closed:
            return
        self._closed = True
        self._watchdog.stop()
        where = f"rank {self.rank}, closing"
        try:
            if drain and not self._failure:
                self.reset(where)  # completes the messages that both sides have posted and pushed
        except HandoffError:
            pass  # a peer has failed, and raises the cause itself
        finally:
            self._store_exchange.close(None)
        self._fail_all(f"rank {self.rank} has closed its transport")
        if not self._failure:
            self.abort(f"{where}: the transport is closed", False)
        torch.cuda.synchronize(self.device)
        poison_handles = self._poison_handles if self._watchdog.stopped else []
        for handle in (*poison_handles, *(handle for _, handle in self._connections.values())):
            self.driver.destroy_stream(handle)
        self._poisoner.begin(lambda: None)  # ends its thread
        self._connections.clear()
        self._aborters.clear()
        self._staging.clear()
        self._memory = None
