"""Event simulation of a plan: every rank's program (``program.build``) runs as the executor runs it, with durations.

It assumes nothing about the schedule: actions, posts, credits and buffer regions are those of the engine. A rank has two clocks,
one for its passes and one for its owner's stream. A message starts when its bytes are ready, its receiver's region is free, and
the sender's link is free. It takes ``Times.message`` and a latency.

As on a GPU, nothing else waits: parameters are forwarded once their message has arrived, not once the pass starts. Two options
change that:

- ``overlap=False``: the runtime on CPUs. With one clock, the owner's work and missing credits block the passes.
- ``host_ahead=False``: the owner's stream gets its work only when the passes have reached it.

It suits rings of up to a few dozen ranks; ``waves`` simulates larger ones.
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

Delays = Callable[[int, int], float]  # (rank, step) -> seconds by which the step starts late


class TimedPass(NamedTuple):
    """One pass of one unit on one rank, in seconds; ``waited``: time before it could start."""

    rank: int
    step: int
    round: int
    unit: int
    backward: bool
    begin: float
    end: float
    waited: float


class TimedMessage(NamedTuple):
    """One message, from its start on the link to its arrival, in seconds."""

    stream: str
    src: int
    dst: int
    unit: int
    begin: float
    end: float
    nbytes: int


@dataclass
class Run:
    """The result of a simulation.

    Attributes:
        passes, messages: all of them, in no particular order.
        starts, ends: [step][rank] -> seconds at which its first pass starts and its last one ends.
    """

    plan: Plan
    passes: list[TimedPass] = field(default_factory=list)
    messages: list[TimedMessage] = field(default_factory=list)
    starts: list[list[float]] = field(default_factory=list)
    ends: list[list[float]] = field(default_factory=list)

    def settled(self) -> int:
        """The first step after the start-up, which is taken to be the first half."""
        return len(self.starts) // 2

    def period(self) -> float:
        """Seconds per settled step of the slowest rank, which the others follow in the end."""
        a, ranks = self.settled() - 1, range(len(self.ends[0]))
        return max(self.ends[-1][r] - self.ends[a][r] for r in ranks) / (len(self.ends) - 1 - a)

    def offsets(self) -> list[float]:
        """Settled delay D of each rank behind the one before it, in seconds; N-1 numbers."""
        steps = range(self.settled(), len(self.starts))
        return [sum(self.starts[t][r] - self.starts[t][r - 1] for t in steps) / len(steps) for r in range(1, len(self.starts[0]))]

    def idle(self) -> list[float]:
        """Fraction of the settled steps that each rank's passes wait."""
        first, period, ranks = self.settled(), self.period(), len(self.ends[0])
        busy = [0.0] * ranks
        for p in self.passes:
            if p.step >= first:
                busy[p.rank] += p.end - p.begin
        return [max(0.0, 1 - b / (period * (len(self.starts) - first))) for b in busy]


class _Transfer:
    """A message on its edge; times that are not known yet are None."""

    __slots__ = ("edge", "unit", "nbytes", "ready", "credit", "after", "begin", "arrival")

    def __init__(self, edge: tuple[str, int, int]):
        self.edge, self.unit, self.nbytes = edge, PERSISTENT, 0
        self.ready: float | None = None
        self.credit: float | None = None
        self.after: list[_Transfer] = []  # pushes that still read from the region in which it lands
        self.begin: float | None = None
        self.arrival: float | None = None


class _RankClocks:
    """One rank: its position in the program, its two clocks, and its messages."""

    def __init__(self, number: int, first: tuple[Action, ...], steady: tuple[Action, ...]):
        self.number, self.programs = number, (_marked(first), _marked(steady))
        self.step = self.cursor = 0
        self.passes = self.owner = 0.0  # the two clocks, in seconds
        self.arrivals: dict[tuple, _Transfer] = {}
        self.reading: dict[str, list[tuple[int, int, _Transfer]]] = defaultdict(list)
        self.published: dict[int, float] = {}
        self.read_from: dict[int, float] = {}
        self.sum_ends: dict[int, float] = {}
        self.early_ends: dict[int, float] = {}
        self.predicted: dict[int, float] = {}
        self.own_read_end = self.credits = self.waited = self.blocked = 0.0
        self.begun = False


def _marked(actions: tuple[Action, ...]) -> tuple[tuple[Action, tuple[int, int, bool] | None], ...]:
    """Each action, and the pass that is computed after it, if it is the last action that starts this pass."""
    last: dict[tuple[int, int, bool], int] = {}
    for index, a in enumerate(actions):
        if a.kind.of_pass and a.phase != END and a.unit != PERSISTENT:
            last[a.round, a.unit, a.backward] = index
    at = {index: visit for visit, index in last.items()}
    return tuple((a, at.get(index)) for index, a in enumerate(actions))


