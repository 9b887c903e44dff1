"""One rank's cyclic training of a module, without DeepSpeed: module, plan, executor, owner and hooks put together.

The engine (integration/engine.py) is a thin shell over ``Runtime``; tests run it on threads over the ``local`` transport.
"""

import hashlib
import json
import logging
import os
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import ModuleType
from typing import Any, NamedTuple

import torch

from deepspeed_cdp.errors import SET_ANY_ORDER, DivergenceError
from deepspeed_cdp.model.discover import Example, FoundUnits, Trace, join, misfit, observe, trace
from deepspeed_cdp.model.make_plan import Settings, find, make_plan
from deepspeed_cdp.model.materialize import Initial
from deepspeed_cdp.native import load
from deepspeed_cdp.optim.loss_scale import LossScale
from deepspeed_cdp.optim.masters import Masters
from deepspeed_cdp.optim.offload import OffloadedOwner
from deepspeed_cdp.optim.stage_owner import StageOwner
from deepspeed_cdp.optim.state import take_over
from deepspeed_cdp.plan.constants import PERSISTENT
from deepspeed_cdp.plan.plan import Plan
from deepspeed_cdp.plan.replicated import ReplicatedPlan
from deepspeed_cdp.runtime.divergence import Divergence
from deepspeed_cdp.runtime.executor import Executor
from deepspeed_cdp.runtime.owned_stage import OwnedStage
from deepspeed_cdp.runtime.param_hooks import BACKWARD, IDLE, ParamHooks
from deepspeed_cdp.runtime.replica_hooks import ReplicaHooks
from deepspeed_cdp.runtime.residency import Partitioned, Replicated
from deepspeed_cdp.runtime.state import RankState
from deepspeed_cdp.runtime.step_counters import StepCounters
from deepspeed_cdp.transport.base import Transport
from deepspeed_cdp.transport.buffers import Buffers

logger = logging.getLogger("deepspeed_cdp")


class Residency(NamedTuple):
    """Classes that bring parameters to passes: one for the program's actions, one for the module's hooks."""

    params: type[Partitioned]
    hooks: type[ParamHooks]


RESIDENCIES: dict[type[Plan], Residency] = {
    Plan: Residency(Partitioned, ParamHooks),
    ReplicatedPlan: Residency(Replicated, ReplicaHooks),
}


