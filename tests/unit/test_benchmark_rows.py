"""Rows, tables, plots and documents of the benchmarks, from recorded and made-up rows."""

import csv
import re

import pytest

from benchmarks import plots, report, rows, run

OLD = rows.FIELDS[:23]  # the columns of the first recorded runs


def row(engine: str, step_ms: float, window: int = 0, **others) -> dict:
    values = {
        "engine": engine,
        "model": "llama-tiny",
        "ranks": 2,
        "micro_batch": 1,
        "sequence": 2048,
        "compiled": False,
        "jitter_ms": 0.0,
        "repeat": 0,
        "window": window,
        "step_ms": step_ms,
        "p20_ms": step_ms - 1,
        "p80_ms": step_ms + 1,
        "p99_ms": step_ms + 9,
        "tokens_per_s_per_gpu": 2048 / step_ms * 1000,
        "mfu": "",
        "peak_gib": 3.0,
        "received_mib_per_step": 7.0,
        "loss": 5.5,
        "device": "NVIDIA H100 80GB HBM3",
        "torch": "2.13.0",
        "deepspeed": "0.19.8",
        "commit": "abc",
        "time": "2026-11-28T00:00:00",
        "steady_gib": 2.0,
        "host_sync": True,
        "bandwidth_gb_s": "",
        "build": "full",
        "python": "3.11.2",
        "transformers": "5.24.0",
        "accumulation": 1,
    }
    return {**values, **others}


@pytest.fixture
def some(tmp_path):
    """Two engines and three windows, then one more setting."""
    made = [row(name, ms + w, w) for name, ms in (("compute", 100), ("fsdp2", 300), ("cdp-v2", 200)) for w in range(3)]
    made += [row("cdp-v2", 400, jitter_ms=50.0)]
    rows.write(tmp_path / "results.csv", made)
    return tmp_path


def body(table: str) -> dict[str, dict[str, str]]:
    """The cells of a table by first cell and heading."""
    lines = [[c.strip() for c in line.strip("|").split("|")] for line in table.splitlines() if line.startswith("| ")]
    return {cells[0]: dict(zip(lines[0], cells)) for cells in lines[1:]}


def test_table_has_medians_spread_and_ratios(some):
    first, second = re.split("(?=### )", report.tables(rows.read(some / "results.csv")))[1:]
    cells = body(first)
    assert list(cells) == ["compute", "fsdp2", "cdp-v2"]
    assert cells["cdp-v2"]["ms per step"] == "201.0"
    assert cells["cdp-v2"]["windows: lowest to highest"] == "200.0 to 202.0 (3)"
    assert cells["cdp-v2"]["p20, p80, p99 of steps"] == "200, 202, 210"
    assert cells["cdp-v2"]["of compute-only speed"] == f"{101 / 201:.3f}"
    assert cells["cdp-v2"]["x fsdp2"] == f"{301 / 201:.2f}" and cells["fsdp2"]["x fsdp2"] == "1.00"
    assert "x zero3-leaf" not in cells["cdp-v2"], "it was not run"
    assert cells["cdp-v2"]["peak GiB"] == "3.00" and cells["cdp-v2"]["GiB after warm-up"] == "2.00"
    assert "MFU" not in cells["cdp-v2"], "it is not known"
    assert second.startswith("### llama-tiny, micro-batch 1, 2 x NVIDIA H100 80GB HBM3, each rank late by U(0, 50) ms a step")
    assert "of compute-only speed" not in body(second)["cdp-v2"]
    assert "python 3.11.2, torch 2.13.0, deepspeed 0.19.8, transformers 5.24.0, commit abc" in first


def test_the_fastest_variant_of_fsdp2_is_the_rival_and_a_rival_that_wins_is_told():
    def table(**ms: float) -> str:
        made = [row(name.replace("_", "-"), t) for name, t in ms.items()]
        return report.tables([{f: str(r.get(f, rows.SINCE.get(f, ""))) for f in rows.FIELDS} for r in made])

    slow = table(compute=90, fsdp2=300, fsdp2_prefetch2=240, fsdp2_keep=260, cdp_v2=200)
    assert body(slow)["cdp-v2"]["x fsdp2-prefetch2"] == "1.20" and "x fsdp2 " not in slow and "wins" not in slow
    fast = table(compute=90, fsdp2=300, fsdp2_prefetch2_symm=160, cdp_v2=200, cdp_v1=210)
    assert "A rival wins here: `cdp-v2` takes 25.0 % longer than `fsdp2-prefetch2-symm`." in fast


