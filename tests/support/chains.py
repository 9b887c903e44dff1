"""Chains of small blocks whose shapes once broke the engine, their data and a plain training loop."""

import warnings
from dataclasses import dataclass

import torch
from torch import nn

from deepspeed_cdp.integration.optimizer import CyclicOptimizer
from deepspeed_cdp.model.make_plan import Settings
from deepspeed_cdp.runtime.runtime import Runtime


class Chain(nn.Module):
    """Blocks one after the other."""

    def __init__(self, *blocks: nn.Module, unwrap: bool = False):
        super().__init__()
        self.blocks, self.unwrap = nn.ModuleList(blocks), unwrap

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x.value if self.unwrap else x


class InPlaceBias(nn.Module):
    """Returns its own input, changed; autograd saves nothing of the unit's buffer."""

    def __init__(self):
        super().__init__()
        self.bias = nn.Parameter(torch.full((8,), 0.1))

    def forward(self, x):
        x += self.bias.to(x.dtype)
        return x


@dataclass
class Box:
    """An output that no pytree knows: its tensor gets no hook."""

    value: torch.Tensor


class Boxed(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return Box(self.linear(x.value if isinstance(x, Box) else x))


class Biased(nn.Module):
    """Hands a tensor of an earlier unit on, given by keyword (as T5 does with its position bias)."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.own = nn.Parameter(torch.ones(8))

    def forward(self, x, bias=None):
        bias = self.own * 2 if bias is None else bias
        return torch.tanh(self.linear(x)) + bias, bias


class ByKeyword(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Biased() for _ in range(4))

    def forward(self, x):
        bias = None
        for block in self.blocks:
            x, bias = block(x, bias=bias)
        return x


def line() -> nn.Linear:
    return nn.Linear(8, 8)


MODELS = {
    "in place": lambda: Chain(line(), InPlaceBias(), line(), InPlaceBias(), line()),
    "boxed": lambda: Chain(Boxed(), Boxed(), Boxed(), unwrap=True),
    "by keyword": ByKeyword,
    "weight_norm": lambda: Chain(*(nn.utils.weight_norm(line()) for _ in range(4))),  # the old one: a forward pre-hook
}


def batch(step: int, round: int, rank: int) -> torch.Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(1000 * step + 100 * round + rank))


def loss(call, x):
    return (call(x) - x.roll(1, 1)).pow(2).mean()


def build(kind: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(7)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch wants the new weight_norm
        return MODELS[kind]().to(dtype)


def train(module: nn.Module, rank: int, transport, settings: Settings, make, steps: int = 3, on_step=None):
    """A plain loop; returns the runtime, the losses by step and round, and the whole state."""
    dtype = next(module.parameters()).dtype
    runtime = Runtime(module, make(list(module.named_parameters())), settings, transport, torch.device("cpu"))
    losses = {}
    for step in range(steps):
        for m in range(settings.rounds):
            with runtime.forward():
                value = loss(module, batch(step, m, rank).to(dtype))
            losses[step, m, rank] = value.item()
            (value / settings.rounds).backward()
            runtime.end_backward()
        runtime.step()
        if on_step:
            on_step(CyclicOptimizer(runtime))
    state = {k: v.clone() for k, v in runtime.whole_state().items()}
    runtime.close(True)
    return runtime, losses, state
