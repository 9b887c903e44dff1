"""The learning experiments from end to end, tiny; and that a script simulated is the script launched."""

import json
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
sys.path.insert(0, str(REPOSITORY / "examples"))

pytest.importorskip("scipy")
from benchmarks import learning, learning_report  # noqa: E402


def launched(rank: int, world: int, config: str) -> list[tuple[float, float]]:
    sys.path.insert(0, str(REPOSITORY / "examples"))
    import cifar10

    import deepspeed_cdp

    deepspeed_cdp.register()  # which its .pth file does where the package is installed
    return cifar10.main(
        ["--dataset", "digits", "--epochs", "2", "--test-every", "1", "--deepspeed", "--deepspeed_config", config]
    )


@pytest.mark.sampled(2)
@pytest.mark.parametrize("rule", ["cdp-v1", "cdp-v2"])
def test_simulating_a_script_is_launching_it(pool, tmp_path, rule) -> None:
    """Two ranks of DeepSpeed with the cyclic engine, stages by FLOPs, flushes for tests included, against --simulate-ranks 2."""
    import cifar10

    config = json.loads((REPOSITORY / "examples" / "images_ds_config.json").read_text())
    config["train_micro_batch_size_per_gpu"] = 96
    config["cyclic"]["rule"] = rule
    (tmp_path / "config.json").write_text(json.dumps(config))
    engine = pool.run(2, launched, str(tmp_path / "config.json"))[0]
    simulated = cifar10.main(
        [
            "--dataset",
            "digits",
            "--epochs",
            "2",
            "--test-every",
            "1",
            "--simulate-ranks",
            "2",
            "--micro-batch",
            "96",
            "--rule",
            rule,
            "--device",
            "cpu",
        ]
    )
    assert len(engine) == 2
    for (loss, accuracy), (expected, right) in zip(engine, simulated):
        assert loss == pytest.approx(expected, rel=1e-6) and accuracy == right


def run(out: Path, *arguments: str) -> int:
    return learning.main(["--size", "tiny", "--device", "cpu", "--processes", "1", "--out", str(out), *arguments])


@pytest.fixture(scope="module")
def done(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("learning")
    assert run(out, "--datasets", "gpt", "--rules", "dp,cdp-v1,cdp-v2", "--seeds", "2") == 0
    return out


def test_rows_table_and_plots(done, capsys) -> None:
    rows = learning_report.read(done / "rows.csv")
    keys = [("gpt", "adamw", "4", "1", rule, "none", str(seed)) for seed in range(2) for rule in ("dp", "cdp-v1", "cdp-v2")]
    assert [learning_report.key(r) for r in rows] == [k for k in keys for _ in range(4)]
    assert [r["step"] for r in rows[:4]] == ["0", "4", "8", "12"] and all(r["graph"] == "False" for r in rows)
    starts = {(r["rule"], r["seed"]): r["test_loss"] for r in rows if r["step"] == "0"}
    assert starts["dp", "0"] == starts["cdp-v2", "0"] != starts["dp", "1"]
    ends = {r["rule"]: float(r["test_loss"]) for r in rows if r["step"] == "12" and r["seed"] == "0"}
    assert ends["dp"] < ends["cdp-v2"] < ends["cdp-v1"] < float(starts["dp", "0"]), "on so few steps a delay costs"
    table = (done / "table.md").read_text()
    assert "| cdp-v2 | 2 | " in table and "`cdp-v1`" in table
    assert (done / "gpt.png").read_bytes().startswith(b"\x89PNG") and "cdp-v2" in (done / "gpt.svg").read_text()


@pytest.mark.slow
def test_it_goes_on_where_it_stopped(done, capsys) -> None:
    path = done / "rows.csv"
    before = path.read_bytes()
    path.write_bytes(before[:-30])  # a crash in the last row: that case is not finished and starts anew
    assert run(done, "--datasets", "gpt", "--rules", "dp,cdp-v1,cdp-v2", "--seeds", "2") == 0
    old, new = (learning_report.read(p) for p in (path, path))
    learned = [[{k: v for k, v in r.items() if k not in ("seconds", "time")} for r in rows] for rows in (old, new)]
    assert learned[0] == learned[1] and len(old) == 24
    assert path.read_bytes().startswith(before[: before.rfind(b"gpt,adamw,1,cdp-v2,none,1,0,")]), (
        "finished cases are kept as they were"
    )
    assert run(done, "--datasets", "gpt", "--rules", "dp", "--seeds", "1", "--size", "small") == 2
    assert "--out has rows of gpt adamw 4 1 dp none 0 with 12 steps and micro-batch 2" in capsys.readouterr().err


@pytest.mark.slow
def test_corrections_ranks_and_optimizers(tmp_path) -> None:
    """dp once per setting; digits take SGD only; the second seed alone."""
    arguments = (
        "--datasets",
        "digits,gpt",
        "--rules",
        "dp,cdp-v2",
        "--seeds",
        "2",
        "--first-seed",
        "1",
        "--simulate-ranks",
        "2,3",
    )
    assert run(tmp_path, *arguments, "--optimizers", "nadamw,muon,sgd", "--corrections", "none,auto") == 0
    keys = {learning_report.key(r) for r in learning_report.read(tmp_path / "rows.csv")}
    both = [("digits", "sgd"), ("gpt", "nadamw"), ("gpt", "muon"), ("gpt", "sgd")]
    variants = [("dp", "none"), ("cdp-v2", "none"), ("cdp-v2", "auto")]
    assert keys == {(*which, ranks, "1", *variant, "1") for which in both for ranks in "23" for variant in variants}
    assert (tmp_path / "gpt-muon.png").exists()


@pytest.mark.slow
def test_a_case_that_fails_is_told_and_others_go_on(tmp_path, capsys) -> None:
    """Fifty ranks need fifty units; the tiny GPT has fewer. The time limit ends a run too."""
    assert run(tmp_path, "--datasets", "gpt", "--rules", "dp", "--seeds", "1", "--simulate-ranks", "50") == 1
    assert "gpt adamw 50 1 dp none 0: ValueError: this GPT has" in capsys.readouterr().err
    assert run(tmp_path, "--datasets", "gpt", "--seeds", "1", "--seconds", "0.1") == 1
    assert "0.1 s are over and 5 of 5 cases are not finished" in capsys.readouterr().err


@pytest.mark.parametrize(
    "wrong, told",
    [
        (("--datasets", "mnist"), "--datasets has 'mnist'; allowed are digits, gpt"),
        (("--corrections", "guess"), "--corrections has 'guess'; allowed are none, extrapolate, predict, auto"),
        (("--optimizers", "lion"), "--optimizers has 'lion'; allowed are adamw, nadamw, muon, sgd"),
        (("--seeds", "0"), "of at least 1"),
        (("--rates", "x"), "are numbers"),
    ],
)
def test_wrong_arguments(tmp_path, capsys, wrong, told) -> None:
    with pytest.raises(SystemExit):
        run(tmp_path, *wrong)
    assert told in capsys.readouterr().err
