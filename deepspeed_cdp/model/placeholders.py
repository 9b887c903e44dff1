"""What stands in for a parameter: while its values are elsewhere, and in what autograd saves."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch


class Saved(NamedTuple):
    """A tensor that autograd saved inside a unit's buffer: rebuilt over the backward's buffer."""

    unit: int
    offset: int  # bytes
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype


class Elsewhere(NamedTuple):
    """What a user's own saved-tensor hooks, pushed outside of the unit, made of a tensor that is not in its buffer."""

    packed: Any
    unpack: Callable[[Any], torch.Tensor]


def placeholder(p: torch.nn.Parameter, shape: torch.Size | None = None) -> torch.Tensor:
    """What a parameter's data is while its values are elsewhere: right shape and dtype, one element, nan."""
    value = float("nan") if p.dtype.is_floating_point or p.dtype.is_complex else 0
    return torch.full((), value, dtype=p.dtype, device=p.device).expand(p.shape if shape is None else shape)


def is_placeholder(p: torch.nn.Parameter, empty: Mapping[torch.nn.Parameter, torch.Tensor]) -> bool:
    """Whether a parameter is away and has no element of its own."""
    return p in empty and p.numel() > 0 and p.data_ptr() == empty[p].data_ptr()


def refuse_use(modules: Sequence[torch.nn.Module], empty: Mapping[torch.nn.Parameter, torch.Tensor]) -> None:
    """Hooks for a module whose engine is gone: what would give nan in silence raises, as long as a placeholder is there."""

    def refuse(module: torch.nn.Module, *_: Any) -> None:
        if any(is_placeholder(p, empty) for p in module.parameters(recurse=False)):
            raise ValueError(
                f"a {type(module).__name__} was used after engine.destroy(), which leaves nothing in its "
                "parameters; take engine.module_state_dict() before, and load it into a new model"
            )

    for m in modules:
        m.register_forward_pre_hook(refuse, prepend=True)
        m.register_state_dict_pre_hook(refuse)
