"""Checkpoints written by someone else: whatever they say, what comes is a CheckpointError or values of the promised kinds.

Every file here is whole, its digests agree, and what it says was changed at random: what no digest can find.
"""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from deepspeed_cdp.checkpoint import export
from deepspeed_cdp.checkpoint.deepspeed_formats import open_checkpoint
from deepspeed_cdp.checkpoint.files import check_tag, file_entry, save_plain, save_tensors
from deepspeed_cdp.checkpoint.format import COUNTERS, MANIFEST, manifest_text, pack_state, unpack_state
from deepspeed_cdp.errors import CheckpointError
from deepspeed_cdp.model.materialize import keys_of

QUICK = settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
NUMBERS = st.one_of(st.integers(-2, 9), st.integers(), st.floats(), st.just(10**400))
NAMES = st.one_of(
    st.sampled_from(
        [
            "param/w",
            "w",
            "../x",
            "/etc/passwd",
            "",
            "float32",
            "load",
            "nn",
            "stage_000.safetensors",
            "client.pt",
            "tensor",
            "dict",
            "list",
            "plain",
            "a\0b",
            "\ud800",
        ]
    ),
    st.text(max_size=4),
)
JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), NUMBERS, NAMES),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(NAMES, inner, max_size=3)),
    max_leaves=6,
)


def make(folder: Path, more: bool = True) -> dict[str, Any]:
    """A whole checkpoint of two stages with Adam's state, without an engine; what its manifest says.

    Args:
        more: with state that DeepSpeed's formats cannot hold.
    """
    folder.mkdir()
    files = {}
    for stage, name in enumerate(("w", "v")):
        tensors = {f"param/{name}": torch.full((2, 3), 1.0 + stage), "frozen/f" + name: torch.ones(2, dtype=torch.bfloat16)}
        state = {"exp_avg": torch.zeros(2, 3), "exp_avg_sq": torch.ones(2, 3), "step": torch.tensor(3.0)}
        state |= {"more": [1, (None, "x")]} if more else {}
        tree = {name: {k: pack_state(v, f"state/{name}/{k}", tensors) for k, v in state.items()}}
        if not stage:
            tensors["scalars"] = torch.zeros(7, dtype=torch.float64)
        file = f"stage_{stage:03d}.safetensors"
        files[file] = save_tensors(str(folder), file, tensors, {"state": json.dumps(tree)})
    for rank in range(2):
        file = f"buffers_{rank:03d}.safetensors"
        files[file] = save_tensors(str(folder), file, {"b": torch.ones(3), "n": torch.tensor(rank)}, {})
    files["client.pt"] = save_plain(str(folder), "client.pt", {"client_state": {"a": 1}, "lr_scheduler": None}, "")
    manifest = {
        "deepspeed_cdp": "0.1.0",
        "ranks": 2,
        "rule": "cdp-v2",
        "stages": [["w"], ["v"]],
        "dtype": "bfloat16",
        "groups": [["w"], ["v"]],
        "options": [{"lr": 0.1, "betas": [0.9, 0.99]}, {"lr": 0.2}],
        "shared": {"u": "w"},
        "frozen_left_out": False,
        "counters": {c: 4 for c in COUNTERS},
        "loss_scale": {
            "untold": False,
            "dynamic": True,
            "cur_scale": 8.0,
            "cur_iter": 3,
            "last_overflow_iter": -1,
            "cur_hysteresis": 1,
            "scale_window": 5,
            "min_scale": 1,
            "delayed_shift": 1,
            "consecutive_hysteresis": False,
        },
        "files": files,
    }
    (folder / MANIFEST).write_text(manifest_text(manifest))
    return manifest


