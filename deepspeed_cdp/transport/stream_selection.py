"""Selects CUDA streams whose waits do not slow down other streams.

A stream that waits, by ``cuStreamWaitValue32`` or for an event, is polled by the GPU's front end. If it shares that front end
with the passes' stream, each kernel of the passes starts 1 to 2 microseconds later (measured on an H100 with three of the first
six high-priority streams). Streams beyond the number of hardware queues (``CUDA_DEVICE_MAX_CONNECTIONS``, 8) share a queue, and
one stream's wait then blocks the other. CUDA tells neither, so both are measured once, before training."""

import gc
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from deepspeed_cdp.transport.cuda_bindings import CudaBindings

CANDIDATES = 14  # streams to measure
_KERNELS = 150  # per measurement
_SLEEP = 20_000_000  # GPU cycles that delay the kernels until the host has enqueued them all
_TIMEOUT = 0.1  # seconds for one measurement


def select_wait_streams(count: int, device: torch.device, driver: CudaBindings) -> tuple[list[torch.cuda.Stream], str]:
    """Select high-priority streams for waiting.

    Returns:
        ``count`` streams, and a sentence for the log. First come streams that slow down no kernels, then those that do, and last
        those that share a hardware queue with another stream.
    """
    if os.environ.get("CUDA_LAUNCH_BLOCKING", "0") not in ("", "0"):  # launching a kernel behind a wait would never return
        return [torch.cuda.Stream(device, priority=-1) for _ in range(count)], "not measured, because CUDA_LAUNCH_BLOCKING is set"
    with _without_garbage_collection():
        probe = _Probe(device, driver)
        candidates = [torch.cuda.Stream(device, priority=-1) for _ in range(CANDIDATES)]
        own: list[torch.cuda.Stream] = []  # with a hardware queue of their own
        for stream in candidates:
            if not probe.shares(stream, own):
                own.append(stream)
        base = probe.cost(None)
        costs = {stream: probe.cost(stream) - base for stream in own}
    shared = [stream for stream in candidates if stream not in costs]
    chosen = sorted(own, key=lambda stream: costs[stream] > 0.1 * base)[:count]
    slowing = sum(costs[stream] > 0.1 * base for stream in chosen)
    chosen += shared[: count - len(chosen)]
    return chosen, (
        f"{len(own)} of {CANDIDATES} streams have queues of their own; of the {count} taken, waiting on {slowing} slows "
        f"each kernel by {max([costs.get(s, 0.0) for s in chosen], default=0.0):.1f} us"
    )


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """A collection frees a former transport's memory, which waits for the device: for ever while this host blocks its streams."""
    enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class _Probe:
    """Blocks streams on a word in pinned host memory, so that the host can release them at any time."""

    def __init__(self, device: torch.device, driver: CudaBindings):
        self._driver = driver
        self._word = torch.zeros(1, dtype=torch.int32, device="cpu", pin_memory=True)
        self._x = torch.zeros(1024, device=device)
        self._x.add_(1)  # loads the kernel
        torch.cuda._sleep(1000)
        torch.cuda.synchronize(device)

    def _block(self, streams: list[torch.cuda.Stream]) -> None:
        self._word.zero_()
        for stream in streams:
            self._driver.wait_value(stream.cuda_stream, self._word.data_ptr(), 1)

    def _event_passes(self, event: torch.cuda.Event) -> bool:
        """Whether the event passes within the timeout; then releases all blocked streams."""
        deadline = time.monotonic() + _TIMEOUT
        while not event.query() and time.monotonic() < deadline:
            pass
        passed = event.query()
        self._word.fill_(1)
        torch.cuda.synchronize()
        return passed

    def _blocked_by(self, stream: torch.cuda.Stream, others: list[torch.cuda.Stream]) -> bool:
        self._block(others)
        event = torch.cuda.Event()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(1000)
            event.record()
        return not self._event_passes(event)

    def shares(self, stream: torch.cuda.Stream, others: list[torch.cuda.Stream]) -> bool:
        """Whether waits of the others block this stream, or a wait of this stream blocks the current one."""
        return self._blocked_by(stream, others) or self._blocked_by(torch.cuda.current_stream(), [stream])

    def cost(self, waiting: torch.cuda.Stream | None) -> float:
        """Microseconds per small kernel on the current stream while ``waiting`` waits: the lower of two measurements."""
        times = []
        for _ in range(2):
            self._block([waiting] if waiting else [])
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            torch.cuda._sleep(_SLEEP)
            begin.record()
            for _ in range(_KERNELS):
                self._x.add_(1)
            end.record()
            if not self._event_passes(end):
                return float("inf")
            times.append(begin.elapsed_time(end) * 1000 / _KERNELS)
        return min(times)
