"""Exchange of file descriptors between the processes of one host, which only a socket can hand over."""

import os
import socket
import struct
import uuid
from contextlib import ExitStack

from deepspeed_cdp.errors import HandoffError
from deepspeed_cdp.transport.base import Where
from deepspeed_cdp.transport.store_exchange import StoreExchange


def exchange_descriptors(own: int, exchange: StoreExchange, where: Where) -> list[int | None]:
    """Collective: by rank, a descriptor of its ``own``, which the caller closes; None for this rank.

    Raises:
        HandoffError: a rank is missing, or does not hand its descriptor over.
    """
    others = [rank for rank in range(exchange.size) if rank != exchange.rank]
    found: list[int | None] = [None] * exchange.size
    with ExitStack() as sockets, ExitStack() as received:
        listener, name = sockets.enter_context(_socket(exchange)), f"\0deepspeed_cdp-{uuid.uuid4().hex}"
        listener.bind(name)  # in Linux's abstract namespace: no file is left behind
        listener.listen(exchange.size)
        names = exchange.exchange(name, where)
        calls = {rank: sockets.enter_context(_socket(exchange)) for rank in others}
        trouble = ""
        try:
            for rank, call in calls.items():
                trouble = f"no memory of rank {rank}"
                call.connect(names[rank])  # needs no accept
            trouble = "not all ranks took this rank's memory"
            for _ in others:
                with _accept(listener) as caller:
                    socket.send_fds(caller, [b"."], [own])
            for rank, call in calls.items():
                trouble = f"no memory of rank {rank}"
                _, descriptors, *_ = socket.recv_fds(call, 1, 1, socket.MSG_CMSG_CLOEXEC)
                if not descriptors:
                    raise HandoffError(f"{where}: {trouble}: it has ended")
                found[rank] = descriptors[0]
                received.callback(os.close, descriptors[0])
        except OSError as error:
            raise HandoffError(f"{where}: {trouble}: {error}") from error
        received.pop_all()  # the caller closes them
    return found


def _socket(exchange: StoreExchange) -> socket.socket:
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    made.settimeout(exchange.timeout_seconds)
    return made


def _accept(listener: socket.socket) -> socket.socket:
    """The next connection of a process of this user; those of others end."""
    while True:
        caller, _ = listener.accept()
        _, user, _ = struct.unpack("3i", caller.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
        if user == os.getuid():
            return caller
        caller.close()
