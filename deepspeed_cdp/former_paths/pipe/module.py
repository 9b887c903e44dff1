"""Now deepspeed_cdp.integration.pipe_module."""

from deepspeed_cdp.integration.pipe_module import PyramidTopology, pyramid_topology

__all__ = ["PyramidTopology", "pyramid_topology"]
