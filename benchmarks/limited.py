"""Slower links: limits the bandwidth of messages, to emulate a network.

Every message takes size / rate longer than without the limit. The limit holds per CUDA stream of the transport (one for
parameters, one for sums, ...), not per link. A link shared by all of them would be slower.
"""

import os
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

from deepspeed_cdp.errors import HandoffError
from deepspeed_cdp.integration import engine
from deepspeed_cdp.native import load
from deepspeed_cdp.transport.base import Ticket, Transport, Where


@contextmanager
def limited(gigabytes_per_second: float) -> Iterator[None]:
    """Engines initialized inside get a limited transport: what ``deepspeed_cdp.integration.engine`` calls ``connect`` is
    replaced. On GPUs Python enqueues the messages then, since their copies are made to wait."""
    plain = engine.connect

    def connect(kind: str, rank: int, size: int, timeout_seconds: float, device: torch.device) -> Transport:
        transport = plain(kind, rank, size, timeout_seconds, device)
        if device.type == "cuda":
            transport.driver = _SlowCopies(transport.driver, gigabytes_per_second, device)
            return transport
        return Limited(transport, gigabytes_per_second)

    with mock.patch.object(engine, "connect", connect), mock.patch.dict(os.environ, {load.OFF: "0"}):
        yield


def cycles_per_second(device: torch.device) -> float:
    """Cycles per second of ``torch.cuda._sleep``, measured for about 30 ms."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(10**7)  # wakes the clock up
    start.record()
    torch.cuda._sleep(5 * 10**7)
    end.record()
    torch.cuda.synchronize(device)
    return 5e7 / (start.elapsed_time(end) / 1000)


class _SlowCopies:
    """The driver, but before each copy its stream waits as long as the bytes would take: one thread of one SM spins."""

    def __init__(self, driver: Any, gigabytes_per_second: float, device: torch.device):
        self._driver, self._device = driver, device
        self._cycles_per_byte = cycles_per_second(device) / (gigabytes_per_second * 1e9)
        self._streams: dict[int, torch.cuda.ExternalStream] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._driver, name)

    def copy(self, stream: int, to: int, source: int, nbytes: int) -> None:
        lane = self._streams.get(stream)
        if lane is None:
            lane = self._streams[stream] = torch.cuda.ExternalStream(stream, self._device)
        with torch.cuda.stream(lane):
            torch.cuda._sleep(int(nbytes * self._cycles_per_byte))
        self._driver.copy(stream, to, source, nbytes)


class _Later:
    """The ticket of a push that has not started yet."""

    def __init__(self, patience: float) -> None:
        self.begun, self._patience = threading.Event(), patience
        self.ticket: Ticket | None = None
        self.error: BaseException | None = None

    def wait(self, where: Where) -> None:
        if not self.begun.wait(self._patience):
            raise HandoffError(f"{where}: the limited link has not come to this message within {self._patience} s")
        if self.error is not None:
            raise self.error
        self.ticket.wait(where)

    def done(self) -> bool:
        return self.ticket is not None and self.ticket.done()


class _Link(threading.Thread):
    """Starts pushes one after the other, each after the time that its bytes take."""

    def __init__(self, rate: float, patience: float):
        super().__init__(daemon=True, name="limited link")
        self._jobs: queue.Queue = queue.Queue()
        self._rate, self._patience, self._free = rate, patience, 0.0
        self.start()

    def put(self, nbytes: int, push: Callable[[], Ticket]) -> _Later:
        later = _Later(self._patience)
        self._jobs.put((time.monotonic(), nbytes, push, later))
        return later

    def end(self, drain: bool) -> None:
        """Accept no more pushes; with ``drain``, return once all have started."""
        self._jobs.put(None)
        if drain:
            self.join()

    def run(self) -> None:
        while (job := self._jobs.get()) is not None:
            since, nbytes, push, later = job
            self._free = max(self._free, since) + nbytes / self._rate
            time.sleep(max(0.0, self._free - time.monotonic()))
            try:
                later.ticket = push()
            except BaseException as error:  # told by the ticket's wait
                later.error = error
            later.begun.set()


class Limited(Transport):
    """A gloo transport whose pushes start late by size / rate; one thread per stream of messages.

    Args:
        gigabytes_per_second: the rate of each stream.
    """

    def __init__(self, transport: Transport, gigabytes_per_second: float):
        # Transport.__init__ is not called: the counters are those of the wrapped transport.
        self.inner, self.name, self._rate = transport, f"limited-{transport.name}", gigabytes_per_second * 1e9
        self.rank, self.size, self.timeout_seconds = transport.rank, transport.size, transport.timeout_seconds
        self.sent, self.bytes_sent = transport.sent, transport.bytes_sent
        self.received, self.bytes_received = transport.received, transport.bytes_received
        self.waited, self.waited_sent, self.host_waits = transport.waited, transport.waited_sent, transport.host_waits
        self._links: dict[str, _Link] = {}

    @property
    def collectives(self) -> int:
        return self.inner.collectives

    def post(
        self, stream: str, src: int, into: torch.Tensor, after: Sequence[Ticket] = (), where: Where = "", remote_offset: int = -1
    ) -> Ticket:
        return self.inner.post(stream, src, into, after, where, remote_offset)

    def push(self, stream: str, dst: int, source: torch.Tensor, after: Ticket | None = None, remote_offset: int = -1) -> _Later:
        link = self._links.get(stream)
        if link is None:
            link = self._links[stream] = _Link(self._rate, self.timeout_seconds)
        return link.put(source.numel(), lambda: self.inner.push(stream, dst, source, after, remote_offset))

    def gather(self, value: Any, where: Where) -> list[Any]:
        return self.inner.gather(value, where)

    def broadcast(self, tensor: torch.Tensor, src: int, where: Where) -> None:
        self.inner.broadcast(tensor, src, where)

    def reset(self, where: Where) -> None:
        self._end(drain=True)
        self.inner.reset(where)

    def close(self, drain: bool) -> None:
        self._end(drain=drain)
        self.inner.close(drain)

    def _end(self, drain: bool) -> None:
        for link in self._links.values():
            link.end(drain)
        self._links.clear()  # the next push starts new ones
