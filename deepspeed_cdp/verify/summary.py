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


def estimated_actions(plan: Plan, tensor: int = 1) -> int:
    """Actions of the dry-run of a plan, from rank 0's program: others have about as many. ``tensor``: as of ``check_rings``."""
    return _runs(plan, tensor) * plan.schedule.ranks * len(build(few_rounds(plan), 0, False)) * STEPS


def _runs(plan: Plan, tensor: int) -> int:
    """How often a rank's programs are run: with several rings, those of one ring alone and those of all rings together."""
    rings = plan.rings * tensor
    return RING_WAYS * (1 if rings == 1 else 1 + rings)


def _actions(plan: Plan, tensor: int) -> int:
    ranks = range(plan.schedule.ranks)
    return _runs(plan, tensor) * sum(len(build(plan, r, True)) + (STEPS - 1) * len(build(plan, r, False)) for r in ranks)


def check_rings(plans: Iterable[Plan], sequence: int = 1, tensor: int = 1) -> Summary:
    """Dry-run the plans that take turns in a training run.

    Of a plan with many rounds it runs the program with few rounds. The executor runs the same one, and repeats two equal rounds.

    Args:
        sequence, tensor: ranks of a sequence group, or of a tensor group, which work in lock-step.
    Raises:
        PlanError: naming rank, step and action.
    """
    began, actions = time.perf_counter(), 0
    for plan in map(few_rounds, plans):
        check.validate(plan, STEPS)
        if plan.rings * tensor > 1:
            cross_ring.validate(plan, STEPS, groups=cross_ring.lock_step(plan, sequence, tensor), tensor=tensor)
        actions += _actions(plan, tensor)
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
