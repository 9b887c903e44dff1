"""The runtime on threads against the oracle: bitwise where the order of sums is the same, which here is everywhere."""

import time
from collections import Counter

import pytest
import torch
from torch import nn

from deepspeed_cdp.model.make_plan import Settings
from deepspeed_cdp.plan.plan import Plan
from deepspeed_cdp.runtime.report import report
from deepspeed_cdp.runtime.runtime import Runtime
from support import models
from support.local_ring import run_ranks, train
from support.optimizers import muon, sgd, two_groups
from support.runtime_runs import EXTRAPOLATE, NONE, PREDICT, RULES, check, named_rule, oracle, schedule


@pytest.mark.sampled(6)
@pytest.mark.parametrize("rounds", [1, 2])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_mlp(size, rule, rounds):
    check("mlp", named_rule(rule, size), size, rounds=rounds, flush_after={2})


@pytest.mark.parametrize("threshold", range(8))
def test_every_threshold(threshold):
    check("mlp", threshold, 4, two_groups, clip=0.5)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("correction", [PREDICT, EXTRAPOLATE], ids=["predict", "extrapolate"])
@pytest.mark.parametrize("replicated", [False, True])
@pytest.mark.parametrize("rounds", [1, 2, 3])
@pytest.mark.parametrize("threshold", range(6))
def test_corrections(threshold, rounds, replicated, correction):
    """Every K; stale readers of a version read its correction, whatever else reads it."""
    clip = 0.3 * (threshold % 2)
    options = dict(rounds=rounds, clip=clip, flush_after={2}, on_step=schedule, replicated=replicated, correction=correction)
    check("rooted", threshold, 3, two_groups, **options)


@pytest.mark.parametrize("correction", [PREDICT, EXTRAPOLATE], ids=["predict", "extrapolate"])
def test_a_correction_on_four_ranks_with_delays(correction):
    check("llama-tied", "cdp-v2", 4, two_groups, correction=correction, delay=0.002, dtype=torch.bfloat16)


@pytest.mark.parametrize("wrong", [lambda plan, lag, stage: "V0", lambda plan, lag, stage: "W0"], ids=["never", "always"])
def test_a_correction_in_the_wrong_place_is_seen(monkeypatch, wrong):
    monkeypatch.setattr(Plan, "published_region", wrong)
    with pytest.raises((AssertionError, KeyError)):  # the last stage has no correction at all
        check("mlp", "cdp-v2", 3, two_groups, correction=PREDICT)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("kind", ["rooted", "conv", "llama", "llama-tied"])
def test_models(kind, rule):
    check(kind, named_rule(rule, 3), 3, two_groups, on_step=schedule, rounds=2 if rule == "cdp-v2" else 1, clip=0.3)


@pytest.mark.parametrize("rule", RULES)
def test_ranks_that_take_different_branches(rule):
    got, _ = check("routed", named_rule(rule, 3), 3, sgd, steps=8)
    visited = {frozenset(r.param_hooks.visited) for r in got["runtimes"]}
    assert len(visited) > 1, "the test needs ranks that use different experts"
    traffic = [kind for r in got["runtimes"] for kind in r.counters.traffic().values()]
    assert traffic and all(kind["counted"] == kind["closed form"] for kind in traffic), "a skipped expert travels as a used one"


