"""What a transport that fails leaves behind: waits have a timeout, and the other ranks learn of it at once (no GPU needed)."""

import os
import re
import resource
import socket
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from deepspeed_cdp.errors import HandoffError
from deepspeed_cdp.transport import connect, cuda_common, gloo, nccl, nccl_group, peer, peer_native
from deepspeed_cdp.transport.base import Transport
from deepspeed_cdp.transport.descriptor_exchange import exchange_descriptors
from deepspeed_cdp.transport.local import Hub, LocalTransport
from deepspeed_cdp.transport.peer_memory import PeerMemory
from deepspeed_cdp.transport.store_exchange import StoreExchange

CPU = torch.device("cpu")


def ring(store: dist.Store, size: int = 2, seconds: float = 20.0) -> list[StoreExchange]:
    """All ranks' exchanges."""
    made: dict[int, StoreExchange] = {}

    def make(rank: int) -> None:
        made[rank] = StoreExchange(rank, size, seconds, store, "a", f"rank {rank}")

    in_threads(make, size)
    return [made[rank] for rank in range(size)]


def in_threads(work: Callable[[int], None], size: int) -> None:
    """Call ``work(rank)`` for all ranks at once; rank 0 on this thread."""
    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(1, size)]
    for thread in threads:
        thread.start()
    work(0)
    for thread in threads:
        thread.join()


def learns_at_once(exchange: StoreExchange, rank: int) -> None:
    began = time.monotonic()
    with pytest.raises(HandoffError, match=f"rank {rank} has closed its transport"):
        exchange.exchange(None, "here")
    assert time.monotonic() - began < 5


# ---- broadcast on GPUs ------------------------------------------------------------------------------------------------------
class Silent:
    """A broadcast in which a rank takes no part."""

    def is_completed(self) -> bool:
        return False

    def wait(self) -> None:
        raise AssertionError("blocks for as long as torch likes")


@pytest.fixture
def on_a_gpu(monkeypatch):
    """A transport between GPUs with one rank, and the devices on which the default group was aborted."""
    made, aborted = object.__new__(peer.PeerTransport), []
    Transport.__init__(made, 0, 1, 0.3)
    made._failure, made.device = None, CPU
    made._store_exchange = StoreExchange(0, 1, 5.0, dist.HashStore(), "a", "here")
    monkeypatch.setattr(cuda_common, "_abort_default_group", aborted.append)
    return made, aborted


def test_a_broadcast_has_the_timeout(on_a_gpu, monkeypatch):
    made, aborted = on_a_gpu
    monkeypatch.setattr(dist, "broadcast", lambda tensor, src, async_op=False: Silent())
    began = time.monotonic()
    with pytest.raises(HandoffError, match=r"^step 3, flush: broadcast from rank 0 failed within 0.3 s \(a rank crashed"):
        made.broadcast(torch.zeros(4, dtype=torch.uint8), 0, "step 3, flush")
    assert 0.2 < time.monotonic() - began < 5
    assert aborted == [CPU], "its kernel would block the device"


def test_a_broadcast_that_fails_is_told(on_a_gpu, monkeypatch):
    made, aborted = on_a_gpu

    def broken() -> None:
        raise RuntimeError("NCCL error: remote process exited\nframe #0: ...")

    monkeypatch.setattr(
        dist, "broadcast", lambda tensor, src, async_op=False: SimpleNamespace(is_completed=lambda: True, wait=broken)
    )
    with pytest.raises(HandoffError, match=r"here: broadcast from rank 0 failed within .*: NCCL error: remote process exited$"):
        made.broadcast(torch.zeros(4, dtype=torch.uint8), 0, "here")
    assert not aborted


# ---- constructors that fail -------------------------------------------------------------------------------------------------
def test_a_rank_that_came_too_late_learns_that_the_first_has_given_up():
    store = dist.HashStore()
    with pytest.raises(HandoffError, match=r"rank\(s\) \[1\] missing"):
        StoreExchange(0, 2, 0.2, store, "a", "rank 0")
    late = StoreExchange(1, 2, 20.0, store, "a", "rank 1")
    learns_at_once(late, 0)


def raises(error: BaseException):
    def call(*_, **__):
        raise error

    return call


