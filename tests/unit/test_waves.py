"""Whole stages by logical time: the same periods as the simulation of every action, where both can be had; and large rings."""

import time
from dataclasses import replace

import pytest

from deepspeed_cdp.analysis.timing import waves
from deepspeed_cdp.analysis.timing.events import simulate
from deepspeed_cdp.analysis.timing.times import Hardware
from deepspeed_cdp.plan.schedule import Schedule
from support.equal_plans import bare, full, plan_of


@pytest.mark.parametrize("rule", ["cdp-v2", "cdp-v1", "dp", 3])
@pytest.mark.parametrize("ranks, units", [(2, 6), (4, 4), (8, 3)])
def test_periods_agree_with_the_events(ranks, units, rule):
    plan = plan_of(ranks, units, nbytes=16 << 20, rule=rule)
    given = full(plan, 0.2)
    events, wave = simulate(plan, given, 14), waves.simulate(plan.schedule, waves.of_plan(plan, given), 14)
    assert wave.period() == pytest.approx(events.period(), rel=0.005)
    assert sum(wave.offsets()) == pytest.approx(sum(events.offsets()), rel=0.3, abs=1e-3)
    assert wave.busy == pytest.approx(sum(given.passes.values()))


@pytest.mark.parametrize("rule", ["cdp-v2", "cdp-v1"])
@pytest.mark.parametrize("ranks", [4, 8])
def test_periods_agree_under_jitter(ranks, rule):
    plan = plan_of(ranks, 3, nbytes=16 << 20, rule=rule)
    given = full(plan, 0.2)
    import random

    rng, drawn = random.Random(1), {}
    events = simulate(plan, given, 60, lambda rank, step: drawn.setdefault((rank, step), rng.uniform(0, 0.04)))
    wave = waves.simulate(plan.schedule, waves.of_plan(plan, given), 60, jitter=0.04, seed=1)
    assert wave.period() == pytest.approx(events.period(), rel=0.02)


@pytest.mark.parametrize("ranks, rule", [(4, "cdp-v2"), (8, "cdp-v2"), (4, "cdp-v1")])
def test_a_busy_link_is_the_limit_in_both(ranks, rule):
    """Events know that ranks share the link out of an owner, and two prefetched units do not even that out."""
    plan = plan_of(ranks, 16 // ranks, nbytes=64 << 20, rule=rule)
    received = max(sum(plan.received_bytes(r).values()) for r in range(ranks))
    for bandwidth, slowed in ((100e9, False), (20e9, True)):
        given = full(plan, 0.1, bandwidth=bandwidth)
        events, wave = (
            simulate(plan, given, 14).period(),
            waves.simulate(plan.schedule, waves.of_plan(plan, given), 14).period(),
        )
        assert wave == pytest.approx(events, rel=0.01) if not slowed else 0.75 * events < wave < events
        assert min(events, wave) > received / bandwidth and (wave > 0.13) == slowed


def test_equal_stages_in_closed_form_are_those_of_a_plan():
    plan = plan_of(8, 4, nbytes=8 << 20)
    nbytes = sum(u.p_bytes for u in plan.units)
    closed = waves.equal(8, 0.2, nbytes // 2, nbytes, Hardware(), 4)
    given = waves.of_plan(plan, full(plan, 0.2))
    for name in ("forward", "backward", "update", "parameters", "again", "sums", "prefetch"):
        assert getattr(closed, name) == pytest.approx(getattr(given, name), rel=0.01), name
    kept = waves.of_plan(kept_plan := replace(plan, keep_after_forward=True), full(kept_plan, 0.2))
    closed = waves.equal(8, 0.2, nbytes // 2, nbytes, Hardware(), 4, keep_after_forward=True)
    assert closed.again == pytest.approx(kept.again) and closed.forward == pytest.approx(kept.forward, rel=0.001)


def test_offsets_are_at_least_a_unit():
    plan = plan_of(6, 3)
    given = bare(plan)
    for d in waves.simulate(plan.schedule, waves.of_plan(plan, given), 10).offsets():
        assert d >= 0.001 - 1e-9  # a unit's forward


def test_rings_wait_for_the_chain_of_their_owners():
    stages = waves.equal(8, 0.2, 1e9, 2e9, Hardware())
    alone = waves.simulate(Schedule(8, 7), stages, 16)
    chain = [waves.chain(4, 2e9 / 8, 4, 50e9, 8e-6)] * 8
    assert chain[0] == pytest.approx(6 * (2e9 / 32 / 50e9 + 8e-6))
    rings = waves.simulate(Schedule(8, 7), stages, 16, rings=4, exchange=chain)
    assert rings.starts.shape == (16, 4, 8)
    # v2's last rank waits for stage 0, which it has just finished, to come round
    assert rings.period() == pytest.approx(alone.period() + chain[0], rel=0.02)
    v1 = waves.simulate(Schedule(8, 15), stages, 16, rings=4, exchange=chain)
    assert v1.period() == pytest.approx(v1.busy, rel=0.01)


def test_one_late_rank_is_felt_less_the_more_slack_there_is():
    stages = waves.equal(16, 0.2, 1e9, 2e9, Hardware())
    calm = waves.simulate(Schedule(16, 15), stages, 16)

    def felt(seconds):
        late = waves.simulate(Schedule(16, 15), stages, 16, late=(8, 8, seconds))
        return float((late.ends[-1, 0, :8] - calm.ends[-1, 0, :8]).max())

    assert felt(0.002) < 0.001
    assert felt(1.0) > 0.5


def test_nobody_runs_further_ahead_than_one_step():
    """Ranks before a late one end their step, since owners take their sums. The next step's have no place before it is over."""
    stages = waves.equal(16, 0.2, 1e9, 2e9, Hardware())
    late, position = 0.5, 0.2 / 32
    calm = waves.simulate(Schedule(16, 31), stages, 12)
    stuck = waves.simulate(Schedule(16, 31), stages, 12, late=(8, 6, late))
    later = (stuck.ends - calm.ends)[:, 0]
    assert later[6, :8] == pytest.approx(0, abs=1e-9)
    assert (later[7, :8] > late - 32 * position).all() and later[7, 0] < late - 16 * position


def test_large_rings_take_seconds():
    began = time.process_time()
    wave = waves.simulate(Schedule(1024, 1023), waves.equal(1024, 2.0, 7e10, 1.4e11, Hardware()), 4)
    many = waves.simulate(Schedule(64, 63), waves.equal(64, 2.0, 7e10, 1.4e11, Hardware()), 4, rings=64, jitter=0.1)
    assert time.process_time() - began < 30
    assert wave.period() == pytest.approx(wave.busy, rel=0.02)
    assert many.ends.shape == (4, 64, 64) and many.period() > many.busy
