"""Bounds in docs/learning.md: the largest curvature times learning rate at which averages of gradients settle on a quadratic."""

import numpy as np
import pytest
import torch
from torch import nn

from deepspeed_cdp.analysis.learning_simulator import Simulator


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


# ---- delay corrections ------------------------------------------------------------------------------------------------------
STEPS = np.geomspace(0.5, 60.0, 240)  # curvature times learning rate, 2 % apart


def limit(beta: float, fresh: float, updates: float = 0.0, lead: bool = False) -> float:
    """Up to which of STEPS an iteration is stable if stale readers read theta moved on by that many times the last update.

    Of a quadratic of curvature 1, one step maps (theta, q, p, m) to the next: q is the correction of theta, and p that of the
    theta before, which stale readers read. A fraction ``fresh`` of readers reads theta.
    With ``lead``, steps are NAdam's: beta m + (1 - beta) g instead of m.
    """
    theta, q, p, m = np.eye(4)
    gradient = STEPS[:, None] * (fresh * theta + (1 - fresh) * p)  # times the rate; (steps, 4)
    momentum = beta * m + (1 - beta) * gradient
    then = theta - (beta * momentum + (1 - beta) * gradient if lead else momentum)
    rows = np.broadcast_arrays(then, then + updates * (then - theta), q, momentum)
    unstable = np.abs(np.linalg.eigvals(np.stack(rows, -2))).max(-1) > 1 + 1e-7
    return float(STEPS[max(unstable.argmax() - 1, 0)] if unstable.any() else STEPS[-1])


def test_the_analysis_agrees_with_iterations():
    for beta in (0.5, 0.9):
        assert limit(beta, 0.0) == pytest.approx(1.0, rel=0.03)
        assert limit(beta, 1.0) == pytest.approx(min(60.0, 2 * (1 + beta) / (1 - beta)), rel=0.03)


@pytest.mark.parametrize(
    "updates, lead, expected",  # by fraction of fresh readers: 0, 1/4, 1/2, 3/4
    [
        (0.0, False, (1.0, 1.33, 2.0, 4.0)),  # none
        (1.0, False, (2.7, 3.2, 4.0, 5.8)),  # extrapolate
        (0.0, True, (2.5, 4.1, 7.5, 18.0)),  # NAdam leads already: it gains nothing where half of the readers are fresh
        (1.0, True, (3.4, 4.1, 5.4, 8.3)),
    ],
)
def test_limits_of_corrections_at_beta1_0_9(updates, lead, expected):
    got = [limit(0.9, fresh, updates, lead) for fresh in (0.0, 0.25, 0.5, 0.75)]
    assert got == pytest.approx(expected, rel=0.04)


def limit_of_predictions(beta: float, weight: float) -> float:
    """The largest rate times curvature if all readers read theta - lr (beta m + (1 - beta) (m + weight (g - m))): theta and m are
    those before the step, g is the step's gradient, which is taken at the reads of the step before."""
    for rate in np.arange(0.1, 60, 0.05):
        # of theta_{t-1}, the m that made it, and the gradient of step t-1
        read = np.array([1.0, -(beta + (1 - beta) * (1 - weight)), -(1 - beta) * weight])
        step = np.array([[1.0, -beta, -(1 - beta)], [0.0, beta, 1 - beta], rate * read])
        if max(abs(np.linalg.eigvals(step))) > 1 + 1e-9:
            return float(rate)
    raise AssertionError


@pytest.mark.parametrize("weight, expected", [(1.0, 38.0), (1.5, 12.7), (2.0, 7.6), (2.5, 5.4)])
def test_predictions_are_exact_with_weight_1(weight, expected):
    """As stable as without delay (2 (1 + beta) / (1 - beta)); a bolder weight is less so, if gradients are not noisy."""
    assert limit_of_predictions(0.9, weight) == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize("correction", ["none", "extrapolate", 1.0, 2.0])
def test_trainings_have_these_limits(correction):
    """SGD on (w^2) / 2 with one rank under cdp-v1; its buffer is m / (1 - beta). A number is a prediction's weight."""
    if isinstance(correction, float):
        most, correction = limit_of_predictions(0.9, correction), {"method": "predict", "weight": correction}
    else:
        most = limit(0.9, 0.0, float(correction == "extrapolate"))
    for factor, stable in ((0.9, True), (1.1, False)):
        module = nn.Linear(1, 1, bias=False)
        nn.init.ones_(module.weight)
        optimizer = torch.optim.SGD(module.parameters(), lr=factor * most * (1 - 0.9), momentum=0.9)
        ring = Simulator(module, optimizer, [["weight"]], "cdp-v1", delay_correction=correction)
        for _ in range(1500):
            loss = ring.step([torch.ones(1, 1)], lambda module, x: module(x).square().sum() / 2).item()
            if loss > 1e6:
                break
        assert (loss < 1e-4) if stable else (loss > 1e4)


def test_an_extrapolation_needs_momentum():
    """Without it does harm (the limit without a correction is 1); it helps from a momentum of about 0.8 on."""
    for beta, low, high in ((0.0, 0.5, 0.7), (0.5, 0.9, 1.1), (0.8, 1.6, 1.9), (0.95, 3.7, 4.2)):
        assert low < limit(beta, 0.0, 1.0) < high
