"""Runs of the GPU scripts and how they are compared."""

from collections.abc import Callable
from typing import Any

import torch

from support import models

Verdict = tuple[bool, dict[str, Any]]
STEPS = 6
LR = 1e-2


def steps_of(
    engine: Any,
    kind: str,
    data: torch.Tensor,
    first: int = 0,
    last: int | None = None,
    after: Callable[[int], None] = lambda step: None,
) -> list[torch.Tensor]:
    """Train over ``data`` ([steps, rounds, ...]); the losses, on the device."""
    losses = []
    for step in range(first, len(data) if last is None else last):
        for x in data[step]:
            loss = models.loss(engine, kind, x)
            engine.backward(loss)
            engine.step()
            losses.append(loss.detach().clone())
        after(step)
    return losses


def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    """Bitwise."""
    return torch.equal(a["losses"], b["losses"]) and all(torch.equal(v, b["state"][k]) for k, v in a["state"].items())


def apart(a: dict[str, Any], b: dict[str, Any]) -> dict[str, float]:
    """The largest differences, relative to the largest weight and to each loss."""
    weights = [(v.float(), b["state"][k].float()) for k, v in a["state"].items()]
    scale = max(float(v.abs().max()) for v, _ in weights)
    return {
        "weights": max(float((v - w).abs().max()) for v, w in weights) / scale,
        "losses": float(((a["losses"] - b["losses"]) / b["losses"]).abs().max()),
    }
