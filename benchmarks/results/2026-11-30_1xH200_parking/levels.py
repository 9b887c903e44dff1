"""Levels of saved activations over real time, on ranks of a ring, with and without parking; computed, no GPU.

A forward of a layer takes 1, its backward 2. Rank r starts ``offset * r`` of a period after rank 0. Bytes are GiB per GPU.
``python levels.py`` writes levels.csv beside this file, in about a minute.
"""

import csv
from itertools import product
from pathlib import Path
from typing import NamedTuple

POINTS = 600  # times of a period that are looked at


class Model(NamedTuple):
    """A Llama. Saved bytes: of fake tensors. Peaks on two GPUs: measured (2026-11-30_2xH200_checks, _states).

    Peaks on four GPUs: the plan's memory, plus by how much the peak is above the plan on two. FSDP2's: 2026-11-28_4xH200_targets.
    """

    name: str
    layers: int
    layer: float  # GiB that a layer saves
    head: float  # GiB of the head and the loss, temporary memory included: peak - static memory - layers
    whole: tuple[float, float]  # peak on two and four GPUs
    fsdp2: tuple[float, float]  # FSDP2's
    passes: float  # ms of forward and backward alone
    head_share: float  # the head's share of them


MODELS = (
    Model("1.35B, micro-batch 4", 24, 0.711, 32.33 - 12.10 - 17.08, (32.33, 27.65), (28.06, 24.3), 187, 0.06),
    Model("3B, micro-batch 2", 26, 0.532, 43.27 - 27.81 - 13.84, (43.27, 31.71), (33.52, 24.8), 184, 0.05),
    Model("8B, micro-batch 1", 32, 0.407, 84.53 - 70.62 - 13.01, (84.53, 51.90), (61.72, 37.7), 235, 0.03),
)


class Clock(NamedTuple):
    """When a rank's passes begin and end, in fractions of a period."""

    model: Model

    def forward(self, i: int) -> tuple[float, float]:
        unit = (1 - self.model.head_share) / self.model.layers / 3
        return i * unit, (i + 1) * unit

    def backward(self, i: int) -> tuple[float, float]:
        unit = (1 - self.model.head_share) / self.model.layers / 3
        begin = self.model.layers * unit + self.model.head_share + 2 * unit * (self.model.layers - 1 - i)
        return begin, begin + 2 * unit

    def head(self) -> tuple[float, float]:
        return self.forward(self.model.layers)[0], self.backward(self.model.layers - 1)[0]


def inside(t: float, begin: float, end: float) -> bool:
    """Whether a time of the circle lies in an interval of it."""
    return (t - begin) % 1.0 < end - begin


def level(model: Model, t: float, copies: bool, parked: int = 0, lag: float = 0.0, gbps: float = 380.0) -> float:
    """GiB on a rank at time t of its own clock.

    Args:
        copies: the time that a layer takes to leave and to come back counts, at both ends; else layers move at once.
        parked: the first layers, whose bytes lie at a partner; the partner that parks here starts ``lag`` after this rank.
        gbps: speed of a copy, for its duration.
    """
    clock, total = Clock(model), 0.0
    copy = model.layer * 2**30 / gbps / 1e6 / model.passes if copies else 0.0
    unit = clock.forward(0)[1]
    if inside(t, *clock.head()):
        total += model.head
    for i in range(model.layers):
        (f0, f1), (b0, b1) = clock.forward(i), clock.backward(i)
        if i >= parked:
            total += model.layer * inside(t, f0, b1)
            continue
        gone = f1 + (max(copy, unit) if copies else 0)  # its output is read by the next layer; copies queue behind each other
        back = b0 - 1.5 * copy  # half a copy of slack
        total += model.layer * (inside(t, f0, gone) + inside(t, back, b1))
        total += model.layer * inside(t - lag, f1, back + copy)
    return total


def peak(model: Model, copies: bool, parked: int, lag: float) -> float:
    return max(level(model, k / POINTS, copies, parked, lag) for k in range(POINTS))


def fluid(model: Model, offset: float, group: tuple[int, ...]) -> float:
    """The least peak if the ranks of ``group`` share all saved bytes evenly at every time, heads too."""
    times = [k / POINTS for k in range(POINTS)]
    return max(sum(level(model, t - offset * r, False) for r in group) for t in times) / len(group)


def main() -> None:
    rows = []
    for model, (ranks, offset) in product(
        MODELS,
        (
            (2, 0.28),
            (2, 0.36),
            (2, 0.42),
            (2, 0.49),
            (3, 0.32),
            (4, 0.12),
            (4, 0.18),
            (4, 0.21),
            (4, 0.245),
            (8, 0.06),
            (8, 0.12),
        ),
    ):
        alone = peak(model, False, 0, 0.0)
        half = ranks // 2
        lags = {half * offset, 1 - half * offset} if ranks % 2 == 0 else {1 - half * offset}
        found = []
        for parked in range(model.layers + 1):
            static = max(peak(model, True, parked, lag) for lag in lags)
            instant = max(peak(model, False, parked, lag) for lag in lags)
            found.append((static, instant, parked))
        best = min(found)
        headless = model._replace(head=0.0)
        slots = min(max(peak(headless, True, n, lag) for lag in lags) for n in range(model.layers + 1)) / model.layer
        moved = best[2] * model.layer
        pair = fluid(model, offset, (0, half))
        rows.append(
            {
                "model": model.name,
                "ranks": ranks,
                "offset of neighbours, periods": offset,
                "saved and head, GiB": round(alone, 2),
                "pair, any bytes at any time": round(pair, 2),
                "all ranks, any bytes at any time": round(fluid(model, offset, tuple(range(ranks))), 2),
                "first layers parked, copies at once": round(min(i for _, i, _ in found), 2),
                "first layers parked, copies take time": round(best[0], 2),
                "layers parked": best[2],
                "slots of a layer, heads elsewhere": round(slots),
                "of alone": round(best[0] / alone, 3),
                "whole, GiB": round(model.whole[ranks == 4] - alone + best[0], 2) if ranks in (2, 4) else "",
                "least whole, GiB": round(model.whole[ranks == 4] - alone + pair, 2) if ranks in (2, 4) else "",
                "0.85 x FSDP2, GiB": round(0.85 * model.fsdp2[ranks == 4], 2) if ranks in (2, 4) else "",
                "out and back, GiB per rank and step": round(2 * moved, 2),
                "device memory traffic, GB per GPU and step": round(4 * moved * 1.0737, 1),
                "of a step at 3 TB/s, per cent": round(4 * moved * 1.0737 / 3000 * 1000 / model.passes * 100, 1),
                "link busy while layers leave": round(
                    model.layer * 1.0737 / 380 * 1000 / (Clock(model).forward(0)[1] * model.passes), 2
                ),
            }
        )
    with (Path(__file__).parent / "levels.csv").open("w", newline="") as f:
        writer = csv.DictWriter(f, rows[0], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    for row in rows:
        print(*row.values(), sep="  ")


if __name__ == "__main__":
    main()
