"""Models that tests of the command line name, as users would: functions that return a module, or a module and a batch."""

import torch
from torch import nn


def mlp():
    """Eight equal blocks and a batch."""
    return nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(8)]), torch.zeros(4, 64)


def lopsided():
    """One block has nearly all parameters and work."""
    sizes = [16, 16, 16, 512, 512, 16, 16]
    return nn.Sequential(*[nn.Linear(a, b) for a, b in zip(sizes, sizes[1:])]), torch.zeros(2, 16)


class Tied(nn.Module):
    """The head is the embedding."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(512, 32)
        self.blocks = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))
        self.example_input_array = torch.zeros(2, 8, dtype=torch.long)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return x @ self.embedding.weight.T


def tied():
    """Held parameters are most of the model."""
    return Tied()


def tied_in_secret():
    """The same without an example, so that the engine cannot see that the head reads the embedding."""
    module = Tied()
    batch = module.example_input_array
    del module.example_input_array
    return module, batch


def not_a_module():
    """What a user might return by mistake."""
    return 3


def fails():
    """What a user's function might do."""
    raise RuntimeError("no such layer\nsecond line")


def without_batch():
    """A module that carries no example."""
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))


class Branching(nn.Module):
    """A forward that depends on the data."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x):
        for block in self.blocks:
            x = block(x) if x.sum().item() > -1e9 else x
        return x


def branching():
    """Cannot be followed without values."""
    return Branching(), torch.zeros(2, 4)


class _Twice(nn.Sequential):
    def forward(self, x):
        return super().forward(super().forward(x))


def everything_twice():
    return _Twice(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)), torch.zeros(2, 8)


def sharded(kind):
    """A model of tests/dist/test_tensor_parallel.py and its batch."""
    from support.sequence_work import LENGTH
    from support.tensor_work import build

    tokens = torch.zeros(2, LENGTH, dtype=torch.long)
    return build(kind), {"input_ids": tokens, "labels": tokens, "use_cache": False}


def llama():
    """Its layers are sharded."""
    return sharded("llama")


def llama_tied():
    """Its head, which is the embedding, and its loss are sharded, too."""
    return sharded("tied")
