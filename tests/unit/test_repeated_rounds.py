"""Programs that hold few rounds and repeat two of them: action for action those that ``build`` makes of all rounds."""

from collections.abc import Iterable

import pytest
import torch

from deepspeed_cdp.model.make_plan import Settings
from deepspeed_cdp.plan import program as program_module
from deepspeed_cdp.plan.actions import Action, Kind
from deepspeed_cdp.plan.constants import START
from deepspeed_cdp.plan.plan import Plan
from deepspeed_cdp.plan.program import Program, backward_end, build, edges, few_rounds, initial_posts, with_rendezvous
from deepspeed_cdp.plan.replicated import ReplicatedPlan
from deepspeed_cdp.plan.warmup import Phases
from deepspeed_cdp.runtime.program import IndexedProgram
from deepspeed_cdp.verify.summary import check_rings, estimated_actions
from support import plans
from support.local_ring import train
from support.optimizers import sgd


def nameless(actions: Iterable[Action]) -> tuple[Action, ...]:
    """Without the rounds of offered versions, which may be of the next step, and of the other side's messages: not used."""
    unused = (Kind.PUBLISH_PARAM, Kind.START_RECV, Kind.START_SEND)
    return tuple(a._replace(round=0, into=("", 0, 0)) if a.kind in unused else a for a in actions)


def expanded(plan: Plan, rank: int, first: bool, rendezvous: bool = False) -> tuple[Action, ...]:
    """The program with every round written out: numbers and times as in the whole step."""
    program, few = Program(plan, rank, first, rendezvous), few_rounds(plan)
    more, actions = plan.schedule.rounds - few.schedule.rounds, []
    begin, end = program.begin, program.end

    def moved(a: Action, rounds: int) -> Action:
        """The action, ``rounds`` rounds later. Some of its numbers are those of the step's last round, or of the next step."""
        posts = tuple(p._replace(round=p.round + (0 if p.ahead else rounds)) for p in a.posts)
        from_rank = a.kind == Kind.OFFER_GRAD or a.stream == "G" and a.kind.incoming  # whose sum has come back
        into = (*a.into[:2], a.into[2] + rounds) if a.into[0] or from_rank else a.into
        if a.kind in (Kind.REDUCE_GRAD, Kind.PREDICT_PARAM):
            round = a.round + more
        elif a.kind == Kind.PULL_PARAM:
            round = posts[0].round
        else:
            round = a.round if a.kind.of_owner else a.round + rounds
        time = a.time + (rounds if first else rounds + more) * plan.round_ticks if a.time >= 0 else a.time
        return a._replace(time=time, round=round, into=into, posts=posts)

    for index, a in enumerate(program.held):
        if index == end:
            for again in range(1, program.repeats + 1):
                actions += [moved(x, 2 * again) for x in program.held[begin:end]]
        actions.append(moved(a, more if index >= end else 0))
    return tuple(actions)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("kind", [Plan, ReplicatedPlan])
@pytest.mark.parametrize("persistent", [None, plans.PERSISTENT_UNIT])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_repeated_rounds_are_the_built_ones(ranks, persistent, kind):
    """Every rule, with units that stay and without, up to rounds that repeat thrice; also with the other side's messages."""
    for k in range(2 * ranks):
        for keep in (False, True)[: 1 + (kind is Plan)]:
            for rounds in (7, 8, 13) if keep == k % 2 else (9,):
                plan = plans.make(ranks, k, rounds, 2, persistent=persistent, keep=keep, kind=kind)
                for rank in range(ranks):
                    assert initial_posts(few_rounds(plan), rank) == initial_posts(plan, rank)
                    for first in (True, False):
                        program = Program(plan, rank, first)
                        whole = build(plan, rank, first)
                        assert nameless(expanded(plan, rank, first)) == nameless(whole) and len(program) == len(whole)
                        for a, b in zip(program.between(0, len(whole)), whole):
                            assert a._replace(time=0, round=0, into=(), posts=()) == b._replace(
                                time=0, round=0, into=(), posts=()
                            )
                    assert nameless(expanded(plan, rank, False, True)) == nameless(with_rendezvous(plan, rank, False))


@pytest.mark.parametrize("threshold", [0, 2, 5])
def test_both_plans_of_a_warm_up_repeat_rounds(threshold):
    for kind in (Plan, ReplicatedPlan):
        plan = plans.make(3, threshold, 11, 2, persistent=plans.PERSISTENT_UNIT, kind=kind)
        for phase in Phases(plan, 2).plans:
            for rank in range(3):
                for first in (True, False):
                    assert nameless(expanded(phase, rank, first)) == nameless(build(phase, rank, first))


@pytest.mark.parametrize("method", ["corrected", "predicts"])
@pytest.mark.parametrize("kind", [Plan, ReplicatedPlan])
def test_plans_with_corrections_repeat_rounds(kind, method):
    for k in range(1, 6):
        for rounds in (8, 11):
            plan = plans.make(3, k, rounds, 2, persistent=plans.PERSISTENT_UNIT, kind=kind, **{method: True})
            for rank in range(3):
                for first in (True, False):
                    assert nameless(expanded(plan, rank, first)) == nameless(build(plan, rank, first))


