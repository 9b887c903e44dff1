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

SMALL = [(n, k, rounds, keep) for n in range(1, 7) for k in range(2 * n) for rounds in (1, 2, 3) for keep in {False, rounds == 2}]


# ---- the dry-run --------------------------------------------------------------------------------------------------------
@pytest.mark.sampled(12)
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


COPIES = [  # rule, what stale readers read, copies of stage 0's versions, and of its corrections, on five ranks
    ("dp", "", 1, 0),
    ("cdp-v2", "", 2, 0),
    ("cdp-v1", "", 2, 0),
    ("cdp-v2", "extrapolate", 1, 2),
    ("cdp-v1", "extrapolate", 1, 2),
    ("cdp-v2", "predict", 1, 2),
    ("cdp-v1", "predict", 1, 2),
]


@pytest.mark.parametrize(("rule", "correction", "published", "corrected"), COPIES)
def test_published_copies_are_as_few_as_can_be(rule: str, correction: str, published: int, corrected: int) -> None:
    """Two copies only where a reader of the old version may come after the update: with one, the dry-run objects."""
    needs, messages = set(), []
    for ranks in range(2, 6):
        for rounds in (1, 2):
            persistent = PERSISTENT_UNIT if rounds == 2 else None
            options = dict(persistent=persistent, corrected=bool(correction), predicts=correction == "predict")
            plan = make(ranks, threshold(rule, ranks), rounds, **options)
            for stage in range(ranks):
                counts = plan.copies(stage), plan.corrected_copies(stage)
                needs.add(counts)
                names = set(plan.regions(plan.schedule.owner(stage)))
                assert names & {"V0", "V1", "W0", "W1"} == {f"{x}{c}" for x, n in zip("VW", counts) for c in range(n)}
                for name, count in zip(("_copies", "_corrected_copies"), counts):
                    if count == 2:
                        fewer = dataclasses.replace(plan)
                        fewer.__dict__[name] = [1 if s == stage else n for s, n in enumerate(getattr(plan, name))]
                        with pytest.raises(PlanError) as error:
                            validate(fewer)
                        messages.append(str(error.value))
    assert max(needs) == (published, corrected) and (rule == "cdp-v1" or (1, 0) in needs), "the last stage has no stale reader"
    assert rule in ("cdp-v1", "dp") or any("waits for a reader that is not earlier" in m for m in messages)


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
            assert kinds.get(Kind.SEND_GRAD) == kinds.get(Kind.RECV_GRAD)
            assert kinds.get(Kind.SEND_PERSISTENT_GRAD) == kinds.get(Kind.RECV_PERSISTENT_GRAD)
            where = [(a.unit, a.backward, a.offset) for a in build(plan, rank, first) if a.region == "PG"]
            assert len(set(where)) <= 3 * len(plan.units), "every round has the same windows: two of parameters, one of sums"


@settings(max_examples=20, derandomize=True, deadline=None)
@given(plans(st.integers(1, 6)))
def test_owners_serve_every_micro_batch_once(plan: Plan) -> None:
    """What other ranks pull in a steady step, what owners offer to them, and the credits for sums that come back."""
    s = plan.schedule
    order = [(m, r) for m in range(s.rounds) for r in range(s.ranks)]
    found: dict[Kind, Counter] = {k: Counter() for k in (Kind.PULL_PARAM, Kind.PUBLISH_PARAM, Kind.PULL_GRAD, Kind.OFFER_GRAD)}
    credits: Counter = Counter()
    for rank in range(s.ranks):
        for a in build(plan, rank, False):
            offered, after = a.kind in (Kind.PUBLISH_PARAM, Kind.OFFER_GRAD), a.round
            if a.kind == Kind.OFFER_GRAD:
                after, reader = order[order.index((a.into[2], a.into[1])) + 1]
                assert reader == a.peer
            if a.kind in found:
                found[a.kind][(rank, a.peer)[offered], (rank, a.peer)[not offered], after, a.unit, a.backward] += 1
            credits.update((x.src, rank, x.round, x.unit) for x in a.posts if x.stream == "G")
    visits = [(i, b) for i, b in plan.messages] + ([(PERSISTENT, False)] if plan.persistent else [])
    readers = [(r, s.owner(plan.unit(i).stage), m, i, b) for m, r in order for i, b in visits]
    want = Counter(x for x in readers if x[0] != x[1])
    assert found[Kind.PULL_PARAM] == found[Kind.PUBLISH_PARAM] == want
    summed = [i for i in plan.every_unit if plan.unit(i).g_bytes]
    sums = Counter((r, s.owner(plan.unit(i).stage), m, i) for m, r in order for i in summed if r != s.owner(plan.unit(i).stage))
    assert credits == sums
    pulled = Counter((*x, True) for x in sums if (x[2], x[0]) != (0, 0))
    assert found[Kind.PULL_GRAD] == found[Kind.OFFER_GRAD] == pulled


