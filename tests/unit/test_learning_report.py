"""The statistics of the learning experiments, on numbers whose answers are known."""

import csv
import math

import pytest

pytest.importorskip("scipy")
from scipy import stats  # noqa: E402

from benchmarks.learning_report import (  # noqa: E402
    compare,
    draw,
    finished,
    into_document,
    last,
    read,
    settings,
    statement,
    tables,
)


def rows(
    rule: str, values: list[float], dataset: str = "digits", optimizer: str = "sgd", correction: str = "none", ranks: str = "4"
) -> list[dict[str, str]]:
    """One evaluation at the start and one at the end, per seed."""
    common = {
        "dataset": dataset,
        "optimizer": optimizer,
        "rate": "1",
        "rule": rule,
        "correction": correction,
        "steps": "10",
        "test_accuracy": "0.5",
        "train_loss": "1",
        "ranks": ranks,
        "micro_batch": "8",
        "parameters": "5",
        "graph": "True",
        "device": "d",
        "torch": "t",
        "python": "p",
        "commit": "c",
        "data": "x",
    }
    return [
        {**common, "seed": str(seed), "step": step, "test_loss": str(value if step == "10" else 9.0)}
        for seed, value in enumerate(values)
        for step in ("0", "10")
    ]


DP = [1.0, 2.0, 3.0, 4.0]
WORSE = [1.5, 2.6, 3.4, 4.5]
ALIKE = [1.1, 1.9, 3.1, 3.9]


def test_pairs_are_tested_as_pairs() -> None:
    """The seeds' spread, ten times the difference, does not hide it."""
    engines = settings(rows("cdp-v2", ALIKE) + rows("dp", DP) + rows("cdp-v1", WORSE))["digits", "sgd", "4", "1"]
    assert list(engines) == ["dp", "cdp-v1", "cdp-v2"]
    v1, v2 = compare(engines, "test_loss")
    expected = stats.ttest_rel(WORSE, DP)
    assert v1.p == pytest.approx(expected.pvalue) and v1.mean == pytest.approx(0.5) and v1.pairs == 4
    assert v1.interval == pytest.approx(tuple(expected.confidence_interval()))
    assert v1.holm == pytest.approx(2 * v1.p) and v2.holm == pytest.approx(v2.p)
    assert v1.interval[0] < v1.bootstrap[0] <= v1.mean <= v1.bootstrap[1] < v1.interval[1]
    assert statement(v1, "test_loss", 2.5).startswith("`cdp-v1` differs from `dp`: test loss +0.5000 (+20.00% of dp's)")
    assert statement(v2, "test_loss", 2.5).startswith("No difference of `cdp-v2` from `dp` is shown")
    same = compare(settings(rows("dp", DP) + rows("cdp-v1", DP))["digits", "sgd", "4", "1"], "test_loss")[0]
    assert same.mean == 0 and same.p == 1 and not math.isnan(same.holm)


def test_what_would_have_been_seen_is_about_right() -> None:
    """Drawn with the difference that is called visible, four experiments out of five find one."""
    import numpy as np

    rng, count = np.random.default_rng(5), 10
    found = 0
    visible = (stats.t(count - 1).ppf(0.975) + stats.t(count - 1).ppf(0.8)) / math.sqrt(count)
    for _ in range(400):
        found += stats.ttest_1samp(rng.normal(visible, 1.0, count), 0).pvalue < 0.05
    assert 0.72 < found / 400 < 0.88


def test_only_common_seeds_and_finished_cases_count() -> None:
    engines = settings(rows("dp", DP) + rows("cdp-v1", WORSE[:3]))["digits", "sgd", "4", "1"]
    assert compare(engines, "test_loss")[0].pairs == 3
    assert compare(settings(rows("dp", DP[:1]) + rows("cdp-v1", WORSE))["digits", "sgd", "4", "1"], "test_loss") == []
    assert compare(settings(rows("cdp-v1", WORSE))["digits", "sgd", "4", "1"], "test_loss") == []
    cut = rows("dp", DP)[:-1]
    assert last(finished(cut), "test_loss") == {"0": 1.0, "1": 2.0, "2": 3.0}


