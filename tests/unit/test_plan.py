"""plan.py and program.py: every plan passes the dry-run, repeats, and costs the bytes that the closed forms say."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspeed_cdp.plan import HELD, Plan, Unit
from deepspeed_cdp.program import _Builder, build
from deepspeed_cdp.schedule import Schedule, threshold
from deepspeed_cdp.validate import DryRun, PlanError, validate

HELD_UNIT = Unit("", 0, ("tied",), (), 320, 192)


def make(ranks: int, k: int, rounds: int = 1, per_stage: int = 1, p_bytes: int = 1024, g_bytes: int = 2048,
         held: Unit | None = None) -> Plan:
    """A plan with equal units."""
    units = tuple(Unit(f"u{i}", i // per_stage, (f"w{i}",), (), p_bytes, g_bytes) for i in range(ranks * per_stage))
    return Plan(Schedule(ranks, k, rounds), units, held)


@st.composite
def plans(draw: st.DrawFn, ranks: st.SearchStrategy[int], k: int | None = None, rounds: int | None = None) -> Plan:
    """Uneven stages of 1 to 5 units of uneven sizes, some frozen, with held parameters or without."""
    n = draw(ranks)
    units: list[Unit] = []
    for stage in range(n):
        for _ in range(draw(st.integers(1, 5))):
            i, frozen = len(units), draw(st.integers(0, 4)) == 0
            units.append(Unit(f"u{i}", stage, () if frozen else (f"w{i}",), (f"w{i}",) if frozen else (),
                              draw(st.integers(1, 5000)), 0 if frozen else draw(st.integers(1, 9000))))
    held = draw(st.sampled_from([None, HELD_UNIT, Unit("", 0, (), ("frozen",), 64, 0)]))
    k = draw(st.integers(0, 2 * n - 1)) if k is None else k
    return Plan(Schedule(n, k, rounds or draw(st.integers(1, 3))), tuple(units), held)


SMALL = [(n, k, rounds) for n in range(1, 7) for k in range(2 * n) for rounds in (1, 2, 3)]


# ---- the dry-run --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("ranks", "k", "rounds"), SMALL)
def test_every_small_ring_passes(ranks: int, k: int, rounds: int) -> None:
    units = []
    for stage in range(ranks):
        for _ in range(1 + (stage + k) % 3):
            i = len(units)
            g_bytes = 0 if i % 4 == 2 else 100 + 900 * (i * 5 % 3)
            units.append(Unit(f"u{i}", stage, (f"w{i}",), (), 64 + 700 * (i * 7 % 5), g_bytes))
    validate(Plan(Schedule(ranks, k, rounds), tuple(units), HELD_UNIT if (k + rounds) % 2 else None))


@settings(max_examples=10, derandomize=True, deadline=None)
@given(plans(st.integers(1, 9)))
def test_random_plans_pass(plan: Plan) -> None:
    validate(plan)


@settings(max_examples=2, derandomize=True, deadline=None)
@given(plans(st.integers(16, 32), rounds=1))
def test_random_large_rings_pass(plan: Plan) -> None:
    validate(plan, steps=3)


@pytest.mark.parametrize(("rule", "copies"), [("cdp-v2", {1}), ("cdp-v1", {1, 2}), ("dp", {1})])
def test_published_copies_are_as_few_as_can_be(rule: str, copies: set[int]) -> None:
    """Two copies only where a reader of the old version may come after the update: with one, the dry-run objects."""
    needs = set()
    for ranks in range(1, 6):
        for rounds in (1, 2):
            plan = make(ranks, threshold(rule, ranks), rounds, held=HELD_UNIT if rounds == 2 else None)
            needs.add(plan.copies)
            if plan.copies == 2:
                plan.__dict__["copies"] = 1
                with pytest.raises(PlanError):
                    validate(plan)
    assert needs == copies


# ---- programs repeat ----------------------------------------------------------------------------------------------------
@settings(max_examples=30, derandomize=True, deadline=None)
@given(plans(st.integers(1, 6)))
def test_later_steps_repeat_the_steady_one(plan: Plan) -> None:
    period = plan.schedule.period * plan.scale
    for rank in range(plan.schedule.ranks):
        steady = build(plan, rank, False)
        assert steady, "a step has actions"
        for step in (2, 3, 7):
            later = _Builder(plan, rank, step).build()
            assert tuple(a._replace(time=a.time - (step - 1) * period) for a in later) == steady


@settings(max_examples=20, derandomize=True, deadline=None)
@given(plans(st.integers(1, 6)))
def test_a_program_holds_every_pass_once(plan: Plan) -> None:
    s = plan.schedule
    passes = {(m, i, b) for m in range(s.rounds) for i, b in plan.visits}
    held = {(m, HELD) for m in range(s.rounds)} if plan.held else set()
    summed = {(m, i) for m, i, b in passes if b and plan.units[i].g_bytes}
    for rank in range(s.ranks):
        for first in (True, False):
            kinds: dict[str, Counter] = {}
            for a in build(plan, rank, first):
                kinds.setdefault(a.kind, Counter())[a.round, a.unit, a.backward] += 1
            assert kinds["READ"] == Counter(passes | {(m, i, False) for m, i in held})
            assert kinds["DONE"] == Counter(passes)
            assert kinds.get("DONE_HELD", Counter()) == Counter((m, i, True) for m, i in held)
            assert kinds.get("SUM", Counter()) == Counter((m, i, True) for m, i in summed)
            if s.ranks > 1:
                assert kinds.get("PASS") == kinds.get("SUM") and kinds.get("PASS_HELD") == kinds.get("SUM_HELD")


# ---- bytes --------------------------------------------------------------------------------------------------------------
def counted(run: DryRun, rank: int, step: int) -> dict[str, int]:
    """Bytes that arrived in a step of the dry-run; finished sums are counted where rank N-1 sends them."""
    total = {"F": 0, "B": 0, "G": 0, "O": 0}
    for r, t, a in run.log:
        if t == step and r == rank and a.peer is not None and a.kind in ("READ", "SUM", "SUM_HELD"):
            total["G" if a.kind != "READ" else "B" if a.backward else "F"] += a.nbytes
        if t == step and a.stream == "O" and a.peer == rank != r:
            total["O"] += a.nbytes
    return total


@settings(max_examples=12, derandomize=True, deadline=None)
@given(plans(st.integers(1, 6)))
def test_closed_form_equals_what_the_dry_run_counts(plan: Plan) -> None:
    run = DryRun(plan, 4)
    run.run()
    for rank in range(plan.schedule.ranks):
        assert counted(run, rank, 2) == counted(run, rank, 3) == plan.received_bytes(rank)


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_closed_form_by_hand(ranks: int) -> None:
    """Psi bytes of parameters, 2 Psi of sums. v2 reads its own stage at home, in the first round; v1 and dp only on rank 0."""
    psi = 1024 * 2 * ranks
    for rule in ("cdp-v2", "cdp-v1", "dp"):
        for rounds in (1, 2):
            plan = make(ranks, threshold(rule, ranks), rounds, per_stage=2)
            for r in range(ranks):
                at_home = rule == "cdp-v2" or r == 0
                parameters = rounds * psi - (psi // ranks if at_home else 0)
                assert plan.received_bytes(r) == {"F": parameters, "B": parameters, "G": 2 * psi * (rounds - (r == 0)),
                                                  "O": 0 if r == ranks - 1 else 2 * psi // ranks}
    v2 = make(ranks, ranks - 1, per_stage=2)
    assert all(v2.received_bytes(r)["F"] + v2.received_bytes(r)["B"] == 2 * psi * (ranks - 1) // ranks for r in range(ranks))


def test_alone_nothing_travels() -> None:
    plan = make(1, 0, 2, per_stage=3, held=HELD_UNIT)
    assert plan.received_bytes(0) == {"F": 0, "B": 0, "G": 0, "O": 0}
    assert plan.regions["P"] == plan.regions["G"] == 0 and plan.regions["O"] == 3 * 2048 + 192
    assert {a.kind for a in build(plan, 0, False)} == {"READ", "DONE", "SUM", "SUM_HELD", "DONE_HELD", "NORM", "UPDATE"}


def test_held_parameters_travel_once() -> None:
    bare, held = make(3, 2), make(3, 2, held=HELD_UNIT)
    more = {k: held.received_bytes(1)[k] - v for k, v in bare.received_bytes(1).items()}
    assert more == {"F": 320, "B": 0, "G": 192, "O": 0}  # rank 2 owns them
    assert held.regions["H0"] == held.regions["H1"] == 320 and held.regions["GH"] == 192 and "H0" not in bare.regions


# ---- memory -------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("rule", ["cdp-v2", "cdp-v1"])
@pytest.mark.parametrize(("ranks", "p_units"), [(4, 22), (8, 19), (16, 18)])
def test_memory_is_about_seven_stages(ranks: int, p_units: int, rule: str) -> None:
    """With 8 equal units a stage, 17 units of P are live (2 stages and the one in use): the fewest slots for 16 N visits."""
    per_stage, p, g = 8, 1024, 2048
    plan = make(ranks, threshold(rule, ranks), per_stage=per_stage)
    assert p_units == -(-2 * per_stage * ranks // (2 * per_stage * ranks // 17))
    assert plan.regions["P"] == p_units * p
    assert 2 * per_stage * g <= plan.regions["G"] <= (2 * per_stage + 1) * g
    assert plan.regions["O"] == per_stage * g and plan.regions["V0"] == per_stage * p and "V1" not in plan.regions
    total = plan.memory()
    assert total == {"in flight": p_units * p + plan.regions["G"], "sums": per_stage * g, "published": per_stage * p,
                     "scalars": plan.regions["S"]}
    whole = per_stage * ranks * (p + g)
    assert sum(total.values()) <= 3.4 * whole / ranks, "about 1/N of everything: 2.1 to 2.8 stages in flight, and one kept"


@settings(max_examples=30, derandomize=True, deadline=None)
@given(plans(st.integers(1, 8)))
def test_regions_hold_all_that_is_placed_in_them(plan: Plan) -> None:
    for rank in range(plan.schedule.ranks):
        for first in (True, False):
            actions = build(plan, rank, first)
            for x in [*actions, *(post for a in actions for post in a.posts)]:
                if x.region:
                    regions = [r for r in plan.regions if r in (x.region, f"{x.region}0", f"{x.region}1")]
                    assert regions and all(0 <= x.offset <= plan.regions[r] - x.nbytes for r in regions), x


# ---- the rest -----------------------------------------------------------------------------------------------------------
def test_stages_and_members() -> None:
    units = (Unit("a", 0, ("a.w",), ("a.f",), 64, 64), Unit("b", 0, ("b.w", "b.b"), (), 64, 64),
             Unit("c", 1, ("c.w",), (), 64, 64))
    plan = Plan(Schedule(2, 1), units, HELD_UNIT)
    assert plan.stages == (("tied", "a.w", "b.w", "b.b"), ("c.w",))
    assert plan.members(0) == (HELD, 0, 1) and plan.members(1) == (2,)
    assert plan.unit(HELD) is HELD_UNIT and plan.unit(2) is units[2]
    assert plan.visits == ((0, False), (1, False), (2, False), (2, True), (1, True), (0, True))
    assert plan.scale == 2 and plan.spans[1, False] == (1, 2) and plan.spans[2, True] == (4, 6) and plan.spans[0, True] == (7, 8)


@pytest.mark.parametrize("stages", [(0,), (0, 2), (1, 0), (0, 0)])
def test_units_that_do_not_run_through_the_stages_are_refused(stages: tuple[int, ...]) -> None:
    with pytest.raises(AssertionError, match="stages in order"):
        Plan(Schedule(2, 1), tuple(Unit(str(i), s, (), (), 64, 64) for i, s in enumerate(stages)))


def test_held_parameters_of_another_stage_are_refused() -> None:
    with pytest.raises(AssertionError, match="stage 0"):
        Plan(Schedule(2, 1), make(2, 1).units, Unit("", 1, (), (), 64, 64))


def test_actions_print_as_one_line() -> None:
    texts = [str(a) for a in build(make(2, 1, held=HELD_UNIT), 1, False)]
    assert "READ forward unit 1 <- rank 0 (stream P, round 0, logical time 7)" in texts
    assert "PASS backward unit 0 -> rank 1 (stream O, round 0, logical time 10)" in texts
    assert "DONE forward unit 1 (stream -, round 0, logical time 8)" in texts
    assert any(x.startswith("UPDATE (stream -") for x in texts) and any(x.startswith("NORM <- rank 0 (stream S") for x in texts)
