"""Simulation of thousands of ranks: recurrences over whole stages, for all ranks and rings at once.

A pass waits only for earlier logical times (docs/algorithm.md#why-it-cannot-deadlock). So at each logical time, the passes of all
ranks are computed together, from arrays of earlier times. A pass starts after

- the rank's own pass before it (and, at the start of a step, its delay);
- the stage's parameters: from the ring neighbour, whose pass of the same stage is two logical times earlier, or from the owner
  that has published the version;
- in the backward, the neighbour's running sum; with u units per stage, both arrive unit by unit, one unit behind;
- the messages on the neighbour's link before it, which carries one at a time;
- room in the next rank's buffers: a rank is at most four positions ahead of the next one.

An owner publishes when rank N-1 has finished the stage's sum; with several rings, after the owners of the stage in all rings have
exchanged theirs (``chain``).

tests/unit/test_waves.py compares it with events.py. If links are busy most of the time and the rule is not cdp-v2, this model
is up to a fifth too fast.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from deepspeed_cdp.analysis.timing.times import Hardware, Times
from deepspeed_cdp.plan.plan import Plan
from deepspeed_cdp.plan.schedule import Schedule


@dataclass(frozen=True)
class Stages:
    """The stages of a plan; durations in seconds, sequences of N numbers.

    Attributes:
        forward, backward: duration of the passes.
        update: duration of the owner's update.
        parameters, sums: time on a link of the stage's parameters and of its gradient sums.
        units: average number per stage.
        kept: the backward uses the forward's parameters, without a second message.
        latency: of a message.
    """

    forward: Sequence[float]
    backward: Sequence[float]
    update: Sequence[float]
    parameters: Sequence[float]
    sums: Sequence[float]
    units: float
    kept: Sequence[bool]
    latency: float


@dataclass(frozen=True)
class Waves:
    """The result of a simulation: arrays [step, ring, rank] of seconds; methods as of ``events.Run``, over all rings."""

    starts: np.ndarray
    ends: np.ndarray
    busy: float

    def period(self) -> float:
        """Seconds per step over the later half, of the slowest rank, which the others follow in the end."""
        a = len(self.ends) // 2 - 1
        return float((self.ends[-1] - self.ends[a]).max() / (len(self.ends) - 1 - a))

    def offsets(self) -> list[float]:
        """Settled delay of each rank behind the one before it, averaged over rings."""
        return np.diff(self.starts[len(self.starts) // 2 :], axis=2).mean(axis=(0, 1)).tolist()

    def idle(self) -> list[float]:
        """Fraction of a settled step in which the passes wait; the same for all ranks, since all do the same work."""
        return [max(0.0, 1 - self.busy / self.period())] * self.ends.shape[2]


def of_plan(plan: Plan, times: Times) -> Stages:
    """A plan's stages."""
    ranks = range(plan.schedule.ranks)
    members = [[i for i in plan.members(s) if i >= 0] for s in ranks]
    return Stages(
        [times.stage(plan, s, False) for s in ranks],
        [times.stage(plan, s, True) for s in ranks],
        [sum(times.updates[i] for i in plan.members(s)) for s in ranks],
        [sum(times.message(plan.units[i].p_bytes) for i in members[s]) for s in ranks],
        [sum(times.message(plan.units[i].g_bytes) for i in members[s]) for s in ranks],
        len(plan.units) / plan.schedule.ranks,
        [all(plan.kept(i) for i in members[s]) for s in ranks],
        times.hardware.latency,
    )


def equal(
    ranks: int,
    compute: float,
    parameters: float,
    nbytes: float,
    hardware: Hardware,
    units: int = 4,
    keep_after_forward: bool = False,
) -> Stages:
    """N equal stages, with the times of ``times.times`` in closed form.

    Args:
        compute: seconds of a step's passes alone.
        parameters: number of parameters.
        nbytes: their bytes, and those of the gradient sums.
        units: per stage.
    """
    n, each = ranks, nbytes / ranks
    kept = [s >= (1 if keep_after_forward else max(1, n - 2)) for s in range(n)]
    twice = (n - sum(kept)) / n
    received = nbytes * (n - 1) / n * (1 + twice + 1 + 1 / n)  # F, B, G, O
    adds = 3 * nbytes / hardware.memory
    update = parameters / n * hardware.update_bytes / hardware.memory
    stretch = 1 + hardware.contention * (2 * received / hardware.memory + update) / (compute + adds)
    forward, backward = compute / 3 / n * stretch, (compute * 2 / 3 + adds) / n * stretch
    link = each / hardware.bandwidth
    return Stages([forward] * n, [backward] * n, [update] * n, [link] * n, [link] * n, units, kept, hardware.latency)


