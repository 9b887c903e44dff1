"""Optimizers as tests make them: functions of (name, parameter) pairs."""

import torch
from torch import nn

Named = list[tuple[str, nn.Parameter]]


def sgd(named: Named) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for _, p in named], lr=0.05, momentum=0.9)


def adamw(named: Named) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for _, p in named], lr=1e-2, weight_decay=0.1)


def two_groups(named: Named) -> torch.optim.Optimizer:
    """Matrices decay, the rest does not."""
    return torch.optim.AdamW(
        [
            {"params": [p for _, p in named if p.dim() > 1], "weight_decay": 0.1},
            {"params": [p for _, p in named if p.dim() <= 1], "weight_decay": 0.0},
        ],
        lr=1e-2,
    )


class Foreign(torch.optim.AdamW):
    """One whose module is not torch's."""


def foreign(named: Named) -> torch.optim.Optimizer:
    return Foreign([p for _, p in named], lr=1e-2)


def muon(named: Named) -> torch.optim.Optimizer:
    """Matrices only; what is not in the optimizer stays as it is. From torch 2.9 on."""
    return torch.optim.Muon([p for _, p in named if p.dim() == 2], lr=1e-2)
