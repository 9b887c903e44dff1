"""plan.py and plan/program.py: every plan passes the dry-run, repeats, and costs the bytes that the closed forms say."""

import dataclasses
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspeed_cdp.plan.actions import Kind
from deepspeed_cdp.plan.constants import PERSISTENT
from deepspeed_cdp.plan.plan import Plan
from deepspeed_cdp.plan.program import build, builder
from deepspeed_cdp.plan.schedule import Schedule, threshold
from deepspeed_cdp.plan.unit_schedule import Unit
from deepspeed_cdp.verify.check import validate
from deepspeed_cdp.verify.dry_run import DryRun
from deepspeed_cdp.verify.well_formed import PlanError
from support.plans import PERSISTENT_UNIT, make, plans

# (up to three ranks keep_after_forward changes nothing: all stages but the first are the last two)
SMALL = [(n, k, rounds, keep) for n in range(1, 7) for k in range(2 * n) for rounds in (1, 2, 3) for keep in {False, n > 3}]


# ---- the dry-run --------------------------------------------------------------------------------------------------------
@pytest.mark.sampled(4)
@pytest.mark.parametrize(("ranks", "k", "rounds", "keep"), SMALL)
def test_every_small_ring_passes(ranks: int, k: int, rounds: int, keep: bool) -> None:
    units = []
    for stage in range(ranks):
        for _ in range(1 + (stage + k) % 3):
            i = len(units)
            g_bytes = 0 if i % 4 == 2 else 100 + 900 * (i * 5 % 3)
            units.append(Unit(f"u{i}", stage, (f"w{i}",), (), 64 + 700 * (i * 7 % 5), g_bytes))
    validate(Plan(Schedule(ranks, k, rounds), tuple(units), PERSISTENT_UNIT if (k + rounds) % 2 else None, keep))


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
            plan = make(ranks, threshold(rule, ranks), rounds, persistent=PERSISTENT_UNIT if rounds == 2 else None)
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
            later = builder(plan, rank, step).build()
            assert tuple(a._replace(time=a.time - (step - 1) * period) for a in later) == steady


@settings(max_examples=20, derandomize=True, deadline=None)
@given(plans(st.integers(1, 6)))
def test_a_program_holds_every_pass_once(plan: Plan) -> None:
    s = plan.schedule
    passes = {(m, i, b) for m in range(s.rounds) for i, b in plan.visits}
    persistent = {(m, PERSISTENT) for m in range(s.rounds)} if plan.persistent else set()
    summed = {(m, i) for m, i, b in passes if b and plan.units[i].g_bytes}
    for rank in range(s.ranks):
        for first in (True, False):
            kinds: dict[str, Counter] = {}
            for a in build(plan, rank, first):
                kinds.setdefault(a.kind, Counter())[a.round, a.unit, a.backward] += 1
            assert kinds[Kind.WAIT_PARAM] == Counter(passes | {(m, i, False) for m, i in persistent})
            assert kinds[Kind.RELEASE_PARAM] == Counter((m, i, b) for m, i, b in passes if b or not plan.kept(i))
            assert kinds.get(Kind.RELEASE_PERSISTENT_PARAM, Counter()) == Counter((m, i, True) for m, i in persistent)
            assert kinds.get(Kind.RECV_GRAD, Counter()) == Counter((m, i, True) for m, i in summed)
            if s.ranks > 1:
                assert kinds.get(Kind.SEND_GRAD) == kinds.get(Kind.RECV_GRAD) and kinds.get(
                    Kind.SEND_PERSISTENT_GRAD
                ) == kinds.get(Kind.RECV_PERSISTENT_GRAD)


# ---- bytes --------------------------------------------------------------------------------------------------------------
SENT = (Kind.SEND_GRAD, Kind.SEND_PERSISTENT_GRAD, Kind.SEND_EARLY_GRAD, Kind.SEND_EARLY_PERSISTENT_GRAD)


def counted(run: DryRun, rank: int, step: int) -> dict[str, int]:
    """Bytes that arrived in a step of the dry-run; finished sums are counted where rank N-1 sends them."""
    total = {"F": 0, "B": 0, "G": 0, "O": 0, "E": 0}
    for r, t, a in run.log:
        if (
            t == step
            and r == rank
            and a.peer is not None
            and a.kind in (Kind.WAIT_PARAM, Kind.RECV_GRAD, Kind.RECV_PERSISTENT_GRAD)
        ):
            total["G" if a.kind != Kind.WAIT_PARAM else "B" if a.backward else "F"] += a.nbytes
        if t == step and a.stream in ("O", "E") and a.kind in SENT and a.peer == rank != r:
            total[a.stream] += a.nbytes
    return total


