"""Several rings: how the owners of a stage, one per ring, add up its gradient sums, as data.

The owners of a stage in C rings form a chain. All have the same items in the same order: the units of the stage that have a
gradient sum, and ``PAIR``, a rank's loss sum and count with numbers that rings compare (``Plan.across_nbytes``). Ring c runs
these links inside its GRAD_NORM::

    for each item:  wait for the own ring's sum; if c > 0, receive X from ring c-1 and add it
                    send X to ring c+1; the last ring has the total and sends it as Y to ring c-1
    for each item:  if c < C-1, receive Y from ring c+1, and send it to ring c-1 if there is one
                    average the total (and update the unit)

The key of a link, (sweep, item, hop), refines the key of GRAD_NORM. A link waits only for links with smaller keys, or for actions
with smaller keys of the plan. So no cycle of waits can form, in whatever order the chains of the stages run
(docs/algorithm.md#rings-of-rings). ``verify.cross_ring.validate`` checks it by a dry-run of all rings together.
"""

from collections.abc import Sequence
from enum import Enum, auto
from typing import NamedTuple

from deepspeed_cdp.plan.plan import Plan

PAIR = -2  # the item after the units


class LinkKind(Enum):
    """An owner's operation on one item of the chain."""

    WAIT_OWN = auto()  # wait for the own ring's sum
    START_RECV = auto()  # start to receive, for transports whose two sides wait for each other
    RECV = auto()
    ADD = auto()
    SEND = auto()
    GRANT_CREDIT = auto()  # the next message may land
    WAIT_SENT = auto()  # wait until the receiver has the message
    FINISHED = auto()  # the total is here, and no message still reads it


class Link(NamedTuple):
    """One operation of an owner; ``item`` is a unit or PAIR, ``stream`` X or Y."""

    key: tuple[int, int, int]
    kind: LinkKind
    item: int
    stream: str = ""


def finishing(plan: Plan, rank: int) -> tuple[int, ...]:
    """The owned units with a gradient sum, in the order in which sums finish.

    The last rank has all at once, and takes them in the order in which its next forward reads them.
    """
    units = tuple(i for i in plan.members(plan.schedule.owned(rank)) if plan.unit(i).g_bytes)
    return units if rank == plan.schedule.ranks - 1 else units[::-1]


def chain(ring: int, rings: int, units: Sequence[int]) -> tuple[Link, ...]:
    """The links of the owner in ``ring``, in order."""
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
        if next_to_last:  # the last ring sends Y of this item before it receives X of the next one
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
    """(stream, item) of the messages that may land once region X is free: at the start, and after each update."""
    return tuple(("X" if ring else "Y", i) for i in (*units, PAIR))


def across_bytes(plan: Plan, rank: int, ring: int) -> int:
    """Bytes that this rank of ``ring`` receives from other rings in a step: X except in ring 0, Y except in the last ring."""
    stage = plan.schedule.owned(rank)
    item = sum(plan.unit(i).g_bytes for i in plan.members(stage)) + plan.across_nbytes
    return ((ring > 0) + (ring < plan.rings - 1)) * item
