"""Transport "peer" with its words, counts and tickets in C++ (native/links.h)."""

from collections.abc import Sequence
from functools import partial
from types import ModuleType
from typing import Any

import torch

from deepspeed_cdp.errors import HandoffError
from deepspeed_cdp.native.load import load
from deepspeed_cdp.transport import cuda_bindings
from deepspeed_cdp.transport.base import PULLED, Ticket, Where
from deepspeed_cdp.transport.cuda_common import Watchdog
from deepspeed_cdp.transport.peer import CREDIT_ON_CURRENT, CUDA_STREAM_OF, STREAMS, PeerTransport


class NativePeerTransport(PeerTransport):
    """Does the same, with the same calls of the driver in the same order, but for words and watches (native/driver.h).

    Attributes:
        native: the extension.
        links: its edges.
        streams_by_name: numbers of streams.
    """

    streams_by_name = {name: code for code, name in enumerate(STREAMS)}

    def __init__(self, native: ModuleType, *arguments: Any, **options: Any):
        """
        Args:
            native: the extension (native/load.py). The others are those of ``PeerTransport``.
        """
        self.native = native
        super().__init__(*arguments, **options)

    def _connected(self) -> None:
        self.links = self.native.Links(
            cuda_bindings.LIBRARY,
            self.rank,
            self.size,
            list(STREAMS),
            [(self._handles[CUDA_STREAM_OF[s]], s in PULLED, s in CREDIT_ON_CURRENT) for s in STREAMS],
            self._word_bases,
            self._handles["credit"],
            self._owner.cuda_stream,
            self._relay_stream.cuda_stream,
            partial(torch._C._cuda_getCurrentRawStream, self.device.index),
            HandoffError,
            self.timing,
            {n: getattr(self, n) for n in ("sent", "bytes_sent", "received", "bytes_received")},
        )
        self._watchdog = _NativeWatchdog(self)

    def allocate(self, nbytes: int) -> torch.Tensor:
        memory = super().allocate(nbytes)
        self.links.bases = self._bases
        return memory

    # ---- words and counts -----------------------------------------------------------------------------------------------
    def _count(self, stream: str, peer: int, incoming: bool) -> int:
        return self.links.count(stream, peer, incoming)

    def _latest_waits(self) -> list[tuple[int, int, tuple[str, int], Where]]:
        return [(*word, where if a is None else where(a, step)) for *word, where, a, step in self.links.noted()]

    def _forget_messages(self) -> None:
        self.links.clear_counts()

    # ---- messages -------------------------------------------------------------------------------------------------------
    def work_enqueued(self) -> None:
        self.links.work_enqueued()

    def record_event(self) -> Any:
        event = self.links.record_event()
        self._watchdog.expect(event)
        return event

    def wait_event(self, event: Any) -> None:
        if event is not None:
            self.links.wait_event(event)

    def post(
        self, stream: str, src: int, into: torch.Tensor, after: Sequence[Ticket] = (), where: Where = "", remote_offset: int = -1
    ) -> Ticket:
        return self.links.post(stream, src, into.data_ptr(), into.numel(), after, where, remote_offset)

    def push(self, stream: str, dst: int, source: torch.Tensor, after: Ticket | None = None, remote_offset: int = -1) -> Ticket:
        return self.links.push(stream, dst, source.data_ptr(), source.numel(), after, remote_offset)

    # ---- failures and the end -------------------------------------------------------------------------------------------
    def abort(self, reason: str, poison: bool = True) -> None:
        self.links.failure = self._failure or reason
        super().abort(reason, poison)

    def close(self, drain: bool) -> None:
        super().close(drain)
        self.links.forget_waits()  # what they name holds this object, and Python does not see that circle


def make(rank: int, size: int, timeout_seconds: float, device: torch.device, name: str = "deepspeed_cdp") -> PeerTransport:
    """Collective: the transport in C++, or in Python where the extension cannot be built. Arguments as of ``PeerTransport``."""
    try:
        native = load()
    except RuntimeError as error:
        transport = PeerTransport(rank, size, timeout_seconds, device, name=name)
        transport.why_not_native = str(error)
        return transport
    return NativePeerTransport(native, rank, size, timeout_seconds, device, name=name)


class _NativeWatchdog(Watchdog):
    """Also watches the streams that C++ has made wait."""

    _transport: NativePeerTransport

    def _watch(self) -> None:
        self._unwatched.update(self._transport.links.take_waiting())
        super()._watch()
