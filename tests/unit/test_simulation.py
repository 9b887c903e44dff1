"""The event simulation: closed forms of docs/algorithm.md, order and bytes of the plan, and a recorded ring of threads."""

import random

import pytest
import torch

from benchmarks.pauses import SlowLinear
from deepspeed_cdp.analysis.timing.baselines import baselines
from deepspeed_cdp.analysis.timing.events import Simulation, _reserve, simulate
from deepspeed_cdp.analysis.timing.times import Hardware, Work, times, traffic
from deepspeed_cdp.model.make_plan import Settings
from deepspeed_cdp.plan.actions import Kind
from deepspeed_cdp.plan.plan import Plan
from deepspeed_cdp.plan.program import build
from deepspeed_cdp.runtime.runtime import Runtime
from deepspeed_cdp.runtime.trace import Recorder
from support.equal_plans import bare, full, plan_of
from support.local_ring import run_ranks

STEP = 9e-3  # of bare(plan_of(n, 3)) per stage: three units, 1 ms forward and 2 ms backward each


@pytest.mark.parametrize("rule", ["cdp-v2", "cdp-v1", "N"])
@pytest.mark.parametrize("ranks", [2, 3, 4, 6])
def test_without_updates_and_hops_nothing_waits(ranks, rule):
    run = simulate(plan_of(ranks, rule=ranks if rule == "N" else rule), bare(plan_of(ranks)))
    assert run.period() == pytest.approx(ranks * STEP, rel=1e-6)
    assert max(run.idle()) < 1e-6


@pytest.mark.parametrize("ranks", [2, 4])
def test_v2_shows_one_units_update_and_a_clipped_one_a_stages(ranks):
    update = 0.5e-3
    plan = plan_of(ranks)
    at_once = simulate(plan, bare(plan, update=update)).period()
    clipped = simulate(plan, bare(plan, update=update), clipped=True).period()
    # P = 2N T + delta on the last rank (docs/algorithm.md), which reads stage 0 unit by unit
    assert at_once == pytest.approx(ranks * STEP + update, rel=1e-6)
    assert clipped == pytest.approx(at_once, rel=1e-6)  # updates by unit, too, in the order of reading
    slow = simulate(plan, bare(plan, update=3e-3), clipped=True).period()
    assert ranks * STEP + 3e-3 <= slow <= ranks * STEP + 3 * 3e-3 + 1e-9


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_a_host_that_is_not_ahead_costs_one_units_update_and_not_a_stages(ranks, monkeypatch):
    """A unit's update takes as long as its forward. Averaging a whole stage where it is wanted would hold up its first reader."""
    plan = plan_of(ranks)
    given = bare(plan, update=1e-3)
    alone = simulate(plan, given).period()
    assert simulate(plan, given, host_ahead=False).period() <= alone + 1e-3 + 1e-9
    monkeypatch.setattr(Plan, "eager_units", lambda plan, rank: ())
    together = plan_of(ranks)
    assert simulate(together, given).period() == pytest.approx(alone, rel=1e-6)
    assert simulate(together, given, host_ahead=False).period() >= alone + 1.9e-3


def test_what_is_let_in_behind_an_update_waits_for_the_owner():
    """And so do credits after it, which are given one after the other; the passes do not."""

    class Noting(Simulation):
        def _do(self, rank, a):
            done = super()._do(rank, a)
            if done and a.kind == Kind.GRANT_CREDIT and rank.step:
                seen.append((rank.credits, rank.owner, rank.passes))
            return done

        def _post(self, rank, post, now):
            given.append((now, rank.credits))
            super()._post(rank, post, now)

    seen, given, plan = [], [], plan_of(4)
    assert any(a.kind == Kind.GRANT_CREDIT for a in build(plan, 1, False))
    Noting(plan, bare(plan, update=8e-3), 6, lambda rank, step: 0.0, True, False, True).go()
    assert seen and all(credits >= owner for credits, owner, _ in seen)
    assert any(owner > passes for _, owner, passes in seen), "the update was late, so that this says something"
    assert all(now >= credits for now, credits in given)


