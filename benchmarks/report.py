"""Tables from the raw rows of a benchmark: ``python -m benchmarks.report DIR...`` (docs/make_numbers.py: the documents'
tables)."""

import argparse
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks import rows

RIVALS = ("fsdp2", "zero3-leaf")  # engines that others are compared with, where they ran; of FSDP2 the fastest variant


def tables(some: Sequence[dict[str, str]], level: str = "###") -> str:
    """Medians over windows (and repeats) with their spread, and ratios to other engines, one table per setting.

    Windows of samples of unlike lengths have unlike work, the same for all engines: there a mean takes the median's place.
    """
    return "\n\n".join(_table(setting, engines, level) for setting, engines in rows.settings(some).items()) + "\n"


def _table(setting: tuple[str, ...], engines: dict[str, list[dict[str, str]]], level: str) -> str:
    times = {name: [float(r["step_ms"]) for r in group] for name, group in engines.items()}
    unlike = bool(dict(zip(rows.SETTING, setting))["lengths"])
    middle = {name: typical(group) for name, group in engines.items()}
    rivals = [best for rival in RIVALS if (best := fastest(rival, middle))]
    columns = {
        "engine": lambda n: n,
        "ms per step": lambda n: f"{middle[n]:.1f}",
        "windows: lowest to highest": lambda n: f"{min(times[n]):.1f} to {max(times[n]):.1f} ({len(times[n])})",
        "p20, p80, p99 of steps": lambda n: ", ".join(_median(engines[n], f"p{p}_ms", ".0f") for p in (20, 80, 99)),
        "of compute-only speed": lambda n: f"{middle['compute'] / middle[n]:.3f}" if "compute" in middle else "",
        **{f"x {rival}": lambda n, rival=rival: f"{middle[rival] / middle[n]:.2f}" for rival in rivals},
        "tokens/s/GPU": lambda n: f"{overall(engines[n]):.0f}" if unlike else _median(engines[n], "tokens_per_s_per_gpu", ".0f"),
        "MFU": lambda n: _median(engines[n], "mfu", ".3f"),
        "peak GiB": lambda n: _median(engines[n], "peak_gib", ".2f"),
        "GiB after warm-up": lambda n: _median(engines[n], "steady_gib", ".2f"),
        "MiB received per step": lambda n: _median(engines[n], "received_mib_per_step", ".0f"),
        "waits, ms per step by rank": lambda n: _by_rank(engines[n], "waited_ms_by_rank"),
        "ends behind the rank before, ms": lambda n: _by_rank(engines[n], "behind_ms_by_rank"),
    }
    body = {head: [cell(n) for n in engines] for head, cell in columns.items()}
    body = {head: cells for head, cells in body.items() if any(cells)}  # no column without a figure
    lines = [f"{level} {rows.describe(setting)}", "", f"| {' | '.join(body)} |", "|" + "---|" * len(body)]
    lines += [f"| {' | '.join(line)} |" for line in zip(*body.values())]
    return "\n".join(lines) + "\n\n" + _won(middle) + _footnote([r for group in engines.values() for r in group])


def typical(some: Sequence[dict[str, str]]) -> float:
    """Milliseconds of an engine's step: the median over windows, or their mean if each window has other lengths."""
    times = [float(r["step_ms"]) for r in some]
    return statistics.mean(times) if some[0]["lengths"] else statistics.median(times)


def fastest(family: str, times: Mapping[str, float]) -> str | None:
    """The engine that stands for ``family`` in tables: of FSDP2 the fastest variant that ran; None if none did."""
    names = [n for n in times if n == family or family == "fsdp2" and n.startswith("fsdp2-")]
    return min(names, key=lambda n: times[n], default=None)


def _won(times: dict[str, float]) -> str:
    """A sentence where a rival that trains is faster than all cyclic engines; else nothing."""
    ours = min((n for n in times if n.startswith("cdp-")), key=lambda n: times[n], default=None)
    best = min((n for n in times if n != "compute"), key=lambda n: times[n], default=None)
    if ours is None or best is None or best.startswith("cdp-"):
        return ""
    return f"A rival wins here: `{ours}` takes {100 * (times[ours] / times[best] - 1):.1f} % longer than `{best}`.\n\n"


def overall(some: list[dict[str, str]]) -> float:
    """Tokens per second and GPU over all windows of unlike lengths."""
    tokens = [sum(map(int, r["tokens_by_rank"].split())) for r in some]
    return sum(tokens) / sum(n / float(r["tokens_per_s_per_gpu"]) for n, r in zip(tokens, some))


def _footnote(some: list[dict[str, str]]) -> str:
    first = some[0]
    versions = [f"{name} {first[name]}" for name in ("python", "torch", "deepspeed", "transformers") if first[name]]
    text = ", ".join([*versions, f"commit {first['commit']}", f"sequence length {first['sequence']}", first["time"][:10]])
    sharded = sorted({r["engine"] for r in some if r["build"] == "sharded"})
    if sharded:
        text += f". Built in shards, so from other random weights than the rest: {', '.join(sharded)}"
    return text


def _median(some: list[dict[str, str]], field: str, form: str) -> str:
    """ "" if it is not known."""
    values = [float(r[field]) for r in some if r[field] != ""]
    return format(statistics.median(values), form) if values else ""


def _by_rank(some: list[dict[str, str]], field: str) -> str:
    """Medians of a field that holds a figure per rank; "" if it is not known."""
    known = [[float(x) for x in r[field].split()] for r in some if r[field].split()]
    return ", ".join(f"{statistics.median(column):.1f}" for column in zip(*known))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.report", description=__doc__)
    parser.add_argument("runs", nargs="+", type=Path, help="folders with a results.csv: prints their tables, writes table.md")
    try:
        for folder in parser.parse_args(argv).runs:
            (folder / "table.md").write_text(tables(rows.read(folder / "results.csv")))
            print((folder / "table.md").read_text())
    except (ValueError, FileNotFoundError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
