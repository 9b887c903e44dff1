"""Reads the keys of a ds_config.json that determine a plan, as the engine does."""

import json
from dataclasses import dataclass
from typing import Any

import torch

from deepspeed_cdp.cli.output import UserError
from deepspeed_cdp.integration.config import CYCLIC, CyclicConfig, misspelt, parse_cyclic
from deepspeed_cdp.model.make_plan import Settings
from deepspeed_cdp.optim.delay_correction import chosen

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
FAMILIES = {"adam": "adam", "adamw": "adam", "adamax": "adamax", "muon": "muon"}  # as optim.delay_correction.family
STATES = {"adam": 2, "adamw": 2, "fusedadam": 2, "lamb": 2, "lion": 1, "muon": 1, "sgd": 1, "adagrad": 1, "rmsprop": 1}


@dataclass(frozen=True)
class Config:
    """The relevant parts of a ds_config.

    Attributes:
        dtype: of the parameters.
        settings: of the runtime.
        micro_batch: number of samples, None if not given.
        optimizer: its name.
        states: fp32 values that it keeps per parameter, besides the masters.
        offload: masters and optimizer state are in host memory.
        cyclic: the block, or its defaults.
        assumed: batch keys that are "auto", which count as 1.
        sequence: ranks that work on one sequence.
        tensor: ranks that share the layers; tensor_parallel: the block, with this number.
    """

    dtype: torch.dtype
    settings: Settings
    micro_batch: int | None
    optimizer: str
    states: int
    offload: bool
    cyclic: CyclicConfig
    assumed: tuple[str, ...]
    sequence: int
    tensor: int
    tensor_parallel: dict[str, Any]

    @property
    def members(self) -> int:
        """Ranks of a group, which are in as many rings."""
        return self.sequence * self.tensor

    @property
    def halves(self) -> bool:
        """Whether owners on GPUs keep masters in halves (optim/masters.py)."""
        return self.dtype == torch.bfloat16 and not self.offload

    @property
    def whole_update_bytes(self) -> int:
        """Device memory traffic of an update per parameter: the sum, the fp32 master and states, the 16-bit copy."""
        return 2 + 8 * (1 + self.states) + 2

    @property
    def update_bytes(self) -> int:
        """The same of the engine's owners: of a master in halves the copy is read, and only the lower half written besides."""
        return self.whole_update_bytes - 2 * self.halves

    @property
    def prediction_bytes(self) -> int:
        """The same of a prediction, which writes the copy only."""
        return 2 + 4 * (1 + self.states) + 2


def _number(config: dict[str, Any], key: str, default: Any) -> Any:
    value = config.get(key, default)
    if value == "auto":
        return default
    if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float)) or value < 0):
        raise UserError(f"{key} is {value!r} in the ds_config; allowed is a number; correct it")
    return value


def _block(config: dict[str, Any], key: str) -> dict[str, Any]:
    value = config.get(key)
    if value is not None and not isinstance(value, dict):
        raise UserError(f"{key} is {json.dumps(value)} in the ds_config; allowed is a block of settings; write {{...}}")
    return value or {}


def _refuse(config: dict[str, Any]) -> None:
    """Raise the engine's error for unsupported settings, by DeepSpeed's own parser and the package's table."""
    import deepspeed

    written = {k: v for k, v in _without_auto(config).items() if k not in ("train_batch_size", "train_micro_batch_size_per_gpu")}
    block = dict(_block(written, CYCLIC), enabled=True)
    block.pop("ring_size", None)
    zero = {"stage": 3, **_block(written, "zero_optimization")}
    try:
        deepspeed.DeepSpeedConfig({**written, "train_micro_batch_size_per_gpu": 1, "zero_optimization": zero, CYCLIC: block})
    except AssertionError as error:
        raise UserError(f"DeepSpeed refuses the ds_config: {error}") from None


def _without_auto(value: Any) -> Any:
    """Drop "auto" values, which Hugging Face replaces before DeepSpeed reads them."""
    return {k: _without_auto(v) for k, v in value.items() if v != "auto"} if isinstance(value, dict) else value


