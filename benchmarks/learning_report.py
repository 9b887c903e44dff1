"""Tables, tests and plots from the rows of the learning experiments (benchmarks/learning.py).

A variant is a rule with a delay correction. It is compared with ``dp`` of the same dataset, optimizer, ranks and learning rate:
by the differences between cases of one seed.
"""

import csv
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib
import numpy as np
from scipy import stats

from benchmarks.plots import STYLE

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402
from matplotlib import ticker  # noqa: E402

COLOURS = {
    "dp": "#444444",
    "cdp-v1": "#009E73",
    "cdp-v2": "#0072B2",
    "cdp-v2-warmup": "#D55E00",
    "cdp-v1-warmup": "#CC79A7",
}  # Okabe and Ito's
LINES = {"none": "-", "extrapolate": "--", "predict": "-.", "auto": (0, (5, 1, 1, 1, 1, 1))}
NAMES = {
    "digits": "digits, ResNet-14",
    "gpt": "byte-level GPT on Python's sources",
    "gpt-beta1-0.5": "the same GPT, AdamW's β₁ 0.5",
    "gpt-beta1-0": "the same GPT, AdamW's β₁ 0",
    "gpt-31m": "byte-level GPT of 32 million parameters on Python's sources",
    "gpt-31m-tuned": "the same, fine-tuned on C++ headers",
    "gpt-128m": "byte-level GPT of 128 million parameters on Python's sources",
}
OPTIMIZERS = {"adamw": "AdamW", "nadamw": "NAdamW", "muon": "Muon", "sgd": "SGD"}
MEASURES = {"test_loss": "test loss", "test_accuracy": "test accuracy"}
LEVEL = 0.05

Row = dict[str, str]


def own_optimizer(dataset: str) -> str:
    """The optimizer of a dataset where none is chosen."""
    return "sgd" if dataset == "digits" else "adamw"


def read(path: Path) -> list[Row]:
    """The rows of a file, without a last line that a crash has truncated.

    Rows recorded before delay corrections lack two columns: they get the dataset's own optimizer and the correction "none".
    """
    text = Path(path).read_text()
    rows = csv.DictReader(text[: text.rfind("\n") + 1].splitlines())
    return [{"optimizer": own_optimizer(row["dataset"]), "correction": "none", **row} for row in rows]


def key(row: Row) -> tuple[str, ...]:
    """Names a case."""
    return (*setting(row), row["rule"], row["correction"], row["seed"])


def setting(row: Row) -> tuple[str, str, str, str]:
    """Dataset, optimizer, ranks and learning rate: what compared cases have in common."""
    return row["dataset"], row["optimizer"], row["ranks"], row["rate"]


def variant(row: Row) -> str:
    """A rule, with its delay correction if there is one."""
    return row["rule"] + ("" if row["correction"] == "none" else f" {row['correction']}")


def finished(some: Sequence[Row]) -> list[Row]:
    """The rows of finished cases."""
    whole = {key(r) for r in some if r["step"] == r["steps"]}
    return [r for r in some if key(r) in whole]


def settings(some: Sequence[Row]) -> dict[tuple[str, str, str, str], dict[str, list[Row]]]:
    """Rows by setting and variant; ``dp`` comes first, the others as in ``COLOURS`` and ``LINES``."""
    groups: dict[tuple[str, str, str, str], dict[str, list[Row]]] = {}

    def order(row: Row) -> tuple[object, ...]:
        dataset, optimizer, ranks, rate = setting(row)
        rule, method = list(COLOURS).index(row["rule"]), list(LINES).index(row["correction"].partition(":")[0])
        return dataset, list(OPTIMIZERS).index(optimizer), int(ranks), float(rate), rule, method, row["correction"]

    for row in sorted(some, key=order):
        groups.setdefault(setting(row), {}).setdefault(variant(row), []).append(row)
    return groups


def title(setting: tuple[str, str, str, str]) -> str:
    """What a table or a figure is about; usual values are left out."""
    dataset, optimizer, ranks, rate = setting
    parts = [
        NAMES[dataset],
        OPTIMIZERS[optimizer] if optimizer != own_optimizer(dataset) else "",
        f"{ranks} ranks" if ranks != "4" else "",
        f"learning rate x {rate}" if rate != "1" else "",
    ]
    return ", ".join(part for part in parts if part)


