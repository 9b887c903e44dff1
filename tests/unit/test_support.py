"""The table of supported, ignored and refused DeepSpeed settings."""

from pathlib import Path

import deepspeed
import pytest
from deepspeed.runtime import config as ds_settings
from deepspeed.runtime.precision_config import DeepSpeedBF16Config
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

from deepspeed_cdp.integration import support
from deepspeed_cdp.integration.plugin import register

REPOSITORY = Path(__file__).parents[2]
ZERO = "zero_optimization"
REFUSED = {
    ZERO + ".zero_quantized_weights": True,
    ZERO + ".zero_quantized_gradients": True,
    ZERO + ".zero_quantized_nontrainable_weights": True,
    ZERO + ".zero_hpz_partition_size": 2,
    ZERO + ".offload_param": {"device": "cpu"},
    ZERO + ".offload_optimizer": {"device": "nvme"},
    ZERO + ".zenflow": {},
    ZERO + ".offload_optimizer.super_offload": True,
    ZERO + ".offload_optimizer.ratio": 0.5,
    ZERO + ".cpu_offload_param": True,
    "fp16.enabled": True,
    "fp16.fp16_master_weights_and_grads": True,
    "bf16.bf16_master_weights_and_grads": True,
    "bf16.bf16_optimizer_states": True,
    "torch_autocast.enabled": True,
    "torch_autocast.dtype": "float16",
    "hybrid_engine.enabled": True,
    "tensor_parallel.autotp_size": 2,
    "expert_parallel.enabled": True,
    "compile.deepcompile": True,
    "communication_data_type": "fp32",
    "seq_parallel_communication_data_type": "fp32",
    "prescale_gradients": True,
    "data_efficiency.data_routing.random_ltd.enabled": True,
}
# What DeepSpeed wants beside a setting to parse it at all, or what the refusal is of.
BESIDE = {
    "tensor_parallel.autotp_size": {"sequence_parallel_size": 2},
    "data_efficiency.data_routing.random_ltd.enabled": {
        "data_efficiency.enabled": True,
        "data_efficiency.data_routing.enabled": True,
    },
    "bf16.bf16_optimizer_states": {"bf16.bf16_master_weights_and_grads": True},
    "torch_autocast.dtype": {"torch_autocast.enabled": True},
}


@pytest.fixture(autouse=True)
def registered():
    register()


def ds_config(settings, **cyclic):
    raw = {"train_batch_size": 4, ZERO: {"stage": 3}, "cyclic": {"enabled": True, **cyclic}}
    for path, value in settings.items():
        section = raw
        *parents, last = path.split(".")
        for parent in parents:
            section = section.setdefault(parent, {})
        section[last] = value
    return raw


def refused_rows():
    return {setting for row in support.TABLE if row.refuses for setting in row.settings}


def test_every_refused_setting_is_tried_below():
    assert refused_rows() == set(REFUSED)


KNOWN_BF16 = {f"bf16.{name}" for name in DeepSpeedBF16Config.model_fields}
# Settings that the oldest supported DeepSpeed does not have yet; it refuses them itself as unknown keys.
THIS_DEEPSPEED = [setting for setting in REFUSED if not setting.startswith("bf16.") or setting in KNOWN_BF16]


@pytest.mark.parametrize("setting", THIS_DEEPSPEED)
def test_refused(setting):
    raw = ds_config({**BESIDE.get(setting, {}), setting: REFUSED[setting]})
    with pytest.raises(ValueError) as caught:
        deepspeed.DeepSpeedConfig(raw)
    text = str(caught.value)
    assert text.startswith(f"{setting} is "), text
    assert text.endswith(".") and "\n" not in text and "; " in text and ". " not in text


@pytest.mark.parametrize("setting", THIS_DEEPSPEED)
def test_refused_only_while_enabled(setting):
    raw = ds_config({**BESIDE.get(setting, {}), setting: REFUSED[setting]})
    raw["cyclic"]["enabled"] = False
    assert not deepspeed.DeepSpeedConfig(raw).cyclic_config.enabled


def test_settings_that_deepspeed_itself_refuses_have_no_row():
    top, zero = ds_settings._REMOVED_TOP_LEVEL_CONFIG_KEYS, ds_settings._REMOVED_ZERO_CONFIG_KEYS
    refused = {*top, *(f"{ZERO}.{key}" for key in zero)}
    assert {"progressive_layer_drop", "curriculum_learning"} <= refused
    assert not refused & {setting for row in support.TABLE for setting in row.settings}


FLOAT16 = [{"fp16.enabled": True}, {"torch_autocast.enabled": True, "torch_autocast.dtype": "float16"}]


@pytest.mark.parametrize("settings", FLOAT16)
@pytest.mark.parametrize("rule", ["cdp-v2", 2])
def test_fp16_is_refused_where_overflow_is_known_too_late(rule, settings):
    with pytest.raises(ValueError) as caught:
        deepspeed.DeepSpeedConfig(ds_config(settings, rule=rule))
    assert all(word in str(caught.value) for word in (f"under cyclic.rule {rule}", 'use bf16, or cyclic.rule "cdp-v1"'))


