"""DeepSpeed settings that the cyclic engine supports, ignores and refuses: one table.

`check_supported` applies it to a parsed DeepSpeedConfig. `python -m deepspeed_cdp.integration.support` prints it for
docs/settings.md.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch

_ABSENT = object()

# Sections of ds_config.json and the attribute of DeepSpeedConfig that holds each one parsed (with coerced types and
# deprecated keys resolved). Everything else is read from the raw dict.
_PARSED = {
    "zero_optimization": "zero_config",
    "fp16": "float16_config",
    "bf16": "bfloat16_config",
    "hybrid_engine": "hybrid_engine",
    "compile": "compile_config",
    "tensor_parallel": "tensor_parallel_config",
}


def _on(value: Any, config: Any) -> bool:
    return bool(value)


def _given(value: Any, config: Any) -> bool:
    return value is not None


def _above_1(value: Any, config: Any) -> bool:
    return value is not None and value > 1


def _beside_sequences(value: Any, config: Any) -> bool:
    return value is not None and value > 1 and config._param_dict.get("sequence_parallel_size", 1) > 1


def _offloads(value: Any, config: Any) -> bool:
    return value is not None and getattr(value, "device", "none") != "none"


def _offloads_to_nvme(value: Any, config: Any) -> bool:
    return value is not None and getattr(value, "device", "none") == "nvme"


def _below_1(value: Any, config: Any) -> bool:
    return value is not None and value < 1


def _late(config: Any) -> bool:
    """Whether the rule updates stages before the step's last overflow is known.

    Until the engine knows the size of an `auto` ring, this is False if it depends on the size.
    """
    rule = config.cyclic_config.rule
    return rule == "cdp-v2" or isinstance(rule, int) and rule not in (0, *(2 * size - 1 for size in _ring_sizes(config)))


def _ring_sizes(config: Any) -> list[int]:
    """Ranks per ring: the size that the engine has found, or that the config sets, or all sizes that `auto` may become."""
    size, world = getattr(config, "cyclic_ring_size", config.cyclic_config.ring_size), config.world_size
    return [size] if size != "auto" else [r for r in range(1, world + 1) if world % r == 0 and (r > 1 or world == 1)]


def _fp16_late(value: Any, config: Any) -> bool:
    return bool(value) and _late(config)


def _autocast_fp16_late(value: Any, config: Any) -> bool:
    return config.torch_autocast_enabled and config.torch_autocast_dtype == torch.float16 and _late(config)


def _no_autocast_dtype(value: Any, config: Any) -> bool:
    return bool(value) and config.torch_autocast_dtype not in (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
        settings: paths as in ds_config.json, dots between sections; a path that starts with "model:" is about the model.
        verdict: the engine refuses, ignores or supports the setting.
        reason: why, as the end of a sentence.
        fix: the instruction to the user; only refused rows have one.
        refuses: (value, DeepSpeedConfig) -> whether this value is the refused one; only refused rows have one.
        when: which values are refused, for the printed table.
    """

    settings: tuple[str, ...]
    verdict: Literal["refused", "ignored", "supported"]
    reason: str
    fix: str = ""
    refuses: Callable[[Any, Any], bool] | None = None
    when: str = ""


def _refused(setting: str, when: str, refuses: Callable[[Any, Any], bool] | None, reason: str, fix: str) -> Row:
    return Row((setting,), "refused", reason, fix, refuses, when)


ZERO = "zero_optimization."
ON_DEVICE = "each rank reads every parameter in every step, so all of them would cross the bus from host memory"
LATER = "not supported in this version"
OTHER_RINGS = "rings with other experts would have to average some parameters and not the rest"
LATE = "a stage is updated before the step's last overflow is known"
USE_V1 = 'use bf16, or cyclic.rule "cdp-v1"'
NO_COLLECTIVE = "there is no collective to tune: parameters and gradient sums travel as one message per unit"

