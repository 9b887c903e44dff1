"""Check a plan: its form, and a dry-run of all ranks in three ways. Pure, no torch."""

from deepspeed_cdp.plan.plan import Plan
from deepspeed_cdp.plan.program import build, initial_posts
from deepspeed_cdp.verify.dry_run import DryRun, Posts, Programs
from deepspeed_cdp.verify.replicated import ReplicaRun
from deepspeed_cdp.verify.well_formed import check_form


def validate(plan: Plan, steps: int = 4, programs: Programs | None = None, posts: Posts | None = None) -> None:
    """Dry-run ``steps`` steps in all three ways; ``programs`` and ``posts`` stand in for the plan's own, in tests.

    Raises:
        PlanError: naming rank, step and action.
    """
    made = {}
    for r in range(plan.schedule.ranks):
        before = posts(r) if posts else initial_posts(plan, r)
        made[r] = [(programs(r, first) if programs else build(plan, r, first)) for first in (True, False)], before
        check_form(plan, r, *made[r])
    for blocking, barrier in ((False, False), (True, False), (False, True)):
        dry_run(plan, steps, lambda r, first: made[r][0][not first], lambda r: made[r][1], blocking, barrier).run()


def dry_run(plan: Plan, *args, **kwargs) -> DryRun:
    """A ``DryRun`` of this plan."""
    if plan.replicated:
        return ReplicaRun(plan, *args, **kwargs)
    return DryRun(plan, *args, **kwargs)
