"""CyclicPipelineEngine in real processes, 1 to 6 ranks: the oracle, stock PipelineEngine, evaluation, checkpoints, errors."""

import time
from dataclasses import replace

import pytest
import torch

from deepspeed_cdp.plan.delay_correction import DelayCorrection
from deepspeed_cdp.plan.schedule import threshold
from support import pipe_work as work
from support.optimizers import two_groups
from support.pipe_threads import farthest
from support.pipe_work import Job

CURRICULUM = {"data_efficiency": {"data_sampling": {"curriculum_learning": {"enabled": True, "curriculum_metrics": {}}}}}
FREE = {"pipeline": {"use_reentrant": False}}  # reentrant checkpoints want floating-point inputs, in stock DeepSpeed too
COVER: dict[int, list[Job]] = {
    1: [
        Job(2, tied=True, clip=0.5, warmup=True),
        Job(3, "cdp-v1", clip=0.5),
        Job(4, 1, checkpointing=1, config=FREE),
        Job(1, "cdp-v2", rounds=2),
        Job(2, "cdp-v2", clip=0.5, cyclic={"delay_correction": "none"}),
        Job(2, "cdp-v1", eval_after=(0, 2), cyclic={"delay_correction": {"method": "predict", "weight": 1.5}}),
        Job(3, "cdp-v2", bf16=True, eval_after=(1,)),
        Job(3, "cdp-v1", clip=0.5, tied=True, cyclic={"warmup_steps": 2}),
    ],
    2: [
        Job(2, "cdp-v2", clip=0.5, warmup=True, eval_after=(-1, 1, 3)),
        Job(2, "cdp-v1", tied=True, clip=0.5),
        Job(2, "dp", 2, tied=True, clip=0.5, eval_after=(2,)),
        Job(2, "cdp-v2", checkpointing=1, config=FREE, cyclic={"placement": "pipeline"}),
        Job(2, 2, 2, bf16=True, clip=0.5),
        Job(2, 2, 2, tied=True, clip=0.5, cyclic={"delay_correction": "none", "warmup_steps": 2}),
        Job(2, "cdp-v1", clip=0.5, cyclic={"delay_correction": "extrapolate", "warmup_steps": 2}, eval_after=(3,)),
        Job(2, "cdp-v1", bf16=True, sum_fp32=True, config={"zero_optimization": {"stage": 1}}),
    ],
    3: [
        Job(3, "cdp-v2", tied=True, clip=0.5, warmup=True),
        Job(3, "cdp-v1", clip=0.5, eval_after=(2,)),
        Job(2, "cdp-v2", tied=True, clip=0.5, warmup=True, eval_after=(1,)),
        Job(2, "cdp-v1", 2, clip=0.5),
        Job(2, "dp", cyclic={"placement": "pyramid"}),
        Job(2, "cdp-v2", clip=0.5, cyclic={"warmup_steps": 2}),
        Job(2, "cdp-v1", eval_after=(1,), cyclic={"delay_correction": "none"}),
        Job(2, "cdp-v2", tied=True, cyclic={"delay_correction": {"method": "extrapolate", "updates": 0.5}}),
    ],
    4: [Job(4, "cdp-v2", clip=0.5), Job(4, 4, tied=True)],
    6: [
        Job(3, "cdp-v2", tied=True, clip=0.5, pyramid=True, eval_after=(-1, 0, 1, 2, 3)),
        Job(3, "cdp-v1", clip=0.5, pyramid=True),
    ],
}


def run_all(rank: int, world: int, jobs: list[Job]) -> list[dict]:
    return [work.train(rank, world, job) for job in jobs]


def merged(ranks: list[dict]) -> dict[str, torch.Tensor]:
    return {n: w for r in ranks for n, w in r["weights"].items()}


