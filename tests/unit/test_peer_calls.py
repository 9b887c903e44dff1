"""What the peer transport asks of the driver, call by call, with a driver that only takes notes (the rest needs GPUs)."""

import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import pytest
import torch

from deepspeed_cdp.transport import cuda_common, peer
from deepspeed_cdp.transport.base import PULLED, Transport
from deepspeed_cdp.transport.deadline import Standby
from deepspeed_cdp.transport.wait_timing import WaitTiming

HANDLES = {"credit": 11, "G": 12, "P": 13, "G0": 14, "P0": 15, "relay": 16, "S": 17}
RANK, SIZE, NCCL_HANDLE = 1, 4, 21


class Notes:
    """The driver's calls as (name, arguments); events are numbers."""

    def __init__(self) -> None:
        self.calls: list[tuple] = []
        self.events = 0

    def create_event(self) -> int:
        self.events += 1
        return self.events

    def __getattr__(self, name: str):
        return lambda *arguments: self.calls.append((name, *arguments))

    def take(self) -> list[tuple]:
        calls, self.calls = self.calls, []
        return calls


@pytest.fixture
def transport(monkeypatch):
    """Rank 1 of 4, on the default stream, whose handle is 0."""
    made = object.__new__(peer.PeerTransport)
    made.timing = WaitTiming(lambda: None)
    Transport.__init__(made, RANK, SIZE, 5.0)
    made.driver, made.events, made._failure, made._counts = Notes(), [], None, {}
    made._point, made._point_on, made._waits = made.driver.create_event(), None, deque(maxlen=9)
    made._owner, made._relay_stream = (SimpleNamespace(cuda_stream=HANDLES[name]) for name in ("S", "relay"))
    made._bases, made._word_bases = [0, 10_000, 20_000, 30_000], [0, 100_000, 200_000, 300_000]
    made.device, made._handles = SimpleNamespace(index=0), dict(HANDLES)
    made._watchdog = SimpleNamespace(expect=lambda mark: None, expect_stream=lambda stream: None)
    current = [0]

    @contextmanager
    def inside(stream: SimpleNamespace) -> Iterator[None]:
        current.append(stream.cuda_stream)
        yield
        current.pop()

    monkeypatch.setattr(cuda_common, "_On", inside)
    monkeypatch.setattr(made, "current", lambda: current[-1])
    return made


def test_every_stream_has_a_cuda_stream():
    assert set(PULLED) < set(peer.CUDA_STREAM_OF) == set(peer.STREAMS)
    pulls = {peer.CUDA_STREAM_OF[stream] for stream in PULLED}
    assert not pulls & {handle for stream, handle in peer.CUDA_STREAM_OF.items() if stream not in PULLED}
    assert set(peer.CUDA_STREAM_OF.values()) - {"S", "X"} | {"credit", "relay"} == set(peer._CUDA_STREAMS)


def test_a_message_is_pushed_behind_the_credit_and_the_work_that_made_it(transport):
    source = torch.zeros(64, dtype=torch.uint8)
    transport.push("G", 2, source, None, 512)
    credit, arrival = transport._word(RANK, "G", 2, False), transport._word(2, "G", RANK, True)
    assert transport.driver.take() == [
        ("record_event", 1, 0),
        ("wait_event", 12, 1),
        ("wait_value", 12, credit, 1),
        ("copy", 12, 20_000 + 512, source.data_ptr(), 64),
        ("write_value", 12, arrival, 1),
        ("record_event", 2, 12),
    ]
    assert arrival >= 200_000 and 100_000 <= credit < 200_000, "each waits on its own words only"


def test_what_is_passed_on_waits_for_its_arrival_alone(transport):
    box = torch.zeros(64, dtype=torch.uint8)
    came = transport.post("P", 0, box)
    transport.driver.take()
    transport.push("P", 2, box, came, 0)
    first = transport.driver.take()[0]
    assert first == ("wait_value", 13, transport._word(RANK, "P", 0, True), 1), "not for the passes' stream"


