"""Event simulation of a plan: every rank's program (program.build) is walked as the runtime walks it, with times.

Nothing is assumed about the schedule that the engine does not do: the same actions, posts, credits and buffer regions. A rank has
two clocks, one of its passes and one of its owner's stream; a message begins when its bytes are there, its receiver's region is
free and the sender's link is, and takes ``Times.message`` and a latency. As in the runtime on a GPU nothing else waits: a relay
follows the message that it passes on, not the pass. ``beside=False`` is the runtime on CPUs: one clock, on which the owner's work
and a credit that is not there yet hold the passes up. ``ahead=False`` is a host that is not ahead of its GPU: the owner's stream
gets its work only when the passes have come to it.

For rings of up to a few dozen ranks; larger ones: analysis/timing/waves.py.
"""

from bisect import bisect_left, insort
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from deepspeed_cdp.analysis.timing.times import Times
from deepspeed_cdp.plan.actions import Action, Kind, Post
from deepspeed_cdp.plan.constants import END, PERSISTENT
from deepspeed_cdp.plan.plan import Plan
from deepspeed_cdp.plan.program import build, initial_posts

Delays = Callable[[int, int], float]  # (rank, step) -> seconds by which its step begins late


class Pass(NamedTuple):
    """One pass of one unit on one rank; seconds. ``waited``: before it could begin."""

    rank: int
    step: int
    round: int
    unit: int
    backward: bool
    begin: float
    end: float
    waited: float


class Message(NamedTuple):
    """One hand-off, from the moment its link carries it to its arrival; seconds."""

    stream: str
    src: int
    dst: int
    unit: int
    begin: float
    end: float
    nbytes: int


@dataclass
class Run:
    """What was simulated.

    Attributes:
        passes, messages: all of them, in no particular order.
        starts, ends: [step][rank] -> seconds at which its first pass begins and its last one ends.
    """

    plan: Plan
    passes: list[Pass] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)
    starts: list[list[float]] = field(default_factory=list)
    ends: list[list[float]] = field(default_factory=list)

    def settled(self) -> int:
        """The first step that is taken to be past the start-up: half of them."""
        return len(self.starts) // 2

    def period(self) -> float:
        """Seconds per step over the settled ones, of the slowest rank, which the others follow in the end."""
        a, ranks = self.settled() - 1, range(len(self.ends[0]))
        return max(self.ends[-1][r] - self.ends[a][r] for r in ranks) / (len(self.ends) - 1 - a)

    def offsets(self) -> list[float]:
        """Settled delay D of each rank behind the one before it, in seconds; N-1 numbers."""
        steps = range(self.settled(), len(self.starts))
        return [sum(self.starts[t][r] - self.starts[t][r - 1] for t in steps) / len(steps) for r in range(1, len(self.starts[0]))]

    def idle(self) -> list[float]:
        """Fraction of the settled steps in which each rank's passes wait."""
        first, period, ranks = self.settled(), self.period(), len(self.ends[0])
        busy = [0.0] * ranks
        for p in self.passes:
            if p.step >= first:
                busy[p.rank] += p.end - p.begin
        return [max(0.0, 1 - b / (period * (len(self.starts) - first))) for b in busy]


class _Message:
    """A message on its edge; what is None is not known yet."""

    __slots__ = ("edge", "unit", "nbytes", "ready", "credit", "after", "begin", "arrival")

    def __init__(self, edge: tuple[str, int, int]):
        self.edge, self.unit, self.nbytes = edge, PERSISTENT, 0
        self.ready: float | None = None
        self.credit: float | None = None
        self.after: list[_Message] = []  # pushes that still read from where it lands
        self.begin: float | None = None
        self.arrival: float | None = None


class _Rank:
    """One rank's walk."""

    def __init__(self, number: int, first: tuple[Action, ...], steady: tuple[Action, ...]):
        self.number, self.programs = number, (_marked(first), _marked(steady))
        self.step = self.cursor = 0
        self.passes = self.owner = 0.0  # the two clocks
        self.arrivals: dict[tuple, _Message] = {}
        self.reading: dict[str, list[tuple[int, int, _Message]]] = defaultdict(list)
        self.published: dict[int, float] = {}
        self.read_from: dict[int, float] = {}
        self.sum_ends: dict[int, float] = {}
        self.own_read_end = self.credits = self.waited = self.blocked = 0.0
        self.begun = False


