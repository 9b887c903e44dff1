"""The plan of a ring: buffers of every rank, and sizes of all messages. Programs are built from it (program.py).

A rank's *program* is the list of its actions for one step, in logical order; the executor runs it as it stands. The first step
after a flush has its own program, and all later steps share one.

Streams (each edge of a stream keeps its own order):

======  =============================================================================================
P, H    parameters forwarded to the ring neighbour: units, persistent parameters
P0, H0  the same from the owner's published copy, pulled by each first reader
G, GH   running gradient sums of units, of persistent parameters: rank r to r+1 (and N-1 to 0 between rounds)
O       finished gradient sums, rank N-1 to the owner
E       early sums: the running sums that predict a stage's next version, from rank s to the owner
S       a few scalars, owner to owner: squared norms by stage, loss (runtime/step_metrics.py)
T       the global squared norm, rank N-1 to every owner (dp and v1 only)
======  =============================================================================================

Regions: ``Plan.regions``.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar

from deepspeed_cdp.plan.buffer_layout import BufferLayout, layouts
from deepspeed_cdp.plan.constants import CHECKSUM, DIFFERENCE, END, OPTIONS, PERSISTENT, START
from deepspeed_cdp.plan.interval_alloc import StreamLayout, aligned
from deepspeed_cdp.plan.unit_schedule import UnitSchedule


@dataclass(frozen=True)
class Plan(UnitSchedule):
    """Everything that follows from the schedule and the sizes of the units; the same on all ranks.

    Its fields are those of ``UnitSchedule``.
    """

    replicated: ClassVar[bool] = False  # whether every rank keeps all parameters (replicated.py)
    g_region: ClassVar[str] = "PG"  # the region of running sums
    o_region: ClassVar[str] = "PG"  # the region of finished sums

    def under(self, threshold: int) -> "Plan":
        """The same units and buffers under a rule with a smaller K, whose messages all fit into these buffers."""
        assert threshold <= self.schedule.threshold and (self.separate_sums or not self.sums_in_gaps), (threshold, self)
        schedule, layout_schedule = replace(self.schedule, threshold=threshold), self.layout_schedule or self.schedule
        plan = replace(self, schedule=schedule, layout_schedule=layout_schedule)
        plan.__dict__["layouts"] = self.layouts
        return plan

    @cached_property
    def layouts(self) -> tuple[BufferLayout, ...]:
        """Of each rank's messages in flight, which share one buffer."""
        return layouts(self)

    @cached_property
    def p_layouts(self) -> tuple[StreamLayout, ...]:
        """Of each rank's parameters in flight."""
        return tuple(x.p for x in self.layouts)

    @cached_property
    def g_layouts(self) -> tuple[StreamLayout, ...]:
        """Of each rank's running sums in flight."""
        return tuple(x.g for x in self.layouts)

    def o_layout(self, stage: int) -> dict[int, int]:
        """Offsets of the units' finished sums in their owner's region ``o_region``."""
        layout = self.layouts[self.schedule.owner(stage)]
        if self.sums_in_gaps:
            return {i: at for (i, _), at in layout.o.offsets.items()}
        return {i: layout.p.nbytes + at for i, at in self.x_layout(stage)[0].items()}

    def x_layout(self, stage: int) -> tuple[dict[int, int], int]:
        """Offsets of the units' gradient sums laid out one after the other, and the bytes of all."""
        return _stacked({i: self.unit(i).g_bytes for i in self.members(stage) if self.unit(i).g_bytes})

    def v_layout(self, stage: int) -> tuple[dict[int, int], int]:
        """Offsets of the units in one published copy of the stage, and its bytes."""
        return _stacked({i: self.unit(i).p_bytes for i in self.members(stage)})

    def copy_region(self, version: int) -> str:
        """The region in which owners publish this version (counted from the last flush)."""
        return f"V{version % self.copies}"

    @property
    def corrects(self) -> bool:
        """Whether stale readers read a correction of their version, published in a region of its own."""
        return self.delay_corrected and self.schedule.threshold > 0

    def is_corrected(self, lag: int) -> bool:
        """Whether readers in step version + ``lag`` read the version's correction."""
        return lag > 0 and self.corrects

    def published_region(self, lag: int) -> str:
        """The region of published versions that are read in step version + ``lag``, as actions name it."""
        return "W" if self.is_corrected(lag) else "V"

    def published_offsets(self, stage: int, lag: int) -> dict[int, int]:
        """Offsets of the stage's units in that region."""
        return self.v_layout(stage)[0] if self.is_corrected(lag) else self.copy_offsets(stage)

    def region_of(self, region: str, version: int) -> str:
        """The region that an action means by ``V`` (a published version) or ``W`` (its correction); others are as they are."""
        if region == "V":
            return self.copy_region(version)
        return f"W{version % self.corrected_copies}" if region == "W" else region

    def written(self, version: int, stage: int) -> list[tuple[str, dict[int, int]]]:
        """Regions that the update to ``version`` writes, and the units' offsets in each."""
        lags = (0, 1) if self.corrects and not self.predicts else (0,)
        return [(self.region_of(self.published_region(x), version), self.published_offsets(stage, x)) for x in lags]

    @property
    def corrected_copies(self) -> int:
        """Copies of corrections. A prediction is out of use before the next one is made."""
        return 1 if self.predicts else self.copies

    def early_place(self, unit: int) -> tuple[str, int]:
        """Region and offset where the unit's early sum lands at its owner.

        That is the place of the prediction, which overwrites it element by element, if both have the same layout.
        """
        stage = self.unit(unit).stage
        if self.schedule.ranks == 1:
            return self.o_region, self.o_layout(0)[unit]
        if self._early_in_place(unit):
            return "W0", self.v_layout(stage)[0][unit]
        apart = {i: self.unit(i).g_bytes for i in self.members(stage) if self.unit(i).g_bytes and not self._early_in_place(i)}
        return "E", _stacked(apart)[0][unit]

    def _early_in_place(self, unit: int) -> bool:
        return not self.unit(unit).frozen and self.unit(unit).p_bytes == self.unit(unit).g_bytes

    def _early_apart(self, stage: int) -> int:
        """Bytes of the stage's early sums that have a region of their own."""
        places = [(self.early_place(i), i) for i in self.members(stage) if self.unit(i).g_bytes and self.is_predicted(stage)]
        return max((at + aligned(self.unit(i).g_bytes) for (region, at), i in places if region == "E"), default=0)

    def copy_offsets(self, stage: int) -> dict[int, int]:
        """Offsets of the stage's units in the region of a published copy."""
        return self.v_layout(stage)[0]

    def extents(self, stage: int) -> dict[str, int]:
        """Bytes of the regions that are addressed by offset, on the owner of ``stage``."""
        in_flight = self.p_layouts[self.schedule.owner(stage)].nbytes
        separate = 0 if self.sums_in_gaps else self.x_layout(stage)[1]
        published = self.v_layout(stage)[1]
        return {"PG": in_flight + separate, "V": published, "W": published, "W0": published, "E": self._early_apart(stage)}

    @cached_property
    def copies(self) -> int:
        """Published copies the owners keep: 1 if every use of a version ends before the next one is published, else 2."""
        for stage in range(self.schedule.ranks):
            for i in self.members(stage):
                if any(use >= (self._update_start(3, i), START) for use in self._last_uses(3, i)):
                    return 2
        return 1

    def _update_start(self, step: int, unit: int) -> int:
        """Ticks from which the owner may write the unit's version step + 1."""
        stage = self.unit(unit).stage
        if unit in self.eager_units(self.schedule.owner(stage)):
            return self.sum_finished(step, unit)
        return self.schedule.update_time(step, stage) * self.scale

    def _last_uses(self, version: int, unit: int) -> list[tuple[int, int]]:
        """Keys of the uses of a published version: pulls of its first readers, ends of the owner's own passes."""
        s, uses, stage = self.schedule, [], self.unit(unit).stage
        last = 0 if unit == PERSISTENT else self.spans[unit, not self.kept(unit)][0]  # the last pass that pulls it
        for step in (version, version + 1):
            if self.predicts and self.is_corrected(step - version):
                continue  # these read predictions
            for v, m, r in s.first_readers(step, stage):
                if v == version:
                    uses.append(((s.start(step, m, r) - 2) * self.scale + last, START))  # two positions ahead of the pass
            for m in {0, s.rounds - 1}:  # the last use is in one of these
                r = s.owner(stage)
                if s.version(step, m, r, stage) == version and s.source(step, m, r, stage) is None:
                    end = 2 * s.ranks * self.scale if unit == PERSISTENT else self.spans[unit, True][1]
                    uses.append((s.start(step, m, r) * self.scale + end, END))
        return uses

    # ---- closed forms ---------------------------------------------------------------------------------------------------
    def received_bytes(self, rank: int) -> dict[str, int]:
        """Bytes that ``rank`` receives in a steady step, by kind; Psi are the bytes of all parameters, k the rounds.

        ====  =========================  =====================================================================
        F     parameters for forwards    k (Psi minus the stages that the rank reads from its own copy)
        B     parameters for backwards   as F, without units kept after the forward and persistent parameters
        G     running gradient sums      k Psi; rank 0: (k - 1) Psi
        O     finished gradient sums     the owned stage; rank N-1: 0
        E     early sums                 the owned stage, if stale readers read its prediction; 0 if the owner has them
        ====  =========================  =====================================================================
        """
        s, total = self.schedule, {"F": 0, "B": 0, "G": 0, "O": 0, "E": 0}
        for i in self.every_unit:
            unit = self.unit(i)
            first, second, later = (s.source(1, m, rank, unit.stage) is not None for m in range(3))  # all later ones alike
            remote = sum((first, second)[: s.rounds]) + later * max(s.rounds - 2, 0)
            total["F"] += remote * unit.p_bytes
            total["B"] += 0 if i == PERSISTENT or self.kept(i) else remote * unit.p_bytes
            if s.ranks > 1:
                total["G"] += (s.rounds - (rank == 0)) * unit.g_bytes
                total["O"] += unit.g_bytes if rank == s.owner(unit.stage) and rank != s.ranks - 1 else 0
                predicted = rank == s.owner(unit.stage) != s.predictor(unit.stage) and self.is_predicted(unit.stage)
                total["E"] += unit.g_bytes if predicted else 0
        return total

    @cached_property
    def regions(self) -> dict[str, int]:
        """Bytes of every region. They are the same on all ranks, since one-sided transports address a peer's memory by offset.

        =========  ==================================================================================
        PG         messages on the streams P, G and O (buffer_layout.py)
        H0, H1     persistent parameters, of two rounds in turn; a post names them as ``H``
        GH         their running gradient sum
        V0 (, V1)  published versions of the owned stage; an action names them as ``V``
        W0 (, W1)  their corrections, if stale readers read these; an action names them as ``W``
        E          early sums that cannot lie where their prediction does
        X          several rings: gradient sums of the rings so far, then of all of them
        S          scalars
        =========  ==================================================================================
        """
        stages = range(self.schedule.ranks)
        sizes = {"PG": max(self.extents(s)["PG"] for s in stages)}
        if self.persistent and self.schedule.ranks > 1:
            sizes |= {
                "H0": aligned(self.persistent.p_bytes),
                "H1": aligned(self.persistent.p_bytes),
                "GH": aligned(self.persistent.g_bytes),
            }
        sizes |= {f"V{c}": max(self.v_layout(s)[1] for s in stages) for c in range(self.copies)}
        return self._with_common_regions(sizes)

    def _with_common_regions(self, sizes: dict[str, int]) -> dict[str, int]:
        """Add regions that every type of plan has: ``W``, ``X``, and ``S`` for a vector of scalars and for the global norm."""
        if self.corrects:
            largest = max(self.v_layout(s)[1] for s in range(self.schedule.ranks))
            sizes |= {f"W{c}": largest for c in range(self.corrected_copies)}
        if early := max(map(self._early_apart, range(self.schedule.ranks))):
            sizes["E"] = early
        if self.rings > 1:
            sizes["X"] = max(self.x_layout(s)[1] for s in range(self.schedule.ranks)) + aligned(self.across_nbytes)
        return sizes | {"S": 2 * aligned(8 * self.scalars)}

    @property
    def scalars(self) -> int:
        """Length of the vector that travels round the ring once a step (runtime/step_metrics.py)."""
        return 2 * self.schedule.ranks + 5 + DIFFERENCE + OPTIONS

    @property
    def across_nbytes(self) -> int:
        """Bytes that the owners of several rings add up once a step: loss sum and count; by ring, a checksum and options."""
        return 8 * (2 + self.rings * (CHECKSUM + OPTIONS))

    def memory(self) -> dict[str, int]:
        """Bytes that the runtime allocates on each rank, by use; masters and optimizer state come on top.

        =========  ==================================================================================
        in flight  parameters and running sums, about two stages each
        sums       finished sums that have a place of their own, and sums of other rings
        published  copies of the owned stage, and their corrections
        scalars    under a kilobyte on few ranks
        =========  ==================================================================================
        """
        published = dict.fromkeys("VW", "published")
        kinds = dict.fromkeys("PGH", "in flight") | published | {"X": "sums", "E": "sums", "S": "scalars"}
        total = dict.fromkeys(kinds.values(), 0)
        for name, nbytes in self.regions.items():
            total[kinds[name[0]]] += nbytes
        separate = 0 if self.sums_in_gaps else self.regions["PG"] - max(x.nbytes for x in self.p_layouts)
        return total | {"in flight": total["in flight"] - separate, "sums": total["sums"] + separate}


def _stacked(sizes: dict[int, int]) -> tuple[dict[int, int], int]:
    """Aligned offsets one after the other, and the bytes of all."""
    offsets, total = {}, 0
    for i, nbytes in sizes.items():
        offsets[i], total = total, total + aligned(nbytes)
    return offsets, total
