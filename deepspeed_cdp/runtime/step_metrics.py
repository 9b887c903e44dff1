"""The vector that goes round the ring once a step: norms by stage, losses, busy times. One small message per rank and step.

Each owner sends the vector on when its stage's sums are finished: the owner of stage N-1 (rank 0) first, the owner of stage 0
last. The last one sends it to rank 0 for the next step. So an owner sees this step's norms of the stages after its own, and the
last step's norms of the stages before it. Under ``cdp-v2`` the norm of both clips. Under ``dp`` and ``cdp-v1`` the last owner
also sends the finished total to all others, and every update waits for it.
"""

import math
from collections import deque
from typing import Any

import torch

from deepspeed_cdp.plan.constants import DIFFERENCE, OPTIONS
from deepspeed_cdp.runtime.divergence import ROW, Divergence
from deepspeed_cdp.transport.base import Ticket, Transport, Where
from deepspeed_cdp.transport.buffers import Buffers


class StepMetrics:
    """One rank's end of the vector.

    Attributes:
        vector: float64: squared norms of the averaged gradients by stage; loss sum and count, growing; the same of the last
            finished step; squared norm of the last finished step; seconds that each rank was busy in its latest step; numbers
            that ranks compare (runtime/divergence.py).
        kept: the part of it that a checkpoint holds, the first N + 5.
        divergence: compares ranks; None if nothing is compared.
        busy: seconds that this rank was busy in its latest step, without waiting for others; 0 before it is known.
        total: float64, [1]: the squared norm that this rank's next update clips with.
        step: the last finished step in the vector; None before the first. Counted on the host.
    """

    divergence: Divergence | None = None

    def __init__(self, transport: Transport, buffers: Buffers):
        self.transport, self.size, self.rank = transport, transport.size, transport.rank
        room = buffers.regions["S"].numel() // 2
        length = 2 * self.size + 5 + DIFFERENCE + OPTIONS
        assert 8 * length <= room, "the vector would reach into the total"
        self._incoming, self._incoming_total = (
            buffers.view("S", at, 8 * n).view(torch.float64) for at, n in ((0, length), (room, 1))
        )
        self._buffers, self._lands = buffers, {"S": 0, "T": room}
        self.vector, self.total = torch.zeros_like(self._incoming), torch.zeros_like(self._incoming_total)
        self.kept, self.busy = self.vector[: self.size + 5], 0.0
        self._posted: dict[str, Ticket] = {}
        self._sent: list[Ticket] = []
        self.step: int | None = None
        self._first_step = 0
        cuda = self.vector.device.type == "cuda"
        numbers = length - self.size - 2 + (transport.rings * ROW if transport.rings > 1 else 0)
        self._slots = [torch.zeros(numbers, dtype=torch.float64, device="cpu", pin_memory=True) for _ in range(4 if cuda else 0)]
        self._host_copies: deque[tuple[int | None, torch.Tensor, Any]] = deque()  # step, slot, when it is filled
        self._uncompared: deque[tuple[int, torch.Tensor, Any]] = deque()  # pass, slot, when it is filled
        self._copies_made, self._entered_busy = 0, 0.0

    def begin(self) -> None:
        """After a reset of the transport: post the first receives; the last owner sends its vector to rank 0.

        There the norms of a skipped step become zero, since after a change to ``cdp-v2`` the next one clips with them.
        """
        self._posted, self._sent = {}, []
        if self.size > 1:
            self._post("S", (self.rank - 1) % self.size, self._incoming)
            if self.rank == 0:
                self.transport.start_peer("S", self.size - 1, True)
            if self.rank != self.size - 1:
                self._post("T", self.size - 1, self._incoming_total)
            else:
                self.vector[: self.size].nan_to_num_(nan=0.0, posinf=0.0)
                self._push("S", 0, self.vector)

    def _post(self, stream: str, src: int, into: torch.Tensor) -> None:
        self._posted[stream] = self.transport.post(stream, src, into.view(torch.uint8))

    def _push(self, stream: str, dst: int, source: torch.Tensor) -> None:
        place = self._buffers.address(dst, "S", self._lands[stream])
        self._sent.append(self.transport.push(stream, dst, source.view(torch.uint8), None, place))

    def receive(self, src: int, where: Where) -> None:
        """Receive the vector from the previous owner."""
        self._wait_sent(where)
        self._posted["S"].wait(where)
        self.vector.copy_(self._incoming)
        self._post("S", src, self._incoming)

    def _wait_sent(self, where: Where) -> None:
        for ticket in self._sent:  # sent a step ago: done long since
            ticket.wait(where)
        self._sent.clear()

    def add(
        self, stage: int, norm2: torch.Tensor, loss: torch.Tensor, count: int, step: int, rows: torch.Tensor | None = None
    ) -> None:
        """Enter this owner's squared norm and this rank's losses of the step, and pass the vector on.

        Args:
            norm2: float64 scalar; loss: float64 scalar, the sum over this rank's micro-batches; count: their number;
                step: the step's.
            rows: with several rings, what their owners compare (``Divergence.write_row``).
        """
        n, v = self.size, self.vector
        finished = step if self.rank == n - 1 else step - 1  # the last owner finishes a step; the others receive it with the next
        self.step = finished if finished >= self._first_step else None
        if self.rank == 0:
            v[n : n + 2].zero_()
        v[stage].copy_(norm2)
        v[n].add_(loss)
        v[n + 1].add_(count)
        torch.sum(v[:n], 0, keepdim=True, out=self.total)
        if self.rank == n - 1:
            v[n + 2 : n + 4].copy_(v[n : n + 2])
            v[n + 4 : n + 5].copy_(self.total)
        if self.busy != self._entered_busy:
            v[n + 5 + self.rank].fill_(self.busy)
            self._entered_busy = self.busy
        if self.divergence:
            part = v[2 * n + 5 :]
            if not self._slots:
                self.divergence.read(step, part.tolist(), [] if rows is None else rows.tolist())
            self.divergence.write(part, step)
        if self._slots:
            self._copy_to_host(step, rows)
        if n > 1:
            self._push("S", (self.rank + 1) % n, v)

    def send_total(self) -> None:
        """The last owner sends the step's exact squared norm to all others."""
        for peer in range(self.size - 1):
            self._push("T", peer, self.total)

    def receive_total(self, where: Where) -> None:
        """Receive it (every owner but the last)."""
        self._posted["T"].wait(where)
        self.total.copy_(self._incoming_total)
        self._post("T", self.size - 1, self._incoming_total)

    def resume(self, step: int, known: bool) -> None:
        """Training goes on with ``step``, after a checkpoint; ``known``: the vector is loaded, and tells of the step before."""
        self._host_copies.clear()
        if self.transport.timing:
            self.transport.timing.reset()
        self._first_step = max(step - known, 0)
        self.step = step - 1 if known and step else None

    def read(self) -> tuple[int | None, float | None, float | None]:
        """(step, mean loss over all its micro-batches, its gradient norm before clipping) of the last finished step known here.

        All are None before a step is known. The loss is None where none was given to ``add``; a norm may be inf or nan. On GPUs
        this is the latest step whose numbers have reached the host: nothing is waited for.
        """
        step, numbers = self.step, None
        if self._host_copies:
            step, numbers = self._newest()
        if step is None:
            return None, None, None
        loss, count, norm2 = (self.kept[self.size + 2 :] if numbers is None else numbers[:3]).tolist()
        return step, loss / count if count else None, math.sqrt(norm2)

    def busy_ranks(self) -> list[float] | None:
        """Busy seconds by rank, each of the latest step that this rank knows; None before all are known."""
        numbers = self._newest()[1] if self._slots else self.vector[self.size + 2 :]
        seconds = [] if numbers is None else numbers[3 : 3 + self.size].tolist()
        return seconds if seconds and min(seconds) > 0 else None

    def _newest(self) -> tuple[int | None, torch.Tensor | None]:
        """The latest step, and its numbers, that have reached the host."""
        return next(((s, slot) for s, slot, event in reversed(self._host_copies) if event.done()), (None, None))

    def compare(self) -> None:
        """Compare the numbers of ranks that have reached the host since the last call; without a device ``add`` has done it."""
        while self.divergence and self._uncompared and self._uncompared[0][2].done():
            step, slot, _ = self._uncompared.popleft()
            self.divergence.read(step, *self.divergence.parts_of(slot[3 + self.size :].tolist()))

    def _copy_to_host(self, step: int, rows: torch.Tensor | None) -> None:
        """Enqueue a copy of the vector's finished part to the host, on the owner's stream."""
        slot = self._slots[self._copies_made % len(self._slots)]
        if len(self._host_copies) == len(self._slots):
            self._host_copies.popleft()  # it is this slot's
        self._copies_made += 1
        numbers = self.vector[self.size + 2 :]
        slot[: len(numbers)].copy_(numbers, non_blocking=True)
        if rows is not None:
            slot[len(numbers) :].copy_(rows.flatten(), non_blocking=True)
        event = self.transport.record_event()
        self._host_copies.append((self.step, slot, event))
        if self.divergence:
            if len(self._uncompared) == len(self._slots):
                self._uncompared.popleft()  # the device is so many steps behind
            self._uncompared.append((step, slot, event))
