"""The cyclic pipeline's timetable: every N up to 8, every K and every placement, dry-run; and timetables broken on purpose."""

import csv
import itertools
import re
from pathlib import Path

import pytest

from deepspeed_cdp.plan.pipeline_schedule import PLACEMENTS, Instruction, PipeSchedule, ProgramCursor
from deepspeed_cdp.plan.schedule import threshold
from deepspeed_cdp.verify.pipeline import ScheduleError, dry_run

GOLDEN = Path(__file__).parent.parent / "golden"


def ties(stages: int) -> tuple[tuple[int, ...], ...]:
    """First with last, and one group of three."""
    return {1: (), 2: ((0, 1),)}.get(stages, ((0, stages - 1), (1, stages // 2 + 1) if stages > 3 else (0, 1, 2)))


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("stages", range(1, 9))
def test_every_threshold_runs_with_blocking_sends_and_a_barrier_after_each_step(stages, placement):
    for k in range(2 * stages):
        exact = k in (0, 2 * stages - 1)
        dry_run(PipeSchedule(stages, k, 1, placement, ties(stages), exact, alone=k % 2 == 0), calls=3)


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("stages", range(1, 7))
def test_corrections_with_every_threshold(stages, placement):
    for k in range(2 * stages):
        exact, rounds = k in (0, 2 * stages - 1), 1 + (k + stages) % 2 * (stages < 5)
        for alone, predicts in itertools.product((False, True), repeat=2):
            dry_run(PipeSchedule(stages, k, rounds, placement, ties(stages), exact, alone, True, predicts), barriers=not alone)


@pytest.mark.parametrize("rounds", [1, 3])
@pytest.mark.parametrize("stages", range(1, 9))
def test_a_prediction_has_the_gradients_that_are_there(stages, rounds):
    """All of those before the stage's first stale forward of the next step. Where the rule stalls more would come by then."""
    for k in range(2 * stages):
        schedule = PipeSchedule(stages, k, rounds, "single", delay_corrected=True, predicts=True)
        at = {(i.name, i.stage, i.step, i.micro): key for t in range(3) for key, i in schedule.program(0, t)}
        for s in range(min(k, stages)):
            predicted, read = at["predict", s, 1, -1], at["forward", s, 2, 0]
            backwards = [at["backward", s, 1, q] for q in range(schedule.micro_batches)]
            assert sum(key < predicted for key in backwards) == (rounds - 1) * stages + s + 1
            assert sum(predicted < key < read for key in backwards) == schedule.stall // 2
            assert predicted[0] + schedule.stall == read[0]


@pytest.mark.parametrize("stages", range(1, 7))
def test_copies_of_weights(stages):
    """Stage s reads stale if K > s. With a correction it then keeps a third copy, unless nobody reads fresh."""
    for k in range(2 * stages):
        plain, corrected = PipeSchedule(stages, k), PipeSchedule(stages, k, delay_corrected=True)
        for s in range(stages):
            assert plain.copies(s) == (2 if k > s else 1)
            assert corrected.copies(s) == (1 if k <= s else 2 if k == 2 * stages - 1 else 3)


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("stages", [1, 2, 3, 4])
def test_accumulation_and_no_barriers(stages, placement):
    for k in range(2 * stages):
        dry_run(PipeSchedule(stages, k, 3, placement, ties(stages), False, alone=k % 2 == 1), calls=3, barriers=False)


@pytest.mark.parametrize("rule", ["cdp-v1", "cdp-v2"])
@pytest.mark.parametrize("stages", range(1, 9))
def test_passes_are_the_papers(stages, rule):
    """The single placement's passes at their logical times, with micro-batch q as the paper's worker q."""
    with (GOLDEN / f"schedule_n{stages}.csv").open() as file:
        rows = list(csv.DictReader(file))
    golden = {
        (*(int(row[k]) for k in ("time", "rank", "stage", "step")), row["pass"], int(row[f"version_{rule[4:]}"])) for row in rows
    }
    schedule = PipeSchedule(stages, threshold(rule, stages), placement="single")
    steps = 1 + max(int(row["step"]) for row in rows)
    ours = {
        (key[0], i.micro, i.stage, i.step, i.name[0].upper(), i.version)
        for t in range(steps)
        for key, i in schedule.program(0, t)
        if i.name in ("forward", "backward")
    }
    assert ours == golden


@pytest.mark.parametrize("stages", range(1, 9))
def test_activations_in_flight(stages):
    """A rank of the pyramid holds one micro-batch's, stage s of the pipeline N-s; one device at most (N+1)/2 models' worth."""
    for k in (stages - 1, 2 * stages - 1):
        assert dry_run(PipeSchedule(stages, k, 1, "pyramid")).activations == [1] * (stages * (stages + 1) // 2)
        assert dry_run(PipeSchedule(stages, k, 1, "pipeline")).activations == [stages - s for s in range(stages)]
        assert dry_run(PipeSchedule(stages, k, 1, "single")).activations[0] <= stages * (stages + 1) // 2


@pytest.mark.parametrize("stages", [2, 3, 5, 8])
def test_a_stage_never_rests_in_a_steady_step(stages):
    """Every position of every stage has a pass for K >= N-1; for smaller K exactly ``stall`` positions per step have none."""
    for k in range(2 * stages):
        schedule = PipeSchedule(stages, k)
        for rank in range(stages):
            passes = sorted(key[0] for t in range(4) for key, i in schedule.program(rank, t) if i.name in ("forward", "backward"))
            assert len(set(passes)) == len(passes)
            start, end = 2 * schedule.period, 3 * schedule.period
            resting = schedule.period - sum(start <= p < end for p in passes)
            assert resting == schedule.stall == max(0, 2 * (stages - 1 - k)), (k, rank)


def test_the_stall_of_dp_is_that_of_1f1b():
    for stages in range(1, 9):
        for rounds in (1, 2, 5):
            schedule = PipeSchedule(stages, 0, rounds)
            assert schedule.idle == pytest.approx((stages - 1) / (schedule.micro_batches + stages - 1))


def test_the_pictures_of_the_docs():
    text = (Path(__file__).parents[2] / "docs" / "pipeline.md").read_text()
    for placement in PLACEMENTS:
        assert PipeSchedule(3, 2, placement=placement).grid() in text, placement
    assert PipeSchedule(3, 0).grid() in text


def test_the_table_of_the_docs_is_what_was_recorded():
    from benchmarks.pipeline import table

    root = Path(__file__).parents[2]
    recorded = table(root / "benchmarks" / "results" / "2026-11-28_cpu_pipeline" / "rows.jsonl")
    assert recorded in (root / "docs" / "pipeline.md").read_text()


def test_a_call_takes_its_own_data_only():
    """Every forward's load is in the call of its step: an iterator is asked for one step's micro-batches per call."""
    for placement in PLACEMENTS:
        schedule = PipeSchedule(4, 3, 2, placement)
        for rank in range(schedule.ranks):
            cursor = ProgramCursor(schedule, rank)
            for call in range(4):
                loads = [i for i in cursor.call() if i.name == "load" and i.stage == 0]
                assert {i.step for i in loads} <= {call}
                assert [i.micro for i in loads] == sorted(i.micro for i in loads)
            assert not [i for i in cursor.rest() if i.name == "load" and i.stage == 0]


def test_instructions_say_what_they_are():
    assert str(Instruction("forward", 1, 4, 2, 3)) == "forward(stage=1, step=4, micro=2, version=3)"


# ---- broken on purpose ------------------------------------------------------------------------------------------------------
def broken(schedule: PipeSchedule, change) -> str:
    with pytest.raises(ScheduleError) as caught:
        dry_run(schedule, change=change)
    return str(caught.value)


def without(name: str, **fields):
    """Leave out the first instruction that fits, on every rank and call."""

    def change(rank, instructions):
        at = next(
            (n for n, i in enumerate(instructions) if i.name == name and all(getattr(i, k) == v for k, v in fields.items())), None
        )
        return instructions if at is None else [*instructions[:at], *instructions[at + 1 :]]

    return change


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (without("backward", step=1), "does not fit"),
        (without("load", step=1), "has no input"),
        (without("update", step=0), "lacks version 1"),
        (without("norm", step=1), "comes before its norm"),
        (without("send_activation", step=1), "deadlock"),
        (without("recv_sum", step=1), "deadlock"),
        (without("send_finished", step=0), "deadlock"),
    ],
)
def test_missing_instructions_are_found(change, words):
    assert words in broken(PipeSchedule(3, 2, 1, "pyramid", ((0, 2),)), change)


def test_a_wrong_version_is_found():
    def change(rank, instructions):
        return [i._replace(version=i.version + 1) if i.name == "forward" and i.version < i.step else i for i in instructions]

    assert "does not say the rule's version" in broken(PipeSchedule(3, 2), change)


def test_a_tied_sum_that_is_not_kept_is_found():
    assert "the sum of unit 3 from stage 2 holds" in broken(PipeSchedule(3, 2, 1, "single", ((0, 2),)), without("send_finished"))


def test_an_update_that_comes_too_early_is_found():
    """Moved in front of the last backward that reads what it overwrites."""

    def change(rank, instructions):
        for n, i in enumerate(instructions):
            if i.name == "update" and i.step == 1:
                at = max((m for m in range(n) if instructions[m].name == "backward"), default=n)
                norm = next(m for m in range(n) if instructions[m].name == "norm" and instructions[m].step == 1)
                if at < norm:
                    moved = [instructions[norm], i]
                    return [*instructions[:at], *moved, *(x for x in instructions[at:] if x not in moved)]
        return instructions

    assert "from stage 0 holds [(1, 0)]" in broken(PipeSchedule(2, 1), change)


def test_one_version_where_two_are_needed_is_found(monkeypatch):
    monkeypatch.setattr(PipeSchedule, "copies", lambda self, unit: 1)
    assert "is in use by" in broken(PipeSchedule(3, 2), None)


def test_messages_in_another_order_are_found():
    """Rank 0 sends before it takes what its neighbour sends first: with sends that block, no rank can continue."""

    def change(rank, instructions):
        if rank:
            return instructions
        for n, i in enumerate(instructions):
            if i.name == "recv_grad":
                at = next((m for m in range(n + 1, len(instructions)) if instructions[m].name == "send_activation"), None)
                if at is not None:
                    return [*instructions[:n], *instructions[n + 1 : at + 1], i, *instructions[at + 1 :]]
        return instructions

    text = broken(PipeSchedule(3, 2), change)
    assert "deadlock" in text or "has no gradient" in text


# ---- corrections, broken on purpose -----------------------------------------------------------------------------------------
def corrected(k: int, placement: str = "pyramid", predicts: bool = False) -> PipeSchedule:
    return PipeSchedule(3, k, 1, placement, ((0, 2),), delay_corrected=True, predicts=predicts)


def swapped(name: str, from_step: int = 2):
    """Versions and their corrections change places in these instructions."""

    def change(rank, instructions):
        return [i._replace(corrected=not i.corrected) if i.name == name and i.version >= from_step else i for i in instructions]

    return change


@pytest.mark.parametrize("predicts", [False, True])
@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("k", [1, 2, 4, 5])
@pytest.mark.parametrize("name", ["forward", "backward"])
def test_passes_that_say_versions_for_corrections_are_found(name, k, placement, predicts):
    assert "does not say the rule's version" in broken(corrected(k, placement, predicts), swapped(name))


@pytest.mark.parametrize("predicts", [False, True])
@pytest.mark.parametrize("k", [2, 5])
@pytest.mark.parametrize("name", ["send_weights", "recv_weights"])
def test_messages_with_versions_for_corrections_are_found(name, k, predicts):
    text = broken(corrected(k, predicts=predicts), swapped(name))
    assert "holds" in text and "correction of version 2" in text or "corrected" in text, text


@pytest.mark.parametrize("predicts", [False, True])
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_rule_that_takes_corrections_for_versions_is_found(placement, predicts, monkeypatch):
    rule = PipeSchedule.corrected
    monkeypatch.setattr(PipeSchedule, "corrected", lambda self, micro, stage: not rule(self, micro, stage))
    assert "does not say the rule's version" in broken(corrected(2, placement, predicts), None)


@pytest.mark.parametrize("predicts", [False, True])
@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize(("k", "copies"), [(2, 2), (2, 1), (5, 1)])
def test_fewer_copies_than_corrections_need_are_found(k, copies, placement, predicts, monkeypatch):
    monkeypatch.setattr(PipeSchedule, "copies", lambda self, unit: copies)
    text = broken(corrected(k, placement, predicts), None)
    assert any(words in text for words in ("is in use by", "lacks", "holds the correction")), text


@pytest.mark.parametrize("predicts", [False, True])
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_flush_that_leaves_corrections_is_found(placement, predicts):
    text = broken(corrected(5, placement, predicts), without("publish"))
    assert "without version 4" in text or f"holds the correction of version {2 if predicts else 4}" in text


@pytest.mark.parametrize("predicts", [False, True])
def test_only_a_flush_sends_versions_that_nobody_reads(predicts):
    cursors = [ProgramCursor(corrected(5, predicts=predicts), rank) for rank in range(6)]
    calls = [i for cursor in cursors for _ in range(3) for i in cursor.call()]
    ends = [i for cursor in cursors for i in cursor.rest()]
    assert {i.corrected for i in calls if i.name == "send_weights"} == {True}
    assert [i.version for i in ends if i.name == "send_weights" and not i.corrected] == [3] * 6


# ---- predictions, broken on purpose -----------------------------------------------------------------------------------------
@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("k", [1, 2, 4, 5])
def test_a_prediction_from_another_number_of_gradients_is_found(k, placement, monkeypatch):
    """With one more it also comes after the first pass that reads it, where nothing stalls."""
    rule, schedule = PipeSchedule.predictor, PipeSchedule(3, k, 2, placement, ((0, 2),), delay_corrected=True, predicts=True)
    monkeypatch.setattr(PipeSchedule, "predictor", lambda self, stage: rule(self, stage) - 1)
    assert "the sum of unit 0 from stage 0 holds [(1, 0), (1, 1), (1, 2)]" in broken(schedule, None)
    monkeypatch.setattr(PipeSchedule, "predictor", lambda self, stage: rule(self, stage) + 1)
    assert re.search("the sum of unit 0|deadlock|lacks the correction of version 1", broken(schedule, None))


def later(name: str, past: str, stage: int):
    """The first such instruction of a stage comes after the next ``past``."""

    def change(rank, instructions):
        at = next((n for n, i in enumerate(instructions) if (i.name, i.stage) == (name, stage)), len(instructions))
        to = next((n for n, i in enumerate(instructions[at:], at) if (i.name, i.stage) == (past, stage)), at)
        return [*instructions[:at], *instructions[at + 1 : to + 1], *instructions[at : at + 1], *instructions[to + 1 :]]

    return change


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize(
    ("k", "change", "words"),
    [
        (2, without("predict", step=1), "lacks the correction of version 1|holds nothing"),
        (5, without("predict", step=2), "lacks the correction of version 2|holds version 0"),
        (2, without("send_early", step=1), "the sum of unit 3 from stage 2 holds|deadlock"),
        (2, later("predict", "backward", 0), "lacks the correction of version 1|holds nothing"),
        (5, later("predict", "norm", 2), r"the sum of unit 2 from stage 2 holds \[\]"),
        (5, without("update", step=1, stage=1), "predicts from version 1"),
    ],
)
def test_predictions_at_the_wrong_time_are_found(placement, k, change, words):
    assert re.search(words, broken(corrected(k, placement, True), change))


@pytest.mark.parametrize("version", [0, 2])
def test_a_prediction_of_another_version_is_found(version):
    def change(rank, instructions):
        return [i._replace(version=version) if i.name == "predict" and i.step == 1 else i for i in instructions]

    assert "predicts from version 1" in broken(corrected(2, "pipeline", True), change)


def test_nothing_is_predicted_in_the_first_step():
    for placement in PLACEMENTS:
        schedule = corrected(5, placement, True)
        names = {i.name for rank in range(schedule.ranks) for _, i in schedule.program(rank, 0)}
        assert not names & {"predict", "send_early", "recv_early"}