def test_a_credit_waits_for_what_reads_there_and_holds_up_nobody_else(transport):
    box, mark = torch.zeros(8, dtype=torch.uint8), transport.record_event()
    credit = transport._word(0, "G", RANK, False)
    transport.driver.take()
    transport.relay(lambda: transport.post("G", 0, box, [mark]))
    relay = HANDLES["relay"]
    assert transport.driver.take() == [("wait_event", relay, mark.event), ("write_value", relay, credit, 1)], (
        "the passes do not wait for it, nor it for them"
    )
    with transport.owner_stream():
        transport.post("G", 0, box, [mark])
    owner = HANDLES["S"]
    assert transport.driver.take() == [("wait_event", owner, mark.event), ("write_value", owner, credit, 2)]
    transport.post("P", 3, box)
    wait, told = transport.driver.take()[-2:]
    assert wait[:2] == ("wait_event", HANDLES["credit"])
    assert told == ("write_value", HANDLES["credit"], transport._word(3, "P", RANK, False), 1)


def test_a_sum_that_comes_back_is_offered_beside_the_passes(transport):
    box, relay = torch.zeros(8, dtype=torch.uint8), HANDLES["relay"]
    back = transport.post("G", 0, box)
    transport.driver.take()

    def begin():
        back.wait("here")
        return transport.push("G0", 2, box)

    pulled = transport.relay(begin)
    assert transport.driver.take() == [
        ("wait_value", relay, transport._word(RANK, "G", 0, True), 1),
        ("write_value", relay, transport._word(2, "G0", RANK, True), 1),
    ]
    transport.relay(lambda: transport.post("G", 2, box, [pulled]))
    taken, told = transport.driver.take()
    assert taken == ("wait_value", relay, transport._word(RANK, "G0", 2, False), 1), "the credit comes behind the pull"
    assert told == ("write_value", relay, transport._word(2, "G", RANK, False), 1)
    done = transport.relay(transport.record_event)
    transport.wait_event(done)
    assert transport.driver.take() == [("record_event", done.event, relay), ("wait_event", 0, done.event)]


def over_nccl(transport):
    """The same rank, with NCCL's calls noted too."""
    from deepspeed_cdp.transport.nccl import NcclTransport

    made = object.__new__(NcclTransport)
    made.__dict__.update({name: value for name, value in transport.__dict__.items() if name != "_point"})
    comes, goes = ("G", 0, RANK), ("G", RANK, 2)
    made._order, made._sides, made._prepared, made._deferred = 99, {}, {comes, goes}, False
    made._connections, made._started, made._lock = {comes: (77, NCCL_HANDLE), goes: (78, NCCL_HANDLE + 1)}, deque(), nullcontext()
    made._staging = {edge: torch.zeros(8, dtype=torch.uint8) for edge in made._connections}  # only its address matters here
    made._host_words = torch.tensor([1] + [0] * 12, dtype=torch.int32)
    made._nccl = SimpleNamespace(
        receive=lambda *a: made.driver.calls.append(("receive", *a)), send=lambda *a: made.driver.calls.append(("send", *a))
    )
    return made


def test_over_nccl_a_receive_waits_for_a_mark_as_for_a_message(transport):
    made = over_nccl(transport)
    mark = made.record_event()
    made.driver.take()
    made.post("G", 0, torch.zeros(8, dtype=torch.uint8), [mark])
    calls = [call[:3] for call in made.driver.take()]
    receive = next(k for k, call in enumerate(calls) if call[0] == "receive")
    assert ("wait_event", NCCL_HANDLE, mark.event) in calls[:receive], calls


