"""Registration with DeepSpeed: the only file that replaces `deepspeed.initialize` and extends `DeepSpeedConfig`.

`register` gives every DeepSpeedConfig a `cyclic_config`. It rebinds `deepspeed.initialize` to a function of the same signature,
which builds a CyclicEngine if the config enables it and calls the stock function otherwise.
"""

import base64
import copy
import functools
import inspect
import os
import warnings
import weakref
from collections.abc import Callable, Mapping
from typing import Any

from deepspeed_cdp.integration import compat
from deepspeed_cdp.integration.pipe_register import classes, refuse_placed, stock_again, tolerate_placements

# This module imports neither deepspeed nor modules that import it: registration runs at the end of `import deepspeed`, which a
# module of this package may have started.

# Marks our wrappers on the functions themselves: importlib.reload(deepspeed) drops them, a flag in this module would stay.
_STOCK = "__deepspeed_cdp_stock__"
# model -> a weak reference to the last stock engine that it was given to
_STOCK_ENGINES: "weakref.WeakKeyDictionary[Any, Callable[[], Any]]" = weakref.WeakKeyDictionary()


def register() -> None:
    """Makes DeepSpeed understand `"cyclic": {"enabled": true}`. Idempotent.

    With a DeepSpeed or torch that the engine cannot run with, it warns, and a config that enables the engine is an error.
    """
    import deepspeed
    from deepspeed.utils import zero_to_fp32

    if problem := compat.problem():
        warnings.warn(f'{problem}; until then "cyclic": {{"enabled": true}} is an error', RuntimeWarning, stacklevel=2)
    else:
        config = deepspeed.DeepSpeedConfig
        if not hasattr(config._initialize_params, _STOCK):
            config._initialize_params = _with_cyclic_config(config._initialize_params)
        tolerate_placements()
        if not hasattr(zero_to_fp32._get_fp32_state_dict_from_zero_checkpoint, _STOCK):
            zero_to_fp32._get_fp32_state_dict_from_zero_checkpoint = _with_cyclic_checkpoints(
                zero_to_fp32._get_fp32_state_dict_from_zero_checkpoint
            )
    if not hasattr(deepspeed.initialize, _STOCK):
        deepspeed.initialize = _with_cyclic_engine(deepspeed.initialize)


def unregister() -> None:
    """Puts the stock functions back (for tests)."""
    import deepspeed
    from deepspeed.utils import zero_to_fp32

    read = zero_to_fp32._get_fp32_state_dict_from_zero_checkpoint
    zero_to_fp32._get_fp32_state_dict_from_zero_checkpoint = getattr(read, _STOCK, read)
    config = deepspeed.DeepSpeedConfig
    config._initialize_params = getattr(config._initialize_params, _STOCK, config._initialize_params)
    deepspeed.initialize = getattr(deepspeed.initialize, _STOCK, deepspeed.initialize)
    stock_again()


def engine_class() -> type:
    """The engine that replaces DeepSpeedEngine; imported only when a config enables it."""
    from deepspeed_cdp.integration.engine import CyclicEngine

    return CyclicEngine


def _with_cyclic_config(stock: Callable[..., None]) -> Callable[..., None]:

    @functools.wraps(stock)
    def _initialize_params(self: Any, param_dict: dict[str, Any]) -> None:
        from deepspeed_cdp.integration.config import parse_cyclic
        from deepspeed_cdp.integration.support import check_supported

        written = dict(param_dict)  # before DeepSpeed fills in sections of its own
        stock(self, param_dict)
        world_size = int(self.world_size) if hasattr(self, "world_size") else None  # a float with sequence groups
        self.cyclic_config = parse_cyclic(written, world_size)
        if self.cyclic_config.enabled:
            self.world_size = world_size  # else batch sizes would be floats, too
            self.cyclic_ignored = check_supported(self, written)  # settings the user wrote to no effect

    setattr(_initialize_params, _STOCK, stock)
    return _initialize_params