@settings(max_examples=12, derandomize=True, deadline=None)
@given(plans(st.integers(1, 6)))
def test_closed_form_equals_what_the_dry_run_counts(plan: Plan) -> None:
    run = DryRun(plan, 4)
    run.run()
    for rank in range(plan.schedule.ranks):
        assert counted(run, rank, 2) == counted(run, rank, 3) == plan.received_bytes(rank)


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_closed_form_by_hand(ranks: int, keep: bool) -> None:
    """Psi bytes of parameters, 2 Psi of sums. v2 and dp read their own stage at home in every round; v1 does on rank 0, in the
    first. The backward needs anew what is not kept: all but the last two stages, or only the first."""
    psi, again = 1024 * 2 * ranks, 1 if keep else max(1, ranks - 2)
    for rule in ("cdp-v2", "cdp-v1", "dp"):
        for rounds in (1, 2):
            plan = make(ranks, threshold(rule, ranks), rounds, per_stage=2, keep=keep)
            for r in range(ranks):
                at_home, own = int(r == 0) if rule == "cdp-v1" else rounds, ranks - 1 - r
                assert plan.received_bytes(r) == {
                    "F": (rounds * ranks - at_home) * psi // ranks,
                    "B": (rounds * again - at_home * (own < again)) * psi // ranks,
                    "G": 2 * psi * (rounds - (r == 0)),
                    "O": 0 if r == ranks - 1 else 2 * psi // ranks,
                    "E": 0,
                }
    v2 = make(ranks, ranks - 1, per_stage=2, keep=keep)
    everyone = sum(v2.received_bytes(r)["F"] + v2.received_bytes(r)["B"] for r in range(ranks))
    assert everyone == (ranks - 1) * psi * (1 + again / ranks), "2 (N-1) Psi without keeping"


# ---- parameters kept from forward to backward ---------------------------------------------------------------------------
@settings(max_examples=40, derandomize=True, deadline=None)
@given(plans(st.integers(1, 8)))
def test_kept_units_are_sent_once_and_lie_still(plan: Plan) -> None:
    """Forward and backward read the same bytes; what is not kept is released after its forward and comes anew."""
    n = plan.schedule.ranks
    first_kept = 1 if plan.keep_after_forward else max(1, n - 2)
    assert [plan.kept(i) for i in range(len(plan.units))] == [u.stage >= first_kept for u in plan.units] and not plan.kept(
        PERSISTENT
    )
    kept = {i for i, u in enumerate(plan.units) if u.stage >= first_kept}
    for rank in range(n):
        offsets = plan.p_layouts[rank].offsets
        assert all(offsets[i, False] == offsets[i, True] for i in kept if (i, False) in offsets)
        for first in (True, False):
            actions = build(plan, rank, first)
            reads = {(a.round, a.unit, a.backward): a for a in actions if a.kind == Kind.WAIT_PARAM}
            for (m, i, backward), a in reads.items():
                if i in kept and backward:
                    forward = reads[m, i, False]
                    assert (a.region, a.offset, a.version) == (forward.region, forward.offset, forward.version) and a.peer is None
            sent = [a for a in actions if a.kind in (Kind.FORWARD_PARAM, Kind.PUBLISH_PARAM, Kind.PULL_PARAM)] + [
                p for a in actions for p in a.posts
            ]
            assert not any(a.backward and a.unit in kept for a in sent if getattr(a, "stream", "")[:1] == "P")
            released = {(a.unit, a.backward) for a in actions if a.kind == Kind.RELEASE_PARAM}
            assert released == {v for v in plan.visits if v[1] or v[0] not in kept}


