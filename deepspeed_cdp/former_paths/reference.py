"""Now deepspeed_cdp.analysis.reference."""

from deepspeed_cdp.analysis.reference import train, version

__all__ = ["train", "version"]