@pytest.mark.parametrize("rule", ["dp", "cdp-v2"])
@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch has no Muon before 2.9")
def test_muon_has_whole_matrices(rule):
    def split(named):
        return muon(named)

    settings = Settings(rule)
    got = train("mlp", 3, settings, split, 6)
    matrices = {n for n in got["runtimes"][0].plan.stages for n in n}
    assert all(n.endswith("weight") for n in matrices)
    want = oracle("mlp", got["runtimes"][0].plan.stages, rule, 3, split, 6, trained=matrices)
    for name, master in want.masters.items():
        torch.testing.assert_close(got["state"][name], master, rtol=0, atol=0)


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize(
    ("kind", "rule", "size"),
    [("llama", "cdp-v2", 2), ("llama-tied", "cdp-v1", 2), ("routed", "cdp-v2", 2), ("mlp", "dp", 2), ("conv", "cdp-v2", 1)],
)
def test_merged_units(kind, rule, size, keep):
    """One unit a stage, of several modules; also where ranks skip some of them."""
    plain = train(kind, size, Settings(rule), sgd, 1)["runtimes"][0].plan
    got, _ = check(kind, rule, size, sgd, steps=8, rounds=2 if kind == "llama" else 1, keep=keep, least=10**9)
    plan = got["runtimes"][0].plan
    assert len(plan.units) == size < len(plain.units) and plan.stages == plain.stages
    assert [m for u in plan.units for m in u.modules] == [m for u in plain.units for m in u.modules]
    assert got["runtimes"][0].counters.messages() < len(plain.units) * 3 or size == 1


@pytest.mark.parametrize("sum_dtype", [None, torch.float32])
@pytest.mark.parametrize("rule", ["dp", "cdp-v1", "cdp-v2"])
def test_bf16(rule, sum_dtype):
    check("llama-tied", rule, 2, two_groups, dtype=torch.bfloat16, sum_dtype=sum_dtype, clip=0.5)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("rule", ["dp", "cdp-v1", "cdp-v2"])
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("kind", ["rooted", "llama-tied"])
def test_keep_after_forward(kind, size, rule):
    """Held parameters, accumulation, clipping, a flush; fewer bytes, and the same weights as without."""
    got, _ = check(kind, rule, size, two_groups, steps=4, rounds=2, clip=0.3, flush_after={1}, keep=True)
    without = train(kind, size, Settings(rule, rounds=2, clip=0.3), two_groups, 4, {1})
    assert all(torch.equal(got["state"][n], x) for n, x in without["state"].items())
    received = []
    for run in (got, without):
        rows = [r.counters.traffic()["F + B"] for r in run["runtimes"]]
        assert all(row["counted"] == row["closed form"] for row in rows)
        received.append(sum(row["counted"] for row in rows))
    assert got["runtimes"][0].plan.keep_after_forward and received[0] < received[1]


@pytest.mark.parametrize("sum_dtype", [None, torch.float32])
@pytest.mark.parametrize("rule", ["cdp-v1", "cdp-v2"])
def test_keep_after_forward_in_bf16(rule, sum_dtype):
    check("llama-tied", rule, 4, two_groups, steps=4, rounds=2, dtype=torch.bfloat16, sum_dtype=sum_dtype, clip=0.5, keep=True)


def test_keep_after_forward_where_ranks_skip_units():
    check("routed", "cdp-v2", 4, sgd, steps=6, keep=True, delay=0.001)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("rule", RULES)
def test_random_delays_change_nothing(rule, seed):
    check("mlp", named_rule(rule, 4), 4, rounds=1 + seed % 2, delay=0.002, seed=seed, steps=5)


def test_rules_differ():
    """Else no test here could see a wrong version."""
    finals = {rule: train("mlp", 3, Settings(rule), sgd, 6)["state"] for rule in ("dp", "cdp-v1", "cdp-v2", 3)}
    names = list(finals)
    for i, a in enumerate(names):
        for b in names[i + 1 :]:
            assert any(not torch.equal(finals[a][n], finals[b][n]) for n in finals[a]), (a, b)
            assert max(float((finals[a][n] - finals[b][n]).abs().max()) for n in finals[a]) > 1e-4, (a, b)


def test_a_wrong_version_is_seen():
    """An owner that publishes one step late once: the oracle's weights are missed."""

    def late(runtime):
        publish, calls = runtime.owner.publish, []

        def skip_third(slot, *values):
            calls.append(slot)
            if len(calls) != 3 or runtime.executor.rank:
                publish(slot, *values)

        runtime.owner.publish = skip_third

    with pytest.raises(AssertionError):
        check("mlp", "cdp-v2", 3, change=late)


