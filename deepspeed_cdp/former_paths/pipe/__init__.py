"""Now deepspeed_cdp.pipeline and deepspeed_cdp.integration.pipe_module."""
