"""Saving never spoils the last good checkpoint, and what does not fit is told before anything is changed."""

import json
import os
import resource
import shutil
import signal
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from deepspeed_cdp.checkpoint import saving
from deepspeed_cdp.checkpoint.files import existing_folder, file_entry
from deepspeed_cdp.checkpoint.format import MANIFEST, manifest_text
from deepspeed_cdp.errors import CheckpointError
from support import models
from support.checkpoint_work import equal, snapshot
from support.engine_work import Job, pack, same, start, train, unpack, whole

MLP = Job("mlp", "cdp-v2", 1, clip=0.3, timeout=8.0)


def refused(action: Any, error: type[Exception] = CheckpointError) -> str:
    with pytest.raises(error) as caught:
        action()
    return str(caught.value)


def failing_saves(rank: int, world: int, folder: str) -> dict[str, str]:
    """Saves that fail in different ways; after each the engine trains on and the first checkpoint is the one loaded."""
    engine = start(MLP, world)
    train(engine, MLP, rank, 0, 2)
    engine.save_checkpoint(folder, tag="good")
    want, texts = whole(engine), {}
    train(engine, MLP, rank, 2, 3)

    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == 1:  # as on a full disk: the file stops growing in the middle
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        texts["full"] = refused(lambda: engine.save_checkpoint(folder, tag="good"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    train(engine, MLP, rank, 3, 4)
    texts["tags"] = refused(lambda: engine.save_checkpoint(folder, tag=f"t{rank}"))
    texts["outside"] = refused(lambda: engine.save_checkpoint(folder, tag="../t"), ValueError)
    texts["client"] = refused(lambda: engine.save_checkpoint(folder, tag="good", client_state={"x": models.MLP()}))
    texts["file"] = refused(lambda: engine.save_checkpoint(os.path.join(folder, "latest")))  # a file where a folder must be made
    stock = saving.replace_folder

    def broken(*_: Any) -> None:
        raise OSError(5, "Input/output error")

    saving.replace_folder = broken  # on rank 0 only, last of all: the others wait for it
    try:
        texts["finish"] = refused(lambda: engine.save_checkpoint(folder, tag="good"))
    finally:
        saving.replace_folder = stock
    train(engine, MLP, rank, 4, 5)
    texts["name"] = refused(lambda: engine.save_checkpoint(folder, tag="latest"), ValueError)
    texts["link"] = refused(lambda: engine.save_checkpoint(folder, tag="linked"))
    texts["inside"] = refused(lambda: engine.save_checkpoint(folder, tag="good/x"))
    texts["odd"] = refused(lambda: engine.load_checkpoint(os.path.join(folder, "odd")))
    train(engine, MLP, rank, 5, 6)
    assert engine.load_checkpoint(folder)[0].endswith("good")
    same(whole(engine), want)
    numbers = {"numpy": numpy.random.default_rng(0).integers(9, size=3), "float": numpy.float64(0.5)}
    engine.save_checkpoint(folder, tag="runs/numpy", client_state=numbers)
    _, back = engine.load_checkpoint(folder)
    assert (back["numpy"] == numbers["numpy"]).all() and back["float"] == 0.5 and Path(folder, "runs", "numpy").is_dir()
    Path(folder, "latest").write_text("good")
    engine.destroy()
    return texts


def killed_between_renames(rank: int, world: int, folder: str) -> None:
    """Rank 0 is killed when the old folder has been moved away and the new one is not there yet."""
    engine = start(MLP, world)
    engine.load_checkpoint(folder)
    train(engine, MLP, rank, 2, 3)
    stock = os.rename

    def kill(source: str, target: str) -> None:
        if source.endswith(".saving"):
            os.kill(os.getpid(), signal.SIGKILL)
        stock(source, target)

    os.rename = kill
    engine.save_checkpoint(folder, tag="good")


def loads_good(rank: int, world: int, folder: str) -> bytes:
    engine = start(MLP, world)
    assert engine.load_checkpoint(folder)[0].endswith("good") and engine.global_steps == 2
    state = pack(whole(engine))
    train(engine, MLP, rank, 2, 3)
    engine.save_checkpoint(folder, tag="good")  # over the remains
    engine.load_checkpoint(folder)
    assert engine.global_steps == 3
    engine.destroy()
    return state


def test_no_failure_while_saving_spoils_the_last_good_checkpoint(pool, tmp_path):
    (tmp_path / "linked").symlink_to(tmp_path)
    (tmp_path / "odd").mkdir()
    os.mkfifo(tmp_path / "odd" / "latest")
    for texts in pool.run(2, failing_saves, str(tmp_path), timeout=120):
        for what in ("full", "client", "finish"):
            assert "untouched" in texts[what] and ("rank 1" if what == "full" else "rank 0") in texts[what], texts[what]
        assert "File too large" in texts["full"] and "Input/output error" in texts["finish"]
        assert "models.MLP" in texts["client"] and "['t0', 't1']" in texts["tags"] and "'../t'" in texts["outside"]
        assert "NotADirectoryError" in texts["file"] or "FileExistsError" in texts["file"]
        assert "'latest' is a name that save_checkpoint writes itself" in texts["name"]
        assert "linked is a symbolic link, and only a folder is replaced" in texts["link"]
        assert "good is a checkpoint, and no other is saved inside it" in texts["inside"]
        assert "latest is no regular file" in texts["odd"] and "nothing was changed" in texts["odd"]
    (tmp_path / "linked").unlink()
    shutil.rmtree(tmp_path / "odd")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["good", "latest", "runs", "zero_to_fp32.py"]
    before = unpack(pool.run(1, loads_state, str(tmp_path), timeout=120)[0])
    dead = pool.run_failing(2, killed_between_renames, str(tmp_path), timeout=120)
    assert dead[0] == -signal.SIGKILL
    assert not (tmp_path / "good").exists() and existing_folder(str(tmp_path / "good")).endswith(".good.old")
    for state in pool.run(2, loads_good, str(tmp_path), timeout=120):
        same(unpack(state), before)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["good", "latest", "runs", "zero_to_fp32.py"]


def loads_state(rank: int, world: int, folder: str) -> bytes:
    engine = start(MLP, world)
    engine.load_checkpoint(folder)
    state = pack(whole(engine))
    engine.destroy()
    return state


ROOTED = Job("rooted", "cdp-v2", 1, schedule="warmup", timeout=8.0)


def frozen_left_out(rank: int, world: int, folder: str) -> dict[str, Any]:
    engine = start(ROOTED, world)
    train(engine, ROOTED, rank, 0, 2)
    engine.save_checkpoint(folder, tag="all")
    engine.save_checkpoint(folder, tag="some", exclude_frozen_parameters=True)
    want = whole(engine)
    engine.destroy()
    other = start(ROOTED, world)
    other._runtime.owner.frozen and [t.add_(1) for t in other._runtime.owner.frozen.values()]
    other._runtime.restart()
    before = whole(other)
    other.load_checkpoint(folder, tag="some")
    some = whole(other)
    other.load_checkpoint(folder, tag="all")
    same(whole(other), want)
    other.destroy()
    frozen = [n for n in want if n.startswith("blocks.1.")]
    same({n: some[n] for n in want if n not in frozen}, {n: want[n] for n in want if n not in frozen})
    same({n: some[n] for n in frozen}, {n: before[n] for n in frozen})
    assert not torch.equal(some[frozen[0]], want[frozen[0]])
    return {"frozen": frozen}


def test_frozen_parameters_are_left_out_on_request(pool, tmp_path):
    frozen = pool.run(2, frozen_left_out, str(tmp_path), timeout=120)[0]["frozen"]
    for tag, there_ in (("all", True), ("some", False)):
        names = {n for file in (tmp_path / tag).glob("stage_*") for n in load_file(file)}
        assert all((f"frozen/{n}" in names) == there_ for n in frozen) and not any(f"param/{n}" in names for n in frozen)


def rewrite(folder: Path, change: Any) -> None:
    """A manifest that is whole, but says something else."""
    manifest = json.loads((folder / MANIFEST).read_text())
    del manifest["sha256"]
    change(manifest)
    (folder / MANIFEST).write_text(manifest_text(manifest))


def unfit(rank: int, world: int, folder: str) -> dict[str, str]:
    """Checkpoints that are whole but do not fit this engine; nothing is changed by trying."""
    import torch.distributed as dist

    root = Path(folder)
    engine = start(ROOTED, world)
    train(engine, ROOTED, rank, 0, 2)
    engine.save_checkpoint(folder, tag="good")
    train(engine, ROOTED, rank, 2, 3)
    engine.flush()
    before, texts = snapshot(engine), {}

    def attempt(what: str, change: Any, **options: Any) -> None:
        good = (root / "good" / MANIFEST).read_text()
        if rank == 0:
            change()
        dist.barrier()
        texts[what] = refused(lambda: engine.load_checkpoint(folder, **{"tag": "good", **options}))
        dist.barrier()
        if rank == 0:
            (root / "good" / MANIFEST).write_text(good)
        dist.barrier()
        assert equal(snapshot(engine), before), what

    def files(change: Any) -> Any:
        return lambda: rewrite(root / "good", lambda m: change(m["files"]))

    def shape(value: Any) -> Any:
        def change(files: dict) -> None:
            for found in files.values():
                if "param/blocks.2.weight" in found["tensors"]:
                    found["tensors"]["param/blocks.2.weight"] = value

        return files_(change)

    files_ = files
    attempt("outside", files(lambda f: f.update({"../good/client.pt": f["client.pt"]})))
    attempt("absolute", files(lambda f: f.update({"/etc/passwd": f["client.pt"]})))
    attempt("huge", shape(["float32", [10**9, 10**9]]))
    attempt("dtype", shape(["int32", [8, 8]]))
    attempt("shape", shape(["float32", [4, 16]]))
    attempt("header", files(lambda f: [v["tensors"].update(ghost=["float32", [0]]) for n, v in f.items() if n[:7] == "buffers"]))
    attempt("buffers", files(lambda f: f["buffers_001.safetensors"]["tensors"].update(ghost=["float32", [0]])))

    def manifest(change: Any) -> Any:
        return lambda: rewrite(root / "good", change)

    attempt("counters", manifest(lambda m: m["counters"].update(_runtime=1)))
    attempt("counter", manifest(lambda m: m["counters"].update(global_steps="many")))
    attempt("options", manifest(lambda m: m["options"][0].update(lr="fast")))
    attempt("betas", manifest(lambda m: m["options"][0].update(betas=0.9)))
    attempt("scale", manifest(lambda m: m["loss_scale"].update(dynamic=True)))
    attempt("code", manifest(lambda m: m.update(dtype="load")))

    def moments() -> None:
        for path in (root / "good").glob("stage_*"):
            tensors = load_file(path)
            with safe_open(path, "pt") as file:
                trees = file.metadata()
            odd = {k: v[:1].clone() if k.endswith("/exp_avg") and v.dim() > 1 else v for k, v in tensors.items()}
            save_file(odd, path, trees)
            kinds = {k: [str(v.dtype)[6:], list(v.shape)] for k, v in odd.items()}
            rewrite(path.parent, lambda m, n=path.name, p=path, k=kinds: m["files"][n].update(file_entry(str(p)), tensors=k))

    whole_files = {path: path.read_bytes() for path in (root / "good").glob("stage_*")} if rank == 0 else {}
    attempt("moments", moments)
    for path, data in whole_files.items():
        path.write_bytes(data)
    dist.barrier()
    attempt("format", lambda: rewrite(root / "good", lambda m: m.update(format=7)))

    def foreign_scheduler() -> None:
        path = root / "good" / "client.pt"
        torch.save({"client_state": {}, "lr_scheduler": {"nothing": "of WarmupLR's"}}, path)
        rewrite(root / "good", lambda m: m["files"]["client.pt"].update(file_entry(str(path))))

    def hostile_scheduler() -> None:
        path = root / "good" / "client.pt"
        torch.save({"client_state": {}, "lr_scheduler": {"last_batch_iteration": 2, "step": 0}}, path)
        rewrite(root / "good", lambda m: m["files"]["client.pt"].update(file_entry(str(path))))

    client = (root / "good" / "client.pt").read_bytes()
    attempt("scheduler", foreign_scheduler)
    attempt("methods", hostile_scheduler)
    if rank == 0:
        (root / "good" / "client.pt").write_bytes(client)
    dist.barrier()
    if rank == 0:
        (root / "latest").write_text("good")
    dist.barrier()
    texts["differ"] = refused(lambda: engine.load_checkpoint(folder if rank else str(root / "nowhere")))
    assert engine.load_checkpoint(folder)[0]
    engine.destroy()

    bigger = Job("mlp", "cdp-v2", 1, timeout=8.0)
    engine = start(bigger, world)
    texts["model"] = refused(lambda: engine.load_checkpoint(folder))
    state = whole(engine)
    assert engine.load_checkpoint(folder, load_module_strict=False, load_optimizer_states=False, load_lr_scheduler_states=False)[
        0
    ]
    same(whole(engine), state)  # nothing of the other model has one of its names
    engine.destroy()
    return texts


def test_what_does_not_fit_is_told_and_changes_nothing(pool, tmp_path):
    pieces = {
        "outside": "'../good/client.pt', which is not in its folder",
        "absolute": "'/etc/passwd'",
        "huge": "enough for its tensors, of 40000000000000",
        "dtype": "torch.int32",
        "shape": "is (4, 16) in",
        "buffers": "each rank's buffers, of the same shapes",
        "counters": "counters._runtime is 1, which is not",
        "counter": "counters.global_steps is 'many', which is not a whole number",
        "options": "'lr' is 'fast' in",
        "betas": "'betas' is 0.9 in",
        "scale": "loss_scale is {",
        "code": "dtype is 'load', which is not a dtype",
        "moments": "the optimizer's 'exp_avg' of parameter",
        "header": "buffer 'ghost' is only in",
        "format": "has format 7 and this version reads",
        "scheduler": "does not fit a WarmupLR",
        "methods": "would replace 'step' of a WarmupLR",
        "differ": "['None', 'good']",
        "model": "has no parameter 'blocks.0.0.bias'",
    }
    for texts in pool.run(2, unfit, str(tmp_path), timeout=120):
        assert texts.keys() == pieces.keys()
        for what, piece in pieces.items():
            assert piece in texts[what] and ("nothing was changed" in texts[what]), (what, texts[what])


class Nested(torch.optim.SGD):
    """State as Shampoo and SOAP keep it: lists, tuples and dicts of tensors."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in (p for g in self.param_groups for p in g["params"] if p.grad is not None):
            state = self.state[p]
            if not state:
                state.update(
                    factors=[torch.eye(n) for n in p.shape], pair=(torch.zeros(()), "word"), by_name={"n": 0, "sum": p * 0}
                )
            state["factors"][0].add_(p.grad.mean())
            state["by_name"]["sum"] += p.grad
            state["by_name"]["n"] += 1
            p.sub_(0.1 * state["by_name"]["sum"] / state["by_name"]["n"])


def nested(rank: int, world: int, folder: str) -> None:
    import deepspeed

    engines = []
    for _ in range(2):
        module = models.build("mlp")
        config = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 3}, "cyclic": {"enabled": True}}
        engines.append(deepspeed.initialize(model=module, optimizer=Nested(module.parameters(), lr=0.1), config=config)[0])
        train(engines[-1], MLP, rank, 0, 2 if len(engines) == 1 else 1)
        if len(engines) == 1:
            engines[0].save_checkpoint(folder)
            losses = train(engines[0], MLP, rank, 2, 4)
            want = whole(engines[0])
            engines[0].destroy()
    engines[1].load_checkpoint(folder)
    assert train(engines[1], MLP, rank, 2, 4) == losses
    same(whole(engines[1]), want)
    engines[1].destroy()


def test_nested_optimizer_state_resumes(pool, tmp_path):
    pool.run(2, nested, str(tmp_path), timeout=120)


class FusedAdam(torch.optim.Optimizer):
    """Counts steps as DeepSpeed's FusedAdam does (which needs a GPU): in the state of a group's last parameter."""

    def __init__(self, params: Any):
        super().__init__(params, {"lr": 1e-2, "step": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in (g for g in self.param_groups if g["params"]):
            for p in group["params"]:
                if not self.state[p]:
                    self.state[p] = {"step": group["step"], "exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
                state = self.state[p]
            state["step"] += 1
            for p in group["params"]:
                mean, square = self.state[p]["exp_avg"], self.state[p]["exp_avg_sq"]
                mean.lerp_(p.grad, 0.1)
                square.lerp_(p.grad.square(), 0.001)
                p.sub_(1e-2 * mean / (1 - 0.9 ** state["step"]) / ((square / (1 - 0.999 ** state["step"])).sqrt() + 1e-8))


def counts(rank: int, world: int, folder: str, saves: bool, fused: bool) -> bytes:
    import deepspeed

    module = models.build("mlp")
    optimizer = FusedAdam(module.parameters()) if fused else torch.optim.Adam(module.parameters(), lr=1e-2)
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": {"stage": 3},
        "gradient_clipping": 0.0,
        "cyclic": {"enabled": True, "rule": "dp"},
    }
    engine = deepspeed.initialize(model=module, optimizer=optimizer, config=config)[0]
    if saves:
        train(engine, MLP, rank, 0, 3)
        engine.save_checkpoint(folder)
    else:
        engine.load_checkpoint(folder)
        train(engine, MLP, rank, 3, 5)
    state = pack(whole(engine))
    engine.destroy()
    return state


def test_counts_of_fused_adam_reach_every_parameter(pool, tmp_path):
    """On another ring another parameter is the last; and torch's Adam takes over."""
    ends = []
    for fused in (True, False):
        pool.run(2, counts, str(tmp_path / str(fused)), True, fused, timeout=120)
        for other in (True, False):
            ends.append(unpack(pool.run(3, counts, str(tmp_path / str(fused)), False, other, timeout=120)[0]))
    for end in ends[1:]:
        same(end, ends[0], 1e-4, 1e-5)
