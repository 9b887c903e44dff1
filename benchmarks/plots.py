"""Plots of recorded rows: ``python -m benchmarks.plots DIR...`` writes them beside each DIR/results.csv, as PNG and SVG."""

import statistics
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

import matplotlib

from benchmarks import rows

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402
from matplotlib.axes import Axes  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402

# Okabe and Ito's palette, told apart by people with any kind of colour vision; ours are the strong ones.
COLOURS = {
    "compute": "#999999",
    "ddp": "#F0E442",
    "zero1": "#C8B400",
    "zero2": "#8F8000",
    "fsdp2": "#56B4E9",
    "zero3": "#CC79A7",
    "zero3-leaf": "#E69F00",
    "cdp-v2": "#0072B2",
    "cdp-v1": "#009E73",
    "cdp-v2-replicas": "#00406B",
    "cdp-v1-replicas": "#00583F",
}
OTHER = "#D55E00"  # cdp-K, cdp-...-keep
MARKERS = {
    "compute": "x",
    "ddp": "v",
    "zero1": "1",
    "zero2": "2",
    "fsdp2": "s",
    "zero3": "P",
    "zero3-leaf": "D",
    "cdp-v2": "o",
    "cdp-v1": "^",
    "cdp-v2-replicas": "h",
    "cdp-v1-replicas": "<",
}
STYLE = {
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "svg.hashsalt": "deepspeed_cdp",
    "svg.fonttype": "none",
    "figure.dpi": 100,
    "savefig.dpi": 150,
}

Group = dict[str, list[dict[str, str]]]


def draw(folder: Path, into: Path | None = None, prefix: str = "", kinds: Sequence[str] = ("png", "svg")) -> list[Path]:
    """Draw what the rows of ``folder`` show: time.*, memory.* and, if delays of several sizes were tried, delay.*.

    Args:
        into: where to write; default: ``folder``.
        prefix: of the files' names.
    Returns:
        The files written.
    """
    settings = rows.settings(rows.read(folder / "results.csv"))
    with matplotlib.rc_context(STYLE):
        figures = {"time": _time(settings), "memory": _memory(settings), "delay": _delay(settings)}
        written = []
        for name, figure in figures.items():
            if figure is None:
                continue
            for kind in kinds:
                path = (into or folder) / f"{prefix}{name}.{kind}"
                path.parent.mkdir(parents=True, exist_ok=True)
                figure.savefig(path, metadata={"Date": None} if kind == "svg" else {"Software": None})
                written.append(path)
            plt.close(figure)
    return written


def _order(settings: dict[tuple[str, ...], Group]) -> list[str]:
    """Engines that ran anywhere, in the palette's order."""
    ran = {name for engines in settings.values() for name in engines}
    return [n for n in COLOURS if n in ran] + sorted(ran - set(COLOURS))


def _colour(engine: str) -> str:
    return COLOURS.get(engine, OTHER)


def _short(setting: tuple[str, ...]) -> str:
    """A setting as the title of a panel, in short lines."""
    s = dict(zip(rows.SETTING, setting))
    words = s["device"].split()
    gpu = words[0] if words[0] == "CPU" else next((w for w in words if any(c.isdigit() for c in w)), s["device"])
    extras = ["compiled"] * (s["compiled"] == "True") + ["no host sync"] * (s["host_sync"] == "False")
    if s["bandwidth_gb_s"]:
        extras.append(f"{float(s['bandwidth_gb_s']):g} GB/s")
    if float(s["jitter_ms"]):
        extras.append(f"late by up to {float(s['jitter_ms']):g} ms")
    lines = [s["model"], f"micro-batch {s['micro_batch']}, {s['ranks']} x {gpu}", *textwrap.wrap(", ".join(extras), 36)]
    return "\n".join(lines)


