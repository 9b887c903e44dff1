"""On GPUs work is ordered by streams alone, which no result on a CPU shows. Here ranks walk their programs over a transport that
does nothing but note what each stream is ordered behind. What writes into memory must be ordered behind all that reads from it,
and what reads behind the latest that wrote.

A stream, or lane, is the set of accesses that are over before its next work begins: messages that land, pushes that read, the use
of parameters by the passes, gradients that are added, and what an owner does with sums and published copies.
"""

import random
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch

from deepspeed_cdp.plan.actions import Kind
from deepspeed_cdp.plan.constants import PERSISTENT
from deepspeed_cdp.plan.plan import Plan
from deepspeed_cdp.plan.replicated import ReplicatedPlan
from deepspeed_cdp.plan.schedule import Schedule
from deepspeed_cdp.plan.unit_schedule import Unit
from deepspeed_cdp.runtime.executor import Executor
from deepspeed_cdp.runtime.messages import PendingReads
from deepspeed_cdp.runtime.owner_executor import OwnerExecutor
from deepspeed_cdp.runtime.runtime import RESIDENCIES
from deepspeed_cdp.runtime.state import RankState
from deepspeed_cdp.transport.base import PULLED, Transport
from deepspeed_cdp.transport.buffers import Buffers
from deepspeed_cdp.transport.peer import _CREDIT_ON_CURRENT, _CUDA_STREAM_OF
from deepspeed_cdp.transport.ring_view import RingView

STEPS, FLUSHED_AFTER = 14, 9


class Behind:
    """A message or mark, and the accesses that are over when it has come."""

    counted = True

    def __init__(self, transport: "Noting", over: set[int]):
        self.transport, self.over = transport, over

    def wait(self, where: Any) -> None:
        self.transport.now.update(self.over)

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

    # ---- what the walk calls --------------------------------------------------------------------------------------------
    def allocate(self, nbytes: int) -> torch.Tensor:
        self._memory = torch.zeros(nbytes, dtype=torch.uint8)
        return self._memory

    def record_event(self) -> Behind:
        return Behind(self, set(self.now))

    def wait_event(self, event: Behind | None) -> None:
        if event is not None:
            event.wait("")

    @contextmanager
    def owner_stream(self) -> Iterator[None]:
        before, self.current = self.current, "owner"
        yield
        self.current = before

    def post(self, stream, src, into, after=(), where="", remote_offset=-1) -> Behind:
        if self.like == "peer":
            lane = stream if stream in PULLED else "credit"
            lane = self.current if stream in _CREDIT_ON_CURRENT or self.current == "owner" else lane
        else:
            lane = stream, src, self.rank
        known = self._streams[lane]
        known.update(self.now, *(ticket.over for ticket in after))
        landed = set(known)
        self.writes(into, f"{stream} from rank {src} lands ({where})", landed)
        if stream in PULLED or self.like == "nccl":  # this rank's stream does it
            known.update(landed)
        return Behind(self, landed)

    def push(self, stream, dst, source, after=None, remote_offset=-1) -> Behind:
        what = f"{stream} to rank {dst} reads"
        if self.like == "peer" and stream in PULLED:  # the reader does, as soon as this stream has said so
            taken = set(self.now)
            self.reads(source, what, taken)
            return Behind(self, taken)
        lane = _CUDA_STREAM_OF[stream] if self.like == "peer" else (stream, self.rank, dst)
        known = self._streams["owner" if lane == "S" else lane]
        known.update(self.now if after is None or self.like == "nccl" else (), after.over if after else ())
        self.reads(source, what, known)
        return Behind(self, set(known))

    def gather(self, value, where) -> list:
        return [value] * self.size

    def broadcast(self, tensor, src, where) -> None:
        pass

    def reset(self, where) -> None:
        for known in (self._streams, self._reads, self._writes):
            known.clear()

    def close(self, drain) -> None:
        pass


