"""Masters and updates of a stage."""

import copy
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from deepspeed_cdp.pipeline.weights import Unit

_EPSILON = 1e-6  # as in DeepSpeed's ZeRO-3


class Owner:
    """Masters and optimizer state of one stage's units, on the rank that updates them.

    Attributes:
        masters: fp32, whole, by name.
        optimizer: the user's, with this stage's masters only (a copy, since stages are updated one by one).
    """

    def __init__(
        self, stage: int, units: Sequence[Unit], optimizer: torch.optim.Optimizer, names: dict[nn.Parameter, str], clip: float
    ):
        """
        Args:
            optimizer: its groups hold the module's parameters; it is left as it is.
            names: of the module's parameters.
        """
        self.stage, self.units, self.clip = stage, list(units), clip
        self.masters: dict[str, nn.Parameter] = {}
        for unit in units:
            for name, value in zip(unit.names, unit.values[0]):
                self.masters[name] = nn.Parameter(value.detach().to(torch.float32, copy=True))
        self.optimizer = _part_of(optimizer, self.masters, names)
        self._grads: dict[int, list[list[Tensor]]] = {}  # step -> unit -> averaged gradients, fp32
        self._kept: set[str] = set()  # group options that step() itself writes

    @torch.no_grad()
    def average(self, step: int, sums: Sequence[Sequence[list[Tensor]]], ranks: int, keep: bool) -> Tensor:
        """Turn finished sums into averaged gradients: the mean over the step's micro-batches, fp32.

        Args:
            sums: by unit, then by stage that uses it (home first), one tensor per parameter; the home's are written to.
            keep: the home's memory is used again before the update.
        Returns:
            Their squared norm (float64, on the device).
        """
        total = torch.zeros((), dtype=torch.float64, device=self.units[0].flats[0].device)
        averaged = []
        for home, *others in sums:
            grads = [v.to(torch.float32, copy=keep) for v in home]
            for tied in others:
                for grad, more in zip(grads, tied):
                    grad.add_(more)
            for grad in grads:
                grad.div_(ranks)
                total += torch.linalg.vector_norm(grad, dtype=torch.float64).square()
            averaged.append(grads)
        self._grads[step] = averaged
        return total

    @torch.no_grad()
    def update(self, step: int, recorded: Sequence[dict[str, Any]], norm2: Tensor | None, version: int, skip: bool) -> None:
        """Make ``version``: opt(masters, averaged gradients), written in the parameters' dtype into its slot.

        Args:
            recorded: the options of the user's groups at that step.
            norm2: squared norm to clip by (float64), or None.
            skip: leave the masters as they are.
        """
        grads = self._grads.pop(step)
        factor = None
        if self.clip > 0 and norm2 is not None:
            factor = (1.0 / torch.clamp((norm2.sqrt() + _EPSILON) / self.clip, min=1.0)).to(torch.float32)
        for unit, averaged in zip(self.units, grads):
            for name, grad in zip(unit.names, averaged):
                self.masters[name].grad = grad.mul_(factor) if factor is not None else grad
        if not skip:
            with torch.enable_grad():
                self._step(recorded)
        for master in self.masters.values():
            master.grad = None
        self.publish(version)

    @torch.no_grad()
    def publish(self, version: int) -> None:
        """Write the masters into the slot of ``version``."""
        for unit in self.units:
            for name, value in zip(unit.names, unit.values[version % len(unit.flats)]):
                value.copy_(self.masters[name])

    def _step(self, recorded: Sequence[dict[str, Any]]) -> None:
        groups = self.optimizer.param_groups
        for group, options in zip(groups, recorded):
            group.update({k: v for k, v in options.items() if k not in self._kept})
        before = [dict(g) for g in groups]
        self.optimizer.step()
        for group, old in zip(groups, before):
            self._kept |= {k for k, v in group.items() if k != "params" and (k not in old or old[k] is not v)}


def options_of(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """The options of the groups, kept apart from later changes."""
    return [{k: v.clone() if isinstance(v, Tensor) else v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]


def _part_of(
    optimizer: torch.optim.Optimizer, masters: dict[str, nn.Parameter], names: dict[nn.Parameter, str]
) -> torch.optim.Optimizer:
    """A copy of the optimizer that has only these masters; all its groups are there, some perhaps empty."""
    part = object.__new__(type(optimizer))
    part.__dict__.update({k: v for k, v in optimizer.__dict__.items() if k != "step"})  # (schedulers wrap an instance's step)
    part.state = defaultdict(dict)
    part.param_groups = []
    for group in optimizer.param_groups:
        mine = [(p, masters[names[p]]) for p in group["params"] if names.get(p) in masters]
        part.param_groups.append({**group, "params": [master for _, master in mine]})
        for p, master in mine:
            if p in optimizer.state:  # some make their state at once
                part.state[master] = {
                    k: v.to(master, copy=True) if isinstance(v, Tensor) and v.shape == master.shape else copy.deepcopy(v)
                    for k, v in optimizer.state[p].items()
                }
    return part
