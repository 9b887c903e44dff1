"""Progress of a run on stderr: a bar on a terminal, otherwise a line now and then."""

import sys
import time

from tqdm import tqdm

_EVERY_SECONDS = 20.0


class Progress:
    """Counts windows.

    Args:
        total: number of windows, warm-ups included.
        shown: False on all ranks but one.
    """

    def __init__(self, total: int, shown: bool):
        self._total, self._shown, self._done, self._text = total, shown, 0, ""
        self._bar = tqdm(total=total, unit="window", file=sys.stderr) if shown and sys.stderr.isatty() else None
        self._told = self._begun = time.monotonic()

    def tell(self, text: str) -> None:
        """Show the current activity."""
        self._text = text or self._text
        if self._bar is not None:
            self._bar.set_description(self._text)
        elif self._shown and time.monotonic() - self._told > _EVERY_SECONDS:
            self._told = time.monotonic()
            print(
                f"[{self._told - self._begun:5.0f} s] {self._done} of {self._total} windows; {self._text}",
                file=sys.stderr,
                flush=True,
            )

    def advance(self, text: str) -> None:
        """Count a finished window, and show ``text`` (if any) as the current activity."""
        self._done += 1
        if self._bar is not None:
            self._bar.update()
        self.tell(text)

    def print(self, line: str) -> None:
        """Print a line on stdout without breaking the bar."""
        if self._bar is not None:
            tqdm.write(line, file=sys.stdout)
        else:
            print(line, flush=True)

    def close(self) -> None:
        """End the run."""
        if self._bar is not None:
            self._bar.close()
