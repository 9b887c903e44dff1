"""What all ranks must have alike when an engine is made, as plain data, and the first place where two ranks differ."""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

import torch

from deepspeed_cdp.optim.options import entries, plain, same

Named = dict[str, Any]  # by name of a parameter, module or option, in order

ALIKE = "start every rank with the same config, model and package versions"


def parameters(named: Iterable[tuple[str, torch.nn.Parameter]]) -> Named:
    """Dtype and shape of each parameter; under ZeRO-3's ``Init`` the whole shape."""
    return {n: f"{str(p.dtype).removeprefix('torch.')} {list(getattr(p, 'ds_shape', p.shape))}" for n, p in named}


def trained(named: Iterable[tuple[str, torch.nn.Parameter]]) -> Named:
    """Whether each parameter requires a gradient."""
    return {n: p.requires_grad for n, p in named}


def classes(named: Iterable[tuple[str, torch.nn.Module]]) -> Named:
    """The class of each module."""
    return {n: type(m).__qualname__ for n, m in named}


def class_of(thing: Any) -> str | None:
    return None if thing is None else type(thing).__name__


def optimizer_kind(optimizer: torch.optim.Optimizer | None) -> dict[str, Any]:
    groups = getattr(optimizer, "param_groups", ())
    return {"class of the optimizer": class_of(optimizer), "number of parameter groups": len(groups)}


def groups(optimizer: torch.optim.Optimizer | None, named: Iterable[tuple[str, torch.nn.Parameter]]) -> Named:
    """The optimizer's group of each parameter, and its place in the group."""
    places = {
        p: f"group {g}, place {i}"
        for g, group in enumerate(getattr(optimizer, "param_groups", ()))
        for i, p in enumerate(group["params"])
    }
    return {n: places.get(p, "no group") for n, p in named}


def options(optimizer: torch.optim.Optimizer | None) -> Named:
    """Each plain option of the optimizer's groups."""
    return dict(entries(getattr(optimizer, "param_groups", ())))


def scheduler_state(scheduler: Any) -> Named:
    """The plain attributes of a scheduler. The state dicts of DeepSpeed's schedulers lack their settings."""
    state = {} if scheduler is None else getattr(scheduler, "__dict__", {})
    return {
        key: list(value) if isinstance(value, (list, tuple)) else value
        for key, value in state.items()
        if all(map(plain, value if isinstance(value, (list, tuple)) else [value]))
    }


def digest(named: Mapping[str, Any]) -> dict[str, str]:
    """Of what two ranks exchange in full only if it differs."""
    return {"digest": hashlib.sha256(json.dumps(list(named.items())).encode()).hexdigest()[:16]}


class Difference(NamedTuple):
    """The first key that two ranks have and that differs."""

    key: str
    here: int
    there: int


def first_difference(everyone: Sequence[Mapping[str, Any]], rank: int) -> Difference | None:
    """The same key on all ranks; a rank that differs from another is ``here``.

    Args:
        everyone: by rank; a key that a rank lacks is not compared with that rank.
    """
    for key in dict.fromkeys(key for one in everyone for key in one):
        holders = [r for r, one in enumerate(everyone) if key in one]
        pairs = [
            (a, b)
            for a in sorted(holders, key=lambda r: r != rank)
            for b in holders
            if not same(everyone[a][key], everyone[b][key])
        ]
        if pairs:
            return Difference(key, *pairs[0])
    return None


def sentence(found: Difference, everyone: Sequence[Mapping[str, Any]]) -> str:
    """About a setting."""
    key, a, b = found
    return f"{key} is {everyone[a][key]!r} on rank {a} but {everyone[b][key]!r} on rank {b}; {ALIKE}"


def detailed_sentence(found: Difference, everyone: Sequence[Mapping[str, Any]]) -> str:
    """About the first entry that differs.

    Args:
        everyone: by rank, what the digests of ``found.key`` are of.
    """
    key, a, b = found
    nothing = ("nothing", "nothing")
    pairs = zip_longest(everyone[a].items(), everyone[b].items(), fillvalue=nothing)
    (name, x), (other, y) = next(pair for pair in pairs if pair[0][0] != pair[1][0] or not same(pair[0][1], pair[1][1]))
    if name != other:
        return f"{key}: {name!r} on rank {a} is at the place of {other!r} on rank {b}; {ALIKE}"
    return f"{key}: {name!r} is {x!r} on rank {a} but {y!r} on rank {b}; {ALIKE}"
