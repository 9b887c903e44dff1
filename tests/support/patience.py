"""Time limits that guard against hangs grow with the machine's load. Limits that a test is about stay as they are."""

import os
import time
from pathlib import Path

MOST = 8.0  # however busy the machine is


def busyness() -> float:
    """How many times longer work takes than on an idle machine: processes that want a core, by cores; 1 to MOST."""
    load = Path("/proc/loadavg")  # third of its fields: running, of all; the averages lag behind
    running = int(load.read_text().split()[3].split("/")[0]) if load.exists() else 1
    return min(max(1.0, os.getloadavg()[0] / os.cpu_count(), running / os.cpu_count()), MOST)


def patience(seconds: float) -> float:
    """``seconds`` on an idle machine, more on a busy one."""
    return seconds * busyness()


class Patience:
    """A deadline that moves: a second counts as less the busier the machine is while it passes."""

    def __init__(self, seconds: float):
        self._seconds, self._seen = seconds, time.monotonic()

    def left(self) -> float:
        """Seconds until the deadline if the load stays as it is; not above 0 once the deadline has passed."""
        now, busy = time.monotonic(), busyness()
        self._seconds -= (now - self._seen) / busy
        self._seen = now
        return self._seconds * busy

    def shorten(self, seconds: float) -> None:
        """No more than ``seconds`` from now on."""
        self.left()
        self._seconds = min(self._seconds, seconds)
