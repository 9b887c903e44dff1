"""Dry-run of plans under which every rank keeps all parameters (plan/replicated.py).

A unit's place in the replica is in use from the time when new content may come in (a post, an update in place, a copy) to the end
of the last pass that reads this version. So, on top of ``DryRun``'s checks,

- no message lands, and no update or copy is made, while a pass still needs the old version;
- a pass reads only a version that REFRESH_PARAM or the owner's own update has put there;
- a separately published version is in the owner's replica before it is overwritten.
"""

from collections.abc import Sequence
from typing import Any

from deepspeed_cdp.plan.actions import Action, Kind
from deepspeed_cdp.plan.constants import PERSISTENT
from deepspeed_cdp.plan.replicated import ReplicatedPlan
from deepspeed_cdp.verify.dry_run import DryRun
from deepspeed_cdp.verify.state import Place, Rank


class ReplicaDryRun(DryRun):
    """See ``DryRun``; ``holds``, by (rank, unit), is the version that each replica has, and whether it is corrected."""

    plan: ReplicatedPlan

    def __init__(self, plan: ReplicatedPlan, *args: Any, **kwargs: Any):
        self.holds: dict[tuple[int, int], tuple[int, bool]] = {}
        super().__init__(plan, *args, **kwargs)
        owned = [plan.schedule.owned(r) for r in range(plan.schedule.ranks)]
        self.v_predicted = [plan.v_layout(stage)[0] if plan.is_predicted(stage) else {} for stage in owned]
        self.handlers[Kind.REFRESH_PARAM] = self._refresh_param
        for rank in self.ranks:
            for i, offset in plan.replica[0].items():
                rank.content["R", offset] = ("p", i, 0)
                rank.busy.setdefault("R", {})[offset] = plan.unit(i).p_bytes
                self.holds[rank.number, i] = (0, False)

    def _next_version(self, rank: Rank, a: Action) -> int | None:
        """The version of the unit's stage that the next micro-batch changes to, if it does."""
        after = (rank.step, a.round + 1) if a.round + 1 < self.schedule.rounds else (rank.step + 1, 0)
        return self.plan.refreshed_version(*after, rank.number, self._stage(a))

    def _leave(self, rank: Rank, a: Action, place: Place) -> None:
        if (a.backward or a.unit == PERSISTENT) and self._next_version(rank, a) is not None:
            self._free(rank, *place)  # the last pass that reads this version

    def _refresh_param(self, rank: Rank, a: Action) -> bool:
        if a.peer is not None and not self._arrived(rank, a):
            return False
        place, to, version = self._at(rank, a), ("R", a.into[1]), rank.step + a.version
        if self._still_read(rank, *to, a.nbytes) or place[0][0] == "W" and self._predicting(rank, a.unit):
            return False
        if a.into[0] != "R" or to[1] != self.plan.replica[0].get(a.unit):
            raise self._error(rank, "refreshes another place than the unit's in the replica")
        published = [*self.written[rank.number][version % 2], ("W0", self.v_predicted[rank.number])]
        if a.peer is None and place not in [(region, offsets.get(a.unit)) for region, offsets in published]:
            raise self._error(rank, "copies a unit that this rank neither owns nor was sent")
        current = self.order[rank.reads - 1][0]  # the round under way
        wanted = (
            self._next_version(rank, a)
            if a.backward
            else self.plan.refreshed_version(rank.step, a.round, rank.number, self._stage(a))
        )
        if a.peer is None and (wanted != version or a.round != (current if a.backward else 0)):
            raise self._error(rank, "copies a version that the next micro-batch does not read")
        ahead = a.backward and a.round + 1 == self.schedule.rounds  # the copy is for the next step
        if rank.content.get(place) != self._params(a.unit, rank.step + ahead, version):
            raise self._error(rank, f"copies {rank.content.get(place)} as version {version}")
        refreshed = version, self.plan.is_corrected(rank.step + ahead - version)
        if place[0] != "R":
            self._claim(rank, *to, a.nbytes)
            rank.content[to] = rank.content[place]
            if place[0] == "L" and not self.plan.forwarded(rank.step, a.round, rank.number, self._stage(a)):
                self._free(rank, *place)
        elif place != to:
            raise self._error(rank, "has landed in another unit's place")
        if refreshed < self.holds[rank.number, a.unit]:
            raise self._error(rank, f"goes back to version {version} from {self.holds[rank.number, a.unit]}")
        self.holds[rank.number, a.unit] = refreshed
        return True

    def _wait_param(self, rank: Rank, a: Action) -> bool:
        if a.region != "R" or a.peer is not None:
            raise self._error(rank, "reads another place than the replica")
        if not super()._wait_param(rank, a):
            return False
        if self.holds[rank.number, a.unit] != (rank.step + a.version, self.plan.is_corrected(-a.version)):
            raise self._error(
                rank, f"reads a version that has landed, but the replica has version {self.holds[rank.number, a.unit]}"
            )
        return True

    def _may_forward(self, rank: Rank, a: Action, place: Place, used: Place | None) -> bool:
        if used is None or self.holds[rank.number, a.unit] != (rank.step + a.version, self.plan.is_corrected(-a.version)):
            return False
        if place[0] == "L":
            self._free(rank, *place)  # its next message waits until the neighbour has received this one
        return place[0] == "L" or used == place

    def _overwrite(self, rank: Rank, a: Action, units: Sequence[int]) -> None:
        for i in units:
            if not self.plan.publishes_separate_copy:
                self._claim(rank, "R", self.v_layouts[rank.number][i], self.plan.unit(i).p_bytes)
            elif self._reads_published(rank, i) and self.holds[rank.number, i][0] != rank.step + a.version:
                raise self._error(rank, f"overwrites a version of unit {i} that is not in its owner's replica yet")
        super()._overwrite(rank, a, units)

    def _reads_published(self, rank: Rank, unit: int) -> bool:
        """Whether the owner reads what its updates publish, and not predictions only."""
        stage = self.plan.unit(unit).stage
        return not self.plan.is_predicted(stage) or (rank.number, stage, False) in self.plan.first_reads

    def _new_version(self, rank: Rank, version: int) -> None:
        super()._new_version(rank, version)
        if not self.plan.publishes_separate_copy:
            self.holds.update({(rank.number, i): (version, False) for i in self.v_layouts[rank.number]})
