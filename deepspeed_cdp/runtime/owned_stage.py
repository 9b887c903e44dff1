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
        early: by unit, the running sums that predict the next version, as ``sums``; None if nothing is predicted from them.
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

        def sums(unit: int, region: str, offset: int) -> dict[str, torch.Tensor]:
            flat = buffers.view(region, offset, plan.unit(unit).g_bytes)
            return {s.name: s.sum(flat) for s in layouts[unit].trained}

        def views(region: str, offsets: Mapping[int, int]) -> dict[int, dict[str, torch.Tensor]]:
            return {i: sums(i, region, offsets[i]) if layouts[i].trained else {} for i in units}

        def values(region: str, offsets: Mapping[int, int]) -> dict[str, torch.Tensor]:
            flats = {i: buffers.view(region, offsets[i], plan.unit(i).p_bytes) for i in units}
            return {s.name: s.value(flats[i]) for i in units for s in layouts[i].slots}

        copies = [[values(*place) for place in plan.written(version, stage)] for version in range(plan.slots(stage))]
        self.published = [written[0] for written in copies]
        self.corrected = [written[1] for written in copies] if plan.corrected_copies(stage) and not plan.predicts else None
        self.early: dict[int, dict[str, torch.Tensor]] | None = None
        own = views("O", plan.o_layout(stage))
        if plan.is_predicted(stage):
            self.corrected = [values(f"W{copy}", units) for copy in range(plan.corrected_copies(stage))]
            self.early = {i: own[i] for i in units if layouts[i].trained}
        self.sums = views("X", plan.x_layout(stage)[0]) if plan.rings > 1 or plan.sums_apart else own
        self.ring_sums = {i: list(sums.values()) for i, sums in own.items()}

    def cross_ring_views(self, unit: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """A unit's sums over all rings, and those of the own ring."""
        return list(self.sums[unit].values()), self.ring_sums[unit]
