"""Exchange of small values outside training steps, through the store of ``torch.distributed``, with a timeout."""

import json
import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from deepspeed_cdp.errors import WHY_MISSING, HandoffError
from deepspeed_cdp.transport.base import Where

_SLICE = timedelta(seconds=1)  # longest wait for one key; in between, closed peers are looked for


class StoreExchange:
    """The ranks of one transport, which exchange values and tell each other when they close.

    The constructor is collective. All ranks must construct theirs of one ``name`` in the same order: the store counts them.

    Args:
        rank, size: this rank and the number of ranks.
        timeout_seconds: how long an exchange waits for the other ranks.
        store: default: the store of ``torch.distributed.init_process_group``.
        name: distinguishes transports that share a store.
        where: what the rank is doing; errors begin with it.
    Raises:
        HandoffError: not all ranks called.
    """

    def __init__(self, rank: int, size: int, timeout_seconds: float, store: dist.Store | None, name: str, where: str):
        self.rank, self.size, self.timeout_seconds = rank, size, timeout_seconds
        self._calls = 0  # the same on all ranks
        store = dist.distributed_c10d._get_default_store() if store is None else store
        try:
            instance = store.add(f"{name}/instances/{rank}", 1)
        except RuntimeError as error:
            raise HandoffError(f"{where}: the store does not answer: {first_line(error)}") from error
        self.store = dist.PrefixStore(f"{name}/{instance}", store)
        try:
            self.exchange(None, where)
        except BaseException:
            self.close(None)  # a rank that comes later finds this rank's value, and must not wait for its next one
            raise

    def exchange(self, value: Any, where: Where) -> list[Any]:
        """Collective: every rank's ``value`` (JSON-serializable), in rank order.

        Raises:
            HandoffError: a rank is missing or has closed, or the store is gone.
        """
        call, store = self._calls, self.store
        self._calls += 1
        deadline = time.monotonic() + self.timeout_seconds
        try:
            store.set(f"gather/{call}/{self.rank}", json.dumps(value))
            values = [json.loads(self._fetch(call, rank, deadline, where)) for rank in range(self.size)]
            if call:
                store.delete_key(f"gather/{call - 1}/{self.rank}")  # all ranks have read the previous call's values
        except RuntimeError as error:
            if isinstance(error, HandoffError):
                raise
            raise HandoffError(f"{where}: the store is gone (rank 0 crashed or exited?): {first_line(error)}") from error
        return values

    def _fetch(self, call: int, rank: int, deadline: float, where: Where) -> bytes:
        store, key = self.store, f"gather/{call}/{rank}"
        while not store.check([key]):
            left = deadline - time.monotonic()
            if left <= 0:
                missing = [r for r in range(self.size) if not store.check([f"gather/{call}/{r}"])]
                raise HandoffError(f"{where}: rank(s) {missing} missing after {self.timeout_seconds} s ({WHY_MISSING})")
            if store.check([f"closing/{rank}"]) and not store.check([key]):
                raise HandoffError(f"{where}: rank {rank} has closed its transport")
            try:
                store.wait([key], min(_SLICE, timedelta(seconds=max(left, 0.001))))  # 0 ms would mean: without a timeout
            except dist.DistStoreError:
                pass  # the slice has passed; an unreachable store raises another error
        return store.get(key)

    def close(self, final_value: Any) -> None:
        """Tell the other ranks that this rank makes no further exchange.

        Args:
            final_value: for ``closing_value`` (JSON-serializable, not None if anybody reads it).
        """
        try:
            self.store.set(f"closing/{self.rank}", json.dumps(final_value))
        except RuntimeError:
            pass  # the store is gone: rank 0 has ended

    def closing_value(self, rank: int) -> Any:
        """The ``final_value`` of a rank that has closed; None if it has not.

        Raises:
            RuntimeError: the store is gone.
        """
        key = f"closing/{rank}"
        return json.loads(self.store.get(key)) if self.store.check([key]) else None


def first_line(error: BaseException) -> str:
    """An error's text without the C++ stack that torch appends."""
    return str(error).split("\n", 1)[0].strip()
