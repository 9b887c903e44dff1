"""The chains between rings: the dry-run passes every plan, and rejects wrong ones."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspeed_cdp.plan.cross_ring import PAIR, Link, LinkKind, chain, finishing
from deepspeed_cdp.plan.plan import Plan
from deepspeed_cdp.plan.replicated import ReplicatedPlan
from deepspeed_cdp.plan.schedule import Schedule
from deepspeed_cdp.plan.unit_schedule import Unit
from deepspeed_cdp.verify.cross_ring import validate
from deepspeed_cdp.verify.well_formed import PlanError
from support.plans import plans
from support.sampling import examples


def plan(ranks: int, k: int, rings: int, rounds: int = 1) -> Plan:
    """Two units a stage, one without sums; persistent parameters."""
    units = tuple(
        Unit(f"u{i}", i // 2, (f"u{i}.w",), (), 256 * (i + 1), 0 if i == 3 else 512 * (i + 1)) for i in range(2 * ranks)
    )
    return Plan(Schedule(ranks, k, rounds), units, Unit("", 0, ("tied",), (), 512, 256), False, rings)


@pytest.mark.parametrize("rings", [2, 3, 4])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_every_rule_passes(ranks, rings):
    for k in range(2 * ranks):
        validate(plan(ranks, k, rings, 1 + k % 2))


@settings(max_examples=examples(25), deadline=None)
@given(plans(st.integers(1, 3)), st.integers(2, 4))
def test_any_plan_passes(one, rings):
    validate(Plan(one.schedule, one.units, one.persistent, one.keep_after_forward, rings), steps=3)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_replicas_pass(ranks):
    """ZeRO stages 0, 1 and 2."""
    for k in range(2 * ranks):
        one = plan(ranks, k, 3)
        validate(ReplicatedPlan(one.schedule, one.units, one.persistent, False, 3))


def links_of(one: Plan) -> list[list[tuple[Link, ...]]]:
    return [[chain(c, one.rings, finishing(one, r)) for r in range(one.schedule.ranks)] for c in range(one.rings)]


def rejected(one: Plan, ring: int, rank: int, wrong: list[Link]) -> str:
    links = links_of(one)
    links[ring][rank] = tuple(wrong)
    with pytest.raises(PlanError) as error:
        validate(one, links=links)
    assert re.match(r"(nothing moves any more: )?rank \d, step \d", str(error.value)), error.value
    return str(error.value)


@pytest.mark.parametrize("k", [0, 1, 3])
@pytest.mark.parametrize("kind", [LinkKind.WAIT_OWN, LinkKind.RECV, LinkKind.ADD, LinkKind.SEND, LinkKind.GRANT_CREDIT])
def test_a_link_that_is_missing_is_found(kind, k):
    one, tried = plan(2, k, 3), 0
    for ring, ranks in enumerate(links_of(one)):
        for rank, good in enumerate(ranks):
            for at, link in enumerate(good):
                if link.kind == kind:
                    rejected(one, ring, rank, [*good[:at], *good[at + 1 :]])
                    tried += 1
    assert tried >= 4


def test_a_link_done_twice_is_found():
    one = plan(2, 1, 3)
    for ring, ranks in enumerate(links_of(one)):
        for rank, good in enumerate(ranks):
            for at, link in enumerate(good):
                if link.kind in (LinkKind.RECV, LinkKind.ADD, LinkKind.SEND, LinkKind.GRANT_CREDIT):
                    rejected(one, ring, rank, [*good[: at + 1], link, *good[at + 1 :]])


def test_rings_that_take_their_units_in_different_orders_are_found():
    one = plan(2, 1, 2)
    for ring in (0, 1):
        units = finishing(one, 1)
        assert len(units) > 1
        assert re.search("lands where|not earlier", rejected(one, ring, 1, list(chain(ring, 2, units[::-1]))))


def test_a_credit_given_too_early_is_found():
    """The credit for Y comes while X is still in the region."""
    one = plan(2, 1, 3)
    good = list(links_of(one)[1][0])
    at = next(i for i, link in enumerate(good) if link.kind == LinkKind.GRANT_CREDIT)
    add = next(i for i, link in enumerate(good) if link.kind == LinkKind.ADD)
    assert "still in use" in rejected(one, 1, 0, [*good[:add], good[at], *good[add:at], *good[at + 1 :]])


def test_a_circle_is_found():
    """Ring 0 wants the total of each item before it sends the sum of it."""
    one = plan(2, 1, 2)
    good = list(links_of(one)[0][0])
    push = next(i for i, link in enumerate(good) if link.kind == LinkKind.SEND)
    total = next(i for i, link in enumerate(good) if link.kind == LinkKind.RECV)
    assert "nothing moves" in rejected(one, 0, 0, [*good[:push], good[total], *good[push:total], *good[total + 1 :]])


@pytest.mark.parametrize("rings", [2, 3, 5])
def test_keys_rise_and_messages_wait_for_smaller_ones(rings):
    chains = [chain(c, rings, (4, 2)) for c in range(rings)]
    for links in chains:
        assert [link.key for link in links] == sorted(link.key for link in links)
    for c, links in enumerate(chains):
        for link in links:
            if link.kind == LinkKind.RECV:
                sender = chains[c - 1 if link.stream == "X" else c + 1]
                push = next(x for x in sender if x.kind == LinkKind.SEND and (x.item, x.stream) == (link.item, link.stream))
                assert push.key < link.key
    assert all(sum(link.kind == LinkKind.FINISHED for link in links) == 3 and links[-1].item == PAIR for links in chains)
