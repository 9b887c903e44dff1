"""optim/fused_adam.py: Adam in one pass, run by Triton's interpreter on the CPU; skipped without triton (torch for CPUs
comes without it).

To run it: ``pip install triton``, then this file alone (TRITON_INTERPRET must be set before triton is imported).
"""

import os
import threading

import pytest
import torch

os.environ.setdefault("TRITON_INTERPRET", "1")
triton = pytest.importorskip("triton")

from deepspeed_cdp.optim import fused_adam  # noqa: E402
from deepspeed_cdp.optim.delay_correction import Corrector  # noqa: E402
from deepspeed_cdp.optim.masters import Masters  # noqa: E402
from deepspeed_cdp.plan.delay_correction import DelayCorrection  # noqa: E402
from support.pipe_threads import Case, farthest, oracle, train  # noqa: E402

SHAPES = {"weight": (64, 70), "bias": (70,), "other": (5000,), "even": (2, 1024)}  # blocks that are full, and ends of them


def aligned(count: int, dtype: torch.dtype) -> torch.Tensor:
    raw = torch.zeros(count * 4 + 64, dtype=torch.uint8)
    start = -raw.data_ptr() % 16
    return raw[start : start + count * dtype.itemsize].view(dtype)


def masters() -> dict[str, torch.nn.Parameter]:
    torch.manual_seed(0)
    return {
        n: torch.nn.Parameter(aligned(torch.Size(s).numel(), torch.float32).view(s).copy_(torch.randn(s)))
        for n, s in SHAPES.items()
    }


def in_halves(parameters: dict[str, torch.nn.Parameter], published: list[dict[str, torch.Tensor]]) -> Masters:
    """Their upper halves are in copy 1."""
    wrapped = Masters(parameters, published, parameters)
    for name, value in published[1].items():
        value.copy_(parameters[name].detach())
        wrapped.split([name], 1)
    return wrapped


@pytest.mark.parametrize("correction", [None, DelayCorrection("extrapolate", 0.7)])
@pytest.mark.parametrize("clip", [None, 0.3])
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adam])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("halves", [False, True])
def test_equals_torch(halves, kind, dtype, clip, correction):
    """Three steps over two units and two groups, one of them with another rate, from sums of four micro-batches.

    Corrections equal those that are made without the kernel.
    """
    ours, theirs = masters(), masters()

    def make(p):
        groups = [{"params": [p["weight"], p["other"], p["even"]]}, {"params": [p["bias"]], "lr": 3e-3}]
        return kind(groups, lr=1e-2, weight_decay=0.1)

    sums = {
        0: {n: aligned(ours[n].numel(), dtype).view(SHAPES[n]) for n in ("weight", "bias")},
        1: {n: aligned(ours[n].numel(), dtype).view(SHAPES[n]) for n in ("other", "even")},
    }
    kept = torch.bfloat16 if halves else torch.float32
    published, corrected = (
        [{n: aligned(p.numel(), kept).view(SHAPES[n]) for n, p in ours.items()} for _ in range(2)] for _ in range(2)
    )
    optimizer, reference = make(ours), make(theirs)
    wrapped = in_halves(ours, published) if halves else Masters(ours, published)
    adam = fused_adam.Adam(optimizer, wrapped, sums, published, corrected if correction else None, correction)
    corrector = Corrector(correction, reference) if correction else None
    options = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    for step in range(3):
        for unit in sums.values():
            for name, total in unit.items():
                total.copy_(torch.randn(SHAPES[name]))
                theirs[name].grad = total.float() / 4 * (clip or 1)
        for unit, members in sums.items():
            want = sum(float((t.double() / 4).square().sum()) for t in members.values())
            assert float(adam.square(unit, 0.25).sum()) == pytest.approx(want, rel=1e-5)
            factor = None if clip is None else torch.tensor(clip)
            got = adam.update(unit, options, 0.25, factor, None if step == 0 and halves else step % 2)
            assert float(got.sum()) == pytest.approx(want, rel=1e-5)
        before = [p.detach().clone() for p in theirs.values()]
        reference.step()
        ahead = corrector.extrapolate(list(theirs.values()), before) if corrector else []
        copy = 1 if step == 0 and halves else step % 2  # masters in halves stay in their copy if none is given
        for name in ours:
            torch.testing.assert_close(wrapped.value(name), theirs[name].detach(), rtol=1e-6, atol=1e-7)
            assert torch.equal(published[copy][name], wrapped.value(name).to(kept))
        tolerance = 2**-7 if halves else 1e-5  # the interpreter truncates to bf16 where a GPU rounds
        for name, value in zip(ours, ahead):
            torch.testing.assert_close(corrected[copy][name].float(), value, rtol=tolerance, atol=1e-6)
            assert not torch.equal(value, theirs[name])
    adam.write_step_counts()
    for name, p in ours.items():
        mine, others = optimizer.state[p], reference.state[theirs[name]]
        assert float(mine["step"]) == float(others["step"]) == 3
        for key in ("exp_avg", "exp_avg_sq"):
            torch.testing.assert_close(mine[key], others[key], rtol=1e-5, atol=1e-8)


