"""The owned stage's published parameters and finished gradient sums, as views of a rank's buffers."""

from collections.abc import Mapping

import torch

from deepspeed_cdp.model.flat_layout import FlatLayout
from deepspeed_cdp.runtime.state import RankState


class OwnedStage:
    """Views of the owned stage's parameters by name.

    Attributes:
        published: by published copy, every parameter in its own dtype.
        corrected: the same of the corrections that stale readers read; None if these read the versions themselves.
        sums: by unit, the finished gradient sum of every trained parameter, over all rings, in the dtype of sums.
        ring_sums: by unit, the sums of this ring alone, in the same order; the same tensors if there is one ring.
    """

    def __init__(self, state: RankState, layouts: Mapping[int, FlatLayout]):
        """
        Args:
            layouts: by unit index, PERSISTENT included.
        """
        plan, stage, buffers = state.plan, state.owned_stage, state.buffers
        units = plan.v_layout(stage)[0]

        def views(region: str, offsets: Mapping[int, int]) -> dict[int, dict[str, torch.Tensor]]:
            return {
                i: {
                    s.name: s.sum(buffers.view(region, offsets[i], plan.unit(i).g_bytes))
                    for s in layouts[i].slots
                    if s.sum_offset >= 0
                }
                for i in units
            }

        def values(region: str, offsets: Mapping[int, int]) -> dict[str, torch.Tensor]:
            flats = {i: buffers.view(region, offsets[i], plan.unit(i).p_bytes) for i in units}
            return {s.name: s.value(flats[i]) for i in units for s in layouts[i].slots}

        copies = [[values(*place) for place in plan.written(copy, stage)] for copy in range(plan.copies)]
        self.published = [written[0] for written in copies]
        self.corrected = [written[1] for written in copies] if plan.corrects else None
        own = views(plan.o_region, plan.o_layout(stage))
        self.sums = own if plan.rings == 1 else views("X", plan.x_layout(stage)[0])
        self.ring_sums = {i: list(sums.values()) for i, sums in own.items()}

    def cross_ring_views(self, unit: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """A unit's sums over all rings, and those of the own ring."""
        return list(self.sums[unit].values()), self.ring_sums[unit]
