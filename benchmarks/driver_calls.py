"""Host time of CUDA driver calls, by kind: ``python -m benchmarks.driver_calls`` (copies go to a second GPU, if any).

It prints microseconds, medians of 7 x 30 calls: in sequence (alone), and the time that each adds between launches of small
kernels.

====  =============================================================================================================
idle  the device has no other work
busy  matrix products are queued on the passes' stream
held  other streams wait for a word in memory, as the transport's streams do, some of them behind a copy
====  =============================================================================================================
"""

import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from deepspeed_cdp.transport.cuda_bindings import CudaBindings

CALLS, TURNS, LANES = 30, 7, 6


class Bench:
    """Streams, words and events to call the driver with."""

    def __init__(self) -> None:
        torch.cuda.set_device(0)
        self.driver = CudaBindings()
        self.words = torch.zeros(64, dtype=torch.int32, device="cuda")
        self.gate = torch.zeros(1, dtype=torch.int32, device="cpu", pin_memory=True)
        self.source = torch.zeros(1 << 20, dtype=torch.uint8, device="cuda")
        self.there = torch.zeros(1 << 20, dtype=torch.uint8, device=f"cuda:{min(1, torch.cuda.device_count() - 1)}")
        self.there.copy_(self.source)
        self.matrix = torch.randn(2048, 2048, device="cuda", dtype=torch.bfloat16)
        self.lane = torch.cuda.Stream(priority=-1)
        self.held = [torch.cuda.Stream(priority=-1) for _ in range(LANES)]
        self.current = torch.cuda.current_stream().cuda_stream
        self.events = [self.driver.create_event(), self.driver.create_event()]
        self.driver.record_event(self.events[0], self.lane.cuda_stream)
        self.driver.record_event(self.events[1], self.current)
        self._small()
        self.matrix @ self.matrix  # a kernel's first use loads it, which waits for all streams: not while some are held
        torch.cuda.synchronize()

    def _small(self) -> None:
        torch.mm(self.matrix[:64], self.matrix[:, :64])

    def kinds(self) -> dict[str, Callable[[], None]]:
        """The driver calls of the transport, and two for comparison."""
        d, lane, word = self.driver, self.lane.cuda_stream, self.words.data_ptr()
        return {
            "write": lambda: d.write_value(lane, word, 1),
            "wait": lambda: d.wait_value(lane, word, 0),
            "wait on the passes' stream": lambda: d.wait_value(self.current, word, 0),
            "copy": lambda: d.copy(lane, self.there.data_ptr(), self.source.data_ptr(), 4096),
            "record": lambda: d.record_event(self.events[0], lane),
            "record on the passes' stream": lambda: d.record_event(self.events[1], self.current),
            "follow": lambda: d.wait_event(lane, self.events[1]),
            "follow on the passes' stream": lambda: d.wait_event(self.current, self.events[0]),
            "query of an event": lambda: d.event_done(self.events[0]),
            "kernel": self._small,
        }

    @contextmanager
    def busy(self) -> Iterator[None]:
        """A few milliseconds of work on the passes' stream."""
        for _ in range(12):
            self.matrix @ self.matrix
        yield

    @contextmanager
    def holding(self) -> Iterator[None]:
        """Streams wait until the host releases them."""
        self.gate.zero_()
        for i, stream in enumerate(self.held):
            self.driver.wait_value(stream.cuda_stream, self.gate.data_ptr(), 1)
            if i % 2:
                self.driver.copy(stream.cuda_stream, self.there.data_ptr(), self.source.data_ptr(), 4096)
        try:
            with self.busy():
                yield
        finally:
            self.gate.fill_(1)

    @contextmanager
    def idle(self) -> Iterator[None]:
        yield

    def cost(self, call: Callable[[], None], state: Callable) -> tuple[float, float]:
        """Microseconds of a call alone, and between kernels."""
        alone, between = [], []
        for _ in range(TURNS):
            with state():
                begun = time.perf_counter()
                for _ in range(CALLS):
                    call()
                called = time.perf_counter()
                for _ in range(CALLS):
                    self._small()
                plain = time.perf_counter()
                for _ in range(CALLS):
                    self._small()
                    call()
                both = time.perf_counter()
            torch.cuda.synchronize()
            alone.append((called - begun) / CALLS)
            between.append((both - plain - (plain - called)) / CALLS)
        return 1e6 * statistics.median(alone), 1e6 * statistics.median(between)


def main() -> int:
    if not torch.cuda.is_available():
        print("no GPU is here, and the calls are its driver's", file=sys.stderr)
        return 2
    bench = Bench()
    print(f"{torch.cuda.get_device_name()} x {torch.cuda.device_count()}, torch {torch.__version__}\n")
    print("| call | " + " | ".join(f"{s}, alone | between kernels" for s in ("idle", "busy", "held")) + " |\n" + "|---" * 7 + "|")
    for name, call in bench.kinds().items():
        cells = [f"{x:.1f}" for state in (bench.idle, bench.busy, bench.holding) for x in bench.cost(call, state)]
        print(f"| {name} | {' | '.join(cells)} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
