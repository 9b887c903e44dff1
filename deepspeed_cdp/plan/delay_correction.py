"""What stale readers read: the old parameters, or a correction towards the next version.

A stale reader of version v works beside fresh readers of version v + 1. Instead of theta_v it may read an estimate of
theta_{v+1}, made by the owner:

===========  =====================================================================================================
none         theta_v: the paper's rule
extrapolate  theta_v + s (theta_v - theta_{v-1}): the last update happens again, s times
predict      the optimizer's step from theta_v with the gradient m + w (g - m): m is the momentum as an average of gradients, g
             the average of the gradients of version v that exist when the first stale reader begins (``Schedule.predictor``)
             In pipelines: theta_v - lr (a m + c g) / d, with the momentum and gradient of the update that made theta_v, in the
             units of the optimizer (optim/delay_correction.py); d is Adam's denominator
===========  =====================================================================================================

docs/algorithm.md#delay-correction tells why. ``coefficients`` gives a and c.
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
        weight: w, for ``predict`` on rings; None: 2.
        momentum, gradient: a and c, for ``predict`` in pipelines; None: by ``coefficients``.
    """

    method: str = "none"
    updates: float = 1.0
    momentum: float | None = None
    gradient: float | None = None
    weight: float | None = None

    def __bool__(self) -> bool:
        """Whether stale readers read anything but the old version."""
        return self.method != "none"

    def lead(self, beta1: float) -> float:
        """w for an optimizer whose momentum averages gradients with this factor: at most the step of the gradient alone."""
        return min(2.0 if self.weight is None else self.weight, 1.0 / (1.0 - beta1))

    def weights(self, beta1: float) -> tuple[float, float]:
        """a and c for an optimizer whose momentum averages gradients with this factor."""
        a, c = coefficients(beta1)
        return a if self.momentum is None else self.momentum, c if self.gradient is None else self.gradient


def parsed(setting: str | Mapping[str, Any]) -> DelayCorrection:
    """The correction that a setting other than ``"auto"`` names: a method, or a block with ``method`` and its coefficients."""
    return DelayCorrection(setting) if isinstance(setting, str) else DelayCorrection(**setting)


def coefficients(beta1: float) -> tuple[float, float]:
    """a and c that keep training stable at a large curvature times rate if all readers are stale.

    On a quadratic of curvature L, with m' = beta1 m + (1 - beta1) g and theta' = theta - lr m', stale readers of
    theta - lr (a m + c g) are stable up to some lr L. Right beside the pairs with the largest lr L lie pairs that are slightly
    unstable at a third of it. So the best pair is the one with the largest lr L if both numbers may be a tenth off. For beta1
    0.5, 0.8, 0.9, 0.95, 0.98 a search finds 1.5, 3.9, 6.6, 11.5, 26, where theta itself gives 1. These formulas reach 95 % of
    that (tests/unit/test_stability.py).
    """
    rest = 1.0 - beta1
    return max(0.0, 1.0 - 3.3 * rest**0.7), 1.12 * rest * (1.0 - rest**1.7)
