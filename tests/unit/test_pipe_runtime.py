"""Cyclic pipelines on threads against the oracle: 1 to 4 stages, every rule, every placement; broken on purpose too."""

from dataclasses import replace

import pytest
import torch

from deepspeed_cdp.errors import HandoffError
from deepspeed_cdp.optim.offload import OffloadedOwner
from deepspeed_cdp.plan.delay_correction import DelayCorrection
from deepspeed_cdp.plan.pipeline_schedule import PipeSchedule
from support.optimizers import sgd
from support.pipe_threads import Case, farthest, oracle, told, train

PLACEMENTS = ("pipeline", "pyramid", "single")
EXTRAPOLATE, PREDICT = DelayCorrection("extrapolate"), DelayCorrection("predict", weight=1.7)
COVER = [{}, {"tied": True, "clip": 0.05}, {"rounds": 2, "clip": 0.05, "flush_after": (1,)}]


def check(case: Case, tolerance: float = 0.0) -> None:
    masters, losses, _ = train(case)
    want, means = oracle(case)
    assert farthest(masters, want) <= tolerance, case
    for rank in losses:  # every rank tells the same
        assert rank == losses[0]
        assert rank == pytest.approx(told(means, case.threshold, case.warmup_steps), rel=1e-6, nan_ok=True), case


@pytest.mark.sampled(6)
@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("stages", [1, 2, 3, 4])
def test_equals_the_oracle(stages, placement):
    """Bitwise; with tied weights to one rounding, since their gradients are summed by stage before they are added."""
    for number, threshold in enumerate(range(2 * stages)):
        more = COVER[(number + stages) % 3] if 0 < threshold < 2 * stages - 1 and threshold != stages - 1 else None
        for extra in COVER if more is None else [more]:
            check(Case(stages, threshold, placement, **extra), 1e-7 if extra.get("tied") else 0.0)


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_bf16_with_fp32_masters(placement):
    check(Case(2, 1, placement, dtype=torch.bfloat16, clip=0.05))
    check(Case(3, 5, placement, dtype=torch.bfloat16, sum_dtype=torch.float32, clip=0.05))


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_tuples_and_tensors_without_gradient_travel(placement):
    check(Case(3, 2, placement, split=True))


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_frozen_parameters_stay_and_are_shared(placement):
    check(Case(3, 2, placement, frozen=("1.gain", "2.0.weight", "3.gain")))


@pytest.mark.parametrize("placement", ["pipeline", "pyramid"])
def test_ranks_that_dawdle_change_nothing(placement):
    check(Case(3, 2, placement, tied=True, delay=0.002), 1e-7)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("stages", [1, 2, 3, 4])
def test_corrections_equal_the_oracle(stages, placement):
    """Every threshold; under ``dp`` a correction changes nothing."""
    for number, threshold in enumerate(range(2 * stages)):
        more = COVER[(number + stages) % 3] if threshold not in (stages - 1, 2 * stages - 1) else None
        for extra in COVER if more is None else [more]:
            correction = (EXTRAPOLATE, PREDICT)[(number + len(extra)) % 2]
            case = Case(stages, threshold, placement, correction=correction, **extra)
            check(case, 1e-6 if extra.get("tied") else 0.0)


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize(
    "case",
    [
        Case(3, 2, warmup_steps=2, correction=PREDICT, clip=0.05),
        Case(3, 5, warmup_steps=2, correction=PREDICT, flush_after=(2,)),
        Case(2, 1, warmup_steps=1, correction=EXTRAPOLATE, tied=True),
        Case(2, 3, warmup_steps=2, correction=EXTRAPOLATE, rounds=2),
        Case(2, 3, flush_after=(0, 1, 3), correction=PREDICT),
        Case(2, 3, correction=EXTRAPOLATE, clip=0.05, infinite=2),
        Case(3, 5, correction=PREDICT, clip=0.05, infinite=2),
        Case(2, 1, correction=PREDICT, optimizer=sgd),
        Case(2, 3, correction=PREDICT, optimizer=sgd),
        Case(3, 4, correction=PREDICT, dtype=torch.bfloat16, sum_dtype=torch.float32, clip=0.05),
        Case(3, 5, correction=EXTRAPOLATE, dtype=torch.bfloat16, frozen=("1.gain", "2.0.weight")),
    ],
)
def test_corrections_with_everything_else(case, placement):
    check(replace(case, placement=placement), 1e-6 if case.tied else 0.0)


