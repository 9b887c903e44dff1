"""What stale readers read: the old parameters, or a correction towards the next version.

A stale reader of version v works beside fresh readers of version v + 1. Instead of theta_v it may read an estimate of
theta_{v+1}, made by the owner:

===========  =====================================================================================================
none         theta_v: the paper's rule
extrapolate  theta_v + s (theta_v - theta_{v-1}): the last update happens again, s times
predict      the optimizer's step from theta_v with the gradient m + w (g - m): m is the momentum as an average of gradients, g
             the average of the gradients of version v that exist when the first stale reader begins (``Schedule.predictor``)
===========  =====================================================================================================

docs/algorithm.md#delay-correction tells why.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

METHODS = ("none", "extrapolate", "predict")


@dataclass(frozen=True)
class DelayCorrection:
    """What stale readers read.

    Attributes:
        method: one of ``METHODS``.
        updates: s, for ``extrapolate``.
        weight: w, for ``predict``.
    """

    method: str = "none"
    updates: float = 1.0
    weight: float = 1.5

    def __bool__(self) -> bool:
        """Whether stale readers read anything but the old version."""
        return self.method != "none"

    def lead(self, beta1: float) -> float:
        """w for an optimizer whose momentum averages gradients with this factor: at most the step of the gradient alone."""
        return min(self.weight, 1.0 / (1.0 - beta1))


def parsed(setting: str | Mapping[str, Any]) -> DelayCorrection:
    """The correction that a setting other than ``"auto"`` names: a method, or a block with ``method`` and its numbers."""
    return DelayCorrection(setting) if isinstance(setting, str) else DelayCorrection(**setting)