@pytest.mark.parametrize("correction", [NONE, PREDICT], ids=["none", "predict"])
def test_bytes_equal_the_closed_form_and_no_collectives(correction):
    counted: Counter[str] = Counter()
    for size in (2, 3, 4):
        for rule in RULES:
            for rounds in (1, 2):
                keep = rounds == 2
                model = "llama-tied" if size == 3 else "rooted"  # both have persistent parameters
                settings = Settings(named_rule(rule, size), rounds=rounds, keep_after_forward=keep, delay_correction=correction)
                got = train(model, size, settings, sgd, 4)
                for runtime in got["runtimes"]:
                    traffic = runtime.counters.traffic()
                    assert set(traffic) == {"F + B", "G", "O"}, "predictions need no message of their own"
                    for kind, row in traffic.items():
                        assert row["counted"] == row["closed form"], (size, rule, rounds, runtime.executor.rank, kind, row)
                        counted[kind] += row["counted"]
                    assert runtime.counters.collectives() == 0
    assert all(counted.values()) and len(counted) == 3


@pytest.mark.parametrize("correction", [NONE, PREDICT], ids=["none", "predict"])
def test_the_report_has_all_traffic_beside_its_closed_form(correction):
    modules = [models.build("mlp") for _ in range(3)]

    def work(rank, transport):
        module, settings = modules[rank], Settings("cdp-v2", delay_correction=correction)
        runtime = Runtime(module, sgd(list(module.named_parameters())), settings, transport, torch.device("cpu"))
        for step in range(4):
            with runtime.forward():
                value = models.loss(module, "mlp", models.batch("mlp", step, 0, rank))
            value.backward()
            runtime.end_backward()
            runtime.step()
        text = report("Engine", runtime)
        runtime.close(True)
        return text

    text, *others = run_ranks(3, work)
    lines = text.splitlines()
    assert all(x == text for x in others)
    assert "(F, B: parameters; G: running gradient sums; O: those that come back to their owner)" in lines[-5]
    for row in lines[-3:]:
        cells = row.split()
        assert cells[2:8:2] == cells[3:8:2] and cells[8] == "0", row


@pytest.mark.parametrize("correction", [NONE, PREDICT], ids=["none", "predict"])
@pytest.mark.parametrize("slow", [0, 2])
def test_a_rank_is_busy_while_it_computes_and_not_while_its_relays_wait(slow, correction):
    """Waits of relays hold up nobody; waits for relays do."""
    modules = [models.build("mlp") for _ in range(3)]

    def work(rank, transport):
        module, settings, busy = modules[rank], Settings("cdp-v2", delay_correction=correction), []
        runtime = Runtime(module, two_groups(list(module.named_parameters())), settings, transport, torch.device("cpu"))
        for step in range(8):
            with runtime.forward():
                value = models.loss(module, "mlp", models.batch("mlp", step, 0, rank))
            time.sleep(0.1 if rank == slow else 0.01)
            value.backward()
            runtime.end_backward()
            runtime.step()
            busy.append(runtime.executor.metrics.busy)
        runtime.close(True)
        return min(busy[2:])  # the machine may be busy, too

    for rank, busy in enumerate(run_ranks(3, work)):
        assert busy > 0.1 if rank == slow else 0.01 < busy < 0.1, (rank, busy)


def test_memory_is_what_the_plan_says():
    for size in (1, 2, 4):
        for correction in (NONE, PREDICT):
            got = train("llama", size, Settings("cdp-v1", delay_correction=correction), sgd, 2)
            for runtime in got["runtimes"]:
                assert runtime.executor.buffers.nbytes() == sum(runtime.plan.memory(runtime.executor.rank).values())


def test_the_step_after_a_flush_reads_one_version():
    _, with_flush = check("mlp", "cdp-v1", 3, flush_after={1, 3})
    _, without = check("mlp", "cdp-v1", 3)
    assert any(not torch.equal(with_flush.masters[n], without.masters[n]) for n in without.masters)


