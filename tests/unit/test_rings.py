"""Rings of rings on threads: every loss and weight is the oracle's, bitwise, and the same in all rings."""

import time
import types
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist

from deepspeed_cdp.model.make_plan import Settings
from deepspeed_cdp.transport.local import Hub, LocalTransport
from deepspeed_cdp.transport.ring_view import ring_size
from support import models
from support.gloo_pairs import GlooPairs
from support.local_ring import train
from support.optimizers import sgd, two_groups
from support.ring_runs import check
from support.runtime_runs import named_rule, oracle, schedule


@pytest.mark.sampled(6)
@pytest.mark.parametrize("rounds", [1, 2])
@pytest.mark.parametrize("rule", ["dp", "cdp-v1", "cdp-v2", "between"])
@pytest.mark.parametrize(("size", "rings"), [(1, 2), (2, 2), (3, 2), (2, 3), (1, 4)])
def test_mlp(size, rings, rule, rounds):
    check("mlp", named_rule(rule, size), size, rings, rounds=rounds, flush_after={2})


@pytest.mark.sampled(6)
@pytest.mark.parametrize("rule", ["dp", "cdp-v1", "cdp-v2", 3])
@pytest.mark.parametrize("kind", ["rooted", "conv", "llama-tied"])
def test_models_with_clipping_schedules_and_groups(kind, rule):
    """Held and frozen parameters, batch norm; the norms that clip are of all rings."""
    check(kind, rule, 3, 2, two_groups, steps=4, on_step=schedule, clip=0.3, rounds=2 if rule == "cdp-v2" else 1)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("sum_dtype", [None, torch.float32])
@pytest.mark.parametrize("rule", ["cdp-v1", "cdp-v2"])
def test_bf16(rule, sum_dtype):
    """GradAccumulation of several rings are added in the sums' dtype."""
    check("llama-tied", rule, 2, 3, two_groups, steps=4, dtype=torch.bfloat16, sum_dtype=sum_dtype, clip=0.5)


def test_ranks_that_take_different_branches():
    check("routed", "cdp-v2", 2, 2, steps=8)


@pytest.mark.parametrize("rule", ["dp", "cdp-v2", "cdp-v1"])
def test_random_delays_change_nothing(rule):
    check("mlp", rule, 2, 3, delay=0.003, rounds=2, steps=5, keep_after_forward=True)


def test_a_flush_tells_ranks_by_their_numbers_among_all():
    said = []

    def note(runtime):
        reset = runtime.transport.reset
        runtime.transport.reset = lambda where: (said.append(str(where)), reset(where))[1]

    train("mlp", 4, Settings("cdp-v2"), sgd, 3, ring_size=2, flush_after={1}, change=note)
    assert {where.split(",")[0] for where in said if where.endswith("flush")} == {f"rank {r}" for r in range(4)}


def test_with_a_warm_up():
    check("mlp", "cdp-v2", 2, 2, warmup_steps=2)


@pytest.mark.parametrize("clip", [0.0, 0.3])
@pytest.mark.parametrize("rule", ["dp", "cdp-v2"])
def test_optimizer_in_host_memory(rule, clip):
    check("llama", rule, 2, 2, two_groups, steps=4, offload=True, clip=clip)


@pytest.mark.parametrize("rule", ["dp", "cdp-v1"])
def test_an_overflow_in_one_ring_skips_the_step_in_all(rule):
    got, want = check_nan(rule)
    assert all(r.executor.owner_executor.skipped == 1 for r in got["runtimes"]) and want.overflows.count(True) == 1


def check_nan(rule):
    got = train("mlp-nan", 4, Settings(rule), sgd, 6, ring_size=2)  # rank 0's micro-batch of step 2
    want = oracle("mlp-nan", got["runtimes"][0].plan.stages, rule, 2, sgd, 6, rings=2)
    for state in got["states"]:
        for name, master in want.masters.items():
            assert torch.isfinite(master).all() and torch.equal(state[name], master)
    return got, want


@pytest.mark.parametrize(("size", "rings"), [(2, 2), (3, 2), (2, 3)])
@pytest.mark.parametrize("rule", ["dp", "cdp-v1", "cdp-v2"])
def test_losses_and_norms_are_of_all_rings(size, rings, rule):
    _, want = check("mlp", rule, size, rings, change=_noting(seen := {}))
    assert set(seen) == set(range(size * rings))
    for rows in seen.values():
        known = {step: (loss, norm) for step, loss, norm in rows if step is not None}
        assert len(known) >= 4
        for step, (loss, norm) in known.items():
            mean = sum(v for (t, _, _), v in want.losses.items() if t == step) / (size * rings)
            assert loss == pytest.approx(mean, rel=1e-12) and norm == pytest.approx(want.norms[step], rel=1e-6)


def _noting(seen):
    """What each rank knows of losses and norms at each step's end."""

    def change(runtime):
        step, scale = runtime.step, runtime.optimizer.scale_if_loss

        def entered(loss):
            runtime.executor.add_loss(loss)
            return scale(loss)

        def noted():
            step()
            seen.setdefault(runtime.transport.world_rank, []).append(runtime.executor.metrics.read())

        runtime.step, runtime.optimizer.scale_if_loss = noted, entered

    return change


