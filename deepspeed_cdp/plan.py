"""The plan: what every rank sends, waits for and frees, in which order, as data (design §6, §7). Pure, no torch.

A rank's *program* is the list of its actions for one step, in logical order; the runtime only walks it. Programs repeat: every
step after the first since a flush has the same one.

Streams (each edge of each stream keeps its own order):

======  =============================================================================================
P, H    parameters relayed to the ring neighbour: units, held parameters
P0, H0  the same from the owner's published copy: offered as soon as it is published, taken by its first reader
G, GH   running gradient sums of units, of held parameters: rank r to r+1 (and N-1 to 0 between rounds)
O       finished gradient sums, rank N-1 to the owner
S       a few scalars, owner to owner: squared norms by stage, loss (design §9)
T       the finished squared norm, rank N-1 to every owner (dp and v1 only)
======  =============================================================================================

Regions: ``PG`` is a buffer for P, G and O (in_flight.py); ``H`` has two slots used in turn; ``V`` are the owned stage's published
versions.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from math import lcm
from typing import ClassVar, NamedTuple

from .in_flight import END, HELD, START, InFlight, layouts
from .layout import Layout, aligned
from .schedule import Schedule

ACROSS_BYTES = 16  # loss sum and count, which the owners of several rings add up beside the sums (rings.py)


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
    modules: tuple[str, ...] = ()  # their paths, in order of use; none for held parameters


class Post(NamedTuple):
    """A region that an action has freed, and the message that may land in it next."""

    stream: str
    src: int
    region: str
    offset: int
    nbytes: int
    ahead: int  # 0: a message of this step, 1: of the next
    round: int
    unit: int
    backward: bool
    origin: int = -1  # where it lies in the owner's published copy, on the streams P0 and H0
    version: int = 0  # which version that is, relative to the message's step


class Action(NamedTuple):
    """One thing a rank does. Printed as ``F2.1@14``: kind and unit, round, logical time."""

    time: int
    phase: int  # END or START
    order: int
    kind: str
    round: int
    unit: int
    backward: bool
    peer: int | None = None
    stream: str = ""
    region: str = ""
    offset: int = 0
    nbytes: int = 0
    version: int = 0  # relative to the program's step
    into: tuple[str, int, int] = ("", 0, 0)  # where a push lands: region, offset, round of the reader
    posts: tuple[Post, ...] = ()

    @property
    def key(self) -> tuple[int, int]:
        """Logical time with the phase; within a step, every wait refers to a smaller one."""
        return self.time, self.phase

    def __str__(self) -> str:
        unit = "held" if self.unit == HELD else f"unit {self.unit}"
        incoming = self.kind in ("RECEIVE", "TAKE", "APPLY", "READ", "SUM", "SUM_HELD", "AVERAGE", "NORM", "UPDATE")
        arrow = "" if self.peer is None else f" {'<-' if incoming else '->'} rank {self.peer}"
        where = "" if self.kind in ("NORM", "UPDATE", "TOTAL", "LET") else f" {'backward' if self.backward else 'forward'} {unit}"
        return f"{self.kind}{where}{arrow} (stream {self.stream or '-'}, round {self.round}, logical time {self.time})"


# Kinds, in the order they take at equal time and phase.
ORDER = {"DONE": 0, "PASS": 1, "SUM_HELD": 2, "PASS_HELD": 3, "DONE_HELD": 4,  # ends
         "AVERAGE": 5, "NORM": 6, "TOTAL": 7, "UPDATE": 8, "LET": 9, "OFFER": 10, "TAKE": 11, "APPLY": 12, "READ": 13,
         "RELAY": 14, "SUM": 15, "RECEIVE": 16, "SEND": 16}  # starts; the last two: see program.with_meetings; APPLY: replicas.py


@dataclass(frozen=True)
class Plan:
    """Everything that follows from the schedule and the sizes of the units; equal on all ranks.

    Attributes:
        schedule: who reads what when.
        units: in execution order.
        held: parameters kept through the whole round, as one more unit of stage 0, or None.
        keep_after_forward: keep the parameters of every stage but the first from the forward to the backward; else only those
            of the last two, with which no more bytes are in use at once (but what is laid out has a few more gaps).
        rings: how many average their sums (rings.py); all have this plan.
        sums_apart: finished sums lie behind what is in flight, not between, so that two rules can take turns (warmup.py); as they
            do anyway where a rule stalls or every rank keeps all parameters.
        room_for: the schedule whose messages buffers have room for, if not this one's (``under``).
    """

    schedule: Schedule
    units: tuple[Unit, ...]
    held: Unit | None = None
    keep_after_forward: bool = False
    rings: int = 1
    sums_apart: bool = False
    room_for: Schedule | None = None
    replicated: ClassVar[bool] = False  # whether every rank keeps all parameters, see replicas.py
    g_region: ClassVar[str] = "PG"  # where running sums lie
    o_region: ClassVar[str] = "PG"  # and finished ones

    def under(self, threshold: int) -> "Plan":
        """The same units and buffers under a rule with a smaller K, whose messages all find room in them."""
        assert threshold <= self.schedule.threshold and (self.sums_apart or not self.sums_between), (threshold, self)
        plan = replace(self, schedule=replace(self.schedule, threshold=threshold), room_for=self.room_for or self.schedule)
        if not self.replicated:  # replicas read where their plan says, which depends on the rule
            plan.__dict__["layouts"] = self.layouts
        return plan

    def __post_init__(self) -> None:
        stages = [u.stage for u in self.units]
        assert stages == sorted(stages) and set(stages) == set(range(self.schedule.ranks)), (
            "units run through the stages in order")
        assert self.held is None or self.held.stage == 0, "held parameters belong to stage 0"

    # ---- stages ---------------------------------------------------------------------------------------------------------
    @cached_property
    def stages(self) -> tuple[tuple[str, ...], ...]:
        """Per stage, the names of its trainable parameters; held ones come first, in stage 0."""
        names: list[list[str]] = [[] for _ in range(self.schedule.ranks)]
        for unit in (*([self.held] if self.held else []), *self.units):
            names[unit.stage].extend(unit.trainable)
        return tuple(map(tuple, names))

    def members(self, stage: int) -> tuple[int, ...]:
        """Indices of the stage's units, HELD first if it is there."""
        held = (HELD,) if self.held and stage == 0 else ()
        return held + tuple(i for i, u in enumerate(self.units) if u.stage == stage)

    def unit(self, index: int) -> Unit:
        """The unit with this index; HELD is one of them."""
        unit = self.held if index == HELD else self.units[index]
        assert unit is not None
        return unit

    def kept(self, index: int) -> bool:
        """Whether this unit's parameters stay on a rank from its forward to its backward, so that they are sent once a round.

        Stage N-1's second message would come before its first is done with, and stage N-2's just then. Stage 0 cannot be kept:
        its forward's parameters come two positions before the round begins, when the round before still has its own.
        """
        n = self.schedule.ranks
        return index != HELD and self.units[index].stage >= (1 if self.keep_after_forward else max(1, n - 2))

    def averaged(self, rank: int) -> tuple[int, ...]:
        """The owned units that are averaged (and, if nothing is clipped, updated) one by one as their sums come, not all in NORM.

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
            units = [i for i in self.members(stage) if i != HELD]
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
        stages = {stage for stage in range(s.ranks) for step in (0, 1) for m in range(s.rounds)
                  if s.source(step, m, rank, stage) is not None}
        return tuple(v for v in self.messages if self.units[v[0]].stage in stages)

    @property
    def sums_between(self) -> bool:
        """Whether finished sums lie between what is in flight, not behind it."""
        return self.schedule.ranks > 1 and not (self.schedule.stalls or self.sums_apart or self.replicated)

    @cached_property
    def layouts(self) -> tuple[InFlight, ...]:
        """Of each rank's parameters and sums in flight, which share one buffer and fill each other's gaps."""
        return layouts(self)

    @cached_property
    def p_layouts(self) -> tuple[Layout, ...]:
        """Of each rank's parameters in flight."""
        return tuple(x.p for x in self.layouts)

    @cached_property
    def g_layouts(self) -> tuple[Layout, ...]:
        """Of each rank's sums in flight."""
        return tuple(x.g for x in self.layouts)

    def o_layout(self, stage: int) -> dict[int, int]:
        """Offsets of the units' finished sums in their owner's region ``o_region``."""
        flight = self.layouts[self.schedule.owner(stage)]
        if self.sums_between:
            return {i: at for (i, _), at in flight.o.offsets.items()}
        return {i: flight.p.nbytes + at for i, at in self.x_layout(stage)[0].items()}

    def x_layout(self, stage: int) -> tuple[dict[int, int], int]:
        """Offsets of the units' sums one behind the other, and the bytes of all."""
        return _stacked({i: self.unit(i).g_bytes for i in self.members(stage) if self.unit(i).g_bytes})

    def v_layout(self, stage: int) -> tuple[dict[int, int], int]:
        """Offsets of the units in one published copy of the stage, and its bytes."""
        return _stacked({i: self.unit(i).p_bytes for i in self.members(stage)})

    def copy_region(self, version: int) -> str:
        """The region in which owners publish this version (counted from the last flush)."""
        return f"V{version % self.copies}"

    def copy_layout(self, stage: int) -> tuple[dict[int, int], int, int]:
        """There: offsets of the stage's units, where the first one starts, and the bytes of all."""
        offsets, nbytes = self.v_layout(stage)
        return offsets, 0, nbytes

    def extents(self, stage: int) -> dict[str, int]:
        """Bytes of the regions that are addressed by offset, on the owner of ``stage``."""
        flight, behind = self.p_layouts[self.schedule.owner(stage)].nbytes, 0 if self.sums_between else self.x_layout(stage)[1]
        return {"PG": flight + behind, "V": self.v_layout(stage)[1]}

    @cached_property
    def copies(self) -> int:
        """Published copies the owners keep: 1 if every use of a version ends before the next one is published, else 2."""
        for stage in range(self.schedule.ranks):
            for i in self.members(stage):
                if any(use >= (self.made(3, i), START) for use in self._uses(3, i)):
                    return 2
        return 1

    def made(self, step: int, unit: int) -> int:
        """Ticks at which the owner may begin to write what this step makes of the unit."""
        stage = self.unit(unit).stage
        if unit in self.averaged(self.schedule.owner(stage)):
            return self.summed(step, unit)
        return self.schedule.update_time(step, stage) * self.scale

    def summed(self, step: int, unit: int) -> int:
        """Ticks at which the unit's gradient sum is finished: the last micro-batch's backward has ended."""
        s = self.schedule
        return s.start(step, s.rounds - 1, s.ranks - 1) * self.scale + self.spans[unit, True][1]

    def _uses(self, version: int, unit: int) -> list[tuple[int, int]]:
        """Keys by which a published version is out of use: its first readers have let it in, the owner's own reads have ended."""
        s, uses, stage = self.schedule, [], self.unit(unit).stage
        last = 0 if unit == HELD else self.spans[unit, not self.kept(unit)][0]  # the last pass that takes it, two positions ahead
        for step in (version, version + 1):
            for v, m, r in s.first_readers(step, stage):
                if v == version:
                    uses.append(((s.start(step, m, r) - 2) * self.scale + last, START))
            for m in range(s.rounds):
                r = s.owner(stage)
                if s.version(step, m, r, stage) == version and s.source(step, m, r, stage) is None:
                    end = 2 * s.ranks * self.scale if unit == HELD else self.spans[unit, True][1]
                    uses.append((s.start(step, m, r) * self.scale + end, END))
        return uses

    # ---- closed forms ---------------------------------------------------------------------------------------------------
    def received_bytes(self, rank: int) -> dict[str, int]:
        """Bytes that ``rank`` receives in a steady step, by kind: F, B (parameters), G (sums on the ring), O (finished sums).

        With Psi the bytes of all parameters and N ranks: F = k (Psi minus the stages it reads from its own copy), B the same
        without stages that are kept after the forward, G = k Psi (rank 0: (k - 1) Psi), O = the owned stage (rank N-1: 0). Held
        parameters have no B.
        """
        s, total = self.schedule, {"F": 0, "B": 0, "G": 0, "O": 0}
        for i in (*([HELD] if self.held else []), *range(len(self.units))):
            unit = self.unit(i)
            remote = sum(s.source(1, m, rank, unit.stage) is not None for m in range(s.rounds))
            total["F"] += remote * unit.p_bytes
            total["B"] += 0 if i == HELD or self.kept(i) else remote * unit.p_bytes
            if s.ranks > 1:
                total["G"] += (s.rounds - (rank == 0)) * unit.g_bytes
                total["O"] += unit.g_bytes if rank == s.owner(unit.stage) and rank != s.ranks - 1 else 0
        return total

    @cached_property
    def regions(self) -> dict[str, int]:
        """Bytes of every region, the same on all ranks (one-sided transports address a peer's memory by offset): ``PG``;
        ``H0``, ``H1``: held parameters of two rounds in turn; ``GH``; ``V0`` (and ``V1``): published versions; ``S``: scalars;
        ``X``: sums of other rings, and of all of them.
        """
        stages = range(self.schedule.ranks)
        sizes = {"PG": max(self.extents(s)["PG"] for s in stages)}
        if self.held and self.schedule.ranks > 1:
            sizes |= {"H0": aligned(self.held.p_bytes), "H1": aligned(self.held.p_bytes), "GH": aligned(self.held.g_bytes)}
        sizes |= {f"V{c}": max(self.v_layout(s)[1] for s in stages) for c in range(self.copies)}
        return self.with_small(sizes)

    def with_small(self, sizes: dict[str, int]) -> dict[str, int]:
        """And the regions that every kind of plan has: ``X``, and ``S`` with room for a vector of scalars and for the total."""
        if self.rings > 1:
            sizes["X"] = max(self.x_layout(s)[1] for s in range(self.schedule.ranks)) + aligned(ACROSS_BYTES)
        return sizes | {"S": 2 * aligned(8 * self.scalars)}

    @property
    def scalars(self) -> int:
        """Numbers in the vector that goes round once a step (scalars.py)."""
        return 2 * self.schedule.ranks + 5

    def memory(self) -> dict[str, int]:
        """Bytes that the runtime itself allocates on each rank; masters and optimizer state come on top.

        ``in flight`` parameters and sums (about 2 stages each), ``sums`` that have a place of their own (finished ones unless
        they lie between those, and those of other rings), ``published`` copies (about a stage each), a few ``scalars``.
        """
        kinds = {"P": "in flight", "G": "in flight", "H": "in flight", "X": "sums", "V": "published", "S": "scalars"}
        total = dict.fromkeys(kinds.values(), 0)
        for name, nbytes in self.regions.items():
            total[kinds[name[0]]] += nbytes
        apart = 0 if self.sums_between else self.regions["PG"] - max(x.nbytes for x in self.p_layouts)
        return total | {"in flight": total["in flight"] - apart, "sums": total["sums"] + apart}


def _stacked(sizes: dict[int, int]) -> tuple[dict[int, int], int]:
    offsets, total = {}, 0
    for i, nbytes in sizes.items():
        offsets[i], total = total, total + aligned(nbytes)
    return offsets, total

