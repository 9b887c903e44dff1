"""The optimizer that ``deepspeed.initialize`` returns."""

from collections.abc import Sequence
from typing import Any

from deepspeed.runtime.base_optimizer import ZeROOptimizer
from deepspeed.runtime.fp16.loss_scaler import LossScalerBase
from deepspeed.runtime.utils import maybe_loss_for_backward

from deepspeed_cdp.runtime.runtime import Runtime


class CyclicOptimizer(ZeROOptimizer):
    """The optimizer that ``deepspeed.initialize`` returns: DeepSpeed's interface to a ``StageOwner``.

    ``param_groups`` are the user's, so schedulers work on it as on any optimizer; each holds the masters that this rank owns.
    """

    custom_loss_scaler = False
    torch_autocast_gradscaler = None
    partition_gradients = True

    def __init__(self, runtime: Runtime):
        super().__init__()
        self._runtime: Runtime | None = runtime
        self.owner, self.scale, self.optimizer = runtime.owner, runtime.scale, runtime.owner.optimizer

    def follow(self, runtime: Runtime) -> None:
        """Use another runtime, whose owner steps the same optimizer."""
        self._runtime, self.owner, self.scale = runtime, runtime.owner, runtime.scale

    @property
    def _live_runtime(self) -> Runtime:
        if self._runtime is None:
            raise RuntimeError("the optimizer belongs to an engine that is destroyed; use it before engine.destroy()")
        return self._runtime

    @property
    def overflow(self) -> bool:
        """Whether the latest step whose norm every rank knows was skipped."""
        return self._runtime is not None and self._runtime.overflow

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, groups: Sequence[dict[str, Any]]) -> None:
        self.optimizer.param_groups = list(groups)

    @property
    def state(self):
        self.owner.sync_optimizer_state()
        return self.optimizer.state

    # ---- loss scaling (fp16) ----------------------------------------------------------------------------------------------
    @property
    def loss_scaler(self) -> LossScalerBase:
        """DeepSpeed's loss scaler."""
        return self.scale.scaler

    @property
    def dynamic_loss_scale(self) -> bool:
        """Whether overflows change the scale."""
        return self.loss_scaler.dynamic

    @property
    def loss_scale(self) -> float:
        """The scale of the next step, 1 where losses are not scaled. Set it on every rank, between steps."""
        return self.loss_scaler.cur_scale

    @loss_scale.setter
    def loss_scale(self, value: float) -> None:
        self.loss_scaler.cur_scale = value

    cur_scale = loss_scale

    def needs_scaler(self) -> bool:
        """Whether a ``loss.backward()`` of a loss that did not pass through ``engine.scale`` is an error."""
        return self.scale.scaling and (self.dynamic_loss_scale or self.loss_scale != 1)

    def scale_if_loss(self, value: Any) -> Any:
        """A loss, times the scale of the step under way."""
        scaled = self.scale.scaling and maybe_loss_for_backward(value)
        return value * self.scale.of(self._live_runtime.executor.global_step) if scaled else value

    # ---- a step -----------------------------------------------------------------------------------------------------------
    def backward_prologue(self) -> None:
        if self._runtime is not None:
            self._runtime.param_hooks.begin_backward()

    def backward_epilogue(self, **_: Any) -> None:
        if self._runtime is not None:
            self._runtime.end_backward()

    def step(self, closure: Any = None) -> None:
        """Record the hyperparameters; the owner updates when the sums have arrived."""
        if closure is not None:
            raise ValueError("optimizer.step() got a closure, but the update happens later and cannot call it; use engine.step()")
        self.optimizer._opt_called = True  # type: ignore[attr-defined]  # torch's schedulers warn unless step() came before
        self._live_runtime.step()

    def finalize_gradient_accumulation_boundary(self) -> None:
        """Nothing to do: with ``managed_gradient_accumulation: false`` DeepSpeed asks before each step."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Nothing: gradients do not stay on a rank."""

    def state_dict(self) -> dict[str, Any]:
        """Collective (it flushes): this rank's part, the torch optimizer's state by the names of the parameters it owns."""
        self._live_runtime.flush()
        names = {p: n for n, p in self.owner.masters.parameters.items()}
        return {
            "state": {names[p]: s for p, s in self.state.items()},
            "param_groups": [
                {**{k: v for k, v in g.items() if k != "params"}, "params": [names[p] for p in g["params"]]}
                for g in self.optimizer.param_groups
            ],
            "loss_scale": self.scale.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any], **_: Any) -> None:
        """Load a state that ``state_dict`` returned on this rank.

        Raises:
            ValueError: it was made with other groups, or another partition.
        """
        self._live_runtime.flush()
        if len(state["param_groups"]) != len(self.optimizer.param_groups):
            raise ValueError(
                f"the optimizer state has {len(state['param_groups'])} parameter groups, this optimizer has "
                f"{len(self.optimizer.param_groups)}; build the optimizer as it was when the state was saved"
            )
        unknown = set(state["state"]) - set(self.owner.masters)
        if unknown:
            raise ValueError(
                f"the optimizer state holds {min(unknown)!r}, which rank {self._live_runtime.executor.rank} does not own; "
                "load it with the number of ranks and the partition it was saved with"
            )
        for group, saved in zip(self.optimizer.param_groups, state["param_groups"]):
            group.update({k: v for k, v in saved.items() if k != "params"})
        for name, values in state["state"].items():
            self.owner.put_state(name, values)
        self.scale.restart(self._live_runtime.executor.global_step, state.get("loss_scale"))

    def destroy(self) -> None:
        """Drop references that would keep buffers alive."""
        self._runtime = None
