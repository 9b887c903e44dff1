"""Hooks in stages whose parameters are kept from forward to backward and in those whose parameters come anew, side by side.

On four ranks with two units a stage the last unit is kept, whose backward follows its forward, and all others come anew; with
keep_after_forward those of stage 0 alone come anew.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import nn

from deepspeed_cdp.analysis import reference
from deepspeed_cdp.model.make_plan import Settings
from deepspeed_cdp.plan.schedule import threshold
from deepspeed_cdp.runtime.runtime import Runtime
from support.chains import Chain, batch, line, loss, train
from support.hooked_chains import MODELS, WITHOUT, Branch, Branches, as_they_are, deep, halved
from support.local_ring import run_ranks
from support.optimizers import sgd

SIZE = 4
innermost = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
pytestmark = pytest.mark.usefixtures("written_in")
needs_innermost = pytest.mark.skipif(innermost is None, reason="this torch does not tell which saved-tensor hooks are innermost")


def build(kind: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(7)
    return MODELS[kind]().to(dtype)


def settings(rule: str = "cdp-v2", keep: bool = False, rounds: int = 1, sums: torch.dtype | None = None) -> Settings:
    return Settings(rule, partition_method="uniform", rounds=rounds, sum_dtype=sums, keep_after_forward=keep)


def assert_same_as_oracle(kind: str, chosen: Settings, around: Callable[[], Any] = contextlib.nullcontext) -> None:
    dtype = torch.bfloat16 if chosen.sum_dtype else torch.float32
    modules = [build(kind, dtype) for _ in range(SIZE)]

    def work(rank: int, transport: Any) -> tuple:
        with around():
            return train(modules[rank], rank, transport, chosen, sgd)

    results = run_ranks(SIZE, work)
    plan = results[0][0].plan
    first = 2 if chosen.keep_after_forward else 7
    assert [u.stage for u in plan.units] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert [plan.kept(i) for i in range(8)] == [i >= first for i in range(8)]
    want = reference.train(
        build(WITHOUT.get(kind, kind), dtype),
        plan.stages,
        threshold(chosen.rule, SIZE),
        lambda t, m, r: batch(t, m, r).to(dtype),
        loss,
        sgd,
        3,
        rounds=chosen.rounds,
        grad_dtype=chosen.sum_dtype,
    )
    assert {k: v for result in results for k, v in result[1].items()} == want.losses
    for name, value in want.masters.items():
        assert torch.equal(results[0][2][name], value.to(dtype)), name


@pytest.mark.sampled(8)
@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("rule", ["cdp-v1", "cdp-v2"])
@pytest.mark.parametrize("kind", MODELS)
def test_gradients_equal_the_oracle(kind: str, rule: str, keep: bool) -> None:
    assert_same_as_oracle(kind, settings(rule, keep))


@pytest.mark.parametrize("kind", ["checkpoint", "boxed", "in place"])
def test_gradients_equal_the_oracle_in_bf16_with_fp32_sums(kind: str) -> None:
    assert_same_as_oracle(kind, settings(rounds=2, sums=torch.float32))


@pytest.mark.parametrize("around", [as_they_are, halved])
def test_saved_tensor_hooks_around_the_whole_loop(around: Callable[[], Any]) -> None:
    """Tensors that the user's hooks keep as they are must not change either when a unit's buffer is used again."""
    assert_same_as_oracle("plain", settings(), around)


# ---- what is saved ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("kind", ["plain", "checkpoint", "reentrant checkpoint"])
def test_a_checkpoint_saves_no_activation_of_its_unit(kind: str, keep: bool) -> None:
    """After the forward the units' own activations are gone, with a checkpoint, in kept stages and others."""
    modules = [build(kind) for _ in range(SIZE)]

    def work(rank: int, transport: Any) -> list[bool]:
        module = modules[rank]
        runtime = Runtime(module, sgd(list(module.named_parameters())), settings(keep=keep), transport, torch.device("cpu"))
        with runtime.forward():
            value = loss(module, batch(0, 0, rank))
        gone = [block.hidden[0].expired() for block in module.blocks]
        value.backward()
        runtime.end_backward()
        runtime.step()
        runtime.close(True)
        return gone

    for gone in run_ranks(SIZE, work):
        assert gone == [kind != "plain"] * 8


# ---- hooks are pushed where they are needed, and taken off --------------------------------------------------------------
class Fails(nn.Module):
    """Notes whether saved-tensor hooks are on while it runs; raises in its turn."""

    def __init__(self):
        super().__init__()
        self.linear, self.seen, self.fails = line(), [], False

    def forward(self, x):
        self.seen.append(innermost(True) is not None)
        if self.fails:
            raise RuntimeError("on purpose")
        return self.linear(x)


