"""Event simulation of a plan: every rank's program (``program.build``) runs as the executor runs it, with durations.

It assumes nothing about the schedule: actions, posts, credits and buffer regions are those of the engine. A rank has three
clocks, as a GPU has streams: for its passes, for its owner's stream, and for what it relays (other ranks' sums, predictions). A
message starts when its bytes are ready, its receiver's region is free, and the message that the same rank started before it on
the same stream is over. It takes ``Times.message`` of the time that is left on the link out of the rank that has the bytes, and
a latency.

As on a GPU, nothing else waits: an owner offers a sum once it is back, wherever its own passes are. Two options change that:

- ``overlap=False``: the runtime on CPUs. The passes and the owner's work have one clock; a thread relays.
- ``host_ahead=False``, and so on CPUs: the owner's stream and the relay get their work only when the passes have reached it.

It suits rings of up to a few dozen ranks; ``waves`` simulates larger ones.
"""

from bisect import bisect_right
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from deepspeed_cdp.analysis.timing.times import Times
from deepspeed_cdp.plan.actions import Action, Kind, Post
from deepspeed_cdp.plan.constants import END, PERSISTENT
from deepspeed_cdp.plan.plan import Plan
from deepspeed_cdp.plan.program import build, initial_posts

GRANTS = {Kind.GRANT_CREDIT: "relay", Kind.GRAD_NORM: "owner", Kind.OPTIMIZER_STEP: "owner"}  # clocks of credits; else passes
Delays = Callable[[int, int], float]  # (rank, step) -> seconds by which the step starts late
Loads = Callable[[int, int, int], float]  # (rank, step, round) -> factor of the durations of a micro-batch's passes


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
    """One message, from the time at which it may use the link to its arrival, in seconds."""

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

    __slots__ = ("edge", "unit", "nbytes", "ready", "credit", "after", "before", "end", "arrival")

    def __init__(self, edge: tuple[str, int, int]):
        self.edge, self.unit, self.nbytes = edge, PERSISTENT, 0
        self.ready: float | None = None
        self.credit: float | None = None
        self.after: list[_Transfer] = []  # messages that still read from the region in which it lands
        self.before: _Transfer | None = None  # the one that the same rank started before it on the same stream
        self.end: float | None = None  # on the link
        self.arrival: float | None = None


