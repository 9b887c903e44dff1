"""Ulysses sequence parallelism in worker processes: a script for a Llama, the same for stock ZeRO-3 and the cyclic engine."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from deepspeed_cdp.analysis import reference
from deepspeed_cdp.errors import DivergenceError
from deepspeed_cdp.plan.delay_correction import DelayCorrection
from deepspeed_cdp.plan.schedule import threshold
from support.engine_work import here, pack, told, whole
from support.optimizers import sgd, two_groups

LENGTH, VOCABULARY = 16, 64
OPTIMIZERS: dict[str, Callable[[list[tuple[str, nn.Parameter]]], torch.optim.Optimizer]] = {"sgd": sgd, "groups": two_groups}


@dataclass(frozen=True)
class Training:
    """What a training run has with groups of any kind.

    Attributes:
        rule: None for stock DeepSpeed.
        rounds: gradient_accumulation_steps; config, cyclic: added to the config and to its cyclic block.
        eval_after: steps after which all ranks evaluate a batch.
        init: zero.Init has partitioned the model.
    """

    rule: str | None = "cdp-v2"
    rounds: int = 1
    steps: int = 6
    clip: float = 0.0
    optimizer: str = "sgd"
    eval_after: tuple[int, ...] = ()
    init: bool = False
    config: dict[str, Any] = field(default_factory=dict)
    cyclic: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Job(Training):
    """One with sequence groups of ``sequence`` ranks.

    Attributes:
        how: how DeepSpeed learns of the groups: "mpu", "mesh" (mesh_param) or "config" (two keys).
        checkpointing: activations are recomputed.
    """

    sequence: int = 2
    how: str = "mpu"
    checkpointing: bool = False


def build() -> nn.Module:
    """Four layers, four heads, two heads of keys and values."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(7)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=LENGTH,
            attn_implementation="sdpa",
            pad_token_id=0,
        )
    )


def sequences(number: int, rank: int) -> torch.Tensor:
    """Batch ``number`` of a rank's data loader; some labels do not count, not as many in each part of a sequence."""
    generator = torch.Generator().manual_seed(100 * number + rank)
    return torch.randint(1, VOCABULARY, (2, LENGTH), generator=generator)


def labels_of(x: torch.Tensor) -> torch.Tensor:
    return x.masked_fill((x < 12) | (torch.arange(LENGTH, device=x.device) < 3), -100)


def batch(job: Job, step: int, rnd: int, group: int) -> torch.Tensor:
    """The sequences on which a group works: its members' batches in turn, as ``UlyssesSPDataLoaderAdapter`` hands them out."""
    number, member = divmod(step * job.rounds + rnd, job.sequence)
    return sequences(number, group * job.sequence + member)


@contextmanager
def ulysses(model: nn.Module, sequence: int) -> Iterator[Any]:
    """The mpu; transformers' attention is the sequence-parallel one inside."""
    import deepspeed
    from deepspeed.runtime.sequence_parallel import parallel_state_sp
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF
    from deepspeed.utils import groups
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    deepspeed.init_distributed("gloo" if here().type == "cpu" else "nccl")
    before = ALL_ATTENTION_FUNCTIONS["sdpa"]
    try:
        yield UlyssesSPAttentionHF.register_with_transformers(
            model_name_or_path=model,
            core_attn_implementation="sdpa",
            sequence_parallel_size=sequence,
            micro_batch_size=2,
            seq_length_is_variable=True,
        )
    finally:
        ALL_ATTENTION_FUNCTIONS["sdpa"] = before
        parallel_state_sp._release_sequence_parallel_groups()
        groups.mpu = groups.mesh_device = None


def run_jobs(rank: int, world: int, jobs: list[Job]) -> list[dict[str, Any]]:
    """Train each job from its start. All have one size of groups."""
    with ulysses(build(), jobs[0].sequence) as mpu:
        return [run(rank, world, job, mpu) for job in jobs]