class Runtime:
    """Puts the parts of a rank together and forwards their ``Events``.

    Attributes:
        plan: the same on all ranks.
        executor, owner, scale, param_hooks, counters: the parts.
        fused: number of linear layers that add their weights' gradients in the GEMM.
        overflow: the latest step whose norm every rank knows was skipped, since the norm was not finite.
        why_not_native: why Python does autograd's side of passes; empty if C++ does, or if Python is meant to.
    """

    why_not_native = ""

    def __init__(
        self,
        module: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        settings: Settings,
        transport: Transport,
        device: torch.device,
        initial: Initial | None = None,
        on_gathered: Callable[[bool], None] = lambda whole: None,
        on_persistent: Callable[[], None] = lambda: None,
        found: FoundUnits | None = None,
    ):
        """
        Args:
            module: has the same full parameters on every rank, or ``initial`` finds them; they become placeholders.
            optimizer: over (some of) them; it steps this rank's masters from now on.
            transport: connects the ring.
            on_gathered: called when all parameters have been gathered (True) or released (False).
            on_persistent: called when persistent parameters are there for a micro-batch, and when they are gone.
            found: the module's units, if they are known.
        Raises:
            ValueError: the settings do not fit the module.
        """
        self.module, self.settings, self.transport, self.device = module, settings, transport, device
        self.borrowed: dict[torch.nn.Parameter, torch.Tensor] = {}  # given out by GatheredParameters -> their data before
        self.overflow, self._on_gathered, self._told_of_holding = False, on_gathered, False
        self.begun_outside = False  # a micro-batch has begun without the engine's forward: too late to make the plan anew
        self._on_persistent = on_persistent
        _check_optimizer(optimizer)
        names = {p: n for n, p in module.named_parameters()}
        trained = frozenset(names[p] for g in optimizer.param_groups for p in g["params"] if p in names and p.requires_grad)
        found = found or find(module, transport.size, settings)
        self.plan, layouts = make_plan(module, trained, settings, transport.size, transport.rings, found)
        residency = RESIDENCIES[type(self.plan)]
        layouts_of_ranks = [self.plan.regions(r) for r in range(transport.size)]
        state = RankState(self.plan, transport.rank, transport, Buffers(layouts_of_ranks, transport.rank, transport))
        self.scale = LossScale(self.plan.schedule, settings.loss_scale)
        with torch.no_grad():
            stage = OwnedStage(state, layouts)
            make_owner: Callable[..., StageOwner] = partial(OffloadedOwner, pin=settings.pin) if settings.offload else StageOwner
            self.owner = make_owner(
                values=initial.values(self.plan, state.rank) if initial else dict(module.named_parameters()),
                sums=stage.sums,
                published=stage.published,
                optimizer=optimizer,
                make_optimizer=lambda whole, masters: take_over(whole, masters, names),
                divisor=lambda step: self.plan.rings * self.plan.schedule.ranks / settings.summed_ranks * self.scale.of(step),
                clip=settings.clip,
                device=state.buffers.arena.device,
                corrected=stage.corrected,
                correction=settings.delay_correction,
                early=stage.early,
                early_divisor=lambda step: self.plan.early_share(state.owned_stage) / settings.summed_ranks * self.scale.of(step),
                uncounted=settings.uncounted,
                in_halves=Masters.suit_halves(device) and not settings.offload and not settings.replicated,
            )
        compares = settings.check_divergence and transport.size * transport.rings > 1
        self.divergence = Divergence(state, self.owner, settings.check_divergence) if compares else None
        self.executor = Executor(
            state, residency.params, self.owner, stage.cross_ring_views, self, device, settings.warmup_steps, self.divergence
        )
        self.counters = StepCounters(state, self.executor.metrics)
        native = self._native_autograd()
        self.param_hooks = residency.hooks(module, self.executor, layouts, self, self.borrowed, native)
        if found.any_order:
            self.param_hooks.keep_all()
            if settings.any_order == "auto":
                self._tell_of_any_order("too few modules run once and in one order")
        self.fused = self.param_hooks.accumulation.fuse(module, settings.gradient_accumulation_fusion, device)
        self._whole: list[torch.Tensor] | None = None  # every stage's parameters, while gathered
        self._losses: deque[tuple[int, torch.Tensor]] = deque()  # the latest steps, and whether their losses are nan
        # autograd knows nothing of a frozen parameter that is read where it is not; with fp16 a nan is no news
        frozen = any(self.plan.unit(i).frozen for i in self.plan.every_unit)
        self._watches_for_nan = frozen and not self.settings.loss_scale and not self.plan.replicated
        self.param_hooks.release_all()
        self.executor.residency.sync_replicas()
        if device.type == "cuda":  # the first versions were written on this stream, and the owner's stream publishes them
            torch.cuda.synchronize(device)
        self._begin()

    def _native_autograd(self) -> ModuleType | None:
        """What C++ does of autograd's side of passes: on GPUs, where the host's time counts, or if asked for."""
        if self.device.type != "cuda" and os.environ.get(load.OFF) != "1":
            return None
        try:
            return load.load(load.AUTOGRAD)
        except RuntimeError as error:
            self.why_not_native = str(error)
            return None

    # ---- events ---------------------------------------------------------------------------------------------------------
    def params_released(self, unit: int) -> None:
        """See ``Events``."""
        self.param_hooks.unbind(unit)
        if unit == PERSISTENT:
            self._on_persistent()

    def grads_complete(self, unit: int, grad_sum: torch.Tensor, empty: bool) -> None:
        """See ``Events``."""
        self.param_hooks.add_grads(unit, grad_sum, empty)

    def norm_known(self, step: int, overflow: bool) -> None:
        """See ``Events``."""
        self.scale.end(step, overflow)

    def step_updated(self, step: int) -> None:
        """See ``Events``."""
        self.scale.finish(step)

    # ---- training -------------------------------------------------------------------------------------------------------
    @contextmanager
    def forward(self) -> Iterator[None]:
        """Around a training forward of the module.

        Raises:
            ValueError: inside GatheredParameters, or the forward before has had no backward.
        """
        self.scatter()
        with self.param_hooks.forward():
            if self.param_hooks.any_order:
                self._on_gathered(True)
            elif self.plan.persistent:
                self._on_persistent()
            yield

    def end_backward(self) -> None:
        """The micro-batch's backward is complete."""
        if self._whole is None or self.param_hooks.mode == BACKWARD:
            held = self.param_hooks.holds
            self.param_hooks.end_backward()
            if held:
                self._on_gathered(False)
        else:
            raise ValueError(
                "a backward came after a forward in eval() mode or under no_grad(), which keeps no gradients; call "
                "engine.train() and engine(...) first"
            )

    def step(self) -> None:
        """The step's micro-batches are done: record hyperparameters, finish the step's messages.

        Raises:
            ValueError: a forward still waits for its backward.
            DivergenceError: ranks that must be equal are not; on all ranks, at the end of the same step.
        """
        self.check_step()
        self.param_hooks.check_late_gradients()
        if self._whole is not None:  # (no micro-batch since) they are out of date now
            self.scatter()
        step = self.executor.global_step
        self.owner.record(step)
        self.executor.end_step()
        if self.param_hooks.any_order:
            self.param_hooks.release_all()
            self._on_gathered(False)
        self.overflow = self.scale.end_step(step)  # of this step under dp, of the one before under cdp-v1
        self.counters.end_step(step)
        self.check_divergence()
        if self.executor.phases.end_with(step):
            self.flush()

    def check_divergence(self) -> None:
        """Raises DivergenceError if all ranks know by now that some differ, once neighbours have this step's last messages."""
        if problem := self.divergence_known():
            self.close(True)
            raise DivergenceError(problem)

    def divergence_known(self, at_once: bool = False) -> str | None:
        """A sentence about ranks that differ; arguments as of ``Divergence.problem``."""
        self.executor.metrics.compare()
        problem = self.divergence and self.divergence.problem(at_once)
        return f"rank {self.transport.world_rank}, step {self.executor.global_step - 1}: {problem}" if problem else None

    def check_step(self) -> None:
        """Raises ValueError if a forward still waits for its backward."""
        if self.param_hooks.mode != IDLE:
            raise ValueError(
                f"engine.step() of step {self.executor.global_step} came before the backward of the last forward; "
                "call engine.backward(loss) first, or restart from the last checkpoint if it raised an error"
            )

    def check_loss(self, loss: torch.Tensor) -> None:
        """Check a loss before its backward. Parameters read outside the forward are nan.

        Raises:
            ValueError: no forward waits for its backward; the loss is nan and depends on a parameter that is not there; or the
                first loss is not finite and is not scaled for fp16.
        """
        self.param_hooks.check_forward()
        if (name := self.param_hooks.absent_parameter(loss)) and bool(loss.isnan().any()):
            raise ValueError(
                f"the loss of step {self.executor.global_step} is nan, and reads parameter {name!r} after its module's forward, "
                f"where it is not there; read it inside that forward, or {SET_ANY_ORDER}"
            )
        first = not (self.executor.global_step or self.executor.state.round or self.settings.loss_scale)
        if first and not bool(torch.isfinite(loss).all()):
            raise ValueError(
                f"the first loss is {loss.item()}; if it reads parameters after the model's forward (a weight penalty, say), "
                "they are not there: read them inside the forward; else look for nan in the data and the model"
            )
        self._watch_for_nan(loss)

    def _watch_for_nan(self, loss: torch.Tensor) -> None:
        """Warn once if a loss was nan, since a frozen parameter may have been read where it is not.

        It looks at the loss of two micro-batches ago, for which the host hardly waits.
        """
        if not self._watches_for_nan or self.param_hooks.any_order:
            return
        self._losses.append((self.executor.global_step, loss.detach().isnan().any()))
        if len(self._losses) > 2:
            step, was_nan = self._losses.popleft()
            if bool(was_nan):
                self._watches_for_nan = False
                logger.warning(
                    "rank %d: the loss of step %d was nan; if the script reads a frozen parameter after its module's forward, it "
                    "is not there: read it inside that forward, or %s; else look for nan in the data and the model",
                    self.transport.world_rank,
                    step,
                    SET_ANY_ORDER,
                )

    # ---- whole parameters -----------------------------------------------------------------------------------------------
    def flush(self) -> None:
        """Collective: finish all steps and apply the last update; the next step reads the newest version everywhere."""
        if self._whole is not None or (
            self.executor.state.step == 0 and self.executor.between_steps and self.param_hooks.mode == IDLE
        ):
            return  # nothing has happened since
        if self.param_hooks.mode != IDLE:
            raise ValueError(
                f"engine.flush() (also done by saving, loading and evaluating) of step {self.executor.global_step} "
                "came between a forward and its backward; call engine.backward(loss) first"
            )
        self.executor.flush()
        self.scale.flush()
        self.owner.sync_optimizer_state()
        self.restart()

    def restart(self) -> None:
        """Publish the masters as version 0 and let the ring start anew (after a reset of the transport)."""
        self.publish()
        self._begin()

    def _begin(self) -> None:
        self.executor.begin()
        self.counters.begin()
        self.scale.follow(self.executor.schedule)

    def publish(self) -> None:
        """Write the masters into the published copies, between steps.

        Collective where every rank keeps all parameters: it updates their replicas.
        """
        with torch.no_grad():
            self.owner.publish_all()
            self.executor.residency.sync_replicas()
        if self.device.type == "cuda":  # the owner's stream publishes them
            torch.cuda.synchronize(self.device)

    @property
    def is_whole(self) -> bool:
        """Whether every parameter is gathered."""
        return self._whole is not None

    @property
    def progress(self) -> tuple:
        """Differs after any change of this rank's state. Equal before and after an error: the error changed nothing."""
        return *self.executor.progress, self.param_hooks.mode, self.is_whole

    @property
    def between_steps(self) -> bool:
        return self.executor.between_steps and self.param_hooks.mode == IDLE

    def gather(self) -> None:
        """Collective: every parameter of the module is whole on every rank, until the next training forward."""
        hooks = self.param_hooks
        if self._whole is not None or len(self.borrowed) == sum(map(len, hooks.slots.values())):
            return
        self.flush()
        if self.executor.residency.whole_after_flush:
            self._whole = []
            self._on_gathered(True)
            return
        borrowed = {p: p.data for p in self.borrowed}  # perhaps changed
        self._whole = []
        for i, flat in self._version_0():
            hooks.bind(i, flat)
            self._whole.append(flat)
        for p, value in borrowed.items():
            self.borrowed[p], p.data = p.data, value
        self._on_gathered(True)

    def gather_for_forward(self) -> None:
        """As ``gather``, for a forward without gradients, which may come in the middle of a step with ``any_order``."""
        if self.param_hooks.mode == BACKWARD and not self.param_hooks.any_order:
            self.order_needed("a forward without gradients came between a forward and its backward")
        if not self.param_hooks.all_there:
            self.gather()

    def _version_0(self) -> Iterator[tuple[int, torch.Tensor]]:
        """Collective, until a step after a flush has ended: each unit's parameters of version 0 (uint8, 1-D)."""
        where = f"rank {self.transport.world_rank}, step {self.executor.global_step}, gathering parameters"
        for stage in range(self.plan.schedule.ranks):
            places, nbytes = self.plan.v_layout(stage)
            owner = self.plan.schedule.owner(stage)
            mine = owner == self.executor.rank
            flat = (
                self.executor.buffers.regions["V0"][:nbytes].clone()
                if mine
                else torch.empty(nbytes, dtype=torch.uint8, device=self.device)
            )
            self.transport.broadcast(flat, owner, where)
            for i, offset in places.items():
                yield i, flat[offset : offset + self.plan.unit(i).p_bytes]

    def order_needed(self, why: str, alone: bool = False) -> None:
        """See ``Events``. If the first micro-batch since a flush needs it, not ``alone``, later ones have any order, too.

        Collective then where both sides start a message.
        """
        state, auto = self.executor.state, self.settings.any_order == "auto"
        first = not (state.step or state.round or alone)
        if self._may_hold and not self.executor.in_backward:
            if first:
                self._tell_of_any_order(why)
            elif not self._told_of_holding:
                logger.warning(
                    "rank %d, step %d: %s, which the plan does not have: to the end of this micro-batch all parameters are here, "
                    "and so they will be in later ones like it; if most are, %s",
                    self.transport.world_rank,
                    self.executor.global_step,
                    why,
                    SET_ANY_ORDER,
                )
                self._told_of_holding = True
            self.param_hooks.hold(first)
        elif auto and first:
            self._tell_of_any_order(why)
            whole = self.executor.residency.whole_after_flush
            self.param_hooks.keep_all(None if whole else dict(self._version_0()))
        else:
            late = ", which the first micro-batch did not do" if auto else ""
            raise ValueError(f"{why} in step {self.executor.global_step}{late}; {SET_ANY_ORDER}")
        self._on_gathered(True)

    @property
    def _may_hold(self) -> bool:
        """Whether a micro-batch may leave the plan by itself."""
        return self.settings.any_order == "auto" and not self.transport.rendezvous

    def _tell_of_any_order(self, why: str) -> None:
        if self.transport.world_rank == 0:
            logger.warning("%s, so from now on parameters stay for the whole step (cyclic.any_order)", why)

    def used_outside(self, how: str) -> None:
        """The module was used while its parameters are placeholders.

        An evaluation (``module.generate()``, for example) gathers them, which is a collective, as under ZeRO-3.

        Raises:
            ValueError: it is training, whose gradients would be lost; a state dict, which must not hold placeholders; or
                one to load, which would be lost at the next step.
        """
        if (
            how == "was called"
            and not (torch.is_grad_enabled() and self.module.training)
            or (how == "was asked for its state_dict()" and self.executor.residency.whole_after_flush)
        ):
            self.gather_for_forward() if how == "was called" else self.gather()
            return
        if how == "was given a state dict":
            raise ValueError(
                "the module itself was given a state dict, which would not reach the masters; load it before "
                "deepspeed.initialize(), or use engine.load_checkpoint()"
            )
        if how == "was called" and self.param_hooks.any_order:
            self.scatter()
            self.param_hooks.begin_outside()
            self._on_gathered(True)
            return
        if how == "was called" and self._may_hold and self._whole is None:
            self.begun_outside = True
            self.param_hooks.begin_outside()
            self.order_needed("a part of the model was called, and not the engine", alone=True)
            return
        if self._whole is not None:
            if how == "was called":
                raise ValueError(
                    "the module itself was called in train() mode, so its gradients would be lost; call the engine "
                    f"instead, or call engine.eval() first, or {SET_ANY_ORDER}"
                )
            return
        fix = (
            f"call the engine instead, or the module after eval() or under no_grad(), on every rank, or {SET_ANY_ORDER}"
            if how == "was called"
            else "use engine.module_state_dict() on every rank"
        )
        state = self.executor.residency.idle_state
        raise ValueError(f"the module itself {how}, while its parameters are {state}; {fix}")

    def scatter(self) -> None:
        """Release the gathered parameters.

        Raises:
            ValueError: inside GatheredParameters.
        """
        if self.borrowed:
            raise ValueError(
                f"a training forward (or loading) of step {self.executor.global_step} came inside "
                "GatheredParameters; leave the context first"
            )
        if self._whole is not None:
            self.param_hooks.release_all()
            self.param_hooks.forget_views()
            self._whole = None
            self._on_gathered(False)

    def whole_state(self) -> dict[str, Any]:
        """Collective: the module's state dict, every tensor with memory of its own."""
        self.gather()
        state = self.module.state_dict()
        memo: dict[tuple, torch.Tensor] = {}  # tied entries stay tied
        for key, value in state.items():
            if isinstance(value, torch.Tensor):
                same = (value.data_ptr(), value.shape, value.stride())
                state[key] = memo.setdefault(same, value.detach().clone()) if value.numel() else value.detach().clone()
        return state

    # ---- the plan ---------------------------------------------------------------------------------------------------------
    def rehearse(self, example: Example) -> tuple[str, FoundUnits] | None:
        """Collective, before a training forward: see what it does on every rank, and compare that with the plan.

        The forward is followed without values. If that does not work on some rank, parameters are gathered, and it really runs
        there once more than in training.

        Args:
            example: the forward's arguments.
        Returns:
            Why the plan does not serve this batch, and units that do; None if it does.
        Raises:
            ValueError: the model has too few units that a plan can serve.
        """
        if self.param_hooks.any_order:
            return None
        where = f"rank {self.transport.world_rank}, step {self.executor.global_step}, comparing what ranks do in a forward"
        with self.param_hooks.rehearsal():
            seen = trace(self.module, example)
        if None in (digests := self.transport.gather(_digest(seen), where)):
            self.gather()
            if seen is None:
                with self.param_hooks.rehearsal():
                    seen = observe(self.module, example)
            digests = self.transport.gather(_digest(seen), where)
        assert seen is not None
        everyone = [seen.packed()] if len(set(digests)) == 1 else self.transport.gather(seen.packed(), where)
        traces = [Trace.unpacked(x) for x in everyone]
        if not (why := next(filter(None, (misfit(self.plan.units, t) for t in traces)), "")):
            return None
        seen = join(self.module, traces)
        return why, find(self.module, self.plan.schedule.ranks, self.settings, seen)

    def retire(self) -> None:
        """Collective, between steps: leave every parameter whole with the module, so that another runtime can take over.

        The optimizer's groups hold this rank's masters afterwards.
        """
        self.gather()
        self.param_hooks.remove(refuse=False)
        self.transport.reset(f"rank {self.transport.world_rank}, step {self.executor.global_step}, changing the plan")

    def close(self, drain: bool, refuse: bool = True) -> None:
        """Remove the hooks and close the transport; idempotent.

        Args:
            refuse: parameters that are placeholders, or of several versions, cannot be used from now on.
        """
        self.param_hooks.remove(refuse)
        if drain:
            self.executor.messages.drain()
        self.transport.end_relays()
        self.transport.close(drain)


def _digest(seen: Trace | None) -> str | None:
    return None if seen is None else hashlib.sha256(json.dumps(seen.packed()).encode()).hexdigest()


def _check_optimizer(optimizer: torch.optim.Optimizer) -> None:
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError(
            "optimizer is LBFGS, whose step() needs a closure, but the update happens later and cannot call it; "
            "use another optimizer"
        )
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise ValueError("optimizer is SparseAdam, but gradient sums are dense; use Adam or AdamW")
