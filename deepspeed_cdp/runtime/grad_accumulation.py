"""Adds a rank's gradients to running sums: one kernel launch per unit, after its backward.

Linear layers can do it earlier for their weights: the GEMM that computes a weight's gradient adds it to the sum, so the gradient
has no memory of its own (Megatron-LM's ``gradient_accumulation_fusion``). The sum is rounded once instead of twice.
"""

from collections.abc import Iterator, Mapping, Sequence, Set
from types import ModuleType
from typing import Any, Protocol

import torch
from torch.autograd import forward_ad
from torch.nn import functional
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext

from deepspeed_cdp.model.flat_layout import Slot
from deepspeed_cdp.plan.constants import PERSISTENT

AFTER_DESTROY = "a backward came after engine.destroy(), with which the parameters are gone; call engine.backward(loss) before"
Slots = Mapping[int, Sequence[tuple[torch.nn.Parameter, Slot]]]
_linear = torch._C._nn.linear
_ZERO = "deepspeed.runtime.zero.linear"  # module of torch.nn.functional.linear after zero.Init
_no_view = torch.ops.aten._unsafe_view.default  # the same memory, not known as a view
_is_dead = torch._C._functorch.is_dead_tensor_wrapper  # type: ignore[attr-defined]  # of a transform of torch.func that is over
_mixed = hasattr(torch.ops.aten.addmm, "dtype_out")  # products of bf16 that add to fp32, on CUDA; from torch 2.8


class Passes(Protocol):
    """``ParamHooks``, as fused layers see it."""

    any_order: bool
    in_pass: int | None

    def prepare_backward_read(self, i: int) -> None:
        """A backward reads the unit's parameters."""


class GradAccumulation:
    """Adds gradients to the running sums in use.

    Attributes:
        not_fused_reason: why no linear layer is fused although the setting asks for it; else empty.
    """

    not_fused_reason = ""

    def __init__(
        self,
        slots: Slots,
        grad_sums: Mapping[int, torch.Tensor],
        empty_sums: Set[int],
        passes: Passes,
        native: ModuleType | None = None,
    ):
        """
        Args:
            slots: by unit, its parameters and their places.
            grad_sums: by unit, the flat sums in use (uint8, 1-D).
            empty_sums: units whose sum in use is uninitialized.
            native: what C++ does (native/autograd.cpp); None: Python does all.
        """
        self.native = native
        self.passes, self._slots, self._in_use, self._empty = passes, slots, grad_sums, empty_sums
        self._parameters = {i: [p for p, _ in pairs] for i, pairs in slots.items()}
        self._views: dict[tuple[int, int], list[torch.Tensor]] = {}
        self._summed: dict[int, set[int]] = {}  # unit -> slots whose gradients fused GEMMs have added in this backward
        self._layers: list[_Layer] = []

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
        for layer in self._layers:
            layer.forget_views()

    def add(self, i: int, flat: torch.Tensor, first: bool) -> None:
        """Add the unit's gradients, now complete, to the running sum that goes on to the next rank.

        Args:
            first: this rank starts the sum; memory that no fused GEMM has written yet is uninitialized.
        """
        if torch.is_grad_enabled():  # behind the backward, or under backward(create_graph=True), where gradients have graphs
            with torch.no_grad():
                self.add(i, flat, first)
            return
        summed = self._summed.pop(i, ())
        if self.native is not None:
            self.native.add_grads(self._parameters[i], self.views(i, flat), first, summed)
            return
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
            torch._foreach_copy_([v for v, _ in copied], [g for _, g in copied])
        if any(g.layout is not torch.strided for _, g in added):
            for view, g in added:
                view.add_(g)
        elif added:
            torch._foreach_add_([v for v, _ in added], [g for _, g in added])

    # ---- inside the GEMM ------------------------------------------------------------------------------------------------
    def fuse(self, module: torch.nn.Module, setting: bool | str, device: torch.device) -> int:
        """Let linear layers add their weights' gradients, if ``setting`` is True or "auto" on a GPU. Returns their number.

        Each call of a layer decides anew. Under autocast, torch.compile or a transform of torch.func, and if the weight has a
        hook, autograd accumulates the gradient as usual.

        Raises:
            ValueError: ``setting`` is True and there is no such layer.
        """
        cuda = device.type == "cuda"
        if setting is False or setting == "auto" and not cuda:
            return 0
        if self.passes.any_order:
            self.not_fused_reason = "with cyclic.any_order gradients are added after the whole backward"
        elif _linear_is_stock():
            self._layers = [self._layer(m, i, k, device.type) for m, i, k in fusible(module, self._slots, cuda)]
            self.not_fused_reason = (
                ""
                if self._layers
                else (
                    "the model has no torch.nn.Linear whose weight is trained, used by one unit "
                    "alone and summed in its own dtype (on GPUs also fp32)"
                )
            )
        else:
            self.not_fused_reason = "torch.nn.Linear.forward or torch.nn.functional.linear has been replaced in this process"
        if setting is True and self.not_fused_reason:
            raise ValueError(f'cyclic.gradient_accumulation_fusion is true, but {self.not_fused_reason}; use "auto"')
        return len(self._layers)

    def _layer(self, module: torch.nn.Linear, i: int, k: int, device: str) -> "_Layer":
        _, slot = self._slots[i][k]
        plain = type(module.weight) is torch.nn.Parameter and slot.sum_dtype == slot.dtype
        return (_Layer if self.native is None or not plain else _NativeLayer)(self, module, i, k, device)

    def remove(self) -> None:
        """Layers compute as before."""
        for layer in self._layers:
            layer.remove()
        self._layers.clear()

    def add_product(self, i: int, k: int, grad: torch.Tensor, x: torch.Tensor) -> bool:
        """Add grad^T x to the sum of the unit's slot ``k``; False if no such sum is in use."""
        flat = self._in_use.get(i)
        if flat is None:
            return False
        view, summed = self.views(i, flat)[k], self._summed.get(i)
        if summed is None:
            summed = self._summed[i] = set()
        mixed: dict[str, Any] = {} if view.dtype == x.dtype else {"out_dtype": view.dtype}
        if i in self._empty and k not in summed:
            torch.mm(grad.t(), x, out=view, **mixed)
        else:
            torch.addmm(view, grad.t(), x, out=view, **mixed)
        summed.add(k)
        return True