@needs_innermost
@pytest.mark.parametrize("keep", [False, True])
def test_only_units_that_come_anew_have_their_saved_tensors_looked_after(keep: bool, written_in: str) -> None:
    modules = [Chain(*(Fails() for _ in range(8))) for _ in range(SIZE)]

    def work(rank: int, transport: Any) -> Any:
        runtime = train(modules[rank], rank, transport, settings(keep=keep), sgd, steps=2)[0]
        assert innermost(True) is None
        return runtime.plan

    for module, plan in zip(modules, run_ranks(SIZE, work)):
        for i, block in enumerate(module.blocks):  # in C++ the first forward shows that they are not needed
            assert block.seen == [not plan.kept(i), not plan.kept(i) and written_in == "Python"]


@needs_innermost
@pytest.mark.parametrize("at", [0, 3])
def test_a_forward_that_raises_leaves_no_saved_tensor_hooks(at: int) -> None:
    """In a unit that is not kept (0) and in one that is (3 of 4, on two ranks)."""
    modules = [Chain(*(Fails() for _ in range(4))) for _ in range(2)]
    ready = threading.Barrier(2, timeout=30)

    def work(rank: int, transport: Any) -> list[bool]:
        module = modules[rank]
        runtime = Runtime(module, sgd(list(module.named_parameters())), settings(), transport, torch.device("cpu"))
        assert not runtime.plan.kept(0) and runtime.plan.kept(3)
        module.blocks[at].fails = True
        with pytest.raises(RuntimeError, match="on purpose"):
            with runtime.forward():
                module(batch(0, 0, rank))
        assert innermost(True) is None
        with pytest.raises(ValueError, match="ended in an exception"):
            with runtime.forward():
                pass
        assert innermost(True) is None
        ready.wait()
        runtime.close(False)
        return module.blocks[at].seen

    assert run_ranks(2, work) == [[at == 0]] * 2


# ---- a second backward --------------------------------------------------------------------------------------------------
class Remembers(Chain):
    """Keeps the outputs of its units."""

    def forward(self, x):
        self.outputs = []
        for block in self.blocks:
            x = block(x)
            self.outputs.append(x)
        return x


@contextlib.contextmanager
def one_step(module: nn.Module, rank: int, transport: Any) -> Iterator[torch.Tensor]:
    """The loss of a micro-batch whose graph is retained, after its backward."""
    runtime = Runtime(module, sgd(list(module.named_parameters())), settings(), transport, torch.device("cpu"))
    with runtime.forward():
        value = loss(module, batch(0, 0, rank))
    value.backward(retain_graph=True)
    runtime.end_backward()
    yield value
    runtime.step()
    runtime.close(True)


def test_a_second_backward_is_refused_in_every_stage() -> None:
    """Over the whole graph, and over each unit's part of it, kept (the last one) or not."""
    torch.manual_seed(7)
    modules = [Remembers(*deep()) for _ in range(SIZE)]

    def work(rank: int, transport: Any) -> None:
        with one_step(modules[rank], rank, transport) as value:
            for again in (value, *(x.sum() for x in modules[rank].outputs)):
                with pytest.raises(ValueError, match="without a training forward"):
                    again.backward(retain_graph=True)
            assert all(p.grad is None for p in modules[rank].parameters())

    run_ranks(SIZE, work)


@pytest.mark.parametrize("late", [False, True])
def test_a_branch_created_after_the_output_is_looked_after(late: bool, written_in: str) -> None:
    """Its gradient may come first; of one created before, the output's does."""
    modules = [Branches(*(Branch(late) for _ in range(8))) for _ in range(2)]
    for runtime, *_ in run_ranks(2, lambda rank, transport: train(modules[rank], rank, transport, settings(), sgd)):
        units = [i for i in range(8) if not runtime.plan.kept(i) and written_in == "C++"]
        # the first unit's input has no gradient, so its branch saves no parameter
        needs = {path: behind is None for path, behind in runtime.param_hooks._behind.items()}
        assert needs == {f"blocks.{i}": i > 0 and late for i in units}


class Guided(Chain):
    """From the second forward on, a gradient that goes back through the first units adds to its output."""

    guides = False

    def forward(self, x):
        h, before = x.detach().requires_grad_(), []
        for block in self.blocks:
            before.append(h)
            h = block(h)
        if self.guides:
            (g,) = torch.autograd.grad(before[2].sum(), before[0], retain_graph=True)
            h = h + (g > 0) * 0.5  # which hides nan
        self.guides = True
        return h