class Owning:
    """An owner that reads sums and writes published copies without a value in them."""

    def __init__(self, state: RankState, transport: Noting, clipped: bool, updates_per_unit: bool):
        self.state, self.transport, self.updates_per_unit = state, transport, updates_per_unit
        self.updates_eagerly, self.stage = updates_per_unit and not clipped, state.owned_stage

    def average(self, step: int, unit: int) -> torch.Tensor:
        plan, buffers = self.state.plan, self.state.buffers
        region, offsets = (plan.o_region, plan.o_layout(self.stage)) if plan.rings == 1 else ("X", plan.x_layout(self.stage)[0])
        view = buffers.view(region, offsets[unit], plan.unit(unit).g_bytes)
        self.transport.reads(view, f"the owner reads the sum of unit {unit}")
        return torch.zeros(1)

    def update(self, step: int, norm2=None, unit: int | None = None, slot: int | None = None) -> None:
        plan, offsets = self.state.plan, self.state.plan.copy_offsets(self.stage)
        for i in [i for i in offsets if plan.unit(i).g_bytes] if unit is None else [unit]:
            self.average(step, i)
            if slot is not None:
                view = self.state.buffers.view(plan.copy_region(slot), offsets[i], plan.unit(i).p_bytes)
                self.transport.writes(view, f"the owner writes unit {i}")

    def predict(self, step: int, unit: int) -> None:
        plan, view = self.state.plan, self.state.buffers.view
        early = view(*plan.early_place(unit), plan.unit(unit).g_bytes)
        self.transport.reads(early, f"the owner reads the early sum of unit {unit}")
        there = view("W0", plan.v_layout(self.stage)[0][unit], plan.unit(unit).p_bytes)
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


def walked(
    plan: Plan, rank: int, ring: int, like: str, clipped: bool, updates_per_unit: bool, warmup: int
) -> tuple[Noting, list[int]]:
    """The transport, and how many pushes the rank remembered after each step."""
    size = plan.schedule.ranks
    transport = Noting(rank + ring * size, size * plan.rings, like)
    seen = RingView(transport, size) if plan.rings > 1 else transport
    state = RankState(plan, rank, seen, Buffers(plan.regions, seen))
    owner, observer = Owning(state, transport, clipped, updates_per_unit), Observer(state, transport)
    views = lambda unit: ([torch.zeros(1)], [torch.zeros(1)])  # noqa: E731
    residency = RESIDENCIES[type(plan)].params
    walk = Executor(state, residency, owner, views, observer, torch.device("cpu"), warmup)
    part, buffers, messages = walk.owner_executor, state.buffers, walk.messages
    copy_sum, refresh, release = part.copy_sum, walk.actions.get(Kind.REFRESH_PARAM), walk.actions[Kind.RELEASE_PARAM]

    def kept(a: Any) -> None:
        copy_sum(a)
        view, there = messages.place(a)[1], buffers.view(*a.into[:2], a.nbytes)
        with transport.owner_stream():  # the mark behind it is made in there
            messages.reads._reading[a.region][-1][2].over |= {
                transport.reads(view, f"unit {a.unit} is copied to its owner's sums"),
                transport.writes(there, f"unit {a.unit} comes to where its owner uses it"),
            }

    def applied(a: Any) -> None:
        refresh(a)
        region, view = messages.place(a)
        if region != "R":
            transport.reads(view, f"unit {a.unit} is copied from {region}")
            transport.writes(buffers.view("R", a.into[1], a.nbytes), f"unit {a.unit} is copied into R")
            if a.peer is None:
                part.read_ended()

    def done(a: Any) -> None:
        if a.unit in walk.params:
            transport.reads(walk.params[a.unit], f"the {'backward' if a.backward else 'forward'} uses unit {a.unit}")
        release(a)

    part.copy_sum = kept
    walk.actions |= {Kind.RELEASE_PARAM: done, Kind.RELEASE_PERSISTENT_PARAM: done}
    if refresh is not None:
        walk.actions[Kind.REFRESH_PARAM] = applied
    remembered = []
    walk.begin()
    for step in range(STEPS):
        for _ in range(plan.schedule.rounds):
            walk.begin_round()
            walk.end_forward()
            walk.end_round()
        walk.add_loss(torch.zeros(()))
        walk.end_step()
        remembered.append(messages.reads.count())
        if step in (warmup - 1, FLUSHED_AFTER):
            walk.flush()
            walk.begin()
    trained = [i for i in [PERSISTENT, *range(len(plan.units))] if (i != PERSISTENT or plan.persistent) and plan.unit(i).g_bytes]
    assert sorted(observer.started) == sorted(trained * STEPS if rank == 0 else []), "each sum is started once a step, by rank 0"
    return transport, remembered


def case(seed: int) -> Iterator[tuple[Plan, dict[str, Any]]]:
    """Two plans with sizes, rule, rounds, persistent, frozen and kept units, rings at random, and how they are walked."""
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
        predicts, fp32_sums = chance.random() < 0.5, chance.random() < 0.3
        yield (
            make(
                schedule,
                tuple(replace(u, g_bytes=2 * u.g_bytes) if fp32_sums else u for u in units),
                persistent,
                keep,
                rings,
                how["warmup"] > 0,
                delay_corrected=predicts,
                predicts=predicts,
            ),
            how,
        )


