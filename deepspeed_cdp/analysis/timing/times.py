"""Durations of the parts of a step, from bytes, operations and a few speeds of the machine.

The model, per rank and step:

- A forward takes its operations divided by ``flops``, a backward twice as long. If the compute-only time of a step was measured
  (without messages and optimizer), both are scaled to it.
- A backward also adds its gradients to the running sum. It reads sum and gradient and writes the sum: three times the sum's
  bytes, divided by ``memory``. A fused product, which adds to the sum itself, moves these bytes once.
- Messages and the owner's update overlap with the passes, on copy engines and a stream of their own. But they use the same device
  memory, so each of their bytes slows the passes, evenly (``contention`` 1; with 0 the passes are not slowed).
- A message takes ``latency`` plus its bytes divided by ``bandwidth``. Messages share the link out of a rank.

The model has no host: if the host cannot enqueue fast enough, steps take longer than predicted.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from deepspeed_cdp.plan.plan import Plan


@dataclass(frozen=True)
class Hardware:
    """Speeds of one rank's device and links; defaults are those of an H100 in an NVLink host (docs/performance.md).

    Attributes:
        flops: operations per second of passes: 40 percent of 989e12, dense bf16.
        memory: bytes per second of device memory in kernels.
        bandwidth, latency: of a message between two ranks, in bytes per second (measured, copy engines) and seconds.
        collective, collective_latency: the same of ZeRO-3's and DDP's collectives (measured, stock all-gather).
        update_bytes: device memory traffic of the optimizer per parameter; Adam in one pass reads and writes 28, with
            masters in halves 26.
        prediction_bytes: the same of a prediction of its next step (``predict``), which writes nothing but the copy.
        contention: the fraction of overlapping traffic that slows the passes, 0 to 1.
    """

    flops: float = 0.4 * 989e12
    memory: float = 3.0e12
    bandwidth: float = 384e9
    latency: float = 8e-6
    collective: float = 295e9
    collective_latency: float = 48e-6
    update_bytes: float = 28.0
    prediction_bytes: float = 16.0
    contention: float = 1.0


class Work(NamedTuple):
    """The work of a unit.

    Attributes:
        forward: operations of its forward.
        parameters: number of trained parameters, which the owner updates.
        fused: bytes of its gradient sums that matrix products add to (``cyclic.gradient_accumulation_fusion``).
    """

    forward: float
    parameters: int
    fused: int = 0


@dataclass(frozen=True)
class Times:
    """Seconds of a plan's parts.

    Attributes:
        passes: (unit, backward) -> seconds of this pass, with gradient adds and its share of the contention.
        updates, predictions: unit (or PERSISTENT) -> seconds of the owner's update, and of its prediction for stale readers.
        hardware: for messages.
        compute: seconds of a step's passes alone, all rounds.
        adds, contention: seconds of gradient adds and of contention on top.
    """

    passes: Mapping[tuple[int, bool], float]
    updates: Mapping[int, float]
    hardware: Hardware
    compute: float
    adds: float
    contention: float
    predictions: Mapping[int, float] = field(default_factory=dict)

    def message(self, nbytes: int) -> float:
        """Seconds that a message occupies its link."""
        return nbytes / self.hardware.bandwidth

    def stage(self, plan: Plan, stage: int, backward: bool) -> float:
        """Seconds of a stage's pass."""
        return sum(self.passes[i, backward] for i in plan.members(stage) if i >= 0)


def traffic(plan: Plan) -> float:
    """Bytes that messages read and write in device memory, per rank and steady step on average; each byte once."""
    ranks = plan.schedule.ranks
    return 2 * sum(sum(plan.received_bytes(r).values()) for r in range(ranks)) / ranks


def times(plan: Plan, work: Sequence[Work], hardware: Hardware, persistent: int = 0, compute: float | None = None) -> Times:
    """The seconds of a plan's parts.

    Args:
        work: per unit of the plan.
        persistent: number of trained persistent parameters.
        compute: measured seconds of all passes of one step; None: computed from operations.
    """
    assert len(work) == len(plan.units)
    rounds, ranks = plan.schedule.rounds, plan.schedule.ranks
    # a unit without matrix products takes time too: it reads and writes about three times its bytes
    least = [3 * u.p_bytes / hardware.memory for u in plan.units]
    ideal = {
        (i, backward): max((2 if backward else 1) * w.forward / hardware.flops, least[i])
        for i, w in enumerate(work)
        for backward in (False, True)
    }
    scale = 1.0 if compute is None else compute / rounds / sum(ideal.values())
    passes = {visit: seconds * scale for visit, seconds in ideal.items()}
    alone = sum(passes.values()) * rounds
    adds = {i: (3 * u.g_bytes - 2 * w.fused) / hardware.memory for i, (u, w) in enumerate(zip(plan.units, work))}
    updates = {i: w.parameters * hardware.update_bytes / hardware.memory for i, w in enumerate(work)}
    if plan.persistent:
        updates[-1] = persistent * hardware.update_bytes / hardware.memory
    share = hardware.prediction_bytes / hardware.update_bytes
    made = {i: t * share for i, t in updates.items() if plan.is_predicted(plan.unit(i).stage)}
    beside = hardware.contention * (traffic(plan) / hardware.memory + (sum(updates.values()) + sum(made.values())) / ranks)
    stretch = 1 + beside / (alone + rounds * sum(adds.values())) if alone else 1.0
    full = {(i, backward): (seconds + (adds[i] if backward else 0)) * stretch for (i, backward), seconds in passes.items()}
    return Times(full, updates, hardware, alone, rounds * sum(adds.values()), beside, made)


def changed(hardware: Hardware, **given: float | None) -> Hardware:
    """The hardware with the given values that are not None."""
    return replace(hardware, **{k: v for k, v in given.items() if v is not None})