def test_v1_hides_the_update():
    plan = plan_of(4, rule="cdp-v1")
    assert simulate(plan, bare(plan, update=2e-3)).period() == pytest.approx(4 * STEP, rel=1e-6)


def test_dp_waits_for_everyone():
    plan = plan_of(4, rule="dp")
    hop = 1e-3
    run = simulate(plan, bare(plan, update=1e-3, latency=hop))
    # the last rank's backward ends three hops later; then sum, norm, update and published version travel
    assert run.period() > 4 * STEP + 3 * hop + 1e-3
    assert simulate(plan_of(4), bare(plan_of(4), update=1e-3, latency=hop)).period() < run.period()


def test_offsets_lie_between_the_bounds_of_the_analysis():
    plan = plan_of(4, units=4)
    run = simulate(plan, full(plan, 0.2), steps=30)
    stage = sum(run_time for (_, b), run_time in full(plan, 0.2).passes.items()) / 8
    for d in run.offsets():
        assert 0 < d <= 2 * stage * 1.05


def test_every_pass_once_in_the_plans_order_and_every_byte_sent():
    plan, steps = plan_of(3, rounds=2), 5
    run = simulate(plan, full(plan, 0.1), steps)
    assert len(run.passes) == steps * 3 * 2 * len(plan.visits)
    for rank in range(3):
        mine = sorted((p for p in run.passes if p.rank == rank), key=lambda p: p.begin)
        assert [(p.unit, p.backward) for p in mine] == list(plan.visits) * (2 * steps)
        assert all(a.end <= b.begin + 1e-12 for a, b in zip(mine, mine[1:]))
    longer = simulate(plan, full(plan, 0.1), steps + 1)
    for rank in range(3):
        got = [sum(m.nbytes for m in r.messages if m.dst == rank) for r in (run, longer)]
        assert got[1] - got[0] == sum(plan.received_bytes(rank).values())


def test_a_link_carries_one_message_at_a_time():
    plan = plan_of(4)
    run = simulate(plan, full(plan, 0.01, bandwidth=2e9))
    for rank in range(4):
        mine = sorted((m.begin, m.begin + m.nbytes / 2e9) for m in run.messages if m.src == rank)
        assert all(a[1] <= b[0] + 1e-12 for a, b in zip(mine, mine[1:]))
    assert run.period() > 0.01 * 1.2  # the link is the limit here
    taken = []
    assert [_reserve(taken, x, 2.0) for x in (5.0, 0.0, 1.0, 6.0)] == [5.0, 0.0, 2.0, 7.0]


def test_a_straggler_within_the_slack_delays_nobody_and_one_beyond_does():
    plan = plan_of(4, units=4)
    calm = simulate(plan, full(plan, 0.2), 20)

    def late(seconds):
        run = simulate(plan, full(plan, 0.2), 20, lambda rank, step: seconds if (rank, step) == (2, 10) else 0.0)
        return max(run.ends[-1][r] - calm.ends[-1][r] for r in (0, 1, 3))

    assert late(0.01) < 0.001
    assert late(0.4) > 0.2


def test_delays_cost_less_than_a_barrier():
    plan = plan_of(4, units=4)
    rng, drawn = random.Random(3), {}
    run = simulate(plan, full(plan, 0.2), 60, lambda rank, step: drawn.setdefault((rank, step), rng.uniform(0, 0.04)))
    period = simulate(plan, full(plan, 0.2)).period()
    assert period + 0.018 < run.period() < period + 0.04 * 4 / 5  # the mean of the largest of four


def test_on_one_clock_the_updates_add_up():
    plan = plan_of(2)
    beside = simulate(plan, bare(plan, update=1e-3)).period()
    alone = simulate(plan, bare(plan, update=1e-3), overlap=False).period()
    assert alone >= 2 * STEP + 3e-3 > beside