def test_squared_norms_leave_out_what_another_rank_counts():
    """The parameters are updated all the same."""
    ours, all_counted = masters(), masters()
    norms = []
    for p, uncounted in ((ours, {"bias", "other"}), (all_counted, ())):
        optimizer = torch.optim.AdamW(p.values(), lr=1e-2)
        sums = {
            u: {n: aligned(p[n].numel(), torch.float32).view(SHAPES[n]).fill_(i + 1) for i, n in enumerate(names)}
            for u, names in ((0, ("weight", "bias")), (1, ("other",)), (2, ("even",)))
        }
        published = [{n: aligned(x.numel(), torch.float32).view(SHAPES[n]) for n, x in p.items()}]
        adam = fused_adam.Adam(optimizer, Masters(p, published), sums, published, uncounted=uncounted)
        options = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
        norms.append([(float(adam.square(u, 1.0).sum()), float(adam.update(u, options, 1.0, None, 0).sum())) for u in sums])
    weight, bias, other, even = 64 * 70.0, 4 * 70.0, 5000.0, 2048.0
    assert norms == [[(weight, weight), (0, 0), (even, even)], [(weight + bias,) * 2, (other, other), (even, even)]]
    assert all(torch.equal(ours[n], all_counted[n]) for n in SHAPES)


