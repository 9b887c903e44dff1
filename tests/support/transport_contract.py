"""What every transport must do (deepspeed_cdp/transport/base.py), as functions that each rank runs.

A scenario takes ``make``, which builds a transport, and runs in every rank at once; it asserts by itself. ``SCENARIOS`` lists
them with their number of ranks. How a rank dies differs between transports and is the test files' business.

    make(timeout_seconds=20.0, name="a") -> Transport
"""

import random
import time
from collections.abc import Callable
from typing import Any

import pytest

from deepspeed_cdp.errors import HandoffError
from support.transport_endings import (
    close_drops_what_nobody_takes,
    close_lingers,
    close_without_linger,
    closed_peer,
    late_gather,
    nobody_takes,
    silent_peer,
    size_mismatch,
)
from support.transport_helpers import Make, W, agree, empty, full, is_done, is_full, untouched


def order_on_an_edge(make: Make) -> None:
    """The n-th push meets the n-th post, whatever the order of the waits, small messages after large ones too."""
    t = make()
    sizes = [100000, 1, 5000, 5000, 300, 1, 1, 70000]
    if t.rank == 0:
        tickets = [t.push("P", 1, full(k, n)) for k, n in enumerate(sizes)]
        for ticket in tickets:
            ticket.wait(W)
    else:
        boxes = [empty(n) for n in sizes]
        tickets = [t.post("P", 0, box) for box in boxes]
        for ticket in reversed(tickets):
            ticket.wait(W)
            ticket.wait(W)  # idempotent
            assert is_done(ticket)
        assert all(is_full(box, k) for k, box in enumerate(boxes))
    t.close(drain=True)


def edges_are_independent(make: Make) -> None:
    """A blocked edge blocks no other: another stream of the same pair, both directions, another pair."""
    t = make()
    other = 1 - t.rank
    if t.rank < 2:
        blocked_in = empty()
        blocked = t.post("blocked", other, blocked_in)  # nothing comes until the end
        stuck = t.push("stuck", other, full(9, 200000))  # nobody takes it until the end
        for k in range(20):
            box = empty()
            post = t.post("free", other, box)
            push = t.push("free", other, full(k + t.rank))
            post.wait(W)
            push.wait(W)
            assert is_full(box, k + other), f"message {k}: {box[:4].tolist()}"
    else:
        stuck = None
    agree(t)
    if stuck is not None:
        box = empty(200000)
        take = t.post("stuck", other, box)
        free = t.push("blocked", other, full(3))
        for ticket in (take, stuck, free, blocked):
            ticket.wait(W)
        assert is_full(box, 9) and is_full(blocked_in, 3)
    t.close(drain=True)


def push_before_post(make: Make) -> None:
    t = make()
    if t.rank == 0:
        ticket = t.push("P", 1, full(7))
        agree(t)
        ticket.wait(W)
    else:
        agree(t)  # the push was made long ago
        time.sleep(0.05)
        box = empty()
        t.post("P", 0, box).wait(W)
        assert is_full(box, 7)
    t.close(drain=True)


def post_before_push(make: Make) -> None:
    t = make()
    if t.rank == 0:
        agree(t)
        time.sleep(0.05)
        t.push("P", 1, full(7)).wait(W)
    else:
        box = empty()
        ticket = t.post("P", 0, box)
        agree(t)
        ticket.wait(W)
        assert is_full(box, 7)
    t.close(drain=True)


def ring_with_reused_buffers(make: Make, messages: int = 150, slots: int = 3) -> None:
    """Each rank sends and receives many messages around the ring through few buffers, overwritten as soon as wait allows."""
    t = make()
    after, before = (t.rank + 1) % t.size, (t.rank - 1) % t.size
    dice, sizes = random.Random(t.rank), random.Random(1).choices([1, 64, 4096, 30000], k=messages)
    out, into = [empty(30000) for _ in range(slots)], [empty(30000) for _ in range(slots)]
    pushes: list[Any] = [None] * slots
    posts = [t.post("G", before, into[k][: sizes[k]]) for k in range(slots)]
    for k in range(messages):
        slot, size = k % slots, sizes[k]
        if pushes[slot] is not None:
            pushes[slot].wait(W)
        out[slot].fill_((k * 7 + t.rank) % 251)
        pushes[slot] = t.push("G", after, out[slot][:size])
        if dice.random() < 0.1:
            time.sleep(dice.random() * 0.01)
        posts[slot].wait(W)
        assert is_full(into[slot][:size], k * 7 + before), f"message {k}"
        into[slot].fill_(255)
        if k + slots < messages:
            posts[slot] = t.post("G", before, into[slot][: sizes[k + slots]])
    t.close(drain=True)


