"""An optimizer's groups and state: moved to masters, and converted for another optimizer class or device."""

import copy
from collections import defaultdict
from functools import cache
from typing import Any

import torch

Names = dict[torch.nn.Parameter, str]


def take_over(optimizer: torch.optim.Optimizer, masters: dict[str, torch.nn.Parameter], names: Names) -> torch.optim.Optimizer:
    """Make the optimizer step these masters instead of the parameters of its groups.

    Args:
        names: of the parameters in its groups.
    """
    state = {names[p]: s for p, s in optimizer.state.items() if isinstance(p, torch.nn.Parameter) and p in names}
    optimizer.state.clear()
    for group in optimizer.param_groups:
        owned = [names[p] for p in group["params"] if names.get(p) in masters]
        group["params"] = [masters[n] for n in owned]
        for n in owned:
            if n in state:  # (Adagrad makes its state at once)
                optimizer.state[masters[n]] = _state_of(masters[n], state[n])
    return optimizer


def part_of(optimizer: torch.optim.Optimizer, masters: dict[str, torch.nn.Parameter], names: Names) -> torch.optim.Optimizer:
    """A copy of the optimizer that steps these masters only. It has all groups; some may be empty."""
    kind: Any = type(optimizer)
    part = object.__new__(_without_finalizer(kind))
    part.__dict__.update({k: v for k, v in optimizer.__dict__.items() if k != "step"})  # (schedulers wrap an instance's step)
    part.state = defaultdict(dict)
    part.param_groups = []
    for group in optimizer.param_groups:
        mine = [(p, masters[names[p]]) for p in group["params"] if names.get(p) in masters]
        part.param_groups.append({**group, "params": [master for _, master in mine]})
        for p, master in mine:
            if p in optimizer.state:
                part.state[master] = _state_of(master, optimizer.state[p])
    return part


@cache
def _without_finalizer(kind: Any) -> Any:
    """The class without ``__del__``, which would free what a copy shares with the original (DeepSpeed's optimizers for CPUs)."""
    if not hasattr(kind, "__del__"):
        return kind
    return type(kind.__name__, (kind,), {"__del__": lambda self: None, "__module__": kind.__module__})


def _state_of(master: torch.nn.Parameter, state: dict[str, Any]) -> dict[str, Any]:
    """A parameter's state for its master: tensors of the parameter's shape get the master's dtype and device."""
    return {
        k: v.to(master, copy=True).contiguous()
        if isinstance(v, torch.Tensor) and v.is_floating_point() and v.shape == master.shape
        else copy.deepcopy(v)
        for k, v in state.items()
    }


def spread_counts(optimizer: torch.optim.Optimizer) -> None:
    """Give all parameters the step count that DeepSpeed's FusedAdam keeps in the state of each group's last parameter only.

    In a ring of another size another parameter is the last.
    """
    for group in optimizer.param_groups if type(optimizer).__name__ == "FusedAdam" else ():
        states = [optimizer.state[p] for p in group["params"] if "step" in optimizer.state.get(p, ())]
        for state in states:
            state["step"] = max(s["step"] for s in states)


def fit_counts(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Convert the step count for this optimizer: torch's optimizers have a tensor, DeepSpeed's an int."""
    make, step = type(optimizer).__module__, state.get("step")
    if make.startswith("torch.optim") and isinstance(step, int):
        state["step"] = torch.tensor(float(step), dtype=torch.float32, device="cpu")
    elif make.startswith("deepspeed.") and isinstance(step, torch.Tensor):
        state["step"] = int(step)


def moved(value: Any, device: torch.device, scalars_too: bool) -> Any:
    """Move tensors to the device. Scalars stay on the CPU, as step counts of torch's optimizers do, unless ``scalars_too``."""
    if isinstance(value, torch.Tensor):
        return value.to(device).contiguous() if value.dim() or scalars_too else value
    if isinstance(value, dict):
        return {k: moved(v, device, scalars_too) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(moved(v, device, scalars_too) for v in value)
    return value
