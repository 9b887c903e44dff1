"""When a pipeline's ranks compare optimizer options on GPUs, where the host is ahead of copies to it."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from deepspeed_cdp.errors import DivergenceError
from deepspeed_cdp.optim import options
from deepspeed_cdp.pipeline.divergence import PipeDivergence
from deepspeed_cdp.plan.constants import OPTIONS
from deepspeed_cdp.plan.pipeline_schedule import PipeSchedule
from deepspeed_cdp.transport.nccl_group import NcclGroupTransport


class Device:
    """Stands for a GPU with one stream: work is done when the test lets the device ``catch_up``."""

    def __init__(self) -> None:
        self.type, self.work = "cuda", list[Callable[[], object]]()

    def catch_up(self) -> None:
        while self.work:
            self.work.pop(0)()

    def record_event(self) -> SimpleNamespace:
        done: list[None] = []
        self.work.append(lambda: done.append(None))
        return SimpleNamespace(query=lambda: bool(done))

    def rows(self, values: torch.Tensor) -> Any:
        """A tensor on this device."""
        return SimpleNamespace(device=self, shape=values.shape, dtype=values.dtype, values=values)

    def host_memory(self, shape: torch.Size, **_: object) -> SimpleNamespace:
        memory = torch.zeros(shape, dtype=torch.float64)

        def copy_(rows: SimpleNamespace, non_blocking: bool) -> torch.Tensor:
            self.work.append(lambda: memory.copy_(rows.values))
            return memory

        return SimpleNamespace(copy_=copy_)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    made = Device()
    monkeypatch.setattr(torch, "empty", made.host_memory)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: device)
    return made


def rank_0(rates: list[float]) -> tuple[PipeDivergence, torch.Tensor]:
    """Rank 0 of two, and what all ranks get of a step in which the owners' learning rates are these; its own is 0.1."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=0.1)
    transport = object.__new__(NcclGroupTransport)
    transport._closed = True  # it has nothing to close
    rows = torch.zeros(2, OPTIONS, dtype=torch.float64)
    for row, lr in zip(rows, rates):
        numbers = options.numbers([{**optimizer.param_groups[0], "lr": lr}])
        row.copy_(torch.tensor(numbers, dtype=torch.float64))
    return PipeDivergence(PipeSchedule(2, 1), 0, transport, optimizer, 1), rows


def test_numbers_are_compared_once_they_have_reached_the_host(device: Device) -> None:
    ranks, rows = rank_0([0.1, 0.1])
    for step in range(3):
        ranks.record(step)
        ranks.read(step, device.rows(rows.flatten()))
        ranks.check()
    device.catch_up()
    ranks.check()


def test_a_difference_is_told_in_the_next_call_however_fast_the_device_is(device: Device) -> None:
    """Else one rank may raise a call before another, which then waits in vain for its messages."""
    for behind in (False, True):
        ranks, rows = rank_0([0.1, 0.2])
        ranks.record(0)
        ranks.read(0, device.rows(rows.flatten()))
        if not behind:
            device.catch_up()
        ranks.check()
        ranks.record(1)
        device.catch_up()
        with pytest.raises(DivergenceError, match="lr of group 0 is 0.1 on rank 0 but 0.2 on rank 1 in step 0"):
            ranks.check()