def test_a_loaded_state_is_taken_up():
    """Batches are made for the state's tensors; other tensors, from a checkpoint, come with their own number of steps."""
    ours = masters()
    optimizer = torch.optim.AdamW(ours.values(), lr=1e-2)
    sums = {0: {n: aligned(p.numel(), torch.float32).view(SHAPES[n]).fill_(1) for n, p in ours.items()}}
    published = [{n: aligned(p.numel(), torch.float32).view(SHAPES[n]) for n, p in ours.items()}]
    adam = fused_adam.Adam(optimizer, Masters(ours, published), sums, published)
    options = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    adam.update(0, options, 1.0, None, None)
    for p in ours.values():
        optimizer.state[p] = {"step": torch.tensor(41.0), "exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
    adam.update(0, options, 1.0, None, None)
    adam.write_step_counts()
    assert all(float(optimizer.state[p]["step"]) == 42 for p in ours.values())
    for p in ours.values():
        optimizer.state[p]["step"].fill_(7)  # by safe_set_full_optimizer_state, say
    adam.update(0, options, 1.0, None, None)
    adam.write_step_counts()
    assert all(float(optimizer.state[p]["step"]) == 8 for p in ours.values())


def test_what_it_does_not_know_is_left_to_the_optimizer():
    p = [torch.nn.Parameter(torch.zeros(3))]
    device = torch.device("cuda")
    assert fused_adam.Adam.suits(torch.optim.AdamW(p), device) and fused_adam.Adam.suits(torch.optim.Adam(p), device)
    for other in (torch.optim.AdamW(p, amsgrad=True), torch.optim.Adam(p, maximize=True), torch.optim.SGD(p, lr=0.1)):
        assert not fused_adam.Adam.suits(other, device)
    assert not fused_adam.Adam.suits(torch.optim.AdamW(p), torch.device("cpu"))


PREDICT = DelayCorrection("predict", weight=1.7)


@pytest.mark.parametrize(
    "case",
    [
        Case(3, 2, "pyramid"),  # the replica that finishes a sum changes from step to step
        Case(3, 2, "pyramid", correction=PREDICT),
        Case(3, 2, "pipeline", correction=PREDICT, tied=True, rounds=2, clip=0.05, flush_after=(1,)),
        Case(3, 5, "pyramid", correction=PREDICT, clip=0.05),  # the optimizer itself steps where updates wait for the norm
        Case(3, 5, "single", correction=PREDICT, warmup_steps=2, clip=0.05),
        Case(2, 3, "pipeline", correction=PREDICT),
        Case(2, 1, "pipeline", correction=DelayCorrection("extrapolate")),
    ],
)
def test_pipelines_with_the_kernel_equal_the_oracle(case, monkeypatch):
    """To a few roundings: the kernel's arithmetic is its own."""
    launch, lock, suits = fused_adam.Batch._launch, threading.Lock(), fused_adam.Adam.suits

    def one_at_a_time(*arguments):  # the interpreter knows one grid
        with lock:
            launch(*arguments)

    monkeypatch.setattr(fused_adam.Batch, "_launch", one_at_a_time)
    monkeypatch.setattr(fused_adam.Adam, "suits", lambda optimizer, _, dtypes: suits(optimizer, torch.device("cuda"), dtypes))
    weights, _, runtimes = train(case)
    assert all(owner._fused for runtime in runtimes for owner in runtime.owners.values())
    assert farthest(weights, oracle(case)[0]) < 1e-6


@pytest.mark.parametrize("copy", [0, 1])
@pytest.mark.parametrize("updates", [0, 2])
@pytest.mark.parametrize("clip", [None, 0.3])
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adam])
@pytest.mark.parametrize(("dtype", "halves"), [(torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True)])
def test_predicts_what_the_optimizer_would(kind, dtype, halves, clip, updates, copy):
    """From running sums, which others still add to: they stay as they are, as do state, masters and the other copy.

    Without any update (all were skipped) there is no momentum yet. Where a sum is not finite, the master is predicted.
    """
    weights, correction = masters(), DelayCorrection("predict", weight=1.7)

    def place() -> dict[str, torch.Tensor]:
        return {n: aligned(p.numel(), dtype).view(SHAPES[n]) for n, p in weights.items()}

    sums, published, copies = place(), [place(), place()], [place(), place()]
    optimizer = kind(list(weights.values()), lr=1e-2, weight_decay=0.1)
    wrapped = in_halves(weights, published) if halves else Masters(weights, published)
    adam = fused_adam.Adam(optimizer, wrapped, {0: sums}, published, copies, correction, {0: sums})
    options = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    factor = None if clip is None else torch.tensor(clip)
    tolerance = 1e-5 if dtype == torch.float32 else 2**-7  # the interpreter truncates to bf16 where a GPU rounds
    for slot in range(updates):
        for value in sums.values():
            value.copy_(torch.randn(value.shape))
        adam.update(0, options, 0.25, factor, slot)
        for name in weights:
            torch.testing.assert_close(published[slot][name], wrapped.value(name).to(dtype), rtol=tolerance, atol=1e-5)
    adam.write_step_counts()
    before = {n: wrapped.value(n).clone() for n in weights}
    for value in sums.values():
        value.copy_(torch.randn(value.shape))
    sums["bias"][3] = float("inf")
    gradients = [value.float() * 0.5 * (clip or 1.0) for value in sums.values()]
    kept = [
        value.clone() for value in (*sums.values(), *copies[1 - copy].values(), *published[0].values(), *published[1].values())
    ]
    if not updates:
        optimizer.state.clear()
    want = Corrector(correction, optimizer).predict(list(weights.values()), gradients, options, list(before.values()))
    adam.predict(0, options, 0.5, factor, copy)
    assert want[list(weights).index("bias")][3] == before["bias"][3]
    after = (*sums.values(), *copies[1 - copy].values(), *published[0].values(), *published[1].values())
    assert all(torch.equal(value, old) for value, old in zip(after, kept))
    for (name, value), ahead in zip(copies[copy].items(), want):
        torch.testing.assert_close(value, ahead.to(dtype), rtol=tolerance, atol=1e-5)
        assert torch.equal(wrapped.value(name), before[name])