@pytest.mark.parametrize("settings", FLOAT16)
@pytest.mark.parametrize("rule", ["cdp-v1", "dp", 0, 1])  # with one rank, K = 1 is cdp-v1
def test_fp16_passes_where_updates_wait_for_the_norm(rule, settings):
    assert deepspeed.DeepSpeedConfig(ds_config(settings, rule=rule)).cyclic_config.enabled


@pytest.mark.parametrize("settings", FLOAT16)
@pytest.mark.parametrize(
    ("rule", "ring", "late"),
    [(3, 2, False), (3, 4, True), (7, 4, False), (7, 8, True), (15, 8, False), ("cdp-v1", 4, False), ("dp", 2, False)],
)
def test_the_size_of_an_auto_ring_decides(rule, ring, late, settings):
    """K = 2N-1 waits for the norm, where N is the ring's size: four hosts of two ranks are rings of 2, not one of 8."""
    raw, config = ds_config(settings, rule=rule), deepspeed.DeepSpeedConfig(ds_config(settings, rule="dp"))
    config.cyclic_config.rule, config.world_size, config._param_dict = rule, 8, raw
    support.check_supported(config)  # some ring size that divides 8 allows the rule
    if late:
        with pytest.raises(ValueError, match=f" under cyclic.rule {rule}: a stage is updated before"):
            support.check_ring_size(config, ring)
    else:
        support.check_ring_size(config, ring)


@pytest.mark.parametrize("settings", FLOAT16)
@pytest.mark.parametrize(("rule", "ring_size"), [(1, "auto"), (5, "auto"), (15, 4)])
def test_no_possible_ring_size_allows_the_rule(rule, ring_size, settings):
    config = deepspeed.DeepSpeedConfig(ds_config(settings, rule="dp"))
    config.cyclic_config.rule, config.cyclic_config.ring_size, config.world_size = rule, ring_size, 8
    with pytest.raises(ValueError, match=f" under cyclic.rule {rule}: a stage is updated before"):
        support.check_supported(config)


@pytest.mark.parametrize("dtype", ["bfloat16", "bf16"])
def test_autocast_to_bf16_passes_under_every_rule(dtype):
    settings = {"torch_autocast.enabled": True, "torch_autocast.dtype": dtype}
    assert deepspeed.DeepSpeedConfig(ds_config(settings, rule="cdp-v2")).cyclic_config.enabled


@pytest.mark.parametrize("stage", [0, 1, 2, 3, None])
def test_every_stage_is_supported(stage):
    raw = ds_config({ZERO + ".stage": stage} if stage is not None else {})
    if stage is None:
        del raw[ZERO]
    config = deepspeed.DeepSpeedConfig(raw)
    assert config.cyclic_config.enabled and config.zero_optimization_stage == (stage or 0) and config.cyclic_ignored == ()


@pytest.mark.parametrize(
    "settings",
    [
        {ZERO + ".offload_param": {"device": "none"}, ZERO + ".offload_optimizer": {"device": "none"}},
        {ZERO + ".offload_optimizer": {"device": "cpu", "pin_memory": False, "ratio": 1.0}},
        {ZERO + ".cpu_offload": True},
        {ZERO + ".zero_hpz_partition_size": 1, "fp16.enabled": False, "prescale_gradients": False, "sequence_parallel_size": 1},
        {"fp16.enabled": "auto", "bf16.enabled": "auto", ZERO + ".overlap_comm": True},
        {"bf16.enabled": True, "gradient_clipping": 1.0, "data_types.grad_accum_dtype": "fp32"},
        {"activation_checkpointing": {"partition_activations": False}, "compile.deepcompile": False},
    ],
)
def test_harmless_values_pass(settings):
    assert deepspeed.DeepSpeedConfig(ds_config(settings)).cyclic_config.enabled


def test_ignored_settings_are_reported_only_when_written():
    assert support.check_supported(deepspeed.DeepSpeedConfig(ds_config({}))) == ()
    config = deepspeed.DeepSpeedConfig(ds_config({ZERO + ".overlap_comm": True, ZERO + ".sub_group_size": 5}))
    assert support.check_supported(config) == (ZERO + ".overlap_comm", ZERO + ".sub_group_size")


def test_every_field_of_the_zero_config_is_in_the_table():
    listed = {setting for row in support.TABLE for setting in row.settings}
    fields = {f"{ZERO}.{field.alias or name}" for name, field in DeepSpeedZeroConfig.model_fields.items()}
    assert fields - listed == set()


def test_rows_are_complete():
    for row in support.TABLE:
        assert row.reason and (row.verdict == "refused") == bool(row.fix) == bool(row.when), row
        assert row.refuses is None or row.verdict == "refused"
    settings = [setting for row in support.TABLE for setting in row.settings]
    assert len(settings) == len(set(settings))


def test_the_settings_page_prints_exactly_this_table():
    parts = (REPOSITORY / "docs" / "settings.md").read_text().split("<!-- settings -->")
    assert len(parts) == 3, "docs/settings.md needs the table between two <!-- settings --> markers"
    assert parts[1].strip() == support.as_markdown().strip(), "run python docs/make_settings.py"
