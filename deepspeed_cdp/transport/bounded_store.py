"""A client of a ``torch.distributed`` store whose calls end by a deadline even if the store's server is frozen or unreachable.

``TCPStore`` waits without a timeout for its server's answers, and even ``wait`` with a timeout waits for the answer to its
cancellation. So a thread makes the calls, and the caller waits for the thread. It uses the process group's own client: a server
that accepts a connection looks the client's name up, which stops it for seconds where no name server answers.
"""

import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from queue import SimpleQueue
from typing import Any, TypeVar

import torch.distributed as dist

_T = TypeVar("_T")
_GRACE_SECONDS = 1.0  # after the deadline, for an answer on its way: this process itself may have been stopped meanwhile


class NoAnswer(RuntimeError):
    """The store has not answered by the deadline, now or in an earlier call."""


class Closed(RuntimeError):
    """The client is closed."""


class BoundedStore:
    """See the module's docstring. The constructor does not wait for the store.

    Args:
        store: the client that the thread uses. A call that the server never answers holds its lock for good.
    Attributes:
        server: the process that hosts the store, as the subject of a sentence.
    """

    def __init__(self, store: dist.Store):
        self.server = _server(store)
        self._refusal: type[RuntimeError] | None = None  # what further calls raise
        self._requests: SimpleQueue[tuple[Future, Callable[[dist.Store], Any]] | None] = SimpleQueue()
        self._thread = threading.Thread(target=_serve, args=(store, self._requests), daemon=True, name="deepspeed_cdp store")
        self._thread.start()

    def __del__(self) -> None:
        # Not weakref.finalize: its callback would end the thread before the __del__ of an engine in the same garbage asks it.
        self._refusal = self._refusal or Closed
        self._requests.put(None)

    def call(self, function: Callable[[dist.Store], _T], deadline: float) -> _T:
        """``function(client)``, by ``deadline`` (of ``time.monotonic``) and a second. Once it was late, all later calls fail.

        Raises:
            NoAnswer, Closed: see there.
            RuntimeError: from the store.
        """
        if self._refusal:
            raise self._refusal
        future: Future[_T] = Future()
        self._requests.put((future, function))
        try:
            for seconds in (deadline - time.monotonic(), _GRACE_SECONDS):
                try:
                    return future.result(max(seconds, 0.0))
                except FutureTimeout:
                    if future.done():
                        return future.result()
        finally:
            del future  # else an error, its traceback, this frame and the future would be a cycle, which keeps GPU memory
        self._refusal = NoAnswer
        raise NoAnswer

    def close(self) -> None:
        """Disconnect and end the thread. A thread that waits for a frozen server ends once that server answers or is gone."""
        self._requests.put(None)
        if not self._refusal:
            self._refusal = Closed
            self._thread.join(_GRACE_SECONDS)


def _serve(store: dist.Store, requests: SimpleQueue) -> None:
    """The thread. It holds no reference to the BoundedStore, whose end ends it."""
    while (request := requests.get()) is not None:
        future, function = request
        try:
            future.set_result(function(store))
        except BaseException as error:
            future.set_exception(error.with_traceback(None))  # its frames would keep the connection open
        del request, future, function


def _innermost(store: dist.Store) -> dist.Store:
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return store


def _server(store: dist.Store) -> str:
    """See ``BoundedStore``."""
    if not isinstance(_innermost(store), dist.TCPStore):
        return "the store"
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return f"{'the agent of torchrun' if agent else 'rank 0'}, which hosts the store,"