class _RankClocks:
    """One rank: its position in the program, its three clocks, and its messages."""

    def __init__(self, number: int, first: tuple[Action, ...], steady: tuple[Action, ...]):
        self.number, self.programs = number, (_marked(first), _marked(steady))
        self.step = self.cursor = 0
        self.passes = self.owner = self.relay = 0.0  # the clocks, in seconds
        # step -> (stream, sender, round, unit, backward) -> a message to this rank, or a sum that it has added to in place
        self.arrivals: dict[int, dict[tuple[str, int, int, int, bool], _Transfer]] = defaultdict(dict)
        self.started: dict[str, _Transfer] = {}  # stream -> the last message that this rank started
        self.reading: dict[str, list[tuple[int, int, _Transfer]]] = defaultdict(list)
        self.written: dict[tuple[bool, int, int], float] = {}  # (predicted, version, unit) -> when it was published
        self.own_read_end = self.sums_used = self.blocked = 0.0
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

    def __init__(
        self,
        plan: Plan,
        times: Times,
        steps: int,
        delays: Delays,
        overlap: bool,
        clipped: bool,
        host_ahead: bool,
        loads: Loads = lambda rank, step, round: 1.0,
    ):
        self.plan, self.times, self.steps, self.delays, self.loads = plan, times, steps, delays, loads
        self.overlap, self.host_ahead = overlap, host_ahead
        self.updates_eagerly = not clipped and not plan.schedule.exact_norm
        self.handlers: dict[Kind, Callable[[_RankClocks, Action], bool]] = {
            Kind.WAIT_PARAM: self._wait_param,
            Kind.RELEASE_PARAM: self._release,
            Kind.RELEASE_PERSISTENT_PARAM: self._release,
            Kind.RECV_GRAD: self._recv_grad,
            Kind.RECV_PERSISTENT_GRAD: self._recv_grad,
            Kind.SEND_GRAD: self._send_grad,
            Kind.SEND_PERSISTENT_GRAD: self._send_grad,
            Kind.OFFER_GRAD: self._offer_grad,
            Kind.GRANT_CREDIT: self._grant_credit,
            Kind.PREDICT_PARAM: self._predict,
            Kind.REDUCE_GRAD: self._reduce_grad,
            Kind.GRAD_NORM: self._grad_norm,
            Kind.SEND_NORM: self._send_norm,
            Kind.OPTIMIZER_STEP: self._optimizer_step,
            Kind.PUBLISH_PARAM: self._publish_param,
            Kind.PULL_PARAM: lambda rank, a: True,
            Kind.PULL_GRAD: lambda rank, a: True,
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
        step = rank.step + post.ahead
        message = self._message((post.stream, post.src, rank.number), 0)
        message.credit = now
        message.after = self._reading(rank, self._region(post.region, step, post.round, 0), post.offset, post.nbytes, now)
        if post.origin[0]:
            self._start(rank, message)
        rank.arrivals[step][post.stream, post.src, post.round, post.unit, post.backward] = message

    def _push(self, rank: _RankClocks, a: Action, ready: float) -> None:
        assert a.peer is not None
        message = self._message((a.stream, rank.number, a.peer), 1)
        message.ready, message.unit, message.nbytes = ready, a.unit, a.nbytes
        if a.kind.initiates:
            self._start(rank, message)
        rank.reading[self._region(a.region, rank.step, a.round, a.version)].append((a.offset, a.nbytes, message))

    def _start(self, rank: _RankClocks, message: _Transfer) -> None:
        """The rank pulls or pushes it, after all that it has started on the same stream."""
        message.before, rank.started[message.edge[0]] = rank.started.get(message.edge[0]), message

    def _arrival(self, message: _Transfer) -> float | None:
        """The time at which a message has landed; None if not known yet."""
        if message.arrival is None and message.ready is not None and message.credit is not None:
            free = [max(message.ready, message.credit), *(self._arrival(other) for other in message.after)]
            if message.before is not None:
                self._arrival(message.before)
                free.append(message.before.end)
            if None in free:
                return None
            stream, src, dst = message.edge
            begin = max(x for x in free if x is not None)
            message.end = _reserve(self.links[src], begin, self.times.message(message.nbytes))
            message.arrival = message.end + self.times.hardware.latency
            message.after, message.before = [], None
            self.run.messages.append(TimedMessage(stream, src, dst, message.unit, begin, message.arrival, message.nbytes))
        return message.arrival

    def _region(self, region: str, step: int, round: int, version: int) -> str:
        if region == "H":
            return f"H{(step * self.plan.schedule.rounds + round) % 2}"
        return self.plan.region_of(region, step + version)

    def _reading(self, rank: _RankClocks, region: str, offset: int, nbytes: int, now: float) -> list[_Transfer]:
        """The messages that may still read from these bytes; those known to be over are forgotten."""
        rank.reading[region] = [x for x in rank.reading[region] if x[2].arrival is None or x[2].arrival > now]
        return [m for at, size, m in rank.reading[region] if at < offset + nbytes and offset < at + size]

    def _free(self, rank: _RankClocks, region: str, offset: int, nbytes: int, now: float) -> float | None:
        """The time at which the messages from these bytes are over, at least ``now``; None if not known yet."""
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
            rank.arrivals.pop(rank.step - 1, None)  # nothing of that step is still under way
            rank.step, rank.cursor, rank.begun = rank.step + 1, 0, False
        return True

    def _compute(self, rank: _RankClocks, round: int, unit: int, backward: bool) -> None:
        begin = rank.passes
        rank.passes += self.times.passes[unit, backward] * self.loads(rank.number, rank.step, round)
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
        if a.kind == (Kind.GRAD_NORM if self.plan.sums_apart else Kind.OPTIMIZER_STEP):
            rank.sums_used = rank.owner
        for post in a.posts:
            self._post(rank, post, getattr(rank, GRANTS.get(a.kind, "passes")))
        return True

    def _came(
        self, rank: _RankClocks, stream: str, src: int, round: int, unit: int, backward: bool = True, ago: int = 0
    ) -> float | None:
        """The time at which a message has landed, or at which this rank has added to its own sum; None if not known yet."""
        return self._arrival(rank.arrivals[rank.step - ago][stream, src, round, unit, backward])

    def _published(self, rank: _RankClocks, a: Action) -> float:
        """The time at which the owner has written the parameters that the action names."""
        predicted = self.plan.predicts and a.region in ("W", "W0")
        return rank.written.get((predicted, rank.step + a.version, a.unit), 0.0)

    def _predicted(self, rank: _RankClocks, unit: int) -> float:
        """The time at which a prediction has read the owned unit's sum so far, if it has done so in this step."""
        return rank.written.get((True, rank.step, unit), 0.0)

    # ---- passes ---------------------------------------------------------------------------------------------------------
    def _wait_param(self, rank: _RankClocks, a: Action) -> bool:
        there = self._published(rank, a) if a.peer is None else self._came(rank, a.stream, a.peer, a.round, a.unit, a.backward)
        if there is None:
            return False
        rank.passes = max(rank.passes, there)
        return True

    def _release(self, rank: _RankClocks, a: Action) -> bool:
        if a.backward or a.unit == PERSISTENT:
            rank.own_read_end = rank.passes
        return True

    def _recv_grad(self, rank: _RankClocks, a: Action) -> bool:
        """The passes wait for the running sum; who starts one waits until its place is free."""
        owned = a.region == "O"
        if a.peer is not None:
            src, round = a.into[1:] if owned else (a.peer, a.round)
            begin = self._came(rank, a.stream, src, round, a.unit)
        else:
            begin = self._free(rank, a.region, a.offset, a.nbytes, rank.sums_used if owned else 0.0)
        if begin is None:
            return False
        rank.passes = max(rank.passes, begin, self._predicted(rank, a.unit) if owned else 0.0)
        return True

    def _send_grad(self, rank: _RankClocks, a: Action) -> bool:
        if a.peer is None:
            rank.arrivals[rank.step]["G", rank.number, a.round, a.unit, True] = own = _Transfer(("G", rank.number, rank.number))
            own.arrival = rank.passes
        else:
            self._push(rank, a, rank.passes)
        return True

    # ---- owners ---------------------------------------------------------------------------------------------------------
    def _offer_grad(self, rank: _RankClocks, a: Action) -> bool:
        """The relay waits for a sum to come back, and lets the next rank pull it."""
        _, src, round = a.into
        back = self._came(rank, "G", src, round, a.unit)
        if back is None:
            return False
        rank.relay = max(self._reached(rank, rank.relay), back)
        self._push(rank, a, rank.relay)
        return True

    def _grant_credit(self, rank: _RankClocks, a: Action) -> bool:
        """The relay waits until a sum has been pulled, and lets its reader push it back."""
        clock: float | None = self._reached(rank, rank.relay)
        for post in a.posts:
            clock = None if clock is None else self._free(rank, post.region, post.offset, post.nbytes, clock)
        if clock is None:
            return False
        rank.relay = clock
        return True

    def _publish_param(self, rank: _RankClocks, a: Action) -> bool:
        self._push(rank, a, self._published(rank, a))
        return True

    def _predict(self, rank: _RankClocks, a: Action) -> bool:
        """The relay waits for a running sum and predicts the unit's next version; not in the first step."""
        step, stage = rank.step, self.plan.schedule.owned(rank.number)
        if step == 0:
            return True
        end: float | None = 0.0
        if self.plan.unit(a.unit).g_bytes:
            end = self._came(rank, "G", self.plan.schedule.predictor(stage), a.round, a.unit)
        region = self._region(a.region, rank.step, a.round, a.version)
        begin = max(self._reached(rank, rank.relay), rank.own_read_end, rank.written.get((False, step, a.unit), 0.0))
        clock = self._free(rank, region, a.offset, a.nbytes, begin)
        if clock is None or end is None:
            return False
        rank.relay = rank.written[True, step, a.unit] = max(clock, end) + self.times.predictions.get(a.unit, 0.0)
        return True

    def _reduce_grad(self, rank: _RankClocks, a: Action) -> bool:
        """The owner waits for one unit's finished sum; without clipping, it updates and publishes the unit."""
        end = self._finished(rank, a, a.unit)
        clock = self._free_copy(rank, a, a.unit) if self.updates_eagerly else self._reached(rank, rank.owner)
        if clock is None or end is None:
            return False
        clock = max(clock, end)
        self._advance_owner(rank, self._update(rank, a, a.unit, clock) if self.updates_eagerly else clock)
        return True

    def _finished(self, rank: _RankClocks, a: Action, unit: int) -> float | None:
        """The time at which the last rank's sum is here; None if not known yet."""
        s = self.plan.schedule
        return self._came(rank, "G", s.ranks - 1, s.rounds - 1, unit, ago=-a.version)

    def _update(self, rank: _RankClocks, a: Action, unit: int, clock: float) -> float:
        """Update and publish a unit from ``clock`` on. Returns the end."""
        end = rank.written[False, rank.step + a.version + 1, unit] = clock + self.times.updates[unit]
        return end

    def _grad_norm(self, rank: _RankClocks, a: Action) -> bool:
        """The owner waits for the norms so far, and for the finished sums without a REDUCE_GRAD."""
        n = self.plan.schedule.ranks
        members = [] if self.plan.eager_units(rank.number) else self._members[rank.number]
        ends = [self._finished(rank, a, i) for i in members]
        clock = self._free_copy(rank, a) if self.updates_eagerly and members else self._reached(rank, rank.owner)
        if clock is None or None in ends or (a.peer is not None and not self.scalars["S", rank.number]):
            return False
        in_turn = list(zip(members, ends))
        for i, end in in_turn if rank.number == n - 1 else reversed(in_turn):
            assert end is not None
            clock = max(clock, end)
            clock = self._update(rank, a, i, clock) if self.updates_eagerly else clock
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
            clock = self._update(rank, a, i, clock)
        self._advance_owner(rank, clock)
        return True

    def _reached(self, rank: _RankClocks, clock: float) -> float:
        """When a stream that has come to ``clock`` gets the action."""
        return clock if self.overlap and self.host_ahead else max(clock, rank.passes)

    def _advance_owner(self, rank: _RankClocks, clock: float) -> None:
        rank.owner = clock
        rank.passes = rank.passes if self.overlap else max(rank.passes, clock)

    def _free_copy(self, rank: _RankClocks, a: Action, unit: int | None = None) -> float | None:
        """The time from which nobody reads the published copies (of one unit, or all) that are written next."""
        clock: float | None = max(self._reached(rank, rank.owner), rank.own_read_end)
        for region, offsets in self.plan.written(rank.step + a.version + 1, self.plan.schedule.owned(rank.number)):
            at, nbytes = (0, 1 << 62) if unit is None else (offsets[unit], self.plan.unit(unit).p_bytes)
            clock = None if clock is None else self._free(rank, region, at, nbytes, clock)
        return clock


def _reserve(busy: list[tuple[float, float]], ready: float, took: float) -> float:
    """Use a link for the first ``took`` seconds from ``ready`` on in which it is free; returns the end.

    Args:
        busy: times at which it is in use, in order and apart from each other.
    """
    first = at = bisect_right(busy, ready, key=lambda x: x[1])
    begin, end = ready, ready + took
    while at < len(busy) and busy[at][0] < end:
        begin, end = min(begin, busy[at][0]), end + busy[at][1] - max(busy[at][0], ready)
        at += 1
    busy[first:at] = [(begin, end)]
    return end


def simulate(
    plan: Plan,
    times: Times,
    steps: int = 12,
    delays: Delays = lambda rank, step: 0.0,
    overlap: bool = True,
    clipped: bool = False,
    host_ahead: bool = True,
    loads: Loads = lambda rank, step, round: 1.0,
) -> Run:
    """Run all ranks for ``steps`` steps after a start or a flush.

    Args:
        delays: seconds by which each rank's step starts late, as a straggler's does.
        overlap: the owner's work overlaps with the passes (GPUs); else the host does one after the other.
        clipped: gradients are clipped, so an owner updates its whole stage once all sums have arrived, not unit by unit.
        host_ahead: the host enqueues work long before the device reaches it.
        loads: how much longer than usual a micro-batch takes, as samples of unlike lengths do.
    """
    return Simulation(plan, times, steps, delays, overlap, clipped, host_ahead, loads).go()