def places(value: Any, path: tuple = ()) -> list[tuple]:
    """Paths of all values inside a JSON tree."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(p for k, v in inside for p in places(v, (*path, k)))]


def changed(data: Any, tree: Any) -> Any:
    """A copy of the tree with a value put in the place of one, a value taken out, or a key renamed."""
    tree = json.loads(json.dumps(tree))
    for _ in range(data.draw(st.integers(1, 2))):
        *above, last = data.draw(st.sampled_from(places(tree)[1:] or [("x",)]))
        at = tree
        for key in above:
            at = at[key]
        how = data.draw(st.sampled_from(["put", "put", "put", "take", "rename"]))
        if how == "put" or not isinstance(at, dict):
            at[last] = data.draw(JSON)
        elif how == "take":
            del at[last]
        else:
            at[data.draw(NAMES)] = at.pop(last)
    return tree


def use(folder: Path) -> bool:
    """Read all that there is, as loading and converting do. False if it was refused, as it may be."""
    try:
        with open_checkpoint(str(folder)) as stored:
            for path in stored._files:
                assert os.path.dirname(os.path.realpath(folder / path)) == os.path.realpath(folder), path
            stored.verify(0, 1, [*stored.trained, *stored.frozen])
            for names in (stored.trained, stored.frozen, stored.buffers):
                for name, kind in names.items():
                    assert isinstance(kind.dtype, torch.dtype) and all(type(n) is int and n >= 0 for n in kind.shape)
                    value = stored.buffer(name, 1) if names is stored.buffers else stored.value(name)
                    assert (tuple(value.shape), value.dtype) == (kind.shape, kind.dtype), name
            for name in stored.trained:
                assert isinstance(stored.state(name), dict)
            vector = stored.scalars((("w",), ("v",)))
            assert vector is None or (vector.shape, vector.dtype) == ((7,), torch.float64)
            assert set(stored.counters) <= set(COUNTERS) and all(type(n) is int and n >= 0 for n in stored.counters.values())
            assert all(isinstance(n, str) for g in stored.groups for n in g["params"]) and isinstance(stored.dtype, torch.dtype)
            assert isinstance(stored.client_state, dict) and isinstance(stored.shared, dict)
            for name in ("w", "u", "nobody"):
                stored.name_of(name)
            outside = {p for p in folder.parent.iterdir()}
            for write in (export.write_universal, export.write_cyclic, lambda s, o: export.write_zero3(s, o, 2)):
                try:
                    write(stored, str(folder.parent / "out" / "t"))
                except CheckpointError:
                    pass  # each format has its limits
                finally:
                    shutil.rmtree(folder.parent / "out", ignore_errors=True)
                    assert {p for p in folder.parent.iterdir()} == outside
                    assert not (folder.parent.parent / "x").exists()
    except CheckpointError as error:
        assert str(error) and "\n" not in str(error)
        return False
    return True


def test_the_checkpoint_itself_is_read(tmp_path):
    make(tmp_path / "t")
    assert use(tmp_path / "t")
    with open_checkpoint(str(tmp_path / "t")) as stored:
        assert stored.state("w")["more"] == [1, (None, "x")] and stored.counters["global_steps"] == 4


@QUICK
@given(st.data())
def test_manifests(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("fuzz") / "t"
    manifest = changed(data, make(folder, more=data.draw(st.booleans())))
    (folder / MANIFEST).write_text(manifest_text(manifest) if isinstance(manifest, dict) else json.dumps(manifest))
    use(folder)


@QUICK
@given(st.data())
def test_trees_of_optimizer_state(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("fuzz") / "t"
    manifest = make(folder)
    path = folder / "stage_000.safetensors"
    from safetensors import safe_open

    with safe_open(path, "pt") as file:
        text = file.metadata()["state"]
    other = data.draw(st.one_of(st.none(), st.text(max_size=6), st.builds(lambda: json.dumps(changed(data, json.loads(text))))))
    save_file(load_file(path), path, {} if other is None else {"state": other})
    manifest["files"][path.name].update(file_entry(str(path)))
    (folder / MANIFEST).write_text(manifest_text(manifest))
    use(folder)


@QUICK
@given(st.data())
def test_what_tensor_files_say(tmp_path_factory, data):
    """Other tensors than the manifest has, or no tensors at all, with a digest that agrees."""
    folder = tmp_path_factory.mktemp("fuzz") / "t"
    manifest = make(folder)
    path = folder / data.draw(
        st.sampled_from(["stage_001.safetensors", "buffers_000.safetensors", "buffers_001.safetensors", "client.pt"])
    )
    if data.draw(st.booleans()) or path.suffix == ".pt":
        path.write_bytes(data.draw(st.binary(max_size=40)) + path.read_bytes()[data.draw(st.integers(0, 60)) :])
    else:
        tensors = load_file(path)
        name = data.draw(st.sampled_from(sorted(tensors)))
        dtype = data.draw(st.sampled_from([torch.float32, torch.int64, torch.bfloat16, torch.bool]))
        tensors[name] = torch.zeros(data.draw(st.lists(st.integers(0, 4), max_size=3)), dtype=dtype)
        save_file(tensors, path, {"state": "{}"})
        if data.draw(st.booleans()):  # and the manifest says so, too
            manifest["files"][path.name]["tensors"][name] = [str(dtype).removeprefix("torch."), list(tensors[name].shape)]
    manifest["files"][path.name].update(file_entry(str(path)))
    (folder / MANIFEST).write_text(manifest_text(manifest))
    use(folder)


@QUICK
@given(st.data())
def test_clients_pickles(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("fuzz") / "t"
    manifest = make(folder)
    torch.save(
        data.draw(JSON.filter(lambda x: "\ud800" not in repr(x).encode().decode("unicode_escape", "replace"))),
        folder / "client.pt",
    )
    manifest["files"]["client.pt"].update(file_entry(str(folder / "client.pt")))
    (folder / MANIFEST).write_text(manifest_text(manifest))
    use(folder)


def foreign(root: Path, kind: str, ranks: int = 2) -> Path:
    """A whole checkpoint in one of DeepSpeed's formats, made from this package's own."""
    if not (root / "own").exists():
        make(root / "own", more=False)
    with open_checkpoint(str(root / "own")) as stored:
        stored.verify(0, 1, ["w", "v"])
        if kind == "zero3":
            export.write_zero3(stored, str(root / kind), ranks, replace=True)
        else:
            export.write_universal(stored, str(root / kind), replace=True)
    return root / kind


def use_foreign(folder: Path) -> str:
    """Read and convert all that there is; the text of the refusal, or nothing."""
    try:
        with open_checkpoint(str(folder)) as stored:
            stored.verify(0, 1, [*stored.trained, *stored.frozen])
            for names in (stored.trained, stored.frozen, stored.buffers):
                for name, kind in names.items():
                    for rank in range(stored.ranks):
                        value = stored.buffer(name, rank) if names is stored.buffers else stored.value(name)
                        assert (tuple(value.shape), value.dtype) == (kind.shape, kind.dtype), name
            for name in stored.trained:
                assert isinstance(stored.state(name), dict)
            assert all(type(n) is int and n >= 0 for n in stored.counters.values())
            for write in (
                export.write_fp32,
                export.write_universal,
                export.write_cyclic,
                lambda s, o: export.write_zero3(s, o, 2),
            ):
                try:
                    write(stored, str(folder.parent / "out"))
                except CheckpointError:
                    pass  # each format has its limits
                finally:
                    shutil.rmtree(folder.parent / "out", ignore_errors=True)
    except CheckpointError as error:
        assert "\n" not in str(error), str(error)
        return str(error)
    return ""


@pytest.mark.parametrize("kind", ["zero3", "universal"])
def test_deepspeeds_formats_are_read(tmp_path, kind):
    assert use_foreign(foreign(tmp_path, kind)) == ""


def rewrite(path: Path, change: Any) -> None:
    """Another content, as torch.save would have written it."""
    content = torch.load(path, weights_only=False)
    change(content)
    torch.save(content, path)


def state_files(folder: Path) -> dict[str, Path]:
    return {
        f"{kind}{rank}": next(folder.glob(f"*zero_pp_rank_{rank}_*{kind}_states.pt"))
        for kind in ("model", "optim")
        for rank in (0, 1)
    }


@pytest.mark.parametrize("ranks", [10**9, 2**62, 3, 1, 0, -1, 2.0, "2", None, 10**30])
def test_false_numbers_of_ranks_take_no_memory(tmp_path, ranks):
    import tracemalloc

    files = state_files(foreign(tmp_path, "zero3"))
    for path in (files["model0"], files["model1"]):
        rewrite(path, lambda content: content.update(dp_world_size=ranks))
    tracemalloc.start()
    assert "rank" in use_foreign(tmp_path / "zero3") or "dp_world_size" in use_foreign(tmp_path / "zero3")
    assert tracemalloc.get_traced_memory()[1] < 50e6
    tracemalloc.stop()


@pytest.mark.parametrize("kind", ["model", "optim"])
def test_swapped_files_are_refused(tmp_path, kind):
    """torch.save keeps the name that a file was written under."""
    files = state_files(foreign(tmp_path, "zero3"))
    one, two = files[kind + "0"], files[kind + "1"]
    first = one.read_bytes()
    one.write_bytes(two.read_bytes())
    two.write_bytes(first)
    assert "was written as" in use_foreign(tmp_path / "zero3")


def optimizer(content: Any) -> Any:
    return content["optimizer_state_dict"]["optimizer_state_dict"]


@pytest.mark.parametrize(
    ("file", "change", "text"),
    [
        ("model1", lambda c: c.update(global_steps=5), "global_steps differs"),
        ("model1", lambda c: c["module"].update(b=torch.ones(4)), "b differs"),
        ("model1", lambda c: c.update(dp_world_size=3), "is of 3 ranks"),
        ("model0", lambda c: c.update(global_steps=-1), "global_steps that ZeRO-3 never writes"),
        ("model0", lambda c: c.update(shared_params={"u": 3}), "shared_params that ZeRO-3 never writes"),
        ("optim1", lambda c: optimizer(c)["state"][0].update(step=torch.tensor(9.0)), "the optimizer's state differs"),
        ("optim1", lambda c: optimizer(c)["state"][0].pop("exp_avg"), "the optimizer's state differs"),
        ("optim1", lambda c: optimizer(c)["param_groups"][1].update(lr=0.5), "the optimizer's param_groups differs"),
        ("optim0", lambda c: optimizer(c)["param_groups"][1].update(params=[0]), "in two parameter groups"),
        ("optim0", lambda c: optimizer(c)["param_groups"][1].update(params=[7]), "do not fit its model states"),
        ("optim0", lambda c: c["optimizer_state_dict"]["loss_scaler"].__dict__.pop("cur_scale"), "a loss scaler that DeepSpeed"),
        ("optim1", lambda c: c["optimizer_state_dict"].update(fp32_flat_groups=[torch.ones(2)]), "flat groups of other sizes"),
        ("optim1", lambda c: c["optimizer_state_dict"].update(partition_count=3), "is of 3 ranks"),
    ],
)
def test_files_of_two_checkpoints_are_refused(tmp_path, file, change, text):
    """Counts, options and shapes are equal on all ranks."""
    path = state_files(foreign(tmp_path, "zero3"))[file]
    rewrite(path, change)
    told = use_foreign(tmp_path / "zero3")
    assert text in told and path.name in told, told


@QUICK
@given(st.data())
def test_what_deepspeeds_files_say(tmp_path_factory, data):
    """Any value in any of the files replaced, taken out or renamed."""
    root = tmp_path_factory.mktemp("fuzz")
    folder = foreign(root, data.draw(st.sampled_from(["zero3", "zero3", "universal"])))
    path = data.draw(st.sampled_from(sorted(folder.rglob("*.pt"))))
    content = torch.load(path, weights_only=False)
    for _ in range(data.draw(st.integers(1, 2))):
        paths = places(content)[1:]
        if not paths:
            break
        *above, last = data.draw(st.sampled_from(paths))
        at = content
        for key in above:
            at = at[key]
        tensors = st.builds(
            torch.zeros, st.lists(st.integers(0, 4), max_size=3), dtype=st.sampled_from([torch.float32, torch.int64])
        )
        if data.draw(st.booleans()) or not isinstance(at, dict):
            at[last] = data.draw(st.one_of(JSON, tensors, st.just(torch.Size([2, 3])), st.just((10**9, 10**9))))
        elif data.draw(st.booleans()):
            del at[last]
        else:
            at[data.draw(NAMES)] = at.pop(last)
    torch.save(content, path)
    use_foreign(folder)


@QUICK
@given(st.one_of(NAMES, st.lists(NAMES, max_size=4).map("/".join)))
def test_tags_stay_inside(tmp_path_factory, tag):
    root = tmp_path_factory.getbasetemp() / "root"
    try:
        tag = check_tag(tag)
    except ValueError as error:
        assert "tag is" in str(error)
        return
    assert os.path.normpath(root / tag).startswith(f"{root}{os.sep}")


@QUICK
@given(st.data())
def test_indexes_of_weights(tmp_path_factory, data):
    """``cyclic.weights``: an index that is no index, or names files elsewhere."""
    folder = tmp_path_factory.mktemp("fuzz") / "weights"
    folder.mkdir()
    save_file({"w": torch.ones(2)}, folder / "a.safetensors")
    save_file({"secret": torch.ones(2)}, folder.parent / "b.safetensors")
    index = {"metadata": {"total_size": 8}, "weight_map": {"w": "a.safetensors"}}
    outside = st.just({"weight_map": {"w": "../b.safetensors"}})
    index = data.draw(st.one_of(outside, st.builds(lambda: changed(data, index)), JSON))
    (folder / "model.safetensors.index.json").write_text(data.draw(st.one_of(st.just(json.dumps(index)), st.text(max_size=9))))
    try:
        keys = keys_of(str(folder))
    except ValueError as error:
        assert "cyclic.weights" in str(error)
        return
    assert set(keys) <= {"w"} and all(os.path.dirname(os.path.realpath(p)) == str(folder) for p in keys.values())


@pytest.mark.parametrize("name", ["../../../x", "/tmp/x-of-the-fuzz-test", "a/../../../../x", ".."])
def test_names_of_parameters_do_not_leave_the_folder_when_written(tmp_path, name):
    """The universal format has a folder per parameter."""
    folder = tmp_path / "in" / "t"
    folder.parent.mkdir()
    manifest = make(folder, more=False)
    path = folder / "stage_000.safetensors"
    tensors = {k.replace("/w", "/" + name): v for k, v in load_file(path).items()}
    trees = {name: {k: {"tensor": f"state/{name}/{k}"} for k in ("exp_avg", "exp_avg_sq", "step")}}
    manifest["files"][path.name] = save_tensors(str(folder), path.name, tensors, {"state": json.dumps(trees)})
    manifest["groups"], manifest["shared"], manifest["stages"] = [[name], ["v"]], {}, None
    (folder / MANIFEST).write_text(manifest_text(manifest))
    before = {p for p in tmp_path.rglob("*")}
    with open_checkpoint(str(folder)) as stored:
        assert torch.equal(stored.value(name), torch.ones(2, 3)), "it can be read"
        with pytest.raises(CheckpointError, match="cannot be the name of a folder"):
            export.write_universal(stored, str(tmp_path / "in" / "out"))
    assert {p for p in tmp_path.rglob("*")} == before and not os.path.exists("/tmp/x-of-the-fuzz-test")


def test_state_that_cannot_be_saved_is_refused():
    tensors: dict[str, torch.Tensor] = {}
    value = {"a": [torch.ones(2), (1, None)], "b": {"c": 2.5, "d": torch.zeros(())}, 3: True}
    back = unpack_state(json.loads(json.dumps(pack_state(value, "state/x", tensors))), tensors.__getitem__)
    assert back.keys() == value.keys() and torch.equal(back["a"][0], torch.ones(2))
    assert back["a"][1] == (1, None) and back[3] is True
    with pytest.raises(ValueError, match="'state/x/a' is a set"):
        pack_state({"a": {1}}, "state/x", tensors)


@QUICK
@given(st.data())
def test_any_damage_is_named(tmp_path_factory, data):
    """Any byte changed, any file cut anywhere or taken away."""
    folder = tmp_path_factory.mktemp("fuzz") / "t"
    make(folder)
    path = folder / data.draw(st.sampled_from(sorted(p.name for p in folder.iterdir())))
    good = path.read_bytes()
    at = data.draw(st.integers(0, len(good) - 1))
    how = data.draw(st.sampled_from(["flip", "cut", "take"]))
    if how == "take":
        path.unlink()
    else:
        rest = bytes([good[at] ^ data.draw(st.integers(1, 255))]) + good[at + 1 :] if how == "flip" else b""
        path.write_bytes(good[:at] + rest)
    try:
        with open_checkpoint(str(folder)) as stored:
            stored.verify(0, 1, ["w"])
    except CheckpointError as error:
        assert path.name in str(error)
        return
    assert path.name == MANIFEST and how == "flip" and json.loads(path.read_bytes()) == json.loads(good), "only white space"