def chain(rings: int, nbytes: float, units: float, bandwidth: float, latency: float) -> float:
    """Seconds for the sum of a stage's first unit to travel along the owners of all rings and back."""
    return 2 * (rings - 1) * (nbytes / units / bandwidth + latency)


def simulate(
    schedule: Schedule,
    stages: Stages,
    steps: int = 8,
    rings: int = 1,
    exchange: Sequence[float] | None = None,
    jitter: float = 0.0,
    seed: int = 0,
    late: tuple[int, int, float] | None = None,
    clipped: bool = False,
) -> Waves:
    """Run ``steps`` steps of all rings.

    Args:
        schedule: one micro-batch per rank and step.
        exchange: per stage, seconds in which the owners of all rings exchange their sums.
        jitter: each rank starts each step late by a uniform random time between 0 and this, from ``seed``.
        late: (rank, step, seconds): one rank of ring 0 is late once.
        clipped: owners update whole stages at the end, not unit by unit.
    """
    assert schedule.rounds == 1
    run = _Simulation(schedule, stages, steps, rings, exchange, clipped)
    generator = np.random.default_rng(seed)

    def delays(rank: int, step: int) -> np.ndarray:
        seconds = generator.uniform(0, jitter, rings) if jitter else np.zeros(rings)
        if late and late[:2] == (rank, step):
            seconds[0] += late[2]
        return seconds

    for tau in range(schedule.period * (steps - 1) + 2 * (schedule.ranks - 1) + 2 * schedule.ranks):
        run.advance(tau, delays)
    return Waves(run.starts, run.ends, float(run.took.sum()))