def test_unlike_lengths_are_summed_up_over_all_windows(tmp_path):
    """Windows have unlike work: mean times, and all tokens by all seconds."""
    unlike = {"lengths": "2048:1 packed", "sequence": 8192, "accumulation": 4}
    made = [
        row(name, ms, w, tokens_by_rank=f"{t} {t}", tokens_per_s_per_gpu=t / (8 * ms) * 1000, **unlike)
        for name, each in (("fsdp2", ((200, 1000), (100, 900), (900, 5000))), ("cdp-v2", ((100, 1000), (90, 900), (500, 5000))))
        for w, (ms, t) in enumerate(each)
    ]
    rows.write(tmp_path / "results.csv", made)
    text = report.tables(rows.read(tmp_path / "results.csv"))
    assert "4 micro-batches a step, log-normal lengths of median 2048 and sigma 1 up to 8192 (packed)\n" in text
    cells = body(text)
    assert cells["cdp-v2"]["ms per step"] == "230.0" and cells["cdp-v2"]["x fsdp2"] == f"{1200 / 690:.2f}"
    assert cells["cdp-v2"]["tokens/s/GPU"] == f"{6900 / (8 * 0.69):.0f}"


def test_received_bytes_of_others_are_unknown_not_zero(some):
    cells = body(report.tables(rows.read(some / "results.csv")[:9]))
    assert cells["fsdp2"]["MiB received per step"] == "" and cells["cdp-v2"]["MiB received per step"] == "7"


def test_old_files_are_read(tmp_path):
    path = tmp_path / "results.csv"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, OLD, extrasaction="ignore")
        writer.writeheader()
        writer.writerow(row("cdp-v2", 10))
    (read,) = rows.read(path)
    assert read["host_sync"] == "True" and read["transformers"] == "" and set(read) == set(rows.FIELDS)
    assert "transformers" not in report.tables([read])
    with pytest.raises(ValueError, match="results.csv with the columns of another version; choose an empty folder"):
        rows.write(path, [row("cdp-v2", 10)])
    path.write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match="no column 'engine'"):
        rows.read(path)


def test_every_recorded_run_is_readable():
    recorded = sorted(rows.RESULTS.glob("*/results.csv"))
    assert recorded
    for path in recorded:
        assert path.with_name("table.md").read_text() == report.tables(rows.read(path)), "python -m benchmarks.report DIR"


def test_plots(some, tmp_path):
    written = plots.draw(some, tmp_path / "images", "x_")
    assert sorted(p.name for p in written) == [f"x_{w}.{k}" for w in ("delay", "memory", "time") for k in ("png", "svg")]
    assert all(p.read_bytes().startswith(b"\x89PNG") for p in written if p.suffix == ".png")
    drawn = (tmp_path / "images" / "x_time.svg").read_text()
    for word in ("llama-tiny", "micro-batch 1", "fsdp2", "cdp-v2", f">{201 / 101:.2f}<"):
        assert word in drawn, word
    first = {p.name: p.read_bytes() for p in written}
    assert {p.name: p.read_bytes() for p in plots.draw(some, tmp_path / "images", "x_")} == first, "the same rows, the same files"


@pytest.mark.parametrize(
    "arguments, told",
    [
        (["--engines", "cdp-v2,fsdp3"], "--engines has 'fsdp3'; allowed are compute"),
        (["--engines", "cdp-v2,fsdp2", "--bandwidth-limit", "25"], "--bandwidth-limit holds back hand-offs and 'fsdp2' has none"),
        (["--engines", "cdp-v2", "--bandwidth-limit", "-1"], "--bandwidth-limit is -1; it must be above 0"),
        (["--models", "llama-1.3b,llama-2b"], "--models has 'llama-2b'; allowed are llama-tiny"),
        (
            ["--models", "llama-1.3b,vit-200", "--sequence", "64"],
            "--sequence is for Llamas, and --models has 'vit-200'; use another",
        ),
        (["--models", "vit-200", "--lengths", "99:1"], "--lengths is for Llamas, and --models has 'vit-200'"),
        (["--models", "vit-tiny", "--build", "sharded"], "--build sharded is for Llamas, and --models has 'vit-tiny'"),
        (["--layer-ms", "5"], "--layer-ms is 5, but GPUs compute by themselves; use it with --cpu"),
        (["--windows", "0"], "must each be at least 1"),
        (["--engines", "fsdp2-prefetch3"], "--engines has 'fsdp2-prefetch3'; allowed are compute"),
        (["--engines", "fsdp2-zerocta,cdp-v2"], "use one call for each"),
        (["--lengths", "2048"], "--lengths is '2048'; give MEDIAN:SIGMA"),
        (["--lengths", "4096:1"], "--lengths is '4096:1' with --sequence 2048; the median must be above 0 and at most"),
        (["--packed"], "--packed is given without --lengths"),
        (["--lengths", "99:1", "--packed", "--micro-batch", "4"], "use --micro-batch 1 without --no-host-sync"),
    ],
)
def test_wrong_command_lines_are_told_in_a_sentence(arguments, told, capsys):
    with pytest.raises(SystemExit) as ended:
        run.parse(arguments)
    assert ended.value.code == 2 and told in capsys.readouterr().err
