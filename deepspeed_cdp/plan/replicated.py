"""Plans for ZeRO stages 0, 1 and 2: every rank keeps all parameters, and only gradient sums and new versions travel (design §12,
the paper's multi-GPU DP + cyclic). 2 Psi a step. Pure, no torch.

A rank's *replica* holds each stage at the version that its present pass reads, and changes it once a step: after the last pass
that reads the old version, before the first one that reads the new. For N = 3, cdp-v2, steps 2 and 3, by ``grid``: F1 and B1 are
the forward and backward at version 1, ``~`` is where nobody reads and the next version may land::

    rank 0  stage 0  F1             B1 F2             B2
            stage 1  ~  F1       B1 ~  ~  F2       B2
            stage 2  ~  ~  F2 B2 ~  ~  ~  ~  F3 B3
    rank 2  stage 0  F2             B2 F3             B3
            stage 1  ~  F2       B2 ~  ~  F3       B3
            stage 2  ~  ~  F2 B2 ~  ~  ~  ~  F3 B3

Who gives version v of a stage to whom: its readers, in the order in which they need it, are neighbours on the ring (under v2
from the owner on: owner, ..., N-1, 0, ..., owner-1), so each passes it on when it begins to read it. The first, if it is not the
owner, takes it from the owner's published version; the owner needs nobody's.

Where it lands: between the last backward and the next forward of stage s lie 2s positions, and a message is under way for two.
So stages from 1 on land in the replica itself, credited when stage 1's last backward ends. Stage 0 and persistent
parameters, which are
read again at once, land in a buffer of their size (region ``L``), credited a round before, and are copied into place.

======  ====================================================================================================
R       the replica: all parameters
L       stage 0 and persistent parameters on their way
V0      the owned stage's published version, if its owner still reads the old one then (K >= N); else it updates in place
======  ====================================================================================================

A flush brings all replicas to the newest version (``version 0`` of the next step), so step 0 receives nothing. In step 1 stale
stages receive version 0 again, so that all later steps have one program.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar

from deepspeed_cdp.plan.actions import Action, Kind, Post
from deepspeed_cdp.plan.buffer_layout import BufferLayout, running_sums
from deepspeed_cdp.plan.builder import Builder
from deepspeed_cdp.plan.constants import END, PERSISTENT, RELEASES, START
from deepspeed_cdp.plan.interval_alloc import EMPTY, StreamLayout, aligned, laid_out, placed
from deepspeed_cdp.plan.plan import Plan
from deepspeed_cdp.plan.schedule import Schedule
from deepspeed_cdp.plan.unit_schedule import Unit


@dataclass(frozen=True)
class ReplicatedPlan(Plan):
    """A plan under which every rank keeps all parameters.

    Attributes:
        apart: owners publish into ``V0`` even where they could update in place; so that two rules can take turns
        (plan/warmup.py).
    """

    apart: bool = False
    replicated: ClassVar[bool] = True
    g_region: ClassVar[str] = "G"
    o_region: ClassVar[str] = "O"

    def under(self, threshold: int) -> "ReplicatedPlan":
        return replace(self, schedule=replace(self.schedule, threshold=threshold), apart=self.staged)

    # ---- who needs which version when, and from whom --------------------------------------------------------------------
    @cached_property
    def _needs(self) -> dict[tuple[int, int], tuple[int, int]]:
        """(rank, stage) -> (a, m): the rank first reads version v in round m of step v + a."""
        s = self.schedule
        return {
            (r, stage): next((step - 2, m) for step in (2, 3) for m in range(s.rounds) if s.version(step, m, r, stage) == 2)
            for r in range(s.ranks)
            for stage in range(s.ranks)
        }

    @cached_property
    def first_readers(self) -> tuple[int, ...]:
        """By stage, the rank that needs each version first."""
        ranks = range(self.schedule.ranks)
        return tuple(min(ranks, key=lambda r: (*self._needs[r, stage], r)) for stage in ranks)

    def applied(self, step: int, round: int, rank: int, stage: int) -> int | None:
        """The version that becomes the replica's before this micro-batch; None if it stays as it is."""
        ahead, m = self._needs[rank, stage]
        return step - ahead if step > 0 and m == round else None

    def giver(self, rank: int, stage: int) -> int | None:
        """Who hands the stage's versions to this rank; None for its owner."""
        owner = self.schedule.owner(stage)
        if rank == owner:
            return None
        return owner if self.first_readers[stage] == rank else (rank - 1) % self.schedule.ranks

    def handed(self, step: int, round: int, rank: int, stage: int) -> tuple[int, int, int] | None:
        """(version, steps ahead, round) of what the rank hands on when it begins to read in this round; None for nothing."""
        s, (ahead, m), after = self.schedule, self._needs[rank, stage], (rank + 1) % self.schedule.ranks
        if round != m or after in (rank, s.owner(stage), self.first_readers[stage]):
            return None
        version = step - ahead
        later, n = self._needs[after, stage]
        return (version, version + later - step, n) if version >= 0 and version + later > 0 else None

    def lands_apart(self, unit: int) -> bool:
        """Whether the unit's new versions land in ``L``: it is read again as soon as the old version is done with."""
        return self.unit(unit).stage == 0

    # ---- buffers --------------------------------------------------------------------------------------------------------
    def kept(self, index: int) -> bool:
        return index != PERSISTENT

    @cached_property
    def staged(self) -> bool:
        """Whether owners publish into ``V0``: one of them still reads the old version of its stage when the new one is made."""
        s = self.schedule
        if self.apart:
            return True
        for stage in range(s.ranks):
            rank = s.owner(stage)
            passes = 2 * s.ranks - (0 if self.persistent and stage == 0 else stage)
            ends = [
                (s.start(step, m, rank) + passes, END)
                for step in (2, 3)
                for m in range(s.rounds)
                if s.version(step, m, rank, stage) == 2
            ]
            if max(ends) > (s.update_time(2, stage), START):
                return True
        return False

    @property
    def copies(self) -> int:
        return 1

    @cached_property
    def replica(self) -> tuple[dict[int, int], tuple[int, ...], int]:
        """Offsets of all units (PERSISTENT included) in R, where each stage starts, and its bytes."""
        offsets: dict[int, int] = {}
        starts, total = [], 0
        for stage in range(self.schedule.ranks):
            inside, nbytes = self.v_layout(stage)
            offsets |= {i: total + at for i, at in inside.items()}
            starts.append(total)
            total += nbytes
        return offsets, tuple(starts), total

    @cached_property
    def layouts(self) -> tuple[BufferLayout, ...]:
        """Where each visit reads: in R, where nothing lands by this layout; and sums in flight."""
        reads = StreamLayout((), {v: self.replica[0][v[0]] for v in self.visits}, {}, 0)
        if self.schedule.ranks == 1:
            return (BufferLayout(reads, EMPTY, EMPTY),)
        sums = (running_sums(self),)
        return (
            BufferLayout(reads, *laid_out(sums, *placed(sums, 2 * self.round_ticks), RELEASES * len(self.visits)), EMPTY),
        ) * self.schedule.ranks

    def o_layout(self, stage: int) -> dict[int, int]:
        return self.x_layout(stage)[0]

    def copy_region(self, version: int) -> str:
        return "V0" if self.staged else "R"

    def copy_layout(self, stage: int) -> tuple[dict[int, int], int, int]:
        offsets, nbytes = self.v_layout(stage)
        start = 0 if self.staged else self.replica[1][stage]
        return {i: start + at for i, at in offsets.items()}, start, nbytes

    def place_of(self, unit: int) -> tuple[str, int]:
        """Region and offset where a new version of the unit lands on a rank that does not own it."""
        return ("L", self.v_layout(0)[0][unit]) if self.lands_apart(unit) else ("R", self.replica[0][unit])

    def extents(self, stage: int) -> dict[str, int]:
        return {
            "G": self.g_layouts[0].nbytes,
            "O": self.x_layout(stage)[1],
            "V": self.v_layout(stage)[1],
            "L": self.v_layout(0)[1],
            "R": self.replica[2],
        }

    @cached_property
    def regions(self) -> dict[str, int]:
        """Bytes of every region: ``R``, ``L`` and perhaps ``V0`` in the place of P, H and V."""
        stages = range(self.schedule.ranks)
        sizes = {"R": self.replica[2], "G": self.g_layouts[0].nbytes, "O": max(self.x_layout(s)[1] for s in stages)}
        if self.schedule.ranks > 1:
            sizes["L"] = self.v_layout(0)[1]
            sizes |= {"GH": aligned(self.persistent.g_bytes)} if self.persistent else {}
        sizes |= {"V0": max(self.v_layout(s)[1] for s in stages)} if self.staged else {}
        return self.with_small(sizes)

    def memory(self) -> dict[str, int]:
        """As ``Plan.memory``, with the ``replica``."""
        regions = self.regions
        return {
            "replica": regions["R"],
            "in flight": sum(regions.get(x, 0) for x in ("L", "G", "GH")),
            "sums": regions["O"] + regions.get("X", 0),
            "published": regions.get("V0", 0),
            "scalars": regions["S"],
        }

    def received_bytes(self, rank: int) -> dict[str, int]:
        """As ``Plan.received_bytes``: F = Psi minus the owned stage, once a step whatever the rounds; B = 0; G and O as ever."""
        units = [self.unit(i) for stage in range(self.schedule.ranks) for i in self.members(stage)]
        return {
            **super().received_bytes(rank),
            "B": 0,
            "F": sum(u.p_bytes for u in units if self.schedule.owner(u.stage) != rank),
        }


