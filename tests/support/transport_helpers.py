"""What the scenarios of the transport contract share."""

from collections.abc import Callable

import torch

from deepspeed_cdp.transport.base import Ticket, Transport

Make = Callable[..., Transport]
W = "rank ?, a test"  # the `where` of waits that must succeed


def full(value: int, size: int = 1000) -> torch.Tensor:
    return torch.full((size,), value % 251, dtype=torch.uint8)


def empty(size: int = 1000) -> torch.Tensor:
    return torch.full((size,), 255, dtype=torch.uint8)


def is_full(tensor: torch.Tensor, value: int) -> bool:
    return bool((tensor == value % 251).all())


def untouched(tensor: torch.Tensor) -> bool:
    return bool((tensor == 255).all())


def agree(transport: Transport) -> None:
    transport.gather(None, W)


def is_done(ticket: Ticket) -> bool:
    """After ``wait``: on a GPU that has only held the stream."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return ticket.done()
