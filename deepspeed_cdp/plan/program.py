"""Each rank's program: the ordered actions of one step, built from the plan.

Rounds of gradient accumulation repeat. In rounds 0 and 1 versions change. The last two rounds grant credits for the next step.
Any two rounds in between differ only in their numbers and logical times. So the executor runs a ``Program``, which holds 6 or 7
rounds and repeats rounds 2 and 3: two, since the slots of region H alternate.
"""

from collections.abc import Sequence
from dataclasses import replace

from deepspeed_cdp.plan.actions import Action, Kind, Post
from deepspeed_cdp.plan.builder import Builder, after_passes
from deepspeed_cdp.plan.constants import PERSISTENT, START
from deepspeed_cdp.plan.plan import Plan
from deepspeed_cdp.plan.replicated import ReplicaBuilder, ReplicatedPlan

BUILDERS: dict[type[Plan], type[Builder]] = {Plan: Builder, ReplicatedPlan: ReplicaBuilder}


def build(plan: Plan, rank: int, first: bool) -> tuple[Action, ...]:
    """The rank's actions for one step: the ``first`` since a flush (with everything before it), or any later one.

    A program ends where the rank's next step begins. So it includes all actions between two steps (the stall under ``dp``).
    """
    return builder(plan, rank, 0 if first else 1).build()


PULLS = (Kind.PULL_PARAM, Kind.PULL_GRAD)
FEW = 6  # rounds of a program that repeats some; 7 if the step's number of rounds is odd
REPEATED = 2  # rounds 2 and 3


def few_rounds(plan: Plan) -> Plan:
    """The plan itself, or if it has many rounds, an equal one with 6 or 7 rounds, which has the same kinds of rounds."""
    rounds = plan.schedule.rounds
    if rounds <= FEW + 1:
        return plan
    return with_rounds(plan, FEW + rounds % REPEATED)


def with_rounds(plan: Plan, rounds: int) -> Plan:
    """The same plan with another number of rounds; the layouts do not depend on it."""
    other = replace(plan, schedule=replace(plan.schedule, rounds=rounds))
    other.__dict__["windows"] = plan.windows
    return other


