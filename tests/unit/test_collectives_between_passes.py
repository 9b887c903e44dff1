"""What a script may do between forward and backward: collectives of its own, and reading all parameters."""

import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspeed_cdp.model.make_plan import Settings
from deepspeed_cdp.plan.actions import Action, Kind
from deepspeed_cdp.plan.delay_correction import DelayCorrection
from deepspeed_cdp.plan.plan import Plan
from deepspeed_cdp.plan.program import build, forward_ends
from deepspeed_cdp.runtime.runtime import Runtime
from deepspeed_cdp.verify.check import dry_run
from deepspeed_cdp.verify.dry_run import CONDITIONS
from support import models, plans
from support.local_ring import run_ranks, train
from support.optimizers import adamw
from support.sampling import examples


@settings(max_examples=examples(80), deadline=None)
@given(plans.plans(st.integers(1, 4)))
def test_ranks_may_meet_between_forward_and_backward(plan: Plan):
    """Owners relay and predict beside their passes, so no rank that has come to the meeting is missed by one that has not."""
    dry_run(plan, 4, meeting=True).run()


@pytest.mark.parametrize("replicated", [False, True])
@pytest.mark.parametrize(("size", "rule", "rounds"), [(3, "dp", 1), (3, "cdp-v2", 2), (4, "cdp-v1", 2), (4, "cdp-v2", 1)])
@pytest.mark.parametrize("method", ["none", "predict"])
def test_ranks_that_meet_train_as_others(size: int, rule: str, rounds: int, method: str, replicated: bool):
    chosen = Settings(rule, rounds=rounds, replicated=replicated, delay_correction=DelayCorrection(method))
    meeting = threading.Barrier(size)
    modules, steps = [models.build("rooted") for _ in range(size)], 4

    def work(rank: int, transport) -> dict[str, torch.Tensor]:
        module = modules[rank]
        runtime = Runtime(module, adamw(list(module.named_parameters())), chosen, transport, torch.device("cpu"))
        for step in range(steps):
            for m in range(rounds):
                with runtime.forward():
                    value = models.loss(module, "rooted", models.batch("rooted", step, m, rank))
                meeting.wait(20)
                (value / rounds).backward()
                runtime.end_backward()
            runtime.step()
        state = {k: v.clone() for k, v in runtime.whole_state().items()}
        runtime.close(True)
        return state

    want = train("rooted", size, chosen, adamw, steps)["state"]
    for state in run_ranks(size, work):
        assert all(torch.equal(state[name], value) for name, value in want.items())


def pulled_at_once(plan: Plan, rank: int, first: bool) -> tuple[Action, ...]:
    """The rank's program, but all parameters of a backward are pulled before it, into memory of their own (``pull_backward``)."""
    program = build(plan, rank, first)
    moved: dict[int, list[Action]] = {index: [] for index in forward_ends(program).values()}
    rest: list[tuple[int, Action]] = []
    for at, a in enumerate(program):
        ends = [index for index in moved if index <= at]
        begin = program[ends[-1]] if ends else None
        if a.kind == Kind.PULL_PARAM and a.backward and begin is not None and begin.round == a.round:
            own = a.posts[0]._replace(region="own", offset=a.unit << 32)
            moved[ends[-1]].append(a._replace(time=begin.time, phase=begin.phase, posts=(own,)))
        else:
            rest.append((at, a))
    own_units = {(a.round, a.unit) for some in moved.values() for a in some}
    done = []
    for at, a in rest:
        done += moved.get(at, [])
        reads = a.kind == Kind.WAIT_PARAM and a.backward and (a.round, a.unit) in own_units
        done.append(a._replace(region="own", offset=a.unit << 32) if reads else a)
    return tuple(done)


@settings(max_examples=examples(60), deadline=None)
@given(plans.plans(st.integers(2, 4)), st.sets(st.integers(0, 3)), st.sampled_from([{}, *CONDITIONS, {"meeting": True}]))
def test_some_ranks_may_pull_a_whole_backward_before_it(plan: Plan, some: set[int], condition: dict[str, bool]):
    """Whatever the others do: what owners offer for a backward is offered when it is for the forward."""

    def programs(rank: int, first: bool) -> tuple[Action, ...]:
        return pulled_at_once(plan, rank, first) if rank in some else build(plan, rank, first)

    dry_run(plan, 4, programs, **condition).run()
