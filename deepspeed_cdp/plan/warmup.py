"""Warm-up: the first steps under ``dp``, then the configured rule (``cyclic.warmup_steps``). Pure, no torch.

Stale parameters cost most at the very start of training. So step t < ``warmup_steps``, counted from the start of training, is
walked by the plan with K = 0 and every later one by the configured plan. The change is at a flush, which the last step of the
warm-up ends with; every rank counts the same steps, so nobody needs to be told, and a checkpoint resumes in the right plan by its
step alone. The two plans differ in their schedule only: they have the same units, stages, owners and layouts (in both, finished
sums lie apart), and the configured one has at least as many published copies, so one set of buffers serves both.
"""

from collections.abc import Sequence

from deepspeed_cdp.plan.plan import Plan


class Phases:
    """Which plan a step is walked by.

    Attributes:
        plan: the configured one, for which buffers are made.
        plans: all that are needed: the configured one, and the one before it if there is a warm-up.
        steps: of the warm-up; 0 where the configured rule is ``dp`` itself.
    """

    def __init__(self, plan: Plan, warmup_steps: int = 0):
        self.plan = plan
        self.steps = warmup_steps if plan.schedule.threshold else 0
        self.plans: Sequence[Plan] = (plan.under(0), plan) if self.steps else (plan,)
        assert all(p.regions[name] <= plan.regions[name] for p in self.plans for name in p.regions), "one allocation serves both"

    def at(self, step: int) -> Plan:
        """The plan of ``step`` (counted from the start of training)."""
        return self.plans[0] if step < self.steps else self.plan

    def end_with(self, step: int) -> bool:
        """Whether ``step`` is the last of the warm-up, so that a flush must end it."""
        return step == self.steps - 1
