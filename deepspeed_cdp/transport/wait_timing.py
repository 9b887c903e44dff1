"""How long the device waits for hand-offs, where it is the device that does: measured by events in one step of eight.

An event before and one behind each wait of the stream that the passes run on; the host reads them once they have passed, never
waiting for them. (Two calls for each of some sixty waits are not nothing for the host where steps are small.)
"""

from collections import defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple

EVERY = 8  # in a new run step 7 is the first: by then kernels are loaded and memory is settled

EdgeTimes = dict[tuple[str, int], float]


class Timed(NamedTuple):
    """What one step waited for.

    Attributes:
        step: its number; seconds: between the ends of the step before and of this one, on the device.
        come: seconds by (stream, peer) until messages had come; taken: until this rank's own had been taken.
    """

    step: int
    seconds: float
    come: EdgeTimes
    taken: EdgeTimes

    @property
    def busy(self) -> float:
        """Seconds in which the stream did not wait for others (an idle stream that waits for its own host counts as busy)."""
        return max(self.seconds - sum(self.come.values()) - sum(self.taken.values()), 1e-9)


class DeviceWaits:
    """One rank's.

    Args:
        mark: records an event on the current stream and returns it: it has ``query()``, and ``elapsed_time(later)`` in ms.
    Attributes:
        active: whether the step being made is timed.
        latest: the newest step whose events have passed; None before there is one.
    """

    def __init__(self, mark: Callable[[], Any]):
        self.mark, self.active = mark, False
        self.latest: Timed | None = None
        self._begun: Any = None
        self._waits: list[tuple[tuple[str, int], bool, Any, Any]] = []  # edge, whether something came, before, behind
        self._passing: tuple[int, Any, Any, list] | None = None  # step, its begin and end, its waits

    def note(self, edge: tuple[str, int], came: bool, before: Any) -> None:
        """The current stream has been given a wait since ``before``."""
        self._waits.append((edge, came, before, self.mark()))

    def end_step(self, step: int) -> bool:
        """The host has enqueued this step; True if ``latest`` is new."""
        if self.active:
            self._passing, self.active = (step, self._begun, self.mark(), self._waits), False
        fresh = self._passing is not None and self._passed(*self._passing[1:])
        if fresh:
            self.latest, self._passing = self._read(*self._passing), None
        if (step + 2) % EVERY == 0 and self._passing is None:
            self.active, self._begun, self._waits = True, self.mark(), []
        return fresh

    def drop(self) -> None:
        """What is being timed is not a step of the usual kind (the ring starts anew)."""
        self.active = False

    def forget(self) -> None:
        """Steps are numbered anew, from a checkpoint."""
        self.active, self._passing, self.latest = False, None, None

    @staticmethod
    def _passed(begin: Any, end: Any, waits: list) -> bool:
        """The events of a script that changes streams are not in order."""
        return all(event.query() for event in (end, begin, *(e for wait in waits for e in wait[2:])))

    @staticmethod
    def _read(step: int, begin: Any, end: Any, waits: list) -> Timed:
        sums: tuple[EdgeTimes, EdgeTimes] = defaultdict(float), defaultdict(float)
        for edge, came, before, behind in waits:
            sums[not came][edge] += before.elapsed_time(behind) / 1000
        return Timed(step, begin.elapsed_time(end) / 1000, dict(sums[0]), dict(sums[1]))
