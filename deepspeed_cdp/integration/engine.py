"""CyclicEngine: DeepSpeed's engine with point-to-point messages in place of ZeRO-3's collectives.

It overrides the methods of ``DeepSpeedEngine`` that differ; ``Runtime`` does the work.
"""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.utils import log_dist

from deepspeed_cdp.checkpoint import save_load
from deepspeed_cdp.errors import HandoffError
from deepspeed_cdp.integration import agreement, sequence_parallel, tensor_parallel
from deepspeed_cdp.integration.curriculum import CurriculumSampler, shared_settings
from deepspeed_cdp.integration.engine_base import EngineBase, check_loss, warn
from deepspeed_cdp.integration.optimizer import CyclicOptimizer
from deepspeed_cdp.integration.support import check_ring_size
from deepspeed_cdp.integration.throughput import on_stream
from deepspeed_cdp.integration.zero3_params import Access, destroy_engines, offload_stub
from deepspeed_cdp.model.discover import Example, FoundUnits
from deepspeed_cdp.model.make_plan import Settings
from deepspeed_cdp.model.materialize import Initial
from deepspeed_cdp.optim.delay_correction import resolve
from deepspeed_cdp.plan.plan import Plan
from deepspeed_cdp.plan.schedule import threshold
from deepspeed_cdp.runtime import trace
from deepspeed_cdp.runtime.runtime import Runtime
from deepspeed_cdp.transport.connect import connect
from deepspeed_cdp.transport.ring_view import rings_of
from deepspeed_cdp.verify.summary import check_rings, estimated_actions


