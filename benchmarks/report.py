"""Tables from the raw rows of a benchmark: ``python -m benchmarks.report OUT/results.csv``."""

import csv
import statistics
import sys
from collections import defaultdict
from pathlib import Path

KEY = ("model", "ranks", "micro_batch", "compiled", "jitter_ms")


def table(path: Path) -> str:
    """Medians over windows (and repeats), with the spread and the ratio to ``compute``, one table per setting."""
    groups: dict[tuple, dict[str, list[dict]]] = defaultdict(lambda: defaultdict(list))
    with Path(path).open() as file:
        for row in csv.DictReader(file):
            groups[tuple(row[k] for k in KEY)][row["engine"]].append(row)
    parts = []
    for key, engines in groups.items():
        some = next(iter(engines.values()))[0]
        model, ranks, micro_batch, compiled, jitter = key
        head = f"### {model}, micro-batch {micro_batch}, {ranks} x {some['device']}"
        head += ", torch.compile" if compiled == "True" else ""
        head += f", each rank late by U(0, {float(jitter):g}) ms a step" if float(jitter) else ""
        ceiling = _median(engines["compute"], "step_ms") if "compute" in engines else None
        lines = [head, "", "| engine | ms per step | windows: lowest to highest | of compute-only speed | tokens/s/GPU | MFU "
                 "| peak GiB | MiB received per step |", "|---|---|---|---|---|---|---|---|"]
        for name, rows in engines.items():
            times = [float(r["step_ms"]) for r in rows]
            middle = statistics.median(times)
            share = f"{ceiling / middle:.3f}" if ceiling else ""
            mfu = f"{_median(rows, 'mfu'):.3f}" if rows[0]["mfu"] else ""
            lines.append(f"| {name} | {middle:.1f} | {min(times):.1f} to {max(times):.1f} ({len(times)}) | {share} "
                         f"| {_median(rows, 'tokens_per_s_per_gpu'):.0f} | {mfu} | {_median(rows, 'peak_gib'):.2f} "
                         f"| {_median(rows, 'received_mib_per_step'):.0f} |")
        lines.append(f"\ntorch {some['torch']}, deepspeed {some['deepspeed']}, commit {some['commit']}, "
                     f"sequence length {some['sequence']}, {some['time'][:10]}")
        parts.append("\n".join(lines))
    return "\n\n".join(parts) + "\n"


def _median(rows: list[dict], field: str) -> float:
    return statistics.median(float(r[field]) for r in rows)


if __name__ == "__main__":
    print(table(Path(sys.argv[1])))
