"""The command line: golden outputs, the shape of --json, and wrong input, which costs one sentence and exit code 2.

``python tests/unit/test_cli.py`` writes the golden files anew.
"""

import contextlib
import io
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from deepspeed_cdp.cli import plan as plan_command
from deepspeed_cdp.cli.main import COMMANDS, main
from deepspeed_cdp.plan import program
from deepspeed_cdp.verify import check
from deepspeed_cdp.verify.well_formed import PlanError
from support.patience import patience

GOLDEN = Path(__file__).parents[1] / "golden" / "cli"
CASES = {
    "costs": "costs --ranks 3 --parameters 3GiB --activations 6GiB --boundary 1MiB",
    "plan_mlp": "plan --model python:support.cli_models:mlp --ranks 4 --tflops 1 --bandwidth 10",
    "plan_tied": "plan --model python:support.cli_models:tied --ranks 2 --rule dp",
    "plan_rings": "plan --model python:support.cli_models:mlp --ranks 8 --ring-size 4 --tflops 1",
    "simulate_equal": "simulate --ranks 3 --parameters 1e9 --step-ms 100 --units 2 --steps 10 --jitter-ms 10",
    "simulate_rings": "simulate --ranks 12 --ring-size 4 --parameters 1e9 --step-ms 100 --steps 10",
    "timeline_v2": "timeline --ranks 3",
    "timeline_dp": "timeline --ranks 2 --rule dp --steps 1",
    "memory_mlp": "memory --model python:support.cli_models:mlp --workers 2,4",
}
NUMBER = (int, float)
SCHEMA = {
    "costs": {
        "ok": bool,
        "ranks": int,
        "psi_p": NUMBER,
        "psi_a": NUMBER,
        "psi_int": NUMBER,
        "rows": [
            {
                "figure": str,
                "implementation": str,
                "cyclic": bool,
                "devices": int,
                "activations": NUMBER,
                "parameters": NUMBER,
                "volume": NUMBER,
                "steps": int,
                "forms": {str: str},
            }
        ],
    },
    "plan": {
        "ok": bool,
        "model": {"name": str, "parameters": int, "bytes": int, "dtype": str, "batch": str, "flops": NUMBER},
        "rule": (str, int),
        "threshold": int,
        "delay_correction": str,
        "ranks": int,
        "rounds": int,
        "rings": int,
        "sequence_parallel": int,
        "tensor_parallel": int,
        "across": [int],
        "exchange": NUMBER,
        "units": [{"name": str, "stage": int, "bytes": int, "flops": NUMBER}],
        "persistent": (dict, type(None)),
        "stages": [
            {
                "stage": int,
                "owner": int,
                "units": int,
                "from": str,
                "to": str,
                "parameter_bytes": int,
                "trained": int,
                "flops_fraction": NUMBER,
                "seconds": NUMBER,
            }
        ],
        "memory": [{str: int}],
        "activations": int,
        "traffic": {"received": [{"F": int, "B": int, "G": int, "O": int}], "messages": [int], "link_busy": NUMBER},
        "time": {
            "step": NUMBER,
            "parts": {str: NUMBER},
            "compute_only": NUMBER,
            "from": str,
            "of_compute": NUMBER,
            "idle": [NUMBER],
            "offsets": [NUMBER],
        },
        "others": [{"name": str, "memory": NUMBER, "received": NUMBER, "messages": int, "step": NUMBER}],
        "hardware": {str: NUMBER},
        "dominates": str,
        "warnings": [str],
    },
    "simulate": {
        "ok": bool,
        "ranks": int,
        "ring_size": int,
        "rings": int,
        "threshold": int,
        "rounds": int,
        "method": str,
        "period": NUMBER,
        "busy": NUMBER,
        "pass": NUMBER,
        "idle": [NUMBER],
        "offsets": [NUMBER],
        "jitter": [dict.fromkeys(("jitter", "period", "longer", "own_delay", "with_barrier"), NUMBER)],
        "late_once": [{"late": NUMBER, "others_end_later": NUMBER}],
        "slack": NUMBER,
        "source": str,
        "exchange": NUMBER,
        "hardware": {str: NUMBER},
    },
    "timeline": {
        "ok": bool,
        "ranks": int,
        "rule": (str, int),
        "threshold": int,
        "period": int,
        "files": [str],
        "passes": [{"backward": bool, **dict.fromkeys(("time", "rank", "stage", "step", "round", "version"), int)}],
    },
    "memory": {
        "ok": bool,
        "model": str,
        "batch": str,
        "dtype": str,
        "device": str,
        "clock": str,
        "total": NUMBER,
        "peak": int,
        "forward_ends": NUMBER,
        "workers": [{"workers": int, "together": int, "in_turn": int, "saving": NUMBER}],
    },
    "doctor": {
        "ok": bool,
        "versions": {str: (str, type(None))},
        "registration": {"active": bool, "why": str, "files": [str]},
        "devices": {"gpus": [str], "peer_access": list, "transport": (str, type(None)), "why": str, "troubles": {str: str}},
        "environment": [str],
        "self_test": type(None),
        "problems": [str],
    },
}