# ---- statistics -------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Comparison:
    """Paired differences, variant minus dp, over their common seeds.

    Attributes:
        mean, interval: of the differences, with Student's 95% confidence interval; bootstrap: the bootstrap's (percentiles).
        p: of the paired t-test; holm: corrected for the comparisons of one table (Holm).
        visible: the difference that the test detects with a probability of 80%.
    """

    variant: str
    pairs: int
    mean: float
    interval: tuple[float, float]
    bootstrap: tuple[float, float]
    p: float
    visible: float
    holm: float = math.nan


def last(some: Sequence[Row], measure: str) -> dict[str, float]:
    """The final value by seed."""
    return {r["seed"]: float(r[measure]) for r in some if r["step"] == r["steps"] and r[measure]}


def compare(engines: dict[str, list[Row]], measure: str) -> list[Comparison]:
    """Every variant against dp; empty if dp is missing or fewer than two seeds are common."""
    base = last(engines.get("dp", []), measure)
    found = []
    for name, some in engines.items():
        other = last(some, measure)
        seeds = sorted(base.keys() & other.keys(), key=int)
        if name == "dp" or len(seeds) < 2:
            continue
        differences = np.array([other[s] - base[s] for s in seeds])
        found.append(_compare(name, differences))
    order = sorted(range(len(found)), key=lambda i: found[i].p)
    held, worst = list(found), 0.0
    for place, i in enumerate(order):
        worst = max(worst, min(1.0, (len(found) - place) * found[i].p))
        held[i] = Comparison(**{**vars(found[i]), "holm": worst})
    return held


def _compare(variant: str, differences: np.ndarray) -> Comparison:
    count, mean = len(differences), float(differences.mean())
    error = float(differences.std(ddof=1)) / math.sqrt(count)
    if error == 0:  # all alike
        return Comparison(variant, count, mean, (mean, mean), (mean, mean), 1.0 if mean == 0 else 0.0, 0.0)
    t = stats.t(count - 1)
    interval = (mean - t.ppf(0.975) * error, mean + t.ppf(0.975) * error)
    drawn = np.random.default_rng(0).choice(differences, (10_000, count)).mean(1)
    bootstrap = (float(np.quantile(drawn, 0.025)), float(np.quantile(drawn, 0.975)))
    p = float(stats.ttest_1samp(differences, 0.0).pvalue)
    return Comparison(variant, count, mean, interval, bootstrap, p, float((t.ppf(0.975) + t.ppf(0.8)) * error))


def statement(c: Comparison, measure: str, base: float) -> str:
    """One sentence: whether the variant differs from dp."""
    what = MEASURES[measure]
    share = f" ({100 * c.mean / base:+.2f}% of dp's)" if measure == "test_loss" and base else ""
    ci = f"95% interval {c.interval[0]:+.4f} to {c.interval[1]:+.4f}, {c.pairs} pairs, p = {c.holm:.2g} after Holm's correction"
    if c.holm < LEVEL:
        return f"`{c.variant}` differs from `dp`: {what} {c.mean:+.4f}{share}; {ci}."
    return (
        f"No difference of `{c.variant}` from `dp` is shown: {what} {c.mean:+.4f}{share}; {ci}. A difference of {c.visible:.4f} "
        "would have been found four times out of five."
    )


# ---- tables -----------------------------------------------------------------------------------------------------------------
def _spread(values: Sequence[float], form: str) -> str:
    deviation = format(statistics.stdev(values), form) if len(values) > 1 else "?"
    return f"{statistics.mean(values):{form}} ± {deviation}"


