"""Curriculum learning in worker processes: one script for stock ZeRO-3 and the cyclic engine, with DeepSpeed's data analyzer."""

import inspect
import os
import textwrap
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from support.engine_work import here, pack, told, whole

LENGTH = 64
STEPS, SAVED_AFTER, ROUNDS, MICRO = 14, 6, 2, 3


class Lines(torch.utils.data.Dataset):
    """Lines of a module's source as bytes; an item is (number, bytes padded with zeros)."""

    def __init__(self) -> None:
        lines = [line.encode()[:LENGTH] for line in inspect.getsource(textwrap).splitlines() if line.strip()]
        self.items = [torch.tensor([*line, *bytes(LENGTH - len(line))]) for line in lines[:150]]

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, number: int) -> tuple[int, torch.Tensor]:
        return number, self.items[number]


def seqlen(data: Any) -> np.ndarray:
    return (data[1] != 0).sum(1).numpy()


def kinds_of_bytes(data: Any) -> np.ndarray:
    return np.array([len(set(row.tolist())) for row in data[1]])


METRICS = {"seqlen": seqlen, "kinds": kinds_of_bytes}


def analyze(folder: str) -> None:
    """What DeepSpeed's data analyzer writes about ``Lines``."""
    from deepspeed.runtime.data_pipeline.data_sampling.data_analyzer import DataAnalyzer

    analyzer = DataAnalyzer(
        Lines(),
        batch_size=10,
        metric_names=list(METRICS),
        metric_functions=list(METRICS.values()),
        metric_types=["single_value_per_sample"] * 2,
        metric_dtypes=[np.int64] * 2,
        save_path=folder,
    )
    analyzer.run_map()
    analyzer.run_reduce()


LINEAR = {"schedule_type": "fixed_linear", "schedule_config": {"total_curriculum_step": 8, "difficulty_step": 8}}
SINGLE = {"clustering_type": "single_cluster"}
ROOT = {"schedule_type": "fixed_root", "schedule_config": {"total_curriculum_step": 9, "difficulty_step": 1, "root_degree": 2}}
DISCRETE = {"schedule_type": "fixed_discrete", "schedule_config": {"difficulty": [20, 45, 100], "max_step": [3, 7]}}
CURRICULA: dict[str, dict[str, dict[str, Any]]] = {
    "value": {"seqlen": {"difficulty_type": "value", "min_difficulty": 24, "max_difficulty": LENGTH, **LINEAR}},
    "percentile": {"kinds": {"difficulty_type": "percentile", "min_difficulty": 10, "max_difficulty": 100, **ROOT}},
    "one cluster": {
        "seqlen": {
            "difficulty_type": "value",
            "min_difficulty": 8,
            "max_difficulty": LENGTH,
            **LINEAR,
            "clustering_type": "single_cluster",
        }
    },
    "both": {
        "seqlen": {"difficulty_type": "value", "min_difficulty": 24, "max_difficulty": LENGTH, **LINEAR},
        "kinds": {"difficulty_type": "percentile", "min_difficulty": 20, "max_difficulty": 100, **DISCRETE},
    },
}


def data_efficiency(curriculum: str, indices: str, clusters: str) -> dict[str, Any]:
    """The block of ds_config.json."""
    metrics = {
        name: {
            "index_to_sample_path": os.path.join(
                indices, name, f"{name}_index_to_sample" + ("_percentile_merged" if m["difficulty_type"] == "percentile" else "")
            ),
            "index_to_metric_path": os.path.join(indices, name, f"{name}_index_to_metric"),
            "clustering_type": "schedule_based",
            **m,
        }
        for name, m in CURRICULA[curriculum].items()
    }
    learning = {"enabled": True, "data_cluster_path": clusters, "curriculum_metrics": metrics}
    return {"enabled": True, "seed": 5, "data_sampling": {"enabled": True, "num_epochs": 20, "curriculum_learning": learning}}


def samplers(rank: int, world: int, curriculum: str, indices: str, clusters: str, micro: int) -> tuple[Any, Any]:
    """DeepSpeed's sampler of a rank, and ours."""
    import deepspeed
    import torch.distributed as dist
    from deepspeed.runtime.data_pipeline.config import get_data_efficiency_config
    from deepspeed.runtime.data_pipeline.data_sampling.data_sampler import DeepSpeedDataSampler

    from deepspeed_cdp.integration.curriculum import CurriculumSampler

    deepspeed.init_distributed("gloo")
    config = get_data_efficiency_config({"data_efficiency": data_efficiency(curriculum, indices, clusters)})
    stock = DeepSpeedDataSampler(config, len(Lines()), micro, rank, world, dist.group.WORLD, ROUNDS, rank)
    return stock, CurriculumSampler(stock)


