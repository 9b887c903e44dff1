"""The event simulation: closed forms of docs/algorithm.md, order and bytes of the plan, and a recorded ring of threads."""

import random
from dataclasses import replace

import pytest
import torch

from benchmarks import lengths_simulated, rows
from benchmarks.lengths import Lengths
from benchmarks.pauses import SlowLinear
from deepspeed_cdp.analysis.timing.baselines import baselines
from deepspeed_cdp.analysis.timing.events import Simulation, _reserve, simulate
from deepspeed_cdp.analysis.timing.times import Hardware, Work, times, traffic
from deepspeed_cdp.model.make_plan import Settings
from deepspeed_cdp.plan.plan import Plan
from deepspeed_cdp.runtime.runtime import Runtime
from deepspeed_cdp.runtime.trace import Recorder
from support.equal_plans import bare, full, plan_of
from support.local_ring import run_ranks

STEP = 9e-3  # of bare(plan_of(n, 3)) per stage: three units, 1 ms forward and 2 ms backward each


@pytest.mark.parametrize("rule", ["cdp-v2", "cdp-v1", "N"])
@pytest.mark.parametrize("ranks", [2, 3, 4, 6])
def test_without_updates_and_hops_nothing_waits(ranks, rule):
    run = simulate(plan_of(ranks, rule=ranks if rule == "N" else rule), bare(plan_of(ranks)))
    assert run.period() == pytest.approx(ranks * STEP, rel=1e-6)
    assert max(run.idle()) < 1e-6


@pytest.mark.parametrize("ranks", [2, 4])
def test_v2_shows_one_units_update_and_a_clipped_one_a_stages(ranks):
    update = 0.5e-3
    plan = plan_of(ranks)
    at_once = simulate(plan, bare(plan, update=update)).period()
    clipped = simulate(plan, bare(plan, update=update), clipped=True).period()
    # P = 2N T + delta on the last rank (docs/algorithm.md), which reads stage 0 unit by unit
    assert at_once == pytest.approx(ranks * STEP + update, rel=1e-6)
    assert clipped == pytest.approx(at_once, rel=1e-6)  # updates by unit, too, in the order of reading
    slow = simulate(plan, bare(plan, update=3e-3), clipped=True).period()
    assert ranks * STEP + 3e-3 <= slow <= ranks * STEP + 3 * 3e-3 + 1e-9


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_a_host_that_is_not_ahead_costs_one_units_update_and_not_a_stages(ranks, monkeypatch):
    """A unit's update takes as long as its forward. Averaging a whole stage where it is wanted would hold up its first reader."""
    plan = plan_of(ranks)
    given = bare(plan, update=1e-3)
    alone = simulate(plan, given).period()
    assert simulate(plan, given, host_ahead=False).period() <= alone + 1e-3 + 1e-9
    monkeypatch.setattr(Plan, "eager_units", lambda plan, rank: ())
    together = plan_of(ranks)
    assert simulate(together, given).period() == pytest.approx(alone, rel=1e-6)
    assert simulate(together, given, host_ahead=False).period() >= alone + 1.9e-3


