"""plan/partition.py against brute force over all cuts; the settings cyclic.partition_method and cyclic.units on top of it."""

import itertools
import subprocess
import sys
import time
from fractions import Fraction
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from deepspeed_cdp.model.discover import FoundUnit, FoundUnits, find_units, stages, why_persistent
from deepspeed_cdp.plan.partition import assign, by_memory, contiguous, merged
from support.sampling import examples


def score(costs, bounds):
    """(largest part, sum of squares), exact."""
    sums = [sum(map(Fraction, costs[a:b])) for a, b in pairwise(bounds)]
    return max(sums), sum(s * s for s in sums)


def brute(costs, parts, least=()):
    cuts = itertools.combinations(range(1, len(costs)), parts - 1)
    allowed = [(0, *cut, len(costs)) for cut in cuts if all(a >= b for a, b in zip(cut, least))]
    return min(score(costs, bounds) for bounds in allowed)


numbers = st.one_of(
    st.lists(st.integers(0, 4), min_size=1, max_size=10),
    st.lists(st.integers(0, 10**15), min_size=1, max_size=10),
    st.lists(st.floats(0, 1e6, allow_subnormal=False), min_size=1, max_size=8),
)


@settings(max_examples=examples(600), deadline=None)
@given(numbers, st.data())
def test_equals_brute_force(costs, data):
    parts = data.draw(st.integers(1, len(costs)))
    bounds = contiguous(costs, parts)
    assert len(bounds) == parts + 1 and bounds[0] == 0 and bounds[-1] == len(costs)
    assert all(a < b for a, b in pairwise(bounds))
    assert score(costs, bounds) == brute(costs, parts)


@settings(max_examples=300, deadline=None)
@given(numbers, st.data())
def test_boundaries_have_a_least(costs, data):
    parts, count = data.draw(st.integers(1, len(costs))), len(costs)
    least = sorted(data.draw(st.lists(st.integers(0, count + 2), min_size=parts - 1, max_size=parts - 1)))
    bounds = contiguous(costs, parts, least)
    possible = [min(b, count - parts + s) for s, b in enumerate(least, 1)]
    assert all(a < b for a, b in pairwise(bounds)) and all(b >= a for a, b in zip(possible, bounds[1:]))
    assert score(costs, bounds) == brute(costs, parts, possible)


@settings(max_examples=300, deadline=None)
@given(numbers, st.data())
def test_parts_have_weights(costs, data):
    parts = data.draw(st.integers(1, len(costs)))
    weights = data.draw(st.lists(st.integers(1, 5), min_size=parts, max_size=parts))

    def weighted(bounds):
        sums = [w * sum(map(Fraction, costs[a:b])) for w, (a, b) in zip(weights, pairwise(bounds))]
        return max(sums), sum(s * s for s in sums)

    cuts = itertools.combinations(range(1, len(costs)), parts - 1)
    assert weighted(contiguous(costs, parts, (), weights)) == min(weighted((0, *cut, len(costs))) for cut in cuts)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=9), st.data())
def test_by_memory_the_first_stages_have_half_of_their_share_of_the_work(items, data):
    sizes, work = zip(*items)
    parts, total = data.draw(st.integers(1, len(items))), sum(work)
    cuts = itertools.combinations(range(1, len(items)), parts - 1)

    def lasts(bounds):  # or leaves one item for each of the other stages
        return all(2 * parts * sum(work[:b]) >= s * total or b == len(items) - parts + s for s, b in enumerate(bounds[1:-1], 1))

    every = [(0, *cut, len(items)) for cut in cuts]
    found = by_memory(sizes, work, parts)
    bounds = (0, *(stage[-1] + 1 for stage in found))
    assert lasts(bounds)
    assert score(sizes, bounds) == min(score(sizes, b) for b in every if lasts(b))


def test_an_embedding_does_not_make_the_first_stage_the_largest():
    sizes, work = [5] + [2] * 16 + [5], [0] + [2] * 16 + [5]
    assert [sum(sizes[i] for i in stage) for stage in by_memory(sizes, work, 4)] == [11, 10, 10, 11]
    assert by_memory([20, 1, 1, 1], [0, 4, 4, 4], 2) == ((0, 1), (2, 3)), "it needs work of its own"


