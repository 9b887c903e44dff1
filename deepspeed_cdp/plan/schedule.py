"""Order and parameter version of every pass, as functions of (step, round, rank, stage).

Symbols, 0-based (the paper's i = rank + 1, j = stage + 1):

====  ======================================================================================================
N     ranks in the ring = number of stages = micro-batches in flight
r     rank; s: stage; t: step (optimizer update); m: round of gradient accumulation
p     position inside a round, 0..2N-1: the forward of stage p, or the backward of stage 2N-1-p
tau   logical time ``period * t + 2N m + 2r + p``: an order, not a clock
K     threshold: at step t, rank r reads stage s fresh (theta_t) if r + s >= K, otherwise stale (theta_{t-1})
====  ======================================================================================================

N = 3, one step (columns are logical time, F/B with the stage)::

    rank 0  F0 F1 F2 B2 B1 B0
    rank 1        F0 F1 F2 B2 B1 B0
    rank 2              F0 F1 F2 B2 B1 B0
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

RULES = ("dp", "cdp-v1", "cdp-v2")


def threshold(rule: str | int, ranks: int) -> int:
    """The K of a rule: ``dp`` 0, ``cdp-v2`` N-1 (the smallest without a stall), ``cdp-v1`` 2N-1 (as PipeDream-2BW), or K itself.

    Raises:
        ValueError: not a rule, or K outside 0..2N-1.
    """
    if isinstance(rule, str) and rule in RULES:
        return {"dp": 0, "cdp-v2": ranks - 1, "cdp-v1": 2 * ranks - 1}[rule]
    if isinstance(rule, int) and not isinstance(rule, bool) and 0 <= rule <= 2 * ranks - 1:
        return rule
    raise ValueError(
        f"cyclic.rule is {rule!r}; allowed are {', '.join(map(repr, RULES))} or an integer K from 0 to "
        f"{2 * ranks - 1} with {ranks} ranks; choose one of these"
    )


class Read(NamedTuple):
    """One rank's forward or backward of one stage, and the version of the parameters that it reads."""

    time: int
    rank: int
    stage: int
    backward: bool
    step: int
    round: int
    version: int


