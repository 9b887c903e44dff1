"""DeepSpeed's functions that read and write parameters between steps, for parameters of a cyclic engine.

``deepspeed.zero.GatheredParameters`` reads ``ds_id``, ``all_gather`` and ``partition`` of a parameter.
``deepspeed.utils.safe_get_full_fp32_param`` and similar functions call methods of its ``_z3_optimizer``. ``Access`` sets these
attributes on the parameters of a cyclic engine and replaces nothing of DeepSpeed. Tools that look for ``ds_id`` treat such
parameters as ZeRO-3's.

Every function is a collective, runs between steps, and flushes first. The exception is ``GatheredParameters`` inside a training
forward (TRL's fused head and loss): there it executes the pass of the parameters' module.
"""

import types
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch
from deepspeed.runtime.zero.parameter_offload import ZeROOrderedDict
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus, _init_external_params

from deepspeed_cdp.model.flat_layout import aligned
from deepspeed_cdp.model.remains import Remains
from deepspeed_cdp.plan.constants import PERSISTENT
from deepspeed_cdp.runtime.param_hooks import IDLE
from deepspeed_cdp.runtime.runtime import Runtime

ZeroParam: TypeAlias = Any  # a torch.nn.Parameter with the attributes below

_ATTRIBUTES = (
    "ds_id",
    "ds_status",
    "ds_shape",
    "ds_numel",
    "ds_persist",
    "ds_process_group",
    "ds_active_sub_modules",
    "ds_enable_sanity_checks",
    "ds_summary",
    "all_gather",
    "partition",
    "_z3_optimizer",
)


_MODULE_ATTRIBUTES = ("_external_params", "ds_external_parameters", "all_parameters")  # of _init_external_params


