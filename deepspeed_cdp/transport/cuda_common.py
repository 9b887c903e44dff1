"""Common parts of the transports between GPUs: tickets of CUDA events, the owner's stream, collectives, and a watchdog."""

import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from typing import Any

import torch
import torch.distributed as dist

from deepspeed_cdp.errors import WHY_MISSING, HandoffError
from deepspeed_cdp.transport.base import Ticket, Transport, Where
from deepspeed_cdp.transport.cuda_bindings import CudaBindings
from deepspeed_cdp.transport.store_exchange import StoreExchange, first_line
from deepspeed_cdp.transport.wait_timing import WaitTiming


class StreamTicket(ABC):
    """One side of a message, for which CUDA streams can be made to wait.

    Attributes:
        edge: (stream, peer).
        nbytes: bytes to count as received at the first ``wait``; -1: not a received message.
    """

    __slots__ = ("transport", "edge", "nbytes", "counted")

    def __init__(self, transport: "CudaTransport", edge: tuple[str, int], nbytes: int):
        self.transport, self.edge, self.nbytes, self.counted = transport, edge, nbytes, nbytes < 0

    @abstractmethod
    def enqueue_wait(self, cuda_stream: int) -> None:
        """Make a CUDA stream (its handle) wait until this side of the message is done."""

    def wait(self, where: Where) -> None:
        transport = self.transport
        transport.raise_failure()
        transport.wait_on_current_stream(self, self.edge, self.nbytes >= 0)
        transport.work_enqueued()
        if not self.counted:
            self.counted = True
            self.transport.count(self.edge, self.nbytes)


class EventTicket(StreamTicket):
    """A message, or work of a stream, that is done at a CUDA event. The event returns to the transport's pool with the ticket."""

    __slots__ = ("event",)

    def __init__(self, transport: "CudaTransport", edge: tuple[str, int], cuda_stream: int, nbytes: int):
        super().__init__(transport, edge, nbytes)
        self.event = transport.events.pop() if transport.events else transport.driver.create_event()
        transport.driver.record_event(self.event, cuda_stream)

    def __del__(self) -> None:
        self.transport.events.append(self.event)

    def enqueue_wait(self, cuda_stream: int) -> None:
        self.transport.driver.wait_event(cuda_stream, self.event)

    def done(self) -> bool:
        return self.transport.driver.event_done(self.event)


class _On:
    """``torch.cuda.stream`` for a stream of the current device, which is several times faster."""

    __slots__ = ("_stream", "_before")

    def __init__(self, stream: torch.cuda.Stream):
        self._stream = stream

    def __enter__(self) -> None:
        stream = self._stream
        self._before = torch._C._cuda_getCurrentStream(stream.device_index)
        torch._C._cuda_setStream(stream.stream_id, stream.device_index, stream.device_type)

    def __exit__(self, *_: Any) -> None:
        torch._C._cuda_setStream(*self._before)


def _timing_event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


class CudaTransport(Transport):
    """Base class of transports between GPUs. In a training step the host only enqueues.

    Attributes:
        device: this rank's GPU.
        driver: CUDA driver calls.
        events: free CUDA events, for ``EventTicket``.
    """

    host_waits = False
    timing: WaitTiming
    _store_exchange: StoreExchange
    _watchdog: "Watchdog"

    def __init__(self, rank: int, size: int, timeout_seconds: float, device: torch.device):
        super().__init__(rank, size, timeout_seconds)
        self.device, self.driver = device, CudaBindings()
        self.events: list[int] = []
        self._owner, self._relay_stream = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self.timing = WaitTiming(_timing_event)
        self._failure: str | None = None
        self._closed = False

    def current(self) -> int:
        """Handle of torch's current CUDA stream."""
        return torch._C._cuda_getCurrentRawStream(self.device.index)

    def wait_on_current_stream(self, ticket: StreamTicket, edge: tuple[str, int], receiving: bool) -> None:
        """Make the current CUDA stream wait for ``ticket``; the watchdog supervises it, and ``timing`` times it in some steps.

        Args:
            edge: (stream, peer); stream "": an event of ``record_event``, which is not timed.
            receiving: the ticket is of a received message; else of a sent one.
        """
        current = self.current()
        beside = current in (self._owner.cuda_stream, self._relay_stream.cuda_stream)
        timed = self.timing.active and not beside and edge[0] != ""
        before = self.timing.record_event() if timed else None
        ticket.enqueue_wait(current)
        if timed:
            self.timing.record_wait(edge, receiving, before)
        self._watchdog.expect_stream(current)  # the host may block right behind this wait

    def raise_failure(self) -> None:
        """Raise HandoffError if the watchdog has found a message late."""
        if self._failure:
            raise HandoffError(self._failure)

    # ---- the owner's stream ---------------------------------------------------------------------------------------------
    def record_event(self) -> EventTicket:
        event = EventTicket(self, ("", self.rank), self.current(), -1)
        self._watchdog.expect(event)
        return event

    def wait_event(self, event: EventTicket | None) -> None:
        if event is not None:
            event.enqueue_wait(self.current())
            self.work_enqueued()

    def owner_stream(self) -> AbstractContextManager:
        return _On(self._owner)

    def relay(self, work: Callable[[], Ticket | None], edge: tuple[str, int, bool] | None = None) -> Any:
        with _On(self._relay_stream):
            return work()

    # ---- collectives, none in a training step ---------------------------------------------------------------------------
    def gather(self, value: Any, where: Where) -> list[Any]:
        self.collectives += 1
        self.raise_failure()
        return self._store_exchange.exchange(value, where)

    def broadcast(self, tensor: torch.Tensor, src: int, where: Where) -> None:
        self.collectives += 1
        self.raise_failure()
        self._store_exchange.exchange(None, where)  # names missing ranks, which a broadcast cannot
        failed = f"{where}: broadcast from rank {src} failed within {self.timeout_seconds} s ({WHY_MISSING})"
        try:
            work = dist.broadcast(tensor, src, async_op=True)
            self._wait_on_host([work.is_completed], lambda: failed)
            work.wait()  # raises what went wrong; the current stream waits, too
        except HandoffError:
            _abort_default_group(self.device)  # its kernel would block the device until torch's own timeout
            raise
        except RuntimeError as error:
            raise HandoffError(f"{failed}: {first_line(error)}") from error

    def _wait_on_host(self, queries: Sequence[Callable[[], bool]], late: Callable[[], str]) -> None:
        """Block the host until each query has returned True.

        Raises:
            HandoffError: the watchdog's reason, or ``late()`` after ``timeout_seconds``.
        """
        deadline = time.monotonic() + self.timeout_seconds
        for query in queries:
            while not query():
                if self._failure or time.monotonic() > deadline:
                    raise HandoffError(self._failure or late())
                time.sleep(0.0005)

    # ---- failures -------------------------------------------------------------------------------------------------------
    @abstractmethod
    def diagnose(self) -> str:
        """Which message blocks this rank."""

    @abstractmethod
    def abort(self, reason: str) -> None:
        """Unblock the device, and let the next call raise HandoffError(``reason``). The watchdog calls it repeatedly."""


