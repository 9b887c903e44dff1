"""Tables, tests and plots from the rows of the learning experiments (benchmarks/learning.py).

Cases of one seed differ in their rule only. So each rule is compared with ``dp`` by the differences between cases of one seed.
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

COLOURS = {"dp": "#444444", "cdp-v1": "#009E73", "cdp-v2": "#0072B2", "cdp-v2-warmup": "#D55E00"}  # Okabe and Ito's
LINES = {"dp": "-", "cdp-v1": "--", "cdp-v2": "-", "cdp-v2-warmup": ":"}
NAMES = {
    "digits": "digits, ResNet-14",
    "gpt": "byte-level GPT on Python's sources",
    "gpt-beta1-0.5": "the same GPT, AdamW's β₁ 0.5",
    "gpt-beta1-0": "the same GPT, AdamW's β₁ 0",
}
MEASURES = {"test_loss": "test loss", "test_accuracy": "test accuracy"}
LEVEL = 0.05

Row = dict[str, str]


def read(path: Path) -> list[Row]:
    """The rows of a file, without a last line that a crash has truncated."""
    text = Path(path).read_text()
    return list(csv.DictReader(text[: text.rfind("\n") + 1].splitlines()))


def key(row: Row) -> tuple[str, str, str, str]:
    return row["dataset"], row["rate"], row["rule"], row["seed"]


def finished(some: Sequence[Row]) -> list[Row]:
    """The rows of finished cases."""
    whole = {key(r) for r in some if r["step"] == r["steps"]}
    return [r for r in some if key(r) in whole]


def settings(some: Sequence[Row]) -> dict[tuple[str, str], dict[str, list[Row]]]:
    """Rows by (dataset, rate) and rule; ``dp`` comes first, the others as in ``COLOURS``."""
    groups: dict[tuple[str, str], dict[str, list[Row]]] = {}
    for row in sorted(some, key=lambda r: (r["dataset"], float(r["rate"]), list(COLOURS).index(r["rule"]))):
        groups.setdefault((row["dataset"], row["rate"]), {}).setdefault(row["rule"], []).append(row)
    return groups


# ---- statistics -------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Comparison:
    """Paired differences, rule minus dp, over their common seeds.

    Attributes:
        mean, interval: of the differences, with Student's 95% confidence interval; bootstrap: the bootstrap's (percentiles).
        p: of the paired t-test; holm: corrected for the comparisons of one table (Holm).
        visible: the difference that the test detects with a probability of 80%.
    """

    rule: str
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
    """Every rule against dp; empty if dp is missing or fewer than two seeds are common."""
    base = last(engines.get("dp", []), measure)
    found = []
    for rule, some in engines.items():
        other = last(some, measure)
        seeds = sorted(base.keys() & other.keys(), key=int)
        if rule == "dp" or len(seeds) < 2:
            continue
        differences = np.array([other[s] - base[s] for s in seeds])
        found.append(_compare(rule, differences))
    order = sorted(range(len(found)), key=lambda i: found[i].p)
    held, worst = list(found), 0.0
    for place, i in enumerate(order):
        worst = max(worst, min(1.0, (len(found) - place) * found[i].p))
        held[i] = Comparison(**{**vars(found[i]), "holm": worst})
    return held


def _compare(rule: str, differences: np.ndarray) -> Comparison:
    count, mean = len(differences), float(differences.mean())
    error = float(differences.std(ddof=1)) / math.sqrt(count)
    if error == 0:  # all alike
        return Comparison(rule, count, mean, (mean, mean), (mean, mean), 1.0 if mean == 0 else 0.0, 0.0)
    t = stats.t(count - 1)
    interval = (mean - t.ppf(0.975) * error, mean + t.ppf(0.975) * error)
    drawn = np.random.default_rng(0).choice(differences, (10_000, count)).mean(1)
    bootstrap = (float(np.quantile(drawn, 0.025)), float(np.quantile(drawn, 0.975)))
    p = float(stats.ttest_1samp(differences, 0.0).pvalue)
    return Comparison(rule, count, mean, interval, bootstrap, p, float((t.ppf(0.975) + t.ppf(0.8)) * error))


def statement(c: Comparison, measure: str, base: float) -> str:
    """One sentence: whether the rule differs from dp."""
    what = MEASURES[measure]
    share = f" ({100 * c.mean / base:+.2f}% of dp's)" if measure == "test_loss" and base else ""
    ci = f"95% interval {c.interval[0]:+.4f} to {c.interval[1]:+.4f}, {c.pairs} pairs, p = {c.holm:.2g} after Holm's correction"
    if c.holm < LEVEL:
        return f"`{c.rule}` differs from `dp`: {what} {c.mean:+.4f}{share}; {ci}."
    return (
        f"No difference of `{c.rule}` from `dp` is shown: {what} {c.mean:+.4f}{share}; {ci}. A difference of {c.visible:.4f} "
        "would have been found four times out of five."
    )


# ---- tables -----------------------------------------------------------------------------------------------------------------
def _spread(values: Sequence[float], form: str) -> str:
    deviation = format(statistics.stdev(values), form) if len(values) > 1 else "?"
    return f"{statistics.mean(values):{form}} ± {deviation}"


def tables(some: Sequence[Row], level: str = "###") -> str:
    """One table per dataset and learning rate: final values, mean ± standard deviation over seeds, and differences from dp."""
    parts = []
    for (dataset, rate), engines in settings(some).items():
        first = next(iter(engines.values()))[0]
        title = NAMES[dataset] + (f", learning rate x {rate}" if rate != "1" else "")
        lines = [
            f"{level} {title}",
            "",
            f"{first['ranks']} ranks and stages, micro-batch {first['micro_batch']}, {first['steps']} steps, "
            f"{int(first['parameters']):,} parameters.",
            "",
            "| rule | seeds | test loss | test accuracy | training loss | minus dp's test loss, 95% interval (bootstrap) "
            "| p (Holm) |",
            "|---|---|---|---|---|---|---|",
        ]
        compared = {measure: {c.rule: c for c in compare(engines, measure)} for measure in MEASURES}
        for rule, group in engines.items():
            loss, accuracy = (list(last(group, m).values()) for m in MEASURES)
            training = [float(r["train_loss"]) for r in group if r["step"] == r["steps"]]
            c = compared["test_loss"].get(rule)
            versus = (
                (
                    f"{c.mean:+.4f}, {c.interval[0]:+.4f} to {c.interval[1]:+.4f} ({c.bootstrap[0]:+.4f} to "
                    f"{c.bootstrap[1]:+.4f}) | {c.p:.2g} ({c.holm:.2g})"
                )
                if c
                else " | "
            )
            lines.append(
                f"| {rule} | {len(loss)} | {_spread(loss, '.4f')} | {_spread(accuracy, '.4f') if accuracy else ''} | "
                f"{_spread(training, '.4f')} | {versus} |"
            )
        lines.append("")
        for measure, by_rule in compared.items():
            base = statistics.mean(last(engines["dp"], measure).values()) if by_rule else 0.0
            lines += [f"- {statement(c, measure, base)}" for c in by_rule.values()]
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
    shown = "\n\n".join(f"![{NAMES[p.stem.removeprefix(out.name + '_')]}](images/{p.name})" for p in images)
    before, after = text.split(start)[0], text.split(end)[1]
    document.write_text(f"{before}{start}\nRows: `benchmarks/results/{out.name}`.\n\n{tables(some)}\n{shown}\n\n{end}{after}")


# ---- plots ------------------------------------------------------------------------------------------------------------------
def _curves(group: Sequence[Row], measure: str) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Steps, and the values of each seed."""
    by_seed: dict[str, dict[int, float]] = {}
    for row in group:
        if row[measure]:
            by_seed.setdefault(row["seed"], {})[int(row["step"])] = float(row[measure])
    steps = sorted(set.intersection(*(set(c) for c in by_seed.values()))) if by_seed else []
    return np.array(steps), {seed: np.array([c[s] for s in steps]) for seed, c in by_seed.items()}