class Access:
    """Gives one engine's parameters the attributes and methods that ZeRO-3's parameters have."""

    _attached: "weakref.WeakSet[Access]" = weakref.WeakSet()  # torch.Tensor has ds_status while one is attached

    def __init__(self, runtime: Runtime, group: Any, destroy: Callable[[], Callable[[], None] | None]):
        """
        Args:
            group: the process group that ``GatheredParameters`` broadcasts over.
            destroy: a weak reference to the engine's method.
        """
        self.runtime, self._group, self.destroy = runtime, group, destroy
        self._names: dict[ZeroParam, str] = {p: n for n, p in runtime.module.named_parameters()}
        self._owner = {
            s.name: runtime.plan.schedule.owner(runtime.plan.unit(i).stage)
            for i, pairs in runtime.param_hooks.slots.items()
            for _, s in pairs
        }

    def attach(self) -> None:
        """Give the parameters ZeRO-3's attributes."""
        for number, (p, name) in enumerate(self._names.items()):
            p.ds_id, p.ds_shape, p.ds_numel, p.ds_persist = number, p.shape, p.numel(), False
            p.ds_process_group, p.ds_active_sub_modules, p.ds_enable_sanity_checks = self._group, set(), False
            p.ds_summary = lambda number=number, name=name, p=p: {"id": number, "name": name, "shape": tuple(p.shape)}
            p.all_gather, p.partition, p._z3_optimizer = partial(self._all_gather, p), partial(self._partition, p), self
        # If saved tensors pass through hooks, an autograd.Function gets new tensor objects instead of the parameters. TRL's fused
        # head reads their ds_status; ordinary tensors are available.
        torch.Tensor.ds_status = ZeroParamStatus.AVAILABLE  # type: ignore[attr-defined]
        self._attached.add(self)
        self.update_status(self.runtime.is_whole)
        _init_external_params(self.runtime.module)

    def detach(self) -> None:
        """Remove them; idempotent."""
        for p in self._names:
            for key in _ATTRIBUTES:
                p.__dict__.pop(key, None)
        for key in _MODULE_ATTRIBUTES:
            self.runtime.module.__dict__.pop(key, None)
        self._attached.discard(self)
        if not self._attached and "ds_status" in torch.Tensor.__dict__:
            del torch.Tensor.ds_status  # type: ignore[attr-defined]

    def leave(self) -> None:
        """After a flush and ``detach``: parameters that are whole stay so, and the others' values stay with their owners.

        With tensor parallelism each rank keeps all of its shards.
        """
        runtime = self.runtime
        if runtime.transport.ring_map.tensor > 1:  # what stays would be gathered over all ranks
            runtime.gather()
        if runtime.is_whole or runtime.executor.residency.whole_after_flush:
            for p in self._names:
                p.data = p.data.clone()  # the buffers go
            return
        sources = {p: runtime.transport.world_rank_of(self._owner[name], 0) for p, name in self._names.items()}
        mine = [(p, name) for p, name in self._names.items() if sources[p] == runtime.transport.world_rank]
        values = {p: self._value(name).to(runtime.device, p.dtype) for p, name in mine}
        Remains(runtime.module, values, sources, runtime.device)

    def update_status(self, whole: bool) -> None:
        """``ds_status`` of every parameter: available if ``whole``, or if GatheredParameters has given it out."""
        whole = whole or self.runtime.param_hooks.always_resident and self.runtime.param_hooks.mode != IDLE  # there, in passes
        self._update(self._names, whole)

    def update_persistent(self) -> None:
        """``ds_status`` of persistent parameters, which are there from a forward to the end of its backward."""
        self._update([p for p, _ in self.runtime.param_hooks.slots[PERSISTENT]], False)

    def _update(self, params: Iterable[ZeroParam], whole: bool) -> None:
        runtime = self.runtime
        there = set(runtime.borrowed)
        if PERSISTENT in runtime.executor.params:
            there.update(p for p, _ in runtime.param_hooks.slots[PERSISTENT])
        for p in params:
            p.ds_status = ZeroParamStatus.AVAILABLE if whole or p in there else ZeroParamStatus.NOT_AVAILABLE

    def _name(self, p: ZeroParam) -> str:
        return self._names[p]

    # ---- for GatheredParameters -----------------------------------------------------------------------------------------
    @torch.no_grad()
    def _all_gather(self, param: ZeroParam, param_list: Sequence[ZeroParam] | None = None, **_: Any) -> None:
        """Give the parameters their values, in their own dtype, in memory of their own, on every rank.

        In the middle of a step nothing happens to parameters that are there, those of the unit in use: after ``zero.Init``
        torch's linear function is DeepSpeed's, which asks in every backward.

        Raises:
            ValueError: in the middle of a step, except inside a training forward, where they are their module's pass of the plan.
        """
        mine, others = self._split(param, param_list)
        if others:
            others[0].all_gather(param_list=others)
        runtime = self.runtime
        if runtime.param_hooks.borrow(mine) or not runtime.between_steps and not any(map(runtime.param_hooks.released, mine)):
            return
        self._flush_for("GatheredParameters")
        for owner in range(runtime.plan.schedule.ranks):  # one message per owner
            theirs = [p for p in mine if self._owner[self._name(p)] == owner]
            starts, nbytes = [], 0
            for p in theirs:
                starts.append(nbytes)
                nbytes += aligned(p.numel() * p.dtype.itemsize)
            if not nbytes:
                continue
            flat = torch.empty(nbytes, dtype=torch.uint8, device=runtime.device)
            views = [flat[at : at + p.numel() * p.dtype.itemsize].view(p.dtype).view(p.shape) for p, at in zip(theirs, starts)]
            if owner == runtime.executor.rank:
                for p, view in zip(theirs, views):
                    view.copy_(self._value(self._name(p)))
            runtime.transport.broadcast(flat, owner, self._where("GatheredParameters"))
            for p, view in zip(theirs, views):
                runtime.borrowed[p] = p.data  # for _partition
                p.data = view
        self.update_status(runtime.is_whole)

    @torch.no_grad()
    def _partition(
        self, param: ZeroParam, param_list: Sequence[ZeroParam] | None = None, has_been_updated: bool = False, **_: Any
    ) -> None:
        """Release the values; first write them into the masters if one rank has broadcast new ones (``has_been_updated``)."""
        mine, others = self._split(param, param_list)
        if has_been_updated and self.runtime.param_hooks.mode != IDLE:
            raise ValueError(
                f"GatheredParameters of {self._name(param)!r} with a modifier_rank is inside a training forward, "
                "where what it writes would be lost; write parameters between steps"
            )
        if others:
            others[0].partition(param_list=others, has_been_updated=has_been_updated)
        self.runtime.param_hooks.give_back(mine)
        borrowed = [p for p in mine if p in self.runtime.borrowed]
        for p in borrowed if has_been_updated else ():
            if p.data.shape != p.ds_shape:
                raise ValueError(
                    f"{self._name(p)} is {tuple(p.data.shape)} at the end of GatheredParameters, but {tuple(p.ds_shape)} "
                    "in the plan; resize parameters before deepspeed.initialize()"
                )
        for p in borrowed:
            before, value = self.runtime.borrowed.pop(p), p.data
            if has_been_updated:
                self._write(self._name(p), value)
                if self.runtime.is_whole:
                    before.copy_(value)
            p.data = before
        if has_been_updated and borrowed:
            self.runtime.publish()
        self.update_status(self.runtime.is_whole)

    def _split(self, param: ZeroParam, params: Sequence[ZeroParam] | None) -> tuple[list[ZeroParam], list[ZeroParam]]:
        """This engine's parameters and others'."""
        params = [param] if params is None else params
        return [p for p in params if p in self._names], [p for p in params if p not in self._names]

    # ---- for safe_get_* and safe_set_* ----------------------------------------------------------------------------------
    @torch.no_grad()
    def get_full_hp_param(self, param: ZeroParam, optim_state_key: str | None = None) -> torch.Tensor:
        """The fp32 master, or an entry of its optimizer state, on every rank."""
        name, what = self._name(param), "safe_get_full_fp32_param" if optim_state_key is None else "safe_get_full_optimizer_state"
        self._flush_for(what)
        mine = self._owner[name] == self.runtime.executor.rank
        shape, dtype = tuple(param.ds_shape), torch.float32
        value = self._master_or_state(name, optim_state_key) if mine else None
        if optim_state_key is not None:
            shape, dtype = self._agree_on(name, optim_state_key, value)
        flat = torch.empty(torch.Size(shape).numel() * dtype.itemsize, dtype=torch.uint8, device=self.runtime.device)
        if value is not None:
            flat.copy_(value.to(flat.device).contiguous().reshape(-1).view(torch.uint8))
        self.runtime.transport.broadcast(flat, self._owner[name], self._where(what))
        return flat.view(dtype).view(shape)

    @torch.no_grad()
    def set_full_hp_param(self, value: torch.Tensor, param: ZeroParam, optim_state_key: str | None = None) -> None:
        """Write the master, or an entry of its optimizer state. Every rank passes the same value."""
        name, what = self._name(param), "safe_set_full_fp32_param" if optim_state_key is None else "safe_set_full_optimizer_state"
        self._flush_for(what)
        if optim_state_key is None:
            if tuple(value.shape) != tuple(param.ds_shape):
                raise ValueError(
                    f"{what} of {name!r} got a value of shape {tuple(value.shape)}, the parameter has "
                    f"{tuple(param.ds_shape)}; give a value of the parameter's shape"
                )
            self._write(name, value)
            if self.runtime.is_whole:
                self.runtime.borrowed.get(param, param.data).copy_(value)
            self.runtime.publish()
            return
        self._put_state(what, name, optim_state_key, value, True)

    def get_local_fp32_param(self, param: ZeroParam, optim_state_key: str | None = None) -> torch.Tensor:
        """This rank's part: on the owner all of it, elsewhere an empty tensor. Collective too: it flushes."""
        name = self._name(param)
        self._flush_for("safe_get_local_fp32_param" if optim_state_key is None else "safe_get_local_optimizer_state")
        mine = self._owner[name] == self.runtime.executor.rank
        value = self._master_or_state(name, optim_state_key) if mine else None
        if optim_state_key is not None:
            self._agree_on(name, optim_state_key, value)
        device = self.runtime.device
        return torch.empty(0, device=device) if value is None else value.detach().to(device, copy=True)

    def set_local_hp_param(self, value: torch.Tensor, param: ZeroParam, optim_state_key: str | None = None) -> None:
        """Write the owner's value; the other ranks pass empty tensors, as ``get_local_fp32_param`` returns them."""
        what = "safe_set_local_fp32_param" if optim_state_key is None else "safe_set_local_optimizer_state"
        name = self._name(param)
        wanted = tuple(param.ds_shape) if self._owner[name] == self.runtime.executor.rank else (0,)
        if optim_state_key is None and tuple(value.shape) != wanted:
            transport = self.runtime.transport
            raise ValueError(
                f"{what} of {name!r} got a value of shape {tuple(value.shape)} on rank {transport.world_rank}, whose part has "
                f"{wanted} (rank {transport.world_rank_of(self._owner[name])} owns the parameter); give what "
                f"{what.replace('set', 'get')} returns"
            )
        self._flush_for(what)
        if optim_state_key is not None:
            self._put_state(what, name, optim_state_key, value, False)
            return
        with torch.no_grad():
            self._write(name, value)
        self.runtime.publish()
        if self.runtime.is_whole:  # release evaluation's copies, which are out of date; updating them would be a collective
            self.runtime.scatter()

    def _no_gradient(self, what: str, param: ZeroParam | None) -> ValueError:
        name = "a gradient" if param is None else f"the gradient of {self._name(param)!r}"
        return ValueError(
            f"{what} asked for {name}, but sums are on their way round the ring until the owner has used them, so "
            "no rank can have them between backward and step; use engine.get_global_grad_norm(), or a hook "
            "(param.register_hook) for this rank's own gradient"
        )

    def get_fp32_grad_for_param(self, param: ZeroParam) -> torch.Tensor:
        raise self._no_gradient("safe_get_full_grad", param)

    def set_fp32_grad_for_param(self, value: torch.Tensor, param: ZeroParam) -> None:
        raise self._no_gradient("safe_set_full_grad", param)

    def get_local_fp32_grad_for_param(self, param: ZeroParam) -> torch.Tensor:
        raise self._no_gradient("safe_get_local_grad", param)

    def set_local_grad_for_param(self, value: torch.Tensor, param: ZeroParam) -> None:
        raise self._no_gradient("safe_set_local_grad", param)

    def update_fp32_grad_for_param_vectorized(self, update: Callable, params: Iterable[ZeroParam]) -> None:
        raise self._no_gradient("safe_update_full_grad_vectorized", next(iter(params), None))

    # ---- inside ---------------------------------------------------------------------------------------------------------
    def _where(self, what: str) -> str:
        return f"rank {self.runtime.transport.world_rank}, step {self.runtime.executor.global_step}, {what}"

    def _flush_for(self, what: str) -> None:
        """Collective: flush for the function ``what``; raises ValueError in the middle of a step."""
        runtime = self.runtime
        if not runtime.between_steps:
            raise ValueError(
                f"{what} came in the middle of step {runtime.executor.global_step}, while parameters and gradient "
                f"sums are on their way round the ring; call it after engine.step(), on every rank"
                + ("" if runtime.param_hooks.mode == IDLE else ", outside forward and backward")
            )
        runtime.flush()

    def _value(self, name: str) -> torch.Tensor:
        owner = self.runtime.owner
        return owner.masters.value(name) if name in owner.masters else owner.frozen[name].detach()

    def _write(self, name: str, value: torch.Tensor) -> None:
        if self._owner[name] == self.runtime.executor.rank:
            self.runtime.owner.put(name, value)

    def _master_or_state(self, name: str, key: str | None) -> torch.Tensor | None:
        """On the owner: the fp32 master, or with a key an entry of its state."""
        return self._value(name).to(torch.float32) if key is None else self._state(name, key)

    def _state(self, name: str, key: str) -> torch.Tensor | None:
        """An entry of the state that this rank keeps for the parameter, None if there is none. A copy, if it is a number."""
        owner = self.runtime.owner
        value = owner.optimizer.state.get(owner.masters.parameters[name], {}).get(key) if name in owner.masters else None
        return value if value is None or isinstance(value, torch.Tensor) else torch.tensor(value)

    @torch.no_grad()
    def _put_state(self, what: str, name: str, key: str, value: torch.Tensor, everywhere: bool) -> None:
        """Collective: write an entry of the state on the owner.

        Args:
            everywhere: every rank passes the value; else only the owner.
        """
        mine = self._owner[name] == self.runtime.executor.rank
        held = self._state(name, key) if mine else None
        shape, _ = self._agree_on(name, key, held)
        if (mine or everywhere) and tuple(value.shape) != shape:
            raise ValueError(
                f"{what} of {name!r} got a value of shape {tuple(value.shape)}, the state {key!r} has {shape}; "
                "give a value of that shape"
            )
        if held is not None:
            state = self.runtime.owner.optimizer.state[self.runtime.owner.masters.parameters[name]]
            if isinstance(state[key], torch.Tensor):
                held.copy_(value)
            else:
                state[key] = type(state[key])(value.item())

    def _no_state(self, name: str, key: str, there: list[str]) -> ValueError:
        keys = ", ".join(map(repr, sorted(there))) or "none: it is frozen, or no step has updated it yet"
        return ValueError(f"optimizer state {key!r} of {name!r} is not there; there is {keys}")

    def _agree_on(self, name: str, key: str, value: torch.Tensor | None) -> tuple[tuple[int, ...], torch.dtype]:
        """Shape and dtype of the owner's entry, on every rank; all of them raise if there is none."""
        owner = self.runtime.owner
        state = owner.optimizer.state.get(owner.masters.parameters[name], {}) if name in owner.masters else {}
        mine = {
            "keys": sorted(map(str, state)),
            "shape": None if value is None else list(value.shape),
            "dtype": None if value is None else str(value.dtype).removeprefix("torch."),
        }
        owner_rank = self.runtime.transport.world_rank_of(self._owner[name])
        told = self.runtime.transport.gather(mine, self._where(f"optimizer state of {name}"))[owner_rank]
        if told["shape"] is None:
            raise self._no_state(name, key, told["keys"])
        return tuple(told["shape"]), getattr(torch, told["dtype"])


