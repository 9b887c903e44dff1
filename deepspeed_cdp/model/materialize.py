"""Takes over a model that no rank holds whole: partitioned by ``deepspeed.zero.Init`` or ZeRO-3, left by a destroyed engine
(``Remains``), or on the meta device.

Such parameters become placeholders. Their values are fetched once, and only the owner of their stage keeps them. They are
gathered from the partitions, one parameter at a time, or read from a folder of safetensors files (``cyclic.weights``).
"""

import glob
import json
import os
from collections.abc import Iterator
from typing import Any

import torch
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from safetensors import SafetensorError, safe_open

from deepspeed_cdp.model.placeholders import placeholder
from deepspeed_cdp.model.remains import ZeroParam, strip
from deepspeed_cdp.plan.plan import Plan

INDEX = "model.safetensors.index.json"


class Values:
    """Values by parameter name. Each can be read once, so that no copy stays behind."""

    def __init__(self, ready: dict[str, torch.Tensor], files: dict[str, tuple[str, str]], dtypes: dict[str, torch.dtype]):
        self._ready, self._files, self._dtypes = ready, files, dtypes

    def __getitem__(self, name: str) -> torch.Tensor:
        if name in self._ready:
            return self._ready.pop(name)
        return read(*self._files[name]).to(self._dtypes[name])


class Initial:
    """Finds the values of a model's parameters when the engine takes it over.

    Create it before DeepSpeed casts and moves the model. Call ``make_placeholders`` afterwards, and ``values`` with the plan.
    """

    def __init__(self, module: torch.nn.Module, weights: str | None, device: torch.device):
        """Empty the parameters that this rank does not have, so that moving the module allocates nothing; fill meta buffers.

        Args:
            weights: ``cyclic.weights``.
        Raises:
            ValueError: the values of a parameter or buffer on the meta device cannot be found; ``weights`` is given but nothing
                is on the meta device; or a parameter lost its values when an earlier engine failed.
        """
        self._module = module
        self._parameters: dict[str, ZeroParam] = dict(module.named_parameters())
        for name, p in self._parameters.items():
            if p.numel() > 1 and not any(p.stride()):
                raise ValueError(
                    f"model's parameter {name!r} has no values: an earlier cyclic engine had them, and failed or was destroyed "
                    "in the middle of a step; build the model anew and load a checkpoint"
                )
        self._partitioned = {n for n, p in self._parameters.items() if hasattr(p, "ds_id")}
        self._files = self._find(weights)
        for name in self._files:
            _empty(self._parameters[name], device)
        for name in self._partitioned:
            p = self._parameters[name]
            if p.ds_status == ZeroParamStatus.AVAILABLE:
                p.partition()

    @property
    def elsewhere(self) -> bool:
        """Whether this rank lacks the values of some parameter."""
        return bool(self._partitioned or self._files)

    def make_placeholders(self) -> None:
        """Once dtypes are final: make placeholders of the parameters that this rank does not have."""
        for name in (*self._partitioned, *self._files):
            p = self._parameters[name]
            p.data = placeholder(p, p.ds_shape)

    @torch.no_grad()
    def values(self, plan: Plan, rank: int) -> Values:
        """The values of the parameters that this rank owns; collective."""
        owned = {n for i in plan.v_layout(plan.schedule.owned(rank))[0] for n in (*plan.unit(i).trainable, *plan.unit(i).frozen)}
        ready: dict[str, torch.Tensor] = {}
        for name, p in self._parameters.items():
            dtype = p.dtype
            if name in self._partitioned:
                p.all_gather(param_list=[p])  # one at a time: a rank holds at most one that it does not own
                if name in owned:
                    ready[name] = p.data.to(dtype, copy=True)
                shape = p.ds_shape
                strip(p)
                p.data = torch.empty(0, dtype=dtype, device=p.device)
                p.data = placeholder(p, shape)
            elif name in self._files:
                strip(p)
            elif name in owned:
                ready[name] = p.detach()
        return Values(ready, self._files, {n: self._parameters[n].dtype for n in self._files})

    # ---- the meta device ------------------------------------------------------------------------------------------------
    def _find(self, weights: str | None) -> dict[str, tuple[str, str]]:
        """File and key of each parameter on the meta device; this also fills the meta buffers."""
        named: dict[str, list[str]] = {}
        first = {id(p): n for n, p in self._parameters.items()}
        for name, p in self._module.named_parameters(remove_duplicate=False):
            if p.is_meta and not hasattr(p, "ds_id"):
                named.setdefault(first[id(p)], []).append(name)  # tied parameters may be saved under any of their names
        if weights is None:
            if named:
                raise ValueError(
                    f"model's parameter {next(iter(named))!r} is on the meta device, where it has no values; set "
                    "cyclic.weights to a folder of safetensors files, or build the model on a real device"
                )
            keys = {}
        elif not named:
            raise ValueError(
                f"cyclic.weights is {weights!r}, but no parameter of the model is on the meta device; build the "
                "model under torch.device('meta'), or set it to null"
            )
        else:
            keys = keys_of(weights)
        found = {}
        for name, aliases in named.items():
            key = next((a for a in aliases if a in keys), None)
            if key is None:
                raise ValueError(
                    f"cyclic.weights is {weights!r}, whose files have no {name!r}; give a folder that was saved "
                    f"from this model (it has {', '.join(sorted(keys)[:2])}, ...)"
                )
            found[name] = (keys[key], key)
            with safe_open(keys[key], "pt") as file:
                shape = tuple(file.get_slice(key).get_shape())
            if shape != tuple(self._parameters[name].shape):
                raise ValueError(
                    f"cyclic.weights is {weights!r}, where {key!r} is {shape}, but the model's is "
                    f"{tuple(self._parameters[name].shape)}; give the weights of this model"
                )
        _fill_buffers(self._module, keys)
        return found


