"""Two engines in one process, as a generator and a discriminator have them."""

import math
from typing import Any

import pytest
import torch

from support import models
from support.engine_work import Job, start


def adversaries(rank: int, world: int, rule: str | None, how: str) -> list[float]:
    """The losses of both.

    Args:
        how: what the script does about the discriminator's gradients in the generator's step: "freeze", "eval", "zero" or "".
    """
    engines = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        engines.append(start(Job("mlp", rule, timeout=20.0), world, models.MLP(blocks=4)))
    (g, d), numbers, losses = engines, torch.Generator().manual_seed(rank), []

    def update(engine: Any, loss: torch.Tensor) -> None:
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())

    for _ in range(4):
        z, x = torch.randn(2, 4, 8, generator=numbers)
        update(d, (d(x).mean() - 1).pow(2) + d(g(z).detach()).mean().pow(2))
        if how == "freeze":
            d.module.requires_grad_(False)
        elif how == "eval":
            d.eval()
        update(g, (d(g(z)).mean() - 1).pow(2))
        if how == "freeze":
            d.module.requires_grad_(True)
        elif how == "eval":
            d.train()
        elif how == "zero":
            d.zero_grad()
    for engine in engines:
        engine.destroy()
    return losses


def test_they_train_as_under_stock(pool):
    """Stock runs one of these scripts only; two others mean the same."""
    stock = pool.run(2, adversaries, None, "freeze", timeout=120)
    for how in ("freeze", "eval", "zero"):
        for got, want in zip(pool.run(2, adversaries, "dp", how, timeout=120), stock):
            assert got == pytest.approx(want, rel=1e-5)


def test_delayed(pool):
    for how in ("freeze", "eval", "zero", ""):
        for losses in pool.run(2, adversaries, "cdp-v2", how, timeout=120):
            assert all(map(math.isfinite, losses))
