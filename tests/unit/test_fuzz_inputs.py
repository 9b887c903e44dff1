"""Settings and plans made up at random: what comes is what was asked for, or the documented error; never another, no hang."""

import json
import math
import re
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from deepspeed_cdp.integration.config import KEYS, CyclicConfig, parse_cyclic
from deepspeed_cdp.plan.actions import Action, Kind, Post
from deepspeed_cdp.plan.plan import Plan
from deepspeed_cdp.plan.program import build, initial_posts
from deepspeed_cdp.plan.schedule import RULES, Schedule, threshold
from deepspeed_cdp.plan.unit_schedule import Unit
from deepspeed_cdp.verify.check import validate
from deepspeed_cdp.verify.well_formed import PlanError

QUICK = settings(max_examples=150, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
NUMBERS = st.one_of(st.integers(-2, 9), st.integers(), st.floats(), st.sampled_from([10**400, 1e300, 1e12, 1e-300]))
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    NUMBERS,
    st.text(max_size=5),
    st.sampled_from(["auto", "dp", "cdp-v2", "type:(", "type:a|b", "gloo", "\ud800", "a\0"]),
)
JSON = st.recursive(
    SCALARS,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=3), inner, max_size=2)),
    max_leaves=5,
)


@QUICK
@given(
    st.one_of(JSON, st.dictionaries(st.one_of(st.sampled_from(sorted(KEYS)), st.text(max_size=6)), JSON, max_size=4)),
    st.integers(1, 5),
)
def test_cyclic_blocks(block, world):
    if isinstance(block, dict):
        block.setdefault("enabled", True)
    try:
        config = parse_cyclic({"cyclic": block}, world)
    except ValueError as error:
        assert type(error) is ValueError and str(error).startswith("cyclic") and "\n" not in str(error).replace(repr(block), "")
        return
    assert isinstance(config, CyclicConfig) and all(getattr(config, k) == v for k, v in block.items()), block
    assert timedelta(seconds=config.timeout_seconds) and math.isfinite(config.min_unit_mb * 2**20)
    json.dumps(config.model_dump())  # ranks compare it as JSON


@QUICK
@given(st.sampled_from(sorted(KEYS)), JSON)
@example("timeout_seconds", 1e300)
@example("timeout_seconds", 1e-9)
@example("min_unit_mb", 1e307)
def test_each_key(key, value):
    test_cyclic_blocks.hypothesis.inner_test({key: value}, 2)


@QUICK
@given(JSON, st.integers(1, 6))
def test_rules(rule, ranks):
    try:
        k = threshold(rule, ranks)
    except ValueError as error:
        assert str(error).startswith("cyclic.rule is ")
        return
    assert rule in RULES or rule == k
    assert 0 <= k <= 2 * ranks - 1


@st.composite
def plans(draw: Any) -> Plan:
    ranks = draw(st.integers(1, 3))
    counts = [draw(st.integers(1, 2)) for _ in range(ranks)]
    stages = [stage for stage, count in enumerate(counts) for _ in range(count)]
    units = tuple(
        Unit(f"u{i}", stage, (f"w{i}",), (), draw(st.integers(1, 999)), draw(st.sampled_from([0, 1, 64, 999])))
        for i, stage in enumerate(stages)
    )
    persistent = draw(st.sampled_from([None, Unit("", 0, ("tied",), (), 512, 256)]))
    return Plan(
        Schedule(ranks, draw(st.integers(0, 2 * ranks - 1)), draw(st.integers(1, 2))), units, persistent, draw(st.booleans())
    )


