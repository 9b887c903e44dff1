"""The simulator against the oracle, bit for bit, and against what it promises its users."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from deepspeed_cdp.analysis import reference
from deepspeed_cdp.analysis.learning_simulator import Simulator, stages_of, threshold_of
from deepspeed_cdp.model.discover import Example
from deepspeed_cdp.plan import schedule
from deepspeed_cdp.plan.delay_correction import DelayCorrection
from support.models import build

STEPS = 7


def batch(kind: str, step: int, rnd: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + 10 * rnd + rank)
    return torch.randn(*((4, 3, 6, 6) if kind == "conv" else (5, 8)), generator=generator)


def loss(call, data):
    return call(data).square().mean() * 3


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01)


def bare_sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=0.01)


def adam(parameters):
    return torch.optim.Adam(parameters, lr=0.01, weight_decay=0.05, amsgrad=True)


def nadam(parameters):
    return torch.optim.NAdam(parameters, lr=0.01, weight_decay=0.05, decoupled_weight_decay=True, momentum_decay=1e6)


def adamax(parameters):
    return torch.optim.Adamax(parameters, lr=0.01, betas=(0.8, 0.99), weight_decay=0.05, maximize=True)


def muon(parameters):
    return torch.optim.Muon(parameters, lr=0.01)


def matrices() -> nn.Module:
    """Muon takes nothing else."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(4)))


def equals_the_oracle(
    kind, ranks, rule, rounds, clip, optimizer, setting="none", corrects=None, warmup=0, flush_after=(3,)
) -> None:
    """Losses, masters and buffers of a training with a moving learning rate, bit for bit.

    Args:
        setting: the simulator's ``delay_correction``.
        corrects: the oracle's.
    """
    module = matrices() if kind == "matrices" else build(kind)
    stages = stages_of(module, ranks)

    def set_rate(step, optimizer):
        for group in optimizer.param_groups:
            group["lr"] = 0.1 / (step + 2)

    expected = reference.train(
        module,
        stages,
        schedule.threshold(rule, ranks),
        lambda *which: batch(kind, *which),
        loss,
        optimizer,
        STEPS,
        rounds=rounds,
        clip=clip,
        flush_after=flush_after,
        on_step=set_rate,
        warmup_steps=warmup,
        delay_correction=corrects,
    )
    ring = Simulator(
        module, optimizer(module.parameters()), stages, rule, clip=clip, warmup_steps=warmup, delay_correction=setting
    )
    for step in range(STEPS):
        set_rate(step, ring.optimizer)
        losses = ring.step([batch(kind, step, rnd, rank) for rnd in range(rounds) for rank in range(ranks)], loss)
        assert losses.tolist() == [expected.losses[step, rnd, rank] for rnd in range(rounds) for rank in range(ranks)], step
        if step in flush_after:
            ring.flush()
    got = dict(module.named_parameters())
    for name, value in expected.masters.items():
        assert torch.equal(got[name], value), name
    for name, value in module.named_buffers():  # rank 0's
        assert torch.equal(value, expected.buffers[0][name]), name


@pytest.mark.parametrize(
    "kind, ranks, rule, rounds, clip, optimizer",
    [
        ("mlp", 1, "cdp-v2", 1, 0.0, sgd),
        ("mlp", 2, "cdp-v1", 1, 0.0, sgd),
        ("mlp", 3, "cdp-v2", 1, 0.3, adamw),
        ("mlp", 3, 4, 2, 0.3, sgd),
        ("mlp", 4, "dp", 2, 0.3, adamw),
        ("mlp", 4, "cdp-v1", 2, 0.3, adamw),
        ("mlp", 4, 1, 1, 0.3, sgd),
        ("conv", 3, "cdp-v2", 2, 0.0, sgd),
        ("conv", 2, "dp", 1, 0.0, adamw),
        ("rooted", 4, "cdp-v2", 1, 0.3, adamw),
        ("routed", 3, "cdp-v2", 1, 0.0, adamw),
    ],
)
def test_equals_the_oracle_bit_for_bit(kind, ranks, rule, rounds, clip, optimizer) -> None:
    equals_the_oracle(kind, ranks, rule, rounds, clip, optimizer)


