"""Sequence parallelism through Accelerate's parallelism config and the Hugging Face Trainer: the scripts are stock ZeRO-3's."""

import pytest
import torch
from deepspeed.runtime.lr_schedules import WarmupLR

from deepspeed_cdp.analysis import reference
from deepspeed_cdp.plan.delay_correction import DelayCorrection
from support.client_results import Results
from support.client_trainer import model as trainer_model
from support.client_trainer import windows as trainer_windows
from support.engine_work import same, unpack
from support.sequence_clients import accelerate, dp_is_stock, trainer
from support.sequence_work import Job, labels_of, reference_of, sequences
from support.trainer_jobs import ROUNDS, STEPS, trainer_arguments

pytestmark = pytest.mark.slow


def test_accelerate(pool, tmp_path):
    jobs = [Job(rule, steps=STEPS, clip=0.5) for rule in (None, "dp", "cdp-v2")]
    stock, dp, v2 = zip(*pool.run(4, accelerate, jobs, str(tmp_path), timeout=240))
    assert [r[0]["class"] for r in (stock, dp, v2)] == ["DeepSpeedEngine", "CyclicEngine", "CyclicEngine"]
    for theirs, ours in zip(stock, dp):
        assert ours["losses"] == pytest.approx(theirs["losses"], rel=1e-5)
    same(unpack(dp[0]["state"]), unpack(stock[0]["state"]), 1e-5, 1e-5)
    want = one_sequence(jobs[2], v2[0]["stages"])
    assert {place: loss for r in v2 for place, loss in r["losses"].items()} == pytest.approx(want.losses, rel=1e-5)
    same(unpack(v2[0]["state"]), want.masters, 1e-5, 1e-5)


def one_sequence(job: Job, stages: list[list[str]]):
    """The oracle where a micro-batch is one sequence."""

    def batch(step: int, rnd: int, group: int):
        number, member = divmod(step * job.rounds + rnd, job.sequence)
        return sequences(number, group * job.sequence + member)[:1]

    return reference_of(job, stages, batch, lambda call, x: call(input_ids=x, labels=labels_of(x), use_cache=False).loss, 1)


@pytest.fixture(scope="module")
def runs(pool, tmp_path_factory) -> dict[str, Results]:
    folder = tmp_path_factory.mktemp("trainer")
    jobs = [trainer_arguments(folder, name, None if name == "stock" else name) for name in ("stock", "dp", "cdp-v2")]
    pool.run(4, trainer, jobs, timeout=400)
    return {name: Results(folder / name) for name in ("stock", "dp", "cdp-v2")}


def test_trainer_under_dp_equals_zero3(runs):
    dp_is_stock(runs["dp"], runs["stock"])


def test_trainer_under_cdp_v2_equals_the_oracle(runs):
    run, data = runs["cdp-v2"], trainer_windows()
    schedulers = []

    def batch(step: int, rnd: int, group: int) -> torch.Tensor:
        number, member = divmod(step * ROUNDS + rnd, 2)  # rank r's data loader has the windows r, r + 4, ...
        return data[number * 4 + group * 2 + member][None]

    def make(named):
        optimizer = torch.optim.AdamW([p for _, p in named], lr=3e-3, eps=1e-2, weight_decay=0.0)
        schedulers.append(WarmupLR(optimizer, warmup_min_lr=0, warmup_max_lr=3e-3, warmup_num_steps=2))
        return optimizer

    want = reference.train(
        trainer_model(),
        run.stages(STEPS),
        1,
        batch,
        lambda call, x: call(input_ids=x, labels=x).loss,
        make,
        STEPS,
        rounds=ROUNDS,
        clip=0.5,
        flush_after=(2, 5),
        on_step=lambda step, _: schedulers[0].step() if step else None,
        delay_correction=DelayCorrection("extrapolate"),
    )
    losses = [sum(want.losses[step, m, g] for m in range(ROUNDS) for g in (0, 1)) / (2 * ROUNDS) for step in range(STEPS)]
    assert run.log("loss") == pytest.approx(losses, rel=1e-5)
    assert losses[3:] != pytest.approx(runs["dp"].log("loss")[3:], rel=1e-5), "the rules differ"
    same(run.weights(STEPS), want.masters, 1e-5, 1e-5)
