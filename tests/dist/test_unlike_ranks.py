"""``deepspeed.initialize`` ends with one sentence on all ranks, with both values, where ranks differ in what they must share."""

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from support import models, pipe_work
from support.engine_work import Job, ds_config

SECONDS = 10.0  # cyclic.timeout_seconds
Group = dict[str, Any]


class Twin(torch.nn.Linear):
    """Computes as Linear does."""


def two_groups(named: list[tuple[str, torch.nn.Parameter]], second: Callable[[str], bool], **options: Any) -> list[Group]:
    return [
        {"params": [p for n, p in named if not second(n)], "lr": 1e-2},
        {"params": [p for n, p in named if second(n)], "lr": 1e-3, **options},
    ]


def biases(name: str) -> bool:
    return name.endswith("bias")


def unlike(name: str, odd: bool) -> dict[str, Any]:
    """Arguments of ``deepspeed.initialize``; an odd rank's differ in what ``name`` says."""
    from deepspeed.runtime.lr_schedules import WarmupLR

    torch.manual_seed(0)
    module = models.MLP()
    if odd and name == "frozen":
        module.blocks[2][0].bias.requires_grad_(False)
    if odd and name == "module":
        module.blocks[2][0].__class__ = Twin
    if odd and name == "shape":
        module.blocks[2][0].bias = torch.nn.Parameter(torch.zeros(1, module.blocks[2][0].bias.numel()))
    named = [(n, p) for n, p in module.named_parameters() if p.requires_grad or name == "frozen"]
    groups = two_groups(named, biases)
    if odd and name == "membership":
        groups = two_groups(named, lambda n: biases(n) and n != "blocks.2.0.bias")
    if odd and name == "order":
        groups[0]["params"].reverse()
    if odd and name == "groups":
        groups = [{"params": [p for _, p in named], "lr": 1e-2}]
    if odd and name == "rate":
        groups[1]["lr"] = 2e-3
    if odd and name == "decay":
        groups[0]["weight_decay"] = 0.25
    if odd and name == "betas":
        groups[1]["betas"] = (0.9, 0.95)
    kind = torch.optim.Adam if odd and name == "class" else torch.optim.AdamW
    optimizer = kind(groups)
    config = ds_config(Job("mlp", timeout=SECONDS, optimizer="groups"), 2)
    if odd and name == "batch":
        config["train_micro_batch_size_per_gpu"] = 5
    given: dict[str, Any] = {}
    if name.startswith("scheduler"):
        given["lr_scheduler"] = lambda o: torch.optim.lr_scheduler.StepLR(o, 5 + (odd and name == "scheduler state"))
    if odd and name == "scheduler class":
        given["lr_scheduler"] = lambda o: WarmupLR(o, 1e-2, 1e-2)
    if odd and name == "scheduler missing":
        del given["lr_scheduler"]
    if name == "optimizer":
        config["zero_optimization"]["stage"] = 2  # under 3 DeepSpeed's own engine serves the rank without one
    if odd and name == "optimizer":
        return {"model": module, "config": config}
    return {"model": module, "config": config, "optimizer": optimizer, **given}


def initialize(rank: int, world: int, names: list[str], who: int) -> list[tuple[str, float]]:
    """By name: the error, and the seconds that it took."""
    import deepspeed

    import deepspeed_cdp

    deepspeed_cdp.register()
    results = []
    for name in names:
        began, text = time.monotonic(), "no error"
        try:
            deepspeed.initialize(**unlike(name, rank == who))[0].destroy()
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
        results.append((text, time.monotonic() - began))
    return results


