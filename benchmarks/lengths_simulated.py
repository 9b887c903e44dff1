"""What samples of unlike lengths cost a ring and engines with collectives: ``python -m benchmarks.lengths_simulated``.

Ranks draw the lengths that the benchmark's ranks draw (benchmarks/lengths.py). A micro-batch takes its operations over the speed
of the recorded passes alone, and no less than the host needs. Four engines, over the same steps from a common start:

- ``cdp``: the event simulation of the rule's plan. Running sums visit each rank once per micro-batch.
- "once a step": a ring that does not exist. Ranks add up a step's micro-batches by themselves, so sums visit each once a step.
- "a collective per layer" (FSDP2, ZeRO-3): each micro-batch takes as long as the slowest rank's.
- "a collective per step" (DDP, fsdp2-keep): each step takes as long as the slowest rank's.

Each engine's time is divided by its own time when all micro-batches are alike, of the mean duration: what unlike lengths cost it.
A ratio of two engines with unlike lengths is their ratio with alike ones times the ratio of these costs.
"""

import argparse
from collections.abc import Sequence
from typing import NamedTuple

from benchmarks import lengths, models, predict
from deepspeed_cdp.analysis.timing.events import Loads, simulate
from deepspeed_cdp.analysis.timing.times import Hardware, times

SPEED = {"llama-1.3b": (0.1838, 4 * 2048)}  # seconds of the passes of so many tokens in rows of 2048 (2026-11-29_2xH200_second)


def seconds(name: str, samples: Sequence[int], packed: bool, host: float) -> float:
    """Of a micro-batch's passes: operations at the recorded speed, at least ``host`` seconds.

    A packed row's attention is computed as a whole and masked, so it costs what one sample of that length costs.
    """
    config, (took, tokens) = models.configuration(name), SPEED[name]
    flops = models.flops_per_token(config, 2048) * tokens / took
    return max(host, sum(models.flops_per_token(config, n) * n for n in lengths.computed(list(samples), packed)) / flops)


class Costs(NamedTuple):
    """``mean``: seconds of a rank's passes per step; the others: time with unlike lengths over that with alike ones."""

    mean: float
    ring: float
    ring_by_step: float
    by_layer: float
    by_step: float


def costs(name: str, rule: str, ranks: int, rounds: int, drawer: lengths.Lengths, steps: int, host: float) -> Costs:
    """What unlike lengths cost each engine; ``host``: the least seconds of a micro-batch."""
    everyone, all_steps, micro_batches = range(ranks), range(steps), range(rounds)
    took = {
        (r, t, m): seconds(name, drawer.draw(r, t, m), drawer.packed, host)
        for r in everyone
        for t in all_steps
        for m in micro_batches
    }
    whole = {(r, t): sum(took[r, t, m] for m in micro_batches) for r in everyone for t in all_steps}
    mean = sum(whole.values()) / len(whole)
    ring = _ring(name, rule, ranks, rounds, steps, mean, lambda r, t, m: took[r, t, m] * rounds / mean)
    once = _ring(name, rule, ranks, 1, steps, mean, lambda r, t, m: whole[r, t] / mean) if rounds > 1 else ring
    by_layer = sum(max(took[r, t, m] for r in everyone) for t in all_steps for m in micro_batches)
    by_step = sum(max(whole[r, t] for r in everyone) for t in all_steps)
    return Costs(mean, ring, once, by_layer / (mean * steps), by_step / (mean * steps))


def _ring(name: str, rule: str, ranks: int, rounds: int, steps: int, mean: float, loads: Loads) -> float:
    """What these loads cost a ring whose passes take ``mean`` seconds per step."""
    plan, work, _ = predict.planned(name, ranks, rounds=rounds, rule=rule)
    given = times(plan, work, Hardware(), compute=mean)
    unlike, alike = (max(simulate(plan, given, steps, loads=of).ends[-1]) for of in (loads, lambda r, t, m: 1.0))
    return unlike / alike


def table(
    name: str, rule: str, drawer: lengths.Lengths, steps: int, host: float, all_ranks: Sequence[int], all_rounds: Sequence[int]
) -> str:
    """Markdown, one line per packing, number of ranks and of micro-batches."""
    lines = [
        f"| samples | ranks | micro-batches a step | mean passes, ms | `{rule}` | once a step | a collective per layer "
        f"| per step | per layer over `{rule}` | per step over `{rule}` |",
        "|" + "---|" * 10,
    ]
    for packed in (False, True):
        for ranks in all_ranks:
            for rounds in all_rounds:
                c = costs(name, rule, ranks, rounds, drawer._replace(packed=packed), steps, host)
                shown = (c.ring, c.ring_by_step, c.by_layer, c.by_step, c.by_layer / c.ring, c.by_step / c.ring)
                figures = " | ".join(f"{x:.2f}" for x in shown)
                lines.append(f"| {'packed' if packed else 'unpacked'} | {ranks} | {rounds} | {1e3 * c.mean:.0f} | {figures} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.lengths_simulated", description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="llama-1.3b", choices=tuple(SPEED))
    parser.add_argument("--rule", default="cdp-v2")
    parser.add_argument("--lengths", default="4096:1", metavar="MEDIAN:SIGMA")
    parser.add_argument("--sequence", type=int, default=16384, help="the longest sample, or the budget of a pack")
    parser.add_argument("--steps", type=int, default=96)
    parser.add_argument("--host-ms", type=float, default=60, help="the least that a micro-batch takes")
    parser.add_argument("--ranks", default="2,4,8")
    parser.add_argument("--accumulation", default="1,4")
    args = parser.parse_args()
    everyone, rounds = ([int(x) for x in text.split(",")] for text in (args.ranks, args.accumulation))
    drawer = lengths.parse(args.lengths, args.sequence, packed=False)
    print(table(args.model, args.rule, drawer, args.steps, args.host_ms / 1e3, everyone, rounds))


if __name__ == "__main__":
    main()