def fits(value, shape, where: str = "result") -> None:
    """Assert that JSON has a shape: types, [of each item], {key: of its value}, {str: of every value}."""
    if isinstance(shape, list):
        assert isinstance(value, list), where
        for i, item in enumerate(value):
            fits(item, shape[0], f"{where}[{i}]")
    elif isinstance(shape, dict):
        assert isinstance(value, dict), where
        if set(shape) == {str}:
            for key, item in value.items():
                fits(item, shape[str], f"{where}.{key}")
            return
        assert value.keys() == shape.keys(), f"{where} has {sorted(value)}, not {sorted(shape)}"
        for key in shape:
            fits(value[key], shape[key], f"{where}.{key}")
    else:
        assert isinstance(value, shape), f"{where} is {value!r}"


def output(command: str) -> str:
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        assert main(shlex.split(command)) == 0
    return text.getvalue()


@pytest.mark.parametrize("name", CASES)
def test_golden(name):
    assert output(CASES[name]) == (GOLDEN / f"{name}.txt").read_text()


@pytest.mark.parametrize("name", [n for n in CASES if n not in ("plan_tied", "timeline_dp")])
def test_json_has_its_shape_and_says_the_same_twice(name):
    first = output(CASES[name] + " --json")
    assert first.count("\n") == 1
    fits(json.loads(first), SCHEMA[name.split("_")[0]])
    assert output(CASES[name] + " --json") == first


def test_json_of_the_doctor():
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        code = main(["doctor", "--no-self-test", "--json"])
    found = json.loads(text.getvalue())
    fits(found, SCHEMA["doctor"])
    assert code == (1 if found["problems"] else 0)
    assert found["registration"]["active"] or found["registration"]["why"] in found["problems"][-1]


def test_the_doctor_explains_a_models_plan():
    def explained(model: str, *more: str) -> dict:
        result = json.loads(output(f"doctor --model python:support.cli_models:{model} --ranks 2 --json {' '.join(more)}"))
        assert result.pop("ok") and output(f"doctor --model python:support.cli_models:{model} --ranks 2 {' '.join(more)}")
        return result

    plain = explained("mlp")
    assert plain["followed"] and not (plain["made_anew"] or plain["any_order"] or plain["persistent"])
    assert [x["owner"] for x in plain["stages"]] == [1, 0] and all(x["units"] and x["bytes"] for x in plain["stages"])
    secret = explained("tied_in_secret")
    assert secret["made_anew"] == "parameter 'embedding.weight' is read outside 'embedding'"
    assert [(x["name"], x["why"]) for x in secret["persistent"]] == [("embedding.weight", "it is read outside 'embedding'")]
    assert not explained("branching")["followed"]
    every = explained("everything_twice")
    assert every["any_order"] and "is called 2 times in a forward" in every["made_anew"]