@pytest.mark.parametrize("method", ["extrapolate", "predict"])
@pytest.mark.parametrize("optimizer", [adamw, adam, nadam, adamax, sgd, bare_sgd])
@pytest.mark.parametrize(
    "kind, ranks, rule, rounds, clip, warmup, flush_after",
    [
        ("mlp", 3, "cdp-v1", 1, 0.0, 0, ()),
        ("mlp", 3, "cdp-v2", 2, 0.3, 0, (3,)),
        ("mlp", 4, "cdp-v1", 2, 0.3, 2, (4,)),
        ("conv", 3, "cdp-v2", 1, 0.3, 2, ()),
        ("rooted", 4, 2, 1, 0.3, 0, (0, 4)),
    ],
)
def test_corrections_equal_the_oracle_bit_for_bit(
    kind, ranks, rule, rounds, clip, warmup, flush_after, optimizer, method
) -> None:
    block = {"method": "extrapolate", "updates": 0.7} if method == "extrapolate" else dict(method=method, weight=1.7)
    equals_the_oracle(kind, ranks, rule, rounds, clip, optimizer, block, DelayCorrection(**block), warmup, flush_after)


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")
@pytest.mark.parametrize("setting, updates", [("auto", 1.0), ({"method": "extrapolate", "updates": 0.5}, 0.5)])
def test_muon_is_extrapolated(setting, updates) -> None:
    equals_the_oracle("matrices", 2, "cdp-v2", 1, 0.3, muon, setting, DelayCorrection("extrapolate", updates=updates))


def test_auto() -> None:
    """Adam's kin is predicted, with weight 1.5; SGD keeps the paper's rule, as does dp."""
    for optimizer in (adamw, adamax):
        for setting in ("auto", "predict"):
            equals_the_oracle("mlp", 3, "cdp-v1", 1, 0.0, optimizer, setting, DelayCorrection("predict", weight=1.5))
    equals_the_oracle("mlp", 3, "cdp-v1", 1, 0.0, sgd, "auto")
    equals_the_oracle("mlp", 3, "dp", 1, 0.0, adamw, "predict")


@pytest.mark.parametrize("rule", ["cdp-v1", "cdp-v2"])
def test_rules_differ_and_warming_up_is_dp_until_a_flush(rule) -> None:
    """The first W steps equal dp's; the step after them too, since it reads one version; then they part."""
    runs = {}
    for name, warmup in (("dp", 0), (rule, 0), (rule, 2)):
        module = build("mlp")
        ring = Simulator(module, sgd(module.parameters()), stages_of(module, 3), name, warmup_steps=warmup)
        runs[name, warmup] = [ring.step([batch("mlp", step, 0, r) for r in range(3)], loss).tolist() for step in range(5)]
    plain, at_once, later = runs["dp", 0], runs[rule, 0], runs[rule, 2]
    assert at_once[0] == plain[0] and at_once[1] != plain[1]
    assert later[:3] == plain[:3] and later[3] != plain[3]


@pytest.mark.parametrize("rule", ["cdp-v1", "cdp-v2", 1])
def test_after_warming_up_it_is_the_oracle_started_there(rule) -> None:
    """Plain SGD has no memory, so two warm-up steps and then the rule are two oracles, one after the other."""

    def plain(parameters):
        parameters = [p for _, p in parameters] if isinstance(parameters, list) else parameters
        return torch.optim.SGD(parameters, lr=0.1)

    module = build("mlp")
    stages = stages_of(module, 3)
    first = reference.train(module, stages, 0, lambda *which: batch("mlp", *which), loss, plain, 2)
    later = build("mlp")
    later.load_state_dict(first.masters)
    then = reference.train(
        later, stages, schedule.threshold(rule, 3), lambda step, *which: batch("mlp", step + 2, *which), loss, plain, 4
    )
    ring = Simulator(module, plain(module.parameters()), stages, rule, warmup_steps=2)
    for step in range(6):
        ring.step([batch("mlp", step, 0, r) for r in range(3)], loss)
    assert all(torch.equal(p, then.masters[n]) for n, p in module.named_parameters())


@pytest.mark.parametrize("setting", ["none", "extrapolate", "predict"])
def test_a_step_reads_the_corrections_of_the_version_before(setting) -> None:
    """In step t, theta_t where fresh; else what was made of theta_{t-1}, theta_0 itself at first and after the warm-up."""
    module = build("mlp")
    stages = stages_of(module, 2)
    ring = Simulator(module, adamw(module.parameters()), stages, "cdp-v2", warmup_steps=2, delay_correction=setting)
    first = stages[0][0]
    thetas, read = [], []

    def look(module, data):
        read.append(module.get_parameter(first).detach().clone())
        return loss(module, data)

    for step in range(6):
        thetas.append(module.get_parameter(first).detach().clone())
        ring.step([batch("mlp", step, 0, r) for r in range(2)], look)
    stale, fresh = read[::2], read[1::2]  # rank 0 reads stage 0 stale, rank 1 fresh
    for t in range(6):
        assert torch.equal(fresh[t], thetas[t])
        assert torch.equal(stale[t], thetas[t]) == (t <= 2)
        if t > 2:
            assert torch.equal(stale[t], thetas[t - 1]) == (setting == "none" or t == 3)
        if t > 3 and setting == "extrapolate":
            assert torch.equal(stale[t], thetas[t - 1] + (thetas[t - 1] - thetas[t - 2]))