@pytest.mark.parametrize("short", [True, False])
def test_over_nccl_what_is_given_up_cannot_look_like_an_older_message(transport, short):
    """NCCL's protocol for small messages leaves an older one then: they go by way of longer memory, marked before (255: nan)."""
    made, long = over_nccl(transport), 1 << 17
    box = torch.zeros(long - short, dtype=torch.uint8)
    made.post("G", 0, box)
    made.push("G", 2, box)
    calls = [call for call in made.driver.take() if call[0] not in ("record_event", "wait_event")]
    at, into, out = box.data_ptr(), made._staging["G", 0, RANK].data_ptr(), made._staging["G", RANK, 2].data_ptr()
    assert calls == (
        [
            ("fill", NCCL_HANDLE, into, 255, long - 1),
            ("receive", 77, 0, into, long, NCCL_HANDLE),
            ("copy", NCCL_HANDLE, at, into, long - 1),
            ("copy", NCCL_HANDLE + 1, out, at, long - 1),
            ("send", 78, 1, out, long, NCCL_HANDLE + 1),
        ]
        if short
        else [
            ("fill", NCCL_HANDLE, at, 255, long),
            ("receive", 77, 0, at, long, NCCL_HANDLE),
            ("send", 78, 1, at, long, NCCL_HANDLE + 1),
        ]
    )


def test_over_nccl_the_watchdog_expects_every_wait_to_end(transport):
    """Marks alone are too few: a rank whose peer had been killed waited for ever at loss.item()."""
    made, looked = over_nccl(transport), []
    made._watchdog = SimpleNamespace(expect=lambda mark: None, expect_stream=looked.append)
    made.post("G", 0, torch.zeros(8, dtype=torch.uint8)).wait("here")
    assert looked == [made.current()]


def test_over_nccl_what_is_waited_for_is_told_before_what_has_only_a_credit(transport):
    """A sum that has been posted for is counted elsewhere, which does not mean that somebody waits for it."""
    made, box = over_nccl(transport), torch.zeros(8, dtype=torch.uint8)
    made._nccl.error = lambda comm: ""
    credit = made.post("G", 0, box, (), "rank 1, the credit")
    credit.counted = True
    assert made.diagnose() == "rank 1, the credit: no message on stream G from rank 0 within 5.0 s"
    made.push("G", 2, box).wait("rank 1, step 7")
    assert made.diagnose() == "rank 1, step 7: nobody took the message on stream G for rank 2 within 5.0 s"
    assert not made.received


def test_over_nccl_who_has_waited_passes_a_gate(transport):
    made = over_nccl(transport)
    made.post("G", 0, torch.zeros(8, dtype=torch.uint8)).wait("here")
    calls = made.driver.take()
    gate = ("wait_value", made.current(), made._host_words.data_ptr(), 1)
    assert [call for call in calls if call[:2] == ("wait_event", made.current())] and calls.index(gate) == len(calls) - 1, calls


def prepare_abort(made, monkeypatch):
    """The threads that abort and poison; after that none can start, as while Python 3.12 exits."""
    cpu = torch.device("cpu")
    made._aborters = {comm: Standby(cpu, "abort") for comm, _ in made._connections.values()}
    made._poisoner = Standby(cpu, "poison")
    monkeypatch.setattr(threading.Thread, "start", lambda thread: pytest.fail("abort started a thread"))


@pytest.mark.parametrize("poison", [True, False])
def test_over_nccl_what_goes_on_after_a_failure_finds_nan(transport, poison, monkeypatch):
    """Aborting lets the device go on with what did not come; a loss of that must not look right."""
    made, memory = over_nccl(transport), torch.zeros(32, dtype=torch.uint8)
    made._memory, made._poison_handles, streams, gate = memory, [], iter(range(31, 99)), []
    made.driver.create_stream = lambda priority: next(streams)
    made._lock = threading.Lock()
    del made._connections["G", RANK, 2]
    prepare_abort(made, monkeypatch)

    def abort(comm):
        made.driver.calls.append(("abort", comm))
        gate.append(int(made._host_words[0]))
        time.sleep(0.05)
        gate.append(int(made._host_words[0]))  # nothing has been filled yet
        made._host_words[3] = 1  # one stream gets through
        while made._host_words[0] == 0:  # an abort may wait for the device, and so for the gate
            time.sleep(0.001)

    made._nccl = SimpleNamespace(abort=abort)
    begun = time.monotonic()
    made.abort("a peer is gone", poison)
    made._poisoner.begin(lambda: None)
    words = made._host_words.data_ptr()
    fills = [
        call
        for k, stream in enumerate(made._poison_handles)
        for call in (("fill", stream, memory.data_ptr(), 0xFF, 32), ("write_value", stream, words + 4 * (1 + k), 1))
    ]
    assert len(made._poison_handles) > 2 if poison else not fills
    assert gate == ([0, 0] if poison else [1, 1])
    assert made.driver.take() == [*fills, ("abort", 77)] and made._failure == "a peer is gone"
    assert made._host_words[0] == 1 and time.monotonic() - begun < 0.9