@pytest.mark.parametrize("world", COVER)
def test_every_weight_and_loss_equals_the_oracle(pool, world):
    """Bitwise, but for the sums of tied weights and DeepSpeed's own order of checkpointed passes."""
    results = pool.run(world, run_all, COVER[world], timeout=200)
    for at, job in enumerate(COVER[world]):
        ranks = [r[at] for r in results]
        masters, means, norms = work.oracle(job)
        assert {r["class"] for r in ranks} == {"CyclicPipelineEngine"}
        assert farthest(merged(ranks), masters) <= (1e-6 if job.tied else 0.0), job
        own = job.steps if threshold(job.rule, job.stages) == 0 else max(1, job.cyclic.get("warmup_steps", 0))
        for r in ranks:
            assert r["told"] == ranks[0]["told"] and r["evaluated"] == ranks[0]["evaluated"] and r["steps"] == job.steps
            assert r["told"] == pytest.approx([*means[:own], *means[own - 1 : -1]][: job.steps], rel=1e-5), job
            assert r["norms"] == pytest.approx([*norms[:own], *norms[own - 1 : -1]][: job.steps], rel=1e-4 if job.bf16 else 1e-5)
            assert len(r["evaluated"]) == len(job.eval_after)


@pytest.mark.parametrize(
    "job",
    [Job(2, clip=0.5, warmup=True, rounds=2, eval_after=(2,)), Job(2, tied=True), Job(2, checkpointing=1, config=FREE)],
    ids=["clip", "tied", "checkpointing"],
)
def test_dp_equals_stock_deepspeed(pool, job):
    """Weights, losses, evaluation and learning rate, on all stages."""
    stock = pool.run(2, work.train, replace(job, rule=None))
    ours = pool.run(2, work.train, replace(job, rule="dp"))
    assert {r["class"] for r in stock} == {"PipelineEngine"} and {r["class"] for r in ours} == {"CyclicPipelineEngine"}
    assert farthest(merged(ours), merged(stock)) < 1e-6
    for a, b in zip(ours, stock):
        assert a["told"] == pytest.approx(b["told"], rel=1e-6) and a["evaluated"] == pytest.approx(b["evaluated"], rel=1e-6)
        assert a["lr"] == b["lr"] and a["steps"] == b["steps"]


@pytest.mark.parametrize(
    ("world", "job"),
    [
        (2, Job(2, clip=0.5, warmup=True, tied=True, steps=6)),
        (3, Job(2, "cdp-v1", steps=6)),
        (1, Job(3, clip=0.5, bf16=True, steps=6)),
        (2, Job(2, "cdp-v1", tied=True, steps=6, cyclic={"delay_correction": "extrapolate"})),
        (3, Job(2, clip=0.5, steps=6, cyclic={"delay_correction": "none"})),
        (2, Job(2, config={"checkpoint": {"writer": {"type": "python", "decoupled": True}}})),
        (1, Job(2, config={"checkpoint": {"writer": {"decoupled": True}}})),
    ],
    ids=["pipeline", "pyramid", "single", "extrapolated", "uncorrected", "saved beside", "single, saved beside"],
)
def test_resuming_is_bitwise_continuing(pool, tmp_path, world, job):
    on = pool.run(world, work.resume, job, job, str(tmp_path / "a"), 3, False)
    again = pool.run(world, work.resume, job, job, str(tmp_path / "b"), 3, True)
    assert farthest(merged(again), merged(on)) == 0.0
    for a, b in zip(again, on):
        assert a["told"] == b["told"] and a["lr"] == b["lr"]


def rewind(rank: int, world: int, job: Job, folder: str) -> list[tuple[list[float], dict]]:
    """Steps 2 and 3, and again after a checkpoint of step 2 is loaded into the same engine."""
    engine = work.initialize(job)
    for step in range(2):
        engine.train_batch(work.data(job, step))
    engine.save_checkpoint(folder)
    runs = []
    for _ in range(2):
        told = [float(engine.train_batch(work.data(job, step))) for step in (2, 3)]
        runs.append((told, work.weights(engine)))
        engine.load_checkpoint(folder)
    engine.destroy()
    return runs


@pytest.mark.parametrize("rule", ["cdp-v1", "cdp-v2"])
def test_loading_leaves_no_correction_of_before(pool, tmp_path, rule):
    for (told, weights), (retold, again) in pool.run(3, rewind, Job(2, rule, tied=True, clip=0.5), str(tmp_path)):
        assert told == retold and all(torch.equal(again[n], w) for n, w in weights.items())


