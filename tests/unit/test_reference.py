"""The oracle against loops that anybody can check by eye."""

import csv
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from deepspeed_cdp.analysis.reference import train, version
from deepspeed_cdp.plan.delay_correction import DelayCorrection

GOLDEN = Path(__file__).parent.parent / "golden"


class Net(nn.Module):
    """Four linear layers; the last is skipped for batches flagged so."""

    def __init__(self, depth: int = 4, width: int = 5, norm: bool = False):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.norm = nn.BatchNorm1d(width) if norm else None

    def forward(self, x: torch.Tensor, skip_last: bool = False) -> torch.Tensor:
        for layer in self.layers[:-1] if skip_last else self.layers:
            x = torch.tanh(layer(x))
        return x if self.norm is None else self.norm(x)


def stages(net: Net, count: int) -> list[list[str]]:
    names = [[f"layers.{i}.weight", f"layers.{i}.bias"] for i in range(len(net.layers))]
    each = len(names) // count
    cut = [sum(names[s * each : (s + 1) * each], []) for s in range(count)]
    cut[-1] += ["norm.weight", "norm.bias"] if net.norm is not None else []
    return cut


def batch(step: int, rnd: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + 10 * rnd + rank)
    return torch.randn(6, 5, generator=generator), torch.randn(6, 5, generator=generator)


def mse(call, data):
    return F.mse_loss(call(data[0]), data[1])


def sgd(named):
    return torch.optim.SGD([p for _, p in named], lr=0.3, momentum=0.9)


def adamw(named):
    return torch.optim.AdamW([p for _, p in named], lr=0.01)


def make(seed: int = 0, **kwargs) -> Net:
    torch.manual_seed(seed)
    return Net(**kwargs)


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor], **tolerance) -> None:
    assert a.keys() == b.keys()
    for name in a:
        torch.testing.assert_close(a[name], b[name], **tolerance)


@pytest.mark.parametrize("optimizer", [sgd, adamw])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_rank_is_the_plain_loop(optimizer, dtype):
    net = make().to(dtype)

    def loss(call, data):
        return F.mse_loss(call(data[0].to(dtype)).float(), data[1])

    got = train(net, stages(net, 1), 0, batch, loss, optimizer, 5)
    masters = {n: nn.Parameter(p.detach().float()) for n, p in net.named_parameters()}
    plain = optimizer(list(masters.items()))
    for step in range(5):
        value = loss(net, batch(step, 0, 0))
        assert got.losses[step, 0, 0] == value.item()
        net.zero_grad()
        value.backward()
        for name, parameter in net.named_parameters():
            masters[name].grad = parameter.grad.float()
        plain.step()
        with torch.no_grad():
            for name, parameter in net.named_parameters():
                parameter.copy_(masters[name])
    same(got.masters, {n: p.detach() for n, p in masters.items()}, rtol=0, atol=0)


def test_one_rank_v1_is_stale_and_v2_is_not():
    net = make()
    v2, dp, v1 = (train(net, stages(net, 1), k, batch, mse, sgd, 4) for k in (0, 0, 1))
    same(v2.masters, dp.masters, rtol=0, atol=0)
    assert not torch.equal(v1.masters["layers.0.weight"], v2.masters["layers.0.weight"])


