"""Every rank keeps all parameters (plan/replicated.py): plans, and training on threads against the oracle, bitwise."""

from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from deepspeed_cdp.model.make_plan import Settings
from deepspeed_cdp.plan.actions import Kind
from deepspeed_cdp.plan.constants import PERSISTENT
from deepspeed_cdp.plan.plan import Plan
from deepspeed_cdp.plan.program import build, builder
from deepspeed_cdp.plan.replicated import ReplicatedPlan
from deepspeed_cdp.plan.schedule import Schedule, threshold
from deepspeed_cdp.plan.unit_schedule import Unit
from deepspeed_cdp.runtime.runtime import Runtime
from deepspeed_cdp.verify.check import dry_run, validate
from support import models, ring_runs, warmup_runs
from support.local_ring import run_ranks, train
from support.optimizers import muon, sgd, two_groups
from support.plans import PERSISTENT_UNIT, make, plans
from support.runtime_runs import RULES, check, named_rule, oracle, schedule


def replicated(plan: Plan) -> ReplicatedPlan:
    corrections = dict(delay_corrected=plan.delay_corrected, predicts=plan.predicts)
    return ReplicatedPlan(plan.schedule, plan.units, plan.persistent, **corrections)


# ---- plans --------------------------------------------------------------------------------------------------------------
@pytest.mark.sampled(10)
@pytest.mark.parametrize(("ranks", "k", "rounds"), [(n, k, m) for n in range(1, 6) for k in range(2 * n) for m in (1, 2, 3)])
def test_every_small_ring_passes(ranks: int, k: int, rounds: int) -> None:
    units = []
    for stage in range(ranks):
        for _ in range(1 + (stage + k) % 3):
            i = len(units)
            g_bytes = 0 if i % 4 == 2 else 100 + 900 * (i * 5 % 3)
            units.append(Unit(f"u{i}", stage, (f"w{i}",), (), 64 + 700 * (i * 7 % 5), g_bytes))
    plan = ReplicatedPlan(Schedule(ranks, k, rounds), tuple(units), PERSISTENT_UNIT if (k + rounds) % 2 else None)
    validate(plan)
    assert plan.publishes_separate_copy == (k >= ranks), "only then an owner reads the old version after its update"


@pytest.mark.parametrize("corrected", [False, True])
@pytest.mark.parametrize(("ranks", "k"), [(n, k) for n in range(1, 5) for k in range(1, 2 * n)])
def test_the_plan_of_a_warm_up_passes(ranks: int, k: int, corrected: bool) -> None:
    """dp in the buffers of another rule, so perhaps with versions that are published apart."""
    for rounds in (1, 2):
        plan = make(ranks, k, rounds, 2, persistent=PERSISTENT_UNIT, kind=ReplicatedPlan, corrected=corrected)
        assert plan.under(0).publishes_separate_copy == plan.publishes_separate_copy
        validate(plan.under(0))


@settings(max_examples=10, derandomize=True, deadline=None)
@given(plans(st.integers(1, 9)))
def test_random_plans_pass(plan: Plan) -> None:
    validate(replicated(plan))


@settings(max_examples=2, derandomize=True, deadline=None)
@given(plans(st.integers(16, 24), rounds=1))
def test_random_large_rings_pass(plan: Plan) -> None:
    validate(replicated(plan), steps=3)


@settings(max_examples=15, derandomize=True, deadline=None)
@given(plans(st.integers(1, 6)))
def test_later_steps_repeat_the_steady_one(plan: Plan) -> None:
    plan = replicated(plan)
    period = plan.schedule.period * plan.scale
    for rank in range(plan.schedule.ranks):
        steady = build(plan, rank, False)
        for step in (2, 3, 7):
            later = builder(plan, rank, step).build()
            assert tuple(a._replace(time=a.time - (step - 1) * period) for a in later) == steady


