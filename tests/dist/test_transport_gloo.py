"""The transport contract with ranks as processes over gloo, and what happens when processes die."""

import gc
import os
import signal
import threading
import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from deepspeed_cdp.errors import WHY_MISSING, HandoffError
from deepspeed_cdp.transport.base import Transport
from deepspeed_cdp.transport.delayed import Delayed
from deepspeed_cdp.transport.gloo import GlooTransport
from deepspeed_cdp.transport.store_exchange import StoreExchange
from support.transport_contract import DELAYED, SCENARIOS, names
from support.transport_helpers import Make, empty, full, is_full


def contract(rank: int, world: int, scenario: Callable[[Make], None], seconds: float = 0.0) -> None:
    others = threading.active_count()  # a worker that ran other tests may have some

    def make(timeout_seconds: float = 20.0, name: str = "a") -> Transport:
        transport = GlooTransport(rank, world, timeout_seconds, name=name)
        return Delayed(transport, seed=1, max_seconds=seconds) if seconds else transport

    scenario(make)
    assert threading.active_count() <= others  # no thread stays inside gloo


@pytest.mark.parametrize(("scenario", "world"), SCENARIOS, ids=names(SCENARIOS))
def test_contract(pool, scenario, world):
    pool.run(world, contract, scenario)


@pytest.mark.parametrize(("scenario", "world"), DELAYED, ids=names(DELAYED))
def test_contract_with_delays(pool, scenario, world):
    pool.run(world, contract, scenario, 0.003)


def die(rank: int, world: int, how: str, waiting_for: str) -> tuple[str, float]:
    t = GlooTransport(rank, world, 40)
    if rank == 1:
        time.sleep(0.5)
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        os._exit(3)
    started = time.perf_counter()
    ticket = t.post("P", 1, empty()) if waiting_for == "message" else t.push("P", 1, full(1, 1 << 20))
    try:
        ticket.wait(f"rank {rank}, step 2")
    except HandoffError as error:
        later = t.push("P", 1, full(0)), t.post("Q", 1, empty())  # no exception before wait
        for other in later:
            with pytest.raises(HandoffError, match="rank 1 closed the connection"):
                other.wait("later")
        t.close(drain=True)
        return str(error), time.perf_counter() - started
    raise AssertionError("no error")


@pytest.mark.parametrize(("how", "code"), [("kill", -9), ("exit", 3)])
@pytest.mark.parametrize("waiting_for", ["message", "taker"])
def test_a_dead_peer_is_named_at_once(pool, how, code, waiting_for):
    (text, seconds), dead = pool.run_failing(2, die, how, waiting_for)
    assert text == "rank 0, step 2: stream P: rank 1 closed the connection (it crashed or exited; see its log)"
    assert dead == code and seconds < 10


def leave_early(rank: int, world: int) -> str:
    t = GlooTransport(rank, world, 30)
    if rank == 0:  # it also holds the store
        for k in range(4):
            t.push("P", 1, full(k, 1 << 20))
        t.close(drain=True)
        os._exit(0)
    boxes = [empty(1 << 20) for _ in range(4)]
    tickets = [t.post("P", 0, boxes[0])]
    time.sleep(1)
    tickets += [t.post("P", 0, box) for box in boxes[1:]]
    time.sleep(1)
    for ticket in tickets:
        ticket.wait("here")
    assert all(is_full(box, k) for k, box in enumerate(boxes))
    t.close(drain=True)
    return "taken"


def test_a_rank_that_ends_early_hands_over_its_last_messages(pool):
    assert pool.run_failing(2, leave_early) == [0, "taken"]


def drains(rank: int, world: int, peer: str) -> float:
    t = GlooTransport(rank, world, 3.0 if peer == "alive" else 40.0)
    if rank == 1:
        time.sleep(1.0)
        if peer == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(5.0 if peer == "alive" else 0.0)
    else:
        t.push("P", 1, full(1, 1 << 20))
    started = time.perf_counter()
    t.close(drain=True)
    return time.perf_counter() - started


@pytest.mark.parametrize(("peer", "least", "most"), [("killed", 0.5, 8.0), ("closes", 0.5, 8.0), ("alive", 2.9, 4.5)])
def test_draining_ends_when_the_peer_is_gone_or_the_time_is_over(pool, peer, least, most):
    seconds = pool.run_failing(2, drains, peer)[0]
    assert least < seconds < most


def close_one_by_one(rank: int, world: int, order: tuple[int, ...]) -> float:
    t = GlooTransport(rank, world, 40)
    for peer in range(world):
        if peer != rank:
            t.push("P", peer, full(1, 100000))
    t.gather(None, "here")
    time.sleep(0.5 * order.index(rank))
    started = time.perf_counter()
    t.close(drain=True)
    return time.perf_counter() - started


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_ranks_that_close_one_by_one_wait_for_the_last(pool, order):
    """Nobody takes their pushes. Those that close first learn from the later ones that nobody will."""
    seconds = pool.run(3, close_one_by_one, order)
    assert seconds[order[0]] > 0.8 and max(seconds) < 8.0


