"""``deepspeed-cdp memory``: activation memory over a step, of one worker, and of N at once and in turn (Figure 4)."""

import argparse
import csv
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from deepspeed_cdp.analysis.activations import Profile, track
from deepspeed_cdp.cli import models
from deepspeed_cdp.cli.output import UserError, columns, human, several, show, whole
from deepspeed_cdp.model.discover import Example

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def add(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    models.add(parser)
    parser.add_argument("--workers", type=several(whole), default=[4, 8, 32], metavar="N,...", help="default: 4,8,32")
    parser.add_argument("--dtype", choices=DTYPES, default="fp32", help="of parameters and floating-point inputs; default: fp32")
    parser.add_argument(
        "--device",
        default="meta",
        help="meta (default): nothing is computed; cpu or cuda: a real forward and backward with random weights",
    )
    parser.add_argument(
        "--clock",
        choices=("flops", "seconds"),
        default="flops",
        help="unit of a step's time; default: flops, the same on every machine",
    )
    parser.add_argument("--out", metavar="FILE", help="write the figure to FILE.png and .svg, and its rows to FILE.csv")
    parser.add_argument("--title", help="of the figure; default: the model's class")


def run(args: argparse.Namespace) -> int:
    """Track, extrapolate, print, draw."""
    loaded = models.load(args.model, DTYPES[args.dtype], args.micro_batch or 1, args.sequence, args.class_name)
    module, example = on_device(loaded, args.device)
    try:
        profile = track(module, example, args.clock)
    except ValueError:
        raise
    except Exception as error:  # a user's model may raise anything
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(f"a forward and backward of {loaded.name} fails ({reason[:200]}); give a batch that works") from None
    rows = [
        {"workers": n, "together": profile.together(n), "in_turn": max(profile.in_turn(n)), "saving": profile.saving(n)}
        for n in args.workers
    ]
    result: dict[str, Any] = {
        "model": loaded.name,
        "batch": loaded.batch,
        "dtype": args.dtype,
        "device": args.device,
        "clock": profile.clock,
        "total": profile.total,
        "peak": profile.peak,
        "forward_ends": profile.turn,
        "workers": rows,
    }
    lines = [
        f"{loaded.name}, micro-batch {loaded.batch}, {args.dtype}, on {args.device}; time in {profile.clock}, the forward "
        f"takes {100 * profile.turn:.0f} %",
        f"one worker: {human(profile.peak)} at its peak",
        "",
    ]
    lines += columns(
        [("workers", "together", "in turn", "less")]
        + [(r["workers"], human(r["together"]), human(r["in_turn"]), f"{100 * r['saving']:.1f} %") for r in rows]
    )
    if args.out:
        files = write(args.out, profile, rows, args.title or f"{loaded.name}, {loaded.batch}")
        result["files"] = files
        lines += ["", "written: " + ", ".join(files)]
    show(result, "\n".join(lines), args.json)
    return 0


def on_device(loaded: models.Loaded, device: str) -> tuple[torch.nn.Module, Example]:
    """The model and its batch on a device, with random values.

    Raises:
        UserError: the device cannot be used.
    """
    if device == "meta":
        return loaded.module, loaded.example
    try:
        module = loaded.module.to_empty(device=device)
    except (RuntimeError, AssertionError) as error:
        raise UserError(f"--device is {device!r}, which cannot be used ({str(error).splitlines()[0]}); use meta or cpu") from None
    generator = torch.Generator(device).manual_seed(0)
    with torch.no_grad():
        for t in (*module.parameters(), *module.buffers()):
            if t.is_floating_point():
                t.normal_(0, 0.02, generator=generator).abs_()
            else:
                t.zero_()
    args, kwargs = tree_map_only(
        torch.Tensor,
        lambda t: torch.zeros(t.shape, dtype=t.dtype, device=device),
        (tuple(loaded.example.args), dict(loaded.example.kwargs)),
    )
    return module, Example(args, kwargs)


def write(out: str, profile: Profile, rows: list[dict[str, Any]], title: str) -> list[str]:
    """Write the figure, and the rows of its curve."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt
    except ImportError:
        raise UserError("--out needs matplotlib; install it, or leave --out out") from None
    base = Path(out)
    base = base.with_suffix("") if base.suffix in (".png", ".svg", ".csv") else base
    base.parent.mkdir(parents=True, exist_ok=True)
    scale, unit = (2**30, "GiB") if rows and max(r["together"] for r in rows) >= 2**30 else (2**20, "MiB")
    with plt.rc_context({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "svg.hashsalt": "deepspeed-cdp"}):
        figure, panels = plt.subplots(1, 1 + len(rows), figsize=(3.1 * (1 + len(rows)), 3.0), constrained_layout=True)
        figure.suptitle(title)
        panels = [panels] if not rows else list(panels)
        one = panels[0]
        one.step([100 * t for t in profile.times], [b / 2**20 for b in profile.live], where="post", color="#555555", lw=1.4)
        one.axvline(100 * profile.turn, color="#bbbbbb", lw=0.8, ls=":")
        one.text(
            100 * profile.turn + 2,
            0.03,
            "backward begins",
            fontsize=7,
            color="#777777",
            va="bottom",
            transform=one.get_xaxis_transform(),
        )
        one.set(title="one worker", xlabel=f"% of a step ({profile.clock})", ylabel="live activations, MiB", xlim=(0, 100))
        one.set_ylim(bottom=0)
        for panel, row in zip(panels[1:], rows):
            n, points = row["workers"], 512
            xs = [i / points for i in range(points + 1)]
            panel.plot(
                [100 * x for x in xs],
                [n * profile.at(min(x, 1 - 1e-9)) / scale for x in xs],
                color="#c44e52",
                lw=1.4,
                label="together",
            )
            panel.plot(
                [100 * x for x in xs],
                [sum(profile.at(x + i / n) for i in range(n)) / scale for x in xs],
                color="#4c72b0",
                lw=1.4,
                label="in turn",
            )
            panel.set(
                title=f"{n} workers: {100 * row['saving']:.0f} % less",
                xlabel=f"% of a step ({profile.clock})",
                xlim=(0, 100),
                ylabel=unit,
            )
            panel.set_ylim(0, 1.15 * row["together"] / scale)
            panel.legend(frameon=False, fontsize=8, loc="upper right", ncols=2, borderaxespad=0)
        for suffix in (".png", ".svg"):
            figure.savefig(base.with_suffix(suffix), dpi=150, metadata={"Date": None} if suffix == ".svg" else None)
        plt.close(figure)
    with base.with_suffix(".csv").open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("fraction", "live_bytes"))
        writer.writerows((f"{t:.6f}", b) for t, b in zip(profile.times, profile.live))
    return [str(base.with_suffix(s)) for s in (".png", ".svg", ".csv")]
