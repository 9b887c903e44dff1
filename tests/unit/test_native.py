"""The executor in C++ asks the driver for the same as the one in Python, call by call, over a stub that takes notes."""

import gc
import time
import weakref
from collections import Counter
from typing import Any
from unittest import mock

import pytest
import torch

from benchmarks.stub_cuda import build, stubbed
from deepspeed_cdp.errors import HandoffError
from deepspeed_cdp.model.make_plan import Settings
from deepspeed_cdp.native import load
from deepspeed_cdp.plan.delay_correction import DelayCorrection
from deepspeed_cdp.runtime.native_messages import NativeMessages
from deepspeed_cdp.runtime.runtime import Runtime
from deepspeed_cdp.runtime.trace import Recorder
from deepspeed_cdp.transport import cuda_common, peer_native
from deepspeed_cdp.transport.peer import PeerTransport
from deepspeed_cdp.transport.peer_native import NativePeerTransport
from deepspeed_cdp.transport.ring_view import RingView
from support import models
from support.optimizers import sgd

DEVICE = torch.device("cpu", 0)


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    return build(tmp_path_factory.mktemp("stub"))


def connect(native: bool, rank: int, size: int, timeout: float = 100.0) -> PeerTransport:
    where = rank, size, timeout, DEVICE
    return NativePeerTransport(load.load(), *where) if native else PeerTransport(*where)


def runtime_of(kind: str, transport: Any, settings: Settings) -> Runtime:
    module = models.build(kind)
    return Runtime(module, sgd(list(module.named_parameters())), settings, transport, DEVICE)


def step(runtime: Runtime, kind: str, number: int) -> float:
    """Returns the last micro-batch's loss."""
    for m in range(runtime.settings.rounds):
        with runtime.forward():
            loss = models.loss(runtime.module, kind, models.batch(kind, number, m, runtime.transport.world_rank))
        (loss / runtime.settings.rounds).backward()
        runtime.end_backward()
    runtime.step()
    return loss.item()


def plain(calls: list[tuple], inner: PeerTransport) -> list[tuple]:
    """Calls without what differs between processes: addresses are places, and an event is the recording that it stands for."""
    starts = {"arena": (inner._bases, inner._memory.own), "words": (inner._word_bases, inner._words)}
    recorded: dict[int, tuple[int, int]] = {}  # event -> (stream, place among its recordings)
    records: Counter[int] = Counter()
    out: list[tuple] = []

    def place(address: int) -> Any:
        for name, (bases, memory) in starts.items():
            for rank, base in enumerate(bases):
                if 0 <= address - base < (memory.numel() if rank == inner.rank else 1 << 40):
                    return name, rank, address - base
        return "elsewhere"

    for kind, stream, a, b, c in calls:
        if kind == "record":
            records[stream] += 1
            recorded[a] = stream, records[stream]
            out.append((kind, stream))
        elif kind == "follow":
            out.append((kind, stream, recorded[a]))
        elif kind == "copy":
            out.append((kind, stream, place(a), place(b), c))
        elif kind != "batch":
            out.append((kind, stream, place(a), b))
    return out


def trained(
    native: bool, library, kind: str, rank: int, size: int, settings: Settings, ring: tuple[int, ...], steps: int, traced: bool
):
    """All calls of a training with a flush in its middle, the counters, losses and masters."""
    # nothing arrives, so what a micro-batch out of order pulls stays as it was allocated
    zeros = mock.patch.object(torch, "empty", torch.zeros)
    with stubbed(library) as stub, mock.patch.object(cuda_common.Watchdog, "_watch", lambda self: None), zeros:
        stub.record(True)
        inner = connect(native, rank, size)
        runtime = runtime_of(kind, RingView(inner, *ring) if ring else inner, settings)
        assert isinstance(runtime.executor.messages, NativeMessages) == native
        losses = []
        for number in range(steps):
            if traced and number == 1:
                recorder = Recorder(runtime.executor, DEVICE)
            losses.append(step(runtime, kind, number))
            if traced and number == 2:
                recorder.stop()
            if number == 3:
                runtime.flush()
        calls = stub.take()
        counts = [dict(c) for c in (inner.sent, inner.bytes_sent, inner.received, inner.bytes_received)]
        values = losses, [m.detach().numpy().tobytes() for m in runtime.owner.masters.values()]
        result = plain(calls, inner), counts, values, inner.timing.latest and (inner.timing.latest.receive_waits.keys())
        runtime.close(False)
    return result


PREDICT, EXTRAPOLATE = DelayCorrection("predict"), DelayCorrection("extrapolate")
CASES = {
    "one rank": ("mlp", 1, Settings(), ()),
    "two ranks": ("mlp", 2, Settings(delay_correction=PREDICT), ()),
    "three ranks": ("mlp", 3, Settings(delay_correction=EXTRAPOLATE), ()),
    "four ranks": ("mlp", 4, Settings(), ()),
    "accumulation": ("mlp", 2, Settings(rounds=2, delay_correction=PREDICT), ()),
    "repeated rounds": ("mlp", 3, Settings(rounds=9, delay_correction=PREDICT), ()),
    "kept": ("mlp", 2, Settings(keep_after_forward=True, delay_correction=PREDICT), ()),
    "dp": ("mlp", 3, Settings("dp"), ()),
    "v1": ("mlp", 3, Settings("cdp-v1", clip=0.1), ()),
    "v1, corrected": ("mlp", 2, Settings("cdp-v1", delay_correction=PREDICT), ()),
    "clipped": ("mlp", 2, Settings(clip=0.1), ()),
    "warm-up": ("mlp", 2, Settings(warmup_steps=2, delay_correction=PREDICT), ()),
    "persistent": ("rooted", 2, Settings(rounds=3, delay_correction=PREDICT), ()),
    "persistent, four ranks": ("rooted", 4, Settings(), ()),
    "replicas": ("mlp", 3, Settings(replicated=True, delay_correction=EXTRAPOLATE), ()),
    "rings": ("mlp", 4, Settings(delay_correction=PREDICT), (2,)),
    "sequence groups": ("mlp", 4, Settings(delay_correction=PREDICT), (2, 2)),
    "out of order": ("strays", 2, Settings(), ()),
    "any order": ("strays", 2, Settings(any_order=True), ()),
    "dense prefetch": ("mlp", 2, Settings(prefetch_units=4), ()),
}


