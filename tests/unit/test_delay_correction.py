"""optim/delay_correction.py: which correction an optimizer gets. What corrections are worth is measured in docs/learning.md."""

import copy

import pytest
import torch

from deepspeed_cdp.optim.delay_correction import Corrector, resolve
from deepspeed_cdp.plan.delay_correction import DelayCorrection


class MuonAndAdamW(torch.optim.Optimizer):
    """As scripts write them."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1})


AUTO = {
    torch.optim.Adam: "predict",
    torch.optim.AdamW: "predict",
    torch.optim.Adamax: "predict",
    torch.optim.NAdam: "none",  # its step leads already
    torch.optim.SGD: "none",
    torch.optim.Adagrad: "none",  # an extrapolation harms where there is no momentum
    torch.optim.RMSprop: "none",
    MuonAndAdamW: "extrapolate",
}


@pytest.mark.parametrize("kind", AUTO)
def test_auto(kind):
    optimizer = kind([torch.nn.Parameter(torch.ones(2, 2))])
    assert resolve("auto", optimizer, 3).method == AUTO[kind]
    assert resolve("auto", optimizer, 0).method == "none", "nobody is stale under dp"


def test_predict_needs_a_known_momentum():
    parameters = [torch.nn.Parameter(torch.ones(2, 2))]
    for kind in (torch.optim.SGD, torch.optim.NAdam, torch.optim.Adam):
        assert resolve("predict", kind(parameters), 1).method == "predict"
    for kind in (torch.optim.Adagrad, MuonAndAdamW):
        with pytest.raises(ValueError, match="is 'predict' and the optimizer .* use 'extrapolate' or 'auto'"):
            resolve("predict", kind(parameters), 1)
    assert resolve({"method": "predict", "weight": 0.5}, torch.optim.AdamW(parameters), 1).lead(0.9) == 0.5


def test_the_trial_step_leaves_nothing_behind():
    """Values, state, options and gradients are as before; what it returns is what a copy of the optimizer makes."""
    torch.manual_seed(0)
    weights = [torch.nn.Parameter(torch.randn(3)), torch.nn.Parameter(torch.randn(2, 2))]
    optimizer = torch.optim.AdamW(weights, lr=0.1, betas=(0.5, 0.9), weight_decay=0.1)
    for w in weights:
        w.grad = torch.randn_like(w)
    optimizer.step()
    before = copy.deepcopy((weights, optimizer.state_dict(), [w.grad for w in weights]))
    gradients, options = [torch.randn_like(w) for w in weights], [{"lr": 0.3, "betas": (0.5, 0.9)}]
    ahead = Corrector(DelayCorrection("predict", weight=1.5), optimizer).predict(weights, gradients, options)
    for now, then in zip(weights, before[0]):
        assert torch.equal(now, then)
    assert all(torch.equal(w.grad, g) for w, g in zip(weights, before[2]))
    assert str(optimizer.state_dict()) == str(before[1])
    trial, copies = copy.deepcopy((optimizer, weights))
    trial.param_groups[0]["lr"] = 0.3
    for w, g in zip(copies, gradients):
        m = trial.state[w]["exp_avg"] / 0.5
        w.grad = m + 1.5 * (g - m)
    trial.step()
    for a, w in zip(ahead, copies):
        torch.testing.assert_close(a, w.detach())
        assert not torch.equal(a, before[0][0 if w.ndim == 1 else 1])


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_a_trial_step_before_any_update_leaves_no_state(kind):
    """An update may be skipped, so the first prediction may be the first step that an optimizer makes."""
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = kind([weight], lr=0.1, weight_decay=0.0)
    for state in ({}, {weight: {}}):
        optimizer.state.clear()
        optimizer.state.update(state)
        (ahead,) = Corrector(DelayCorrection("predict"), optimizer).predict([weight], [torch.ones(2)], [{}])
        torch.testing.assert_close(ahead, torch.full((2,), 0.9))
        assert not optimizer.state.get(weight) and torch.equal(weight.detach(), torch.ones(2)) and weight.grad is None


def test_coupled_decay_is_part_of_both_gradients():
    """With steady gradients, Adam with coupled decay is predicted exactly, whatever the weight."""
    weight = torch.nn.Parameter(torch.full((2,), 3.0))
    optimizer = torch.optim.Adam([weight], lr=1e-4, weight_decay=0.1)
    for _ in range(200):
        weight.grad = torch.full((2,), 0.5)
        optimizer.step()
    (ahead,) = Corrector(DelayCorrection("predict", weight=3.0), optimizer).predict([weight], [torch.full((2,), 0.5)], [{}])
    weight.grad = torch.full((2,), 0.5)
    optimizer.step()
    torch.testing.assert_close(ahead, weight.detach(), rtol=0, atol=1e-6)


def test_a_prediction_runs_none_of_the_scripts_hooks():
    """An average of weights or a count of steps in a hook would be wrong, and on the relay's thread."""
    p = torch.nn.Parameter(torch.ones(3))
    optimizer, calls = torch.optim.AdamW([p]), []
    optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
    optimizer.register_step_post_hook(lambda *_: calls.append("post"))
    p.grad = torch.ones(3)
    optimizer.step()
    assert calls == ["pre", "post"]
    options = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    Corrector(DelayCorrection("predict"), optimizer).predict([p], [torch.ones(3)], options)
    assert calls == ["pre", "post"]