@pytest.mark.parametrize("rounds", [1, 2])
def test_dp_is_a_large_batch(rounds):
    net = make()
    got = train(net, stages(net, 4), 0, batch, mse, sgd, 4, rounds=rounds)
    optimizer = sgd(list(net.named_parameters()))
    for step in range(4):
        parts = [batch(step, m, r) for m in range(rounds) for r in range(4)]
        optimizer.zero_grad()
        mse(net, [torch.cat(p) for p in zip(*parts, strict=True)]).backward()
        optimizer.step()
    same(got.masters, {n: p.detach() for n, p in net.named_parameters()}, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("flush_after", [(), (1,), (2, 3)])
def test_v1_on_a_quadratic_by_hand(flush_after):
    net = nn.Linear(1, 1, bias=False).double()  # f = (w x)^2 / 2
    nn.init.constant_(net.weight, 1.0)
    net = net.float()
    got = train(
        net,
        [["weight"], []],
        3,
        lambda t, m, r: torch.tensor([[1.0 + r]]),
        lambda call, x: call(x).square().sum() / 2,
        lambda named: torch.optim.SGD([p for _, p in named], lr=0.1),
        6,
        flush_after=flush_after,
    )
    now = before = 1.0
    for step in range(6):
        now, before = now - 0.1 * (before * 1.0 + before * 4.0) / 2, now
        if step in flush_after:
            before = now
    assert got.masters["weight"].item() == pytest.approx(now, rel=1e-5)


def test_v2_by_hand():
    """Two stages a, b; f_r = x_r a b. N = 2, K = 1: only (rank 0, stage 0) is stale."""

    class Product(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Parameter(torch.tensor(1.0)), nn.Parameter(torch.tensor(2.0))

        def forward(self, x):
            return x * self.a * self.b

    got = train(
        Product(),
        [["a"], ["b"]],
        1,
        lambda t, m, r: 1.0 + r,
        lambda call, x: call(x),
        lambda named: torch.optim.SGD([p for _, p in named], lr=0.1),
        3,
    )
    a = old_a = 1.0
    b = 2.0
    for step in range(3):
        assert got.losses[step, 0, 0] == pytest.approx(1.0 * old_a * b, rel=1e-5)
        assert got.losses[step, 0, 1] == pytest.approx(2.0 * a * b, rel=1e-5)
        grad_a = (1.0 * b + 2.0 * b) / 2
        grad_b = (1.0 * old_a + 2.0 * a) / 2
        a, old_a, b = a - 0.1 * grad_a, a, b - 0.1 * grad_b
    assert got.masters["a"].item() == pytest.approx(a, rel=1e-5)
    assert got.masters["b"].item() == pytest.approx(b, rel=1e-5)


@pytest.mark.parametrize("method", ["extrapolate", "predict"])
@pytest.mark.parametrize("flush_after", [(), (2,)])
def test_corrections_with_sgd_by_hand(method, flush_after):
    """Two stages a, b; f_r = x_r a b. N = 2, K = 1: rank 0 reads a correction of a, all others read what is new."""

    class Product(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Parameter(torch.tensor(1.0)), nn.Parameter(torch.tensor(2.0))

        def forward(self, x):
            return x * self.a * self.b

    got = train(
        Product(),
        [["a"], ["b"]],
        1,
        lambda t, m, r: 1.0 + r,
        lambda call, x: call(x),
        lambda named: torch.optim.SGD([p for _, p in named], lr=0.1, momentum=0.5),
        5,
        delay_correction=DelayCorrection(method, updates=0.7, weight=1.5),
        flush_after=flush_after,
    )
    a, b = [1.0], [2.0]
    buffer_a = buffer_b = 0.0
    correction = [1.0]  # what is read in step t + 1
    for t in range(5):
        reads = a[t] if t == 0 or t - 1 in flush_after else correction[t]
        assert got.losses[t, 0, 0] == pytest.approx(1.0 * reads * b[t], rel=1e-5)
        assert got.losses[t, 0, 1] == pytest.approx(2.0 * a[t] * b[t], rel=1e-5)
        grad_a, grad_b = (1.0 * b[t] + 2.0 * b[t]) / 2, (1.0 * reads + 2.0 * a[t]) / 2
        lead = 0.5 * buffer_a + 1.5 * (1.0 * b[t] - 0.5 * buffer_a)  # rank 0 has its own gradient, and the buffer is m / 0.5
        predicted = a[t] - 0.1 * (0.5 * buffer_a + lead) if t and t - 1 not in flush_after else a[t]
        buffer_a, buffer_b = 0.5 * buffer_a + grad_a, 0.5 * buffer_b + grad_b
        a.append(a[t] - 0.1 * buffer_a)
        b.append(b[t] - 0.1 * buffer_b)
        if method == "predict":
            correction.append(predicted)
        else:
            ahead = a[t] + 0.7 * (a[t] - a[t - 1]) if t and t - 1 not in flush_after else a[t]
            correction.append(ahead)
    assert got.masters["a"].item() == pytest.approx(a[-1], rel=1e-5)
    assert got.masters["b"].item() == pytest.approx(b[-1], rel=1e-5)


def test_predict_with_adamw_by_hand():
    """f = (w x)^2 / 2 of one weight, K = 1 on one rank: every reader reads a prediction, made in the step before."""
    net = nn.Linear(1, 1, bias=False)
    nn.init.constant_(net.weight, 1.0)
    rates = [0.1, 0.05, 0.2, 0.1, 0.1]

    def set_rate(step, optimizer):
        optimizer.param_groups[0]["lr"] = rates[step]

    got = train(
        net,
        [["weight"]],
        1,
        lambda t, m, r: torch.tensor([[1.0 + t]]),
        lambda call, x: call(x).square().sum() / 2,
        lambda named: torch.optim.AdamW([p for _, p in named], betas=(0.9, 0.99), eps=1e-3, weight_decay=0.1),
        5,
        clip=3.0,
        on_step=set_rate,
        delay_correction=DelayCorrection("predict", weight=1.5),
    )
    now = before = 1.0  # before: what is read
    m = v = 0.0
    factor = 1.0
    for t, rate in enumerate(rates):
        g = before * (1.0 + t) ** 2
        predicted = now
        if t:  # with the last update's rate and clipping
            mean, rate_before = m / (1 - 0.9**t), rates[t - 1]
            lead = mean + 1.5 * (g * factor - mean)
            m1, v1 = 0.9 * m + 0.1 * lead, 0.99 * v + 0.01 * lead * lead
            denominator = (v1 / (1 - 0.99 ** (t + 1))) ** 0.5 + 1e-3
            predicted = now * (1 - rate_before * 0.1) - rate_before * m1 / (1 - 0.9 ** (t + 1)) / denominator
        factor = 1 / max(1.0, (abs(g) + 1e-6) / 3.0)
        g *= factor
        m, v = 0.9 * m + 0.1 * g, 0.99 * v + 0.01 * g * g
        first, denominator = 1 - 0.9 ** (t + 1), (v / (1 - 0.99 ** (t + 1))) ** 0.5 + 1e-3
        now = now * (1 - rate * 0.1) - rate * m / first / denominator
        before = predicted
    assert got.masters["weight"].item() == pytest.approx(now, rel=1e-4)


def test_a_prediction_that_is_not_finite_is_the_version_itself():
    """fp16, K = 1 on one rank: step 1 overflows, so step 2 reads the version itself, and step 3 a prediction again."""

    class Scaler:
        loss_scale = 1.0

        def update_scale(self, overflow):
            pass

    net = nn.Linear(1, 1, bias=False)
    nn.init.constant_(net.weight, 1.0)
    got = train(
        net,
        [["weight"]],
        1,
        lambda t, m, r: torch.tensor([[float("inf") if t == 1 else 1.0]]),
        lambda call, x: call(x).sum(),
        lambda named: torch.optim.SGD([p for _, p in named], lr=0.1, momentum=0.5),
        4,
        scaler=Scaler(),
        delay_correction=DelayCorrection("predict", weight=1.5),
    )
    assert got.overflows == [False, True, False, False]
    assert [got.losses[t, 0, 0] for t in (0, 2, 3)] == pytest.approx([1.0, 0.9, 0.9 - 0.1 * (0.5 + 0.5 + 1.5 * 0.5)], rel=1e-6)


@pytest.mark.parametrize("ranks", range(1, 9))
def test_versions_are_the_golden_table(ranks):
    with open(GOLDEN / f"schedule_n{ranks}.csv") as file:
        rows = list(csv.DictReader(file))
    assert rows
    for row in rows:
        step, rank, stage = int(row["step"]), int(row["rank"]), int(row["stage"])
        assert version(ranks - 1, ranks, step, 0, rank, stage) == int(row["version_v2"]), row
        assert version(2 * ranks - 1, ranks, step, 0, rank, stage) == int(row["version_v1"]), row
        assert version(0, ranks, step, 0, rank, stage) == step


def test_versions_of_later_rounds_and_after_a_flush():
    assert [version(3, 4, 5, 0, 0, s) for s in range(4)] == [4, 4, 4, 5]
    assert [version(3, 4, 5, 1, 0, s) for s in range(4)] == [5, 5, 5, 5]
    assert [version(7, 4, 5, m, 3, 3) for m in range(2)] == [4, 4]
    assert [version(k, 4, 5, 0, 0, 0, flushed_at=5) for k in (0, 3, 7)] == [5, 5, 5]
    assert [version(k, 4, 6, 0, 0, 0, flushed_at=5) for k in (0, 3, 7)] == [6, 5, 5]


@pytest.mark.parametrize("threshold", [3, 7])
def test_flush_is_a_restart(threshold):
    """SGD without momentum has no state: training on after a flush is training anew from its result."""
    net = make()
    plain = lambda named: torch.optim.SGD([p for _, p in named], lr=0.3)  # noqa: E731
    whole = train(net, stages(net, 4), threshold, batch, mse, plain, 6, flush_after={2})
    half = train(net, stages(net, 4), threshold, batch, mse, plain, 3)
    net.load_state_dict(half.masters)
    rest = train(net, stages(net, 4), threshold, lambda t, m, r: batch(t + 3, m, r), mse, plain, 3)
    same(whole.masters, rest.masters, rtol=0, atol=0)
    unflushed = train(make(), stages(net, 4), threshold, batch, mse, plain, 6)
    assert not torch.equal(unflushed.masters["layers.0.weight"], whole.masters["layers.0.weight"])


def test_accumulation_two_rounds_by_hand():
    """One weight w in stage 0 of N = 2 under v2 (K = 1): only (round 0, rank 0) is stale."""
    net = nn.Linear(1, 1, bias=False)
    nn.init.constant_(net.weight, 1.0)
    got = train(
        net,
        [["weight"], []],
        1,
        lambda t, m, r: torch.tensor([[1.0 + r + 2 * m]]),
        lambda call, x: call(x).square().sum() / 2,
        lambda named: torch.optim.SGD([p for _, p in named], lr=0.05),
        4,
        rounds=2,
    )
    now = before = 1.0
    for _ in range(4):
        gradient = (1 * before + 4 * now + 9 * now + 16 * now) / 2 / 2
        now, before = now - 0.05 * gradient, now
    assert got.masters["weight"].item() == pytest.approx(now, rel=1e-5)


def test_lagged_clipping_by_hand():
    """f_r = x_t (3 a + 4 b), N = 2, K = 1: gradients do not depend on parameters, so every factor can be written down."""

    class Line(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Parameter(torch.zeros(())), nn.Parameter(torch.zeros(()))

        def forward(self, x):
            return x * (3 * self.a + 4 * self.b)

    scale = [1.0, 2.0, 0.1, 1.0]
    got = train(
        Line(),
        [["a"], ["b"]],
        1,
        lambda t, m, r: scale[t],
        lambda call, x: call(x),
        lambda named: torch.optim.SGD([p for _, p in named], lr=1.0),
        4,
        clip=1.0,
        flush_after={1},
    )
    a = b = 0.0
    last = 0.0  # the norm^2 of stage 0 one step ago: zero at the start, kept through the flush
    for x in scale:
        now_a, now_b = (3 * x) ** 2, (4 * x) ** 2
        a -= 3 * x / max(1.0, ((now_a + now_b) ** 0.5 + 1e-6) / 1.0)
        b -= 4 * x / max(1.0, ((now_b + last) ** 0.5 + 1e-6) / 1.0)
        last = now_a
    assert got.masters["a"].item() == pytest.approx(a, rel=1e-5)
    assert got.masters["b"].item() == pytest.approx(b, rel=1e-5)
    assert got.norms == pytest.approx([5 * x for x in scale])
    assert got.clip_norms[0] == pytest.approx([5.0, 4.0])
    assert got.clip_norms[2] == pytest.approx([0.5, (0.4**2 + 6.0**2) ** 0.5])


@pytest.mark.parametrize("threshold", [0, 7])
def test_exact_clipping_bounds_the_whole_update(threshold):
    net = make()
    plain = lambda named: torch.optim.SGD([p for _, p in named], lr=1.0)  # noqa: E731
    got = train(net, stages(net, 4), threshold, batch, mse, plain, 1, clip=0.05)
    moved = sum((got.masters[n] - p.detach()).square().sum().item() for n, p in net.named_parameters()) ** 0.5
    assert got.norms[0] > 0.05 and moved == pytest.approx(0.05, rel=1e-3)


def test_each_rank_keeps_its_batch_statistics_and_the_template_is_untouched():
    net = make(norm=True)
    before = {name: value.clone() for name, value in net.state_dict().items()}
    got = train(net, stages(net, 2), 1, batch, mse, sgd, 3)
    same(before, net.state_dict(), rtol=0, atol=0)
    assert int(got.buffers[0]["norm.num_batches_tracked"]) == 3
    assert not torch.equal(got.buffers[0]["norm.running_mean"], got.buffers[1]["norm.running_mean"])


def test_a_skipped_layer_adds_nothing():
    net = make()

    def sometimes(call, data):
        return F.mse_loss(call(data[0], skip_last=bool(data[2])), data[1])

    never = train(net, stages(net, 4), 3, lambda t, m, r: (*batch(t, m, r), True), sometimes, adamw, 2)
    mixed = train(net, stages(net, 4), 3, lambda t, m, r: (*batch(t, m, r), r == 1), sometimes, adamw, 2)
    decayed = net.layers[3].weight.detach() * (1 - 0.01 * 0.01) ** 2
    torch.testing.assert_close(never.masters["layers.3.weight"], decayed)
    assert not torch.equal(mixed.masters["layers.3.weight"], decayed)


def test_gradient_dtype_and_order_of_the_sum():
    net = nn.Linear(1, 1, bias=False)
    values = [256.0, 1.0, 1.0, 0.0]  # in bf16 256 + 1 = 256: the order shows
    got = train(
        net,
        [["weight"], [], [], []],
        0,
        lambda t, m, r: torch.tensor([[values[r]]]),
        lambda call, x: call(x).sum(),
        lambda named: torch.optim.SGD([p for _, p in named], lr=1.0),
        1,
        grad_dtype=torch.bfloat16,
    )
    assert (net.weight - got.masters["weight"]).item() == pytest.approx(256 / 4)


def test_learning_rates_and_bad_stages():
    net = make()

    def halve(step, optimizer):
        optimizer.param_groups[0]["lr"] = 0.0 if step else 0.3

    frozen = train(net, stages(net, 4), 3, batch, mse, sgd, 3, on_step=halve)
    once = train(net, stages(net, 4), 3, batch, mse, sgd, 1)
    same(frozen.masters, once.masters, rtol=0, atol=0)
    with pytest.raises(ValueError, match=r"layers\.3"):
        train(net, stages(net, 4)[:3], 3, batch, mse, sgd, 1)
