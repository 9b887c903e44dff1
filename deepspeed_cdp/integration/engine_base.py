"""Behaviour that CyclicEngine and CyclicPipelineEngine share: settings compared between ranks, failures, checks, the end."""

import atexit
import logging
import os
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from deepspeed.runtime.model_checkpointing.constants import CHECKPOINT_WRITER, CHECKPOINT_WRITER_DECOUPLED
from deepspeed.runtime.utils import DummyOptim, maybe_loss_for_backward
from deepspeed.runtime.zero.config import ZERO_OPTIMIZATION
from deepspeed.utils import log_dist, logger

from deepspeed_cdp.checkpoint.saving import Pending
from deepspeed_cdp.errors import CheckpointError, DivergenceError, HandoffError, class_and_text
from deepspeed_cdp.integration import agreement
from deepspeed_cdp.integration.zero3_params import remove_hooks
from deepspeed_cdp.transport.base import Transport
from deepspeed_cdp.verify.pipeline import ScheduleError
from deepspeed_cdp.verify.summary import AT_START, Summary
from deepspeed_cdp.verify.well_formed import PlanError
from deepspeed_cdp.version import __version__

_TAKEN: "weakref.WeakSet[torch.optim.Optimizer]" = weakref.WeakSet()  # optimizers that engines have been given


