"""Checks a plan: its form, and a dry-run of all ranks under three conditions."""

from typing import Any

from deepspeed_cdp.plan.plan import Plan
from deepspeed_cdp.plan.program import build, initial_posts
from deepspeed_cdp.plan.replicated import ReplicatedPlan
from deepspeed_cdp.verify.dry_run import CONDITIONS, DryRun, Posts, Programs
from deepspeed_cdp.verify.replicated import ReplicaDryRun
from deepspeed_cdp.verify.well_formed import check_form

DRY_RUNS: dict[type[Plan], type[DryRun]] = {Plan: DryRun, ReplicatedPlan: ReplicaDryRun}


def validate(plan: Plan, steps: int = 4, programs: Programs | None = None, posts: Posts | None = None) -> None:
    """Check the form of a plan, and dry-run ``steps`` steps.

    Args:
        programs, posts: replace the plan's own, in tests.
    Raises:
        PlanError: naming rank, step and action.
    """
    ranks = range(plan.schedule.ranks)
    own = [[programs(r, first) if programs else build(plan, r, first) for first in (True, False)] for r in ranks]
    before = [posts(r) if posts else initial_posts(plan, r) for r in ranks]
    for r in ranks:
        check_form(plan, r, own[r], before[r])
    for condition in CONDITIONS:
        dry_run(plan, steps, lambda r, first: own[r][not first], lambda r: before[r], **condition).run()


def dry_run(plan: Plan, *args: Any, **kwargs: Any) -> DryRun:
    """A ``DryRun`` of this type of plan."""
    return DRY_RUNS[type(plan)](plan, *args, **kwargs)
