"""Cyclic data parallelism as a DeepSpeed engine.

A training script needs nothing from here: importing ``deepspeed`` registers the engine, and the ``cyclic`` block of
ds_config.json chooses it. The names below serve scripts that register by hand. docs/architecture.md explains the folders.
"""

from pathlib import Path
from typing import Any

import deepspeed_cdp_autoload
from deepspeed_cdp.version import __version__

__all__ = ["CyclicConfig", "CyclicEngine", "__version__", "register"]

# Import paths that documents once gave users, such as deepspeed_cdp.convert, keep working.
__path__.append(str(Path(__file__).with_name("former_paths")))

# Registers as soon as deepspeed is imported, or now. The pure folders thus import neither torch nor deepspeed.
deepspeed_cdp_autoload.install()


def __getattr__(name: str) -> Any:
    if name == "CyclicConfig":
        from deepspeed_cdp.integration.config import CyclicConfig

        return CyclicConfig
    if name == "CyclicEngine":
        from deepspeed_cdp.integration.engine import CyclicEngine

        return CyclicEngine
    if name == "register":
        from deepspeed_cdp.integration.plugin import register

        return register
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