def test_the_paper_has_more_ranks_than_stages() -> None:
    """8 ranks and 4 stages, as in the paper's experiments: under v2 ranks 0 to 2 read stale, ranks 3 to 7 do not."""
    assert [threshold_of(rule, 8, 4) for rule in ("dp", "cdp-v2", "cdp-v1")] == [0, 3, 11]
    module = build("mlp")
    ring = Simulator(module, sgd(module.parameters()), stages_of(module, 4), ranks=8)
    stale = [(r, s) for r in range(8) for s in range(4) if not ring.is_fresh(0, r, s)]
    assert stale == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (2, 0)]
    v1 = Simulator(module, sgd(module.parameters()), stages_of(module, 4), "cdp-v1", ranks=8)
    assert not any(v1.is_fresh(m, r, s) for m in range(2) for r in range(8) for s in range(4))
    assert len(ring.step([batch("mlp", 0, 0, r) for r in range(8)], loss)) == 8


@pytest.mark.parametrize("ranks", range(1, 9))
def test_freshness_is_the_schedules(ranks) -> None:
    module = nn.Sequential(*(nn.Linear(2, 2) for _ in range(8)))
    for k in range(2 * ranks):
        ring = Simulator(module, sgd(module.parameters()), stages_of(module, ranks), k)
        for m, r, s in ((m, r, s) for m in range(2) for r in range(ranks) for s in range(ranks)):
            assert ring.is_fresh(m, r, s) == schedule.Schedule(ranks, k).fresh(m, r, s), (k, m, r, s)
    for rule in schedule.RULES:
        assert threshold_of(rule, ranks, ranks) == schedule.threshold(rule, ranks)


def test_the_model_between_steps_is_the_users_own() -> None:
    """Evaluation in between changes nothing, and the module always holds theta_t; autocast sees the swapped weights."""

    def mixed(module, data):
        with torch.autocast("cpu", torch.bfloat16):
            return F.mse_loss(module(data).float(), data)

    def under_one_context(evaluate: bool):
        module = build("mlp")
        pointers = [p.data_ptr() for p in module.parameters()]
        ring = Simulator(module, sgd(module.parameters()), stages_of(module, 2), "cdp-v1")
        losses = []
        with torch.autocast("cpu", torch.bfloat16):  # its cache must not outlive a micro-batch
            for step in range(4):
                losses += ring.step([batch("mlp", step, 0, r) for r in range(2)], mixed).tolist()
                if evaluate:
                    with torch.no_grad():
                        module(batch("mlp", 99, 0, 0))
        assert [p.data_ptr() for p in module.parameters()] == pointers and all(p.grad is None for p in module.parameters())
        return losses

    plain = build("mlp")
    ring = Simulator(plain, sgd(plain.parameters()), stages_of(plain, 2), "cdp-v1")
    expected = [x for step in range(4) for x in ring.step([batch("mlp", step, 0, r) for r in range(2)], mixed).tolist()]
    assert under_one_context(False) == under_one_context(True) == expected


def test_stages_are_the_engines() -> None:
    """By FLOPs where there is an example; persistent parameters in stage 0; each parameter once."""
    module = build("conv")
    flat = sorted(name for stage in stages_of(module, 3) for name in stage)
    assert flat == sorted(name for name, _ in module.named_parameters())
    by_flops = stages_of(module, 2, Example((torch.zeros(1, 3, 6, 6),)))
    assert "head.weight" in by_flops[1] and "blocks.0.0.weight" in by_flops[0]
    rooted = stages_of(build("rooted"), 2)
    assert {"scale", "shift"} <= set(rooted[0])


def test_what_is_wrong_is_said() -> None:
    module = build("mlp")
    stages = stages_of(module, 2)
    with pytest.raises(ValueError, match="each parameter must be in exactly one stage; look at"):
        Simulator(module, sgd(module.parameters()), stages[:1])
    with pytest.raises(ValueError, match="rule is 'cdp-v3'; allowed are 'dp'"):
        Simulator(module, sgd(module.parameters()), stages, "cdp-v3")
    with pytest.raises(ValueError, match="K from 0 to 3 with 2 ranks and 2 stages"):
        Simulator(module, sgd(module.parameters()), stages, 4)
    with pytest.raises(ValueError, match="'predict' and the optimizer Adagrad, whose next step is not known"):
        Simulator(module, torch.optim.Adagrad(module.parameters()), stages, delay_correction="predict")
    with pytest.raises(ValueError, match="warmup_steps -1"):
        Simulator(module, sgd(module.parameters()), stages, warmup_steps=-1)
    with pytest.raises(ValueError, match="got 3 micro-batches for 2 ranks"):
        Simulator(module, sgd(module.parameters()), stages).step([batch("mlp", 0, 0, 0)] * 3, loss)
