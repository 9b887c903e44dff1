"""Which rank is where: several rings, with sequence or tensor parallelism or without (docs/parallelism.md).

Numbers of ranks here are those of the whole job (world ranks) unless said otherwise.
"""

from typing import NamedTuple


class RingMap(NamedTuple):
    """The ring of each world rank, and its place in that ring, which is its rank for the plan.

    A *group* is consecutive ranks: ``sequence`` that work on one sequence, or ``tensor`` that share the layers, as in DeepSpeed.
    Its members work in lock-step, so they must have one logical time: the same place, in as many rings. ``ring_size`` consecutive
    groups make as many rings as a group has members, and member j of each is in ring j of these. Without groups a ring is
    consecutive ranks.

    A *family* is the rings that hold the same parameters, and average their gradients: all, or with ``tensor`` those of the same
    members.

    Attributes:
        ranks: of the job.
        ring_size: ranks per ring, R.
        sequence: ranks per sequence group, S; tensor: ranks per tensor group, T. One of them is 1.
    """

    ranks: int
    ring_size: int
    sequence: int = 1
    tensor: int = 1

    @property
    def members(self) -> int:
        """Ranks per group."""
        return self.sequence * self.tensor

    @property
    def rings(self) -> int:
        """The number of rings."""
        return self.ranks // self.ring_size

    def ring(self, rank: int) -> int:
        """The ring of a world rank."""
        return rank // (self.ring_size * self.members) * self.members + rank % self.members

    def place(self, rank: int) -> int:
        """The place of a world rank in its ring."""
        return rank // self.members % self.ring_size

    def rank(self, ring: int, place: int) -> int:
        """The world rank at a place of a ring."""
        return (ring // self.members * self.ring_size + place) * self.members + ring % self.members

    def group(self, rank: int) -> range:
        """The world ranks of a rank's group."""
        first = rank - rank % self.members
        return range(first, first + self.members)

    def family(self, rank: int) -> range:
        """The rings that hold the same parameters as a world rank's."""
        return range(rank % self.tensor, self.rings, self.tensor)

    def grid(self) -> list[list[int]]:
        """By ring and place, the world rank."""
        return [[self.rank(ring, place) for place in range(self.ring_size)] for ring in range(self.rings)]
