"""Cyclic data parallelism as a DeepSpeed engine. Public names only."""

from typing import Any

import deepspeed_cdp_autoload

__version__ = "0.1.0"
__all__ = ["CyclicConfig", "CyclicEngine", "register"]

# Registers as soon as deepspeed is imported, or now. The pure parts of the package thus import neither torch nor deepspeed.
deepspeed_cdp_autoload.install()


def __getattr__(name: str) -> Any:
    if name == "CyclicConfig":
        from deepspeed_cdp.config import CyclicConfig
        return CyclicConfig
    if name == "CyclicEngine":
        from deepspeed_cdp.engine import CyclicEngine
        return CyclicEngine
    if name == "register":
        from deepspeed_cdp.plugin import register
        return register
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
