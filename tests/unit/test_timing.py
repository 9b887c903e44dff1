"""Waits of a device's stream (transport/wait_timing.py): a clock that the test moves, events that come when it says so."""

import pytest

from deepspeed_cdp.transport.wait_timing import EVERY, WaitTiming


class Clock:
    """Milliseconds on the device; events up to ``reached`` have passed."""

    def __init__(self):
        self.now, self.reached = 0.0, 0.0

    def record_event(self):
        return Mark(self, self.now)


class Mark:
    def __init__(self, clock, at):
        self.clock, self.at = clock, at

    def query(self):
        return self.clock.reached >= self.at

    def elapsed_time(self, later):
        return later.at - self.at


def step(clock: Clock, waits: WaitTiming, number: int) -> bool:
    """10 ms of passes, 3 ms until a message of rank 1 has come, 2 ms until rank 0 has taken one."""
    for edge, came, ms in ((("P", 1), True, 3), (("G", 0), False, 2)):
        before = waits.record_event() if waits.active else None
        clock.now += ms
        if before:
            waits.record_wait(edge, came, before)
    clock.now += 10
    return waits.end_step(number)


def test_one_step_of_eight_is_timed_and_told_once_it_has_passed():
    clock = Clock()
    waits = WaitTiming(clock.record_event)
    active = []
    for number in range(EVERY):
        active.append(waits.active)
        assert not step(clock, waits, number) and waits.latest is None
    assert active == [False] * (EVERY - 1) + [True]
    assert not step(clock, waits, EVERY) and waits.latest is None, "the device has not come so far"
    clock.reached = clock.now
    assert step(clock, waits, EVERY + 1)
    assert waits.latest == (EVERY - 1, pytest.approx(0.015), {("P", 1): 0.003}, {("G", 0): 0.002})
    assert waits.latest.busy == pytest.approx(0.010)


def test_nothing_new_is_timed_while_one_is_under_way():
    clock = Clock()
    waits = WaitTiming(clock.record_event)
    for number in range(3 * EVERY):
        step(clock, waits, number)
    clock.reached = clock.now
    assert step(clock, waits, 3 * EVERY) and waits.latest.step == EVERY - 1


def test_a_flush_is_not_a_step():
    clock = Clock()
    waits = WaitTiming(clock.record_event)
    for number in range(EVERY - 1):
        step(clock, waits, number)
    assert waits.active
    waits.discard_step()
    clock.reached = 1e9
    for number in range(EVERY - 1, 2 * EVERY - 1):
        assert not step(clock, waits, number)
    assert waits.active and waits.latest is None


def test_a_flush_after_a_timed_step_does_not_lose_it():
    clock = Clock()
    waits = WaitTiming(clock.record_event)
    for number in range(EVERY):
        step(clock, waits, number)
    waits.discard_step()
    clock.reached = 1e9
    assert step(clock, waits, EVERY) and waits.latest.step == EVERY - 1
    waits.reset()
    assert waits.latest is None