def run(rank: int, world: int, job: Job, mpu: Any) -> dict[str, Any]:
    """Train one job; packed state, losses by (step, round, group), stages, metrics."""
    engine = start(world, job, mpu)
    losses, metrics = train(engine, job, mpu, rank), []
    if job.rule is not None:
        metrics = [engine.cyclic_metrics[key] for key in ("step", "loss", "grad_norm", "slowest")]
    result = {
        "losses": losses,
        "metrics": metrics,
        "batch": (engine.train_batch_size(), engine.dp_world_size),
        "norm": float(engine.get_global_grad_norm()),
        "state": pack(whole(engine)),
        "class": type(engine).__name__,
        "stages": None if job.rule is None else engine.cyclic_plan.stages,
        "rings": None if job.rule is None else (engine._transport.ring, engine._transport.rank, engine._transport.rings),
        "collectives": None if job.rule is None else engine._runtime.counters.collectives(),
        "any_order": None if job.rule is None else engine._runtime.param_hooks.any_order,
        "report": "" if job.rule is None else engine.report(),
    }
    engine.destroy()
    return result


def start(world: int, job: Job, mpu: Any) -> Any:
    """The engine, as a script makes it."""
    import deepspeed
    from deepspeed.utils import groups

    import deepspeed_cdp

    deepspeed_cdp.register()
    groups.mpu = groups.mesh_device = None  # of the job before
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": job.rounds,
        "gradient_clipping": job.clip,
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        "zero_allow_untested_optimizer": True,
        **job.config,
    }
    if job.rule is not None:
        block = {"rule": job.rule, "timeout_seconds": 30.0, "delay_correction": "none"}
        config["cyclic"] = {"enabled": True, **block, **job.cyclic}
    model = build().to(here())
    if job.init:
        deepspeed.zero.Init(module=model, config_dict_or_path=config, mpu=mpu)
    if job.checkpointing:
        model.gradient_checkpointing_enable()
    given: dict[str, Any] = {"optimizer": OPTIMIZERS[job.optimizer](list(model.named_parameters()))}
    if job.how == "mpu":
        given["mpu"] = mpu
    elif job.how == "mesh":
        given["mesh_param"] = (world // job.sequence, job.sequence)
    else:
        config |= {"sequence_parallel_size": job.sequence, "data_parallel_size": world // job.sequence}
    return deepspeed.initialize(model=model, config=config, **given)[0]


def train(engine: Any, job: Job, mpu: Any, rank: int, first: int = 0) -> dict[tuple[int, int, int], float]:
    """An ordinary loop over the adapted data loader; losses are of whole sequences, as the Hugging Face Trainer computes them.

    Args:
        first: the first step; its micro-batch is the first of a batch of the data loader.
    """
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPDataLoaderAdapter

    group, losses = mpu.get_sequence_parallel_group(), {}
    positions = torch.arange(LENGTH).repeat(2, 1)
    begin, end = first * job.rounds, job.steps * job.rounds
    data = [sequences(number, rank) for number in range(begin // job.sequence, -(-end // job.sequence))]
    loader = torch.utils.data.DataLoader(
        [{"input_ids": x, "labels": labels_of(x), "position_ids": positions} for x in data], batch_size=None
    )
    adapted = UlyssesSPDataLoaderAdapter(
        loader, sp_rank=mpu.get_sequence_parallel_rank(), sp_group=group, sp_world_size=job.sequence, device=here()
    )
    for number, given in zip(range(begin, end), adapted):
        step, rnd = divmod(number, job.rounds)
        part = {k: v.to(here()) for k, v in given.items() if torch.is_tensor(v)}  # the adapter leaves that to the script
        loss = loss_of(engine, part, group)
        losses[step, rnd, rank // job.sequence] = loss.item()
        engine.backward(loss)
        engine.step()
        if step in job.eval_after and rnd == job.rounds - 1:
            engine.eval()
            with torch.no_grad():
                assert torch.isfinite(loss_of(engine, part, group))
            engine.train()
    return losses


def loss_of(engine: Any, part: dict[str, torch.Tensor], group: Any) -> torch.Tensor:
    """The mean loss of whole sequences, from a part of them on each rank: a collective between forward and backward.

    torch's differentiable all_gather, which the Trainer uses, fails over gloo in any group but that of rank 0; all_reduce works.
    """
    from torch.distributed.nn.functional import all_reduce

    labels = part["shift_labels"].contiguous()
    given = {"input_ids": part["input_ids"], "position_ids": part["position_ids"]}
    output = engine(**given, labels=labels, shift_labels=labels, use_cache=False)
    count = (labels != -100).sum().float()
    mine = output.loss * count if count else output.logits.sum() * 0.0  # a part without labels has no mean
    return all_reduce(mine, group=group) / all_reduce(count, group=group)


def oracle(job: Job, stages: list[list[str]], world: int, factor: float = 1.0) -> reference.Trained:
    """The same job by the single-process reference, where a place's gradient is of its whole sequences.

    Args:
        factor: of gradients.
    """

    def loss(call: Callable[..., Any], x: torch.Tensor) -> torch.Tensor:
        return call(input_ids=x, labels=labels_of(x), use_cache=False).loss * factor

    rings = world // job.sequence // len(stages)
    return reference_of(job, stages, lambda step, rnd, group: batch(job, step, rnd, group), loss, rings)


def reference_of(
    job: Job, stages: list[list[str]], batches: Callable[[int, int, int], Any], loss: Callable[..., torch.Tensor], rings: int
) -> reference.Trained:
    return reference.train(
        build(),
        stages,
        threshold(job.rule or "dp", len(stages)),
        batches,
        loss,
        OPTIMIZERS[job.optimizer],
        job.steps,
        rounds=job.rounds,
        clip=job.clip,
        flush_after=job.eval_after,
        warmup_steps=job.cyclic.get("warmup_steps", 0),
        rings=rings,
        delay_correction=DelayCorrection(job.cyclic.get("delay_correction", "none")),
    )


def uses(rank: int, world: int, job: Job, folder: str) -> dict[str, Any]:
    """A checkpoint, DeepSpeed's functions for parameters, batch sizes, the end, and a second engine that continues."""
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param, safe_set_full_fp32_param

    with ulysses(build(), job.sequence) as mpu:
        engine = start(world, job, mpu)
        train(engine, replace(job, steps=2), mpu, rank)
        engine.save_checkpoint(folder)
        train(engine, job, mpu, rank, 2)
        continued = pack(whole(engine))
        named = dict(engine.module.named_parameters())
        p = named["model.layers.3.mlp.up_proj.weight"]
        before = safe_get_full_fp32_param(p)
        safe_set_full_fp32_param(p, before * 2)
        with deepspeed.zero.GatheredParameters([p], modifier_rank=world - 1):
            double = p.detach().clone()
            if rank == world - 1:
                p.data.add_(1)
        plus = safe_get_full_fp32_param(p)
        engine.set_train_batch_size(2 * job.rounds * world // job.sequence)
        module = engine.module
        engine.destroy()
        with deepspeed.zero.GatheredParameters(list(module.parameters())):
            left = p.detach().clone()
        other = start(world, job, mpu)
        other.load_checkpoint(folder)
        train(other, job, mpu, rank, 2)
        resumed = pack(whole(other))
        other.destroy()
    return {
        "continued": continued,
        "resumed": resumed,
        "double": torch.equal(double, before * 2),
        "plus": torch.equal(plus, before * 2 + 1) and torch.equal(left, plus),
    }


def refused(rank: int, world: int) -> list[str]:
    """What engines say of groups that they cannot use."""
    import torch.distributed as dist
    from deepspeed.runtime.sequence_parallel import parallel_state_sp

    with ulysses(build(), 2) as mpu:
        said = [
            told(lambda: start(world, Job(config={"sequence_parallel_size": 4}), mpu)),
            told(lambda: start(world, Job(cyclic={"ring_size": 4}), mpu)),
        ]
        strided = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]
        mine, parallel_state_sp._SEQUENCE_PARALLEL_GROUP = parallel_state_sp._SEQUENCE_PARALLEL_GROUP, strided
        said.append(told(lambda: start(world, Job(), mpu)))
        parallel_state_sp._SEQUENCE_PARALLEL_GROUP = mine
    return said


def diverges(rank: int, world: int) -> str:
    """Rank 3 takes another learning rate from step 2 on; what each rank is told."""
    from torch.distributed.nn.functional import all_reduce

    with ulysses(build(), 2) as mpu:
        engine, group = start(world, Job("dp"), mpu), mpu.get_sequence_parallel_group()
        part = slice(mpu.get_sequence_parallel_rank() * LENGTH // 2, (mpu.get_sequence_parallel_rank() + 1) * LENGTH // 2)
        positions = torch.arange(LENGTH).repeat(2, 1)[:, part].contiguous()
        try:
            for step in range(8):
                if rank == 3 and step == 2:
                    engine.optimizer.param_groups[0]["lr"] = 0.01
                x = sequences(step, rank // 2)[:, part].contiguous()
                engine.backward(
                    all_reduce(engine(input_ids=x, position_ids=positions, labels=x, shift_labels=x).loss, group=group)
                )
                engine.step()
        except DivergenceError as error:
            return str(error)
    return "nothing"
