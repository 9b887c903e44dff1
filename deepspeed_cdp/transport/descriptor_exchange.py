"""Exchange of file descriptors between the processes of one host, which only a socket can hand over."""

import os
import socket
import struct
import time
import uuid
from contextlib import ExitStack

from deepspeed_cdp.errors import HandoffError
from deepspeed_cdp.transport.base import Where
from deepspeed_cdp.transport.store_exchange import StoreExchange

_RANK = struct.Struct("i")  # what a caller says first


def exchange_descriptors(own: int, exchange: StoreExchange, where: Where) -> list[int | None]:
    """Collective: by rank, a descriptor of its ``own``, which the caller closes; None for this rank.

    Raises:
        HandoffError: a rank is missing, or does not hand its descriptor over.
    """
    others = [rank for rank in range(exchange.size) if rank != exchange.rank]
    found: list[int | None] = [None] * exchange.size
    with ExitStack() as sockets, ExitStack() as received:
        trouble = "no socket"
        try:
            listener, name = sockets.enter_context(_socket()), f"\0deepspeed_cdp-{uuid.uuid4().hex}"
            listener.bind(name)  # in Linux's abstract namespace: no file is left behind
            listener.listen(exchange.size)
            names = exchange.exchange(name, where)
            deadline = time.monotonic() + exchange.timeout_seconds
            calls = {rank: sockets.enter_context(_socket()) for rank in others}
            for rank, call in calls.items():
                trouble = f"no memory of rank {rank}"
                _until(deadline, call).connect(names[rank])  # needs no accept
                call.send(_RANK.pack(exchange.rank))
            missing = set(others)
            while missing:
                trouble = f"rank(s) {sorted(missing)} did not take this rank's memory"
                with _accept(listener, deadline) as caller:
                    said = _until(deadline, caller).recv(_RANK.size)
                    if len(said) == _RANK.size:  # else the caller has ended
                        socket.send_fds(caller, [b"."], [own])
                        missing.discard(*_RANK.unpack(said))
            for rank, call in calls.items():
                trouble = f"no memory of rank {rank}"
                message, descriptors, *_ = socket.recv_fds(_until(deadline, call), 1, 1, socket.MSG_CMSG_CLOEXEC)
                if not descriptors:
                    why = "this process has too many open files" if message else "it has ended"
                    raise HandoffError(f"{where}: {trouble}: {why}")
                found[rank] = descriptors[0]
                received.callback(os.close, descriptors[0])
        except OSError as error:
            raise HandoffError(f"{where}: {trouble}: {error}") from error
        received.pop_all()  # the caller closes them
    return found


def _socket() -> socket.socket:
    return socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)


def _until(deadline: float, waiting: socket.socket) -> socket.socket:
    """The socket, whose next call waits no longer."""
    waiting.settimeout(max(deadline - time.monotonic(), 0.001))  # 0 would mean: not at all
    return waiting


def _accept(listener: socket.socket, deadline: float) -> socket.socket:
    """The next connection of a process of this user; those of others end."""
    while True:
        caller, _ = _until(deadline, listener).accept()
        _, user, _ = struct.unpack("3i", caller.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
        if user == os.getuid():
            return caller
        caller.close()
