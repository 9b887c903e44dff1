"""Warm-up: dp first, then the rule, against the oracle; the switch, resuming on both sides of it, and what a late switch does."""

import dataclasses

import pytest
import torch

from deepspeed_cdp.model.make_plan import Settings
from deepspeed_cdp.plan.plan import Plan
from deepspeed_cdp.plan.schedule import Schedule, threshold
from deepspeed_cdp.plan.unit_schedule import Unit
from deepspeed_cdp.plan.warmup import Phases
from deepspeed_cdp.runtime.runtime import Runtime
from deepspeed_cdp.verify.check import validate
from support import models
from support.local_ring import run_ranks
from support.optimizers import sgd, two_groups
from support.runtime_runs import named_rule, oracle, schedule
from support.warmup_runs import check


@pytest.mark.parametrize("rounds", [1, 2])
@pytest.mark.parametrize("rule", ["dp", "cdp-v1", "cdp-v2", "between"])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_dp_then_the_rule(size, rule, rounds):
    got, _ = check("mlp", named_rule(rule, size), size, 3, rounds=rounds)
    expected = threshold(named_rule(rule, size), size)
    assert all(r.executor.schedule.threshold == expected for r in got["runtimes"])


@pytest.mark.parametrize("rule", ["cdp-v1", "cdp-v2", 5])
def test_with_clipping_schedules_held_parameters_and_flushes(rule):
    """The v2 norm of the first step after the switch holds the last dp step's stages."""
    check("llama-tied", rule, 4, 3, two_groups, rounds=2, clip=0.3, on_step=schedule, flush_after={0, 4})


@pytest.mark.parametrize("flush_after", [(), {2}])
def test_a_skipped_last_step_does_not_spoil_the_next_one_s_clipping(flush_after):
    """Its norms are nan, and the first step under the rule clips some stages with the last step's norms of the others."""
    got, want = check("mlp-nan", "cdp-v2", 3, 3, clip=1.0, flush_after=flush_after)
    assert want.overflows[2] and all(p.isfinite().all() for p in got["state"].values())


@pytest.mark.parametrize("sum_dtype", [None, torch.float32])
def test_in_bf16(sum_dtype):
    check("llama-tied", "cdp-v2", 2, 2, two_groups, dtype=torch.bfloat16, sum_dtype=sum_dtype, clip=0.5, keep=True)


def test_with_random_delays():
    check("mlp", "cdp-v2", 3, 2, delay=0.002)


@pytest.mark.parametrize("warmup", [0, 1, 2, 7, 20])
def test_any_number_of_steps(warmup):
    got, want = check("mlp", "cdp-v2", 3, warmup)
    plain = oracle("mlp", got["runtimes"][0].plan.stages, "cdp-v2", 3, sgd, 7)
    assert (warmup == 0) == all(torch.equal(plain.masters[n], m) for n, m in want.masters.items()), (
        "the test needs a warm-up that can be seen"
    )


def test_a_switch_one_step_late_is_seen():
    """Broken on purpose: the whole ring stays under dp for a step more."""

    def late(runtime):
        runtime.executor.phases.steps += 1

    with pytest.raises(AssertionError):
        check("mlp", "cdp-v2", 3, 2, change=late)


def test_the_switch_is_the_only_collective():
    built = [models.build("mlp") for _ in range(3)]

    def work(rank, transport):
        module, seen = built[rank], []
        runtime = Runtime(
            module, sgd(list(module.named_parameters())), Settings("cdp-v2", warmup_steps=3), transport, torch.device("cpu")
        )
        for step in range(7):
            before = transport.collectives
            with runtime.forward():
                value = models.loss(module, "mlp", models.batch("mlp", step, 0, rank))
            value.backward()
            runtime.end_backward()
            runtime.step()
            seen.append((transport.collectives - before, runtime.executor.schedule.threshold))
        runtime.close(True)
        return seen

    for seen in run_ranks(3, work):
        assert seen == [(0, 0), (0, 0), (1, 2), (0, 2), (0, 2), (0, 2), (0, 2)]


def test_a_rank_that_leaves_its_micro_batch_out_after_an_evaluation_switches_too():
    """Its parameters are still gathered from the evaluation when the others flush."""
    built = [models.build("mlp") for _ in range(3)]

    def work(rank, transport):
        module = built[rank]
        runtime = Runtime(
            module, sgd(list(module.named_parameters())), Settings("cdp-v2", warmup_steps=2), transport, torch.device("cpu")
        )
        for step in range(4):
            if step == 1:
                runtime.gather()
            if (step, rank) != (1, 1):
                with runtime.forward():
                    value = models.loss(module, "mlp", models.batch("mlp", step, 0, rank))
                value.backward()
                runtime.end_backward()
            runtime.step()
        state = {k: v.clone() for k, v in runtime.whole_state().items()}
        runtime.close(True)
        return state

    states = run_ranks(3, work, seconds=10)
    assert all(torch.equal(states[0][n], s[n]) for s in states for n in s)


@pytest.mark.parametrize(("rule", "copies"), [("cdp-v1", 2), ("cdp-v2", 2), (1, 2)])
def test_one_allocation_serves_both_plans(rule, copies):
    units = tuple(Unit(f"u{i}", i // 2, (f"u{i}.w",), (), 512 * (i + 1), 1024 * (i + 1)) for i in range(6))
    phases = Phases(Plan(Schedule(3, threshold(rule, 3), 2), units), 4)
    first, later = phases.plans
    assert (first.schedule.threshold, first.copies(0), later.copies(0)) == (0, 1, copies)
    assert [first.o_layout(s) for s in range(3)] == [later.o_layout(s) for s in range(3)], "owners do not look elsewhere"
    assert first.windows is later.windows and first.windows == dataclasses.replace(first).windows, "searched for once"
    assert [phases.at(t) is first for t in range(6)] == [True] * 4 + [False] * 2
    assert [t for t in range(9) if phases.end_with(t)] == [3]
    for plan in phases.plans:
        validate(plan)
    assert Phases(dataclasses.replace(later, schedule=first.schedule), 4).plans == (first,), "dp needs no warm-up"