def keys_of(folder: str) -> dict[str, str]:
    """The tensors in a folder's safetensors files, as name -> path; only headers are read.

    Raises:
        ValueError: there is no such file, or one is damaged or missing.
    """
    index = os.path.join(folder, INDEX)
    if os.path.isfile(index):
        paths = [os.path.join(folder, name) for name in _indexed(folder, index)]
    else:
        paths = sorted(glob.glob(os.path.join(glob.escape(folder), "*.safetensors")))
    if not paths:
        raise ValueError(f"cyclic.weights is {folder!r}, where there is no *.safetensors file; give a folder that has some")
    keys: dict[str, str] = {}
    for path in paths:
        try:
            with safe_open(path, "pt") as file:
                keys.update(dict.fromkeys(file.keys(), path))
        except (OSError, SafetensorError) as error:
            raise ValueError(
                f"cyclic.weights is {folder!r}, whose file {os.path.basename(path)!r} cannot be read "
                f"({str(error).splitlines()[0]}); download or save it again"
            ) from None
    return keys


def _indexed(folder: str, index: str) -> list[str]:
    """The files that an index names; all must be in its folder."""
    try:
        with open(index, encoding="utf-8") as file:
            names = set(json.load(file)["weight_map"].values())
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(
            f"cyclic.weights is {folder!r}, whose {INDEX} is no index of safetensors files "
            f"({type(error).__name__}); download or save it again"
        ) from None
    for name in names:
        if not isinstance(name, str) or os.path.basename(name) != name or name in ("", ".", "..") or "\0" in name:
            raise ValueError(
                f"cyclic.weights is {folder!r}, whose {INDEX} names the file {ascii(name)[:80]}, which is not in "
                "its folder; download or save it again"
            )
    return sorted(names)


def read(path: str, key: str) -> torch.Tensor:
    """One tensor of a safetensors file, on the CPU."""
    with safe_open(path, "pt") as file:
        return file.get_tensor(key)


def _empty(p: ZeroParam, device: torch.device) -> None:
    """Turn a parameter on the meta device into an empty one on ``device``; it remains the same object."""
    shape = p.shape
    # p.data = ... cannot change the type of device, and torch.utils.swap_tensors refuses tensors with weak references, which
    # DeepSpeed has made; here those stay valid, since the Python object remains
    torch._C._swap_tensor_impl(p, torch.nn.Parameter(torch.empty(0, dtype=p.dtype, device=device), p.requires_grad))
    p.ds_shape, p.ds_status = shape, ZeroParamStatus.NOT_AVAILABLE  # as zero.Init says it: DeepSpeed leaves it alone


def _meta_tensors(module: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module, str]]:
    for path, m in module.named_modules():
        for name, buffer in m._buffers.items():
            if buffer is not None and buffer.is_meta:
                yield f"{path}.{name}".lstrip("."), m, name
        for name, value in vars(m).items():
            if isinstance(value, torch.Tensor) and value.is_meta:
                raise ValueError(
                    f"the tensor {name!r} of module {path!r} is on the meta device and is neither a parameter nor a "
                    "buffer, so nothing can fill it; make it a buffer, or build the model on a real device"
                )


def _fill_buffers(module: torch.nn.Module, keys: dict[str, str]) -> None:
    """Give buffers on the meta device their values: from the files, or else from their module's own initialisation.

    Two initialisations from different contents must agree; otherwise the module does not set the buffer.
    """
    modules = dict(module.named_modules())
    for full, m, name in list(_meta_tensors(module)):
        buffers: dict[str, Any] = m._buffers  # none of these is None
        shape = buffers[name].shape, buffers[name].dtype
        if full in keys:
            buffers[name] = read(keys[full], full).to(shape[1])
            continue
        path = full.rpartition(".")[0]
        seen = []
        for fill in (0, 1):
            buffers[name] = torch.full(shape[0], fill, dtype=shape[1], device="cpu")
            _initialise(modules, path, m)
            seen.append(buffers[name])
        if not torch.equal(*seen):
            raise ValueError(
                f"buffer {full!r} is on the meta device, and neither the files of cyclic.weights nor its module's "
                "own initialisation have its values; make it persistent, or build the model on a real device"
            )


@torch.no_grad()
def _initialise(modules: dict[str, Any], path: str, m: torch.nn.Module) -> None:
    """Initialise a module as Hugging Face (by the closest model above it) or torch does; parameters stay on the meta device."""
    at = path
    while True:
        if hasattr(modules[at], "_init_weights"):
            modules[at]._init_weights(m)
            return
        if not at:
            break
        at = at.rpartition(".")[0]
    for how in ("reset_parameters", "_reset_parameters"):
        if callable(getattr(m, how, None)):
            getattr(m, how)()
            return