def _panels(count: int, slots: int, title: str, note: str) -> tuple[Figure, list[Axes]]:
    """One panel per setting, three or four in a row, each wide enough for so many bars."""
    across = min(count, 4 if count > 9 else 3)
    down = -(-count // across)
    wide = max(4.2 if count == 1 else 2.9, 0.48 * slots + 1.2)
    figure, axes = plt.subplots(down, across, figsize=(wide * across, 3.5 * down + 0.6), squeeze=False, layout="constrained")
    figure.get_layout_engine().set(w_pad=0.12, h_pad=0.12)
    figure.suptitle(title + ("\n" if count < 3 else ": ") + note, fontsize=10.5)
    flat = [a for line in axes for a in line]
    for spare in flat[count:]:
        spare.remove()
    return figure, flat[:count]


def _bars(
    axes: Axes,
    slots: int,
    names: Sequence[str],
    values: Sequence[float],
    below: Sequence[float],
    above: Sequence[float],
    form: str,
) -> None:
    """Bars of one width in all panels, however many a panel has."""
    at = range(len(names))
    spread = [below, above] if any(below) or any(above) else None
    axes.bar(
        at,
        values,
        width=0.78,
        color=[_colour(n) for n in names],
        edgecolor="#333333",
        linewidth=0.6,
        yerr=spread,
        error_kw={"elinewidth": 1.1, "capsize": 3, "ecolor": "#222222"},
    )
    top = max(v + a for v, a in zip(values, above))
    for i, (value, over) in enumerate(zip(values, above)):
        axes.text(i, value + over + 0.02 * top, format(value, form), ha="center", va="bottom", fontsize=8.5)
    axes.set_ylim(0, 1.13 * top)
    axes.set_xlim((len(names) - 1 - slots) / 2 - 0.1, (len(names) - 1 + slots) / 2 + 0.1)
    axes.set_xticks(list(at), names, rotation=35, ha="right", rotation_mode="anchor", fontsize=9)
    axes.tick_params(axis="x", length=0)
    axes.grid(axis="y", color="#dddddd", linewidth=0.7)
    axes.set_axisbelow(True)


def _time(settings: dict[tuple[str, ...], Group]) -> Figure:
    """Step time by engine, relative to the passes alone where they were measured; windows' range as error bars."""
    order = _order(settings)
    slots = max(len(e) for e in settings.values())
    figure, panels = _panels(
        len(settings), slots, "Step time relative to compute only", "median, fastest and slowest window; lower is better"
    )
    for axes, (setting, engines) in zip(panels, settings.items()):
        names = [n for n in order if n in engines]
        times = {n: [float(r["step_ms"]) for r in engines[n]] for n in names}
        unit = statistics.median(times["compute"]) if "compute" in times else 1.0
        middle = [statistics.median(times[n]) / unit for n in names]
        _bars(
            axes,
            slots,
            names,
            middle,
            [m - min(times[n]) / unit for m, n in zip(middle, names)],
            [max(times[n]) / unit - m for m, n in zip(middle, names)],
            ".2f" if "compute" in times else ".0f",
        )
        if "compute" in times:
            axes.axhline(1, color="#333333", linewidth=0.9, linestyle="--")
            axes.set_ylabel(f"x compute ({unit:.0f} ms)", fontsize=9)
        else:
            axes.set_ylabel("ms (compute was not run)", fontsize=9)
        axes.set_title(_short(setting), fontsize=9)
    return figure


def _memory(settings: dict[tuple[str, ...], Group]) -> Figure | None:
    """Peak memory per GPU, buffers for hand-offs included."""
    known = {s: {n: g for n, g in engines.items() if _known(g, "peak_gib")} for s, engines in settings.items()}
    known = {s: e for s, e in known.items() if e and not float(dict(zip(rows.SETTING, s))["jitter_ms"])}  # delays change nothing
    if not known:
        return None
    order = _order(known)
    slots = max(len(e) for e in known.values())
    figure, panels = _panels(len(known), slots, "Peak memory of the fullest GPU", "with the buffers for hand-offs")
    for axes, (setting, engines) in zip(panels, known.items()):
        names = [n for n in order if n in engines]
        values = [max(_known(engines[n], "peak_gib")) for n in names]
        _bars(axes, slots, names, values, [0.0] * len(names), [0.0] * len(names), ".1f")
        axes.set_ylabel("GiB", fontsize=9)
        axes.set_title(_short(setting), fontsize=9)
    return figure


def _known(group: list[dict[str, str]], field: str) -> list[float]:
    return [float(r[field]) for r in group if r[field] not in ("", "0", "0.0")]


def _delay(settings: dict[tuple[str, ...], Group]) -> Figure | None:
    """Step time against the largest delay, a line per engine, for settings tried with several delays."""
    at = rows.SETTING.index("jitter_ms")
    families: dict[tuple[str, ...], dict[float, Group]] = {}
    for setting, engines in settings.items():
        families.setdefault((*setting[:at], "0", *setting[at + 1 :]), {})[float(setting[at])] = engines
    families = {k: v for k, v in families.items() if len(v) > 1}
    if not families:
        return None
    figure, panels = _panels(len(families), 7, "Step time with stragglers", "each rank late by U(0, delay) in every step")
    for axes, (setting, by_delay) in zip(panels, families.items()):
        for name in _order({(str(d),): e for d, e in by_delay.items()}):
            points = [(d, [float(r["step_ms"]) for r in e[name]]) for d, e in sorted(by_delay.items()) if name in e]
            if len(points) < 2:
                continue
            middle = [statistics.median(t) for _, t in points]
            spread = [[m - min(t) for m, (_, t) in zip(middle, points)], [max(t) - m for m, (_, t) in zip(middle, points)]]
            axes.errorbar(
                [d for d, _ in points],
                middle,
                yerr=spread,
                color=_colour(name),
                marker=MARKERS.get(name, "*"),
                markersize=6,
                linewidth=1.8,
                capsize=3,
                label=name,
            )
        axes.set_ylim(bottom=0)
        axes.set_xlabel("delay, ms", fontsize=9)
        axes.set_ylabel("ms per step", fontsize=9)
        axes.grid(color="#dddddd", linewidth=0.7)
        axes.set_title(_short(setting), fontsize=9)
    legend = {label: handle for axes in panels for handle, label in zip(*axes.get_legend_handles_labels())}
    figure.legend(
        legend.values(),
        legend.keys(),
        loc="outside lower center",
        frameon=False,
        fontsize=9,
        ncols=min(len(legend), 3 if len(panels) == 1 else 8),
    )
    return figure


def main(argv: list[str] | None = None) -> int:
    folders = [Path(a) for a in (sys.argv[1:] if argv is None else argv)]
    if not folders or any(str(f).startswith("-") for f in folders):
        print(__doc__, file=sys.stderr)
        return 2
    for folder in folders:
        if not (folder / "results.csv").exists():
            print(f"{folder} has no results.csv; name a folder that benchmarks.run wrote", file=sys.stderr)
            return 2
        for path in draw(folder):
            print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
