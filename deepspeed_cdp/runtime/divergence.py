"""Tells all ranks when ranks diverge: options of optimizers that differ, or masters of rings that differ.

No message is added: the numbers travel with the vector of norms (runtime/step_metrics.py) and, between rings, with the sum of
losses (runtime/cross_ring.py). Call a step's turn of that vector its *pass*::

    pass t        the first rank of a ring enters its options of step t; the others compare them with their own of step t.
                  The owners of a stage, one per ring, compare options and checksums of masters.
                  A rank that finds a difference enters it into the vector.
    pass t + 1    all ranks read the difference.
    end of the step in which a rank took part in pass t + 1:  it raises. All ranks do so at the end of the same step.

On GPUs a pass's numbers are read once they have reached the host, so each line may come a step or two later.
"""

import torch

from deepspeed_cdp.optim import options
from deepspeed_cdp.optim.stage_owner import StageOwner
from deepspeed_cdp.plan.constants import CHECKSUM, DIFFERENCE, OPTIONS
from deepspeed_cdp.runtime.state import RankState

ROW = CHECKSUM + OPTIONS  # numbers of a ring's owner
MASTERS = OPTIONS  # in a difference, the place of checksums

Difference = list[float]  # pass + 1, step, two ranks of the world, place of the number, its value on both


class Divergence:
    """One rank's comparisons; numbers lie in the memory that travels."""

    def __init__(self, state: RankState, owner: StageOwner, every: int):
        """
        Args:
            every: steps from one comparison to the next.
        """
        self._owner, self._every, self._schedule = owner, every, state.schedule
        self._rank, self._map, self._world_rank_of = state.rank, state.transport.ring_map, state.transport.world_rank_of
        self._own: dict[int, list[float]] = {}  # options by step, until they are compared
        self._mine: Difference | None = None  # found here
        self._entered = False  # it, or another rank's, is in the vector
        self._seen: Difference | None = None  # read from the vector
        self._known_to_all = False

    def _due(self, step: int) -> bool:
        return step % self._every == 0

    def _options(self, step: int) -> list[float]:
        if step not in self._own:
            self._own[step] = self._owner.numbers(step)
            self._own.pop(step - 16 * self._every, None)  # its pass is over
        return self._own[step]

    def write_row(self, row: torch.Tensor, step: int) -> None:
        """Enter this ring's checksum of masters and options, before the step's update.

        Args:
            row: float64, [ROW]; zeros.
        """
        if self._due(step):
            row[:CHECKSUM].copy_(self._owner.checksum())
            row[CHECKSUM:].copy_(torch.tensor(self._options(step), dtype=torch.float64, device="cpu"), non_blocking=True)

    def write(self, part: torch.Tensor, step: int) -> None:
        """Enter what this rank has to tell into its part of the vector (float64, [DIFFERENCE + OPTIONS]), before it moves on."""
        if self._due(step):
            mine = self._options(step)
            if self._rank == 0:
                part[DIFFERENCE:].copy_(torch.tensor(mine, dtype=torch.float64, device="cpu"), non_blocking=True)
        if self._mine and not self._entered:
            self._entered = True
            part[:DIFFERENCE].copy_(
                torch.tensor([step + 1, *self._mine[1:]], dtype=torch.float64, device="cpu"), non_blocking=True
            )

    @staticmethod
    def parts_of(numbers: list[float]) -> tuple[list[float], list[list[float]]]:
        """The part of the vector, and the rows behind it."""
        length = DIFFERENCE + OPTIONS
        return numbers[:length], [numbers[at : at + ROW] for at in range(length, len(numbers), ROW)]

    def read(self, step: int, part: list[float], rows: list[list[float]]) -> None:
        """Compare the numbers of a pass.

        Args:
            part: as in ``write``, as it came (or as it moved on).
            rows: by ring, as in ``write_row``; empty if there is one ring.
        """
        if part[0]:
            self._seen, self._entered = part[:DIFFERENCE], True
            self._known_to_all = self._known_to_all or step >= part[0]
        if self._due(step) and not self._mine:
            self._mine = self._compare(step, part[DIFFERENCE:], rows)

    def _compare(self, step: int, first: list[float], rows: list[list[float]]) -> Difference | None:
        for ring, row in enumerate(rows):
            here, there = self._world_rank_of(self._rank, 0), self._world_rank_of(self._rank, ring)
            place = options.first_difference(rows[0][CHECKSUM:], row[CHECKSUM:])
            if place is not None:
                return [0, step, here, there, place, rows[0][CHECKSUM + place], row[CHECKSUM + place]]
            if row[:CHECKSUM] != rows[0][:CHECKSUM]:
                return [0, step, here, there, MASTERS, 0, 0]
        mine = self._options(step) if self._rank else first
        place = options.first_difference(first, mine)
        if place is None:
            return None
        return [0, step, self._world_rank_of(0), self._world_rank_of(self._rank), place, first[place], mine[place]]

    def problem(self, at_once: bool = False) -> str | None:
        """What differs, in a sentence, once all ranks know it.

        Args:
            at_once: as soon as this rank knows it; for a rank whose peer is gone.
        """
        found = self._seen or self._mine if at_once or self._known_to_all else None
        if not found:
            return None
        step, a, b, place = map(int, found[1:5])
        if place == MASTERS:
            stage = self._schedule.owned(self._map.place(a))
            return (
                f"the fp32 masters of stage {stage} differ between rank {a} and rank {b} before "
                f"the update of step {step}; restart from a checkpoint before that step"
            )
        return options.sentence(self._owner.user_optimizer.param_groups, place, (a, found[5]), (b, found[6]), step)
