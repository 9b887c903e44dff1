"""The options of an optimizer's groups as a few numbers that ranks compare: the first of them, and a digest of all."""

import hashlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch

from deepspeed_cdp.plan.constants import OPTIONS

_FIRST = ("lr", "weight_decay", "momentum", "betas", "eps")  # learning rates of all groups come first, and so on

Groups = Sequence[Mapping[str, Any]]


def entries(groups: Groups) -> Iterator[tuple[str, Any]]:
    """Each plain option of the groups, such as ("lr of group 0", 0.01). Tensors on GPUs are left out: reading would wait."""
    keys = {key for group in groups for key in group if key != "params"}
    for key in sorted(keys, key=lambda k: (_FIRST.index(k) if k in _FIRST else len(_FIRST), k)):
        for number, group in enumerate(groups):
            value = group.get(key)
            if isinstance(value, torch.Tensor):
                value = value.tolist() if value.device.type == "cpu" else None
            if isinstance(value, (list, tuple)):
                yield from ((f"{key}[{i}] of group {number}", x) for i, x in enumerate(value) if plain(x))
            elif plain(value):
                yield f"{key} of group {number}", value


def plain(value: Any) -> bool:
    """Whether ranks can compare the value."""
    return value is None or isinstance(value, (bool, int, float, str))


def same(a: Any, b: Any) -> bool:
    """Whether two plain values are equal, also inside lists and dicts; nan equals nan."""
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(value, b[key]) for key, value in a.items())
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return a == b or (isinstance(a, float) and isinstance(b, float) and a != a and b != b)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def names(groups: Groups) -> list[str]:
    """Of the numbers of ``numbers``, without padding."""
    return [name for name, value in entries(groups) if _is_number(value)][: OPTIONS - 1]


def numbers(groups: Groups, written: Collection[str] = ()) -> list[float]:
    """The first numbers, padded with zeros, and a digest of all plain options; nan is not compared.

    Args:
        written: keys that the optimizer itself writes in its step, which may depend on the parameters that a rank owns.
    """
    every = list(entries(groups))
    own = [any(name.startswith((f"{key} ", f"{key}[")) for key in written) for name, _ in every]
    first = [float("nan") if mine else float(value) for (_, value), mine in zip(every, own) if _is_number(value)][: OPTIONS - 1]
    digest = hashlib.blake2b(repr(every).encode(), digest_size=6).digest()
    last = float("nan") if any(own) else float(int.from_bytes(digest, "big"))
    return first + [0.0] * (OPTIONS - 1 - len(first)) + [last]


def first_difference(a: Sequence[float], b: Sequence[float]) -> int | None:
    """The place of the first number that differs, nan aside."""
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y and x == x and y == y), None)


def sentence(groups: Groups, place: int, a: tuple[int, float], b: tuple[int, float], step: int) -> str:
    """What differs at ``place``, between (rank, number) and (rank, number).

    Args:
        groups: of this rank's optimizer, for names.
    """
    known = names(groups)
    if place < len(known):
        what, (x, y) = known[place], (repr(a[1]), repr(b[1]))
    else:
        what, (x, y) = "the digest of all options of the parameter groups", (f"{int(a[1]):012x}", f"{int(b[1]):012x}")
    return (
        f"{what} is {x} on rank {a[0]} but {y} on rank {b[0]} in step {step}; give every rank the same optimizer options and "
        "scheduler, and restart from a checkpoint before that step"
    )
