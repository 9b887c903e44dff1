"""Dry-run of several rings together (plan/cross_ring.py)."""

import functools
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

from deepspeed_cdp.plan.actions import Action
from deepspeed_cdp.plan.cross_ring import PAIR, Link, LinkKind, chain, finishing, first_posts
from deepspeed_cdp.plan.plan import Plan
from deepspeed_cdp.plan.program import build
from deepspeed_cdp.plan.replicated import ReplicatedPlan
from deepspeed_cdp.verify.dry_run import CONDITIONS, DryRun
from deepspeed_cdp.verify.replicated import ReplicaDryRun
from deepspeed_cdp.verify.state import Key, Rank
from deepspeed_cdp.verify.well_formed import PlanError


class _RingMessage(NamedTuple):
    """A push, or a credit; a push holds the sums of ``rings`` rings."""

    key: tuple
    step: int
    item: int
    rings: int = 0


def lock_step(plan: Plan, sequence: int = 1, tensor: int = 1) -> list[list[tuple[int, int]]]:
    """The groups of ``sequence`` or ``tensor`` ranks, each as (ring, rank in the ring): the same rank of neighbouring rings."""
    members = sequence * tensor
    starts = range(0, plan.rings * tensor, members) if members > 1 else ()
    return [[(c, r) for c in range(start, start + members)] for start in starts for r in range(plan.schedule.ranks)]


