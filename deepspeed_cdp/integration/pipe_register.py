"""Registration of cyclic pipelines, called by integration/plugin.py. Like that module, it imports deepspeed only when needed."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

_STOCK = "__deepspeed_cdp_stock__"


def tolerate_placements() -> None:
    """Makes ``PipelineModule(num_stages=N)`` work on one rank and, for even N, on N(N+1)/2 ranks. Idempotent.

    A script builds its PipelineModule before any config is read, so the constructor must accept these numbers of ranks. If the
    config does not enable the cyclic engine, ``refuse_placed`` raises the stock error at ``deepspeed.initialize``.
    """
    import deepspeed

    module = deepspeed.PipelineModule
    if not hasattr(module.__init__, _STOCK):
        module.__init__ = _tolerant(module.__init__)


def stock_again() -> None:
    """Undoes ``tolerate_placements`` (for tests)."""
    import deepspeed

    module = deepspeed.PipelineModule
    module.__init__ = getattr(module.__init__, _STOCK, module.__init__)


def _tolerant(stock: Callable[..., None]) -> Callable[..., None]:
    """``PipelineModule.__init__`` that differs from the stock one only where the stock one is about to raise."""
    signature = inspect.signature(stock)

    @functools.wraps(stock)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        try:
            given = signature.bind(self, *args, **kwargs).arguments
        except TypeError:  # the stock function raises it
            given = {}
        stages, topology = given.get("num_stages"), given.get("topology")
        if topology is None and stages is not None and _misfits(stages):
            from deepspeed_cdp.integration.pipe_module import topology_for

            topology = topology_for(stages)
        if getattr(topology, "cyclic_stages", None) is None:
            return stock(self, *args, **kwargs)
        from deepspeed_cdp.integration.pipe_module import cut

        stock(**{**given, "topology": topology})
        cut(self, given.get("partition_method", "parameters"))

    setattr(__init__, _STOCK, stock)
    return __init__


def _misfits(stages: Any) -> bool:
    """Whether the stock ``PipelineModule`` refuses this number of stages."""
    import torch.distributed as dist

    return isinstance(stages, int) and stages > 0 and dist.is_initialized() and dist.get_world_size() % stages != 0


def classes() -> dict[str, type]:
    """Replacements of DeepSpeed's classes, by name, while ``initialize`` builds a cyclic pipeline."""
    from deepspeed_cdp.integration.pipe_config import PipelineConfig
    from deepspeed_cdp.integration.pipe_engine import CyclicPipelineEngine

    return {"PipelineEngine": CyclicPipelineEngine, "DeepSpeedConfig": PipelineConfig}


def refuse_placed(model: Any, hint: bool) -> None:
    """Raises the stock ``PipelineModule``'s error for a module that only the cyclic engine can train.

    Args:
        hint: say how to enable the cyclic engine.
    """
    stages = getattr(getattr(model, "_topo", None), "cyclic_stages", None)
    if stages is not None:
        import torch.distributed as dist

        world = dist.get_world_size()
        unless = ', unless "cyclic": {"enabled": true} is in the config' if hint or world % stages == 0 else ""
        raise RuntimeError(f"num_stages ({stages}) must divide distributed world size ({world}){unless}")
