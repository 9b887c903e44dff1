"""A rank's communication buffers: one allocation of the transport, cut into the plan's regions."""

from collections.abc import Mapping

import torch

from deepspeed_cdp.transport.base import Transport


class Buffers:
    """One rank's regions (uint8, 1-D). The constructor is collective; all ranks have the same layout.

    Args:
        regions: bytes by name (``Plan.regions``).
    Attributes:
        arena: the whole allocation.
        regions: tensors by name.
    """

    def __init__(self, regions: Mapping[str, int], transport: Transport):
        self.arena = transport.allocate(sum(regions.values()))
        self.regions: dict[str, torch.Tensor] = {}
        self._start: dict[str, int] = {}
        start = 0
        for name, nbytes in regions.items():
            self.regions[name], self._start[name] = self.arena[start : start + nbytes], start
            start += nbytes
        self._views: dict[tuple[str, int, int], torch.Tensor] = {}

    def address(self, region: str, offset: int) -> int:
        """Offset in bytes of a region's byte in the allocation, the same on all ranks."""
        return self._start[region] + offset

    def view(self, region: str, offset: int, nbytes: int) -> torch.Tensor:
        """``nbytes`` bytes of a region (uint8, 1-D). Equal arguments give the same tensor object, whose views callers cache."""
        key = (region, offset, nbytes)
        view = self._views.get(key)
        if view is None:
            view = self._views[key] = self.regions[region][offset : offset + nbytes]
        return view

    def nbytes(self) -> int:
        """Size of the allocation in bytes."""
        return self.arena.numel()
