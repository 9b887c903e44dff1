"""The plan: what every rank sends, waits for and frees, in which order, as data (design §6, §7). Pure, no torch.

A rank's *program* is the list of its actions for one step, in logical order; the runtime only walks it. Programs repeat: every
step after the first since a flush has the same one.

Streams (each edge of each stream keeps its own order):

======  =============================================================================================
P, H    parameters relayed to the ring neighbour: units, persistent parameters
P0, H0  the same from the owner's published copy: offered as soon as it is published, taken by its first reader
G, GH   running gradient sums of units, of persistent parameters: rank r to r+1 (and N-1 to 0 between rounds)
O       finished gradient sums, rank N-1 to the owner
S       a few scalars, owner to owner: squared norms by stage, loss (design §9)
T       the finished squared norm, rank N-1 to every owner (dp and v1 only)
======  =============================================================================================

Regions: ``PG`` is a buffer for P, G and O (plan/buffer_layout.py); ``H`` has two slots used in turn; ``V`` are the owned
stage's published
versions.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar

from deepspeed_cdp.plan.buffer_layout import BufferLayout, layouts
from deepspeed_cdp.plan.constants import ACROSS_BYTES, END, PERSISTENT, START
from deepspeed_cdp.plan.interval_alloc import StreamLayout, aligned
from deepspeed_cdp.plan.unit_schedule import UnitSchedule


@dataclass(frozen=True)
class Plan(UnitSchedule):
    """Everything that follows from the schedule and the sizes of the units; equal on all ranks. Fields: ``UnitSchedule``'s."""

    g_region: ClassVar[str] = "PG"  # where running sums lie
    o_region: ClassVar[str] = "PG"  # and finished ones

    def under(self, threshold: int) -> "Plan":
        """The same units and buffers under a rule with a smaller K, whose messages all find room in them."""
        assert threshold <= self.schedule.threshold and (self.sums_apart or not self.sums_between), (threshold, self)
        plan = replace(self, schedule=replace(self.schedule, threshold=threshold), room_for=self.room_for or self.schedule)
        if not self.replicated:  # replicas read where their plan says, which depends on the rule
            plan.__dict__["layouts"] = self.layouts
        return plan

    @cached_property
    def layouts(self) -> tuple[BufferLayout, ...]:
        """Of each rank's parameters and sums in flight, which share one buffer and fill each other's gaps."""
        return layouts(self)

    @cached_property
    def p_layouts(self) -> tuple[StreamLayout, ...]:
        """Of each rank's parameters in flight."""
        return tuple(x.p for x in self.layouts)

    @cached_property
    def g_layouts(self) -> tuple[StreamLayout, ...]:
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

    def _uses(self, version: int, unit: int) -> list[tuple[int, int]]:
        """Keys by which a published version is out of use: its first readers have let it in, the owner's own reads have ended."""
        s, uses, stage = self.schedule, [], self.unit(unit).stage
        last = (
            0 if unit == PERSISTENT else self.spans[unit, not self.kept(unit)][0]
        )  # the last pass that takes it, two positions ahead
        for step in (version, version + 1):
            for v, m, r in s.first_readers(step, stage):
                if v == version:
                    uses.append(((s.start(step, m, r) - 2) * self.scale + last, START))
            for m in range(s.rounds):
                r = s.owner(stage)
                if s.version(step, m, r, stage) == version and s.source(step, m, r, stage) is None:
                    end = 2 * s.ranks * self.scale if unit == PERSISTENT else self.spans[unit, True][1]
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
        for i in (*([PERSISTENT] if self.persistent else []), *range(len(self.units))):
            unit = self.unit(i)
            remote = sum(s.source(1, m, rank, unit.stage) is not None for m in range(s.rounds))
            total["F"] += remote * unit.p_bytes
            total["B"] += 0 if i == PERSISTENT or self.kept(i) else remote * unit.p_bytes
            if s.ranks > 1:
                total["G"] += (s.rounds - (rank == 0)) * unit.g_bytes
                total["O"] += unit.g_bytes if rank == s.owner(unit.stage) and rank != s.ranks - 1 else 0
        return total

    @cached_property
    def regions(self) -> dict[str, int]:
        """Bytes of every region, the same on all ranks (one-sided transports address a peer's memory by offset): ``PG``;
        ``H0``, ``H1``: persistent parameters of two rounds in turn; ``GH``; ``V0`` (and ``V1``): published versions; ``S``:
        scalars;
        ``X``: sums of other rings, and of all of them.
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
        return self.with_small(sizes)

    def with_small(self, sizes: dict[str, int]) -> dict[str, int]:
        """And the regions that every kind of plan has: ``X``, and ``S`` with room for a vector of scalars and for the total."""
        if self.rings > 1:
            sizes["X"] = max(self.x_layout(s)[1] for s in range(self.schedule.ranks)) + aligned(ACROSS_BYTES)
        return sizes | {"S": 2 * aligned(8 * self.scalars)}

    @property
    def scalars(self) -> int:
        """Numbers in the vector that goes round once a step (runtime/step_metrics.py)."""
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