@pytest.mark.parametrize("corrected", [False, True])
@pytest.mark.parametrize(("ranks", "k", "rounds"), [(n, k, m) for n in range(1, 6) for k in range(2 * n) for m in (1, 2, 3)])
def test_a_replica_changes_where_the_schedule_changes_version(ranks: int, k: int, rounds: int, corrected: bool) -> None:
    """Micro-batch by micro-batch; each version once, and each in time for the next rank to have it two positions later."""
    plan = make(ranks, k, rounds, kind=ReplicatedPlan, corrected=corrected)
    s = plan.schedule
    for rank in range(ranks):
        for stage in range(ranks):
            has, came = (0, False), []
            for step in range(5):
                for m in range(rounds):
                    new = plan.refreshed_version(step, m, rank, stage)
                    if new is not None:
                        has = new, plan.is_corrected(step - new)
                        came.append(has)
                    version = s.version(step, m, rank, stage)
                    assert has == (version, plan.is_corrected(step - version)) or step == 0, (rank, stage, step, m)
            for kind in {c for _, c in came}:
                versions = [v for v, c in came if c == kind]
                assert versions == list(range(versions[0], versions[-1] + 1)) and versions[0] in (0, 1)
                sender = plan.sender(rank, stage, int(kind))
                if sender is not None and plan.first_readers[stage, kind] != rank:
                    (a, m), (b, n) = plan.first_reads[sender, stage, kind], plan.first_reads[rank, stage, kind]
                    gap = s.start(b + 1, n, rank) - s.start(a + 1, m, sender)
                    assert gap == 2 if rank or k >= ranks - 1 else gap >= 2


def counted(run, rank: int, step: int) -> dict[str, int]:
    total, back = {"F": 0, "B": 0, "G": 0, "O": 0}, (Kind.SEND_GRAD, Kind.SEND_PERSISTENT_GRAD)
    for r, t, a in run.log:
        if t == step and r == rank and a.peer is not None and a.kind.carries and a.kind.incoming:
            kind = {Kind.REFRESH_PARAM: "F"}.get(a.kind, "G" if a.stream == "G0" else "")
            total |= {kind: total[kind] + a.nbytes} if kind else {}
        if t == step and a.kind in back and a.peer == rank:
            total["O"] += a.nbytes
    return total


@settings(max_examples=12, derandomize=True, deadline=None)
@given(plans(st.integers(1, 6)))
def test_closed_form_equals_what_the_dry_run_counts(plan: Plan) -> None:
    plan = replicated(plan)
    run = dry_run(plan, 4)
    run.run()
    for rank in range(plan.schedule.ranks):
        assert counted(run, rank, 2) == counted(run, rank, 3) == plan.received_bytes(rank)


