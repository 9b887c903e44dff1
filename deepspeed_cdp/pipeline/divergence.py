"""Tells all ranks of a pipeline when the options of their optimizers differ.

Each stage's owner enters its options of a step into the vector of norms, which comes back to all ranks with the totals. A rank
compares all of them, and its own, when it takes note of the finished step. So all ranks raise at the end of the same call.

On GPUs the host does not wait for the numbers: they are compared in a later call that finds them there. In the same call some
ranks might find them and others not, which might then block in the next call, in wait for messages of those that have raised.
"""

from collections import deque

import torch

from deepspeed_cdp.errors import DivergenceError
from deepspeed_cdp.optim import options
from deepspeed_cdp.plan.constants import OPTIONS
from deepspeed_cdp.plan.pipeline_schedule import PipeSchedule
from deepspeed_cdp.transport.base import Transport


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
        self._call = -1  # the step that this call began
        # call, step, own, all stages' numbers, the event behind their copy
        self._copies: deque[tuple[int, int, list[float], torch.Tensor, torch.cuda.Event | None]] = deque()

    def record(self, step: int) -> None:
        """Keep this rank's options for the update of ``step``, which begins."""
        self._call = step
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
        event = None
        if rows.device.type == "cuda":
            stream = torch.cuda.current_stream(rows.device)
            rows = torch.empty(rows.shape, dtype=rows.dtype, device="cpu", pin_memory=True).copy_(rows, non_blocking=True)
            event = stream.record_event()
        self._copies.append((self._call, step, own, rows, event))

    def check(self) -> None:
        """Compare what has reached the host.

        Raises:
            DivergenceError: two ranks differ.
        """
        while self._copies:
            call, step, own, rows, event = self._copies[0]
            if event is not None and (call == self._call or not event.query()):
                return
            self._copies.popleft()
            by_rank = [*zip(self._owners, rows.view(-1, OPTIONS).tolist()), (self._rank, own)]
            first = by_rank[0]
            for there, numbers in by_rank[1:]:
                place = options.first_difference(first[1], numbers)
                if place is not None:
                    groups = self._optimizer.param_groups
                    text = options.sentence(groups, place, (first[0], first[1][place]), (there, numbers[place]), step)
                    self._transport.close(True)  # others need this rank's last messages to come this far
                    raise DivergenceError(f"rank {self._rank}, {text}")