class CyclicEngine(EngineBase, DeepSpeedEngine):
    """The engine that ``deepspeed.initialize`` returns under ``"cyclic": {"enabled": true}``.

    Attributes:
        cyclic_plan: the plan; ``cyclic_plan.stages`` names every trained parameter once.
        optimizer_group_names: names of the trained parameters of each of the optimizer's groups, in its order, on every rank.
    """

    _runtime: Runtime = None  # type: ignore[assignment]  # until the optimizer is configured
    _access: Access | None = None
    _initial: Initial | None = None
    _evaluating = False  # between eval() and train()
    _collectives = 0  # that the default process group had begun at the end of the last training forward
    _sequence = 1  # ranks that work on one sequence
    _check_inputs: Callable[..., Any] | None = None  # DeepSpeed's, of the first batch with tensor parallelism
    _rehearsed = False  # the first training forward has been compared with the plan
    _loaded: tuple | None = None  # arguments of the last ``load_checkpoint``
    _rewinds_data = True  # ``load_checkpoint`` sets the curriculum's sampler, too

    # ---- setting up -----------------------------------------------------------------------------------------------------
    def _configure_distributed_model(self, model: torch.nn.Module) -> None:
        config = self._config.cyclic_config
        self._config.timers_config.synchronized = False  # no device synchronize per step: it delays messages
        destroy_engines(model)
        self._transport = connect(config.transport, dist.get_rank(), dist.get_world_size(), config.timeout_seconds, self.device)
        if (tensor := self._tensor) > 1:
            tensor_parallel.check(tensor, model, self._transport, self._config)
            self._check_inputs = tensor_parallel.take_input_check(self)
        self._agree(model)
        if tensor > 1:
            add = tensor_parallel.sum_members(tensor, config.timeout_seconds)
            self._transport = rings_of(self._transport, config.ring_size, tensor=tensor, sum_members=add)
        else:
            self._sequence = sequence_parallel.degree(self.mpu, self._config._param_dict)
            self._transport = rings_of(self._transport, config.ring_size, self._sequence)
        check_ring_size(self._config, self._transport.size)
        self._initial = Initial(model, config.weights, self.device)
        super()._configure_distributed_model(model)
        # DeepSpeed's is None with an mpu of sequence groups
        self.dp_world_size = dist.get_world_size() // (self._sequence * tensor)
        self._initial.make_placeholders()

    @property
    def _tensor(self) -> int:
        """Ranks that share the layers."""
        return max(self.autotp_size(), 1)

    def _broadcast_model(self) -> None:
        """As DeepSpeed's, which cannot see a parameter without dimensions (CLIP's temperature) as bytes."""
        scalars = [p for p in self.module.parameters() if p.dim() == 0]
        for p in scalars:
            p.data = p.data.view(1)
        super()._broadcast_model()
        if self._sequence > 1:
            sequence_parallel.broadcast(self.module)
        for p in scalars:
            p.data = p.data.view(())

    def _agree(self, model: torch.nn.Module) -> None:
        """Collective: compare settings and model between the ranks, as ``_compare``."""
        named = list(model.named_parameters())
        self._compare_settings(
            {
                "zero_optimization.stage": int(self.zero_optimization_stage()),
                "loss scale (fp16)": self._loss_scale(),
                "torch_autocast.dtype": str(self.torch_autocast_dtype()) if self.torch_autocast_enabled() else None,
                "number of parameters": len(named),
                **shared_settings(self.data_efficiency_config()),
            },
            {
                "parameter names, shapes and dtypes": agreement.parameters(named),
                "requires_grad": agreement.trained(named),
                "classes of the model's modules": agreement.classes(model.named_modules()),
            },
        )

    def _agree_on_optimizer(self, optimizer: torch.optim.Optimizer | None) -> None:
        """Collective: all ranks have the same optimizer, with the same groups and options."""
        self._compare(
            agreement.optimizer_kind(optimizer),
            {
                "options of the optimizer": agreement.options(optimizer),
                "groups of the optimizer": agreement.groups(optimizer, self.module.named_parameters()),
            },
        )

    def _configure_zero_optimizer(self, optimizer: torch.optim.Optimizer | None) -> Any:
        self._agree_on_optimizer(optimizer)
        optimizer = self._checked(optimizer, self.module)
        config = self._config.cyclic_config
        _, sum_dtype = self.get_data_types()
        names = {p: n for n, p in self.module.named_parameters() if p.requires_grad}
        self.optimizer_group_names = [[names[p] for p in g["params"] if p in names] for g in optimizer.param_groups]
        correction = resolve(config.correction, optimizer, threshold(config.rule, self._transport.size))
        self._settings = Settings(
            rule=config.rule,
            partition_method=config.partition_method,
            units=config.units,
            rounds=self.gradient_accumulation_steps(),
            clip=float(self.gradient_clipping()),
            sum_dtype=sum_dtype if self._config.grad_accum_dtype else None,
            keep_after_forward=config.keep_after_forward,
            prefetch_units=config.prefetch_units,
            min_unit_bytes=int(config.min_unit_mb * 2**20),
            loss_scale=self._loss_scale(),
            warmup_steps=config.warmup_steps,
            **self._offloading(),
            replicated=self.zero_optimization_stage() < 3,
            gradient_accumulation_fusion=config.gradient_accumulation_fusion,
            check_divergence=config.check_divergence,
            delay_correction=correction,
            any_order=config.any_order,
            summed_ranks=sequence_parallel.summed_ranks(self._sequence, self._config),
            uncounted=tensor_parallel.uncounted(self.module) if self._tensor > 1 else frozenset(),
        )
        self._make_runtime(optimizer, self._initial if self._initial and self._initial.elsewhere else None)
        self._initial = None
        surface = CyclicOptimizer(self._runtime)
        surface.parameter_offload = offload_stub(self.module)
        self.enable_backward_allreduce = False
        self._log_warnings()
        if why := self._runtime.param_hooks.accumulation.not_fused_reason:
            warn(f"gradients are added after the products that make them, which is slower: {why}")
        if why := self._runtime.why_not_native:
            warn(f"Python does autograd's side of passes, which takes the host longer than C++ would: {why}")
        if warning := self.cyclic_plan.schedule.warning:
            warn(warning)
        schedule = self.cyclic_plan.schedule
        log_dist(
            f"cyclic: {schedule.ranks} ranks and stages, K = {schedule.threshold}, delay correction {correction.method}",
            ranks=[0],
        )
        self._destroy_at_exit()
        return surface

    def _make_runtime(self, optimizer: torch.optim.Optimizer, initial: Initial | None, found: FoundUnits | None = None) -> None:
        """Collective: make the runtime and dry-run its plan. Arguments as of ``Runtime``."""
        self._runtime = Runtime(
            self.module,
            optimizer,
            self._settings,
            self._transport,
            self.device,
            initial,
            self._on_gathered,
            self._on_persistent,
            found,
        )
        plans = self._runtime.executor.phases.plans
        self._dry_run(
            sum(estimated_actions(p, self._tensor) for p in plans), lambda: check_rings(plans, self._sequence, self._tensor)
        )
        self._access = Access(self._runtime, dist.group.WORLD, weakref.WeakMethod(self.destroy))
        self._access.attach()

    def _rehearse(self, example: Example) -> None:
        """Collective, before the first training forward: make the plan anew if this batch, on any rank, cannot follow it."""
        self._rehearsed = True
        found = self._runtime.rehearse(example)
        if found is None:
            return
        why, units = found
        log_dist(f"the plan is made anew for the first batch, in which {why}", ranks=[0])
        optimizer, parameters = self._runtime.owner.user_optimizer, dict(self.module.named_parameters())
        assert self._access is not None
        self._access.detach()
        self._access = None
        self._runtime.retire()
        optimizer.state.clear()
        for group, names in zip(optimizer.param_groups, self.optimizer_group_names):
            group["params"] = [parameters[n] for n in names]
        self._make_runtime(optimizer, None, units)
        self.optimizer.follow(self._runtime)
        if self._loaded:
            self._rewinds_data = False  # this forward's batch has been drawn
            self.load_checkpoint(*self._loaded)
            self._rewinds_data = True

    def _on_gathered(self, whole: bool) -> None:
        if self._access is not None:
            self._access.update_status(whole)

    def _on_persistent(self) -> None:
        if self._access is not None:
            self._access.update_persistent()

    def _loss_scale(self) -> float | dict[str, Any] | None:
        """``Settings.loss_scale``: of the ``fp16`` block, also for autocast to float16."""
        if not (self.fp16_enabled() or self.torch_autocast_enabled() and self.torch_autocast_dtype() == torch.float16):
            return None
        return self.dynamic_loss_scale_args() if self.dynamic_loss_scale() else self.loss_scale()

    def zero_optimization(self) -> bool:
        """True under stage 0 too: the optimizer is always ours, and DeepSpeed's own paths without ZeRO do not apply."""
        return True

    def zero_optimization_partition_gradients(self) -> bool:
        """True under every stage: gradients leave a rank in every micro-batch, and ``step()`` ends the step."""
        return True

    def zero_optimization_partition_weights(self) -> bool:
        """False: parameters are sent whole, so ZeRO-3's hooks, gathers and shard files do not apply."""
        return False

    @property
    def tput_timer(self) -> Any:
        """As DeepSpeed's, but on a GPU it does not wait for the device (integration/throughput.py)."""
        return self._tput_timer

    @tput_timer.setter
    def tput_timer(self, timer: Any) -> None:
        self._tput_timer = on_stream(timer, self.device)

    @property
    def cyclic_plan(self) -> Plan:
        """Units, stages, owners and buffer offsets, equal on all ranks."""
        return self._runtime.plan

    # ---- data -----------------------------------------------------------------------------------------------------------
    def deepspeed_io(self, *args: Any, **kwargs: Any) -> Any:
        """As DeepSpeed's; with curriculum learning each rank draws the batches that DeepSpeed's rank 0 broadcasts."""
        loader = super().deepspeed_io(*args, **kwargs)
        if self.curriculum_learning_enabled():
            loader.data_sampler = CurriculumSampler(loader.data_sampler)
        return loader

    @property
    def curriculum_sampler(self) -> CurriculumSampler | None:
        """The sampler of ``training_data``, which checkpoints save and load; None without curriculum learning."""
        on = self.curriculum_learning_enabled() and self._rewinds_data and self.training_dataloader is not None
        return self.training_dataloader.data_sampler if on else None

    # ---- training -------------------------------------------------------------------------------------------------------
    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """As DeepSpeed's; the first forward in ``eval()`` mode or under ``no_grad`` is collective: it flushes and gathers."""
        with self._noting_failure():
            torch.clear_autocast_cache()  # of casts of other versions, where the script has an autocast around its loop
            training = self.module.training and torch.is_grad_enabled()
            if training:
                if self._check_inputs:
                    self._check_inputs(self.module, inputs, kwargs)
                    self._check_inputs = None
                if not (self._rehearsed or self._runtime.borrowed or self._runtime.begun_outside):
                    self._rehearse(Example(inputs, kwargs))
                with self._runtime.forward():
                    output = super().forward(*inputs, **kwargs)
                if not self._runtime.executor.state.step:
                    self._collectives = _collectives()
                return output
            self._runtime.gather_for_forward()
        return super().forward(*inputs, **kwargs)  # an evaluation changes no state: its errors are the script's

    def backward(self, loss: torch.Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> torch.Tensor:
        """As DeepSpeed's.

        Raises:
            ValueError: the loss is not one number, or its forward is missing or has had its backward.
        """
        with self._noting_failure():
            check_loss(loss, self._runtime.executor.global_step)
            self._check_meetings()
            self._runtime.check_loss(loss)
            self._runtime.executor.add_loss(loss)
            return super().backward(loss, retain_graph, scale_wrt_gas)

    def _check_meetings(self) -> None:
        """In the first micro-batch since a flush, which cannot hang.

        Raises:
            ValueError: the script called a collective since the forward, and in later micro-batches ranks would hang in it.
        """
        state, plan, runtime = self._runtime.executor.state, self.cyclic_plan, self._runtime
        if state.step or state.round or plan.schedule.ranks < 3 or _collectives() == self._collectives:
            return
        if plan.predicts and runtime.settings.offload and runtime.device.type == "cuda":
            raise ValueError(
                "the script calls a collective between the forward and the backward of a micro-batch (metrics gathered with the "
                f"loss, perhaps), where the ranks of a ring of {plan.schedule.ranks} would wait for each other for ever, since "
                "cyclic.delay_correction is 'predict' and zero_optimization.offload_optimizer makes predictions on the host; set "
                "cyclic.delay_correction to 'extrapolate' or 'none', or call the collective after engine.step()"
            )

    def step(self, lr_kwargs: dict[str, Any] | None = None) -> None:
        """As DeepSpeed's: hyperparameters are recorded now, the update follows when the sums have come round the ring."""
        with self._noting_failure():
            if not self.managed_gradient_accumulation() or self.is_gradient_accumulation_boundary():
                self._runtime.check_step()  # before DeepSpeed's step() has changed anything
            super().step(lr_kwargs)

    def allreduce_gradients(self, *args: Any, **kwargs: Any) -> None:
        """Nothing: the backward sends the sums."""

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate only, as every micro-batch here does; ``step()`` inside is an error, as DeepSpeed has it."""
        self.inside_no_sync_ctxt, before = True, self.inside_no_sync_ctxt
        try:
            yield
        finally:
            self.inside_no_sync_ctxt = before

    def eval(self) -> Any:
        """As DeepSpeed's; the evaluation that begins is collective, even for a rank that runs no batch of it (see ``train``)."""
        self._evaluating = True
        return super().eval()

    def train(self, mode: bool = True) -> Any:
        """As DeepSpeed's; a rank that ran no forward since ``eval()`` takes part here in the others' gathering of parameters."""
        if mode and self._evaluating and self._runtime is not None and self._runtime.between_steps and not self._failed:
            with self._noting_failure():
                self._runtime.gather()
        self._evaluating = not mode
        return super().train(mode)

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """As DeepSpeed's, but it cannot raise the number of micro-batches per step: the timetable is made for it."""
        most, each = self.cyclic_plan.schedule.rounds, self.train_micro_batch_size_per_gpu() * self.dp_world_size
        if train_batch_size > most * each:
            raise ValueError(
                f"set_train_batch_size({train_batch_size}) needs more micro-batches per step than the {most} that "
                f"the engine was made for; start with a larger gradient_accumulation_steps, it can be lowered later"
            )
        super().set_train_batch_size(train_batch_size)

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Nothing, since gradients do not stay on a rank. With ``any_order`` they do until a backward ends, and are dropped."""
        if self._runtime.param_hooks.any_order:
            self._runtime.param_hooks.drop_grads()

    def get_global_grad_norm(self) -> float | None:
        """Gradient norm, before clipping, of the last step that this rank knows to be finished everywhere.

        That is one step ago on the last rank and two on the others (under dp each knows one more), without a collective. Until
        the first is known it is nan, a number that scripts can format, and before the first step None as under ZeRO-3.
        """
        norm = self.cyclic_metrics["grad_norm"]
        return float("nan") if norm is None and self.global_steps > 0 else norm

    @property
    def cyclic_metrics(self) -> dict[str, Any]:
        """Metrics that this rank knows without a collective (docs/observability.md); None where they are not known yet.

        - ``step``: the last step that this rank knows to be finished on all ranks, from 0. ``loss`` (mean over all ranks'
          micro-batches) and ``grad_norm`` (before clipping) are of that step. ``lag``: steps since then.
        - ``waited``, ``waited_sent``: seconds by (stream, peer) that the host was blocked in step ``waited_step``, until messages
          arrived and until peers took sent ones; ``waited_total``: all of them. On GPUs the passes' CUDA stream waits, which is
          timed in one step of eight.
        - ``busy``: by rank of the ring, seconds without waits in the rank's latest (timed) step; ``slowest``: the rank with the
          most.

        Reading never blocks: on GPUs the numbers are the latest ones that have reached the host.
        """
        executor, (waited, sent) = self._runtime.executor, self._runtime.counters.waited()
        step, loss, grad_norm = executor.metrics.read()
        busy = executor.metrics.busy_ranks()
        timing = self._transport.timing
        of = executor.global_step - 1 if timing is None else timing.latest and timing.latest.step
        return {
            "step": step,
            "lag": None if step is None else max(executor.global_step - 1 - step, 0),
            "loss": loss,
            "grad_norm": grad_norm,
            "waited_step": None if waited is None else of,
            "waited": waited,
            "waited_sent": sent,
            "waited_total": None if waited is None or sent is None else sum(waited.values()) + sum(sent.values()),
            "busy": busy,
            "slowest": None if busy is None else self._transport.world_rank_of(busy.index(max(busy))),
        }

    @contextmanager
    def cyclic_trace(self, path: str) -> Iterator[None]:
        """Record passes, waits, messages and updates of the steps inside, and write them to ``path`` (trace.json:
        trace.rank0.json).

        Between steps only; not collective, but ``deepspeed-cdp timeline --from`` wants every rank's file. See runtime/trace.py.

        Raises:
            ValueError: in the middle of a step.
        """
        if not self._runtime.between_steps:
            raise ValueError(
                f"engine.cyclic_trace() began in the middle of step {self._runtime.executor.global_step}; enter it "
                "before engine.forward() or after engine.step()"
            )
        recorder = trace.Recorder(self._runtime.executor, self.device)
        try:
            yield
        finally:
            trace.write(trace.file_of(path, recorder.rank), recorder.stop())

    # ---- whole parameters -----------------------------------------------------------------------------------------------
    def flush(self) -> None:
        """Collective: finish all steps and apply the last update; the next step reads it everywhere (the delay starts anew)."""
        with self._noting_failure():
            self._runtime.flush()

    def module_state_dict(
        self, destination: Any = None, prefix: str = "", keep_vars: bool = False, exclude_frozen_parameters: bool = False
    ) -> dict[str, Any]:
        """Collective: the whole, up-to-date state dict, on every rank."""
        with self._noting_failure():
            state = self._runtime.whole_state()
            if self._tensor > 1:
                tensor_parallel.gather_layers(self.module, state)
        if exclude_frozen_parameters:
            for name, p in self.module.named_parameters():
                if not p.requires_grad:
                    state.pop(name, None)
        state = {prefix + k: v for k, v in state.items()}
        if destination is not None:
            destination.update(state)
        return state if destination is None else destination

    def _zero3_consolidated_16bit_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Any] | None:
        """Collective: the whole state dict on the CPU of rank 0, None elsewhere."""
        state = self.module_state_dict(exclude_frozen_parameters=exclude_frozen_parameters)
        return {k: v.cpu() if isinstance(v, torch.Tensor) else v for k, v in state.items()} if self.global_rank == 0 else None

    def _consolidated_16bit_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Any] | None:
        return self._zero3_consolidated_16bit_state_dict(exclude_frozen_parameters)

    # ---- checkpoints ----------------------------------------------------------------------------------------------------
    def save_checkpoint(
        self,
        save_dir: str,
        tag: str | None = None,
        client_state: dict | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Collective: flush, and write a checkpoint (checkpoint/save_load.py), under ``checkpoint.writer.decoupled`` later.

        Raises:
            CheckpointError: it, or one that was written beside training, could not be written; on every rank, and the last good
                checkpoint is untouched.
        """
        with self._noting_failure():
            self._finish_saving()
            given = save_dir, tag, client_state or {}, save_latest, exclude_frozen_parameters, self._saves_later
            self._pending = save_load.save(self, self._runtime, *given)
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
        """Collective: load a checkpoint of this engine, of stock ZeRO-3, or a universal one (checkpoint/deepspeed_formats.py).

        Returns:
            (path, client_state), or (None, None) if there is no tag and no ``latest`` file.
        Raises:
            CheckpointError: it cannot be read; on every rank, with the file's name, and nothing was changed.
        """
        with self._noting_failure():
            self._finish_saving()
            given = (
                load_dir,
                tag,
                load_module_strict,
                load_optimizer_states,
                load_lr_scheduler_states,
                load_module_only,
                custom_load_fn,
            )
            path, state = save_load.load(self, self._runtime, *given)
            self._loaded = given if path is not None else self._loaded
            return path, state

    # ---- the end --------------------------------------------------------------------------------------------------------
    def report(self) -> str:
        """Collective: a short text report of the run."""
        from deepspeed_cdp.runtime.report import report

        with self._noting_failure():
            return report(type(self).__name__, self._runtime)

    def _divergence(self) -> str | None:
        return self._runtime.divergence_known(at_once=True)

    def _progress(self) -> Any:
        return self._runtime.progress

    @property
    def _failure_in_hooks(self) -> str:
        return "" if self._runtime is None else self._runtime.executor.failure

    @property
    def _in_step(self) -> bool:
        return not self._runtime.between_steps

    def _close(self, well: bool) -> None:
        access, runtime, self._access = self._access, self._runtime, None
        if runtime is None:
            if self._transport is not None:
                self._transport.close(False)
            return
        well = well and runtime.executor.between_steps
        stays = False
        if access is not None:
            if well and not self._exiting:
                with suppress(HandoffError):  # the others have ended, and need no parameters
                    runtime.flush()
                    stays = True
            access.detach()
            if stays:
                access.leave()
        runtime.close(well, not stays)


def _collectives() -> int:
    """Collectives of the default process group so far."""
    group: Any = torch.distributed.group.WORLD
    return group._get_sequence_number_for_group()


__all__ = ["CyclicEngine", "HandoffError"]
