"""Masters in halves (optim/masters.py) under whole engines: nothing that a script does between steps leaves one whole."""

import os
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from deepspeed import utils

from deepspeed_cdp.errors import CheckpointError
from deepspeed_cdp.optim.masters import Masters
from support.checkpoint_work import resumes
from support.engine_work import Job, start, train

JOB = Job("llama-tied", "cdp-v2", bf16=True, clip=1.0, correction="predict")


def in_halves(rank: int, world: int, scenario: Callable, *arguments: Any) -> Any:
    """The scenario as it runs on GPUs."""
    with patch.object(Masters, "suit_halves", staticmethod(lambda device: True)):
        return scenario(rank, world, *arguments)


def stays_in_halves(rank: int, world: int, folder: str) -> None:
    from deepspeed.runtime.zero import GatheredParameters

    engine = start(JOB, world)
    train(engine, JOB, rank, 0, 2)
    module, masters = engine.module, engine._runtime.owner.masters
    one = next(module.parameters())

    def gather(modifier_rank: int | None) -> None:
        with GatheredParameters(list(module.parameters()), modifier_rank=modifier_rank):
            pass

    def load_nothing() -> None:
        with pytest.raises(CheckpointError):
            engine.load_checkpoint(folder, tag="none")

    for do in (
        engine.flush,
        lambda: gather(None),
        lambda: gather(0),
        lambda: utils.safe_get_full_fp32_param(one),
        lambda: utils.safe_get_local_fp32_param(one),
        lambda: utils.safe_set_full_fp32_param(one, utils.safe_get_full_fp32_param(one)),
        lambda: engine.save_checkpoint(folder, tag="some"),
        lambda: engine.load_checkpoint(folder, tag="some"),
        load_nothing,
        engine.optimizer.state_dict,
        engine.module_state_dict,
    ):
        do()
        assert masters.lows.keys() == masters.parameters.keys()
        assert all(p.untyped_storage().nbytes() == 4 for p in masters.parameters.values())
    engine.destroy()


def test_scripts_leave_no_master_whole(pool, tmp_path):
    pool.run(2, in_halves, stays_in_halves, os.fspath(tmp_path))


def test_resuming_continues_bit_by_bit(pool, tmp_path):
    pool.run(2, in_halves, resumes, [JOB, Job("llama", "cdp-v1", 2, bf16=True)], os.fspath(tmp_path))


def what_scripts_see(rank: int, world: int) -> None:
    """The optimizer's masters have their shape, but a script that averages them finds nan, and one that writes them an error."""
    engine = start(JOB, world)
    train(engine, JOB, rank, 0, 2)
    shapes = {tuple(p.ds_shape) for p in engine.module.parameters()}
    seen = [p for group in engine.optimizer.param_groups for p in group["params"]]
    assert seen
    for p in seen:
        assert tuple(p.shape) in shapes and p.dtype == torch.float32 and p.isnan().all()
        with torch.no_grad(), pytest.raises(RuntimeError, match="single memory location"):
            p.mul_(0.5)
    engine.destroy()


def test_masters_in_halves_do_not_look_like_empty_ones(pool):
    pool.run(2, in_halves, what_scripts_see)
