"""The cyclic pipeline's timetable as data: who computes, sends, receives and updates what, when, and at which version.

In the style of DeepSpeed's ``PipeSchedule`` (deepspeed/runtime/pipe/schedule.py), but instructions name (stage, micro-batch,
version) instead of a buffer, and nothing is flushed between steps (the paper's Figure 2 (a.ii), (c.ii), (c.iii)).

Micro-batch q of step t takes the place of rank r = q mod N, round m = q div N, in the rule of
``deepspeed_cdp.plan.schedule``. With
``base(t)`` the start of step t, its forward on stage s is at logical time ``base(t) + 2q + s``, its backward at
``base(t) + 2q + 2N-1-s``. A stage thus does one pass per position, forwards and backwards in turn. What differs between
placements is only which rank a (stage, micro-batch) is on::

    pipeline    stage s is rank s                                                 N ranks
    pyramid     stage s has N-s replicas; the Q-th micro-batch is on replica      N(N+1)/2 ranks
                Q mod (N-s), which so holds the activations of one micro-batch
    single      all stages are on one rank                                        1 rank

Every instruction has a key, compared lexicographically; both sides of a message have the same key, and a rank works in the order
of keys. So messages have one order that all ranks share, and no wait can form a circle, even if every send blocks until it is
received (``validate.dry_run`` plays it so).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from deepspeed_cdp.plan.schedule import Schedule

PLACEMENTS = ("pipeline", "pyramid", "single")

Key = tuple[int, ...]

# Phases of a position, in order: messages of earlier passes; finished sums and norms; norm and update; new versions; passes.
_EARLY, _FINISHED, _WORK, _LATE, _PASS = range(5)
_MESSAGES = ("activation", "grad", "sum", "finished", "norms", "totals", "weights")


class Instruction(NamedTuple):
    """One thing that a rank does.

    Attributes:
        name: ``load``, ``forward``, ``backward``, ``norm``, ``update``; ``send_X`` and ``recv_X`` with X ``activation``,
            ``grad``, ``sum`` (running, from replica to replica), ``finished`` (a step's sum, to the unit's owner; to oneself:
            keep it), ``norms`` (from owner to owner), ``totals`` (norms and loss, to everybody), ``weights`` (a new version).
        stage, step: of what; steps count from the last flush.
        micro: micro-batch of the step, or -1.
        version: that a pass reads, or that an update or message makes, or -1.
        unit: of weights that are handed on as one message, or -1 (see ``PipeSchedule.units``).
        peer: the other rank, or -1.
    """

    name: str
    stage: int
    step: int
    micro: int = -1
    version: int = -1
    unit: int = -1
    peer: int = -1

    def __str__(self) -> str:
        said = [f"{k}={v}" for k, v in zip(self._fields[1:], self[1:]) if v >= 0]
        return f"{self.name}({', '.join(said)})"


@dataclass(frozen=True)
class PipeSchedule:
    """The rule and a placement.

    Attributes:
        stages: N.
        threshold: K, 0..2N-1.
        rounds: micro-batches per step, divided by N.
        placement: one of PLACEMENTS.
        ties: for each tied group the stages that use it, ascending, two or more.
        exact_norm: updates wait for the norm of the whole step (clipping under K = 0 and K = 2N-1).
        alone: step 0 ends before step 1 begins, so that its loss can be told at once; versions stay the rule's.
    """

    stages: int
    threshold: int
    rounds: int = 1
    placement: str = "pipeline"
    ties: tuple[tuple[int, ...], ...] = ()
    exact_norm: bool = False
    alone: bool = False

    def __post_init__(self) -> None:
        assert self.placement in PLACEMENTS, self.placement
        assert not self.exact_norm or self.threshold in (0, 2 * self.stages - 1), self
        assert all(list(t) == sorted(set(t)) and len(t) > 1 and t[-1] < self.stages for t in self.ties), self.ties

    # ---- the rule ---------------------------------------------------------------------------------------------------------
    @cached_property
    def rule(self) -> Schedule:
        """Which version is read, shared with the ring."""
        return Schedule(self.stages, self.threshold, self.rounds)

    @property
    def micro_batches(self) -> int:
        """Micro-batches per step, a multiple of N."""
        return self.stages * self.rounds

    def version(self, step: int, micro: int, stage: int) -> int:
        """The version of a stage's weights that both passes of a micro-batch read."""
        return self.rule.version(step, *divmod(micro, self.stages), stage)

    # ---- logical time -----------------------------------------------------------------------------------------------------
    @property
    def stall(self) -> int:
        """Positions per step in which every stage waits because K < N-1: 2(N-1-K)."""
        return max(0, 2 * (self.stages - 1 - self.threshold))

    @property
    def period(self) -> int:
        """Positions from one step to the next."""
        return 2 * self.micro_batches + self.stall

    @property
    def idle(self) -> float:
        """Closed form: the fraction of its time that a rank of ``pipeline`` waits in a steady step, passes being equally long.

        For ``dp`` it is that of 1F1B with a flush per step, (N-1)/(M+N-1).
        """
        return self.stall / self.period

    def base(self, step: int) -> int:
        """Where a step begins."""
        gap = max(0, 2 * self.micro_batches + 4 * self.stages - self.period) if self.alone and step else 0
        return self.period * step + gap

    def finished(self, step: int, stage: int) -> int:
        """The position before which the step's last backward of the stage has ended."""
        return self.base(step) + 2 * self.micro_batches + 2 * self.stages - 2 - stage

    def update_time(self, step: int, stage: int) -> int:
        """The position before which the stage is updated; with ``exact_norm`` when the last stage's sum is known."""
        return self.finished(step, 0) + stage if self.exact_norm else self.finished(step, stage)

    def drains(self, step: int) -> bool:
        """Whether a step is run to its end before ``train_batch`` returns: under dp, and the first one if it is ``alone``."""
        return self.threshold == 0 or self.alone and step == 0

    def cut(self, step: int, rank: int) -> Key:
        """The key up to which (exclusive) ``train_batch`` of a step goes: its last forward and the pass after it."""
        if self.drains(step):
            return (self.base(step + 1) + self.stages + 1,)
        first = self.stages_of(rank)[0]
        return (self.base(step) + 2 * (self.micro_batches - 1) + first + 2,)

    # ---- places -------------------------------------------------------------------------------------------------------------
    @property
    def ranks(self) -> int:
        n = self.stages
        return {"pipeline": n, "pyramid": n * (n + 1) // 2, "single": 1}[self.placement]

    def replicas(self, stage: int) -> tuple[int, ...]:
        """The ranks of a stage."""
        if self.placement == "pyramid":
            start = sum(self.stages - s for s in range(stage))
            return tuple(range(start, start + self.stages - stage))
        return (stage if self.placement == "pipeline" else 0,)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        return tuple(s for s in range(self.stages) if rank in self.replicas(s))

    def rank_of(self, step: int, micro: int, stage: int) -> int:
        """Where a micro-batch's passes of a stage are."""
        replicas = self.replicas(stage)
        return replicas[(step * self.micro_batches + micro) % len(replicas)]

    def owner(self, stage: int) -> int:
        """The rank that keeps a stage's masters and optimizer state: the replica of the N-th micro-batch."""
        return self.rank_of(0, self.stages - 1, stage)

    # ---- units of weights ---------------------------------------------------------------------------------------------------
    @property
    def units(self) -> tuple[tuple[int, ...], ...]:
        """The stages that use each unit: unit s < N is stage s's own weights, the others are the tied groups.

        A unit belongs to the first of its stages, its home: it has its version and is updated with it.
        """
        return (*((s,) for s in range(self.stages)), *self.ties)

    def units_at(self, stage: int) -> tuple[int, ...]:
        """The units that a stage uses."""
        return tuple(u for u, used in enumerate(self.units) if stage in used)

    def homed(self, stage: int) -> tuple[int, ...]:
        """The units whose home a stage is."""
        return tuple(u for u, used in enumerate(self.units) if used[0] == stage)

    def copies(self, unit: int) -> int:
        """Versions that a rank keeps of a unit: 2 if some micro-batch reads a stale one, else 1."""
        return 2 if self.threshold > self.units[unit][0] else 1

    def holders(self, unit: int) -> tuple[int, ...]:
        """The ranks that keep a copy of a unit."""
        return tuple(sorted({r for s in self.units[unit] for r in self.replicas(s)}))

    # ---- programs -----------------------------------------------------------------------------------------------------------
    def program(self, rank: int, step: int) -> list[tuple[Key, Instruction]]:
        """What a rank does for a step, in order. Some of it falls between the instructions of the next step."""
        mine = [*self._passes(rank, step), *self._owning(rank, step)]
        return sorted(mine, key=lambda item: item[0])

    def _passes(self, rank: int, t: int) -> Iterator[tuple[Key, Instruction]]:
        n, last, base = self.stages, self.stages - 1, self.base(t)
        for q in range(self.micro_batches):
            for s in self.stages_of(rank):
                if self.rank_of(t, q, s) != rank:
                    continue
                f, b = base + 2 * q + s, base + 2 * q + 2 * n - 1 - s
                at = {"stage": s, "step": t, "micro": q, "version": self.version(t, q, s)}
                before = self.rank_of(t, q, s - 1) if s else rank
                after = self.rank_of(t, q, s + 1) if s < last else rank
                if s in (0, last):
                    yield (f, _PASS, 2, s, 0), Instruction("load", s, t, q)
                if before != rank:
                    yield self._message(f, "activation", before, rank), Instruction("recv_activation", s, t, q, peer=before)
                    yield self._message(b + 1, "grad", rank, before), Instruction("send_grad", s, t, q, peer=before)
                yield (f, _PASS, 2, s, 1), Instruction("forward", **at)
                if after != rank:
                    yield self._message(f + 1, "activation", rank, after), Instruction("send_activation", s, t, q, peer=after)
                    yield self._message(b, "grad", after, rank), Instruction("recv_grad", s, t, q, peer=after)
                yield (b, _PASS, 1, s, 1), Instruction("backward", **at)
                yield from self._sums(rank, t, q, s, b)

    def _sums(self, rank: int, t: int, q: int, s: int, b: int) -> Iterator[tuple[Key, Instruction]]:
        """The running sum comes from the replica of the micro-batch before, and goes to that of the next one or the owner."""
        for u in self.units_at(s):
            if q and (peer := self.rank_of(t, q - 1, s)) != rank:
                yield self._message(b - 1, "sum", peer, rank, u), Instruction("recv_sum", s, t, q, unit=u, peer=peer)
            if q < self.micro_batches - 1:
                if (peer := self.rank_of(t, q + 1, s)) != rank:
                    yield self._message(b + 1, "sum", rank, peer, u), Instruction("send_sum", s, t, q, unit=u, peer=peer)
            elif (owner := self.owner(self.units[u][0])) != rank or s != self.units[u][0]:
                key = self._message(self.finished(t, s), "finished", rank, owner, u, s, phase=_FINISHED)
                yield key, Instruction("send_finished", s, t, unit=u, peer=owner)

    def _owning(self, rank: int, t: int) -> Iterator[tuple[Key, Instruction]]:
        last_micro = self.micro_batches - 1
        for s in range(self.stages):
            end, update, owner = self.finished(t, s), self.update_time(t, s), self.owner(s)
            if owner == rank:
                for u in self.homed(s):
                    for b in self.units[u]:
                        if (peer := self.rank_of(t, last_micro, b)) != rank:
                            key = self._message(self.finished(t, b), "finished", peer, rank, u, b, phase=_FINISHED)
                            yield key, Instruction("recv_finished", b, t, unit=u, peer=peer)
                if s < self.stages - 1 and (peer := self.owner(s + 1)) != rank:
                    yield self._message(end, "norms", peer, rank, phase=_FINISHED), Instruction("recv_norms", s, t, peer=peer)
                yield (end, _WORK, 0, s), Instruction("norm", s, t)
                if s and (peer := self.owner(s - 1)) != rank:
                    key = self._message(self.finished(t, s - 1), "norms", rank, peer, phase=_FINISHED)
                    yield key, Instruction("send_norms", s, t, peer=peer)
                yield (update, _WORK, 1, s), Instruction("update", s, t, version=t + 1)
            for u in self.homed(s):
                for peer in self.holders(u):
                    key = self._message(update, "weights", owner, peer, u, phase=_LATE)
                    if peer != owner and rank == owner:
                        yield key, Instruction("send_weights", s, t, version=t + 1, unit=u, peer=peer)
                    elif peer != owner and rank == peer:
                        yield key, Instruction("recv_weights", s, t, version=t + 1, unit=u, peer=owner)
        first = self.owner(0)
        for peer in range(self.ranks):
            key = self._message(self.finished(t, 0), "totals", first, peer, phase=_LATE)
            if peer != first and rank == first:
                yield key, Instruction("send_totals", 0, t, peer=peer)
            elif peer != first and rank == peer:
                yield key, Instruction("recv_totals", 0, t, peer=first)

    @staticmethod
    def _message(time: int, kind: str, src: int, dst: int, unit: int = 0, stage: int = 0, phase: int = _EARLY) -> Key:
        return (time, phase, _MESSAGES.index(kind), src, dst, unit, stage)

    def grid(self, steps: int = 2) -> str:
        """The passes as text: a row per rank (``single``: per micro-batch in flight), a column per logical time.

        ``F2'`` is the forward of stage 2 at a stale version.
        """
        cells: dict[tuple[int, int], str] = {}
        for rank in range(self.ranks):
            for step in range(steps):
                for key, i in self.program(rank, step):
                    if i.name in ("forward", "backward"):
                        row = i.micro % self.stages if self.placement == "single" else rank
                        cells[row, key[0]] = f"{i.name[0].upper()}{i.stage}{chr(39) if i.version < i.step else ''}"
        end, width = 1 + max(time for _, time in cells), max(map(len, cells.values()))
        word = "micro-batch" if self.placement == "single" else "rank"
        return "\n".join(
            f"{word} {row}  " + " ".join(cells.get((row, x), "").ljust(width) for x in range(end)).rstrip()
            for row in sorted({row for row, _ in cells})
        )


class Walker:
    """One rank's way through the programs of successive steps, call by call.

    A call of ``train_batch`` ends before the last backwards of its step; they are done in the next call, or by ``rest``.
    """

    def __init__(self, schedule: PipeSchedule, rank: int):
        self.schedule, self.rank = schedule, rank
        self.step = 0  # of the next call
        self._ahead: list[tuple[Key, Instruction]] = []

    def call(self) -> list[Instruction]:
        """What the next ``train_batch`` does."""
        cut = self.schedule.cut(self.step, self.rank)
        self._ahead = sorted([*self._ahead, *self.schedule.program(self.rank, self.step)], key=lambda item: item[0])
        self.step += 1
        now = [i for key, i in self._ahead if key < cut]
        self._ahead = self._ahead[len(now) :]
        return now

    def rest(self) -> list[Instruction]:
        """What is left to do when no step follows."""
        left, self._ahead = [i for _, i in self._ahead], []
        return left
