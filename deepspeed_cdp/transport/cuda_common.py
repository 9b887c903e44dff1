"""What transports between GPUs share: events, the owner's stream, and a thread that sees when the device has waited too long."""

import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist

from deepspeed_cdp.errors import HandoffError
from deepspeed_cdp.transport.base import Transport, Where
from deepspeed_cdp.transport.cuda_bindings import Driver
from deepspeed_cdp.transport.store_exchange import StoreExchange
from deepspeed_cdp.transport.wait_timing import DeviceWaits


class Awaited(ABC):
    """One side of a message that CUDA streams can be made to wait for.

    Attributes:
        edge: (stream, peer); nbytes: what is counted as received when it is waited for, -1 for nothing.
    """

    __slots__ = ("transport", "edge", "nbytes", "counted")

    def __init__(self, transport: "CudaTransport", edge: tuple[str, int], nbytes: int):
        self.transport, self.edge, self.nbytes, self.counted = transport, edge, nbytes, nbytes < 0

    @abstractmethod
    def enqueue(self, stream: int) -> None:
        """Hold a CUDA stream until the message is there."""

    def wait(self, where: Where) -> None:
        transport = self.transport
        transport.check()
        transport.hold(self, self.edge, self.nbytes >= 0)
        transport.moved_on()
        if not self.counted:
            self.counted = True
            self.transport.count(self.edge, self.nbytes)


class Event(Awaited):
    """A message whose work on a CUDA stream ends with an event, or a mark; the event goes back to the pool with the ticket."""

    __slots__ = ("event",)

    def __init__(self, transport: "CudaTransport", edge: tuple[str, int], stream: int, nbytes: int):
        super().__init__(transport, edge, nbytes)
        self.event = transport.events.pop() if transport.events else transport.driver.event()
        transport.driver.record(self.event, stream)

    def __del__(self) -> None:
        self.transport.events.append(self.event)

    def enqueue(self, stream: int) -> None:
        self.transport.driver.follow(stream, self.event)

    def done(self) -> bool:
        return self.transport.driver.reached(self.event)


def _timing_event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


class CudaTransport(Transport):
    """Part of a transport between GPUs; the host only enqueues.

    Attributes:
        device: this rank's GPU; driver: calls that torch does not offer; events: free ones.
    """

    host_waits = False
    timing: DeviceWaits
    _meeting: StoreExchange
    _watch: "Watch"

    def __init__(self, rank: int, size: int, timeout_seconds: float, device: torch.device):
        super().__init__(rank, size, timeout_seconds)
        self.device, self.driver = device, Driver()
        self.events: list[int] = []
        self._owner = torch.cuda.Stream(device)
        self.timing = DeviceWaits(_timing_event)
        self._failure: str | None = None
        self._closed = False

    def current(self) -> int:
        """The handle of the stream that torch uses now."""
        return torch._C._cuda_getCurrentRawStream(self.device.index)

    def hold(self, awaited: Awaited, edge: tuple[str, int], came: bool) -> None:
        """Make the current stream wait, watched; and time it in some steps if it is the passes'.

        Args:
            came: whether it waits for a message to come; else for its own to be taken.
        """
        current = self.current()
        timed = self.timing.active and current != self._owner.cuda_stream and edge[0] != ""
        before = self.timing.mark() if timed else None
        awaited.enqueue(current)
        if timed:
            self.timing.note(edge, came, before)
        self._watch.look_behind(current)  # the host may block right there

    def check(self) -> None:
        """Raise what the watch has found."""
        if self._failure:
            raise HandoffError(self._failure)

    # ---- the owner's stream ---------------------------------------------------------------------------------------------
    def mark(self) -> Event:
        mark = Event(self, ("", self.rank), self.current(), -1)
        self._watch.look(mark)
        return mark

    def after(self, mark: Event | None) -> None:
        if mark is not None:
            mark.enqueue(self.current())
            self.moved_on()

    def owner_stream(self) -> AbstractContextManager:
        return torch.cuda.stream(self._owner)

    # ---- collectives, none in a training step ---------------------------------------------------------------------------
    def gather(self, value: Any, where: Where) -> list[Any]:
        self.collectives += 1
        self.check()
        return self._meeting.exchange(value, where)

    def broadcast(self, tensor: torch.Tensor, src: int, where: Where) -> None:
        self.collectives += 1
        self.check()
        self._meeting.exchange(None, where)  # with a timeout, unlike what follows
        dist.broadcast(tensor, src)

    def _synchronize(self, idle: Sequence[Callable[[], bool]], where: Where) -> None:
        """Wait on the host until each says that it is idle, up to the timeout."""
        deadline = time.monotonic() + self.timeout_seconds
        for query in idle:
            while not query():
                if self._failure or time.monotonic() > deadline:
                    raise HandoffError(self._failure or f"{where}: {self.diagnose()}")
                time.sleep(0.0005)

    # ---- when something is wrong ----------------------------------------------------------------------------------------
    @abstractmethod
    def diagnose(self) -> str:
        """What holds this rank up."""

    @abstractmethod
    def give_up(self, reason: str) -> None:
        """Called by the watch, again and again: unblock the device, and let the next call raise."""


class Watch:
    """A thread that sees when the device has waited too long."""

    def __init__(self, transport: CudaTransport):
        self._transport = transport
        self._marks: deque[tuple[float, Event]] = deque()
        self._behind: dict[int, tuple[float, int]] = {}  # stream -> when the event behind its latest wait was recorded, the event
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="deepspeed_cdp watch")
        self._thread.start()

    def look(self, mark: Event) -> None:
        """This mark should be reached within the timeout."""
        now = time.monotonic()
        if not self._marks or now - self._marks[-1][0] > 0.2:
            self._marks.append((now, mark))

    def look_behind(self, stream: int) -> None:
        """So should what the stream has been given so far. The latest such place counts: the host may block right behind it."""
        latest = self._behind.get(stream)
        event = latest[1] if latest else self._transport.driver.event()
        if latest:  # before it is recorded anew: the watch must not see it with the old time
            self._behind[stream] = (time.monotonic(), event)
        self._transport.driver.record(event, stream)
        self._behind[stream] = (time.monotonic(), event)

    def _late(self, patience: float) -> bool:
        driver, now = self._transport.driver, time.monotonic()
        while self._marks and self._marks[0][1].done():
            self._marks.popleft()
        if self._marks and now - self._marks[0][0] > patience:
            return True
        return any(now - since > patience and not driver.reached(event) for since, event in list(self._behind.values()))

    def _run(self) -> None:
        transport, patience = self._transport, self._transport.timeout_seconds
        torch.cuda.set_device(transport.device)
        torch.cuda.current_stream().query()  # makes the context current here too, which calls of the driver need
        while not self._over.wait(min(1.0, patience / 4)):
            try:
                reason = transport._failure or (transport.diagnose() if self._late(patience) else None)
            except RuntimeError as error:  # of the driver: the device itself has failed
                reason = f"rank {transport.rank}: the GPU does not answer: {error}"
            if reason:
                transport.give_up(reason)

    def stop(self) -> None:
        self._over.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(5)

    @property
    def over(self) -> bool:
        """Whether it does nothing any more."""
        return not self._thread.is_alive()
