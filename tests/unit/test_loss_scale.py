"""fp16: scales and skipped steps on a ring of threads against the oracle, bitwise; the delay by which overflows count."""

import types

import deepspeed.runtime.fp16.loss_scaler as ds
import pytest
import torch

from deepspeed_cdp.analysis import reference
from deepspeed_cdp.model.make_plan import Settings
from deepspeed_cdp.optim.loss_scale import LossScale
from deepspeed_cdp.plan.schedule import Schedule, threshold
from support import models
from support.local_ring import train
from support.optimizers import adamw


@pytest.fixture(autouse=True)
def no_group(monkeypatch):
    """DeepSpeed's scaler asks for the rank before it logs; there is no process group here."""
    monkeypatch.setattr(ds, "dist", types.SimpleNamespace(get_rank=lambda: 1))


def dynamic(power: int, window: int = 1000, hysteresis: int = 1, consecutive: bool = False, least: float = 1.0) -> dict:
    return {
        "init_scale": 2.0**power,
        "scale_window": window,
        "delayed_shift": hysteresis,
        "consecutive_hysteresis": consecutive,
        "min_scale": least,
    }


def check(size, rule, loss_scale, monkeypatch, steps=9, **options):
    """Scales, overflows, losses and weights are the oracle's; returns it and the ranks' records."""
    monkeypatch.setattr(models, "loss", _half(models.loss))
    kind, flush_after = options.pop("kind", "mlp"), options.pop("flush_after", ())
    seen: dict[int, list] = {}

    def change(runtime):
        rows, step = seen.setdefault(runtime.executor.rank, []), runtime.step

        def noted():
            t = runtime.executor.global_step
            scale = runtime.scale.of(t)
            step()
            rows.append((t, scale, runtime.optimizer.overflow))

        runtime.step = noted

    settings = Settings(rule, loss_scale=loss_scale, **options)
    got = train(kind, size, settings, adamw, steps, flush_after, dtype=torch.float16, change=change)
    module = models.build(kind).half()
    scaler = ds.CreateLossScaler(torch.half, loss_scale, isinstance(loss_scale, dict), loss_scale)
    want = reference.train(
        module,
        got["runtimes"][0].plan.stages,
        threshold(rule, size),
        lambda t, m, r: models.batch(kind, t, m, r),
        lambda call, x: models.loss(call, kind, x),
        adamw,
        steps,
        rounds=settings.rounds,
        clip=settings.clip,
        grad_dtype=settings.sum_dtype,
        flush_after=flush_after,
        scaler=scaler,
        warmup_steps=settings.warmup_steps,
    )
    for rows in seen.values():
        assert [scale for _, scale, _ in rows] == want.scales
    assert set(seen) == set(range(size))
    for name, master in want.masters.items():
        assert torch.isfinite(master).all()
        for state in got["states"]:
            torch.testing.assert_close(state[name], master.half(), rtol=0, atol=0, msg=lambda m, n=name: f"{n}: {m}")
    assert {k: repr(v) for k, v in got["losses"].items()} == {k: repr(v) for k, v in want.losses.items()}  # nan too
    return want, seen


def _half(loss):
    """The model computes in fp16, the loss in fp32."""

    def of(call, kind, x):
        if kind.startswith("llama"):
            return loss(call, kind, x)
        return loss(lambda v: call(v.half()).float(), kind, x)

    return of


@pytest.mark.parametrize("warmup", [1, 3, 6])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_warm_up_has_its_own_delay(size, warmup, monkeypatch):
    """Overflows before the switch, at it and after it; the scale's window runs on."""
    want, _ = check(size, "cdp-v1", dynamic(20, window=2), monkeypatch, steps=12, clip=0.3, warmup_steps=warmup)
    assert any(want.overflows[:warmup]) and len(set(want.scales[warmup:])) > 1, "the test needs overflows and changes"