def test_the_module_outside_the_engine():
    """Training and state_dict() on placeholders are refused; evaluation gathers first."""
    modules = [models.build("mlp") for _ in range(2)]  # not on the threads, which share the seed

    def work(rank, transport):
        module = modules[rank]
        runtime = Runtime(module, sgd(list(module.named_parameters())), Settings(any_order=False), transport, torch.device("cpu"))
        x = models.batch("mlp", 0, 0, 0)
        with pytest.raises(ValueError, match="call the engine instead"):
            module(x)
        with pytest.raises(ValueError, match="engine.module_state_dict"):
            module.state_dict()
        with torch.no_grad():
            seen = module(x)
        assert all(torch.isfinite(v).all() for v in module.state_dict().values())
        runtime.close(True)
        return seen

    for seen in run_ranks(2, work):
        torch.testing.assert_close(seen, models.build("mlp")(models.batch("mlp", 0, 0, 0)), rtol=0, atol=0)


def test_a_write_to_an_absent_parameter_of_one_element_changes_no_other():
    modules = [nn.Sequential(*(nn.PReLU() for _ in range(4))) for _ in range(2)]

    def work(rank, transport):
        module = modules[rank]
        runtime = Runtime(module, sgd(list(module.named_parameters())), Settings(), transport, torch.device("cpu"))
        module[0].weight.data.fill_(1.0)
        assert all(m.weight.isnan() for m in module[1:])
        runtime.close(True)

    run_ranks(2, work)


def test_where_both_sides_start_a_message_another_order_later_is_told():
    """The rank would pull at another place of the order than the one at which the owner starts to send."""
    modules = [models.build("mlp") for _ in range(2)]

    def work(rank, transport):
        transport.rendezvous, module = True, modules[rank]
        runtime = Runtime(module, sgd(list(module.named_parameters())), Settings(), transport, torch.device("cpu"))
        x = models.batch("mlp", 0, 0, rank)
        with runtime.forward():
            loss = module(x).pow(2).mean()
        loss.backward()
        runtime.end_backward()
        runtime.step()
        why = "^unit 'blocks.4' was used after unit 'blocks.5' in the forward in step 1, which the first micro-batch did not do; "
        with pytest.raises(ValueError, match=why), runtime.forward():
            module.blocks[4](module.blocks[5](x))
        transport.gather(None, "both")
        runtime.close(False)

    run_ranks(2, work)


@pytest.mark.parametrize("rule", ["dp", "cdp-v1"])
def test_a_step_without_a_norm_is_skipped(rule):
    """One micro-batch is nan: the whole step is skipped, as ZeRO-3 does and the oracle."""
    got = train("mlp-nan", 3, Settings(rule), sgd, 6)
    want = oracle("mlp-nan", got["runtimes"][0].plan.stages, rule, 3, sgd, 6)
    for name, master in want.masters.items():
        assert torch.isfinite(master).all()
        torch.testing.assert_close(got["state"][name], master, rtol=0, atol=0)
    assert all(r.executor.owner_executor.skipped == 1 for r in got["runtimes"])


def test_a_rank_that_leaves_the_plan_has_copies_of_its_own_stage():
    """Other ranks pull from the published copies, and the script may write to parameters."""
    modules = [models.build("mlp") for _ in range(2)]

    def work(rank, transport):
        module = modules[rank]
        runtime = Runtime(module, sgd(list(module.named_parameters())), Settings(), transport, torch.device("cpu"))
        x = models.batch("mlp", 0, 0, rank)
        with runtime.forward():
            loss = module.blocks[4](module.blocks[5](x)).pow(2).mean()
        arena = runtime.executor.buffers.regions["V0"]
        published = range(arena.data_ptr(), arena.data_ptr() + arena.numel())
        assert not any(p.data_ptr() in published for p in module.parameters())
        loss.backward()
        runtime.end_backward()
        runtime.step()
        runtime.close(True)

    run_ranks(2, work)
