"""The throughput timer for GPUs, against DeepSpeed's own, on events that the test's device passes when it is told to."""

import os

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import pytest
import torch
from deepspeed.utils.timer import ThroughputTimer

from deepspeed_cdp.integration.throughput import StreamThroughputTimer, on_stream


class Config:
    enabled, synchronized = True, False


class Device:
    """A queue of work: ``events`` in the order recorded, each at the time (s) that the work before it ends."""

    def __init__(self) -> None:
        self.enqueued, self.now = 0.0, 0.0

    def event(self) -> "Event":
        return Event(self)


class Event:
    def __init__(self, device: Device):
        self.device, self.at = device, None

    def record(self) -> None:
        self.at = self.device.enqueued

    def query(self) -> bool:
        return self.at <= self.device.now

    def elapsed_time(self, end: "Event") -> float:
        assert self.query() and end.query(), "not yet"
        return 1e3 * (end.at - self.at)


def timer(lines: list[str]) -> ThroughputTimer:
    return ThroughputTimer(Config(), batch_size=8, steps_per_output=2, logging_fn=lines.append)


def rates(line: str) -> list[float]:
    return [float(part.split("=")[-1]) for part in line.split(", ")[1:3]]


def test_the_devices_time_counts_not_the_hosts():
    device, lines = Device(), []
    t = StreamThroughputTimer(timer(lines), device.event)
    for step in range(6):
        for m in range(2):
            t.start()
            device.enqueued += 0.5 + step  # the host is done at once; the device is later
            t.stop(global_step=m == 1)
        device.enqueued += 3.0  # between steps: not the step's
        device.now = device.enqueued if step != 5 else device.now
    # DeepSpeed's first two steps are not timed; the reports of steps 4 and 6 come when the device has finished steps 3 and 5
    assert [line.split(",")[0] for line in lines] == ["epoch=0/micro_step=8/global_step=4", "epoch=0/micro_step=12/global_step=6"]
    assert rates(lines[0]) == pytest.approx([8 / 5, 8 / 5], rel=1e-5)
    assert rates(lines[1]) == pytest.approx([8 / 7, 8 / 9], rel=1e-5)
    device.now = device.enqueued
    t._collect()
    assert t.avg_samples_per_sec() == pytest.approx(8 * 4 / (5 + 7 + 9 + 11))


def test_its_lines_look_like_deepspeeds():
    device, ours, stock = Device(), [], []
    for t in (StreamThroughputTimer(timer(ours), device.event), timer(stock)):
        for _ in range(8):
            t.start()
            device.enqueued = device.now = device.now + 1
            t.stop(global_step=True)
            t.stop(global_step=True)  # not started: nothing

    def words(lines: list[str]) -> list[list[str]]:
        return [[part.split("=")[0] for part in line.split(", ")] for line in lines]

    assert words(ours) == words(stock) and len(ours) == 3  # steps 4, 6, 8
    assert [line.split(",")[0] for line in ours] == [line.split(",")[0] for line in stock]


def test_nothing_is_reported_before_the_device_has_finished_a_step_or_if_off():
    device, lines = Device(), []
    t = StreamThroughputTimer(timer(lines), device.event)
    for _ in range(5):
        t.start()
        device.enqueued += 1
        t.stop(global_step=True)
    assert lines == [] and t.avg_samples_per_sec() == float("-inf")
    t.config = type("Off", (), {"enabled": False})
    t.start()
    t.stop(global_step=True)
    assert t.global_step_count == 5


def test_on_a_cpu_it_is_deepspeeds_own():
    own = timer([])
    assert on_stream(own, torch.device("cpu")) is own
    assert type(on_stream(own, torch.device("cuda"))) is StreamThroughputTimer
