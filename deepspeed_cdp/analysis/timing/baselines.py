"""Lower bounds of memory, traffic and time for ZeRO-3, FSDP2 and DDP on the same model.

They assume that collectives run at full bandwidth from the first byte, that they overlap with the passes, and that the host is
always ahead. Measured steps of ZeRO-3, with its large host work per module, were up to twice as long (docs/performance.md).
"""

from collections.abc import Sequence
from dataclasses import dataclass

from deepspeed_cdp.analysis.timing.times import Hardware, Work

MASTER = 4  # bytes per trained parameter: fp32
ADAM = MASTER + 8  # with two states


@dataclass(frozen=True)
class Baseline:
    """One engine's figures, per rank.

    Attributes:
        states: bytes of the parameters, masters and optimizer state that it keeps.
        gradients: bytes of those that it keeps until the update.
        frees_gradients: the update frees them, so they grow while the backward frees activations.
        working: bytes of the whole units and gradients in use.
        received: bytes per step.
        messages: collectives per step.
        seconds: per step.
    """

    name: str
    states: float
    gradients: float
    frees_gradients: bool
    working: float
    received: float
    messages: int
    seconds: float

    def memory(self, activations: float) -> float:
        """Peak bytes, with so many of activations."""
        together = max(self.gradients, activations) if self.frees_gradients else self.gradients + activations
        return self.states + self.working + together


def _passes(work: Sequence[Work], sizes: Sequence[int], hardware: Hardware, compute: float) -> list[tuple[float, float]]:
    """(forward, backward) seconds of each unit, scaled to a step's compute-only time."""
    raw = [
        (max(w.forward / hardware.flops, b / hardware.memory), max(2 * w.forward / hardware.flops, 2 * b / hardware.memory))
        for w, b in zip(work, sizes)
    ]
    scale = compute / sum(f + b for f, b in raw)
    return [(f * scale, b * scale) for f, b in raw]


def baselines(
    work: Sequence[Work],
    sizes: Sequence[int],
    sums: Sequence[int],
    ranks: int,
    hardware: Hardware,
    compute: float,
    rounds: int = 1,
    states: int = ADAM,
) -> list[Baseline]:
    """ZeRO-3, FSDP2 and DDP.

    Args:
        work: of each unit.
        sizes, sums: bytes of each unit's parameters and gradients.
        compute: seconds of all passes of a step.
        states: bytes of masters and optimizer state per trained parameter.
    """
    trained, psi, grads = sum(w.parameters for w in work), sum(sizes), sum(sums)
    share = (ranks - 1) / ranks
    passes = _passes(work, sizes, hardware, compute / rounds)

    def collective(nbytes: float) -> float:
        return hardware.collective_latency + nbytes * share / hardware.collective if ranks > 1 else 0.0

    # sharded: a pass overlaps with the next unit's gather, a backward also with its own reduce-scatter; nothing hides the first
    gathers = [collective(b) for b in sizes]
    scatters = [collective(g) for g in sums]
    order = list(range(len(work)))
    visits = [(i, 0) for i in order] + [(i, 1) for i in reversed(order)]
    seconds = gathers[0]
    for at, (i, backward) in enumerate(visits):
        coming = gathers[visits[at + 1][0]] if at + 1 < len(visits) else 0.0
        seconds += max(passes[i][backward], coming + (scatters[i] if backward else 0.0))
    seconds = seconds * rounds + trained / ranks * hardware.update_bytes / hardware.memory
    largest = max(sizes, default=0)
    working = 2 * largest + max(sums, default=0)
    sharded = working, rounds * share * (2 * psi + grads), rounds * 3 * len(work), seconds
    forwards, backwards = (sum(p[k] for p in passes) for k in (0, 1))
    summed = 2 * grads * share / hardware.collective + 2 * hardware.collective_latency if ranks > 1 else 0.0
    ddp = rounds * (forwards + backwards) + max(0.0, summed - backwards * (1 - 1 / max(len(work), 1)))
    ddp += trained * hardware.update_bytes / hardware.memory
    return [
        Baseline("ZeRO-3", (psi + states * trained) / ranks, grads / ranks, False, *sharded),
        # its parameters are the masters, and its gradients fp32, too; with several rounds they are there in all but the first
        Baseline("FSDP2", states * trained / ranks, MASTER * trained / ranks, rounds == 1, *sharded),
        Baseline("DDP", psi + states * trained, grads, False, 0, 2 * grads * share, max(1, round(grads / (25 * 2**20))), ddp),
    ]
