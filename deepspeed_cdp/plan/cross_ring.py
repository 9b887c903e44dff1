"""What an owner does to average its stage over several rings (cross_ring.py), as data, and a dry-run of it. Pure, no torch.

The owners at one position of C rings form a chain. All have the same items in the same order: the units of the stage that have
sums, and ``PAIR``, a rank's loss sum and count. Ring c does, inside its NORM (docs/algorithm.md)::

    for each item:  its own ring's sum is there; unless c = 0, X comes from ring c-1 and is added
                    X goes to ring c+1; the last ring has the total: Y goes to ring c-1
    for each item:  unless c = C-1, Y comes from ring c+1, and goes to ring c-1 if there is one
                    the total is averaged (and the unit updated)

Links have keys, which refine NORM's: (sweep, item, hop). Whatever a link waits for belongs to a smaller one, or to a smaller key
of the plan. So nothing closes a cycle, whatever the order in which the chains of different positions come about. ``validate``
does not trust this: it runs all rings of a plan together.
"""

from collections.abc import Sequence
from enum import Enum, auto
from typing import NamedTuple

from deepspeed_cdp.plan.constants import ACROSS_BYTES
from deepspeed_cdp.plan.plan import Plan

PAIR = -2  # the item after the units


class LinkKind(Enum):
    """What an owner does with one item of the chain."""

    WAIT_OWN = auto()  # the own ring's sum is there
    START_RECV = auto()  # begin to receive, where both sides of a message wait for each other
    RECV = auto()
    ADD = auto()
    SEND = auto()
    GRANT_CREDIT = auto()  # let the next message in
    WAIT_SENT = auto()  # what was sent is taken
    FINISHED = auto()  # the total is there, and nobody else reads it


class Link(NamedTuple):
    """One thing an owner does, as data."""

    key: tuple[int, int, int]
    kind: LinkKind
    item: int
    stream: str = ""


def finishing(plan: Plan, rank: int) -> tuple[int, ...]:
    """The owned units that have sums, as they are finished; the last rank has all at once, and reads the first unit first."""
    units = tuple(i for i in plan.members(plan.schedule.owned(rank)) if plan.unit(i).g_bytes)
    return units if rank == plan.schedule.ranks - 1 else units[::-1]


def chain(ring: int, rings: int, units: Sequence[int]) -> tuple[Link, ...]:
    """What the owner in ``ring`` does, in order."""
    links, last, next_to_last = [], ring == rings - 1, ring == rings - 2
    items = (*units, PAIR)
    for j, i in enumerate(items):
        key = 0, j, ring
        links.append(Link(key, LinkKind.WAIT_OWN, i))
        if ring:
            links += [Link(key, LinkKind.START_RECV, i, "X"), Link(key, LinkKind.RECV, i, "X"), Link(key, LinkKind.ADD, i)]
        links.append(Link(key, LinkKind.SEND, i, "Y" if last else "X"))
        if ring and not last:
            links.append(Link(key, LinkKind.GRANT_CREDIT, i, "Y"))
        if next_to_last:  # the last ring sends it before it sees the next item
            links.append(Link((0, j, rings), LinkKind.START_RECV, i, "Y"))
    for j, i in enumerate(items):
        key = 1, j, rings - 1 - ring
        if not last:
            links += [] if next_to_last else [Link(key, LinkKind.START_RECV, i, "Y")]
            links.append(Link(key, LinkKind.RECV, i, "Y"))
            links += [Link(key, LinkKind.SEND, i, "Y"), Link(key, LinkKind.WAIT_SENT, i, "Y")] if ring else []
        links += [Link(key, LinkKind.WAIT_SENT, i, "Y" if last else "X"), Link(key, LinkKind.FINISHED, i)]
    return tuple(links)


def first_posts(ring: int, units: Sequence[int]) -> tuple[tuple[str, int], ...]:
    """(stream, item) that may land as soon as region X is free: at the start, and after each update."""
    return tuple(("X" if ring else "Y", i) for i in (*units, PAIR))


def across_bytes(plan: Plan, rank: int, ring: int) -> int:
    """Bytes that the rank at this position receives from other rings in a step: X unless in ring 0, Y unless in the last."""
    stage = plan.schedule.owned(rank)
    item = sum(plan.unit(i).g_bytes for i in plan.members(stage)) + ACROSS_BYTES
    return ((ring > 0) + (ring < plan.rings - 1)) * item
