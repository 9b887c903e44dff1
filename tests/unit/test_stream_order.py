"""On GPUs work is ordered by streams alone, which no result on a CPU shows. Here ranks walk their programs over a transport that
does nothing but note what each stream is ordered behind. What writes into memory must be ordered behind all that reads from it,
and what reads behind the latest that wrote.

A stream, or lane, is the set of accesses that are over before its next work begins: messages that land, pushes that read, the use
of parameters by the passes, gradients that are added, what an owner does with sums and published copies, and on the peer
transport the words that tell the other side of an edge how far it may go: each must come after the one before.
"""

import random
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from deepspeed_cdp.plan.actions import Action, Kind
from deepspeed_cdp.plan.constants import PERSISTENT
from deepspeed_cdp.plan.plan import Plan
from deepspeed_cdp.plan.replicated import ReplicatedPlan
from deepspeed_cdp.plan.schedule import Schedule
from deepspeed_cdp.plan.unit_schedule import Unit
from deepspeed_cdp.runtime.executor import Executor
from deepspeed_cdp.runtime.messages import Messages, PendingReads
from deepspeed_cdp.runtime.owner_executor import OwnerExecutor
from deepspeed_cdp.runtime.runtime import RESIDENCIES
from deepspeed_cdp.runtime.state import RankState
from deepspeed_cdp.transport.base import PULLED, Transport
from deepspeed_cdp.transport.buffers import Buffers
from deepspeed_cdp.transport.peer import CREDIT_ON_CURRENT, CUDA_STREAM_OF
from deepspeed_cdp.transport.ring_view import RingView

STEPS, FLUSHED_AFTER = 14, 9


class Behind:
    """A message or mark, and the accesses that are over when it has come."""

    counted = True

    def __init__(self, transport: "Noting", over: set[int]):
        self.transport, self.over = transport, over

    def wait(self, where: Any) -> None:
        self.transport.now.update(self.over)
        self.transport.work_enqueued()

    def done(self) -> bool:
        return False  # nobody may count on it


