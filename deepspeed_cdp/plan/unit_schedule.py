"""The schedule at the granularity of units: logical time of each unit's passes inside a round. Pure, no torch."""

from dataclasses import dataclass
from functools import cached_property
from math import lcm
from typing import ClassVar

from deepspeed_cdp.plan.constants import PERSISTENT
from deepspeed_cdp.plan.schedule import Schedule


@dataclass(frozen=True)
class Unit:
    """What is handed off as one message.

    Attributes:
        name: module path, or the first and the last of several.
        stage: the stage it belongs to.
        trainable, frozen: names from ``named_parameters()``.
        p_bytes, g_bytes: bytes of its flat parameters and of its flat gradient sums.
    """

    name: str
    stage: int
    trainable: tuple[str, ...]
    frozen: tuple[str, ...]
    p_bytes: int
    g_bytes: int
    modules: tuple[str, ...] = ()  # their paths, in order of use; none for persistent parameters


@dataclass(frozen=True)
class UnitSchedule:
    """Who uses which unit when; the part of a ``Plan`` that needs no buffers.

    Attributes:
        schedule: who reads what when, by stage.
        units: in execution order.
        persistent: parameters kept through the whole round, as one more unit of stage 0, or None.
        keep_after_forward: keep the parameters of every stage but the first from the forward to the backward; else only those
            of the last two, with which no more bytes are in use at once (but what is laid out has a few more gaps).
        rings: how many average their sums (cross_ring.py); all have this plan.
        sums_apart: finished sums lie behind what is in flight, not between, so that two rules can take turns
        (plan/warmup.py); as they
            do anyway where a rule stalls or every rank keeps all parameters.
        room_for: the schedule whose messages buffers have room for, if not this one's (``Plan.under``).
    """

    schedule: Schedule
    units: tuple[Unit, ...]
    persistent: Unit | None = None
    keep_after_forward: bool = False
    rings: int = 1
    sums_apart: bool = False
    room_for: Schedule | None = None
    replicated: ClassVar[bool] = False  # whether every rank keeps all parameters, see replicated.py

    def __post_init__(self) -> None:
        stages = [u.stage for u in self.units]
        assert stages == sorted(stages) and set(stages) == set(range(self.schedule.ranks)), (
            "units run through the stages in order"
        )
        assert self.persistent is None or self.persistent.stage == 0, "persistent parameters belong to stage 0"

    # ---- stages ---------------------------------------------------------------------------------------------------------
    @cached_property
    def stages(self) -> tuple[tuple[str, ...], ...]:
        """Per stage, the names of its trainable parameters; persistent ones come first, in stage 0."""
        names: list[list[str]] = [[] for _ in range(self.schedule.ranks)]
        for unit in (*([self.persistent] if self.persistent else []), *self.units):
            names[unit.stage].extend(unit.trainable)
        return tuple(map(tuple, names))

    def members(self, stage: int) -> tuple[int, ...]:
        """Indices of the stage's units, PERSISTENT first if it is there."""
        persistent = (PERSISTENT,) if self.persistent and stage == 0 else ()
        return persistent + tuple(i for i, u in enumerate(self.units) if u.stage == stage)

    def unit(self, index: int) -> Unit:
        """The unit with this index; PERSISTENT is one of them."""
        unit = self.persistent if index == PERSISTENT else self.units[index]
        assert unit is not None
        return unit

    def kept(self, index: int) -> bool:
        """Whether this unit's parameters stay on a rank from its forward to its backward, so that they are sent once a round.

        Stage N-1's second message would come before its first is done with, and stage N-2's just then. Stage 0 cannot be kept:
        its forward's parameters come two positions before the round begins, when the round before still has its own.
        """
        n = self.schedule.ranks
        return index != PERSISTENT and self.units[index].stage >= (1 if self.keep_after_forward else max(1, n - 2))

    def averaged(self, rank: int) -> tuple[int, ...]:
        """The owned units that are averaged (and, if nothing is clipped, updated) one by one as their sums come, not all in
        GRAD_NORM.

        Not those of rank N-1: its own last backward finishes them, and ``engine.step()`` has not recorded the learning rate yet.
        Where updates wait for the norm of all stages, or for other rings, little would be gained.
        """
        s = self.schedule
        if rank == s.ranks - 1 or s.stalls or s.exact_norm or self.rings > 1:
            return ()
        return tuple(i for i in reversed(self.members(s.owned(rank))) if self.unit(i).g_bytes)

    # ---- logical time inside a round ------------------------------------------------------------------------------------
    @cached_property
    def scale(self) -> int:
        """Logical times are integers: one position of the schedule is this many ticks, so that every unit gets a whole number."""
        counts = [0] * self.schedule.ranks
        for unit in self.units:
            counts[unit.stage] += 1
        return lcm(*counts)

    @cached_property
    def spans(self) -> dict[tuple[int, bool], tuple[int, int]]:
        """(unit, backward) -> ticks from the round's start to the beginning and to the end of this pass."""
        spans: dict[tuple[int, bool], tuple[int, int]] = {}
        for stage in range(self.schedule.ranks):
            units = [i for i in self.members(stage) if i != PERSISTENT]
            width = self.scale // len(units)
            for j, i in enumerate(units):
                forward = stage * self.scale + j * width
                backward = (2 * self.schedule.ranks - 1 - stage) * self.scale + (len(units) - 1 - j) * width
                spans[i, False], spans[i, True] = (forward, forward + width), (backward, backward + width)
        return spans

    @cached_property
    def visits(self) -> tuple[tuple[int, bool], ...]:
        """(unit, backward) in the order of a round: forwards up, backwards down."""
        up = range(len(self.units))
        return tuple((i, False) for i in up) + tuple((i, True) for i in reversed(up))

    @cached_property
    def messages(self) -> tuple[tuple[int, bool], ...]:
        """The visits whose parameters are sent, in the order of a round."""
        return tuple((i, backward) for i, backward in self.visits if not (backward and self.kept(i)))

    # ---- buffers --------------------------------------------------------------------------------------------------------
    @property
    def round_ticks(self) -> int:
        """How long a round is."""
        return 2 * self.schedule.ranks * self.scale

    def received(self, rank: int) -> tuple[tuple[int, bool], ...]:
        """The messages that land in this rank's P buffer in some round; a stage whose published copy it reads itself has none."""
        s = self.room_for or self.schedule
        stages = {
            stage
            for stage in range(s.ranks)
            for step in (0, 1)
            for m in range(s.rounds)
            if s.source(step, m, rank, stage) is not None
        }
        return tuple(v for v in self.messages if self.units[v[0]].stage in stages)

    @property
    def sums_between(self) -> bool:
        """Whether finished sums lie between what is in flight, not behind it."""
        return self.schedule.ranks > 1 and not (self.schedule.stalls or self.sums_apart or self.replicated)

    def summed(self, step: int, unit: int) -> int:
        """Ticks at which the unit's gradient sum is finished: the last micro-batch's backward has ended."""
        s = self.schedule
        return s.start(step, s.rounds - 1, s.ranks - 1) * self.scale + self.spans[unit, True][1]