def _abort_default_group(device: torch.device) -> None:
    """End the running collectives of the default process group; best effort, while another error is raised."""
    with suppress(Exception):
        dist.distributed_c10d._get_default_group()._get_backend(device).abort()


class Watchdog:
    """A thread that aborts the transport when the device has waited for longer than ``timeout_seconds``."""

    def __init__(self, transport: CudaTransport):
        self._transport = transport
        self._events: deque[tuple[float, EventTicket]] = deque()
        self._unwatched: set[int] = set()  # CUDA streams of ``expect_stream`` that have no event behind it yet
        self._stream_events: dict[int, tuple[float, int]] = {}  # CUDA stream -> when its event was recorded, the event
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="deepspeed_cdp watchdog")
        self._thread.start()

    def expect(self, event: EventTicket) -> None:
        """Expect the event within the timeout. At most five events a second are kept."""
        now = time.monotonic()
        if not self._events or now - self._events[-1][0] > 0.2:
            self._events.append((now, event))

    def expect_stream(self, cuda_stream: int) -> None:
        """Expect the stream to finish its work so far within the timeout; the host may block right behind this call.

        The thread records the stream's event soon. It does so again only when that one is done: a host that runs ahead of a
        device that stands must not put off the end.
        """
        self._unwatched.add(cuda_stream)

    def _watch(self) -> None:
        """Record events on streams that are expected to finish, unless they have one under way."""
        driver = self._transport.driver
        for stream in tuple(self._unwatched):
            since, event = self._stream_events.get(stream) or (0.0, driver.create_event())
            if not since or driver.event_done(event):
                self._unwatched.discard(stream)  # before the recording, which then covers what comes in between
                driver.record_event(event, stream)
                self._stream_events[stream] = (time.monotonic(), event)

    def _late(self, timeout: float) -> bool:
        self._watch()
        driver, now = self._transport.driver, time.monotonic()
        while self._events and self._events[0][1].done():
            self._events.popleft()
        if self._events and now - self._events[0][0] > timeout:
            return True
        return any(now - since > timeout and not driver.event_done(event) for since, event in self._stream_events.values())

    def _run(self) -> None:
        transport, timeout = self._transport, self._transport.timeout_seconds
        torch.cuda.set_device(transport.device)
        torch.cuda.current_stream().query()  # makes the CUDA context current in this thread, for driver calls
        while not self._stopping.wait(min(1.0, timeout / 4)):
            try:
                reason = transport._failure or (transport.diagnose() if self._late(timeout) else None)
            except RuntimeError as error:  # from the driver: the device itself has failed
                reason = f"rank {transport.rank}: the GPU does not answer: {error}"
            if reason:
                transport.abort(reason)

    def stop(self) -> None:
        """End the thread; waits for it for up to 5 s."""
        self._stopping.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(5)

    @property
    def stopped(self) -> bool:
        """Whether the thread has ended."""
        return not self._thread.is_alive()