def relays_beside_the_host(make: Make) -> None:
    """A sum rests with rank 0, which relays it from rank to rank, in the order of its calls, while its own host goes on."""
    t, rounds = make(), 5
    others = range(1, t.size)
    t.prepare([e for r in others for e in (("G", r, 0), ("G0", 0, r))], False)
    if t.rank == 0:
        box, back = full(0), None

        def offer(back: Any, dst: int) -> Any:
            if back is not None:
                back.wait(W)
            return t.push("G0", dst, box)

        for _ in range(rounds):
            for r in others:
                taken = t.relay(lambda back=back, r=r: offer(back, r))
                back = t.relay(lambda taken=taken, r=r: t.post("G", r, box, [taken]))
        last = t.relay(t.record_event)
        t.gather(None, W)  # the others begin now
        t.wait_event(last)
        assert not t.waited and not t.waited_sent, "relays hold up nobody"
        back.wait(W)
        t.finish_relays(W)
        assert is_full(box, rounds * len(others))
    else:
        box, push = empty(), None
        t.gather(None, W)
        for k in range(rounds):
            if push is not None:
                push.wait(W)
            t.post("G0", 0, box).wait(W)
            assert is_full(box, k * len(others) + t.rank - 1)
            box += 1
            push = t.push("G", 0, box)
        push.wait(W)
    agree(t)
    t.end_relays()
    t.close(drain=True)


def sender_waits_for_the_copy(make: Make) -> None:
    """push does not block, the sender's wait does until the receiver has posted."""
    t = make()
    if t.rank == 0:
        started = time.perf_counter()
        ticket = t.push("P", 1, full(1, 100))
        assert time.perf_counter() - started < 0.15
        agree(t)
        ticket.wait(W)
        assert time.perf_counter() - started > 0.2
    else:
        agree(t)
        time.sleep(0.3)
        t.post("P", 0, empty(100)).wait(W)
    t.close(drain=True)


def zero_bytes(make: Make) -> None:
    t = make()
    for k, size in enumerate([0, 10, 0, 0, 20]):
        if t.rank == 0:
            push = t.push("P", 1, full(k, size))
            assert size or is_done(push)
            push.wait(W)
        else:
            box = empty(size)
            post = t.post("P", 0, box)
            assert size or is_done(post)
            post.wait(W)
            assert is_full(box, k)
    if t.rank == 0:
        assert (t.sent["P", 1], t.bytes_sent["P", 1]) == (5, 30)
    else:
        assert (t.received["P", 0], t.bytes_received["P", 0]) == (5, 30)
    t.close(drain=True)


def counters(make: Make) -> None:
    t = make()
    if t.rank == 0:
        for stream, size in (("P", 10), ("G", 5), ("P", 7)):
            t.push(stream, 1, full(0, size)).wait(W)
        assert dict(t.sent) == {("P", 1): 2, ("G", 1): 1} and dict(t.bytes_sent) == {("P", 1): 17, ("G", 1): 5}
        assert not t.received and not t.waited and all(seconds < 5 for seconds in t.waited_sent.values())
    else:
        a, b, c = t.post("P", 0, empty(10)), t.post("G", 0, empty(5)), t.post("P", 0, empty(7))
        assert not t.received
        a.wait(W)
        a.wait(W)
        assert dict(t.received) == {("P", 0): 1}
        c.wait(W)
        b.wait(W)
        assert dict(t.received) == {("P", 0): 2, ("G", 0): 1} and dict(t.bytes_received) == {("P", 0): 17, ("G", 0): 5}
        assert not t.sent and not t.waited_sent and all(seconds < 5 for seconds in t.waited.values())
    assert t.collectives == 0
    agree(t)
    t.reset(W)
    t.broadcast(empty(4), 0, W)
    assert t.collectives == 3
    if t.rank == 0:
        time.sleep(0.3)
        t.push("P", 1, full(0)).wait(W)
    else:
        t.waited.clear()
        t.post("P", 0, empty()).wait(W)
        assert 0.15 < t.waited["P", 0] < 5
    t.close(drain=True)


def gather_and_broadcast(make: Make) -> None:
    t = make()
    for k in range(20):
        value = {"rank": t.rank, "k": k, "list": [1.5, None, "x" * 3000], "big": 2**60 + t.rank}
        got = t.gather(value, W)
        assert got == [{**value, "rank": r, "big": 2**60 + r} for r in range(t.size)]
    for src in range(t.size):
        for size in (1, 0, 100003):
            tensor = full(src + 1, size) if t.rank == src else empty(size)
            t.broadcast(tensor, src, W)
            assert is_full(tensor, src + 1)
    t.close(drain=True)


