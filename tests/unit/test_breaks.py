"""What a hostile tester broke: modules, optimizers and uses that once trained wrongly in silence, each against the oracle."""

import pytest
import torch
from torch import nn

from deepspeed_cdp.analysis import reference
from deepspeed_cdp.model.make_plan import Settings
from deepspeed_cdp.plan.schedule import threshold
from deepspeed_cdp.runtime.runtime import Runtime
from support.chains import MODELS, batch, build, line, loss, train
from support.local_ring import run_ranks
from support.optimizers import adamw


@pytest.mark.parametrize("sums", [None, torch.float32])
@pytest.mark.parametrize("rule", ["dp", "cdp-v2"])
@pytest.mark.parametrize("kind", MODELS)
def test_no_gradient_is_lost(kind, rule, sums):
    """Gradients that come before a unit's backward is noticed, tensors that only pass through, hooks that read parameters."""
    dtype = torch.bfloat16 if sums else torch.float32
    modules = [build(kind, dtype) for _ in range(2)]
    settings = Settings(rule, rounds=2, sum_dtype=sums)
    results = run_ranks(2, lambda rank, transport: train(modules[rank], rank, transport, settings, adamw))
    want = reference.train(
        build(kind, dtype),
        results[0][0].plan.stages,
        threshold(rule, 2),
        lambda t, m, r: batch(t, m, r).to(dtype),
        loss,
        adamw,
        3,
        rounds=2,
        grad_dtype=sums,
    )
    assert {**results[0][1], **results[1][1]} == want.losses
    for name, value in want.masters.items():
        assert torch.equal(results[0][2][name], value.to(dtype)), name


def test_optimizer_state_made_before_follows_the_masters_dtype():
    """Adagrad makes its sums when it is built, from bf16 parameters."""

    def adagrad(named):
        return torch.optim.Adagrad([p for _, p in named], lr=0.05)

    modules = [build("boxed", torch.bfloat16) for _ in range(2)]
    results = run_ranks(2, lambda rank, transport: train(modules[rank], rank, transport, Settings("cdp-v2"), adagrad))
    want = reference.train(
        build("boxed", torch.bfloat16),
        results[0][0].plan.stages,
        1,
        lambda t, m, r: batch(t, m, r).to(torch.bfloat16),
        loss,
        adagrad,
        3,
    )
    for name, value in want.masters.items():
        assert torch.equal(results[0][2][name], value.to(torch.bfloat16)), name


def test_a_tensor_learning_rate_is_recorded_by_value():
    """Schedulers write into it, before the update that it was recorded for."""

    def run(lr):
        def halve(optimizer):
            for group in optimizer.param_groups:
                if isinstance(group["lr"], torch.Tensor):
                    group["lr"].mul_(0.5)
                else:
                    group["lr"] *= 0.5

        modules = [build("boxed") for _ in range(2)]
        make = lambda named: torch.optim.SGD([p for _, p in named], lr=lr())  # noqa: E731
        return run_ranks(2, lambda rank, transport: train(modules[rank], rank, transport, Settings("dp"), make, on_step=halve))[
            0
        ][2]

    floats, tensors = run(lambda: 0.5), run(lambda: torch.tensor(0.5))
    for name, value in floats.items():
        torch.testing.assert_close(tensors[name], value, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("make, words", [(torch.optim.LBFGS, "needs a closure"), (torch.optim.SparseAdam, "dense")])
def test_optimizers_that_cannot_work_are_refused_at_once(make, words):
    module = build("boxed")
    with pytest.raises(ValueError, match=words):
        run_ranks(
            1, lambda rank, transport: train(module, rank, transport, Settings("dp"), lambda named: make([p for _, p in named]))
        )


def test_a_complex_parameter_is_refused():
    module = build("boxed")
    module.w = nn.Parameter(torch.ones(3, dtype=torch.complex64))
    with pytest.raises(ValueError, match="'w' is complex"):
        run_ranks(1, lambda rank, transport: train(module, rank, transport, Settings("dp"), adamw))


def test_the_module_in_train_mode_and_loading_into_it_are_refused_while_gathered():
    module = build("boxed")

    def work(rank, transport):
        runtime = Runtime(module, adamw(list(module.named_parameters())), Settings("dp"), transport, torch.device("cpu"))
        state = runtime.whole_state()
        with pytest.raises(ValueError, match="its gradients would be lost"):
            module(batch(0, 0, 0))
        with pytest.raises(ValueError, match="would not reach the masters"):
            module.load_state_dict(state)
        with torch.no_grad():
            assert module(batch(0, 0, 0)).isfinite().all()
        runtime.close(True)

    run_ranks(1, work)


class Shared(nn.Module):
    """An embedding that is used twice, so persistent, and called by itself in evaluation."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(line() for _ in range(3))
        self.tail = nn.Linear(8, 8)
        self.tail.weight = self.embed.weight

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.tail(x)


def test_a_held_module_called_by_itself_gathers():
    """It once computed nan, silently: only units and the root were watched."""
    torch.manual_seed(7)
    module = Shared()

    def work(rank, transport):
        runtime = train_only(module, transport)
        with torch.no_grad():
            assert module.embed(batch(0, 0, 0)).isfinite().all()
        runtime.close(True)

    def train_only(module, transport):
        runtime = Runtime(module, adamw(list(module.named_parameters())), Settings("dp"), transport, torch.device("cpu"))
        with runtime.forward():
            value = loss(module, batch(0, 0, 0))
        value.backward()
        runtime.end_backward()
        runtime.step()
        return runtime

    run_ranks(1, work)
