"""Converts checkpoints: ``python -m deepspeed_cdp.cli.convert to-fp32|to-zero3|to-universal|to-cyclic|check DIR [OUT] [...]``.

DIR is the folder of ``save_checkpoint``, of the cyclic engine or of stock ZeRO-3, or holds a universal checkpoint; its files tell
which. Exit code 0: done; 1: the checkpoint cannot be read or written; 2: wrong arguments.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from typing import Any

import torch

from deepspeed_cdp.checkpoint import export
from deepspeed_cdp.checkpoint.deepspeed_formats import open_checkpoint
from deepspeed_cdp.checkpoint.files import check_tag, existing_folder, read_latest, write_text
from deepspeed_cdp.checkpoint.format import CheckpointReader
from deepspeed_cdp.cli.output import size, whole
from deepspeed_cdp.errors import CheckpointError


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: str, tag: str | None = None, exclude_frozen_parameters: bool = False
) -> dict[str, torch.Tensor]:
    """As DeepSpeed's function of this name, for all supported formats: the whole fp32 state dict, on the CPU.

    Raises:
        CheckpointError: there is no such checkpoint, or it is damaged.
    """
    with _open(checkpoint_dir, tag) as stored:
        return {name: read() for name, (_, read) in export.weights(stored, exclude_frozen_parameters).items()}


def _open(checkpoint_dir: str, tag: str | None) -> CheckpointReader:
    """The checkpoint of a tag, or the latest one, with all files checked."""
    if not os.path.isdir(checkpoint_dir):
        raise CheckpointError(f"{checkpoint_dir} is not a folder")
    tag = check_tag(tag) if tag else read_latest(checkpoint_dir) or read_latest(checkpoint_dir, "latest_universal")
    if tag is None:
        raise CheckpointError(f"{os.path.join(checkpoint_dir, 'latest')} is missing; pass --tag with a folder in it")
    stored = open_checkpoint(existing_folder(os.path.join(checkpoint_dir, tag)))
    stored.tag = tag
    stored.verify(0, 1, list(stored.trained))
    return stored


def _shard(text: str) -> int:
    nbytes = size(text)
    if not nbytes:
        raise argparse.ArgumentTypeError(f"{text!r} is no size for a file; write one above 0, such as 5GB")
    return nbytes


def _parser(name: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        name,
        description="Converts checkpoints of the cyclic engine, "
        "of ZeRO-3 and universal ones; which of them DIR holds is found from its files.",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, text: str, writes: bool = True, **more: Any) -> argparse.ArgumentParser:
        one = commands.add_parser(name, help=text, description=text, **more)
        one.add_argument("dir", metavar="DIR", help="the folder that save_checkpoint was given")
        if writes:
            one.add_argument("out", metavar="OUT", help="the folder to write")
            one.add_argument(
                "--overwrite",
                action="store_true",
                help="replace OUT/TAG as a whole (to-fp32: OUT, if it holds nothing but exported weights)",
            )
        one.add_argument("-t", "--tag", help="the checkpoint in DIR; default: what DIR/latest names")
        one.add_argument("--json", action="store_true", help="print the result, or the error, as one line of JSON")
        one.add_argument("--quiet", action="store_true", help="no progress")
        return one

    fp32 = command("to-fp32", "the weights in fp32, as safetensors, whole or in several files with an index")
    fp32.add_argument(
        "--max-shard-size", "--max_shard_size", type=_shard, default=export.DEFAULT_SHARD_BYTES, help="default: 5GB"
    )
    fp32.add_argument(
        "--exclude-frozen-parameters",
        "--exclude_frozen_parameters",
        action="store_true",
        help="leave out parameters that were not trained",
    )
    fp32.add_argument("--safe-serialization", "--safe_serialization", action="store_true", help="always so")
    zero3 = command("to-zero3", "a checkpoint that stock ZeRO-3 loads, for a number of ranks: OUT/TAG and OUT/latest")
    zero3.add_argument("--ranks", type=whole, required=True, help="how many ranks will load it")
    zero3.add_argument(
        "--sub-group-size",
        type=whole,
        default=10**9,
        help="zero_optimization.sub_group_size of that run; default: DeepSpeed's, 1e9",
    )
    command("to-universal", "a universal checkpoint, for ZeRO-3 with any number of ranks: OUT/TAG and OUT/latest_universal")
    cyclic = command("to-cyclic", "a checkpoint of the cyclic engine: OUT/TAG and OUT/latest", aliases=["from-zero3"])
    cyclic.add_argument("--max-shard-size", type=_shard, default=export.DEFAULT_SHARD_BYTES, help="default: 5GB")
    command("check", "read every file and list its contents", writes=False)
    return parser


def _convert(stored: CheckpointReader, args: argparse.Namespace, tick: Callable[[str], None]) -> dict[str, Any]:
    out, tag = getattr(args, "out", ""), stored.tag
    if args.command == "to-fp32":
        return export.write_fp32(stored, out, args.max_shard_size, args.exclude_frozen_parameters, args.overwrite, tick)
    if args.command == "to-zero3":
        result = export.write_zero3(stored, os.path.join(out, tag), args.ranks, args.sub_group_size, args.overwrite, tick)
    elif args.command == "to-universal":
        result = export.write_universal(stored, os.path.join(out, tag), args.overwrite, tick)
        write_text(os.path.join(out, "latest_universal"), tag)
        return result
    elif args.command == "check":
        return {
            "parameters": len(stored.trained) + len(stored.frozen),
            "frozen": len(stored.frozen),
            "buffers": len(stored.buffers),
            "ranks": stored.ranks,
            "global_steps": stored.counters.get("global_steps"),
            "elements": sum(map(_numel, (*stored.trained.values(), *stored.frozen.values()))),
        }
    else:
        result = export.write_cyclic(stored, os.path.join(out, tag), args.max_shard_size, args.overwrite, tick)
    write_text(os.path.join(out, "latest"), tag)
    return result


def _numel(kind: Any) -> int:
    return int(torch.Size(kind.shape).numel())


class _Progress:
    """Progress in one line of a terminal, after three seconds."""

    def __init__(self, total: int, on: bool):
        self.total, self.done, self.begun, self.on = total, 0, time.monotonic(), on and sys.stderr.isatty()
        self.shown = False

    def __call__(self, name: str) -> None:
        self.done += 1
        if self.on and time.monotonic() - self.begun > 3:
            self.shown = True
            print(f"\r{self.done}/{self.total} {name[:90]:90}", end="", file=sys.stderr, flush=True)

    def end(self) -> None:
        if self.shown:
            print(file=sys.stderr)


def main(argv: Sequence[str] | None = None, name: str = "python -m deepspeed_cdp.cli.convert") -> int:
    """The command line, called ``name`` in its help; returns its exit code."""
    args = _parser(name).parse_args(argv)
    try:
        with redirect_stdout(sys.stderr):  # DeepSpeed prints when it is imported; stdout is for the result
            with _open(args.dir, args.tag) as stored:
                progress = _Progress(len(stored.trained) + len(stored.frozen), not (args.quiet or args.json))
                try:
                    result = {"format": stored.format, "tag": stored.tag, **_convert(stored, args, progress)}
                finally:
                    progress.end()
    except (CheckpointError, ValueError, OSError) as error:
        text = str(error) or type(error).__name__
        print(
            json.dumps({"ok": False, "error": text}) if args.json else f"error: {text}",
            file=sys.stdout if args.json else sys.stderr,
        )
        return 1
    if args.json:
        print(json.dumps({"ok": True, "command": args.command, **result}))
        return 0
    for warning in result.pop("warnings", ()):
        print(f"warning: {warning}", file=sys.stderr)
    where = f" -> {args.out}" if hasattr(args, "out") else ""
    print(f"{args.dir}{where}: " + ", ".join(f"{k} {v:,}" if isinstance(v, int) else f"{k} {v}" for k, v in result.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
