"""Topologies that DeepSpeed's PipelineModule lacks: a pyramid of ranks, and all stages on one device.

DeepSpeed refuses ``PipelineModule(layers, num_stages=N)`` if N does not divide the number of ranks. Registration
(integration/pipe_register.py) supplies one of these topologies there, so that scripts need no change.

If N divides the ranks of its pyramid (N odd), DeepSpeed builds several pipelines instead. Such a script passes
``topology=pyramid_topology(N)``.
"""

from collections import namedtuple
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from deepspeed.runtime.pipe.module import PipelineModule, TiedLayerSpec
from deepspeed.runtime.pipe.topology import PipeDataParallelTopology, ProcessTopology

from deepspeed_cdp.plan.pipeline_schedule import PipeSchedule

_Place = namedtuple("_Place", ("pipe", "data", "rank"))


class PyramidTopology(ProcessTopology):
    """N(N+1)/2 ranks, of which stage s has N-s. To DeepSpeed it is a grid of one axis, without data parallelism."""

    def __init__(self, num_stages: int):
        places = PipeSchedule(num_stages, 0, placement="pyramid")
        self.cyclic_stages = num_stages
        self._places, self.axes, self.dims = places, ["rank"], [places.ranks]
        self.ProcessCoord: Any = _Place
        self.mapping = {_Place(places.stages_of(r)[0], 0, r): r for r in range(places.ranks)}

    def get_axis_names(self) -> list[str]:
        return self.axes

    def get_dim(self, axis: str) -> int:
        return {"pipe": self._places.stages, "data": 1, "rank": self._places.ranks}.get(axis, 0)

    def get_rank(self, pipe: int, **_: int) -> int:
        """The stage's first replica."""
        return self._places.replicas(pipe)[0]

    def get_rank_repr(self, *_: Any, **__: Any) -> str:
        return ""

    def get_axis_list(self, axis: str, idx: int) -> list[int]:
        return list(range(self._places.ranks)) if axis == "data" else list(self._places.replicas(idx))

    def get_axis_comm_lists(self, axis: str) -> list[list[int]]:
        """Along ``data`` every rank is alone; along ``pipe`` one list per way that a micro-batch may take."""
        if axis != "pipe":
            return [[r] for r in range(self._places.ranks)] if axis == "data" else []
        return [[self._places.rank_of(0, q, s) for s in range(self._places.stages)] for q in range(self._places.stages)]


class SingleTopology(PipeDataParallelTopology):
    """One rank that has all N stages. To DeepSpeed it is one stage."""

    def __init__(self, num_stages: int):
        super().__init__(num_pp=1, num_dp=1)
        self.cyclic_stages = num_stages


def pyramid_topology(num_stages: int) -> PyramidTopology:
    """For ``PipelineModule(layers, topology=pyramid_topology(N))`` on N(N+1)/2 ranks; needed only where N is odd."""
    return PyramidTopology(num_stages)


def topology_for(stages: int) -> ProcessTopology | None:
    """The topology of a pyramid or of a single device, if all ranks are one; else None."""
    world = torch.distributed.get_world_size()
    if world == 1:
        return SingleTopology(stages)
    return PyramidTopology(stages) if world == stages * (stages + 1) // 2 else None


def cut(module: PipelineModule, method: str) -> None:
    """Note where the N stages of a module on one device begin, by DeepSpeed's own partition; it keeps all its layers."""
    if not isinstance(module._topo, SingleTopology):
        return
    kept = (module.num_stages, module.parts, module._local_start, module._local_stop)
    module.num_stages = module._topo.cyclic_stages
    try:
        with torch.random.fork_rng(devices=[]):  # counting parameters builds layers
            module._partition_layers(method=method)
        module.cyclic_parts = module.parts
    finally:
        module.num_stages, module.parts, module._local_start, module._local_stop = kept


def placement_of(model: PipelineModule, asked: str) -> tuple[str, int]:
    """(placement, N) of a module under ``cyclic.placement``.

    Raises:
        ValueError: the module was built for another.
    """
    topology, world = model._topo, torch.distributed.get_world_size()
    if isinstance(topology, SingleTopology):
        found, stages = "single", topology.cyclic_stages
    elif isinstance(topology, PyramidTopology):
        found, stages = "pyramid", topology.cyclic_stages
    else:
        found, stages = "pipeline", topology.get_dim("pipe")
        others = [a for a in topology.get_axis_names() if a != "pipe" and topology.get_dim(a) > 1]
        if others:
            pyramid = (
                f'; for placement "pyramid" pass topology=deepspeed_cdp.integration.pipe_module.pyramid_topology({stages}) to '
                "PipelineModule"
                if world == stages * (stages + 1) // 2
                else ""
            )
            raise ValueError(
                f"model: PipelineModule has {topology.get_dim(others[0])} ranks along {others[0]!r}, and a cyclic "
                f"pipeline has one rank per stage; start {stages} ranks{pyramid}."
            )
    if asked not in ("auto", found) and not (world == stages == 1):
        raise ValueError(
            f"cyclic.placement is '{asked}', but {stages} stages on {world} ranks are a '{found}'; start "
            f'{PipeSchedule(stages, 0, placement=asked).ranks} ranks, or use "auto".'
        )
    return (asked if asked != "auto" else found), stages


def bounds_of(model: PipelineModule) -> list[int]:
    """Where the stages begin, and the number of layers."""
    return [int(k) for k in getattr(model, "cyclic_parts", model.parts)]  # (DeepSpeed balances with numpy)


def ties_of(model: PipelineModule) -> dict[str, tuple[int, ...]]:
    """Keys of tied modules that several stages use, to these stages."""
    bounds = bounds_of(model)
    stages: dict[str, set[int]] = {}
    for k, spec in enumerate(model._layer_specs):
        if isinstance(spec, TiedLayerSpec):
            stages.setdefault(spec.key, set()).add(max(s for s in range(len(bounds) - 1) if bounds[s] <= k))
    return {key: tuple(sorted(used)) for key, used in sorted(stages.items()) if len(used) > 1}


@contextmanager
def only_stage(model: PipelineModule, bounds: list[int], stage: int, number: int) -> Iterator[None]:
    """While it lasts ``model(x)`` is the forward of one stage, of micro-batch ``number`` (by which DeepSpeed seeds layers)."""
    kept = (model.forward_funcs, model._local_start, model.is_checkpointable_results, model.micro_offset)
    start, stop, offset = bounds[stage], bounds[stage + 1], model._local_start
    model.micro_offset = number
    if (start, stop) != (offset, offset + len(model.forward_funcs)):
        model.forward_funcs, model._local_start = model.forward_funcs[start - offset : stop - offset], start
        if model.activation_checkpoint_interval > 0:
            every, funcs = model.activation_checkpoint_interval, model.forward_funcs
            model.is_checkpointable_results = [
                model._is_checkpointable(funcs[k : k + every]) for k in range(0, len(funcs), every)
            ]
    try:
        yield
    finally:
        model.forward_funcs, model._local_start, model.is_checkpointable_results, _ = kept


def layers_of(model: PipelineModule, bounds: list[int], stage: int) -> list[torch.nn.Module]:
    """The modules of a stage, tied ones included."""
    found = []
    for k in range(bounds[stage], bounds[stage + 1]):
        spec, func = model._layer_specs[k], model.forward_funcs[k - model._local_start]
        module = model.tied_modules[spec.key] if isinstance(spec, TiedLayerSpec) else func
        if isinstance(module, torch.nn.Module):
            found.append(module)
    return found
