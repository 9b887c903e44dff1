"""The tensors behind the plan's regions, and cached views of them."""

from collections.abc import Mapping

import torch

from deepspeed_cdp.transport.base import Transport


class Buffers:
    """One rank's flat buffers (uint8, 1-D), cut from one allocation of the transport; laid out alike on all ranks.

    Attributes:
        regions: by name (see ``Plan.regions``).
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
        """Where this byte lies in the allocation, here and on every other rank."""
        return self._start[region] + offset

    def view(self, region: str, offset: int, nbytes: int) -> torch.Tensor:
        """The bytes of one message; the same tensor object every time, so that views of it can be cached too."""
        key = (region, offset, nbytes)
        view = self._views.get(key)
        if view is None:
            view = self._views[key] = self.regions[region][offset : offset + nbytes]
        return view

    def nbytes(self) -> int:
        """Everything this rank holds for hand-offs, finished sums and published copies."""
        return self.arena.numel()