class Program:
    """A rank's actions for one step, in order.

    Rounds and logical times of the actions are those of ``few_rounds(plan)``.

    Attributes:
        held: the actions of the program with few rounds.
        repeats: how often rounds 2 and 3 come again.
        per_round: actions of each of them.
        begin, end: where they are in ``held``; at its end if nothing repeats.
    """

    def __init__(self, plan: Plan, rank: int, first: bool, rendezvous: bool = False):
        few = few_rounds(plan)
        self.held = (with_rendezvous if rendezvous else build)(few, rank, first)
        self.repeats = (plan.schedule.rounds - few.schedule.rounds) // REPEATED
        self.begin = self.end = len(self.held)
        if self.repeats:
            begins = [(few.schedule.start(0 if first else 1, m, rank) * few.scale, START) for m in (2, 2 + REPEATED)]
            self.begin, self.end = (next(x for x, a in enumerate(self.held) if a.key >= begin) for begin in begins)
        self.per_round = (self.end - self.begin) // REPEATED

    def __len__(self) -> int:
        return len(self.held) + self.repeats * (self.end - self.begin)

    def __getitem__(self, index: int) -> Action:
        if index < self.end:
            return self.held[index]
        return self.held[index - self.skipped_at(index) * self.per_round]

    def between(self, begin: int, end: int) -> Sequence[Action]:
        """The actions from ``begin`` to before ``end``."""
        skipped = self.skipped_at(begin)
        if skipped == self.skipped_at(end - 1):
            return self.held[begin - skipped * self.per_round : end - skipped * self.per_round]
        return [self[index] for index in range(begin, end)]

    def skipped_at(self, index: int) -> int:
        """How many rounds come between this action of the step and the equal one of ``held``."""
        if not self.repeats or index < self.end:
            return 0
        return min((index - self.begin) // (self.end - self.begin), self.repeats) * REPEATED

    def skipped(self, round: int) -> int:
        """How many rounds come between this round of the step and the equal round of ``held``."""
        return min(max(round // REPEATED - 1, 0), self.repeats) * REPEATED if self.repeats else 0


def forward_ends(actions: Sequence[Action]) -> dict[int, int]:
    """By round, the index at which the script's code between a forward and its backward comes.

    That is right before the first backward: pulls before it must not wait for that code. Predictions of the same time come after
    the code: an offloaded optimizer makes them on the host, which then waits for another rank's backward.
    """
    ends: dict[int, int] = {}
    for index, a in enumerate(actions):
        if a.kind.of_pass and a.backward and a.unit != PERSISTENT and a.round not in ends:
            before = index
            while before and actions[before - 1].key == a.key:
                before -= 1
            predicted = (x for x in range(before, index) if actions[x].kind == Kind.PREDICT_PARAM)
            ends[a.round] = next(predicted, index)
    return ends


def backward_end(actions: Sequence[Action]) -> int:
    """The index at which the script's code between the last backward and the end of the step comes.

    That is behind the last pass, and behind all that only begins there: other ranks' passes of this step need these relays.
    """
    end = max(index for index, a in enumerate(actions, 1) if a.kind.of_pass)
    while end < len(actions) and (actions[end].relayed or actions[end].kind in PULLS):
        end += 1
    return end


def builder(plan: Plan, rank: int, step: int) -> Builder:
    """The builder of the rank's program for this step since the last flush."""
    return BUILDERS[type(plan)](plan, rank, step)


def initial_posts(plan: Plan, rank: int) -> tuple[Post, ...]:
    """The credits that a rank grants after a flush, before its first action: every region is free."""
    return builder(plan, rank, 0).initial_posts()


def with_rendezvous(plan: Plan, rank: int, first: bool) -> tuple[Action, ...]:
    """``build``, with a START_RECV or START_SEND at every message that another rank initiates with this one.

    Transports whose two sides wait for each other need it (transport/rendezvous.py). All ranks' messages have one order: (step,
    ``after_passes``, time, phase, order of the kind, initiating rank, place in its program). Each program is a part of this
    order, so no cycle of waits can form.

    A message belongs to its initiator's step on both sides, whatever the other side's logical time. So no message lies across a
    barrier that a user puts between two steps.
    """

    def key(a: Action, initiator: int) -> tuple:
        return after_passes(plan, initiator, 0 if first else 1, a), a.time, a.phase, a.order, initiator

    entries = [(key(a, rank), a) for a in build(plan, rank, first)]
    for other in range(plan.schedule.ranks):
        for a in build(plan, other, first) if other != rank else ():
            kind = Kind.START_SEND if a.kind in PULLS else Kind.START_RECV
            entries += [
                (key(a, other), a._replace(kind=kind, peer=other, stream=stream, posts=()))
                for stream, peer in _initiated(plan, other, a)
                if peer == rank
            ]
    return tuple(a for _, a in sorted(entries, key=lambda entry: entry[0]))  # stable


def edges(plan: Plan) -> list[tuple[str, int, int]]:
    """All (stream, source, destination) on which messages travel; the same list in the same order on every rank."""
    few = few_rounds(plan)
    found = {("S", r, (r + 1) % plan.schedule.ranks) for r in range(plan.schedule.ranks) if plan.schedule.ranks > 1}
    for rank in range(plan.schedule.ranks):
        for first in (True, False):
            for a in build(few, rank, first):
                found |= {
                    (stream, peer, rank) if a.kind in PULLS else (stream, rank, peer)
                    for stream, peer in _initiated(plan, rank, a)
                }
    return sorted(found)


def _initiated(plan: Plan, rank: int, a: Action) -> list[tuple[str, int]]:
    """(stream, peer) of the messages that this action of ``rank`` initiates."""
    n = plan.schedule.ranks
    if a.kind == Kind.GRAD_NORM:
        return [("S", (rank + 1) % n)] if n > 1 else []
    if a.kind == Kind.SEND_NORM:
        return [("T", r) for r in range(n - 1)]
    return [(a.stream, a.peer)] if a.kind.initiates and a.peer not in (None, rank) else []