@pytest.mark.parametrize("rounds", [1, 2])
@pytest.mark.parametrize("rule", ["dp", "cdp-v1"])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_the_scale_comes_down_and_goes_up(size, rule, rounds, monkeypatch):
    want, seen = check(size, rule, dynamic(18, window=2), monkeypatch, steps=14, rounds=rounds, clip=0.3, flush_after={6})
    assert want.overflows[0] and not all(want.overflows), want.overflows
    assert min(want.scales) < want.scales[0] and any(b > a for a, b in zip(want.scales, want.scales[1:])), want.scales
    told = 0 if rule == "dp" and size > 1 else 1
    for rows in seen.values():
        assert [overflow for _, _, overflow in rows] == [False] * told + want.overflows[: len(rows) - told]


@pytest.mark.parametrize("rule", ["dp", "cdp-v1"])
def test_sums_in_fp32(rule, monkeypatch):
    """They overflow later: an fp16 sum of three does where each term does not."""
    narrow, _ = check(3, rule, dynamic(16), monkeypatch)
    wide, _ = check(3, rule, dynamic(16), monkeypatch, sum_dtype=torch.float32)
    assert sum(wide.overflows) <= sum(narrow.overflows)
    assert any(not torch.equal(wide.masters[n], x) for n, x in narrow.masters.items())


@pytest.mark.parametrize("rule", ["dp", "cdp-v1"])
def test_a_fixed_scale(rule, monkeypatch):
    want, _ = check(2, rule, 384.0, monkeypatch, kind="llama-tied", steps=4, clip=0.5)
    assert want.scales == [384.0] * 4 and not any(want.overflows)


def test_a_nan_micro_batch_counts_two_steps_later_under_v1(monkeypatch):
    want, _ = check(3, "cdp-v1", dynamic(8), monkeypatch, kind="mlp-nan", steps=6)
    assert want.overflows == [False, False, True, False, False, False]
    assert want.scales == [256.0] * 4 + [128.0] * 2
    want, _ = check(3, "dp", dynamic(8), monkeypatch, kind="mlp-nan", steps=6)
    assert want.scales == [256.0] * 3 + [128.0] * 3
    want, _ = check(3, "cdp-v1", dynamic(8), monkeypatch, kind="mlp-nan", steps=6, flush_after={2})
    assert want.scales == [256.0] * 3 + [128.0] * 3


def test_a_scale_that_came_too_early_is_seen(monkeypatch):
    """Breaks the delay on purpose."""
    keep = LossScale.follow

    def early(self, schedule):
        keep(self, schedule)
        self._delay = 1

    monkeypatch.setattr(LossScale, "follow", early)
    with pytest.raises(AssertionError):
        check(2, "cdp-v1", dynamic(18), monkeypatch)


@pytest.mark.parametrize("rule", ["cdp-v2", 2])
def test_other_rules_are_refused(rule):
    with pytest.raises(ValueError, match="use bf16, or cyclic.rule"):
        LossScale(Schedule(3, threshold(rule, 3)), dynamic(16))


def test_hysteresis_and_state_survive_a_restart():
    """Two scalers with the same history, one of them through ``state_dict`` after a flush."""
    pattern = [True, False, True, True, False, False, False, True, False, False, False, False]
    schedule = Schedule(2, 3)
    for cut in range(1, len(pattern)):
        one, two = (LossScale(schedule, dynamic(16, window=2, hysteresis=2)) for _ in range(2))
        rows: dict[int, list] = {0: [], 1: []}
        for which, scale in enumerate((one, two)):
            for t, overflow in enumerate(pattern):
                rows[which].append(scale.of(t))
                if t and t != cut:  # the step before ends in this one
                    scale.end(t - 1, pattern[t - 1])
                    scale.finish(t - 1)
                rows[which].append(scale.end_step(t))
                if t == cut - 1:
                    scale.end(t, overflow)
                    scale.finish(t)
                    scale.flush()
                    if which:
                        state, scale = scale.state_dict(), LossScale(schedule, dynamic(16, window=2, hysteresis=2))
                        scale.restart(cut, state)
        assert rows[0] == rows[1]
        assert rows[0][1::2] == [False, *pattern[:-1]], "each overflow is told once, one step late"
