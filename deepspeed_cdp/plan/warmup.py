"""Warm-up: the first steps under ``dp``, then the configured rule (``cyclic.warmup_steps``).

Stale parameters cost most at the very start of training. So steps t < ``warmup_steps``, counted from the start of training, run
the plan with K = 0, and later steps the configured plan. The last step of the warm-up ends with a flush. All ranks count the same
steps, so the switch needs no message, and a checkpoint resumes in the right plan by its step alone.

One set of buffers serves both plans. They differ in their schedule only: units, stages, owners and windows are the same,
and the configured plan has at least as many published copies.
"""

from collections.abc import Sequence

from deepspeed_cdp.plan.plan import Plan


class Phases:
    """The plan of each step.

    Attributes:
        plan: the configured plan; buffers are allocated for it.
        plans: all plans in use: that of the warm-up, if there is one, and the configured plan.
        steps: length of the warm-up; 0 if the configured rule is ``dp`` itself.
    """

    def __init__(self, plan: Plan, warmup_steps: int = 0):
        self.plan = plan
        self.steps = warmup_steps if plan.schedule.threshold else 0
        self.plans: Sequence[Plan] = (plan.under(0), plan) if self.steps else (plan,)
        for rank in range(plan.schedule.ranks):
            room = plan.regions(rank)
            assert all(p.regions(rank).items() <= room.items() for p in self.plans), "one allocation serves both"

    def at(self, step: int) -> Plan:
        """The plan of ``step``, counted from the start of training."""
        return self.plans[0] if step < self.steps else self.plan

    def end_with(self, step: int) -> bool:
        """Whether ``step`` is the last of the warm-up, which must end with a flush."""
        return step == self.steps - 1
