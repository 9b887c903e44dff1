"""Now deepspeed_cdp.errors."""

from deepspeed_cdp.errors import CheckpointError

__all__ = ["CheckpointError"]
