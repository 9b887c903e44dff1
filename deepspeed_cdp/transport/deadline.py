"""Calls that may block without a timeout, made in threads."""

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, TypeVar

import torch

_T = TypeVar("_T")


class Late(Exception):
    """The call has not returned in time; its thread goes on."""


class Standby:
    """A daemon thread that starts now, and makes one call later: Python 3.12 starts no thread while it exits.

    Args:
        device: the thread's current device.
        name: of the thread.
    """

    def __init__(self, device: torch.device, name: str):
        self._device = device
        self._calls: SimpleQueue[Callable[[], Any]] = SimpleQueue()  # the thread takes the first
        self._results: list[Any] = []
        self._errors: list[BaseException] = []
        self._thread = threading.Thread(target=self._run, daemon=True, name=name)
        self._thread.start()

    def _run(self) -> None:
        call = self._calls.get()
        try:
            if self._device.type == "cuda":
                torch.cuda.set_device(self._device)
            self._results.append(call())
        except BaseException as error:  # ``result`` raises it
            self._errors.append(error)

    def begin(self, call: Callable[[], Any]) -> None:
        """Let the thread make ``call``, if it has had none."""
        self._calls.put(call)

    def result(self, seconds: float) -> Any:
        """The call's result.

        Raises:
            Late: it did not return within ``seconds``.
        """
        self._thread.join(seconds)
        if self._errors:
            raise self._errors.pop()  # no cycle of error, traceback, frame and list, which would keep callers' objects
        if not self._results:
            raise Late
        return self._results[0]


def call_within(seconds: float, call: Callable[[], _T], device: torch.device) -> _T:
    """``call()``, made in a daemon thread whose current device is ``device``.

    Raises:
        Late: it did not return within ``seconds``.
    """
    thread = Standby(device, "deepspeed_cdp connect")
    thread.begin(call)
    return thread.result(seconds)
