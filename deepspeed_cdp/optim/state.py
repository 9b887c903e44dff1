"""An optimizer's state as another make of optimizer, or another device, takes it."""

from typing import Any

import torch


def spread_counts(optimizer: torch.optim.Optimizer) -> None:
    """DeepSpeed's FusedAdam counts steps in the state of a group's last parameter only; on another ring another one is last."""
    for group in optimizer.param_groups if type(optimizer).__name__ == "FusedAdam" else ():
        states = [optimizer.state[p] for p in group["params"] if "step" in optimizer.state.get(p, ())]
        for state in states:
            state["step"] = max(s["step"] for s in states)


def fit_counts(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """torch's optimizers count in a tensor, in place, DeepSpeed's in an int: the state of one is taken by the other."""
    make, step = type(optimizer).__module__, state.get("step")
    if make.startswith("torch.optim") and isinstance(step, int):
        state["step"] = torch.tensor(float(step), dtype=torch.float32, device="cpu")
    elif make.startswith("deepspeed.") and isinstance(step, torch.Tensor):
        state["step"] = int(step)


def moved(value: Any, device: torch.device, scalars_too: bool) -> Any:
    """Tensors on the device; those of one number stay on the CPU, as torch's optimizers keep their counts."""
    if isinstance(value, torch.Tensor):
        return value.to(device).contiguous() if value.dim() or scalars_too else value
    if isinstance(value, dict):
        return {k: moved(v, device, scalars_too) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(moved(v, device, scalars_too) for v in value)
    return value
