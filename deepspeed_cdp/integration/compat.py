"""The names of DeepSpeed that this package relies on beyond its documented interface, and the versions it is tested with.

Registration calls `problem` and warns. `deepspeed.initialize` calls `require` when a config enables the engine, and raises. Both
look only at modules that ``import deepspeed`` has loaded, and import none.
"""

import functools
import inspect
import sys
from collections.abc import Iterator
from typing import Any

# Tested versions: oldest, newest.
DEEPSPEED = ("0.19.8", "0.19.8")
TORCH = ("2.6", "2.13")

_ENGINE = "deepspeed.runtime.engine:DeepSpeedEngine."
_HOOKS = ("module_forward_pre_hook", "module_forward_post_hook")
_PIPE_ENGINE = "deepspeed.runtime.pipe.engine:PipelineEngine."
_MODULE = "deepspeed.runtime.pipe.module:PipelineModule."
_CONFIG = "deepspeed.runtime.config:DeepSpeedConfig."
_FRAGMENT = "deepspeed.utils.tensor_fragment:"
_FP32 = "deepspeed.utils.zero_to_fp32:"
_TIMER = "deepspeed.utils.timer:ThroughputTimer."
_SAMPLER = "deepspeed.runtime.data_pipeline.data_sampling.data_sampler:DeepSpeedDataSampler."

# Functions that this package overrides or wraps -> exactly these parameters. DeepSpeed calls ours in their place.
OVERRIDDEN: dict[str, tuple[str, ...]] = {
    _CONFIG + "_initialize_params": ("self", "param_dict"),
    **{
        f"{engine}{name}": ("self", parameter)
        for engine in (_ENGINE, _PIPE_ENGINE)
        for name, parameter in (
            ("_configure_distributed_model", "model"),
            ("_do_optimizer_sanity_check", "basic_optimizer"),
            ("_configure_zero_optimizer", "optimizer"),
        )
    },
    _ENGINE + "_zero3_consolidated_16bit_state_dict": ("self", "exclude_frozen_parameters"),
    _ENGINE + "_consolidated_16bit_state_dict": ("self", "exclude_frozen_parameters"),
    _ENGINE + "zero_optimization": ("self",),
    _ENGINE + "zero_optimization_partition_gradients": ("self",),
    _ENGINE + "zero_optimization_partition_weights": ("self",),
    _ENGINE + "_broadcast_model": ("self",),
    _ENGINE + "destroy": ("self",),
    _FP32 + "_get_fp32_state_dict_from_zero_checkpoint": ("ds_checkpoint_dir", "exclude_frozen_parameters"),
    _SAMPLER + "get_next_global_batch": ("self",),
    _SAMPLER + "get_new_cluster": ("self", "previous_difficulties"),
    _SAMPLER + "reshuffle_clusters": ("self", "cidx"),
    _SAMPLER + "state_dict": ("self",),
    _SAMPLER + "load_state_dict": ("self", "state_dict"),
    _TIMER + "start": ("self",),
    _TIMER + "stop": ("self", "global_step", "report_speed"),
}

# Functions that this package calls -> at least these parameters.
CALLED: dict[str, tuple[str, ...]] = {
    "deepspeed:initialize": ("args", "model", "mpu", "config", "mesh_param", "config_params"),
    _PIPE_ENGINE + "_next_batch": ("self",),
    _PIPE_ENGINE + "_reentrant_activation_checkpointing": ("self",),
    _PIPE_ENGINE + "_report_progress": ("self", "step"),
    _MODULE + "__init__": ("self", "num_stages", "topology", "partition_method"),
    _MODULE + "_partition_layers": ("self", "method"),
    _MODULE + "_is_checkpointable": ("self", "funcs"),
    "deepspeed.runtime.zero.partition_parameters:_init_external_params": ("module",),
    "deepspeed.runtime.utils:maybe_loss_for_backward": ("value",),
    "deepspeed.utils.groups:_init_tp_mesh_device": ("tensor_model_parallel_size",),
    _ENGINE + "_apply_autotp_partitioning": ("self", "model", "tp_config"),
    _SAMPLER + "__init__": ("data_efficiency_config", "data_parallel_rank", "data_parallel_group", "global_rank", "drop_last"),
    _SAMPLER + "sample_from_clusters": ("self",),
    _SAMPLER + "get_sample_from_cluster": ("self", "cidx", "num_samples"),
    _SAMPLER + "get_sample_based_on_metric_value": ("self", "metric", "value_start", "value_end"),
    _SAMPLER + "get_sample_based_on_metric_percentile": ("self", "metric", "percentile_start", "percentile_end"),
    _TIMER + "__init__": ("self", "config", "batch_size", "start_step", "steps_per_output", "logging_fn"),
    _TIMER + "_init_timer": ("self",),
    _TIMER + "_is_report_boundary": ("self",),
}

