"""Searches a module's arguments for a tensor, and lists the places of its parameters."""

from typing import Any

import torch
from torch.utils._pytree import tree_flatten


def holds(tree: Any, x: torch.Tensor) -> bool:
    """Whether the object ``x`` is in these arguments; much faster than flattening them if they are simple."""
    if tree is x:
        return True
    if isinstance(tree, (tuple, list)):
        return any(holds(t, x) for t in tree)
    if type(tree) is dict:
        return any(holds(t, x) for t in tree.values())
    if tree is None or isinstance(tree, (torch.Tensor, bool, int, float, str)):
        return False
    return any(leaf is x for leaf in tree_flatten(tree)[0])


def links(module: torch.nn.Module) -> list[tuple[dict[str, Any], str, Any]]:
    """(dict, name, value) for every submodule and parameter: ``dict[name]`` is the attribute that holds it."""
    return [(there, name, x) for m in module.modules() for there in (m._modules, m._parameters) for name, x in there.items()]
