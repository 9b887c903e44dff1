"""Compares how rules and delay corrections learn: trains every case, and compares pair by pair with dp.

A case is a (dataset, optimizer, ranks, learning rate, rule, correction, seed). dp has nothing to correct, so it runs once.

    python -m benchmarks.learning --seeds 5 --out benchmarks/results/DATE_HARDWARE_learning

Each evaluation appends a row to rows.csv. Tables and plots are made from the rows only; ``--report`` makes them again. A
second run with the same ``--out`` continues: it keeps finished cases and restarts unfinished ones.
"""

import argparse
import csv
import io
import itertools
import multiprocessing
import os
import platform
import queue
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from benchmarks import learning_report, rows
from benchmarks.learning_tasks import CORRECTIONS, OPTIMIZERS, RATES, RULES, SIZES, Case, run
from deepspeed_cdp.plan.delay_correction import DelayCorrection

FIELDS = (
    "dataset",
    "optimizer",
    "rate",
    "rule",
    "correction",
    "seed",
    "step",
    "steps",
    "train_loss",
    "test_loss",
    "test_accuracy",
    "seconds",
    "ranks",
    "micro_batch",
    "parameters",
    "graph",
    "data",
    "device",
    "torch",
    "python",
    "commit",
    "time",
)


# ---- rows -------------------------------------------------------------------------------------------------------------------
def _line(values: Any) -> bytes:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(values)
    return text.getvalue().encode()


class Rows:
    """rows.csv, each row written whole: one ``write`` to a file that is only appended to, then ``fsync``."""

    def __init__(self, path: Path, cases: list[Case]):
        """
        Raises:
            ValueError: the file has rows of these cases with other steps or micro-batches.
        """
        self.path = path
        there = learning_report.read(path) if path.exists() else []
        by_key = {c.key: c for c in cases}
        for row in there:
            case = by_key.get(learning_report.key(row))
            ours = case and (str(case.spans.steps), str(case.spans.micro_batch))
            if case and ours != (row["steps"], row["micro_batch"]):
                raise ValueError(
                    f"--out has rows of {' '.join(case.key)} with {row['steps']} steps and micro-batch {row['micro_batch']}; "
                    "choose another folder"
                )
        self.finished = {learning_report.key(row) for row in there if row["step"] == row["steps"]}
        kept = [row for row in there if learning_report.key(row) in self.finished]
        part = path.with_suffix(".new")
        part.write_bytes(_line(FIELDS) + b"".join(_line([row[f] for f in FIELDS]) for row in kept))
        os.replace(part, path)
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND)

    def add(self, row: dict[str, Any]) -> None:
        os.write(self._file, _line([row[f] for f in FIELDS]))
        os.fsync(self._file)

    def close(self) -> None:
        os.close(self._file)


# ---- processes --------------------------------------------------------------------------------------------------------------
def _work(cases: Any, results: Any, device: str, graph: bool) -> None:
    """A process that runs cases until none is left."""
    torch.set_num_threads(1)
    while (case := cases.get()) is not None:
        try:
            for row in run(case, torch.device(device), graph):
                results.put((case, row))
        except Exception as error:  # the others go on; the parent fails at the end
            results.put((case, error))
    results.put((None, None))


def run_all(cases: list[Case], out: Rows, args: argparse.Namespace, about: dict[str, str]) -> list[str]:
    """Run the cases missing in ``out``, several at a time; returns the errors."""
    todo = [c for c in cases if c.key not in out.finished]
    began, context, faults = time.monotonic(), multiprocessing.get_context("spawn"), []
    waiting, results = context.Queue(), context.Queue()
    workers = [
        context.Process(target=_work, args=(waiting, results, args.device, args.graph), daemon=True)
        for _ in range(min(args.processes, len(todo)))
    ]
    for case in [*todo, *([None] * len(workers))]:
        waiting.put(case)
    for worker in workers:
        worker.start()
    total = sum(c.spans.steps for c in todo)
    bar = tqdm(total=total, unit="step", disable=None if sys.stderr.isatty() else True)
    done, told, ended = 0, began, 0
    while ended < len(workers):
        if args.seconds and time.monotonic() - began > args.seconds:
            faults.append(f"{args.seconds:g} s are over and {len(todo) - done} of {len(todo)} cases are not finished")
            break
        try:
            case, row = results.get(timeout=1)
        except queue.Empty:
            if not any(worker.is_alive() for worker in workers):
                faults.append("a process died without a word; see above")
                break
            continue
        if case is None:
            ended += 1
        elif isinstance(row, Exception):
            faults.append(f"{' '.join(case.key)}: {type(row).__name__}: {row}")
        else:
            out.add({**row, **about, "time": time.strftime("%Y-%m-%dT%H:%M:%S")})
            done += row["step"] == row["steps"]
            bar.update(min(case.spans.every, row["step"]))
            if bar.disable and time.monotonic() - told > 20:
                told = time.monotonic()
                print(f"[{told - began:4.0f} s] {done} of {len(todo)} cases", file=sys.stderr, flush=True)
    bar.close()
    for worker in workers:
        if worker.is_alive():
            worker.terminate()
        worker.join(10)
    return faults


