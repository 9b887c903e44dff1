"""The interface between the owner's actions and the masters."""

from typing import Protocol

import torch


class Owner(Protocol):
    """Keeps the owned stage's masters and steps them (optim/stage_owner.py).

    Attributes:
        updates_per_unit: units can be updated one by one (deferred or eager).
        updates_eagerly: each unit can be updated as soon as its own sum is finished, since nothing is clipped.
    """

    updates_per_unit: bool

    @property
    def updates_eagerly(self) -> bool: ...

    def advance(self, step: int, unit: int, slot: int | None) -> torch.Tensor:
        """Average and update a unit, and publish it into copy ``slot`` unless that is None. Returns as ``average``."""

    def average(self, step: int, unit: int) -> torch.Tensor:
        """Turn the unit's finished sum of ``step`` into averaged gradients. Returns parts of their squared norm (1-D)."""

    def update(self, step: int, norm2: torch.Tensor | None = None, unit: int | None = None, slot: int | None = None) -> None:
        """Apply the update of ``step`` to one unit, or to all that have been averaged, clipped by ``norm2``, and publish."""

    def predict(self, step: int, unit: int, copy: int) -> None:
        """Predict the unit's next version from its early sum of ``step``, for stale readers."""

    def discard(self) -> None:
        """Forget the averaged gradients: the step is skipped."""

    def finish(self, step: int) -> None:
        """The update of ``step`` is complete."""
