"""A script's own collective between forward and backward (TRL gathers its metrics there): which plans run with it."""

import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspeed_cdp.model.make_plan import Settings
from deepspeed_cdp.plan.delay_correction import DelayCorrection
from deepspeed_cdp.plan.plan import Plan
from deepspeed_cdp.runtime.runtime import Runtime
from deepspeed_cdp.verify.check import dry_run
from support import models, plans
from support.local_ring import run_ranks, train
from support.optimizers import adamw


@settings(max_examples=80, deadline=None)
@given(plans.plans(st.integers(1, 4)))
def test_ranks_may_meet_between_forward_and_backward(plan: Plan):
    """Owners relay and predict beside their passes, so no rank that has come to the meeting is missed by one that has not."""
    dry_run(plan, 4, meeting=True).run()


@pytest.mark.parametrize("replicated", [False, True])
@pytest.mark.parametrize(("size", "rule", "rounds"), [(3, "dp", 1), (3, "cdp-v2", 2), (4, "cdp-v1", 2), (4, "cdp-v2", 1)])
@pytest.mark.parametrize("method", ["none", "predict"])
def test_ranks_that_meet_train_as_others(size: int, rule: str, rounds: int, method: str, replicated: bool):
    chosen = Settings(rule, rounds=rounds, replicated=replicated, delay_correction=DelayCorrection(method))
    meeting = threading.Barrier(size)
    modules, steps = [models.build("rooted") for _ in range(size)], 4

    def work(rank: int, transport) -> dict[str, torch.Tensor]:
        module = modules[rank]
        runtime = Runtime(module, adamw(list(module.named_parameters())), chosen, transport, torch.device("cpu"))
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

    want = train("rooted", size, chosen, adamw, steps)["state"]
    for state in run_ranks(size, work):
        assert all(torch.equal(state[name], value) for name, value in want.items())