class Simulation:
    """See ``simulate``."""

    def __init__(self, plan: Plan, times: Times, steps: int, delays: Delays, overlap: bool, clipped: bool, host_ahead: bool):
        self.plan, self.times, self.steps, self.delays = plan, times, steps, delays
        self.overlap, self.host_ahead = overlap, host_ahead
        self.updates_eagerly = not clipped and not plan.schedule.exact_norm
        self.handlers: dict[Kind, Callable[[_RankClocks, Action], bool]] = {
            Kind.WAIT_PARAM: self._wait_param,
            Kind.FORWARD_PARAM: self._forward_param,
            Kind.RELEASE_PARAM: self._release,
            Kind.RELEASE_PERSISTENT_PARAM: self._release,
            Kind.RECV_GRAD: self._recv_grad,
            Kind.RECV_PERSISTENT_GRAD: self._recv_grad,
            Kind.SEND_EARLY_GRAD: self._send_grad,
            Kind.SEND_EARLY_PERSISTENT_GRAD: self._send_grad,
            Kind.PREDICT_PARAM: self._predict,
            Kind.SEND_GRAD: self._send_grad,
            Kind.SEND_PERSISTENT_GRAD: self._send_grad,
            Kind.REDUCE_GRAD: self._reduce_grad,
            Kind.GRAD_NORM: self._grad_norm,
            Kind.SEND_NORM: self._send_norm,
            Kind.OPTIMIZER_STEP: self._optimizer_step,
            Kind.PUBLISH_PARAM: self._publish_param,
            Kind.PULL_PARAM: lambda rank, a: True,
            Kind.GRANT_CREDIT: self._grant_credit,
        }
        n = plan.schedule.ranks
        self.run = Run(plan, starts=[[0.0] * n for _ in range(steps)], ends=[[0.0] * n for _ in range(steps)])
        self.ranks = [_RankClocks(r, build(plan, r, True), build(plan, r, False)) for r in range(n)]
        self.edges: dict[tuple[str, int, int], tuple[deque[_Transfer], deque[_Transfer]]] = defaultdict(
            lambda: (deque(), deque())
        )
        self.links: list[list[tuple[float, float]]] = [[] for _ in range(n)]  # times at which each rank's link is busy
        self.scalars: dict[tuple[str, int], deque[float]] = defaultdict(deque)  # (stream, receiver) -> arrivals
        self._members = [[i for i in plan.members(plan.schedule.owned(r)) if plan.unit(i).g_bytes] for r in range(n)]
        if n > 1:
            self.scalars["S", 0].append(0.0)  # the last rank's message before the first step
        for rank in self.ranks:
            for post in initial_posts(plan, rank.number):
                self._post(rank, post, 0.0)

    def go(self) -> Run:
        """Run all ranks to the end."""
        moved = True
        while moved:
            moved = False
            for rank in self.ranks:
                while rank.step < self.steps and self._advance(rank):
                    moved = True
        assert all(rank.step == self.steps for rank in self.ranks), "the plan deadlocks"
        return self.run

    # ---- messages -------------------------------------------------------------------------------------------------------
    def _message(self, edge: tuple[str, int, int], side: int) -> _Transfer:
        """The next message of the edge, as seen by its post (side 0) or its push (side 1)."""
        mine, other = self.edges[edge][side], self.edges[edge][1 - side]
        if other:
            return other.popleft()
        mine.append(message := _Transfer(edge))
        return message

    def _post(self, rank: _RankClocks, post: Post, now: float) -> None:
        region = self._region(post.region, rank.step + post.ahead, post.round, 0)
        message = self._message((post.stream, post.src, rank.number), 0)
        message.credit = now
        message.after = self._reading(rank, region, post.offset, post.nbytes, now)
        rank.arrivals[post.stream, rank.step + post.ahead, post.round, post.unit, post.backward] = message

    def _push(self, rank: _RankClocks, a: Action, ready: float) -> None:
        assert a.peer is not None
        message = self._message((a.stream, rank.number, a.peer), 1)
        message.ready, message.unit, message.nbytes = ready, a.unit, a.nbytes
        region = self._region(a.region, rank.step, a.round, a.version)
        rank.reading[region].append((a.offset, a.nbytes, message))

    def _arrival(self, message: _Transfer) -> float | None:
        """The time at which a message has landed; None if not known yet."""
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
            self.run.messages.append(TimedMessage(stream, src, dst, message.unit, message.begin, message.arrival, message.nbytes))
        return message.arrival

    def _region(self, region: str, step: int, round: int, version: int) -> str:
        if region == "H":
            return f"H{(step * self.plan.schedule.rounds + round) % 2}"
        return self.plan.region_of(region, step + version)

    def _reading(self, rank: _RankClocks, region: str, offset: int, nbytes: int, now: float) -> list[_Transfer]:
        """The pushes that may still read from these bytes; pushes known to be over are forgotten."""
        rank.reading[region] = [x for x in rank.reading[region] if x[2].arrival is None or x[2].arrival > now]
        return [m for at, size, m in rank.reading[region] if at < offset + nbytes and offset < at + size]

    def _free(self, rank: _RankClocks, region: str, offset: int, nbytes: int, now: float) -> float | None:
        """The time at which the pushes from these bytes are over, at least ``now``; None if not known yet."""
        for message in self._reading(rank, region, offset, nbytes, now):
            end = self._arrival(message)
            if end is None:
                return None
            now = max(now, end)
        return now

    # ---- actions --------------------------------------------------------------------------------------------------------
    def _advance(self, rank: _RankClocks) -> bool:
        """Do the rank's next action, if the times of all that it waits for are known."""
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

    def _compute(self, rank: _RankClocks, round: int, unit: int, backward: bool) -> None:
        begin = rank.passes
        rank.passes += self.times.passes[unit, backward]
        self.run.passes.append(TimedPass(rank.number, rank.step, round, unit, backward, begin, rank.passes, begin - rank.blocked))
        rank.blocked = rank.passes
        if (round, unit, backward) == (0, 0, False):
            self.run.starts[rank.step][rank.number] = begin
        if (round, unit, backward) == (self.plan.schedule.rounds - 1, 0, True):
            self.run.ends[rank.step][rank.number] = rank.passes

    def _do(self, rank: _RankClocks, a: Action) -> bool:
        """Do the action and grant its credits, if the times of all that it waits for are known."""
        if not self.handlers[a.kind](rank, a):
            return False
        updated = a.kind == Kind.OPTIMIZER_STEP  # its credits follow the owner's stream, others the passes and earlier credits
        for post in a.posts:
            self._post(rank, post, rank.owner if updated else max(rank.passes, rank.credits))
        return True

    def _wait(self, rank: _RankClocks, a: Action) -> bool:
        """The passes wait for the action's message."""
        key = (a.stream, rank.step, a.round, a.unit, a.backward)
        arrival = self._arrival(rank.arrivals[key])
        if arrival is None:
            return False
        del rank.arrivals[key]
        rank.passes = max(rank.passes, arrival)
        rank.read_from[a.unit] = arrival
        return True

    def _wait_param(self, rank: _RankClocks, a: Action) -> bool:
        if a.peer is not None:
            return self._wait(rank, a)
        if not (a.backward and self.plan.kept(a.unit)):
            there = rank.predicted if self.plan.predicts and a.region == "W" else rank.published
            rank.read_from[a.unit] = rank.passes = max(rank.passes, there.get(a.unit, 0.0))
        return True

    def _forward_param(self, rank: _RankClocks, a: Action) -> bool:
        self._push(rank, a, rank.read_from[a.unit] if self.overlap else rank.passes)
        return True

    def _release(self, rank: _RankClocks, a: Action) -> bool:
        if a.backward or a.unit == PERSISTENT:
            rank.own_read_end = rank.passes
        return True

    def _recv_grad(self, rank: _RankClocks, a: Action) -> bool:
        if a.peer is not None:
            return self._wait(rank, a)
        if a.round == 0:
            free = self._free(rank, a.region, a.offset, a.nbytes, rank.passes)
            if free is None:
                return False
            rank.passes = free
        return True

    def _send_grad(self, rank: _RankClocks, a: Action) -> bool:
        if a.peer == rank.number:
            (rank.early_ends if a.stream == "E" else rank.sum_ends)[a.unit] = rank.passes
        else:
            self._push(rank, a, rank.passes)
        return True

    def _publish_param(self, rank: _RankClocks, a: Action) -> bool:
        there = rank.predicted if self.plan.predicts and a.region == "W" else rank.published
        self._push(rank, a, there.get(a.unit, 0.0))
        return True

    def _predict(self, rank: _RankClocks, a: Action) -> bool:
        """The owner waits for an early sum and predicts the unit's next version; not in the first step."""
        if rank.step + a.version == 0:
            return True
        end, key = rank.early_ends.get(a.unit, 0.0), ("E", rank.step + a.version, a.round, a.unit, True)
        if a.peer is not None:
            arrival = self._arrival(rank.arrivals[key])
            if arrival is None:
                return False
            end = arrival
        clock = self._free(rank, "W0", a.offset, a.nbytes, max(self._owner_clock(rank), rank.own_read_end))
        if clock is None:
            return False
        rank.arrivals.pop(key, None)
        rank.predicted[a.unit] = clock = max(clock, end) + self.times.predictions.get(a.unit, 0.0)
        self._advance_owner(rank, clock)
        return True

    def _grant_credit(self, rank: _RankClocks, a: Action) -> bool:
        if a.posts:  # the region held finished sums, which the owner's stream has read; later credits wait their turn
            rank.credits = max(rank.credits, rank.owner)
        return True

    def _reduce_grad(self, rank: _RankClocks, a: Action) -> bool:
        """The owner waits for one unit's finished sum; without clipping, it updates and publishes the unit."""
        key = ("O", rank.step + a.version, a.round, a.unit, True)
        end = self._arrival(rank.arrivals[key])
        clock = self._free_copy(rank, a, a.unit) if self.updates_eagerly else self._owner_clock(rank)
        if clock is None or end is None:
            return False
        del rank.arrivals[key]
        clock = max(clock, end)
        if self.updates_eagerly:
            clock = rank.published[a.unit] = clock + self.times.updates[a.unit]
        self._advance_owner(rank, clock)
        return True

    def _grad_norm(self, rank: _RankClocks, a: Action) -> bool:
        """The owner waits for the norms so far, and for the finished sums without a REDUCE_GRAD."""
        n, step = self.plan.schedule.ranks, rank.step + a.version
        members = [] if self.plan.eager_units(rank.number) else self._members[rank.number]
        last = rank.number == n - 1
        keys = {i: ("O", step, self.plan.schedule.rounds - 1, i, True) for i in members}
        ends: dict[int, float] = {}
        for i in members:
            end = rank.sum_ends.get(i, rank.passes) if last else self._arrival(rank.arrivals[keys[i]])
            if end is None:
                return False
            ends[i] = end
        clock = self._free_copy(rank, a) if self.updates_eagerly and members else self._owner_clock(rank)
        if clock is None or (a.peer is not None and not self.scalars["S", rank.number]):
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
        self._advance_owner(rank, clock)
        return True

    def _send_norm(self, rank: _RankClocks, a: Action) -> bool:
        for r in range(self.plan.schedule.ranks - 1):
            self.scalars["T", r].append(rank.owner + self.times.hardware.latency)
        return True

    def _optimizer_step(self, rank: _RankClocks, a: Action) -> bool:
        if self.updates_eagerly:
            return True
        clock = self._free_copy(rank, a)
        if clock is None or (a.peer is not None and not self.scalars["T", rank.number]):
            return False
        if a.peer is not None:
            clock = max(clock, self.scalars["T", rank.number].popleft())
        for i in self._members[rank.number]:
            clock = rank.published[i] = clock + self.times.updates[i]
        self._advance_owner(rank, clock)
        return True

    def _owner_clock(self, rank: _RankClocks) -> float:
        return rank.owner if self.overlap and self.host_ahead else max(rank.owner, rank.passes)

    def _advance_owner(self, rank: _RankClocks, clock: float) -> None:
        rank.owner = clock
        if not self.overlap:
            rank.passes = max(rank.passes, clock)

    def _free_copy(self, rank: _RankClocks, a: Action, unit: int | None = None) -> float | None:
        """The time from which no push reads the published copies (of one unit, or all) that are written next."""
        clock: float | None = max(self._owner_clock(rank), rank.own_read_end)
        for region, offsets in self.plan.written(rank.step + a.version + 1, self.plan.schedule.owned(rank.number)):
            at, nbytes = (0, 1 << 62) if unit is None else (offsets[unit], self.plan.unit(unit).p_bytes)
            clock = None if clock is None else self._free(rank, region, at, nbytes, clock)
        return clock


def _reserve(busy: list[tuple[float, float]], ready: float, took: float) -> float:
    """Reserve a link for ``took`` seconds, as early as possible from ``ready`` on; returns the start."""
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
    overlap: bool = True,
    clipped: bool = False,
    host_ahead: bool = True,
) -> Run:
    """Run all ranks for ``steps`` steps after a start or a flush.

    Args:
        delays: seconds by which each rank's step starts late, as a straggler's does.
        overlap: the owner's work and the messages overlap with the passes (GPUs); else the host does one after the other.
        clipped: gradients are clipped, so an owner updates its whole stage once all sums have arrived, not unit by unit.
        host_ahead: the host enqueues work long before the device reaches it.
    """
    return Simulation(plan, times, steps, delays, overlap, clipped, host_ahead).go()
