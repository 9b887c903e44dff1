"""How a rank's own gradients get into the running sums that go round: by autograd itself, or a unit at a time."""

from collections.abc import Mapping, Sequence

import torch

from .handoff import Handoff
from .units import Slot

Slots = Mapping[int, Sequence[tuple[torch.nn.Parameter, Slot]]]


class Gradients:
    """One rank's; trained slots of a unit come first.

    Attributes:
        lent: running sums that stand in for ``param.grad`` now, so that autograd adds to them.
    """

    def __init__(self, handoff: Handoff, slots: Slots):
        self.handoff, self.slots = handoff, slots
        self.lent: dict[torch.nn.Parameter, torch.Tensor] = {}
        self._cache: dict[tuple[int, int], list[torch.Tensor]] = {}

    def lend(self, i: int) -> None:
        """Let autograd add the unit's gradients to the running sum, each as soon as it is made: it is still in the cache then.

        Not where nothing has been added before (autograd gives its own memory away), nor where a hook is to see the gradient.
        """
        flat = self.handoff.sums.get(i)
        if flat is None or not self.handoff.continues(i):
            return
        for (p, s), view in zip(self.slots[i], self.views(i, flat)):
            if p.grad is None and s.sum_dtype == p.dtype and not p._post_accumulate_grad_hooks:
                p.grad = self.lent[p] = view

    @torch.no_grad()  # under backward(create_graph=True) gradients have graphs
    def add(self, i: int, flat: torch.Tensor, first: bool) -> None:
        """Add what autograd has not added of the unit's gradients, now complete, to the running sum; all in one launch.

        Args:
            flat: the running sum (uint8, 1-D), which goes on to the next rank.
            first: nothing has been added before, and the memory holds anything.
        """
        views, pairs = self.views(i, flat), []
        for (p, _), view in zip(self.slots[i], views):
            grad, lent = p.grad, self.lent.pop(p, None)
            if grad is not None and lent is None:
                pairs.append((view, grad))
            elif grad is not None and grad is not lent:
                view.copy_(grad)  # under create_graph autograd adds out of place
        for p, _ in self.slots[i]:
            p.grad = None
        if first and len(pairs) < len(views):
            flat.zero_()
            first = False
        sums, grads = map(list, zip(*pairs)) if pairs else ([], [])
        if any(g.layout is not torch.strided for g in grads):
            for view, g in pairs:
                view.zero_().add_(g) if first else view.add_(g)
        elif pairs:
            (torch._foreach_copy_ if first else torch._foreach_add_)(sums, grads)

    def views(self, i: int, flat: torch.Tensor) -> list[torch.Tensor]:
        """Of the running sum, one by trained parameter; the same objects every time."""
        key = (i, flat.data_ptr())
        views = self._cache.get(key)
        if views is None:
            views = self._cache[key] = [s.sum(flat) for _, s in self.slots[i] if s.sum_offset >= 0]
        return views

    def drop(self, i: int) -> None:
        """Forget the gradients of this unit's parameters."""
        for p, _ in self.slots[i]:
            p.grad = None
            self.lent.pop(p, None)

    def forget_views(self) -> None:
        """Drop cached views, which may be of memory that is gone."""
        self._cache.clear()
