"""What a walk through a program needs to know: places in it, who owns what, and words for errors."""

from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    pass


class Owner(Protocol):
    """Who keeps the owned stage's masters (see optim/stage_owner.py).

    Attributes:
        updates_per_unit: whether units can be updated one by one; updates_eagerly: and each as soon as its own sum is finished.
    """

    updates_per_unit: bool
    updates_eagerly: bool

    def advance(self, step: int, unit: int, slot: int | None) -> torch.Tensor:
        """Average, update and (into copy ``slot``, if one is given) publish a unit; squares as ``average``."""

    def average(self, step: int, unit: int) -> torch.Tensor:
        """Turn the unit's finished sum of ``step`` into averaged gradients; parts of their squared norm (1-D)."""

    def update(self, step: int, norm2: torch.Tensor | None = None, unit: int | None = None, slot: int | None = None) -> None:
        """Apply the update of ``step`` to one unit, or to all that have been averaged, clipped by ``norm2``, and publish."""

    def discard(self) -> None:
        """Forget what has been averaged: the step is skipped."""

    def ring_sums(self, unit: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """A unit's sums over all rings and of the own ring, parameter by parameter, where there are several rings."""

    def finish(self, step: int) -> None:
        """The update of ``step`` is complete."""

    def publish(self, slot: int, unit: int | None = None) -> None:
        """Write the newest version (of one unit, or all) into published copy ``slot``."""