# Functions -> globals and attributes that their code must name: ours take the place of these, or are read by them.
MENTIONED: dict[str, tuple[str, ...]] = {
    "deepspeed:initialize": ("DeepSpeedEngine", "PipelineEngine", "DeepSpeedConfig"),
    _CONFIG + "__init__": ("_param_dict", "_initialize_params", "world_size"),
    _ENGINE + "__init__": ("_config", "tput_timer", "inside_no_sync_ctxt", "enable_backward_allreduce", *_HOOKS),
    _ENGINE + "_configure_optimizer": ("_configure_zero_optimizer", "_do_optimizer_sanity_check"),
    _ENGINE + "deepspeed_io": ("DeepSpeedDataLoader", "curriculum_learning_enabled"),
    _SAMPLER + "__init__": ("np_rng", "curriculum_schedulers", "difficulty_type", "clustering_type", "data_cluster_sizes"),
    _SAMPLER + "get_sample_from_cluster": ("data_clusters", "data_cluster_current_position", "reshuffle_clusters"),
    _SAMPLER + "__iter__": ("batch", "get_next_global_batch", "consumed_samples"),
    _MODULE + "__init__": ("_topo", "_layer_specs", "_local_start", "_local_stop", "is_checkpointable_results"),
    _FP32 + "get_fp32_state_dict_from_zero_checkpoint": ("_get_fp32_state_dict_from_zero_checkpoint",),
    "deepspeed.runtime.zero.partition_parameters:_init_external_params": (
        "_external_params",
        "ds_external_parameters",
        "all_parameters",
    ),
    **{
        _FRAGMENT + function: ("_z3_optimizer", method)
        for function, method in (
            ("safe_get_full_fp32_param", "get_full_hp_param"),
            ("safe_set_full_fp32_param", "set_full_hp_param"),
            ("safe_get_full_optimizer_state", "get_full_hp_param"),
            ("safe_set_full_optimizer_state", "set_full_hp_param"),
            ("safe_get_full_grad", "get_fp32_grad_for_param"),
            ("safe_set_full_grad", "set_fp32_grad_for_param"),
            ("safe_get_local_grad", "get_local_fp32_grad_for_param"),
            ("safe_set_local_grad", "set_local_grad_for_param"),
            ("safe_get_local_fp32_param", "get_local_fp32_param"),
            ("safe_set_local_fp32_param", "set_local_hp_param"),
            ("safe_get_local_optimizer_state", "get_local_fp32_param"),
            ("safe_set_local_optimizer_state", "set_local_hp_param"),
            ("safe_update_full_grad_vectorized", "update_fp32_grad_for_param_vectorized"),
        )
    },
}

