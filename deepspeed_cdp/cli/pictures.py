"""Draws the passes of schedules and recorded runs on a time axis, a row per rank. Only ``draw`` imports matplotlib."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from deepspeed_cdp.cli.output import UserError

COLOURS = ("#4c72b0", "#dd8452", "#55a868", "#c44e52", "#8172b3", "#937860", "#da8bc3", "#8c8c8c")


class Bar(NamedTuple):
    """A pass: its row, its start and end on the axis; ``stale``: it reads the previous version."""

    rank: int
    begin: float
    end: float
    stage: int
    backward: bool
    stale: bool
    text: str


class Arrow(NamedTuple):
    """A hand-off from one row to another."""

    src: int
    sent: float
    dst: int
    received: float


def draw(
    bars: Sequence[Bar],
    ranks: int,
    paths: Sequence[str],
    title: str,
    axis: str,
    arrows: Sequence[Arrow] = (),
    waits: Sequence[tuple[int, float, float]] = (),
    labels: bool = True,
) -> None:
    """Write the picture to each of ``paths`` (.png or .svg).

    Raises:
        UserError: matplotlib is missing.
    """
    try:
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt
        from matplotlib.patches import Patch
        from matplotlib.ticker import MaxNLocator
    except ImportError:
        raise UserError("pictures need matplotlib; install it, or write text or .json") from None
    with plt.rc_context({"font.size": 9, "svg.hashsalt": "deepspeed-cdp", "axes.spines.top": False, "axes.spines.right": False}):
        low, high = min(b.begin for b in bars), max(b.end for b in bars)
        width = min(max(7.0, 0.26 * len(bars) / ranks), 18.0)
        figure, axes = plt.subplots(figsize=(width, 1.3 + 0.42 * ranks), constrained_layout=True)
        for rank, begin, end in waits:
            axes.broken_barh([(begin, end - begin)], (rank - 0.08, 0.16), facecolors="#cccccc", zorder=1)
        stages = sorted({b.stage for b in bars})
        for b in bars:
            axes.broken_barh(
                [(b.begin, b.end - b.begin)],
                (b.rank - 0.36, 0.72),
                facecolors=COLOURS[b.stage % len(COLOURS)],
                alpha=0.95 if b.backward else 0.55,
                edgecolor="white",
                linewidth=0.8 if labels else 0.2,
                hatch="////" if b.stale and labels else None,
                zorder=2,
            )
            if labels and b.text:
                axes.text(
                    (b.begin + b.end) / 2,
                    b.rank,
                    b.text,
                    ha="center",
                    va="center",
                    fontsize=7,
                    zorder=3,
                    color="white" if b.backward else "#222222",
                    bbox={
                        "boxstyle": "round,pad=0.1",
                        "fc": COLOURS[b.stage % len(COLOURS)] if b.backward else "white",
                        "ec": "none",
                        "alpha": 0.75,
                    }
                    if b.stale
                    else None,
                )
        for a in arrows:
            axes.annotate(
                "",
                (a.received, a.dst - 0.36 if a.dst > a.src else a.dst + 0.36),
                (a.sent, a.src + 0.36 if a.dst > a.src else a.src - 0.36),
                zorder=4,
                arrowprops={"arrowstyle": "-|>", "lw": 0.4, "color": "#666666", "mutation_scale": 5, "shrinkA": 0, "shrinkB": 0},
            )
        axes.set(ylim=(ranks - 0.5, -0.5), xlim=(low, high), xlabel=axis, title=title)
        axes.set_yticks(range(ranks), [f"rank {r}" for r in range(ranks)])
        axes.tick_params(axis="y", length=0)
        if axis == "logical time":
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        handles = [Patch(color=COLOURS[s % len(COLOURS)], label=f"stage {s}") for s in stages[: len(COLOURS)]]
        handles += [Patch(color="#777777", alpha=0.55, label="forward"), Patch(color="#777777", label="backward")]
        if labels and any(b.stale for b in bars):
            handles.append(Patch(facecolor="#bbbbbb", hatch="////", edgecolor="white", label="one update behind"))
        if waits:
            handles.append(Patch(color="#cccccc", label="waits"))
        figure.legend(
            handles=handles, ncols=min(len(handles), int(width * 0.86)), frameon=False, fontsize=8, loc="outside lower center"
        )
        for path in paths:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            figure.savefig(path, dpi=150, metadata={"Date": None} if path.endswith(".svg") else None)
        plt.close(figure)
