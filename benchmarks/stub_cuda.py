"""Peer transports without GPUs: CUDA streams are numbers, and a stub of the driver (stub_driver.cpp) takes notes.

Nothing arrives, so the values of other ranks are zeros. The host does all that it does on GPUs: this is for timing it, and for
comparing the driver's calls.
"""

import ctypes
import itertools
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from deepspeed_cdp.transport import cuda_bindings, peer

KINDS = ("", "wait", "write", "copy", "record", "follow", "fill", "query", "batch")
_MOST = 1 << 16


def build(folder: Path) -> Path:
    """Compile the stub with g++; returns the library's path."""
    library = folder / "libcuda_stub.so"
    if not library.exists():
        source = Path(__file__).with_name("stub_driver.cpp")
        subprocess.run(["g++", "-O2", "-shared", "-fPIC", "-o", library, source], check=True, timeout=120)
    return library


class Stub:
    """The driver's notes."""

    def __init__(self, library: Path):
        self._library = ctypes.CDLL(str(library))
        self._library.stub_total.restype = self._library.stub_take.restype = ctypes.c_uint64
        self._calls = (ctypes.c_uint64 * (5 * _MOST))()

    def record(self, on: bool) -> None:
        """Keep (or no longer keep) the calls from now on."""
        self._library.stub_record(int(on))

    def stick(self, on: bool) -> None:
        """Events are never reached."""
        self._library.stub_stick(int(on))

    def fail(self, on: bool) -> None:
        """Copies fail."""
        self._library.stub_fail(int(on))

    def single(self, on: bool) -> None:
        """Several words in one call are not supported."""
        self._library.stub_single(int(on))

    def total(self) -> int:
        """Driver calls so far, kept or not."""
        return self._library.stub_total()

    def take(self) -> list[tuple[Any, ...]]:
        """The calls kept since the last time: (kind, stream, arguments)."""
        n = self._library.stub_take(self._calls, ctypes.c_uint64(_MOST))
        flat = list(self._calls[: 5 * n])
        return [(KINDS[flat[k]], *flat[k + 1 : k + 5]) for k in range(0, 5 * n, 5)]


class _Stream:
    """torch.cuda.Stream, as far as transports use it."""

    numbers = itertools.count(100)

    device_index, device_type = 0, 1

    def __init__(self, *_: Any, **__: Any):
        self.cuda_stream = self.stream_id = next(self.numbers)

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


class _Event:
    """torch.cuda.Event."""

    def __init__(self, *_: Any, **__: Any):
        pass

    def record(self) -> None:
        pass

    def query(self) -> bool:
        return True

    def elapsed_time(self, _: Any) -> float:
        return 1.0


class _Exchange:
    """StoreExchange among ranks that all say the same."""

    def __init__(self, rank: int, size: int, *_: Any):
        self.rank, self.size = rank, size

    def exchange(self, value: Any, where: Any) -> list[Any]:
        return [value] * self.size

    def close(self, _: Any) -> None:
        pass


class _Memory:
    """PeerMemory: the addresses of other ranks' are made up, 2**40 bytes apart."""

    numbers = itertools.count(1)

    def __init__(self, nbytes: int, device: Any, driver: Any, exchange: Any):
        self.own, number = torch.zeros(nbytes, dtype=torch.uint8), next(self.numbers)
        self.addresses = [number << 50 | r << 40 for r in range(exchange.size)]
        self.addresses[exchange.rank] = self.own.data_ptr()

    def close(self) -> None:
        self.addresses = []


@contextmanager
def stubbed(library: Path) -> Iterator[Stub]:
    """Inside, ``PeerTransport(rank, size, ...)`` can be made on the CPU, and ``NativePeerTransport``."""
    thread = threading.local()

    def current(_: int = 0) -> int:
        return getattr(thread, "stream", 0)

    def put(stream: int, *_: int) -> None:
        thread.stream = stream

    @contextmanager
    def on(stream: Any) -> Iterator[None]:
        before = current()
        put(stream.cuda_stream)
        try:
            yield
        finally:
            put(before)

    def streams(count: int, *_: Any) -> tuple[list[_Stream], str]:
        return [_Stream() for _ in range(count)], "stubs"

    _Stream.numbers, _Memory.numbers = itertools.count(100), itertools.count(1)
    broadcast = SimpleNamespace(is_completed=lambda: True, wait=lambda: None)
    with (
        mock.patch.object(cuda_bindings, "LIBRARY", str(library)),
        mock.patch.object(peer, "StoreExchange", _Exchange),
        mock.patch.object(peer, "PeerMemory", _Memory),
        mock.patch.object(peer, "select_wait_streams", streams),
        mock.patch.object(torch.distributed, "broadcast", lambda *_, **__: broadcast),
        mock.patch.multiple(
            torch.cuda,
            Stream=_Stream,
            Event=_Event,
            stream=on,
            synchronize=lambda *_: None,
            set_device=lambda *_: None,
            current_stream=_Stream,
        ),
        mock.patch.object(torch._C, "_cuda_getCurrentRawStream", current, create=True),
        mock.patch.object(torch._C, "_cuda_getCurrentStream", lambda _: (current(), 0, 1), create=True),
        mock.patch.object(torch._C, "_cuda_setStream", put, create=True),
    ):
        yield Stub(library)
