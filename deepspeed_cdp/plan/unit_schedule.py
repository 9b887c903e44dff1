"""The schedule of units: when each unit's forward and backward run inside a round, in logical time."""

from dataclasses import dataclass
from functools import cached_property
from math import lcm

from deepspeed_cdp.plan.constants import PERSISTENT
from deepspeed_cdp.plan.schedule import Schedule

Visit = tuple[int, bool]  # (unit, backward): one pass of one unit


@dataclass(frozen=True)
class Unit:
    """Modules whose parameters travel as one message.

    Attributes:
        name: module path; for several modules, the first and the last one.
        stage: the stage it belongs to.
        trainable, frozen: names from ``named_parameters()``.
        p_bytes, g_bytes: bytes of its flat parameters and of its flat gradient sum.
        modules: paths in order of use; empty for persistent parameters.
    """

    name: str
    stage: int
    trainable: tuple[str, ...]
    frozen: tuple[str, ...]
    p_bytes: int
    g_bytes: int
    modules: tuple[str, ...] = ()


@dataclass(frozen=True)
class UnitSchedule:
    """The part of a ``Plan`` that needs no buffers: which rank uses which unit when.

    Attributes:
        schedule: the same by stage.
        units: in execution order.
        persistent: parameters that stay on a rank for a whole round, as one more unit of stage 0; or None.
        keep_after_forward: the parameters of every stage but the first stay on a rank from its forward to its backward. By
            default only the last two stages stay, which takes no room, except for a few gaps.
        rings: number of rings that average their gradients (cross_ring.py); all have this plan.
        separate_sums: finished sums have a place of their own in the buffer, so that two rules can share it (warmup.py).
        layout_schedule: the buffers are laid out for this schedule's messages (``Plan.under``); None: for ``schedule``.
        delay_corrected: stale readers read corrections (delay_correction.py).
        predicts: these are predictions, made from running sums while the step's later ranks still compute.
    """

    schedule: Schedule
    units: tuple[Unit, ...]
    persistent: Unit | None = None
    keep_after_forward: bool = False
    rings: int = 1
    separate_sums: bool = False
    layout_schedule: Schedule | None = None
    delay_corrected: bool = False
    predicts: bool = False

    def __post_init__(self) -> None:
        stages = [u.stage for u in self.units]
        assert stages == sorted(stages) and set(stages) == set(range(self.schedule.ranks)), (
            "units run through the stages in order"
        )
        assert self.delay_corrected or not self.predicts, "predictions are corrections"
        assert self.persistent is None or self.persistent.stage == 0, "persistent parameters belong to stage 0"

    # ---- stages ---------------------------------------------------------------------------------------------------------
    @cached_property
    def stages(self) -> tuple[tuple[str, ...], ...]:
        """Per stage, the names of its trainable parameters; persistent ones come first, in stage 0."""
        names: list[list[str]] = [[] for _ in range(self.schedule.ranks)]
        for i in self.every_unit:
            names[self.unit(i).stage].extend(self.unit(i).trainable)
        return tuple(map(tuple, names))

    @cached_property
    def every_unit(self) -> tuple[int, ...]:
        """Indices of all units, PERSISTENT first if there is one."""
        return ((PERSISTENT,) if self.persistent else ()) + tuple(range(len(self.units)))

    def members(self, stage: int) -> tuple[int, ...]:
        """Indices of the stage's units, PERSISTENT first if it is one of them."""
        return tuple(i for i in self.every_unit if self.unit(i).stage == stage)

    def unit(self, index: int) -> Unit:
        """The unit with this index, which may be PERSISTENT."""
        unit = self.persistent if index == PERSISTENT else self.units[index]
        assert unit is not None
        return unit

    def kept(self, index: int) -> bool:
        """Whether the unit's parameters stay on a rank from its forward to its backward, and so are sent once a round.

        Without ``keep_after_forward``, stages N-1 and N-2 stay: their second message would have to land before, or just when,
        the first one is out of use. Stage 0 cannot stay: its parameters land two positions before the round begins, while the
        round before still uses its own (docs/algorithm.md#parameters-that-stay-for-the-backward).
        """
        n = self.schedule.ranks
        return index != PERSISTENT and self.units[index].stage >= (1 if self.keep_after_forward else max(1, n - 2))

    def eager_units(self, rank: int) -> tuple[int, ...]:
        """The owned units with a REDUCE_GRAD of their own, as each finished sum arrives; GRAD_NORM averages the others.

        Rank N-1 has none: its own last backward finishes the sums, before ``engine.step()`` has recorded the learning rate.
        Nor has any rank whose update waits for the norm of all stages or for other rings, where little would be gained.
        """
        s = self.schedule
        if rank == s.ranks - 1 or s.stalls or s.exact_norm or self.rings > 1:
            return ()
        return tuple(i for i in reversed(self.members(s.owned(rank))) if self.unit(i).g_bytes)

    # ---- logical time inside a round ------------------------------------------------------------------------------------
    @cached_property
    def scale(self) -> int:
        """Ticks per position of the schedule, such that every unit of a stage takes a whole number of ticks."""
        counts = [0] * self.schedule.ranks
        for u in self.units:
            counts[u.stage] += 1
        return lcm(*counts)

    @cached_property
    def spans(self) -> dict[Visit, tuple[int, int]]:
        """Ticks from the start of the round to the start and to the end of each pass."""
        spans: dict[Visit, tuple[int, int]] = {}
        for stage in range(self.schedule.ranks):
            units = [i for i in self.members(stage) if i != PERSISTENT]
            width = self.scale // len(units)
            for j, i in enumerate(units):
                forward = stage * self.scale + j * width
                backward = (2 * self.schedule.ranks - 1 - stage) * self.scale + (len(units) - 1 - j) * width
                spans[i, False], spans[i, True] = (forward, forward + width), (backward, backward + width)
        return spans

    @cached_property
    def visits(self) -> tuple[Visit, ...]:
        """The passes of a round in order: forwards up, backwards down."""
        up = range(len(self.units))
        return tuple((i, False) for i in up) + tuple((i, True) for i in reversed(up))

    @cached_property
    def messages(self) -> tuple[Visit, ...]:
        """The passes whose parameters are sent, in the order of a round."""
        return tuple((i, backward) for i, backward in self.visits if not (backward and self.kept(i)))

    # ---- buffers --------------------------------------------------------------------------------------------------------
    @property
    def round_ticks(self) -> int:
        """Length of a round."""
        return 2 * self.schedule.ranks * self.scale

    def received(self, rank: int) -> tuple[Visit, ...]:
        """The messages that this rank receives in some round; it receives none of a stage that it reads from its own copy."""
        s = self.layout_schedule or self.schedule
        stages = {
            stage
            for stage in range(s.ranks)
            for step in (0, 1)
            for m in range(min(s.rounds, 3))  # later rounds are as round 2
            if s.source(step, m, rank, stage) is not None
        }
        return tuple(v for v in self.messages if self.units[v[0]].stage in stages)

    @property
    def sums_in_gaps(self) -> bool:
        """Whether finished sums fill gaps between messages in flight, and have no place of their own."""
        return self.schedule.ranks > 1 and not (self.schedule.stalls or self.separate_sums)

    def sum_finished(self, step: int, unit: int) -> int:
        """Ticks at which the unit's gradient sum is finished: the end of the last micro-batch's backward."""
        s = self.schedule
        return s.start(step, s.rounds - 1, s.ranks - 1) * self.scale + self.spans[unit, True][1]

    # ---- predictions ----------------------------------------------------------------------------------------------------
    def is_predicted(self, stage: int) -> bool:
        """Whether stale readers of the stage read a prediction."""
        return self.predicts and self.schedule.is_read_stale(stage)

    def predict_time(self, step: int, unit: int) -> int:
        """Ticks at which the unit's version step + 1 is predicted. All early sums of its stage are there by then.

        The stage's first unit comes when rank 0 begins to read it, the others a tick later, so that they need not wait for each
        other's transfers; but none after its update.
        """
        s, stage, persistent = self.schedule, self.unit(unit).stage, unit == PERSISTENT
        first = next(i for i in self.members(stage) if i != PERSISTENT)
        read = s.start(step + 1, 0, 0) * self.scale + (0 if persistent else self.spans[first, False][0] + (unit != first))
        return min(read, s.update_time(step, 0) * self.scale if persistent else self.sum_finished(step, unit))

    def early_share(self, stage: int) -> float:
        """Micro-batches in the stage's early sum, by rounds: divides a sum of gradients of losses divided by the rounds."""
        s = self.schedule
        return ((s.rounds - 1) * s.ranks + s.predictor(stage) + 1) / s.rounds
