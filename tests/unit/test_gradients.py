"""How a rank's own gradients get into the sums that go round: once a unit, whatever they are."""

import contextlib
import warnings
from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from deepspeed_cdp.analysis import reference
from deepspeed_cdp.model.make_plan import Settings
from deepspeed_cdp.native import load
from deepspeed_cdp.plan.schedule import threshold
from deepspeed_cdp.runtime.grad_accumulation import GradAccumulation
from deepspeed_cdp.runtime.runtime import Runtime
from support.chains import batch, loss, train
from support.gradient_chains import MODELS
from support.local_ring import run_ranks
from support.optimizers import sgd

SIZE = 3


def build(kind: str) -> nn.Module:
    torch.manual_seed(7)
    return MODELS[kind]()


def settings(rule: str = "cdp-v2", rounds: int = 1) -> Settings:
    return Settings(rule, partition_method="uniform", rounds=rounds)


@pytest.mark.parametrize("rounds", [1, 2])
@pytest.mark.parametrize("rule", ["dp", "cdp-v2"])
@pytest.mark.parametrize(("kind", "oracle"), [("sometimes", "sometimes"), ("sparse", "dense")])
def test_sums_equal_the_oracle(kind: str, oracle: str, rule: str, rounds: int) -> None:
    """A sum that a rank starts has the content of a step ago, unless each of its parameters is written."""
    modules, chosen, seen = [build(kind) for _ in range(SIZE)], settings(rule, rounds), set()
    for module in modules:
        for block in module.blocks:
            if kind == "sometimes":
                block.register_forward_pre_hook(lambda _, args: seen.add(bool(args[0].sum() > 0)))
    results = run_ranks(SIZE, lambda rank, transport: train(modules[rank], rank, transport, chosen, sgd))
    assert kind != "sometimes" or seen == {False, True}
    want = reference.train(build(oracle), results[0][0].plan.stages, threshold(rule, SIZE), batch, loss, sgd, 3, rounds=rounds)
    assert {k: v for result in results for k, v in result[1].items()} == want.losses
    for name, value in want.masters.items():
        assert torch.equal(results[0][2][name], value), name


def one_step(module: nn.Module, rank: int, transport: Any) -> None:
    runtime = Runtime(module, sgd(list(module.named_parameters())), settings(), transport, torch.device("cpu"))
    with runtime.forward():
        value = loss(module, batch(0, 0, rank))
    value.backward()
    runtime.end_backward()
    assert all(p.grad is None for p in module.parameters())
    runtime.step()
    runtime.close(True)


def test_until_they_are_passed_on_they_are_the_ranks_own() -> None:
    """``param.grad`` in a hook is the micro-batch's gradient, not the sum over the ranks before."""
    modules, seen = [build("dense") for _ in range(SIZE)], [{} for _ in range(SIZE)]
    for module, mine in zip(modules, seen):
        for name, p in module.named_parameters():
            p.register_post_accumulate_grad_hook(lambda p, mine=mine, name=name: mine.update({name: p.grad.clone()}))
    run_ranks(SIZE, lambda rank, transport: one_step(modules[rank], rank, transport))
    for rank, mine in enumerate(seen):
        alone = build("dense")
        loss(alone, batch(0, 0, rank)).backward()
        assert {n: p.grad.tolist() for n, p in alone.named_parameters()} == {n: g.tolist() for n, g in mine.items()}


class Launches(TorchDispatchMode):
    """Counts operators of lists by name and length, whichever language calls them."""

    def __init__(self, calls: Counter) -> None:
        super().__init__()
        self.calls = calls

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if isinstance(args[0], list):
            self.calls[func.overloadpacket.__name__, len(args[0])] += 1
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("native", ["0", "1"])
def test_one_launch_a_unit(native: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rank that starts the sums copies, the others add."""
    monkeypatch.setenv(load.OFF, native)
    modules, calls, add = [build("dense") for _ in range(SIZE)], Counter(), GradAccumulation.add

    def counted(self: GradAccumulation, *given: Any) -> None:
        with contextlib.nullcontext() if torch.is_grad_enabled() else Launches(calls):  # in the first case it calls itself
            add(self, *given)

    monkeypatch.setattr(GradAccumulation, "add", counted)
    run_ranks(SIZE, lambda rank, transport: one_step(modules[rank], rank, transport))
    units, parameters = len(modules[0].blocks), 3
    assert calls["_foreach_add_", parameters] == (SIZE - 1) * units
    assert calls["_foreach_copy_", parameters] >= units


@pytest.mark.parametrize("replicated", [False, True])
@pytest.mark.parametrize("size", [1, 3])
def test_those_that_nobody_wants_are_dropped(size: int, replicated: bool) -> None:
    """The optimizer has the last unit alone; the others' parameters require gradients all the same."""
    modules = [build("dense") for _ in range(size)]

    def work(rank: int, transport: Any) -> list[int]:
        module, left = modules[rank], []
        runtime = Runtime(
            module,
            torch.optim.SGD(module.blocks[-1].parameters(), lr=0.1),
            Settings("cdp-v2", partition_method="uniform", replicated=replicated),
            transport,
            torch.device("cpu"),
        )
        for step in range(3):
            with runtime.forward():
                value = loss(module, batch(step, 0, rank))
            value.backward()
            runtime.end_backward()
            left.append(sum(p.grad is not None for p in module.parameters()))
            runtime.step()
        runtime.close(True)
        return left

    assert run_ranks(size, work) == [[0, 0, 0]] * size


def test_their_graphs_are_not_kept() -> None:
    """Under ``backward(create_graph=True)`` gradients have graphs; sums must not hold them from step to step."""
    modules = [build("dense") for _ in range(SIZE)]

    def work(rank: int, transport: Any) -> bool:
        module = modules[rank]
        runtime = Runtime(module, sgd(list(module.named_parameters())), settings(), transport, torch.device("cpu"))
        with runtime.forward():
            value = loss(module, batch(0, 0, rank))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # torch's, of the cycle that this makes
            value.backward(create_graph=True)
        runtime.end_backward()
        graphs = any(view.requires_grad for views in runtime.param_hooks.accumulation._views.values() for view in views)
        runtime.step()
        runtime.close(True)
        return graphs

    assert run_ranks(SIZE, work) == [False] * SIZE
