"""Now deepspeed_cdp.plan.replicated."""

from deepspeed_cdp.plan.replicated import ReplicatedPlan, grid

__all__ = ["ReplicatedPlan", "grid"]
