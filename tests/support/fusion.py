"""Models and helpers for tests of fused gradient accumulation."""

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from deepspeed_cdp.analysis import reference
from deepspeed_cdp.model.make_plan import Settings
from deepspeed_cdp.plan.schedule import threshold
from deepspeed_cdp.runtime.grad_accumulation import GradAccumulation
from deepspeed_cdp.runtime.runtime import Runtime
from support import chains, gradient_chains, hooked_chains
from support.chains import Chain, batch, line, loss
from support.local_ring import run_ranks
from support.optimizers import sgd

SIZE = 3


class Twice(nn.Module):
    """A layer that is used twice, a second one, of the same weight, and one in some micro-batches only."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.again, self.sometimes = line(), nn.Linear(8, 8, bias=False), line()
        self.again.weight = self.first.weight

    def forward(self, x):
        h = torch.tanh(self.again(torch.tanh(self.first(torch.tanh(self.first(x))))))
        return self.sometimes(h) if bool(x.sum() > 0) else h


class Shapes(nn.Module):
    """Inputs of one and of three dimensions, a gradient that is expanded, an input that needs none."""

    def __init__(self) -> None:
        super().__init__()
        self.flat, self.deep, self.detached = nn.Linear(32, 8), line(), line()

    def forward(self, x):
        h = torch.tanh(self.deep(x[None, :, None])).squeeze(2)[0] + self.detached(x.detach())
        return torch.tanh(h) + self.flat(x.reshape(-1)) + x.sum() / 100


class Positions(nn.Module):
    """A layer whose input is a parameter, which leaves with the layer after the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.positions = line(), nn.Parameter(torch.linspace(-1, 1, 32).reshape(4, 8))

    def forward(self, x):
        return torch.tanh(x + self.linear(self.positions * 1.0) + self.linear(self.positions[:1]))


MODELS = {
    **{f"hooks: {k}": make for k, make in hooked_chains.MODELS.items()},
    **{f"breaks: {k}": make for k, make in chains.MODELS.items() if k not in ("weight_norm", "in place")},
    **{f"gradients: {k}": make for k, make in gradient_chains.MODELS.items()},
    "changed in place": lambda: Chain(
        *(nn.Sequential(nn.Unflatten(0, (2, 2)), line(), nn.ReLU(inplace=True), line(), nn.Flatten(0, 1)) for _ in range(6))
    ),
    "twice": lambda: Chain(*(Twice() for _ in range(6))),
    "positions": lambda: Chain(*(Positions() for _ in range(6))),
    "shapes": lambda: Chain(*(Shapes() for _ in range(4))),
}
ORACLE = {f"hooks: {k}": f"hooks: {v}" for k, v in hooked_chains.WITHOUT.items()} | {"gradients: sparse": "gradients: dense"}


def build(kind: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(7)
    return MODELS[kind]().to(dtype)


def settings(rule: str = "cdp-v2", fusion: bool | str = True, **options: Any) -> Settings:
    return Settings(rule, partition_method="uniform", gradient_accumulation_fusion=fusion, **options)


def difference(kind: str, chosen: Settings, size: int = SIZE) -> float:
    """Between a ring of threads and the oracle, which adds gradients: the largest, of weights and losses (above 1 relative)."""
    modules = [build(kind) for _ in range(size)]
    results = run_ranks(size, lambda rank, transport: chains.train(modules[rank], rank, transport, chosen, sgd))
    assert all(runtime.fused for runtime, *_ in results)
    want = reference.train(
        build(ORACLE.get(kind, kind)),
        results[0][0].plan.stages,
        threshold(chosen.rule, size),
        batch,
        loss,
        sgd,
        3,
        rounds=chosen.rounds,
    )
    losses = {k: v for result in results for k, v in result[1].items()}
    assert losses.keys() == want.losses.keys()
    return max(
        *(abs(losses[k] - v) / max(1.0, abs(v)) for k, v in want.losses.items()),
        *(float((results[0][2][n] - v).abs().max()) for n, v in want.masters.items()),
    )


def one_step(
    module: nn.Module,
    rank: int,
    transport: Any,
    around: Callable[[], Any] = contextlib.nullcontext,
    backward: Callable[[torch.Tensor], Any] = torch.Tensor.backward,
    **options: Any,
) -> dict[str, torch.Tensor]:
    """The masters after a step."""
    runtime = Runtime(module, sgd(list(module.named_parameters())), settings(**options), transport, torch.device("cpu"))
    with runtime.forward(), around():
        value = loss(module, batch(0, 0, rank))
    backward(value)
    runtime.end_backward()
    runtime.step()
    state = {k: v.clone() for k, v in runtime.whole_state().items()}
    runtime.close(True)
    return state


def watch(monkeypatch: pytest.MonkeyPatch, added: Callable[[int], Any]) -> None:
    """Call ``added`` with the slot of each gradient that a layer has added to a sum."""
    add = GradAccumulation.add

    def seen(self: GradAccumulation, i: int, *given: Any) -> None:
        if not torch.is_grad_enabled():  # else it calls itself
            for k in self._summed.get(i, ()):
                added(k)
        add(self, i, *given)

    monkeypatch.setattr(GradAccumulation, "add", seen)


def inside(monkeypatch: pytest.MonkeyPatch, **options: Any) -> tuple[list[bool], list[dict[str, torch.Tensor]]]:
    """One step of the plain model: True for each gradient that a layer has added to a sum, and all ranks' masters."""
    asked: list[bool] = []
    watch(monkeypatch, lambda k: asked.append(True))
    modules = [build("hooks: plain") for _ in range(SIZE)]
    change = options.pop("change", None)
    if change:
        for module in modules:
            change(module)
    return asked, run_ranks(SIZE, lambda rank, transport: one_step(modules[rank], rank, transport, **options))


def assert_equal(got: list[dict[str, torch.Tensor]], want: list[dict[str, torch.Tensor]]) -> None:
    for a, b in zip(got, want, strict=True):
        for name in b:
            torch.testing.assert_close(a[name], b[name], rtol=1e-5, atol=1e-6)