TABLE: tuple[Row, ...] = (
    _refused(ZERO + "zero_quantized_weights", "true", _on, "it quantizes all-gathers and there are none", "remove it"),
    _refused(ZERO + "zero_quantized_gradients", "true", _on, "it quantizes reductions and there are none", "remove it"),
    _refused(ZERO + "zero_quantized_nontrainable_weights", "true", _on, "hand-offs carry whole units in one dtype", "remove it"),
    _refused(
        ZERO + "zero_hpz_partition_size",
        "above 1",
        _above_1,
        "a second copy within a node saves no all-gather, since there is none",
        "remove it",
    ),
    _refused(ZERO + "cpu_offload_param", "true", _on, ON_DEVICE, "remove it"),
    _refused(ZERO + "offload_param", "cpu, nvme", _offloads, ON_DEVICE, "remove it"),
    _refused(
        ZERO + "offload_optimizer.super_offload",
        "true",
        _on,
        "it overlaps ZeRO-3's sub-groups with the backward, and owners update whole units",
        "remove it",
    ),
    _refused(ZERO + "offload_optimizer.ratio", "below 1", _below_1, "an owner updates its stage in one place", "set it to 1.0"),
    _refused(ZERO + "offload_optimizer", "nvme", _offloads_to_nvme, LATER, "set its device to cpu"),
    _refused(
        ZERO + "zenflow", "set", _given, "it splits the update by gradient importance, the owner applies it whole", "remove it"
    ),
    _refused("fp16.enabled", "true under cdp-v2 and K other than 0 and 2N-1", _fp16_late, LATE, USE_V1),
    _refused("fp16.fp16_master_weights_and_grads", "true", _on, "owners keep fp32 master weights", "remove it"),
    _refused("bf16.bf16_optimizer_states", "true", _on, "owners keep fp32 optimizer state", "remove it"),
    _refused("bf16.bf16_master_weights_and_grads", "true", _on, "owners keep fp32 master weights", "remove it"),
    _refused(
        "torch_autocast.enabled",
        "true without a dtype of 16 bits",
        _no_autocast_dtype,
        "torch_autocast.dtype must say what to compute in",
        'set it to "bfloat16"',
    ),
    _refused("torch_autocast.dtype", "float16 under cdp-v2 and K other than 0 and 2N-1", _autocast_fp16_late, LATE, USE_V1),
    _refused(
        "hybrid_engine.enabled", "true", _on, "it swaps the engine for one that generates from gathered parameters", "remove it"
    ),
    _refused(
        "tensor_parallel.autotp_size",
        "above 1 with sequence_parallel_size above 1",
        _beside_sequences,
        "a group of ranks shares layers or a sequence",
        "remove one of both",
    ),
    _refused("expert_parallel.enabled", "true", _on, OTHER_RINGS, "keep whole experts on every rank and remove it"),
    _refused(
        "compile.deepcompile",
        "true",
        _on,
        "it compiles ZeRO's collectives into the graph and there are none",
        "call engine.compile() instead",
    ),
    _refused(
        "communication_data_type",
        "set",
        _given,
        "gradient sums travel in the dtype in which they are kept",
        "set data_types.grad_accum_dtype instead",
    ),
    _refused(
        "seq_parallel_communication_data_type",
        "set",
        _given,
        "gradient sums travel in the dtype in which they are kept",
        "set data_types.grad_accum_dtype instead",
    ),
    _refused("prescale_gradients", "true", _on, "the owner divides the sum over the ranks once", "remove it"),
    _refused(
        "data_efficiency.data_routing.random_ltd.enabled",
        "true",
        _on,
        "it puts layers into wrappers after initialize, which renames the plan's parameters; its kernels need a GPU",
        "remove it",
    ),
    _refused("model: DualPipeVModule", "any", None, LATER, "pass a PipelineModule"),
    _refused(
        "model: deepspeed.moe.layer.MoE",
        "ep_size above 1",
        None,
        OTHER_RINGS,
        "set ep_size to 1, which keeps whole experts on every rank",
    ),
    _refused(
        "model: mpu",
        "above 1 model parallel",
        None,
        "only DeepSpeed's AutoTP shards layers as the engine expects",
        "use tensor_parallel.autotp_size",
    ),
    Row(
        (ZERO + "stage",),
        "supported",
        "3: parameters and optimizer state in one place each; 0, 1, 2 or no block, all the same: "
        "every rank keeps all parameters, optimizer state in one place",
    ),
    Row(("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"), "supported", "as in ZeRO-3"),
    Row(
        ("optimizer", "scheduler", "gradient_clipping"),
        "supported",
        "on whole tensors; clipping uses the exact global norm under cdp-v1 and last step's for unfinished stages under cdp-v2",
    ),
    Row(
        ("sequence_parallel_size", "data_parallel_size", "model: mpu or mesh_param with sequence parallelism"),
        "supported",
        "Ulysses, as in ZeRO-3; see docs/parallelism.md",
    ),
    Row(("tensor_parallel",), "supported", "AutoTP, as in ZeRO-3, without sequence parallelism; see docs/parallelism.md"),
    Row(
        ("managed_gradient_accumulation",),
        "supported",
        "if false, steps of at most gradient_accumulation_steps micro-batches, by which losses are divided",
    ),
    Row(("bf16.enabled", "data_types.grad_accum_dtype"), "supported", "fp32 and bf16 parameters, fp32 masters"),
    Row(
        ("fp16",),
        "supported",
        "under dp and cdp-v1, with fixed and dynamic scales; under cdp-v1 an overflow lowers the scale one step later",
    ),
    Row(("torch_autocast",), "supported", "parameters and sums stay fp32 and travel so"),
    Row(
        (ZERO + "offload_optimizer.device", ZERO + "offload_optimizer.pin_memory", ZERO + "cpu_offload"),
        "supported",
        "cpu: masters, optimizer state and update on the owner's host, with DeepSpeedCPUAdam where the config names Adam",
    ),
    Row(("zero_force_ds_cpu_optimizer",), "supported", "as in ZeRO-3"),
    Row(("checkpoint.load_universal",), "supported", "as in ZeRO-3"),
    Row(
        ("checkpoint.writer.decoupled",),
        "supported",
        "a thread of each rank writes the files, and training goes on; with any writer.type, and for as many steps as it takes",
    ),
    Row(
        ("data_efficiency.data_sampling.curriculum_learning",),
        "supported",
        "DeepSpeed's batches, which every rank draws for itself; not in pipelines; see docs/limits.md#curriculum-learning",
    ),
    Row(
        ("model: deepspeed.moe.layer.MoE of ep_size 1",),
        "supported",
        "whole experts on every rank, under every stage; see docs/limits.md#mixtures-of-experts",
    ),
    Row(("activation_checkpointing",), "supported", "a unit's parameters stay through its recomputation"),
    Row(
        (ZERO + "stage3_gather_16bit_weights_on_model_save", ZERO + "stage3_gather_fp16_weights_on_model_save"),
        "supported",
        "as in ZeRO-3",
    ),
    Row(
        ("wall_clock_breakdown", "steps_per_print", "tensorboard", "wandb", "csv_monitor", "flops_profiler", "comms_logger"),
        "supported",
        "as in ZeRO-3; docs/observability.md has what they cost",
    ),
    Row(
        ("model: PipelineModule",),
        "supported",
        "with ZeRO stage 0 or 1, fp32 or bf16, one pipeline (no data or tensor parallelism beside it); see docs/pipeline.md",
    ),
    Row(
        (
            ZERO + "overlap_comm",
            ZERO + "reduce_scatter",
            ZERO + "reduce_bucket_size",
            ZERO + "use_multi_rank_bucket_allreduce",
            ZERO + "allgather_partitions",
            ZERO + "allgather_bucket_size",
            ZERO + "stage3_allgather_sequential",
            ZERO + "stage3_use_all_reduce_for_fetch_params",
            ZERO + "stage3_prefetch_bucket_size",
            "disable_allgather",
        ),
        "ignored",
        NO_COLLECTIVE,
    ),
    Row(
        (
            ZERO + "stage3_param_persistence_threshold",
            ZERO + "stage3_model_persistence_threshold",
            ZERO + "stage3_max_live_parameters",
            ZERO + "stage3_max_reuse_distance",
            ZERO + "contiguous_gradients",
            ZERO + "sub_group_size",
            ZERO + "round_robin_gradients",
            ZERO + "parameter_alignment",
        ),
        "ignored",
        "buffers are sized by the plan, and the owner updates whole stages",
    ),
    Row((ZERO + "leaf_module", ZERO + "stage3_module_granularity_threshold"), "ignored", "units come from cyclic.units"),
    Row(("gradient_predivide_factor",), "ignored", "the owner divides the sum over the ranks once"),
    Row(
        (
            ZERO + "cpu_offload_use_pin_memory",
            ZERO + "save_muon_momentum_buffer_in_memory",
            "aio",
            ZERO + "offload_optimizer.nvme_path",
            ZERO + "offload_optimizer.buffer_count",
            ZERO + "offload_optimizer.pipeline_read",
            ZERO + "offload_optimizer.pipeline_write",
            ZERO + "offload_optimizer.fast_init",
            ZERO + "offload_optimizer.cpuadam_cores_perc",
        ),
        "ignored",
        "it belongs to a setting that is refused",
    ),
    Row(
        (
            ZERO + "ignore_unused_parameters",
            ZERO + "legacy_stage1",
            ZERO + "elastic_checkpoint",
            ZERO + "compute_grad_norm",
            ZERO + "load_from_fp32_weights",
            ZERO + "pipeline_loading_checkpoint",
            ZERO + "memory_efficient_linear",
            ZERO + "override_module_apply",
            ZERO + "log_trace_cache_warnings",
            ZERO + "enable_sanity_checks",
        ),
        "ignored",
        "it tunes code of ZeRO's that does not run",
    ),
    Row(
        tuple(f"checkpoint.writer.{key}" for key in ("type", "io_buffer_size", "io_buffer_double", "show_statistics"))
        + ("checkpoint.writer.data_parallel", "checkpoint.writer.io_multiplier"),
        "ignored",
        "it tunes DeepSpeed's writers, and each owner writes its own file",
    ),
    Row(
        ("torch_autocast.lower_precision_safe_modules",),
        "ignored",
        "parameters and sums travel in the dtype in which they are kept",
    ),
    Row(("bf16.immediate_grad_update",), "ignored", "as in ZeRO-3"),
    Row(("timers.throughput.synchronized",), "ignored", "the throughput timer reads the device's events and does not wait"),
    Row(
        ("bf16.check_grad_overflow",), "ignored", "dp and cdp-v1 skip a step whose norm is not finite, cdp-v2 cannot know in time"
    ),
)