# ---- the command ------------------------------------------------------------------------------------------------------------
def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.learning", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    gpu = torch.cuda.is_available()
    parser.add_argument("--datasets", default="digits,gpt")
    parser.add_argument("--optimizers", default="", help="comma-separated; default: each dataset's own")
    parser.add_argument("--rules", default=",".join(RULES))
    parser.add_argument("--corrections", default="none", help="comma-separated; predict:W has a weight, which rows name")
    parser.add_argument("--seeds", default="5", help="how many; or one number per dataset, comma-separated")
    parser.add_argument("--rates", default="1", help="multiply the learning rates; comma-separated")
    parser.add_argument("--simulate-ranks", default="4", help="ranks, and stages; comma-separated")
    parser.add_argument("--first-seed", type=int, default=0, help="to add seeds to some cases only")
    parser.add_argument(
        "--size", default="full", choices=("full", "small", "tiny"), help="small: for a CPU; tiny: to see that everything works"
    )
    parser.add_argument(
        "--processes",
        type=int,
        default=min(14, max(1, (os.cpu_count() or 1) - 2)) if gpu else 1,
        help="cases trained at a time, on the one device",
    )
    parser.add_argument("--device", default="cuda" if gpu else "cpu")
    parser.add_argument("--no-graph", dest="graph", action="store_false", help="no CUDA graphs")
    parser.add_argument("--seconds", type=float, default=0, help="stop after so long, wherever it is; 0: never")
    parser.add_argument("--report", action="store_true", help="train nothing; tables and plots of the rows that are there")
    parser.add_argument("--docs", action="store_true", help="train nothing; docs/learning.md gets the tables and plots of --out")
    parser.add_argument("--out", default="", help="default: benchmarks/results/DATE_HARDWARE_learning")
    args = parser.parse_args(argv)
    for option, known in (("datasets", SIZES), ("optimizers", RATES), ("rules", RULES), ("corrections", CORRECTIONS)):
        given = [name for name in getattr(args, option).split(",") if name]
        setattr(args, option, given)
        for name in given:
            if (name.partition(":")[0] if option == "corrections" else name) not in known:
                parser.error(f"--{option} has {name!r}; allowed are {', '.join(known)}")
    default = f"predict:{DelayCorrection('predict').weight:g}"
    args.corrections = [default if name == "predict" else name for name in args.corrections]
    try:
        args.rates = [float(r) for r in args.rates.split(",")]
        args.simulate_ranks = [int(n) for n in args.simulate_ranks.split(",")]
        seeds = [int(s) for s in args.seeds.split(",")]
    except ValueError as error:
        parser.error(f"--seeds, --rates and --simulate-ranks are numbers, comma-separated ({error})")
    if len(seeds) not in (1, len(args.datasets)) or min(seeds) < 1 or min(args.rates) <= 0 or args.processes < 1:
        parser.error("--seeds takes one number or one per dataset, of at least 1; --rates are above 0; --processes is at least 1")
    args.seeds = dict(zip(args.datasets, seeds * len(args.datasets)))
    args.graph = args.graph and args.device.startswith("cuda")
    return args


def grid(args: argparse.Namespace) -> list[Case]:
    """All cases, seed by seed, so that an interrupted run has complete pairs."""
    every = itertools.product(
        range(args.first_seed, max(args.seeds.values())),
        args.datasets,
        args.simulate_ranks,
        args.rates,
        args.optimizers or [""],
        args.rules,
        args.corrections,
    )
    cases = [
        Case(
            dataset,
            rate,
            rule,
            seed,
            ranks,
            args.size,
            optimizer or OPTIMIZERS[dataset][0],
            "none" if rule == "dp" else correction,
        )
        for seed, dataset, ranks, rate, optimizer, rule, correction in every
        if seed < args.seeds[dataset] and optimizer in ("", *OPTIMIZERS[dataset])
    ]
    return list(dict.fromkeys(cases))


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    device = torch.cuda.get_device_name() if args.device.startswith("cuda") else "CPU"
    hardware = next((w for w in device.split() if w[0] in "ABHL" and w[-1].isdigit()), device.split()[0])
    out = Path(args.out or rows.RESULTS / f"{time.strftime('%Y-%m-%d')}_1x{hardware}_learning")
    if args.docs:
        learning_report.into_document(out, rows.RESULTS.parents[1] / "docs" / "learning.md")
        return 0
    out.mkdir(parents=True, exist_ok=True)
    faults: list[str] = []
    if not args.report:
        commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
        about = {
            "device": device,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "commit": os.environ.get("COMMIT", commit or "unknown"),
        }
        cases = grid(args)
        try:
            store = Rows(out / "rows.csv", cases)
        except ValueError as error:
            print(error, file=sys.stderr)
            return 2
        faults = run_all(cases, store, args, about)
        store.close()
    there = learning_report.finished(learning_report.read(out / "rows.csv"))
    if there:
        for path in learning_report.draw(there, out):
            print(path)
        text = learning_report.tables(there)
        (out / "table.md").write_text(text)
        print("\n" + text)
    for fault in faults:
        print(fault, file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
