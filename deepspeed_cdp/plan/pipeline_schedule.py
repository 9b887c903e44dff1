"""The schedule of a cyclic pipeline as data: each rank's computations, messages and updates, in order.

It follows DeepSpeed's ``PipeSchedule`` (deepspeed/runtime/pipe/schedule.py), with two differences. An instruction names (stage,
micro-batch, version) instead of a buffer. The pipeline is not flushed between steps (the paper's Figure 2 (a.ii), (c.ii),
(c.iii)).

In the rule (``plan.schedule``), micro-batch q of step t has the place of rank r = q mod N, round m = q div N. With ``base(t)``
the start of step t, its forward on stage s is at logical time ``base(t) + 2q + s``, its backward at ``base(t) + 2q + 2N-1-s``.
So a stage does one pass per position, forwards and backwards in turn. Placements differ only in the rank of a (stage,
micro-batch)::

    pipeline    stage s is rank s                                                 N ranks
    pyramid     stage s has N-s replicas; the Q-th micro-batch is on replica      N(N+1)/2 ranks
                Q mod (N-s), which so holds the activations of one micro-batch
    single      all stages are on one rank                                        1 rank

Every instruction has a key, compared lexicographically. Both sides of a message have the same key, and a rank runs instructions
in the order of keys. So all ranks share one order of messages, and no cycle of waits can form, even if every send blocks until it
is received. ``verify.pipeline.dry_run`` checks this case.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from deepspeed_cdp.plan.schedule import Schedule

PLACEMENTS = ("pipeline", "pyramid", "single")

Key = tuple[int, ...]

# Phases of a position, in order: messages of earlier passes; finished sums and norms; norm and update; new versions; passes.
_EARLY, _FINISHED, _WORK, _LATE, _PASS = range(5)
_MESSAGES = ("activation", "grad", "sum", "early", "finished", "norms", "totals", "weights")


class Instruction(NamedTuple):
    """One instruction of a rank.

    Attributes:
        name: ``load``, ``forward``, ``backward``, ``predict`` (write the correction of a version from early sums), ``norm``,
            ``update``, ``publish`` (write the newest version where updates do not), or ``send_X`` and ``recv_X`` for a message X:

            ==========  ======================================================================
            activation  a stage's output, to the next stage
            grad        the gradient of a stage's input, to the stage before
            sum         a running gradient sum, from replica to replica
            early       a running sum that a prediction needs, to the unit's owner (to itself: the owner keeps it)
            finished    the same for a step's whole sum
            norms       norms so far, from owner to owner
            totals      norms of all stages, and the loss, to all ranks
            weights     a new version, or its correction
            ==========  ======================================================================
        stage, step: steps count from the last flush.
        micro: micro-batch of the step, or -1.
        version: the version that a pass reads, or that an update, prediction or message produces, or -1.
        unit: weights that travel as one message (see ``PipeSchedule.units``), or -1.
        peer: the other rank, or -1.
        corrected: a pass reads, or a message holds, the correction of the version (delay_correction.py).
    """

    name: str
    stage: int
    step: int
    micro: int = -1
    version: int = -1
    unit: int = -1
    peer: int = -1
    corrected: bool = False

    def __str__(self) -> str:
        said = [f"{k}={v}" for k, v in zip(self._fields[1:-1], self[1:-1]) if v >= 0]
        return f"{self.name}({', '.join(said + ['corrected'] * self.corrected)})"


@dataclass(frozen=True)
class PipeSchedule:
    """The rule and the placement of a pipeline.

    Attributes:
        stages: N.
        threshold: K, 0..2N-1.
        rounds: micro-batches per step, divided by N.
        placement: one of PLACEMENTS.
        ties: for each group of tied weights, the stages that use it: ascending, two or more.
        exact_norm: updates wait for the norm of the whole step (clipping under K = 0 and K = 2N-1).
        alone: step 0 ends before step 1 begins, so that ``train_batch`` can return its loss; versions are the rule's.
        delay_corrected: stale readers read the correction of their version.
        predicts: corrections are predictions, made of the next step's early sums; else updates make them.
    """

    stages: int
    threshold: int
    rounds: int = 1
    placement: str = "pipeline"
    ties: tuple[tuple[int, ...], ...] = ()
    exact_norm: bool = False
    alone: bool = False
    delay_corrected: bool = False
    predicts: bool = False

    def __post_init__(self) -> None:
        assert self.placement in PLACEMENTS, self.placement
        assert self.delay_corrected or not self.predicts, "predictions are corrections"
        assert not self.exact_norm or self.threshold in (0, 2 * self.stages - 1), self
        assert all(list(t) == sorted(set(t)) and len(t) > 1 and t[-1] < self.stages for t in self.ties), self.ties

    # ---- the rule ---------------------------------------------------------------------------------------------------------
    @cached_property
    def rule(self) -> Schedule:
        """The rule of the ring, which decides the version that a pass reads."""
        return Schedule(self.stages, self.threshold, self.rounds)

    @property
    def micro_batches(self) -> int:
        """Micro-batches per step, a multiple of N."""
        return self.stages * self.rounds

    def version(self, step: int, micro: int, stage: int) -> int:
        """The version of a stage's weights that both passes of a micro-batch read."""
        return self.rule.version(step, *divmod(micro, self.stages), stage)

    def corrected(self, micro: int, stage: int) -> bool:
        """Whether they read the version's correction. That of version 0 is version 0 itself."""
        return self.delay_corrected and not self.rule.fresh(*divmod(micro, self.stages), stage)

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
        """Closed form: the fraction of a steady step in which a rank of ``pipeline`` waits, if all passes take the same time.

        For ``dp`` it is that of 1F1B with a flush per step and M micro-batches, (N-1)/(M+N-1).
        """
        return self.stall / self.period

    def base(self, step: int) -> int:
        """The position at which a step begins."""
        gap = max(0, 2 * self.micro_batches + 4 * self.stages - self.period) if self.alone and step else 0
        return self.period * step + gap

    def summed(self, step: int, micro: int, stage: int) -> int:
        """The position by which the stage's backward of a micro-batch has ended."""
        return self.base(step) + 2 * micro + 2 * self.stages - stage

    def finished(self, step: int, stage: int) -> int:
        """The position by which the step's last backward of the stage has ended."""
        return self.summed(step, self.micro_batches - 1, stage)

    def predict_time(self, step: int, stage: int) -> int:
        """The position of the stage's prediction: where nothing stalls, that of its first stale forward in the next step."""
        return self.summed(step, self.predictor(stage), stage)

    def update_time(self, step: int, stage: int) -> int:
        """The position of the stage's update; with ``exact_norm``, after the last sum of all stages."""
        return self.finished(step, 0) + stage if self.exact_norm else self.finished(step, stage)

    def drains(self, step: int) -> bool:
        """Whether ``train_batch`` runs the step to its end: under dp, and in step 0 if ``alone``."""
        return self.threshold == 0 or self.alone and step == 0

    def cut(self, step: int, rank: int) -> Key:
        """The key before which ``train_batch`` of the step stops: after its last forward and one more pass."""
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
        """The ranks that hold a stage."""
        if self.placement == "pyramid":
            start = sum(self.stages - s for s in range(stage))
            return tuple(range(start, start + self.stages - stage))
        return (stage if self.placement == "pipeline" else 0,)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        return tuple(s for s in range(self.stages) if rank in self.replicas(s))

    def rank_of(self, step: int, micro: int, stage: int) -> int:
        """The rank that runs a micro-batch's passes of a stage."""
        replicas = self.replicas(stage)
        return replicas[(step * self.micro_batches + micro) % len(replicas)]

    def predictor(self, stage: int) -> int:
        """The last micro-batch in the early sum that predicts the stage, and with it the units whose home it is."""
        return self.rule.early_micro_batches(stage) - 1

    def handed_over(self, unit: int, step: int) -> dict[str, int]:
        """Sums that a unit's owner gets in a step: by message, the last micro-batch in them. Version 0 is its own correction."""
        early = {"early": self.predictor(self.units[unit][0])} if self.predicts and step and self.stale(unit) else {}
        return early | {"finished": self.micro_batches - 1}

    def lands(self, unit: int, stage: int, micro: int) -> bool:
        """Whether the owner needs memory for the stage's sum up to a micro-batch: it is, in some step, not where it adds."""
        home = self.units[unit][0]
        return stage != home or any(self.rank_of(t, micro, stage) != self.owner(home) for t in range(self.stages))

    def owner(self, stage: int) -> int:
        """The rank that holds a stage's masters and optimizer state: the replica of the N-th micro-batch."""
        return self.rank_of(0, self.stages - 1, stage)

    # ---- units of weights ---------------------------------------------------------------------------------------------------
    @property
    def units(self) -> tuple[tuple[int, ...], ...]:
        """The stages that use each unit: unit s < N holds stage s's own weights, later units hold groups of tied weights.

        The first stage of a unit is its home: the unit has the home's version, and is updated with it.
        """
        return (*((s,) for s in range(self.stages)), *self.ties)

    def units_at(self, stage: int) -> tuple[int, ...]:
        """The units that a stage uses."""
        return tuple(u for u, used in enumerate(self.units) if stage in used)

    def homed(self, stage: int) -> tuple[int, ...]:
        """The units whose home is this stage."""
        return tuple(u for u, used in enumerate(self.units) if used[0] == stage)

    def stale(self, unit: int) -> bool:
        """Whether some micro-batch reads a stale version of a unit."""
        return self.threshold > self.units[unit][0]

    def read_forms(self, unit: int) -> tuple[bool, ...]:
        """What passes read of a unit: versions (False), corrections (True), or both."""
        if not (self.delay_corrected and self.stale(unit)):
            return (False,)
        return (True,) if self.threshold == 2 * self.stages - 1 else (False, True)

    def updated_forms(self, unit: int) -> tuple[bool, ...]:
        """What updates write of it."""
        return tuple(form for form in self.read_forms(unit) if not (form and self.predicts))

    def slots(self, stage: int) -> int:
        """How many versions, and corrections, the owner of a stage writes in turn."""
        return 2 if self.stale(stage) else 1

    def copies(self, unit: int) -> int:
        """Copies of a unit's weights that a rank keeps: two of what stale readers read, in turn.

        Versions that only fresh readers read need one copy. Such a version is out of use when the next one is made.
        """
        return self.slots(self.units[unit][0]) + len(self.read_forms(unit)) - 1

    def copy(self, unit: int, version: int, corrected: bool) -> int:
        """The copy that holds a version or its correction; both in turn where passes read one form only."""
        if self.copies(unit) == 3:
            return 1 + version % 2 if corrected else 0
        return version % self.copies(unit)

    def holders(self, unit: int) -> tuple[int, ...]:
        """The ranks that keep a copy of a unit."""
        return tuple(sorted({r for s in self.units[unit] for r in self.replicas(s)}))

    # ---- programs -----------------------------------------------------------------------------------------------------------
    def program(self, rank: int, step: int) -> list[tuple[Key, Instruction]]:
        """A rank's instructions for a step, in order; the last ones interleave with those of the next step."""
        mine = [*self._passes(rank, step), *self._owning(rank, step)]
        return sorted(mine, key=lambda item: item[0])

    def _passes(self, rank: int, t: int) -> Iterator[tuple[Key, Instruction]]:
        n, last, base = self.stages, self.stages - 1, self.base(t)
        for q in range(self.micro_batches):
            for s in self.stages_of(rank):
                if self.rank_of(t, q, s) != rank:
                    continue
                f, b = base + 2 * q + s, base + 2 * q + 2 * n - 1 - s
                forward = Instruction("forward", s, t, q, self.version(t, q, s), corrected=self.corrected(q, s))
                before = self.rank_of(t, q, s - 1) if s else rank
                after = self.rank_of(t, q, s + 1) if s < last else rank
                if s in (0, last):
                    yield (f, _PASS, 2, s, 0), Instruction("load", s, t, q)
                if before != rank:
                    yield self._message(f, "activation", before, rank), Instruction("recv_activation", s, t, q, peer=before)
                    yield self._message(b + 1, "grad", rank, before), Instruction("send_grad", s, t, q, peer=before)
                yield (f, _PASS, 2, s, 1), forward
                if after != rank:
                    yield self._message(f + 1, "activation", rank, after), Instruction("send_activation", s, t, q, peer=after)
                    yield self._message(b, "grad", after, rank), Instruction("recv_grad", s, t, q, peer=after)
                yield (b, _PASS, 1, s, 1), forward._replace(name="backward")
                yield from self._sums(rank, t, q, s, b)

    def _sums(self, rank: int, t: int, q: int, s: int, b: int) -> Iterator[tuple[Key, Instruction]]:
        """Receive the running sum from the micro-batch before's replica; send it to the next one's replica, and to the owner."""
        for u in self.units_at(s):
            if q and (peer := self.rank_of(t, q - 1, s)) != rank:
                yield self._message(b - 1, "sum", peer, rank, u), Instruction("recv_sum", s, t, q, unit=u, peer=peer)
            if q < self.micro_batches - 1 and (peer := self.rank_of(t, q + 1, s)) != rank:
                yield self._message(b + 1, "sum", rank, peer, u), Instruction("send_sum", s, t, q, unit=u, peer=peer)
            owner = self.owner(self.units[u][0])
            for kind, micro in self.handed_over(u, t).items():
                if q == micro and self.lands(u, s, micro):
                    key = self._message(b + 1, kind, rank, owner, u, s, phase=_FINISHED)
                    yield key, Instruction(f"send_{kind}", s, t, unit=u, peer=owner)

    def _owning(self, rank: int, t: int) -> Iterator[tuple[Key, Instruction]]:
        for s in range(self.stages):
            end, update, owner = self.finished(t, s), self.update_time(t, s), self.owner(s)
            if owner == rank:
                for u in self.homed(s):
                    for (kind, micro), b in itertools.product(self.handed_over(u, t).items(), self.units[u]):
                        if (peer := self.rank_of(t, micro, b)) != rank:
                            key = self._message(self.summed(t, micro, b), kind, peer, rank, u, b, phase=_FINISHED)
                            yield key, Instruction(f"recv_{kind}", b, t, unit=u, peer=peer)
                if "early" in self.handed_over(s, t):  # before the norm, which averages sums in place
                    yield (self.predict_time(t, s), _WORK, -1, s), Instruction("predict", s, t, version=t, corrected=True)
                if s < self.stages - 1 and (peer := self.owner(s + 1)) != rank:
                    yield self._message(end, "norms", peer, rank, phase=_FINISHED), Instruction("recv_norms", s, t, peer=peer)
                yield (end, _WORK, 0, s), Instruction("norm", s, t)
                if s and (peer := self.owner(s - 1)) != rank:
                    key = self._message(self.finished(t, s - 1), "norms", rank, peer, phase=_FINISHED)
                    yield key, Instruction("send_norms", s, t, peer=peer)
                yield (update, _WORK, 1, s), Instruction("update", s, t, version=t + 1)
            for u in self.homed(s):
                for form in self.read_forms(u):
                    if form in self.updated_forms(u) or t:
                        yield from self._weights(rank, t, u, form)
        first = self.owner(0)
        for peer in range(self.ranks):
            key = self._message(self.finished(t, 0), "totals", first, peer, phase=_LATE)
            if peer != first and rank == first:
                yield key, Instruction("send_totals", 0, t, peer=peer)
            elif peer != first and rank == peer:
                yield key, Instruction("recv_totals", 0, t, peer=first)

    def _weights(self, rank: int, t: int, unit: int, corrected: bool) -> Iterator[tuple[Key, Instruction]]:
        """The owner sends what the update or the prediction of step t wrote to the other holders."""
        s, predicted = self.units[unit][0], corrected and self.predicts
        owner, version = self.owner(s), t if predicted else t + 1
        for peer in self.holders(unit):
            # a prediction comes when the peer's stage reads it: in the same call of train_batch on both sides
            first = min(b for b in self.units[unit] if b in self.stages_of(peer))
            time = self.predict_time(t, s) + first - s if predicted else self.update_time(t, s)
            key = self._message(time, "weights", owner, peer, unit, int(corrected), phase=_LATE)
            send = Instruction("send_weights", s, t, version=version, unit=unit, peer=peer, corrected=corrected)
            if peer != owner and rank == owner:
                yield key, send
            elif peer != owner and rank == peer:
                yield key, send._replace(name="recv_weights", peer=owner)

    def closing(self, rank: int, t: int) -> Iterator[Instruction]:
        """After all passes of step t, the last one: its new version to all holders that have the correction only."""
        for s in range(self.stages):
            units = [u for u in self.homed(s) if False not in self.read_forms(u)]
            if units and self.owner(s) == rank:
                yield Instruction("publish", s, t, version=t + 1)
            for u in units:
                yield from (i for _, i in self._weights(rank, t, u, False))

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


class ProgramCursor:
    """Splits one rank's instructions of successive steps into calls of ``train_batch``.

    A call ends before the last backwards of its step. The next call, or ``rest``, runs them.
    """

    def __init__(self, schedule: PipeSchedule, rank: int):
        self.schedule, self.rank = schedule, rank
        self.step = 0  # the step of the next call
        self._ahead: list[tuple[Key, Instruction]] = []

    def call(self) -> list[Instruction]:
        """The instructions of the next ``train_batch``."""
        cut = self.schedule.cut(self.step, self.rank)
        self._ahead = sorted([*self._ahead, *self.schedule.program(self.rank, self.step)], key=lambda item: item[0])
        self.step += 1
        now = [i for key, i in self._ahead if key < cut]
        self._ahead = self._ahead[len(now) :]
        return now

    def rest(self) -> list[Instruction]:
        """The remaining instructions, if no step follows."""
        left, self._ahead = [i for _, i in self._ahead], []
        return [*left, *self.schedule.closing(self.rank, self.step - 1)]
