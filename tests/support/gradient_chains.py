"""Chains of blocks whose gradients are missing in some micro-batches, sparse or dense."""

import torch
from torch import nn

from support.chains import Chain, line


class Sometimes(nn.Module):
    """A parameter that has no gradient in some micro-batches."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.extra = line(), nn.Parameter(torch.full((8,), 0.5))

    def forward(self, x):
        h = torch.tanh(self.linear(x))
        return h * self.extra if bool(x.sum() > 0) else h


class Indexed(nn.Module):
    """An embedding, whose gradient may be sparse."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.table, self.linear = nn.Embedding(16, 8, sparse=sparse), line()

    def forward(self, x):
        return torch.tanh(self.linear(x + self.table((x.detach().abs().sum(-1) * 10).long() % 16)))


MODELS = {
    "sometimes": lambda: Chain(*(Sometimes() for _ in range(6))),
    "dense": lambda: Chain(*(Indexed(False) for _ in range(6))),
    "sparse": lambda: Chain(*(Indexed(True) for _ in range(6))),
}