def never_arrives(rank: int, world: int) -> str | None:
    if rank == 1:
        time.sleep(4)
        return None
    started = time.perf_counter()
    with pytest.raises(HandoffError) as caught:
        GlooTransport(rank, world, 2)
    assert time.perf_counter() - started < 4
    return str(caught.value)


def test_a_rank_that_never_arrives_is_named(pool):
    texts = pool.run(3, never_arrives)
    assert texts[2] == f"rank 2, connecting the 3 ranks of 'deepspeed_cdp': rank(s) [1] missing after 2 s ({WHY_MISSING})"


def outlives_the_default_group(rank: int, world: int) -> None:
    t, peer = GlooTransport(rank, world, 20), 1 - rank
    t.gather(0, "before")
    dist.destroy_process_group()
    gc.collect()
    for _ in range(3):
        box = empty()
        tickets = [t.post("P", peer, box), t.push("P", peer, full(peer + 1))]
        for ticket in tickets:
            ticket.wait("here")
        assert is_full(box, rank + 1) and t.gather(rank, "here") == [0, 1]
    t.close(drain=True)
    t.close(drain=False)


def test_it_outlives_the_default_process_group(pool):
    pool.run(2, outlives_the_default_group)


def keeps_no_tickets(rank: int, world: int) -> tuple[int, float]:
    t, peer = GlooTransport(rank, world, 20), 1 - rank
    source, box = full(1, 64), empty(64)
    count = 2000
    started = time.perf_counter()
    for _ in range(count):
        post, push = t.post("P", peer, box), t.push("P", peer, source)
        post.wait("here")
        push.wait("here")
    seconds = (time.perf_counter() - started) / count
    left = sum(len(edge.pending) for edge in (*t._in.values(), *t._out.values()))
    t.close(drain=True)
    return left, seconds


def test_finished_tickets_are_forgotten(pool):
    for left, seconds in pool.run(2, keeps_no_tickets):
        assert left == 0
        assert seconds < 0.01
        print(f"{1e6 * seconds:.0f} us per message each way")


def store_stays_small(rank: int, world: int) -> None:
    store = dist.distributed_c10d._get_default_store()
    t = GlooTransport(rank, world, 20, store=store)
    for k in range(3):
        t.gather(k, "here")
    t.gather(None, "here")
    before = store.num_keys()
    for k in range(50):
        t.gather([k] * 100, "here")
    t.gather(None, "here")
    assert abs(store.num_keys() - before) <= world  # a rank may not have deleted its last key yet
    t.close(drain=True)


def test_gathering_does_not_grow_the_store(pool):
    pool.run(2, store_stays_small)


def drop_pending(rank: int, world: int) -> None:
    """What the transport relies on: dropped Works are cancelled, and the pair goes on."""
    store = dist.distributed_c10d._get_default_store()
    pg, peer = dist.ProcessGroupGloo(dist.PrefixStore("raw", store), rank, world), 1 - rank
    for size in (10, 1 << 22):
        works = [pg.send([full(1, size)], peer, 1), pg.recv([empty(size)], peer, 2)]
        time.sleep(0.1)
        del works
        gc.collect()
        for tag in range(10, 15):
            box = torch.zeros(size, dtype=torch.uint8)
            works = [pg.recv([box], peer, tag), pg.send([full(tag, size)], peer, tag)]
            for work in works:
                work.wait()
            assert is_full(box, tag)


def test_dropped_works_leave_the_pair_usable(pool):
    pool.run(2, drop_pending)


def broadcasts(rank: int, world: int) -> str | None:
    """The broadcast of transports between GPUs, by torch's default group, which is gloo's here."""
    from deepspeed_cdp.transport.peer import PeerTransport

    t = object.__new__(PeerTransport)
    Transport.__init__(t, rank, world, 2.0)
    t._failure, t.device = None, torch.device("cpu")
    t._store_exchange = StoreExchange(rank, world, 20.0, None, "broadcasts", "connecting")
    for src in range(world):
        box = full(7, 1000) if rank == src else empty(1000)
        t.broadcast(box, src, "here")
        assert is_full(box, 7)
    if rank:
        t._store_exchange.exchange(None, "here")  # comes, and then takes no part
        time.sleep(4)
        return None
    started = time.perf_counter()
    with pytest.raises(HandoffError) as caught:
        t.broadcast(empty(1000), 1, "step 3, flush")
    assert time.perf_counter() - started < 4
    return str(caught.value)


def test_the_broadcast_between_gpus_has_the_timeout(pool):
    text, _ = pool.run(2, broadcasts)
    assert text == f"step 3, flush: broadcast from rank 1 failed within 2.0 s ({WHY_MISSING})"