class Noting(Transport):
    """One rank's, with the streams of ``like`` ("peer" or "nccl").

    Attributes:
        wrong: accesses that are not ordered behind one that they must not come before.
    """

    name, host_waits = "noting", False

    def __init__(self, rank: int, size: int, like: str):
        super().__init__(rank, size, 1.0)
        self.like, self.rendezvous, self.current, self.wrong = like, like == "nccl", "passes", []
        self._streams: dict[Any, set[int]] = defaultdict(set)
        self._reads: dict[int, tuple[int, int, str]] = {}  # number -> from, to, what
        self._writes: dict[int, tuple[int, int, str]] = {}
        self._words: dict[tuple[str, int, bool], int] = {}  # stream, peer, incoming -> number of the latest word told
        self._point: tuple[str, set[int]] | None = None  # what others follow of a stream, until it gets more work
        self._count = 0

    @property
    def now(self) -> set[int]:
        return self._streams[self.current]

    def _span(self, view: torch.Tensor) -> tuple[int, int]:
        """Addresses in the arena, or an empty span."""
        begin = view.data_ptr() - self._memory.data_ptr()
        return (begin, begin + view.numel()) if 0 <= begin < self._memory.numel() else (0, 0)

    def _check(self, known: dict[int, tuple[int, int, str]], span: tuple[int, int], over: set[int], what: str) -> list[int]:
        found = [n for n, (low, high, _) in known.items() if low < span[1] and span[0] < high]
        self.wrong += [f"{what} while {known[n][2]}" for n in found if n not in over]
        return found

    def reads(self, view: torch.Tensor, what: str, over: set[int] | None = None) -> int:
        """Note a read by the current stream, or one that is ordered behind ``over``; its number, which is in that set now."""
        over, span = self.now if over is None else over, self._span(view)
        self._check(self._writes, span, over, what)
        self._count += 1
        self._reads[self._count] = *span, what
        over.add(self._count)
        return self._count

    def writes(self, view: torch.Tensor, what: str, over: set[int] | None = None) -> int:
        """Likewise a write; what was there before is forgotten."""
        over, span = self.now if over is None else over, self._span(view)
        for known in (self._reads, self._writes):
            for number in self._check(known, span, over, what):
                low, high, before = known[number]
                if span[0] <= low and high <= span[1]:
                    del known[number]
        self._count += 1
        self._writes[self._count] = *span, what
        over.add(self._count)
        return self._count

    def forget(self) -> None:
        """Drop what has been overwritten since: nothing is compared with it any more."""
        known = {*self._reads, *self._writes, *self._words.values()}
        for over in self._streams.values():
            over &= known

    def _tell(self, stream: str, peer: int, incoming: bool, over: set[int]) -> None:
        """Write the edge's next credit or arrival word; a smaller number that comes later would take it back."""
        before = self._words.get((stream, peer, incoming), 0)
        if before and before not in over:
            self.wrong.append(f"{stream} {'from' if incoming else 'to'} rank {peer} is told before the message before it")
        self._count += 1
        self._words[stream, peer, incoming] = self._count
        over.add(self._count)

    def _follow(self, lane: Any) -> set[int]:
        """The lane, behind the current stream's work as ``PeerTransport._wait_for_current`` has it."""
        known = self._streams[lane]
        if lane != self.current:
            if self._point is None or self._point[0] != self.current or self.like == "nccl":
                self._point = self.current, set(self.now)
            known.update(self._point[1])
        return known

    # ---- what the walk calls --------------------------------------------------------------------------------------------
    def allocate(self, nbytes: int) -> torch.Tensor:
        self._memory = torch.zeros(nbytes, dtype=torch.uint8)
        return self._memory

    def work_enqueued(self) -> None:
        self._point = None

    def record_event(self) -> Behind:
        return Behind(self, set(self.now))

    def wait_event(self, event: Behind | None) -> None:
        if event is not None:
            event.wait("")

    @contextmanager
    def _beside(self, lane: str) -> Iterator[None]:
        before, self.current = self.current, lane
        yield
        self.current = before

    def owner_stream(self):
        return self._beside("owner")

    def relay(self, work: Callable[[], Behind | None], edge: Any = None) -> Any:
        with self._beside("relay"):
            return work()

    def finish_relays(self, where) -> None:
        pass

    def end_relays(self) -> None:
        pass

    def post(self, stream, src, into, after=(), where="", remote_offset=-1) -> Behind:
        peer = self.like == "peer"
        if not peer:
            lane: Any = stream, src, self.rank
        elif stream in CREDIT_ON_CURRENT or self.current == "owner":
            lane = self.current
        else:
            lane = stream if stream in PULLED else "credit"
        known = self._follow(lane)
        known.update(*(ticket.over for ticket in after))
        if peer and stream not in PULLED:
            self._tell(stream, src, True, known)
        landed = set(known)
        self.writes(into, f"{stream} from rank {src} lands ({where})", landed)
        if stream in PULLED or not peer:  # this rank's stream does it
            known.update(landed)
        if peer and stream in PULLED:
            self._tell(stream, src, True, known)
        return Behind(self, landed)

    def push(self, stream, dst, source, after=None, remote_offset=-1) -> Behind:
        what, peer = f"{stream} to rank {dst} reads", self.like == "peer"
        if peer and stream in PULLED:  # the reader does, as soon as this stream has said so
            self._tell(stream, dst, False, self.now)
            taken = set(self.now)
            self.reads(source, what, taken)
            return Behind(self, taken)
        lane = CUDA_STREAM_OF[stream] if peer else (stream, self.rank, dst)
        lane = "owner" if lane == "S" else lane
        known = self._follow(lane) if after is None or not peer else self._streams[lane]
        known.update(after.over if after else ())
        self.reads(source, what, known)
        if peer:
            self._tell(stream, dst, False, known)
        return Behind(self, set(known))

    def gather(self, value, where) -> list:
        return [value] * self.size

    def broadcast(self, tensor, src, where) -> None:
        pass

    def reset(self, where) -> None:
        for known in (self._streams, self._reads, self._writes, self._words):
            known.clear()

    def close(self, drain) -> None:
        pass