# ---- bytes --------------------------------------------------------------------------------------------------------------
def counted(run: DryRun, rank: int, step: int) -> dict[str, int]:
    """Bytes that arrived in a step of the dry-run; sums that come back are counted where they are sent."""
    total, back = {"F": 0, "B": 0, "G": 0, "O": 0}, (Kind.SEND_GRAD, Kind.SEND_PERSISTENT_GRAD)
    for r, t, a in run.log:
        if (
            t == step
            and r == rank
            and a.peer is not None
            and a.stream in ("P0", "W0", "G0")
            and a.kind.carries
            and a.kind.incoming
        ):
            total["G" if a.stream == "G0" else "B" if a.backward else "F"] += a.nbytes
        if t == step and a.kind in back and a.peer == rank:
            total["O"] += a.nbytes
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
    """Psi bytes of parameters, 2 Psi of sums. All but the owned stage is pulled, the same under every rule. The backward needs
    anew what is not kept: all but the last unit, or only stage 0."""
    psi = 1024 * 2 * ranks
    for rule in ("cdp-v2", "cdp-v1", "dp"):
        for rounds in (1, 2):
            plan = make(ranks, threshold(rule, ranks), rounds, per_stage=2, keep=keep)
            for r in range(ranks):
                pulled, last = psi - psi // ranks, 1024 * (r != 0)
                assert plan.received_bytes(r) == {
                    "F": rounds * pulled,
                    "B": rounds * (psi // ranks * (r < ranks - 1) if keep else pulled - last),
                    "G": (rounds - (r == 0)) * 2 * pulled,
                    "O": rounds * (ranks - 1) * 2 * psi // ranks,
                }


# ---- parameters kept from forward to backward ---------------------------------------------------------------------------
@settings(max_examples=40, derandomize=True, deadline=None)
@given(plans(st.integers(1, 8)))
def test_kept_units_are_pulled_once_and_lie_still(plan: Plan) -> None:
    """Forward and backward read the same bytes; what is not kept is released after its forward and comes anew."""
    n, last = plan.schedule.ranks, len(plan.units)
    later = last - (plan.ahead + 1) // 2  # passes between forward and backward: 0, 2, 4, ...
    kept = {i for i, u in enumerate(plan.units) if (u.stage >= 1 if plan.keep_after_forward else i >= later)}
    assert kept == {i for i in range(last) if plan.kept(i)} and not plan.kept(PERSISTENT)
    assert all(plan.windows.params[i, False] == plan.windows.params[i, True] for i in kept)
    assert plan.messages == tuple(v for v in plan.visits if not (v[1] and v[0] in kept))
    for rank in range(n):
        for first in (True, False):
            actions = build(plan, rank, first)
            reads = {(a.round, a.unit, a.backward): a for a in actions if a.kind == Kind.WAIT_PARAM}
            for (m, i, backward), a in reads.items():
                if i in kept and backward:
                    forward = reads[m, i, False]
                    assert (a.region, a.offset, a.version) == (forward.region, forward.offset, forward.version) and a.peer is None
            sent = [a for a in actions if a.kind in (Kind.PUBLISH_PARAM, Kind.PULL_PARAM)]
            assert not any(a.backward and a.unit in kept for a in sent)
            released = {(a.unit, a.backward) for a in actions if a.kind == Kind.RELEASE_PARAM}
            assert released == {v for v in plan.visits if v[1] or v[0] not in kept}


@pytest.mark.parametrize("rounds", [1, 2])
@pytest.mark.parametrize("rule", ["cdp-v2", "cdp-v1", "dp"])
def test_with_keep_after_forward_only_stage_0_travels_twice(rule: str, rounds: int) -> None:
    """What the backward receives in the dry-run, on four ranks: all but the last unit or only stage 0, unless it is their own."""
    for keep, units in ((False, set(range(11))), (True, {0, 1, 2})):
        plan = make(4, threshold(rule, 4), rounds, per_stage=3, keep=keep)
        run = DryRun(plan, 4)
        run.run()
        received = {
            (r, a.unit) for r, t, a in run.log if a.kind == Kind.WAIT_PARAM and a.backward and a.peer is not None and t == 2
        }
        assert received == {(r, i) for r in range(4) for i in units if r != 3 - i // 3}
        for rank in range(4):
            assert counted(run, rank, 2)["B"] == plan.received_bytes(rank)["B"]


def test_alone_nothing_travels() -> None:
    plan = make(1, 0, 2, per_stage=3, persistent=PERSISTENT_UNIT)
    assert plan.received_bytes(0) == {"F": 0, "B": 0, "G": 0, "O": 0}
    assert plan.regions(0)["PG"] == plan.memory(0)["in flight"] == 0 and plan.memory(0)["sums"] == 3 * 2048 + 192
    assert {a.kind for a in build(plan, 0, False)} == {
        Kind.WAIT_PARAM,
        Kind.RELEASE_PARAM,
        Kind.RECV_GRAD,
        Kind.SEND_GRAD,
        Kind.RECV_PERSISTENT_GRAD,
        Kind.SEND_PERSISTENT_GRAD,
        Kind.RELEASE_PERSISTENT_PARAM,
        Kind.GRAD_NORM,
        Kind.OPTIMIZER_STEP,
    }


def test_held_parameters_travel_once() -> None:
    bare, persistent = make(3, 2), make(3, 2, persistent=PERSISTENT_UNIT)
    more = {k: persistent.received_bytes(1)[k] - v for k, v in bare.received_bytes(1).items()}
    assert more == {"F": 320, "B": 0, "G": 192, "O": 0}  # rank 2 owns them
    assert persistent.received_bytes(2)["O"] == bare.received_bytes(2)["O"] + 2 * 192
    regions = persistent.regions(1)
    assert regions["H0"] == regions["H1"] == 320 and regions["GH"] == 192 and "H0" not in bare.regions(1)


# ---- memory -------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("rule", ["cdp-v2", "cdp-v1", "dp"])
@pytest.mark.parametrize("ranks", [2, 3, 4, 6, 8, 16])
def test_memory_is_a_few_units_and_what_the_owner_has(ranks: int, rule: str) -> None:
    """8 equal units a stage: in flight are the same few of them under every rule, on any number of ranks."""
    per_stage, p, g = 8, 1024, 2048
    plan = make(ranks, threshold(rule, ranks), per_stage=per_stage)
    for rank in range(ranks):
        total, regions = plan.memory(rank), plan.regions(rank)
        assert 3 * p + 4 * g <= total["in flight"] <= 4 * p + 4 * g
        copies = 1 if rule == "dp" or (rule, rank) == ("cdp-v2", 0) else 2  # nobody reads the last stage stale
        finished = per_stage * g * (rule == "cdp-v1")  # apart, until all norms are known
        assert total["sums"] == per_stage * g + finished and total["published"] == copies * per_stage * p
        assert sum(total.values()) == sum(regions.values()) and ("X" in regions) == (rule == "cdp-v1")


@pytest.mark.parametrize("per_stage", [1, 2, 4, 8])
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_with_keep_after_forward_all_stages_but_one_are_in_flight(ranks: int, per_stage: int) -> None:
    """At the turn, with what is pulled ahead and the sums."""
    plan, without = (make(ranks, ranks - 1, per_stage=per_stage, keep=keep) for keep in (True, False))
    kept = (ranks - 1) * per_stage * 1024
    for rank in range(ranks):
        assert kept < plan.regions(rank)["PG"] <= kept + without.regions(rank)["PG"]
        changed = {name for name, _ in plan.regions(rank).items() ^ without.regions(rank).items()}
        assert changed <= {"PG", "V1"} and len(plan.regions(rank)) <= len(without.regions(rank)), "early pulls save copies"


@settings(max_examples=30, derandomize=True, deadline=None)
@given(plans(st.integers(1, 8)))
def test_regions_hold_all_that_is_placed_in_them(plan: Plan) -> None:
    def inside(rank: int, region: str, offset: int, nbytes: int) -> bool:
        names = [f"{region}0", f"{region}1"] if region in ("V", "W", "H") else [region]
        return all(0 <= offset <= plan.regions(rank)[name] - nbytes for name in names)

    for rank in range(plan.schedule.ranks):
        for first in (True, False):
            for a in build(plan, rank, first):
                for x in (a, *a.posts):
                    assert not x.region or inside(rank, x.region, x.offset, x.nbytes), x
                assert not a.into[0] or inside(rank if a.peer is None else a.peer, *a.into[:2], a.nbytes), a
                assert all(inside(x.src, *x.origin, x.nbytes) for x in a.posts if x.origin[0]), a


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
    assert plan.scale == 4 and plan.spans[1, False] == (2, 4) and plan.spans[2, True] == (8, 12)
    assert plan.spans[0, True] == (14, 16)


@pytest.mark.parametrize("stages", [(0,), (0, 2), (1, 0), (0, 0)])
def test_units_that_do_not_run_through_the_stages_are_refused(stages: tuple[int, ...]) -> None:
    with pytest.raises(AssertionError, match="stages in order"):
        Plan(Schedule(2, 1), tuple(Unit(str(i), s, (), (), 64, 64) for i, s in enumerate(stages)))


def test_held_parameters_of_another_stage_are_refused() -> None:
    with pytest.raises(AssertionError, match="stage 0"):
        Plan(Schedule(2, 1), make(2, 1).units, Unit("", 1, (), (), 64, 64))


def test_actions_print_as_one_line() -> None:
    texts = [str(a) for a in build(make(2, 1, persistent=PERSISTENT_UNIT), 1, False)]
    assert "WAIT_PARAM forward unit 1 <- rank 0 (stream P0, round 0, logical time 14)" in texts
    assert "SEND_GRAD backward unit 1 -> rank 0 (stream G, round 0, logical time 18)" in texts
    assert "SEND_GRAD backward unit 0 (stream -, round 0, logical time 20)" in texts  # at home
    assert "PUBLISH_PARAM forward persistent -> rank 0 (stream P0, round 0, logical time 12)" in texts
    assert "RELEASE_PARAM forward unit 0 (stream -, round 0, logical time 14)" in texts
    assert "WAIT_PARAM backward unit 1 (stream -, round 0, logical time 16)" in texts  # kept: none comes
    assert any(x.startswith("OPTIMIZER_STEP (stream -") for x in texts) and any(
        x.startswith("GRAD_NORM <- rank 0 (stream S") for x in texts
    )


@pytest.mark.parametrize("rounds", [1, 2])
def test_a_pull_far_ahead_waits_for_an_owner_that_stalls(rounds):
    """The owner publishes behind its last pass of a step, and its next step begins later. The reader's passes may go on then."""
    units = tuple(Unit(f"u{i}", stage, (f"w{i}",), (), 64, 64) for i, stage in enumerate((0, 1, 2, 2, 3, 3, 3, 4, 4, 4)))
    validate(Plan(Schedule(5, 3, rounds), units, prefetch_units=9))
