"""Writes the measured tables of the documents from recorded rows: ``python docs/make_numbers.py`` (from anywhere).

A line ``<!-- rows: KIND; RUN, part, part; RUN ... -->`` begins a table, ``<!-- end of rows -->`` ends it. KIND is a function in
`KINDS`. RUN is a folder of benchmarks/results. The parts select the settings whose heading (`benchmarks.rows.describe`) has all
of them, for example ``llama-1.3b, micro-batch 4``. A part ``only ENGINE ENGINE`` selects engines.
tests/unit/test_docs_numbers.py checks that the committed tables are the ones that this script makes.
"""

import csv
import os
import re
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import rows  # noqa: E402
from benchmarks.report import fastest, overall, typical  # noqa: E402

PAGES = (ROOT / "README.md", *(ROOT / "docs" / f"{name}.md" for name in ("performance", "performance-other", "learning")))
BLOCK = re.compile(r"<!-- rows: ([^>]*?) -->\n.*?<!-- end of rows -->", re.DOTALL)

ENGINES = {
    "cdp-v2": "`cdp-v2`",
    "fsdp2": "FSDP2",
    "zero3-leaf": "ZeRO-3, leaf modules",
    "zero3": "ZeRO-3",
    "ddp": "DDP",
    "compute": "passes alone",
}
MODELS = {"llama-1.3b": "Llama 1.35B", "llama-3b": "Llama 3B", "llama-8b": "Llama 8B", "vit-200": "ViT of 200 layers"}
RULES = {"dp": "`dp`", "cdp-v2-warmup": "`cdp-v2` after 100 steps of `dp`", "cdp-v2": "`cdp-v2`", "cdp-v1": "`cdp-v1`"}
BASE_RATE = 1e-3  # of the GPT in benchmarks/learning_tasks.py; rows record a multiple of it
GPTS = {"gpt": "3.4 million", "gpt-31m": "32 million", "gpt-31m-tuned": "32 million, fine-tuned", "gpt-128m": "128 million"}
RECOMMENDED = ("predict:1.5", "predict:2", "extrapolate", "none")  # the first that was measured
GOAL = 1.0  # per cent above ``dp``


class Setting(NamedTuple):
    """One setting of one recorded run, with its rows by engine."""

    run: str
    parts: tuple[str, ...]
    engines: dict[str, list[dict[str, str]]]
    shown: tuple[str, ...] = ()  # the engines that a marker asks for; none: all

    @property
    def first(self) -> dict[str, str]:
        return next(iter(self.engines.values()))[0]

    @property
    def plain(self) -> bool:
        """No rank is delayed and no link is slowed down."""
        return not float(self.first["jitter_ms"]) and not self.first["bandwidth_gb_s"] and not self.first["lengths"]

    @property
    def place(self) -> str:
        return f"{self.first['ranks']} x {self.first['device'].removeprefix('NVIDIA ').removesuffix(' 80GB HBM3')}"

    @property
    def label(self) -> str:
        """The setting without its model and its hardware."""
        hardware = f"{self.first['ranks']} x {self.first['device']}"
        return ", ".join(p for p in self.parts if p not in (self.first["model"], hardware))

    def best(self, engine: str) -> str | None:
        """The engine whose figures stand for ``engine``; None if none ran.

        Of FSDP2 it is the fastest variant, and ``cdp-v2`` without its correction where only that ran.
        """
        if engine == "fsdp2":
            return fastest(engine, {n: typical(some) for n, some in self.engines.items()})
        return next((n for n in (engine, f"{engine}-uncorrected") if n in self.engines), None)

    def variant(self, engine: str) -> str:
        """What to write beside a figure of an engine: the variant, if it is not the plain one."""
        name = self.best(engine)
        return f" (`{name}`)" if name not in (None, engine) else ""

    def times(self, engine: str) -> list[float]:
        return [float(r["step_ms"]) for r in self.engines.get(self.best(engine) or "", [])]

    def ms(self, engine: str) -> float | None:
        """Of a step; None if the engine did not run."""
        name = self.best(engine)
        return typical(self.engines[name]) if name else None

    def tokens(self, engine: str) -> float | None:
        """Tokens per second and GPU over all windows of unlike lengths; None if the engine did not run."""
        name = self.best(engine)
        return overall(self.engines[name]) if name else None

    def gib(self, engine: str) -> float | None:
        """Peak memory; of FSDP2 that of the variant with the least, which need not be the fastest."""
        names = [n for n in self.engines if n.startswith(engine)] if engine == "fsdp2" else [self.best(engine)]
        known = [[float(r["peak_gib"]) for r in self.engines.get(n, []) if r["peak_gib"]] for n in names]
        return min((statistics.median(some) for some in known if some), default=None)


