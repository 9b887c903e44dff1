"""The owner of a stage: fp32 masters, updated by the user's optimizer once the stage's gradient sums are finished.

Rings and pipelines use the same owner. ``engine.step()`` records a step's hyperparameters. The owner applies the update with them
later, when the step's sums have arrived.
"""

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Protocol

import torch

from deepspeed_cdp.optim import fused_adam
from deepspeed_cdp.optim.delay_correction import Corrector
from deepspeed_cdp.optim.masters import Masters
from deepspeed_cdp.optim.options import numbers
from deepspeed_cdp.optim.state import fit_counts, moved
from deepspeed_cdp.plan.delay_correction import DelayCorrection

EPSILON = 1e-6  # added to the norm when clipping, as in DeepSpeed's ZeRO-3


class Values(Protocol):
    """Initial values of parameters by name, each asked for once."""

    def __getitem__(self, name: str, /) -> torch.Tensor: ...


Sums = Mapping[Any, Mapping[str, torch.Tensor]]


class StageOwner:
    """Masters of one stage: fp32, whole tensors, stepped by a torch optimizer.

    A *unit* here is a key of ``sums``: in a ring a unit's index in the plan.

    Attributes:
        masters: trained parameters of the stage by name; fp32 ``nn.Parameter`` of the parameter's shape (masters.py).
        frozen: the others, in their own dtype.
        copies: how many published copies there are.
        updates_per_unit: units can be updated one by one.
        master_device: of both; None for that of the parameters (see optim/offload.py).
    """

    master_device: torch.device | None = None

    def __init__(
        self,
        values: Values,
        sums: Sums,
        published: Sequence[Mapping[str, torch.Tensor]],
        optimizer: torch.optim.Optimizer,
        make_optimizer: Callable[[torch.optim.Optimizer, dict[str, torch.nn.Parameter]], torch.optim.Optimizer],
        divisor: Callable[[int], float],
        clip: float,
        device: torch.device,
        corrected: Sequence[Mapping[str, torch.Tensor]] | None = None,
        correction: DelayCorrection = DelayCorrection(),  # noqa: B008  (it is frozen)
        early: Sums | None = None,
        early_divisor: Callable[[int], float] = lambda step: 1.0,
        in_halves: bool = False,
        uncounted: Collection[str] = (),
    ):
        """
        Args:
            values: initial values of (at least) the stage's parameters, by name; each is asked for once.
            sums: by unit and name, the finished gradient sum of each trained parameter, in the dtype of sums.
            published: by copy and name, every parameter in its own dtype; updates write them.
            optimizer: the user's; its groups' options are recorded at each step.
            make_optimizer: gives the optimizer that steps the masters (optim/state.py: ``take_over`` or ``part_of``).
            divisor: of a step: the number that turns its sums of scaled gradients into averages.
            clip: ``gradient_clipping``; 0 for none.
            device: of sums and published copies.
            corrected: by copy and name, what stale readers read. None: they read ``published``.
            correction: how it is made.
            early: by unit and name, early gradient sums; ``predict`` makes ``corrected`` of them, else updates do.
            early_divisor: as ``divisor``, of early sums.
            in_halves: keep masters of bf16 parameters in halves. Nothing but updates may write ``published`` then.
            uncounted: parameters that squared norms leave out.
        """
        self._early_divisor, self._uncounted = early_divisor, uncounted
        self.forget_last_update()
        self.clip, self._divisor, self._device, self._published = clip, divisor, device, published
        self.master_device, self.copies = self.master_device or device, len(published)
        trained = {name for views in sums.values() for name in views}
        masters: dict[str, torch.nn.Parameter] = {}
        self.frozen: dict[str, torch.Tensor] = {}
        for name in published[0]:
            value = values[name].detach()
            if name in trained:
                masters[name] = torch.nn.Parameter(
                    value.to(self.master_device, torch.float32, copy=True, memory_format=torch.contiguous_format)
                )
            else:
                self.frozen[name] = value.to(self.master_device, copy=True)
        self.masters = Masters(masters, published, [n for n in masters if in_halves and published[0][n].dtype == torch.bfloat16])
        self.user_optimizer, self.optimizer = optimizer, make_optimizer(optimizer, masters)
        self._corrected, self._corrector = corrected, Corrector(correction, self.optimizer) if corrected else None
        # averaged gradients of units not updated yet; None where fused Adam reads the sums again
        self._grads: dict[Hashable, list[torch.Tensor] | None] = {}
        self._fused: fused_adam.Adam | None = None
        self._not_fused: set[Hashable] = set()  # units that the optimizer itself steps, which so has the count of their steps
        self.use_sums(sums, early)
        # torch's own optimizers keep their state by parameter, so units can be updated one by one
        self.updates_per_unit = self._fused is not None or type(optimizer).__module__.startswith("torch.optim")
        self._recorded: dict[int, list[dict[str, Any]]] = {}
        self._kept_by_optimizer: set[str] = set()  # group options that step() itself writes (FusedAdam's step count)
        self.publish_all()

    def use_sums(self, sums: Sums, early: Sums | None) -> None:
        """Read finished and early sums from these tensors from now on."""
        self.sync_optimizer_state()
        self._sums, self._early = sums, early
        dtypes = {t.dtype for views in (*sums.values(), self._published[0]) for n, t in views.items() if n in self.masters}
        suits = fused_adam.Adam.suits(self.optimizer, self.master_device or self._device, dtypes)
        correction = self._corrector.correction if self._corrector else None
        written = self._published, self._corrected, correction, self._early
        self._fused = fused_adam.Adam(self.optimizer, self.masters, sums, *written, self._uncounted) if suits else None

    @property
    def updates_eagerly(self) -> bool:
        """Whether each unit can be updated as soon as its own sum is finished: no norm of other units clips it."""
        return self.updates_per_unit and not self.clip

    @torch.no_grad()
    def put(self, name: str, value: torch.Tensor) -> None:
        """Write a parameter; ``publish_all`` comes next."""
        (self.masters if name in self.masters else self.frozen)[name].copy_(value)
        if name in self.masters.lows:
            self.publish(0, [name])  # so no other masters need be whole meanwhile

    def put_state(self, name: str, state: dict[str, Any]) -> None:
        """Give the optimizer a parameter's saved state, perhaps of another optimizer class or device."""
        master, state = self.masters.parameters[name], dict(state)
        on_device = any(
            p is master for g in self.optimizer.param_groups if g.get("fused") or g.get("capturable") for p in g["params"]
        )
        fit_counts(self.optimizer, state)
        self.optimizer.state[master] = {k: moved(v, master.device, on_device) for k, v in state.items()}

    # ---- publishing -----------------------------------------------------------------------------------------------------
    @torch.no_grad()
    def publish(self, slot: int, names: Collection[str], ahead: Mapping[str, torch.Tensor] = MappingProxyType({})) -> None:
        """Write these masters in the parameters' dtype into published copy ``slot``.

        Args:
            ahead: by name, their corrections; a correction that is not there is the master itself.
        """
        if names:
            values = {n: self.masters.rounded(n) for n in names}
            self._write(self._published[slot], values)
            if self._corrected and self._early is None:
                self._write(self._corrected[slot], {n: ahead.get(n, v) for n, v in values.items()}, True)
            self.masters.split(names, slot)

    def _write(self, copy: Mapping[str, torch.Tensor], values: Mapping[str, torch.Tensor], corrected: bool = False) -> None:
        torch._foreach_copy_([copy[n] for n in values], list(values.values()))

    def publish_all(self) -> None:
        """Write masters and frozen parameters into every published copy, and into every correction."""
        self.forget_last_update()
        for copy in range(self.copies):
            self.publish(copy, self.masters)
        if self._corrected and self._early is not None and self.masters:
            for corrected in self._corrected:
                self._write(corrected, {n: self.masters.rounded(n) for n in self.masters}, True)
        for views in (*self._published, *(self._corrected or ())):
            for name, value in self.frozen.items():
                views[name].copy_(value)

    def forget_last_update(self) -> None:
        """Nothing is predicted before the next update; a flush has ended all steps."""
        self._factor: torch.Tensor | None = None  # that the last update multiplied gradients with
        self._applied: list[dict[str, Any]] | None = None  # the groups' options in the last update

    # ---- updates --------------------------------------------------------------------------------------------------------
    def record(self, step: int) -> None:
        """Record the groups' options for the update of ``step``."""
        self.masters.forget(self.masters)  # that were read since the flush
        self._recorded[step] = [
            {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in g.items() if k != "params"}
            for g in self.user_optimizer.param_groups  # (schedulers write into a tensor lr)
        ]

    def numbers(self, step: int) -> list[float]:
        """The options recorded for ``step``, as ranks compare them."""
        return numbers(self._recorded[step], self._kept_by_optimizer)

    @torch.no_grad()
    def checksum(self) -> torch.Tensor:
        """The halves of the masters' sum as 64-bit words, modulo 2**64: it changes with any one bit (float64, [2])."""
        sums = []
        for words in self.masters.words():
            octets = words.reshape(-1).view(torch.uint8)
            full = len(octets) // 8 * 8
            sums += [octets[:full].view(torch.int64).sum()] if full else []
            sums += [octets[full:].view(torch.int16).sum()] if full < len(octets) else []
        total = torch.stack(sums).sum() if sums else torch.zeros((), dtype=torch.int64, device=self.master_device)
        return torch.stack([total & 0xFFFFFFFF, total >> 32]).double()

    @torch.no_grad()
    def predict(self, step: int, unit: Hashable, copy: int, tied: Sequence[Sequence[torch.Tensor]] = ()) -> None:
        """Write a unit's next version, as far as its early sum tells, into the correction ``copy``, which stale readers read.

        It has the hyperparameters and the clipping of the last update since ``forget_last_update``. Where a prediction is not
        finite, stale readers read the master.

        Args:
            tied: more early sums of the same parameters, to be added.
        """
        assert self._early is not None and self._corrected and self._corrector and self._applied is not None
        names, scale = list(self._early[unit]), 1 / self._early_divisor(step)
        if self._fused and unit not in self._not_fused:
            self._fused.predict(unit, self._applied, scale, self._factor, copy)
        else:
            masters, values = zip(*((self.masters.parameters[n], self.masters.value(n)) for n in names))
            options = [{k: v for k, v in g.items() if k not in self._kept_by_optimizer} for g in self._applied]
            ahead = self._corrector.predict(masters, self._early_gradients(unit, step, tied), options, values)
            self._write(self._corrected[copy], dict(zip(names, ahead)), True)

    def _early_gradients(self, unit: Hashable, step: int, tied: Sequence[Sequence[torch.Tensor]]) -> list[torch.Tensor]:
        """Averaged early gradients, fp32, beside the masters, scaled as the last update's were to clip them."""
        assert self._early is not None
        divisor = self._early_divisor(step)
        sums = [sum(more, v.to(torch.float32)) for v, *more in zip(self._early[unit].values(), *tied)]
        grads = [(v / divisor).to(self.master_device) for v in sums]
        if self._factor is not None:
            torch._foreach_mul_(grads, self._factor)
        return grads

    @torch.no_grad()
    def advance(self, step: int, unit: Hashable, slot: int | None) -> torch.Tensor:
        """Average and update a unit, and publish it into copy ``slot`` unless that is None. Returns as ``average``."""
        if self._fused:
            return self._fused.update(unit, self._recorded[step], 1 / self._divisor(step), None, slot)
        squares = self.average(step, unit)
        self.update(step, None, unit, slot)
        return squares

    @torch.no_grad()
    def average(self, step: int, unit: Hashable, tied: Sequence[Sequence[torch.Tensor]] = (), keep: bool = False) -> torch.Tensor:
        """Turn a unit's finished sums into averaged gradients: fp32, sum / divisor.

        Args:
            tied: more sums of the same parameters, to be added.
            keep: the sums' memory is overwritten before the update, so the gradients need memory of their own.
        Returns:
            parts of their squared norm (1-D, float32 or float64, on the device), valid until the unit's next average.
        """
        views = list(self._sums[unit].values())
        if not views:
            self._grads[unit] = []
            return torch.zeros(1, dtype=torch.float64, device=self._device)
        if self._fused and not tied and not keep:
            self._grads[unit] = None
            self._not_fused.discard(unit)
            return self._fused.square(unit, 1 / self._divisor(step))
        self._not_fused.add(unit)
        grads = [v if v.dtype == torch.float32 and not keep else torch.empty_like(v, dtype=torch.float32) for v in views]
        pairs = [(g, v) for g, v in zip(grads, views) if g is not v]
        if pairs:
            torch._foreach_copy_([g for g, _ in pairs], [v for _, v in pairs])
        for more in tied:
            for grad, addend in zip(grads, more):
                grad.add_(addend)
        torch._foreach_div_(grads, self._divisor(step))
        self._grads[unit] = grads
        counted = [g for name, g in zip(self._sums[unit], grads) if name not in self._uncounted]
        if not counted:
            return torch.zeros(1, dtype=torch.float64, device=self._device)
        if self._device.type == "cpu":  # in double precision, as in analysis/reference.py
            norms = [torch.linalg.vector_norm(g, dtype=torch.float64) for g in counted]
        else:
            norms = list(torch._foreach_norm(counted))
        return torch.stack(norms).double().square()

    @torch.no_grad()
    def update(self, step: int, norm2: torch.Tensor | None = None, unit: Hashable = None, slot: int | None = None) -> None:
        """theta_{step+1} = opt(theta_step, averaged gradients), for one unit, or for all units not updated yet.

        Args:
            norm2: squared norm to clip by (float64, one element); None not to clip.
            slot: the published copy to write, or None.
        """
        factor = None
        if norm2 is not None and self.clip > 0:
            # as ZeRO-3 does: divided by (norm + epsilon) / clip where that is above one
            factor = (1.0 / torch.clamp((norm2.sqrt() + EPSILON) / self.clip, min=1.0)).to(torch.float32).squeeze()
        units = [i for i in ([unit] if unit is not None else list(self._grads)) if i in self._grads]
        if units:  # else the step is skipped
            self._factor = factor
        grads: dict[str, torch.Tensor] = {}
        ahead: dict[str, torch.Tensor] = {}
        for i in units:
            averaged = self._grads.pop(i)
            if averaged is None:
                assert self._fused is not None
                self._fused.update(i, self._recorded[step], 1 / self._divisor(step), factor, slot)
            else:
                grads |= dict(zip(self._sums[i], averaged))
        if grads:
            if factor is not None:
                torch._foreach_mul_(list(grads.values()), factor)
            for name, grad in grads.items():
                self.masters[name].grad = grad
            ahead = self._step(self._recorded[step], grads)
            for name in grads:
                self.masters[name].grad = None
        if slot is not None and not units:  # a skipped step is published, too
            self.publish(slot, self.masters if unit is None else self._sums[unit])
        elif slot is not None:
            self.publish(slot, grads, ahead)

    def discard(self) -> None:
        """Forget the averaged gradients: the step is skipped."""
        self._grads.clear()

    def finish(self, step: int) -> None:
        """All of the step's updates are done."""
        self._applied = self._recorded.pop(step)

    def sync_optimizer_state(self) -> None:
        """Write step counts into the optimizer's state; call it before reading that state."""
        if self._fused:
            self._fused.write_step_counts()

    def _step(self, recorded: list[dict[str, Any]], grads: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Step the optimizer. Returns the corrections by name, if stale readers read them."""
        groups = self.optimizer.param_groups
        current = [{k: v for k, v in g.items() if k != "params"} for g in groups]
        for group, options in zip(groups, recorded):
            group.update({k: v for k, v in options.items() if k not in self._kept_by_optimizer})
        before = [dict(g) for g in groups]
        stepped, corrector = [self.masters[n] for n in grads], self._corrector if self._early is None else None
        old_values = [p.detach().clone() for p in stepped] if corrector else []
        with torch.enable_grad():
            self.optimizer.step()
        ahead = dict(zip(grads, corrector.extrapolate(stepped, old_values))) if corrector else {}
        for group, old, now in zip(groups, before, current):
            self._kept_by_optimizer |= {k for k, v in group.items() if k != "params" and (k not in old or old[k] is not v)}
            group.update({k: v for k, v in now.items() if k not in self._kept_by_optimizer})
        return ahead
