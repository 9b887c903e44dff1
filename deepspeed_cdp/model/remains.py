"""Parameters of a destroyed engine: each owner keeps the values of its stage, and the parameters look as after ``zero.Init``.

So ``deepspeed.zero.GatheredParameters`` reads and writes them, and ``Initial`` takes them over for another engine.
"""

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

ZeroParam: TypeAlias = Any  # a torch.nn.Parameter, with the attributes that zero.Init gives it


class Remains:
    """Values of a module's parameters, each on one rank. ``param.ds_remains`` is this object.

    Using a parameter while its values are not there raises.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        values: Mapping[ZeroParam, torch.Tensor],
        sources: Mapping[ZeroParam, int],
        device: torch.device,
    ):
        """
        Args:
            values: of the parameters that this rank keeps.
            sources: of every parameter the rank that keeps its values.
        """
        self._values, self._sources, self._device = dict(values), dict(sources), device
        self._dtypes = {p: p.dtype for p in sources}
        holders = [m for m in module.modules() if m._parameters or m is module]
        self._handles = [m.register_forward_pre_hook(self._refuse, prepend=True) for m in holders]
        self._handles += [m.register_state_dict_pre_hook(self._refuse) for m in holders]
        for number, (name, p) in enumerate(module.named_parameters()):
            self._partition_first(number, name, p)

    def _partition_first(self, number: int, name: str, p: ZeroParam) -> None:
        p.ds_id, p.ds_shape, p.ds_numel, p.ds_persist, p.ds_remains = number, p.shape, p.numel(), False, self
        p.ds_process_group, p.ds_active_sub_modules, p.ds_enable_sanity_checks = dist.group.WORLD, set(), False
        p.ds_summary = partial(dict, id=number, name=name, shape=tuple(p.shape))
        p.all_gather, p.partition = partial(self._all_gather, p), partial(self._partition, p)
        self._release(p)

    def __deepcopy__(self, memo: Any) -> Any:
        raise ValueError(
            "the module was copied after engine.destroy(), while each rank keeps a part of its parameters; copy it inside "
            "deepspeed.zero.GatheredParameters of all of them"
        )

    def _refuse(self, module: torch.nn.Module, *_: Any) -> None:
        if any(getattr(p, "ds_status", None) == ZeroParamStatus.NOT_AVAILABLE for p in module.parameters(recurse=False)):
            raise ValueError(
                f"a {type(module).__name__} was used after engine.destroy(), when each rank keeps a part of the parameters; "
                "use it inside deepspeed.zero.GatheredParameters, or give the model to deepspeed.initialize() again"
            )

    @staticmethod
    def _release(p: ZeroParam) -> None:
        p.data, p.ds_status = p.data.new_empty(0), ZeroParamStatus.NOT_AVAILABLE

    @torch.no_grad()
    def _all_gather(self, param: ZeroParam, param_list: Iterable[ZeroParam] | None = None, **_: Any) -> None:
        """Collective: give the parameters their values, on every rank."""
        mine, others = self._split(param, param_list)
        if others:
            others[0].all_gather(param_list=others)
        for p in mine:
            if p.ds_status == ZeroParamStatus.NOT_AVAILABLE:
                kept = self._values.get(p)
                value = torch.empty(p.ds_shape, dtype=self._dtypes[p], device=self._device) if kept is None else kept.clone()
                dist.broadcast(value, self._sources[p])
                p.data, p.ds_status = value.to(p.dtype), ZeroParamStatus.AVAILABLE

    @torch.no_grad()
    def _partition(
        self, param: ZeroParam, param_list: Iterable[ZeroParam] | None = None, has_been_updated: bool = False, **_: Any
    ) -> None:
        """Release the values; first keep them if one rank has broadcast new ones (``has_been_updated``)."""
        mine, others = self._split(param, param_list)
        if others:
            others[0].partition(param_list=others, has_been_updated=has_been_updated)
        for p in mine:
            if p.ds_status == ZeroParamStatus.AVAILABLE:
                if has_been_updated and p in self._values:
                    self._values[p].copy_(p.data)
                self._release(p)

    def _split(self, param: ZeroParam, params: Iterable[ZeroParam] | None) -> tuple[list[ZeroParam], list[ZeroParam]]:
        """These parameters and others'."""
        params = [param] if params is None else list(params)
        return [p for p in params if p in self._sources], [p for p in params if p not in self._sources]

    def forget(self, p: ZeroParam) -> None:
        """The parameter is taken over."""
        self._values.pop(p, None)
        del self._sources[p]
        if not self._sources:
            for handle in self._handles:
                handle.remove()


@torch.no_grad()
def make_whole(model: torch.nn.Module) -> None:
    """Collective: give a destroyed engine's parameters their values back, on every rank, as ordinary ones."""
    left: list[ZeroParam] = [p for p in model.parameters() if hasattr(p, "ds_remains")]
    for p in left:
        p.all_gather()
        strip(p)


def strip(p: ZeroParam) -> None:
    """Remove the attributes that ``zero.Init``, ZeRO-3's optimizer or ``Remains`` have put on a parameter."""
    if hasattr(p, "ds_remains"):
        p.ds_remains.forget(p)
    for key, value in list(p.__dict__.items()):
        of_deepspeed = str(getattr(value, "__module__", "")).startswith("deepspeed.")  # its methods and optimizer
        if of_deepspeed or key.startswith("ds_") or key in ("nvme_swapper", "is_external_param", "all_gather", "partition"):
            del p.__dict__[key]