def _raw(raw: dict[str, Any], path: str) -> Any:
    """The value at a dotted path of the ds_config dict, or _ABSENT."""
    value: Any = raw
    for part in path.split("."):
        if not isinstance(value, dict) or part not in value:
            return _ABSENT
        value = value[part]
    return _ABSENT if isinstance(value, str) and value == "auto" else value


def _value(config: Any, raw: dict[str, Any], path: str) -> Any:
    """The value at a dotted path as DeepSpeed parsed it, else as the user wrote it, else _ABSENT."""
    written = _raw(raw, path)
    head, *rest = path.split(".")
    section = getattr(config, _PARSED.get(head, ""), None)
    if section is None or not rest:
        return written
    for part in rest:
        if section is None:
            return _ABSENT
        fields = getattr(type(section), "model_fields", {})
        name = next((name for name, field in fields.items() if part in (name, field.alias)), None)
        # A deprecated key is deleted from the parsed section once it is resolved.
        section = getattr(section, name, written) if name is not None else written
    return section


def _show(value: Any) -> str:
    if hasattr(value, "device"):
        value = value.device
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict) or hasattr(type(value), "model_fields"):
        return "set"
    return str(int(value)) if isinstance(value, int) else str(getattr(value, "value", value))


def refusal(setting: str, value: str) -> ValueError:
    """The error of the row of `setting`, for rows about the model, which the config does not show."""
    row = next(row for row in TABLE if row.verdict == "refused" and setting in row.settings)
    return ValueError(f"{setting} is {value}: {row.reason}; {row.fix}.")


