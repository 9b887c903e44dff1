"""Ulysses sequence parallelism, real processes over gloo: stock ZeRO-3's weights under dp, the oracle's under every rule."""

import pytest

from support.engine_work import farthest, same, unpack
from support.sequence_work import Job, build, diverges, oracle, refused, run_jobs, uses

CLOSE = dict(rtol=1e-5, atol=1e-5)  # parts of a sequence are added in another order than whole ones


def pair(cyclic: dict | None = None, **options) -> list[Job]:
    """Stock, and the same script with a cyclic block."""
    return [Job(None, steps=4, **options), Job("dp", steps=4, cyclic=cyclic or {}, **options)]


PAIRS = [
    pair(rounds=2, clip=0.3),
    pair(how="mesh"),
    pair(how="config", cyclic={"ring_size": 1}),
    # gradients are divided by the data-parallel ranks
    pair(config={"zero_optimization": {"stage": 3, "reduce_scatter": False}}),
    pair(config={"zero_optimization": {"stage": 2}}),
]


@pytest.mark.sampled(8)
@pytest.mark.parametrize("jobs", PAIRS)
def test_dp_equals_stock_zero(pool, jobs):
    for rank, (theirs, ours) in enumerate(pool.run(4, run_jobs, jobs, timeout=120)):
        assert (theirs["class"], ours["class"]) == ("DeepSpeedEngine", "CyclicEngine")
        assert ours["losses"] == pytest.approx(theirs["losses"], rel=1e-5), rank
        assert theirs["batch"][0] == ours["batch"][0] == 2 * jobs[0].rounds * 2 and ours["batch"][1] == 2
        same(unpack(ours["state"]), unpack(theirs["state"]), **CLOSE)
        same(unpack(ours["state"]), oracle(jobs[1], ours["stages"], 4, 2 if jobs[1].config else 1).masters, **CLOSE)


COVER = [  # ranks, job
    (4, Job("cdp-v2", rounds=2, clip=0.3, optimizer="groups", eval_after=(2,))),
    (4, Job("cdp-v1", clip=0.3, how="mesh")),
    (4, Job("cdp-v2", cyclic={"delay_correction": "extrapolate", "warmup_steps": 2}, optimizer="groups")),
    (4, Job("cdp-v2", cyclic={"ring_size": 1})),  # four rings of one rank
    (4, Job("cdp-v2", config={"zero_optimization": {"stage": 1}}, rounds=3)),
    (4, Job("cdp-v2", rounds=2, checkpointing=True, init=True)),
    (4, Job("cdp-v2", sequence=4, rounds=2)),  # one group: four rings of one rank, and heads of keys that are repeated
    (6, Job("cdp-v2", clip=0.3, optimizer="groups")),  # rings of three
]


@pytest.mark.sampled(8)
@pytest.mark.parametrize(("world", "job"), COVER)
def test_every_weight_and_loss_equals_the_oracle(pool, world, job):
    ranks = [result[0] for result in pool.run(world, run_jobs, [job], timeout=120)]
    sequence, stages, replicated = job.sequence, ranks[0]["stages"], "zero_optimization" in job.config
    size = job.cyclic.get("ring_size", world // sequence)
    assert len(stages) == size and [r["rings"][1] for r in ranks] == [w // sequence % size for w in range(world)]
    want = oracle(job, stages, world, sequence if replicated else 1)
    scale = sequence if replicated else 1
    losses = {place: loss / scale for place, loss in want.losses.items()}
    assert {place: loss for r in ranks for place, loss in r["losses"].items()} == pytest.approx(losses, rel=1e-5)
    for r in ranks:
        same(unpack(r["state"]), want.masters, **CLOSE)
        step, mean, norm, slowest = r["metrics"]
        known = [loss for (t, _, _), loss in losses.items() if t == step]
        assert mean == pytest.approx(sum(known) / len(known), rel=1e-5) and norm == pytest.approx(want.norms[step], rel=1e-4)
        assert slowest is None or slowest % sequence == ranks.index(r) % sequence, "of its own ring"
        assert r["collectives"] == 0 and not r["any_order"]
    assert all(unpack(r["state"])[n].equal(v) for r in ranks for n, v in unpack(ranks[0]["state"]).items())


def test_resuming_is_bitwise_continuing_and_parameters_can_be_read_and_written(pool, tmp_path):
    job = Job("cdp-v2", rounds=2, optimizer="groups", steps=4, cyclic={"delay_correction": "predict"})
    for r in pool.run(4, uses, job, str(tmp_path), timeout=180):
        assert r["double"] and r["plus"]
        same(unpack(r["resumed"]), unpack(r["continued"]))
    saved = sorted(f.name for f in (tmp_path / "global_step2").iterdir() if f.name.startswith("stage"))
    assert saved == ["stage_000.safetensors", "stage_001.safetensors"]


def test_groups_that_cannot_be_used_are_refused(pool):
    for size, ring, strided in pool.run(4, refused, timeout=120):
        assert size.startswith("ValueError: sequence_parallel_size is 4, but DeepSpeed's sequence groups have 2 rank(s); ")
        assert "cyclic.ring_size is 4, which does not divide the 2 data-parallel ranks" in ring
        assert "ValueError: the sequence group of rank " in strided and "allowed are 2 consecutive ranks" in strided


def test_a_rank_that_diverges_is_named_by_its_number_in_the_world(pool):
    for rank, said in enumerate(pool.run(4, diverges, timeout=120)):
        assert said.startswith(f"rank {rank}, step ") and "lr of group 0 is 0.05 on rank " in said, said
        assert "but 0.01 on rank 3 in step 2" in said, said


def test_rules_and_divisors_differ():
    """Else no test here could see a rule, or what gradients are divided by, that is not followed."""
    stages = [[n for n, _ in names] for names in halves()]
    dp, v2 = (oracle(Job(rule), stages, 4).masters for rule in ("dp", "cdp-v2"))
    assert farthest(dp, v2) > 1e-4
    assert farthest(dp, oracle(Job("dp"), stages, 4, 2).masters) > 1e-3


def halves():
    named = list(build().named_parameters())
    return named[: len(named) // 2], named[len(named) // 2 :]
