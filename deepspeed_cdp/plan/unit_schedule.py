"""The schedule of units: when each unit's forward and backward run inside a round, in logical time."""

import sys
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
            default only the last units stay, whose backward begins within ``prefetch_units`` passes.
        rings: number of rings that average their gradients (cross_ring.py); all have this plan.
        prefetch_units: a rank pulls a unit so many passes before it needs it, or fewer if the model has few units.
        delay_corrected: stale readers read corrections (delay_correction.py).
        predicts: these are predictions, made from running sums while the step's later ranks still compute.
    """

    schedule: Schedule
    units: tuple[Unit, ...]
    persistent: Unit | None = None
    keep_after_forward: bool = False
    rings: int = 1
    prefetch_units: int = 2
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
        return self._members[stage]

    @cached_property
    def _members(self) -> tuple[tuple[int, ...], ...]:
        found: list[list[int]] = [[] for _ in range(self.schedule.ranks)]
        for i in self.every_unit:
            found[self.unit(i).stage].append(i)
        return tuple(map(tuple, found))

    def unit(self, index: int) -> Unit:
        """The unit with this index, which may be PERSISTENT."""
        unit = self.persistent if index == PERSISTENT else self.units[index]
        assert unit is not None
        return unit

    def kept(self, index: int) -> bool:
        """Whether the unit's parameters stay on a rank from its forward to its backward, and so are pulled once a round.

        Stage 0 never stays: its parameters are pulled before the round begins, while the round before still uses its own
        (docs/algorithm.md#parameters-that-stay-for-the-backward).
        """
        if index == PERSISTENT:
            return False
        after = len(self.units) - 1 - index  # units between its forward and its backward
        return self.units[index].stage >= 1 if self.keep_after_forward else 2 * after < self.ahead

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
        """Ticks per position of the schedule, such that every unit of a stage takes an even number of ticks."""
        counts = [0] * self.schedule.ranks
        for u in self.units:
            counts[u.stage] += 1
        return 2 * lcm(*counts)

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

    @cached_property
    def ahead(self) -> int:
        """Passes from a pull to its use: ``prefetch_units``, such that every place is free before its next use."""
        first_stage = sum(unit.stage == 0 for unit in self.units)
        return min(self.prefetch_units, max(2, len(self.units) - 1), 2 * first_stage if self.keep_after_forward else sys.maxsize)

    def pull_ticks(self, unit: int, backward: bool) -> int:
        """Ticks from the start of the round to the pull for this pass, ``ahead`` passes before it; may be negative.

        Persistent parameters are pulled with the first unit.
        """
        number = 0 if unit == PERSISTENT else self._numbers[unit, backward]
        rounds, before = divmod(number - self.ahead, len(self.visits))
        return rounds * self.round_ticks + self.spans[self.visits[before]][0]

    @cached_property
    def _numbers(self) -> dict[Visit, int]:
        return {visit: number for number, visit in enumerate(self.visits)}

    def grad_ticks(self, unit: int) -> tuple[int, int, int]:
        """Ticks from the start of the round to the pull of the unit's running sum, to its use, and to its end.

        A rank adds to the sum of the persistent parameters at the end of its round, as if in the last pass.
        """
        start, end = self.spans[self.visits[-1]] if unit == PERSISTENT else self.spans[unit, True]
        number = len(self.visits) - 1 if unit == PERSISTENT else self._numbers[unit, True]
        pull = self.spans[self.visits[max(number - self.ahead, 0)]][0]
        # the rank before ends two positions earlier
        return min(max(pull, end - 2 * self.scale + 1), start), start, end

    def sum_finished(self, step: int, unit: int) -> int:
        """Ticks at which the unit's gradient sum is finished: the end of the last micro-batch's backward."""
        s = self.schedule
        return s.start(step, s.rounds - 1, s.ranks - 1) * self.scale + self.spans[unit, True][1]

    # ---- predictions ----------------------------------------------------------------------------------------------------
    def is_predicted(self, stage: int) -> bool:
        """Whether stale readers of the stage read a prediction."""
        return self.predicts and self.schedule.is_read_stale(stage)

    def predict_time(self, step: int, unit: int) -> int:
        """Ticks at which the unit's version step + 1 is predicted: when rank 0 begins to read the stage, or a tick later.

        That is one position, at most, after the predictor has added to the sum, and before the next rank has. Where the rule
        stalls, rank 0 reads later than that.
        """
        s, stage, persistent = self.schedule, self.unit(unit).stage, unit == PERSISTENT
        first = next(i for i in self.members(stage) if i != PERSISTENT)
        read = s.start(step + 1, 0, 0) * self.scale + (0 if persistent else self.spans[first, False][0] + (unit != first))
        added = s.start(step, s.rounds - 1, s.predictor(stage)) * self.scale + self.grad_ticks(unit)[2]
        return min(read, added + self.scale)

    def early_share(self, stage: int) -> float:
        """Micro-batches in the stage's early sum, by rounds: divides a sum of gradients of losses divided by the rounds."""
        return self.schedule.early_micro_batches(stage) / self.schedule.rounds
