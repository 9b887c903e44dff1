"""Tells all ranks of a pipeline when the options of their optimizers differ.

Each stage's owner enters its options of a step into the vector of norms, which comes back to all ranks with the totals. A rank
compares all of them, and its own, when it takes note of the finished step. So all ranks raise at the end of the same call.
"""

from collections import deque

import torch

from deepspeed_cdp.errors import DivergenceError
from deepspeed_cdp.optim import options
from deepspeed_cdp.plan.constants import OPTIONS
from deepspeed_cdp.plan.pipeline_schedule import PipeSchedule
from deepspeed_cdp.transport.base import Ticket, Transport


class PipeDivergence:
    """One rank's comparisons."""

    def __init__(
        self, schedule: PipeSchedule, rank: int, transport: Transport, optimizer: torch.optim.Optimizer, every: int
    ) -> None:
        """
        Args:
            optimizer: the user's, whose options every step records.
            every: steps from one comparison to the next.
        """
        self._rank, self._transport, self._optimizer, self._every = rank, transport, optimizer, every
        self._owners = [schedule.owner(stage) for stage in range(schedule.stages)]
        self._own: dict[int, list[float]] = {}  # by step, until it is finished
        self._copies: deque[tuple[int, list[float], torch.Tensor, Ticket | None]] = deque()  # step, own, all stages', event

    def record(self, step: int) -> None:
        """Keep this rank's options for the update of ``step``."""
        if step % self._every == 0:
            self._own[step] = options.numbers(self._optimizer.param_groups)

    def write(self, step: int, row: torch.Tensor) -> None:
        """Enter them for a stage that this rank owns (float64, [OPTIONS])."""
        if step in self._own:
            row.copy_(torch.tensor(self._own[step], dtype=torch.float64, device="cpu"), non_blocking=True)

    def read(self, step: int, rows: torch.Tensor) -> None:
        """All stages' options of a finished step are here, or on their way to the host."""
        own = self._own.pop(step, None)
        if own is None:  # not to be compared, or read before (a flush ends a step again that has ended)
            return
        if rows.device.type == "cuda":
            rows = torch.empty(rows.shape, dtype=rows.dtype, device="cpu", pin_memory=True).copy_(rows, non_blocking=True)
        self._copies.append((step, own, rows, self._transport.record_event()))

    def check(self) -> None:
        """Compare what has reached the host.

        Raises:
            DivergenceError: two ranks differ.
        """
        while self._copies and (self._copies[0][3] is None or self._copies[0][3].done()):
            step, own, rows, _ = self._copies.popleft()
            by_rank = [*zip(self._owners, rows.view(-1, OPTIONS).tolist()), (self._rank, own)]
            first = by_rank[0]
            for there, numbers in by_rank[1:]:
                place = options.first_difference(first[1], numbers)
                if place is not None:
                    groups = self._optimizer.param_groups
                    text = options.sentence(groups, place, (first[0], first[1][place]), (there, numbers[place]), step)
                    self._transport.close(True)  # others need this rank's last messages to come this far
                    raise DivergenceError(f"rank {self._rank}, {text}")
