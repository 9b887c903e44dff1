"""Where ranks meet outside training steps: small values through the store of ``torch.distributed``, with a timeout."""

import json
import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from deepspeed_cdp.errors import APART, HandoffError
from deepspeed_cdp.transport.base import Where

_SLICE = timedelta(seconds=1)  # the store is waited for in slices, so that a closing peer is noticed


class StoreExchange:
    """The ranks of one transport instance.

    All ranks must make theirs of one ``name`` in the same order: instances are numbered through the store.

    Args:
        store: default: the store of ``torch.distributed.init_process_group``.
        name: keeps apart the transports that share a store.
        where: for the error.
    Raises:
        HandoffError: not all ranks came.
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
        self.exchange(None, where)

    def exchange(self, value: Any, where: Where) -> list[Any]:
        """Collective: every rank's ``value`` (what json can carry), in rank order.

        Raises:
            HandoffError: a rank is missing, has closed, or the store is gone.
        """
        call, store = self._calls, self.store
        self._calls += 1
        deadline = time.monotonic() + self.timeout_seconds
        try:
            store.set(f"gather/{call}/{self.rank}", json.dumps(value))
            values = [json.loads(self._fetch(call, rank, deadline, where)) for rank in range(self.size)]
            if call:
                store.delete_key(f"gather/{call - 1}/{self.rank}")  # everybody has read the call before
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
                raise HandoffError(f"{where}: rank(s) {missing} missing after {self.timeout_seconds} s ({APART})")
            if store.check([f"closing/{rank}"]) and not store.check([key]):
                raise HandoffError(f"{where}: rank {rank} has closed its transport")
            try:
                store.wait([key], min(_SLICE, timedelta(seconds=left)))
            except dist.DistStoreError:
                pass  # a slice went by; an unreachable store raises another error
        return store.get(key)

    def close(self, last_words: Any) -> None:
        """Tell the others that this rank takes part no more, and ``last_words``."""
        try:
            self.store.set(f"closing/{self.rank}", json.dumps(last_words))
        except RuntimeError:
            pass  # the store is gone, and so is rank 0

    def closed(self, rank: int) -> Any:
        """A closing rank's last words; None before it closes.

        Raises:
            RuntimeError: the store is gone.
        """
        key = f"closing/{rank}"
        return json.loads(self.store.get(key)) if self.store.check([key]) else None


def first_line(error: BaseException) -> str:
    """An error's text without its stack of C++ frames."""
    return str(error).split("\n", 1)[0].strip()
