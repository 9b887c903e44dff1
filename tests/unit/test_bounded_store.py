"""A client of a store whose server does not answer: calls end in time, and nothing is left after close."""

import contextlib
import gc
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from deepspeed_cdp.errors import HandoffError
from deepspeed_cdp.transport.bounded_store import BoundedStore, Closed, NoAnswer
from deepspeed_cdp.transport.deadline import Late, call_within
from deepspeed_cdp.transport.gloo import GlooTransport
from deepspeed_cdp.transport.store_exchange import StoreExchange

NAME = "deepspeed_cdp store"


def threads() -> int:
    return sum(thread.name == NAME for thread in threading.enumerate())


def connections() -> int:
    count = 0
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the folder's own
            count += os.readlink(f"/proc/self/fd/{fd}").startswith("socket:")
    return count


def soon(condition) -> bool:
    until = time.monotonic() + 10
    while time.monotonic() < until and not condition():
        time.sleep(0.02)
    return condition()


SERVER = """
import signal, torch.distributed as dist
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
signal.pause()
"""


@pytest.fixture
def server() -> Iterator[tuple[int, int]]:
    """(process, port) of a store in a process of its own."""
    # not a fork: other threads of this process may hold locks that its child would wait for
    process = subprocess.Popen([sys.executable, "-c", SERVER], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    yield process.pid, int(process.stdout.readline())
    process.kill()
    process.wait()
    process.stdout.close()


def client(port: int) -> dist.Store:
    return dist.PrefixStore("job", dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False))


def within(seconds: float) -> float:
    return time.monotonic() + seconds


def freeze(process: int) -> None:
    """SIGSTOP, and wait until every thread has stopped."""
    os.kill(process, signal.SIGSTOP)
    stats = [task / "stat" for task in Path(f"/proc/{process}/task").iterdir()]
    assert soon(lambda: all(x.read_text().rsplit(")", 1)[1].split()[0] == "T" for x in stats))


def test_calls_end_in_time_while_the_server_is_frozen(server):
    process, port = server
    before = threads()
    torchs = client(port)
    store = BoundedStore(torchs)
    store.call(lambda s: s.set("key", "value"), within(20))
    assert torchs.get("key") == b"value", "the same keys"
    freeze(process)
    began = time.monotonic()
    with pytest.raises(NoAnswer):
        store.call(lambda s: s.check(["key"]), within(0.5))
    assert 0.4 < time.monotonic() - began < 5
    began = time.monotonic()
    with pytest.raises(NoAnswer):
        store.call(lambda s: s.get("key"), within(20))
    store.close()
    assert time.monotonic() - began < 0.2, "later calls fail at once"
    os.kill(process, signal.SIGCONT)
    assert soon(lambda: threads() == before), "the thread ends once the server answers"
    assert torchs.get("key") == b"value", "the client is free again"


def test_no_connection_to_a_frozen_server(server):
    process, port = server
    torchs = client(port)
    freeze(process)
    began = time.monotonic()
    with pytest.raises(HandoffError) as caught:
        StoreExchange(1, 2, 0.5, torchs, "a", "rank 1, connecting")
    assert str(caught.value) == "rank 1, connecting: rank 0, which hosts the store, does not answer within 0.5 s"
    assert 0.4 < time.monotonic() - began < 5


def test_under_torchrun_its_agent_hosts_the_store(server, monkeypatch):
    process, port = server
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    torchs = client(port)
    freeze(process)
    with pytest.raises(HandoffError) as caught:
        StoreExchange(1, 2, 0.2, torchs, "a", "here")
    assert str(caught.value) == "here: the agent of torchrun, which hosts the store, does not answer within 0.2 s"


