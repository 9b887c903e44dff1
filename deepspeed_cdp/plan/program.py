"""From the plan to each rank's program: the ordered actions of one step. Pure, no torch."""

from deepspeed_cdp.plan.actions import Action, Kind, Post
from deepspeed_cdp.plan.builder import Builder
from deepspeed_cdp.plan.plan import Plan
from deepspeed_cdp.plan.replicated import ReplicaBuilder


def build(plan: Plan, rank: int, first: bool) -> tuple[Action, ...]:
    """The rank's actions for one step: the first since a flush (with what comes before it), or any later one.

    A program ends where the rank's next step begins, so it holds what happens between two steps too (the stall under ``dp``).
    """
    return builder(plan, rank, 0 if first else 1).build()


def builder(plan: Plan, rank: int, step: int) -> Builder:
    """What makes the rank's program of this step since the last flush."""
    if plan.replicated:
        return ReplicaBuilder(plan, rank, step)
    return Builder(plan, rank, step)


def initial_posts(plan: Plan, rank: int) -> tuple[Post, ...]:
    """What may land before the first action after a flush: every region is free."""
    return builder(plan, rank, 0).initial_posts()


def with_rendezvous(plan: Plan, rank: int, first: bool) -> tuple[Action, ...]:
    """``build`` with a START_RECV or START_SEND wherever another rank begins a message with this one, for transports whose
    two sides wait
    for each other (transport/rendezvous.py).

    Actions with messages of all ranks have one order: (step, whether an owner's after its rank's passes, time, phase, order of
    the kind, initiating rank, place in its program). Each rank's program is a part of it. A message belongs to its initiator's
    step on both sides, so that none lies across a barrier that a user puts between two steps: the other side meets it in that
    step, whatever its own logical time.
    """

    def key(a: Action, by: int) -> tuple:
        return after_passes(plan, by, first, a), a.time, a.phase, a.order, by

    entries = [(key(a, rank), a) for a in build(plan, rank, first)]
    for other in range(plan.schedule.ranks):
        if other != rank:
            for a in build(plan, other, first):
                entries += [
                    (
                        key(a, other),
                        a._replace(
                            kind=Kind.START_SEND if a.kind == Kind.PULL_PARAM else Kind.START_RECV,
                            peer=other,
                            stream=stream,
                            posts=(),
                        ),
                    )
                    for stream, peer in _initiated(plan, other, a)
                    if peer == rank
                ]
    return tuple(a for _, a in sorted(entries, key=lambda entry: entry[0]))  # stable


def edges(plan: Plan) -> list[tuple[str, int, int]]:
    """All (stream, source, destination) on which messages travel, the same list on every rank, in one order."""
    found = {("S", r, (r + 1) % plan.schedule.ranks) for r in range(plan.schedule.ranks) if plan.schedule.ranks > 1}
    for rank in range(plan.schedule.ranks):
        for first in (True, False):
            for a in build(plan, rank, first):
                found |= {
                    (stream, peer, rank) if a.kind == Kind.PULL_PARAM else (stream, rank, peer)
                    for stream, peer in _initiated(plan, rank, a)
                }
    return sorted(found)


def _initiated(plan: Plan, rank: int, a: Action) -> list[tuple[str, int]]:
    """(stream, peer) of the messages that this action of ``rank`` begins: pushes, and offers that it takes."""
    n = plan.schedule.ranks
    if a.kind == Kind.GRAD_NORM:
        return [("S", (rank + 1) % n)] if n > 1 else []
    if a.kind == Kind.SEND_NORM:
        return [("T", r) for r in range(n - 1)]
    if a.kind in (Kind.FORWARD_PARAM, Kind.SEND_GRAD, Kind.SEND_PERSISTENT_GRAD, Kind.PULL_PARAM) and a.peer != rank:
        return [(a.stream, a.peer)]
    return []


def after_passes(plan: Plan, rank: int, first: bool, a: Action) -> bool:
    """Whether an owner's action comes when its rank's passes of the step are over (``first``: in the first since a flush)."""
    return a.kind.of_owner and a.time >= plan.schedule.start(0 if first else 1, plan.schedule.rounds, rank) * plan.scale
