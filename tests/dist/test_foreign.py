"""DeepSpeed's checkpoints and ours: stock ZeRO-3's are taken up, ours are converted and stock takes them up."""

import contextlib
import io
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from deepspeed_cdp.checkpoint.deepspeed_formats import open_checkpoint
from deepspeed_cdp.cli import convert
from deepspeed_cdp.errors import CheckpointError
from support import models
from support.engine_work import Job, farthest, pack, same, start, train, unpack, whole

SMALL = {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0, "sub_group_size": 600}}
JOBS = {  # frozen parameters, and sub-groups; ties, groups and a schedule; buffers and momentum; bf16
    "rooted": {"config": SMALL},
    "llama-tied": {"optimizer": "groups", "schedule": "lambda", "clip": 0.3, "config": SMALL},
    "conv": {"optimizer": "sgd"},
    "bf16": {"kind": "llama-tied", "bf16": True, "schedule": "warmup"},
}
FIRST, LAST = 3, 6
UNIVERSAL = {"checkpoint": {"load_universal": True}}


def job(name: str, rule: str | None, **more: Any) -> Job:
    options = {"kind": name, **JOBS[name], **more}
    options["config"] = {**JOBS[name].get("config", {}), **more.get("config", {})}
    return Job(rule=rule, **options)


def begin(rank: int, world: int, jobs: dict[str, Job], root: str) -> dict[str, Any]:
    """Train, save, go on; by job: the state when saved, and at the end."""
    results = {}
    for name, one in jobs.items():
        engine = start(one, world)
        train(engine, one, rank, 0, FIRST)
        engine.save_checkpoint(os.path.join(root, name), client_state={"epoch": 4, "words": ["a"], "tensor": torch.arange(3)})
        results[name] = {"saved": pack(whole(engine))}
        train(engine, one, rank, FIRST, LAST)
        results[name]["end"] = pack(whole(engine))
        results[name]["buffers"] = pack(dict(engine.module.named_buffers()))
        engine.destroy()
    return results


def resume(rank: int, world: int, jobs: dict[str, Job], root: str) -> dict[str, Any]:
    """Load into new engines that have trained otherwise before (stock ones have not: they want a pristine model), and go on."""
    results = {}
    for name, one in jobs.items():
        engine = start(one, world)
        if one.rule is not None:
            train(engine, one, rank, 0, 1)
        path, client = engine.load_checkpoint(os.path.join(root, name))
        assert path and engine.global_steps == FIRST
        assert client["epoch"] == 4 and client["words"] == ["a"] and torch.equal(client["tensor"], torch.arange(3))
        results[name] = {"saved": pack(whole(engine)), "lr": engine.get_lr()[0]}
        train(engine, one, rank, FIRST, LAST)
        results[name]["end"] = pack(whole(engine))
        results[name]["buffers"] = pack(dict(engine.module.named_buffers()))
        engine.destroy()
    return results


@pytest.fixture(scope="module")
def stock(pool, tmp_path_factory):
    """Stock ZeRO-3 on two ranks, of every job: where it saved, and what it came to."""
    root = tmp_path_factory.mktemp("stock")
    return root, pool.run(2, begin, {name: job(name, None) for name in JOBS}, str(root), timeout=200)


@pytest.fixture(scope="module")
def ours(pool, tmp_path_factory):
    """The same by the cyclic engine under dp."""
    root = tmp_path_factory.mktemp("ours")
    return root, pool.run(2, begin, {name: job(name, "dp") for name in JOBS}, str(root), timeout=200)


