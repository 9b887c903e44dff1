"""The `cyclic` block of ds_config.json.

    "cyclic": {"enabled": true, "rule": "cdp-v2", "partition_method": "auto", "units": null, "ring_size": "auto",
               "transport": "auto", "keep_after_forward": false, "min_unit_mb": 0, "warmup_steps": 0, "placement": "auto",
               "timeout_seconds": 600, "weights": null, "gradient_accumulation_fusion": "auto"}

`parse_cyclic` turns a whole ds_config dict into a `CyclicConfig`. Every error is a ValueError of one sentence that names the
key, its value, what is allowed and how to fix it.
"""

import difflib
import json
import re
from typing import Any, Literal

from deepspeed.runtime.config_utils import DeepSpeedConfigModel
from pydantic import Field, StrictBool, ValidationError, field_validator

from deepspeed_cdp.plan.schedule import RULES

CYCLIC = "cyclic"

# key -> (what is allowed, how to fix a wrong value)
KEYS: dict[str, tuple[str, str]] = {
    "enabled": ("true and false", 'write "enabled": true to train with the cyclic engine'),
    "rule": (
        '"dp", "cdp-v1", "cdp-v2" or an integer K with 0 <= K <= 2N-1 on a ring of N ranks',
        'use "cdp-v2" unless you need another',
    ),
    "partition_method": (
        '"auto", "parameters", "uniform", "flops" or "type:REGEX" with a valid regular expression',
        'use "auto" unless you need another',
    ),
    "units": ("null or a list of distinct module paths as in named_modules()", "use null to let the units be found"),
    "ring_size": ('"auto" or an integer of at least 1', 'use "auto" for a ring per host'),
    "transport": ('"auto", "gloo", "nccl" and "peer"', 'use "auto" to get the fastest one that works'),
    "keep_after_forward": ("true and false", "use false unless memory is plentiful"),
    "min_unit_mb": ("a number of MiB from 0 to 1e9", "use 0 to hand off each module by itself"),
    "warmup_steps": ("an integer of at least 0", "use 0 to follow the rule from the first step"),
    "placement": ('"auto", "pyramid", "pipeline" and "single"', 'use "auto"'),
    "timeout_seconds": ("a number of seconds from 0.01 to 1e6", "use 600 unless steps take minutes"),
    "weights": ("null or the path of a folder of safetensors files", "use null unless the model is on the meta device"),
    "gradient_accumulation_fusion": ('"auto", true and false', 'use "auto" for true on GPUs and false on CPUs'),
}


def _show(value: Any) -> str:
    """A value as the user wrote it in JSON."""
    try:
        return f"'{value}'" if isinstance(value, str) else json.dumps(value)
    except TypeError:
        return repr(value)


def _sentence(key: str, value: Any) -> str:
    if key in KEYS:
        allowed, fix = KEYS[key]
        return f"{CYCLIC}.{key} is {_show(value)}; allowed are {allowed}; {fix}."
    near = difflib.get_close_matches(key, KEYS, n=1)
    key = key if key.isprintable() else ascii(key)
    fix = f"did you mean {CYCLIC}.{near[0]}?" if near else "remove it."
    return f"{CYCLIC}.{key} is {_show(value)}, but there is no such key; allowed are {', '.join(KEYS)}; {fix}"


