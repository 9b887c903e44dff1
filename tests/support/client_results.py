"""What the Trainer's scripts leave in their output folders."""

import json
import math
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from safetensors.torch import load_file


class Results(NamedTuple):
    """An output folder of a Trainer."""

    folder: Path

    def log(self, key: str) -> list[float]:
        history = json.loads((self.folder / "trainer_state.json").read_text())["log_history"]
        return [entry[key] for entry in history if key in entry]

    def weights(self, checkpoint: int | None = None, file: str = "model.safetensors") -> dict[str, torch.Tensor]:
        return load_file(self.folder / (f"checkpoint-{checkpoint}" if checkpoint else "") / file)

    def stages(self, step: int) -> list[list[str]]:
        return json.loads((self.folder / f"checkpoint-{step}/global_step{step}/cyclic.json").read_text())["stages"]


def same(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor], tolerance: float) -> None:
    """The same names, and no element farther than ``tolerance``."""
    assert got.keys() == want.keys()
    far = max(float((got[n] - want[n]).abs().max()) for n in want)
    print(f"largest difference of a weight {far:.2e}")
    assert far <= tolerance


def same_run(dp: Results, stock: Results, steps: int) -> None:
    """Everything that is logged: rank 0 knows the norm one step later."""
    assert len(stock.log("loss")) == steps
    for key in ("loss", "eval_loss", "learning_rate", "entropy", "mean_token_accuracy"):
        assert dp.log(key) == pytest.approx(stock.log(key), rel=1e-6), key
    first, *late = dp.log("grad_norm")
    assert math.isnan(first) and late == pytest.approx(stock.log("grad_norm")[:-1], rel=1e-5)