@pytest.mark.parametrize("rule", ["cdp-v2", "cdp-v1"])
def test_credits_follow_the_clock_that_frees_the_place(rule):
    """A step's first sums may come once the owner has used the last step's. Later ones may once the relay has seen that their
    rank has pulled them, and that the owner has predicted from them. Pulls follow the passes."""

    class Noting(Simulation):
        def _post(self, rank, post, now):
            if post.stream == "G" and (post.round, post.src) == (0, 0):
                assert now == rank.owner
                seen.add(("first", rank.owner > rank.passes))
            elif post.stream == "G":
                pulls = [m for m in self.run.messages if (m.stream, m.dst, m.unit) == ("G0", post.src, post.unit)]
                assert now == rank.relay >= pulls[-1].end
                seen.add(("later", rank.relay > rank.passes))
                if post.src == 1 + self.plan.schedule.predictor(self.plan.schedule.owned(rank.number)) and rank.step:
                    assert now >= made[rank.number, rank.step, post.unit]
                    seen.add(("predicted", now == made[rank.number, rank.step, post.unit]))
            else:
                assert now == rank.passes
            super()._post(rank, post, now)

        def _predict(self, rank, a):
            done = super()._predict(rank, a)
            if done and rank.step:
                made[rank.number, rank.step, a.unit] = rank.relay
                key = "G", self.plan.schedule.predictor(3 - rank.number), a.unit
                assert rank.relay >= [m.end for m in self.run.messages if (m.stream, m.src, m.unit) == key][rank.step] + 5e-3
            return done

        def _recv_grad(self, rank, a):
            done = super()._recv_grad(rank, a)
            if done and rank.step and a.region == "O" and rank.number == 1 + self.plan.schedule.predictor(3 - rank.number):
                assert rank.passes >= made[rank.number, rank.step, a.unit], "the owner's own part is the next one"
                seen.add(("own", rank.passes == made[rank.number, rank.step, a.unit]))
            return done

    seen, made, plan = set(), {}, plan_of(4, rule=rule, delay_corrected=True, predicts=True)
    given = replace(bare(plan, update=16e-3), predictions=dict.fromkeys(range(12), 5e-3))  # longer than what they let in
    Noting(plan, given, 6, lambda rank, step: 0.0, True, False, True).go()
    assert seen >= {(what, True) for what in ("first", "later", "predicted", "own")}, "each clock was the one to wait for"


def test_a_sum_goes_from_rank_to_rank_in_two_hops():
    """One for the push to its owner, one for the pull; the owner adds in place."""
    plan, hop, forward = plan_of(4, 1), 1e-4, 1e-3
    run = simulate(plan, bare(plan, forward, latency=hop), 2)
    begin = {(p.rank, p.unit): p.begin for p in run.passes if p.backward and p.step == 0}
    first = [begin[r, 3] for r in range(4)]  # of the last stage, which rank 0 owns
    assert [b - a - 2 * forward for a, b in zip(first, first[1:])] == pytest.approx([hop, 2 * hop, 2 * hop])
    sums = [(m.stream, m.src, m.dst) for m in run.messages if m.unit == 2 and m.stream in ("G", "G0")]  # rank 1 owns it
    assert sums[:5] == [("G", 0, 1), ("G0", 1, 2), ("G", 2, 1), ("G0", 1, 3), ("G", 3, 1)]


def test_an_owner_relays_sums_beside_its_passes():
    """Rank 0 begins a step while its sums of the last one still go from rank to rank; also on CPUs, where a thread relays."""

    class InTheWay(Simulation):
        def _do(self, rank, a):
            rank.passes = max(rank.passes, rank.relay)
            return super()._do(rank, a)

    plan = plan_of(6)

    def run(late=0.0, kind=Simulation, overlap=True):
        return kind(plan, bare(plan), 8, lambda rank, step: late * ((rank, step) == (4, 3)), overlap, False, True).go()

    for overlap in (True, False):
        assert run(overlap=overlap).period() == pytest.approx(6 * STEP, rel=1e-6)
        assert run(kind=InTheWay, overlap=overlap).period() > 1.2 * 6 * STEP
    assert run(0.5).starts[4][:4] == run().starts[4][:4], "ranks before the late one owe it sums, and do not wait for it"
    assert run(0.5, InTheWay).starts[4][0] > 0.5


@pytest.mark.parametrize("kept", [False, True])
def test_pulls_begin_as_many_passes_ahead_as_the_plan_says(kept):
    """A hop of one and a half forwards is hidden by two passes, not by one."""
    hop = 1.5e-3

    def late(prefetch):
        plan = plan_of(4, 4, prefetch_units=prefetch, keep_after_forward=kept)
        return simulate(plan, bare(plan, latency=hop)).period() - 4 * 4 * 3e-3

    assert late(2) == pytest.approx(0, abs=1e-9)
    assert late(1) > 4 * 0.5e-3


