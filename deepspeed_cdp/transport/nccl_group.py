"""A pipeline's messages on GPUs: torch's NCCL, with a process group of two ranks for each direction between two ranks.

The class keeps as much of ``base.Transport``'s contract as a pipeline needs. A message is an ``isend`` or ``irecv`` on the CUDA
stream of its group. ``wait`` makes the current CUDA stream wait; the host goes on.

A NCCL kernel holds a few multiprocessors until the other side has come, and kernels may share one hardware queue. All ranks start
their messages in one order (the keys of plan/pipeline_schedule.py), and each waits for smaller keys only. So no cycle is possible
even if every kernel blocks every other.

``wait`` raises HandoffError if the oldest message that was waited for is overdue. If instead the host blocks in a read of its own
(``loss.item()``), NCCL's watchdog ends the process.
"""

import time
from collections import deque
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from deepspeed_cdp.errors import WHY_MISSING, HandoffError
from deepspeed_cdp.transport.base import Ticket, Transport, Where
from deepspeed_cdp.transport.deadline import Late, call_within
from deepspeed_cdp.transport.store_exchange import StoreExchange


class _Ticket:
    """One side of one message; keeps its tensor alive until it was waited for."""

    __slots__ = ("transport", "stream", "peer", "receiving", "tensor", "work", "counted")

    def __init__(
        self,
        transport: "NcclGroupTransport",
        stream: str,
        peer: int,
        receiving: bool,
        tensor: torch.Tensor | None,
        work: dist.Work | None,
    ):
        self.transport, self.stream, self.peer, self.receiving = transport, stream, peer, receiving
        self.tensor, self.work, self.counted = tensor, work, True  # when it is posted

    def done(self) -> bool:
        return self.work is None or self.work.is_completed()

    def wait(self, where: Where) -> None:
        if self.work is None:
            return
        self.work.wait()  # enqueues: the current CUDA stream waits
        self.transport.expect(self, where)
        self.work = self.tensor = None


class NcclGroupTransport(Transport):
    """See the module's docstring. The constructor is collective.

    Args:
        rank, size: this rank and the number of ranks: all those of the default process group.
        timeout_seconds: how long the device waits for a peer before this rank raises HandoffError.
        device: this rank's GPU.
        backend: of torch.distributed; tests use "gloo" on CPUs.
    Raises:
        HandoffError: not all ranks called.
    """

    name = "NCCL"
    host_waits = False

    def __init__(self, rank: int, size: int, timeout_seconds: float, device: torch.device, backend: str = "nccl"):
        super().__init__(rank, size, timeout_seconds)
        self._device, self._closed = device, False
        self._expected: deque[tuple[dist.Work, torch.Tensor | None, str, float]] = (
            deque()
        )  # work, its tensor, error text, time of wait
        where = f"rank {rank}, connecting the {size} ranks"
        self._store_exchange = StoreExchange(rank, size, timeout_seconds, None, "deepspeed_cdp_pipe", where)
        try:
            self._groups = call_within(timeout_seconds, partial(self._make_groups, backend), device)
        except Late:
            self._store_exchange.close(None)
            raise HandoffError(f"{where}: no process groups within {timeout_seconds} s ({WHY_MISSING})") from None
        except BaseException:
            self._store_exchange.close(None)  # the other ranks need not wait
            raise

    def _make_groups(self, backend: str) -> dict[tuple[int, int], dist.ProcessGroup]:
        """A group per direction between two ranks; each connects at its first message."""
        return {
            (src, dst): dist.new_group([src, dst], timeout=timedelta(seconds=self.timeout_seconds), backend=backend)
            for src in range(self.size)
            for dst in range(self.size)
            if src != dst
        }

    def post(
        self, stream: str, src: int, into: torch.Tensor, after: Sequence[Ticket] = (), where: Where = "", remote_offset: int = -1
    ) -> _Ticket:
        for ticket in after:
            ticket.wait(where)
        work = dist.irecv(into, src, self._groups[src, self.rank]) if into.numel() else None
        self.count((stream, src), into.numel())
        return _Ticket(self, stream, src, True, into, work)

    def push(self, stream: str, dst: int, source: torch.Tensor, after: Ticket | None = None, remote_offset: int = -1) -> _Ticket:
        work = dist.isend(source, dst, self._groups[self.rank, dst]) if source.numel() else None
        self.sent[stream, dst] += 1
        self.bytes_sent[stream, dst] += source.numel()
        return _Ticket(self, stream, dst, False, source, work)

    def expect(self, ticket: _Ticket, where: Where) -> None:
        """Expect the message within the timeout, now that the device waits for it.

        Raises:
            HandoffError: the oldest expected message is overdue.
        """
        assert ticket.work is not None
        what = "no message" if ticket.receiving else "nobody took the message"
        whose = f"{'from' if ticket.receiving else 'for'} rank {ticket.peer}"
        text = f"{where}: {what} on stream {ticket.stream} {whose} within {self.timeout_seconds} s"
        self._expected.append((ticket.work, ticket.tensor, text, time.monotonic()))
        while self._expected and self._expected[0][0].is_completed():
            self._expected.popleft()
        if self._expected and time.monotonic() - self._expected[0][3] > self.timeout_seconds:
            raise HandoffError(self._expected[0][2])

    def gather(self, value: Any, where: Where) -> list[Any]:
        self.collectives += 1
        return self._store_exchange.exchange(value, str(where))

    def broadcast(self, tensor: torch.Tensor, src: int, where: Where) -> None:
        raise NotImplementedError("a pipeline broadcasts nothing")

    def reset(self, where: Where) -> None:
        raise NotImplementedError("a pipeline's flush leaves no message under way")

    def close(self, drain: bool) -> None:
        if self._closed:
            return
        self._closed = True
        try:
            if drain and self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
        finally:
            self._store_exchange.close(None)
            self._expected.clear()