@pytest.mark.parametrize("threshold", [2, 5])
def test_ranks_that_dawdle_do_not_change_corrections(threshold):
    check(Case(3, threshold, "pyramid", correction=PREDICT, delay=0.002))


# ---- broken on purpose ------------------------------------------------------------------------------------------------------
def differs(case: Case) -> bool:
    masters, _, _ = train(case)
    return farthest(masters, oracle(case)[0]) > 1e-5


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_the_newest_version_in_the_place_of_the_rules_shows(placement):
    def change(runtime):
        def bind(i):  # forwards take what is newest, backwards what they should
            for u in runtime.schedule.units_at(i.stage):
                copy = runtime.schedule.copy(u, i.step if i.name == "forward" else i.version, False)
                runtime._waits.pop(("weights", u, copy), None)
                runtime.units[u].bind(copy)

        runtime._bind = bind

    assert differs(Case(3, 5, placement, change=change)) and not differs(Case(3, 5, placement))


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize(
    ("mistake", "threshold"), [("fresh readers", 2), ("stale readers", 2), ("version", 2), ("version", 5), ("start", 2)]
)
def test_a_correction_in_the_wrong_place_shows(placement, mistake, threshold):
    """Under K = 5 nobody reads fresh, and corrections overwrite the versions."""

    def change(runtime):
        def bind(i):
            schedule = runtime.schedule
            for u in schedule.units_at(i.stage):
                home = schedule.units[u][0]
                version, corrected = schedule.version(i.step, i.micro, home), schedule.corrected(i.micro, home)
                if mistake == "version":
                    version += corrected
                else:
                    corrected = mistake == "fresh readers"
                copy = schedule.copy(u, version, corrected)
                runtime._waits.pop(("weights", u, copy), None)
                runtime.units[u].bind(copy)

        if mistake == "start":  # step 1 has no correction of version 0
            for unit in runtime.units.values():
                unit.fill = lambda copy: None
        else:
            runtime._bind = bind

    case = Case(3, threshold, placement, correction=PREDICT, flush_after=(1,))
    assert differs(replace(case, change=change)) and not differs(case)


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("mistake", ["one more", "one less", "a tied sum"])
@pytest.mark.parametrize("threshold", [2, 5])
def test_a_prediction_from_other_gradients_shows(placement, mistake, threshold, monkeypatch):
    """From the sum of one micro-batch more or less, divided by the right number; or without what the last stage has."""
    rule = PipeSchedule.predictor
    case = Case(3, threshold, placement, tied=mistake == "a tied sum", correction=PREDICT, rounds=2)

    def change(runtime):
        tied_sums = runtime._tied_sums
        if mistake == "a tied sum":
            runtime._tied_sums = lambda i, unit, kind: [] if kind == "early" else tied_sums(i, unit, kind)
        for stage, owner in runtime.owners.items():
            owner._early_divisor = lambda step, stage=stage: (rule(runtime.schedule, stage) + 1) / 2

    assert not differs(case)
    if mistake != "a tied sum":
        by = 1 if mistake == "one more" else -1
        monkeypatch.setattr(PipeSchedule, "predictor", lambda self, stage: rule(self, stage) + by * (stage == 1))
    assert differs(replace(case, change=change))


@pytest.mark.parametrize("correction", [PREDICT, EXTRAPOLATE])
def test_skipped_first_steps_after_a_flush(correction):
    """The first prediction after a flush knows no clipping of the steps before it."""
    check(Case(3, 5, correction=correction, clip=0.05, infinite=2, flush_after=(1,), steps=7))

    def change(runtime):
        for owner in runtime.owners.values():
            owner.forget_last_update = lambda: None

    if correction is PREDICT:
        assert differs(Case(3, 5, correction=correction, clip=0.05, infinite=2, flush_after=(1,), steps=7, change=change))


