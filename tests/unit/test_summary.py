"""The dry-run's summary: it counts the actions that are done, and the estimate is close."""

import pytest

from deepspeed_cdp.plan.pipeline_schedule import PipeSchedule
from deepspeed_cdp.plan.plan import Plan
from deepspeed_cdp.plan.schedule import Schedule
from deepspeed_cdp.plan.unit_schedule import Unit
from deepspeed_cdp.verify import check, summary


def plan(ranks: int, rounds: int = 1, rings: int = 1) -> Plan:
    units = tuple(Unit(f"{i}", i // 3, (f"w{i}",), (), 64, 64, (f"{i}",)) for i in range(3 * ranks))
    return Plan(Schedule(ranks, ranks - 1, rounds), units, rings=rings)


@pytest.mark.parametrize(("ranks", "rounds"), [(1, 1), (2, 1), (3, 2), (4, 1)])
def test_actions_are_those_of_the_runs(ranks, rounds):
    one = plan(ranks, rounds)
    run = check.dry_run(one, summary.STEPS)
    run.run()
    done = sum(step < summary.STEPS for _, step, _ in run.log)
    found = summary.check_rings([one])
    assert found.actions == done * summary.RING_WAYS and found.seconds > 0
    assert summary.estimated_actions(one) == pytest.approx(found.actions, rel=0.3)
    assert summary.check_rings([one, one]).actions == 2 * found.actions


def test_several_rings_are_run_together_and_alone():
    assert summary.check_rings([plan(2, rings=3)]).actions > 3 * summary.check_rings([plan(2)]).actions
    assert str(summary.Summary(1234, 4, 3, 0.5)) == "dry-run: 1,234 actions, 4 steps, 3 ways, 0.50 s: OK"


@pytest.mark.parametrize("placement", ["pipeline", "pyramid", "single"])
def test_pipelines(placement):
    one = PipeSchedule(3, 2, 1, placement)
    found = summary.check_pipelines([one])
    assert found.actions == summary.pipeline_actions(one) and (found.steps, found.ways) == (4, 2)