class ReplicaBuilder(Builder):
    """Programs for a ``ReplicatedPlan``. ``REFRESH_PARAM`` is the one new kind: this rank's replica of a unit gets its next
    version."""

    plan: ReplicatedPlan

    def initial_posts(self) -> tuple[Post, ...]:
        persistent = self.plan.persistent
        return (*self.posts("G", -1, None), *(self._persistent_grad_posts(0) if persistent else ()), *self.sum_posts(0))

    def persistent_posts(self, number: int) -> list[Post]:
        return []

    def _passes(self) -> Iterator[Action]:
        yield from super()._passes()
        if self.plan.staged:
            for m in range(self.schedule.rounds):
                yield from self._adopt(m)

    def _adopt(self, m: int) -> Iterator[Action]:
        """The owner's replica gets what it has published as soon as that is there and the old version out of use."""
        plan, s, stage = self.plan, self.schedule, self.schedule.owned(self.rank)
        ahead, round = self._place(m + 1)
        version = plan.applied(self.step + ahead, round, self.rank, stage)
        if version is None or round == 0 and self._made_late(version, ahead):
            return
        begin, made = s.start(self.step, m, self.rank) * plan.scale, (s.update_time(version - 1, stage) * plan.scale, START)
        for i in reversed(plan.members(stage)):
            end = begin + (2 * s.ranks * plan.scale if i == PERSISTENT else plan.spans[i, True][1])
            yield self._action(
                Kind.REFRESH_PARAM,
                *max((end, END), made),
                m,
                i,
                True,
                region="V",
                offset=plan.copy_layout(stage)[0][i],
                nbytes=plan.unit(i).p_bytes,
                version=version - self.step,
                into=("R", plan.replica[0][i], m),
            )

    def _made_late(self, version: int, ahead: int) -> bool:
        """Whether the owned stage's version is made only in the step (so many ahead) in which its owner reads it first."""
        s = self.schedule
        return s.update_time(version - 1, s.owned(self.rank)) >= s.start(self.step + ahead, 0, self.rank)

    def _read(self, time: int, m: int, i: int, backward: bool, offset: int) -> Iterator[Action]:
        plan, s, unit = self.plan, self.schedule, self.plan.unit(i)
        place, stage = dict(region="R", offset=plan.replica[0][i], nbytes=unit.p_bytes), unit.stage
        version = s.version(self.step, m, self.rank, stage) - self.step
        if backward:
            yield self._action(Kind.WAIT_PARAM, time, START, m, i, True, version=version, **place)
            return
        src, came = plan.giver(self.rank, stage), plan.applied(self.step, m, self.rank, stage) is not None
        landed = dict(zip(("region", "offset"), plan.place_of(i)), nbytes=unit.p_bytes) if came and src is not None else place
        if came and src is not None:
            stream = "P0" if plan.first_readers[stage] == self.rank else "P"
            yield self._action(
                Kind.REFRESH_PARAM,
                time,
                START,
                m,
                i,
                False,
                peer=src,
                stream=stream,
                version=version,
                into=("R", place["offset"], m),
                **landed,
            )
        elif came and plan.staged and m == 0 and self._made_late(self.step + version, 0):
            yield self._action(
                Kind.REFRESH_PARAM,
                time,
                START,
                m,
                i,
                False,
                region="V",
                offset=plan.copy_layout(stage)[0][i],
                nbytes=unit.p_bytes,
                version=version,
                into=("R", place["offset"], m),
            )
        begins = i == self._first_of_stage_1
        yield self._action(
            Kind.WAIT_PARAM,
            time,
            START,
            m,
            i,
            False,
            version=version,
            **place,
            posts=tuple(self._landings(m, True)) if begins else (),
        )
        if handed := plan.handed(self.step, m, self.rank, stage):
            yield self._action(
                Kind.FORWARD_PARAM,
                time,
                START,
                m,
                i,
                False,
                peer=(self.rank + 1) % s.ranks,
                stream="P",
                version=handed[0] - self.step,
                into=(*plan.place_of(i), handed[2]),
                **landed,
            )

    @property
    def _first_of_stage_1(self) -> int | None:
        return self.plan.members(1)[0] if self.schedule.ranks > 1 else None

    def done_posts(self, m: int, number: int) -> Iterator[Post]:
        """When stage 1's last backward is over, all stages from 1 on may be overwritten."""
        if self.plan.visits[number] == (self._first_of_stage_1, True):
            yield from self._landings(m, False)

    def _landings(self, m: int, apart: bool) -> Iterator[Post]:
        """What the ring neighbour hands on for the next micro-batch, in the order in which it is read."""
        ahead, round = self._place(m + 1)
        for i in ([PERSISTENT] if self.plan.persistent else []) + list(range(len(self.plan.units))):
            unit = self.plan.unit(i)
            src = self.plan.giver(self.rank, unit.stage)
            changes = self.plan.applied(self.step + ahead, round, self.rank, unit.stage) is not None
            if (
                changes
                and src is not None
                and self.plan.lands_apart(i) == apart
                and self.plan.first_readers[unit.stage] != self.rank
            ):
                region, offset = self.plan.place_of(i)
                yield Post("P", src, region, offset, unit.p_bytes, ahead, round, i, False)

    def _takes(self, step: int) -> Iterator[Action]:
        """As a first reader, let the owner's offers in: two positions before they are read, but not before they are made."""
        plan, s = self.plan, self.schedule
        for m in range(s.rounds):
            for i in ([PERSISTENT] if plan.persistent else []) + list(range(len(plan.units))):
                unit = plan.unit(i)
                version, src = plan.applied(step, m, self.rank, unit.stage), plan.giver(self.rank, unit.stage)
                if version is None or src is None or plan.first_readers[unit.stage] != self.rank:
                    continue
                made = s.update_time(version - 1, unit.stage)
                time = (s.start(step, m, self.rank) - 2) * plan.scale + (0 if i == PERSISTENT else plan.spans[i, False][0])
                time = max(time, made * plan.scale + 1)
                if made >= s.start(step, 0, src):  # in the owner's same step: this rank must have begun it too
                    time = max(time, s.start(step, 0, self.rank) * plan.scale)
                post = Post(
                    "P0",
                    src,
                    *plan.place_of(i),
                    unit.p_bytes,
                    step - self.step,
                    m,
                    i,
                    False,
                    plan.copy_layout(unit.stage)[0][i],
                    version - step,
                )
                yield self._action(Kind.PULL_PARAM, time, START, m, i, False, peer=src, stream="P0", posts=(post,))

    def _offered(self, version: int, time: int) -> Iterator[Action]:
        plan, stage = self.plan, self.schedule.owned(self.rank)
        reader = plan.first_readers[stage]
        ahead, m = plan._needs[reader, stage]
        if reader == self.rank or version + ahead == 0:
            return
        offsets, _, _ = plan.copy_layout(stage)
        for i in plan.members(stage):
            yield self._action(
                Kind.PUBLISH_PARAM,
                time,
                START,
                m,
                i,
                False,
                peer=reader,
                stream="P0",
                region=plan.copy_region(version)[0],
                offset=offsets[i],
                nbytes=plan.unit(i).p_bytes,
                version=version - self.step,
            )


def grid(schedule: Schedule, rank: int, steps: int = 2) -> str:
    """When this rank's replica of each stage changes version, from step 2 on: a row per stage, a column per logical time."""
    plan = ReplicatedPlan(schedule, tuple(Unit(str(s), s, (), (), 1, 1) for s in range(schedule.ranks)))
    start, end = schedule.start(2, 0, rank), schedule.start(2 + steps, 0, rank)
    rows = []
    for stage in range(schedule.ranks):
        reads = sorted(x for x in schedule.reads(2 + steps) if (x.rank, x.stage) == (rank, stage))
        cells = {x.time: f"{'B' if x.backward else 'F'}{x.version}" for x in reads}
        for before, after in zip(reads, reads[1:]):
            if not after.backward and plan.applied(after.step, after.round, rank, stage) is not None:
                cells |= {time: "~ " for time in range(before.time + 1, after.time)}
        rows.append(f"stage {stage}  " + " ".join(cells.get(time, "").ljust(2) for time in range(start, end)).rstrip())
    return "\n".join(rows)