def test_a_transport_leaves_neither_threads_nor_connections(server):
    _, port = server
    clients = [client(port) for _ in range(2)]
    gc.collect()  # connections of other tests
    before = threads(), connections()
    for k in range(3):
        with ThreadPoolExecutor(2) as ranks:
            pair = list(ranks.map(lambda r, k=k: GlooTransport(r, 2, 20.0, clients[r], f"t{k}"), range(2)))
            assert threads() == before[0] + 2 and connections() > before[1]
            list(ranks.map(lambda t: t.close(drain=True), pair))
        del pair
    gc.collect()
    assert soon(lambda: (threads(), connections()) == before), (threads(), connections(), before)


def test_an_exchange_that_nobody_closed_ends_with_its_last_reference(server):
    _, port = server
    torchs = client(port)
    before = threads(), connections()
    exchange = StoreExchange(0, 1, 20.0, torchs, "a", "here")
    assert (threads(), connections()) == (before[0] + 1, before[1])
    del exchange
    assert soon(lambda: (threads(), connections()) == before), (threads(), connections(), before)


def test_errors_keep_no_connection_open(server):
    _, port = server
    torchs = client(port)
    before = threads(), connections()
    store = BoundedStore(torchs)
    with pytest.raises(RuntimeError) as caught:
        store.call(lambda s: s.wait(["never"], timedelta(seconds=0.02)), within(20))
    store.close()
    assert caught.value is not None and soon(lambda: (threads(), connections()) == before)
    with pytest.raises(Closed):
        store.call(lambda s: s.check(["key"]), within(20))


def test_errors_are_freed_without_a_garbage_collection():
    """A collection in the middle of work on a GPU would free a former transport's memory, and block on the device."""
    store, kept = BoundedStore(dist.HashStore()), []

    class Transport:
        def fails(self, call) -> None:
            with contextlib.suppress(RuntimeError, Late):
                call()

    def refuse(*_) -> None:
        raise RuntimeError("on purpose")

    def late(*_) -> None:
        time.sleep(0.3)

    cpu = torch.device("cpu")
    calls = [
        lambda: store.call(refuse, within(20)),
        lambda: call_within(20, refuse, cpu),
        lambda: call_within(0.1, late, cpu),
        lambda: store.call(late, within(-20)),
        lambda: BoundedStore(dist.HashStore()).call(lambda s: time.sleep(2), within(0.1)),
    ]
    gc.collect()
    gc.disable()
    try:
        for call in calls:
            transport = Transport()
            transport.fails(call)
            kept.append(weakref.ref(transport))
            del transport
        assert [ref() for ref in kept] == [None] * len(calls)
    finally:
        gc.enable()
        store.close()


@pytest.mark.parametrize("kind", ["hash", "file"])
def test_other_stores(tmp_path, kind):
    store = BoundedStore(dist.HashStore() if kind == "hash" else dist.FileStore(str(tmp_path / "store"), 1))
    store.call(lambda s: s.set("key", "value"), within(20))
    assert store.call(lambda s: s.get("key"), within(20)) == b"value"
    held = threading.Event()
    assert store.server == "the store"
    with pytest.raises(NoAnswer):
        store.call(lambda s: held.wait(), within(0.1))
    held.set()
    store.close()


@pytest.mark.parametrize("owner_first", [True, False])
def test_garbage_that_closes_its_exchange_does_not_wait(owner_first):
    """An engine that nobody destroyed closes in its __del__, within a cycle that the garbage collector finds whole."""

    class Engine:
        def __del__(self):
            began = time.monotonic()
            with contextlib.suppress(Closed):
                self.store.call(lambda store: store.set("closing", "1"), began + 5.0)
            seconds.append(time.monotonic() - began)

    seconds: list[float] = []
    made = [Engine] if owner_first else []
    made += [lambda: BoundedStore(dist.HashStore())] + ([] if owner_first else [Engine])
    parts = [make() for make in made]
    engine, store = parts if owner_first else parts[::-1]
    engine.store, engine.itself = store, engine
    del engine, store, parts
    gc.collect()
    assert len(seconds) == 1 and seconds[0] < 1.0
    assert soon(lambda: not threads())