def draw(some: Sequence[Row], out: Path, prefix: str = "", kinds: Sequence[str] = ("png", "svg")) -> list[Path]:
    """A figure per dataset: left the test loss, its mean and range over seeds; right its difference from dp's, mean and 95%
    confidence interval; a row of panels per learning rate. The files written."""
    written = []
    every = settings(some)
    for dataset in dict.fromkeys(d for d, _ in every):
        mine = {rate: engines for (d, rate), engines in every.items() if d == dataset}
        with matplotlib.rc_context(STYLE):
            figure, axes = plt.subplots(len(mine), 2, figsize=(9.6, 3.4 * len(mine) + 0.8), squeeze=False, layout="constrained")
            figure.suptitle(NAMES[dataset] + ": mean over seeds", fontsize=11)
            for (rate, engines), (left, right) in zip(mine.items(), axes):
                _panel(left, right, engines, "" if rate == "1" else f"learning rate x {rate}")
            handles = {label: h for a in axes[:, 0] for h, label in zip(*a.get_legend_handles_labels())}
            figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=4, frameon=False)
            for kind in kinds:
                path = out / f"{prefix}{dataset}.{kind}"
                figure.savefig(path, metadata={"Date": None} if kind == "svg" else {"Software": None})
                written.append(path)
            plt.close(figure)
    return written


def _panel(left: plt.Axes, right: plt.Axes, engines: dict[str, list[Row]], title: str) -> None:
    curves = {rule: _curves(group, "test_loss") for rule, group in engines.items()}
    ends = [0.0]  # of the intervals at the last step
    for rule, (steps, by_seed) in curves.items():
        values = np.stack(list(by_seed.values()))
        _band(left, rule, steps, values.mean(0), values.min(0), values.max(0))
        base_steps, base = curves.get("dp", (np.array([]), {}))
        seeds = [s for s in by_seed if s in base]
        if rule != "dp" and len(seeds) > 1:
            both = np.intersect1d(steps, base_steps)
            here, there = np.isin(steps, both), np.isin(base_steps, both)
            differences = np.stack([by_seed[s][here] - base[s][there] for s in seeds])
            error = differences.std(0, ddof=1) / math.sqrt(len(seeds)) * stats.t(len(seeds) - 1).ppf(0.975)
            _band(right, rule, both, differences.mean(0), differences.mean(0) - error, differences.mean(0) + error)
            ends += [abs(differences.mean(0)[-1]) + error[-1]]
    right.axhline(0, color=COLOURS["dp"], linewidth=1)
    low, high = left.dataLim.y0, left.dataLim.y1
    if low > 0 and high / low > 10:
        left.set_yscale("log")
        left.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
        left.yaxis.set_major_formatter("{x:g}")
        left.yaxis.set_minor_formatter(ticker.NullFormatter())
    straight = 10 ** math.ceil(math.log10(max(ends))) if max(ends) > 0 else 0.0
    if 3 * straight < (furthest := max(abs(right.dataLim.y0), abs(right.dataLim.y1))):
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


def _band(axes: plt.Axes, rule: str, steps: np.ndarray, middle: np.ndarray, low: np.ndarray, high: np.ndarray) -> None:
    axes.plot(steps, middle, label=rule, linewidth=1.6, color=COLOURS[rule], linestyle=LINES[rule])
    axes.fill_between(steps, low, high, color=COLOURS[rule], alpha=0.15, linewidth=0)
