"""Training with warm-up steps on a ring of threads, compared with the oracle."""

import pytest
import torch

from deepspeed_cdp.model.make_plan import Settings
from support.local_ring import train
from support.optimizers import sgd
from support.runtime_runs import oracle


def check(kind: str, rule, size: int, warmup: int, make=sgd, steps: int = 7, **options):
    """Every loss of every step and every final weight is the oracle's, bitwise."""
    own = {k: options.pop(k) for k in ("change", "delay", "keep") if k in options}
    flush_after, on_step, dtype = options.pop("flush_after", ()), options.pop("on_step", None), options.pop("dtype", None)
    settings = Settings(rule, warmup_steps=warmup, keep_after_forward=own.pop("keep", False), **options)
    got = train(kind, size, settings, make, steps, flush_after, on_step, dtype, **own)
    want = oracle(
        kind,
        got["runtimes"][0].plan.stages,
        rule,
        size,
        make,
        steps,
        dtype,
        flush_after=flush_after,
        on_step=on_step,
        warmup_steps=warmup,
        rounds=settings.rounds,
        clip=settings.clip,
        grad_dtype=settings.sum_dtype,
    )
    assert got["losses"] == pytest.approx(want.losses, rel=0, abs=0, nan_ok=True)
    for state in got["states"]:
        for name, master in want.masters.items():
            torch.testing.assert_close(state[name], master.to(state[name].dtype), rtol=0, atol=0, msg=name)
    return got, want