@pytest.mark.parametrize("rule", ["cdp-v2", "cdp-v1"])
def test_rank_0_waits_for_its_own_prediction(rule):
    """Stage 0's comes from the sum that rank 0 has just pushed: it waits for the push, a unit's prediction, and a pull. It pulls
    no prediction ahead, and the second unit's only after the first one's pass: two pulls to wait for, also in later stages."""
    ranks, hop, made = 4, 1e-4, 3e-4
    plan = plan_of(ranks, rule=rule, delay_corrected=True, predicts=True)
    given = replace(bare(plan, latency=hop), predictions=dict.fromkeys(range(3 * ranks), made))
    extra = simulate(plan, given).period() - ranks * STEP
    assert extra == pytest.approx(made + 3 * hop + 2 * hop * (ranks - 2), rel=1e-6)
    assert simulate(plan, replace(given, predictions={})).period() == pytest.approx(ranks * STEP + extra - made, rel=1e-6)


def test_v1_hides_the_update():
    plan = plan_of(4, rule="cdp-v1")
    assert simulate(plan, bare(plan, update=2e-3)).period() == pytest.approx(4 * STEP, rel=1e-6)


def test_dp_waits_for_everyone():
    plan = plan_of(4, rule="dp")
    hop = 1e-3
    run = simulate(plan, bare(plan, update=1e-3, latency=hop))
    # the last rank's backward ends three hops later; then sum, norm, update and published version travel
    assert run.period() > 4 * STEP + 3 * hop + 1e-3
    assert simulate(plan_of(4), bare(plan_of(4), update=1e-3, latency=hop)).period() < run.period()


def test_offsets_lie_between_the_bounds_of_the_analysis():
    plan = plan_of(4, units=4)
    run = simulate(plan, full(plan, 0.2), steps=30)
    stage = sum(run_time for (_, b), run_time in full(plan, 0.2).passes.items()) / 8
    for d in run.offsets():
        assert 0 < d <= 2 * stage * 1.05


def test_every_pass_once_in_the_plans_order_and_every_byte_sent():
    plan, steps = plan_of(3, rounds=2), 5
    run = simulate(plan, full(plan, 0.1), steps)
    assert len(run.passes) == steps * 3 * 2 * len(plan.visits)
    for rank in range(3):
        mine = sorted((p for p in run.passes if p.rank == rank), key=lambda p: p.begin)
        assert [(p.unit, p.backward) for p in mine] == list(plan.visits) * (2 * steps)
        assert all(a.end <= b.begin + 1e-12 for a, b in zip(mine, mine[1:]))
    longer = simulate(plan, full(plan, 0.1), steps + 1)
    for rank in range(3):
        got = [sum(m.nbytes for m in r.messages if m.dst == rank) for r in (run, longer)]
        assert got[1] - got[0] == sum(plan.received_bytes(rank).values())


@pytest.mark.parametrize("rounds", [1, 2])
@pytest.mark.parametrize("rule", ["cdp-v2", "cdp-v1", "dp", 3])
def test_no_pass_begins_before_its_version_and_its_sum_are_there(rule, rounds):
    plan, steps, rng, drawn = plan_of(4, 2, rule=rule, rounds=rounds), 6, random.Random(5), {}
    run = simulate(plan, full(plan, 0.1), steps, lambda rank, step: drawn.setdefault((rank, step), rng.uniform(0, 0.05)))
    at = {(p.step, p.round, p.rank, p.unit, p.backward): p for p in run.passes}
    for (step, m, rank, unit, backward), p in at.items():
        if version := plan.schedule.version(step, m, rank, plan.unit(unit).stage):
            assert p.begin > at[version - 1, rounds - 1, 3, unit, True].end
        if backward and (before := plan.schedule.neighbor(m, rank, -1)):
            assert p.begin > at[(step, *before, unit, True)].end