def read(
    path: str | None,
    ranks: int,
    rule: str | int | None = None,
    ring_size: int | None = None,
    sequence: int | None = None,
    tensor: int | None = None,
) -> Config:
    """Read a ds_config file; without one: bf16, AdamW, no clipping, and defaults.

    Args:
        ranks: of all rings.
        rule, ring_size: override the cyclic block's.
        sequence, tensor: override sequence_parallel_size and tensor_parallel.autotp_size.
    Raises:
        UserError, ValueError: the file cannot be read, or has a wrong value.
    """
    config: Any = {"bf16": {"enabled": True}, "gradient_clipping": 0.0, "optimizer": {"type": "AdamW"}}
    if path is not None:
        try:
            with open(path) as file:
                config = json.load(file)
        except OSError as error:
            raise UserError(f"--config names {path!r}, which cannot be read ({error.strerror}); give a ds_config.json") from None
        except ValueError as error:
            raise UserError(f"--config names {path!r}, which is no JSON ({error}); correct it") from None
        if not isinstance(config, dict):
            raise UserError(f"--config names {path!r}, which holds no block of settings; give a ds_config.json")
    _refuse(config)
    if path is not None:
        stage = _block(config, "zero_optimization").get("stage", 0)
        if stage != 3:
            raise UserError(
                f"zero_optimization.stage is {stage} in the ds_config, under which every rank keeps all parameters, "
                "but only stage 3 can be predicted; set it to 3"
            )
    if near := misspelt(config):
        raise UserError(f"{near} is in the ds_config, but DeepSpeed knows no such key; did you mean {CYCLIC!r}?")
    block: dict[str, Any] = dict(_block(config, CYCLIC)) if CYCLIC in config else {"enabled": True}
    if rule is not None:
        block["rule"] = rule
    if ring_size is not None:
        block["ring_size"] = ring_size
    sequence = sequence or int(_number(config, "sequence_parallel_size", 1) or 1)
    layers = _block(config, "tensor_parallel")
    tensor = tensor or int(_number(layers, "autotp_size", 1) or 1)
    if sequence > 1 and tensor > 1:
        raise UserError(
            f"sequence_parallel_size is {sequence} and tensor_parallel.autotp_size is {tensor}, but a group of ranks shares a "
            "sequence or layers; remove one of both"
        )
    for key, size in (("sequence_parallel_size", sequence), ("tensor_parallel.autotp_size", tensor)):
        if ranks % size:
            raise UserError(f"{key} is {size}, which does not divide --ranks {ranks}; choose a divisor")
    groups = ranks // (sequence * tensor)
    cyclic = parse_cyclic({CYCLIC: block}, groups)
    if not cyclic.enabled:
        raise UserError(f"{CYCLIC}.enabled is false in the ds_config, so nothing is planned; set it to true")
    dtype = next((DTYPES[k] for k in ("bf16", "fp16") if _block(config, k).get("enabled") is True), torch.float32)
    sums = _block(config, "data_types").get("grad_accum_dtype")
    if sums not in (None, "auto", *DTYPES):
        raise UserError(f"data_types.grad_accum_dtype is {sums!r} in the ds_config; allowed are {', '.join(DTYPES)}; choose one")
    optimizer = str(_block(config, "optimizer").get("type", "AdamW"))
    params = _block(config, "optimizer").get("params") or {}
    states = STATES.get(optimizer.lower(), 2)
    if optimizer.lower() == "sgd" and not (isinstance(params, dict) and params.get("momentum")):
        states = 0
    zero = _block(config, "zero_optimization")
    offload = zero.get("offload_optimizer") or {}
    settings = Settings(
        cyclic.rule,
        cyclic.partition_method,
        cyclic.units,
        int(_number(config, "gradient_accumulation_steps", 1) or 1),
        float(_number(config, "gradient_clipping", 1.0) or 0.0),  # 1.0 is DeepSpeed's own default
        DTYPES.get(str(sums)),
        cyclic.keep_after_forward,
        int(cyclic.min_unit_mb * 2**20),
        prefetch_units=cyclic.prefetch_units,
        warmup_steps=cyclic.warmup_steps,
        delay_correction=chosen(cyclic.correction, FAMILIES.get(optimizer.lower(), "")),
        any_order=cyclic.any_order,
    )
    micro = _number(config, "train_micro_batch_size_per_gpu", None)
    if micro is None and (batch := _number(config, "train_batch_size", None)):
        micro = batch // (groups * settings.rounds) or None
    return Config(
        dtype,
        settings,
        None if micro is None else int(micro),
        optimizer,
        states,
        isinstance(offload, dict) and offload.get("device") == "cpu",
        cyclic,
        tuple(k for k in ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps") if config.get(k) == "auto"),
        sequence,
        tensor,
        {**_without_auto(layers), "autotp_size": tensor},
    )