def test_not_greedy():
    # filling each part up to the mean would give 7 | 10 | 2
    assert contiguous([4, 3, 3, 7, 2], 3) == (0, 1, 3, 5)


def test_most_even_among_optimal():
    # the largest part is 9 whatever happens; the rest must still be even
    assert contiguous([9, 1, 1, 1, 1], 3) == (0, 1, 3, 5)


def test_floats_are_exact():
    # in float arithmetic 0.1 + 0.2 > 0.3; as exact numbers too, so the cut must fall after 0.1
    assert contiguous([0.1, 0.2, 0.3], 2) == (0, 2, 3)
    assert contiguous([1e16, 1.0, 1e16, 1.0], 2) == (0, 2, 4)


@pytest.mark.parametrize("cost", [lambda i: 1, lambda i: (i * 7919) % 1000, lambda i: (i % 50 == 0) * 1.5, lambda i: 0])
def test_fast_enough(cost):
    costs = [cost(i) for i in range(500)]
    start = time.process_time()
    bounds = contiguous(costs, 64)
    assert time.process_time() - start < 1.0
    assert len(bounds) == 65 and all(a < b for a, b in pairwise(bounds))


def test_too_few():
    with pytest.raises(ValueError, match="3 units cannot fill 4 stages: use at most 3 ranks"):
        contiguous([1, 1, 1], 4)


def test_assign_methods():
    names, costs = ["Embedding", "Block", "Block", "Block", "Block", "Linear"], [100, 1, 1, 1, 1, 100]
    assert assign(names, costs, 2, "parameters") == ((0, 1, 2), (3, 4, 5))
    assert assign(names, costs, 3, "uniform") == ((0, 1), (2, 3), (4, 5))
    assert assign(names, [1, 1, 1, 1, 1, 5], 2, "flops") == ((0, 1, 2, 3, 4), (5,))
    stages = assign(names, costs, 2, "type:block")
    assert [sum(names[i] == "Block" for i in stage) for stage in stages] == [2, 2]


@pytest.mark.parametrize("method", ["profile", "type:", "type", "parameters:x", ""])
def test_assign_unknown_method(method):
    with pytest.raises(ValueError, match="cyclic.partition_method is .* must be one of auto, parameters"):
        assign(["a", "b"], [1, 1], 2, method)


def test_assign_bad_regex():
    with pytest.raises(ValueError, match="REGEX is invalid"):
        assign(["a"], [1], 1, "type:(")
    with pytest.raises(ValueError, match="matches no unit: match one of the classes a, b"):
        assign(["a", "b"], [1, 1], 2, "type:Block")


def test_imports_no_torch():
    code = "import importlib.util as u, sys; s = u.spec_from_file_location('p', sys.argv[1]); m = u.module_from_spec(s)\n"
    code += "s.loader.exec_module(m); assert 'torch' not in sys.modules"
    from deepspeed_cdp.plan import partition

    subprocess.run([sys.executable, "-c", code, partition.__file__], check=True)


def model(costs, flops=None, persistent=0):
    """Units of an embedding, blocks and a head."""
    kinds = ["Embedding", *["DecoderLayer"] * (len(costs) - 2), "Linear"]
    flops = flops or [None] * len(costs)
    fields = zip(costs, flops, kinds, strict=True)
    return FoundUnits(tuple(FoundUnit(f"u{i}", (f"u{i}.weight",), *f) for i, f in enumerate(fields)), (), persistent)


def test_stages():
    plain, traced = model([8, 2, 2, 2, 2, 8]), model([8, 2, 2, 2, 2, 8], [0, 4, 4, 4, 4, 16])
    assert stages(plain, 2, "parameters") == ((0, 1, 2), (3, 4, 5)) == stages(plain, 2, "auto")
    assert stages(plain, 3, "uniform") == ((0, 1), (2, 3), (4, 5))
    assert [sum(1 <= i <= 4 for i in stage) for stage in stages(plain, 4, "type:decoderlayer")] == [1, 1, 1, 1]
    assert stages(traced, 2, "flops") == ((0, 1, 2, 3, 4), (5,))
    assert stages(traced, 2, "parameters") == ((0, 1, 2), (3, 4, 5)) == stages(traced, 2, "auto")


