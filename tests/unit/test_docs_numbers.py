"""Measured tables in documents are made from recorded rows, settings from the code, and each plot lies in one folder."""

import importlib.util
import re
import subprocess
from pathlib import Path
from types import ModuleType

import pytest

pytest.importorskip("scipy")
from benchmarks import rows  # noqa: E402

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, DOCS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


NUMBERS = script("make_numbers")


def cells(table: str) -> list[dict[str, str]]:
    lines = [[c.strip() for c in line.strip("|").split("|")] for line in table.splitlines() if line.startswith("| ")]
    return [dict(zip(lines[0], line)) for line in lines[2:]]


@pytest.mark.parametrize("page", NUMBERS.PAGES, ids=lambda p: p.name)
def test_tables_are_what_the_rows_say(page: Path) -> None:
    text = page.read_text()
    assert NUMBERS.BLOCK.search(text)
    assert NUMBERS.render(text, page) == text, f"{page.name} is stale: run python docs/make_numbers.py"


def test_table_1_is_what_its_rows_say() -> None:
    from benchmarks import table1

    text = table1.PAGE.read_text()
    assert len(table1.BLOCK.findall(text)) == 2
    assert table1.render(text) == text, "docs/table1.md is stale: run python -m benchmarks.table1 --write"


def test_promises_name_tests_that_exist() -> None:
    named = set(re.findall(r"`(tests/[^`]*)`", (DOCS / "promises.md").read_text()))
    assert len(named) > 30 and not [name for name in named if not (ROOT / name).exists()]


@pytest.mark.parametrize(
    "page", [ROOT / "README.md", DOCS / "performance.md", DOCS / "performance-other.md"], ids=lambda p: p.name
)
def test_measured_figures_are_in_generated_tables_only(page: Path) -> None:
    prose = re.sub(r"```.*?```", "", NUMBERS.BLOCK.sub("", page.read_text()), flags=re.DOTALL)
    assert not re.findall(r"[^\n]*\d ?(?:ms|GiB|GB/s|tokens)\b[^\n]*", prose)


def test_settings_page_is_current() -> None:
    make = script("make_settings")
    text = make.PAGE.read_text()
    assert text.count("<!-- keys -->") == 2 and "`gradient_accumulation_fusion`" in text
    assert make.render(text) == text, "docs/settings.md is stale: run python docs/make_settings.py"


def test_speed_and_memory_come_from_the_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = rows.RESULTS / "2026-11-28_4xH200_targets"
    (tmp_path / "run").mkdir()
    text = (run / "results.csv").read_text()
    (tmp_path / "run" / "results.csv").write_text(text)
    monkeypatch.setattr(rows, "RESULTS", tmp_path)
    late, plain = (
        next(
            c for c in cells(NUMBERS.speed(["run, llama-1.3b, micro-batch 4"], DOCS / "x.md")) if ("late" in c["setting"]) == late
        )
        for late in (True, False)
    )
    assert late["of passes alone"] != plain["of passes alone"]
    of_engine = {}
    for r in rows.read(tmp_path / "run" / "results.csv"):
        if (r["model"], r["micro_batch"], r["jitter_ms"], r["bandwidth_gb_s"]) == ("llama-1.3b", "4", "0.0", ""):
            of_engine.setdefault(r["engine"], []).append(float(r["step_ms"]))
    middle = {name: sorted(times)[len(times) // 2] for name, times in of_engine.items()}
    assert plain["x FSDP2"] == f"{middle['fsdp2'] / middle['cdp-v2']:.2f}"
    assert plain["x ZeRO-3"] == f"{middle['zero3'] / middle['cdp-v2']:.2f}"
    assert plain["of passes alone"] == f"{100 * middle['compute'] / middle['cdp-v2']:.1f} %"
    before = NUMBERS.memory(["run, llama-8b"], DOCS / "x.md")
    (tmp_path / "run" / "results.csv").write_text(text.replace("63.8", "64.8"))
    assert NUMBERS.memory(["run, llama-8b"], DOCS / "x.md") != before


def test_printed_losses_count_beside_rows_and_once() -> None:
    runs = ["2026-11-29_2xH200_predictions", "2026-11-29_4xH200_predictions", "2026-11-30_2xH200_weights"]
    found = cells(NUMBERS.warmed_up(runs, DOCS / "x.md"))
    muon = {c["ranks"]: c["`extrapolate`"] for c in found if c["optimizer"] == "Muon"}
    assert muon == {"4": "**+0.20 ± 0.84** (3)", "8": "**+0.38 ± 0.83** (4)"}
    small = next(c for c in found if (c["parameters"], c["optimizer"], c["ranks"]) == ("3.4 million", "AdamW", "8"))
    assert small["w = 2"].endswith(" (3)") and small["at most 1 %"] == "**missed**"


@pytest.mark.parametrize(
    "text, told",
    [
        ("<!-- rows: speed; nowhere -->\n<!-- end of rows -->", "nowhere/results.csv does not exist"),
        ("<!-- rows: speed; RUN, llama-2b -->\n<!-- end of rows -->", "no setting's heading has these parts"),
        ("<!-- rows: engines; RUN, only fsdp3 -->\n<!-- end of rows -->", "an engine did not run"),
        ("<!-- rows: pace; RUN -->\n<!-- end of rows -->", "allowed kinds are speed"),
        ("<!-- rows: speed; RUN -->\n", "1 blocks of rows begin and 0 end"),
        ("<!-- end of rows -->\n", "0 blocks of rows begin and 0 end"),
    ],
)
def test_wrong_markers_are_told(text: str, told: str) -> None:
    with pytest.raises(ValueError, match=re.escape(told)):
        NUMBERS.render(text.replace("RUN", "2026-11-28_4xH200_targets"), DOCS / "x.md")


def test_each_image_lies_in_one_folder_and_a_document_names_it() -> None:
    if (ROOT / ".git").exists():
        command = ["git", "ls-files", "benchmarks/results"]
        kept = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
        assert kept and not [f for f in kept if f.endswith((".png", ".svg", ".gz"))], "commit rows; plots are drawn from them"
    pages = "".join(p.read_text() for p in DOCS.rglob("*.md"))
    for image in (DOCS / "images").iterdir():
        assert f"images/{image.name}" in pages, f"no document names {image.name}"
