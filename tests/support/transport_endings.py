"""The part of the transport contract (transport_contract.py) about closing, silence and disagreement."""

import time

import pytest

from deepspeed_cdp.errors import HandoffError
from support.transport_helpers import Make, W, empty, full, is_full, untouched


def close_lingers(make: Make) -> None:
    """Rank 0 closes at once; rank 1 posts for its message later, and has another one landed but not waited for."""
    t = make()
    if t.rank == 0:
        t.push("early", 1, full(5, 300000))
        t.push("late", 1, full(6, 300000))
        started = time.perf_counter()
        t.close(drain=True)
        assert 0.3 < time.perf_counter() - started < 10
        t.close(drain=True)
    else:
        early, late = empty(300000), empty(300000)
        ticket = t.post("early", 0, early)
        time.sleep(0.5)
        t.post("late", 0, late).wait(W)
        time.sleep(0.5)  # rank 0 has left
        ticket.wait(W)
        assert is_full(early, 5) and is_full(late, 6)
        t.close(drain=True)


def close_drops_what_nobody_takes(make: Make) -> None:
    """All ranks have pushes that nobody posts for; when all close, none waits."""
    t = make(timeout_seconds=20)
    for peer in range(t.size):
        if peer != t.rank:
            t.push("P", peer, full(1, 100000))
            t.post("Q", peer, empty())
    started = time.perf_counter()
    t.close(drain=True)
    assert time.perf_counter() - started < 5


def close_without_linger(make: Make) -> None:
    t = make()
    pushed, posted = t.push("P", 1 - t.rank, full(1)), t.post("Q", 1 - t.rank, empty())
    started = time.perf_counter()
    t.close(drain=False)
    assert time.perf_counter() - started < 1
    for ticket in (pushed, posted):
        with pytest.raises(HandoffError):
            ticket.wait("after closing")


def silent_peer(make: Make) -> None:
    """A peer that is alive but says nothing is an error within the timeout, for both sides of a message."""
    t = make(timeout_seconds=1)
    if t.rank == 0:
        ticket = t.post("P", 1, empty())
        started = time.perf_counter()
        with pytest.raises(HandoffError, match=r"^rank 0, step 7: no message on stream P from rank 1 within 1(\.0)? s"):
            ticket.wait("rank 0, step 7")
        assert 0.9 < time.perf_counter() - started < 3
        with pytest.raises(HandoffError, match="^again"):
            ticket.wait("again")
    else:
        time.sleep(2)
    t.close(drain=False)


def nobody_takes(make: Make) -> None:
    t = make(timeout_seconds=1)
    if t.rank == 0:
        with pytest.raises(HandoffError, match=r"^here: nobody took the message on stream P for rank 1 within 1(\.0)? s"):
            t.push("P", 1, full(0)).wait("here")
    else:
        time.sleep(2)
    t.close(drain=False)


def late_gather(make: Make) -> None:
    t = make(timeout_seconds=1)
    if t.rank == 1:
        time.sleep(2.5)
    else:
        started = time.perf_counter()
        with pytest.raises(HandoffError, match=r"^saving: rank\(s\) \[1\] missing after 1(\.0)? s"):
            t.gather(t.rank, "saving")
        assert time.perf_counter() - started < 3
    t.close(drain=False)


def closed_peer(make: Make) -> None:
    """What a peer that closed will never send is an error at once, also in a collective."""
    t = make(timeout_seconds=30)
    if t.rank == 0:
        t.close(drain=True)
        return
    started = time.perf_counter()
    with pytest.raises(HandoffError, match="rank 0 (has closed|closed)"):
        t.post("P", 0, empty()).wait("here")
    with pytest.raises(HandoffError, match="rank 0 (has closed|closed)"):
        t.push("P", 0, full(0)).wait("here")
    with pytest.raises(HandoffError, match="rank 0 has closed"):
        t.gather(1, "here")
    assert time.perf_counter() - started < 5
    t.close(drain=True)


def size_mismatch(make: Make) -> None:
    """Sides that disagree on the size never exchange bytes, and neither is told that all is well."""
    t = make(timeout_seconds=2)
    for stream, pushed, posted in (("less", 50, 100), ("more", 100, 50)):
        box = empty(posted)
        with pytest.raises(HandoffError):
            (t.push(stream, 1, full(0, pushed)) if t.rank == 0 else t.post(stream, 0, box)).wait("here")
        assert untouched(box)
    t.close(drain=False)