@pytest.mark.parametrize("rounds", [1, 2])
@pytest.mark.parametrize("rule", ["cdp-v2", "cdp-v1", "dp"])
def test_with_keep_after_forward_only_stage_0_travels_twice(rule: str, rounds: int) -> None:
    """What the backward receives in the dry-run, on four ranks: stage 0, unless it is the rank's own."""
    plans = {keep: make(4, threshold(rule, 4), rounds, per_stage=3, keep=keep) for keep in (False, True)}
    for keep, stages in ((False, {0, 1}), (True, {0})):
        run = DryRun(plans[keep], 4)
        run.run()
        received = {
            (r, plans[keep].units[a.unit].stage)
            for r, t, a in run.log
            if a.kind == Kind.WAIT_PARAM and a.backward and a.peer is not None and t == 2
        }
        home = {(r, 3 - r) for r in range(4)} if rule != "cdp-v1" else set()
        assert received == {(r, s) for r in range(4) for s in stages} - home
        for rank in range(4):
            assert counted(run, rank, 2)["B"] == plans[keep].received_bytes(rank)["B"]
    for rank in range(4):
        stage = 3 * 1024
        assert plans[True].received_bytes(rank)["B"] == stage * (0 if rule != "cdp-v1" and rank == 3 else rounds)


def overlaid(plan: Plan, kept: int, other: tuple[int, bool]) -> Plan:
    """The same plan with the offset of visit ``other`` moved onto a kept unit's, on every rank that receives both."""
    wrong = Plan(plan.schedule, plan.units, plan.persistent, plan.keep_after_forward)
    moved = {other} | ({(other[0], True)} if plan.kept(other[0]) else set())
    wrong.__dict__["layouts"] = tuple(
        x._replace(
            p=x.p._replace(offsets={v: x.p.offsets.get((kept, False), at) if v in moved else at for v, at in x.p.offsets.items()})
        )
        for x in plan.layouts
    )
    return wrong


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("rule", ["cdp-v2", "cdp-v1", "dp"])
def test_a_kept_region_overwritten_between_forward_and_backward_is_refused(rule: str, keep: bool) -> None:
    """Messages that land while a kept unit lies there idle, one at a time on top of it."""
    plan, tried = make(5, threshold(rule, 5), per_stage=2, keep=keep), 0
    validate(plan)
    for i in range(len(plan.units)):
        for other in plan.messages:
            landing = plan.spans[other][0] - 2 * plan.scale
            if plan.kept(i) and other[0] != i and plan.spans[i, False][1] <= landing < plan.spans[i, True][0]:
                with pytest.raises(PlanError, match="is still in use"):
                    validate(overlaid(plan, i, other))
                tried += 1
    assert tried == (11 if keep else 6)


def test_alone_nothing_travels() -> None:
    plan = make(1, 0, 2, per_stage=3, persistent=PERSISTENT_UNIT)
    assert plan.received_bytes(0) == {"F": 0, "B": 0, "G": 0, "O": 0, "E": 0}
    assert plan.p_layouts[0].nbytes == 0 and plan.regions["PG"] == plan.memory()["sums"] == 3 * 2048 + 192
    assert {a.kind for a in build(plan, 0, False)} == {
        Kind.WAIT_PARAM,
        Kind.RELEASE_PARAM,
        Kind.RECV_GRAD,
        Kind.RECV_PERSISTENT_GRAD,
        Kind.RELEASE_PERSISTENT_PARAM,
        Kind.GRAD_NORM,
        Kind.OPTIMIZER_STEP,
    }


def test_held_parameters_travel_once() -> None:
    bare, persistent = make(3, 2), make(3, 2, persistent=PERSISTENT_UNIT)
    more = {k: persistent.received_bytes(1)[k] - v for k, v in bare.received_bytes(1).items()}
    assert more == {"F": 320, "B": 0, "G": 192, "O": 0, "E": 0}  # rank 2 owns them
    assert (
        persistent.regions["H0"] == persistent.regions["H1"] == 320
        and persistent.regions["GH"] == 192
        and "H0" not in bare.regions
    )


# ---- memory -------------------------------------------------------------------------------------------------------------
def most_live(plan: Plan, sums: bool = True) -> int:
    """The most bytes of P (and G) in use at one time on any rank, counted tick by tick round the circle of a round."""
    return max(live_on(plan, rank, sums) for rank in range(plan.schedule.ranks))


def live_on(plan: Plan, rank: int, sums: bool = True) -> int:
    ticks, totals = 2 * plan.schedule.ranks * plan.scale, Counter()

    def add(start: int, end: int, nbytes: int) -> None:
        for t in range(start - 2 * plan.scale, end):
            totals[t % ticks] += nbytes

    for v in plan.p_layouts[rank].items:
        add(plan.spans[v][0], plan.spans[v[0], v[1] or plan.kept(v[0])][1], plan.units[v[0]].p_bytes)
    for v in plan.g_layouts[rank].items if sums else ():
        add(plan.spans[v][1], plan.spans[v][1], plan.units[v[0]].g_bytes)
    return max(totals.values())


