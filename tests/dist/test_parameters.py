"""Kinds of parameters: frozen, tied, unused, added by resizing; buffers; and the files they are saved in."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn

from support import models
from support.engine_work import Job, pack, same, start, told, train, unpack, whole


class Adapted(nn.Module):
    """As LoRA makes a model: frozen layers, small trained ones beside; the first three blocks are frozen altogether."""

    def __init__(self, width: int = 16, blocks: int = 6):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.ModuleDict(
                {"base": nn.Linear(width, width)}
                | ({"down": nn.Linear(width, 2, bias=False), "up": nn.Linear(2, width, bias=False)} if i >= 3 else {})
            )
            for i in range(blocks)
        )
        for block in self.blocks:
            block["base"].requires_grad_(False)
        self.register_buffer("steps", torch.zeros(()))  # counts forwards, in place

    def forward(self, x):
        self.steps += 1
        for block in self.blocks:
            y = block["base"](x)
            x = x + torch.tanh(y + block["up"](block["down"](x)) if "up" in block else y)
        return x


class Partly(models.MLP):
    """A parameter and a module that no forward uses."""

    def __init__(self):
        super().__init__()
        self.never = nn.Linear(8, 8)
        self.loose = nn.Parameter(torch.ones(8))


def resized() -> nn.Module:
    module = models.build("llama-tied")
    module.resize_token_embeddings(80, mean_resizing=False)
    return module


def built(kind: str) -> nn.Module:
    torch.manual_seed(7)
    return {"adapted": Adapted, "partly": Partly, "resized": resized}.get(kind, lambda: models.build(kind))()


def data(kind: str, step: int, rank: int) -> torch.Tensor:
    if kind == "resized":
        return torch.randint(1, 80, (2, 9), generator=torch.Generator().manual_seed(1000 * step + rank))
    width = 16 if kind == "adapted" else 8
    return torch.randn(4, width, generator=torch.Generator().manual_seed(1000 * step + rank))


def kinds(rank: int, world: int, jobs: list[Job], folder: str) -> list[dict[str, Any]]:
    results = []
    for job in jobs:
        engine = start(job, world, built(job.kind))
        name = "llama" if job.kind == "resized" else "mlp"
        losses = {}
        for step in range(job.steps):
            loss = models.loss(engine, name, data(job.kind, step, rank))
            losses[step, 0, rank] = loss.item()
            engine.backward(loss)
            engine.step()
        owner, plan = engine._runtime.owner, engine.cyclic_plan
        traffic = engine._runtime.counters.traffic()
        engine.save_checkpoint(f"{folder}/{job.kind}")
        results.append(
            {
                "state": pack(whole(engine)),
                "losses": losses,
                "stages": plan.stages,
                "traffic": traffic,
                "steps": int(dict(engine.module.named_buffers()).get("steps", 0)),
                "kept": sorted(n for n, p in owner.masters.items() if p in owner.optimizer.state),
                "masters": sorted(owner.masters),
                "g_bytes": {u.name: u.g_bytes for u in plan.units},
            }
        )
        engine.destroy()
    return results


def test_kinds_of_parameters_train_as_the_oracle_does(pool, tmp_path):
    jobs = [Job("adapted", "cdp-v2", optimizer="sgd"), Job("partly", "cdp-v1"), Job("resized", "cdp-v2")]
    results = pool.run(2, kinds, jobs, str(tmp_path), timeout=180)
    for at, job in enumerate(jobs):
        first = results[0][at]
        name = "llama" if job.kind == "resized" else "mlp"
        want = _oracle(job, first["stages"], name)
        for rank in range(2):
            got = unpack(results[rank][at]["state"])
            unused = {n for n in want.masters if n.startswith(("never", "loose"))}
            same(got, {n: v for n, v in want.masters.items() if n not in unused})
            for place, value in results[rank][at]["losses"].items():
                assert value == want.losses[place]
        assert all(bool(v.isfinite().all()) for v in unpack(first["state"]).values())
    # frozen: no gradient traffic, no state, not even an owner's
    adapted = [results[rank][0] for rank in range(2)]
    trained = {n for n, p in built("adapted").named_parameters() if p.requires_grad}
    assert {n for x in adapted for n in x["masters"]} == trained == {n for x in adapted for n in x["kept"]}
    for name, nbytes in adapted[0]["g_bytes"].items():
        block = int(name.split(".")[1])
        assert (nbytes > 0) == (block >= 3 and not name.endswith("base")), (name, nbytes)
    whole_sums = sum(adapted[0]["g_bytes"].values())
    assert all(x["traffic"]["G"]["counted"] + x["traffic"]["O"]["counted"] <= 2 * whole_sums for x in adapted)
    before, after = built("adapted").state_dict(), unpack(adapted[0]["state"])
    assert all(torch.equal(after[n], v) for n, v in before.items() if n not in trained and n != "steps")
    assert [x["steps"] for x in adapted] == [jobs[0].steps] * 2
    tied = json.loads((tmp_path / "resized" / "global_step6" / "cyclic.json").read_text())["shared"]
    assert tied == {"lm_head.weight": "model.embed_tokens.weight"}
    with safe_open(next((tmp_path / "resized" / "global_step6").glob("stage_000*")), "pt") as file:
        assert file.get_tensor("param/model.embed_tokens.weight").shape == (80, 16)


def _oracle(job: Job, stages: Any, name: str) -> Any:
    from deepspeed_cdp.analysis import reference
    from deepspeed_cdp.plan.schedule import threshold
    from support.engine_work import ORACLES

    module = built(job.kind)
    names = {n for stage in stages for n in stage}
    for n, p in module.named_parameters():
        p.requires_grad_(n in names)
    return reference.train(
        module,
        stages,
        threshold(job.rule, 2),
        lambda t, m, r: data(job.kind, t, r),
        lambda call, x: models.loss(call, name, x),
        ORACLES[job.optimizer],
        job.steps,
    )


def ties(rank: int, world: int, folder: str) -> None:
    """A tied model's checkpoint into an untied one, and back where the two have stayed alike."""
    tied, untied = Job("llama-tied", "cdp-v2"), Job("llama", "cdp-v2")
    one = start(tied, world)
    train(one, tied, rank, 0, 2)
    one.save_checkpoint(f"{folder}/tied")
    want = whole(one)
    assert want["lm_head.weight"].data_ptr() == want["model.embed_tokens.weight"].data_ptr()  # saved once by torch.save
    one.destroy()
    two = start(untied, world)
    two.load_checkpoint(f"{folder}/tied", load_module_only=True)
    same(whole(two), want)
    two.save_checkpoint(f"{folder}/untied")
    two.destroy()
    one = start(tied, world)
    one.load_checkpoint(f"{folder}/untied", load_module_only=True)
    same(whole(one), want)
    one.destroy()


def test_tied_and_untied_models_read_each_other(pool, tmp_path):
    pool.run(2, ties, str(tmp_path), timeout=180)
    manifest = json.loads(next(Path(tmp_path, "tied").glob("*/cyclic.json")).read_text())
    assert manifest["shared"] == {"lm_head.weight": "model.embed_tokens.weight"}


def replaces(rank: int, world: int) -> str:
    job = Job("llama", "cdp-v2")
    engine = start(job, world)
    train(engine, job, rank, 0, 1)
    whole(engine)
    engine.module.resize_token_embeddings(80, mean_resizing=False)
    text = told(lambda: train(engine, job, rank, 1, 2))
    engine.destroy()
    return text


def test_resizing_afterwards_is_refused(pool):
    """It once trained on without the new parameters, in silence."""
    for text in pool.run(2, replaces, timeout=120):
        assert "was put into the model after deepspeed.initialize()" in text and "resize_token_embeddings" in text, text
