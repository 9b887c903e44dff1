"""Now deepspeed_cdp.plan.schedule."""

from deepspeed_cdp.plan.schedule import RULES, Read, Schedule, grid, threshold

__all__ = ["RULES", "Read", "Schedule", "grid", "threshold"]