def test_bytes_are_the_closed_form_and_there_are_no_collectives():
    for rounds in (1, 2):
        got, _ = check("llama-tied", "cdp-v2", 2, 3, rounds=rounds, steps=4)
        crossed = set()
        for runtime in got["runtimes"]:
            traffic = runtime.counters.traffic()
            assert all(row["counted"] == row["closed form"] for row in traffic.values()), traffic
            assert runtime.counters.collectives() == 0
            crossed.add(traffic["X"]["counted"])
            psi = sum(u.g_bytes for u in runtime.plan.units) + runtime.plan.persistent.g_bytes
            assert traffic["X"]["counted"] <= 2 * (psi + 16)
            assert runtime.executor.buffers.nbytes() == sum(runtime.plan.memory(runtime.executor.rank).values())
        assert len(crossed) > 2, "the test needs stages of different sizes, and a ring in the middle"


@pytest.mark.sampled(3)
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize(
    ("size", "rings", "rule", "rounds"),
    [(2, 2, "cdp-v2", 1), (2, 3, "cdp-v1", 2), (1, 4, "dp", 1), (3, 2, "dp", 1), (2, 4, "cdp-v2", 1)],
)
def test_where_both_sides_of_a_message_wait_for_each_other(size, rings, rule, rounds, strict):
    """As over NCCL; strictly: a rank stops at each message until the other side is at it. None begins for being waited for."""
    store, forced = dist.HashStore(), {}

    def watch(runtime):
        flush, inner = runtime.executor.flush, runtime.transport.inner

        def seen():
            forced.setdefault(inner.rank, []).append(sum(inner.forced.values()))
            flush()
            inner.forced.clear()

        runtime.executor.flush = seen

    check(
        "mlp",
        rule,
        size,
        rings,
        rounds=rounds,
        clip=0.5,
        flush_after={2},
        warmup_steps=1,
        change=watch,
        connect=lambda rank: GlooPairs(rank, size * rings, 20.0, store, strict=strict),
    )
    assert set(forced) == set(range(size * rings)) and not any(sum(v) for v in forced.values()), forced


class Slow(LocalTransport):
    """What is sent between rings is read a while after it was pushed, as over a slow link."""

    def __init__(self, hub: Hub, rank: int):
        super().__init__(hub, rank)
        self.thread = ThreadPoolExecutor(1)

    def push(self, stream, dst, source, after=None, remote_offset=-1):
        if stream not in ("X", "Y"):
            return super().push(stream, dst, source, after, remote_offset)
        future = self.thread.submit(self._later, stream, dst, source)
        return types.SimpleNamespace(wait=lambda where: future.result().wait(where), done=lambda: False)

    def _later(self, stream, dst, source):
        time.sleep(0.002)
        return LocalTransport.push(self, stream, dst, source)


@pytest.mark.parametrize(("size", "rings", "rule"), [(2, 2, "cdp-v2"), (2, 3, "dp"), (1, 3, "cdp-v1"), (2, 3, "cdp-v1")])
def test_nothing_is_written_that_is_still_to_be_sent(size, rings, rule):
    hub = Hub(size * rings, 20.0)
    check("mlp", rule, size, rings, clip=0.5 if rule != "cdp-v2" else 0.0, connect=lambda rank: Slow(hub, rank))


def test_rings_that_do_not_average_are_seen():
    """Broken on purpose: one ring keeps its own sum of one unit in one step."""

    def skip(runtime):
        ring, calls = runtime.executor.owner_executor._cross_ring, []
        views = ring._views

        def wrong(unit):
            x, o = views(unit)
            calls.append(unit)
            return (x, o) if len(calls) != 7 else ([t.clone() for t in x], o)

        if runtime.transport.world_rank == 2:
            ring._views = wrong

    with pytest.raises(AssertionError):
        check("mlp", "cdp-v2", 2, 2, change=skip)


@pytest.mark.parametrize("rings", [1, 2])
def test_another_number_of_micro_batches_is_another_training(rings):
    """Else no test here could see rings that train by themselves."""
    a = train("mlp", 4, Settings("cdp-v2"), sgd, 4, ring_size=2)["state"]
    b = train("mlp", 2 * rings, Settings("cdp-v2"), sgd, 4, ring_size=2 if rings == 1 else 4)["state"]
    assert any(not torch.equal(a[n], b[n]) for n in a)


@pytest.mark.parametrize(
    ("setting", "hosts", "size"),
    [
        ("auto", "aaaa", 4),
        ("auto", "aabb", 2),
        ("auto", "aaabbb", 3),
        ("auto", "aabbcc", 2),
        ("auto", "abcd", 4),
        ("auto", "abab", 4),
        ("auto", "aab", 3),
        ("auto", "aabbaa", 6),
        ("auto", "a", 1),
        ("auto", "ab", 2),
        ("auto", "aabbb", 5),
        (2, "aaaa", 2),
        (1, "aaa", 1),
        (3, "ababab", 3),
        (4, "aabb", 4),
    ],
)
def test_ring_size(setting, hosts, size):
    assert ring_size(setting, hosts) == size


@pytest.mark.parametrize(("setting", "world"), [(3, 4), (5, 4), (8, 4), (4, 6)])
def test_a_ring_size_that_does_not_divide_the_ranks_is_refused(setting, world):
    with pytest.raises(ValueError, match=f"cyclic.ring_size is {setting}, which does not divide the {world} data-parallel ranks"):
        ring_size(setting, "a" * world)


def test_models_has_batches_for_all_ranks():
    assert not torch.equal(models.batch("mlp", 0, 0, 0), models.batch("mlp", 0, 0, 2))
