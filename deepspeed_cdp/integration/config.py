"""The `cyclic` block of ds_config.json: `CyclicConfig` describes each key once.

The field descriptions are also the text of docs/cyclic.schema.json and of the table in the documentation. `parse_cyclic` turns a
whole ds_config dict into a `CyclicConfig`. Each error is a ValueError of one sentence: key, value, allowed values, fix.
"""

import difflib
import json
import re
from typing import Annotated, Any, Literal, NamedTuple

from deepspeed.runtime.config_utils import DeepSpeedConfigModel
from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictInt, ValidationError, field_validator

CYCLIC = "cyclic"


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


class Words(NamedTuple):
    """Metadata of a key, for errors and the documentation: the allowed values, and how to fix a wrong one."""

    allowed: str
    fix: str


class CorrectionConfig(BaseModel):
    """A correction with its numbers (plan/delay_correction.py)."""

    model_config = ConfigDict(title="delay_correction", extra="forbid", strict=True, allow_inf_nan=False)

    method: Literal["none", "extrapolate", "predict"]
    updates: float = Field(1.0, description="`extrapolate`: how often the last update is expected to happen again.")
    weight: float = Field(1.5, description="`predict`: the weight of the ranks' gradients beside the momentum.")


class CyclicConfig(DeepSpeedConfigModel):
    """The `cyclic` block of a DeepSpeed config: settings of the cyclic engine."""

    model_config = ConfigDict(
        title="cyclic",
        field_title_generator=lambda key, _: key,
        json_schema_extra={"required": ["enabled"]},  # `parse_cyclic` requires it
    )

    enabled: Annotated[StrictBool, Words("true and false", 'write "enabled": true to train with the cyclic engine')] = Field(
        False, description="Train with the cyclic engine. If false, DeepSpeed is unchanged."
    )
    rule: Annotated[
        Literal["dp", "cdp-v1", "cdp-v2"] | Annotated[StrictInt, Field(ge=0)],
        Words(
            '"dp", "cdp-v1", "cdp-v2" or an integer K with 0 <= K <= 2N-1 on a ring of N ranks',
            'use "cdp-v2" unless you need another',
        ),
    ] = Field("cdp-v2", description="Which version of the parameters each rank reads. An integer is the threshold K itself.")
    partition_method: Annotated[
        str,
        Words(
            '"auto", "parameters", "uniform", "flops" or "type:REGEX" with a valid regular expression',
            'use "auto" unless you need another',
        ),
    ] = Field(
        "auto",
        pattern=r"^(auto|parameters|uniform|flops|type:[\s\S]+)$",
        description="The cost that stages balance. `parameters`, `uniform` and `type:REGEX` are as in PipelineModule. `auto`: "
        "`parameters`, but with an example batch any first stages have at least half of their share of the operations.",
    )
    units: Annotated[
        Annotated[list[str], Field(min_length=1, json_schema_extra={"uniqueItems": True})] | None,
        Words(
            'null or a list of distinct module paths as in named_modules(), or patterns such as "model.layers.*"',
            "use null to let the units be found",
        ),
    ] = Field(
        None,
        description="Modules that are sent as one message each, in execution order. `model.layers.*` stands for all modules "
        "directly below `model.layers`. null: the engine finds them.",
    )
    ring_size: Annotated[
        Literal["auto"] | Annotated[StrictInt, Field(ge=1)],
        Words('"auto" or an integer of at least 1', 'use "auto" for a ring per host'),
    ] = Field(
        "auto",
        description="Ranks per ring; it must divide the number of data-parallel ranks. Several rings average their gradients "
        "stage by stage. `auto`: one ring per host if every host has the same number of ranks (at least 2); otherwise one ring. "
        "With sequence or tensor parallelism read groups for ranks, and as many rings as a group has ranks.",
    )
    transport: Annotated[
        Literal["auto", "gloo", "nccl", "peer"],
        Words('"auto", "gloo", "nccl" and "peer"', 'use "auto" to get the fastest one that works'),
    ] = Field(
        "auto",
        description="How ranks send messages. `gloo`: CPUs. `peer`: GPUs of one host with peer access. `nccl`: other GPUs, or "
        "several hosts. `auto`: the engine chooses, and logs its choice and the reason.",
    )
    keep_after_forward: Annotated[StrictBool, Words("true and false", "use false unless memory is plentiful")] = Field(
        False,
        description="Keep the parameters of all stages but the first from forward to backward, instead of the last units "
        "only. Fewer bytes travel and buffers are larger.",
    )
    prefetch_units: Annotated[StrictInt, Words("an integer of at least 1", "use 2, or more if ranks wait for links")] = Field(
        2,
        ge=1,
        description="Pull a unit's parameters, and its gradient sum, from their owner so many units before a rank needs them. "
        "Larger windows hide slower links.",
    )
    any_order: Annotated[
        Literal["auto"] | StrictBool, Words('"auto", true and false', 'use "auto" for true where the first micro-batch needs it')
    ] = Field(
        "auto",
        description="A step's parameters arrive before its first forward and stay to its end, and gradients leave after each "
        "backward. Modules may run in any order and several times. Each rank holds the whole model and its gradients, and waits "
        "for messages. `auto`: so for a micro-batch that needs it, on its rank.",
    )
    min_unit_mb: Annotated[float, Words("a number of MiB from 0 to 1e9", "use 0 to hand off each module by itself")] = Field(
        0.0,
        ge=0,
        le=1e9,
        allow_inf_nan=False,
        description="Merge neighbouring modules of a stage into one unit until it holds this many MiB. Fewer messages cost the "
        "host less time; buffers are larger.",
    )
    warmup_steps: Annotated[StrictInt, Words("an integer of at least 0", "use 0 to follow the rule from the first step")] = Field(
        0,
        ge=0,
        description="Train this many first steps under `dp`, then flush and change to `rule`. Checkpoints keep the count. "
        "Buffers hold one more stage throughout.",
    )
    delay_correction: Annotated[
        Literal["auto", "none", "extrapolate", "predict"] | CorrectionConfig,
        Words(
            '"auto", "none", "extrapolate", "predict" or a block with "method" and "updates" or "weight"',
            'use "auto", or "none" for the paper\'s rule',
        ),
    ] = Field(
        "auto",
        description="What stale readers read. `none`: the old parameters, the paper's rule. `extrapolate`: the old ones moved on "
        "by the last update. `predict`: moved on by the step that the optimizer makes with the gradients of the ranks that have "
        "them. `auto`: `predict` for Adam, AdamW and Adamax, `extrapolate` for Muon, `none` for others.",
    )
    placement: Annotated[
        Literal["auto", "pyramid", "pipeline", "single"], Words('"auto", "pyramid", "pipeline" and "single"', 'use "auto"')
    ] = Field(
        "auto",
        description="Where the N stages of a PipelineModule run. `pipeline`: N ranks. `pyramid`: N(N+1)/2 ranks. `single`: one "
        "rank. `auto`: the placement that fits the number of ranks.",
    )
    timeout_seconds: Annotated[float, Words("a number of seconds from 0.01 to 1e6", "use 600 unless steps take minutes")] = Field(
        600.0,
        ge=0.01,
        le=1e6,  # as milliseconds in 32 bits
        allow_inf_nan=False,
        description="How long a rank waits for a message before it raises an error.",
    )
    weights: Annotated[
        Annotated[str, Field(min_length=1)] | None,
        Words("null or the path of a folder of safetensors files", "use null unless the model is on the meta device"),
    ] = Field(
        None,
        description="Folder of safetensors files with the values of parameters on the meta device. Each rank reads its stage.",
    )
    gradient_accumulation_fusion: Annotated[
        Literal["auto"] | StrictBool, Words('"auto", true and false', 'use "auto" for true on GPUs and false on CPUs')
    ] = Field(
        "auto",
        description="Linear layers accumulate weight gradients into the running sum inside the GEMM, as Megatron-LM's option of "
        "this name does. Sums are rounded once instead of twice. `auto`: true on GPUs, false on CPUs.",
    )
    check_divergence: Annotated[
        StrictInt, Words("an integer of at least 0", "use 1 to compare ranks in every step, or 0 not to compare them")
    ] = Field(
        1,
        ge=0,
        description="Steps between comparisons of the ranks' optimizer options, and with several rings of their fp32 masters. "
        "All ranks raise an error within two steps of a difference. 0: never.",
    )

    def __init__(self, strict: bool = True, **data: Any) -> None:
        # strict=True always: otherwise the base class drops every value "auto".
        try:
            super().__init__(strict=True, **data)
        except ValidationError as error:
            key = str(error.errors()[0]["loc"][0])
            raise ValueError(_sentence(key, data.get(key))) from None

    @property
    def correction(self) -> str | dict[str, Any]:
        """``delay_correction`` as ``optim.delay_correction.resolve`` takes it."""
        setting = self.delay_correction
        return setting if isinstance(setting, str) else setting.model_dump()

    @field_validator("partition_method")
    @classmethod
    def _check_partition_method(cls, value: str) -> str:
        if value.startswith("type:"):
            try:
                re.compile(value[len("type:") :])
            except re.error:
                raise ValueError("partition_method") from None
        return value

    @field_validator("units")
    @classmethod
    def _check_units(cls, value: list[str] | None) -> list[str] | None:
        if value is not None and len(set(value)) != len(value):
            raise ValueError("units")
        return value

    @field_validator("timeout_seconds", "min_unit_mb", mode="before")
    @classmethod
    def _check_number(cls, value: Any) -> Any:
        if isinstance(value, (bool, str)):
            raise ValueError("a number")
        return value


