"""The `cyclic` block: defaults, kept values, errors of one sentence each, and the published schema."""

import importlib.util
from pathlib import Path

import pytest

from deepspeed_cdp.integration.config import KEYS, CyclicConfig, parse_cyclic
from deepspeed_cdp.plan.schedule import RULES

DOCS = Path(__file__).parents[2] / "docs"

DEFAULTS = {
    "enabled": False,
    "rule": "cdp-v2",
    "partition_method": "auto",
    "units": None,
    "ring_size": "auto",
    "transport": "auto",
    "keep_after_forward": False,
    "prefetch_units": 2,
    "min_unit_mb": 0.0,
    "warmup_steps": 0,
    "delay_correction": "auto",
    "placement": "auto",
    "timeout_seconds": 600,
    "weights": None,
    "gradient_accumulation_fusion": "auto",
    "check_divergence": 1,
    "any_order": "auto",
}


def parse(**block):
    return parse_cyclic({"cyclic": {"enabled": True, **block}})


def error_of(call, *args, **kwargs):
    with pytest.raises(ValueError) as caught:
        call(*args, **kwargs)
    text = str(caught.value)
    assert type(caught.value) is ValueError and "\n" not in text
    assert text.count(". ") == 0 and text[-1] in ".?", f"not one sentence: {text}"
    return text


def test_defaults_are_the_documented_ones():
    assert CyclicConfig().model_dump() == DEFAULTS
    assert set(KEYS) == set(DEFAULTS) == set(CyclicConfig.model_fields)


def test_every_key_is_described_once():
    for key, field in CyclicConfig.model_fields.items():
        assert field.description and field.description[-1] == ".", key
        assert sum(isinstance(item, type(KEYS[key])) for item in field.metadata) == 1, key


def test_published_schema_is_current():
    spec = importlib.util.spec_from_file_location("make_schema", DOCS / "make_schema.py")
    make = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(make)
    assert make.FILE.read_text() == make.render(), "docs/cyclic.schema.json is stale: run python docs/make_schema.py"


def test_schema_names_every_rule():
    named, threshold = CyclicConfig.model_json_schema()["properties"]["rule"]["anyOf"]
    assert set(named["enum"]) == set(RULES) and threshold == {"type": "integer", "minimum": 0}


def test_no_block_means_disabled():
    assert parse_cyclic({"train_batch_size": 4}) == CyclicConfig()


def test_auto_is_kept_not_dropped():
    config = parse(ring_size="auto", transport="auto", placement="auto", partition_method="auto")
    assert {"ring_size", "transport", "placement", "partition_method"} <= config.model_fields_set


@pytest.mark.parametrize(
    "block",
    [
        {"rule": "dp"},
        {"rule": "cdp-v1"},
        {"rule": "cdp-v2"},
        {"rule": 0},
        {"rule": 7},
        {"partition_method": "flops"},
        {"partition_method": "type:Decoder.*"},
        {"units": ["model.layers.0", "lm_head"]},
        {"transport": "gloo"},
        {"timeout_seconds": 0.5},
        {"timeout_seconds": 30},
        {"warmup_steps": 0},
        {"warmup_steps": 100},
        {"check_divergence": 0},
        {"check_divergence": 50},
        {"weights": "a/folder"},
        {"delay_correction": "predict"},
    ],
)
def test_allowed_values_come_through_unchanged(block):
    config = parse(**block)
    assert {key: getattr(config, key) for key in block} == block and config.enabled