def _with_cyclic_checkpoints(stock: Callable[..., dict]) -> Callable[..., dict]:
    """DeepSpeed's functions of ``zero_to_fp32`` call this one by its name, so copies that were imported before read ours, too."""

    @functools.wraps(stock)
    def _get_fp32_state_dict_from_zero_checkpoint(ds_checkpoint_dir: str, exclude_frozen_parameters: bool) -> dict[str, Any]:
        from deepspeed_cdp.checkpoint.export import lazy_weights
        from deepspeed_cdp.checkpoint.format import MANIFEST

        if os.path.isfile(os.path.join(ds_checkpoint_dir, MANIFEST)):
            return lazy_weights(ds_checkpoint_dir, exclude_frozen_parameters)
        return stock(ds_checkpoint_dir, exclude_frozen_parameters)

    setattr(_get_fp32_state_dict_from_zero_checkpoint, _STOCK, stock)
    return _get_fp32_state_dict_from_zero_checkpoint


def _with_cyclic_engine(stock: Callable[..., tuple]) -> Callable[..., tuple]:
    signature = inspect.signature(stock)

    @functools.wraps(stock)
    def initialize(*args: Any, **kwargs: Any) -> tuple:
        import deepspeed
        from deepspeed.utils import log_dist, logger

        from deepspeed_cdp.integration.config import CYCLIC, misspelt, parse_cyclic

        given = signature.bind(*args, **kwargs).arguments
        raw = _resolve_config(given)
        if CYCLIC not in raw or not parse_cyclic(raw).enabled:
            refuse_placed(given.get("model"), CYCLIC in raw)
            if near := misspelt(raw):
                logger.warning(
                    f"{near} is in the config, but DeepSpeed knows no such key, so it has no effect; did you mean {CYCLIC!r}?"
                )
            _take_back(given.get("model"))
            return _remembered(given.get("model"), stock(*args, **kwargs))
        compat.require()
        from deepspeed_cdp.integration.zero3_params import release_stock

        if _is_only_used(given, raw):
            _take_back(given.get("model"))
            result = _remembered(given.get("model"), stock(**_disabled(given, raw)))
            log_dist("cyclic: there is no optimizer, so DeepSpeed's own engine serves this model", ranks=[0])
            return result
        _refuse_model(given, parse_cyclic(raw).placement)
        # Stock `initialize` has no parameter for the engine's class: it reads `DeepSpeedEngine` (for a PipelineModule,
        # `PipelineEngine`) from the globals of its module. These name our classes during this call only. Our classes derive
        # from the stock ones, so isinstance(engine, deepspeed.DeepSpeedEngine) holds afterwards.
        pipeline = isinstance(given.get("model"), deepspeed.PipelineModule)
        ours = classes() if pipeline else {"DeepSpeedEngine": engine_class()}
        if before := _STOCK_ENGINES.pop(given["model"], lambda: None)():
            release_stock(before)
        stocks = {name: getattr(deepspeed, name) for name in ours}
        for name, cls in ours.items():
            setattr(deepspeed, name, cls)
        try:
            result = stock(*args, **kwargs)
        finally:
            for name, cls in stocks.items():
                setattr(deepspeed, name, cls)
        engine = next(iter(ours.values()))
        if not isinstance(result[0], engine):  # never train with the wrong engine silently
            raise RuntimeError(
                f"deepspeed.initialize built {type(result[0]).__name__}, not {engine.__name__}, although {CYCLIC}.enabled is "
                "true; remove what else replaces deepspeed.initialize or its engines"
            )
        return result

    setattr(initialize, _STOCK, stock)
    return initialize


def _remembered(model: Any, result: tuple) -> tuple:
    """What stock `initialize` returned, unchanged; a cyclic engine that takes over the model destroys this engine before."""
    if hasattr(model, "named_modules") and hasattr(result[0], "named_modules"):
        _STOCK_ENGINES[model] = weakref.ref(result[0])
    return result


