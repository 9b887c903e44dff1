"""Weights of a rank of the cyclic pipeline: copies and gradient sums.

A *unit* (``PipeSchedule.units``) is a stage's own trained parameters, or those of a tied group. A rank that uses a unit
keeps one to three copies of it as flat memory, of which ``param.data`` is a view during a pass. ``PipeSchedule.copy`` says which
version or correction each copy holds. For each of its stages that uses the unit the rank keeps one flat sum of the step's
gradients, to which autograd adds in place.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from deepspeed_cdp.model.flat_layout import FlatLayout, lay_out

Named = Sequence[tuple[str, nn.Parameter]]


class UnitWeights:
    """One rank's copies of a unit, and its sums by stage.

    Attributes:
        params: the trained parameters, in the layout's order; their ``data`` are views of a copy.
        flats: uint8, one per copy; sums: uint8, one per stage of this rank that uses the unit.
    """

    def __init__(self, named: Named, copies: int, stages: Sequence[int], sum_dtype: torch.dtype | None, device: torch.device):
        by_name = dict(named)
        self.layout: FlatLayout = lay_out(named, frozenset(by_name), sum_dtype)
        self.names = [s.name for s in self.layout.slots]
        self.params = [by_name[n] for n in self.names]

        def room(nbytes: int) -> Tensor:
            return torch.zeros(nbytes, dtype=torch.uint8, device=device)

        self.flats = [room(self.layout.p_bytes) for _ in range(copies)]
        self.values = [[s.value(flat) for s in self.layout.slots] for flat in self.flats]
        self.sums = {stage: room(self.layout.g_bytes) for stage in stages}
        self.grads = {stage: self.sum_views(flat) for stage, flat in self.sums.items()}
        for p, value in zip(self.params, self.values[0]):
            value.copy_(p.detach())
        self.bind(0)

    def sum_views(self, flat: Tensor) -> list[Tensor]:
        """The sums in ``flat`` (uint8, ``layout.g_bytes``), by parameter."""
        return [s.sum(flat) for s in self.layout.slots]

    def bind(self, copy: int) -> None:
        """Point the parameters at a copy, for forwards and for backwards that read saved parameters."""
        for p, value in zip(self.params, self.values[copy]):
            p.data = value

    def begin_backward(self, stage: int) -> None:
        """Let autograd add to the stage's sums in place, where the dtypes agree."""
        for p, view in zip(self.params, self.grads[stage]):
            p.grad = view if view.dtype == p.dtype else None

    def end_backward(self, stage: int) -> None:
        """Add gradients of another dtype than the sums', and clear ``grad``."""
        for p, view in zip(self.params, self.grads[stage]):
            if p.grad is not None and p.grad is not view:
                view.add_(p.grad)
            p.grad = None

    def restart(self, copy: int) -> None:
        """The version in this copy is version 0 from now on."""
        if copy:
            self.flats[0].copy_(self.flats[copy])
        self.bind(0)

    def fill(self, copy: int) -> None:
        """Write version 0 into a copy."""
        if copy:
            self.flats[copy].copy_(self.flats[0])