def altered(data: Any, x: Action | Post) -> Action | Post:
    """One field of an action or a post with another value of its kind."""
    field = data.draw(st.sampled_from(x._fields))
    value = getattr(x, field)
    if field == "posts":
        if not value:
            return x
        at = data.draw(st.integers(0, len(value) - 1))
        return x._replace(posts=(*value[:at], altered(data, value[at]), *value[at + 1 :]))
    if field == "into":
        return x._replace(into=(data.draw(st.sampled_from(["", "PG", "O", "Z"])), data.draw(st.integers(-64, 999)), 0))
    if isinstance(value, bool):
        return x._replace(**{field: not value})
    if isinstance(value, Kind):
        return x._replace(kind=data.draw(st.sampled_from([*Kind, "SEND"])))
    if isinstance(value, str):
        return x._replace(**{field: data.draw(st.sampled_from(["P", "P0", "PG", "G", "G0", "O", "S", "V", "", "Z"]))})
    if field == "origin":
        return x._replace(origin=(data.draw(st.sampled_from(["", "V", "O", "Z"])), data.draw(st.integers(-64, 999))))
    return x._replace(**{field: data.draw(st.integers(-3, 12))})


@settings(QUICK, max_examples=60)
@given(plans(), st.data())
def test_plans(plan, data):
    """Programs with anything in them changed: accepted (some fields say nothing in some places) or a PlanError."""
    ranks = range(plan.schedule.ranks)
    made = {(r, first): build(plan, r, first) for r in ranks for first in (True, False)}
    before = {r: initial_posts(plan, r) for r in ranks}
    validate(plan)
    who, first = data.draw(st.sampled_from(sorted(made)))
    program = made[who, first]
    how = data.draw(st.sampled_from(["alter", "alter", "drop", "swap", "posts"]))
    at = data.draw(st.integers(0, len(program) - 1))
    if how == "alter":
        made[who, first] = (*program[:at], altered(data, program[at]), *program[at + 1 :])
    elif how == "drop":
        made[who, first] = program[:at]
    elif how == "swap":
        to = data.draw(st.integers(0, len(program) - 1))
        swapped = list(program)
        swapped[at], swapped[to] = swapped[to], swapped[at]
        made[who, first] = tuple(swapped)
    elif before[who]:
        i = data.draw(st.integers(0, len(before[who]) - 1))
        before[who] = (*before[who][:i], altered(data, before[who][i]), *before[who][i + 1 :])
    try:
        validate(plan, programs=lambda r, f: made[r, f], posts=lambda r: before[r])
    except PlanError as error:
        assert re.match(r"(nothing moves any more: )?rank \d+, step \d+: ", str(error)), error


@pytest.mark.parametrize("kind", [Kind.PUBLISH_PARAM, Kind.OFFER_GRAD, Kind.SEND_GRAD, Kind.PULL_PARAM, Kind.GRANT_CREDIT])
@pytest.mark.parametrize("change", [{"peer": None}, {"unit": 7}, {"kind": "REALY"}, {"peer": 5}, {"round": 3}, {"stream": "?"}])
def test_actions_that_make_no_sense(change, kind):
    """They once ended the dry-run in an AssertionError, IndexError or KeyError of its own."""
    plan = Plan(Schedule(3, 2), tuple(Unit(x, s, (x,), (), 64, 64) for s, x in enumerate("abc")))
    if kind == Kind.GRANT_CREDIT and next(iter(change)) in ("peer", "stream") and change != {"peer": 5}:
        return  # it has neither

    def programs(r: int, first: bool) -> tuple[Action, ...]:
        good = build(plan, r, first)
        return tuple(a._replace(**change) if a.kind == kind else a for a in good)

    with pytest.raises(PlanError, match=r"rank \d, step \d"):
        validate(plan, programs=programs)


def test_the_dry_run_itself_can_refuse():
    plan = Plan(Schedule(2, 1), (Unit("a", 0, ("a",), (), 64, 64), Unit("b", 1, ("b",), (), 64, 64)))
    with pytest.raises(PlanError, match="rank 0, step"):
        validate(plan, programs=lambda r, f: build(plan, r, f)[:-1] if r == 0 else build(plan, r, f))
