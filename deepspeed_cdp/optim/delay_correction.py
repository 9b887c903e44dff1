"""Estimates of the next version for stale readers (plan/delay_correction.py).

``predict`` lets the optimizer make its step, and takes it back. It needs to know where the optimizer keeps its momentum.
``extrapolate`` serves any optimizer, with one more copy of a unit during its update. It helps optimizers with a momentum of about
0.8 and more (Muon, Lion), and harms those without (Adagrad, RMSprop). NAdam's step leads already, by about what ``predict`` adds.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

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
        self, parameters: Sequence[nn.Parameter], gradients: Sequence[Tensor], options: Sequence[Mapping[str, Any]]
    ) -> list[Tensor]:
        """The next version, fp32, as far as it is known before the step: the optimizer makes that step, and takes it back.

        Args:
            gradients: of the parameters, averaged over the ranks so far.
            options: of each group.
        """
        optimizer, values = self._optimizer, [p.detach().clone() for p in parameters]
        own = [p.grad for p in parameters]
        states = [
            {k: x.clone() if isinstance(x, Tensor) else x for k, x in optimizer.state[p].items()}
            if p in optimizer.state
            else None
            for p in parameters
        ]
        before = [dict(group) for group in optimizer.param_groups]
        for group, given in zip(optimizer.param_groups, options):
            group.update(given)
        for p, gradient in zip(parameters, gradients):
            group, state = optimizer.param_groups[self._group_of[p]], optimizer.state.get(p) or {}
            if "step" in state and not isinstance(state["step"], Tensor):
                state["step"] = int(self._count(group, state))
            p.grad = self._leading(p, gradient)
        with torch.enable_grad():
            optimizer.step()
        ahead = [p.detach().clone() for p in parameters]
        torch._foreach_copy_([p.detach() for p in parameters], values)
        for p, state, grad in zip(parameters, states, own):
            p.grad = grad
            if state is None:
                optimizer.state.pop(p, None)
                continue
            for k in optimizer.state[p].keys() - state.keys():
                del optimizer.state[p][k]
            for k, x in state.items():
                if isinstance(x, Tensor):
                    optimizer.state[p][k].copy_(x)
                else:
                    optimizer.state[p][k] = x
        for group, old in zip(optimizer.param_groups, before):
            group.update(old)
        return [torch.where(x.isfinite(), x, value) for x, value in zip(ahead, values)]

    def _leading(self, p: Tensor, gradient: Tensor) -> Tensor:
        """m + w (g - m), with the momentum m as an average of gradients; g where there is none yet.

        A coupled decay of weights is part of m, and of g for this. The optimizer adds it, so it is not in the result. SGD's
        buffer times 1 - mu is below an average in the first steps.
        """
        group, state = self._optimizer.param_groups[self._group_of[p]], self._optimizer.state.get(p) or {}
        if "exp_avg" in state:
            beta1 = group["betas"][0]
            mean = state["exp_avg"] / (1.0 - beta1 ** self._count(group, state))
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

    def _count(self, group: dict[str, Any], state: dict[str, Any]) -> Any:
        """Steps so far: a number, or a tensor on a device for which the host does not wait."""
        count = state["step"]
        if type(self._optimizer).__name__ == "FusedAdam":  # DeepSpeed's counts in the state of a group's last parameter only
            count = max(self._optimizer.state[p].get("step", 0) for p in group["params"])
        return float(count) if not isinstance(count, Tensor) or count.device.type == "cpu" else count
