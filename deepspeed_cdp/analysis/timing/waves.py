"""Simulation of thousands of ranks: recurrences over whole stages, for all ranks and rings at once.

A pass waits only for earlier logical times (docs/algorithm.md#why-it-cannot-deadlock). So at each logical time, the passes of all
ranks are computed together, from arrays of earlier times. At any logical time, each stage has one rank at most. A pass starts
after

- the rank's own pass before it (and, at the start of a step, its delay);
- the stage's parameters: once the owner has published the version, and the rank has pulled the first unit;
- in the backward, the running sum of the rank before, over the owner; with u units per stage, both arrive unit by unit, one unit
  behind. The owner relays in logical order: it takes nothing back from a rank before it has the rank before's whole stage. Until
then, the rank has room for a few units;
- the rank's own messages before, which it starts one after the other, ``prefetch`` units before it needs them.

Rank 0 pushes a step's sum once the owner has used the last one. An owner publishes when rank N-1 has finished the stage's sum;
with several rings, after the owners of the stage in all rings have exchanged theirs (``chain``).

tests/unit/test_waves.py compares it with events.py. This model does not know that ranks share the link out of an owner: if links
are busy more than half of the time, it is up to a quarter too fast.
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
        parameters, again, sums: time on a link of the stage's parameters, of those that are pulled again for the backward, and of
            its gradient sums.
        units: average number per stage.
        latency: of a message.
        prefetch: units that a rank pulls ahead.
    """

    forward: Sequence[float]
    backward: Sequence[float]
    update: Sequence[float]
    parameters: Sequence[float]
    again: Sequence[float]
    sums: Sequence[float]
    units: float
    latency: float
    prefetch: int = 2


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
        [sum(times.message(plan.units[i].p_bytes) for i in members[s] if not plan.kept(i)) for s in ranks],
        [sum(times.message(plan.units[i].g_bytes) for i in members[s]) for s in ranks],
        len(plan.units) / plan.schedule.ranks,
        times.hardware.latency,
        plan.ahead,
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
    n, each, share = ranks, nbytes / ranks, (ranks - 1) / ranks
    link = each / hardware.bandwidth
    again = [link] * (n - 1) + [link * (1 - 1 / units)]  # the last unit stays for its backward
    if keep_after_forward:
        again = [link] + [0.0] * (n - 1)
    received = nbytes * share * (1 + sum(again) / link / n + share + 1)  # F, B, G, O
    adds = 3 * nbytes / hardware.memory
    update = parameters / n * hardware.update_bytes / hardware.memory
    stretch = 1 + hardware.contention * (2 * received / hardware.memory + update) / (compute + adds)
    forward, backward = compute / 3 / n * stretch, (compute * 2 / 3 + adds) / n * stretch
    return Stages([forward] * n, [backward] * n, [update] * n, [link] * n, again, [link] * n, units, hardware.latency)


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
    """The state of ``simulate``; times are seconds.

    Attributes:
        stage, back, took: by position: stage, whether it is a backward, its duration.
        clock, lane: [ring, rank] ends of each rank's latest pass, and of the messages that it has started.
        begun, ended: [ring, stage] of the latest backward: when its first unit and its last one were added.
        let_in: [ring, stage] from when on that rank may push sums back.
        used: [ring, stage] when the owner has used the last step's sums.
        published: [version, ring, stage] -> time of publication.
    """

    def __init__(
        self, schedule: Schedule, stages: Stages, steps: int, rings: int, exchange: Sequence[float] | None, clipped: bool
    ):
        n, u, self.latency = schedule.ranks, stages.units, stages.latency
        self.schedule, self.steps, self.rings, self.ranks, self.units = schedule, steps, rings, np.arange(n), u
        update, link_p, link_b, link_g = (
            np.asarray(x, float) for x in (stages.update, stages.parameters, stages.again, stages.sums)
        )
        self.between = np.zeros(n) if exchange is None else np.asarray(exchange, float)
        self.update = update if clipped or schedule.exact_norm else update / u
        self.stage = np.concatenate([np.arange(n), np.arange(n)[::-1]])
        self.back = np.arange(2 * n) >= n
        self.took = np.concatenate([np.asarray(stages.forward, float), np.asarray(stages.backward, float)[::-1]])
        self.pulled = np.concatenate([link_p, link_b[::-1]])  # by position: time of the parameters that it pulls
        self.link_g, self.hop_g = link_g, link_g / u + self.latency
        self.ahead, self.room = stages.prefetch * self.took / u, stages.prefetch + 2
        self.starts, self.ends = np.zeros((steps, rings, n)), np.zeros((steps, rings, n))
        self.clock, self.lane = np.zeros((rings, n)), np.zeros((rings, n))
        self.begun, self.ended, self.let_in, self.used = (np.zeros((rings, n)) for _ in range(4))
        self.published = np.zeros((steps + 1, rings, n))

    def advance(self, tau: int, delays: Callable[[int, int], np.ndarray]) -> None:
        """Compute the passes of all ranks that have one at this logical time."""
        n = self.schedule.ranks
        step, position = np.divmod(tau - 2 * self.ranks, self.schedule.period)
        r = np.flatnonzero((step >= 0) & (step < self.steps) & (position < 2 * n))
        step, p = step[r], position[r]
        s, took, back = self.stage[p], self.took[p], self.back[p]
        own, after_own, unit = n - 1 - s == r, n - s == r, took / self.units
        begin = self.clock[:, r]
        for x in np.flatnonzero(p == 0):
            begin[:, x] += delays(int(r[x]), int(step[x]))
        # parameters
        there = self.published[self._version(step, r, s), :, s].T
        parameters, sums = np.where(own, 0.0, self.pulled[p]), np.where(own | ~back, 0.0, self.link_g[s])
        pull = np.maximum(np.maximum(self.lane[:, r], there), begin - self.ahead[p])
        pulled = pull + parameters + np.where(r > 0, sums, 0.0)
        np.maximum(begin, there, out=begin, where=own)
        np.maximum(begin, pull + parameters / self.units + self.latency, out=begin, where=parameters > 0)
        # the sum of the rank before, which comes to the owner and from there to this rank
        to_owner = np.where(after_own, 0.0, self.hop_g[s])
        hops = to_owner + np.where(own, 0.0, self.hop_g[s])
        starts, summed = back & (r == 0), back & (r > 0)
        np.maximum(begin, self.used[:, s], out=begin, where=starts & own)
        np.maximum(begin, self.begun[:, s] + hops, out=begin, where=summed)
        np.maximum(begin, self.let_in[:, s] + hops, out=begin, where=summed & ~after_own)
        end = np.maximum(begin + took, pulled + np.where(parameters + sums > 0, unit, -np.inf))
        np.maximum(end, self.ended[:, s] + hops + unit, out=end, where=summed)
        # hand the sum on
        let_in = np.where(starts, self.used[:, s], self.ended[:, s] + to_owner)
        np.maximum(end, let_in + took - self.room * unit, out=end, where=back & ~own)
        self.lane[:, r] = np.where(parameters + sums > 0, pulled + sums, self.lane[:, r])
        self.clock[:, r] = end
        b = s[back]
        self.begun[:, b], self.ended[:, b], self.let_in[:, b] = (x[:, back] for x in (begin + unit, end, let_in))
        for x in np.flatnonzero(p == 0):
            self.starts[step[x], :, r[x]] = begin[:, x]
        for x in np.flatnonzero(p == 2 * n - 1):
            self.ends[step[x], :, r[x]] = end[:, x]
        if r.size and r[-1] == n - 1 and back[-1]:  # the last rank has finished this stage's sum
            self._publish(int(s[-1]), int(step[-1]) + 1, end[:, -1])

    def _version(self, step: np.ndarray, r: np.ndarray, s: np.ndarray) -> np.ndarray:
        """``Schedule.version``."""
        fresh = (self.schedule.threshold < 2 * self.schedule.ranks - 1) & (r + s >= self.schedule.threshold)
        return np.where(fresh, step, np.maximum(step - 1, 0))

    def _publish(self, stage: int, version: int, finished: np.ndarray) -> None:
        """The owners update a stage whose sums are finished; with an exact norm, all stages after the last sum."""
        done = np.broadcast_to(finished.max(), (self.rings,)) if self.rings > 1 else finished
        back = done + (0.0 if stage == 0 else self.hop_g[stage]) + self.between[stage]
        self.used[:, stage] = back
        if not self.schedule.exact_norm:
            self.used[:, stage] = self.published[version, :, stage] = back + self.update[stage]
        elif stage == 0:
            self.published[version] = done[:, None] + self.latency + self.between.max() + self.update[None, :]
