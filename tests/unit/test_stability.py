"""docs/learning.md's bounds: the longest step at which an average of gradients, fresh or one step stale, settles on a quadratic."""

from math import sqrt

import pytest


def settles(step: float, beta: float, delay: int) -> bool:
    """Whether theta comes to 0 from 1, with curvature 1, momentum m = beta m + (1 - beta) g, g taken ``delay`` steps ago."""
    thetas, m = [1.0] * (delay + 1), 0.0
    for _ in range(20000):
        m = beta * m + (1 - beta) * thetas[-1 - delay]
        thetas = [*thetas[-delay - 1:], thetas[-1] - step * m]
        if abs(thetas[-1]) > 1e6:
            return False
    return abs(thetas[-1]) < 1e-3


@pytest.mark.parametrize("beta, table", [(0.0, 0.618), (0.5, 0.562), (0.8, 0.525), (0.9, 0.512), (0.95, 0.506)])
def test_bounds(beta, table):
    fresh = 2 * (1 + beta) / (1 - beta)
    stale = (sqrt((1 + beta) ** 2 + 4 * (1 - beta)) - (1 + beta)) / (2 * (1 - beta))
    assert stale == pytest.approx(table, abs=5e-4)
    for bound, delay in ((fresh, 0), (stale, 1)):
        assert settles(0.98 * bound, beta, delay) and not settles(1.02 * bound, beta, delay)