def destroy_engines(model: torch.nn.Module) -> None:
    """Collective: destroy the engines that the model belongs to, which leave the parameters' values with it."""
    for access in {getattr(p, "_z3_optimizer", None) for p in model.parameters()}:
        if isinstance(access, Access) and (destroy := access.destroy()):
            destroy()


def remove_hooks(engine: Any) -> None:
    """Remove an engine's own hooks from its module, which DeepSpeed's ``destroy`` leaves there."""
    for name in ("module_forward_pre_hook", "module_forward_post_hook"):
        if handle := engine.__dict__.get(name):
            handle.remove()


def release_stock(engine: Any) -> None:
    """Destroy a stock engine; under ZeRO-3 its model's parameters stay partitioned, as after ``zero.Init``."""
    engine.destroy()
    remove_hooks(engine)
    for m in engine.module.modules():
        if isinstance(m._parameters, ZeROOrderedDict):
            m._parameters = dict(m._parameters)


def offload_stub(module: torch.nn.Module) -> types.SimpleNamespace:
    """``optimizer.parameter_offload`` without hooks, for tools that remove ZeRO-3's hooks while they generate.

    TRL and DeepSpeed's ``unwrap_model_for_generation`` do so. The cyclic engine's hooks handle evaluation themselves.
    """
    return types.SimpleNamespace(
        module=module, forward_hooks=[], backward_hooks=[], _register_deepspeed_module=lambda module: None
    )
