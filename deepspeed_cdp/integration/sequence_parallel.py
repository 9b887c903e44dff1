"""Ulysses sequence parallelism: what DeepSpeed's groups and config say of it (docs/parallelism.md)."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from deepspeed.utils import groups

KEY = "sequence_parallel_size"


def degree(mpu: Any, config: Mapping[str, Any]) -> int:
    """Ranks per sequence group, 1 without sequence parallelism.

    Args:
        mpu: the engine's; DeepSpeed's groups use it from now on.
        config: the ds_config dict.
    Raises:
        ValueError: there are no groups of the config's size, or a group is not consecutive ranks.
    """
    if mpu is not None:
        groups.mpu = mpu  # as DeepSpeed's engine does a little later
    size, written = groups._get_sequence_parallel_world_size(), config.get(KEY, 1)
    if written not in (1, size):
        raise ValueError(
            f"{KEY} is {written}, but DeepSpeed's sequence groups have {size} rank(s); give deepspeed.initialize() the mpu that "
            "UlyssesSPAttentionHF.register_with_transformers returns for this size, or mesh_param, or set data_parallel_size too"
        )
    if size > 1:
        mine = dist.get_process_group_ranks(groups._get_sequence_parallel_group())
        first = dist.get_rank() // size * size
        if mine != list(range(first, first + size)):
            raise ValueError(
                f"the sequence group of rank {dist.get_rank()} is ranks {mine}; allowed are {size} consecutive ranks that begin "
                f"at a multiple of {size}, as UlyssesSPAttentionHF.register_with_transformers makes them"
            )
    return size


@torch.no_grad()
def broadcast(model: torch.nn.Module) -> None:
    """Collective: with ``mesh_param`` DeepSpeed gives the first rank's values to that rank's data-parallel group only."""
    if groups.mesh_device is not None:
        group = groups._get_sequence_parallel_group()
        for p in model.parameters():
            if getattr(p, "ds_status", ZeroParamStatus.AVAILABLE) is ZeroParamStatus.AVAILABLE:
                dist.broadcast(p.data.view(torch.uint8), dist.get_global_rank(group, 0), group=group)


def summed_ranks(sequence: int, config: Any) -> int:
    """How many ranks' gradients DeepSpeed adds up without dividing: the mean is over all ranks divided by this.

    ZeRO-3's reduce-scatter divides by all ranks; its all-reduce and ZeRO's lower stages divide by the data-parallel ranks.

    Args:
        config: the DeepSpeedConfig.
    """
    return 1 if int(config.zero_optimization_stage) == 3 and config.zero_config.reduce_scatter else sequence