class Owning:
    """An owner that reads sums and writes published copies without a value in them."""

    def __init__(self, state: RankState, transport: Noting, clipped: bool, updates_per_unit: bool):
        self.state, self.transport, self.updates_per_unit = state, transport, updates_per_unit
        self.updates_eagerly, self.stage = updates_per_unit and not clipped, state.owned_stage
        self._apart = state.plan.rings > 1 or state.plan.sums_apart  # also in the warm-up before such a rule

    def place(self, unit: int, finished: bool) -> torch.Tensor:
        """Where the unit's finished sum is averaged, or its running one grows."""
        plan, region = self.state.plan, "X" if finished and self._apart else "O"
        return self.state.buffers.view(region, plan.x_layout(self.stage)[0][unit], plan.unit(unit).g_bytes)

    def average(self, step: int, unit: int) -> torch.Tensor:
        self.transport.reads(self.place(unit, True), f"the owner reads the sum of unit {unit}")
        self.transport.writes(self.place(unit, True), f"the owner divides the sum of unit {unit}")
        return torch.zeros(1)

    def update(self, step: int, norm2=None, unit: int | None = None, slot: int | None = None) -> None:
        plan, stage = self.state.plan, self.stage
        for i in [i for i in plan.members(stage) if plan.unit(i).g_bytes] if unit is None else [unit]:
            self.average(step, i)
            for region, offsets in () if slot is None else plan.written(slot, stage):
                view = self.state.buffers.view(region, offsets[i], plan.unit(i).p_bytes)
                self.transport.writes(view, f"the owner writes unit {i} in {region}")

    def predict(self, step: int, unit: int, copy: int) -> None:
        plan, view = self.state.plan, self.state.buffers.view
        self.transport.reads(self.place(unit, False), f"the owner predicts from the sum of unit {unit}")
        there = view(f"W{copy}", plan.v_layout(self.stage)[0][unit], plan.unit(unit).p_bytes)
        self.transport.writes(there, f"the owner predicts unit {unit}")

    def advance(self, step: int, unit: int, slot: int | None) -> torch.Tensor:
        self.update(step, None, unit, slot)
        return torch.zeros(1)

    def discard(self) -> None:
        pass

    def finish(self, step: int) -> None:
        pass


class Observer:
    """The runtime's events, noted."""

    def __init__(self, state: RankState, transport: Noting):
        self.state, self.transport, self.started = state, transport, []

    def params_released(self, unit: int) -> None:
        pass

    def grads_complete(self, unit: int, grad_sum: torch.Tensor, empty: bool) -> None:
        self.started.extend([unit] if empty else [])
        self.transport.writes(grad_sum, f"gradients of unit {unit} are added in step {self.state.step}")

    def norm_known(self, step: int, overflow: bool) -> None:
        pass

    def step_updated(self, step: int) -> None:
        pass


def run_round(walk: Executor, transport: Noting) -> None:
    """One micro-batch: each pass uses its parameters, and a backward adds to its sum from its beginning on (fused GEMMs do)."""
    held = (PERSISTENT,) if walk.plan.persistent else ()
    walk.begin_round()
    for unit, backward in walk.plan.visits:
        if (unit, backward) == (len(walk.plan.units) - 1, True):
            walk.end_forward()
        walk.acquire(unit, backward)
        for i in (*held, unit):
            transport.reads(walk.params[i], f"the {'backward' if backward else 'forward'} uses unit {i}")
        if unit in walk.grad_sums:
            transport.writes(walk.grad_sums[unit], f"a layer of unit {unit} adds its gradient in step {walk.state.step}")
        walk.release(unit, backward)
    walk.end_round()


