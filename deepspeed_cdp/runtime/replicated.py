"""Where every rank keeps all parameters (plan/replicated.py): the walk's one new action, and hooks that leave parameters in
place.

``param.data`` is a view of the replica (region ``R``) from the start to the end. The hooks of ``ParamHooks`` still say how far to
walk: a unit's new version is there before its forward, its running gradient sum before its backward.
"""

from typing import Any

import torch

from deepspeed_cdp.plan.actions import Action, Kind
from deepspeed_cdp.plan.constants import PERSISTENT
from deepspeed_cdp.plan.replicated import ReplicatedPlan
from deepspeed_cdp.runtime.executor import Executor
from deepspeed_cdp.runtime.param_hooks import BACKWARD, FORWARD, ParamHooks
from deepspeed_cdp.runtime.program import ActionLocation
from deepspeed_cdp.transport.base import Ticket


class ReplicaExecutor(Executor):
    """One rank's walk through its program; see ``Executor``."""

    plan: ReplicatedPlan

    def __init__(self, *args: Any):
        super().__init__(*args)
        self._do[Kind.REFRESH_PARAM] = self._apply_version
        self._owned = frozenset(self.plan.members(self.schedule.owned(self.rank)))

    def begin(self) -> None:
        """Start from the version that all replicas have."""
        super().begin()
        self._came: dict[int, Any] = {}  # unit -> the message that brought its present version, to be passed on

    def spread(self) -> None:
        """Collective, between steps: every rank's replica gets what the owners have published."""
        where = f"rank {self.transport.label}, step {self.global_step}, bringing replicas up to date"
        _, starts, _ = self.plan.replica
        for stage, start in enumerate(starts):
            owner = self.schedule.owner(stage)
            nbytes = self.plan.v_layout(stage)[1]
            flat = self.buffers.regions["R"][start : start + nbytes]
            if self.plan.staged and owner == self.rank:
                flat.copy_(self.buffers.regions["V0"][:nbytes])
            if self.schedule.ranks * self.plan.rings > 1 and nbytes:
                self.transport.broadcast(flat, owner, where)

    def _kept_under(self, region: str, offset: int) -> str:
        return f"{region}{offset}" if region in "LR" else region  # where each unit has one place, and there are many

    def _copy_readers(self, a: Action, unit: int | None) -> list[Ticket]:
        if self.plan.staged:
            return super()._copy_readers(a, unit)
        units = self._owned if unit is None else (unit,)
        return [t for i in units for t in self._readers("R", self.plan.replica[0][i], self.plan.unit(i).p_bytes)]

    def _apply_version(self, a: Action) -> None:
        """The replica gets its next version of a unit: it has landed there, or is copied into it."""
        region, view = self._place(a)
        if a.peer is not None:
            self._came[a.unit] = self._await(a)
        else:
            self.transport.after(self._published_at.get((a.unit, 0)))
        if region != "R":
            for ticket in self._readers("R", a.into[1], a.nbytes):
                ticket.wait(ActionLocation(self, a))
            self.buffers.view("R", a.into[1], a.nbytes).copy_(view)
            self.transport.moved_on()
        if a.peer is None:
            self._own_read_end = self.transport.mark()

    def _read(self, a: Action) -> None:
        if not a.backward:
            if a.unit in self._owned and not self.plan.staged:
                self.transport.after(self._published_at.get((a.unit, 0)))  # which was written in place, beside the passes
            self.params[a.unit] = self._place(a)[1]
        self._posts(a)

    def _relay(self, a: Action) -> None:
        self._push(a, self._came.pop(a.unit, None))

    def _done(self, a: Action) -> None:
        if self.schedule.ranks == 1 and a.backward:  # summed in place, not passed on
            self._add(a.unit)
        self.params.pop(a.unit, None)
        self.on_release(a.unit)
        if a.unit in self._owned:
            self._own_read_end = self.transport.mark()
        self._posts(a)

    @property
    def newest(self) -> bool:
        """Whether the replica is the newest version as a whole: right after a flush, or before the first step."""
        return self.step == 0 and self.between_steps


class ReplicaHooks(ParamHooks):
    """Walks as a module's units are used; their parameters stay where they are, in the replica. See ``ParamHooks``."""

    executor: ReplicaExecutor

    def __init__(self, *args: Any):
        super().__init__(*args)
        offsets = self.executor.plan.replica[0]
        for i, pairs in self.slots.items():
            flat = self._bound[i] = self.executor.buffers.view("R", offsets[i], self.executor.plan.unit(i).p_bytes)
            for p, s in pairs:
                p.data = s.value(flat)

    def remove(self) -> None:
        """Take the hooks off; using parameters of several versions is refused from now on."""
        stays = self.executor.newest or not self._handles
        self._empty = {}
        super().remove()
        if not stays:
            for m in self._root.modules():
                if m is self._root or m._parameters:
                    m.register_forward_pre_hook(_refuse, prepend=True)
                    m.register_state_dict_pre_hook(_refuse)

    def released(self, p: torch.nn.Parameter) -> bool:
        """Whether the parameter may lack the version that is wanted now: in a pass its unit's, between steps the newest."""
        if self.mode in (FORWARD, BACKWARD):
            return self._unit_of[p] not in self.executor.params
        return not self.executor.newest

    def bind(self, i: int, flat: torch.Tensor) -> None:
        """They are."""

    def unbind(self, i: int) -> None:
        """They stay."""
        self._drop_unwanted(i)

    def release_all(self) -> None:
        for pairs in self.slots.values():
            for p, _ in pairs:
                p.grad = None

    def forget_views(self) -> None:
        """None is of memory that goes."""

    def _begin_saving(self) -> bool:
        return False  # what autograd saves stays

    def _add(self, i: int, flat: torch.Tensor, first: bool) -> None:
        if i != PERSISTENT and i not in self.visited and any(p.grad is not None for p, _ in self.slots[i]):
            raise self._read_outside(i)
        super()._add(i, flat, first)

    def end_backward(self) -> None:
        super().end_backward()
        for i, pairs in self.slots.items():
            if i not in self.visited and any(p.grad is not None and s.sum_offset >= 0 for p, s in pairs):
                raise self._read_outside(i)

    def _read_outside(self, i: int) -> ValueError:
        name, step = self.executor.plan.unit(i).name, self.executor.global_step
        return ValueError(
            f"parameters of {name!r} got gradients in step {step}, but its module was not called in the forward, "
            "so they were read from outside it, perhaps at another version; list the modules that are called in "
            f"cyclic.units, without {name!r}"
        )


def _refuse(module: torch.nn.Module, *_: Any) -> None:
    raise ValueError(
        f"a {type(module).__name__} was used after engine.destroy(), which came without engine.flush(), so its "
        "parameters are of several versions; call engine.flush() on every rank before"
    )
