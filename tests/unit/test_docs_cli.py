"""docs/cli.md shows what the commands print today."""

import importlib.util
from pathlib import Path

import pytest

pytest.importorskip("transformers")
ROOT = Path(__file__).parents[2]


def script():
    spec = importlib.util.spec_from_file_location("make_cli", ROOT / "docs" / "make_cli.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_every_block_is_current(monkeypatch):
    monkeypatch.chdir(ROOT)
    make = script()
    page = make.PAGE.read_text()
    assert len(make.BLOCK.findall(page)) >= 6 and make.TABLE.search(page)
    assert make.render(page) == page, "docs/cli.md is stale: run python docs/make_cli.py"


def test_files_that_the_page_names_are_there():
    import re

    page = (ROOT / "docs" / "cli.md").read_text()
    for target in re.findall(r"\]\(([^)#]+)", page):
        if not target.startswith("http"):
            assert (ROOT / "docs" / target).exists(), target


def test_rows_of_figure_4_are_committed():
    rows = (ROOT / "docs" / "results" / "memory" / "workers.csv").read_text().splitlines()
    assert len(rows) == 1 + 3 * 3
    resnet = next(r for r in rows if r.startswith("ResNet-50,flops,32"))
    assert 0.28 < float(resnet.rpartition(",")[2]) < 0.32
