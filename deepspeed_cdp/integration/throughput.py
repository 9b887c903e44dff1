"""DeepSpeed's ThroughputTimer on a GPU, without its device synchronize, which would delay messages at every step."""

from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.utils.timer import TIME_EPSILON, ThroughputTimer


class Event(Protocol):
    """The part of ``torch.cuda.Event(enable_timing=True)`` that is used here."""

    def record(self) -> None: ...

    def query(self) -> bool: ...

    def elapsed_time(self, end_event: Any, /) -> float: ...


class StreamThroughputTimer(ThroughputTimer):
    """Times steps by events of the current stream, and reads each event when it is done.

    The host's clock would time the enqueueing only, and steps would seem too fast. A report covers the steps that the device has
    finished: all but the one or two by which the host is ahead.

    Args:
        stock: the timer whose settings this one copies; it has not started.
        event: makes an event.
    """

    def __init__(self, stock: ThroughputTimer, event: Callable[[], Event]):
        super().__init__(stock.config, stock.batch_size, stock.start_step, stock.steps_per_output, logging_fn=stock.logging)
        self._event = event
        self._begin: Event | None = None
        self.step_elapsed_time = 0.0
        self._pending: deque[tuple[Event, Event, bool]] = deque()  # of micro-batches: begin, end, whether it is a step's last
        self._finished, self._latest = 0, 0.0  # steps that the device has finished, and the seconds of the last one

    def _record_event(self) -> Event:
        event = self._event()
        event.record()
        return event

    def start(self) -> None:
        """A micro-batch begins."""
        if self.config.enabled:
            self._init_timer()
            self.started = True
            self._begin = self._record_event() if self.global_step_count >= self.start_step else None

    def stop(self, global_step: bool = False, report_speed: bool = True) -> None:
        """A micro-batch ends; with ``global_step`` its step ends, too."""
        if not self.config.enabled or not self.started:
            return
        self.started = False
        self.micro_step_count += 1
        self.global_step_count += bool(global_step)
        if self._begin is None:
            return
        self._pending.append((self._begin, self._record_event(), global_step))
        self._collect()
        if global_step and report_speed and self._is_report_boundary() and self._finished:
            accelerator, gib = get_accelerator(), 1024**3
            self.logging(
                f"epoch={self.epoch_count}/micro_step={self.micro_step_count}/global_step={self.global_step_count}, "
                f"RunningAvgSamplesPerSec={self.avg_samples_per_sec()}, "
                f"CurrSamplesPerSec={self.batch_size / (self._latest + TIME_EPSILON)}, "
                f"MemAllocated={round(accelerator.memory_allocated() / gib, 2)}GB, "
                f"MaxMemAllocated={round(accelerator.max_memory_allocated() / gib, 2)}GB"
            )

    def _collect(self) -> None:
        while self._pending and all(event.query() for event in self._pending[0][:2]):  # a script may change streams in between
            begin, end, last = self._pending.popleft()
            seconds = begin.elapsed_time(end) / 1e3
            self.total_elapsed_time += seconds
            self.step_elapsed_time += seconds
            if last:
                self._finished += 1
                self._latest, self.step_elapsed_time = self.step_elapsed_time, 0.0

    def avg_samples_per_sec(self) -> float:
        """Over all timed steps that the device has finished."""
        return self.batch_size * self._finished / self.total_elapsed_time if self._finished else float("-inf")


def on_stream(timer: Any, device: torch.device) -> Any:
    """A timer for ``device``: on GPUs a ``StreamThroughputTimer`` with the settings of ``timer``, else ``timer`` itself."""
    if device.type == "cuda" and type(timer) is ThroughputTimer:
        return StreamThroughputTimer(timer, lambda: torch.cuda.Event(enable_timing=True))
    return timer
