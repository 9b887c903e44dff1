"""Tables from the raw rows of a benchmark: ``python -m benchmarks.report DIR...`` (docs/make_numbers.py: the documents'
tables)."""

import argparse
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks import rows

RIVALS = ("fsdp2", "zero3-leaf")  # engines that others are compared with, where they ran


def tables(some: Sequence[dict[str, str]], level: str = "###") -> str:
    """Medians over windows (and repeats) with their spread, and ratios to other engines, one table per setting."""
    return "\n\n".join(_table(setting, engines, level) for setting, engines in rows.settings(some).items()) + "\n"


def _table(setting: tuple[str, ...], engines: dict[str, list[dict[str, str]]], level: str) -> str:
    times = {name: [float(r["step_ms"]) for r in group] for name, group in engines.items()}
    middle = {name: statistics.median(t) for name, t in times.items()}
    columns = {
        "engine": lambda n: n,
        "ms per step": lambda n: f"{middle[n]:.1f}",
        "windows: lowest to highest": lambda n: f"{min(times[n]):.1f} to {max(times[n]):.1f} ({len(times[n])})",
        "p20, p80, p99 of steps": lambda n: ", ".join(_median(engines[n], f"p{p}_ms", ".0f") for p in (20, 80, 99)),
        "of compute-only speed": lambda n: f"{middle['compute'] / middle[n]:.3f}" if "compute" in middle else "",
        **{f"x {rival}": lambda n, rival=rival: f"{middle[rival] / middle[n]:.2f}" for rival in RIVALS if rival in middle},
        "tokens/s/GPU": lambda n: _median(engines[n], "tokens_per_s_per_gpu", ".0f"),
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
    return "\n".join(lines) + "\n\n" + _footnote([r for group in engines.values() for r in group])


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
