"""One rank of two, as an ordinary script that fails: ``python -m support.failing_script HOW WHO``, with RANK and so on set.

WHO is the rank that fails, or "all".
"""

import os
import sys
from typing import Any

import torch
from torch import nn

from support import models


class Fails(models.MLP):
    """Fails in a pass, once ``where`` says so."""

    where = ""

    def fail(self, *_: Any) -> None:
        raise RuntimeError(f"own error in {self.where}")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x)
        if self.where == "forward":
            self.fail()
        if self.where == "backward":
            x.register_hook(self.fail)
        return x


def main(how: str, who: str) -> None:
    import deepspeed

    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    mine = who in ("all", str(rank))
    module = Fails()
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": {"stage": 2 if how == "no optimizer" else 3},
        "cyclic": {"enabled": True, "timeout_seconds": 60, "any_order": how != "module" and "auto"},
    }
    parameters = list(module.parameters())
    if mine and how == "criterion":
        parameters.append(nn.Parameter(torch.zeros(3)))
    if mine and how == "units":
        config["cyclic"]["units"] = ["blocks.0", "blocks.9"]
    if mine and how == "scheduler":
        config["scheduler"] = {"type": "Nothing", "params": {}}
    optimizer = None if how == "no optimizer" else torch.optim.SGD(parameters, 0.1)
    engine = deepspeed.initialize(model=module, optimizer=optimizer, config=config)[0]
    for step in range(6):
        if mine and step == 3:
            module.where = how
            if how == "script":
                raise RuntimeError("own error in script")
        loss = models.loss(engine, "mlp", models.batch("mlp", step, 0, rank))
        if mine and step == 3 and how == "twice":
            engine.backward(loss)
        engine.backward(loss)
        engine.step()
    if mine and how == "module":
        module(torch.zeros(1, 8))


if __name__ == "__main__":
    main(*sys.argv[1:])