def check_supported(config: Any, raw: dict[str, Any] | None = None) -> tuple[str, ...]:
    """Raises ValueError, "key is value: reason; fix.", for the first setting that the cyclic engine refuses.

    Args:
        config: a parsed DeepSpeedConfig with its `cyclic_config`.
        raw: the ds_config dict as the user wrote it; the config's own by default.

    Returns:
        The settings that the user wrote and that are ignored.
    """
    raw = config._param_dict if raw is None else raw
    _refuse(TABLE, config, raw)
    return tuple(
        setting for row in TABLE if row.verdict == "ignored" for setting in row.settings if _raw(raw, setting) is not _ABSENT
    )


def check_ring_size(config: Any, size: int) -> None:
    """Raises ValueError for the settings that the rule refuses with this size of the ring, which `auto` did not tell before.

    Args:
        config: as for `check_supported`.
        size: ranks per ring.
    """
    config.cyclic_ring_size = size
    _refuse([row for row in TABLE if row.reason == LATE], config, config._param_dict)


def _refuse(rows: Iterable[Row], config: Any, raw: dict[str, Any]) -> None:
    for row in rows:
        for setting in row.settings:
            value = _value(config, raw, setting)
            if value is not _ABSENT and row.refuses and row.refuses(value, config):
                under = f" under cyclic.rule {config.cyclic_config.rule}" if row.reason == LATE else ""
                raise ValueError(f"{setting} is {_show(value)}{under}: {row.reason}; {row.fix}.")


def _lines() -> Iterator[str]:
    yield "| setting | verdict | why | instead |"
    yield "|---|---|---|---|"
    for verdict in ("supported", "ignored", "refused"):
        for row in TABLE:
            if row.verdict == verdict:
                names = ", ".join(f"`{setting}`" for setting in row.settings)
                yield f"| {names}{': ' + row.when if row.when else ''} | {verdict} | {row.reason} | {row.fix} |"


def as_markdown() -> str:
    """The table as docs/settings.md has it between its `<!-- settings -->` markers."""
    return "\n".join(_lines()) + "\n"


if __name__ == "__main__":
    print(as_markdown(), end="")
