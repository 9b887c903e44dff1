"""Activations and their gradients as messages: a description of a stage's output, sent once per edge, and its bytes."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

_WORDS = 256  # int64 words of a description; as long as DeepSpeed's
_DTYPES = (
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
    torch.float16,
    torch.bfloat16,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.bool,
)


class Item(NamedTuple):
    """One tensor of an output."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    grad: bool  # whether its gradient comes back


class Spec(NamedTuple):
    """A stage's output: a tensor, or a tuple of them."""

    is_tensor: bool
    items: tuple[Item, ...]

    def empty(self, device: torch.device) -> list[Tensor]:
        return [torch.empty(i.shape, dtype=i.dtype, device=device) for i in self.items]


def describe(output: Any) -> Spec:
    """Shapes and dtypes of a stage's output.

    Raises:
        ValueError: it is neither a tensor nor a tuple or list of tensors.
    """
    is_tensor = isinstance(output, Tensor)
    tensors = (output,) if is_tensor else output
    if not isinstance(tensors, (tuple, list)) or not all(isinstance(t, Tensor) for t in tensors):
        raise ValueError(
            f"a pipeline stage returned a {type(output).__name__}; stages hand on a tensor or a tuple of tensors; "
            "change the last layer of the stage"
        )
    return Spec(is_tensor, tuple(Item(t.dtype, tuple(t.shape), t.requires_grad) for t in tensors))


def tensors_of(output: Any) -> list[Tensor]:
    return [output] if isinstance(output, Tensor) else list(output)


def pack(spec: Spec, device: torch.device) -> Tensor:
    """The description as int64 words on the device."""
    words = [int(spec.is_tensor), len(spec.items)]
    for i in spec.items:
        words += [_DTYPES.index(i.dtype), int(i.grad), len(i.shape), *i.shape]
    if len(words) > _WORDS:
        raise ValueError(
            f"a pipeline stage returned {len(spec.items)} tensors, too many to describe in {_WORDS} words; return fewer"
        )
    return torch.tensor(words + [0] * (_WORDS - len(words)), dtype=torch.int64, device=device)


def empty_description(device: torch.device) -> Tensor:
    """Memory that a description is received into."""
    return torch.empty(_WORDS, dtype=torch.int64, device=device)


def unpack(words: Tensor) -> Spec:
    is_tensor, count, *rest = words.tolist()
    items = []
    for _ in range(count):
        dtype, grad, dims, *rest = rest
        items.append(Item(_DTYPES[dtype], tuple(rest[:dims]), bool(grad)))
        rest = rest[dims:]
    return Spec(bool(is_tensor), tuple(items))


def as_bytes(tensor: Tensor) -> Tensor:
    """A contiguous tensor as uint8, 1-D, sharing its memory."""
    return tensor.reshape(-1).view(torch.uint8)


def as_text(spec: Spec) -> str:
    """Dtypes and shapes, for errors."""
    return ", ".join(f"{str(i.dtype).removeprefix('torch.')}{list(i.shape)}" for i in spec.items)
