"""What ZeRO-3, FSDP2 and DDP would need for the same model: bytes, messages, time. Pure closed forms and one overlap per unit.

They are lower bounds: collectives run at their full bandwidth from the first byte, beside the passes, and the host is always
ahead. Measured steps of ZeRO-3, whose host work per module is large, were up to twice as long (docs/performance.md).
"""

from collections.abc import Sequence
from dataclasses import dataclass

from deepspeed_cdp.analysis.timing.times import Hardware, Work

ADAM = 12  # bytes per trained parameter: fp32 master and two states


@dataclass(frozen=True)
class Rival:
    """One engine's figures, per rank.

    Attributes:
        states: bytes of parameters, gradients, masters and optimizer state that stay; working: of whole units and gradients in
            use.
        received: bytes per step; messages: collectives per step; seconds: per step.
    """

    name: str
    states: float
    working: float
    received: float
    messages: int
    seconds: float


def _passes(work: Sequence[Work], sizes: Sequence[int], hardware: Hardware, compute: float) -> list[tuple[float, float]]:
    """(forward, backward) seconds of each unit, scaled to a step's compute-only time."""
    raw = [
        (max(w.forward / hardware.flops, b / hardware.memory), max(2 * w.forward / hardware.flops, 2 * b / hardware.memory))
        for w, b in zip(work, sizes)
    ]
    scale = compute / sum(f + b for f, b in raw)
    return [(f * scale, b * scale) for f, b in raw]


def rivals(
    work: Sequence[Work],
    sizes: Sequence[int],
    sums: Sequence[int],
    ranks: int,
    hardware: Hardware,
    compute: float,
    rounds: int = 1,
    states: int = ADAM,
) -> list[Rival]:
    """ZeRO-3, FSDP2 and DDP.

    Args:
        work, sizes, sums: per unit: what it does, bytes of its parameters, of its gradients.
        compute: seconds of all passes of a step.
        states: bytes of masters and optimizer state per trained parameter.
    """
    trained, psi, grads = sum(w.parameters for w in work), sum(sizes), sum(sums)
    share = (ranks - 1) / ranks
    passes = _passes(work, sizes, hardware, compute / rounds)

    def collective(nbytes: float) -> float:
        return hardware.collective_latency + nbytes * share / hardware.collective if ranks > 1 else 0.0

    # sharded: each pass hides the next unit's gather, each backward also its own reduce-scatter; the first gather is not hidden
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
    sharded = dict(
        states=psi / ranks + grads / ranks + states * trained / ranks,
        working=2 * largest + max(sums, default=0),
        received=rounds * share * (2 * psi + grads),
        messages=rounds * 3 * len(work),
        seconds=seconds,
    )
    forward, backward = (sum(p[k] for p in passes) for k in (0, 1))
    summed = 2 * grads * share / hardware.collective + 2 * hardware.collective_latency if ranks > 1 else 0.0
    ddp = rounds * (forward + backward) + max(0.0, summed - backward * (1 - 1 / max(len(work), 1)))
    ddp += trained * hardware.update_bytes / hardware.memory
    return [
        Rival("ZeRO-3", **sharded),
        Rival("FSDP2", **sharded),
        Rival("DDP", psi + grads + states * trained, 0, 2 * grads * share, max(1, round(grads / (25 * 2**20))), ddp),
    ]
