"""AutoTP training: DeepSpeed shards the layers, and the members of a tensor group are in as many rings (docs/parallelism.md)."""

import datetime
import types
import warnings
from collections.abc import Callable
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.module_inject.layers import TensorParallel_Layer, configure_tensor_parallel_runtime, set_autotp_mode
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.model_checkpointing.constants import CHECKPOINT_WRITER, CHECKPOINT_WRITER_DECOUPLED
from deepspeed.runtime.tensor_parallel.config import TPTrainingConfig
from deepspeed.sequence.cross_entropy import VocabParallelCausalLMLoss
from deepspeed.utils import groups

from deepspeed_cdp.errors import HandoffError
from deepspeed_cdp.integration import agreement
from deepspeed_cdp.transport.base import Transport, Where
from deepspeed_cdp.transport.store_exchange import first_line

KEY = "tensor_parallel.autotp_size"


def check(size: int, model: torch.nn.Module, transport: Transport, config: Any) -> None:
    """Collective: all rings need the same plan.

    Args:
        config: the DeepSpeedConfig.
    Raises:
        ValueError: the tensor groups are not consecutive ranks; the shards of a parameter have several shapes; or checkpoints
            are to be written beside training.
    """
    writer = config.checkpoint_config[CHECKPOINT_WRITER]
    if writer and writer[CHECKPOINT_WRITER_DECOUPLED]:
        raise ValueError(
            f"checkpoint.writer.decoupled is true, but the members of a tensor group ({KEY} is {size}) save together, so that "
            "the newest checkpoint has all shards; set it to false"
        )
    rank, where = transport.world_rank, f"rank {transport.world_rank}, comparing shards"
    given = config.tensor_parallel_config.tensor_parallel.tp_group  # the script's, or DeepSpeed's own
    mine = dist.get_process_group_ranks(given or groups.get_tensor_model_parallel_group())
    first = rank // size * size
    if mine != list(range(first, first + size)):
        raise ValueError(
            f"the tensor group of rank {rank} is ranks {mine}; allowed are {size} consecutive ranks that begin at a multiple of "
            f"{size}, as {KEY} makes them"
        )
    shapes = agreement.parameters(model.named_parameters())
    if len({str(x) for x in transport.gather(agreement.digest(shapes), where)}) > 1:
        everyone = transport.gather(shapes, where)
        name = next(n for n in shapes if len({one.get(n) for one in everyone}) > 1)
        raise ValueError(_uneven(size, name, ", ".join(sorted({str(one.get(name)) for one in everyone}))))


def shard_alone(model: torch.nn.Module, settings: dict[str, Any]) -> None:
    """Give a model on the meta device the shards of a tensor group's first member, in a group whose other members do not exist.

    It begins a process group, so it is for processes that train nothing.

    Args:
        settings: the tensor_parallel block.
    Raises:
        ValueError: DeepSpeed cannot shard the model; or members would have unlike shards, which ``check`` refuses.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore  # torch has no public one

    size, whole = settings["autotp_size"], {n: p.numel() for n, p in model.named_parameters()}
    if not dist.is_initialized():
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    deepspeed.init_distributed("fake", verbose=False)
    groups._init_tp_mesh_device(tensor_model_parallel_size=size)
    config = TPTrainingConfig(**settings)
    configure_tensor_parallel_runtime(config)
    set_autotp_mode(training=True)
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")  # of DeepSpeed's calls
    engine = types.SimpleNamespace(autotp_size=lambda: size, local_rank=-1, is_deepcompile_enabled=lambda: False)
    try:
        DeepSpeedEngine._apply_autotp_partitioning(engine, model, config)
    except Exception as error:  # an assertion, mostly
        raise ValueError(
            f"{KEY} is {size}, but DeepSpeed cannot shard {type(model).__name__} ({first_line(error)}); remove it, or give "
            "tensor_parallel.partition_config"
        ) from error
    for name, p in model.named_parameters():
        if p.numel() not in (whole[name], whole[name] / size):
            raise ValueError(_uneven(size, name, f"one of {tuple(p.shape)}"))
    if isinstance(getattr(model, "loss_function", None), VocabParallelCausalLMLoss):
        model.loss_function = _loss_of_shard  # type: ignore[assignment]


def _loss_of_shard(logits: torch.Tensor, labels: torch.Tensor, **_: Any) -> torch.Tensor:
    """As many operations and bytes as DeepSpeed's loss of a vocabulary's shard, which reads values and asks the other members."""
    return torch.nn.functional.cross_entropy(logits.flatten(0, -2).float(), labels.flatten())


def _uneven(size: int, name: str, shapes: str) -> str:
    return (
        f"{KEY} is {size}, which shards {name} unevenly ({shapes}); "
        "choose a size that divides the numbers of attention heads, of key-value heads and of the layers' features"
    )


def uncounted(model: torch.nn.Module) -> frozenset[str]:
    """Parameters whose gradients' norm the first member of the tensor group counts: it has the same ones, not a shard."""
    if groups.get_tensor_model_parallel_rank() == 0:
        return frozenset()
    return frozenset(n for n, p in model.named_parameters() if not getattr(p, "tensor_model_parallel", False))


def sum_members(size: int, timeout_seconds: float) -> Callable[[torch.Tensor, Where], None]:
    """Collective: what adds up a tensor over the members of a tensor group.

    Its group is one of its own: norms are summed beside the passes, whose collectives have another order on the device.
    """
    timeout, own = datetime.timedelta(seconds=timeout_seconds), None
    for first in range(0, dist.get_world_size(), size):
        members = list(range(first, first + size))
        group = dist.new_group(members, timeout=timeout)
        own = group if dist.get_rank() in members else own

    def add(tensor: torch.Tensor, where: Where) -> None:
        try:
            dist.all_reduce(tensor, group=own)
        except RuntimeError as error:
            raise HandoffError(f"{where}: the tensor group's sum of norms failed: {first_line(error)}") from error

    return add


@torch.no_grad()
def gather_layers(model: torch.nn.Module, state: dict[str, Any]) -> None:
    """Collective: put whole parameters in the places of shards in the model's state dict, while its parameters are gathered."""
    whole: dict[torch.nn.Parameter, torch.Tensor] = {}  # tied entries stay tied
    for path, layer in model.named_modules():
        if not isinstance(layer, TensorParallel_Layer):
            continue
        named = dict(layer.named_parameters(recurse=False))
        shards = [p.data for p in named.values()]
        layer.gather_params(list(named.values()))
        for name, p in named.items():
            state[f"{path}.{name}".lstrip(".")] = whole.setdefault(p, p.detach().clone())
        for p, shard in zip(named.values(), shards):
            p.data = shard


def take_input_check(engine: Any) -> Callable[..., Any]:
    """DeepSpeed's check that a tensor group's members have the same batch; a hook no longer, since a forward without values
    comes before the first one with them."""
    handle = engine.first_dataloader_check
    hook = handle.hooks_dict_ref()[handle.id]
    handle.remove()
    return hook
