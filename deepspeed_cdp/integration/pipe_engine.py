"""CyclicPipelineEngine: DeepSpeed's PipelineEngine without its flush, in three placements. ``PipeRuntime`` does the work."""

import hashlib
import math
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.base_optimizer import DeepSpeedOptimizer
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.torch_autocast import autocast_if_enabled
from deepspeed.utils import log_dist

from deepspeed_cdp.checkpoint import pipeline
from deepspeed_cdp.checkpoint.common import refuse_custom_load
from deepspeed_cdp.checkpoint.saving import save_location
from deepspeed_cdp.integration import agreement
from deepspeed_cdp.integration.engine_base import EngineBase, warn
from deepspeed_cdp.integration.pipe_module import bounds_of, layers_of, only_stage, placement_of, ties_of
from deepspeed_cdp.optim.delay_correction import resolve
from deepspeed_cdp.pipeline.evaluate import evaluate
from deepspeed_cdp.pipeline.runtime import PipeRuntime
from deepspeed_cdp.pipeline.state import PipelineStage
from deepspeed_cdp.plan.pipeline_schedule import PipeSchedule
from deepspeed_cdp.plan.schedule import threshold
from deepspeed_cdp.transport.connect import connect_pipeline
from deepspeed_cdp.verify.summary import check_pipelines, pipeline_actions


class PipeOptimizer(DeepSpeedOptimizer):
    """The optimizer that ``deepspeed.initialize`` returns: the user's groups, with this rank's fp32 masters."""

    def __init__(self, optimizer: torch.optim.Optimizer, runtime: PipeRuntime):
        self.optimizer, self._runtime = optimizer, runtime
        optimizer._opt_called = True  # type: ignore[attr-defined]  # for torch's schedulers: copies of the optimizer make the updates
        masters = [
            [m for owner in runtime.owners.values() for m in owner.optimizer.param_groups[g]["params"]]
            for g in range(len(optimizer.param_groups))
        ]
        for group, mine in zip(optimizer.param_groups, masters):
            group["params"] = mine

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups

    @property
    def state(self) -> dict[torch.Tensor, dict[str, Any]]:
        """Of this rank's masters; up to date after ``engine.flush()``."""
        return {p: s for owner in self._runtime.owners.values() for p, s in owner.optimizer.state.items()}

    def step(self, *_: Any, **__: Any) -> None:
        raise RuntimeError("optimizer.step() has no meaning in a pipeline; call engine.train_batch()")

    def zero_grad(self, *_: Any, **__: Any) -> None:
        """Nothing: each step starts its sums itself."""