@pytest.mark.parametrize("wrong", ["blocks", "raises"])
def test_over_nccl_messages_end_even_if_nothing_can_be_filled(transport, wrong, monkeypatch):
    made, aborted, over = over_nccl(transport), [], threading.Event()
    made._memory, made._poison_handles, made._lock = torch.zeros(32, dtype=torch.uint8), [], threading.Lock()
    prepare_abort(made, monkeypatch)

    def stream(priority):
        if wrong == "raises":
            raise OSError("no stream")
        over.wait(20)  # as a driver does whose lock another thread has
        return 31

    made.driver.create_stream, made._nccl = stream, SimpleNamespace(abort=aborted.append)
    begun = time.monotonic()
    made.abort("a peer is gone")
    over.set()
    assert sorted(aborted) == [77, 78] and "numbers read after that may be wrong" in made._failure
    assert made._host_words[0] == 1 and not made._lock.locked() and time.monotonic() - begun < 5


def test_streams_follow_one_point_until_the_stream_moves_on(transport):
    """The default stream's handle is 0, so no number can stand for "none": each new point must be recorded."""
    source = torch.zeros(8, dtype=torch.uint8)

    def records() -> int:
        transport.push("G", 2, source, None, 0)
        return sum(call[:3] == ("record_event", 1, 0) for call in transport.driver.take())

    assert [records(), records()] == [1, 0]
    transport.work_enqueued()
    assert [records(), records()] == [1, 0]
    transport.post("P", 0, source).wait("here")
    transport.driver.take()
    assert records() == 1, "a wait moves the stream on"
    transport.wait_event(transport.record_event())
    transport.driver.take()
    assert records() == 1


@pytest.mark.parametrize("stream", PULLED)
def test_offers_are_told_and_pulled(transport, stream):
    box, handle = torch.zeros(64, dtype=torch.uint8), HANDLES[peer.CUDA_STREAM_OF[stream]]
    offer = transport.push(stream, 3, box)
    assert transport.driver.take() == [("write_value", 0, transport._word(3, stream, RANK, True), 1)]
    offer.wait("here")
    assert transport.driver.take() == [("wait_value", 0, transport._word(RANK, stream, 3, False), 1)]
    taken = transport.post(stream, 2, box, (), "here", 256)
    assert transport.driver.take() == [
        ("record_event", 1, 0),
        ("wait_event", handle, 1),
        ("wait_value", handle, transport._word(RANK, stream, 2, True), 1),
        ("copy", handle, box.data_ptr(), 20_000 + 256, 64),
        ("write_value", handle, transport._word(2, stream, RANK, False), 1),
        ("record_event", 2, handle),
    ]
    taken.wait("here")
    taken.wait("here")
    assert transport.received == {(stream, 2): 1} and transport.bytes_received == {(stream, 2): 64}


def test_only_the_passes_waits_are_timed(transport):
    """They are what a step loses; the owner's streams wait beside them."""
    box, events = torch.zeros(8, dtype=torch.uint8), []
    transport.timing = WaitTiming(lambda: events.append("event"))
    transport.timing.active = True
    with transport.owner_stream():
        transport.post("S", 0, box).wait("here")
    transport.relay(lambda: transport.post("G", 0, box).wait("here"))
    assert not events
    transport.post("P", 0, box).wait("here")
    assert len(events) == 2


def test_events_come_back(transport):
    source = torch.zeros(8, dtype=torch.uint8)
    for _ in range(5):
        transport.push("G", 2, source, None, 0)
    assert transport.driver.events == 2, "one for the point, one that every ticket in turn has used"
