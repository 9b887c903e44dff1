"""The plan of a ring: buffers of every rank, and sizes of all messages. Programs are built from it (program.py).

A rank's *program* is the list of its actions for one step, in logical order; the executor runs it as it stands. The first step
after a flush has its own program, and all later steps share one.

States rest with their owners. A rank pulls a unit's parameters from the owner's published copy, and its running gradient sum from
the owner's region ``O``, when it needs them, and pushes the sum back.

Streams (each edge of a stream keeps its own order):

======  =============================================================================================
P0      parameters, pulled by a reader from the owner's published copy
W0      the same of predictions, which the owner publishes beside its other actions
G0      running gradient sums, pulled by the rank that adds to them next
G       the same, pushed back to the owner
P       replicas only: a new version, forwarded to the ring neighbour
S       a few scalars, owner to owner: squared norms by stage, loss (runtime/step_metrics.py)
T       the global squared norm, rank N-1 to every owner (dp and v1 only)
======  =============================================================================================

Regions: ``Plan.regions``.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar

from deepspeed_cdp.plan.constants import CHECKSUM, DIFFERENCE, END, OPTIONS, PERSISTENT, START
from deepspeed_cdp.plan.interval_alloc import aligned
from deepspeed_cdp.plan.unit_schedule import UnitSchedule
from deepspeed_cdp.plan.windows import Windows, lay_out


@dataclass(frozen=True)
class Plan(UnitSchedule):
    """Everything that follows from the schedule and the sizes of the units; the same on all ranks.

    Its fields are those of ``UnitSchedule``.
    """

    replicated: ClassVar[bool] = False  # whether every rank keeps all parameters (replicated.py)

    def under(self, threshold: int) -> "Plan":
        """The same units under a rule with a smaller K, whose messages all fit into the same buffers."""
        assert threshold <= self.schedule.threshold, (threshold, self)
        plan = replace(self, schedule=replace(self.schedule, threshold=threshold))
        plan.__dict__["windows"] = self.windows
        return plan

    @cached_property
    def windows(self) -> Windows:
        """Where parameters and running sums lie while they visit a rank; the same on all ranks."""
        return lay_out(self)

    def o_layout(self, stage: int) -> dict[int, int]:
        """Offsets of the units' gradient sums in their owner's region ``O``."""
        return self.x_layout(stage)[0]

    def x_layout(self, stage: int) -> tuple[dict[int, int], int]:
        """Offsets of the units' gradient sums laid out one after the other, and the bytes of all."""
        return _stacked({i: self.unit(i).g_bytes for i in self.members(stage) if self.unit(i).g_bytes})

    def v_layout(self, stage: int) -> tuple[dict[int, int], int]:
        """Offsets of the units in one published copy of the stage, and its bytes."""
        return _stacked({i: self.unit(i).p_bytes for i in self.members(stage)})

    @property
    def corrects(self) -> bool:
        """Whether stale readers read a correction of their version, published in a region of its own."""
        return self.delay_corrected and self.schedule.threshold > 0

    def is_corrected(self, lag: int) -> bool:
        """Whether readers in step version + ``lag`` read the version's correction."""
        return lag > 0 and self.corrects

    def published_region(self, lag: int, stage: int) -> str:
        """The region of the stage's published versions that are read in step version + ``lag``, as actions name it.

        ``V`` and ``W`` mean two copies by turns, which ``region_of`` tells apart.
        """
        if self.is_corrected(lag):
            return "W" if self.corrected_copies(stage) == 2 else "W0"
        return "V" if self.copies(stage) == 2 else "V0"

    def published_stream(self, stage: int, lag: int) -> str:
        """The stream on which those of the stage are pulled."""
        return "W0" if lag and self.is_predicted(stage) else "P0"

    def published_offsets(self, stage: int, lag: int) -> dict[int, int]:
        """Offsets of the stage's units in that region."""
        return self.v_layout(stage)[0] if self.is_corrected(lag) else self.copy_offsets(stage)

    def region_of(self, region: str, version: int) -> str:
        """The region that an action means by ``V`` (a version published by turns) or ``W`` (its correction); others stay."""
        return f"{region}{version % 2}" if region in ("V", "W") else region

    def written(self, version: int, stage: int) -> list[tuple[str, dict[int, int]]]:
        """Regions that the update to ``version`` writes, and the units' offsets in each."""
        lags = (0, 1) if self.corrected_copies(stage) and not self.predicts else (0,)
        return [(self.region_of(self.published_region(x, stage), version), self.published_offsets(stage, x)) for x in lags]

    def copies(self, stage: int) -> int:
        """Published copies its owner keeps: 1 if every use of a version ends before the next one is published, else 2."""
        return self._copies[stage]

    def corrected_copies(self, stage: int) -> int:
        """Copies of its corrections: 1 if every use of one ends before the next one is written, else 2; without readers 0."""
        return self._corrected_copies[stage]

    def slots(self, stage: int) -> int:
        """1 if all updates of the stage write the same places, else 2, by turns."""
        return max(self.copies(stage), 1 if self.predicts else self.corrected_copies(stage))

    @property
    def sums_apart(self) -> bool:
        """Whether finished sums are copied from region ``O`` to ``X``, since the next step's sums begin before the update."""
        return self.schedule.exact_norm and not self.schedule.stalls and self.schedule.ranks > 1

    def copy_offsets(self, stage: int) -> dict[int, int]:
        """Offsets of the stage's units in the region of a published copy."""
        return self.v_layout(stage)[0]

    def extents(self, stage: int) -> dict[str, int]:
        """Bytes of the regions that are addressed by offset, on the owner of ``stage``."""
        published = dict.fromkeys(("V", "V0", "V1", "W", "W0", "W1"), self.v_layout(stage)[1])
        return {"PG": self.windows.nbytes, "O": self.x_layout(stage)[1]} | published

    @cached_property
    def _copies(self) -> list[int]:
        lags, found = (0,) if self.corrects else (0, 1), [1] * self.schedule.ranks
        for i in self.every_unit:
            if any(self._used_after(i, lag, self._update_start(3, i)) for lag in lags):
                found[self.unit(i).stage] = 2
        return found

    @cached_property
    def _corrected_copies(self) -> list[int]:
        found = [int(self.corrects and self.schedule.is_read_stale(stage)) for stage in range(self.schedule.ranks)]
        for i in self.every_unit:
            written, step = (self.predict_time(4, i), 4) if self.predicts else (self._update_start(3, i), None)
            if found[self.unit(i).stage] and self._used_after(i, 1, written, step):
                found[self.unit(i).stage] = 2
        return found

    def _update_start(self, step: int, unit: int) -> int:
        """Ticks from which the owner may write the unit's version step + 1."""
        stage = self.unit(unit).stage
        if unit in self.eager_units(self.schedule.owner(stage)):
            return self.sum_finished(step, unit)
        return self.schedule.update_time(step, stage) * self.scale

    def _used_after(self, unit: int, lag: int, written: int, step: int | None = None) -> bool:
        """Whether some use of version 3 in step 3 + ``lag`` is not earlier than the owner's action that overwrites it.

        Uses are readers' pulls, and ends of the owner's own passes. A user may put a barrier between two steps, so the program of
        a reader's pull must not be of a later step either.

        Args:
            written: ticks of that action.
            step: of its program; None: the one under way then.
        """
        s, stage = self.schedule, self.unit(unit).stage
        owner = s.owner(stage)
        step = self._under_way(owner, written) if step is None else step
        pull = self.pull_ticks(unit, unit != PERSISTENT and not self.kept(unit))  # the last one of a round
        end = 2 * s.ranks * self.scale if unit == PERSISTENT else self.spans[unit, True][1]
        for m in {0, s.rounds - 1}:  # the last use is in one of these
            for r in range(s.ranks):
                if s.version(3 + lag, m, r, stage) != 3:
                    continue
                start = s.start(3 + lag, m, r) * self.scale
                use = (start + end, END) if r == owner else (start + pull, START)
                if use >= (written, START) or r != owner and self._under_way(r, use[0]) > step:
                    return True
        return False

    def _under_way(self, rank: int, time: int) -> int:
        """The step that the rank is in at these ticks."""
        return (time // self.scale - self.schedule.start(0, 0, rank)) // self.schedule.period

    # ---- closed forms ---------------------------------------------------------------------------------------------------
    def received_bytes(self, rank: int) -> dict[str, int]:
        """Bytes that ``rank`` receives in a steady step, by kind; Psi are the bytes of all parameters, k the rounds.

        ====  =========================  =====================================================================
        F     parameters for forwards    k (Psi minus the owned stage)
        B     parameters for backwards   as F, without units kept after the forward and persistent parameters
        G     running sums, pulled       k (Psi minus the owned stage); rank 0: k - 1 times
        O     running sums, pushed back  k (N - 1) times the owned stage
        ====  =========================  =====================================================================
        """
        s, total = self.schedule, {"F": 0, "B": 0, "G": 0, "O": 0}
        for i in self.every_unit:
            unit = self.unit(i)
            if rank == s.owner(unit.stage):
                total["O"] += s.rounds * (s.ranks - 1) * unit.g_bytes
                continue
            total["F"] += s.rounds * unit.p_bytes
            total["B"] += 0 if i == PERSISTENT or self.kept(i) else s.rounds * unit.p_bytes
            total["G"] += (s.rounds - (rank == 0)) * unit.g_bytes
        return total

    def regions(self, rank: int) -> dict[str, int]:
        """Bytes of every region of a rank, in the order in which they lie in its buffers.

        =========  ==================================================================================
        PG         parameters and running sums that visit the rank (windows.py)
        H0, H1     persistent parameters, of two rounds in turn; a post names them as ``H``
        GH         their running gradient sum
        S          scalars
        O          gradient sums of the owned stage
        V0 (, V1)  published versions of the owned stage; an action names both as ``V``
        W0 (, W1)  their corrections, if stale readers read these; an action names both as ``W``
        X          gradient sums of several rings so far, then of all of them; under v1, finished sums
        =========  ==================================================================================
        """
        sizes, stage = {"PG": self.windows.nbytes}, self.schedule.owned(rank)
        if self.persistent and self.schedule.ranks > 1:
            sizes |= {
                "H0": aligned(self.persistent.p_bytes),
                "H1": aligned(self.persistent.p_bytes),
                "GH": aligned(self.persistent.g_bytes),
            }
        return sizes | self._owned_regions(rank, [f"V{c}" for c in range(self.copies(stage))])

    def _owned_regions(self, rank: int, published: Sequence[str]) -> dict[str, int]:
        """``S``, for a vector of scalars and the global norm, and the regions of the owned stage."""
        stage = self.schedule.owned(rank)
        sums, copy = self.x_layout(stage)[1], self.v_layout(stage)[1]
        sizes = {"S": 2 * aligned(8 * self.scalars), "O": sums} | dict.fromkeys(published, copy)
        sizes |= {f"W{c}": copy for c in range(self.corrected_copies(stage))}
        if self.rings > 1 or self.sums_apart:
            sizes["X"] = sums + (aligned(self.across_nbytes) if self.rings > 1 else 0)
        return sizes

    @property
    def scalars(self) -> int:
        """Length of the vector that travels round the ring once a step (runtime/step_metrics.py)."""
        return 2 * self.schedule.ranks + 5 + DIFFERENCE + OPTIONS

    @property
    def across_nbytes(self) -> int:
        """Bytes that the owners of several rings add up once a step: loss sum and count; by ring, a checksum and options."""
        return 8 * (2 + self.rings * (CHECKSUM + OPTIONS))

    def kept_by_owner(self, stage: int) -> int:
        """How often an owner keeps something of the stage's size: copies, corrections, sums."""
        return self.copies(stage) + self.corrected_copies(stage) + 1

    def memory(self, rank: int) -> dict[str, int]:
        """Bytes that the runtime allocates on a rank, by use; masters and optimizer state come on top.

        =========  ==================================================================================
        in flight  parameters and running sums that visit the rank, some units each
        sums       of the owned stage, and of other rings
        published  copies of the owned stage, and their corrections
        scalars    under a kilobyte on few ranks
        =========  ==================================================================================
        """
        published = dict.fromkeys("VW", "published")
        kinds = dict.fromkeys("PGH", "in flight") | {"O": "sums", "X": "sums"} | published | {"S": "scalars"}
        total = dict.fromkeys(kinds.values(), 0)
        for name, nbytes in self.regions(rank).items():
            total[kinds[name[0]]] += nbytes
        return total


def _stacked(sizes: dict[int, int]) -> tuple[dict[int, int], int]:
    """Aligned offsets one after the other, and the bytes of all."""
    offsets, total = {}, 0
    for i, nbytes in sizes.items():
        offsets[i], total = total, total + aligned(nbytes)
    return offsets, total
