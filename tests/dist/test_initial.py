"""Models that no rank holds whole: zero.Init, Hugging Face's from_pretrained under it, the meta device with a weights folder."""

import ctypes
import gc
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from support import models
from support.engine_work import Job, ds_config, pack, same, start, told, train, unpack, whole

JOBS = [
    Job("rooted", "cdp-v2", clip=0.3),
    Job("conv", "dp", 2),
    Job("llama-tied", "cdp-v1", bf16=True),
    Job("llama", "cdp-v2", optimizer="callable"),
]


def on_meta(kind: str) -> nn.Module:
    with torch.device("meta"):
        return models.build(kind)


def built_in(how: str, job: Job, world: int) -> nn.Module:
    import deepspeed

    if how == "plain":
        return models.build(job.kind)
    if how == "meta":
        return on_meta(job.kind)
    config = {k: v for k, v in ds_config(job, world).items() if k != "cyclic"} if how == "stock config" else ds_config(job, world)
    if job.kind.startswith("llama"):  # Hugging Face's own initialisation needs its own way in: see below
        module = models.build(job.kind)
        deepspeed.zero.Init(module=module, config_dict_or_path=config)
    else:
        with deepspeed.zero.Init(config_dict_or_path=config):
            module = models.build(job.kind)
    assert all(p.numel() == 0 for p in module.parameters())  # partitioned indeed
    return module


def trains(rank: int, world: int, how: str, jobs: list[Job]) -> list[tuple[bytes, dict]]:
    results = []
    for job in jobs:
        module = built_in(how, job, world)
        given = list(module.parameters())
        engine = start(job, world, module)
        assert all(p is q for p, q in zip(given, engine.module.parameters()))  # what a script holds stays valid
        losses = train(engine, job, rank)
        results.append((pack(whole(engine)), losses))
        engine.destroy()
    return results


@pytest.mark.slow
def test_zero_init_trains_as_the_whole_model_does(pool):
    """Frozen and root parameters, batch norm, tied weights, bf16: bit by bit."""
    want = pool.run(2, trains, "plain", JOBS, timeout=180)
    for how in ("stock config", "our config"):
        got = pool.run(2, trains, how, JOBS, timeout=180)
        for rank in range(2):
            for job, (state, losses), (expected, their_losses) in zip(JOBS, got[rank], want[rank]):
                assert losses == their_losses, job
                same(unpack(state), unpack(expected))


def saved(kind: str, folder: Path, shards: int = 1) -> str:
    """Weights as Hugging Face saves them: tied names once, an index for several files."""
    module = models.build(kind)
    state = {n: p.detach() for n, p in module.named_parameters()}
    state |= {
        n: b
        for n, b in module.state_dict().items()
        if n not in state and "." in n and n.split(".")[-1] in ("running_mean", "running_var", "num_batches_tracked")
    }
    folder.mkdir()
    names = [f"model-{i}.safetensors" for i in range(shards)]
    home = {n: names[i % shards] for i, n in enumerate(state)}
    for name in names:
        save_file({n: v for n, v in state.items() if home[n] == name}, folder / name)
    if shards > 1:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": home}))
        save_file({n: v + 1 for n, v in state.items()}, folder / "other.safetensors")  # not in the index: not read
    return str(folder)


def test_the_meta_device_trains_as_the_whole_model_does(pool, tmp_path):
    want = pool.run(2, trains, "plain", JOBS, timeout=180)
    jobs = []
    for at, job in enumerate(JOBS):
        folder = saved(job.kind, tmp_path / str(at), 1 + at % 2)
        jobs.append(
            Job(job.kind, job.rule, job.rounds, clip=job.clip, optimizer=job.optimizer, bf16=job.bf16, cyclic={"weights": folder})
        )
    got = pool.run(2, trains, "meta", jobs, timeout=180)
    for rank in range(2):
        for job, (state, losses), (expected, their_losses) in zip(JOBS, got[rank], want[rank]):
            assert losses == their_losses, job
            same(unpack(state), unpack(expected))


class Unfillable(models.MLP):
    """A buffer that no file has and that nothing sets again."""

    def __init__(self):
        super().__init__()
        self.register_buffer("table", torch.ones(3), persistent=False)


class Hidden(models.MLP):
    def __init__(self):
        super().__init__()
        self.secret = torch.ones(3)


def mistakes(rank: int, world: int, folder: str) -> dict[str, str]:
    root = Path(folder)

    def attempt(module: nn.Module, weights: str | None) -> str:
        return told(lambda: start(Job("mlp", cyclic={"weights": weights}), world, module))

    texts = {
        "no folder given": attempt(on_meta("mlp"), None),
        "nothing on meta": attempt(models.build("mlp"), folder + "/mlp"),
        "empty": attempt(on_meta("mlp"), folder),
        "missing": attempt(on_meta("mlp"), folder + "/rooted"),
        "damaged": attempt(on_meta("mlp"), str(root / "damaged")),
        "shape": attempt(on_meta("mlp"), str(root / "shape")),
    }
    with torch.device("meta"):
        texts |= {"buffer": attempt(Unfillable(), folder + "/mlp"), "attribute": attempt(Hidden(), folder + "/mlp")}
    return texts


