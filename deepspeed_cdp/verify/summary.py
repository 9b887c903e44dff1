"""The dry-run as the engine and the command line start it: its cost estimated first, its result in one line."""

import time
from collections.abc import Iterable
from typing import NamedTuple

from deepspeed_cdp.plan.pipeline_schedule import PipeSchedule, ProgramCursor
from deepspeed_cdp.plan.plan import Plan
from deepspeed_cdp.plan.program import build, few_rounds
from deepspeed_cdp.verify import check, cross_ring, pipeline

STEPS = 4
RING_WAYS = 3  # pushes do not block; pushes block; a barrier after each step
PIPELINE_WAYS = 2  # without and with a barrier after each step
AT_START = 50_000  # actions that a dry-run at deepspeed.initialize may have: well under a second


class Summary(NamedTuple):
    """A dry-run that found nothing wrong."""

    actions: int
    steps: int
    ways: int
    seconds: float

    def __str__(self) -> str:
        return f"dry-run: {self.actions:,} actions, {self.steps} steps, {self.ways} ways, {self.seconds:.2f} s: OK"


def estimated_actions(plan: Plan) -> int:
    """Actions of the dry-run of a plan, from rank 0's program: others have about as many."""
    return _runs(plan) * plan.schedule.ranks * len(build(few_rounds(plan), 0, False)) * STEPS


def _runs(plan: Plan) -> int:
    """How often a rank's programs are run: with several rings, those of one ring alone and those of all rings together."""
    return RING_WAYS * (1 if plan.rings == 1 else 1 + plan.rings)


def _actions(plan: Plan) -> int:
    ranks = range(plan.schedule.ranks)
    return _runs(plan) * sum(len(build(plan, r, True)) + (STEPS - 1) * len(build(plan, r, False)) for r in ranks)


def check_rings(plans: Iterable[Plan], sequence: int = 1) -> Summary:
    """Dry-run the plans that take turns in a training run.

    Of a plan with many rounds it runs the program with few rounds. The executor runs the same one, and repeats two equal rounds.

    Args:
        sequence: ranks of a sequence group, which work in lock-step.
    Raises:
        PlanError: naming rank, step and action.
    """
    began, actions = time.perf_counter(), 0
    for plan in map(few_rounds, plans):
        check.validate(plan, STEPS)
        if plan.rings > 1:
            cross_ring.validate(plan, STEPS, groups=cross_ring.lock_step(plan, sequence) if sequence > 1 else ())
        actions += _actions(plan)
    return Summary(actions, STEPS, RING_WAYS, time.perf_counter() - began)


def pipeline_actions(schedule: PipeSchedule) -> int:
    """Instructions of the dry-run of a pipeline's schedule."""
    cursors = [ProgramCursor(schedule, rank) for rank in range(schedule.ranks)]
    return PIPELINE_WAYS * sum(len(cursor.call()) for cursor in cursors for _ in range(STEPS))


def check_pipelines(schedules: Iterable[PipeSchedule]) -> Summary:
    """Dry-run the schedules that take turns in the training run of a pipeline.

    Raises:
        ScheduleError: naming rank and instruction.
    """
    began, actions = time.perf_counter(), 0
    for schedule in schedules:
        for barriers in (False, True):
            pipeline.dry_run(schedule, STEPS, barriers)
        actions += pipeline_actions(schedule)
    return Summary(actions, STEPS, PIPELINE_WAYS, time.perf_counter() - began)