@pytest.mark.parametrize("case", CASES)
def test_both_ask_the_driver_for_the_same(case, library):
    kind, size, settings, ring = CASES[case]
    for rank in range(size):
        steps = 10 if case == "two ranks" else 6  # step 7 is timed
        python, native = (trained(x, library, kind, rank, size, settings, ring, steps, False) for x in (False, True))
        for at, (a, b) in enumerate(zip(python[0], native[0])):
            assert a == b, (rank, at, python[0][at - 5 : at + 5], native[0][at - 5 : at + 5])
        assert python == native and (size == 1 or len(python[0]) > 100)


def test_a_recording_changes_nothing(library):
    settings = Settings(delay_correction=PREDICT)
    plain_one, traced = (trained(True, library, "mlp", 0, 2, settings, (), 5, x) for x in (False, True))
    assert plain_one == traced


@pytest.mark.parametrize("native", [False, True])
def test_a_message_that_never_comes_is_named(native, library):
    with stubbed(library) as stub:
        runtime = runtime_of("mlp", connect(native, 0, 2, 0.4), Settings())
        stub.stick(True)
        try:
            begun = time.monotonic()
            with pytest.raises(HandoffError) as raised:
                for number in range(10_000):
                    step(runtime, "mlp", number)
                    time.sleep(0.02)
            assert 0.3 < time.monotonic() - begun < 30
            told = r"rank 0, step \d+, stage \d, .*: no message on stream \w+ from rank 1 within 0.4 s"
            assert raised.match(told)
            assert runtime.executor.failure.startswith("HandoffError")
            with pytest.raises(HandoffError, match=told):
                runtime.transport.gather(0, "later")
        finally:
            stub.stick(False)
            runtime.close(False)


@pytest.mark.parametrize("native", [False, True])
def test_what_the_driver_refuses_is_told(native, library):
    with stubbed(library) as stub:
        runtime = runtime_of("mlp", connect(native, 0, 2), Settings())
        step(runtime, "mlp", 0)
        stub.fail(True)
        try:
            with pytest.raises(RuntimeError, match="^cuMemcpyDtoDAsync: CUDA_ERROR_STUB$"):
                step(runtime, "mlp", 1)
            action = runtime.executor._program.actions[runtime.executor._cursor]
            assert action.posts, f"the cursor stays at what failed, not at {action}"
        finally:
            stub.fail(False)
            runtime.close(False)


def test_nothing_keeps_a_closed_runtime(library):
    with stubbed(library):
        runtime = runtime_of("mlp", connect(True, 0, 2), Settings())
        for number in range(3):
            step(runtime, "mlp", number)
        runtime.close(False)
        gone = [weakref.ref(x) for x in (runtime, runtime.transport, runtime.executor, runtime.executor.state)]
        del runtime
        for _ in range(2):  # first what holds objects of C++, then what those held
            gc.collect()
        assert [x() for x in gone] == [None] * 4


def test_without_a_compiler_python_does_it(library, tmp_path, monkeypatch):
    monkeypatch.setattr(load, "_loaded", {})
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler")
    with stubbed(library):
        transport = peer_native.make(0, 2, 5.0, DEVICE)
        assert type(transport) is PeerTransport and "no-such-compiler cannot be run" in transport.why_not_native
        transport.close(False)
        monkeypatch.setenv("CXX", "false")
        with pytest.raises(RuntimeError, match="^false failed: no message$"):
            load.load()
        assert not list(tmp_path.rglob("*.so"))


def test_the_variable_switches_it_off(library, monkeypatch):
    monkeypatch.setenv(load.OFF, "0")
    with stubbed(library):
        transport = peer_native.make(0, 2, 5.0, DEVICE)
        assert transport.native is None and transport.why_not_native == "DEEPSPEED_CDP_NATIVE is 0"
        transport.close(False)


def test_words_that_follow_one_another_are_one_call(library):
    """Where the driver has no call for several words, each gets its own."""
    counts = []
    for single in (False, True):
        with stubbed(library) as stub, mock.patch.object(cuda_common.Watchdog, "_watch", lambda self: None):
            runtime = runtime_of("mlp", connect(True, 0, 3), Settings())
            step(runtime, "mlp", 0)
            stub.record(True)
            stub.single(single)
            try:
                for number in (1, 2):
                    step(runtime, "mlp", number)
            finally:
                stub.single(False)
            counts.append(Counter(kind for kind, *_ in stub.take()))
            runtime.close(False)
    assert counts[0].pop("batch") and counts[0] == counts[1]