class Scale(nn.Module):
    """A unit whose parameter autograd saves as it is."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.full((8,), 1.1))

    def forward(self, x):
        return torch.tanh(x * self.scale)


def test_a_gradient_inside_a_forward_that_reads_absent_parameters_is_refused(written_in: str) -> None:
    modules = [Guided(*(Scale() for _ in range(8))) for _ in range(2)]
    error, words = {"C++": (RuntimeError, "parameters that are not there"), "Python": (ValueError, "without a training forward")}[
        written_in
    ]
    with pytest.raises(error, match=words):
        run_ranks(2, lambda rank, transport: train(modules[rank], rank, transport, settings(), sgd))


def test_what_was_saved_before_all_parameters_come_is_looked_after() -> None:
    """In the first micro-batch since a flush, when modules have shown before that they need no hooks."""
    torch.manual_seed(7)
    stock = Chain(*deep(6))
    modules = [deepcopy(stock) for _ in range(2)]

    def work(rank: int, transport: Any) -> dict[str, torch.Tensor]:
        transport.rendezvous, module = True, modules[rank]  # as over NCCL, where a rank does not leave the plan alone
        runtime = Runtime(module, sgd(list(module.named_parameters())), settings("dp"), transport, torch.device("cpu"))
        for step in range(2):
            with runtime.forward():
                value = loss(module, batch(step, 0, rank))
            if step:
                with runtime.forward():
                    value = value + loss(module, batch(step, 1, rank))
            value.backward()
            runtime.end_backward()
            runtime.step()
            runtime.flush()
        state = {k: v.clone() for k, v in runtime.whole_state().items()}
        runtime.close(True)
        return state

    optimizer = sgd(list(stock.named_parameters()))
    for step in range(2):
        for rank in range(2):
            value = sum(loss(stock, batch(step, m, rank)) for m in range(1 + step))
            (value / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    for state in run_ranks(2, work):
        for name, value in stock.state_dict().items():
            torch.testing.assert_close(state[name], value, rtol=1e-5, atol=1e-6)


class Skips(Branches):
    """In some forwards the second unit's output is not used, but its second result is."""

    def forward(self, x):
        uses = self.uses(x)
        for i, block in enumerate(self.blocks):
            y = block(x)
            x = x + block.second.mean() if uses and i == 1 else y
        return x


def test_a_backward_that_never_comes_to_the_outputs_is_told(written_in: str) -> None:
    """Python's hooks notice what it reads; in C++ the first forward has shown that they are not needed."""
    done: list[list[int]] = [[], []]
    modules = [Skips(*(Branch(False) for _ in range(8)), uses=lambda x, at=at: at.append(1) or len(at) == 2) for at in done]

    said = []

    def work(rank: int, transport: Any) -> None:
        try:
            train(modules[rank], rank, transport, settings(), sgd)
        except RuntimeError as error:
            said.append(str(error))
            raise  # the other rank need not wait for its timeout

    if written_in == "Python":
        run_ranks(2, work)
    else:
        with pytest.raises(RuntimeError):
            run_ranks(2, work)
        assert any("read parameters that are not there" in x and "any_order" in x for x in said), said


def test_a_second_backward_is_refused_where_outputs_have_no_hook(written_in: str) -> None:
    """Boxed outputs. In Python it gets as far as the units that are not kept."""
    modules = [build("all boxed") for _ in range(SIZE)]
    error, words = {"C++": (RuntimeError, "is the second over a graph"), "Python": (ValueError, "without a training forward")}[
        written_in
    ]

    def work(rank: int, transport: Any) -> None:
        with one_step(modules[rank], rank, transport) as value:
            with pytest.raises(error, match=words):
                value.backward()

    run_ranks(SIZE, work)


class Lending(torch.nn.Module):
    """Twelve linear layers; the second's weight is read by the whole, as GatheredParameters in a forward allows, or by itself."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(6, 6) for _ in range(12))
        self.param_hooks = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            if number == 1 and self.param_hooks is not None:
                parameters = [layer.weight, layer.bias]
                assert self.param_hooks.borrow(parameters)
                x = torch.addmm(layer.bias, x, layer.weight.t())
                self.param_hooks.give_back(parameters)
            else:
                x = layer(x)
            x = torch.tanh(2 * x)
        return x.sum()


@pytest.mark.parametrize("least", [0, 10**6])
@pytest.mark.parametrize("size", [2, 4])
def test_lent_parameters_give_the_module_s_own_results(size, least):
    """Also between two modules of a merged unit, which is bound already but whose saved tensors nobody looked after."""

    def train_it(lending: bool) -> list:
        built = [Lending() for _ in range(size)]

        def work(rank, transport):
            module = built[rank]
            settings = Settings(partition_method="uniform", min_unit_bytes=least, units=[f"layers.{i}" for i in range(12)])
            runtime = Runtime(module, torch.optim.SGD(module.parameters(), lr=0.1), settings, transport, torch.device("cpu"))
            module.param_hooks = runtime.param_hooks if lending else None
            for step in range(6):
                x = torch.randn(3, 6, generator=torch.Generator().manual_seed(10 * step + rank))
                with runtime.forward():
                    loss = module(x)
                loss.backward()
                runtime.end_backward()
                runtime.step()
            state = {k: v.clone() for k, v in runtime.whole_state().items()}
            runtime.close(True)
            return state

        return run_ranks(size, work)

    called, borrowed = train_it(False)[0], train_it(True)[0]
    for name, value in called.items():
        torch.testing.assert_close(borrowed[name], value, rtol=0, atol=0, msg=lambda m, name=name: f"{name}: {m}")
