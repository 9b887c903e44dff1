"""The owner's side: masters, updates, published copies; and the optimizer that users hold.

``engine.step()`` records the hyperparameters of the step; the owner applies the step's update later, when its sums have come in
round the ring, with the recorded ones (design §9).
"""

from typing import Any

import torch

from deepspeed_cdp.model.flat_layout import FlatLayout, Slot
from deepspeed_cdp.optim import fused_adam
from deepspeed_cdp.optim.loss_scale import LossScale
from deepspeed_cdp.optim.state import fit_counts, moved
from deepspeed_cdp.runtime.executor import Executor


class StageOwner:
    """Masters of one stage: fp32, whole tensors, stepped by the user's own optimizer.

    Attributes:
        masters: trained parameters of the owned stage by name; fp32 ``nn.Parameter`` of the parameter's shape.
        frozen: the others, in their own dtype.
        home: device of both; None where the parameters are (see optim/offload.py).
    """

    home: torch.device | None = None

    def __init__(
        self,
        executor: Executor,
        layouts: dict[int, FlatLayout],
        values: dict[str, torch.Tensor],
        optimizer: torch.optim.Optimizer,
        names: dict[torch.nn.Parameter, str],
        clip: float,
        scale: LossScale | None = None,
    ):
        """
        Args:
            layouts: by unit index, PERSISTENT included.
            values: initial values of (at least) the owned stage's parameters, by name; each is asked for once.
            optimizer: its groups' parameters are replaced by the owned stage's masters, in place.
            names: of the module's parameters that the groups hold now.
            clip: ``gradient_clipping``; 0 for none.
            scale: by which the losses of a step are multiplied, and its sums divided; None for 1.
        """
        self.executor, self.clip, self.optimizer = executor, clip, optimizer
        self.scale = scale or LossScale(executor.schedule)
        stage = executor.plan.schedule.owned(executor.rank)
        places, _ = executor.plan.v_layout(stage)
        self.slots: dict[str, tuple[int, Slot]] = {s.name: (i, s) for i in places for s in layouts[i].slots}
        self._device = executor.buffers.arena.device
        self.home = self.home or self._device
        self.masters: dict[str, torch.nn.Parameter] = {}
        self.frozen: dict[str, torch.Tensor] = {}
        for name, (_, slot) in self.slots.items():
            value = values[name].detach()
            if slot.sum_offset >= 0:
                self.masters[name] = torch.nn.Parameter(
                    value.to(self.home, torch.float32, copy=True, memory_format=torch.contiguous_format)
                )
            else:
                self.frozen[name] = value.to(self.home, copy=True)
        self._published = [{n: self._view("V", i, s, c) for n, (i, s) in self.slots.items()} for c in range(executor.plan.copies)]
        self._sums: dict[int, dict[str, torch.Tensor]] = {i: {} for i in places}
        self._ring_sums: dict[int, list[torch.Tensor]] = {}
        for n, (i, s) in self.slots.items():
            if s.sum_offset >= 0:
                self._sums[i][n] = self._view(executor.plan.o_region if executor.across is None else "X", i, s)
        # torch's own optimizers keep their state by parameter, so units can be updated one by one; and if nothing is clipped by
        # a norm of the whole step, as soon as each one's sum is finished.
        self._grads: dict[int, list[torch.Tensor]] = {}  # averaged, of units not updated yet (empty lists if fused)
        self._take_over(names)
        dtypes = {d for _, s in self.slots.values() if s.sum_offset >= 0 for d in (s.dtype, s.sum_dtype)}
        self._fused = (
            fused_adam.Adam(optimizer, self.masters, self._sums, self._published)
            if fused_adam.Adam.suits(optimizer, self.home, dtypes)
            else None
        )
        self.updates_per_unit = self._fused is not None or type(optimizer).__module__.startswith("torch.optim")
        self._recorded: dict[int, list[dict[str, Any]]] = {}
        self._kept_by_optimizer: set[str] = set()  # group options that step() itself writes (FusedAdam keeps its count there)
        self.publish_all()

    @property
    def updates_eagerly(self) -> bool:
        """Whether each unit is updated as soon as its own sum is finished, as far as the schedule goes that is followed now."""
        return self.updates_per_unit and not self.clip and not self.executor.schedule.exact_norm

    def _view(self, region: str, i: int, slot: Slot, copy: int | None = None) -> torch.Tensor:
        plan, stage = self.executor.plan, self.executor.plan.schedule.owned(self.executor.rank)
        view = self.executor.buffers.view
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
                        k: v.to(master).contiguous()
                        if isinstance(v, torch.Tensor) and v.is_floating_point() and v.shape == master.shape
                        else v
                        for k, v in state[n].items()
                    }

    def put_state(self, name: str, state: dict[str, Any]) -> None:
        """Give the optimizer a saved state of a parameter, perhaps saved by an optimizer of another device or make."""
        master, state = self.masters[name], dict(state)
        on_device = any(
            p is master for g in self.optimizer.param_groups if g.get("fused") or g.get("capturable") for p in g["params"]
        )
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
        self._recorded[step] = [
            {
                k: v.clone() if isinstance(v, torch.Tensor) else v  # schedulers write into a tensor lr
                for k, v in g.items()
                if k != "params"
            }
            for g in self.optimizer.param_groups
        ]

    def _divisor(self, step: int) -> float:
        """What turns the step's sums of scaled gradients into averages."""
        return self.executor.plan.rings * self.executor.schedule.ranks * self.scale.of(step)

    def ring_sums(self, unit: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """A unit's sums over all rings, in region X, and of the own ring (see cross_ring.py)."""
        own = self._ring_sums.get(unit)
        if own is None:
            region = self.executor.plan.o_region
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
