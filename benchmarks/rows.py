"""The raw rows of a benchmark: one per measured window, in OUT/results.csv and results.jsonl."""

import csv
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
FIELDS = (
    "engine",
    "model",
    "ranks",
    "micro_batch",
    "sequence",
    "compiled",
    "jitter_ms",
    "repeat",
    "window",
    "step_ms",
    "p20_ms",
    "p80_ms",
    "p99_ms",
    "tokens_per_s_per_gpu",
    "mfu",
    "peak_gib",
    "received_mib_per_step",
    "loss",
    "device",
    "torch",
    "deepspeed",
    "commit",
    "time",
    # since the third run; the names and the order of those above stay, so that old files can be read
    "steady_gib",
    "host_sync",
    "bandwidth_gb_s",
    "build",
    "python",
    "transformers",
    # since the stragglers on CPUs: per step, by rank; how far each rank ends a step behind the one before
    "waited_ms_by_rank",
    "behind_ms_by_rank",
    # since samples of unlike lengths: micro-batches per step; MEDIAN:SIGMA; real tokens in the window
    "accumulation",
    "lengths",
    "tokens_by_rank",
)
SINCE = {
    "steady_gib": "",
    "host_sync": "True",
    "bandwidth_gb_s": "",
    "build": "full",
    "python": "",
    "transformers": "",
    "waited_ms_by_rank": "",
    "behind_ms_by_rank": "",
    "accumulation": "1",
    "lengths": "",
    "tokens_by_rank": "",
}
SETTING = (
    "model",
    "ranks",
    "micro_batch",
    "sequence",
    "compiled",
    "jitter_ms",
    "host_sync",
    "bandwidth_gb_s",
    "device",
    "accumulation",
    "lengths",
)


def read(path: Path) -> list[dict[str, str]]:
    """The rows of a file, old ones filled up to today's columns; "" is unknown.

    Raises:
        ValueError: a column that every file has is missing.
    """
    with Path(path).open(newline="") as file:
        reader = csv.DictReader(file)
        missing = [f for f in FIELDS if f not in SINCE and f not in (reader.fieldnames or ())]
        if missing:
            raise ValueError(f"{path} has no column {missing[0]!r}, so it is no file of benchmark rows; give a results.csv")
        rows = [{**SINCE, **row} for row in reader]
    for row in rows:
        if not row["engine"].startswith("cdp-"):
            row["received_mib_per_step"] = ""  # only hand-offs are counted; old files say 0
    return rows


def write(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Append rows; a header first if the file is new.

    Raises:
        ValueError: the file is there and has other columns.
    """
    check(path)
    new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, FIELDS, lineterminator="\n")
        if new:
            writer.writeheader()
        writer.writerows(rows)
    with path.with_suffix(".jsonl").open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def check(path: Path) -> None:
    """Whether rows can be appended to this file.

    Raises:
        ValueError: it has other columns.
    """
    if path.exists():
        with path.open(newline="") as file:
            header = next(csv.reader(file), [])
        if tuple(header) != FIELDS:
            raise ValueError(f"--out has {path.name} with the columns of another version; choose an empty folder")


def settings(rows: Sequence[dict[str, str]]) -> dict[tuple[str, ...], dict[str, list[dict[str, str]]]]:
    """Rows by setting (values of ``SETTING``) and engine, both in the order in which they came."""
    groups: dict[tuple[str, ...], dict[str, list[dict[str, str]]]] = {}
    for row in rows:
        groups.setdefault(tuple(row[k] for k in SETTING), {}).setdefault(row["engine"], []).append(row)
    return groups


def describe(setting: tuple[str, ...]) -> str:
    """A setting in words, for headings."""
    s = dict(zip(SETTING, setting))
    text = f"{s['model']}, micro-batch {s['micro_batch']}, {s['ranks']} x {s['device']}"
    text += f", {s['accumulation']} micro-batches a step" if s["accumulation"] != "1" else ""
    if s["lengths"]:
        shape, _, packed = s["lengths"].partition(" ")
        median, sigma = shape.split(":")
        text += f", log-normal lengths of median {median} and sigma {sigma} up to {s['sequence']}" + f" ({packed})" * bool(packed)
    else:
        text += f", sequence {s['sequence']}" if s["sequence"] != "2048" else ""
    text += ", torch.compile" if s["compiled"] == "True" else ""
    text += ", no host synchronization in the forward" if s["host_sync"] == "False" else ""
    text += f", hand-offs at {float(s['bandwidth_gb_s']):g} GB/s" if s["bandwidth_gb_s"] else ""
    text += f", each rank late by U(0, {float(s['jitter_ms']):g}) ms a step" if float(s["jitter_ms"]) else ""
    return text
