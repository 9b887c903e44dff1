"""Named events between the parts of a rank's runtime, passed to their constructors."""

from typing import Protocol

import torch


class Events(Protocol):
    """Callbacks of the executor, the owner's executor and the parameter hooks, which ``Runtime`` implements."""

    def params_released(self, unit: int) -> None:
        """A pass of the unit is over: its parameters are about to be overwritten."""

    def grads_complete(self, unit: int, grad_sum: torch.Tensor, empty: bool) -> None:
        """The unit's backward is over: this rank's gradients must be added to its running sum.

        Args:
            grad_sum: uint8, 1-D; the unit's flat sum.
            empty: this rank starts the sum; memory that no fused product has written yet is uninitialized.
        """

    def norm_known(self, step: int, overflow: bool) -> None:
        """The gradient norm of ``step`` is known, before its update (``dp`` and ``cdp-v1`` only).

        Args:
            overflow: the norm is not finite.
        """

    def step_updated(self, step: int) -> None:
        """The update of ``step`` is complete on this rank."""

    def order_needed(self, why: str, alone: bool = False) -> None:
        """Parameters are needed when the plan has no pass for them. From now on all are there, or the error says why not.

        Args:
            why: a clause for people, such as "the module was called between a forward and its backward".
            alone: other ranks may do as planned.
        Raises:
            ValueError: the setting forbids it, or the transport cannot do it.
        """

    def used_outside(self, how: str) -> None:
        """The module was used outside the engine's own calls.

        Args:
            how: a verb phrase for the error, such as "was called".
        """
