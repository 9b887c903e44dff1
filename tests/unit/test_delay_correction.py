"""optim/delay_correction.py: which correction an optimizer gets. What corrections are worth is measured in docs/learning.md."""

import pytest
import torch

from deepspeed_cdp.optim.delay_correction import resolve


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


def test_predict_needs_a_formula():
    parameters = [torch.nn.Parameter(torch.ones(2, 2))]
    for kind in (torch.optim.SGD, torch.optim.NAdam, torch.optim.Adam):
        assert resolve("predict", kind(parameters), 1).method == "predict"
    for kind in (torch.optim.Adagrad, MuonAndAdamW):
        with pytest.raises(ValueError, match="is 'predict' and the optimizer .* use 'extrapolate' or 'auto'"):
            resolve("predict", kind(parameters), 1)
    chosen = resolve({"method": "predict", "momentum": 0.5}, torch.optim.AdamW(parameters), 1)
    assert chosen.weights(0.9) == (0.5, resolve("predict", torch.optim.AdamW(parameters), 1).weights(0.9)[1])
