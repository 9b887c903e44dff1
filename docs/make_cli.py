"""Writes what docs/cli.md shows: ``python docs/make_cli.py`` (from anywhere; takes a minute).

A line ``<!-- run: deepspeed-cdp ... -->`` is followed by a code block with what that command prints, ``<!-- table: measured -->``
by the table of benchmarks/predict.py. Commands with ``--out`` also write their figures. tests/unit/test_docs_cli.py checks that
the blocks are what the commands print today.
"""

import contextlib
import csv
import io
import json
import os
import re
import shlex
import shutil
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "cli.md"
BLOCK = re.compile(r"<!-- run: deepspeed-cdp (.*?) -->\n```\n.*?```\n", re.DOTALL)
TABLE = re.compile(r"<!-- table: measured -->\n\n.*?\n\n", re.DOTALL)
MODELS = {"resnet-50": "ResNet-50", "vit-b-16": "ViT-B/16", "vit-b-16-eager": "ViT-B/16, attention not fused"}
WORKERS = (4, 8, 32)


def said(command: str, draw: bool) -> str:
    """What a command prints; without ``draw`` it writes no files, and says nothing of them."""
    from deepspeed_cdp.cli.main import main

    argv = shlex.split(command)
    if not draw and "--out" in argv:
        at = argv.index("--out")
        end = next((i for i in range(at + 1, len(argv)) if argv[i].startswith("--")), len(argv))
        del argv[at:end]
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        code = main(argv)
    assert code == 0, f"{command}: exit code {code}"
    return re.sub(r"\n\nwritten: [^\n]*", "", text.getvalue())


def render(page: str, draw: bool = False, measured: bool = True) -> str:
    """The page with every block anew."""
    page = BLOCK.sub(lambda m: f"<!-- run: deepspeed-cdp {m[1]} -->\n```\n$ deepspeed-cdp {m[1]}\n{said(m[1], draw)}```\n", page)
    if measured:
        from benchmarks.predict import table

        page = TABLE.sub(lambda m: f"<!-- table: measured -->\n\n{table()}\n\n", page)
    return page


def figures() -> None:
    """Figure 4: the pictures that the page shows under docs/images, curves and totals under docs/results/memory."""
    from deepspeed_cdp.cli.main import main

    results, totals = ROOT / "docs" / "results" / "memory", []
    for name, title in MODELS.items():
        with tempfile.TemporaryDirectory() as folder:
            text = io.StringIO()
            with contextlib.redirect_stdout(text):
                main(
                    [
                        "memory",
                        "--model",
                        f"hf:{results / name}.json",
                        "--workers",
                        ",".join(map(str, WORKERS)),
                        "--json",
                        "--out",
                        f"{folder}/{name}",
                        "--title",
                        f"{title}, one image of 224 x 224 per worker, fp32",
                    ]
                )
            if f"images/memory-{name}.png" in PAGE.read_text():
                shutil.copy(f"{folder}/{name}.png", ROOT / "docs" / "images" / f"memory-{name}.png")
            shutil.copy(f"{folder}/{name}.csv", results / f"{name}.csv")
        found = json.loads(text.getvalue())
        totals += [
            (title, found["clock"], r["workers"], r["together"], r["in_turn"], f"{r['saving']:.4f}") for r in found["workers"]
        ]
    with (results / "workers.csv").open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerows([("model", "clock", "workers", "together_bytes", "in_turn_bytes", "saving"), *totals])


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    os.chdir(ROOT)
    PAGE.write_text(render(PAGE.read_text(), draw=True))
    figures()
