"""The watchdog of GPU transports, with events that come when the test says so (the rest of that transport needs GPUs)."""

import threading
import time
from types import SimpleNamespace

import pytest
import torch

from deepspeed_cdp.transport import cuda_common

PATIENCE = 0.4


class Events:
    """The driver's events: reached once told."""

    def __init__(self) -> None:
        self.made, self.come, self.recorded = 0, set(), []

    def create_event(self) -> int:
        self.made += 1
        return self.made

    def record_event(self, event: int, stream: int) -> None:
        self.recorded.append((event, stream))
        self.come.discard(event)

    def event_done(self, event: int) -> bool:
        return event in self.come


class Mark:
    def __init__(self, done: bool):
        self.is_done = done

    def done(self) -> bool:
        return self.is_done


@pytest.fixture
def watched(monkeypatch):
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(query=lambda: True))
    transport = SimpleNamespace(
        timeout_seconds=PATIENCE, driver=Events(), device=None, _failure=None, reasons=[], diagnose=lambda: "why"
    )

    def abort(reason: str) -> None:
        transport._failure = reason
        transport.reasons.append(reason)

    transport.abort = abort
    watchdog = cuda_common.Watchdog(transport)
    yield transport, watchdog
    watchdog.stop()
    assert not watchdog._thread.is_alive()


def until(condition, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and not condition():
        time.sleep(0.01)
    return condition()


def test_a_host_that_blocks_right_behind_a_wait(watched):
    transport, watchdog = watched
    watchdog.expect(Mark(True))  # all that was marked is done; only the wait since is not
    watchdog.expect_stream(0)
    assert not until(lambda: transport.reasons, PATIENCE * 0.8), "before its time"
    assert until(lambda: len(transport.reasons) >= 3, 10), "a peer may overwrite a word: once is not enough"
    assert set(transport.reasons) == {"why"}


def test_one_stream_does_not_hide_another(watched):
    transport, watchdog = watched
    watchdog.expect_stream(1)
    over = threading.Event()

    def busy() -> None:
        while not over.wait(0.02):
            watchdog.expect_stream(0)
            transport.driver.come |= {event for event, stream in transport.driver.recorded if stream == 0}

    thread = threading.Thread(target=busy)
    thread.start()
    told = until(lambda: transport.reasons, 10)
    over.set()
    thread.join()
    assert told
    assert {stream for _, stream in transport.driver.recorded} == {0, 1} and transport.driver.made == 2


def test_a_host_that_runs_ahead_of_a_device_that_stands(watched):
    transport, watchdog = watched
    begun = time.monotonic()
    while not transport.reasons and time.monotonic() - begun < 10:
        watchdog.expect(Mark(False))
        watchdog.expect_stream(0)
        time.sleep(0.02)
    assert transport.reasons and time.monotonic() - begun > PATIENCE


def test_waits_that_a_host_enqueues_ahead_do_not_put_off_the_end(watched):
    transport, watchdog = watched
    begun = time.monotonic()
    while not transport.reasons and time.monotonic() - begun < 10:
        watchdog.expect_stream(0)
        time.sleep(0.02)
    assert transport.reasons and PATIENCE < time.monotonic() - begun < 10
    assert transport.driver.recorded == [(1, 0)], "the host's calls record nothing"


def test_nothing_is_late_while_events_come(watched):
    transport, watchdog = watched
    transport.driver.event_done = lambda event: True
    begun = time.monotonic()
    while time.monotonic() - begun < 4 * PATIENCE:
        watchdog.expect(Mark(True))
        watchdog.expect_stream(0)
        time.sleep(0.02)
    time.sleep(3 * PATIENCE)  # nor after the last one has come, however long the pause
    assert not transport.reasons


def test_a_device_that_fails_is_told(watched):
    transport, watchdog = watched

    def event_done(event: int) -> bool:
        raise RuntimeError("cuEventQuery: CUDA_ERROR_ILLEGAL_ADDRESS")

    transport.rank, transport.driver.event_done = 3, event_done
    watchdog.expect_stream(0)
    assert until(lambda: transport.reasons, 10)
    assert transport.reasons[0] == "rank 3: the GPU does not answer: cuEventQuery: CUDA_ERROR_ILLEGAL_ADDRESS"
