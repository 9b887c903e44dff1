"""Exchange of small values outside training steps, through the store of ``torch.distributed``, with a timeout."""

import json
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from deepspeed_cdp.errors import WHY_MISSING, HandoffError
from deepspeed_cdp.transport.base import Where
from deepspeed_cdp.transport.bounded_store import BoundedStore, Closed, NoAnswer

_T = TypeVar("_T")
_SLICE = timedelta(seconds=1)  # longest wait for one key; in between, closed peers are looked for
_GONE = "the store is gone (rank 0 crashed or exited?)"


class StoreExchange:
    """The ranks of one transport, which exchange values and tell each other when they close.

    The constructor is collective. All ranks must construct theirs of one ``name`` in the same order: the store counts them.

    Args:
        rank, size: this rank and the number of ranks.
        timeout_seconds: how long an exchange waits for the other ranks, and for the store.
        store: default: the store of ``torch.distributed.init_process_group``.
        name: distinguishes transports that share a store.
        where: what the rank is doing; errors begin with it.
    Raises:
        HandoffError: not all ranks called, or the store does not answer.
    """

    def __init__(self, rank: int, size: int, timeout_seconds: float, store: dist.Store | None, name: str, where: str):
        self.rank, self.size, self.timeout_seconds = rank, size, timeout_seconds
        self._calls = 0  # the same on all ranks
        self._prefix, self._announced = "", False
        self._store = BoundedStore(dist.distributed_c10d._get_default_store() if store is None else store)
        try:
            instance = self.ask(lambda store: store.add(f"{name}/instances/{rank}", 1), where, "the store does not answer")
            self._prefix = f"{name}/{instance}"
            self.exchange(None, where)
        except BaseException:
            self.close(None)  # a rank that comes later finds this rank's value, and must not wait for its next one
            raise

    def ask(self, function: Callable[[dist.Store], _T], where: Where, failed: str = _GONE, deadline: float | None = None) -> _T:
        """``function(store)``, called by another thread; the store has this exchange's prefix.

        Args:
            failed: what an error of the store means.
            deadline: of ``time.monotonic``; default: after ``timeout_seconds``.
        Raises:
            HandoffError: the store does not answer in time, or raised an error.
        """
        deadline = time.monotonic() + self.timeout_seconds if deadline is None else deadline
        prefix = self._prefix
        try:
            return self._store.call(lambda store: function(dist.PrefixStore(prefix, store) if prefix else store), deadline)
        except HandoffError:
            raise
        except NoAnswer:
            raise HandoffError(f"{where}: {self._store.server} does not answer within {self.timeout_seconds} s") from None
        except Closed:
            raise HandoffError(f"{where}: rank {self.rank} has closed its transport") from None
        except RuntimeError as error:
            raise HandoffError(f"{where}: {failed}: {first_line(error)}") from error

    def exchange(self, value: Any, where: Where) -> list[Any]:
        """Collective: every rank's ``value`` (JSON-serializable), in rank order.

        Raises:
            HandoffError: a rank is missing or has closed, or the store is gone or does not answer.
        """
        call, text = self._calls, json.dumps(value)
        self._calls += 1
        deadline = time.monotonic() + self.timeout_seconds
        self.ask(lambda store: store.set(f"gather/{call}/{self.rank}", text), where, deadline=deadline)
        values = [json.loads(self._fetch(call, rank, deadline, where)) for rank in range(self.size)]
        if call:  # all ranks have read the previous call's values
            self.ask(lambda store: store.delete_key(f"gather/{call - 1}/{self.rank}"), where, deadline=deadline)
        return values

    def _fetch(self, call: int, rank: int, deadline: float, where: Where) -> bytes:
        def look(store: dist.Store) -> bytes | None:
            """The value; None if it has not come after a slice of time."""
            key, left = f"gather/{call}/{rank}", deadline - time.monotonic()
            if store.check([key]):
                return store.get(key)
            if left <= 0:
                missing = [r for r in range(self.size) if not store.check([f"gather/{call}/{r}"])]
                raise HandoffError(f"{where}: rank(s) {missing} missing after {self.timeout_seconds} s ({WHY_MISSING})")
            if store.check([f"closing/{rank}"]) and not store.check([key]):
                raise HandoffError(f"{where}: rank {rank} has closed its transport")
            try:
                store.wait([key], min(_SLICE, timedelta(seconds=max(left, 0.001))))  # 0 ms would mean: without a timeout
            except dist.DistStoreError:
                pass  # the slice has passed; an unreachable store raises another error
            return None

        while (value := self.ask(look, where, deadline=deadline)) is None:
            pass
        return value

    def announce(self, final_value: Any) -> None:
        """Tell the other ranks that this rank makes no further exchange, if they can be told.

        Args:
            final_value: for ``closing_value`` (JSON-serializable, not None if anybody reads it).
        """
        self._announced, text = True, json.dumps(final_value)
        try:
            self.ask(lambda store: store.set(f"closing/{self.rank}", text), "")
        except HandoffError:
            pass  # the store is gone or frozen, and rank 0 with it

    def close(self, final_value: Any = None) -> None:
        """``announce``, unless that was done, and disconnect from the store."""
        if not self._announced:
            self.announce(final_value)
        self._store.close()

    def closing_value(self, rank: int) -> Any:
        """The ``final_value`` of a rank that has closed; None if it has not.

        Raises:
            HandoffError: the store is gone or does not answer.
        """
        key = f"closing/{rank}"
        text = self.ask(lambda store: store.get(key) if store.check([key]) else b"null", "")
        return json.loads(text)


def first_line(error: BaseException) -> str:
    """An error's text without the C++ stack that torch appends."""
    return str(error).split("\n", 1)[0].strip()