@pytest.mark.parametrize("rounds", [1, 7, 8, 21])
def test_indices_of_passes_are_those_of_the_built_program(rounds):
    plan = plans.make(3, 2, rounds, 2, persistent=plans.PERSISTENT_UNIT)
    program, whole = IndexedProgram(Program(plan, 1, False)), build(plan, 1, False)
    for m in range(rounds):
        of_round = [x for x, a in enumerate(whole, 1) if a.kind.of_pass and a.round == m]
        assert program.round_end(m) == (max(of_round) if m < rounds - 1 else backward_end(whole)) >= max(of_round)
        assert program.forward_end(m) == min(x for x in of_round if whole[x - 1].unit != -1 and whole[x - 1].backward) - 1
        for unit, backward in plan.visits:
            of_pass = [x for x in of_round if (whole[x - 1].unit, whole[x - 1].backward) == (unit, backward)]
            assert program.pass_start(m, unit, backward) == max(x for x in of_pass if whole[x - 1].phase == START)
            assert program.pass_end(m, unit, backward) == max(of_pass)
    for x, a in enumerate(whole):
        if a.kind.of_pass:
            assert program.actions[x].round + program.actions.skipped_at(x) == a.round


@pytest.mark.parametrize("kind", [Plan, ReplicatedPlan])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_what_a_plan_takes_from_few_rounds_is_true_of_all(ranks, kind, monkeypatch):
    for k in range(2 * ranks):
        for rounds in (1, 2, 3, 9):
            plan = plans.make(ranks, k, rounds, 2, persistent=plans.PERSISTENT_UNIT, kind=kind)
            found = edges(plan)
            with monkeypatch.context() as patch:
                patch.setattr(program_module, "FEW", 10**6)
                assert edges(plan) == found
            assert all(plan.regions(r) == few_rounds(plan).regions(r) for r in range(ranks))
            assert plan.windows is few_rounds(plan).windows or plan.windows == few_rounds(plan).windows
            for rank in range(ranks) if kind is Plan else ():
                reads = [a for a in build(plan, rank, False) if a.kind == Kind.WAIT_PARAM and a.peer is not None]
                assert plan.received_bytes(rank)["F"] == sum(a.nbytes for a in reads if not a.backward)


@pytest.mark.parametrize("kind", [Plan, ReplicatedPlan])
def test_the_dry_run_of_a_plan_with_many_rounds_ends_soon(kind):
    few, many = (plans.make(3, 2, rounds, 2, persistent=plans.PERSISTENT_UNIT, kind=kind) for rounds in (6, 100_000))
    assert check_rings([many]).actions == check_rings([few]).actions
    assert estimated_actions(many) == estimated_actions(few)


def test_making_programs_does_no_work_per_round(monkeypatch):
    """The number of actions that are made is bounded; a plan of 100,000 rounds is ready at once."""
    made, new = [], Action.__new__
    monkeypatch.setattr(Action, "__new__", lambda cls, *a, **k: made.append(1) or new(cls, *a, **k))
    counts = []
    for rounds in (6, 100_000):
        plan = plans.make(3, 2, rounds, 2, persistent=plans.PERSISTENT_UNIT)
        made.clear()
        for rank in range(3):
            IndexedProgram(Program(plan, rank, False))
        edges(plan), plan.regions(1), plan.received_bytes(1), initial_posts(few_rounds(plan), 1)
        counts.append(len(made))
    assert counts[0] == counts[1] > 0


@pytest.mark.parametrize(
    "model, settings",
    [
        ("mlp", Settings(rounds=11)),
        ("rooted", Settings(rule="dp", rounds=10)),
        ("rooted", Settings(rounds=9, replicated=True)),
        ("rooted", Settings(rule="cdp-v1", rounds=10, warmup_steps=1)),
    ],
)
def test_training_with_repeated_rounds_is_that_with_all_rounds(model, settings, monkeypatch):
    """Bit for bit the training of programs that hold every round."""
    few = train(model, 2, settings, sgd, 4, flush_after=(1,))
    assert few["runtimes"][0].executor._program.actions.repeats > 0
    monkeypatch.setattr(program_module, "FEW", 10**6)
    whole = train(model, 2, settings, sgd, 4, flush_after=(1,))
    assert whole["runtimes"][0].executor._program.actions.repeats == 0
    assert few["losses"] == whole["losses"] and all(torch.equal(few["state"][k], v) for k, v in whole["state"].items())


@pytest.mark.parametrize("rounds", [3, 13])
def test_any_part_of_a_program_can_be_had(rounds):
    program = Program(plans.make(2, 1, rounds, 2), 1, False)
    whole = [program[x] for x in range(len(program))]
    for begin in range(0, len(whole) + 1, 3):
        for end in range(begin % 4, len(whole) + 1, 4):
            assert list(program.between(begin, end)) == whole[begin:end]