WRONG = [
    ("", None),
    ("nope", "command is 'nope'; allowed are plan,"),
    ("costs --ranks 0", "'0' is not a whole number of at least 1"),
    ("costs --ranks", "expected one argument"),
    ("costs --parameters many", "'many' is no size"),
    ("costs --nope", "--nope"),
    ("plan --model python:support.cli_models:everything_twice --ranks 2", "with cyclic.any_order, which this model or its"),
    ("plan --ranks 2", "--model"),
    ("plan --model python:support.cli_models:mlp", "--ranks"),
    ("plan --model x --ranks 2", "--model is 'x'; allowed are hf:PATH"),
    ("plan --model hf:/nowhere --ranks 2", "which does not exist"),
    ("plan --model python:no_such_module:f --ranks 2", "cannot be imported"),
    ("plan --model python:support.cli_models:nope --ranks 2", "has no function 'nope'"),
    ("plan --model python:support.cli_models:not_a_module --ranks 2", "returned int"),
    ("plan --model python:support.cli_models:fails --ranks 2", "fails with RuntimeError: no such layer"),
    ("plan --model python:support.cli_models:without_batch --ranks 2", "return (module, batch)"),
    ("plan --model python:support.cli_models:branching --ranks 2", "give a measured time with --step-ms"),
    ("plan --model python:support.cli_models:mlp --ranks 99", "units for 99 ranks"),
    ("plan --model python:support.cli_models:mlp --ranks 2 --rule 7", "cyclic.rule is 7"),
    ("plan --model python:support.cli_models:mlp --ranks 2 --rule fast", "cyclic.rule is 'fast'"),
    ("plan --model python:support.cli_models:mlp --ranks 2 --config {bad}/none.json", "cannot be read"),
    ("plan --model python:support.cli_models:mlp --ranks 2 --config {bad}/text.json", "which is no JSON"),
    ("plan --model python:support.cli_models:mlp --ranks 2 --config {bad}/list.json", "holds no block of settings"),
    ("plan --model python:support.cli_models:mlp --ranks 2 --config {bad}/key.json", "cyclic.rul"),
    ("plan --model python:support.cli_models:mlp --ranks 2 --config {bad}/refused.json", "offload_param"),
    (
        "plan --model python:support.cli_models:mlp --ranks 2 --config {bad}/stage.json",
        "zero_optimization.stage is 1 in the ds_config",
    ),
    (
        "plan --model python:support.cli_models:mlp --ranks 2 --config {bad}/block.json",
        "zero_optimization.stage is 0 in the ds_config",
    ),
    (
        "plan --model python:support.cli_models:mlp --ranks 9 --config {bad}/tensor.json",
        "tensor_parallel.autotp_size is 2, which does not divide --ranks 9",
    ),
    (
        "plan --model python:support.cli_models:mlp --ranks 8 --sequence-parallel 2 --config {bad}/tensor.json",
        "sequence_parallel_size is 2 and tensor_parallel.autotp_size is 2, but a group of ranks shares a sequence or layers",
    ),
    ("plan --model python:support.cli_models:mlp --ranks 2 --config {bad}/cylic.json", "cylic is in the ds_config"),
    ("plan --model python:support.cli_models:mlp --ranks 2 --config {bad}/missing.json", "cyclic.enabled is missing"),
    ("plan --model python:support.cli_models:mlp --ranks 2 --config {bad}/off.json", "cyclic.enabled is false"),
    ("plan --model python:support.cli_models:mlp --ranks 2 --step-ms -1", "'-1' is not a number"),
    ("plan --model hf:{bad}/text.json --ranks 2", "is no Hugging Face config"),
    (
        "plan --model python:support.cli_models:mlp --ranks 6 --ring-size 4",
        "cyclic.ring_size is 4, which does not divide the 6 data-parallel ranks",
    ),
    (
        "plan --model python:support.cli_models:mlp --ranks 6 --sequence-parallel 4",
        "sequence_parallel_size is 4, which does not divide --ranks 6",
    ),
    ("simulate --ranks 4", "--parameters and --step-ms must say"),
    ("simulate --ranks 6 --ring-size 4 --parameters 1 --step-ms 1", "does not divide"),
    (
        "simulate --ranks 8 --ring-size 8 --tensor-parallel 2 --parameters 1 --step-ms 1",
        "does not divide --ranks 8 by groups of 2",
    ),
    ("simulate --ranks 4 --parameters 1e9 --step-ms 1 --jitter-ms 1,x", "'x' is not a number"),
    ("simulate --ranks 8 --ring-size 4 --parameters 1e9 --step-ms 1 --method events", "simulates one ring"),
    ("simulate --ranks 999 --parameters 1e9 --step-ms 1 --method events", "use waves"),
    ("timeline", "give either --ranks"),
    ("timeline --ranks 2 --from x", "give either --ranks"),
    ("timeline --ranks 2 --out a.gif", "whose ending is unknown"),
    ("timeline --ranks 9999", "too large to look at"),
    ("timeline --from {bad}/none.json", "cannot be read"),
    ("timeline --from {bad}/list.json", "is no recording"),
    ("memory --model python:support.cli_models:mlp --workers 0", "'0' is not a whole number"),
    ("memory --model python:support.cli_models:branching", "give a batch that works"),
    ("memory --model python:support.cli_models:mlp --clock seconds", "clock is 'seconds'"),
    ("memory --model python:support.cli_models:mlp --device nowhere", "which cannot be used"),
    ("doctor --seconds 0", "'0' is not a number above 0"),
]