@pytest.mark.parametrize("rule", ["cdp-v2", "cdp-v1"])
def test_the_first_sum_of_a_step_waits_until_the_last_steps_is_used(rule):
    """Rank 0 owns the last stage, so it starts that sum in place. Under v1, whose updates wait for all stages, a copy will do."""
    plan = plan_of(4, rule=rule)
    run = simulate(plan, bare(plan), 6, lambda rank, step: 0.5 * ((rank, step) == (3, 3)))
    at = {(p.rank, p.step, p.unit): p for p in run.passes if p.backward}
    assert at[3, 3, 9].end <= at[0, 4, 11].begin < at[3, 3, 0].end, "unit 9 is the last of its stage to be finished"


def test_an_owner_overwrites_nothing_that_is_still_to_be_pulled(monkeypatch):
    """With one copy for two versions, it waits for readers that wait for it."""
    monkeypatch.setattr(Plan, "_copies", [1] * 4)
    plan = plan_of(4, rule="cdp-v1")
    with pytest.raises(AssertionError, match="deadlocks"):
        simulate(plan, bare(plan))


def test_a_link_carries_no_more_than_its_bandwidth():
    """Several ranks pull from an owner at once and share the link out of it. What a rank starts on a stream goes in order."""
    plan, speed = plan_of(4), 2e9
    run = simulate(plan, full(plan, 0.01, bandwidth=speed))
    latency = Hardware().latency
    for rank in range(4):
        mine = [m for m in run.messages if m.src == rank]
        for begin in {m.begin for m in mine}:
            sent = sorted((m.end - latency, m.nbytes) for m in mine if m.begin >= begin)
            assert all(sum(n for _, n in sent[: k + 1]) <= speed * (sent[k][0] - begin) + 1 for k in range(len(sent)))
        for stream in ("P0", "G0", "G"):
            own = sorted(m for m in run.messages if m.stream == stream and rank == (m.src if stream == "G" else m.dst))
            own.sort(key=lambda m: m.end)
            assert all(a.end - latency <= b.begin + 1e-12 for a, b in zip(own, own[1:])), stream
    assert run.period() > 0.01 * 1.2  # the link is the limit here
    taken = []
    assert [_reserve(taken, *x) for x in ((5, 2), (0, 2), (1, 2), (6, 2), (3, 3))] == [7, 2, 4, 9, 11]
    assert taken == [(0, 11)]


def test_a_straggler_delays_only_whom_its_sums_would_reach_too_late():
    """All ranks begin together, so each follows the one before as closely as sums allow, and is late with it. Who has been late
    itself has room. Ranks before the straggler wait only beyond their slack, in the next step."""
    plan = plan_of(4, units=4)
    given = full(plan, 0.2)

    def ends(*late):
        return simulate(plan, given, 20, lambda rank, step: sum(x[2] for x in late if x[:2] == (rank, step))).ends[-1]

    def later(a, b):
        return [y - x for x, y in zip(a, b)]

    calm, once = ends(), ends((3, 8, 0.02))
    assert later(calm, ends((2, 10, 0.01))) == pytest.approx([0, 0, 0.01, 0.01], abs=2e-4)
    assert later(once, ends((3, 8, 0.02), (2, 10, 0.01))) == pytest.approx([0, 0, 0.01, 0], abs=2e-4)
    assert min(later(calm, ends((2, 10, 0.4)))) > 0.2


def test_delays_cost_less_than_a_barrier():
    plan = plan_of(4, units=4)
    rng, drawn = random.Random(3), {}
    run = simulate(plan, full(plan, 0.2), 60, lambda rank, step: drawn.setdefault((rank, step), rng.uniform(0, 0.04)))
    period = simulate(plan, full(plan, 0.2)).period()
    assert period + 0.018 < run.period() < period + 0.04 * 4 / 5  # the mean of the largest of four


def test_on_one_clock_the_updates_add_up():
    plan = plan_of(2)
    beside = simulate(plan, bare(plan, update=1e-3)).period()
    alone = simulate(plan, bare(plan, update=1e-3), overlap=False).period()
    assert alone >= 2 * STEP + 3e-3 > beside