@pytest.mark.sampled(4)
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


def test_a_sum_that_is_overwritten_while_it_is_copied_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    keep = OwnerExecutor.copy_sum

    def forgetful(self: OwnerExecutor, a: Any) -> None:
        keep(self, a)
        self.messages.reads._reading[a.region].pop()

    plan = Plan(Schedule(3, 2, 2), tuple(Unit(f"u{i}", i // 2, ("w",), (), 256, 256) for i in range(6)))
    assert not walked(plan, 2, 0, "peer", False, True, 0)[0].wrong
    monkeypatch.setattr(OwnerExecutor, "copy_sum", forgetful)
    assert any("while unit" in w and "is copied" in w for w in walked(plan, 2, 0, "peer", False, True, 0)[0].wrong)


def test_an_owner_alone_does_not_sum_where_it_still_reads() -> None:
    """One rank under cdp-v1: its passes do not wait for the update before. (It was wrong once.)"""
    plan = Plan(Schedule(1, 1, 1), (Unit("u0", 0, ("w",), (), 256, 256), Unit("u1", 0, ("w",), (), 256, 256)))
    assert plan.copies == 2
    assert not walked(plan, 0, 0, "peer", False, True, 0)[0].wrong


def test_a_wait_that_is_left_out_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = Plan(Schedule(3, 2, 2), tuple(Unit(f"u{i}", i // 2, ("w",), (), 256, 256) for i in range(6)))
    monkeypatch.setattr(OwnerExecutor, "_wait_copy", lambda *a: None)
    assert any("the owner writes unit" in w for r in range(3) for w in walked(plan, r, 0, "peer", False, True, 0)[0].wrong)
    monkeypatch.undo()
    take = PendingReads.take
    monkeypatch.setattr(PendingReads, "take", lambda reads, region, *a: [] if region == "PG" else take(reads, region, *a))
    wrong = [w for r in range(3) for w in walked(plan, r, 0, "peer", False, True, 0)[0].wrong]
    assert any(w.startswith("G from rank") for w in wrong) or any("gradients of unit" in w for w in wrong)


def test_what_lands_where_an_owner_still_reads_its_sums_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Finished sums lie between what is in flight: the next message there must wait for the owner's stream."""
    plans = [Plan(Schedule(4, k, 2), tuple(Unit(f"u{i}", i // 2, ("w",), (), 256, 256) for i in range(8))) for k in (3, 7)]
    for plan in plans:
        assert not any(
            walked(plan, r, 0, like, clipped, True, 0)[0].wrong
            for r in range(4)
            for like in ("peer", "nccl")
            for clipped in (False, True)
        )
    monkeypatch.setattr(OwnerExecutor, "_sums_used", lambda walk: None)
    for plan in plans:
        wrong = [w for r in range(4) for w in walked(plan, r, 0, "peer", False, True, 0)[0].wrong]
        assert any(" lands (" in w and "while the owner reads the sum" in w for w in wrong), wrong[:5]


def test_a_read_before_its_write_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Marks are what orders a rank's reads of its own published copy behind its owner's writes."""
    plan = Plan(Schedule(2, 1, 1), tuple(Unit(f"u{i}", i // 2, ("w",), (), 256, 256) for i in range(4)))
    monkeypatch.setattr(Noting, "wait_event", lambda *a: None)
    wrong = [w for r in range(2) for w in walked(plan, r, 0, "peer", False, True, 0)[0].wrong]
    assert any(" uses unit " in w and "while the owner writes" in w for w in wrong), wrong[:5]


def test_what_is_left_of_a_push_that_is_half_overwritten_is_remembered() -> None:
    """Two messages land in the place of one, from two streams, so both must wait for it. (The second did not once.)"""
    sizes = 640, 64, 192, 320, 640, 128, 64, 640
    units = tuple(Unit(f"u{i}", i // 2, ("w",), (), nbytes, nbytes) for i, nbytes in enumerate(sizes))
    for like in ("peer", "nccl"):
        for k in (2, 3):
            plan = Plan(Schedule(4, k, 2), units)
            assert not any(walked(plan, r, 0, like, False, True, 0)[0].wrong for r in range(4)), (k, like)
