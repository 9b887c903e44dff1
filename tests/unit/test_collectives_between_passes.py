"""A script's own collective between forward and backward (TRL gathers its metrics there): which plans run with it."""

import threading
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspeed_cdp.model.make_plan import Settings
from deepspeed_cdp.plan.plan import Plan
from deepspeed_cdp.plan.replicated import ReplicatedPlan
from deepspeed_cdp.runtime.runtime import Runtime
from deepspeed_cdp.verify.check import allows_meetings, dry_run
from deepspeed_cdp.verify.dry_run import DryRun
from deepspeed_cdp.verify.well_formed import PlanError
from support import models, plans
from support.local_ring import run_ranks, train
from support.optimizers import sgd


@settings(max_examples=80, deadline=None)
@given(plans.plans(st.integers(1, 4)))
def test_ranks_may_meet_between_forward_and_backward(plan: Plan):
    """Owners relay sums beside their passes, so no rank that has come to the meeting is missed by one that has not."""
    DryRun(replace(plan, predicts=False), 4, meeting=True).run()


@settings(max_examples=40, deadline=None)
@given(plans.plans(st.sampled_from([1, 2])))
def test_one_rank_or_two_may_with_predictions(plan: Plan):
    DryRun(plan, 4, meeting=True).run()


@pytest.mark.parametrize("kind", [Plan, ReplicatedPlan])
@pytest.mark.parametrize(
    ("ranks", "k", "rounds", "per_stage", "runs"),
    [
        (3, 0, 1, 2, True),
        (3, 0, 3, 2, True),
        (3, 1, 1, 1, True),
        (3, 1, 1, 2, False),
        (3, 2, 1, 1, False),
        (3, 2, 3, 2, False),
        (3, 5, 1, 1, False),
        (4, 1, 1, 1, False),
        (4, 3, 2, 2, False),
    ],
)
def test_more_ranks_mostly_may_not_with_predictions(kind, ranks: int, k: int, rounds: int, per_stage: int, runs: bool):
    """An owner predicts in its own forward from what another rank adds behind the meeting."""
    plan = plans.make(ranks, k, rounds, per_stage, kind=kind, predicts=True)
    run = dry_run(plan, 4, meeting=True)
    assert allows_meetings(plan) == runs and allows_meetings(replace(plan, predicts=False))
    if runs:
        run.run()
    else:
        with pytest.raises(PlanError, match=f"nothing moves any more: .*rank {ranks - 1}, step 1: PREDICT_PARAM"):
            run.run()


@pytest.mark.parametrize("replicated", [False, True])
@pytest.mark.parametrize(("size", "rule", "rounds"), [(3, "dp", 1), (3, "cdp-v2", 2), (4, "cdp-v1", 2), (4, "cdp-v2", 1)])
def test_ranks_that_meet_train_as_others(size: int, rule: str, rounds: int, replicated: bool):
    chosen, meeting = Settings(rule, rounds=rounds, replicated=replicated), threading.Barrier(size)
    modules, steps = [models.build("rooted") for _ in range(size)], 4

    def work(rank: int, transport) -> dict[str, torch.Tensor]:
        module = modules[rank]
        runtime = Runtime(module, sgd(list(module.named_parameters())), chosen, transport, torch.device("cpu"))
        for step in range(steps):
            for m in range(rounds):
                with runtime.forward():
                    value = models.loss(module, "rooted", models.batch("rooted", step, m, rank))
                meeting.wait(20)
                (value / rounds).backward()
                runtime.end_backward()
            runtime.step()
        state = {k: v.clone() for k, v in runtime.whole_state().items()}
        runtime.close(True)
        return state

    want = train("rooted", size, chosen, sgd, steps)["state"]
    for state in run_ranks(size, work):
        assert all(torch.equal(state[name], value) for name, value in want.items())
