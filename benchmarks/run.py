"""Runs engines in turns on this host: ``python -m benchmarks.run --models llama-1.3b --micro-batch 1,4``.

Each setting (model, micro-batch, delay, eager or compiled) is one torchrun in which the engines take turns, ``--repeats``
times. It writes rows to ``OUT/results.csv`` (one per window), the table of medians to ``OUT/table.md``, and plots beside it.
``--cpu`` runs over gloo, which tests the benchmark and says nothing about speed.
"""

import argparse
import itertools
import os
import re
import subprocess
import sys
import time
from pathlib import Path

from benchmarks import lengths, report, rows
from benchmarks.sizes import IMAGES, SIZES

ENGINES = ("compute", "ddp", "fsdp2", "zero3", "zero3-leaf", "cdp-v2", "cdp-v1")
RIVALS = r"fsdp2(-prefetch2)?(-symm|-zerocta)?(-keep)?|zero3-deepcompile|zero3(-leaf)?-offload"
REPLICAS = ("zero1", "zero2", "cdp-v2-replicas", "cdp-v1-replicas")  # beside ddp: every rank keeps all parameters
PASSED_ON = (
    "engines",
    "steps",
    "windows",
    "warmup",
    "repeats",
    "seconds",
    "trace",
    "build",
    "bandwidth_limit",
    "layer_ms",
    "lengths",
)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line; unknown names end with an error on stderr."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.run", description=__doc__.split("\n")[0])
    parser.add_argument("--models", default="llama-1.3b", help="comma-separated, of " + ", ".join(SIZES))
    parser.add_argument("--micro-batch", default="4", help="samples of a rank, for vit-... images; comma-separated")
    parser.add_argument(
        "--engines",
        default=",".join(ENGINES),
        help="comma-separated, of "
        + ", ".join(ENGINES + REPLICAS)
        + ", cdp-K; cdp-...-replicas: every rank keeps all parameters; cdp-...-keep: with keep_after_forward; "
        "cdp-...-minS: with min_unit_mb S; cdp-...-unfused: without "
        "gradient_accumulation_fusion; cdp-...-uncorrected: with delay_correction none; "
        "cdp-...-nccl: over NCCL where peer copies would do; "
        "zero3-offload, cdp-...-offload: optimizer in host memory; fsdp2-prefetch2, fsdp2-symm, fsdp2-zerocta, fsdp2-keep and "
        "their combinations: benchmarks/fsdp.py; zero3-deepcompile: DeepSpeed's compiler (warm-up of 8 steps at least)",
    )
    parser.add_argument("--ranks", type=int, default=0, help="default: all GPUs, or 2 with --cpu")
    parser.add_argument(
        "--sequence",
        type=int,
        help="tokens of a sample (default: 2048); with --lengths: of the longest, or of a pack; not for vit-...",
    )
    parser.add_argument("--accumulation", default="1", help="micro-batches per step; comma-separated")
    parser.add_argument(
        "--lengths",
        default="",
        metavar="MEDIAN:SIGMA",
        help="samples have log-normal lengths, drawn by rank, step and micro-batch; tokens per second count no padding, and each "
        "window is timed from a common start until all ranks have done all its work",
    )
    parser.add_argument(
        "--packed", action="store_true", help="with --lengths: a micro-batch is one row of samples, up to --sequence"
    )
    parser.add_argument("--steps", type=int, default=8, help="per window")
    parser.add_argument("--windows", type=int, default=5)
    parser.add_argument("--warmup", type=int, default=4, help="steps before the first window")
    parser.add_argument("--repeats", type=int, default=1, help="rounds of all engines")
    parser.add_argument("--jitter-ms", default="0", help="each rank is late by U(0, this) in every step; comma-separated")
    parser.add_argument(
        "--compile",
        nargs="?",
        const="yes",
        default="no",
        choices=("no", "yes", "both"),
        help="torch.compile the forward of every layer",
    )
    parser.add_argument(
        "--no-host-sync",
        action="store_true",
        help="skip Hugging Face's search for packed sequences, for which the host waits in every forward",
    )
    parser.add_argument(
        "--bandwidth-limit",
        type=float,
        default=0.0,
        metavar="GB/S",
        help="hold each stream of hand-offs to this rate; cdp engines only",
    )
    parser.add_argument(
        "--build",
        default="auto",
        choices=("auto", "full", "sharded"),
        help="sharded: fsdp2 and zero3 never hold the whole model on a GPU, and start from other random weights; "
        "auto: sharded for llama-8b only",
    )
    parser.add_argument(
        "--threads", type=int, default=1, help="OMP_NUM_THREADS of each rank: what DeepSpeedCPUAdam steps with in ...-offload"
    )
    parser.add_argument("--trace", default="", help="also record a profiler trace of engines whose name starts so")
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument(
        "--layer-ms",
        type=float,
        default=0.0,
        help="with --cpu: each layer sleeps this long in its "
        "forward and twice as long in its backward, as if a device that shares no core with anybody computed it; shorter samples "
        "sleep less, in proportion",
    )
    parser.add_argument("--seconds", type=float, default=120, help="no engine may take longer than this")
    parser.add_argument("--topic", default="run", help="ends the name of the default for --out")
    parser.add_argument("--out", default="", help="default: benchmarks/results/DATE_HARDWARE_TOPIC")
    args = parser.parse_args(argv)
    names = args.engines.split(",")
    for name in names:
        if name not in ENGINES + REPLICAS and not re.fullmatch(
            r"cdp-(v1|v2|\d+)(-keep|-replicas)?(-min\d+)?(-unfused)?(-uncorrected)?(-nccl)?(-offload)?|" + RIVALS, name
        ):
            parser.error(
                f"--engines has {name!r}; allowed are {', '.join(ENGINES + REPLICAS)}, cdp-K with an integer K, "
                "cdp-...-replicas, cdp-...-keep, cdp-...-minS, cdp-...-unfused, cdp-...-uncorrected, cdp-...-nccl, "
                "cdp-...-offload, zero3-offload, zero3-deepcompile and fsdp2[-prefetch2][-symm or -zerocta][-keep]"
            )
    for model in args.models.split(","):
        if model not in SIZES:
            parser.error(f"--models has {model!r}; allowed are {', '.join(SIZES)}")
        given = {"--sequence": args.sequence is not None, "--lengths": args.lengths, "--build sharded": args.build == "sharded"}
        if model in IMAGES and (option := next((o for o in given if given[o]), None)):
            parser.error(f"{option} is for Llamas, and --models has {model!r}; use another call without it for that model")
    args.sequence = 2048 if args.sequence is None else args.sequence
    others = [n for n in names if not n.startswith("cdp-")]
    if args.bandwidth_limit and others:
        parser.error(f"--bandwidth-limit holds back hand-offs and {others[0]!r} has none; use it with cdp engines only")
    if "fsdp2-zerocta" in args.engines and ("-symm" in args.engines or "cdp-" in args.engines):
        parser.error("fsdp2-zerocta needs NCCL's symmetric memory, and fsdp2-symm and cdp engines CUDA's; use one call for each")
    if args.packed and not args.lengths:
        parser.error("--packed is given without --lengths; give MEDIAN:SIGMA too")
    if args.packed and (args.micro_batch != "1" or args.no_host_sync):
        parser.error(
            "--packed makes each micro-batch one row, and models must search it for samples; "
            "use --micro-batch 1 without --no-host-sync"
        )
    if args.lengths:
        try:
            lengths.parse(args.lengths, args.sequence, args.packed)
        except ValueError as error:
            parser.error(str(error))
    if args.bandwidth_limit < 0:
        parser.error(f"--bandwidth-limit is {args.bandwidth_limit:g}; it must be above 0 GB/s")
    if args.layer_ms and not args.cpu:
        parser.error(f"--layer-ms is {args.layer_ms:g}, but GPUs compute by themselves; use it with --cpu")
    if min(args.steps, args.windows, args.warmup, args.threads) < 1:
        parser.error("--steps, --windows, --warmup and --threads must each be at least 1")
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    ranks, hardware = args.ranks, "CPU"
    if not args.cpu:
        import torch

        ranks = ranks or torch.cuda.device_count()
        if not ranks:
            print("no GPU is here; use --cpu for a run that shows that everything works", file=sys.stderr)
            return 2
        hardware = next((w for w in torch.cuda.get_device_name().split() if w[0] in "ABHL" and w[-1].isdigit()), "GPU")
    ranks = ranks or 2
    out = Path(args.out or rows.RESULTS / f"{time.strftime('%Y-%m-%d')}_{ranks}x{hardware}_{args.topic}")
    out.mkdir(parents=True, exist_ok=True)
    try:
        rows.check(out / "results.csv")
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip() or "unknown"
    environment = {**os.environ, "OMP_NUM_THREADS": str(args.threads), **({"DS_ACCELERATOR": "cpu"} if args.cpu else {})}
    environment.setdefault("PYTHONWARNINGS", "ignore::FutureWarning")
    modes = {"no": (False,), "yes": (True,), "both": (False, True)}[args.compile]
    choices = (args.models, args.micro_batch, args.accumulation, args.jitter_ms)
    settings = list(itertools.product(*(c.split(",") for c in choices), modes))
    failed = 0
    for i, (model, micro_batch, accumulation, jitter, compiled) in enumerate(settings):
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            f"--nproc-per-node={ranks}",
            "-m",
            "benchmarks.rank",
            "--model",
            model,
            "--micro-batch",
            micro_batch,
            "--sequence",
            str(IMAGES[model].tokens if model in IMAGES else args.sequence),
            "--accumulation",
            accumulation,
            "--jitter-ms",
            jitter,
            "--out",
            str(out / "results.csv"),
            "--commit",
            os.environ.get("COMMIT", commit),
        ]
        for name in PASSED_ON:
            command += [f"--{name.replace('_', '-')}", str(getattr(args, name))]
        command += ["--compile"] * compiled + ["--cpu"] * args.cpu + ["--no-host-sync"] * args.no_host_sync
        command += ["--packed"] * args.packed
        if len(settings) > 1:
            print(
                f"setting {i + 1} of {len(settings)}: {model}, micro-batch {micro_batch} x {accumulation}, "
                + f"delays up to {jitter} ms"
                + ", compiled" * compiled,
                file=sys.stderr,
                flush=True,
            )
        failed |= subprocess.run(command, env=environment).returncode
    if (out / "results.csv").exists():
        (out / "table.md").write_text(report.tables(rows.read(out / "results.csv")))
        print((out / "table.md").read_text())
        _plot(out)
    return failed


def _plot(out: Path) -> None:
    try:
        from benchmarks import plots
    except ModuleNotFoundError as error:
        print(f"no plots: {error}; pip install 'deepspeed-cdp[bench]', then python -m benchmarks.plots {out}", file=sys.stderr)
        return
    for path in plots.draw(out):
        print(path)


if __name__ == "__main__":
    sys.exit(main())
