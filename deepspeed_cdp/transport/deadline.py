"""Calls that may block without a timeout, made in a thread."""

import threading
from collections.abc import Callable
from typing import TypeVar

import torch

_T = TypeVar("_T")


class Late(Exception):
    """The call has not returned in time; its thread goes on."""


def call_within(seconds: float, call: Callable[[], _T], device: torch.device) -> _T:
    """``call()``, made in a daemon thread whose current device is ``device``.

    Raises:
        Late: it did not return within ``seconds``.
    """
    results: list[_T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            if device.type == "cuda":
                torch.cuda.set_device(device)
            results.append(call())
        except BaseException as error:  # raised below
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True, name="deepspeed_cdp connect")
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors.pop()  # no cycle of error, traceback, frame and list, which would keep callers' objects
    if not results:
        raise Late
    return results[0]
