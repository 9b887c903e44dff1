"""Estimates of the next version for stale readers (plan/delay_correction.py).

``predict`` lets a copy of the optimizer make its step. It needs to know where the optimizer keeps its momentum.
``extrapolate`` serves any optimizer, with one more copy of a unit during its update. It helps optimizers with a momentum of about
0.8 and more (Muon, Lion), and harms those without (Adagrad, RMSprop). NAdam's step leads already, by about what ``predict`` adds.
"""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from deepspeed_cdp.optim.state import part_of
from deepspeed_cdp.plan.delay_correction import DelayCorrection, parsed

_ADAM = ("torch.optim.adam.Adam", "torch.optim.adamw.AdamW")
_DEEPSPEED = ("deepspeed.ops.adam.fused_adam.FusedAdam", "deepspeed.ops.adam.cpu_adam.DeepSpeedCPUAdam")
_FAMILIES = dict.fromkeys(_ADAM + _DEEPSPEED, "adam") | {
    "torch.optim.nadam.NAdam": "nadam",
    "torch.optim.adamax.Adamax": "adamax",
    "torch.optim.sgd.SGD": "sgd",
}
_AUTO = {"adam": "predict", "adamax": "predict", "muon": "extrapolate"}  # what docs/learning.md measures; others: none


def family(optimizer: torch.optim.Optimizer) -> str:
    """The kind of optimizer: "adam", "nadam", "adamax" or "sgd", whose momentum ``predict`` knows; "muon" by its name; or ""."""
    name = type(optimizer).__name__
    return _FAMILIES.get(f"{type(optimizer).__module__}.{name}", "muon" if "muon" in name.lower() else "")


def resolve(setting: str | Mapping[str, Any], optimizer: torch.optim.Optimizer, threshold: int) -> DelayCorrection:
    """The correction for this optimizer under K = ``threshold``; without stale readers (K = 0) none.

    Raises:
        ValueError: ``predict`` is set, and this optimizer's momentum is not known.
    """
    if threshold == 0:
        return DelayCorrection()
    known = family(optimizer)
    correction = chosen(setting, known)
    if correction.method == "predict" and known not in _FAMILIES.values():
        raise ValueError(
            f"cyclic.delay_correction is 'predict' and the optimizer {type(optimizer).__name__}, whose next step is not known; "
            f"allowed are Adam, AdamW, NAdam, Adamax, SGD and DeepSpeed's Adams; use 'extrapolate' or 'auto'"
        )
    return correction


def chosen(setting: str | Mapping[str, Any], family: str) -> DelayCorrection:
    """The correction that a setting means for a family of optimizers."""
    return DelayCorrection(_AUTO.get(family, "none")) if setting == "auto" else parsed(setting)


class Corrector:
    """Makes the estimates for an optimizer's parameters."""

    def __init__(self, correction: DelayCorrection, optimizer: torch.optim.Optimizer):
        self.correction, self._optimizer = correction, optimizer
        self._group_of = {p: k for k, group in enumerate(optimizer.param_groups) for p in group["params"]}

    @torch.no_grad()
    def extrapolate(self, parameters: Sequence[Tensor], before: Sequence[Tensor]) -> list[Tensor]:
        """The estimates, fp32, from the values before and after the last step."""
        moves = torch._foreach_sub(list(parameters), list(before))
        torch._foreach_mul_(moves, self.correction.updates)
        torch._foreach_add_(moves, list(parameters))
        return list(moves)

    @torch.no_grad()
    def predict(
        self,
        parameters: Sequence[nn.Parameter],
        gradients: Sequence[Tensor],
        options: Sequence[Mapping[str, Any]],
        values: Sequence[Tensor] | None = None,
    ) -> list[Tensor]:
        """The next version, fp32, as far as it is known before the step: a copy of the optimizer makes that step.

        Args:
            gradients: of the parameters, averaged over the ranks so far.
            options: of each group.
            values: of the parameters, if they do not hold them themselves (masters.py).
        """
        values = [p.detach() for p in parameters] if values is None else values
        names = {p: str(i) for i, p in enumerate(parameters)}
        trials = [nn.Parameter(value.clone()) for value in values]
        trial = part_of(self._optimizer, dict(zip(names.values(), trials)), names)
        trial.__dict__.update(_optimizer_step_pre_hooks=OrderedDict(), _optimizer_step_post_hooks=OrderedDict())  # the script's
        for group, given in zip(trial.param_groups, options):
            group.update(given)
        for p, value, q, gradient in zip(parameters, values, trials, gradients):
            group, state = trial.param_groups[self._group_of[p]], trial.state.get(q) or {}
            count = self._count(self._group_of[p], state) if "step" in state else 0
            if "step" in state and not isinstance(state["step"], Tensor):
                state["step"] = int(count)
            q.grad = self._leading(group, state, count, value, gradient)
        with torch.enable_grad():
            trial.step()
        return [torch.where(q.isfinite(), q, value).detach() for value, q in zip(values, trials)]

    def _leading(self, group: dict[str, Any], state: dict[str, Any], count: Any, p: Tensor, gradient: Tensor) -> Tensor:
        """m + w (g - m), with the momentum m as an average of gradients; g where there is none yet.

        A coupled decay of weights is part of m, and of g for this. The optimizer adds it, so it is not in the result. SGD's
        buffer times 1 - mu is below an average in the first steps.

        Args:
            count: steps so far.
        """
        if "exp_avg" in state:
            beta1 = group["betas"][0]
            mean = state["exp_avg"] / (1.0 - beta1**count)
        elif state.get("momentum_buffer") is not None:
            beta1 = group["momentum"]
            mean = state["momentum_buffer"] * (1.0 - beta1)
        else:
            return gradient
        decay = self._decay_in_gradient(group)
        gradient = -gradient if group.get("maximize") else gradient
        lead = torch.lerp(mean, gradient.add(p, alpha=decay) if decay else gradient, self.correction.lead(beta1))
        lead = lead.sub(p, alpha=decay) if decay else lead
        return -lead if group.get("maximize") else lead

    def _decay_in_gradient(self, group: dict[str, Any]) -> float:
        """The decay of weights that the optimizer adds to the gradient."""
        optimizer = self._optimizer
        decoupled = group.get("decoupled_weight_decay") or getattr(optimizer, "adam_w_mode", type(optimizer).__name__ == "AdamW")
        return 0.0 if decoupled else group.get("weight_decay", 0.0)

    def _count(self, group: int, state: dict[str, Any]) -> Any:
        """Steps so far: a number, or a tensor on a device for which the host does not wait."""
        count = state["step"]
        if type(self._optimizer).__name__ == "FusedAdam":  # DeepSpeed's counts in the state of a group's last parameter only
            every = self._optimizer.param_groups[group]["params"]
            count = max(self._optimizer.state[p].get("step", 0) for p in every)
        return float(count) if not isinstance(count, Tensor) or count.device.type == "cpu" else count
