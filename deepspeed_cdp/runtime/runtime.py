"""Everything of one rank put together, without DeepSpeed's engine: module, plan, hand-off, owner, hooks.

The engine (engine.py) is a thin shell over this class; tests run it on threads over the ``local`` transport.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from deepspeed_cdp.integration.optimizer import CyclicOptimizer
from deepspeed_cdp.model.make_plan import Settings, make_plan
from deepspeed_cdp.optim.loss_scale import LossScale
from deepspeed_cdp.optim.offload import OffloadedOwner
from deepspeed_cdp.optim.stage_owner import StageOwner
from deepspeed_cdp.plan.cross_ring import across_bytes
from deepspeed_cdp.runtime.executor import Executor
from deepspeed_cdp.runtime.param_hooks import BACKWARD, IDLE, ParamHooks
from deepspeed_cdp.runtime.replicated import ReplicaExecutor, ReplicaHooks
from deepspeed_cdp.transport.base import Transport
from deepspeed_cdp.transport.wait_timing import EdgeTimes

if TYPE_CHECKING:
    from deepspeed_cdp.model.materialize import Initial


class _Seen(NamedTuple):
    """The transport's counters at the end of a step."""

    nbytes: dict[tuple[str, int], int]
    messages: dict[tuple[str, int], int]
    collectives: int
    waited: tuple[dict[tuple[str, int], float], dict[tuple[str, int], float]]  # for messages to come, and to be taken


