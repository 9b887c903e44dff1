"""Autograd's side of passes in C++ (native/autograd.cpp) gives the bits of Python's, and leaves to it what is uncommon."""

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from deepspeed_cdp.native import load
from deepspeed_cdp.runtime.grad_accumulation import _Layer
from deepspeed_cdp.runtime.runtime import Runtime
from support import chains
from support.chains import Chain, batch, line, loss
from support.fusion import MODELS, SIZE, assert_equal, build, inside, one_step, settings
from support.local_ring import run_ranks
from support.optimizers import sgd


def trained(kind: str, native: bool, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, **options: Any) -> list[Any]:
    """All ranks' losses and masters."""
    monkeypatch.setenv(load.OFF, "1" if native else "0")
    modules = [build(kind, dtype) for _ in range(SIZE)]

    def work(rank: int, transport: Any) -> Any:
        runtime, losses, _ = chains.train(modules[rank], rank, transport, settings(**options), sgd)
        assert (runtime.param_hooks._native is not None) == native
        return losses, {n: m.detach().numpy().tobytes() for n, m in runtime.owner.masters.items()}

    return run_ranks(SIZE, work)


@pytest.mark.sampled(12)
@pytest.mark.parametrize("fusion", [True, False])
@pytest.mark.parametrize("kind", MODELS)
def test_both_give_the_same_bits(kind: str, fusion: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {"dtype": torch.float32, "fusion": fusion, "rounds": 2}
    assert trained(kind, False, monkeypatch, **given) == trained(kind, True, monkeypatch, **given)


@pytest.mark.parametrize("kind", ["hooks: plain", "twice", "shapes"])
def test_both_give_the_same_bits_in_bf16(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    results = [trained(kind, native, monkeypatch, torch.bfloat16) for native in (False, True)]
    assert results[0] == results[1]


def test_a_plain_model_needs_no_python(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    plain = _Layer.forward
    monkeypatch.setattr(_Layer, "forward", lambda self, x: asked.append(torch.is_grad_enabled()) or plain(self, x))
    monkeypatch.setenv(load.OFF, "1")
    added, _ = inside(monkeypatch)
    assert len(added) == 16 * SIZE and not any(asked)  # it follows the first forward without gradients


def test_the_collector_sees_through_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a runtime that nobody has closed nothing stays."""
    monkeypatch.setenv(load.OFF, "1")

    def work(rank: int, transport: Any) -> list[weakref.ref]:
        module = build("hooks: plain")
        runtime = Runtime(module, sgd(list(module.named_parameters())), settings(), transport, torch.device("cpu"))
        with runtime.forward():
            value = chains.loss(module, chains.batch(0, 0, rank))
        value.backward()
        runtime.end_backward()
        return [weakref.ref(x) for x in (runtime, runtime.param_hooks, module)]

    (gone,) = run_ranks(1, work)
    for _ in range(2):
        gc.collect()
    assert [x() for x in gone] == [None] * 3


def test_without_a_compiler_python_does_it(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "_loaded", {})
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv(load.OFF, "1")
    module, why = build("hooks: plain"), []
    told = Runtime._native_autograd
    monkeypatch.setattr(Runtime, "_native_autograd", lambda self: (told(self), why.append(self.why_not_native))[0])
    run_ranks(1, lambda rank, transport: one_step(module, rank, transport))
    assert len(why) == 1 and "no-such-compiler cannot be run" in why[0]


class Broadcast(nn.Module):
    """Its input's rows do not lie one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = line()

    def forward(self, x):
        return torch.tanh(self.linear(x[:, None].expand(4, 3, 8))).mean(1)


def test_inputs_that_are_broadcast_give_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MODELS, "broadcast", lambda: Chain(*(Broadcast() for _ in range(4))))
    results = [trained("broadcast", native, monkeypatch, torch.float32) for native in (False, True)]
    assert results[0] == results[1]


class Operators(TorchDispatchMode):
    """Those that ran."""

    def __init__(self, seen: list[str]) -> None:
        super().__init__()
        self.seen = seen

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **kwargs or {})


@pytest.mark.usefixtures("written_in")
def test_modes_of_dispatch_see_the_products() -> None:
    """Selective checkpoints keep what they see."""
    seen: list[str] = []
    run_ranks(1, lambda rank, transport: one_step(build("hooks: plain"), rank, transport, around=lambda: Operators(seen)))
    assert seen.count("aten.addmm.default") == 16 and "aten.linear.default" not in seen


class Sparse(nn.Module):
    """Autograd saves sparse tensors, of the parameters' memory too; a linear layer has a sparse input; so is the output."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.values = line(), line(), nn.Parameter(torch.linspace(0.5, 1, 4))

    def forward(self, x):
        x, at = x.to_dense() if x.is_sparse else x, torch.arange(4)
        edges = torch.sparse_csr_tensor(torch.arange(5), at, self.values, (4, 4))
        graph = torch.sparse_coo_tensor(torch.stack([at, at]), self.values, (4, 4))
        h = torch.sparse.mm(edges, torch.tanh(self.first(x))) + self.second(x.detach().to_sparse())
        return torch.tanh(torch.sparse.mm(graph, h)).to_sparse()


class Dense(Chain):
    def forward(self, x):
        return super().forward(x).to_dense()


@pytest.mark.usefixtures("written_in")
@pytest.mark.parametrize("fusion", [True, False])
def test_sparse_tensors_in_a_graph(fusion: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MODELS, "sparse", lambda: Dense(*(Sparse() for _ in range(4))))
    module = build("sparse")
    (got,) = run_ranks(1, lambda rank, transport: one_step(module, rank, transport, fusion=fusion))
    want = build("sparse")
    optimizer = sgd(list(want.named_parameters()))
    loss(want, batch(0, 0, 0)).backward()
    optimizer.step()
    assert_equal([got], [want.state_dict()])


class Leaf(nn.Module):
    """Gives a leaf that has a hook."""

    def __init__(self, called: list[int]) -> None:
        super().__init__()
        self.linear, self.called = line(), called

    def forward(self, x):
        leaf = torch.zeros(4, 8, requires_grad=True)
        leaf.register_hook(lambda grad: self.called.append(1))
        return torch.tanh(self.linear(x)), leaf


class Leaves(Chain):
    def forward(self, x):
        for block in self.blocks:
            x = sum(block(x))
        return x


@pytest.mark.usefixtures("written_in")
def test_hooks_of_a_leaf_that_a_unit_gives_are_called(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[int] = []
    monkeypatch.setitem(MODELS, "leaves", lambda: Leaves(*(Leaf(called) for _ in range(4))))
    run_ranks(1, lambda rank, transport: one_step(build("leaves"), rank, transport))
    assert len(called) == 4


@pytest.mark.usefixtures("written_in")
def test_a_layer_that_raises_leaves_hooks_of_saved_tensors_on() -> None:
    def work(rank: int, transport: Any) -> int:
        with pytest.raises(RuntimeError, match="Inference tensors cannot be saved"):
            one_step(module, rank, transport)
        packed, x = [], torch.ones(3, requires_grad=True)
        with saved_tensors_hooks(lambda t: packed.append(t) or t, lambda t: t):
            x.exp()
        return len(packed)

    module = build("hooks: plain")
    with torch.inference_mode():
        given = torch.ones(4, 8)
    module.blocks[0].second.register_forward_pre_hook(lambda layer, args: (given,))
    assert run_ranks(1, work) == [1]


@pytest.mark.usefixtures("written_in")
def test_a_loss_that_stays_keeps_no_buffers() -> None:
    """After ``engine.destroy()``."""

    def work(rank: int, transport: Any) -> tuple[torch.Tensor, list[StorageWeakRef]]:
        module = build("hooks: plain")
        runtime = Runtime(module, sgd(list(module.named_parameters())), settings(), transport, torch.device("cpu"))
        with runtime.forward():
            value = loss(module, batch(0, 0, rank))
        value.backward()
        runtime.end_backward()
        runtime.step()
        memory = [runtime.executor.buffers.arena, *runtime.owner.masters.values()]
        runtime.close(True)
        return value, [StorageWeakRef(x.untyped_storage()) for x in memory]

    ((value, memory),) = run_ranks(1, work)
    gc.collect()
    assert value.grad_fn is not None and all(x.expired() for x in memory)


@pytest.mark.usefixtures("written_in")
def test_a_module_whose_wrapper_holds_a_layer_can_be_copied() -> None:
    """After ``engine.destroy()``."""

    module = build("hooks: plain")

    def wrap() -> Any:
        layer = module.blocks[0].first
        layer.wrapped = layer.forward
        return torch.enable_grad()

    run_ranks(1, lambda rank, transport: one_step(module, rank, transport, around=wrap, replicated=True))
    copied, x = copy.deepcopy(module.blocks[0].first), batch(0, 0, 0)
    with torch.no_grad():
        copied.weight.zero_()
        torch.testing.assert_close(copied.wrapped(x), copied.bias.expand(4, 8))
        assert module.blocks[0].first(x).ne(copied.bias).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_parameters_take_values_of_any_dtype(dtype: torch.dtype) -> None:
    """Autograd's node that accumulates the gradient lives as long as a graph, and belongs to one dtype."""
    p, values = nn.Parameter(torch.zeros(3)), torch.ones(3, dtype=dtype)
    before = p * 2
    load.load(load.AUTOGRAD).Views([p], [values]).show()
    assert p.data_ptr() == values.data_ptr() and before.dtype == torch.float32
    (p * 3).sum().backward()
    assert p.grad is not None and p.grad.dtype == dtype and p.grad.tolist() == [3.0] * 3