def draw(rank: int, world: int, curriculum: str, indices: str, clusters: str, micro: int, batches: int) -> dict[str, Any]:
    """Batches of both samplers; ours goes on from DeepSpeed's state, and from its own, too."""
    import torch.distributed as dist

    stock, ours = samplers(rank, world, curriculum, indices, clusters, micro)
    count = dist.group.WORLD._get_sequence_number_for_group
    drawn: dict[str, Any] = {"stock": [], "ours": [], "changes": 0, "reshuffled": []}
    theirs, mine, before = iter(stock), iter(ours), None
    reshuffle = ours.reshuffle_clusters
    ours.reshuffle_clusters = lambda cidx: (drawn["reshuffled"].append(cidx), reshuffle(cidx))  # type: ignore[func-returns-value]
    for at in range(batches):
        drawn["stock"].append(next(theirs))
        begun = count()
        drawn["ours"].append(next(mine))
        assert count() == begun, "a collective"
        assert ours.current_difficulties == stock.current_difficulties
        drawn["changes"] += ours.current_difficulties != before
        before = dict(ours.current_difficulties)
        if at == batches // 2:
            states = stock.state_dict(), ours.state_dict()
    for name, state in zip(("from stock", "from ours"), states):
        again = samplers(rank, world, curriculum, indices, clusters, micro)[1]
        for _ in zip(again, range(batches)):  # what it did before leaves no trace
            pass
        again.load_state_dict(state)
        drawn[name] = [batch for batch, _ in zip(again, range(batches // 2 - 1))]
    return drawn


class Bytes(nn.Module):
    """Predicts the next byte from the last one."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, 8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.head = nn.Linear(8, 256)

    def order(self) -> list[nn.Module]:
        return list(self.blocks)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(x)
        for block in self.order():
            hidden = hidden + torch.tanh(block(hidden))
        return F.cross_entropy(self.head(hidden[:, :-1]).flatten(0, 1), x[:, 1:].flatten(), ignore_index=0)


class Backwards(Bytes):
    """Uses its blocks in another order than it defines them, so the first forward makes a new plan."""

    def order(self) -> list[nn.Module]:
        return list(self.blocks)[::-1]


MODELS = {"bytes": Bytes, "backwards": Backwards}


def start(
    rule: str | None, indices: str, folder: str, model: str = "bytes", seed: int = 5, cyclic: dict[str, Any] | None = None
) -> tuple[Any, Any]:
    """The engine, stock ZeRO-3 if ``rule`` is None, and its data loader, which cuts sequences to the difficulty."""
    import deepspeed

    import deepspeed_cdp

    deepspeed_cdp.register()
    torch.manual_seed(3)
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": MICRO,
        "gradient_accumulation_steps": ROUNDS,
        "optimizer": {"type": "SGD", "params": {"lr": 0.5, "momentum": 0.9}},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        "zero_allow_untested_optimizer": True,
        "data_efficiency": data_efficiency("value", indices, os.path.join(folder, f"clusters-{rule}")),
    }
    if rule:
        config["cyclic"] = {"enabled": True, "rule": rule, "timeout_seconds": 30, "delay_correction": "none", **(cyclic or {})}
    config["data_efficiency"]["seed"] = seed
    module = MODELS[model]().to(here())
    engine, _, loader, _ = deepspeed.initialize(
        model=module, model_parameters=module.parameters(), training_data=Lines(), config=config
    )

    def shorten(data: Any, state: dict[str, Any]) -> Any:
        return data[0], data[1][:, : state["current_difficulties"]["seqlen"]]

    engine.set_data_post_process_func(shorten)
    return engine, loader


def train(
    rank: int,
    world: int,
    rule: str | None,
    indices: str,
    folder: str,
    model: str = "bytes",
    load: str = "",
    save: str = "",
    cyclic: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Train.

    Args:
        load: folder of a checkpoint to go on from; save: folder to save into after SAVED_AFTER steps.
        cyclic: added to the cyclic block.
    Returns:
        losses, numbers and shapes of the samples by micro-batch, the state at the end, the engine's class.
    """
    engine, loader = start(rule, indices, folder, model, cyclic=cyclic)
    if load:
        engine.load_checkpoint(load)
    first = engine.global_steps
    result: dict[str, Any] = {"losses": [], "samples": [], "class": type(engine).__name__}
    batches = iter(loader)
    for step in range(first, STEPS):
        for _ in range(ROUNDS):
            numbers, x = next(batches)
            result["samples"].append((numbers.tolist(), tuple(x.shape)))
            loss = engine(x.to(here()))
            result["losses"].append(loss.item())
            engine.backward(loss)
            engine.step()
        if save and step + 1 == SAVED_AFTER:
            engine.save_checkpoint(save)
    result["state"] = pack(whole(engine))
    engine.destroy()
    return result


def refused(rank: int, world: int, indices: str, folder: str) -> list[str]:
    """What is said of a curriculum below every sample, of a state of other metrics or data, and of seeds that differ."""

    def ours(curriculum: str) -> Any:
        return samplers(rank, world, curriculum, indices, folder, MICRO)[1]

    hard, one, other = ours("value"), ours("value"), ours("percentile")
    hard.curriculum_schedulers["seqlen"].state.update(current_difficulty=1, max_difficulty=1)
    next(iter(other))
    state = {**other.state_dict(), "data_clusters": [np.array([len(Lines())])]}
    return [
        told(lambda: next(iter(hard))),
        told(lambda: one.load_state_dict(other.state_dict())),
        told(lambda: other.load_state_dict(state)),
        told(lambda: start("dp", indices, folder, seed=rank)),
    ]