class EngineBase:
    """Base class of both engines, before DeepSpeed's.

    An engine that has failed closes its transport without waiting for other ranks. So does one that is destroyed while an
    exception propagates. The closed connection tells the other ranks.
    """

    _config: Any
    _transport: Transport = None  # type: ignore[assignment]  # until the engine is connected; a single device stays alone
    _failed = False
    _first_failure = ""  # the error with which it failed first, and its step
    _exit_callback: Callable[[], None] | None = None
    _destroyed = False
    _saves_later = False  # checkpoint.writer.decoupled
    _pending: Pending | None = None  # a checkpoint that is being written
    _exiting = False  # the interpreter ends, so nobody needs the parameters any more

    # ---- setting up -----------------------------------------------------------------------------------------------------
    def __init__(self, *args: Any, **kwargs: Any):
        """As DeepSpeed's. After an error the transport is closed: else torch aborts when the interpreter frees posted memory."""
        try:
            super().__init__(*args, **kwargs)
        except BaseException:
            self._failed = True
            self._forget_exit()
            self._close(False)
            remove_hooks(self)
            raise

    def _compare_settings(self, mine: dict[str, Any], details: dict[str, agreement.Named]) -> None:
        """Collective: all ranks run the same package with the same settings. Arguments and errors as in ``_compare``."""
        engine: Any = self
        shared = {
            "deepspeed_cdp version": __version__,
            "torch version": torch.__version__,
            **{f"cyclic.{key}": value for key, value in self._config.cyclic_config.model_dump().items()},
            "gradient_accumulation_steps": engine.gradient_accumulation_steps(),
            "train_micro_batch_size_per_gpu": engine.train_micro_batch_size_per_gpu(),
            "gradient_clipping": engine.gradient_clipping(),
            "dtypes": list(map(str, engine.get_data_types())),
        }
        self._compare({**shared, **mine}, details)

    def _compare(self, mine: dict[str, Any], details: dict[str, agreement.Named]) -> None:
        """Collective: ranks that have the same key have the same value.

        Args:
            mine: settings by name.
            details: by name, more data than an error can show. Ranks exchange digests first, and all of it if those differ.
        Raises:
            ValueError: on all ranks, with the first setting, or entry of the details, that differs.
        """
        if self._transport is None:
            return
        rank = self._transport.world_rank
        where = f"rank {rank}, comparing settings between ranks"
        everyone = self._transport.gather(mine | {key: agreement.digest(named) for key, named in details.items()}, where)
        found = agreement.first_difference(everyone, rank)
        if found is None:
            return
        if not isinstance(everyone[found.here][found.key], dict) or "digest" not in everyone[found.here][found.key]:
            raise ValueError(agreement.sentence(found, everyone))
        raise ValueError(agreement.detailed_sentence(found, self._transport.gather(details.get(found.key, {}), where)))

    def _configure_lr_scheduler(self) -> None:
        """As DeepSpeed's. Collective: all ranks have the same scheduler, in the same state."""
        super()._configure_lr_scheduler()  # type: ignore[misc]  # DeepSpeed's engine, the next base class
        scheduler = self.lr_scheduler  # type: ignore[attr-defined]
        self._compare(
            {"class of the lr scheduler": agreement.class_of(scheduler)},
            {"state of the lr scheduler": agreement.scheduler_state(scheduler)},
        )

    def _configure_checkpointing(self) -> None:
        """As DeepSpeed's, without its writers: checkpoint/saving.py writes."""
        config = self._config.checkpoint_config
        writer, config[CHECKPOINT_WRITER] = config[CHECKPOINT_WRITER], None
        super()._configure_checkpointing()  # type: ignore[misc]  # DeepSpeed's engine, the next base class
        config[CHECKPOINT_WRITER] = writer
        self._saves_later = bool(writer and writer[CHECKPOINT_WRITER_DECOUPLED])

    def _finish_saving(self) -> None:
        """Collective: wait for a checkpoint that is written beside training.

        Raises:
            CheckpointError: it was not saved; on every rank.
        """
        pending, self._pending = self._pending, None
        if pending:
            pending.wait(self._transport.gather if self._transport else lambda value, where: [value])

    def _do_optimizer_sanity_check(self, basic_optimizer: torch.optim.Optimizer) -> str:
        return ZERO_OPTIMIZATION  # whole tensors: any torch optimizer works, tested with ZeRO or not

    @staticmethod
    def _checked(optimizer: torch.optim.Optimizer | None, model: torch.nn.Module) -> torch.optim.Optimizer:
        """The optimizer; raises ValueError if there is none, or if it has trainable parameters that are not the model's."""
        if optimizer is None or isinstance(optimizer, DummyOptim):
            raise ValueError(
                "optimizer is missing in ds_config and in deepspeed.initialize(), and only zero_optimization.stage 0 and 3 do "
                "without; give an optimizer, or for evaluation set the stage to 3"
            )
        own = set(model.parameters())
        strangers = [
            f"group {g}, place {i}, shape {tuple(p.shape)}"
            for g, group in enumerate(optimizer.param_groups)
            for i, p in enumerate(group["params"])
            if p not in own and p.requires_grad
        ]
        if strangers and optimizer in _TAKEN:
            raise ValueError(
                "optimizer was given to an earlier engine, whose masters it steps; make a new one from model.parameters()"
            )
        if strangers:
            more = f" and {len(strangers) - 3} more" if len(strangers) > 3 else ""
            raise ValueError(
                f"optimizer has parameters of no module of the model ({'; '.join(strangers[:3])}{more}), so the engine cannot "
                "train them; make their module (a criterion, say) a submodule of the model, or give it an optimizer of its own"
            )
        _TAKEN.add(optimizer)
        return optimizer

    def _offloading(self) -> dict[str, bool]:
        """The runtime's arguments for ``zero_optimization.offload_optimizer``."""
        engine: Any = self
        offload = engine.zero_offload_optimizer()
        return {"offload": engine.zero_cpu_offload(), "pin": offload is not None and offload.pin_memory}

    def _dry_run(self, actions: int, check: Callable[[], Summary]) -> None:
        """Collective: rank 0 dry-runs all ranks' programs, if that takes well under a second.

        Args:
            actions: of the dry-run.
        Raises:
            PlanError: on every rank, if the dry-run of rank 0 fails.
        """
        if self._transport is None:
            return
        problem = None
        if self._transport.world_rank == 0 and actions <= AT_START:
            try:
                logger.debug(str(check()))
            except (PlanError, ScheduleError) as error:
                problem = str(error)
        elif self._transport.world_rank == 0:
            logger.debug(f"dry-run: skipped, since it has about {actions:,} actions; run deepspeed-cdp plan --check")
        where = f"rank {self._transport.world_rank}, waiting for the dry-run of the plan"
        if problem := self._transport.gather(problem, where)[0]:
            raise PlanError(f"the plan fails its dry-run ({problem}); report it with the config and the model's modules")

    def _log_warnings(self) -> None:
        if self._config.cyclic_ignored:
            warn(f"settings that have no effect with the cyclic engine: {', '.join(self._config.cyclic_ignored)}")
        if warning := restart_warning(os.environ):
            warn(warning)

    # ---- failures -------------------------------------------------------------------------------------------------------
    def _progress(self) -> Any:
        """A value that changes with every change of this rank's state."""
        return object()

    def _divergence(self) -> str | None:
        """The difference between ranks that this rank knows of; a peer that is gone may have ended because of it."""
        return None

    @contextmanager
    def _noting_failure(self) -> Iterator[None]:
        """An error inside marks the engine failed, unless it came before any state changed: then training may go on.

        Raises:
            ValueError: the engine is destroyed; or it failed before, and is in the middle of a step or cannot do what is called
                for.
        """
        if self._destroyed:
            raise ValueError(
                "this engine is destroyed, by destroy() or by another deepspeed.initialize() of its model; use the engine that "
                "has the model now, or make one"
            )
        if self._failure_in_hooks:
            self._note_failure(self._failure_in_hooks)
        failed_before = bool(self._first_failure)
        if failed_before and self._in_step:
            raise self._failed_before()
        before = self._progress()
        try:
            yield
        except CheckpointError:  # on all ranks, and nothing was changed
            raise
        except BaseException as error:
            if not isinstance(error, (ValueError, TypeError, AssertionError)) or self._progress() != before:
                self._note_failure(class_and_text(error))
            if isinstance(error, HandoffError) and (reason := self._divergence()):
                raise DivergenceError(reason) from error
            if failed_before and isinstance(error, Exception) and not isinstance(error, HandoffError):
                raise self._failed_before() from error
            raise

    def _note_failure(self, error: str) -> None:
        engine: Any = self
        self._failed = True  # peers must learn of it from a closed connection, not from their timeout
        self._first_failure = self._first_failure or f"in step {engine.global_steps} with {error}"

    def _failed_before(self) -> ValueError:
        return ValueError(
            f"this engine failed {self._first_failure}; it cannot go on after that error, so do not catch it: end all ranks and "
            "restart from the last checkpoint"
        )

    @property
    def _failure_in_hooks(self) -> str:
        """An error that came outside the engine's methods, in hooks of the module: in ``loss.backward()``, say."""
        return ""

    @property
    def _in_step(self) -> bool:
        """Whether this rank is in the middle of a step, which only goes on as the plan has it."""
        return False

    @property
    def _is_well(self) -> bool:
        """Whether this rank may wait for the others."""
        return not self._failed and not self._failure_in_hooks and not isinstance(sys.exc_info()[1], Exception)

    # ---- the end --------------------------------------------------------------------------------------------------------
    def _destroy_at_exit(self) -> None:
        """Register ``destroy`` as an exit callback: when a script ends, neighbours still need its last messages."""
        reference = weakref.ref(self)

        def close() -> None:
            engine = reference()
            if engine is not None:
                engine._failed = engine._failed or getattr(sys, "last_value", None) is not None
                engine._exiting = True
                engine.destroy()

        self._exit_callback = close
        atexit.register(close)

    def _forget_exit(self) -> None:
        if self._exit_callback is not None:
            atexit.unregister(self._exit_callback)
            self._exit_callback = None

    def _close(self, well: bool) -> None:
        """Remove the engine's hooks and attributes from the module, and close the transport; idempotent.

        Args:
            well: wait until neighbours have taken the last messages.
        """
        raise NotImplementedError

    def destroy(self) -> None:
        """As DeepSpeed's; waits until neighbours have taken the last messages, unless this rank has failed.

        Raises:
            CheckpointError: a checkpoint that was written beside training was not saved; the engine is destroyed.
        """
        self._forget_exit()
        try:
            if self._is_well:
                self._finish_saving()
        finally:
            self._close(self._is_well)
            self._destroyed = True
            remove_hooks(self)
            super().destroy()  # type: ignore[misc]  # DeepSpeed's engine, the next base class


def restart_warning(environment: Mapping[str, str]) -> str:
    """A warning if torchrun would restart ranks with a store that keeps the addresses of the ranks before; else empty."""
    restarts = environment.get("TORCHELASTIC_MAX_RESTARTS", "0")
    if restarts == "0" or environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return ""
    return (
        f"--max-restarts is {restarts}, but torchrun's ranks share a store, where restarted ranks read addresses of ranks that "
        "have ended, and fail to connect; start torchrun with --rdzv-backend c10d and TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"
    )


def warn(text: str) -> None:
    """A warning of rank 0."""
    log_dist(text, ranks=[0], level=logging.WARNING)


def check_loss(loss: Any, step: int) -> None:
    """Raises ValueError unless a loss is a tensor of one number that has a backward."""
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        what = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else f"a {type(loss).__name__}"
        raise ValueError(f"the loss of step {step} is {what}; give engine.backward() a tensor of one number, such as loss.mean()")
    if not maybe_loss_for_backward(loss):
        raise ValueError(
            f"the loss of step {step} has no grad_fn, so it has no backward; compute it from the outputs of engine(...), without "
            "detach() or torch.no_grad()"
        )
