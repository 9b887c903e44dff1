"""How long the passes' CUDA stream waits for messages, measured with timing events in one step of eight.

Two timing events enclose each wait. The host reads them once they are done, and never waits for them. Timing every step would
cost the host two calls per wait.
"""

from collections import defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple

EVERY = 8  # steps from one timed step to the next; step 7 is the first: by then kernels are loaded and memory is allocated

EdgeTimes = dict[tuple[str, int], float]
_Wait = tuple[tuple[str, int], bool, Any, Any]  # edge, whether it waited for an arrival, event before, event after


class StepTiming(NamedTuple):
    """The waits of one step, on the device.

    Attributes:
        step: its number.
        seconds: from the end of the previous step to the end of this one.
        receive_waits: seconds until messages arrived, by (stream, peer).
        send_waits: seconds until peers took messages, by (stream, peer).
    """

    step: int
    seconds: float
    receive_waits: EdgeTimes
    send_waits: EdgeTimes

    @property
    def busy(self) -> float:
        """Seconds without a wait for peers. A stream that is idle because its host is slow counts as busy."""
        return max(self.seconds - sum(self.receive_waits.values()) - sum(self.send_waits.values()), 1e-9)


class WaitTiming:
    """Times the waits of one rank.

    Args:
        record_event: records a timing event on the current stream and returns it; as ``torch.cuda.Event`` it has ``query()``,
            and ``elapsed_time(later)`` in milliseconds.
    Attributes:
        active: the current step is timed.
        latest: timing of the newest step whose events are done; None before the first.
    """

    def __init__(self, record_event: Callable[[], Any]):
        self.record_event, self.active = record_event, False
        self.latest: StepTiming | None = None
        self._begin: Any = None  # event at the begin of the current step
        self._waits: list[_Wait] = []  # of the current step
        self._pending: tuple[int, Any, Any, list[_Wait]] | None = None  # step, its begin and end, its waits; not read yet

    def record_wait(self, edge: tuple[str, int], receiving: bool, before: Any) -> None:
        """Record a wait that was enqueued after event ``before``.

        Args:
            edge: (stream, peer).
            receiving: it waits for a message to arrive; else for a peer to take one.
        """
        self._waits.append((edge, receiving, before, self.record_event()))

    def end_step(self, step: int) -> bool:
        """End the step that the host has enqueued. Returns whether ``latest`` is new."""
        if self.active:
            self._pending, self.active = (step, self._begin, self.record_event(), self._waits), False
        pending = self._pending
        done = pending is not None and self._done(*pending[1:])
        if pending is not None and done:
            self.latest, self._pending = self._read(*pending), None
        if (step + 2) % EVERY == 0 and self._pending is None:
            self.active, self._begin, self._waits = True, self.record_event(), []
        return done

    def discard_step(self) -> None:
        """Discard the current step's timing: a flush is not a normal step."""
        self.active = False

    def reset(self) -> None:
        """Discard all timing: a checkpoint was loaded, and steps have other numbers."""
        self.active, self._pending, self.latest = False, None, None

    @staticmethod
    def _done(begin: Any, end: Any, waits: list[_Wait]) -> bool:
        """Whether all events are done. A script that changes streams may record them out of order."""
        return all(event.query() for event in (end, begin, *(e for wait in waits for e in wait[2:])))

    @staticmethod
    def _read(step: int, begin: Any, end: Any, waits: list[_Wait]) -> StepTiming:
        sums: tuple[EdgeTimes, EdgeTimes] = defaultdict(float), defaultdict(float)
        for edge, receiving, before, after in waits:
            sums[not receiving][edge] += before.elapsed_time(after) / 1000
        return StepTiming(step, begin.elapsed_time(end) / 1000, dict(sums[0]), dict(sums[1]))
