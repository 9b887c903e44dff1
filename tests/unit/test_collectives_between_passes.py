"""A script's own collective between forward and backward (TRL gathers its metrics there): which plans run with it."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspeed_cdp.plan.plan import Plan
from deepspeed_cdp.verify.dry_run import DryRun
from deepspeed_cdp.verify.well_formed import PlanError
from support import plans


@settings(max_examples=60, deadline=None)
@given(plans.plans(st.sampled_from([1, 2])))
def test_two_ranks_may_meet_between_forward_and_backward(plan: Plan):
    DryRun(plan, 4, meeting=True).run()


@pytest.mark.parametrize(("k", "rounds", "runs"), [(0, 1, True), (0, 2, False), (2, 1, False), (2, 3, False), (5, 1, False)])
def test_three_ranks_mostly_may_not(k: int, rounds: int, runs: bool):
    """The last rank starts a step while the first still has to pull, or to take sums, in the backward behind the meeting."""
    run = DryRun(plans.make(3, k, rounds, 2), 4, meeting=True)
    if runs:
        run.run()
    else:
        with pytest.raises(PlanError, match="nothing moves any more"):
            run.run()