def load_elsewhere(rank: int, world: int, job: Job, folder: str) -> dict:
    engine = work.initialize(job)
    engine.load_checkpoint(folder)
    result = work.weights(engine)
    state = {
        n: float(s["exp_avg"].double().sum())
        for o in engine._runtime.owners.values()
        for n, m in o.masters.items()
        for s in [o.optimizer.state[m]]
    }
    held = {n: p.detach().clone() for u in engine._runtime.units.values() for n, p in zip(u.names, u.params)}
    engine.destroy()
    return {"weights": result, "state": state, "held": held}


def test_other_placements_and_stages_read_a_checkpoint(pool, tmp_path):
    job = Job(2, clip=0.5, tied=True, steps=3)
    saved = pool.run(2, work.resume, job, job, str(tmp_path), 3, False)
    for world, other in (
        (1, replace(job, stages=3)),
        (3, job),
        (4, replace(job, stages=4)),
        (1, replace(job, stages=1, rule="dp")),
    ):
        there = pool.run(world, load_elsewhere, other, str(tmp_path))
        assert farthest(merged(there), merged(saved)) == 0.0
        assert all(r["state"] for r in there if r["weights"])
        for r in there:  # copies on other ranks, too
            for name, value in r["held"].items():
                assert torch.equal(value, merged(saved)[name])


def fail_to_start(rank: int, world: int, job: Job) -> str:
    try:
        engine = work.initialize(job)
    except (ValueError, RuntimeError) as error:
        return str(error)
    engine.destroy()
    return ""


@pytest.mark.parametrize(
    ("world", "job", "words"),
    [
        (2, Job(2, config={"gradient_accumulation_steps": 3}), "takes a multiple of 2 micro-batches per step; set it to 4."),
        (2, Job(2, cyclic={"placement": "pyramid"}), 'start 3 ranks, or use "auto".'),
        (2, Job(2, config={"zero_optimization": {"stage": 2}}), "zero_optimization.stage is 2: "),
        (2, Job(2, config={"fp16": {"enabled": True}}), "fp16.enabled is true under cyclic.rule cdp-v2: "),
        (2, Job(2, "dp", config={"fp16": {"enabled": True}}), "fp16.enabled is true: "),
        (2, Job(2, config=CURRICULUM), "data_efficiency.data_sampling.curriculum_learning.enabled is true: "),
        (2, Job(2, cyclic={"min_unit_mb": 1.0}), "cyclic.min_unit_mb is 1.0: it is about models that are no PipelineModule"),
        (
            2,
            Job(2, config={"optimizer": {"type": "Adagrad"}}, cyclic={"delay_correction": "predict"}),
            "cyclic.delay_correction is 'predict' and the optimizer ",
        ),
        (2, Job(2, cyclic={"transport": "peer"}), "cyclic.transport is 'peer'"),
        (2, Job(1), "has 2 ranks along 'data', and a cyclic pipeline has one rank per stage; start 1 ranks."),
        (6, Job(3), "pass topology=deepspeed_cdp.integration.pipe_module.pyramid_topology(3) to PipelineModule."),
        (1, Job(2, rule=None), "num_stages (2) must divide distributed world size (1)"),
        (4, Job(3), "num_stages (3) must divide distributed world size (4)"),
    ],
)
def test_what_is_refused(pool, world, job, words):
    for text in pool.run(world, fail_to_start, job):
        assert words in text and text.count("\n") == 0, text


def other_rules(rank: int, world: int) -> str:
    return fail_to_start(rank, world, Job(2, "cdp-v1" if rank else "cdp-v2"))


def test_ranks_that_differ_say_so(pool):
    texts = pool.run(2, other_rules)
    assert any("cyclic.rule is 'cdp-v2' on rank 0 but 'cdp-v1' on rank 1" in text for text in texts)


def stop_early(rank: int, world: int) -> str:
    from deepspeed_cdp.errors import HandoffError

    job = Job(2, timeout=3.0)
    engine = work.initialize(job)
    try:
        for step in range(5):
            if rank == 1 and step == 2:
                raise RuntimeError("broken on purpose")
            engine.train_batch(work.data(job, step))
    except (RuntimeError, HandoffError) as error:
        engine._failed = True
        return str(error)
    finally:
        engine.destroy()
    return ""


def test_a_rank_that_stops_is_named_with_step_stage_stream_and_peer(pool):
    texts = pool.run(2, stop_early)
    assert texts[1] == "broken on purpose"
    for word in ("rank 0, step ", "stage 0", "stream grad", "rank 1"):
        assert word in texts[0], texts[0]