def test_what_is_missing_is_named(pool, tmp_path):
    for kind in ("mlp", "rooted"):
        saved(kind, tmp_path / kind)
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "a.safetensors").write_bytes((tmp_path / "mlp" / "model-0.safetensors").read_bytes()[:100])
    (tmp_path / "shape").mkdir()
    state = {n: p.detach().repeat(*[2] * p.dim()) for n, p in models.build("mlp").named_parameters()}
    save_file(state, tmp_path / "shape" / "a.safetensors")
    wanted = {
        "no folder given": ("'blocks.0.0.weight' is on the meta device", "set cyclic.weights"),
        "nothing on meta": ("no parameter of the model is on the meta device", "set it to null"),
        "empty": ("there is no *.safetensors file",),
        "missing": ("have no 'blocks.0.0.weight'", "saved from this model"),
        "damaged": ("'a.safetensors' cannot be read",),
        "shape": ("'blocks.0.0.weight' is (16, 16)", "the model's is (8, 8)"),
        "buffer": ("buffer 'table' is on the meta device",),
        "attribute": ("the tensor 'secret'",),
    }
    for texts in pool.run(2, mistakes, str(tmp_path), timeout=120):
        assert texts.keys() == wanted.keys()
        for name, words in wanted.items():
            assert texts[name].startswith("ValueError") and "\n" not in texts[name], (name, texts[name])
            for word in words:
                assert word in texts[name], (name, texts[name])


# ---- Hugging Face -----------------------------------------------------------------------------------------------------------
def pretrained(rank: int, world: int, jobs: list[Job], folder: str) -> list[tuple[bytes, dict]]:
    from transformers import LlamaForCausalLM
    from transformers.integrations import HfDeepSpeedConfig
    from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled, unset_hf_deepspeed_config

    results = []
    for job in jobs:
        keep = HfDeepSpeedConfig(ds_config(job, world))
        assert is_deepspeed_zero3_enabled()
        module = LlamaForCausalLM.from_pretrained(os.path.join(folder, job.kind), dtype=torch.bfloat16 if job.bf16 else None)
        assert all(p.numel() == 0 for p in module.parameters())
        if job.rounds > 1:  # before initialize: new rows are made on all ranks alike
            module.resize_token_embeddings(80, mean_resizing=False)
        module.train()
        engine = start(job, world, module)
        losses = train(engine, job, rank)
        results.append((pack(whole(engine)), losses))
        engine.destroy()
        unset_hf_deepspeed_config()
        del keep
    return results


@pytest.mark.slow
def test_from_pretrained_under_hf_deepspeed_config(pool, tmp_path):
    pytest.importorskip("accelerate")  # HfDeepSpeedConfig is empty without it
    jobs = [Job("llama", "cdp-v2"), Job("llama-tied", "cdp-v1", bf16=True), Job("llama-tied", "dp", 2)]
    for kind in ("llama", "llama-tied"):
        models.build(kind).save_pretrained(tmp_path / kind)
    got = pool.run(2, pretrained, jobs, str(tmp_path), timeout=240)
    want = pool.run(2, trains, "plain", jobs[:2], timeout=180)
    for rank in range(2):
        for (state, losses), (expected, their_losses) in zip(got[rank], want[rank]):
            assert losses == their_losses
            same(unpack(state), unpack(expected))
    resized = unpack(got[0][2][0])
    assert resized["lm_head.weight"].shape == (80, 16) and torch.equal(
        resized["lm_head.weight"], resized["model.embed_tokens.weight"]
    )
    assert all(bool(v.isfinite().all()) for v in resized.values())


# ---- memory -----------------------------------------------------------------------------------------------------------------
MIB = 2**20


class Deep(nn.Sequential):
    """16 layers of 4 MiB each."""

    def __init__(self):
        super().__init__(*(nn.Linear(1024, 1024, bias=False) for _ in range(16)))


def resident(field: str) -> float:
    """MiB of this process: VmRSS now, VmHWM at most since the last call of ``forget``."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) / 1024 for line in file if line.startswith(field))


def forget() -> None:
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")


def peaks(rank: int, world: int, how: str, folder: str) -> float:
    """Peak memory of this rank while building and initializing, in MiB, without the message buffers, which the plan sizes."""
    import deepspeed

    ctypes.CDLL(None).mallopt(-3, 65536)  # large tensors' memory goes back at once
    job = Job("mlp", optimizer="sgd", cyclic={"weights": folder} if how == "meta" else {})
    small = start(Job("mlp"), world)  # imports and pools
    small.destroy()
    del small
    forget()
    before = resident("VmRSS")
    if how == "zero.Init":
        with deepspeed.zero.Init(config_dict_or_path=ds_config(job, world)):
            module: Any = Deep()
    elif how == "meta":
        with torch.device("meta"):
            module = Deep()
    else:
        module = Deep()
    engine = start(job, world, module)
    peak = resident("VmHWM") - before
    buffers = engine._runtime.executor.buffers.nbytes() / MIB
    engine.destroy()
    return peak - buffers


@pytest.mark.slow
@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="peak memory cannot be reset here")
def test_no_rank_ever_holds_the_model(pool, tmp_path, capsys):
    """64 MiB on four ranks: a stage is 16, a layer 4."""
    save_file({n: p.detach() for n, p in Deep().named_parameters()}, tmp_path / "a.safetensors")
    got = {how: pool.run(4, peaks, how, str(tmp_path), timeout=180) for how in ("plain", "zero.Init", "meta")}
    with capsys.disabled():
        print("\npeak MiB per rank:", {how: [round(x, 1) for x in values] for how, values in got.items()})
    assert min(got["plain"]) > 64 + 12  # the model and the masters: the measure sees them
    assert max(got["meta"]) < 16 + 3 * 4 + 4  # the masters, and a layer as it is read
    assert max(got["zero.Init"]) < 16 + 16 + 3 * 4 + 4  # also the partitions, until they are gathered
