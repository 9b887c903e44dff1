"""The owner's side: masters, updates, published copies; and the optimizer that users hold.

``engine.step()`` records the hyperparameters of the step; the owner applies the step's update later, when its sums have come in
round the ring, with the recorded ones (design §9).
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from deepspeed.runtime.base_optimizer import ZeROOptimizer
from deepspeed.runtime.fp16.loss_scaler import LossScalerBase
from deepspeed.runtime.utils import maybe_loss_for_backward

from . import fused
from .checkpoint_parts import fit_counts, moved
from .handoff import Handoff
from .loss_scale import LossScale
from .units import Layout, Slot


class StageOwner:
    """Masters of one stage: fp32, whole tensors, stepped by the user's own optimizer.

    Attributes:
        masters: trained parameters of the owned stage by name; fp32 ``nn.Parameter`` of the parameter's shape.
        frozen: the others, in their own dtype.
        home: device of both; None where the parameters are (see offload.py).
    """

    home: torch.device | None = None

    def __init__(self, handoff: Handoff, layouts: dict[int, Layout], values: dict[str, torch.Tensor],
                 optimizer: torch.optim.Optimizer, names: dict[torch.nn.Parameter, str], clip: float,
                 scale: LossScale | None = None):
        """
        Args:
            layouts: by unit index, HELD included.
            values: initial values of (at least) the owned stage's parameters, by name; each is asked for once.
            optimizer: its groups' parameters are replaced by the owned stage's masters, in place.
            names: of the module's parameters that the groups hold now.
            clip: ``gradient_clipping``; 0 for none.
            scale: by which the losses of a step are multiplied, and its sums divided; None for 1.
        """
        self.handoff, self.clip, self.optimizer = handoff, clip, optimizer
        self.scale = scale or LossScale(handoff.schedule)
        stage = handoff.plan.schedule.owned(handoff.rank)
        places, _ = handoff.plan.v_layout(stage)
        self.slots: dict[str, tuple[int, Slot]] = {s.name: (i, s) for i in places for s in layouts[i].slots}
        self._device = handoff.buffers.arena.device
        self.home = self.home or self._device
        self.masters: dict[str, torch.nn.Parameter] = {}
        self.frozen: dict[str, torch.Tensor] = {}
        for name, (_, slot) in self.slots.items():
            value = values[name].detach()
            if slot.sum_offset >= 0:
                self.masters[name] = torch.nn.Parameter(
                    value.to(self.home, torch.float32, copy=True, memory_format=torch.contiguous_format))
            else:
                self.frozen[name] = value.to(self.home, copy=True)
        self._published = [{n: self._view("V", i, s, c) for n, (i, s) in self.slots.items()} for c in range(handoff.plan.copies)]
        self._sums: dict[int, dict[str, torch.Tensor]] = {i: {} for i in places}
        self._ring_sums: dict[int, list[torch.Tensor]] = {}
        for n, (i, s) in self.slots.items():
            if s.sum_offset >= 0:
                self._sums[i][n] = self._view(handoff.plan.o_region if handoff.across is None else "X", i, s)
        # torch's own optimizers keep their state by parameter, so units can be updated one by one; and if nothing is clipped by
        # a norm of the whole step, as soon as each one's sum is finished.
        self._grads: dict[int, list[torch.Tensor]] = {}  # averaged, of units not updated yet (empty lists if fused)
        self._take_over(names)
        dtypes = {d for _, s in self.slots.values() if s.sum_offset >= 0 for d in (s.dtype, s.sum_dtype)}
        self._fused = (fused.Adam(optimizer, self.masters, self._sums, self._published)
                       if fused.Adam.suits(optimizer, self.home, dtypes) else None)
        self.by_unit = self._fused is not None or type(optimizer).__module__.startswith("torch.optim")
        self._recorded: dict[int, list[dict[str, Any]]] = {}
        self._kept_by_optimizer: set[str] = set()  # group options that step() itself writes (FusedAdam keeps its count there)
        self.publish_all()

    @property
    def at_once(self) -> bool:
        """Whether each unit is updated as soon as its own sum is finished, as far as the schedule goes that is followed now."""
        return self.by_unit and not self.clip and not self.handoff.schedule.exact_norm

    def _view(self, region: str, i: int, slot: Slot, copy: int | None = None) -> torch.Tensor:
        plan, stage = self.handoff.plan, self.handoff.plan.schedule.owned(self.handoff.rank)
        view = self.handoff.buffers.view
        if region == "V":
            return slot.value(view(plan.copy_region(copy or 0), plan.copy_layout(stage)[0][i], plan.unit(i).p_bytes))
        places = plan.o_layout(stage) if region == plan.o_region else plan.x_layout(stage)[0]
        return slot.sum(view(region, places[i], plan.unit(i).g_bytes))

    def _take_over(self, names: dict[torch.nn.Parameter, str]) -> None:
        """The optimizer steps this rank's masters from now on; what it knew of them goes along, the rest is forgotten."""
        state = {names[p]: s for p, s in self.optimizer.state.items() if p in names}
        self.optimizer.state.clear()
        for group in self.optimizer.param_groups:
            owned = [names[p] for p in group["params"] if names.get(p) in self.masters]
            group["params"] = [self.masters[n] for n in owned]
            for n in owned:
                if n in state:  # (Adagrad makes its state at once) in the masters' dtype now
                    master = self.masters[n]
                    self.optimizer.state[master] = {
                        k: v.to(master).contiguous() if isinstance(v, torch.Tensor) and v.is_floating_point()
                        and v.shape == master.shape else v for k, v in state[n].items()}

    def put_state(self, name: str, state: dict[str, Any]) -> None:
        """Give the optimizer a saved state of a parameter, perhaps saved by an optimizer of another device or make."""
        master, state = self.masters[name], dict(state)
        on_device = any(p is master for g in self.optimizer.param_groups if g.get("fused") or g.get("capturable")
                        for p in g["params"])
        fit_counts(self.optimizer, state)
        self.optimizer.state[master] = {k: moved(v, master.device, on_device) for k, v in state.items()}

    # ---- publishing -----------------------------------------------------------------------------------------------------
    @torch.no_grad()
    def publish(self, slot: int, unit: int | None = None) -> None:
        """Write the masters (of one unit, or all) in the parameters' dtype into published copy ``slot``."""
        names = list(self.masters if unit is None else self._sums[unit])
        if names:
            torch._foreach_copy_([self._published[slot][n] for n in names], [self.masters[n] for n in names])

    def publish_all(self) -> None:
        """Write everything, frozen parameters too, into every copy."""
        for copy, views in enumerate(self._published):
            self.publish(copy)
            for name, value in self.frozen.items():
                views[name].copy_(value)

    # ---- updates --------------------------------------------------------------------------------------------------------
    def record(self, step: int) -> None:
        """Keep the groups' options for the update of ``step``."""
        self._recorded[step] = [{k: v.clone() if isinstance(v, torch.Tensor) else v  # schedulers write into a tensor lr
                                 for k, v in g.items() if k != "params"} for g in self.optimizer.param_groups]

    def _divisor(self, step: int) -> float:
        """What turns the step's sums of scaled gradients into averages."""
        return self.handoff.plan.rings * self.handoff.schedule.ranks * self.scale.of(step)

    def ring_sums(self, unit: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """A unit's sums over all rings, in region X, and of the own ring (see rings.py)."""
        own = self._ring_sums.get(unit)
        if own is None:
            region = self.handoff.plan.o_region
            own = self._ring_sums[unit] = [self._view(region, unit, self.slots[n][1]) for n in self._sums[unit]]
        return list(self._sums[unit].values()), own

    @torch.no_grad()
    def advance(self, step: int, unit: int, slot: int | None) -> torch.Tensor:
        """Average, update and publish (if ``slot`` is given) a unit whose sums are finished; squares, as ``average`` has them."""
        if self._fused:
            return self._fused.update(unit, self._recorded[step], 1 / self._divisor(step), None, slot)
        squares = self.average(step, unit)
        self.update(step, None, unit, slot)
        return squares

    @torch.no_grad()
    def average(self, step: int, unit: int) -> torch.Tensor:
        """Turn a unit's finished sums into averaged gradients (fp32, sum / N / the step's loss scale).

        Returns:
            parts of their squared norm (1-D, float32 or float64, on the device); to be read before the unit's next average.
        """
        views = list(self._sums[unit].values())
        if not views:
            return torch.zeros(1, dtype=torch.float64, device=self._device)
        if self._fused:
            self._grads[unit] = []
            return self._fused.square(unit, 1 / self._divisor(step))
        grads = [v if v.dtype == torch.float32 else torch.empty_like(v, dtype=torch.float32) for v in views]
        pairs = [(g, v) for g, v in zip(grads, views) if g is not v]
        if pairs:
            torch._foreach_copy_(*map(list, zip(*pairs)))
        torch._foreach_div_(grads, self._divisor(step))
        self._grads[unit] = grads
        if self._device.type == "cpu":  # in double precision, as the oracle has it
            norms = [torch.linalg.vector_norm(g, dtype=torch.float64) for g in grads]
        else:
            norms = torch._foreach_norm(grads)
        return torch.stack(norms).double().square()

    @torch.no_grad()
    def update(self, step: int, norm2: torch.Tensor | None = None, unit: int | None = None, slot: int | None = None) -> None:
        """theta_{step+1} = opt(theta_step, averaged gradients), of one unit or all that are left.

        Args:
            norm2: squared norm to clip by (float64, one element); None not to clip.
            slot: the published copy to write, or None.
        """
        factor = None
        if norm2 is not None and self.clip > 0:
            # as ZeRO-3 does: divided by (norm + 1e-6) / clip where that is above one
            factor = (1.0 / torch.clamp((norm2.sqrt() + 1e-6) / self.clip, min=1.0)).to(torch.float32).squeeze()
        units = [i for i in ([unit] if unit is not None else list(self._grads)) if i in self._grads]
        if self._fused:
            for i in units:
                del self._grads[i]
                self._fused.update(i, self._recorded[step], 1 / self._divisor(step), factor, slot)
            if units:
                return
        grads = {n: g for i in units for n, g in zip(self._sums[i], self._grads.pop(i))}
        if grads:
            if factor is not None:
                torch._foreach_mul_(list(grads.values()), factor)
            for name, grad in grads.items():
                self.masters[name].grad = grad
            with torch.enable_grad():
                self._step(self._recorded[step])
            for name in grads:
                self.masters[name].grad = None
        if slot is not None:
            self.publish(slot, unit)

    def discard(self) -> None:
        """Forget the averaged gradients: the step is skipped."""
        self._grads.clear()

    def finish(self, step: int) -> None:
        """All of the step's updates are done."""
        del self._recorded[step]
        self.scale.finish(step)

    def settle(self) -> None:
        """Bring the optimizer's state up to date for those who look at it."""
        if self._fused:
            self._fused.settle()

    def _step(self, recorded: list[dict[str, Any]]) -> None:
        groups = self.optimizer.param_groups
        current = [{k: v for k, v in g.items() if k != "params"} for g in groups]
        for group, options in zip(groups, recorded):
            group.update({k: v for k, v in options.items() if k not in self._kept_by_optimizer})
        before = [dict(g) for g in groups]
        self.optimizer.step()
        for group, old, now in zip(groups, before, current):
            self._kept_by_optimizer |= {k for k, v in group.items() if k != "params" and (k not in old or old[k] is not v)}
            group.update({k: v for k, v in now.items() if k not in self._kept_by_optimizer})


class CyclicOptimizer(ZeROOptimizer):
    """What ``deepspeed.initialize`` returns as the optimizer: DeepSpeed's surface over a ``StageOwner``.

    ``param_groups`` are the user's, so schedulers work on it as on any optimizer; each holds the masters that this rank owns.
    """

    custom_loss_scaler = False
    torch_autocast_gradscaler = None
    overflow = False
    partition_gradients = True

    def __init__(self, owner: StageOwner, on_backward_end: Callable[[], None], on_step: Callable[[], None],
                 flush: Callable[[], None]):
        """
        Args:
            on_backward_end: called when a micro-batch's backward is complete.
            on_step: called when the step's micro-batches are complete.
            flush: brings masters up to date; called before state is read or written.
        """
        super().__init__()
        self.owner, self.optimizer = owner, owner.optimizer
        self._on_backward_end, self._on_step, self._flush = on_backward_end, on_step, flush

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, groups: Sequence[dict[str, Any]]) -> None:
        self.optimizer.param_groups = list(groups)

    @property
    def state(self):
        self.owner.settle()
        return self.optimizer.state

    # ---- loss scaling (fp16) ----------------------------------------------------------------------------------------------
    @property
    def loss_scaler(self) -> LossScalerBase:
        """DeepSpeed's."""
        return self.owner.scale.scaler

    @property
    def dynamic_loss_scale(self) -> bool:
        """Whether the scale follows overflows."""
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
        return self.owner.scale.scaling and (self.dynamic_loss_scale or self.loss_scale != 1)

    def scale_if_loss(self, value: Any) -> Any:
        """A loss, times the scale of the step under way."""
        scaled = self.owner.scale.scaling and maybe_loss_for_backward(value)
        return value * self.owner.scale.of(self.owner.handoff.global_step) if scaled else value

    # ---- a step -----------------------------------------------------------------------------------------------------------
    def backward_epilogue(self, **_: Any) -> None:
        self._on_backward_end()

    def step(self, closure=None) -> None:
        """Record the hyperparameters; the owner's update follows when the sums have come in."""
        if closure is not None:
            raise ValueError("optimizer.step() got a closure, but the update happens later and cannot call it; use engine.step()")
        self.optimizer._opt_called = True  # for torch's schedulers, which warn when step() has not been called before them
        self._on_step()

    def finalize_gradient_accumulation_boundary(self) -> None:
        """Nothing to do: with ``managed_gradient_accumulation: false`` DeepSpeed asks before each step."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Nothing to do: gradients travel on, none stays."""

    def state_dict(self) -> dict[str, Any]:
        """Collective (it flushes): this rank's part, the torch optimizer's state by the names of the parameters it owns."""
        self._flush()
        names = {p: n for n, p in self.owner.masters.items()}
        return {"state": {names[p]: s for p, s in self.state.items()},
                "param_groups": [{**{k: v for k, v in g.items() if k != "params"}, "params": [names[p] for p in g["params"]]}
                                 for g in self.optimizer.param_groups],
                "loss_scale": self.owner.scale.state_dict()}

    def load_state_dict(self, state: dict[str, Any], **_: Any) -> None:
        """Take back what ``state_dict`` gave on this rank.

        Raises:
            ValueError: it was made with other groups, or another partition.
        """
        self._flush()
        if len(state["param_groups"]) != len(self.optimizer.param_groups):
            raise ValueError(f"the optimizer state has {len(state['param_groups'])} parameter groups, this optimizer has "
                             f"{len(self.optimizer.param_groups)}; build the optimizer as it was when the state was saved")
        unknown = set(state["state"]) - set(self.owner.masters)
        if unknown:
            raise ValueError(f"the optimizer state holds {min(unknown)!r}, which rank {self.owner.handoff.rank} does not own; "
                             "load it with the number of ranks and the partition it was saved with")
        for group, saved in zip(self.optimizer.param_groups, state["param_groups"]):
            group.update({k: v for k, v in saved.items() if k != "params"})
        for name, values in state["state"].items():
            self.owner.put_state(name, values)
        self.owner.scale.restart(self.owner.handoff.global_step, state.get("loss_scale"))

    def destroy(self) -> None:
        """Drop references that would keep buffers alive."""
        self._on_backward_end = self._on_step = self._flush = lambda: None
