"""Placeholders for parameters whose values are not on this rank, and for tensors that autograd saves in a unit's buffer."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch


class SavedView(NamedTuple):
    """Stands for a tensor in a unit's buffer that autograd saved; the backward rebuilds it in the unit's buffer of that pass."""

    unit: int
    offset: int  # bytes
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype


class UserPacked(NamedTuple):
    """The result of a user's saved-tensor hooks, entered outside the unit, for a tensor that is not in its buffer."""

    packed: Any
    unpack: Callable[[Any], torch.Tensor]


def placeholder(p: torch.nn.Parameter, shape: torch.Size | None = None) -> torch.Tensor:
    """The data of a parameter without values: its shape and dtype, over one element, which is nan."""
    return Placeholders()(p, shape)


class Placeholders:
    """Makes data of parameters without values: shape and dtype over one element, which is nan.

    Attributes:
        elements: those in use, one for each dtype and device; parameters of one element, which scripts can write, have their own.
    """

    def __init__(self) -> None:
        self._elements: dict[tuple[torch.dtype, torch.device, int | None], torch.Tensor] = {}

    def __call__(self, p: torch.nn.Parameter, shape: torch.Size | None = None) -> torch.Tensor:
        shape = p.shape if shape is None else shape
        key = p.dtype, p.device, id(p) if shape.numel() == 1 else None
        element = self._elements.get(key)
        if element is None:
            value = float("nan") if p.dtype.is_floating_point or p.dtype.is_complex else 0
            element = self._elements[key] = torch.full((), value, dtype=p.dtype, device=p.device)
        return element.expand(shape)

    @property
    def elements(self) -> list[torch.Tensor]:
        return list(self._elements.values())


def is_placeholder(p: torch.nn.Parameter, empty: Mapping[torch.nn.Parameter, torch.Tensor]) -> bool:
    """Whether a parameter is a placeholder."""
    return p in empty and p.numel() > 0 and p.untyped_storage()._cdata == empty[p].untyped_storage()._cdata


def refuse_use(modules: Sequence[torch.nn.Module], empty: Mapping[torch.nn.Parameter, torch.Tensor]) -> None:
    """Add hooks to the modules of an engine that failed: they raise if a parameter is a placeholder, instead of computing nan."""

    def refuse(module: torch.nn.Module, *_: Any) -> None:
        if any(is_placeholder(p, empty) for p in module.parameters(recurse=False)):
            raise ValueError(
                f"a {type(module).__name__} was used after its engine failed, or was destroyed in the middle of a step, so its "
                "parameters are gone; build the model anew and load a checkpoint"
            )

    for m in modules:
        m.register_forward_pre_hook(refuse, prepend=True)
        m.register_state_dict_pre_hook(refuse)
