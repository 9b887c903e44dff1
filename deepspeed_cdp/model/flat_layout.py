"""The flat layout of a unit: offsets of its parameters and gradient sums in one message."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from deepspeed_cdp.plan.interval_alloc import aligned
from deepspeed_cdp.plan.unit_schedule import Unit


@dataclass(frozen=True)
class Slot:
    """One parameter inside its unit's flat buffer.

    Attributes:
        name: from ``named_parameters()``.
        shape, dtype: of the parameter as the module sees it.
        offset: bytes from the start of the flat parameters.
        sum_offset: bytes from the start of the flat gradient sums, or -1 for a parameter that is not trained.
        sum_dtype: of the gradient sum.
    """

    name: str
    shape: torch.Size
    dtype: torch.dtype
    offset: int
    sum_offset: int
    sum_dtype: torch.dtype

    def value(self, flat: torch.Tensor) -> torch.Tensor:
        """The parameter as a view of its unit's flat parameters (uint8, 1-D)."""
        return _view(flat, self.offset, self.dtype, self.shape)

    def sum(self, flat: torch.Tensor) -> torch.Tensor:
        """The gradient sum as a view of its unit's flat sums (uint8, 1-D)."""
        assert self.sum_offset >= 0, self.name
        return _view(flat, self.sum_offset, self.sum_dtype, self.shape)


@dataclass(frozen=True)
class FlatLayout:
    """All slots of one unit. Trained parameters come first, so that the sums are contiguous too."""

    slots: tuple[Slot, ...]
    p_bytes: int
    g_bytes: int

    @property
    def trained(self) -> tuple[Slot, ...]:
        return tuple(s for s in self.slots if s.sum_offset >= 0)


def lay_out(parameters: Iterable[tuple[str, torch.Tensor]], trained: frozenset[str], sum_dtype: torch.dtype | None) -> FlatLayout:
    """Assigns offsets to one unit's parameters.

    Args:
        parameters: (name, tensor); only shape and dtype are read.
        trained: names of parameters with gradients and optimizer state.
        sum_dtype: dtype of the gradient sums; None: that of each parameter.
    Raises:
        ValueError: a trained parameter is complex.
    """
    p_bytes = g_bytes = 0
    slots = []
    for name, p in sorted(parameters, key=lambda item: item[0] not in trained):  # stable
        train = name in trained
        dtype = sum_dtype or p.dtype
        if train and p.dtype.is_complex:
            raise ValueError(
                f"parameter {name!r} is complex, but masters are fp32; make it a real parameter and use "
                "torch.view_as_complex in the forward, or freeze it"
            )
        slots.append(Slot(name, p.shape, p.dtype, p_bytes, g_bytes if train else -1, dtype))
        elements = max(p.numel(), 1)  # so that no message is empty
        p_bytes += aligned(elements * p.dtype.itemsize)
        g_bytes += aligned(elements * dtype.itemsize) if train else 0
    return FlatLayout(tuple(slots), p_bytes, g_bytes)


def plan_unit(modules: tuple[str, ...], stage: int, layout: FlatLayout) -> Unit:
    """The plan's unit: names and sizes."""
    name = " to ".join(dict.fromkeys((modules[0], modules[-1]))) if modules else ""
    trained = tuple(s.name for s in layout.trained)
    frozen = tuple(s.name for s in layout.slots if s.sum_offset < 0)
    return Unit(name, stage, trained, frozen, layout.p_bytes, layout.g_bytes, modules)


def _view(flat: torch.Tensor, offset: int, dtype: torch.dtype, shape: torch.Size) -> torch.Tensor:
    return flat[offset : offset + shape.numel() * dtype.itemsize].view(dtype).view(shape)