def fusible(module: torch.nn.Module, slots: Slots, cuda: bool) -> Iterator[tuple[torch.nn.Linear, int, int]]:
    """Linear layers that can add their weights' gradients, each with the weight's unit and its index among the unit's slots.

    The class is ``torch.nn.Linear``. The weight is trained and not persistent, and its sum has the weight's dtype; on CUDA with
    torch >= 2.8 the sum may also be fp32.
    """
    places = {
        p: (i, k, s) for i, pairs in slots.items() if i != PERSISTENT for k, (p, s) in enumerate(pairs) if s.sum_offset >= 0
    }
    for m in module.modules():
        if type(m) is not torch.nn.Linear or "forward" in m.__dict__:
            continue
        weight = m._parameters.get("weight")
        if weight is not None and weight in places and weight.numel():
            i, k, s = places[weight]
            if s.sum_dtype == s.dtype or _mixed and cuda and s.sum_dtype == torch.float32:
                yield m, i, k


def _linear_is_stock() -> bool:
    """Whether the process uses torch's own linear layer and function."""
    layer, function = torch.nn.Linear.forward, functional.linear
    if layer.__module__ != torch.nn.Linear.__module__ or not (function is _linear or function.__module__ == _ZERO):
        return False
    return not torch._C._len_torch_function_stack() or all(  # torch.set_default_device has one
        type(mode) is DeviceContext for mode in _get_current_function_mode_stack()
    )


