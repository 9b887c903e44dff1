"""plan/windows.py: no two windows in use at once share a byte, they are few, and what goes wrong if one lies elsewhere."""

import dataclasses
import itertools
from collections import Counter
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspeed_cdp.plan import windows
from deepspeed_cdp.plan.actions import Kind
from deepspeed_cdp.plan.constants import PERSISTENT
from deepspeed_cdp.plan.interval_alloc import Lifetime, aligned, overlap_in_time
from deepspeed_cdp.plan.plan import Plan
from deepspeed_cdp.plan.program import build, with_rounds
from deepspeed_cdp.plan.replicated import ReplicatedPlan
from deepspeed_cdp.plan.schedule import threshold
from deepspeed_cdp.verify.check import validate
from deepspeed_cdp.verify.well_formed import PlanError
from support.plans import PERSISTENT_UNIT, make, plans

P, G = 1024, 2048  # bytes of a unit's parameters and of its sum


def placed(plan: Plan) -> Iterator[tuple[Lifetime, int]]:
    """Every window: when it is in use, and its offset."""
    params, sums = windows.parameters(plan), windows.running_sums(plan)
    yield from ((x, plan.windows.params[v]) for v, x in params.items())
    yield from ((x, plan.windows.sums[i]) for i, x in sums.items())


def most(plan: Plan, lifetimes: dict) -> int:
    """The most bytes in use at one time, counted tick by tick round the circle of a round."""
    in_use: Counter = Counter()
    for x in lifetimes.values():
        in_use.update({time % (2 * plan.round_ticks): x.nbytes for time in range(x.start, x.end + 1)})
    return max(in_use.values())


@settings(max_examples=40, derandomize=True, deadline=None)
@given(plans(st.integers(2, 6)))
def test_no_two_in_use_at_once_share_a_byte(plan: Plan) -> None:
    every = list(placed(plan))
    for k, (a, at) in enumerate(every):
        assert at % 64 == 0 and 0 <= at and at + aligned(a.nbytes) <= plan.windows.nbytes
        for b, there in every[:k]:
            if overlap_in_time(a, b, 2 * plan.round_ticks):
                assert at + a.nbytes <= there or there + b.nbytes <= at, (a, at, b, there)


@settings(max_examples=15, derandomize=True, deadline=None)
@given(plans(st.integers(2, 5)))
def test_programs_use_windows_within_their_time(plan: Plan) -> None:
    """No pull is earlier, nothing is released or pushed back later; sums have a pass more to leave (but in the last pass)."""
    params, sums, s = windows.parameters(plan), windows.running_sums(plan), plan.schedule
    for rank in range(s.ranks):
        for a in build(plan, rank, False):
            if a.unit == PERSISTENT or plan.unit(a.unit).stage == s.owned(rank):
                continue
            begin = s.start(1 + sum(x.ahead for x in a.posts), a.round, rank) * plan.scale
            time = 2 * (a.time - begin) + a.phase
            if a.kind == Kind.PULL_PARAM:
                assert time >= params[a.unit, a.backward].start and a.posts[0].offset == plan.windows.params[a.unit, a.backward]
            elif a.kind == Kind.RELEASE_PARAM:
                assert time <= params[a.unit, a.backward and not plan.kept(a.unit)].end
            elif a.kind == Kind.PULL_GRAD:
                assert time >= sums[a.unit].start and a.posts[0].offset == plan.windows.sums[a.unit]
            elif a.kind == Kind.SEND_GRAD:
                assert time + 2 <= sums[a.unit].end or a.unit == 0


@settings(max_examples=30, derandomize=True, deadline=None)
@given(plans(st.integers(2, 6)))
def test_a_sum_is_pulled_after_the_rank_before_has_pushed_it(plan: Plan) -> None:
    for i in plan.every_unit:
        pull, start, end = plan.grad_ticks(i)
        assert end - 2 * plan.scale < pull <= start < end


@pytest.mark.parametrize("prefetch", [1, 2, 4])
@pytest.mark.parametrize("per_stage", [2, 4, 8])
def test_memory_in_flight_is_that_of_a_few_units(per_stage: int, prefetch: int) -> None:
    """Those pulled ahead and the one in use; sums have a unit more, on its way back. No rule and no number of ranks matters."""
    for ranks in (3, 4, 16):
        for rule in ("cdp-v2", "cdp-v1", "dp"):
            for rounds in (1, 3):
                plan = make(ranks, threshold(rule, ranks), rounds, per_stage, P, G)
                plan = dataclasses.replace(plan, prefetch_units=prefetch)
                params, sums = most(plan, windows.parameters(plan)), most(plan, windows.running_sums(plan))
                assert params == (prefetch + 1) * P and prefetch * G < sums <= (prefetch + 2) * G
                assert params + sums <= plan.windows.nbytes <= params + P + sums, "at most a unit is lost to gaps"