def walked(
    plan: Plan, rank: int, ring: int, like: str, clipped: bool, updates_per_unit: bool, warmup: int
) -> tuple[Noting, list[int]]:
    """The transport, and how many pushes the rank remembered after each step."""
    size = plan.schedule.ranks
    transport = Noting(rank + ring * size, size * plan.rings, like)
    seen = RingView(transport, size) if plan.rings > 1 else transport
    state = RankState(plan, rank, seen, Buffers([plan.regions(r) for r in range(size)], rank, seen))
    owner, observer = Owning(state, transport, clipped, updates_per_unit), Observer(state, transport)

    def added(unit: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Of several rings: the own sum and the one that has come are added, where this ring has the result."""
        places = owner.place(unit, False), owner.place(unit, True)
        read, written = places if ring == plan.rings - 1 else places[::-1]
        transport.reads(read, f"the owner adds the sum of unit {unit} to another ring's")
        transport.writes(written, f"the owner has added unit {unit} of two rings")
        return [torch.zeros(1)], [torch.zeros(1)]

    walk = Executor(state, RESIDENCIES[type(plan)].params, owner, added, observer, torch.device("cpu"), warmup)
    part, buffers, messages = walk.owner_executor, state.buffers, walk.messages
    wait_sum, refresh = part._wait_sum, walk.actions.get(Kind.REFRESH_PARAM)

    def finished(a: Action, unit: int) -> int:
        wait_sum(a, unit)
        if part._copies_sums:
            transport.reads(owner.place(unit, False), f"the finished sum of unit {unit} is copied")
            transport.writes(owner.place(unit, True), f"the finished sum of unit {unit} comes to where its owner uses it")
        return unit

    def applied(a: Action) -> None:
        refresh(a)
        region, view = messages.place(a)
        if region != "R":
            transport.reads(view, f"unit {a.unit} is copied from {region}")
            transport.writes(buffers.view("R", a.into[1], a.nbytes), f"unit {a.unit} is copied into R")
            if a.peer is None:
                part.read_ended()

    part._wait_sum = finished
    if refresh is not None:
        walk.actions[Kind.REFRESH_PARAM] = applied
    remembered = []
    walk.begin()
    for step in range(STEPS):
        for _ in range(plan.schedule.rounds):
            run_round(walk, transport)
        walk.add_loss(torch.zeros(()))
        walk.end_step()
        remembered.append(messages.reads.count())
        transport.forget()
        if step in (warmup - 1, FLUSHED_AFTER):
            walk.flush()
            walk.begin()
    trained = [i for i in [PERSISTENT, *range(len(plan.units))] if (i != PERSISTENT or plan.persistent) and plan.unit(i).g_bytes]
    assert sorted(observer.started) == sorted(trained * STEPS if rank == 0 else []), "each sum is started once a step, by rank 0"
    return transport, remembered


def case(seed: int) -> Iterator[tuple[Plan, dict[str, Any]]]:
    """Two plans with sizes, rule, rounds, persistent, frozen and kept units, rings, corrections at random; how to walk them."""
    chance = random.Random(seed)
    size = chance.choice([1, 2, 2, 3, 3, 4, 5])
    k = chance.choice([0, size - 1, size, 2 * size - 1, chance.randint(0, 2 * size - 1)])
    frozen, per_stage = chance.choice([0.0, 0.0, 0.4, 0.8]), chance.choice([1, 2, 3])
    units = []
    for number in range(size * per_stage):
        nbytes = chance.choice([64, 128, 192, 320, 640])
        units.append(Unit(f"u{number}", number // per_stage, ("w",), (), nbytes, 0 if chance.random() < frozen else nbytes))
    persistent = chance.choice([None, Unit("", 0, ("h",), (), 128, 128), Unit("", 0, (), ("h",), 128, 0)])
    schedule, rings = Schedule(size, k, chance.choice([1, 1, 2, 3])), chance.choice([1, 1, 2, 3])
    for make, keep in ((Plan, chance.random() < 0.5), (ReplicatedPlan, False)):
        how = {
            "clipped": chance.random() < 0.5,
            "updates_per_unit": chance.random() < 0.8,
            "warmup": chance.choice([0, 0, 3]) if k else 0,
        }
        corrects, predicts, fp32_sums = chance.random() < 0.6, chance.random() < 0.7, chance.random() < 0.3
        yield (
            make(
                schedule,
                tuple(replace(u, g_bytes=2 * u.g_bytes) if fp32_sums else u for u in units),
                persistent,
                keep,
                rings,
                chance.choice([1, 2, 2, 4]),
                delay_corrected=corrects,
                predicts=corrects and predicts,
            ),
            how,
        )


@pytest.mark.sampled(12)
@pytest.mark.parametrize("like", ["peer", "nccl"])
@pytest.mark.parametrize("seed", range(60))
def test_nothing_is_written_while_it_is_read(seed: int, like: str) -> None:
    for plan, how in case(seed):
        for ring in range(plan.rings):
            for rank in range(plan.schedule.ranks):
                transport, remembered = walked(plan, rank, ring, like, **how)
                assert not transport.wrong, (plan, how, rank, transport.wrong[:3])
                # what is remembered is bounded by what is in flight: it does not grow between two flushes
                assert max(remembered[7:10]) <= max(remembered[4:7]), (plan, how, rank, remembered)


def equal(ranks: int, k: int, rounds: int = 2, predicts: bool = False, make: type[Plan] = Plan) -> Plan:
    """Two equal units a stage."""
    units = tuple(Unit(f"u{i}", i // 2, ("w",), (), 256, 256) for i in range(2 * ranks))
    return make(Schedule(ranks, k, rounds), units, delay_corrected=predicts, predicts=predicts)


def wrong(plan: Plan, like: str = "peer", clipped: bool = False, updates_per_unit: bool = True) -> list[str]:
    """All that is wrong on all ranks."""
    ranks = range(plan.schedule.ranks)
    return [w for r in ranks for w in walked(plan, r, 0, like, clipped, updates_per_unit, 0)[0].wrong]


@cache
def right(plan: Plan, like: str) -> bool:
    """Whether nothing is wrong; several plants have the same plan."""
    return not wrong(plan, like)


def offers_at_once(patch: pytest.MonkeyPatch) -> None:
    offer = Messages.offer
    patch.setattr(Messages, "offer", lambda self, a, back: offer(self, a, None))


def grants_at_once(patch: pytest.MonkeyPatch) -> None:
    post = Noting.post
    patch.setattr(
        Noting,
        "post",
        lambda self, stream, src, into, after=(), *rest: post(
            self, stream, src, into, () if self.current == "relay" else after, *rest
        ),
    )


def forgets_predictions(patch: pytest.MonkeyPatch) -> None:
    """What a prediction has read is not remembered."""
    predict = OwnerExecutor.predict

    def forgetful(self: OwnerExecutor, a: Action) -> None:
        of_sums = self.messages.reads._reading.setdefault("O", [])
        before = len(of_sums)
        predict(self, a)
        del of_sums[before:]

    patch.setattr(OwnerExecutor, "predict", forgetful)


def predicts_at_once(patch: pytest.MonkeyPatch) -> None:
    predict = OwnerExecutor.predict

    def hasty(self: OwnerExecutor, a: Action) -> None:
        with patch.context() as inside:
            inside.setattr(self, "added_at", {})
            inside.setattr(self.messages, "coming_back", lambda *rest: None)
            predict(self, a)

    patch.setattr(OwnerExecutor, "predict", hasty)


def waits_for_no_reader_of(region: str) -> Callable[[pytest.MonkeyPatch], None]:
    def plant(patch: pytest.MonkeyPatch) -> None:
        wait = Messages.wait_readers
        patch.setattr(Messages, "wait_readers", lambda self, a, at, *rest: at[0] == region or wait(self, a, at, *rest))

    return plant


def lands_on_readers_of(region: str) -> Callable[[pytest.MonkeyPatch], None]:
    def plant(patch: pytest.MonkeyPatch) -> None:
        take = PendingReads.take
        patch.setattr(PendingReads, "take", lambda self, at, *rest: [] if at == region else take(self, at, *rest))

    return plant


def adds_at_once(patch: pytest.MonkeyPatch) -> None:
    """The owner's own gradients, before the sum of the rank before has come."""
    recv = Executor._recv_grad

    def hasty(self: Executor, a: Action) -> None:
        if a.stream == "G":
            self.messages.back(a, a.unit, *a.into[1:])
        recv(self, a._replace(peer=None, stream="") if a.stream == "G" else a)

    patch.setattr(Executor, "_recv_grad", hasty)


def updates_at_once(patch: pytest.MonkeyPatch) -> None:
    """Before the finished sum is there."""

    def hasty(self: OwnerExecutor, a: Action, unit: int) -> int:
        if self.sum_ends.pop(unit, None) is None:
            self.messages.back(a, unit, self.state.schedule.ranks - 1, self.state.schedule.rounds - 1)
        return unit

    patch.setattr(OwnerExecutor, "_wait_sum", hasty)


def left_out(owner: type, name: str) -> Callable[[pytest.MonkeyPatch], None]:
    return lambda patch: patch.setattr(owner, name, lambda *rest: None)


PLANTED = {  # what is left out, the plan, what is seen then
    "an offer waits for the sum that comes back": (offers_at_once, equal(3, 2), "G0 to rank . reads while G from rank . lands"),
    "an offer waits for what its own rank adds": (offers_at_once, equal(3, 2), "G0 to rank . reads while gradients of unit"),
    "a credit waits for the pull": (grants_at_once, equal(3, 2), "G from rank . lands .* while G0 to rank . reads"),
    "the owner's own gradients wait for the prediction": (
        forgets_predictions,
        equal(2, 1, 2, True),
        "a layer of unit . adds .* while the owner predicts from the sum",
    ),
    "the owner's own gradients wait for readers": (
        waits_for_no_reader_of("O"),
        equal(2, 1, 2, True),
        "a layer of unit . adds .* while the owner predicts from the sum",
    ),
    "the owner's own gradients wait for the sum": (
        adds_at_once,
        equal(3, 2),
        "a layer of unit . adds .* while G from rank . lands",
    ),
    "a prediction waits for the sum": (
        predicts_at_once,
        equal(4, 3, 2, True),
        "predicts from the sum of unit . while G from rank",
    ),
    "a prediction waits for the owner's own gradients": (
        predicts_at_once,
        equal(1, 1, 2, True),  # elsewhere it comes behind the offer of this sum
        "predicts from the sum of unit . while gradients of unit",
    ),
    "a prediction waits for those who pull the one before": (
        lands_on_readers_of("W0"),
        equal(4, 3, 2, True),
        "the owner predicts unit . while W0 to rank . reads",
    ),
    "an update waits for the sum": (updates_at_once, equal(3, 2), "the owner reads the sum of unit . while G from rank . lands"),
    "an update waits for the last rank's own gradients": (
        updates_at_once,
        equal(3, 2),
        "the owner reads the sum of unit . while gradients of unit",
    ),
    "an update waits for readers": (
        left_out(OwnerExecutor, "_wait_copy"),
        equal(3, 2),
        "the owner writes unit . in V. while P0 to rank . reads",
    ),
    "an update waits for its own rank's replica": (
        left_out(OwnerExecutor, "read_ended"),
        equal(4, 5, 1, False, ReplicatedPlan),
        "the owner writes unit . in V0 while unit . is copied from V0",
    ),
    "a prediction waits for its own rank's replica": (
        left_out(OwnerExecutor, "read_ended"),
        equal(4, 5, 1, True, ReplicatedPlan),
        "the owner predicts unit . while unit . is copied from W0",
    ),
    "the next step's sums wait for the update": (
        left_out(OwnerExecutor, "_sums_used"),
        equal(4, 5),
        "a layer of unit . adds .* while the owner divides the sum",
    ),
    "the next step's sums wait for the copy of the finished ones": (
        left_out(OwnerExecutor, "_sums_used"),
        equal(4, 7),
        "a layer of unit . adds .* while the finished sum of unit . is copied",
    ),
    "marks order reads behind writes": (left_out(Noting, "wait_event"), equal(2, 1, 1), " uses unit . while the owner writes"),
    "a push follows new work": (left_out(Noting, "work_enqueued"), equal(3, 2), "G to rank . reads while gradients of unit"),
    "what lands waits for pushes": (
        lands_on_readers_of("PG"),
        equal(3, 2),
        "(P0|G0) from rank . lands .* while G to rank . reads",
    ),
}
ONLY_PEER = "a push follows new work", "nccl"  # where each message has a point of its own


@pytest.mark.parametrize(("what", "like"), [(w, like) for w in PLANTED for like in ("peer", "nccl") if (w, like) != ONLY_PEER])
def test_a_wait_that_is_left_out_is_seen(what: str, like: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant, plan, sign = PLANTED[what]
    assert right(plan, like)
    plant(monkeypatch)
    found = wrong(plan, like)
    assert any(re.search(sign, w) for w in found), sorted(set(found))[:20]


def test_an_owner_that_tells_a_later_credit_first_is_seen() -> None:
    """From two streams a smaller number may come last, and take back what the larger one has told."""
    transport = Noting(0, 2, "peer")
    boxes = transport.allocate(24).split(8)
    with transport.owner_stream():
        transport.post("G", 1, boxes[0])
    came = transport.relay(lambda: transport.post("G", 1, boxes[1]))
    assert transport.wrong == ["G from rank 1 is told before the message before it"]
    with transport.owner_stream():
        came.wait("")
        transport.post("G", 1, boxes[2])
    assert len(transport.wrong) == 1


@pytest.mark.parametrize("rings", [1, 2])
def test_rank_0_starts_the_next_sums_behind_its_copy_of_the_finished_ones(rings: int) -> None:
    """Under cdp-v1 it owns what it adds to first, and grants no credit. (It once did not wait.)"""
    plan = replace(equal(2, 3), rings=rings)
    assert plan.sums_apart and not walked(plan, 0, 0, "peer", True, True, 0)[0].wrong


def test_an_owner_alone_does_not_sum_where_it_still_reads() -> None:
    """One rank under cdp-v1: its passes do not wait for the update before. (It was wrong once.)"""
    plan = Plan(Schedule(1, 1, 1), (Unit("u0", 0, ("w",), (), 256, 256), Unit("u1", 0, ("w",), (), 256, 256)))
    assert plan.copies(0) == 2
    assert not walked(plan, 0, 0, "peer", False, True, 0)[0].wrong


def test_what_is_left_of_a_push_that_is_half_overwritten_is_remembered() -> None:
    """Two messages land in the place of one, from two streams, so both must wait for it. (The second did not once.)"""
    sizes = 640, 64, 192, 320, 640, 128, 64, 640
    units = tuple(Unit(f"u{i}", i // 2, ("w",), (), nbytes, nbytes) for i, nbytes in enumerate(sizes))
    for like in ("peer", "nccl"):
        for k in (2, 3):
            plan = Plan(Schedule(4, k, 2), units)
            assert not any(walked(plan, r, 0, like, False, True, 0)[0].wrong for r in range(4)), (k, like)
