"""CUDA streams to wait on: finding those whose waiting costs nobody else anything.

While a stream is held by ``cuStreamWaitValue32`` or an event, the front end of the GPU looks at it again and again. If it shares
that part of it with the stream that the passes run on, each of their kernels starts about 1 to 2 microseconds later
(measured on an H100: three of the first six streams of high priority), which is 3 ms in a step of 3000 kernels. Streams beyond
the number of hardware queues (CUDA_DEVICE_MAX_CONNECTIONS, 8) share queues: one is then held up by another's wait. Neither can be
asked for, so both are tried, once, before training.
"""

import os
import time

import torch

from deepspeed_cdp.transport.cuda_bindings import Driver

CANDIDATES = 14
_KERNELS, _SLEEP = 150, 20_000_000  # per trial; cycles of the device in which the host enqueues them
_PATIENCE = 0.1  # seconds that anything here may take


def quiet_streams(count: int, device: torch.device, driver: Driver) -> tuple[list[torch.cuda.Stream], str]:
    """``count`` streams of high priority, the quiet ones first, and a sentence on what was found.

    Streams that are held up by the wait of one chosen before come last.
    """
    if os.environ.get("CUDA_LAUNCH_BLOCKING", "0") not in ("", "0"):  # a launch behind a waiting stream would never return
        return [torch.cuda.Stream(device, priority=-1) for _ in range(count)], "not tried, since CUDA_LAUNCH_BLOCKING is set"
    trial = _Trial(device, driver)
    candidates = [torch.cuda.Stream(device, priority=-1) for _ in range(CANDIDATES)]
    own: list[torch.cuda.Stream] = []  # with a hardware queue of their own
    for stream in candidates:
        if not trial.shares(stream, own):
            own.append(stream)
    base = trial.cost(None)
    costs = {stream: trial.cost(stream) - base for stream in own}
    shared = [stream for stream in candidates if stream not in costs]
    chosen = sorted(own, key=lambda stream: costs[stream] > 0.1 * base)[:count]
    loud = sum(costs[stream] > 0.1 * base for stream in chosen)
    chosen += shared[: count - len(chosen)]
    return chosen, (
        f"{len(own)} of {CANDIDATES} streams have queues of their own; of the {count} taken, waiting on {loud} slows "
        f"each kernel by {max([costs.get(s, 0.0) for s in chosen], default=0.0):.1f} us"
    )


class _Trial:
    """Holds streams by a word in host memory, so that the host can let them go whatever the device does."""

    def __init__(self, device: torch.device, driver: Driver):
        self._driver = driver
        self._word = torch.zeros(1, dtype=torch.int32, device="cpu", pin_memory=True)
        self._x = torch.zeros(1024, device=device)
        self._x.add_(1)  # loads the kernel
        torch.cuda._sleep(1000)
        torch.cuda.synchronize(device)

    def _hold(self, streams: list[torch.cuda.Stream]) -> None:
        self._word.zero_()
        for stream in streams:
            self._driver.wait(stream.cuda_stream, self._word.data_ptr(), 1)

    def _comes(self, event: torch.cuda.Event) -> bool:
        """Whether the event comes soon; whatever holds it is let go after."""
        deadline = time.monotonic() + _PATIENCE
        while not event.query() and time.monotonic() < deadline:
            pass
        came = event.query()
        self._word.fill_(1)
        torch.cuda.synchronize()
        return came

    def _held_by(self, stream: torch.cuda.Stream, others: list[torch.cuda.Stream]) -> bool:
        self._hold(others)
        event = torch.cuda.Event()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(1000)
            event.record()
        return not self._comes(event)

    def shares(self, stream: torch.cuda.Stream, others: list[torch.cuda.Stream]) -> bool:
        """Whether the others' waiting keeps this stream from running, or its waiting the current one."""
        return self._held_by(stream, others) or self._held_by(torch.cuda.current_stream(), [stream])

    def cost(self, held: torch.cuda.Stream | None) -> float:
        """Microseconds per small kernel on the current stream while ``held`` waits; the better of two tries."""
        times = []
        for _ in range(2):
            self._hold([held] if held else [])
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            torch.cuda._sleep(_SLEEP)
            begin.record()
            for _ in range(_KERNELS):
                self._x.add_(1)
            end.record()
            if not self._comes(end):
                return float("inf")
            times.append(begin.elapsed_time(end) * 1000 / _KERNELS)
        return min(times)