def test_corrections_are_compared_with_dp_of_the_same_optimizer_and_ranks(tmp_path) -> None:
    some = rows("dp", DP) + rows("cdp-v2", WORSE) + rows("cdp-v2", ALIKE, correction="predict")
    some += rows("dp", WORSE, ranks="8") + rows("cdp-v2", WORSE, ranks="8", correction="auto")
    some += rows("dp", DP, "gpt", "nadamw") + rows("cdp-v1", ALIKE, "gpt", "nadamw", "predict")
    every = settings(some)
    assert [list(engines) for engines in every.values()] == [
        ["dp", "cdp-v2", "cdp-v2 predict"],
        ["dp", "cdp-v2 auto"],
        ["dp", "cdp-v1 predict"],
    ]
    assert [round(c.mean, 3) for engines in every.values() for c in compare(engines, "test_loss")] == [0.5, 0.0, 0.0, 0.0]
    text = tables(some)
    titles = [line for line in text.splitlines() if line.startswith("###")]
    gpt = "byte-level GPT on Python's sources, NAdamW"
    assert titles == ["### digits, ResNet-14", "### digits, ResNet-14, 8 ranks", f"### {gpt}"]
    assert "| cdp-v2 predict | 4 | 2.5000" in text and "`cdp-v2 predict` from `dp`" in text
    drawn = draw(some, tmp_path, kinds=("png",))
    assert {path.name: about for path, about in drawn.items()} == {"digits.png": "digits, ResNet-14", "gpt-nadamw.png": gpt}


def test_rows_recorded_before_corrections_are_read(tmp_path) -> None:
    old = [
        {k: v for k, v in row.items() if k not in ("optimizer", "correction")} for row in rows("dp", DP) + rows("dp", DP, "gpt")
    ]
    with (tmp_path / "rows.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(old[0]))
        writer.writeheader()
        writer.writerows(old)
    assert list(settings(read(tmp_path / "rows.csv"))) == [("digits", "sgd", "4", "1"), ("gpt", "adamw", "4", "1")]


def test_new_rows_name_the_weight_of_predictions() -> None:
    from benchmarks.learning import parse

    assert parse(["--corrections", "none,predict,predict:2"]).corrections == ["none", "predict:1.5", "predict:2"]


def test_one_pair_has_a_difference_and_no_interval() -> None:
    text = tables(rows("dp", DP[:1]) + rows("cdp-v2", WORSE[:1], correction="predict"))
    assert "| cdp-v2 predict | 1 | 1.5000 ± ? | 0.5000 ± ? | 1.0000 ± ? | +0.5000 |  |" in text and "- " not in text


def test_a_document_gets_a_runs_tables_and_plots(tmp_path) -> None:
    run, document = tmp_path / "2026_run", tmp_path / "docs" / "learning.md"
    run.mkdir()
    (tmp_path / "docs" / "images").mkdir(parents=True)
    some = rows("dp", DP) + rows("cdp-v1", WORSE)
    with (run / "rows.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(some[0]))
        writer.writeheader()
        writer.writerows(some)
    document.write_text("above\n<!-- generated: learning -->\nold\n<!-- end of generated: learning -->\nbelow\n")
    for _ in range(2):
        into_document(run, document)
    text = document.read_text()
    assert text.startswith("above\n<!-- gen") and text.endswith("-->\nbelow\n") and "old" not in text
    assert text.count("`cdp-v1` differs") == 1 and text.count("(images/2026_run_digits.png)") == 1
    assert (tmp_path / "docs" / "images" / "2026_run_digits.png").read_bytes().startswith(b"\x89PNG")
    document.write_text("no lines")
    with pytest.raises(ValueError, match="has no lines"):
        into_document(run, document)


def test_tables_need_no_accuracy_and_no_dp(tmp_path) -> None:
    text = tables([{**r, "test_accuracy": ""} for r in rows("cdp-v1", WORSE, "gpt", "adamw")])
    assert "| cdp-v1 | 4 | 3.0000 ± 1.2675 |  |" in text and "p (Holm)" in text
    (tmp_path / "rows.csv").write_text("dataset,b\ngpt,2\n3")
    assert read(tmp_path / "rows.csv") == [{"dataset": "gpt", "b": "2", "optimizer": "adamw", "correction": "none"}]
