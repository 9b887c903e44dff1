"""Curriculum learning (``data_efficiency``): DeepSpeed's batches without DeepSpeed's broadcast (docs/limits.md).

DeepSpeed's rank 0 draws each global batch and broadcasts it. A draw depends on the seed, the config and the index files only, so
here every rank draws for itself.
"""

import copy
import logging
import os
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from deepspeed.runtime.data_pipeline import constants as key
from deepspeed.runtime.data_pipeline.data_sampling.data_sampler import DeepSpeedDataSampler
from deepspeed.utils import log_dist

from deepspeed_cdp.errors import CheckpointError

CLUSTERS = "data_clusters"  # in the state: the order of the samples in each cluster


class CurriculumSampler(DeepSpeedDataSampler):
    """Yields the batches that DeepSpeed's sampler yields on its rank, and calls no collective.

    Clusters, in their shuffled order, are arrays in memory; DeepSpeed keeps them in files that rank 0 writes.

    Args:
        stock: DeepSpeed's sampler of this rank, before its first batch.
    """

    curriculum_step: int
    current_difficulties: dict[str, Any]

    def __init__(self, stock: DeepSpeedDataSampler):
        config = copy.deepcopy(stock.data_efficiency_config)
        config[key.DATA_SAMPLING][key.CURRICULUM_LEARNING][key.CURRICULUM_LEARNING_CLUSTER_PATH] = os.curdir  # nothing is written
        super().__init__(
            config,
            stock.one_epoch_total_samples,
            stock.micro_batch_size,
            stock.data_parallel_rank,
            stock.micro_batch_times_data_parallel_size // stock.micro_batch_size,
            stock.data_parallel_group,
            stock.gradient_accumulation_steps,
            global_rank=0,  # the rank that draws
            drop_last=stock.drop_last,
        )

    # ---- drawing: the random numbers are used in DeepSpeed's order -----------------------------------------------------------
    def get_next_global_batch(self) -> None:
        """As DeepSpeed's rank 0 does it."""
        self.curriculum_step += 1
        previous, current = {}, {}
        for metric, scheduler in self.curriculum_schedulers.items():
            previous[metric] = self.current_difficulties.get(metric, self._lowest(metric))
            current[metric] = scheduler.update_difficulty(self.curriculum_step)
        changed, self.current_difficulties = current != self.current_difficulties, current
        if changed:
            self.get_new_cluster(previous)
        if not self.data_clusters:
            raise ValueError(
                f"data_efficiency.data_sampling.curriculum_learning begins at difficulties {current}, and no sample of "
                "training_data is that easy; raise min_difficulty"
            )
        batch: list[Any] = []
        for cluster, samples in enumerate(self.sample_from_clusters()):
            batch += self.get_sample_from_cluster(cluster, samples)
        self.np_rng.shuffle(batch)
        self.batch = [int(sample) for sample in batch]

    def get_new_cluster(self, previous_difficulties: Mapping[str, Any]) -> None:
        """Append the samples that the current difficulties add, if any."""
        samples = self._new_samples(previous_difficulties)
        change = f"curriculum: from difficulties {previous_difficulties} to {self.current_difficulties}"
        log_dist(f"{change}: {len(samples)} more of {self.one_epoch_total_samples} samples", ranks=[0])
        if len(samples):
            self.np_rng.shuffle(samples)
            self._set_clusters([*(cluster for (cluster,) in self.data_clusters), samples.astype(self.index_dtype)])
            self.data_cluster_current_position.append(0)

    def reshuffle_clusters(self, cidx: int) -> None:
        """Shuffle a cluster whose samples have all been drawn."""
        cluster = self.data_clusters[cidx][0].copy()  # states that were handed out keep the array before
        self.np_rng.shuffle(cluster)
        self.data_clusters[cidx] = [cluster]

    def _new_samples(self, previous: Mapping[str, Any]) -> np.ndarray:
        metrics = [m for m in self.curriculum_schedulers if self.clustering_type[m] != key.CURRICULUM_LEARNING_SINGLE_CLUSTER]
        if len(metrics) < 2:
            if metrics:
                return self._between(metrics[0], previous[metrics[0]])
            return np.arange(0 if self.data_clusters else self.one_epoch_total_samples, dtype=self.index_dtype)
        samples = self._between(metrics[0], self._lowest(metrics[0]))
        for metric in metrics[1:]:
            samples = np.intersect1d(samples, self._between(metric, self._lowest(metric)), assume_unique=True)
        for (cluster,) in self.data_clusters:
            samples = np.setdiff1d(samples, cluster, assume_unique=True)
        return samples

    def _between(self, metric: str, lower: Any) -> np.ndarray:
        """Samples above a difficulty and not above the current one."""
        of = self.get_sample_based_on_metric_value if self._by_value(metric) else self.get_sample_based_on_metric_percentile
        samples = of(metric, lower, self.current_difficulties[metric])
        return np.arange(0, dtype=self.index_dtype) if samples is None else samples

    def _by_value(self, metric: str) -> bool:
        return self.difficulty_type[metric] == key.CURRICULUM_LEARNING_VALUE_BASED

    def _lowest(self, metric: str) -> float:
        return float("-inf") if self._by_value(metric) else 0

    def _set_clusters(self, clusters: list[np.ndarray]) -> None:
        self.data_clusters = [[cluster] for cluster in clusters]  # DeepSpeed's files have one document each
        self.data_cluster_sizes = [len(cluster) for cluster in clusters]

    # ---- checkpoints ---------------------------------------------------------------------------------------------------------
    def state_dict(self) -> dict[str, Any]:
        """DeepSpeed's state, with this sampler's random numbers (DeepSpeed saves numpy's global ones) and the clusters."""
        return {
            key.CURRICULUM_LEARNING_BATCH: self.batch,
            key.CURRICULUM_LEARNING_CONSUMED_SAMPLES: self.consumed_samples,
            key.CURRICULUM_LEARNING_STEP: self.curriculum_step,
            key.CURRICULUM_LEARNING_CURRENT_DIFFICULTIES: self.current_difficulties,
            key.CURRICULUM_LEARNING_DATA_CLUSTER_CURRENT_POSITION: list(self.data_cluster_current_position),
            key.CURRICULUM_LEARNING_NP_RNG_STATE: self.np_rng.bit_generator.state,
            CLUSTERS: [cluster for (cluster,) in self.data_clusters],
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on where the sampler of ``state_dict`` was."""
        self.prepare(state_dict, "the state")()

    def prepare(self, state: Mapping[str, Any] | None, folder: str) -> Callable[[], None]:
        """Check a state, and change nothing.

        Args:
            state: of ``state_dict``, or of DeepSpeed's own sampler: then the batches before it are drawn again. None: begin anew.
        Returns:
            What loads it.
        Raises:
            CheckpointError: it is of other metrics, or of more samples.
        """
        if state is None:
            log_dist(f"{folder} was saved without curriculum learning, which begins anew", ranks=[0], level=logging.WARNING)
            return lambda: None
        metrics, samples = set(state[key.CURRICULUM_LEARNING_CURRENT_DIFFICULTIES]), self.one_epoch_total_samples
        if metrics and metrics != set(self.curriculum_schedulers):
            raise CheckpointError(
                f"{folder} has a curriculum of {sorted(metrics)} and the config one of {sorted(self.curriculum_schedulers)}; "
                "continue with the same metrics"
            )
        largest = max((int(cluster.max()) for cluster in state.get(CLUSTERS, ())), default=0)
        if largest >= samples:
            raise CheckpointError(
                f"{folder} has a curriculum with sample {largest}, and training_data has {samples} samples; give the same data"
            )
        return lambda: self._load(state)

    def _load(self, state: Mapping[str, Any]) -> None:
        own = CLUSTERS in state
        difficulties = state[key.CURRICULUM_LEARNING_CURRENT_DIFFICULTIES] if own else {}
        self.curriculum_step = state[key.CURRICULUM_LEARNING_STEP] if own else 0
        self.current_difficulties = dict(difficulties)
        for metric, scheduler in self.curriculum_schedulers.items():  # one at its maximum stays there
            lowest = scheduler.state[key.CURRICULUM_LEARNING_MIN_DIFFICULTY]
            scheduler.state[key.CURRICULUM_LEARNING_CURRENT_DIFFICULTY] = difficulties.get(metric, lowest)
        self.data_cluster_current_position = list(state[key.CURRICULUM_LEARNING_DATA_CLUSTER_CURRENT_POSITION]) if own else []
        self._set_clusters(list(state[CLUSTERS]) if own else [])
        self.np_rng = np.random.default_rng(self.data_efficiency_config[key.DATA_EFFICIENCY_SEED])
        if own:
            self.np_rng.bit_generator.state = state[key.CURRICULUM_LEARNING_NP_RNG_STATE]
        while self.curriculum_step < state[key.CURRICULUM_LEARNING_STEP]:
            self.get_next_global_batch()
        self.batch = list(state[key.CURRICULUM_LEARNING_BATCH])
        self.consumed_samples = state[key.CURRICULUM_LEARNING_CONSUMED_SAMPLES]


def shared_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """What all ranks must agree on to draw the same batches.

    Args:
        config: DeepSpeed's ``data_efficiency_config``.
    """
    curriculum = config[key.DATA_SAMPLING][key.CURRICULUM_LEARNING]
    if not curriculum[key.CURRICULUM_LEARNING_ENABLED]:
        return {}
    paths = (key.CURRICULUM_LEARNING_SAMPLE_PATH, key.CURRICULUM_LEARNING_METRIC_PATH)  # of each host's own disk, perhaps
    metrics = {
        metric: {name: value for name, value in settings.items() if name not in paths}
        for metric, settings in curriculum[key.CURRICULUM_LEARNING_METRICS].items()
    }
    return {
        "data_efficiency.seed": config[key.DATA_EFFICIENCY_SEED],
        "data_efficiency.data_sampling.curriculum_learning.curriculum_metrics": metrics,
    }
