"""Training on several rings of threads, compared with the oracle."""

import torch

from deepspeed_cdp.model.make_plan import Settings
from support.local_ring import train
from support.optimizers import sgd
from support.runtime_runs import oracle


def check(kind: str, rule, size: int, rings: int, make=sgd, steps: int = 6, **options):
    """Train ``rings`` rings of ``size`` ranks and the oracle; returns what the ranks had, and the oracle's."""
    own = {k: options.pop(k) for k in ("change", "delay", "seed", "connect", "flush_after", "on_step", "dtype") if k in options}
    settings = Settings(rule, **options)
    got = train(kind, size * rings, settings, make, steps, ring_size=size, **own)
    want = oracle(
        kind,
        got["runtimes"][0].plan.stages,
        rule,
        size,
        make,
        steps,
        own.get("dtype"),
        rings=rings,
        rounds=settings.rounds,
        clip=settings.clip,
        grad_dtype=settings.sum_dtype,
        warmup_steps=settings.warmup_steps,
        flush_after=own.get("flush_after", ()),
        on_step=own.get("on_step"),
    )
    assert got["losses"] == want.losses
    for runtime in got["runtimes"]:
        for name, master in runtime.owner.masters.items():
            assert torch.equal(master, want.masters[name]), (runtime.transport.world_rank, name)
    for state in got["states"]:
        for name, master in want.masters.items():
            assert torch.equal(state[name], master.to(state[name].dtype)), name
    return got, want