class CyclicPipelineEngine(EngineBase, PipelineEngine):
    """The engine that ``deepspeed.initialize`` returns for a PipelineModule under ``"cyclic": {"enabled": true}``.

    Attributes:
        pipe_schedule: rule, placement and tied groups; ``print(engine.pipe_schedule.grid())`` draws it.
        placement: "pipeline", "pyramid" or "single".
        optimizer_group_names: names of this rank's trained parameters in each of the optimizer's groups.
    """

    _runtime: PipeRuntime = None  # type: ignore[assignment]  # until the optimizer is configured
    data_iterator: Iterator | None
    _placed = False

    # ---- setting up ---------------------------------------------------------------------------------------------------------
    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.num_stages, self._placed = self.pipe_schedule.stages, True
        self.stage_id = self.pipe_schedule.stages_of(dist.get_rank())[-1]
        self._began = time.perf_counter()

    def _configure_distributed_model(self, model: torch.nn.Module) -> None:
        config = self._config.cyclic_config
        self.placement, stages = placement_of(model, config.placement)
        steps = self.gradient_accumulation_steps()
        _check_micro_batches("gradient_accumulation_steps", steps, stages)
        k = threshold(config.rule, stages)
        exact = self.gradient_clipping() > 0 and k in (0, 2 * stages - 1)
        self._ties = ties_of(model)
        self.pipe_schedule = PipeSchedule(stages, k, steps // stages, self.placement, tuple(self._ties.values()), exact)
        self._warn_of_stall(config.rule)
        transport = connect_pipeline(
            config.transport, dist.get_rank(), self.pipe_schedule.ranks, config.timeout_seconds, self.device
        )
        if transport is not None:  # more than a single device
            self._transport = transport
            self._agree(model)
        super()._configure_distributed_model(model)

    def _warn_of_stall(self, rule: Any) -> None:
        schedule = self.pipe_schedule
        if schedule.stall and schedule.placement != "single":
            warn(
                f"cyclic.rule {rule!r} (K = {schedule.threshold}) on {schedule.stages} stages reads versions before they "
                f"exist: in a step of {schedule.micro_batches} micro-batches every stage waits for {schedule.stall} of "
                f'{schedule.period} passes ({schedule.idle:.0%}); K >= {schedule.stages - 1} ("cdp-v2") does not wait'
            )

    def _agree(self, model: Any) -> None:
        """Collective: compare settings and the pipeline's layers between the ranks, as ``_compare``."""
        layers = (
            repr([(type(s).__name__, repr(s)) for s in model._layer_specs])
            if all(not isinstance(s, torch.nn.Module) and not callable(getattr(s, "__code__", None)) for s in model._layer_specs)
            else ""
        )
        self._compare_settings(
            {
                "bounds of the stages": bounds_of(model),
                "tied stages": [list(t) for t in self._ties.values()],
                "layers (digest)": hashlib.sha256(layers.encode()).hexdigest()[:16],
            },
            {},
        )

    def _agree_on_stages(self, optimizer: torch.optim.Optimizer | None) -> None:
        """Collective: all ranks have the same optimizer and options, and replicas of a stage the same layers and groups."""
        details: dict[str, agreement.Named] = {"options of the optimizer": agreement.options(optimizer)}
        names, bounds = {p: n for n, p in self.module.named_parameters()}, bounds_of(self.module)
        for stage in self.pipe_schedule.stages_of(dist.get_rank()):
            layers = torch.nn.ModuleList(layers_of(self.module, bounds, stage))
            named = [(names[p], p) for p in layers.parameters()]
            details |= {
                f"parameter names, shapes and dtypes of stage {stage}": agreement.parameters(named),
                f"requires_grad in stage {stage}": agreement.trained(named),
                f"classes of the modules of stage {stage}": agreement.classes(layers.named_modules()),
                f"groups of the optimizer in stage {stage}": agreement.groups(optimizer, named),
            }
            for key, used in self._ties.items():
                if stage in used:
                    tied = self.module.tied_modules[key].named_parameters()
                    details[f"requires_grad in tied layer {key!r}"] = agreement.trained(tied)
        self._compare(agreement.optimizer_kind(optimizer), details)

    def _configure_zero_optimizer(self, optimizer: torch.optim.Optimizer | None) -> Any:
        self._agree_on_stages(optimizer)
        optimizer = self._checked(optimizer, self.module)
        config, rank, device = self._config.cyclic_config, dist.get_rank(), self.device
        _, sum_dtype = self.get_data_types()
        stages = {s: self._stage(s) for s in self.pipe_schedule.stages_of(rank)}
        trained = {p: n for stage in stages.values() for named in stage.units.values() for n, p in named}
        self.optimizer_group_names = [[trained[p] for p in g["params"] if p in trained] for g in optimizer.param_groups]
        correction = resolve(config.correction, optimizer, self.pipe_schedule.threshold)
        self.pipe_schedule = schedule = replace(
            self.pipe_schedule, delay_corrected=bool(correction), predicts=correction.method == "predict"
        )
        self._runtime = PipeRuntime(
            schedule,
            rank,
            stages,
            self._loss,
            optimizer,
            trained,
            self._transport,
            device,
            float(self.gradient_clipping()),
            sum_dtype if self._config.grad_accum_dtype else None,
            self.module.dynamic_shape,
            config.warmup_steps,
            **self._offloading(),
            read=(self._read_inputs, self._read_labels),
            check_divergence=config.check_divergence,
            correction=correction,
        )
        warmup = config.warmup_steps > 0
        schedules = [schedule, *([replace(schedule, threshold=0, exact_norm=self.gradient_clipping() > 0)] if warmup else [])]
        self._dry_run(sum(map(pipeline_actions, schedules)), lambda: check_pipelines(schedules))
        self.enable_backward_allreduce = False
        self._log_warnings()
        log_dist(
            f"cyclic pipeline: {schedule.stages} stages, placement {self.placement}, K = {schedule.threshold}, "
            f"delay correction {correction.method}",
            ranks=[0],
        )
        self._destroy_at_exit()
        return PipeOptimizer(optimizer, self._runtime)

    def _stage(self, stage: int) -> PipelineStage:
        """A stage for the runtime, with its parameters by unit."""
        schedule, module, bounds = self.pipe_schedule, self.module, bounds_of(self.module)
        names = {p: n for n, p in module.named_parameters()}
        tied = {
            p: schedule.stages + i
            for i, (key, used) in enumerate(self._ties.items())
            if stage in used
            for p in module.tied_modules[key].parameters()
        }
        units: dict[int, list] = {u: [] for u in schedule.units_at(stage)}
        fixed: dict[str, torch.Tensor] = {}
        seen: set[torch.nn.Parameter] = set()
        for number, layer in enumerate(layers_of(module, bounds, stage)):
            for p in layer.parameters():
                if p in seen:
                    continue
                seen.add(p)
                if p.requires_grad:
                    units[tied.get(p, stage)].append((names[p], p))
                else:
                    fixed[names[p]] = p
            fixed |= {f"{number} {n}": b for n, b in layer.named_buffers()}
        for named in units.values():
            named.sort()

        def run(inputs: Any, number: int) -> Any:
            torch.clear_autocast_cache()  # of casts of other versions, where the script has an autocast around its loop
            with only_stage(module, bounds, stage, number), autocast_if_enabled(self):
                return module.forward(inputs)

        return PipelineStage(run, units, fixed, lambda: only_stage(module, bounds, stage, module.micro_offset))

    def _loss(self, outputs: Any, labels: Any) -> torch.Tensor:
        with autocast_if_enabled(self):
            return outputs if self.module.loss_fn is None else self.module.loss_fn(outputs, labels)

    def _read_inputs(self, inputs: Any) -> Any:
        if torch.is_tensor(inputs):
            mine = inputs.clone().to(self.device).detach()
            return mine.requires_grad_(self._reentrant_activation_checkpointing() and mine.is_floating_point())
        return tuple(self._read_inputs(x) for x in inputs)

    def _read_labels(self, labels: Any) -> Any:
        if torch.is_tensor(labels):
            return labels.to(self.device)
        return tuple(x.to(self.device).detach() for x in labels) if isinstance(labels, (tuple, list)) else labels

    def is_first_stage(self) -> bool:
        """Whether this rank has the first stage."""
        return not self._placed or 0 in self.pipe_schedule.stages_of(self.global_rank)  # True in set-up: send nothing

    def is_last_stage(self) -> bool:
        """Whether this rank has the last stage."""
        return not self._placed or self.num_stages - 1 in self.pipe_schedule.stages_of(self.global_rank)

    # ---- training -----------------------------------------------------------------------------------------------------------
    def train_batch(self, data_iter: Iterator | None = None) -> torch.Tensor:
        """As DeepSpeed's, without the flush: the next call, or ``flush``, does the step's last backwards.

        Returns:
            The mean loss of the last step that is finished everywhere, the same on all ranks (float32): in the very first call,
            and under ``dp``, of this step; else of the step before. ``cyclic_metrics`` says which step it is.
        """
        if not torch.is_grad_enabled():
            raise RuntimeError("train_batch() requires gradients enabled. Use eval_batch() instead.")
        if data_iter is not None:
            self.set_dataiterator(data_iter)
        batches = self._batches("train_batch")
        with self._noting_failure():
            self.module.train()
            skipped = self._runtime.skipped
            self.agg_train_loss = self._runtime.train(batches).float()
            self._count_step(self._runtime.skipped - skipped)
        return self.agg_train_loss

    def _batches(self, what: str) -> Iterator[Any]:
        """Iterate over micro-batches. It reads the first at once, so that an exhausted iterator raises before any state changes.

        Raises:
            StopIteration: there is no further micro-batch.
            ValueError: this rank reads micro-batches and has no iterator.
        """
        first = []
        if self.is_first_stage() or self.is_last_stage():
            if self.data_iterator is None and self.batch_fn is None:
                raise ValueError(
                    f"{what}() of step {self.global_steps} has no data on rank {self.global_rank}, which has the first or the "
                    "last stage; pass an iterator, or training_data to deepspeed.initialize()"
                )
            first.append(self._next_batch())
        return chain(first, self._further_batches())

    def _further_batches(self) -> Iterator[Any]:
        while True:
            yield self._next_batch()

    def _count_step(self, skipped: int) -> None:
        self.skipped_steps += skipped
        if self.lr_scheduler is not None:
            try:
                self.lr_scheduler.step()
            except TypeError:  # as DeepSpeed has it for Megatron
                self.lr_scheduler.step(self.train_batch_size())
        self.global_steps += 1
        self.global_samples += self.train_batch_size()
        self.micro_steps += self.micro_batches
        if self.monitor.enabled and self.global_rank == 0:
            self.monitor.write_events(
                [
                    ("Train/Samples/train_loss", self.agg_train_loss.item(), self.global_samples),
                    ("Train/Samples/lr", self.get_lr()[0], self.global_samples),
                ]
            )
        every = self.steps_per_print()
        if every and self.global_steps % every == 0:
            now, began = time.perf_counter(), self._began
            self._began = now
            if self.global_rank == 0:
                self._report_progress(self.global_steps)
                seconds = (now - began) / every
                print(
                    f"steps: {self.global_steps} loss: {self.agg_train_loss.item():0.4f} iter time (s): {seconds:0.3f} "
                    f"samples/sec: {self.train_batch_size() / seconds:0.3f}"
                )

    def eval_batch(
        self,
        data_iter: Iterator,
        return_logits: bool = False,
        compute_loss: bool = True,
        reduce_output: str | None = "avg",
        bcast_loss: bool = True,
        num_micro_batches: int | None = None,
    ) -> Any:
        """As DeepSpeed's. Collective: it flushes, so that every stage has its newest weights."""
        if reduce_output not in (None, "avg"):
            raise ValueError(f'reduce_output is {reduce_output!r}; it must be "avg" or None; leave it out of eval_batch()')
        self.flush()
        before, self.data_iterator = self.data_iterator, data_iter
        count = self.micro_batches if num_micro_batches is None else num_micro_batches
        share = compute_loss and reduce_output == "avg" and (bcast_loss or self.monitor.enabled)
        try:
            batches = self._batches("eval_batch")
            with self._noting_failure():
                self.module.eval()
                results, outputs = evaluate(self._runtime, batches, count, compute_loss, share)
        finally:
            self.data_iterator = before
        result: Any = results
        if reduce_output == "avg":
            result = sum(results) / count if results else None
            result = result.to(self.device, torch.float32) if share else result
        if share and self.monitor.enabled and self.global_rank == 0:
            self.monitor.write_events([("Train/Samples/eval_loss", result.item(), self.global_samples)])
        return (result, outputs) if return_logits else result

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """As DeepSpeed's. Collective: it flushes. The number of micro-batches stays a multiple of the number of stages."""
        each = self.train_micro_batch_size_per_gpu()
        if train_batch_size % each == 0:
            _check_micro_batches("set_train_batch_size: micro-batches per step", train_batch_size // each, self.num_stages)
        super().set_train_batch_size(train_batch_size)
        self.flush()
        with self._noting_failure():
            self._runtime.set_rounds(self.micro_batches // self.num_stages)
        self.pipe_schedule = self._runtime.schedule

    def reset_activation_shape(self) -> None:
        """As DeepSpeed's. Collective: it flushes; outputs may be of other shapes from now on."""
        self.flush()
        self._runtime.forget_shapes(True)

    def flush(self) -> None:
        """Collective: finish all steps and apply the last update; the next step reads it everywhere (the delay starts anew)."""
        mode = self.module.training
        with self._noting_failure():
            self.module.train()  # as in train_batch, whose last passes are done here
            self._runtime.flush()
            self.module.train(mode)

    @property
    def cyclic_metrics(self) -> dict[str, Any]:
        """The last step finished on all ranks: ``step`` (from 0), mean ``loss``, ``grad_norm`` (before clipping).

        ``lag`` is the number of steps since then. All are None before the first step is finished.
        """
        known = self._runtime.finished
        if known is None:
            return {"step": None, "lag": None, "loss": None, "grad_norm": None}
        return {
            "step": known.step,
            "lag": max(self.global_steps - 1 - known.step, 0),
            "loss": float(known.loss),
            "grad_norm": float(known.norm),
        }

    def get_global_grad_norm(self) -> float | None:
        """Gradient norm, before clipping, of the step in ``cyclic_metrics``."""
        norm = self.cyclic_metrics["grad_norm"]
        return norm if norm is not None or self.global_steps == 0 else math.nan

    # ---- checkpoints --------------------------------------------------------------------------------------------------------
    def save_checkpoint(
        self,
        save_dir: str,
        tag: str | None = None,
        client_state: dict | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Collective: flush, and write a checkpoint (checkpoint/pipeline.py), under ``checkpoint.writer.decoupled`` later.

        Raises:
            CheckpointError: it, or one that was written beside training, could not be written; on every rank, and the last good
                checkpoint is untouched.
        """
        save_dir, tag = save_location(save_dir, tag, self.global_steps)
        self.flush()
        with self._noting_failure():
            self._finish_saving()
            self._pending = pipeline.save(
                self,
                self._stage_modules(),
                self._runtime,
                save_dir,
                tag,
                client_state or {},
                save_latest,
                exclude_frozen_parameters,
                self._saves_later,
            )
            return True

    def load_checkpoint(
        self,
        load_dir: str,
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Any = None,
    ) -> tuple[str | None, dict | None]:
        """Collective: load a checkpoint of a cyclic pipeline with any number of stages and placement.

        Returns:
            (path, client_state), or (None, None) if there is no tag and no ``latest`` file.
        Raises:
            CheckpointError: it cannot be read; on every rank, with the file's name, and nothing was changed.
        """
        refuse_custom_load(custom_load_fn)
        self.flush()
        with self._noting_failure():
            self._finish_saving()
            return pipeline.load(
                self,
                self._stage_modules(),
                self._runtime,
                load_dir,
                tag,
                load_module_strict,
                load_optimizer_states,
                load_lr_scheduler_states,
                load_module_only,
                custom_load_fn,
            )

    def _stage_modules(self) -> pipeline.StageModules:
        bounds = bounds_of(self.module)
        return pipeline.StageModules(bounds, {s: layers_of(self.module, bounds, s) for s in self._runtime.local_stages})

    # ---- the end ------------------------------------------------------------------------------------------------------------
    def _close(self, well: bool) -> None:
        if self._transport is not None:
            self._transport.close(well)


def _check_micro_batches(what: str, count: int, stages: int) -> None:
    if count % stages:
        raise ValueError(
            f"{what} is {count}, but a cyclic pipeline of {stages} stages takes a multiple of {stages} "
            f"micro-batches per step; set it to {(count // stages + 1) * stages}."
        )