@pytest.mark.parametrize("error", [OSError("no sockets"), AssertionError("a bug")])
def test_connect_closes_its_exchange_when_a_constructor_raises(monkeypatch, error):
    store, exchanges, outcomes = dist.HashStore(), {}, {}

    def exchange(rank, size, seconds, _, name, where):
        exchanges[rank] = StoreExchange(rank, size, seconds, store, name, where)
        return exchanges[rank]

    def make(rank, size, seconds):
        if rank == 0:
            raise error
        return SimpleNamespace(name="gloo")

    monkeypatch.setattr(connect, "StoreExchange", exchange)
    monkeypatch.setattr(gloo, "GlooTransport", make)

    def run(rank: int) -> None:
        try:
            connect._choose_and_make("auto", exchange(rank, 2, 20.0, None, "deepspeed_cdp_choice", "here"), CPU, "here")
            outcomes[rank] = "made"
        except BaseException as caught:
            outcomes[rank] = caught

    thread = threading.Thread(target=run, args=(1,))  # all but the log, which needs a process group
    thread.start()
    with pytest.raises(type(error)):
        connect.connect("auto", 0, 2, 20.0, CPU)
    thread.join()
    assert outcomes == {1: "made"}
    learns_at_once(exchanges[1], 0)


def test_connect_closes_the_peer_transport_if_another_rank_is_gone(monkeypatch):
    closed = []
    monkeypatch.setattr(peer_native, "make", lambda *_: SimpleNamespace(close=closed.append))
    exchange = SimpleNamespace(rank=0, size=2, timeout_seconds=1.0, exchange=raises(HandoffError("rank 1 is gone")))
    with pytest.raises(HandoffError, match="rank 1 is gone"):
        connect._try_peer(exchange, CPU, "here")
    assert closed == [False]


@pytest.fixture
def one_store(monkeypatch):
    """All exchanges use one store."""
    store = dist.HashStore()
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: store)
    return store


def fake_cuda(monkeypatch) -> None:
    monkeypatch.setattr(cuda_common, "CudaBindings", lambda: SimpleNamespace(create_event=lambda: 1))
    monkeypatch.setattr(torch.cuda, "Stream", lambda *_, **__: SimpleNamespace(cuda_stream=7, query=lambda: True))


def make_gloo(monkeypatch):
    monkeypatch.setattr(dist, "ProcessGroupGloo", raises(RuntimeError("no route to host")))
    return lambda: gloo.GlooTransport(0, 1, 5.0), "deepspeed_cdp"


def make_nccl_group(monkeypatch):
    monkeypatch.setattr(nccl_group, "range", lambda size: (0, 1), raising=False)  # groups are made for two ranks or more
    monkeypatch.setattr(dist, "new_group", raises(RuntimeError("no NCCL")))
    return lambda: nccl_group.NcclGroupTransport(0, 1, 5.0, CPU), "deepspeed_cdp_pipe"


def make_peer(monkeypatch):
    fake_cuda(monkeypatch)
    monkeypatch.setattr(peer, "PeerMemory", lambda *_: SimpleNamespace(own=None, addresses=[0]))
    monkeypatch.setattr(peer, "select_wait_streams", raises(RuntimeError("cuStreamWaitValue32: CUDA_ERROR_NOT_SUPPORTED")))
    return lambda: peer.PeerTransport(0, 1, 5.0, CPU), "deepspeed_cdp"


def make_nccl(monkeypatch):
    fake_cuda(monkeypatch)
    monkeypatch.setattr(nccl, "NcclBindings", lambda: None)
    monkeypatch.setattr(nccl, "Watchdog", raises(RuntimeError("can't start new thread")))
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *a, pin_memory=False, **k: zeros(*a, **k))
    return lambda: nccl.NcclTransport(0, 1, 5.0, CPU), "deepspeed_cdp"


@pytest.mark.parametrize("prepare", [make_gloo, make_nccl_group, make_peer, make_nccl])
def test_a_transport_that_cannot_be_made_tells_the_others(one_store, monkeypatch, prepare):
    make, name = prepare(monkeypatch)
    with pytest.raises(RuntimeError):
        make()
    assert one_store.check([f"{name}/1/closing/0"])