@pytest.mark.parametrize(
    "key, value",
    [
        ("rule", "cdp-v3"),
        ("rule", "3"),
        ("rule", -1),
        ("rule", 1.5),
        ("rule", True),
        ("rule", None),
        ("rule", "auto"),
        ("partition_method", "best"),
        ("partition_method", "type:"),
        ("partition_method", "type:("),
        ("partition_method", 3),
        ("units", []),
        ("units", "model.layers"),
        ("units", ["a", "a"]),
        ("units", [1]),
        ("ring_size", 0),
        ("ring_size", True),
        ("ring_size", "all"),
        ("ring_size", 2.0),
        ("transport", "mpi"),
        ("min_unit_mb", -1),
        ("min_unit_mb", "25"),
        ("min_unit_mb", True),
        ("keep_after_forward", "auto"),
        ("keep_after_forward", 1),
        ("prefetch_units", 0),
        ("prefetch_units", True),
        ("gradient_accumulation_fusion", "on"),
        ("gradient_accumulation_fusion", 1),
        ("placement", "ring"),
        ("delay_correction", "on"),
        ("delay_correction", {"weight": 2.0}),
        ("delay_correction", {"method": "predict", "momentum": 0.2}),
        ("delay_correction", {"method": "predict", "gradient": 0.1}),
        ("timeout_seconds", 0),
        ("timeout_seconds", -3),
        ("timeout_seconds", float("inf")),
        ("timeout_seconds", float("nan")),
        ("timeout_seconds", "600"),
        ("timeout_seconds", True),
        ("weights", ""),
        ("weights", 3),
        ("enabled", "auto"),
        ("check_divergence", -1),
        ("check_divergence", True),
        ("check_divergence", 1.5),
        ("warmup_steps", -1),
        ("warmup_steps", True),
        ("warmup_steps", 2.0),
        ("warmup_steps", "10"),
        ("enabled", 1),
    ],
)
def test_wrong_values_are_named_with_what_is_allowed_and_the_fix(key, value):
    text = error_of(parse_cyclic, {"cyclic": {"enabled": True, key: value}})
    allowed, fix = KEYS[key]
    shown = f"'{value}'" if isinstance(value, str) else str(value) if isinstance(value, float) else None
    assert text.startswith(f"cyclic.{key} is ") and allowed in text and fix in text
    assert shown is None or shown.lower().strip("'") in text.lower() or value != value
    assert text == error_of(CyclicConfig, **{key: value})


def test_rule_error_reads_as_documented():
    assert error_of(parse, rule="cdp-v3").startswith('cyclic.rule is \'cdp-v3\'; allowed are "dp", "cdp-v1", "cdp-v2"')


@pytest.mark.parametrize(
    "key, near", [("rul", "rule"), ("timeout", "timeout_seconds"), ("ringsize", "ring_size"), ("enable", "enabled")]
)
def test_unknown_key_gets_the_nearest_known_one(key, near):
    text = error_of(parse_cyclic, {"cyclic": {"enabled": True, key: 1}})
    assert text.startswith(f"cyclic.{key} is 1, but there is no such key") and text.endswith(f"did you mean cyclic.{near}?")
    assert text == error_of(CyclicConfig, **{key: 1})


@pytest.mark.parametrize("key", ["zzz", "strict", "self"])
def test_unknown_key_without_a_near_one_lists_all(key):
    text = error_of(parse_cyclic, {"cyclic": {"enabled": True, key: "x"}})
    assert all(known in text for known in KEYS)


def test_unknown_key_is_an_error_even_when_disabled():
    assert "no such key" in error_of(parse_cyclic, {"cyclic": {"enabled": False, "rulez": "dp"}})


@pytest.mark.parametrize(
    "shorthand, fix",
    [(True, '{"enabled": true}'), (False, '{"enabled": false}'), ("cdp-v2", '{"enabled": true}'), (None, '{"enabled": true}')],
)
def test_shorthand_is_refused_with_the_fix(shorthand, fix):
    assert fix in error_of(parse_cyclic, {"cyclic": shorthand})


@pytest.mark.parametrize("block", [{}, {"rule": "dp"}])
def test_a_block_that_does_not_say_enabled_is_not_silently_off(block):
    assert "cyclic.enabled is missing" in error_of(parse_cyclic, {"cyclic": block})


@pytest.mark.parametrize("placement", ["auto", "pyramid", "pipeline", "single"])
def test_placements_are_allowed(placement):
    assert parse(placement=placement).placement == placement


def test_keep_after_forward_is_allowed():
    assert parse(keep_after_forward=True).keep_after_forward is True and parse().keep_after_forward is False


def test_ring_size_divides_the_world():
    block = {"cyclic": {"enabled": True, "ring_size": 2}}
    assert parse_cyclic(block, world_size=2).ring_size == parse_cyclic(block, world_size=4).ring_size == 2
    assert parse_cyclic(block).ring_size == 2  # the world is not known yet
    text = error_of(parse_cyclic, block, world_size=3)
    assert "cyclic.ring_size is 2, which does not divide the 3 data-parallel ranks" in text and '"auto" and 1, 3;' in text
