"""Which rank is where: several rings, with sequence parallelism or without (docs/parallelism.md).

Numbers of ranks here are those of the whole job (world ranks) unless said otherwise.
"""

from typing import NamedTuple


class RingMap(NamedTuple):
    """The ring of each world rank, and its place in that ring, which is its rank for the plan.

    A *sequence group* is ``sequence`` consecutive ranks, as in DeepSpeed. Its members work in lock-step on one sequence, so they
    must have one logical time: the same place, in as many rings. ``ring_size`` consecutive groups make ``sequence`` rings, and
    member j of each is in ring j of these. Without sequence parallelism a group is one rank, and a ring is consecutive ranks.

    Attributes:
        ranks: of the job.
        ring_size: ranks per ring, R.
        sequence: ranks per sequence group, S.
    """

    ranks: int
    ring_size: int
    sequence: int = 1

    @property
    def rings(self) -> int:
        """The number of rings."""
        return self.ranks // self.ring_size

    def ring(self, rank: int) -> int:
        """The ring of a world rank."""
        return rank // (self.ring_size * self.sequence) * self.sequence + rank % self.sequence

    def place(self, rank: int) -> int:
        """The place of a world rank in its ring."""
        return rank // self.sequence % self.ring_size

    def rank(self, ring: int, place: int) -> int:
        """The world rank at a place of a ring."""
        return (ring // self.sequence * self.ring_size + place) * self.sequence + ring % self.sequence

    def group(self, rank: int) -> range:
        """The world ranks of a rank's sequence group."""
        first = rank - rank % self.sequence
        return range(first, first + self.sequence)

    def grid(self) -> list[list[int]]:
        """By ring and place, the world rank."""
        return [[self.rank(ring, place) for place in range(self.ring_size)] for ring in range(self.rings)]