# ---- memory -----------------------------------------------------------------------------------------------------------------
class Memory:
    """Allocations of a driver, and what is mapped of other processes'; memory of the host in the place of a GPU's."""

    def __init__(self, rank: int):
        self.rank, self.held, self.mapped = rank, {}, {}

    def whole(self, nbytes: int) -> int:
        return -(-nbytes // 4096) * 4096

    def allocate(self, nbytes: int) -> int:
        assert nbytes == self.whole(nbytes)
        held = torch.full((nbytes,), 7, dtype=torch.uint8)
        self.held[held.data_ptr()] = held
        return held.data_ptr()

    def share(self, address: int) -> int:
        descriptor = os.memfd_create("shared")
        os.write(descriptor, f"{self.rank}:{address}".encode())
        return descriptor

    def map_shared(self, descriptor: int, nbytes: int) -> int:
        rank, address = map(int, os.pread(descriptor, 100, 0).split(b":"))
        self.mapped[address] = rank, nbytes
        return address

    def unmap(self, address: int, nbytes: int) -> None:
        if address in self.held:
            assert self.held.pop(address).numel() == nbytes
        else:
            assert self.mapped.pop(address)[1] == nbytes


@pytest.fixture
def on_hosts(monkeypatch):
    """``PeerMemory`` with ``Memory`` as its driver."""
    fake_cuda(monkeypatch)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    wrapped, kept = torch.as_tensor, []

    def as_tensor(allocation, device):
        assert allocation.__cuda_array_interface__["data"] == (allocation.address, False)
        kept.append(allocation)  # as torch does
        return wrapped(allocation.driver.held[allocation.address])

    monkeypatch.setattr(torch, "as_tensor", as_tensor)


def test_ranks_map_each_other_s_memory_of_any_size(on_hosts):
    exchanges, made, sizes = ring(dist.HashStore(), 3), {}, (5000, 100, 0)
    drivers, before = [Memory(rank) for rank in range(3)], set(os.listdir("/proc/self/fd"))

    def make(rank: int) -> None:
        made[rank] = PeerMemory(sizes[rank], CPU, drivers[rank], exchanges[rank])

    in_threads(make, 3)
    assert [made[r].own.numel() for r in range(3)] == [5000, 100, 0] and not any(made[r].own.any() for r in range(3))
    own = [next(iter(driver.held)) for driver in drivers]
    assert made[0].addresses == made[1].addresses == made[2].addresses == own
    for rank, driver in enumerate(drivers):
        assert driver.mapped == {own[r]: (r, (8192, 4096, 4096)[r]) for r in range(3) if r != rank}
    assert set(os.listdir("/proc/self/fd")) <= before  # no descriptor is left
    made[0].close()
    assert not drivers[0].mapped and len(drivers[1].mapped) == 2


def test_a_rank_that_ends_before_it_hands_its_descriptor_over_is_told():
    mine, others = ring(dist.HashStore())
    thread = threading.Thread(target=lambda: others.exchange("\0nobody-listens", "there"))
    thread.start()
    with pytest.raises(HandoffError, match="^here: no memory of rank 1: .*refused"):
        exchange_descriptors(0, mine, "here")
    thread.join()


def test_a_rank_that_ends_instead_of_sending_its_descriptor_is_told(monkeypatch):
    exchanges, told, before = ring(dist.HashStore()), {}, set(os.listdir("/proc/self/fd"))
    send, sent = socket.send_fds, threading.Event()

    def send_or_end(*arguments) -> None:
        if threading.current_thread() is threading.main_thread():  # rank 0
            send(*arguments)
            sent.set()
        else:
            sent.wait(10)
            raise OSError("the process ends")

    def hand_over(rank: int) -> None:
        try:
            exchange_descriptors(0, exchanges[rank], f"rank {rank}")
        except HandoffError as error:
            told[rank] = str(error)

    monkeypatch.setattr(socket, "send_fds", send_or_end)
    in_threads(hand_over, 2)
    assert told == {
        0: "rank 0: no memory of rank 1: it has ended",
        1: "rank 1: rank(s) [0] did not take this rank's memory: the process ends",
    }
    assert set(os.listdir("/proc/self/fd")) <= before


def test_descriptors_go_to_no_other_user(monkeypatch):
    exchanges, told = ring(dist.HashStore(), 2, 1.0), []
    monkeypatch.setattr(os, "getuid", lambda: 12345)

    def hand_over(rank: int) -> None:
        try:
            told.append(exchange_descriptors(0, exchanges[rank], "here"))
        except HandoffError as error:
            told.append(str(error))

    in_threads(hand_over, 2)
    refused = r"here: (rank\(s\) \[[01]\] did not take this rank's memory: timed out|no memory of rank [01]: .*Broken pipe)"
    assert len(told) == 2 and all(isinstance(x, str) and re.fullmatch(refused, x) for x in told)


def test_a_rank_that_listens_only_is_told_in_time():
    """However many others call late, and whoever else calls."""
    exchanges, told, seconds = ring(dist.HashStore(), 3, 2.0), {}, {}

    def listen() -> None:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(f"\0cdp-test-{os.getpid()}")
            listener.listen(4)
            names = exchanges[2].exchange(f"\0cdp-test-{os.getpid()}", "there")
            for _ in range(25):  # calls of a process that is no rank
                with socket.socket(socket.AF_UNIX) as stranger, suppress(OSError):
                    stranger.connect(names[0])
                time.sleep(0.1)

    def hand_over(rank: int) -> None:
        if rank == 2:
            return listen()
        began = time.monotonic()
        try:
            exchange_descriptors(0, exchanges[rank], f"rank {rank}")
        except HandoffError as error:
            told[rank], seconds[rank] = str(error), time.monotonic() - began

    in_threads(hand_over, 3)
    assert told == {r: f"rank {r}: rank(s) [2] did not take this rank's memory: timed out" for r in (0, 1)}
    assert max(seconds.values()) < 2.5


def test_a_process_with_too_many_open_files_says_so():
    limits, told, before = resource.getrlimit(resource.RLIMIT_NOFILE), set(), len(os.listdir("/proc/self/fd"))

    def hand_over(rank: int) -> None:
        try:
            for descriptor in filter(None, exchange_descriptors(0, exchanges[rank], "here")):
                os.close(descriptor)
        except HandoffError as error:
            told.add(str(error))

    try:
        for more in range(8):
            exchanges = ring(dist.HashStore(), 2, 1.0)
            resource.setrlimit(resource.RLIMIT_NOFILE, (before + more, limits[1]))
            in_threads(hand_over, 2)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert "here: no socket: [Errno 24] Too many open files" in told and len(os.listdir("/proc/self/fd")) == before


def test_no_rank_waits_for_one_that_lacks_the_memory(on_hosts):
    mine, others = ring(dist.HashStore())
    made = object.__new__(peer.PeerTransport)
    Transport.__init__(made, 0, 2, 20.0)
    made.device, made._store_exchange, made.driver, made._memory = CPU, mine, Memory(0), None
    others.close(None)  # as its engine does when it ran out of memory
    with pytest.raises(HandoffError, match="rank 0, allocating: rank 1 has closed its transport"):
        made.allocate(100)


# ---- closing ----------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", [peer.PeerTransport, nccl.NcclTransport])
def test_a_close_that_fails_tells_the_others(monkeypatch, kind):
    """The device itself may fail while a transport drains."""
    mine, others = ring(dist.HashStore())
    made, stopped = object.__new__(kind), []
    Transport.__init__(made, 0, 2, 20.0)
    made._failure, made._closed, made._store_exchange, made.device = None, False, mine, CPU
    made._memory = made._word_memory = None
    made._watchdog = SimpleNamespace(stop=lambda: stopped.append(True))
    made._streams = {"P": SimpleNamespace(query=raises(RuntimeError("CUDA error: an illegal memory access")))}
    made.reset = raises(RuntimeError("CUDA error: an illegal memory access"))
    if kind is peer.PeerTransport:
        thread = threading.Thread(target=others.exchange, args=(None, "closing"))
        thread.start()
    with pytest.raises(RuntimeError, match="illegal memory access"):
        made.close(True)
    if kind is peer.PeerTransport:
        thread.join()
    learns_at_once(others, 0)
    assert stopped == [True]


# ---- the store --------------------------------------------------------------------------------------------------------------
def test_a_store_that_is_gone_at_the_first_message_is_told():
    made = object.__new__(gloo.GlooTransport)
    made.rank, made._streams = 1, {}
    made._store_exchange = exchange = StoreExchange(0, 1, 5.0, dist.HashStore(), "a", "here")
    client = SimpleNamespace(compare_set=raises(RuntimeError("Connection reset by peer\nframe #0: ...")))
    exchange._store = SimpleNamespace(call=lambda function, deadline: function(client))
    exchange._prefix = ""
    with pytest.raises(HandoffError) as caught:
        made._stream_number("P")
    assert str(caught.value) == (
        "rank 1, first message on stream P: the store is gone (rank 0 crashed or exited?): Connection reset by peer"
    )


def test_the_last_wait_for_a_key_has_a_timeout_too():
    """To torch's stores 0 ms mean no timeout, and they cut off fractions of a millisecond."""
    waits: list[float] = []

    def wait(keys, timeout):
        waits.append(timeout.total_seconds())
        raise dist.DistStoreError("wait timeout")

    exchange = object.__new__(StoreExchange)
    exchange.rank, exchange.size, exchange.timeout_seconds, exchange._calls, exchange._prefix = 0, 1, 0.0005, 0, ""
    client = SimpleNamespace(set=lambda *_: None, check=lambda keys: False, wait=wait)
    exchange._store = SimpleNamespace(call=lambda function, deadline: function(client))
    for _ in range(100):  # on a busy machine half a millisecond may be over before the first wait
        with pytest.raises(HandoffError, match="missing after 0.0005 s"):
            exchange.exchange(None, "here")
        if waits:
            break
    assert waits and min(waits) >= 0.001


# ---- relays -----------------------------------------------------------------------------------------------------------------
class Came:
    """A ticket that is done."""

    def __init__(self) -> None:
        self.waited: list[object] = []

    def wait(self, where: object) -> None:
        self.waited.append(where)

    def done(self) -> bool:
        return bool(self.waited)


def test_relays_are_done_in_order_beside_the_host():
    transport, go, seen, came = LocalTransport(Hub(1, 5), 0), threading.Event(), [], Came()
    ticket = transport.relay(lambda: go.wait(5) and seen.append("first") or came)
    last = transport.relay(lambda: seen.append("second"))
    assert not seen and not ticket.done() and not last.done()
    go.set()
    transport.wait_event(last)
    assert seen == ["first", "second"] and not ticket.done() and last.done()
    ticket.wait("here")
    last.wait("here")
    assert came.waited == ["here"] and ticket.done()
    transport.finish_relays("here")
    transport.end_relays()
    transport._relay.thread.join(5)
    assert not transport._relay.thread.is_alive()


def test_a_relay_that_fails_fails_all_later_ones_and_whoever_waits_for_them():
    """What it has not offered cannot be pulled, so what comes after it must not be either."""
    transport, seen = LocalTransport(Hub(2, 0.2), 0), []

    def fails() -> None:
        transport.post("G", 1, torch.zeros(8, dtype=torch.uint8)).wait("rank 0, step 3, stage 1, running sum of u2")

    ticket = transport.relay(fails)
    later = transport.relay(lambda: seen.append("later"))
    reason = "^rank 0, step 3, stage 1, running sum of u2: no message on stream G from rank 1 within 0.2 s"
    for wait in (ticket.wait, later.wait, transport.finish_relays, lambda where: transport.wait_event(later)):
        with pytest.raises(HandoffError, match=reason):
            wait("elsewhere")
    assert not seen
    transport.end_relays()


def test_an_error_in_a_relay_is_raised_where_it_is_waited_for():
    transport = LocalTransport(Hub(1, 5), 0)
    ticket = transport.relay(lambda: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        transport.wait_event(ticket)
    transport.end_relays()


def test_on_a_gpu_a_relay_is_a_stream_and_no_thread(on_a_gpu, monkeypatch):
    made, _ = on_a_gpu
    current, before = [], threading.active_count()
    made._relay_stream = "the relay stream"
    monkeypatch.setattr(cuda_common, "_On", lambda stream: current.append(stream) or nullcontext())
    assert made.relay(lambda: "ticket") == "ticket" and current == ["the relay stream"]
    made.finish_relays("here")
    made.end_relays()
    assert threading.active_count() == before
