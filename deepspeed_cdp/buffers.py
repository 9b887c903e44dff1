"""The tensors behind the plan's regions, and cached views of them."""

import torch

from .layout import aligned
from .plan import Plan


class Buffers:
    """One rank's flat buffers (uint8, 1-D), allocated once.

    Attributes:
        regions: ``P`` parameters in flight; ``G`` gradient sums in flight; ``H0``, ``H1`` held parameters of two rounds in turn;
            ``GH`` held sums in flight; ``O`` finished sums of the owned stage; ``V0`` (and ``V1``) its published versions.
    """

    def __init__(self, plan: Plan, rank: int, device: torch.device):
        stage, alone = plan.schedule.owned(rank), plan.schedule.ranks == 1
        sizes = {"P": plan.p_layout[2], "G": plan.g_layout[2], "O": plan.o_layout(stage)[1]}
        if plan.held and not alone:
            sizes |= {"H0": aligned(plan.held.p_bytes), "H1": aligned(plan.held.p_bytes), "GH": aligned(plan.held.g_bytes)}
        sizes |= {f"V{c}": plan.v_layout(stage)[1] for c in range(plan.copies)}
        self.regions = {name: torch.zeros(nbytes, dtype=torch.uint8, device=device) for name, nbytes in sizes.items()}
        self._views: dict[tuple[str, int, int], torch.Tensor] = {}

    def view(self, region: str, offset: int, nbytes: int) -> torch.Tensor:
        """The bytes of one message; the same tensor object every time, so that views of it can be cached too."""
        key = (region, offset, nbytes)
        view = self._views.get(key)
        if view is None:
            view = self._views[key] = self.regions[region][offset:offset + nbytes]
        return view

    def nbytes(self) -> int:
        """Everything this rank holds for hand-offs, finished sums and published copies."""
        return sum(t.numel() for t in self.regions.values())