@pytest.mark.parametrize("threshold", [1, 2, 3, 5])
def test_rounds_may_change_between_steps(threshold):
    """As a run that starts with as many: ``set_rounds`` flushes, and comes before the first step here, in the warm-up or not."""
    for placement, warmup_steps in (("pipeline", 0), ("pyramid", 0), ("pyramid", 1)):
        case = Case(3, threshold, placement, rounds=2, tied=True, correction=PREDICT, warmup_steps=warmup_steps)

        def change(runtime):
            runtime.set_rounds(1)
            runtime.set_rounds(2)

        assert not differs(replace(case, change=change))


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_flush_that_leaves_corrections_shows(placement):
    def change(runtime):
        runtime._publish = lambda i: None

    with pytest.raises(AssertionError):  # ``train`` compares every copy with the masters
        train(Case(3, 5, placement, correction=PREDICT, change=change))


@pytest.mark.parametrize("threshold", [2, 5])
def test_a_correction_that_is_left_out_shows(threshold):
    plain, corrected = (Case(3, threshold, correction=c) for c in (DelayCorrection(), PREDICT))
    assert farthest(train(plain)[0], oracle(corrected)[0]) > 1e-5


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_tied_gradient_that_is_left_out_shows(placement):
    def change(runtime):
        norm = runtime._norm

        def without(i):
            runtime._wait_for(("finished", 3, 2), i)
            if ("finished", 3, 2) in runtime._landing:
                runtime._landing["finished", 3, 2].zero_()
            norm(i)

        runtime._norm = without

    assert differs(Case(3, 2, placement, tied=True, change=change)) and not differs(Case(3, 2, placement, tied=True))


@pytest.mark.parametrize(
    "case",
    [
        Case(3, 2, clip=0.5, flush_after=(2,)),
        Case(2, 3, tied=True, clip=0.5),
        Case(3, 2, "single", rounds=2),
        Case(2, 1, "pyramid", dtype=torch.bfloat16, sum_dtype=torch.float32),
        Case(3, 2, "pyramid", clip=0.5, correction=PREDICT, flush_after=(2,), warmup_steps=1),
        Case(3, 5, dtype=torch.bfloat16, correction=EXTRAPOLATE, flush_after=(2,), warmup_steps=1),
        Case(2, 3, "single", clip=0.5, correction=PREDICT, infinite=2),
    ],
)
def test_offloading_changes_no_bit(case: Case):
    plain, told, _ = train(case)
    offloaded, retold, runtimes = train(replace(case, offload=True))
    assert told == retold and all(torch.equal(plain[n], offloaded[n]) for n in plain) and plain.keys() == offloaded.keys()
    assert all(type(o) is OffloadedOwner and o._grad_buffers for r in runtimes for o in r.owners.values())


def test_a_rank_that_fails_is_named():
    def change(runtime):
        if runtime.rank == 1:

            def broken(i):
                raise RuntimeError("broken on purpose")

            runtime._update = broken

    with pytest.raises((RuntimeError, HandoffError), match="broken on purpose|rank 1"):
        train(Case(3, 2, change=change))


def test_shapes_that_change_are_refused_in_a_sentence():
    from deepspeed_cdp.pipeline.runtime import PipeRuntime
    from support.local_ring import run_ranks
    from support.optimizers import two_groups
    from support.pipe_threads import batch, build, loss

    def work(rank, transport, dynamic):
        case, model = Case(2, 1), build(2)
        named = [x for units in [model.part(rank, case.schedule).units] for u in units for x in units[u]]
        runtime = PipeRuntime(
            case.schedule,
            rank,
            {rank: model.part(rank, case.schedule)},
            loss,
            two_groups(named),
            {p: n for n, p in named},
            transport,
            torch.device("cpu"),
            dynamic=dynamic,
        )
        runtime.train(iter([batch(0, 0), tuple(x[:2] for x in batch(0, 1))]))

    run_ranks(2, lambda rank, transport: work(rank, transport, True))
    with pytest.raises((ValueError, HandoffError), match="pass dynamic_shape=True to PipelineModule"):
        run_ranks(2, lambda rank, transport: work(rank, transport, False))