UNLIKE = {  # what differs -> what it is called, on the usual ranks, on the odd one
    "frozen": ("requires_grad: 'blocks.2.0.bias' is ", "True", "False"),
    "module": ("classes of the model's modules: 'blocks.2.0' is ", "'Linear'", "'Twin'"),
    "shape": ("parameter names, shapes and dtypes: 'blocks.2.0.bias' is ", "'float32 [8]'", "'float32 [1, 8]'"),
    "membership": ("groups of the optimizer: 'blocks.2.0.bias' is ", "'group 1, place 2'", "'group 0, place 3'"),
    "order": ("groups of the optimizer: 'blocks.0.0.weight' is ", "'group 0, place 0'", "'group 0, place 5'"),
    "groups": ("number of parameter groups is ", "2", "1"),
    "rate": ("options of the optimizer: 'lr of group 1' is ", "0.001", "0.002"),
    "decay": ("options of the optimizer: 'weight_decay of group 0' is ", "0.01", "0.25"),
    "betas": ("options of the optimizer: 'betas[1] of group 1' is ", "0.999", "0.95"),
    "class": ("class of the optimizer is ", "'AdamW'", "'Adam'"),
    "optimizer": ("class of the optimizer is ", "'AdamW'", "None"),
    "batch": ("train_micro_batch_size_per_gpu is ", "4", "5"),
    "scheduler class": ("class of the lr scheduler is ", "'StepLR'", "'WarmupLR'"),
    "scheduler missing": ("class of the lr scheduler is ", "'StepLR'", "None"),
    "scheduler state": ("state of the lr scheduler: 'step_size' is ", "5", "6"),
    "nothing": ("", "", ""),
}


@pytest.mark.parametrize(("world", "who"), [(2, 0), (2, 1), (3, 1)])
def test_all_ranks_name_both_values(pool, world, who):
    results = pool.run(world, initialize, list(UNLIKE), who, timeout=300)
    for rank, mine in enumerate(results):
        for (name, (what, usual, odd)), (text, seconds) in zip(UNLIKE.items(), mine):
            if name == "nothing":
                assert text == "no error"
                continue
            assert text.startswith("ValueError: " + what) and "; start every rank with the same config" in text, (
                rank,
                name,
                text,
            )
            other = next(r for r in range(world) if r != who)
            here, there = (rank, who) if rank != who else (who, other)
            said = {who: odd}
            assert f"{said.get(here, usual)} on rank {here}" in text and f"{said.get(there, usual)} on rank {there}" in text, text
            assert seconds < SECONDS + 6, (rank, name, seconds)


def initialize_pipeline(rank: int, world: int, names: list[str], who: int) -> list[str]:
    """By name: the error, for a PipelineModule of two stages; three ranks are a pyramid with two replicas of the first stage."""
    import deepspeed

    results = []
    for name in names:
        odd = rank == who
        job = pipe_work.Job(2, warmup=True, tied=name == "tied", timeout=SECONDS)
        config, module = pipe_work.config(job), pipe_work.build(job)
        if odd and name == "rate":
            config["optimizer"]["params"]["lr"] = 2e-2
        if odd and name == "scheduler":
            config["scheduler"]["params"]["warmup_num_steps"] = 5
        if odd and name == "batch":
            config["train_micro_batch_size_per_gpu"] = 4
        parameters = dict(module.named_parameters())
        if odd and name in ("frozen", "tied"):
            parameters[next(n for n in parameters if ("tied" in n) == (name == "tied"))].requires_grad_(False)
        trained = [p for p in parameters.values() if p.requires_grad]
        given: Any = trained
        if odd and name == "groups":
            given = [{"params": trained[:1]}, {"params": trained[1:]}]
        if odd and name == "order":
            given = trained[::-1]
        text = "no error"
        try:
            deepspeed.initialize(model=module, model_parameters=given, config=config)[0].destroy()
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
        results.append(text)
    return results


UNLIKE_PIPELINES = {
    "rate": "options of the optimizer: 'lr of group 0' is ",
    "scheduler": "state of the lr scheduler: 'warmup_num_steps' is ",
    "batch": "train_micro_batch_size_per_gpu is ",
    "groups": "number of parameter groups is ",
    "tied": "requires_grad in tied layer 'embed': 'weight' is ",
    "nothing": "",
}
UNLIKE_REPLICAS = {
    "frozen": "requires_grad in stage 0: ",
    "order": "groups of the optimizer in stage 0: ",
    "tied": "requires_grad in stage 0: ",
    "nothing": "",
}


@pytest.mark.parametrize(("world", "unlike"), [(2, UNLIKE_PIPELINES), (3, UNLIKE_REPLICAS)])
def test_pipelines_name_both_values_too(pool, world, unlike):
    for rank, texts in enumerate(pool.run(world, initialize_pipeline, list(unlike), 1, timeout=120)):
        for (name, words), text in zip(unlike.items(), texts):
            if name == "nothing":
                assert text == "no error"
            else:
                assert text.startswith("ValueError: " + words), (rank, text)
                assert " on rank 0" in text and " on rank 1" in text and "; start every rank with" in text, (rank, text)