class CyclicConfig(DeepSpeedConfigModel):
    """Settings of the cyclic engine, reachable as `engine._config.cyclic_config`."""

    enabled: StrictBool = False
    """Train with the cyclic engine. Without it DeepSpeed is left exactly as it is."""

    rule: str | int = "cdp-v2"
    """Which version of the parameters each rank reads: "dp", "cdp-v1", "cdp-v2" or the threshold K itself.
    K's upper bound 2N-1 needs the ring's size; `schedule.threshold` checks it."""

    partition_method: str = "auto"
    """How units are grouped into stages, in PipelineModule's words, and "flops"."""

    units: list[str] | None = None
    """Module paths to take as units; None finds them."""

    ring_size: Literal["auto"] | int = "auto"
    """Ranks per ring; "auto" is those of a host where there are several hosts, else all of them."""

    transport: Literal["auto", "gloo", "nccl", "peer"] = "auto"
    """How hand-offs travel."""

    keep_after_forward: StrictBool = False
    """Keep the forward's parameters of every stage but the first for the backward, not only the last two stages': less traffic,
    more memory on rings of four and more."""

    min_unit_mb: float = Field(0.0, ge=0, le=1e9, allow_inf_nan=False)
    """Neighbouring modules of a stage are handed off as one unit until it holds this many MiB: fewer messages, less work for the
    host, more memory in flight."""

    warmup_steps: int = Field(0, ge=0)
    """The first steps of training run under "dp", which then changes to `rule` at a flush. Buffers take a stage more
    throughout."""

    placement: Literal["auto", "pyramid", "pipeline", "single"] = "auto"
    """Where the stages of a PipelineModule run."""

    timeout_seconds: float = Field(600.0, ge=0.01, le=1e6, allow_inf_nan=False)  # as milliseconds in 32 bits
    """How long a rank waits for a hand-off before it ends with an error."""

    weights: str | None = None
    """A folder of safetensors files that parameters on the meta device are read from, by each stage's owner."""

    gradient_accumulation_fusion: Literal["auto"] | StrictBool = "auto"
    """Linear layers add their weights' gradients to the running sums inside the matrix product that makes them; "auto" is on GPUs
    only. GradAccumulation are then rounded once where they would be twice."""

    def __init__(self, strict: bool = True, **data: Any) -> None:
        # strict=True always: otherwise the base class drops every value "auto".
        try:
            super().__init__(strict=True, **data)
        except ValidationError as error:
            key = str(error.errors()[0]["loc"][0])
            raise ValueError(_sentence(key, data.get(key))) from None

    @field_validator("rule", mode="before")
    @classmethod
    def _check_rule(cls, value: Any) -> Any:
        named = isinstance(value, str) and value in RULES
        threshold = isinstance(value, int) and not isinstance(value, bool) and value >= 0
        if not (named or threshold):
            raise ValueError("rule")
        return value

    @field_validator("partition_method")
    @classmethod
    def _check_partition_method(cls, value: str) -> str:
        if value.startswith("type:") and len(value) > len("type:"):
            try:
                re.compile(value[len("type:") :])
            except re.error:
                raise ValueError("partition_method") from None
        elif value not in ("auto", "parameters", "uniform", "flops"):
            raise ValueError("partition_method")
        return value

    @field_validator("units")
    @classmethod
    def _check_units(cls, value: list[str] | None) -> list[str] | None:
        if value is not None and (not value or len(set(value)) != len(value)):
            raise ValueError("units")
        return value

    @field_validator("weights")
    @classmethod
    def _check_weights(cls, value: str | None) -> str | None:
        if value == "":
            raise ValueError("weights")
        return value

    @field_validator("ring_size", mode="before")
    @classmethod
    def _check_ring_size(cls, value: Any) -> Any:
        if value != "auto" and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            raise ValueError("ring_size")
        return value

    @field_validator("warmup_steps", mode="before")
    @classmethod
    def _check_warmup_steps(cls, value: Any) -> Any:
        if not isinstance(value, int) or isinstance(value, bool):
            raise ValueError("warmup_steps")
        return value

    @field_validator("timeout_seconds", "min_unit_mb", mode="before")
    @classmethod
    def _check_number(cls, value: Any) -> Any:
        if isinstance(value, (bool, str)):
            raise ValueError("a number")
        return value


def refuse_unsupported(config: CyclicConfig, world_size: int | None = None) -> None:
    """Raises ValueError for values that are valid but that this version does not implement.

    Args:
        config: the parsed block; nothing is refused while it is disabled.
        world_size: number of ranks, where it is known; rings divide it.
    """
    if not config.enabled:
        return
    if config.ring_size != "auto" and world_size is not None and world_size % config.ring_size:
        sizes = ", ".join(str(r) for r in range(1, world_size + 1) if world_size % r == 0)
        raise ValueError(
            f"{CYCLIC}.ring_size is {config.ring_size}, which does not divide the {world_size} ranks; allowed are "
            f'"auto" and {sizes}; use "auto" for a ring per host.'
        )


def parse_cyclic(param_dict: dict[str, Any], world_size: int | None = None) -> CyclicConfig:
    """The `cyclic` block of a ds_config dict; disabled when there is none.

    Args:
        param_dict: the whole ds_config.
        world_size: number of ranks, where it is known.

    Returns:
        The parsed block. Raises ValueError with one sentence for anything wrong in it.
    """
    if CYCLIC not in param_dict:
        return CyclicConfig()
    block = param_dict[CYCLIC]
    if not isinstance(block, dict):
        enabled = json.dumps(block) if isinstance(block, bool) else "true"
        raise ValueError(
            f'{CYCLIC} is {_show(block)}; allowed is a block of settings; write "{CYCLIC}": {{"enabled": {enabled}}}.'
        )
    for key, value in block.items():
        if key not in KEYS:
            raise ValueError(_sentence(str(key), value))
    config = CyclicConfig(**block)
    if "enabled" not in block:
        # Silence would leave the user with stock ZeRO-3 and no hint.
        raise ValueError(f'{CYCLIC}.enabled is missing; allowed are true and false; write "{CYCLIC}": {{"enabled": true}}.')
    refuse_unsupported(config, world_size)
    return config