def test_times_add_up():
    plan = plan_of(4, units=2, nbytes=1 << 20)
    given = times(plan, [Work(1e9, 1 << 19)] * 8, Hardware(), compute=0.1)
    assert given.compute == pytest.approx(0.1)
    assert sum(given.passes.values()) == pytest.approx(given.compute + given.adds + given.contention)
    assert given.adds == pytest.approx(3 * 8 * (1 << 20) / 3e12)
    assert traffic(plan) == 2 * sum(sum(plan.received_bytes(r).values()) for r in range(4)) / 4
    fused = times(plan, [Work(1e9, 1 << 19, (1 << 20) - 512)] * 8, Hardware(), compute=0.1)  # one of the sums stays apart
    assert fused.adds == pytest.approx((8 * (1 << 20) + 2 * 8 * 512) / 3e12)
    quiet = times(plan, [Work(1e9, 1 << 19)] * 8, Hardware(contention=0.0), compute=0.1)
    assert quiet.contention == 0


def test_baselines_move_what_they_should():
    work, sizes = [Work(1e12, 1000)] * 4, [2000] * 4
    by_name = {r.name: r for r in baselines(work, sizes, sizes, 4, Hardware(), 0.1)}
    assert by_name["ZeRO-3"].received == 3 * 8000 * 3 / 4
    assert by_name["DDP"].received == 2 * 8000 * 3 / 4
    assert by_name["DDP"].memory(500) == 8000 + 8000 + 12 * 4000 + 500
    assert by_name["ZeRO-3"].memory(500) == pytest.approx((8000 + 8000 + 12 * 4000) / 4 + 3 * 2000 + 500)
    assert by_name["FSDP2"].memory(500) == pytest.approx((12 + 4) * 4000 / 4 + 3 * 2000)
    assert by_name["FSDP2"].memory(5000) == pytest.approx(12 * 4000 / 4 + 3 * 2000 + 5000)
    again = {r.name: r for r in baselines(work, sizes, sizes, 4, Hardware(), 0.1, rounds=2)}
    assert again["FSDP2"].memory(500) == by_name["FSDP2"].memory(500) + 500, "the first round's gradients stay"
    assert all(r.seconds >= 0.1 for r in by_name.values())
    assert all(r.received == 0 for r in baselines(work, sizes, sizes, 1, Hardware(), 0.1))