def _take_back(model: Any) -> None:
    """Collective: destroy the model's cyclic engine, if any, and make its parameters ordinary ones."""
    import torch

    if isinstance(model, torch.nn.Module) and any(hasattr(p, "ds_id") for p in model.parameters()):
        from deepspeed_cdp.integration.zero3_params import destroy_engines
        from deepspeed_cdp.model.remains import make_whole

        destroy_engines(model)
        make_whole(model)


def _is_only_used(given: Mapping[str, Any], raw: Mapping[str, Any]) -> bool:
    """Whether the model is for evaluation or prediction, or a reference: there is no optimizer, and DeepSpeed needs none."""
    import deepspeed

    section = raw.get("zero_optimization")
    stage = section.get("stage", 0) if isinstance(section, dict) else 0
    trains = given.get("optimizer") is not None or "optimizer" in raw or isinstance(given.get("model"), deepspeed.PipelineModule)
    return not trains and stage in (0, 3)


def _disabled(given: Mapping[str, Any], raw: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of `initialize`, with a config that does not enable the engine."""
    from deepspeed_cdp.integration.config import CYCLIC

    args = copy.copy(given.get("args"))
    for name in ("deepscale_config", "deepspeed_config"):
        if getattr(args, name, None) is not None and given.get("config") is None:  # (two configs are an error of DeepSpeed's)
            setattr(args, name, None)
    return {**given, "args": args, "config": {**raw, CYCLIC: {**raw[CYCLIC], "enabled": False}}, "config_params": None}


def _resolve_config(given: Mapping[str, Any]) -> dict[str, Any]:
    """The ds_config dict that stock `initialize` is going to use, without side effects.

    Args:
        given: the arguments of `initialize` that were passed, by name.

    Returns:
        The dict; an empty one where stock `initialize` is about to fail, so that its own error is the one seen.
    """
    import hjson

    config: Any = given.get("config")
    if config is None:
        config = given.get("config_params")
    args = given.get("args")
    for name in ("deepscale_config", "deepspeed_config"):
        from_args = getattr(args, name, None)
        if from_args is not None:
            config = from_args
    if isinstance(config, dict):
        return config
    try:
        if os.path.exists(config):
            with open(config) as file:
                loaded = hjson.load(file)
        else:
            loaded = hjson.loads(base64.urlsafe_b64decode(config).decode("utf-8"))
    except (TypeError, ValueError, OSError):
        return {}
    return loaded if isinstance(loaded, dict) else {}


def _refuse_model(given: Mapping[str, Any], placement: str) -> None:
    """Raises for what the config does not show (`check_supported` sees the rest, hybrid engine included)."""
    import deepspeed
    import torch
    from deepspeed.moe.layer import MoE

    from deepspeed_cdp.integration.support import refusal

    model = given.get("model")
    if type(model).__name__ == "DualPipeVModule":
        raise refusal("model: DualPipeVModule", "given")
    if placement != "auto" and not isinstance(model, deepspeed.PipelineModule):
        raise ValueError(
            f"cyclic.placement is '{placement}', but the model is a {type(model).__name__}; placements are for "
            'deepspeed.PipelineModule; use "auto".'
        )
    for name, module in model.named_modules() if isinstance(model, torch.nn.Module) else ():
        if isinstance(module, MoE) and module.ep_size > 1:
            raise refusal("model: deepspeed.moe.layer.MoE", f"at '{name}' with ep_size {module.ep_size}")
        if isinstance(module, MoE) and isinstance(model, deepspeed.PipelineModule):
            raise ValueError(
                f"model: deepspeed.moe.layer.MoE is at '{name}' of a PipelineModule, where it has not been tried; keep whole "
                "experts in ordinary modules."
            )
    mpu = given.get("mpu")
    if hasattr(mpu, "initialize_sequence_parallel"):  # DeepSpeed's own, whose model parallel groups are the sequence groups
        return
    degrees = [getattr(mpu, f"get_{kind}_parallel_world_size", int)() for kind in ("model", "tensor_model")]
    if max(degrees) > 1:
        raise refusal("model: mpu", f"of size {max(degrees)}")
