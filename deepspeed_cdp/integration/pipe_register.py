"""Registration of cyclic pipelines; called by integration/plugin.py, and like it imports nothing of deepspeed before it is
needed."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

_STOCK = "__deepspeed_cdp_stock__"


def tolerate_placements() -> None:
    """Makes ``PipelineModule(num_stages=N)`` work on one rank and, for even N, on N(N+1)/2 ranks. Idempotent."""
    import deepspeed

    module = deepspeed.PipelineModule
    if not hasattr(module.__init__, _STOCK):
        module.__init__ = _tolerant(module.__init__)


def stock_again() -> None:
    """Undoes it (for tests)."""
    import deepspeed

    module = deepspeed.PipelineModule
    module.__init__ = getattr(module.__init__, _STOCK, module.__init__)


def _tolerant(stock: Callable[..., None]) -> Callable[..., None]:
    signature = inspect.signature(stock)

    @functools.wraps(stock)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        import torch.distributed as dist

        from deepspeed_cdp.integration.pipe_module import cut, misfit

        given = signature.bind(self, *args, **kwargs)
        stages = given.arguments.get("num_stages")
        if stages and given.arguments.get("topology") is None and dist.is_initialized():
            given.arguments["topology"] = misfit(stages, dist.get_world_size())
        stock(*given.args, **given.kwargs)
        cut(self, given.arguments.get("partition_method", "parameters"))

    setattr(__init__, _STOCK, stock)
    return __init__


def classes() -> dict[str, type]:
    """What takes the place of DeepSpeed's classes of these names while ``initialize`` builds a cyclic pipeline."""
    from deepspeed_cdp.integration.pipe_config import PipelineConfig
    from deepspeed_cdp.integration.pipe_engine import CyclicPipelineEngine

    return {"PipelineEngine": CyclicPipelineEngine, "DeepSpeedConfig": PipelineConfig}


def refuse_placed(model: Any) -> None:
    """Raises for a module that only the cyclic engine can train."""
    from deepspeed_cdp.integration.pipe_module import refuse_placed

    refuse_placed(model)