@pytest.mark.parametrize("rule", ["cdp-v2", "cdp-v1"])
@pytest.mark.parametrize("ranks", [2, 3, 4, 6, 8, 16])
def test_memory_is_about_six_stages_and_one_in_use(ranks: int, rule: str) -> None:
    """With 8 equal units a stage, 17 units of P are live (2 stages and the one in use; under v2 on 2 ranks two stages), as if
    none were kept; with sums, of twice the bytes, 49 (41). Laid out on a circle, in one buffer, they take one sum more (on 2
    ranks nothing fits beside what is kept)."""
    per_stage, p, g, more = 8, 1024, 2048, {"cdp-v2": 5, "cdp-v1": 16}[rule]
    units = {"cdp-v2": 48, "cdp-v1": 56}[rule] if ranks == 2 else 51
    plan = make(ranks, threshold(rule, ranks), per_stage=per_stage)
    assert most_live(plan, False) == (16 if (rule, ranks) == ("cdp-v2", 2) else 17) * p
    behind = dataclasses.replace(plan, separate_sums=True)
    assert most_live(plan) <= behind.memory()["in flight"] == units * p and behind.memory()["sums"] == per_stage * g
    assert plan.regions["V0"] == per_stage * p and "V1" not in plan.regions
    total = plan.memory()
    assert units * p <= total["in flight"] <= (units + more) * p, "of 16 units, under v1 waiting for all norms"
    assert total | {"in flight": 0} == {"in flight": 0, "sums": 0, "published": per_stage * p, "scalars": plan.regions["S"]}
    whole = per_stage * ranks * (p + g)
    assert sum(total.values()) <= 3.5 * whole / ranks, "about 1/N of everything: 2.1 to 3.1 stages in flight, and one kept"


@pytest.mark.parametrize("per_stage", [1, 2, 4, 8])
@pytest.mark.parametrize("ranks", [5, 6, 8])
def test_with_keep_after_forward_all_stages_but_one_are_live_at_the_turn(ranks: int, per_stage: int) -> None:
    """N-1 kept stages are live at the last stage; nothing more is needed than that, since stage 0's need lies elsewhere."""
    plan = make(ranks, ranks - 1, per_stage=per_stage, keep=True)
    assert most_live(plan, False) == (ranks - 1) * per_stage * 1024
    assert dataclasses.replace(plan, separate_sums=True).memory()["in flight"] == most_live(plan) + 2048
    assert plan.regions | {"PG": 0} == make(ranks, ranks - 1, per_stage=per_stage).regions | {"PG": 0}


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_up_to_three_ranks_keep_after_forward_changes_nothing(ranks: int) -> None:
    plan, keeping = (make(ranks, ranks - 1, 2, per_stage=2, keep=keep) for keep in (False, True))
    for rank in range(ranks):
        assert build(plan, rank, False) == build(keeping, rank, False)


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
    units = (
        Unit("a", 0, ("a.w",), ("a.f",), 64, 64),
        Unit("b", 0, ("b.w", "b.b"), (), 64, 64),
        Unit("c", 1, ("c.w",), (), 64, 64),
    )
    plan = Plan(Schedule(2, 1), units, PERSISTENT_UNIT)
    assert plan.stages == (("tied", "a.w", "b.w", "b.b"), ("c.w",))
    assert plan.members(0) == (PERSISTENT, 0, 1) and plan.members(1) == (2,)
    assert plan.unit(PERSISTENT) is PERSISTENT_UNIT and plan.unit(2) is units[2]
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
    texts = [str(a) for a in build(make(2, 1, persistent=PERSISTENT_UNIT), 1, False)]
    assert "WAIT_PARAM forward unit 1 <- rank 0 (stream P, round 0, logical time 7)" in texts
    assert "SEND_GRAD backward unit 0 -> rank 1 (stream O, round 0, logical time 10)" in texts
    assert "RELEASE_PARAM forward unit 0 (stream -, round 0, logical time 7)" in texts
    assert "WAIT_PARAM backward unit 1 (stream -, round 0, logical time 8)" in texts  # kept: none comes
    assert any(x.startswith("OPTIMIZER_STEP (stream -") for x in texts) and any(
        x.startswith("GRAD_NORM <- rank 0 (stream S") for x in texts
    )
