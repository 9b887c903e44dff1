"""Small Hugging Face models of many kinds train with nothing configured: under ``dp`` as under stock ZeRO-3."""

import math

import pytest

from support.architectures import ARCHITECTURES
from support.sweep import STEPS, sweep

IN_MAKE_TEST = ("Qwen2-VL", "wav2vec2, stable layer norm")  # their order of use is not that of their definition
TOLERANCE = 1e-6  # stock's gradients round otherwise in their last bits, and AdamW passes that on


def marked(name: str) -> object:
    marks = [] if name in IN_MAKE_TEST else [pytest.mark.slow]
    if why := ARCHITECTURES[name].fails:
        marks.append(pytest.mark.xfail(strict=True, reason=why))
    return pytest.param(name, marks=marks)


@pytest.mark.parametrize("name", [marked(name) for name in ARCHITECTURES])
def test_losses_are_those_of_stock_zero3(pool, name):
    """The first to the bit, since weights are equal. ``cdp-v2``, whose later weights are others, stays finite."""
    for by_rule in pool.run(2, sweep, name, timeout=60):
        stock, dp, delayed = by_rule[None], by_rule["dp"], by_rule["cdp-v2"]
        assert len(stock) == len(dp) == len(delayed) == STEPS
        assert stock[0] == dp[0] == delayed[0]
        assert all(abs(a - b) <= TOLERANCE * max(1.0, abs(a)) for a, b in zip(stock, dp)), (stock, dp)
        assert all(map(math.isfinite, stock + delayed)), (stock, delayed)