def _marked(actions: tuple[Action, ...]) -> tuple[tuple[Action, tuple[int, int, bool] | None], ...]:
    """Each action, and the pass that is computed after it, if it is the last that begins this pass."""
    last: dict[tuple[int, int, bool], int] = {}
    for index, a in enumerate(actions):
        if a.kind.of_pass and a.phase != END and a.unit != PERSISTENT:
            last[a.round, a.unit, a.backward] = index
    at = {index: visit for visit, index in last.items()}
    return tuple((a, at.get(index)) for index, a in enumerate(actions))


class Simulation:
    """See ``simulate``."""

    def __init__(self, plan: Plan, times: Times, steps: int, delays: Delays, beside: bool, clipped: bool, ahead: bool):
        self.plan, self.times, self.steps, self.delays, self.beside, self.ahead = plan, times, steps, delays, beside, ahead
        self.updates_eagerly = not clipped and not plan.schedule.exact_norm
        n = plan.schedule.ranks
        self.run = Run(plan, starts=[[0.0] * n for _ in range(steps)], ends=[[0.0] * n for _ in range(steps)])
        self.ranks = [_Rank(r, build(plan, r, True), build(plan, r, False)) for r in range(n)]
        self.edges: dict[tuple[str, int, int], tuple[deque[_Message], deque[_Message]]] = defaultdict(lambda: (deque(), deque()))
        self.links: list[list[tuple[float, float]]] = [[] for _ in range(n)]  # times at which each rank's link is busy
        self.scalars: dict[tuple[str, int], deque[float]] = defaultdict(deque)  # (stream, receiver) -> arrivals
        self._members = [[i for i in plan.members(plan.schedule.owned(r)) if plan.unit(i).g_bytes] for r in range(n)]
        if n > 1:
            self.scalars["S", 0].append(0.0)  # rank 0 takes up what the last rank sent at the start
        for rank in self.ranks:
            for post in initial_posts(plan, rank.number):
                self._post(rank, post, 0.0)

    def go(self) -> Run:
        """Walk all ranks to the end."""
        moved = True
        while moved:
            moved = False
            for rank in self.ranks:
                while rank.step < self.steps and self._advance(rank):
                    moved = True
        assert all(rank.step == self.steps for rank in self.ranks), "the plan hangs"
        return self.run

    # ---- messages -------------------------------------------------------------------------------------------------------
    def _message(self, edge: tuple[str, int, int], side: int) -> _Message:
        """The next message of this side (0: post, 1: push) of the edge."""
        mine, other = self.edges[edge][side], self.edges[edge][1 - side]
        if other:
            return other.popleft()
        mine.append(message := _Message(edge))
        return message

    def _post(self, rank: _Rank, post: Post, now: float) -> None:
        region = self._region(post.region, rank.step + post.ahead, post.round, 0)
        message = self._message((post.stream, post.src, rank.number), 0)
        message.credit = now
        message.after = self._reading(rank, region, post.offset, post.nbytes, now)
        rank.arrivals[post.stream, rank.step + post.ahead, post.round, post.unit, post.backward] = message

    def _push(self, rank: _Rank, a: Action, ready: float) -> None:
        message = self._message((a.stream, rank.number, a.peer), 1)
        message.ready, message.unit, message.nbytes = ready, a.unit, a.nbytes
        region = self._region(a.region, rank.step, a.round, a.version)
        rank.reading[region].append((a.offset, a.nbytes, message))

    def _arrival(self, message: _Message) -> float | None:
        """When a message has landed; None if that is not known yet."""
        if message.arrival is None and message.ready is not None and message.credit is not None:
            free = message.credit
            for other in message.after:
                end = self._arrival(other)
                if end is None:
                    return None
                free = max(free, end)
            stream, src, dst = message.edge
            took = self.times.message(message.nbytes)
            message.begin = _reserve(self.links[src], max(message.ready, free), took)
            message.arrival = message.begin + took + self.times.hardware.latency
            self.run.messages.append(Message(stream, src, dst, message.unit, message.begin, message.arrival, message.nbytes))
        return message.arrival

    def _region(self, region: str, step: int, round: int, version: int) -> str:
        if region == "H":
            return f"H{(step * self.plan.schedule.rounds + round) % 2}"
        return f"V{(step + version) % self.plan.copies}" if region == "V" else region

    def _reading(self, rank: _Rank, region: str, offset: int, nbytes: int, now: float) -> list[_Message]:
        """The pushes that may still read from these bytes; what is known to be over is forgotten."""
        rank.reading[region] = [x for x in rank.reading[region] if x[2].arrival is None or x[2].arrival > now]
        return [m for at, size, m in rank.reading[region] if at < offset + nbytes and offset < at + size]

    def _free(self, rank: _Rank, region: str, offset: int, nbytes: int, now: float) -> float | None:
        """When the pushes from these bytes are over, at least ``now``; None if that is not known yet."""
        ends = [self._arrival(m) for m in self._reading(rank, region, offset, nbytes, now)]
        return None if None in ends else max([now, *ends])  # type: ignore[list-item]

    # ---- walking --------------------------------------------------------------------------------------------------------
    def _advance(self, rank: _Rank) -> bool:
        """Do the rank's next action, if all that it waits for is known."""
        if not rank.begun:
            rank.begun = True
            rank.passes += self.delays(rank.number, rank.step)
            rank.blocked = rank.passes
        a, visit = rank.programs[rank.step > 0][rank.cursor]
        if not self._do(rank, a):
            return False
        if visit is not None:
            self._compute(rank, *visit)
        rank.cursor += 1
        if rank.cursor == len(rank.programs[rank.step > 0]):
            rank.step, rank.cursor, rank.begun = rank.step + 1, 0, False
        return True

    def _compute(self, rank: _Rank, round: int, unit: int, backward: bool) -> None:
        begin = rank.passes
        rank.passes += self.times.passes[unit, backward]
        self.run.passes.append(Pass(rank.number, rank.step, round, unit, backward, begin, rank.passes, begin - rank.blocked))
        rank.blocked = rank.passes
        if (round, unit, backward) == (0, 0, False):
            self.run.starts[rank.step][rank.number] = begin
        if (round, unit, backward) == (self.plan.schedule.rounds - 1, 0, True):
            self.run.ends[rank.step][rank.number] = rank.passes

    def _wait(self, rank: _Rank, a: Action) -> bool:
        """Let the passes go on once the action's message is there."""
        key = (a.stream, rank.step, a.round, a.unit, a.backward)
        arrival = self._arrival(rank.arrivals[key])
        if arrival is None:
            return False
        del rank.arrivals[key]
        rank.passes = max(rank.passes, arrival)
        rank.read_from[a.unit] = arrival
        return True

    def _do(self, rank: _Rank, a: Action) -> bool:
        kind = a.kind
        if kind == Kind.WAIT_PARAM:
            if a.backward and self.plan.kept(a.unit):
                return True
            if a.peer is not None:
                return self._wait(rank, a)
            rank.read_from[a.unit] = rank.passes = max(rank.passes, rank.published.get(a.unit, 0.0))
        elif kind == Kind.FORWARD_PARAM:
            self._push(rank, a, rank.read_from[a.unit] if self.beside else rank.passes)
        elif kind in (Kind.RECV_GRAD, Kind.RECV_PERSISTENT_GRAD):
            if a.peer is not None:
                return self._wait(rank, a)
            if a.round == 0:
                free = self._free(rank, a.region, a.offset, a.nbytes, rank.passes)
                if free is None:
                    return False
                rank.passes = free
        elif kind in (Kind.SEND_GRAD, Kind.SEND_PERSISTENT_GRAD):
            if a.peer == rank.number:
                rank.sum_ends[a.unit] = rank.passes
            else:
                self._push(rank, a, rank.passes)
        elif kind == Kind.PUBLISH_PARAM:
            self._push(rank, a, rank.published.get(a.unit, 0.0))
        elif kind in (Kind.RELEASE_PARAM, Kind.RELEASE_PERSISTENT_PARAM):
            if a.backward or a.unit == PERSISTENT:
                rank.own_read_end = rank.passes
        elif kind == Kind.REDUCE_GRAD:
            return self._average(rank, a)
        elif kind == Kind.GRAD_NORM:
            return self._norm(rank, a)
        elif kind == Kind.SEND_NORM:
            for r in range(self.plan.schedule.ranks - 1):
                self.scalars["T", r].append(rank.owner + self.times.hardware.latency)
        elif kind == Kind.OPTIMIZER_STEP and not self._update(rank, a):
            return False
        now = rank.owner if kind == Kind.OPTIMIZER_STEP else rank.passes
        if kind == Kind.GRANT_CREDIT and a.posts:  # where the owner has read; and credits are given one after the other
            rank.credits = max(rank.credits, rank.owner)
        for post in a.posts:
            self._post(rank, post, now if kind == Kind.OPTIMIZER_STEP else max(now, rank.credits))
        return True

    def _average(self, rank: _Rank, a: Action) -> bool:
        """One unit's finished sum comes in; where nothing is clipped it is updated and published."""
        key = ("O", rank.step + a.version, a.round, a.unit, True)
        end = self._arrival(rank.arrivals[key])
        clock = self._free_copy(rank, a, a.unit) if self.updates_eagerly else self._owner_clock(rank)
        if clock is None or end is None:
            return False
        del rank.arrivals[key]
        clock = max(clock, end)
        if self.updates_eagerly:
            clock = rank.published[a.unit] = clock + self.times.updates[a.unit]
        self._owned(rank, clock)
        return True

    def _norm(self, rank: _Rank, a: Action) -> bool:
        """The finished sums come in, where they are not averaged one by one."""
        n, step = self.plan.schedule.ranks, rank.step + a.version
        members = [] if self.plan.averaged(rank.number) else self._members[rank.number]
        last = rank.number == n - 1
        keys = {i: ("O", step, self.plan.schedule.rounds - 1, i, True) for i in members}
        ends = {i: rank.sum_ends.get(i, rank.passes) if last else self._arrival(rank.arrivals[keys[i]]) for i in members}
        clock = self._free_copy(rank, a) if self.updates_eagerly and members else self._owner_clock(rank)
        if clock is None or None in ends.values() or (a.peer is not None and not self.scalars["S", rank.number]):
            return False
        for i in members if last else reversed(members):
            clock = max(clock, ends[i])
            if self.updates_eagerly:
                clock = rank.published[i] = clock + self.times.updates[i]
            if not last:
                del rank.arrivals[keys[i]]
        if a.peer is not None:
            clock = max(clock, self.scalars["S", rank.number].popleft())
            self.scalars["S", (rank.number + 1) % n].append(clock + self.times.hardware.latency)
        self._owned(rank, clock)
        return True

    def _update(self, rank: _Rank, a: Action) -> bool:
        if self.updates_eagerly:
            return True
        clock = self._free_copy(rank, a)
        if clock is None or (a.peer is not None and not self.scalars["T", rank.number]):
            return False
        if a.peer is not None:
            clock = max(clock, self.scalars["T", rank.number].popleft())
        for i in self._members[rank.number]:
            clock = rank.published[i] = clock + self.times.updates[i]
        self._owned(rank, clock)
        return True

    def _owner_clock(self, rank: _Rank) -> float:
        return rank.owner if self.beside and self.ahead else max(rank.owner, rank.passes)

    def _owned(self, rank: _Rank, clock: float) -> None:
        rank.owner = clock
        if not self.beside:
            rank.passes = max(rank.passes, clock)

    def _free_copy(self, rank: _Rank, a: Action, unit: int | None = None) -> float | None:
        """When the published copy (of one unit, or all) that is written next is not read any more."""
        region, at, nbytes = f"V{(rank.step + a.version + 1) % self.plan.copies}", 0, 1 << 62
        if unit is not None:
            at, nbytes = self.plan.v_layout(self.plan.unit(unit).stage)[0][unit], self.plan.unit(unit).p_bytes
        return self._free(rank, region, at, nbytes, max(self._owner_clock(rank), rank.own_read_end))


def _reserve(busy: list[tuple[float, float]], ready: float, took: float) -> float:
    """The earliest time from ``ready`` on at which a link is free for so long; it is taken."""
    at = max(bisect_left(busy, (ready, ready)) - 1, 0)
    begin = ready
    for a, b in busy[at:]:
        if a >= begin + took:
            break
        begin = max(begin, b)
    if took:
        insort(busy, (begin, begin + took))
        if len(busy) > 512:
            del busy[:128]
    return begin


def simulate(
    plan: Plan,
    times: Times,
    steps: int = 12,
    delays: Delays = lambda rank, step: 0.0,
    beside: bool = True,
    clipped: bool = False,
    ahead: bool = True,
) -> Run:
    """Walk all ranks through ``steps`` steps after a start or a flush.

    Args:
        delays: by how many seconds each rank's step begins late, such as a straggler's.
        beside: whether the owner's work and the hand-offs run beside the passes (GPUs), or the host does one after the other.
        clipped: whether gradients are clipped, so that an owner updates when all its sums have come, not unit by unit.
        ahead: whether the host enqueues work long before the device comes to it.
    """
    return Simulation(plan, times, steps, delays, beside, clipped, ahead).go()
