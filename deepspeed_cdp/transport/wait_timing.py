"""How long the passes' CUDA stream waits for messages, measured with timing events in one step of eight.

Two timing events enclose each wait. The host reads them once they have passed, and never waits for them. Timing every step would
cost the host two calls per wait.
"""

from collections import defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple

EVERY = 8  # steps from one timed step to the next; step 7 is the first: by then kernels are loaded and memory is allocated

EdgeTimes = dict[tuple[str, int], float]


class StepTiming(NamedTuple):
    """The waits of one step, on the device.

    Attributes:
        step: its number.
        seconds: from the end of the previous step to the end of this one.
        come: seconds until messages arrived, by (stream, peer).
        taken: seconds until peers took messages, by (stream, peer).
    """

    step: int
    seconds: float
    come: EdgeTimes
    taken: EdgeTimes

    @property
    def busy(self) -> float:
        """Seconds without a wait for peers. A stream that is idle because its host is slow counts as busy."""
        return max(self.seconds - sum(self.come.values()) - sum(self.taken.values()), 1e-9)


class WaitTiming:
    """Times the waits of one rank.

    Args:
        mark: records a timing event on the current stream and returns it; as ``torch.cuda.Event`` it has ``query()``, and
            ``elapsed_time(later)`` in milliseconds.
    Attributes:
        active: the current step is timed.
        latest: timing of the newest step whose events have passed; None before the first.
    """

    def __init__(self, mark: Callable[[], Any]):
        self.mark, self.active = mark, False
        self.latest: StepTiming | None = None
        self._begun: Any = None
        self._waits: list[
            tuple[tuple[str, int], bool, Any, Any]
        ] = []  # edge, whether it waited for an arrival, event before, event after
        self._passing: tuple[int, Any, Any, list] | None = None  # step, its begin and end, its waits

    def note(self, edge: tuple[str, int], came: bool, before: Any) -> None:
        """Record a wait that was enqueued after event ``before``.

        Args:
            edge: (stream, peer).
            came: it waits for a message to arrive; else for a peer to take one.
        """
        self._waits.append((edge, came, before, self.mark()))

    def end_step(self, step: int) -> bool:
        """End the step that the host has enqueued. Returns whether ``latest`` is new."""
        if self.active:
            self._passing, self.active = (step, self._begun, self.mark(), self._waits), False
        passing = self._passing
        fresh = passing is not None and self._passed(*passing[1:])
        if passing is not None and fresh:
            self.latest, self._passing = self._read(*passing), None
        if (step + 2) % EVERY == 0 and self._passing is None:
            self.active, self._begun, self._waits = True, self.mark(), []
        return fresh

    def drop(self) -> None:
        """Discard the current step's timing: a flush is not a normal step."""
        self.active = False

    def forget(self) -> None:
        """Discard all timing: a checkpoint was loaded, and steps have other numbers."""
        self.active, self._passing, self.latest = False, None, None

    @staticmethod
    def _passed(begin: Any, end: Any, waits: list) -> bool:
        """Whether all events have passed. A script that changes streams may record them out of order."""
        return all(event.query() for event in (end, begin, *(e for wait in waits for e in wait[2:])))

    @staticmethod
    def _read(step: int, begin: Any, end: Any, waits: list) -> StepTiming:
        sums: tuple[EdgeTimes, EdgeTimes] = defaultdict(float), defaultdict(float)
        for edge, came, before, after in waits:
            sums[not came][edge] += before.elapsed_time(after) / 1000
        return StepTiming(step, begin.elapsed_time(end) / 1000, dict(sums[0]), dict(sums[1]))