def rebatch(rank: int, world: int) -> list[float]:
    job = Job(2, clip=0.5)
    engine = work.initialize(job)
    told = [float(engine.train_batch(work.data(job, 0)))]
    engine.set_train_batch_size(12)
    wide = replace(job, rounds=2)
    told += [float(engine.train_batch(work.data(wide, step))) for step in (1, 2)]
    try:
        engine.set_train_batch_size(9)
    except ValueError as error:
        assert "set it to 4." in str(error)
    metrics = engine.cyclic_metrics
    assert (metrics["step"], metrics["lag"]) == (1, 1) and engine.global_samples == 6 + 2 * 12
    engine.destroy()
    return told


def test_another_number_of_micro_batches(pool):
    a, b = pool.run(2, rebatch)
    assert a == b and len(a) == 3


def over_groups(rank: int, world: int, stages: int, placement: str, method: str) -> tuple[dict, list[float]]:
    """The runtime over torch.distributed's groups, as on GPUs, with gloo for NCCL."""
    from deepspeed_cdp.pipeline.runtime import PipeRuntime
    from deepspeed_cdp.transport.nccl_group import NcclGroupTransport
    from support import pipe_threads as threads

    case = threads.Case(stages, stages - 1, placement, tied=True, clip=0.05, correction=DelayCorrection(method))
    model, schedule = threads.build(stages, True), case.schedule
    parts = {s: model.part(s, schedule) for s in schedule.stages_of(rank)}
    named = [(n, p) for part in parts.values() for u in sorted(part.units) for n, p in part.units[u]]
    runtime = PipeRuntime(
        schedule,
        rank,
        parts,
        threads.loss,
        two_groups(named),
        {p: n for n, p in named},
        NcclGroupTransport(rank, world, 30.0, torch.device("cpu"), backend="gloo"),
        torch.device("cpu"),
        case.clip,
        correction=case.correction,
    )
    told = []
    for step in range(case.steps):
        threads.decay(step, runtime.user_optimizer)
        told.append(float(runtime.train(threads.batch(step, q) for q in range(schedule.micro_batches))))
    runtime.flush()
    masters = {n: m.detach().clone() for owner in runtime.owners.values() for n, m in owner.masters.items()}
    runtime.close(True)
    return masters, told


@pytest.mark.parametrize(
    ("world", "stages", "placement", "method"), [(3, 3, "pipeline", "none"), (3, 2, "pyramid", "extrapolate")]
)
def test_the_transport_of_gpus_carries_the_same(pool, world, stages, placement, method):
    from support import pipe_threads as threads

    results = pool.run(world, over_groups, stages, placement, method)
    case = threads.Case(stages, stages - 1, placement, tied=True, clip=0.05, correction=DelayCorrection(method))
    want, means = threads.oracle(case)
    assert farthest({n: m for r in results for n, m in r[0].items()}, want) < 1e-6
    assert all(r[1] == pytest.approx(threads.told(means, stages - 1), rel=1e-6) for r in results)


def one_leaves(rank: int, world: int) -> tuple[str, float]:
    from deepspeed_cdp.errors import HandoffError
    from deepspeed_cdp.transport.nccl_group import NcclGroupTransport

    transport, begun = NcclGroupTransport(rank, world, 30.0, torch.device("cpu"), backend="gloo"), time.monotonic()
    text = "left"
    try:
        if rank:
            transport.gather(None, f"rank {rank}, saving")
    except HandoffError as error:
        text = str(error)
    transport.close(False)
    return text, time.monotonic() - begun


def test_the_transport_of_gpus_tells_others_that_a_rank_has_left(pool):
    (_, _), (text, seconds) = pool.run(2, one_leaves)
    assert "rank 1, saving" in text and "rank 0 has closed" in text and seconds < 15


@pytest.mark.parametrize("world", [1, 2, 3])
def test_balanced_partitions_whose_bounds_are_numpys(pool, tmp_path, world):
    """DeepSpeed's own bounds then are numpy's integers, which neither json nor random seeds take."""
    job = Job(2, partition="type:Block", steps=2)
    ranks = pool.run(world, work.resume, job, job, str(tmp_path), 1, True)
    assert all(r["told"] == ranks[0]["told"] for r in ranks)
