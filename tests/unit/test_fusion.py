"""Linear layers that add their weights' gradients to the running sums themselves (runtime/grad_accumulation.py): to
rounding, nothing else changes."""

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from deepspeed_cdp.runtime.grad_accumulation import GradAccumulation
from support import chains
from support.chains import Chain, batch, line, loss
from support.fusion import MODELS, SIZE, assert_equal, build, difference, inside, one_step, settings
from support.local_ring import run_ranks
from support.optimizers import sgd

pytestmark = pytest.mark.usefixtures("written_in")


@pytest.mark.sampled(8)
@pytest.mark.parametrize("rule", ["dp", "cdp-v1", "cdp-v2"])
@pytest.mark.parametrize("kind", MODELS)
def test_it_is_the_oracle_to_rounding(kind: str, rule: str) -> None:
    assert difference(kind, settings(rule, rounds=1 if rule == "cdp-v1" else 2)) < 2e-6


@pytest.mark.parametrize("replicated", [False, True])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_on_rings_of_all_sizes_and_with_replicas(size: int, replicated: bool) -> None:
    assert difference("twice", settings(rounds=2, replicated=replicated), size) < 2e-6


@pytest.mark.parametrize("broken", ["lost", "twice", "not started"])
def test_the_oracle_would_notice(broken: str, written_in: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if written_in == "C++":  # it asks where to add
        where, add_all = GradAccumulation.views, GradAccumulation.add

        def elsewhere(self: GradAccumulation, i: int, flat: torch.Tensor) -> list[torch.Tensor]:
            return [torch.full_like(v, 0.1) for v in where(self, i, flat)]

        def otherwise(self: GradAccumulation, i: int, flat: torch.Tensor, first: bool) -> None:
            if broken == "twice":
                for k in self._summed.get(i, ()):
                    self.views(i, flat)[k].mul_(2)
            elif broken == "not started":
                self._summed.pop(i, None)
            add_all(self, i, flat, first)

        monkeypatch.setattr(GradAccumulation, *("views", elsewhere) if broken == "lost" else ("add", otherwise))
        assert not difference("twice", settings()) < 1e-3
        return
    add = GradAccumulation.add_product

    def wrong(self: GradAccumulation, i: int, *given: Any) -> bool:
        if broken == "not started":
            self._empty.discard(i)
        return broken == "lost" or (add(self, i, *given) and (broken != "twice" or add(self, i, *given)))

    monkeypatch.setattr(GradAccumulation, "add_product", wrong)
    assert not difference("twice", settings()) < 1e-3  # or nan


def test_gradients_are_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of weights that have no other use; biases and the rest go the common way, in one launch per unit."""
    added = []
    add = GradAccumulation.add

    def seen(self: GradAccumulation, i: int, *given: Any) -> None:
        if not torch.is_grad_enabled():
            added.extend(p.grad.dim() for p, _ in self._slots[i] if p.grad is not None)
        add(self, i, *given)

    monkeypatch.setattr(GradAccumulation, "add", seen)
    asked, _ = inside(monkeypatch)
    layers = 16
    assert asked == [True] * layers * SIZE
    assert added.count(2) == 8 * SIZE, "of the eight weights that are also read by hand"


def _hooked(module: nn.Module) -> None:
    for p in module.parameters():
        p.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", p.grad * 1.0))


def _doubled(module: nn.Module) -> None:
    for p in module.parameters():
        p.register_hook(lambda g: g * 1.0)


@pytest.mark.parametrize("change", [_hooked, _doubled])
def test_hooks_on_a_weight_get_its_gradient(change: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, got = inside(monkeypatch, change=change)
    assert not asked
    assert_equal(got, inside(monkeypatch, fusion=False)[1])


def test_autocast_casts_as_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    around = lambda: torch.autocast("cpu", torch.bfloat16)  # noqa: E731
    asked, got = inside(monkeypatch, around=around)
    want = inside(monkeypatch, around=around, fusion=False)[1]
    assert not asked and all(torch.equal(a[n], b[n]) for a, b in zip(got, want) for n in b)


@pytest.mark.filterwarnings("ignore:Using backward\\(\\) with create_graph=True")
def test_create_graph_makes_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, got = inside(monkeypatch, backward=lambda value: value.backward(create_graph=True))
    assert not asked
    assert_equal(got, inside(monkeypatch, fusion=False)[1])


class Penalized(nn.Module):
    """Uses gradients in its forward: of a layer's input, and second ones by its weight."""

    def __init__(self, graph: bool) -> None:
        super().__init__()
        self.linear, self.graph = line(), graph

    def forward(self, x):
        inner = x.detach().requires_grad_()
        y = torch.tanh(self.linear(inner))
        (slope,) = torch.autograd.grad(y.sum(), inner, create_graph=self.graph)
        (weight,) = torch.autograd.grad(torch.tanh(self.linear(inner)).sum(), self.linear.weight)
        return torch.tanh(self.linear(x)) + slope.pow(2) / 10 + weight.sum() / 100


@pytest.mark.parametrize("graph", [False, True])
def test_gradients_for_their_own_sake_are_not_added(graph: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MODELS, "penalized", lambda: Chain(*(Penalized(graph) for _ in range(6))))
    assert difference("penalized", settings()) < 2e-6


class Transformed(nn.Module):
    """Transforms inside a forward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = line()

    def forward(self, x):
        slope = torch.func.vmap(torch.func.grad(lambda v: torch.tanh(self.linear(v)).sum()))(x)
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(x.detach(), torch.ones_like(x))
            tangent = torch.autograd.forward_ad.unpack_dual(self.linear(dual)).tangent
        return torch.tanh(self.linear(x)) + slope + tangent


def test_transforms_see_a_plain_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MODELS, "transformed", lambda: Chain(*(Transformed() for _ in range(6))))
    # (where parameters are handed off, saved-tensor hooks are on, which torch.func refuses)
    assert difference("transformed", settings(replicated=True), 1) < 2e-6


def test_a_frozen_weight_stays_frozen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the optimizer has it and it is frozen afterwards: its gradient is zero."""

    def freeze() -> Any:
        modules[0].blocks[3].first.weight.requires_grad_(False)
        return contextlib.nullcontext()

    modules = [build("hooks: plain")]
    (got,) = run_ranks(1, lambda rank, transport: one_step(modules[0], rank, transport, around=freeze))
    want = build("hooks: plain").state_dict()
    assert torch.equal(got["blocks.3.first.weight"], want["blocks.3.first.weight"])
    assert not torch.equal(got["blocks.3.second.weight"], want["blocks.3.second.weight"])


def test_in_bf16_a_sum_is_rounded_once() -> None:
    """A sum of three ranks is nearer to the exact one than rounded gradients, rounded again and again, are."""

    def error(fusion: bool) -> float:
        modules = [build("hooks: plain", torch.bfloat16) for _ in range(SIZE)]

        def work(rank: int, transport: Any) -> dict[str, torch.Tensor]:
            runtime, _, _ = chains.train(modules[rank], rank, transport, settings("dp", fusion), sgd, steps=1)
            return {n: m.detach().clone() for n, m in runtime.owner.masters.items()}

        masters = {k: v for result in run_ranks(SIZE, work) for k, v in result.items()}
        template = build("hooks: plain", torch.bfloat16).double()
        exact = {n: 0 for n in masters}
        for rank in range(SIZE):
            template.zero_grad()
            loss(template, batch(0, 0, rank).to(torch.bfloat16).double()).backward()
            exact = {n: exact[n] + p.grad / SIZE for n, p in template.named_parameters()}
        weights = [n for n, p in template.named_parameters() if n.endswith("first.weight")]
        return sum(float(((template.get_parameter(n).detach() - 0.05 * exact[n]) - masters[n]).abs().mean()) for n in weights)

    assert error(True) < error(False)


def test_what_cannot_be_fused_is_refused_or_left_alone() -> None:
    module = chains.build("weight_norm")
    with pytest.raises(ValueError, match='gradient_accumulation_fusion is true, but the model has no torch.nn.Linear .* "auto"'):
        run_ranks(1, lambda rank, transport: one_step(module, rank, transport))
    for fusion in ("auto", False):
        module = build("twice")
        run_ranks(1, partial(one_step, module, fusion=fusion))  # on a CPU
        assert not any("forward" in m.__dict__ for m in module.modules())
