"""How a step's numbers come to the host where a device has them first (runtime/step_metrics.py); marks come when the test
says so."""

from collections import deque
from types import SimpleNamespace

import torch

from deepspeed_cdp.runtime.step_metrics import StepMetrics


def made(size: int = 2) -> tuple[StepMetrics, list[SimpleNamespace]]:
    marks: list[SimpleNamespace] = []

    def mark() -> SimpleNamespace:
        marks.append(SimpleNamespace(come=False))
        marks[-1].done = lambda m=marks[-1]: m.come
        return marks[-1]

    scalars = object.__new__(StepMetrics)
    scalars.transport, scalars.size, scalars.rank = (
        SimpleNamespace(record_event=mark, push=lambda *a: None, timing=None),
        size,
        size - 1,
    )
    scalars.vector, scalars.total = torch.zeros(2 * size + 5, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
    scalars.kept, scalars.busy = scalars.vector[: size + 5], 0.0
    scalars._slots, scalars._host_copies, scalars._copies_made = (
        [torch.zeros(3 + size, dtype=torch.float64) for _ in range(4)],
        deque(),
        0,
    )
    scalars._entered_busy = 0.0
    scalars._buffers = SimpleNamespace(address=lambda rank, region, offset: offset)
    scalars._sent, scalars._lands, scalars.step, scalars._first_step = [], {"S": 0}, None, 0
    return scalars, marks


def add(scalars: StepMetrics, step: int) -> None:
    scalars.vector.zero_()
    scalars.add(0, torch.tensor(float((step + 1) ** 2)), torch.tensor(10.0 * step), 2, step)


def test_the_newest_that_has_come_is_told_and_nothing_is_waited_for():
    scalars, marks = made()
    assert scalars.read() == (None, None, None)
    for step in range(3):
        add(scalars, step)
    assert scalars.read() == (None, None, None), "the device has done nothing yet"
    marks[0].come = True
    assert scalars.read() == (0, 0.0, 1.0)
    marks[1].come = marks[2].come = True
    assert scalars.read() == (2, 10.0, 3.0)


def test_a_slot_is_used_again_only_when_its_step_is_forgotten():
    scalars, marks = made()
    for step in range(4):
        add(scalars, step)
    marks[0].come = True
    assert scalars.read()[0] == 0
    add(scalars, 4)  # its numbers go where those of step 0 were
    assert scalars.read() == (None, None, None)
    marks[1].come = True
    assert scalars.read() == (1, 5.0, 2.0)
    for mark in marks:
        mark.come = True
    assert scalars.read() == (4, 20.0, 5.0)


def test_after_a_checkpoint_the_vector_tells():
    scalars, marks = made()
    add(scalars, 0)
    scalars.kept[2:] = torch.tensor([0.0, 0.0, 6.0, 3.0, 16.0])
    scalars.resume(7, True)
    assert scalars.read() == (6, 2.0, 4.0)


def test_busy_ranks_come_with_the_numbers():
    scalars, marks = made()
    scalars.vector[-2] = 0.25  # the other rank's
    for step, busy in enumerate((0.0, 0.5, 0.5)):
        scalars.busy = busy
        scalars.add(0, torch.tensor(1.0), torch.tensor(1.0), 2, step)
    assert scalars.busy_ranks() is None, "nothing has reached the host"
    marks[0].come = True
    assert scalars.busy_ranks() is None, "this rank did not know its own yet"
    marks[2].come = True
    assert scalars.busy_ranks() == [0.25, 0.5]