def tables(some: Sequence[Row], level: str = "###") -> str:
    """One table per setting: final values, mean ± standard deviation over seeds, and differences from dp."""
    parts = []
    for which, engines in settings(some).items():
        first = next(iter(engines.values()))[0]
        lines = [
            f"{level} {title(which)}",
            "",
            f"{first['ranks']} ranks and stages, micro-batch {first['micro_batch']}, {first['steps']} steps, "
            f"{int(first['parameters']):,} parameters.",
            "",
            "| rule | seeds | test loss | test accuracy | training loss | minus dp's test loss, 95% interval (bootstrap) "
            "| p (Holm) |",
            "|---|---|---|---|---|---|---|",
        ]
        compared = {measure: {c.variant: c for c in compare(engines, measure)} for measure in MEASURES}
        base = last(engines.get("dp", []), "test_loss")
        for name, group in engines.items():
            loss, accuracy = (list(last(group, m).values()) for m in MEASURES)
            training = [float(r["train_loss"]) for r in group if r["step"] == r["steps"]]
            c = compared["test_loss"].get(name)
            pairs = [value - base[seed] for seed, value in last(group, "test_loss").items() if seed in base and name != "dp"]
            versus = f"{pairs[0]:+.4f} | " if len(pairs) == 1 else " | "
            if c:
                versus = (
                    f"{c.mean:+.4f}, {c.interval[0]:+.4f} to {c.interval[1]:+.4f} ({c.bootstrap[0]:+.4f} to "
                    f"{c.bootstrap[1]:+.4f}) | {c.p:.2g} ({c.holm:.2g})"
                )
            lines.append(
                f"| {name} | {len(loss)} | {_spread(loss, '.4f')} | {_spread(accuracy, '.4f') if accuracy else ''} | "
                f"{_spread(training, '.4f')} | {versus} |"
            )
        lines.append("")
        for measure, by_variant in compared.items():
            mean = statistics.mean(last(engines["dp"], measure).values()) if by_variant else 0.0
            lines += [f"- {statement(c, measure, mean)}" for c in by_variant.values()]
        graphs = {r["graph"] for group in engines.values() for r in group if r["step"] == r["steps"]}
        lines += [
            "",
            f"{first['device']}, torch {first['torch']}, Python {first['python']}, commit {first['commit']}, data "
            f"{first['data']}, CUDA graph: {', '.join(sorted(graphs))}.",
        ]
        parts.append("\n".join(lines))
    return "\n\n".join(parts) + "\n"


def into_document(out: Path, document: Path) -> None:
    """Put a recorded run's tables and plots between the two lines ``<!-- generated: learning -->`` and ``<!-- end ... -->``.

    Raises:
        ValueError: the document has no such lines, or the run no finished case.
    """
    some = finished(read(out / "rows.csv"))
    text = document.read_text()
    start, end = "<!-- generated: learning -->\n", "<!-- end of generated: learning -->"
    if not some or start not in text or end not in text:
        raise ValueError(f"{document} has no lines {start.strip()} and {end}, or {out} no finished case; give a recorded run")
    images = draw(some, document.parent / "images", f"{out.name}_", ("png",))
    shown = "\n\n".join(f"![{about}](images/{path.name})" for path, about in images.items())
    before, after = text.split(start)[0], text.split(end)[1]
    document.write_text(f"{before}{start}\nRows: `benchmarks/results/{out.name}`.\n\n{tables(some)}\n{shown}\n\n{end}{after}")


