"""model/discover.py: what it may call a model with, and models that zero.Init has partitioned."""

import torch
from torch import nn

from deepspeed_cdp.model.discover import example_of, find_units, trace
from support.discover_models import X8, llama, mlp, vit


def test_example_of():
    assert list(example_of(llama()).kwargs) == ["input_ids"]
    assert example_of(vit()).kwargs["pixel_values"].shape == (1, 3, 16, 16)
    assert example_of(mlp()) is None
    model, x = mlp(), torch.zeros(2, 8)
    for given, args, kwargs in ((x, 1, 0), ((x, x), 2, 0), ({"input": x}, 0, 1)):
        model.example_input_array = given
        example = example_of(model)
        assert (len(example.args), len(example.kwargs)) == (args, kwargs)
    assert trace(model, example) is not None
    assert trace(model.to(torch.bfloat16), example) is not None

    class Broken(nn.Linear):
        @property
        def dummy_inputs(self):
            raise RuntimeError("no")

    assert example_of(Broken(2, 2)) is None


def test_partitioned_by_zero_init():
    model = mlp()
    for p in model.parameters():  # what deepspeed.zero.Init leaves
        p.ds_shape, p.ds_numel, p.data = p.shape, p.numel(), torch.empty(0)
    units = find_units(model, 2, X8)
    assert [(u.cost_parameters, u.flops) for u in units.units] == [(72, 384), (72, 384), (18, 96)]
