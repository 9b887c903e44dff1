"""Which rank is where: every map up to 24 ranks, and the dry-run of rings whose groups work in lock-step."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspeed_cdp.plan.plan import Plan
from deepspeed_cdp.plan.schedule import Schedule, threshold
from deepspeed_cdp.plan.unit_schedule import Unit
from deepspeed_cdp.transport.ring_map import RingMap
from deepspeed_cdp.transport.ring_view import ring_size
from deepspeed_cdp.verify.cross_ring import lock_step, validate
from deepspeed_cdp.verify.well_formed import PlanError
from support.plans import plans
from support.sampling import examples

MAPS = [
    RingMap(ranks, size, sequence)
    for ranks in range(1, 25)
    for sequence in range(1, ranks + 1)
    if ranks % sequence == 0
    for size in range(1, ranks // sequence + 1)
    if ranks // sequence % size == 0
]
TENSOR = [RingMap(m.ranks, m.ring_size, 1, m.sequence) for m in MAPS if m.sequence > 1]  # the same, of tensor groups


@pytest.mark.parametrize("ring_map", MAPS + TENSOR, ids=str)
def test_every_rank_has_one_place_and_groups_share_it(ring_map: RingMap):
    ranks, size, members = ring_map.ranks, ring_map.ring_size, ring_map.members
    places = [(ring_map.ring(w), ring_map.place(w)) for w in range(ranks)]
    assert sorted(places) == [(ring, place) for ring in range(ranks // size) for place in range(size)]
    assert [ring_map.rank(*at) for at in places] == list(range(ranks))
    assert [ring_map.grid()[ring][place] for ring, place in places] == list(range(ranks))
    for w in range(ranks):
        group = ring_map.group(w)
        assert w in group and len(group) == members and group.start % members == 0
        assert len({ring_map.place(g) for g in group}) == 1, "one logical time"
        assert [ring_map.ring(g) for g in group] == list(range(ring_map.ring(group[0]), ring_map.ring(group[0]) + members))
        # members of a ring are the same members of their groups, in the groups' order
        ring = [ring_map.rank(ring_map.ring(w), place) for place in range(size)]
        assert [x % members for x in ring] == [w % members] * size and ring == sorted(ring)


@pytest.mark.parametrize("ring_map", MAPS + TENSOR, ids=str)
def test_families_are_the_rings_of_equal_parameters(ring_map: RingMap):
    families = {tuple(ring_map.family(w)) for w in range(ring_map.ranks)}
    assert sorted(ring for family in families for ring in family) == list(range(ring_map.rings))
    assert len(families) == ring_map.tensor
    for w in range(ring_map.ranks):
        holders = [ring_map.rank(ring, place) for ring in ring_map.family(w) for place in range(ring_map.ring_size)]
        assert w in holders and {x % ring_map.tensor for x in holders} == {w % ring_map.tensor}, "they hold the same shards"


def test_without_sequence_parallelism_rings_are_consecutive_ranks():
    for ranks, size, sequence, _ in MAPS:
        if sequence == 1:
            ring_map = RingMap(ranks, size)
            assert [(ring_map.ring(w), ring_map.place(w)) for w in range(ranks)] == [divmod(w, size) for w in range(ranks)]


def test_the_picture_of_two_by_two():
    assert RingMap(4, 2, 2).grid() == [[0, 2], [1, 3]]
    assert RingMap(8, 2, 2).grid() == [[0, 2], [1, 3], [4, 6], [5, 7]]
    tensor = RingMap(8, 2, 1, 2)
    assert tensor.grid() == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert [list(tensor.family(w)) for w in range(4)] == [[0, 2], [1, 3]] * 2


@pytest.mark.parametrize(
    ("setting", "hosts", "sequence", "size"),
    [
        ("auto", "aaaa", 2, 2),
        ("auto", "aaaabbbb", 2, 2),
        ("auto", "aaaabbbb", 4, 2),  # a host is one group: the rings span both
        ("auto", "aabb", 4, 1),  # a group spans both hosts
        ("auto", "aaabbb", 2, 3),  # a host's ranks are no whole groups
        ("auto", "aaaaaabbbbbb", 3, 2),
        (2, "aaaaaaaa", 2, 2),
        (1, "aaaa", 2, 1),
    ],
)
def test_ring_size(setting, hosts, sequence, size):
    assert ring_size(setting, hosts, sequence) == size


@pytest.mark.parametrize(("setting", "ranks", "sequence"), [(4, 4, 2), (2, 6, 2), (3, 4, 1)])
def test_a_ring_size_that_does_not_divide_the_groups_is_refused(setting, ranks, sequence):
    with pytest.raises(ValueError, match=f"cyclic.ring_size is {setting}, which does not divide the {ranks // sequence} "):
        ring_size(setting, "a" * ranks, sequence)


def plan(ring_map: RingMap, rule: str | int, rounds: int = 1) -> Plan:
    """Two units a stage, and persistent parameters."""
    n = ring_map.ring_size
    units = tuple(Unit(f"u{i}", i // 2, (f"u{i}.w",), (), 256 * (i + 1), 512 * (i + 1)) for i in range(2 * n))
    schedule = Schedule(n, threshold(rule, n), rounds)
    return Plan(schedule, units, Unit("", 0, ("tied",), (), 512, 256), False, ring_map.rings // ring_map.tensor)


def groups(ring_map: RingMap) -> list[list[tuple[int, int]]]:
    firsts = range(0, ring_map.ranks, ring_map.members)
    return [[(ring_map.ring(w), ring_map.place(w)) for w in ring_map.group(first)] for first in firsts]


SMALL = [m for m in MAPS + TENSOR if m.members > 1 and m.ranks <= 12 and m.ring_size <= 4]


@pytest.mark.sampled(24)
@pytest.mark.parametrize("rounds", [1, 2])
@pytest.mark.parametrize("rule", ["dp", "cdp-v1", "cdp-v2"])
@pytest.mark.parametrize("ring_map", SMALL, ids=str)
def test_groups_in_lock_step_end(ring_map: RingMap, rule: str, rounds: int):
    """Members meet before every action: so collectives in each layer, of the loss and of the data loader cannot hang."""
    one = plan(ring_map, rule, rounds)
    assert sorted(lock_step(one, ring_map.sequence, ring_map.tensor)) == sorted(groups(ring_map))
    validate(one, steps=3, groups=groups(ring_map), tensor=ring_map.tensor)


@settings(max_examples=examples(16), deadline=None)
@given(plans(st.integers(1, 3)), st.integers(2, 3), st.integers(1, 2))
def test_any_plan_ends_in_lock_step(one: Plan, sequence: int, blocks: int):
    one = replace(one, rings=sequence * blocks)
    validate(one, steps=3, groups=lock_step(one, sequence))
    one = replace(one, rings=blocks)
    validate(one, steps=3, groups=lock_step(one, tensor=sequence), tensor=sequence)


@pytest.mark.parametrize("rule", ["dp", "cdp-v1", "cdp-v2"])
@pytest.mark.parametrize("ring_map", [m for m in SMALL if m.ring_size > 1 and m.ranks <= 8], ids=str)
def test_groups_that_are_no_equal_places_hang(ring_map: RingMap, rule: str):
    """As with the map of rings without sequence parallelism, where a group would be neighbours in one ring."""
    wrong = RingMap(ring_map.ranks, ring_map.ring_size)
    firsts = range(0, ring_map.ranks, ring_map.members)
    neighbours = [[(wrong.ring(w), wrong.place(w)) for w in ring_map.group(first)] for first in firsts]
    with pytest.raises(PlanError, match="nothing moves any more"):
        validate(plan(ring_map, rule), steps=3, groups=neighbours, tensor=ring_map.tensor)
