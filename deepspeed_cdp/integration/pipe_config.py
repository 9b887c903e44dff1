"""A DeepSpeedConfig of a cyclic pipeline: settings that a ring supports and a pipeline does not, and the reverse."""

from typing import Any

import deepspeed
import torch
from deepspeed.runtime.data_pipeline.constants import CURRICULUM_LEARNING, CURRICULUM_LEARNING_ENABLED, DATA_SAMPLING

from deepspeed_cdp.integration.config import CyclicConfig

_RING_ONLY = {
    "partition_method": "give partition_method to PipelineModule instead",
    "units": "a stage is sent as a whole; remove it",
    "ring_size": "the stages of the PipelineModule are the ring; remove it",
    "keep_after_forward": "weights stay where they are; remove it",
    "prefetch_units": "weights stay where they are; remove it",
    "any_order": "a stage stays where it is; remove it",
    "min_unit_mb": "a stage is sent as a whole; remove it",
    "gradient_accumulation_fusion": "gradients are added on the rank that has the stage; remove it",
    "weights": "load weights in the layers of the PipelineModule; remove it",
}


class PipelineConfig(deepspeed.DeepSpeedConfig):
    """The config class for a PipelineModule with a cyclic block."""

    def _initialize_params(self, param_dict: dict[str, Any]) -> None:
        super()._initialize_params(param_dict)
        refuse(self)


def refuse(config: Any) -> None:
    """Raises ValueError, "key is value: reason; fix.", for settings that a ring supports and a pipeline does not."""
    stage = int(config.zero_optimization_stage)
    if stage > 1:
        raise ValueError(
            f"zero_optimization.stage is {stage}: DeepSpeed's pipelines have stages 0 and 1, and each rank keeps "
            "its stage of the model; set it to 0."
        )
    if config.float16_config.enabled:
        raise ValueError(
            "fp16.enabled is true: a pipeline's stages are updated before the step's last overflow is known; use bf16."
        )
    if config.torch_autocast_enabled and config.torch_autocast_dtype != torch.bfloat16:
        raise ValueError('torch_autocast.dtype is not bfloat16: a cyclic pipeline does not scale losses; set it to "bfloat16".')
    if config._param_dict.get("sequence_parallel_size", 1) > 1:
        raise ValueError(
            f"sequence_parallel_size is {config._param_dict['sequence_parallel_size']}: a PipelineModule's stages work on whole "
            "sequences; remove it."
        )
    if config.data_efficiency_config[DATA_SAMPLING][CURRICULUM_LEARNING][CURRICULUM_LEARNING_ENABLED]:
        raise ValueError(
            "data_efficiency.data_sampling.curriculum_learning.enabled is true: checkpoints of pipelines have no place for its "
            "sampler; order the data set instead."
        )
    block, default = config.cyclic_config, CyclicConfig()
    for key, fix in _RING_ONLY.items():
        if getattr(block, key) != getattr(default, key):
            raise ValueError(f"cyclic.{key} is {getattr(block, key)!r}: it is about models that are no PipelineModule; {fix}.")
    if block.transport == "peer":
        raise ValueError("cyclic.transport is 'peer': PipelineModules travel by gloo on CPUs and by NCCL on GPUs; use \"auto\".")