def settings(sources: Sequence[str]) -> list[Setting]:
    """The settings that the sources of a marker select.

    Raises:
        ValueError: a run or a part does not exist.
    """
    found: list[Setting] = []
    for source in sources:
        run, *parts = (part.strip() for part in source.split(","))
        path = rows.RESULTS / run / "results.csv"
        if not path.exists():
            raise ValueError(f"rows: {source}, but benchmarks/results/{run}/results.csv does not exist; name a recorded run")
        every = [Setting(run, tuple(rows.describe(s).split(", ")), e) for s, e in rows.settings(rows.read(path)).items()]
        only = {name for part in parts if part.startswith("only ") for name in part.split()[1:]}
        asked = {part for part in parts if not part.startswith("only ")}
        some = [s for s in every if asked <= set(s.parts)]
        if not some or not all(only <= set(s.engines) for s in some if s.plain):
            raise ValueError(
                f"rows: {source}, but no setting's heading has these parts, or an engine did not run; leave some out"
            )
        found += [s._replace(shown=tuple(only)) for s in some]
    return found


def table(head: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    """A Markdown table without the columns that have no entry."""
    kept = [i for i in range(len(head)) if any(line[i] for line in body)]
    lines = [[h[i] for i in kept] for h in (head, *body)]
    return "\n".join(f"| {' | '.join(line)} |" for line in (lines[0], ["---"] * len(kept), *lines[1:]))


def _show(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def _ratio(over: float | None, under: float | None, form: str) -> str:
    return "" if over is None or under is None else format(over / under, form)


def _recorded(run: str, page: Path) -> str:
    return f"[{run[:10]}]({os.path.relpath(rows.RESULTS / run / 'table.md', page.parent)})"


def speed(sources: Sequence[str], page: Path) -> str:
    """Steps of ``cdp-v2`` beside the passes alone and the other engines, one line per setting."""
    head = ["GPUs", "setting", "passes alone, ms", "`cdp-v2`, ms (windows)", "of passes alone"]
    rivals = ("fsdp2", "zero3-leaf", "zero3", "ddp")
    body = []
    for s in settings(sources):
        times = s.times("cdp-v2")
        body.append(
            [
                s.place,
                s.label,
                _show(s.ms("compute"), ".1f"),
                f"**{s.ms('cdp-v2'):.1f}** ({min(times):.0f} to {max(times):.0f})" + s.variant("cdp-v2"),
                _ratio(s.ms("compute"), s.ms("cdp-v2"), ".1%").replace("%", " %"),
                *(_ratio(s.ms(rival), s.ms("cdp-v2"), ".2f") + s.variant(rival) for rival in rivals),
                _recorded(s.run, page),
            ]
        )
    return table([*head, *(f"x {ENGINES[rival]}" for rival in rivals), "rows"], body)


def memory(sources: Sequence[str], page: Path) -> str:
    """Peak memory per GPU, one line per setting; delays and slow links do not change it."""
    names = ("cdp-v2", "fsdp2", "zero3-leaf", "zero3", "ddp")
    body = [
        [
            f"{MODELS[s.first['model']]}, {s.label}",
            s.place,
            _show(s.gib("cdp-v2"), ".1f") + s.variant("cdp-v2"),
            *(_show(s.gib(name), ".1f") for name in names[1:]),
            _recorded(s.run, page),
        ]
        for s in settings(sources)
        if s.plain and s.gib("cdp-v2")
    ]
    return table(["setting", "GPUs", *(f"{ENGINES[name]}, GiB" for name in names), "rows"], body)


def engines(sources: Sequence[str], page: Path) -> str:
    """The engines of the settings without delays, fastest first."""
    body = [
        [
            f"`{name}`",
            s.place,
            f"{s.ms(name):.1f}",
            _ratio(s.ms("compute"), s.ms(name), ".1%").replace("%", " %"),
            _show(s.gib(name), ".1f"),
            _recorded(s.run, page),
        ]
        for s in settings(sources)
        if s.plain
        for name in sorted(s.shown or s.engines, key=s.ms)
    ]
    return table(["engine", "GPUs", "ms per step", "of passes alone", "GiB", "rows"], body)


def unlike(sources: Sequence[str], page: Path) -> str:
    """Tokens per second and GPU with samples of unlike lengths, one line per setting."""
    names = ("compute", "cdp-v2", "fsdp2", "zero3-leaf", "ddp")
    body = [
        [
            s.place,
            ", ".join([MODELS.get(s.first["model"], s.first["model"]), s.label]),
            *(_show(s.tokens(name), ".0f") + s.variant(name) for name in names),
            _ratio(s.tokens("cdp-v2"), s.tokens("fsdp2"), ".2f"),
            _recorded(s.run, page),
        ]
        for s in settings(sources)
    ]
    return table(["GPUs", "setting", *(ENGINES[name] for name in names), "`cdp-v2` x FSDP2", "rows"], body)


def hosts(sources: Sequence[str], page: Path) -> str:
    """Two hosts and a slow link: medians over repeats, one line per link, number of micro-batches and engine."""
    body = []
    for run in sources:
        for path in sorted((rows.RESULTS / run).glob("rows*.csv")):
            summary = path.with_name(path.name.replace("rows", "summary", 1)).with_suffix(".txt")
            rounds = re.search(r"--rounds=(\d+)", summary.read_text())[1]
            with path.open(newline="") as file:
                some = list(csv.DictReader(file))
            for engine in dict.fromkeys(r["engine"] for r in some):
                mine = [r for r in some if r["engine"] == engine]
                step, sent, received = (
                    statistics.median(float(r[f]) for r in mine) for f in ("step_s", "sent_mb", "received_mb")
                )
                link = f"{float(mine[0]['mbit']):g} Mbit/s"
                name = {"rings": "`cdp-v2`, a ring per host", "ring": "`cdp-v2`, one ring", "zero3": "ZeRO-3"}[engine]
                body.append([link, rounds, name, f"{step:.2f}", f"{sent:.1f}", f"{received:.1f}", str(len(mine))])
    head = ["link", "micro-batches per step", "engine", "s per step", "MB sent by host 0", "MB received by host 0", "repeats"]
    return table(head, body)


def _learned(runs: Sequence[str]) -> dict[tuple[str, str, str, str], dict[str, list[dict[str, str]]]]:
    """Rows of finished cases by setting and variant. Rows that name no weight are from when the default was 2."""
    from benchmarks import learning_report as report

    some = [r for run in runs for r in report.read(rows.RESULTS / run / "rows.csv")]
    older = {"predict": "predict:2"}
    return report.settings(report.finished([{**r, "correction": older.get(r["correction"], r["correction"])} for r in some]))


def _gpt(runs: Sequence[str]) -> dict[tuple[str, str], dict[str, list[dict[str, str]]]]:
    every = _learned(runs).items()
    return {(data, rate): by_rule for (data, optimizer, ranks, rate), by_rule in every if (optimizer, ranks) == ("adamw", "4")}


def _split(sources: Sequence[str]) -> tuple[list[str], list[str]]:
    """Sources with measured times, and runs of the learning experiments."""
    learned = [source for source in sources if (rows.RESULTS / source / "rows.csv").exists()]
    return [source for source in sources if source not in learned], learned


def _test_loss(some: Sequence[dict[str, str]]) -> float:
    from benchmarks import learning_report

    return statistics.mean(learning_report.last(some, "test_loss").values())


def learning(sources: Sequence[str], page: Path) -> str:
    """The GPT's final test losses by rule, one line per learning rate and momentum."""
    body = []
    for (dataset, rate), by_rule in _gpt(sources).items():
        momentum = dataset.partition("gpt-beta1-")[2] or "0.9"
        seeds = {r["seed"] for some in by_rule.values() for r in some}
        losses = [f"{_test_loss(by_rule[rule]):.3f}" if rule in by_rule else "" for rule in RULES]
        body.append([momentum, f"{float(rate) * BASE_RATE:g}", str(len(seeds)), *losses])
    body.sort(key=lambda line: (-float(line[0]), -float(line[1])))
    return table(["β₁ of AdamW", "learning rate", "seeds", *RULES.values()], body)


def _finals(warmup: bool, sources: Sequence[str]) -> str:
    """Final test losses in per cent above ``dp``'s: mean, standard deviation and number of seeds; a column per correction.

    Seeds are paired. Of some runs printed lines are left: those per cents count that the rows of no case have.
    """
    from benchmarks import learning_report as report

    plain: dict[tuple[str, ...], float] = {}
    above: dict[tuple[str, ...], dict[str, list[float]]] = {}
    seeds: dict[tuple[str, ...], int] = {}
    for setting, variants in _learned(sources).items():
        base = report.last(variants["dp"], "test_loss")
        plain[setting] = statistics.mean(base.values())
        for some in variants.values():
            losses = report.last(some, "test_loss")
            found = [100 * (losses[s] / base[s] - 1) for s in losses if s in base]
            above.setdefault((*setting, some[0]["rule"]), {})[some[0]["correction"]] = found
    for path in filter(Path.exists, (rows.RESULTS / run / "finals.csv" for run in sources)):
        with path.open(newline="") as file:
            printed = list(csv.DictReader(file))
        for r in sorted(printed, key=lambda r: r["rule"] != "dp"):
            setting, loss, by_seed = report.setting(r), float(r["test_loss"]), r["percent_above_dp_by_seed"].split()
            of_dp = plain.setdefault(setting, loss)
            name = "predict:2" if r["correction"] == "predict" else r["correction"]
            values = above.setdefault((*setting, r["rule"]), {}).setdefault(name, [])
            there = {f"{v:+.2f}" for v in values}
            values += [float(v) for v in by_seed if v not in there] if by_seed else [100 * (loss / of_dp - 1)]
            seeds[(*setting, r["rule"], name)] = int(r["seeds"])

    def order(case: tuple[str, ...]) -> tuple[object, ...]:
        dataset, optimizer, ranks, rate, rule = case
        return list(GPTS).index(dataset), list(report.OPTIMIZERS).index(optimizer), rule != "cdp-v2", int(ranks), float(rate)

    rules = {"cdp-v1": ", `cdp-v1`", "cdp-v2": ""}
    shown = {
        (*case[:-1], case[-1].removesuffix("-warmup")): v for case, v in above.items() if case[-1].endswith("-warmup") == warmup
    }
    cases = sorted((case for case in shown if case[-1] in rules), key=order)
    names = sorted({name for case in cases for name in shown[case]}, key=lambda n: (list(report.LINES).index(n.split(":")[0]), n))
    body = []
    for case in cases:
        dataset, optimizer, ranks, rate, rule = case
        best, cells, goal = next((n for n in RECOMMENDED if n in shown[case]), None), [], ""
        for name in names:
            values = shown[case].get(name, [])
            cell = f"{statistics.mean(values):+.2f}" if values else ""
            cell += f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else ""
            count = max(len(values), seeds.get((*case[:-1], rule + "-warmup" * warmup, name), 0))
            if warmup and name == best:
                cell, goal = f"**{cell}**", "met" if statistics.mean(values) <= GOAL else "**missed**"
            cells.append(f"{cell} ({count})" if values else "")
        what = [GPTS[dataset], report.OPTIMIZERS[optimizer] + rules[rule], ranks, rate, f"{plain[case[:-1]]:.3f}"]
        body.append([*what, *cells, goal])
    heads = [f"w = {weight}" if weight else f"`{method}`" for method, _, weight in (name.partition(":") for name in names)]
    return table(["parameters", "optimizer", "ranks", "rate x", "`dp`", *heads, "at most 1 %"], body)


def warmed_up(sources: Sequence[str], page: Path) -> str:
    """Final losses after a warm-up of a tenth of the steps; the recommended correction is bold and has the goal's verdict."""
    return _finals(True, sources)


def from_step_0(sources: Sequence[str], page: Path) -> str:
    """Final losses without a warm-up."""
    return _finals(False, sources)


def same_loss(sources: Sequence[str], page: Path) -> str:
    """Steps until means over seeds of ``dp`` and ``cdp-v2`` both reach the higher final one, and times by recorded step times."""
    import numpy as np

    from benchmarks import learning_report as report

    speeds, learned = _split(sources)
    rivals = [(s, name) for s in settings(speeds) if s.plain for name in ("fsdp2", "zero3-leaf") if name in s.engines]
    body = []
    for (dataset, _, ranks, rate), variants in _learned(learned).items():
        if (mine := f"cdp-v2-warmup {RECOMMENDED[0]}") not in variants:
            continue
        (steps, cyclic), (_, plain) = (report.curves(variants[v], "test_loss") for v in (mine, "dp"))
        seeds = [s for s in cyclic if s in plain]
        losses = [np.mean([of[s] for s in seeds], 0) for of in (cyclic, plain)]
        goal, reached = max(some[-1] for some in losses), []
        for some in losses:
            i = int((some <= goal).argmax())
            reached.append(float(np.interp(goal, some[[i, i - 1]], steps[[i, i - 1]])))
        longer = reached[0] + steps[-1] // 10  # steps of the warm-up stall: they take twice as long
        times = [f"{reached[1] / longer * s.ms(name) / s.ms('cdp-v2'):.2f}" for s, name in rivals]
        body.append([GPTS[dataset], ranks, rate, str(len(seeds)), f"{goal:.3f}", *(f"{r:.0f}" for r in reached), *times])
    heads = [f"{ENGINES[name]}, {s.place}" for s, name in rivals]
    return table(["parameters", "ranks", "rate x", "seeds", "loss", "steps, `cdp-v2`", "steps, `dp`", *heads], body)


def headline(sources: Sequence[str], page: Path) -> str:
    """README's table: time and memory of settings without delays, and the GPT's test losses."""
    speeds, learned = _split(sources)
    names = ("cdp-v2", "fsdp2", "zero3-leaf", "zero3")
    body = []
    for s in settings(speeds):
        if not s.plain:
            continue
        label = f"{MODELS[s.first['model']]}, {s.label}: "
        for what, figure in (("ms per step", s.ms), ("peak GiB per GPU", s.gib)):
            known = {name: v for name in names if (v := figure(name)) is not None}
            form = ".0f" if figure == s.ms else ".1f"
            best = min(known, key=known.get)
            cells = {n: format(v, form) for n, v in known.items()}
            shown = [f"**{cells[n]}**" if n == best else cells.get(n, "") for n in names]
            variants = [s.variant(n) * bool(cell) * (figure == s.ms) for n, cell in zip(names, shown)]
            body.append([label + what, *map(str.__add__, shown, variants)])
            label = "its "
    gpt = _gpt(learned)["gpt", "1"]
    plain, cyclic, warm = (
        _test_loss(gpt[rule]) for rule in ("dp", f"cdp-v2 {RECOMMENDED[0]}", f"cdp-v2-warmup {RECOMMENDED[0]}")
    )
    trained = gpt["dp"][0]
    label = f"small GPT from scratch, AdamW, {trained['steps']} steps: test loss"
    body.append([label, f"{warm:.2f} with `warmup_steps` ({cyclic:.2f} without)", *[f"**{plain:.2f}**"] * 3])
    where = f"{s.place} of one host (NVLink), bf16, AdamW, sequence length 2048 if not said, torch {s.first['torch']}, "
    where += f"DeepSpeed {s.first['deepspeed']}, {_recorded(s.run, page)}; "
    where += "of FSDP2's variants the fastest, and the least memory of all; empty cells were not recorded. "
    where += "`cdp-v2-uncorrected` has no delay correction, which takes up to 4 % of a step."
    what = f"{int(trained['parameters']):,} parameters, {trained['ranks']} ranks, {len({r['seed'] for r in gpt['dp']})} seeds, "
    what += " and ".join(_recorded(run, page) for run in learned)
    what += '. FSDP2 and ZeRO-3 are plain data parallelism, recorded as `"rule": "dp"`.'
    head = ["lower is better", *(ENGINES[name] for name in names)]
    return f"{table(head, body)}\n\nSpeed and memory: {where}\nTest loss: {what}"


KINDS: dict[str, Callable[[Sequence[str], Path], str]] = {
    f.__name__: f for f in (speed, memory, engines, unlike, hosts, learning, warmed_up, from_step_0, same_loss, headline)
}


def render(text: str, page: Path) -> str:
    """The text of ``page`` with each block made anew.

    Raises:
        ValueError: a marker names an unknown kind, run or setting, or its block does not end.
    """
    begun, whole = text.count("<!-- rows: "), len(BLOCK.findall(text))
    if begun != whole or whole != text.count("<!-- end of rows -->"):
        raise ValueError(f"{page.name}: {begun} blocks of rows begin and {whole} end; each needs both lines")

    def made(match: re.Match[str]) -> str:
        kind, *sources = (part.strip() for part in match[1].split(";"))
        if kind not in KINDS:
            raise ValueError(f"{page.name}: rows: {kind}; allowed kinds are {', '.join(KINDS)}")
        return f"<!-- rows: {match[1]} -->\n{KINDS[kind](sources, page)}\n<!-- end of rows -->"

    return BLOCK.sub(made, text)


def main() -> None:
    for page in PAGES:
        page.write_text(render(page.read_text(), page))


if __name__ == "__main__":
    main()
