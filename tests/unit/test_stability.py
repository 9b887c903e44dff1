"""Bounds in docs/learning.md: the largest curvature times learning rate at which averages of gradients settle on a quadratic."""

import numpy as np
import pytest
import torch
from torch import nn

from deepspeed_cdp.analysis.learning_simulator import Simulator
from deepspeed_cdp.plan.delay_correction import coefficients


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


def limits(beta: float, fresh: float, a: np.ndarray, c: np.ndarray, lead: bool = False) -> np.ndarray:
    """Up to which of STEPS an iteration is stable; a, c and the result have shape (n,).

    Of a quadratic of curvature 1, one step maps (theta, q, p, m) to the next: q is the correction of theta, and p that of the
    theta before, which stale readers read. A fraction ``fresh`` of readers reads theta.
    With ``lead``, steps are NAdam's: beta m + (1 - beta) g instead of m.
    """
    theta, q, p, m = np.eye(4)
    gradient = STEPS[:, None] * (fresh * theta + (1 - fresh) * p)  # times the rate; (steps, 4)
    momentum = beta * m + (1 - beta) * gradient
    then = theta - (beta * momentum + (1 - beta) * gradient if lead else momentum)
    ahead = a[:, None, None] * momentum + c[:, None, None] * gradient
    rows = np.broadcast_arrays(then, then - ahead, q, momentum)
    radius = np.abs(np.linalg.eigvals(np.stack(rows, -2))).max(-1)  # (n, steps)
    unstable = radius > 1 + 1e-7
    return np.where(unstable.any(1), STEPS[np.maximum(unstable.argmax(1) - 1, 0)], STEPS[-1])


def lasting(beta: float, a: np.ndarray, c: np.ndarray) -> np.ndarray:
    """The limit, all readers stale, if a and c may be a tenth off."""
    return np.min([limits(beta, 0.0, a * i, c * j) for i in (0.9, 1.1) for j in (0.9, 1.1)], 0)


def best_of(beta: float) -> float:
    """The largest limit that lasts, by a search over a and c that narrows round the best pair."""
    middle, width = np.array([0.4, 1.0]), np.array([0.6, 0.5])
    for _ in range(3):
        a, share = (x.ravel() for x in np.meshgrid(*(middle[:, None] + width[:, None] * np.linspace(-1, 1, 7))))
        a = np.maximum(a, 0.0)
        found = lasting(beta, a, share * (1 - beta))
        middle, width = np.array([a[found.argmax()], share[found.argmax()]]), width / 2.5
    return float(found.max())


def test_the_analysis_agrees_with_iterations():
    for beta in (0.5, 0.9):
        assert limits(beta, 0.0, np.zeros(1), np.zeros(1)) == pytest.approx(1.0, rel=0.03)
        assert limits(beta, 1.0, np.zeros(1), np.zeros(1)) == pytest.approx(min(60.0, 2 * (1 + beta) / (1 - beta)), rel=0.03)


@pytest.mark.parametrize(
    "a, c, expected",  # by fraction of fresh readers: 0, 1/4, 1/2, 3/4
    [
        (0.0, 0.0, (1.0, 1.33, 2.0, 4.0)),  # none
        (1.0, 0.0, (2.7, 3.2, 4.0, 5.8)),  # extrapolate: theta - theta_before is minus the rate times m
        (0.9, 0.1, (5.0, 5.8, 7.0, 9.1)),  # the step that no gradient changes
        (0.2, 0.12, (7.0, 7.9, 9.2, 11.4)),
        (*coefficients(0.9), (6.7, 7.6, 8.7, 10.8)),  # predict
    ],
)
def test_limits_of_corrections_at_beta1_0_9(a, c, expected):
    got = [limits(0.9, fresh, np.array([a]), np.array([c]))[0] for fresh in (0.0, 0.25, 0.5, 0.75)]
    assert got == pytest.approx(expected, rel=0.04)


@pytest.mark.parametrize(
    "a, c, expected",
    [
        (0.0, 0.0, (2.5, 4.1, 7.5, 18.0)),  # none
        (*coefficients(0.9), (4.2, 5.0, 6.3, 8.9)),  # predict
        (0.0, 0.09, (5.1, 5.8, 7.2, 10.4)),
    ],
)
def test_nadam_leads_already(a, c, expected):
    """Its own lead does what a correction does: a further one helps only where most readers are stale."""
    got = [limits(0.9, fresh, np.array([a]), np.array([c]), lead=True)[0] for fresh in (0.0, 0.25, 0.5, 0.75)]
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
        limit, correction = limit_of_predictions(0.9, correction), {"method": "predict", "weight": correction}
    else:
        limit = limits(0.9, 0.0, np.array([float(correction == "extrapolate")]), np.array([0.0]))[0]
    for factor, stable in ((0.9, True), (1.1, False)):
        module = nn.Linear(1, 1, bias=False)
        nn.init.ones_(module.weight)
        optimizer = torch.optim.SGD(module.parameters(), lr=factor * limit * (1 - 0.9), momentum=0.9)
        ring = Simulator(module, optimizer, [["weight"]], "cdp-v1", delay_correction=correction)
        for _ in range(1500):
            loss = ring.step([torch.ones(1, 1)], lambda module, x: module(x).square().sum() / 2).item()
            if loss > 1e6:
                break
        assert (loss < 1e-4) if stable else (loss > 1e4)


@pytest.mark.parametrize("beta", [0.5, 0.8, 0.9, 0.95, 0.98])
def test_coefficients_are_near_the_best(beta):
    a, c = (np.array([x]) for x in coefficients(beta))
    assert lasting(beta, a, c)[0] >= 0.94 * best_of(beta)
    assert limits(beta, 0.0, a, c)[0] >= 1.4


def test_without_momentum_there_is_nothing_to_predict():
    """An extrapolation then does harm; it helps from a momentum of about 0.8 on."""
    assert coefficients(0.0) == (0.0, 0.0)
    for beta, low, high in ((0.0, 0.5, 0.7), (0.5, 0.9, 1.1), (0.8, 1.6, 1.9), (0.95, 3.7, 4.2)):
        assert low < limits(beta, 0.0, np.ones(1), np.zeros(1))[0] < high