@dataclass(frozen=True)
class Schedule:
    """The rule of one ring.

    Steps count from the last flush, so version v is theta after v updates since then, and step 0 reads version 0 everywhere.

    Attributes:
        ranks: N.
        threshold: K, 0..2N-1.
        rounds: micro-batches per rank and step (DeepSpeed's gradient_accumulation_steps).
    """

    ranks: int
    threshold: int
    rounds: int = 1

    def __post_init__(self) -> None:
        assert self.ranks >= 1 and self.rounds >= 1 and 0 <= self.threshold <= 2 * self.ranks - 1, self

    @property
    def stalls(self) -> bool:
        """Whether a step takes more than 2N positions per round, since ranks wait for version t (K < N-1)."""
        return self.threshold < self.ranks - 1

    @property
    def period(self) -> int:
        """Logical time from one step to the next: 2N per round; if K < N-1, 4N - 2K for the last round (dp: 4N)."""
        last = 4 * self.ranks - 2 * self.threshold if self.stalls else 2 * self.ranks
        return 2 * self.ranks * (self.rounds - 1) + last

    @property
    def warning(self) -> str:
        """A warning about the duration of a step if the rule stalls; else empty."""
        if not self.stalls:
            return ""
        n, plain = self.ranks, 2 * self.ranks * self.rounds
        return (
            f"cyclic.rule has K = {self.threshold} on a ring of {n} ranks, so every step waits for versions that are not "
            f"there yet: it takes {self.period} stage times (2N = {2 * n} for each micro-batch, but 4N-2K = "
            f"{4 * n - 2 * self.threshold} for the last) instead of {plain}, {self.period / plain:.2f} times as long; use "
            f'"cdp-v2" (K = {n - 1}), the smallest K without waiting, unless you want it so'
        )

    @property
    def exact_norm(self) -> bool:
        """Whether every update waits for the whole step's gradient norm (dp and v1)."""
        return self.threshold in (0, 2 * self.ranks - 1)

    def owner(self, stage: int) -> int:
        """The rank that holds the stage's masters and optimizer state, and updates it: N-1-s."""
        return self.ranks - 1 - stage

    def owned(self, rank: int) -> int:
        """The stage that ``rank`` owns."""
        return self.ranks - 1 - rank

    def is_read_stale(self, stage: int) -> bool:
        """Whether some rank reads the stage stale; rank 0 does so first, in the first round."""
        return self.threshold > stage

    def predictor(self, stage: int) -> int:
        """The rank whose running sum, after its last backward of the stage in a step, predicts the stage's next version: s.

        It ends that backward when rank 0 begins its forward of the stage in the next step.
        """
        return stage

    def early_micro_batches(self, stage: int) -> int:
        """Micro-batches of a step in the sum that predicts the stage's next version: all up to the predictor's last."""
        return (self.rounds - 1) * self.ranks + self.predictor(stage) + 1

    def start(self, step: int, round: int, rank: int) -> int:
        """Logical time of the rank's first position in this round."""
        return self.period * step + 2 * self.ranks * round + 2 * rank

    def fresh(self, round: int, rank: int, stage: int) -> bool:
        """Whether the rule reads theta_t (else theta_{t-1}). v1 is stale in every round; other rules are fresh after round 0."""
        return self.threshold < 2 * self.ranks - 1 and (round > 0 or rank + stage >= self.threshold)

    def version(self, step: int, round: int, rank: int, stage: int) -> int:
        """The version that both passes of this micro-batch read."""
        return step if self.fresh(round, rank, stage) else max(step - 1, 0)

    def readers(self, step: int, stage: int) -> list[tuple[int, int, int]]:
        """(version, round, rank) of each micro-batch of this step that gets the stage from its owner: all but the owner's own."""
        return [
            (self.version(step, m, r, stage), m, r)
            for m in range(self.rounds)
            for r in range(self.ranks)
            if r != self.owner(stage)
        ]

    def neighbor(self, round: int, rank: int, by: int) -> tuple[int, int] | None:
        """(round, rank) of the micro-batch ``by`` places later in the order of a step, q = mN + r; None outside the step."""
        q = round * self.ranks + rank + by
        return divmod(q, self.ranks) if 0 <= q < self.ranks * self.rounds else None

    def norm_time(self, step: int, stage: int) -> int:
        """Logical time at which the stage's gradient sum is finished: the end of its last backward."""
        return self.period * step + 2 * self.ranks * (self.rounds - 1) + 4 * self.ranks - 2 - stage

    def update_time(self, step: int, stage: int) -> int:
        """Logical time of the update theta_step -> theta_{step+1}; dp and v1 wait for the global norm (stage 0's, and a hop)."""
        return self.norm_time(step, 0) + 1 if self.exact_norm and self.ranks > 1 else self.norm_time(step, stage)

    def reads(self, steps: int) -> Iterator[Read]:
        """Every pass of the first ``steps`` steps, in no particular order."""
        for t in range(steps):
            for m in range(self.rounds):
                for r in range(self.ranks):
                    for p in range(2 * self.ranks):
                        s = p if p < self.ranks else 2 * self.ranks - 1 - p
                        yield Read(self.start(t, m, r) + p, r, s, p >= self.ranks, t, m, self.version(t, m, r, s))


def grid(schedule: Schedule, steps: int = 2) -> str:
    """The timeline as text: a row per rank, a column per logical time. ``F2'`` is the forward of stage 2 at a stale version."""
    cells: dict[tuple[int, int], str] = {}
    for read in schedule.reads(steps):
        mark = "'" if read.version < read.step else ""
        cells[read.rank, read.time] = f"{'B' if read.backward else 'F'}{read.stage}{mark}"
    end = 1 + max(time for _, time in cells)
    width = max(map(len, cells.values()))
    rows = [" ".join(cells.get((r, x), "").ljust(width) for x in range(end)).rstrip() for r in range(schedule.ranks)]
    return "\n".join(f"rank {r}  {row}" for r, row in enumerate(rows))
