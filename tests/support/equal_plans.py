"""Plans of equal stages for the simulators' tests."""

from deepspeed_cdp.analysis.timing.times import Hardware, Times, Work, times
from deepspeed_cdp.plan.plan import Plan
from deepspeed_cdp.plan.schedule import Schedule, threshold
from deepspeed_cdp.plan.unit_schedule import Unit


def plan_of(ranks: int, units: int = 3, nbytes: int = 3 << 20, rule: str | int = "cdp-v2", rounds: int = 1, **more) -> Plan:
    """``units`` equal units per stage, of ``nbytes`` each."""
    made = tuple(Unit(f"u{i}", i // units, (f"w{i}",), (), nbytes, nbytes) for i in range(ranks * units))
    return Plan(Schedule(ranks, threshold(rule, ranks), rounds), made, **more)


def bare(plan: Plan, forward: float = 1e-3, update: float = 0.0, **speeds) -> Times:
    """Nothing but ``forward`` seconds per unit (twice that backward), an update's seconds per unit, and messages of no length."""
    hardware = Hardware(**{"latency": 0.0, "bandwidth": 1e18, **speeds})
    passes = {(i, b): forward * (2 if b else 1) for i in range(len(plan.units)) for b in (False, True)}
    return Times(passes, dict.fromkeys(range(len(plan.units)), update), hardware, sum(passes.values()), 0.0, 0.0)


def full(plan: Plan, compute: float, **speeds) -> Times:
    """With all that analysis/timing/times.py knows."""
    hardware = Hardware(**speeds)
    forward = compute / 3 / len(plan.units) / plan.schedule.rounds * hardware.flops
    return times(plan, [Work(forward, u.p_bytes // 2) for u in plan.units], hardware, compute=compute)
