"""How a rank's gradients get into running sums (design §8): all of a unit's in one launch, when its backward is over.

Or earlier, for the weights of linear layers: the matrix product that makes such a gradient adds it, so that it is never written
and read by itself (Megatron-LM's ``gradient_accumulation_fusion``). The sum is rounded once where it would be twice.
"""

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch.autograd import forward_ad

from .handoff import Handoff
from .plan import HELD
from .units import Slot

Slots = Mapping[int, Sequence[tuple[torch.nn.Parameter, Slot]]]
_linear = torch._C._nn.linear  # torch.nn.functional.linear is DeepSpeed's after zero.Init
_mixed = hasattr(torch.ops.aten.addmm, "dtype_out")  # products of bf16 that add to fp32, on CUDA; from torch 2.8


class Sums:
    """Adds gradients to the sums that ``handoff`` has in use.

    Args:
        slots: by unit, parameters and where they lie; trained ones first.
        visited: the units used in this micro-batch's forward; gradients of others are left to the caller.
    """

    def __init__(self, handoff: Handoff, slots: Slots, visited: Container[int]):
        self._handoff, self._slots, self._visited = handoff, slots, visited
        self._views: dict[tuple[int, int], list[torch.Tensor]] = {}
        self._summed: dict[int, set[int]] = {}  # unit -> slots whose gradients products have added in this backward
        self._fused: list[tuple[torch.nn.Module, Callable]] = []

    def views(self, i: int, flat: torch.Tensor) -> list[torch.Tensor]:
        """The sums of the unit's trained parameters in its flat sum."""
        key = (i, flat.data_ptr())
        views = self._views.get(key)
        if views is None:
            views = self._views[key] = [s.sum(flat) for _, s in self._slots[i] if s.sum_offset >= 0]
        return views

    def forget_views(self) -> None:
        """Drop cached views, which may be of memory that is gone."""
        self._views.clear()

    @torch.no_grad()  # under backward(create_graph=True) gradients have graphs
    def add(self, i: int, flat: torch.Tensor, first: bool) -> None:
        """Add the unit's gradients, now complete, to the running sum that goes on to the next rank.

        Args:
            first: this rank starts the sum, and the memory holds anything where no product has written.
        """
        summed = self._summed.pop(i, ())
        empty, copied, added = [], [], []
        for k, (view, (p, _)) in enumerate(zip(self.views(i, flat), self._slots[i])):
            grad = p.grad
            if first and k not in summed:
                if grad is None or grad.layout is not torch.strided:
                    empty.append(view)
                else:
                    copied.append((view, grad))
                    continue
            if grad is not None:
                added.append((view, grad))
        for p, _ in self._slots[i]:
            p.grad = None
        if empty:
            torch._foreach_zero_(empty)
        if copied:
            torch._foreach_copy_(*map(list, zip(*copied)))
        if any(g.layout is not torch.strided for _, g in added):
            for view, g in added:
                view.add_(g)
        elif added:
            torch._foreach_add_(*map(list, zip(*added)))

    # ---- inside the matrix product --------------------------------------------------------------------------------------
    def fuse(self, module: torch.nn.Module, setting: bool | str, device: torch.device) -> int:
        """Let linear layers add their weights' gradients themselves, if ``setting`` is True or "auto" on a GPU; how many do.

        Each call of a layer decides anew: under autocast, torch.compile or a transform of torch.func, and where somebody has a
        hook on the weight, gradients go the common way.

        Raises:
            ValueError: ``setting`` is True and there is no such layer.
        """
        cuda = device.type == "cuda"
        if setting is False or setting == "auto" and not cuda:
            return 0
        for m, i, k in fusible(module, self._slots, cuda):
            forward = m.forward = _forward(m, partial(self._add_product, i, k, m.weight))
            self._fused.append((m, forward))
        if setting is True and not self._fused:
            raise ValueError("cyclic.gradient_accumulation_fusion is true, but the model has no torch.nn.Linear whose weight is "
                             "trained, used by one unit alone and summed in its own dtype (on GPUs also fp32); use \"auto\"")
        return len(self._fused)

    def remove(self) -> None:
        """Layers compute as before."""
        for m, forward in self._fused:
            if m.__dict__.get("forward") is forward:
                del m.forward
        self._fused.clear()

    def _add_product(self, i: int, k: int, p: torch.nn.Parameter, grad: torch.Tensor, x: torch.Tensor) -> bool:
        """Add grad^T x to the sum of the unit's slot ``k``; False if the gradient must go the common way."""
        flat = self._handoff.sums.get(i)
        if flat is None or i not in self._visited or p._backward_hooks or p._post_accumulate_grad_hooks or not self._fused:
            return False
        view, summed = self.views(i, flat)[k], self._summed.setdefault(i, set())
        mixed = {} if view.dtype == x.dtype else {"out_dtype": view.dtype}
        if i in self._handoff.starting and k not in summed:
            torch.mm(grad.t(), x, out=view, **mixed)
        else:
            torch.addmm(view, grad.t(), x, out=view, **mixed)
        summed.add(k)
        return True