class _Simulation:
    """The state of ``simulate``; arrays are [ring, rank] unless stated otherwise, times are seconds.

    Attributes:
        stage, back, took: by position: stage, whether it is a backward, its duration.
        hop, lag: by position: delay of the parameters behind the neighbour's pass, and of its running sum; -inf for none.
        loads: by position: time of its messages on the link.
        clock, link: ends of each rank's latest pass, and of the messages on its link.
        history: start, end and arrival of the parameters, after each of the last three logical times.
        published: [version, ring, stage] -> time of publication.
    """

    def __init__(
        self, schedule: Schedule, stages: Stages, steps: int, rings: int, exchange: Sequence[float] | None, clipped: bool
    ):
        n, u, self.latency = schedule.ranks, stages.units, stages.latency
        self.schedule, self.steps, self.rings, self.ranks, self.units = schedule, steps, rings, np.arange(n), u
        update, link_p, self.link_g = (np.asarray(x, float) for x in (stages.update, stages.parameters, stages.sums))
        self.between = np.zeros(n) if exchange is None else np.asarray(exchange, float)
        self.update = update if clipped or schedule.exact_norm else update / u
        self.stage = np.concatenate([np.arange(n), np.arange(n)[::-1]])
        self.back = np.arange(2 * n) >= n
        self.took = np.concatenate([np.asarray(stages.forward, float), np.asarray(stages.backward, float)[::-1]])
        kept = self.back & np.asarray(stages.kept)[self.stage]  # the forward's parameters are still there
        self.hop = np.where(kept, -np.inf, link_p[self.stage] / u + self.latency)
        self.lag = np.where(self.back, self.took / u + self.link_g[self.stage] / u + self.latency, -np.inf)
        self.loads = np.where(kept, 0.0, link_p[self.stage]) + np.where(self.back, self.link_g[self.stage], 0.0)
        self.starts, self.ends = np.zeros((steps, rings, n)), np.zeros((steps, rings, n))
        self.clock, self.link = np.zeros((rings, n)), np.zeros((rings, n))
        self.history = [[np.zeros((rings, n)) for _ in range(3)] for _ in range(3)]
        self.published = np.zeros((steps + 1, rings, n))

    def advance(self, tau: int, delays: Callable[[int, int], np.ndarray]) -> None:
        """Compute the passes of all ranks that have one at this logical time."""
        n = self.schedule.ranks
        step, position = np.divmod(tau - 2 * self.ranks, self.schedule.period)
        active = (step >= 0) & (step < self.steps) & (position < 2 * n)
        p = np.where(active, position, 0)
        two_before, one_before = self.history[(tau - 2) % 3], self.history[(tau - 1) % 3]
        begin = self.clock.copy()
        for r in np.flatnonzero(active & (p == 0)):
            begin[:, r] += delays(int(r), int(step[r]))
        here = self._parameters(active, p, step, two_before)
        np.maximum(begin, here, out=begin)
        begin[:, :-1] = np.maximum(begin[:, :-1], two_before[1][:, 1:])  # room: the next rank has used older messages
        lag = self.lag[p[1:]]  # sums: one unit behind the neighbour, at the start and at the end
        np.maximum(begin[:, 1:], two_before[0][:, :-1] + lag, out=begin[:, 1:])
        end = begin + self.took[p]
        np.maximum(end[:, 1:], two_before[1][:, :-1] + lag, out=end[:, 1:])
        # the link to the next rank (the last rank's: to the owners) may be at most one pass behind
        ready = np.maximum(np.where(np.isinf(here), begin, np.minimum(here, begin)), self.link)
        carried = ready + np.where(active, self.loads[p], 0.0)
        np.maximum(end, carried - self.took[p], out=end)
        here = np.where(np.isinf(here), begin, here)
        for kept, new in ((self.clock, end), (self.link, carried)):
            np.copyto(kept, new, where=active)
        for kept, old, new in zip(self.history[tau % 3], one_before, (begin, self.clock, here)):
            np.copyto(kept, np.where(active, new, old))
        for r in np.flatnonzero(active & (p == 0)):
            self.starts[step[r], :, r] = begin[:, r]
        for r in np.flatnonzero(active & (p == 2 * n - 1)):
            self.ends[step[r], :, r] = end[:, r]
        if active[-1] and self.back[p[-1]]:  # the last rank has finished this stage's sum
            self._publish(int(self.stage[p[-1]]), int(step[-1]) + 1, end[:, -1])

    def _parameters(self, active: np.ndarray, p: np.ndarray, step: np.ndarray, two_before: list[np.ndarray]) -> np.ndarray:
        """Arrival of the parameters: from the neighbour, or from the owner for the first reader of a version."""
        n, k, ranks = self.schedule.ranks, self.schedule.threshold, self.ranks
        here = np.full((self.rings, n), -np.inf)
        here[:, 1:] = two_before[2][:, :-1] + self.hop[p[1:]]
        s = self.stage[p]
        first = (ranks == 0) if k == 2 * n - 1 else (ranks == 0) | ((ranks + s >= k) & (ranks - 1 + s < k))
        for r in np.flatnonzero(first & active):
            fresh = k < 2 * n - 1 and r + s[r] >= k
            version = step[r] if fresh else max(step[r] - 1, 0)
            hop = self.hop[p[r]] if n - 1 - s[r] != r else min(self.hop[p[r]], 0.0)
            here[:, r] = self.published[version, :, s[r]] + hop
        return here

    def _publish(self, stage: int, version: int, finished: np.ndarray) -> None:
        """The owners update a stage whose sums are finished; with an exact norm, all stages after the last sum."""
        done = np.broadcast_to(finished.max(), (self.rings,)) if self.rings > 1 else finished
        if not self.schedule.exact_norm:
            hop = 0.0 if stage == 0 else self.link_g[stage] / self.units + self.latency
            self.published[version, :, stage] = done + hop + self.between[stage] + self.update[stage]
        elif stage == 0:
            self.published[version] = done[:, None] + self.latency + self.between.max() + self.update[None, :]
