"""Plans for ZeRO stages 0, 1 and 2: every rank keeps all parameters, and only gradient sums and new versions travel.

This is the paper's multi-GPU DP + cyclic, with 2 Psi received per step and rank.

A rank's *replica* holds each stage at the version that its present pass reads. It changes the version once a step: after the last
pass that reads the old one, before the first pass that reads the new one. ``grid`` draws it, here for N = 3, cdp-v2, steps 2 and
3. F1 and B1 are the forward and backward at version 1. At ``~`` no pass reads the stage, and the next version may land::

    rank 0  stage 0  F1             B1 F2             B2
            stage 1  ~  F1       B1 ~  ~  F2       B2
            stage 2  ~  ~  F2 B2 ~  ~  ~  ~  F3 B3
    rank 2  stage 0  F2             B2 F3             B3
            stage 1  ~  F2       B2 ~  ~  F3       B3
            stage 2  ~  ~  F2 B2 ~  ~  ~  ~  F3 B3

Senders: the readers of a version, in the order in which they need it, are ring neighbours (under v2: owner, ..., N-1, 0, ...,
owner-1). Each forwards the version when it begins to read it. The first reader pulls it from the owner, if it is not the owner.

Destinations: 2s positions lie between the last backward and the next forward of stage s, and a message takes two. So stages from
1 on land in the replica itself; their credits come when stage 1's last backward ends. Stage 0 and persistent parameters are read
again at once. So they are double-buffered: the next version lands in region ``L``, with credits a round earlier, and is copied.

======  ====================================================================================================
R       the replica: all parameters
L       the next version of stage 0 and of persistent parameters
V0      the owned stage's published version, if its owner still reads the old one then (K >= N); otherwise the
        owner updates its replica in place
======  ====================================================================================================

A flush brings all replicas to the newest version (version 0 of the next step). So step 0 receives nothing, and in step 1 stale
stages receive version 0 again: this gives all later steps one program.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

from deepspeed_cdp.plan.actions import Action, Kind, Post
from deepspeed_cdp.plan.builder import Builder
from deepspeed_cdp.plan.constants import END, PERSISTENT, START
from deepspeed_cdp.plan.interval_alloc import aligned
from deepspeed_cdp.plan.plan import Plan
from deepspeed_cdp.plan.schedule import Schedule
from deepspeed_cdp.plan.unit_schedule import Unit, Visit


@dataclass(frozen=True)
class ReplicatedPlan(Plan):
    """A plan under which every rank keeps all parameters.

    Attributes:
        force_separate_copy: owners publish into ``V0`` even where they could update in place, so that two rules can share the
            buffers (warmup.py).
    """

    force_separate_copy: bool = False
    replicated: ClassVar[bool] = True

    def under(self, threshold: int) -> "ReplicatedPlan":
        return replace(
            self, schedule=replace(self.schedule, threshold=threshold), force_separate_copy=self.publishes_separate_copy
        )

    @property
    def messages(self) -> tuple[Visit, ...]:
        """None: passes read from the replica."""
        return ()

    # ---- versions and their senders -------------------------------------------------------------------------------------
    @cached_property
    def first_reads(self) -> dict[tuple[int, int, bool], tuple[int, int]]:
        """(rank, stage, corrected) -> (ahead, m): the rank first reads version v so in round m of step v + ahead.

        A rank that reads versions stale in one round and fresh in the next has both entries.
        """
        s = self.schedule
        return {
            (r, stage, self.is_corrected(step - 2)): (step - 2, m)
            for step in (3, 2)  # the earlier one counts
            for m in reversed(range(min(s.rounds, 2)))
            for r in range(s.ranks)
            for stage in range(s.ranks)
            if s.version(step, m, r, stage) == 2
        }

    @cached_property
    def first_readers(self) -> dict[tuple[int, bool], int]:
        """(stage, corrected) -> the rank that reads each version, or its correction, first; nobody: no entry."""
        found: dict[tuple[int, bool], int] = {}
        for (r, stage, corrected), _ in sorted(self.first_reads.items(), key=lambda x: (x[1], x[0][0])):
            found.setdefault((stage, corrected), r)
        return found

    def refreshed_version(self, step: int, round: int, rank: int, stage: int) -> int | None:
        """The version that the replica changes to before this micro-batch; None if it stays at its version."""
        for corrected in (False, True):
            ahead, m = self.first_reads.get((rank, stage, corrected), (0, -1))
            if step > 0 and m == round:
                return step - ahead
        return None

    def sender(self, rank: int, stage: int, lag: int) -> int | None:
        """The rank that sends this rank the stage's versions that it reads ``lag`` steps later; None for the stage's owner."""
        owner = self.schedule.owner(stage)
        return None if rank == owner else owner if self.reads_first(rank, stage, lag) else (rank - 1) % self.schedule.ranks

    def reads_first(self, rank: int, stage: int, lag: int) -> bool:
        """Whether no rank reads them earlier than this one."""
        return self.first_readers[stage, self.is_corrected(lag)] == rank

    def forwarded(self, step: int, round: int, rank: int, stage: int) -> tuple[int, int, int] | None:
        """The version that the rank forwards when it begins to read the stage in this round: (version, steps ahead, round).

        The last two say when its neighbour reads it. None: the rank forwards nothing.
        """
        after = (rank + 1) % self.schedule.ranks
        for corrected in (False, True):
            (ahead, m), (later, n) = (self.first_reads.get((r, stage, corrected), (0, -1)) for r in (rank, after))
            if round != m or n < 0 or after in (rank, self.schedule.owner(stage), self.first_readers[stage, corrected]):
                continue
            version = step - ahead
            if version >= 0 and version + later > 0:
                return version, version + later - step, n
        return None

    def double_buffered(self, unit: int) -> bool:
        """Whether new versions of the unit land in ``L``, since it is read again as soon as the old version is out of use."""
        return self.unit(unit).stage == 0

    # ---- buffers --------------------------------------------------------------------------------------------------------
    def kept(self, index: int) -> bool:
        return index != PERSISTENT

    @cached_property
    def publishes_separate_copy(self) -> bool:
        """Whether owners publish into ``V0``, since one of them still reads the old version of its stage during the update."""
        s = self.schedule
        if self.force_separate_copy:
            return True
        for stage in range(s.ranks):
            rank = s.owner(stage)
            passes = 2 * s.ranks - (0 if self.persistent and stage == 0 else stage)
            ends = [
                (s.start(step, m, rank) + passes, END)
                for step in (2, 3)
                for m in {0, s.rounds - 1}  # the last pass is in one of these
                if s.version(step, m, rank, stage) == 2
            ]
            if max(ends) > (s.update_time(2, stage), START):
                return True
        return False

    def copies(self, stage: int) -> int:
        """What fresh readers read has one place."""
        return 1

    def corrected_copies(self, stage: int) -> int:
        """Rules that stall update before stale readers have pulled. A prediction is out of use before the next one is made."""
        if not (self.corrects and self.schedule.is_read_stale(stage)):
            return 0
        return 2 if self.schedule.stalls and not self.predicts else 1

    @cached_property
    def replica(self) -> tuple[dict[int, int], tuple[int, ...], int]:
        """Region R: offsets of all units (PERSISTENT included) and of each stage, and its bytes."""
        offsets: dict[int, int] = {}
        starts, total = [], 0
        for stage in range(self.schedule.ranks):
            inside, nbytes = self.v_layout(stage)
            offsets |= {i: total + at for i, at in inside.items()}
            starts.append(total)
            total += nbytes
        return offsets, tuple(starts), total

    def published_region(self, lag: int, stage: int) -> str:
        return super().published_region(lag, stage) if self.publishes_separate_copy or self.is_corrected(lag) else "R"

    def copy_offsets(self, stage: int) -> dict[int, int]:
        start = 0 if self.publishes_separate_copy else self.replica[1][stage]
        return {i: start + at for i, at in self.v_layout(stage)[0].items()}

    def landing_place(self, unit: int) -> tuple[str, int]:
        """Region and offset at which a new version of the unit lands on a rank that does not own it."""
        return ("L", self.v_layout(0)[0][unit]) if self.double_buffered(unit) else ("R", self.replica[0][unit])

    def extents(self, stage: int) -> dict[str, int]:
        return {**super().extents(stage), "L": self.v_layout(0)[1], "R": self.replica[2]}

    def regions(self, rank: int) -> dict[str, int]:
        """As ``Plan.regions``, with ``R``, ``L`` and perhaps ``V0`` in place of H and V."""
        sizes = {"R": self.replica[2], "PG": self.windows.nbytes}
        if self.schedule.ranks > 1:
            sizes["L"] = self.v_layout(0)[1]
            sizes |= {"GH": aligned(self.persistent.g_bytes)} if self.persistent else {}
        return sizes | self._owned_regions(rank, ["V0"] if self.publishes_separate_copy else [])

    def memory(self, rank: int) -> dict[str, int]:
        """As ``Plan.memory``, with the ``replica``."""
        regions = self.regions(rank)
        return {
            "replica": regions["R"],
            "in flight": sum(regions.get(x, 0) for x in ("L", "PG", "GH")),
            "sums": regions["O"] + regions.get("X", 0),
            "published": sum(regions.get(x, 0) for x in ("V0", "W0", "W1")),
            "scalars": regions["S"],
        }

    def received_bytes(self, rank: int) -> dict[str, int]:
        """As ``Plan.received_bytes``, but B = 0 and F = Psi minus the owned stage, once a step whatever the rounds.

        With corrections and several rounds, stages that the first round reads stale come twice.
        """
        received = 0
        for i in self.every_unit:
            unit = self.unit(i)
            if self.schedule.owner(unit.stage) != rank:
                received += unit.p_bytes * sum((rank, unit.stage, corrected) in self.first_reads for corrected in (False, True))
        return {**super().received_bytes(rank), "B": 0, "F": received}


class ReplicaBuilder(Builder):
    """Builds programs for a ``ReplicatedPlan``. They have one more kind, REFRESH_PARAM: a unit of the replica changes version."""

    plan: ReplicatedPlan

    def _passes(self) -> Iterator[Action]:
        yield from super()._passes()
        if self.plan.publishes_separate_copy:
            for m in range(self.schedule.rounds):
                yield from self._refresh_own_stage(m)

    def _refresh_own_stage(self, m: int) -> Iterator[Action]:
        """The owner copies its published version into its replica, once it is published and the old version is out of use."""
        plan, s, stage = self.plan, self.schedule, self.stage
        ahead, round = self._ahead(m + 1)
        version = plan.refreshed_version(self.step + ahead, round, self.rank, stage)
        begin, lag = s.start(self.step, m, self.rank) * plan.scale, 0 if version is None else self.step + ahead - version
        for i in reversed(plan.members(stage)) if version is not None else ():
            assert version is not None
            if round == 0 and self._publishes_in_step_of_read(version, ahead, i):
                continue
            end = begin + (plan.round_ticks if i == PERSISTENT else plan.spans[i, True][1])
            time, phase = max((end, END), (self._published(version, i, lag), START))
            yield self._refresh_own(time, phase, m, i, True, version - self.step, self.step + ahead - version)

    def _refresh_own(self, time: int, phase: int, m: int, i: int, backward: bool, version: int, lag: int) -> Action:
        """The owner copies one unit of its published version into its replica, and reads it ``lag`` steps after the version."""
        plan, offsets = self.plan, self.plan.published_offsets(self.stage, lag)
        place: dict[str, Any] = dict(
            region=plan.published_region(lag, self.stage), offset=offsets[i], nbytes=plan.unit(i).p_bytes
        )
        into = ("R", plan.replica[0][i], m)
        return Action(time, phase, Kind.REFRESH_PARAM, m, i, backward, version=version, into=into, **place)

    def _publishes_in_step_of_read(self, version: int, ahead: int, i: int) -> bool:
        """Whether the owner publishes this version of its unit only in the step (``ahead``) in which it first reads it."""
        step = self.step + ahead
        return self._published(version, i, step - version) >= self.schedule.start(step, 0, self.rank) * self.plan.scale

    def _ahead(self, m: int) -> tuple[int, int]:
        """(steps ahead, round) of round number ``m``, counted from the first round of this step."""
        return divmod(m, self.schedule.rounds)

    def _read(self, time: int, m: int, i: int, backward: bool) -> Iterator[Action]:
        """Refresh the unit if the version changes before this pass, read it, and forward a new version to the ring neighbour."""
        plan, s, unit = self.plan, self.schedule, self.plan.unit(i)
        stage, version = unit.stage, s.version(self.step, m, self.rank, unit.stage) - self.step
        place: dict[str, Any] = dict(region="R", offset=plan.replica[0][i], nbytes=unit.p_bytes, version=version)
        if backward:
            yield Action(time, START, Kind.WAIT_PARAM, m, i, True, **place)
            return
        refreshed = plan.refreshed_version(self.step, m, self.rank, stage) is not None
        src = plan.sender(self.rank, stage, -version) if refreshed else None
        landed = place
        if refreshed and src is not None:
            landed = place | dict(zip(("region", "offset"), plan.landing_place(i)))
            first, into = plan.reads_first(self.rank, stage, -version), ("R", place["offset"], m)
            stream = plan.published_stream(stage, -version) if first else "P"
            yield Action(time, START, Kind.REFRESH_PARAM, m, i, False, src, stream, into=into, **landed)
        elif refreshed and plan.publishes_separate_copy and m == 0 and self._publishes_in_step_of_read(self.step + version, 0, i):
            yield self._refresh_own(time, START, m, i, False, version, -version)
        posts = tuple(self._landing_posts(m, True)) if i == self._first_of_stage_1 else ()
        yield Action(time, START, Kind.WAIT_PARAM, m, i, False, posts=posts, **place)
        if forwarded := plan.forwarded(self.step, m, self.rank, stage):
            landed = landed | dict(version=forwarded[0] - self.step)
            after, into = (self.rank + 1) % s.ranks, (*plan.landing_place(i), forwarded[2])
            yield Action(time, START, Kind.FORWARD_PARAM, m, i, False, after, "P", into=into, **landed)

    @property
    def _first_of_stage_1(self) -> int | None:
        return self.plan.members(1)[0] if self.schedule.ranks > 1 else None

    def _release_posts(self, m: int, i: int, backward: bool) -> Iterator[Post]:
        """When stage 1's last backward ends, all stages from 1 on may be overwritten."""
        if (i, backward) == (self._first_of_stage_1, True):
            yield from self._landing_posts(m, False)

    def _landing_posts(self, m: int, double_buffered: bool) -> Iterator[Post]:
        """Credits for the versions that the ring neighbour forwards for the next micro-batch, in the order of reads."""
        plan, (ahead, round) = self.plan, self._ahead(m + 1)
        for i in plan.every_unit:
            if plan.double_buffered(i) != double_buffered or not self._receives(self.step + ahead, round, i):
                continue
            stage = plan.unit(i).stage
            version = plan.refreshed_version(self.step + ahead, round, self.rank, stage)
            assert version is not None
            lag = self.step + ahead - version
            if not plan.reads_first(self.rank, stage, lag):
                src, place = plan.sender(self.rank, stage, lag), plan.landing_place(i)
                assert src is not None, "the owner receives no version of its own stage"
                yield Post("P", src, *place, plan.unit(i).p_bytes, ahead, round, i, False)

    def _receives(self, step: int, round: int, i: int) -> bool:
        """Whether another rank sends this one a new version of the unit for this micro-batch."""
        stage = self.plan.unit(i).stage
        return self.plan.refreshed_version(step, round, self.rank, stage) is not None and self.rank != self.schedule.owner(stage)

    def _pulls(self, step: int) -> Iterator[Action]:
        """As a first reader, pull from the owner: two positions before the pass, but not before the version is published."""
        plan, s = self.plan, self.schedule
        for m in range(s.rounds):
            for i in plan.every_unit:
                stage = plan.unit(i).stage
                version, src = plan.refreshed_version(step, m, self.rank, stage), self.schedule.owner(stage)
                if version is None or src == self.rank or not plan.reads_first(self.rank, stage, step - version):
                    continue
                pass_start = 0 if i == PERSISTENT else plan.spans[i, False][0]
                time = (s.start(step, m, self.rank) - 2) * plan.scale + pass_start
                time = self._not_before_published(time, step, 0, version, i, False)
                origin = plan.published_region(step - version, stage), plan.published_offsets(stage, step - version)[i]
                ahead = step - self.step
                place = (src, *plan.landing_place(i), plan.unit(i).p_bytes)
                post = Post(plan.published_stream(stage, step - version), *place, ahead, m, i, False, origin, version - step)
                yield Action(time, START, Kind.PULL_PARAM, m, i, False, src, post.stream, posts=(post,))

    def _published(self, version: int, i: int, lag: int, m: int = 0, backward: bool = False) -> int:
        """Once for all rounds."""
        plan, s, stage = self.plan, self.schedule, self.plan.unit(i).stage
        if lag and plan.is_predicted(stage):
            return super()._published(version, i, lag, 0, False)
        return s.update_time(version - 1, stage) * plan.scale

    def _publish(self, version: int, predicted: bool = False) -> Iterator[Action]:
        plan = self.plan
        for (stage, corrected), reader in plan.first_readers.items():
            if stage != self.stage or reader == self.rank:
                continue
            ahead, m = plan.first_reads[reader, stage, corrected]
            if predicted != (ahead > 0 and plan.is_predicted(stage)):
                continue
            offsets, region = plan.published_offsets(stage, ahead), plan.published_region(ahead, stage)
            stream = plan.published_stream(stage, ahead)
            for i in plan.members(stage) if version + ahead else ():
                place = (region, offsets[i], plan.unit(i).p_bytes, version - self.step)
                time = self._published(version, i, ahead) if version or predicted else -(10**18)
                yield Action(time, START, Kind.PUBLISH_PARAM, m, i, False, reader, stream, *place)


def grid(schedule: Schedule, rank: int, steps: int = 2) -> str:
    """A drawing of the versions in this rank's replica from step 2 on: a row per stage, a column per logical time."""
    plan = ReplicatedPlan(schedule, tuple(Unit(str(s), s, (), (), 1, 1) for s in range(schedule.ranks)))
    start, end = schedule.start(2, 0, rank), schedule.start(2 + steps, 0, rank)
    rows = []
    for stage in range(schedule.ranks):
        reads = sorted(x for x in schedule.reads(2 + steps) if (x.rank, x.stage) == (rank, stage))
        cells = {x.time: f"{'B' if x.backward else 'F'}{x.version}" for x in reads}
        for before, after in zip(reads, reads[1:]):
            if not after.backward and plan.refreshed_version(after.step, after.round, rank, stage) is not None:
                cells |= {time: "~ " for time in range(before.time + 1, after.time)}
        rows.append(f"stage {stage}  " + " ".join(cells.get(time, "").ljust(2) for time in range(start, end)).rstrip())
    return "\n".join(rows)