def run(*args: str, code: int = 0) -> dict[str, Any]:
    """What the converter says, as JSON."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        assert convert.main([*args, "--json"]) == code, out.getvalue()
    return json.loads(out.getvalue())


def tolerance(name: str) -> tuple[float, float]:
    return (2e-2, 4e-3) if name == "bf16" else (1e-6, 1e-6)


@pytest.mark.slow
def test_stock_zero3_is_taken_up_and_training_goes_on(pool, stock, tmp_path):
    """On as many ranks it comes to what stock comes to; on others it is the same as from a converted checkpoint, bit by bit."""
    root, want = stock
    got = pool.run(2, resume, {name: job(name, "dp") for name in JOBS}, str(root), timeout=200)
    for name in JOBS:
        for rank in range(2):
            same(unpack(got[rank][name]["saved"]), unpack(want[rank][name]["saved"]))
            same(unpack(got[rank][name]["end"]), unpack(want[rank][name]["end"]), *tolerance(name))
            if name == "conv":
                same(unpack(got[rank][name]["buffers"]), unpack(want[rank][name]["buffers"]), *tolerance(name))
        assert farthest(unpack(got[0][name]["saved"]), unpack(got[0][name]["end"])) > 1e-3, "training must go on"
    for name in JOBS:
        assert convert.main(["from-zero3", str(root / name), str(tmp_path / name), "--json"]) == 0
    others = {name: job(name, "cdp-v2") for name in JOBS}
    direct, converted = (pool.run(3, resume, others, str(x), timeout=200)[0] for x in (root, tmp_path))
    for name in JOBS:
        for when in ("saved", "end"):
            same(unpack(direct[name][when]), unpack(converted[name][when]))
        same(
            {n: t for n, t in unpack(direct[name]["saved"]).items() if n in unpack(want[0][name]["saved"])},
            unpack(want[0][name]["saved"]),
        )
        assert direct[name]["lr"] == converted[name]["lr"]


@pytest.mark.slow
def test_ours_becomes_zero3_and_stock_goes_on(pool, ours, tmp_path):
    root, want = ours
    for ranks in (2, 3):
        for name in JOBS:
            size = ["--sub-group-size", "600"] if JOBS[name].get("config") is SMALL else []
            assert (
                convert.main(
                    ["to-zero3", str(root / name), str(tmp_path / str(ranks) / name), "--ranks", str(ranks), *size, "--json"]
                )
                == 0
            )
    two = pool.run(2, resume, {name: job(name, None) for name in JOBS}, str(tmp_path / "2"), timeout=200)
    three = pool.run(3, resume, {name: job(name, None) for name in JOBS}, str(tmp_path / "3"), timeout=200)
    again = pool.run(3, resume, {name: job(name, "dp") for name in JOBS}, str(root), timeout=200)
    for name in JOBS:
        kept = unpack(two[0][name]["saved"])
        for got, same_ranks in ((two, want), (three, again)):
            same(unpack(got[0][name]["saved"]), {n: t for n, t in unpack(want[0][name]["saved"]).items() if n in kept})
            end = unpack(same_ranks[0][name]["end"])
            same(unpack(got[0][name]["end"]), {n: end[n] for n in kept}, *tolerance(name))


@pytest.mark.slow
def test_universal_both_ways(pool, ours, stock, tmp_path):
    """Ours to universal to stock on another number of ranks; stock by DeepSpeed's own converter to universal to ours."""
    names = ("rooted", "bf16")
    root, _ = ours
    for name in names:
        assert convert.main(["to-universal", str(root / name), str(tmp_path / "out" / name), "--json"]) == 0
        folder = stock[0] / name
        done = subprocess.run(
            [
                sys.executable,
                "-m",
                "deepspeed.checkpoint.ds_to_universal",
                "--input_folder",
                str(folder / f"global_step{FIRST}"),
                "--output_folder",
                str(tmp_path / "in" / name / "universal"),
                "--num_extract_workers",
                "1",
                "--num_merge_workers",
                "1",
            ],
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
    got = pool.run(3, resume, {n: job(n, None, config=UNIVERSAL) for n in names}, str(tmp_path / "out"), timeout=200)
    back = pool.run(3, resume, {n: job(n, "dp", config=UNIVERSAL) for n in names}, str(tmp_path / "out"), timeout=200)
    again = pool.run(3, resume, {n: job(n, "dp") for n in names}, str(root), timeout=200)
    theirs = pool.run(3, resume, {n: job(n, "dp", config=UNIVERSAL) for n in names}, str(tmp_path / "in"), timeout=200)
    direct = pool.run(3, resume, {n: job(n, "dp") for n in names}, str(stock[0]), timeout=200)
    for name in names:
        kept = unpack(got[0][name]["saved"])
        for when, allowed in (("saved", (0, 0)), ("end", tolerance(name))):
            end = unpack(again[0][name][when])
            same(unpack(got[0][name][when]), {n: end[n] for n in kept}, *allowed)
            same(unpack(back[0][name][when]), end)
            same(unpack(theirs[0][name][when]), unpack(direct[0][name][when]))


@pytest.mark.slow
def test_deepspeeds_functions_read_our_checkpoints(ours, tmp_path):
    """Also copies of them that a script imported before the engine was registered, lazily, and into files or a model."""
    from deepspeed.utils import zero_to_fp32

    from deepspeed_cdp.integration import plugin

    plugin.unregister()
    try:
        read, load = zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint, zero_to_fp32.load_state_dict_from_zero_checkpoint
        with pytest.raises(FileNotFoundError):
            read(str(ours[0] / "rooted"))
    finally:
        plugin.register()
    for name in JOBS:
        folder = str(ours[0] / name)
        want, tag = convert.get_fp32_state_dict_from_zero_checkpoint(folder), (ours[0] / name / "latest").read_text()
        got, lazy = read(folder), read(folder, tag, lazy_mode=True)
        assert list(got) == list(lazy) == list(want)
        same(got, want)
        for n, t in want.items():
            assert lazy[n].shape == t.shape and lazy[n].dtype == t.dtype and torch.equal(lazy[n].contiguous(), t), n
        zero_to_fp32.convert_zero_checkpoint_to_fp32_state_dict(folder, str(tmp_path / name), max_shard_size="9KB")
        files = [torch.load(path) for path in (tmp_path / name).glob("*.bin")]
        same({n: t for file in files for n, t in file.items()}, want)
    tied = read(str(ours[0] / "llama-tied"))
    assert tied["lm_head.weight"] is tied["model.embed_tokens.weight"]
    model = models.build("rooted")
    load(model, str(ours[0] / "rooted"))
    same(model.state_dict(), convert.get_fp32_state_dict_from_zero_checkpoint(str(ours[0] / "rooted")))
    frozen = [n for n, p in model.named_parameters() if not p.requires_grad]
    assert frozen and not set(frozen) & set(read(str(ours[0] / "rooted"), exclude_frozen_parameters=True))


def test_weights_equal_zero_to_fp32(ours, stock, tmp_path):
    """Of stock's checkpoint, and of ours by way of ZeRO-3's format; one file or several; the script beside the checkpoint."""
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    for name in JOBS:
        want = {
            n: t.float() if t.is_floating_point() else t
            for n, t in get_fp32_state_dict_from_zero_checkpoint(str(stock[0] / name)).items()
        }
        assert convert.main(["to-fp32", str(stock[0] / name), str(tmp_path / name), "--json"]) == 0
        got = load_file(tmp_path / name / "model.safetensors")
        assert got.keys() == want.keys()
        same(got, want)
        memory = convert.get_fp32_state_dict_from_zero_checkpoint(str(ours[0] / name))
        convert.main(["to-zero3", str(ours[0] / name), str(tmp_path / "z" / name), "--ranks", "3", "--json"])
        want = get_fp32_state_dict_from_zero_checkpoint(str(tmp_path / "z" / name))
        assert memory.keys() == want.keys()
        same(memory, {n: t.float() if t.is_floating_point() else t for n, t in want.items()})
    script = subprocess.run(
        [
            sys.executable,
            str(ours[0] / "llama-tied" / "zero_to_fp32.py"),
            str(ours[0] / "llama-tied"),
            str(tmp_path / "several"),
            "--max_shard_size",
            "9KB",
        ],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert script.returncode == 0, script.stderr
    index = json.loads((tmp_path / "several" / "model.safetensors.index.json").read_text())
    parts = {}
    for file in set(index["weight_map"].values()):
        parts |= load_file(tmp_path / "several" / file)
    same(parts, convert.get_fp32_state_dict_from_zero_checkpoint(str(ours[0] / "llama-tied")))
    assert len(set(index["weight_map"].values())) > 3 and parts.keys() == index["weight_map"].keys()
    left = {n for n in convert.get_fp32_state_dict_from_zero_checkpoint(str(ours[0] / "rooted"), exclude_frozen_parameters=True)}
    assert not any(n.startswith("blocks.1.") for n in left) and "blocks.2.weight" in left


def damage(path: Path, how: str) -> None:
    data = path.read_bytes()
    if how == "missing":
        path.unlink()
    elif how == "truncated":
        path.write_bytes(data[: len(data) // 2])
    else:
        flat = torch.load(path, weights_only=False)["optimizer_state_dict"]["fp32_flat_groups"][0]
        at = data.find(flat.detach().numpy().tobytes())
        assert at > 0
        path.write_bytes(data[: at + 4] + bytes([data[at + 4] ^ 0x10]) + data[at + 5 :])


@pytest.mark.parametrize("how", ["missing", "truncated", "flipped"])
def test_damaged_files_of_deepspeed_are_named(stock, tmp_path, how):
    shutil.copytree(stock[0] / "rooted", tmp_path / "c")
    name = "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    damage(tmp_path / "c" / f"global_step{FIRST}" / name, how)
    result = run("check", str(tmp_path / "c"), code=1)
    assert name.removeprefix("zero") in result["error"] and not result["ok"], result


@pytest.mark.parametrize(("name", "kind"), [("rooted", "optim"), ("bf16", "optim"), ("conv", "model")])
def test_swapped_files_of_ranks_are_refused(stock, tmp_path, name, kind):
    """Files that stock DeepSpeed wrote know their ranks. Swapped, they would convert to wrong weights."""
    shutil.copytree(stock[0] / name, tmp_path / "c")
    one, two = sorted((tmp_path / "c" / f"global_step{FIRST}").glob(f"*_{kind}_states.pt"))
    first = one.read_bytes()
    one.write_bytes(two.read_bytes())
    two.write_bytes(first)
    for command in (["check"], ["to-fp32", str(tmp_path / "out")]):
        text = run(command[0], str(tmp_path / "c"), *command[1:], code=1)["error"]
        assert "was written as" in text and "give the files their own names back" in text, text
    assert not (tmp_path / "out").exists()


class Evil:
    """What a hostile pickle does when it is loaded."""

    def __init__(self, path: str):
        self.path = path

    def __reduce__(self):
        return (os.mkdir, (self.path,))


def test_nothing_in_a_checkpoint_is_executed(stock, ours, tmp_path):
    for root, name in ((stock[0], "zero_pp_rank_0_mp_rank_00_optim_states.pt"), (ours[0], "client.pt")):
        folder = tmp_path / name
        shutil.copytree(root / "rooted", folder)
        path = folder / f"global_step{FIRST}" / name
        torch.save({"optimizer_state_dict": Evil(str(tmp_path / "executed"))}, path)
        if name == "client.pt":  # a manifest that agrees
            from deepspeed_cdp.checkpoint.files import file_entry
            from deepspeed_cdp.checkpoint.format import MANIFEST, manifest_text

            manifest = json.loads((path.parent / MANIFEST).read_text())
            del manifest["sha256"]
            manifest["files"][name].update(file_entry(str(path)))
            (path.parent / MANIFEST).write_text(manifest_text(manifest))
        text = run("check", str(folder), code=1)["error"]
        assert name in text and "posix.mkdir" in text and not (tmp_path / "executed").exists(), text
        torch.load(path, weights_only=False)
        assert (tmp_path / "executed").exists(), "the pickle must be one that would do it"
        (tmp_path / "executed").rmdir()


def test_what_is_read_or_of_others_is_never_replaced(stock, tmp_path):
    """--overwrite with OUT at or above DIR, and with files of others in OUT."""
    shutil.copytree(stock[0] / "rooted", tmp_path / "up" / "mine")
    before = sorted(str(p) for p in tmp_path.rglob("*"))
    for out in (tmp_path / "up" / "mine", tmp_path / "up", tmp_path / "up" / "mine" / f"global_step{FIRST}"):
        text = run("to-fp32", str(tmp_path / "up" / "mine"), str(out), "--overwrite", code=1)["error"]
        assert "which is being read" in text, text
    assert (
        "which is being read"
        in run("to-zero3", str(tmp_path / "up" / "mine"), str(tmp_path / "up" / "mine"), "--ranks", "2", "--overwrite", code=1)[
            "error"
        ]
    )
    assert sorted(str(p) for p in tmp_path.rglob("*")) == before
    out = tmp_path / "out"
    run("to-fp32", str(stock[0] / "rooted"), str(out))
    run("to-fp32", str(stock[0] / "rooted"), str(out), "--overwrite", "--max-shard-size", "1KB")
    (out / "notes.txt").write_text("")
    assert "'notes.txt'" in run("to-fp32", str(stock[0] / "rooted"), str(out), "--overwrite", code=1)["error"]
    assert (out / "notes.txt").exists() and len(list(out.iterdir())) > 3


def test_json_is_all_there_is_on_stdout(stock):
    """In a process of its own, where DeepSpeed tells of its accelerator while it is imported."""
    done = subprocess.run(
        [sys.executable, "-m", "deepspeed_cdp.cli.convert", "check", str(stock[0] / "rooted"), "--json"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0 and json.loads(done.stdout)["ok"], (done.stdout, done.stderr)


def test_foreign_folders_and_wrong_arguments(stock, tmp_path):
    step = f"global_step{FIRST}"
    assert "is not a folder" in run("check", str(tmp_path / "no"), code=1)["error"]
    (tmp_path / "latest").write_bytes(b"\xff\xfe")
    assert "latest does not hold" in run("check", str(tmp_path), code=1)["error"]
    (tmp_path / "latest").write_text("../x")
    assert "latest does not hold" in run("check", str(tmp_path), code=1)["error"]
    assert "tag is '../x'" in run("check", str(tmp_path), "--tag", "../x", code=1)["error"]
    (tmp_path / "two").mkdir()
    (tmp_path / "two" / "mp_rank_00_model_states.pt").write_bytes(b"")
    with pytest.raises(CheckpointError, match="not of ZeRO-3"):
        open_checkpoint(str(tmp_path / "two"))
    shutil.copytree(stock[0] / "rooted" / step, tmp_path / "mixed")
    shutil.copy(stock[0] / "conv" / step / "zero_pp_rank_1_mp_rank_00_model_states.pt", tmp_path / "mixed")
    with pytest.raises(CheckpointError, match="rank_1_mp_rank_00_model_states.pt does not belong to"):
        open_checkpoint(str(tmp_path / "mixed"))
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").write_text("")
    assert "--overwrite" in run("to-fp32", str(stock[0] / "conv"), str(tmp_path / "full"), code=1)["error"]
    assert (tmp_path / "full" / "x").exists() and not [p for p in tmp_path.iterdir() if p.name.startswith(".")]
    assert "Adam" in run("to-universal", str(stock[0] / "conv"), str(tmp_path / "u"), code=1)["error"]
    for wrong in (["to-zero3", "a", "b", "--ranks", "0"], ["to-fp32", "a", "b", "--max-shard-size", "big"], ["to-nothing"]):
        with pytest.raises(SystemExit) as ended:
            convert.main(wrong)
        assert ended.value.code == 2
