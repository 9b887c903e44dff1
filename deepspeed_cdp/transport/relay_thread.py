"""A thread that relays messages for an owner, on transports whose host waits."""

import queue
import threading
import time
from collections.abc import Callable
from typing import Any

from deepspeed_cdp.errors import HandoffError

_here = threading.local()


def relaying() -> bool:
    """Whether this thread relays, so that it holds up nobody when it waits."""
    return getattr(_here, "relaying", False)


class Begun:
    """A piece of work of a ``RelayThread``.

    Args:
        count_wait: called with the seconds for which somebody has waited for it.
    """

    def __init__(self, count_wait: Callable[[float], None]):
        self._done, self._count_wait = threading.Event(), count_wait
        self._error: BaseException | None = None
        self.result: Any = None

    def run(self, work: Callable[[], Any], failed: BaseException | None) -> BaseException | None:
        """Do the work, unless an earlier one failed. Returns the error."""
        try:
            self.result = None if failed else work()
            self._error = failed
        except BaseException as error:  # the rank that waits raises it
            self._error = error
        self._done.set()
        return self._error

    def done(self) -> bool:
        return self._done.is_set()

    def wait(self, where: object) -> None:
        """Wait until the work is done. Every message that it waits for has a timeout, so this ends.

        Raises:
            HandoffError: the work, or an earlier one, failed; or the error that was raised in it.
        """
        if not self._done.is_set():
            started = time.perf_counter()
            self._done.wait()
            self._count_wait(time.perf_counter() - started)
        if isinstance(self._error, HandoffError):
            raise HandoffError(str(self._error)) from self._error
        if self._error is not None:
            raise self._error


class RelayTicket:
    """The ticket that a piece of work returns, before it does."""

    counted = True

    def __init__(self, count_wait: Callable[[float], None]):
        self.begun = Begun(count_wait)

    def wait(self, where: object) -> None:
        self.begun.wait(where)
        if self.begun.result is not None:
            self.begun.result.wait(where)

    def done(self) -> bool:
        return self.begun.done() and (self.begun.result is None or self.begun.result.done())


class RelayThread:
    """Does pieces of work one after the other. After an error, all later ones fail with it.

    Attributes:
        thread: ends after ``stop``.
    """

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._run, daemon=True, name="deepspeed_cdp relay")
        self.thread.start()

    def begin(self, work: Callable[[], Any], count_wait: Callable[[float], None] = lambda seconds: None) -> RelayTicket:
        """Queue a piece of work; ``count_wait`` as of ``Begun``."""
        ticket = RelayTicket(count_wait)
        self._queue.put((work, ticket.begun))
        return ticket

    def stop(self) -> None:
        """End the thread after what is queued."""
        self._queue.put(None)

    def _run(self) -> None:
        _here.relaying, failed = True, None
        while item := self._queue.get():
            failed = item[1].run(item[0], failed)
