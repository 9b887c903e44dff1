"""A rank's communication buffers: one allocation of the transport, cut into the plan's regions."""

from collections.abc import Mapping, Sequence
from itertools import accumulate

import torch

from deepspeed_cdp.transport.base import Transport


class Buffers:
    """One rank's regions (uint8, 1-D). The constructor is collective.

    Args:
        layouts: by rank of the ring, bytes by name (``Plan.regions``).
        rank: this one.
    Attributes:
        arena: the whole allocation.
        regions: tensors by name.
    """

    def __init__(self, layouts: Sequence[Mapping[str, int]], rank: int, transport: Transport):
        mine = layouts[rank]
        self.arena = transport.allocate(sum(mine.values()))
        self._starts = [dict(zip(sizes, accumulate(sizes.values(), initial=0))) for sizes in layouts]
        self.regions = {name: self.arena[start : start + mine[name]] for name, start in self._starts[rank].items()}
        self._views: dict[tuple[str, int, int], torch.Tensor] = {}

    def address(self, rank: int, region: str, offset: int) -> int:
        """Offset in bytes of a region's byte in the allocation of a rank."""
        return self._starts[rank][region] + offset

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