# ---- plots ------------------------------------------------------------------------------------------------------------------
def curves(group: Sequence[Row], measure: str) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Steps, and the values of each seed."""
    by_seed: dict[str, dict[int, float]] = {}
    for row in group:
        if row[measure]:
            by_seed.setdefault(row["seed"], {})[int(row["step"])] = float(row[measure])
    steps = sorted(set.intersection(*(set(c) for c in by_seed.values()))) if by_seed else []
    return np.array(steps), {seed: np.array([c[s] for s in steps]) for seed, c in by_seed.items()}


def draw(some: Sequence[Row], out: Path, prefix: str = "", kinds: Sequence[str] = ("png", "svg")) -> dict[Path, str]:
    """A figure per dataset and optimizer: left the test loss, its mean and range over seeds; right its difference from dp's, mean
    and 95% confidence interval; a row of panels per ranks and learning rate. The files written, and their titles."""
    written, every = {}, settings(some)
    for dataset, optimizer in dict.fromkeys(which[:2] for which in every):
        mine = {which: engines for which, engines in every.items() if which[:2] == (dataset, optimizer)}
        about = title((dataset, optimizer, "4", "1"))
        with matplotlib.rc_context(STYLE):
            figure, axes = plt.subplots(len(mine), 2, figsize=(9.6, 3.4 * len(mine) + 0.8), squeeze=False, layout="constrained")
            figure.suptitle(about + ": mean over seeds", fontsize=11)
            for (which, engines), (left, right) in zip(mine.items(), axes):
                _panel(left, right, engines, title(which).removeprefix(about).removeprefix(", "))
            handles = {label: h for a in axes[:, 0] for h, label in zip(*a.get_legend_handles_labels())}
            figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=4, frameon=False)
            for kind in kinds:
                path = out / f"{prefix}{dataset}{'' if optimizer == own_optimizer(dataset) else '-' + optimizer}.{kind}"
                figure.savefig(path, metadata={"Date": None} if kind == "svg" else {"Software": None})
                written[path] = about
            plt.close(figure)
    return written


def _panel(left: plt.Axes, right: plt.Axes, engines: dict[str, list[Row]], title: str) -> None:
    by_name = {name: curves(group, "test_loss") for name, group in engines.items()}
    ends = [0.0]  # of the intervals at the last step
    for name, (steps, by_seed) in by_name.items():
        values = np.stack(list(by_seed.values()))
        _band(left, name, steps, values.mean(0), values.min(0), values.max(0))
        base_steps, base = by_name.get("dp", (np.array([]), {}))
        seeds = [s for s in by_seed if s in base]
        if name != "dp" and seeds:
            both = np.intersect1d(steps, base_steps)
            here, there = np.isin(steps, both), np.isin(base_steps, both)
            differences = np.stack([by_seed[s][here] - base[s][there] for s in seeds])
            error = np.zeros(len(both))  # one seed: no interval
            if len(seeds) > 1:
                error = differences.std(0, ddof=1) / math.sqrt(len(seeds)) * stats.t(len(seeds) - 1).ppf(0.975)
            _band(right, name, both, differences.mean(0), differences.mean(0) - error, differences.mean(0) + error)
            ends += [abs(differences.mean(0)[-1]) + error[-1]]
    right.axhline(0, color=COLOURS["dp"], linewidth=1)
    low, high = left.dataLim.y0, left.dataLim.y1
    if low > 0 and high / low > 10:
        left.set_yscale("log")
        left.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
        left.yaxis.set_major_formatter("{x:g}")
        left.yaxis.set_minor_formatter(ticker.NullFormatter())
    straight = 10 ** math.ceil(math.log10(max(ends))) if max(ends) > 0 else 0.0
    if 0 < 3 * straight < (furthest := max(abs(right.dataLim.y0), abs(right.dataLim.y1))):
        # straight round the end's differences, logarithmic beyond: early ones are many times larger
        right.set_yscale("symlog", linthresh=straight, linscale=2)
        beyond = [straight * 10**i for i in range(1, math.ceil(math.log10(furthest / straight)) + 1)]
        ticks = [straight / 2, straight, *beyond]
        right.yaxis.set_major_locator(ticker.FixedLocator([0.0, *ticks, *(-t for t in ticks)]))
        right.yaxis.set_minor_locator(ticker.NullLocator())
        right.yaxis.set_major_formatter("{x:g}")
    left.set_ylabel("test loss, lowest to highest", fontsize=9)
    right.set_ylabel("test loss minus dp's, 95% interval", fontsize=9)
    for axes in (left, right):
        axes.set_xlabel("step", fontsize=9)
        axes.set_title(title, fontsize=9)
        axes.grid(color="#dddddd", linewidth=0.7)


def _band(axes: plt.Axes, name: str, steps: np.ndarray, middle: np.ndarray, low: np.ndarray, high: np.ndarray) -> None:
    rule, _, correction = name.partition(" ")
    line = (0, (1, 1)) if ":" in correction else LINES[correction or "none"]
    axes.plot(steps, middle, label=name, linewidth=1.6, color=COLOURS[rule], linestyle=line)
    axes.fill_between(steps, low, high, color=COLOURS[rule], alpha=0.15, linewidth=0)