def fusible(module: torch.nn.Module, slots: Slots, cuda: bool) -> Iterator[tuple[torch.nn.Linear, int, int]]:
    """Linear layers that can add their weights' gradients themselves; the weight's unit, and its number among the unit's slots.

    Those of class ``torch.nn.Linear`` whose weight is trained, not held, and has a sum of its own dtype or, from torch 2.8 and on
    CUDA, fp32.
    """
    places = {p: (i, k, s) for i, pairs in slots.items() if i != HELD for k, (p, s) in enumerate(pairs) if s.sum_offset >= 0}
    for m in module.modules():
        weight = m._parameters.get("weight") if type(m) is torch.nn.Linear and "forward" not in m.__dict__ else None
        if weight in places:
            i, k, s = places[weight]
            if s.sum_dtype == s.dtype or _mixed and cuda and s.sum_dtype == torch.float32:
                yield m, i, k


def _forward(m: torch.nn.Linear, add: Callable[[torch.Tensor, torch.Tensor], bool]) -> Callable[[torch.Tensor], torch.Tensor]:
    plain = m.forward

    def forward(input: torch.Tensor) -> torch.Tensor:
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return plain(input)
        weight = m.weight
        if (type(input) is not torch.Tensor or not weight.requires_grad or input.dtype != weight.dtype
                or torch.is_autocast_enabled(weight.device.type) or torch._C._are_functorch_transforms_active()
                or forward_ad._current_level >= 0):
            return plain(input)
        return _Linear.apply(input, weight, m.bias, add)
    return forward


class _Linear(torch.autograd.Function):
    """``torch.nn.functional.linear``, whose backward offers the weight's gradient to ``add`` before it makes it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, add: Callable) -> torch.Tensor:
        ctx.add = add
        ctx.save_for_backward(x, weight if ctx.needs_input_grad[0] else None)
        return _linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        for_x, for_weight, for_bias, _ = ctx.needs_input_grad
        rows, inputs = grad.reshape(-1, grad.shape[-1]), x.reshape(-1, x.shape[-1])
        result: list[torch.Tensor | None] = [None] * 4
        if for_x:
            result[0] = rows.mm(weight).view(x.shape)
        if for_weight and not (_accumulates(ctx) and ctx.add(rows, inputs)):
            result[1] = rows.t().mm(inputs)
        if for_bias:
            result[2] = rows.sum(0)
        return tuple(result)


def _accumulates(ctx: Any) -> bool:
    """Whether this backward adds to the weight's gradient: not under ``create_graph``, and not for ``torch.autograd.grad``."""
    if torch.is_grad_enabled():
        return False
    try:
        return torch._C._will_engine_execute_node(ctx.next_functions[1][0])
    except RuntimeError:  # torch.autograd.grad wants the weight's gradient for itself
        return False