class _Layer:
    """A linear layer that adds its weight's gradient itself. The weight is not saved for the backward, where it is bound anew."""

    def __init__(self, accumulation: GradAccumulation, module: torch.nn.Linear, unit: int, slot: int, device: str):
        self.accumulation, self.passes, self.module, self.unit, self.slot = accumulation, accumulation.passes, module, unit, slot
        self.weight, self.parameters = module.weight, module._parameters
        self.device, self.fused = device, True
        module.forward = self.forward  # type: ignore[method-assign]

    def remove(self) -> None:
        """Restore the module's forward, even if a wrapper holds this one, and drop all references to the engine."""
        if self.module.__dict__.get("forward") == self.forward:
            del self.module.forward
        self.fused = False
        del self.accumulation, self.passes, self.weight

    def forget_views(self) -> None:
        """Drop cached views of sums."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """The module's."""
        if (
            torch.compiler.is_compiling()
            or not self.fused
            or not torch.is_grad_enabled()
            or self.passes.in_pass != self.unit
            or self.parameters.get("weight") is not self.weight
            or "bias" not in self.parameters
            or type(input) is not torch.Tensor
            or input.dtype != self.weight.dtype
            or input.layout is not torch.strided
            or not self.weight.requires_grad
            or type(self.module) is not torch.nn.Linear
            or not _linear_is_stock()
            or torch.is_autocast_enabled(self.device)
            or torch._C._are_functorch_transforms_active()
            or _is_dead(input)
            or forward_ad._current_level >= 0
        ):
            return type(self.module).forward(self.module, input)
        return _apply(input, self.weight, self.parameters["bias"], self)

    def add(self, node: Any, grad: torch.Tensor, x: torch.Tensor) -> bool:
        """Add grad^T x to the sum; False if the gradient must go to hooks or to the caller of ``torch.autograd.grad``."""
        p = self.weight
        if (
            torch.is_grad_enabled()  # under create_graph
            or not p.requires_grad
            or p._backward_hooks
            or p._post_accumulate_grad_hooks
        ):
            return False
        try:
            accumulates = torch._C._will_engine_execute_node(node)
        except RuntimeError:  # torch.autograd.grad wants the weight's gradient for itself
            return False
        return accumulates and self.accumulation.add_product(self.unit, self.slot, grad, x)


class _NativeLayer(_Layer):
    """The same in C++ where nothing is uncommon; else it does as ``_Layer``."""

    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        assert self.accumulation.native is not None
        self._product = self.accumulation.native.Layer(self, vars(functional))

    def remove(self) -> None:
        super().remove()
        self._product.remove()

    def __getstate__(self) -> dict[str, Any]:  # of a layer that is removed, in a copy of a module whose wrapper holds it
        return {k: v for k, v in vars(self).items() if k != "_product"}

    def forget_views(self) -> None:
        self._product.forget_views()

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if self.fused and not torch.compiler.is_compiling():
            output = self._product.forward(input)
            if output is not None:
                return output
        return super().forward(input)


class _Linear(torch.autograd.Function):
    """``torch.nn.functional.linear``; the backward first lets the layer add the weight's gradient to the sum."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, layer: _Layer) -> torch.Tensor:
        ctx.layer, ctx.version = layer, weight._version
        ctx.save_for_backward(x)
        y = _linear(x, weight, bias)
        return _no_view(y, y.shape) if y._is_view() else y  # autograd forbids in-place changes of views made in here

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (x,), layer, (for_x, for_weight, for_bias, _) = ctx.saved_tensors, ctx.layer, ctx.needs_input_grad
        if not layer.fused:
            raise ValueError(AFTER_DESTROY)
        if layer.passes.in_pass != layer.unit:
            layer.passes.prepare_backward_read(layer.unit)
        if layer.weight._version != ctx.version:  # autograd's error for saved tensors
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                "the weight of a linear layer"
            )
        rows, inputs = grad.reshape(-1, grad.shape[-1]), x.reshape(-1, x.shape[-1])
        gradient = weights = biases = None
        if for_x:
            gradient = rows.mm(layer.weight).view(x.shape)
        if for_weight and not layer.add(ctx.next_functions[1][0], rows, inputs):
            weights = rows.t().mm(inputs)
        if for_bias:
            biases = rows.sum(0)
        return gradient, weights, biases, None


# ``_Linear.apply`` without its preparations for torch.func, which take as long as the rest; ``_Layer.forward`` sees to them
_apply = super(torch.autograd.Function, _Linear).apply
