"""Training on a ring of threads, compared with the oracle."""

import pytest
import torch

from deepspeed_cdp.analysis import reference
from deepspeed_cdp.model.make_plan import Settings
from deepspeed_cdp.plan.delay_correction import DelayCorrection
from deepspeed_cdp.plan.schedule import threshold
from support import models
from support.local_ring import train
from support.optimizers import sgd

NONE, PREDICT, EXTRAPOLATE = (DelayCorrection(), DelayCorrection("predict", weight=1.7), DelayCorrection("extrapolate"))


def schedule(step, optimizer):
    """A learning rate that moves every step."""
    for group in optimizer.param_groups:
        group["lr"] = 1e-2 / (1 + step)


def oracle(kind: str, stages, rule, size: int, make, steps: int, dtype=None, trained=None, **options):
    module = models.build(kind)
    if dtype:
        module.to(dtype)
    if trained is not None:
        for name, p in module.named_parameters():
            p.requires_grad_(name in trained)
    return reference.train(
        module,
        stages,
        threshold(rule, size),
        lambda t, m, r: models.batch(kind, t, m, r),
        lambda call, x: models.loss(call, kind, x),
        make,
        steps,
        **options,
    )


def check(
    kind: str,
    rule,
    size: int,
    make=sgd,
    steps: int = 6,
    rounds: int = 1,
    clip: float = 0.0,
    flush_after=(),
    on_step=None,
    dtype=None,
    sum_dtype=None,
    exact: bool = True,
    keep: bool = False,
    least: int = 0,
    replicated: bool = False,
    correction: DelayCorrection = NONE,
    **extra,
):
    """Train on a ring of threads and with the oracle: every loss and every final weight is equal."""
    settings = Settings(
        rule,
        rounds=rounds,
        clip=clip,
        sum_dtype=sum_dtype,
        keep_after_forward=keep,
        min_unit_bytes=least,
        replicated=replicated,
        delay_correction=correction,
    )
    got = train(kind, size, settings, make, steps, flush_after, on_step, dtype, **extra)
    plan = got["runtimes"][0].plan
    want = oracle(
        kind,
        plan.stages,
        rule,
        size,
        make,
        steps,
        dtype,
        rounds=rounds,
        clip=clip,
        flush_after=flush_after,
        grad_dtype=sum_dtype,
        on_step=on_step,
        delay_correction=correction,
    )
    close = dict(rtol=0, atol=0) if exact else dict(rtol=1e-5, atol=1e-7)
    for name, master in want.masters.items():
        for state in got["states"]:
            torch.testing.assert_close(
                state[name], master.to(state[name].dtype), **close, msg=lambda m, name=name: f"{name}: {m}"
            )
    assert got["losses"] == (want.losses if exact else pytest.approx(want.losses, rel=1e-5))
    return got, want


RULES = ["dp", "cdp-v1", "cdp-v2", "between"]


def named_rule(rule: str, size: int) -> str | int:
    return min(size, 2 * size - 1) if rule == "between" else rule
