"""The logic of the nccl transport (transport/rendezvous.py) without GPUs: two-rank gloo groups, where the host waits."""

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from deepspeed_cdp.errors import HandoffError
from deepspeed_cdp.transport.base import Edge, Ticket, Where
from deepspeed_cdp.transport.rendezvous import _DONE, Message, RendezvousTransport
from deepspeed_cdp.transport.store_exchange import StoreExchange


class GlooPairs(RendezvousTransport):
    """One gloo group per edge.

    Args:
        strict: a message's host waits where it begins, until both sides are there: the hardest reading of the order.
    """

    name = "pairs"

    def __init__(
        self,
        rank: int,
        size: int,
        timeout_seconds: float,
        store: dist.Store | None = None,
        name: str = "pairs",
        strict: bool = False,
    ):
        super().__init__(rank, size, timeout_seconds)
        self._store_exchange = StoreExchange(rank, size, timeout_seconds, store, name, f"rank {rank}, connecting")
        self._groups: dict[Edge, dist.ProcessGroupGloo] = {}
        self._patience, self._strict = timedelta(seconds=timeout_seconds), strict

    def _connect(self, edges: Sequence[Edge], where: Where) -> None:
        for edge in edges:
            if self.rank in edge[1:]:
                self._groups[edge] = self._store_exchange.ask(partial(self._make_group, edge), where)

    def _make_group(self, edge: Edge, store: dist.Store) -> dist.ProcessGroupGloo:
        prefix = dist.PrefixStore("/".join(map(str, edge)), store)
        return dist.ProcessGroupGloo(prefix, int(self.rank == edge[2]), 2, self._patience)

    def relay(self, work: Callable[[], Ticket | None], edge: Any = None) -> Any:
        return work() or SimpleNamespace(
            wait=lambda where: None
        )  # in the program's order, as the host of a device has it; here the host waits, too

    def _record_point(self) -> None:
        return None

    def _start(self, message: Message) -> dist.Work:
        side = message.side
        for ticket in message.after:
            ticket.wait("before a message")
        if side.incoming:
            work = self._groups[side.stream, side.peer, self.rank].recv([message.tensor], 0, 0)
        else:
            work = self._groups[side.stream, self.rank, side.peer].send([message.tensor], 1, 0)
        if self._strict and self._deferred:
            self._finish(message, work, f"rank {self.rank}, strictly")
        return work

    def _finish(self, message: Message, work: dist.Work, where: Where) -> None:
        side, started = message.side, time.perf_counter()
        try:
            work.wait(self._patience)
        except RuntimeError as error:
            what = "no message" if side.incoming else "nobody took the message"
            message.fail(f"{what} on stream {side.stream} with rank {side.peer} within {self.timeout_seconds} s: {error}")
            raise HandoffError(f"{where}: {message.reason}") from error
        if side.incoming:
            self.waited[side.stream, side.peer] += time.perf_counter() - started

    def _wait_started(self, message: Message, where: Where) -> None:
        if not (self._strict and self._deferred):
            self._finish(message, message.work, where)
        message.state, message.work = _DONE, None

    def _is_done(self, message: Message) -> bool:
        return False  # gloo cannot tell before wait

    def _finish_started(self, where: Where) -> None:
        for side in self._sides.values():
            for message in side.running:
                if not message.done():
                    self._wait_started(message, where)

    def _scratch(self, nbytes: int) -> torch.Tensor:
        return torch.zeros(nbytes, dtype=torch.uint8)

    def gather(self, value: Any, where: Where) -> list[Any]:
        self.collectives += 1
        return self._store_exchange.exchange(value, where)

    def broadcast(self, tensor: torch.Tensor, src: int, where: Where) -> None:
        self.collectives += 1
        values = self._store_exchange.exchange(tensor.tolist() if self.rank == src else None, where)
        tensor.copy_(torch.tensor(values[src], dtype=torch.uint8))

    def close(self, drain: bool) -> None:
        if drain:  # first: a send that is given up does not reach a peer that is still waiting for it
            self._store_exchange.exchange(None, "closing")
        self._fail_all(f"rank {self.rank} has closed its transport")
        self._groups.clear()
        self._store_exchange.close()