def validate(
    plan: Plan,
    steps: int = 4,
    links: Sequence[Sequence[Sequence[Link]]] | None = None,
    groups: Sequence[Sequence[tuple[int, int]]] = (),
    tensor: int = 1,
) -> None:
    """Run all rings of a plan together, under all ``CONDITIONS``.

    Args:
        links: by ring and rank; they replace those of ``chain``, in tests.
        groups: of (ring, rank in the ring): members of a group meet before every action of their programs, relays apart. So they
            may have collectives anywhere between two actions: in each attention layer, say.
        tensor: families of ``plan.rings`` rings each, which exchange no sums; every ``tensor``-th ring is in the same one. The
            members of a group meet within GRAD_NORM, too, where they add up their norms.
    Raises:
        PlanError: naming rank, step, ring and link.
    """
    ranks = range(plan.schedule.ranks)
    count = plan.rings * tensor
    links = links or [
        [chain(c // tensor, plan.rings, finishing(plan, r)) if plan.rings > 1 else () for r in ranks] for c in range(count)
    ]
    programs = functools.cache(lambda rank, first: build(plan, rank, first))  # all rings have the same
    for condition in CONDITIONS:
        rings: list[_Ring] = []
        for c in range(count):
            rings.append(_RINGS[type(plan)](plan, steps, {**condition, "programs": programs}, links[c], rings, tensor))
        for group in groups:
            for c, r in group:
                rings[c].groups[r] = [(rings[other], rings[other].ranks[place]) for other, place in group]
        everyone = [(ring, rank) for ring in rings for rank in ring.ranks]
        for ring, rank in everyone:
            ring.open(rank, (-1,))
        while any(rank.step < steps for _, rank in everyone):
            floor, moved = min(rank.step for _, rank in everyone), False
            for ring, rank in everyone:
                moved |= ring.advance(rank, floor)
            if not moved:
                stuck = [str(ring.wrong(rank, "waits")) for ring, rank in everyone if rank.cursor < len(rank.program)]
                raise PlanError(f"nothing moves any more: {'; '.join(stuck)}")


class _Ring(DryRun):
    """One ring of several, with its owners' ends of the chains.

    Attributes:
        number, ring: this ring's number; that in its family.
        links, at: by rank, its links; the next one of the GRAD_NORM under way.
        x: by rank, item -> content of region X: (stream,) after a credit for it, then (step, number of rings summed).
        o: by rank, item -> number of rings in the own ring's region of finished sums.
        posts, coming: (stream, rank) -> credits, and pushes of another ring.
        come: (stream, rank, item) -> the push that has landed.
        unsent: by rank, (stream, item) of pushes that still read.
        groups: by rank, the ranks of all rings that it meets before every action, with their rings.
        reduced: by rank, the latest step of which it has reduced all sums.
    """

    def __init__(
        self,
        plan: Plan,
        steps: int,
        condition: dict[str, Any],
        links: Sequence[Sequence[Link]],
        rings: Sequence["_Ring"],
        tensor: int,
    ):
        super().__init__(plan, steps, **condition)
        self.number, self._rings, self._tensor, self.links = len(rings), rings, tensor, links
        self.ring, self.reduced = self.number // tensor, [-1] * self.schedule.ranks
        n = self.schedule.ranks
        self.at = [0] * n
        self.x: list[dict[int, tuple | None]] = [{} for _ in range(n)]
        self.o: list[dict[int, int]] = [{} for _ in range(n)]
        self.posts: dict[tuple[str, int], deque[_RingMessage]] = {}
        self.coming: dict[tuple[str, int], deque[_RingMessage]] = {}
        self.come: dict[tuple[str, int, int], _RingMessage] = {}
        self.unsent: list[set[tuple[str, int]]] = [set() for _ in range(n)]
        self.groups: list[list[tuple[_Ring, Rank]]] = [[] for _ in range(n)]

    def neighbour(self, step: int) -> "_Ring":
        """The next (1) or previous (-1) ring of the family."""
        return self._rings[self.number + step * self._tensor]

    def wrong(self, rank: Rank, reason: str) -> PlanError:
        links, at = self.links[rank.number], self.at[rank.number]
        return self._error(rank, f"ring {self.number}, {links[at] if at < len(links) else 'done'}: {reason}")

    def open(self, rank: Rank, key: tuple) -> None:
        """Region X is free: grant the first credits."""
        for stream, item in first_posts(self.ring, finishing(self.plan, rank.number)) if self.plan.rings > 1 else ():
            self._grant_credit(rank, stream, item, key, rank.version)

    def _grant_credit(self, rank: Rank, stream: str, item: int, key: tuple, step: int) -> None:
        if self.x[rank.number].get(item) is not None:
            raise self.wrong(rank, f"region X of item {item} is still in use: {self.x[rank.number][item]}")
        self.x[rank.number][item] = (stream,)
        self.posts.setdefault((stream, rank.number), deque()).append(_RingMessage(key, step, item))
        self._land(stream, rank)

    def _land(self, stream: str, rank: Rank) -> None:
        """Messages to this rank land where it has granted a credit."""
        edge = stream, rank.number
        posts, pushes = self.posts.get(edge), self.coming.get(edge)
        while posts and pushes:
            post, push = posts.popleft(), pushes.popleft()
            if (post.step, post.item) != (push.step, push.item):
                raise self.wrong(
                    rank,
                    f"{stream} of item {push.item}, step {push.step}, lands where item {post.item}, step {post.step}, should",
                )
            if not post.key < push.key:
                raise self.wrong(
                    rank, f"{stream} of item {push.item} has its credit at {post.key}, not before the push at {push.key}"
                )
            self.come[stream, rank.number, push.item] = push
            sender = self.neighbour(-1 if stream == "X" else 1)
            sender.unsent[rank.number].discard((stream, push.item))
            sender.ranks[rank.number].blocked -= 1

    def _may_act(self, rank: Rank) -> bool:
        here = rank.step, rank.cursor
        return super()._may_act(rank) and all((x.step, x.cursor) >= here for _, x in self.groups[rank.number])

    def _grad_norm(self, rank: Rank, a: Action) -> bool:
        links, r, step = self.links[rank.number], rank.number, rank.step + a.version
        while self.at[r] < len(links):
            if self.blocking and rank.blocked or not self._link(rank, step, self._key(rank, a), links[self.at[r]]):
                return False
            self.at[r] += 1
        if self._tensor > 1 and not self._members_reduced(rank, step):
            return False
        if not super()._grad_norm(rank, a):
            return False
        wanted = dict.fromkeys((*finishing(self.plan, r), PAIR), (step, self.plan.rings))
        if self.plan.rings > 1 and self.x[r] != wanted or self.unsent[r]:
            raise self.wrong(rank, f"averages {self.x[r]} while {sorted(self.unsent[r])} are still to be sent")
        self.at[r] = 0
        return True

    def _members_reduced(self, rank: Rank, step: int) -> bool:
        """Whether all members of the rank's tensor group have reduced the step's sums, so that they can add up their norms."""
        r = rank.number
        if self._landed(rank, step, [i for i in self.o_layouts[r] if i not in self.plan.eager_units(r)]) is None:
            return False
        self.reduced[r] = step
        return all(ring.reduced[x.number] >= step for ring, x in self.groups[r])

    def _link(self, rank: Rank, step: int, time: Key, link: Link) -> bool:
        r, i, key = rank.number, link.item, (*time, *link.key)
        x, o, last = self.x[r], self.o[r], self.plan.rings - 1
        if link.kind == LinkKind.WAIT_OWN:
            n = self.schedule.ranks
            if i != PAIR and r != n - 1 and ("G", n - 1, step, self.schedule.rounds - 1, i, True) not in rank.landed:
                return False
            o[i] = 1
        elif link.kind == LinkKind.RECV:
            push = self.come.get((link.stream, r, i))
            if push is None:
                return False
            if not push.key < key or x.get(i) != (link.stream,):
                raise self.wrong(rank, f"arrives at {push.key}, which is not earlier, or lands on {x.get(i)}")
            del self.come[link.stream, r, i]
            x[i] = (step, push.rings)
        elif link.kind == LinkKind.ADD:
            if x.get(i) != (step, self.ring) or o.get(i) != 1:
                raise self.wrong(rank, f"adds {o.get(i)} and {x.get(i)}")
            x[i], o[i] = ((step, self.ring + 1), 1) if self.ring == last else (None, self.ring + 1)
        elif link.kind == LinkKind.SEND:
            up = link.stream == "X"
            if (o.get(i) if up else x.get(i)) != (self.ring + 1 if up else (step, last + 1)):
                raise self.wrong(rank, f"sends {o.get(i) if up else x.get(i)}")
            self.unsent[r].add((link.stream, i))
            rank.blocked += 1
            there, summed = self.neighbour(1 if up else -1), self.ring + 1 if up else last + 1
            there.coming.setdefault((link.stream, r), deque()).append(_RingMessage(key, step, i, summed))
            there._land(link.stream, there.ranks[r])
        elif link.kind == LinkKind.GRANT_CREDIT:
            self._grant_credit(rank, link.stream, i, key, step)
        elif link.kind == LinkKind.WAIT_SENT:
            return (link.stream, i) not in self.unsent[r]
        elif link.kind == LinkKind.FINISHED and x.get(i) != (step, last + 1):
            raise self.wrong(rank, f"has {x.get(i)} for a total")
        return True

    def _optimizer_step(self, rank: Rank, a: Action) -> bool:
        if not super()._optimizer_step(rank, a):
            return False
        self.x[rank.number].clear()
        self.open(rank, self._key(rank, a))
        return True


class _ReplicaRing(_Ring, ReplicaDryRun):
    """The same, of replicas."""


_RINGS: dict[type[Plan], type[_Ring]] = {Plan: _Ring, ReplicatedPlan: _ReplicaRing}