# Other names that are imported, called or replaced.
PRESENT: tuple[str, ...] = (
    "deepspeed:DeepSpeedEngine",
    "deepspeed:PipelineEngine",
    "deepspeed:PipelineModule",
    "deepspeed:DeepSpeedConfig",
    "deepspeed.runtime.base_optimizer:ZeROOptimizer",
    "deepspeed.runtime.base_optimizer:DeepSpeedOptimizer",
    "deepspeed.runtime.pipe.module:TiedLayerSpec",
    "deepspeed.runtime.pipe.topology:PipeDataParallelTopology",
    "deepspeed.runtime.pipe.topology:ProcessTopology",
    "deepspeed.runtime.torch_autocast:autocast_if_enabled",
    "deepspeed.runtime.utils:DummyOptim",
    "deepspeed.runtime.zero.config:ZERO_OPTIMIZATION",
    "deepspeed.runtime.zero.parameter_offload:ZeROOrderedDict",
    "deepspeed.runtime.zero.partition_parameters:ZeroParamStatus",
    "deepspeed.utils.groups:_get_sequence_parallel_world_size",
    "deepspeed.utils.groups:_get_sequence_parallel_group",
    "deepspeed.utils.timer:TIME_EPSILON",
    "torch.distributed:ProcessGroup._get_sequence_number_for_group",
)


def _find(path: str) -> Any:
    """The object at "module:Class.name", or None."""
    module, _, names = path.partition(":")
    return functools.reduce(lambda found, name: getattr(found, name, None), names.split("."), sys.modules.get(module))


def _code(path: str) -> Any:
    """The code of the function at a path, without this package's and other wrappers; None if there is no such function."""
    found = _find(path)
    return getattr(inspect.unwrap(found), "__code__", None) if callable(found) else None


def missing() -> Iterator[str]:
    """Whatever this DeepSpeed lacks of the tables above, in words."""
    for path in PRESENT:
        if _find(path) is None:
            yield f"{path.replace(':', '.')}"
    for path in dict.fromkeys((*OVERRIDDEN, *CALLED, *MENTIONED)):
        name, code = path.replace(":", "."), _code(path)
        if code is None:
            yield name
            continue
        parameters = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        if path in OVERRIDDEN and parameters != OVERRIDDEN[path]:
            yield f"{name}({', '.join(OVERRIDDEN[path])})"
        yield from (f"parameter {p!r} of {name}" for p in CALLED.get(path, ()) if p not in parameters)
        yield from (f"{other!r} in the code of {name}" for other in MENTIONED.get(path, ()) if other not in _names(code))


def _names(code: Any) -> set[str]:
    """Globals and attributes that a function's code names, nested functions included."""
    nested = (constant for constant in code.co_consts if hasattr(constant, "co_names"))
    return set(code.co_names).union(*map(_names, nested))


def _release(version: str) -> tuple[int, ...]:
    from packaging.version import Version

    return Version(version).release


def _tested(name: str, versions: tuple[str, str]) -> str:
    oldest, newest = versions
    return f"{name} {oldest}" if oldest == newest else f"{name} {oldest} to {newest}"


def problem() -> str | None:
    """A sentence that says why the cyclic engine cannot run with these versions, or None."""
    import deepspeed
    import torch

    for name, version, tested in (("DeepSpeed", deepspeed.__version__, DEEPSPEED), ("torch", torch.__version__, TORCH)):
        if _release(version) < _release(tested[0]):
            return (
                f"{name} is {version}, but the cyclic engine needs at least {tested[0]}; "
                f"install a tested version ({_tested(name, tested)})"
            )
    lacking = list(missing())
    if lacking:
        more = f" and {len(lacking) - 1} more" if len(lacking) > 1 else ""
        return (
            f"DeepSpeed {deepspeed.__version__} lacks {lacking[0]}{more}, on which the cyclic engine relies; "
            f"install a tested version ({_tested('DeepSpeed', DEEPSPEED)})"
        )
    return None


def require() -> None:
    """Raise RuntimeError if the cyclic engine cannot run with these versions; log a warning above the tested ones."""
    import deepspeed
    import torch
    from deepspeed.utils import logger

    if sentence := problem():
        raise RuntimeError(sentence)
    for name, version, tested in (("DeepSpeed", deepspeed.__version__, DEEPSPEED), ("torch", torch.__version__, TORCH)):
        newest = _release(tested[1])
        if _release(version)[: len(newest)] > newest:
            logger.warning(f"{name} {version} is newer than the tested versions ({_tested(name, tested)})")