# key -> its Words, in the order of the fields
KEYS: dict[str, Words] = {
    name: next(word for word in field.metadata if isinstance(word, Words)) for name, field in CyclicConfig.model_fields.items()
}


def refuse_unsupported(config: CyclicConfig, world_size: int | None = None) -> None:
    """Raises ValueError for values that are valid but that this version does not implement.

    Args:
        config: the parsed block; nothing is refused while it is disabled.
        world_size: number of data-parallel ranks, where it is known; rings divide it. A sequence group counts as one.
    """
    if not config.enabled:
        return
    if config.ring_size != "auto" and world_size is not None and world_size % config.ring_size:
        sizes = ", ".join(str(r) for r in range(1, world_size + 1) if world_size % r == 0)
        raise ValueError(
            f"{CYCLIC}.ring_size is {config.ring_size}, which does not divide the {world_size} data-parallel ranks; "
            f'allowed are "auto" and {sizes}; use "auto" for a ring per host.'
        )


def misspelt(param_dict: dict[str, Any]) -> str | None:
    """A key of a ds_config without a `cyclic` block that is nearly its name."""
    written = {str(key).lower(): str(key) for key in param_dict}
    near = [] if CYCLIC in param_dict else difflib.get_close_matches(CYCLIC, list(written), 1, 0.8)
    return written[near[0]] if near else None


def parse_cyclic(param_dict: dict[str, Any], world_size: int | None = None) -> CyclicConfig:
    """The `cyclic` block of a ds_config dict; disabled when there is none.

    Args:
        param_dict: the whole ds_config.
        world_size: number of data-parallel ranks, where it is known.

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
