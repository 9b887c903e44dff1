"""Learning under ``predict`` with sequence parallelism, all ranks in one process: ``python -m benchmarks.sequence_predictions``.

Prints a row for each seed and variant: its test loss. ``ring`` predicts from the gradients of the ring's own members, as the
engine does, so members of a sequence group read different values. ``group`` predicts from those of all members. The others are
the engine's.
"""

import argparse
import itertools
import sysconfig
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from deepspeed_cdp.analysis.reference import _predicted, version
from deepspeed_cdp.plan.delay_correction import DelayCorrection

VARIANTS = ("dp", "none", "extrapolate", "ring", "group")
BYTES = 256
Params = dict[str, Tensor]


def parameters(layers: int, width: int, length: int, places: int) -> tuple[Params, dict[str, int]]:
    """Initial values of a byte-level GPT, and the stage of each."""
    shapes: dict[str, tuple[tuple[int, ...], int]] = {"bytes": ((BYTES, width), 0), "positions": ((length, width), 0)}
    for layer in range(layers):
        stage = layer * places // layers
        for name, shape in {"qkv": (3 * width, width), "out": (width, width), "up": (4 * width, width)}.items():
            shapes[f"{layer}.{name}"] = shape, stage
        shapes[f"{layer}.down"] = (width, 4 * width), stage
        shapes |= {f"{layer}.{name}": ((width,), stage) for name in ("norm1", "norm2")}
    shapes |= {"norm": ((width,), places - 1), "head": ((BYTES, width), places - 1)}
    values = {n: torch.ones(shape) if len(shape) == 1 else torch.randn(shape) * 0.02 for n, (shape, _) in shapes.items()}
    return values, {n: stage for n, (_, stage) in shapes.items()}


def logits(members: list[Params], x: Tensor, layers: int, heads: int) -> Tensor:
    """The model, where each member of the sequence group computes its part of the sequences with its own parameters.

    Args:
        x: byte values, [batch, length].
    """
    parts, batch = x.chunk(len(members), 1), len(x)
    places = torch.arange(x.shape[1]).chunk(len(members))
    states = [p["bytes"][part] + p["positions"][place] for p, part, place in zip(members, parts, places)]
    for layer in range(layers):
        normed = [F.rms_norm(h, h.shape[-1:], p[f"{layer}.norm1"]) for p, h in zip(members, states)]
        qkv = torch.cat([F.linear(h, p[f"{layer}.qkv"]) for p, h in zip(members, normed)], 1)
        q, k, v = (t.view(batch, x.shape[1], heads, -1).transpose(1, 2) for t in qkv.chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2).chunk(len(members), 1)
        for j, p in enumerate(members):
            states[j] = states[j] + F.linear(mixed[j], p[f"{layer}.out"])
            hidden = F.gelu(F.linear(F.rms_norm(states[j], states[j].shape[-1:], p[f"{layer}.norm2"]), p[f"{layer}.up"]))
            states[j] = states[j] + F.linear(hidden, p[f"{layer}.down"])
    return torch.cat([F.linear(F.rms_norm(h, h.shape[-1:], p["norm"]), p["head"]) for p, h in zip(members, states)], 1)


def train(
    variant: str,
    seed: int,
    steps: int = 400,
    warmup: int = 40,
    places: int = 4,
    sequence: int = 2,
    layers: int = 8,
    width: int = 64,
    length: int = 64,
    batch: int = 4,
    rate: float = 2e-3,
) -> float:
    """Train under cdp-v2 with a warm-up under dp (all of it for "dp"); returns the test loss."""
    torch.manual_seed(seed)
    initial, stage_of = parameters(layers, width, length, places)
    masters = {n: nn.Parameter(v) for n, v in initial.items()}
    optimizer = torch.optim.AdamW(masters.values(), lr=rate, weight_decay=0.1)
    text = b"".join(p.read_bytes() for p in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:60])
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    cut, end = int(0.95 * len(data)), len(data) - length - 1

    def loss(members: list[Params], generator: torch.Generator, low: int, high: int) -> Tensor:
        starts = torch.randint(low, high, (batch,), generator=generator)
        x, y = (torch.stack([data[at + ahead : at + ahead + length] for at in starts]) for ahead in (0, 1))
        return F.cross_entropy(logits(members, x, layers, 4).flatten(0, 1), y.flatten())

    def snapshot() -> Params:
        return {n: p.detach().clone() for n, p in masters.items()}

    fresh = before = snapshot()
    corrected = stale = [fresh] * sequence  # by member: of the fresh version, and of the one before
    correction, applied, generator = DelayCorrection("predict", weight=1.5), None, torch.Generator().manual_seed(1000 * seed + 1)
    for step in range(steps):
        threshold = 0 if variant == "dp" or step < warmup else places - 1
        sums = [{n: torch.zeros_like(v) for n, v in fresh.items()} for _ in range(sequence)]
        early: list[Params] = [{} for _ in range(sequence)]
        for place in range(places):
            read = {n: version(threshold, places, step, 0, place, stage_of[n], warmup) for n in fresh}
            members = [
                {n: (fresh if read[n] == step else stale[j])[n].clone().requires_grad_() for n in fresh} for j in range(sequence)
            ]
            value = loss(members, generator, 0, cut)
            gradients = iter(torch.autograd.grad(value, [p for member in members for p in member.values()]))
            for j, n in itertools.product(range(sequence), fresh):
                sums[j][n] = sums[j][n] + next(gradients)
                if stage_of[n] == place:
                    early[j][n] = sums[j][n]
        predicted = None
        if variant in ("ring", "group") and applied is not None:
            rings = [{n: sequence * e[n] / (stage_of[n] + 1) for n in fresh} for e in early]
            if variant == "group":
                rings = [{n: sum(r[n] for r in rings) / sequence for n in fresh}]
            guesses = [_predicted(correction, optimizer, masters, averages, applied) for averages in rings]
            predicted = guesses * (sequence // len(guesses))
        for group in optimizer.param_groups:
            group["lr"] = rate * min(1, (step + 1) / 20) * (1 - 0.9 * step / steps)
        for n, p in masters.items():
            p.grad = sum(s[n] for s in sums) / places  # type: ignore[assignment]
        optimizer.step()
        applied: Any = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
        before, stale = fresh, predicted or corrected
        fresh = snapshot()
        moved = {n: 2 * fresh[n] - before[n] for n in fresh} if variant == "extrapolate" else fresh
        corrected = [moved] * sequence
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        return sum(loss([fresh] * sequence, generator, cut, end).item() for _ in range(60)) / 60


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=400)
    args = parser.parse_args()
    print("variant,seed,steps,test_loss")
    for seed, variant in itertools.product(range(args.seeds), VARIANTS):
        print(f"{variant},{seed},{args.steps},{train(variant, seed, args.steps, args.steps // 10):.4f}", flush=True)


if __name__ == "__main__":
    main()