class Runtime:
    """One rank's cyclic training of a module.

    Attributes:
        plan: the same on all ranks.
        executor, owner, scale, param_hooks, optimizer: the parts.
        fused: linear layers that add their weights' gradients themselves.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        settings: Settings,
        transport: Transport,
        device: torch.device,
        initial: "Initial | None" = None,
    ):
        """
        Args:
            module: with the same full parameters on every rank, or ``initial`` knows where they are; they become placeholders.
            optimizer: over (some of) them; it steps this rank's masters from now on.
            transport: connects the ring.
        Raises:
            ValueError: the settings do not fit the module.
        """
        self.module, self.settings, self.transport, self.device = module, settings, transport, device
        self.borrowed: dict[torch.nn.Parameter, torch.Tensor] = {}  # given out by GatheredParameters -> what they go back to
        if isinstance(optimizer, torch.optim.LBFGS):
            raise ValueError(
                "optimizer is LBFGS, whose step() needs a closure, but the update happens later and cannot call it; "
                "use another optimizer"
            )
        if isinstance(optimizer, torch.optim.SparseAdam):
            raise ValueError("optimizer is SparseAdam, but gradient sums are dense; use Adam or AdamW")
        names = {p: n for n, p in module.named_parameters()}
        trained = frozenset(names[p] for g in optimizer.param_groups for p in g["params"] if p in names and p.requires_grad)
        self.plan, layouts = make_plan(module, trained, settings, transport.size, transport.rings)
        make_executor, make_hooks = (ReplicaExecutor, ReplicaHooks) if settings.replicated else (Executor, ParamHooks)
        self.executor = make_executor(self.plan, transport.rank, transport, device, settings.warmup_steps)
        with torch.no_grad():
            values = initial.values(self.plan, transport.rank) if initial else dict(module.named_parameters())
            self.scale = LossScale(self.plan.schedule, settings.loss_scale)
            given = self.executor, layouts, values, optimizer, names, settings.clip, self.scale
            self.owner = OffloadedOwner(*given, pin=settings.pin) if settings.offload else StageOwner(*given)
        self.executor.owner, self.executor.on_end = self.owner, self.scale.end
        self.param_hooks = make_hooks(module, self.executor, layouts, self.borrowed)
        self.fused = self.param_hooks.sums.fuse(module, settings.gradient_accumulation_fusion, device)
        self.optimizer = CyclicOptimizer(self.owner, self.end_backward, self.step, self.flush)
        self._whole: list[torch.Tensor] | None = None  # every stage's parameters, while gathered
        self.on_whole: Callable[[bool], None] = lambda whole: None  # told when the parameters are gathered or given up
        self._busy_since: tuple[float, float] | None = None  # when the last step ended, and the seconds waited until then
        self._steps_seen: list[_Seen] = []  # counters at the ends of the last two steps
        self.param_hooks.on_idle_use = self._used_outside
        self.param_hooks.release_all()
        self.executor.spread()
        if device.type == "cuda":  # what is published first was written on this stream, and is offered from the owner's
            torch.cuda.synchronize(device)
        self._begin()

    # ---- training -------------------------------------------------------------------------------------------------------
    @contextmanager
    def forward(self) -> Iterator[None]:
        """Around a training forward of the module.

        Raises:
            ValueError: inside GatheredParameters, or the forward before has had no backward.
        """
        self.scatter()
        with self.param_hooks.forward():
            yield

    def end_backward(self) -> None:
        """The micro-batch's backward is complete."""
        if self._whole is None or self.param_hooks.mode == BACKWARD:
            self.param_hooks.end_backward()
        else:
            raise ValueError(
                "a backward came after a forward in eval() mode or under no_grad(), which keeps no gradients; call "
                "engine.train() and engine(...) first"
            )

    def step(self) -> None:
        """The step's micro-batches are done: record hyperparameters, finish the step's hand-offs.

        Raises:
            ValueError: a forward still waits for its backward.
        """
        if self.param_hooks.mode != IDLE:
            raise ValueError(
                f"engine.step() of step {self.executor.global_step} came before the backward of the last forward; "
                "call engine.backward(loss) first"
            )
        if self._whole is not None:  # (no micro-batch since) they are out of date now
            self.scatter()
        step = self.executor.global_step
        self.owner.record(step)
        self.executor.end_step()
        self.optimizer.overflow = self.scale.end_step(step)  # of this step under dp, of the one before under cdp-v1
        self._steps_seen.append(
            _Seen(
                dict(self.transport.bytes_received),
                dict(self.transport.received),
                self.transport.collectives,
                (dict(self.transport.waited), dict(self.transport.waited_sent)),
            )
        )
        del self._steps_seen[:-2]
        self._note_busy(step)
        if self.executor.phases.end_with(step):
            self.flush()

    def check_loss(self, loss: torch.Tensor) -> None:
        """Before its backward. At the very first a unit never called may have had its parameters read from outside it.

        Raises:
            ValueError: no forward waits for its backward, or the loss is not finite and there is such a unit.
        """
        self.param_hooks.check_forward()
        if self.executor.global_step or self.executor.round:
            return
        idle = [path for unit in self.plan.units for path in unit.modules if path not in self.param_hooks.called]
        if idle and not bool(torch.isfinite(loss).all()):
            raise ValueError(
                f"the loss is {loss.item()} and module {idle[0]!r} was not called in the forward, so its parameters "
                f"may be read from outside it, where they are not; list the modules that are called in "
                f"cyclic.units, without {idle[0]!r}"
            )

    # ---- whole parameters -----------------------------------------------------------------------------------------------
    def flush(self) -> None:
        """Collective: finish all steps and apply the last update; the next step reads the newest version everywhere."""
        if self._whole is not None or (self.executor.step == 0 and self.executor.between_steps and self.param_hooks.mode == IDLE):
            return  # nothing has happened since
        if self.param_hooks.mode != IDLE:
            raise ValueError(
                f"engine.flush() (also done by saving, loading and evaluating) of step {self.executor.global_step} "
                "came between a forward and its backward; call engine.backward(loss) first"
            )
        self.executor.flush()
        self.scale.flush()
        self.owner.settle()
        self.restart()

    def restart(self) -> None:
        """Publish the masters as version 0 and let the ring start anew (after a reset of the transport)."""
        self.publish()
        self._begin()

    def _begin(self) -> None:
        self.executor.begin()
        self._busy_since = None  # what a flush takes is not a step's
        if self.transport.timing:
            self.transport.timing.drop()
        self.scale.adopt(self.executor.schedule)

    def publish(self) -> None:
        """Write the masters into the published copies, between steps; whatever is offered from now on has them.

        Collective where every rank keeps all parameters: they get the same values.
        """
        with torch.no_grad():
            self.owner.publish_all()
            self.executor.spread()
        if self.device.type == "cuda":  # offers are made on another stream
            torch.cuda.synchronize(self.device)

    @property
    def is_whole(self) -> bool:
        """Whether every parameter is gathered."""
        return self._whole is not None

    @property
    def between_steps(self) -> bool:
        return self.executor.between_steps and self.param_hooks.mode == IDLE

    def gather(self) -> None:
        """Collective: every parameter of the module is whole on every rank, until the next training forward."""
        if self._whole is not None or len(self.borrowed) == sum(map(len, self.param_hooks.slots.values())):
            return
        self.flush()
        if self.plan.replicated:  # the flush has brought them up to date
            self._whole = []
            self.on_whole(True)
            return
        borrowed = {p: p.data for p in self.borrowed}  # perhaps changed
        where = f"rank {self.transport.label}, step {self.executor.global_step}, gathering parameters"
        self._whole = []
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
            self._whole.append(flat)
            for i, offset in places.items():
                self.param_hooks.bind(i, flat[offset : offset + self.plan.unit(i).p_bytes])
        for p, value in borrowed.items():
            self.borrowed[p], p.data = p.data, value
        self.on_whole(True)

    def _used_outside(self, how: str) -> None:
        """The module is used while nothing is in its parameters.

        Evaluation (``module.generate()``, say) gathers them first, which is a collective, as it is under ZeRO-3.
        Raises:
            ValueError: it is training, whose gradients would be lost; a state dict, which must not hold placeholders; or
                one to load, which would be lost at the next step.
        """
        if (
            how == "was called"
            and not (torch.is_grad_enabled() and self.module.training)
            or (how == "was asked for its state_dict()" and self.plan.replicated)
        ):
            self.gather()
            return
        if how == "was given a state dict":
            raise ValueError(
                "the module itself was given a state dict, which would not reach the masters; load it before "
                "deepspeed.initialize(), or use engine.load_checkpoint()"
            )
        if self._whole is not None:
            if how == "was called":
                raise ValueError(
                    "the module itself was called in train() mode, so its gradients would be lost; call the engine "
                    "instead, or call engine.eval() first"
                )
            return
        fix = (
            "call the engine instead, or the module after eval() or under no_grad(), on every rank"
            if how == "was called"
            else "use engine.module_state_dict() on every rank"
        )
        state = "of several versions" if self.plan.replicated else "on their way round the ring"
        raise ValueError(f"the module itself {how}, while its parameters are {state}; {fix}")

    def scatter(self) -> None:
        """Give the gathered parameters up.

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
            self.on_whole(False)

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

    # ---- figures --------------------------------------------------------------------------------------------------------
    def traffic(self) -> dict[str, dict[str, int]]:
        """Bytes received in the last step, by kind, beside the closed form: F + B, G, O (see ``Plan.received_bytes``), and with
        several rings X, from other rings."""
        if len(self._steps_seen) < 2:
            return {}
        before, after = self._steps_seen
        seen = {edge: n - before.nbytes.get(edge, 0) for edge, n in after.nbytes.items()}
        kinds = {"F + B": ("P", "P0", "H", "H0"), "G": ("G", "GH"), "O": ("O",)}
        form = self.executor.plan.received_bytes(self.executor.rank)
        forms = {"F + B": form["F"] + form["B"], "G": form["G"], "O": form["O"]}
        if self.plan.rings > 1:
            kinds["X"], forms["X"] = ("X", "Y"), across_bytes(self.plan, self.executor.rank, self.transport.ring)
        return {
            k: {"counted": sum(n for (stream, _), n in seen.items() if stream in streams), "closed form": forms[k]}
            for k, streams in kinds.items()
        }

    def waited(self) -> tuple[EdgeTimes | None, EdgeTimes | None]:
        """Seconds that the host was held up by (stream, peer), until messages had come, and until its own had been taken.

        Between the ends of the last two steps (a flush between them counts). On devices: that the passes' stream was held up, in
        the latest step that was timed. None before there is such a step.
        """
        if self.transport.timing:
            timed = self.transport.timing.latest
            return (timed.come, timed.taken) if timed else (None, None)
        if not self._steps_seen:
            return None, None
        before = self._steps_seen[-2].waited if len(self._steps_seen) > 1 else ({}, {})
        come, taken = (
            {edge: t - old.get(edge, 0.0) for edge, t in now.items()} for now, old in zip(self._steps_seen[-1].waited, before)
        )
        return come, taken

    def _note_busy(self, step: int) -> None:
        """At the end of a step: what of the time since the end of the one before was this rank's own, not spent waiting."""
        timing = self.transport.timing
        if timing:
            if timing.end_step(step):
                self.executor.scalars.busy = timing.latest.busy
            return
        now, waited = time.perf_counter(), sum((*self.transport.waited.values(), *self.transport.waited_sent.values()))
        if self._busy_since is not None:
            self.executor.scalars.busy = max(now - self._busy_since[0] - (waited - self._busy_since[1]), 1e-9)
        self._busy_since = now, waited

    def messages(self) -> int:
        """Messages received in the last step, scalars included."""
        if len(self._steps_seen) < 2:
            return 0
        before, after = self._steps_seen
        return sum(after.messages.values()) - sum(before.messages.values())

    @property
    def collectives_in_steps(self) -> int:
        """Collective calls of the transport between the ends of the last two steps (a flush between them counts)."""
        return self._steps_seen[-1].collectives - self._steps_seen[0].collectives if self._steps_seen else 0

    def close(self, drain: bool) -> None:
        """Take hooks off and free everything; idempotent."""
        self.param_hooks.remove()
        if drain:
            self.executor.drain()
        self.transport.close(drain)
