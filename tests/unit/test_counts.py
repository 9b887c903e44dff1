"""Counts of steps go from one optimizer's state to another's, which keeps them otherwise."""

import pytest
import torch
from deepspeed.ops.adam import FusedAdam

from deepspeed_cdp.optim.state import fit_counts


@pytest.fixture
def short_floats():
    """Some scripts build their models so."""
    torch.set_default_dtype(torch.bfloat16)
    yield
    torch.set_default_dtype(torch.float32)


def test_torchs_optimizers_get_a_tensor_that_can_count(short_floats):
    p = torch.nn.Parameter(torch.zeros(3, dtype=torch.float32))
    optimizer = torch.optim.AdamW([p], lr=1e-3)
    state = {"step": 1001, "exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
    fit_counts(optimizer, state)
    optimizer.state[p] = state
    p.grad = torch.ones_like(p)
    for _ in range(20):
        optimizer.step()
    assert optimizer.state[p]["step"].dtype == torch.float32 and float(optimizer.state[p]["step"]) == 1021


def test_deepspeeds_get_a_number():
    optimizer = object.__new__(FusedAdam)  # without a GPU there is no other way
    state = {"step": torch.tensor(7.0)}
    fit_counts(optimizer, state)
    assert state == {"step": 7} and type(state["step"]) is int
    fit_counts(torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1), untouched := {"momentum_buffer": None})
    assert untouched == {"momentum_buffer": None}
