"""What the sweep over architectures runs inside worker processes: a few steps under stock ZeRO-3 and under two rules."""

import random
from collections.abc import Iterable
from typing import Any

import numpy
import torch

from support.architectures import ARCHITECTURES

STEPS = 3
RULES = (None, "dp", "cdp-v2")  # None: stock ZeRO-3


def sweep(rank: int, world: int, name: str, rules: Iterable[str | None] = RULES) -> dict[str | None, list[float]]:
    """This rank's losses by rule."""
    return {rule: losses(rank, name, rule) for rule in rules}


def losses(rank: int, name: str, rule: str | None) -> list[float]:
    """Train a model from its start, with nothing configured but the rule."""
    import deepspeed

    import deepspeed_cdp

    deepspeed_cdp.register()
    _seed(0)
    architecture = ARCHITECTURES[name]
    module, rank = architecture.build().train(), 0 if architecture.alike else rank
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 0.0,  # norms are sums in another order
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0, "memory_efficient_linear": False},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.01, "torch_adam": True}},
        "steps_per_print": None,
    }
    if rule is None:
        _give_dimensions(module)
    else:
        config["cyclic"] = {"enabled": True, "rule": rule, "timeout_seconds": 50.0}
    engine = deepspeed.initialize(model=module, model_parameters=module.parameters(), config=config)[0]
    found = []
    for step in range(STEPS):
        batch = architecture.batch(torch.Generator().manual_seed(1000 * step + rank))
        _seed(1 + 10 * step + rank)  # models draw masks and noise
        loss = engine(**batch).loss
        found.append(loss.item())
        engine.backward(loss)
        engine.step()
    engine.destroy()
    return found


def _give_dimensions(module: torch.nn.Module) -> None:
    """Stock DeepSpeed cannot broadcast a parameter without dimensions (CLIP's logit_scale)."""
    for path, p in list(module.named_parameters()):
        if p.dim() == 0:
            owner, _, name = path.rpartition(".")
            setattr(module.get_submodule(owner), name, torch.nn.Parameter(p.detach().view(1)))


def _seed(seed: int) -> None:
    torch.manual_seed(seed)
    numpy.random.seed(seed)
    random.seed(seed)
