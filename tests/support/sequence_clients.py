"""Sequence and tensor parallelism through the Hugging Face Trainer and Accelerate, in worker processes."""

import gc
import os
import runpy
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from support.client_results import Results
from support.client_results import same as same_weights
from support.engine_work import pack
from support.sequence_work import LENGTH, Job, build, labels_of, sequences
from support.tensor_work import own_groups
from support.trainer_jobs import EXAMPLES, PARALLELISM, STEPS


class _AllGather(torch.autograd.Function):
    """torch's differentiable all_gather. Its backward over gloo takes ranks in the group for ranks in the world (torch 2.13)."""

    @staticmethod
    def forward(ctx: Any, group: Any, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.group = group
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, x.contiguous(), group=group)
        return tuple(parts)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[None, torch.Tensor]:
        total = torch.stack(gradients)
        dist.all_reduce(total, group=ctx.group)
        return None, total[dist.get_rank(ctx.group)]


@contextmanager
def client(env: dict[str, str]) -> Iterator[None]:
    """The state of Accelerate, transformers and DeepSpeed is a fresh process's, inside and afterwards."""
    import deepspeed
    from accelerate.state import AcceleratorState, PartialState
    from deepspeed.runtime.sequence_parallel import parallel_state_sp
    from deepspeed.utils import groups
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    attention, gather = ALL_ATTENTION_FUNCTIONS["sdpa"], torch.distributed.nn.functional.all_gather
    torch.distributed.nn.functional.all_gather = lambda x, group: _AllGather.apply(group, x)
    added = {key: value for key, value in (env | {"ACCELERATE_USE_DEEPSPEED": "true"}).items() if key not in os.environ}
    os.environ.update(added)
    deepspeed.init_distributed("gloo")
    PartialState(cpu=True)
    try:
        yield
    finally:
        torch.distributed.nn.functional.all_gather, ALL_ATTENTION_FUNCTIONS["sdpa"] = gather, attention
        parallel_state_sp._release_sequence_parallel_groups()
        groups.mpu = None
        destroy, PartialState.destroy_process_group = PartialState.destroy_process_group, lambda *_: None
        AcceleratorState._reset_state(reset_partial_state=True)
        PartialState.destroy_process_group = destroy
        unset_hf_deepspeed_config()
        for key in added:
            del os.environ[key]
        gc.collect()


def dp_is_stock(dp: Results, stock: Results) -> None:
    """The Trainer's logs and weights are equal to 1e-5: ranks of a group add up parts in another order than one rank."""
    for key in ("loss", "eval_loss", "learning_rate"):
        assert len(stock.log(key)) == len(dp.log(key)) > 1 and dp.log(key) == pytest.approx(stock.log(key), rel=1e-5), key
    same_weights(dp.weights(STEPS), stock.weights(STEPS), 1e-5)


def trainer(rank: int, world: int, jobs: list[list[str]]) -> None:
    """Run the Trainer's example with each job's arguments."""
    for arguments in jobs:
        with client(PARALLELISM):
            sys.argv = ["hf_trainer.py", *arguments]
            runpy.run_path(str(EXAMPLES / "hf_trainer.py"), run_name="__main__")


def tensor_trainer(rank: int, world: int, jobs: list[list[str]]) -> None:
    """The same with AutoTP."""
    from deepspeed.runtime.tensor_parallel import init_utils

    for arguments in jobs:
        with client({}), own_groups():
            sys.argv = ["hf_trainer.py", *arguments]
            runpy.run_path(str(EXAMPLES / "hf_trainer.py"), run_name="__main__")
            init_utils._TP_MODEL_INIT_ARGS = None  # transformers has given the config's size to DeepSpeed's tp_model_init


def accelerate(rank: int, world: int, jobs: list[Job], folder: str) -> list[dict[str, Any]]:
    """A loop of one's own with each job's rule; its losses and weights."""
    return [_loop(rank, job, Path(folder, str(number))) for number, job in enumerate(jobs)]


def _loop(rank: int, job: Job, folder: Path) -> dict[str, Any]:
    with client({}):
        from accelerate import Accelerator, ParallelismConfig
        from accelerate.utils import DataLoaderConfiguration, DeepSpeedPlugin, DeepSpeedSequenceParallelConfig
        from transformers.integrations.deepspeed import deepspeed_sp_compute_loss

        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": job.rounds,
            "gradient_clipping": job.clip,
            "zero_optimization": {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True},
            "zero_allow_untested_optimizer": True,
        }
        if job.rule is not None:
            block = {"rule": job.rule, "timeout_seconds": 30.0, "delay_correction": "none"}
            config["cyclic"] = {"enabled": True, **block}
        sequence = DeepSpeedSequenceParallelConfig(sp_seq_length_is_variable=True, sp_attn_implementation="sdpa")
        accelerator = Accelerator(
            deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config),
            parallelism_config=ParallelismConfig(dp_shard_size=2, sp_size=job.sequence, sp_handler=sequence),
            dataloader_config=DataLoaderConfiguration(dispatch_batches=False),
        )
        model = build()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        # Accelerate gives rank r the batches r, r + world, ...: of one sequence each
        data = [sequences(number, r)[0] for number in range(job.steps * job.rounds // job.sequence) for r in range(4)]
        rows = [{"input_ids": x, "labels": labels_of(x), "position_ids": torch.arange(LENGTH)} for x in data]
        loader = torch.utils.data.DataLoader(rows, batch_size=1)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        losses, pc = {}, accelerator.parallelism_config
        for number, part in enumerate(loader):
            with accelerator.accumulate(model):
                loss = deepspeed_sp_compute_loss(accelerator, model, part, False, pc)
                losses[(*divmod(number, job.rounds), rank // job.sequence)] = loss.item()
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
        accelerator.save_state(str(folder))
        state = accelerator.get_state_dict(model)
        result = {
            "losses": losses,
            "state": pack(state) if rank == 0 else None,
            "class": type(model).__name__,
            "stages": None if job.rule is None else model.cyclic_plan.stages,
        }
        model.destroy()
    return result