def test_times_add_up():
    plan = plan_of(4, units=2, nbytes=1 << 20)
    given = times(plan, [Work(1e9, 1 << 19)] * 8, Hardware(), compute=0.1)
    assert given.compute == pytest.approx(0.1)
    assert sum(given.passes.values()) == pytest.approx(given.compute + given.adds + given.contention)
    assert given.adds == pytest.approx(3 * 8 * (1 << 20) / 3e12)
    assert traffic(plan) == 2 * sum(sum(plan.received_bytes(r).values()) for r in range(4)) / 4
    fused = times(plan, [Work(1e9, 1 << 19, (1 << 20) - 512)] * 8, Hardware(), compute=0.1)  # one of the sums stays apart
    assert fused.adds == pytest.approx((8 * (1 << 20) + 2 * 8 * 512) / 3e12)
    quiet = times(plan, [Work(1e9, 1 << 19)] * 8, Hardware(contention=0.0), compute=0.1)
    assert quiet.contention == 0


def test_baselines_move_what_they_should():
    work, sizes = [Work(1e12, 1000)] * 4, [2000] * 4
    by_name = {r.name: r for r in baselines(work, sizes, sizes, 4, Hardware(), 0.1)}
    assert by_name["ZeRO-3"].received == 3 * 8000 * 3 / 4
    assert by_name["DDP"].received == 2 * 8000 * 3 / 4
    assert by_name["DDP"].states == 8000 + 8000 + 12 * 4000
    assert by_name["FSDP2"].states == pytest.approx((8000 + 8000 + 12 * 4000) / 4)
    assert all(r.seconds >= 0.1 for r in by_name.values())
    assert all(r.received == 0 for r in baselines(work, sizes, sizes, 1, Hardware(), 0.1))


# ---- against a run ------------------------------------------------------------------------------------------------------
FORWARD = 0.012  # seconds of a unit's forward; its backward takes twice that


@pytest.mark.parametrize("rule", ["cdp-v2", "cdp-v1"])
def test_the_order_of_a_recorded_run_is_the_simulations(rule):
    """Passes of all ranks by their beginnings, threads on one clock. Pairs whose simulated times are closer than a pass are not
    compared: the machine decides these."""
    ranks, steps = 3, 5
    built = [torch.nn.Sequential(*[SlowLinear(8, FORWARD) for _ in range(2 * ranks)]) for _ in range(ranks)]

    def work(rank, transport):
        module = built[rank]
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        runtime = Runtime(module, optimizer, Settings(rule=rule), transport, torch.device("cpu"))
        recorder = Recorder(runtime.executor, torch.device("cpu"))
        for step in range(steps):
            with runtime.forward():
                loss = module(torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + rank))).pow(2).mean()
            loss.backward()
            runtime.end_backward()
            runtime.step()
        trace = recorder.stop()
        runtime.close(True)
        return trace, runtime.plan

    results = run_ranks(ranks, work)
    plan = results[0][1]
    run = simulate(plan, bare(plan, FORWARD), steps, overlap=False)
    seen = {
        (e["pid"], e["args"]["step"], e["args"]["unit"], e["args"]["backward"]): e["ts"] / 1e6
        for trace, _ in results
        for e in trace["traceEvents"]
        if e.get("cat") == "passes"
    }
    expected = {(p.rank, p.step, p.unit, p.backward): p.begin for p in run.passes}
    assert seen.keys() == expected.keys()
    wrong = compared = 0
    keys = sorted(expected, key=expected.__getitem__)
    for i, a in enumerate(keys):
        for b in keys[i + 1 :]:
            if expected[b] - expected[a] > 3 * FORWARD:
                compared += 1
                wrong += seen[a] > seen[b]
    assert compared > 1000
    assert wrong / compared < 0.01, f"{wrong} of {compared} pairs came in another order"
