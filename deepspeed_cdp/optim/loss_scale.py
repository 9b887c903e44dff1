"""Loss scaling for fp16 gradients: the scale of each step, and the step at which an overflow takes effect.

DeepSpeed's own scaler holds the numbers (``fp16.loss_scale`` and related settings). ``LossScale`` decides *when* the scaler is
updated with a step's overflow, so that every rank multiplies a step's losses by the same scale, known before its first backward::

    scale of step t = the scaler's, updated with the overflows of the steps <= t - delay

The delay is 1 under ``dp``, as in ZeRO-3. Under ``cdp-v1`` it is 2: the update of step t, which waits for the step's norm, comes
on some ranks after the backwards of step t + 1 have begun. A flush ends all steps: the step after it has a delay of 1 under both.
"""

from collections.abc import Mapping
from typing import Any

import torch
from deepspeed.runtime.fp16.loss_scaler import CreateLossScaler, DynamicLossScaler, LossScaler, LossScalerBase

from deepspeed_cdp.plan.schedule import Schedule

_KEPT = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")  # attributes that change in training


def plain(scaler: LossScalerBase) -> dict[str, Any]:
    """The numbers of DeepSpeed's scaler."""
    return {key: value for key, value in vars(scaler).items() if isinstance(value, (bool, int, float))}


def scaler_of(state: Mapping[str, Any] | None) -> LossScalerBase:
    """DeepSpeed's scaler with these numbers; None is a fixed scale of 1."""
    if not state or not state["dynamic"]:
        return LossScaler(scale=state["cur_scale"] if state else 1.0)
    scaler = DynamicLossScaler(
        *(state[key] for key in ("cur_scale", "scale_window", "min_scale", "delayed_shift", "consecutive_hysteresis"))
    )
    for key in _KEPT:
        setattr(scaler, key, state[key])
    return scaler


class LossScale:
    """The scales of one rank's steps; the same on all ranks.

    Attributes:
        scaler: DeepSpeed's; ``cur_scale`` is that of the next step, as far as this rank knows.
    """

    def __init__(self, schedule: Schedule, loss_scale: float | Mapping[str, Any] | None = None):
        """
        Args:
            loss_scale: a fixed scale, or the ``dynamic_loss_args`` of DeepSpeed's scaler; None for 1.
        Raises:
            ValueError: there is one, and the schedule updates stages before the step's overflow is known.
        """
        if loss_scale is not None and not schedule.exact_norm:
            raise ValueError(
                f"losses are scaled for fp16, but with the threshold K = {schedule.threshold} a stage is updated "
                'before the step\'s last overflow is known; use bf16, or cyclic.rule "cdp-v1" or "dp"'
            )
        dynamic = dict(loss_scale) if isinstance(loss_scale, Mapping) else None
        static = 1.0 if loss_scale is None or isinstance(loss_scale, Mapping) else float(loss_scale)
        self.scaler: LossScalerBase = CreateLossScaler(torch.half, static, dynamic is not None, dynamic)
        self.scaling = loss_scale is not None
        self.follow(schedule)
        self.restart(0)

    def follow(self, schedule: Schedule) -> None:
        """After a flush: steps follow this schedule from now on (see plan/warmup.py)."""
        self._delay = (1 if schedule.threshold == 0 else 2) if schedule.exact_norm else None
        self._report_delay = (
            0 if schedule.threshold == 0 and schedule.ranks > 1 else 1
        )  # steps from a step to the step at whose end its overflow is known

    def restart(self, step: int, state: Mapping[str, Any] | None = None) -> None:
        """Go on with ``step``, between steps after a flush; ``state`` is that of ``state_dict``, or None to stay as it is."""
        self._next_scale = self._next_overflow = (
            step  # first step without a scale; first step whose overflow the scaler has not got
        )
        self._scales: dict[int, float] = {}
        self._overflows: dict[int, bool] = {}  # step -> whether it overflowed, for the scaler
        self._unreported: dict[int, bool] = {}  # the same, for the engine
        if state and self.scaler.dynamic and state["dynamic"]:
            for key in _KEPT:
                setattr(self.scaler, key, state[key])
        if state and state.get("untold"):
            self._unreported[step - 1] = True

    def state_dict(self) -> dict[str, Any]:
        """After a flush: plain numbers that ``restart`` takes."""
        assert not self._overflows, "a flush updates the scaler with all steps"
        return {"untold": any(self._unreported.values()), **plain(self.scaler)}

    def of(self, step: int) -> float:
        """The scale of a step, from its first backward to its update."""
        while self._next_scale <= step:
            self._update_scaler(self._next_scale)
            assert self._delay is None or self._next_overflow > self._next_scale - self._delay, (
                step,
                self._next_overflow,
                self._delay,
            )
            self._scales[self._next_scale] = float(self.scaler.cur_scale)
            self._next_scale += 1
        return self._scales[step]

    def _update_scaler(self, step: int) -> None:
        """Update the scaler with the known overflows that take effect at ``step``."""
        while self._delay is not None and self._next_overflow <= step - self._delay and self._next_overflow in self._overflows:
            self.scaler.update_scale(self._overflows.pop(self._next_overflow))
            self._next_overflow += 1

    def end(self, step: int, overflow: bool) -> None:
        """Record whether the step's norm overflowed; then its update is skipped."""
        self._overflows[step] = self._unreported[step] = overflow

    def finish(self, step: int) -> None:
        """The step's update is over."""
        self.of(step)  # (a rank without a backward has not asked for it)
        del self._scales[step]

    def end_step(self, step: int) -> bool:
        """End ``step`` on this rank. Returns whether the newest step whose overflow every rank knows was skipped.

        That is this step under ``dp`` on several ranks, else the step before.
        """
        if self._next_scale <= step:  # no backward on this rank
            self.of(step)
        self._update_scaler(step + 1)
        return any([self._unreported.pop(s) for s in sorted(self._unreported) if s <= step - self._report_delay])

    def flush(self) -> None:
        """All steps have ended: update the scaler with all of them."""
        if self._delay is not None:
            self._update_scaler(self._next_scale - 1 + self._delay)
        assert not self._overflows, self._overflows
