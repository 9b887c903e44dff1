"""What the nccl transport does besides moving bytes: matching, meetings, resets; over gloo pairs, with ranks as threads."""

from collections.abc import Callable

import pytest
import torch.distributed as dist

from deepspeed_cdp.errors import HandoffError
from deepspeed_cdp.runtime.runtime import Runtime
from support import transport_contract as contract
from support.gloo_pairs import GlooPairs
from support.local_ring import run_ranks
from support.optimizers import two_groups
from support.runtime_runs import PREDICT, check
from support.transport_helpers import Make, W, empty, full, is_full

# Not here: those about closing, silence and dead peers, which the transport itself is tested for on GPUs (tests/gpu).
SCENARIOS = [
    (contract.order_on_an_edge, 2),
    (contract.edges_are_independent, 2),
    (contract.edges_are_independent, 3),
    (contract.push_before_post, 2),
    (contract.post_before_push, 2),
    (contract.ring_with_reused_buffers, 2),
    (contract.ring_with_reused_buffers, 4),
    (contract.sender_waits_for_the_copy, 2),
    (contract.zero_bytes, 2),
    (contract.counters, 2),
    (contract.gather_and_broadcast, 4),
    (contract.reset_forgets, 2),
    (contract.reset_forgets, 4),
    (contract.many_resets, 2),
    (contract.two_at_once, 3),
    (contract.bad_peers, 2),
    (contract.alone, 1),
]
STREAMS = ("P", "G", "Q", "free", "blocked", "stuck")


def run_scenario(scenario: Callable[[Make], None], world: int) -> None:
    store = dist.HashStore()
    pairs = [(s, a, b) for s in STREAMS for a in range(world) for b in range(world) if a != b]

    def work(rank: int, _: object) -> None:
        def make(timeout_seconds: float = 20.0, name: str = "a") -> GlooPairs:
            transport = GlooPairs(rank, world, timeout_seconds, store, name)
            transport.prepare(pairs, deferred=False)
            return transport

        scenario(make)

    run_ranks(world, work)


@pytest.mark.parametrize(("scenario", "world"), SCENARIOS, ids=contract.names(SCENARIOS))
def test_contract(scenario, world):
    run_scenario(scenario, world)


def ring(strict: bool) -> Callable[[int, int], Callable[[int], GlooPairs]]:
    store = dist.HashStore()
    return lambda size, seconds=20.0: lambda rank: GlooPairs(rank, size, seconds, store, strict=strict)


def check_starts(kind: str, rule: str | int, size: int, *rest, **options) -> None:
    """Training equals the oracle, and messages begin where the plan says, never because somebody waits."""
    forced = {}

    def watch(runtime: Runtime) -> None:
        flush, rank = runtime.executor.flush, runtime.transport.rank

        def seen() -> None:
            forced.setdefault(rank, []).append(sum(runtime.transport.forced.values()))
            flush()
            runtime.transport.forced.clear()

        runtime.executor.flush = seen

    check(kind, rule, size, *rest, flush_after={2}, change=watch, **options)
    assert set(forced) == set(range(size)) and not any(sum(v) for v in forced.values()), forced


@pytest.mark.sampled(3)
@pytest.mark.parametrize("replicated", [False, True])
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize(
    ("size", "rule", "rounds"),
    [(2, "cdp-v2", 1), (2, "dp", 2), (3, "cdp-v1", 1), (3, "cdp-v2", 2), (4, "dp", 1), (4, 4, 1), (4, "cdp-v2", 1)],
)
def test_training_equals_the_oracle(size, rule, rounds, strict, replicated):
    """Strictly: each rank stops at every message."""
    check_starts("rooted", rule, size, rounds=rounds, clip=0.5, connect=ring(strict)(size), replicated=replicated)


@pytest.mark.parametrize("replicated", [False, True])
@pytest.mark.parametrize(("size", "rule", "rounds"), [(2, "cdp-v2", 2), (3, "cdp-v2", 1), (4, "cdp-v1", 2)])
def test_predictions_wait_for_no_message_that_has_not_begun(size, rule, rounds, replicated):
    connect = ring(True)(size)
    check_starts("rooted", rule, size, two_groups, rounds=rounds, connect=connect, replicated=replicated, correction=PREDICT)


def two(work: Callable[[GlooPairs], None], seconds: float = 20.0) -> None:
    make = ring(False)(2, seconds)
    run_ranks(2, lambda rank, transport: work(transport), connect=make)


def test_deferred_messages_begin_at_the_meeting():
    def work(t: GlooPairs) -> None:
        t.prepare([("P", 0, 1), ("P0", 0, 1)], deferred=True)
        box = empty()
        if t.rank == 0:
            push, offer = t.push("P", 1, full(1)), t.push("P0", 1, full(2))
            assert push.work is not None and offer.work is None
            push.wait(W)
            t.gather(None, W)
            t.start_peer("P0", 1, False)
            assert offer.work is not None
            offer.wait(W)
        else:
            post = t.post("P", 0, box)
            assert post.work is None
            t.start_peer("P", 0, True)
            assert post.work is not None
            post.wait(W)
            assert is_full(box, 1)
            t.gather(None, W)
            take = t.post("P0", 0, box)
            assert take.work is not None  # the reader initiates
            take.wait(W)
            assert is_full(box, 2)
        assert not t.forced
        t.close(True)

    two(work)


def test_a_meeting_before_the_post_counts_and_a_wait_begins_what_was_not_met():
    def work(t: GlooPairs) -> None:
        t.prepare([("P", 0, 1)], deferred=True)
        if t.rank == 0:
            for k in range(3):
                t.push("P", 1, full(k)).wait(W)
        else:
            boxes = [empty() for _ in range(3)]
            t.start_peer("P", 0, True)
            first, second, third = (t.post("P", 0, box) for box in boxes)
            assert first.work is not None and second.work is None
            third.wait(W)
            second.wait(W)
            first.wait(W)
            assert all(is_full(box, k) for k, box in enumerate(boxes)) and t.forced == {("P", 0): 2}
        t.close(True)

    two(work)


@pytest.mark.parametrize("late", ["sender", "receiver"])
def test_a_reset_plays_the_missing_part_of_what_one_side_has_begun(late):
    """Messages of several sizes, some of zero bytes, begun by one side alone: the reset ends, and what follows is right."""
    sizes = [100, 0, 7000, 0, 1]

    def work(t: GlooPairs) -> None:
        edge = ("P", 0, 1)
        t.prepare([edge], deferred=late == "receiver")
        if t.rank == 0 and late == "receiver":
            tickets = [t.push("P", 1, full(9, n)) for n in sizes]
        elif t.rank == 1 and late == "sender":
            tickets = [t.post("P", 0, empty(n)) for n in sizes]
        else:
            tickets = []
        t.reset(W)
        for ticket in tickets:
            with pytest.raises(HandoffError, match="forgotten by a reset"):
                ticket.wait(W)
        t.prepare([edge], deferred=False)
        if t.rank == 0:
            t.push("P", 1, full(5, 50)).wait(W)
        else:
            box = empty(50)
            t.post("P", 0, box).wait(W)
            assert is_full(box, 5)
        t.close(True)

    two(work, 5.0)


def test_what_no_plan_knows_is_a_bug():
    def work(t: GlooPairs) -> None:
        with pytest.raises(AssertionError, match="not prepared"):
            t.push("P", 1 - t.rank, full(0))

    two(work)
