"""A pipeline's messages on GPUs: torch's NCCL, a group of two ranks for each direction between two ranks.

``base.Transport``'s contract as far as a pipeline needs it. A message is an ``isend`` or ``irecv`` on its group's own CUDA
stream; waiting is done by the current stream, the host goes on. A NCCL kernel holds a few multiprocessors until the other
side has come, and kernels may end up in one hardware queue; but all ranks begin their messages in one order (the keys of
schedule.py), and each waits for smaller keys only, so even kernels that all block one another cannot close a circle.

The host runs ahead of the device. ``wait`` looks whether the oldest message that was waited for is overdue, and raises with
the words of the instruction that waited; where the host blocks in a read of its own (``loss.item()``), NCCL's watchdog ends
the process instead.
"""

import time
from collections import deque
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from deepspeed_cdp.errors import HandoffError
from deepspeed_cdp.transport.base import Ticket, Transport, Where
from deepspeed_cdp.transport.store_exchange import StoreExchange


class _Ticket:
    """One side of one message; keeps its memory until it was waited for."""

    __slots__ = ("transport", "stream", "peer", "receiving", "tensor", "work")

    def __init__(
        self, transport: "GroupTransport", stream: str, peer: int, receiving: bool, tensor: torch.Tensor, work: dist.Work | None
    ):
        self.transport, self.stream, self.peer, self.receiving = transport, stream, peer, receiving
        self.tensor, self.work = tensor, work

    def done(self) -> bool:
        return self.work is None or self.work.is_completed()

    def wait(self, where: Where) -> None:
        if self.work is None:
            return
        self.work.wait()  # the current stream does
        self.transport.watch(self, where)
        self.work = self.tensor = None


class GroupTransport(Transport):
    """See the module's text; every rank makes it at the same time.

    Args:
        rank, size: this rank and the number of ranks.
        device: this rank's GPU.
        backend: "gloo" shows on CPUs that the messages are in order.
    """

    name = "NCCL"
    host_waits = False

    def __init__(self, rank: int, size: int, timeout_seconds: float, device: torch.device, backend: str = "nccl"):
        super().__init__(rank, size, timeout_seconds)
        self._device, patience, where = device, timedelta(seconds=timeout_seconds), f"rank {rank}, connecting the {size} ranks"
        self._meeting = StoreExchange(rank, size, timeout_seconds, None, "deepspeed_cdp_pipe", where)
        self._groups = {
            (src, dst): dist.new_group([src, dst], timeout=patience, backend=backend)  # connected when first used
            for src in range(size)
            for dst in range(size)
            if src != dst
        }
        self._closed = False
        self._watched: deque[tuple[dist.Work, torch.Tensor, str, float]] = deque()

    def post(
        self, stream: str, src: int, into: torch.Tensor, after: Sequence[Ticket] = (), where: Where = "", from_at: int = -1
    ) -> _Ticket:
        for ticket in after:
            ticket.wait(where)
        work = dist.irecv(into, src, self._groups[src, self.rank]) if into.numel() else None
        self.count((stream, src), into.numel())
        return _Ticket(self, stream, src, True, into, work)

    def push(self, stream: str, dst: int, source: torch.Tensor, after: Ticket | None = None, into_at: int = -1) -> _Ticket:
        work = dist.isend(source, dst, self._groups[self.rank, dst]) if source.numel() else None
        self.sent[stream, dst] += 1
        self.bytes_sent[stream, dst] += source.numel()
        return _Ticket(self, stream, dst, False, source, work)

    def watch(self, ticket: _Ticket, where: Where) -> None:
        """Remember what the device waits for; raise if the oldest of it is overdue.

        Raises:
            HandoffError: see ``base.Ticket.wait``.
        """
        what = "no message" if ticket.receiving else "nobody took the message"
        whose = f"{'from' if ticket.receiving else 'for'} rank {ticket.peer}"
        text = f"{where}: {what} on stream {ticket.stream} {whose} within {self.timeout_seconds} s"
        self._watched.append((ticket.work, ticket.tensor, text, time.monotonic()))
        while self._watched and self._watched[0][0].is_completed():
            self._watched.popleft()
        if self._watched and time.monotonic() - self._watched[0][3] > self.timeout_seconds:
            raise HandoffError(self._watched[0][2])

    def gather(self, value: Any, where: Where) -> list[Any]:
        self.collectives += 1
        return self._meeting.exchange(value, str(where))

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
            self._meeting.close(None)
            self._watched.clear()
