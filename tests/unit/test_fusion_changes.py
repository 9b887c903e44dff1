"""Fused linear layers (runtime/grad_accumulation.py) whose module, weight or surroundings somebody changes: they compute
what a plain layer would."""

import contextlib
import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import prune
from torch.overrides import TorchFunctionMode

from deepspeed_cdp.runtime.runtime import Runtime
from support.chains import Chain, batch, line, loss
from support.fusion import MODELS, SIZE, assert_equal, build, inside, one_step, settings, sgd, watch
from support.local_ring import run_ranks

pytestmark = pytest.mark.usefixtures("written_in")


def test_weights_that_change_places_go_the_common_way(monkeypatch: pytest.MonkeyPatch) -> None:
    def swap(block: nn.Module) -> None:
        block.first.weight, block.second.weight = block.second.weight, block.first.weight

    def swapped() -> Any:
        for module in modules:
            swap(module.blocks[3])
        return contextlib.nullcontext()

    modules, asked = [build("hooks: plain")], []
    watch(monkeypatch, asked.append)
    (got,) = run_ranks(1, lambda rank, transport: one_step(modules[0], rank, transport, around=swapped))
    assert len(asked) == 14
    want = build("hooks: plain")
    optimizer = sgd(list(want.named_parameters()))
    swap(want.blocks[3])
    loss(want, batch(0, 0, 0)).backward()
    optimizer.step()
    assert_equal([got], [want.state_dict()])


@contextlib.contextmanager
def _exchanged(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    yield
    setattr(owner, name, before)


class Doubling(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return 2 * torch._C._nn.linear(input, self.weight, self.bias)


class DoublingMode(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **kwargs or {})
        return 2 * result if func is nn.functional.linear else result


def _reclass(module: nn.Module) -> Any:
    for layer in module.modules():
        if type(layer) is nn.Linear:
            layer.__class__ = Doubling
    return contextlib.nullcontext()


def _prune(module: nn.Module) -> Any:
    prune.l1_unstructured(module.blocks[2].first, "weight", 0.5)
    prune.l1_unstructured(module.blocks[4].first, "bias", 0.5)
    return contextlib.nullcontext()


@pytest.mark.parametrize(
    "around",
    [
        lambda _: _exchanged(nn.Linear, "forward", Doubling.forward),
        _reclass,
        lambda _: DoublingMode(),
        _prune,
        lambda _: _exchanged(nn.functional, "linear", lambda x, w, b=None: 2 * torch._C._nn.linear(x, w, b)),
    ],
)
def test_who_replaces_what_a_layer_does_is_heard(around: Callable[[nn.Module], Any]) -> None:
    """After the engine has been made."""
    results = []
    for fusion in (True, False):
        module = build("hooks: plain")
        results.append(
            run_ranks(
                1,
                lambda rank, transport, module=module, fusion=fusion: one_step(
                    module, rank, transport, around=lambda: around(module), fusion=fusion, replicated=True
                ),
            )
        )
    assert_equal(*results)


def test_what_has_been_replaced_before_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nn.functional, "linear", lambda x, w, b=None: 2 * torch._C._nn.linear(x, w, b))
    with pytest.raises(ValueError, match='torch.nn.functional.linear has been replaced in this process; use "auto"'):
        run_ranks(1, lambda rank, transport: one_step(build("hooks: plain"), rank, transport))


def test_a_default_device_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, _ = inside(monkeypatch, around=lambda: torch.device("cpu"))
    assert asked == [True] * 16 * SIZE


class Borrowing(nn.Module):
    """Calls a layer of the block before it."""

    def __init__(self, lender: "Borrowing | None") -> None:
        super().__init__()
        self.linear, self.lender = line(), [lender]

    def forward(self, x):
        h = torch.tanh(self.linear(x))
        return h if self.lender[0] is None else torch.tanh(self.lender[0].linear(h))


def test_a_layer_of_another_unit_goes_the_common_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where parameters stay; elsewhere it would read what is not there."""

    def make() -> nn.Module:
        blocks = [Borrowing(None)]
        for _ in range(5):
            blocks.append(Borrowing(blocks[-1]))
        return Chain(*blocks)

    monkeypatch.setitem(MODELS, "borrowing", make)
    module, oracle = build("borrowing"), build("borrowing")
    (got,) = run_ranks(1, lambda rank, transport: one_step(module, rank, transport, replicated=True))
    optimizer = sgd(list(oracle.named_parameters()))
    loss(oracle, batch(0, 0, 0)).backward()
    optimizer.step()
    assert_equal([got], [oracle.state_dict()])


def test_a_weight_that_is_changed_after_its_use_is_refused() -> None:
    """As autograd does, of tensors that it has saved."""

    def backward(value: torch.Tensor) -> None:
        with torch.no_grad():
            module.blocks[3].first.weight.mul_(2)
        value.backward()

    module = build("hooks: plain")
    with pytest.raises(RuntimeError, match="modified by an inplace operation: the weight of a linear layer"):
        run_ranks(1, lambda rank, transport: one_step(module, rank, transport, backward=backward, replicated=True))


def test_layers_without_elements_and_weights_frozen_after_the_forward() -> None:
    def backward(value: torch.Tensor) -> None:
        module.blocks[3].first.weight.requires_grad_(False)
        value.backward()

    module = build("hooks: plain")
    module.blocks[5].empty = nn.Linear(8, 0)
    module.blocks[5].register_forward_hook(lambda block, args, out: out + block.empty(out).sum())
    (got,) = run_ranks(1, lambda rank, transport: one_step(module, rank, transport, backward=backward))
    want = build("hooks: plain").state_dict()
    assert torch.equal(got["blocks.3.first.weight"], want["blocks.3.first.weight"])
    assert not torch.equal(got["blocks.5.first.weight"], want["blocks.5.first.weight"])


def test_a_backward_after_the_end_is_refused() -> None:
    module = build("hooks: plain")

    def work(rank: int, transport: Any) -> None:
        runtime = Runtime(module, sgd(list(module.named_parameters())), settings(), transport, torch.device("cpu"))
        with runtime.forward():
            value = loss(module, batch(0, 0, rank))
        runtime.close(False)
        with pytest.raises(ValueError, match=r"a backward came after engine.destroy\(\)"):
            value.backward()

    run_ranks(1, work)


def test_layers_are_their_own_again_after_the_end() -> None:
    module = build("twice")
    run_ranks(1, lambda rank, transport: one_step(module, rank, transport))
    assert not any("forward" in m.__dict__ for m in module.modules())


def test_who_wraps_a_layer_later_keeps_the_wrapper_and_nothing_else() -> None:
    """As accelerate does, say."""
    module, calls, kept = build("hooks: plain"), [], []

    def wrap() -> Any:
        layer = module.blocks[0].first
        inner = layer.forward
        kept.append(weakref.ref(inner.__self__.passes))
        layer.forward = lambda x: (calls.append(x.shape), inner(x))[1]
        return contextlib.nullcontext()

    run_ranks(1, lambda rank, transport: one_step(module, rank, transport, around=wrap))
    gc.collect()
    assert calls and "forward" in module.blocks[0].first.__dict__ and kept[0]() is None
    assert torch.isfinite(nn.Sequential(module.blocks[0].first)(torch.ones(8))).all() and len(calls) == 2