def reset_forgets(make: Make, resets: int = 2) -> None:
    """Unmatched posts and pushes on both sides of every edge, then a reset: nothing old meets anything new."""
    t = make()
    after, before = (t.rank + 1) % t.size, (t.rank - 1) % t.size
    for k in range(resets):
        matched = [empty() for _ in range(3)]
        taken = [t.post("P", before, box) for box in matched]
        given = [t.push("P", after, full(10 * k + n + t.rank)) for n in range(3)]
        extra = [t.push("P", after, full(99)) for _ in range(1 + t.rank % 2)]
        orphan_in = empty()
        orphan = t.post("Q", before, orphan_in)
        t.reset(W)
        assert all(is_done(ticket) for ticket in (*taken, *given))
        assert all(is_full(box, 10 * k + n + before) for n, box in enumerate(matched))
        for ticket in (*extra, orphan):
            if t.name == "nccl" and ticket is not orphan:
                continue  # NCCL may have ended a small send that nobody had begun to receive
            with pytest.raises(HandoffError, match="forgotten by a reset"):
                ticket.wait("here")
        assert t.rendezvous or untouched(orphan_in)
        for stream in ("P", "Q"):
            for n in range(5):
                box = empty()
                post, push = t.post(stream, before, box), t.push(stream, after, full(50 + n + t.rank))
                post.wait(W)
                push.wait(W)
                assert is_full(box, 50 + n + before)
        assert t.rendezvous or untouched(orphan_in)
    t.close(drain=True)


def many_resets(make: Make) -> None:
    """More resets than the transport may have room for in a message's label."""
    reset_forgets(make, resets=70)


def two_at_once(make: Make) -> None:
    """Two transports of the same ranks and streams in one process; closing one leaves the other alone."""
    a, b = make(name="a"), make(name="b")
    after, before = (a.rank + 1) % a.size, (a.rank - 1) % a.size
    for k in range(5):
        in_a, in_b = empty(), empty()
        tickets = [a.post("P", before, in_a), b.post("P", before, in_b)]
        tickets += [b.push("P", after, full(100 + k)), a.push("P", after, full(k))]
        for ticket in tickets:
            ticket.wait(W)
        assert is_full(in_a, k) and is_full(in_b, 100 + k)
        assert a.gather("a", W) == ["a"] * a.size and b.gather("b", W) == ["b"] * a.size
    a.close(drain=True)
    box = empty()
    tickets = [b.post("P", before, box), b.push("P", after, full(3))]
    for ticket in tickets:
        ticket.wait(W)
    assert is_full(box, 3)
    b.close(drain=True)


def bad_peers(make: Make) -> None:
    t = make()
    for peer in (t.rank, -1, t.size):
        with pytest.raises(ValueError, match="two different ranks"):
            t.push("P", peer, full(0))
        with pytest.raises(ValueError, match="two different ranks"):
            t.post("P", peer, empty())
    t.close(drain=True)


def alone(make: Make) -> None:
    """A ring of one rank has no edges, but its collectives work."""
    t = make()
    assert t.gather(3, W) == [3]
    tensor = full(2)
    t.broadcast(tensor, 0, W)
    assert is_full(tensor, 2)
    t.reset(W)
    t.close(drain=True)


SCENARIOS: list[tuple[Callable[[Make], None], int]] = [
    (order_on_an_edge, 2),
    (edges_are_independent, 2),
    (edges_are_independent, 3),
    (push_before_post, 2),
    (post_before_push, 2),
    (ring_with_reused_buffers, 2),
    (ring_with_reused_buffers, 4),
    (relays_beside_the_host, 3),
    (sender_waits_for_the_copy, 2),
    (zero_bytes, 2),
    (counters, 2),
    (gather_and_broadcast, 4),
    (reset_forgets, 2),
    (reset_forgets, 4),
    (many_resets, 2),
    (close_lingers, 2),
    (close_drops_what_nobody_takes, 3),
    (close_without_linger, 2),
    (silent_peer, 2),
    (nobody_takes, 2),
    (late_gather, 3),
    (closed_peer, 2),
    (size_mismatch, 2),
    (two_at_once, 3),
    (bad_peers, 2),
    (alone, 1),
]
# Those in which random delays can bring out something new.
DELAYED = [
    (order_on_an_edge, 2),
    (edges_are_independent, 2),
    (ring_with_reused_buffers, 4),
    (relays_beside_the_host, 3),
    (zero_bytes, 2),
    (reset_forgets, 4),
    (two_at_once, 3),
]


def names(cases: list[tuple[Callable[[Make], None], int]]) -> list[str]:
    return [f"{scenario.__name__}-{world}" for scenario, world in cases]