def test_held_parameters_count_as_stage_0():
    assert stages(model([2, 2, 2, 2], persistent=20), 2, "parameters") == ((0,), (1, 2, 3))
    assert stages(model([2, 2, 2, 2], persistent=20), 2, "uniform") == ((0, 1), (2, 3))


@pytest.mark.parametrize(
    "method, message",
    [
        ("flops", "needs a traced example batch: use 'parameters'"),
        ("profile", "must be one of auto, parameters, uniform, type:REGEX, flops"),
        ("type:Bogus", "matches no unit: match one of the classes DecoderLayer, Embedding, Linear"),
    ],
)
def test_stages_refusals(method, message):
    with pytest.raises(ValueError, match="cyclic.partition_method is") as error:
        stages(model([1, 1, 1]), 2, method)
    assert message in str(error.value)


def network():
    layers = nn.ModuleList(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)) for _ in range(2))
    net = nn.ModuleDict({"embed": nn.Embedding(2, 2), "layers": layers, "act": nn.ReLU(), "head": nn.Linear(2, 2, bias=False)})
    net["head"].weight = net["embed"].weight
    return net


def test_the_users_units():
    units = find_units(network(), 2, names=["layers.1", "layers.0.1"])
    assert [(u.name, u.cost_parameters) for u in units.units] == [("layers.1", 12), ("layers.0.1", 6)]
    assert units.persistent == ("embed.weight", "layers.0.0.weight", "layers.0.0.bias") and units.persistent_cost == 10


def test_why_parameters_are_persistent():
    found = find_units(network(), 2, names=["layers.1", "layers.0.1"])
    reasons = why_persistent(network(), found)
    assert reasons["embed.weight"] == "it is also 'head.weight'"
    assert reasons["layers.0.0.bias"] == "it lies directly on 'layers.0.0', whose parts are units"


def test_the_users_patterns():
    def named(*names):
        return [u.name for u in find_units(network(), 2, names=names).units]

    assert named("layers.*") == ["layers.0", "layers.1"]
    assert named("layers.1", "layers.0.*") == ["layers.1", "layers.0.0", "layers.0.1"]
    assert named("l*.[01]") == ["layers.0", "layers.1"]


@pytest.mark.parametrize(
    "given, message",
    [
        (["layers.*", "layers.1.0"], "has 'layers.1.0', which overlaps 'layers.1': keep one"),
        (["layer.*"], "has 'layer.*', which fits no module with parameters"),
        (["layer"], "has 'layer', which is no module of this model: use paths from named_modules"),
        (["layers.0", "layers.0.1"], "has 'layers.0.1', which overlaps 'layers.0': keep one"),
        (["layers.0.1", "layers.0"], "has 'layers.0', which overlaps 'layers.0.1': keep one"),
        (["layers.1", "layers.1"], "which overlaps 'layers.1'"),
        (["act"], "which has no parameters: remove it"),
        (["layers"], "a ModuleList, which is never called as such: list its children"),
        (["head", "layers.0"], "has 'head', whose parameters are all shared"),
        (["layers.0"], "has 1 units for 2 ranks: use at most 1 ranks, or list more modules in cyclic.units"),
    ],
)
def test_the_users_mistakes(given, message):
    with pytest.raises(ValueError, match="cyclic.units") as error:
        find_units(network(), 2, names=given)
    assert message in str(error.value)


def test_merged() -> None:
    assert merged([], 5) == ()
    assert merged([3, 1, 9, 2], 0) == ((0,), (1,), (2,), (3,))
    assert merged([3, 1, 9, 2], 4) == ((0, 1), (2,), (3,))
    assert merged([3, 1, 9, 2], 100) == ((0, 1, 2, 3),)
    assert merged([0, 0, 1], 1) == ((0, 1, 2),)
