"""Bounds in docs/learning.md: the longest step at which an average of gradients, fresh or one step stale, settles."""

import pytest


def settles(step: float, beta: float, delay: int) -> bool:
    """Whether theta comes to 0 from 1, with curvature 1, momentum m = beta m + (1 - beta) g, g taken ``delay`` steps ago."""
    thetas, m = [1.0, 1.0], 0.0
    for _ in range(20000):
        m = beta * m + (1 - beta) * thetas[-1 - delay]
        thetas = [thetas[-1], thetas[-1] - step * m]
        if abs(thetas[-1]) > 1e6:
            return False
    return abs(thetas[-1]) < 1e-3


@pytest.mark.parametrize("beta", [0.0, 0.5, 0.8, 0.9, 0.95])
def test_bounds(beta):
    for bound, delay in ((2 * (1 + beta) / (1 - beta), 0), (1.0, 1)):
        assert settles(0.98 * bound, beta, delay) and not settles(1.02 * bound, beta, delay)