@pytest.mark.parametrize("rounds", [1, 2])
@pytest.mark.parametrize("rule", ["cdp-v2", "cdp-v1", "dp"])
@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_bytes_by_hand(ranks: int, rule: str, rounds: int) -> None:
    """Psi in parameters once a step, and sums (here 1 and 2 KiB a unit) once pulled and once pushed back in each round."""
    psi = 1024 * 2 * ranks
    plan = make(ranks, threshold(rule, ranks), rounds, per_stage=2, kind=ReplicatedPlan)
    for r in range(ranks):
        assert plan.received_bytes(r) == {
            "F": psi - psi // ranks,
            "B": 0,
            "G": 2 * (psi - psi // ranks) * (rounds - (r == 0)),
            "O": 2 * psi // ranks * (ranks - 1) * rounds,
        }


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_no_second_copy_of_the_model(ranks: int) -> None:
    """Beside the replica: a stage that lands, under v1 one that is published, and sums as under stage 3."""
    for rule in ("cdp-v2", "cdp-v1", "dp"):
        stage = 1024 * 4
        plan = make(ranks, threshold(rule, ranks), per_stage=4, kind=ReplicatedPlan)
        other = make(ranks, threshold(rule, ranks), per_stage=4)
        sums = plan.windows.nbytes
        assert 3 * 2048 <= sums <= 4 * 2048, "two pulled ahead, the one in use, and one on its way back"
        for rank in range(ranks):
            assert plan.memory(rank) == {
                "replica": ranks * stage,
                "in flight": stage + sums,
                "sums": other.x_layout(0)[1] * (2 if rule == "cdp-v1" else 1),
                "published": stage if rule == "cdp-v1" else 0,
                "scalars": other.regions(rank)["S"],
            }
            assert sum(plan.regions(rank).values()) == sum(plan.memory(rank).values())
            assert {"H0", "H1", "V1"}.isdisjoint(plan.regions(rank))


@settings(max_examples=20, derandomize=True, deadline=None)
@given(plans(st.integers(1, 8)))
def test_regions_hold_all_that_is_placed_in_them(plan: Plan) -> None:
    plan = replicated(plan)
    for rank in range(plan.schedule.ranks):
        for first in (True, False):
            actions = build(plan, rank, first)
            for x in [*actions, *(post for a in actions for post in a.posts)]:
                if x.region:
                    region = f"{x.region}0" if x.region in ("V", "W") else x.region
                    assert 0 <= x.offset <= plan.regions(rank)[region] - x.nbytes, x


def test_alone_nothing_travels() -> None:
    for k in (0, 1):
        plan = make(1, k, 2, per_stage=3, persistent=PERSISTENT_UNIT, kind=ReplicatedPlan)
        assert plan.received_bytes(0) == {"F": 0, "B": 0, "G": 0, "O": 0} and "L" not in plan.regions(0)
        kinds = {a.kind for a in build(plan, 0, False)}
        assert kinds == {
            Kind.WAIT_PARAM,
            Kind.RELEASE_PARAM,
            Kind.RECV_GRAD,
            Kind.SEND_GRAD,
            Kind.RECV_PERSISTENT_GRAD,
            Kind.SEND_PERSISTENT_GRAD,
            Kind.RELEASE_PERSISTENT_PARAM,
            Kind.GRAD_NORM,
            Kind.OPTIMIZER_STEP,
        } | ({Kind.REFRESH_PARAM} if k else set())


def test_a_program_applies_each_unit_once_and_reads_only_the_replica() -> None:
    for k in (0, 3, 5, 7):
        plan = make(4, k, 2, per_stage=2, persistent=PERSISTENT_UNIT, kind=ReplicatedPlan)
        for rank in range(4):
            actions = build(plan, rank, False)
            own = plan.members(plan.schedule.owned(rank))
            want = Counter(i for i in (PERSISTENT, *range(8)) if i not in own or plan.publishes_separate_copy)
            assert Counter(a.unit for a in actions if a.kind == Kind.REFRESH_PARAM) == want
            assert all(a.region == "R" and a.peer is None for a in actions if a.kind == Kind.WAIT_PARAM)
            assert not any(a.backward for a in actions if a.kind in (Kind.FORWARD_PARAM, Kind.PUBLISH_PARAM, Kind.PULL_PARAM))


# ---- training -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("rounds", [1, 2])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_mlp(size, rule, rounds):
    check("mlp", named_rule(rule, size), size, rounds=rounds, flush_after={2}, replicated=True)


@pytest.mark.parametrize("threshold", range(8))
def test_every_threshold(threshold):
    check("mlp", threshold, 4, two_groups, clip=0.5, replicated=True)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("kind", ["rooted", "conv", "llama", "llama-tied"])
def test_models(kind, rule):
    rounds = 2 if rule == "cdp-v2" else 1
    check(kind, named_rule(rule, 3), 3, two_groups, on_step=schedule, rounds=rounds, clip=0.3, replicated=True)


@pytest.mark.parametrize("rule", RULES)
def test_ranks_that_take_different_branches(rule):
    got, _ = check("routed", named_rule(rule, 3), 3, sgd, steps=8, replicated=True)
    assert len({frozenset(r.param_hooks.visited) for r in got["runtimes"]}) > 1, "the test needs ranks that use different experts"


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch has no Muon before 2.9")
def test_muon_has_whole_matrices():
    got = train("mlp", 3, Settings("cdp-v2", replicated=True), muon, 6)
    matrices = {n for n in got["runtimes"][0].plan.stages for n in n}
    want = oracle("mlp", got["runtimes"][0].plan.stages, "cdp-v2", 3, muon, 6, trained=matrices)
    for name, master in want.masters.items():
        assert torch.equal(got["state"][name], master)


@pytest.mark.parametrize(("kind", "rule", "size"), [("llama", "cdp-v2", 2), ("llama-tied", "cdp-v1", 2), ("routed", "cdp-v2", 2)])
def test_merged_units(kind, rule, size):
    check(kind, rule, size, sgd, steps=8, rounds=2 if kind == "llama" else 1, least=10**9, replicated=True)


@pytest.mark.parametrize("sum_dtype", [None, torch.float32])
@pytest.mark.parametrize("rule", ["dp", "cdp-v1", "cdp-v2"])
def test_bf16(rule, sum_dtype):
    check("llama-tied", rule, 2, two_groups, dtype=torch.bfloat16, sum_dtype=sum_dtype, clip=0.5, replicated=True)


@pytest.mark.parametrize("rule", RULES)
def test_random_delays_change_nothing(rule):
    for seed in range(2):
        check("mlp", named_rule(rule, 4), 4, rounds=1 + seed, delay=0.002, seed=seed, steps=5, replicated=True)


@pytest.mark.parametrize(("size", "rule"), [(1, "cdp-v1"), (2, "cdp-v2"), (3, "cdp-v1"), (3, 3), (3, 1)])
def test_after_a_warm_up_under_dp(size, rule):
    """Under v1 and other K >= N owners publish apart in the warm-up too, since one set of buffers serves both plans."""
    got, _ = warmup_runs.check("rooted", rule, size, 3, two_groups, rounds=1 + size % 2, clip=0.3, replicated=True)
    for plan in got["runtimes"][0].executor.phases.plans:
        assert plan.replicated and plan.publishes_separate_copy == got["runtimes"][0].plan.publishes_separate_copy
        validate(plan)


@pytest.mark.parametrize("rule", ["cdp-v2", "cdp-v1", "dp"])
@pytest.mark.parametrize(("size", "rings"), [(1, 2), (2, 2), (2, 3)])
def test_several_rings(size, rings, rule):
    ring_runs.check("rooted", rule, size, rings, two_groups, steps=5, clip=0.3, rounds=2, flush_after={2}, replicated=True)


@pytest.mark.parametrize("rule", ["cdp-v2", "cdp-v1", "dp"])
def test_the_optimizer_in_host_memory(rule):
    runs = [
        train("rooted", 3, Settings(rule, clip=0.3, rounds=2, offload=offload, replicated=True), two_groups, 5, {2})
        for offload in (False, True)
    ]
    assert runs[0]["losses"] == runs[1]["losses"]
    assert all(torch.equal(x, runs[1]["state"][n]) for n, x in runs[0]["state"].items())


def test_bytes_collectives_and_memory_are_as_planned():
    for size in (2, 3, 4):
        for rule in RULES:
            rounds, kind = 1 + size % 2, "llama-tied" if size == 3 else "rooted"  # both have persistent parameters
            got = train(kind, size, Settings(named_rule(rule, size), rounds=rounds, replicated=True), sgd, 4)
            for runtime in got["runtimes"]:
                for kind, row in runtime.counters.traffic().items():
                    assert row["counted"] == row["closed form"], (size, rule, rounds, runtime.executor.rank, kind, row)
                assert runtime.counters.collectives() == 0
                assert runtime.executor.buffers.nbytes() == sum(runtime.plan.memory(runtime.executor.rank).values())


def test_parameters_stay_where_they_are():
    """Views of the replica from the start to the end, whole in every hook, and no tensor of autograd's is replaced."""
    places: list[dict] = []

    def whole(module: nn.Module, *_) -> None:
        assert all(p.isfinite().all() for p in module.parameters())

    def look(runtime: Runtime) -> None:
        places.append({p: p.data_ptr() for p in runtime.module.parameters()})
        low, high = (lambda r: (r.data_ptr(), r.data_ptr() + r.numel()))(runtime.executor.buffers.regions["R"])
        assert all(low <= at < high for at in places[-1].values())
        for m in runtime.module.modules():
            m.register_forward_pre_hook(whole)

    got = train("llama-tied", 3, Settings("cdp-v2", replicated=True), sgd, 4, change=look)
    assert all(p.data_ptr() == at for there in places for p, at in there.items()) and len(got["runtimes"]) == len(places)
    assert all(not r.param_hooks._is_saving and not r.param_hooks._rebuilt for r in got["runtimes"])


# ---- broken on purpose --------------------------------------------------------------------------------------------------
def test_a_version_that_is_not_applied_is_seen():
    """One rank's replica misses one new version of one unit."""

    def skip(runtime: Runtime) -> None:
        apply, executor = runtime.executor.actions[Kind.REFRESH_PARAM], runtime.executor

        def missing(a) -> None:
            before = executor.buffers.regions["R"].clone()
            apply(a)
            if (executor.rank, executor.state.step, a.unit, a.region) == (1, 3, 0, "L"):
                executor.buffers.regions["R"].copy_(before)

        runtime.executor.actions[Kind.REFRESH_PARAM] = missing

    check("mlp", "cdp-v1", 3, replicated=True)
    with pytest.raises(AssertionError):
        check("mlp", "cdp-v1", 3, replicated=True, change=skip)


def test_an_update_applied_too_early_is_seen():
    """Rank 1 lets stages from 1 on land a step's forward earlier than it may: its passes read what is not theirs yet."""

    def early(runtime: Runtime) -> None:
        executor = runtime.executor
        if executor.rank != 1:
            return
        for program in executor._programs[executor.schedule]:
            at = next(i for i, a in enumerate(program.actions) if a.kind == Kind.RELEASE_PARAM and a.posts)
            to = next(i for i, a in enumerate(program.actions) if a.kind == Kind.WAIT_PARAM and a.unit == 0)
            actions = list(program.actions)
            actions[to] = actions[to]._replace(posts=(*actions[to].posts, *actions[at].posts))
            actions[at] = actions[at]._replace(posts=())
            program.actions.held = tuple(actions)

    check("mlp", "cdp-v2", 4, replicated=True)
    with pytest.raises(AssertionError):
        for seed in range(10):
            check("mlp", "cdp-v2", 4, replicated=True, change=early, delay=0.002, seed=seed)


class Peeks(nn.Module):
    """Reads a layer's weight without calling it; nothing shows that before the backward."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.silent = nn.Linear(8, 8)

    def forward(self, x):
        for block in self.blocks:
            x = torch.tanh(block(x))
        return nn.functional.linear(x, self.silent.weight)


def test_parameters_read_outside_their_module_are_noticed():
    def work(rank, transport):
        module = Peeks()
        runtime = Runtime(module, sgd(list(module.named_parameters())), Settings(replicated=True), transport, torch.device("cpu"))
        with runtime.forward():
            value = module(models.batch("mlp", 0, 0, rank)).pow(2).mean()
        with pytest.raises(ValueError, match="'silent.weight' got a gradient in step 0, but its module was not called"):
            value.backward()
            runtime.end_backward()
        runtime.close(False)

    run_ranks(1, work)


def test_the_module_outside_the_engine():
    """Training it is refused once versions differ; evaluation and state_dict() bring it up to date first."""
    modules = [models.build("mlp") for _ in range(2)]

    def work(rank, transport):
        module = modules[rank]
        runtime = Runtime(
            module,
            sgd(list(module.named_parameters())),
            Settings("cdp-v1", replicated=True, any_order=False),
            transport,
            torch.device("cpu"),
        )
        for step in range(2):
            with runtime.forward():
                value = models.loss(module, "mlp", models.batch("mlp", step, 0, rank))
            value.backward()
            runtime.end_backward()
            runtime.step()
        with pytest.raises(ValueError, match="while its parameters are of several versions; call the engine instead"):
            module(models.batch("mlp", 0, 0, 0))
        with pytest.raises(ValueError, match="load it before"):
            module.load_state_dict({})
        state = {n: x.clone() for n, x in module.state_dict().items()}
        with torch.no_grad():
            seen = module(models.batch("mlp", 0, 0, 0))
        runtime.close(True)
        assert all(torch.equal(x, state[n]) for n, x in module.state_dict().items()), "what was flushed may be used after the end"
        return state, seen

    results = run_ranks(2, work)
    assert all(torch.equal(x, results[1][0][n]) for n, x in results[0][0].items()) and torch.equal(results[0][1], results[1][1])
    start = models.build("mlp").state_dict()
    assert any(not torch.equal(start[n], x) for n, x in results[0][0].items())
