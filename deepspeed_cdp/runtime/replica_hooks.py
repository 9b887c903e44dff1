"""Module hooks for ranks that keep all parameters (plan/replicated.py)."""

from collections.abc import Mapping
from typing import Any

import torch

from deepspeed_cdp.plan.constants import PERSISTENT
from deepspeed_cdp.plan.replicated import ReplicatedPlan
from deepspeed_cdp.runtime.param_hooks import BACKWARD, FORWARD, ParamHooks


class ReplicaHooks(ParamHooks):
    """``ParamHooks`` for parameters that stay in the replica: hooks execute the program, and bind nothing.

    ``param.data`` is a view of region ``R`` from the start to the end.
    """

    always_resident = True
    _elsewhere = "perhaps has another version"

    def __init__(self, *args: Any):
        super().__init__(*args)
        assert isinstance(self.executor.plan, ReplicatedPlan)
        offsets = self.executor.plan.replica[0]
        for i, pairs in self.slots.items():
            flat = self._bound[i] = self.executor.buffers.view("R", offsets[i], self.executor.plan.unit(i).p_bytes)
            for p, s in pairs:
                p.data = s.value(flat)

    def remove(self, refuse: bool = True) -> None:
        """Remove the hooks. If parameters have several versions, using them raises from now on."""
        stays = self.executor.newest or not self._handles or not refuse
        self._empty = {}
        super().remove(refuse)
        if not stays:
            for m in self._root.modules():
                if m is self._root or m._parameters:
                    m.register_forward_pre_hook(_refuse, prepend=True)
                    m.register_state_dict_pre_hook(_refuse)

    def released(self, p: torch.nn.Parameter) -> bool:
        """Whether the parameter may have another version than needed: in a pass its unit's version, between steps the newest."""
        if self.mode in (FORWARD, BACKWARD) and not self.any_order:
            return self._unit_of[p] not in self.executor.params
        return not (self.executor.newest or self.all_there)

    def bind(self, i: int, flat: torch.Tensor, moves: bool = False) -> None:
        """Nothing: parameters always point at the replica."""

    def unbind(self, i: int) -> None:
        """Parameters keep pointing at the replica."""
        if i in self._without_sums:
            self._drop_untrained_grads(i)

    def release_all(self) -> None:
        self.drop_grads()

    def forget_views(self) -> None:
        """Nothing: the replica's memory stays."""

    def _begin_saving(self, path: str = "") -> bool:
        return False  # tensors that autograd saves stay where they are

    def _receive_all(self) -> None:
        """Execute every unit's forward, which brings the replica to the versions that this micro-batch reads."""
        self.executor.end_forward()

    def keep_all(self, values: Mapping[int, torch.Tensor] | None = None) -> None:
        """From now on ``any_order``; the replica has the values."""
        self.any_order, self.in_pass = True, None

    def _bind_for_backward(self) -> None:
        """Nothing: the replica has the values."""

    def _end_hold(self) -> None:
        self.any_order, self.holds, self._has_held = self._stays, False, True

    @property
    def all_there(self) -> bool:
        return self.any_order and not self.executor.between_steps

    def end_backward(self) -> None:
        super().end_backward()
        for i in self.slots:
            if i not in self.visited and i != PERSISTENT and not self.any_order:
                self._check_unused(i)


def _refuse(module: torch.nn.Module, *_: Any) -> None:
    raise ValueError(
        f"a {type(module).__name__} was used after its engine failed, or was destroyed in the middle of a step, so its "
        "parameters are of several versions; build the model anew and load a checkpoint"
    )