@pytest.fixture(scope="module")
def bad(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("bad")
    (folder / "text.json").write_text("not { json")
    (folder / "list.json").write_text("[1]")
    (folder / "key.json").write_text('{"cyclic": {"enabled": true, "rul": "dp"}}')
    (folder / "stage.json").write_text('{"zero_optimization": {"stage": 1}}')
    (folder / "block.json").write_text('{"bf16": {"enabled": true}}')
    (folder / "tensor.json").write_text('{"zero_optimization": {"stage": 3}, "tensor_parallel": {"autotp_size": 2}}')
    for name, block in (("cylic", {"enabled": True}), ("missing", {"rule": "dp"}), ("off", {"enabled": False})):
        key = "cylic" if name == "cylic" else "cyclic"
        (folder / f"{name}.json").write_text(json.dumps({"zero_optimization": {"stage": 3}, key: block}))
    (folder / "refused.json").write_text('{"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}}')
    return folder


@pytest.mark.parametrize("command, fragment", WRONG, ids=[c or "nothing" for c, _ in WRONG])
def test_wrong_input_costs_a_sentence(command, fragment, bad, capsys):
    argv = shlex.split(command.replace("{bad}", str(bad)))
    assert main(argv) == 2
    out, err = capsys.readouterr()
    if fragment is None:
        assert out.startswith("usage:")
        return
    assert out == "" and err.count("\n") == 1 and err.startswith("error: ") and fragment in err
    assert main([*argv, "--json"]) == 2
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert found["ok"] is False and fragment in found["error"] and "Traceback" not in err


def test_a_plan_is_the_engines_with_the_configs_own_settings(tmp_path, capsys):
    """Stages that stay for their backwards come once, and take more room."""
    found = []
    for keep in ("false", "true"):
        config = tmp_path / f"{keep}.json"
        config.write_text(f'{{"zero_optimization": {{"stage": 3}}, "cyclic": {{"enabled": true, "keep_after_forward": {keep}}}}}')
        assert main(shlex.split(f"plan --model python:support.cli_models:mlp --ranks 4 --config {config} --json")) == 0
        found.append(json.loads(capsys.readouterr().out))
    without, kept = found
    assert kept["memory"][0]["in flight"] > without["memory"][0]["in flight"]
    stage = without["stages"][0]["parameter_bytes"]
    for rank in range(4):
        received = [x["traffic"]["received"][rank] for x in found]
        assert received[0]["F"] == received[1]["F"] and received[1]["B"] == (stage if rank < 3 else 0) < received[0]["B"]


@pytest.mark.parametrize("options", ["", "--tflops 1", "--step-ms 1"])
def test_the_speed_of_fp32_is_not_guessed(options, tmp_path, capsys):
    (tmp_path / "fp32.json").write_text('{"zero_optimization": {"stage": 3}, "cyclic": {"enabled": true}}')
    (tmp_path / "bf16.json").write_text(
        '{"zero_optimization": {"stage": 3}, "cyclic": {"enabled": true}, "bf16": {"enabled": true}}'
    )
    for name in ("fp32", "bf16"):
        command = f"plan --model python:support.cli_models:mlp --ranks 2 --config {tmp_path}/{name}.json {options}"
        assert main(shlex.split(command)) == 0
        assert ("trains in fp32" in capsys.readouterr().out) == (name == "fp32" and not options)


@pytest.mark.parametrize("rule", ["dp", "cdp-v1", "cdp-v2"])
def test_a_plan_with_many_rounds_is_extrapolated(rule, tmp_path, monkeypatch, capsys):
    """Figures of few simulated rounds are those of all rounds, and 100,000 rounds take no longer."""

    def figures(rounds: int) -> dict:
        config = tmp_path / "config.json"
        block = {"enabled": True, "rule": rule}
        config.write_text(json.dumps({"zero_optimization": {"stage": 3}, "gradient_accumulation_steps": rounds, "cyclic": block}))
        command = f"plan --model python:support.cli_models:mlp --ranks 2 --tflops 0.001 --bandwidth 10 --json --config {config}"
        assert main(shlex.split(command)) == 0
        return json.loads(capsys.readouterr().out)

    extrapolated, most = figures(41), figures(100_000)
    assert most["traffic"]["messages"][0] > 100_000
    assert most["time"]["step"] == pytest.approx(extrapolated["time"]["step"] * 100_000 / 41, rel=0.05)
    monkeypatch.setattr(plan_command, "MOST_ROUNDS", 41)
    simulated = figures(41)
    assert extrapolated["time"]["step"] == pytest.approx(simulated["time"]["step"], rel=1e-3)
    assert extrapolated["time"]["idle"] == pytest.approx(simulated["time"]["idle"], abs=1e-3)
    monkeypatch.setattr(program, "FEW", 10**6)
    assert extrapolated["traffic"]["messages"] == figures(41)["traffic"]["messages"]


def test_a_plan_says_what_it_takes_for_auto(tmp_path, capsys):
    (tmp_path / "auto.json").write_text(
        '{"zero_optimization": {"stage": 3}, "gradient_accumulation_steps": "auto", "train_micro_batch_size_per_gpu": "auto"}'
    )
    told = []
    for more in ("", "--micro-batch 2"):
        assert (
            main(shlex.split(f"plan --model python:support.cli_models:mlp --ranks 4 --config {tmp_path}/auto.json {more} --json"))
            == 0
        )
        told += [w for w in json.loads(capsys.readouterr().out)["warnings"] if "auto" in w]
    assert len(told) == 2 and told[0].startswith("train_micro_batch_size_per_gpu and gradient_accumulation_steps are")
    assert told[1].startswith("gradient_accumulation_steps is")


@pytest.mark.parametrize("options", ["--ranks 4", "--ranks 2 --rule dp", "--ranks 4 --ring-size 2"])
def test_a_plan_is_checked(options):
    command = f"plan --model python:support.cli_models:mlp {options} --check"
    assert re.fullmatch(r"dry-run: [\d,]+ actions, 4 steps, 3 ways, \d\.\d\d s: OK\n", output(command))
    found = json.loads(output(f"{command} --json"))
    assert found.keys() == {"ok", "actions", "steps", "ways", "seconds"} and found["actions"] > 0


def test_a_plan_with_a_warm_up_is_two_plans(tmp_path):
    config, plan = tmp_path / "c.json", "plan --model python:support.cli_models:mlp --ranks 3 --check --json"
    counts = []
    for block in ({"enabled": True}, {"enabled": True, "rule": "dp"}, {"enabled": True, "warmup_steps": 3}):
        config.write_text(json.dumps({"zero_optimization": {"stage": 3}, "cyclic": block}))
        counts.append(json.loads(output(f"{plan} --config {config}"))["actions"])
    assert counts[2] == pytest.approx(counts[0] + counts[1], rel=0.1)


def test_a_plan_that_fails_its_dry_run(monkeypatch, capsys):
    def broken(plan, steps):
        raise PlanError("rank 1, step 0: broken on purpose")

    monkeypatch.setattr(check, "validate", broken)
    command = "plan --model python:support.cli_models:mlp --ranks 2 --check".split()
    assert main(command) == 1
    assert capsys.readouterr() == ("", "error: the plan fails its dry-run: rank 1, step 0: broken on purpose\n")
    assert main([*command, "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["ok"] is False


@pytest.mark.parametrize("name", COMMANDS)
def test_help(name, capsys):
    with pytest.raises(SystemExit) as end:
        main([name, "--help"])
    assert end.value.code == 0
    out = capsys.readouterr().out
    assert f"deepspeed-cdp {name}" in out
    if name != "convert":
        assert "--json" in out


def test_usage_names_every_command(capsys):
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    assert all(f"  {name} " in out for name in COMMANDS)


def test_convert_is_the_old_command_too(capsys, tmp_path):
    assert main(["convert", "check", str(tmp_path / "none")]) == 1
    assert "is not a folder" in capsys.readouterr().err
    done = subprocess.run(
        [sys.executable, "-m", "deepspeed_cdp.cli.convert", "check", str(tmp_path / "none")],
        capture_output=True,
        text=True,
        timeout=patience(120),
    )
    assert done.returncode == 1 and "is not a folder" in done.stderr


def test_costs_and_schedules_need_no_torch():
    code = (
        "import sys; from deepspeed_cdp.cli.main import main; main(['costs']); main(['timeline', '--ranks', '2']); "
        "sys.exit(any(m in sys.modules for m in ('torch', 'deepspeed', 'matplotlib')))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=patience(120)).returncode == 0


def test_a_closed_pipe_is_no_error():
    done = subprocess.run(
        f"{sys.executable} -m deepspeed_cdp.cli.main timeline --ranks 9 --json | head -c 10",
        shell=True,
        capture_output=True,
        text=True,
        timeout=patience(120),
    )
    assert "Traceback" not in done.stderr and "BrokenPipe" not in done.stderr


def test_warnings_say_what_to_do():
    found = json.loads(
        output("plan --model python:support.cli_models:lopsided --ranks 2 --device-memory 1KB --bandwidth 0.001 --json")
    )
    text = "\n".join(found["warnings"])
    for part in ("times the mean stage's bytes", "set cyclic.partition_method to 'parameters'", "use more ranks", "rank's link"):
        assert part in text
    secret = json.loads(output("plan --model python:support.cli_models:tied_in_secret --ranks 2 --json"))
    assert secret["persistent"]["names"] == ["embedding.weight"]  # as after the first batch
    tied = json.loads(output("plan --model python:support.cli_models:tied --ranks 2 --json"))
    assert any("persistent parameters (embedding.weight)" in w and "untie" in w for w in tied["warnings"])
    alone = json.loads(output("plan --model python:support.cli_models:mlp --ranks 8 --json"))
    assert any("single unit" in w for w in alone["warnings"])
    quiet = json.loads(output("plan --model python:support.cli_models:mlp --ranks 4 --json"))
    assert not any("times the mean" in w or "persistent" in w for w in quiet["warnings"])


def test_pictures_are_written(tmp_path):
    files = [str(tmp_path / f"x{s}") for s in (".png", ".svg", ".json", ".txt")]
    found = json.loads(output(f"timeline --ranks 3 --out {' '.join(files)} --json"))
    assert found["files"] == files
    assert (tmp_path / "x.png").read_bytes()[:4] == b"\x89PNG" and "<svg" in (tmp_path / "x.svg").read_text()
    events = json.loads((tmp_path / "x.json").read_text())["traceEvents"]
    assert sum(e["ph"] == "X" for e in events) == 2 * 3 * 6
    made = json.loads(output(f"memory --model python:support.cli_models:mlp --workers 2 --out {tmp_path / 'm.png'} --json"))[
        "files"
    ]
    assert [Path(f).suffix for f in made] == [".png", ".svg", ".csv"] and all(Path(f).stat().st_size for f in made)
    assert (tmp_path / "m.csv").read_text().startswith("fraction,live_bytes\n0.000000,")


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    GOLDEN.mkdir(parents=True, exist_ok=True)
    for case, line in CASES.items():
        (GOLDEN / f"{case}.txt").write_text(output(line))