def test_lifetimes_by_hand() -> None:
    """Three ranks, two units a stage, in halves of a position. Unit 5 stays from its forward to its backward."""
    plan = make(3, 2, per_stage=2)
    half = plan.scale  # ticks are counted twice

    def halves(x: Lifetime) -> tuple[float, float]:
        return x.start // half, (x.end + 1) // half

    assert {v: halves(x) for v, x in windows.parameters(plan).items()} == {
        **{(i, False): (i - 2, i + 1) for i in range(5)},
        (5, False): (3, 7),
        **{(i, True): (11 - i - 2, 12 - i) for i in range(5)},
    }
    sums = {i: halves(x) for i, x in windows.running_sums(plan).items()}
    assert {i: end for i, (_, end) in sums.items()} == {i: min(13 - i, 12) for i in range(6)}
    pulls = {i: 2 * plan.grad_ticks(i)[0] / half for i in range(6)}
    assert pulls == {i: max(11 - i - 2, 12 - i - 4 + 2 / half) for i in range(6)}


def test_alone_a_rank_has_none() -> None:
    assert make(1, 0, per_stage=3).windows.nbytes == 0


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize(("ranks", "per_stage"), [(2, 1), (2, 3), (3, 1), (3, 2), (4, 1)])
def test_any_number_of_passes_ahead_that_fits(ranks: int, per_stage: int, keep: bool) -> None:
    """A model with few units has fewer: no unit is pulled before its own pass of the round before is over."""
    for prefetch in range(ranks * per_stage + 2):
        plan = dataclasses.replace(make(ranks, ranks - 1, 1 + prefetch % 2, per_stage, keep=keep), prefetch_units=prefetch)
        assert plan.ahead == prefetch or prefetch > plan.ahead >= min(2 * per_stage, ranks * per_stage - 1)
        validate(plan, steps=3)


def test_rules_that_take_turns_share_windows_and_so_do_numbers_of_rounds() -> None:
    for kind in (Plan, ReplicatedPlan):
        plan = make(3, 5, 9, 2, persistent=PERSISTENT_UNIT, kind=kind)
        assert with_rounds(plan, 7).windows is plan.windows
        assert plan.under(0).windows == plan.windows and plan.under(0).regions(0)["PG"] == plan.regions(0)["PG"]
        assert kind is ReplicatedPlan or validate(plan.under(0)) is None
    assert make(3, 5, per_stage=2).under(0).windows.params == make(3, 0, per_stage=2).windows.params


def test_replicas_have_windows_for_sums_alone() -> None:
    plan = make(4, 3, per_stage=4, kind=ReplicatedPlan)
    assert set(plan.windows.params) == set() and 3 * G <= plan.windows.nbytes <= 4 * G


# ---- what must be noticed ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("rule", ["cdp-v2", "cdp-v1"])
@pytest.mark.parametrize("keep", [False, True])
def test_two_windows_in_use_at_once_in_one_place_are_refused(rule: str, keep: bool) -> None:
    """Each window moved onto each other one that is in use at the same time. The dry-run's messages take no time, so it does not
    see a sum on its way back."""
    plan = make(4, threshold(rule, 4), 2, keep=keep, per_stage=1 + keep)
    period, params = 2 * plan.round_ticks, windows.parameters(plan)
    sums = {(i, "sum"): x._replace(end=2 * plan.spans[i, True][1]) for i, x in windows.running_sums(plan).items()}
    at = {**plan.windows.params, **{(i, "sum"): offset for i, offset in plan.windows.sums.items()}}
    every, tried = {**params, **sums}, 0
    for v, w in itertools.combinations(every, 2):
        if overlap_in_time(every[v], every[w], period):
            places = {**at, v: at[w]} | ({(v[0], True): at[w]} if v in params and plan.kept(v[0]) else {})
            with pytest.raises(PlanError, match="is still in use"):
                validate(with_windows(plan, places))
            tried += 1
    assert tried > 20


def with_windows(plan: Plan, at: dict) -> Plan:
    other = dataclasses.replace(plan)
    params, sums = {v: x for v, x in at.items() if v[1] != "sum"}, {i: x for (i, kind), x in at.items() if kind == "sum"}
    other.__dict__["windows"] = windows.Windows(params, sums, plan.windows.nbytes + G)
    return other