@pytest.mark.parametrize(  # of Llama 1.35B, 3B and 8B (benchmarks/sizes.py): parameters, a layer's MiB, GiB of activations
    ("run", "model", "ranks", "parameters", "layer", "activations"),
    [
        ("2026-11-30_2xH200_rivals", "llama-1.3b", 2, 1_345_423_360, 96.5, 18.93),
        ("2026-11-30_2xH200_states", "llama-3b", 2, 3_141_172_224, 216.0, 14.81),
        ("2026-11-30_2xH200_rivals", "llama-8b", 2, 8_047_038_464, 464.0, 13.57),
        ("2026-11-28_4xH200_targets", "llama-1.3b", 4, 1_345_423_360, 96.5, 18.93),
        ("2026-11-28_4xH200_targets", "llama-8b", 4, 8_047_038_464, 464.0, 13.57),
    ],
)
def test_memory_of_fsdp2_as_measured(run, model, ranks, parameters, layer, activations):
    micro_batch = {"llama-1.3b": "4", "llama-3b": "2", "llama-8b": "1"}[model]
    measured = [
        float(r["peak_gib"])
        for r in rows.read(rows.RESULTS / run / "results.csv")
        if (r["engine"], r["model"], r["micro_batch"], r["sequence"]) == ("fsdp2", model, micro_batch, "2048") and r["peak_gib"]
    ]
    count = round(2 * parameters / (layer * 2**20))
    each, size = Work(1e12, parameters // count), int(layer * 2**20)
    fsdp2 = baselines([each] * count, [size] * count, [size] * count, ranks, Hardware(), 0.1)[1]
    assert fsdp2.name == "FSDP2" and measured
    assert fsdp2.memory(activations * 2**30) / 2**30 == pytest.approx(min(measured), rel=0.06)


# ---- against a run ------------------------------------------------------------------------------------------------------
FORWARD = 0.012  # seconds of a unit's forward; its backward takes twice that


@pytest.mark.parametrize("rule", ["cdp-v2", "cdp-v1"])
def test_the_order_of_a_recorded_run_is_the_simulations(rule):
    """Passes of all ranks by their beginnings, threads on one clock. Pairs whose simulated times are closer than a pass are not
    compared: the machine decides these."""
    ranks, steps = 3, 5
    built = [torch.nn.Sequential(*[SlowLinear(8, FORWARD) for _ in range(2 * ranks)]) for _ in range(ranks)]

    def work(rank, transport):
        module = built[rank]
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        runtime = Runtime(module, optimizer, Settings(rule=rule), transport, torch.device("cpu"))
        recorder = Recorder(runtime.executor, torch.device("cpu"))
        for step in range(steps):
            with runtime.forward():
                loss = module(torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + rank))).pow(2).mean()
            loss.backward()
            runtime.end_backward()
            runtime.step()
        trace = recorder.stop()
        runtime.close(True)
        return trace, runtime.plan

    results = run_ranks(ranks, work)
    plan = results[0][1]
    run = simulate(plan, bare(plan, FORWARD), steps, overlap=False)
    seen = {
        (e["pid"], e["args"]["step"], e["args"]["unit"], e["args"]["backward"]): e["ts"] / 1e6
        for trace, _ in results
        for e in trace["traceEvents"]
        if e.get("cat") == "passes"
    }
    expected = {(p.rank, p.step, p.unit, p.backward): p.begin for p in run.passes}
    assert seen.keys() == expected.keys()
    wrong = compared = 0
    keys = sorted(expected, key=expected.__getitem__)
    for i, a in enumerate(keys):
        for b in keys[i + 1 :]:
            if expected[b] - expected[a] > 3 * FORWARD:
                compared += 1
                wrong += seen[a] > seen[b]
    assert compared > 1000
    assert wrong / compared < 0.01, f"{wrong} of {compared} pairs came in another order"


def test_loads_stretch_the_passes_of_a_micro_batch():
    """Everyone half as slow again: so is the step. One rank twice as slow: all follow it. Every second step so: their mean."""
    plan, given = plan_of(2), bare(plan_of(2))
    alone = simulate(plan, given).period()
    assert simulate(plan, given, loads=lambda rank, step, round: 1.5).period() == pytest.approx(1.5 * alone, rel=1e-6)
    assert simulate(plan, given, loads=lambda rank, step, round: 1 + rank).period() == pytest.approx(2 * alone, rel=1e-6)
    both = simulate(plan, given, 24, loads=lambda rank, step, round: 1 + step % 2)
    assert both.period() == pytest.approx(1.5 * alone, rel=0.02)


def test_what_unlike_lengths_cost(monkeypatch):
    """Nothing if all are alike; else a ring loses less than an engine that meets in every layer, and packs lose little."""
    monkeypatch.setitem(lengths_simulated.SPEED, "llama-tiny", (0.1, 8192))
    alike = lengths_simulated.costs("llama-tiny", "cdp-v2", 4, 2, Lengths(512, 0, 512), 8, 0.0)
    assert alike[1:] == pytest.approx((1, 1, 1, 1), abs=1e-9)
    some = Lengths(512, 1.0, 4096)
    cost = lengths_simulated.costs("llama-tiny", "cdp-v2", 4, 2, some, 24, 0.0)
    assert 1 < cost.ring_by_step < cost.by_step < cost.ring < cost.by_layer
    packed = lengths_simulated.costs("llama-tiny", "cdp-v2", 4, 2, some._replace(packed=True), 24, 0.0)
    assert 1 < packed.by_layer < 1 + 0.2 * (cost.by_layer - 1) and packed.ring < packed.by_layer
    least = lengths_simulated.seconds("llama-tiny", [512], False, 9.0)
    assert least == 9.0 and lengths_simulated.seconds("llama-tiny", [2048], False, 0.0) == pytest.approx(0.1 / 4)
