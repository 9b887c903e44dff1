"""Conversion of a checkpoint, parameter by parameter, to fp32 weights, to ZeRO-3's, the universal or this package's format.

Each ``write_`` function fills a temporary folder and renames it once everything is written.
"""

import json
import math
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from deepspeed_cdp.checkpoint.files import (
    check_replaceable,
    discard_quietly,
    make_working,
    replace_folder,
    save_plain,
    save_tensors,
    write_text,
)
from deepspeed_cdp.checkpoint.format import (
    MANIFEST,
    CheckpointReader,
    CyclicReader,
    TensorSpec,
    manifest_text,
    pack_state,
    plain_options,
)
from deepspeed_cdp.errors import CheckpointError
from deepspeed_cdp.optim.options import same
from deepspeed_cdp.version import __version__

Progress = Callable[[str], None]  # called with the name of each parameter that has been read
DEFAULT_SHARD_BYTES = 5 * 10**9  # bytes per file by default
WEIGHT_FILES = r"model.*\.safetensors(\.index\.json)?"  # names of the files that write_fp32 writes


@contextmanager
def _output_folder(final: str, replace: bool, source: str, only: str = "") -> Iterator[str]:
    """A temporary folder, which is renamed to ``final`` if the block raises nothing, and deleted otherwise.

    Args:
        replace: ``final`` may exist already.
        source: the folder that is being read; ``final`` must not be or contain it.
        only: regular expression of file names; an existing folder with any other file is not replaced.
    Raises:
        CheckpointError: ``final`` must not be replaced.
    """
    output = os.path.realpath(final)
    if os.path.commonpath([os.path.realpath(source), output]) == output:
        raise CheckpointError(f"{final} is or holds {source}, which is being read; choose another folder")
    others = [x for x in os.listdir(final) if not re.fullmatch(only, x)] if only and replace and os.path.isdir(final) else []
    if others:
        raise CheckpointError(
            f"{final} holds {min(others)!r}, which is not what this command writes and would be lost; choose another folder"
        )
    if os.path.exists(final) and not replace and (not os.path.isdir(final) or os.listdir(final)):
        raise CheckpointError(f"{final} exists; choose another folder, or pass --overwrite")
    check_replaceable(final)
    working = make_working(os.path.abspath(final))
    try:
        yield working
        replace_folder(working, os.path.abspath(final))
    finally:
        discard_quietly(working)


# ---- weights ----------------------------------------------------------------------------------------------------------------
def weights(stored: CheckpointReader, exclude_frozen: bool = False) -> dict[str, tuple[TensorSpec, Callable[[], torch.Tensor]]]:
    """The state dict as (spec, function that reads the tensor) by name.

    Floating-point tensors are converted to fp32. Buffers are rank 0's. Tied parameters appear under all their names.
    """

    def exported(of: TensorSpec) -> TensorSpec:
        return TensorSpec(of.shape, torch.float32 if of.dtype.is_floating_point else of.dtype)

    parameters = {**({} if exclude_frozen else stored.frozen), **stored.trained}
    result = {n: (exported(k), lambda n=n, k=k: stored.buffer(n, 0).to(exported(k).dtype)) for n, k in stored.buffers.items()}
    result |= {n: (exported(k), lambda n=n, k=k: stored.value(n).to(exported(k).dtype)) for n, k in parameters.items()}
    return result | {other: result[n] for other, n in stored.shared.items() if n in result}


class LazyTensor:
    """A tensor in a checkpoint, as ``zero_to_fp32`` has them with ``lazy_mode``: ``contiguous()`` reads it."""

    def __init__(self, spec: TensorSpec, read: Callable[[], torch.Tensor]):
        self.shape, self.dtype, self.contiguous = torch.Size(spec.shape), spec.dtype, read


def lazy_weights(folder: str, exclude_frozen: bool = False) -> dict[str, LazyTensor]:
    """The fp32 state dict of this package's checkpoint in ``folder`` (DIR/TAG); tied parameters are one object.

    Raises:
        CheckpointError: it is damaged.
    """
    stored = CyclicReader(folder)
    stored.verify(0, 1, list(stored.trained))
    found = weights(stored, exclude_frozen)
    lazy = {id(entry): LazyTensor(*entry) for entry in found.values()}
    return {name: lazy[id(entry)] for name, entry in found.items()}


def write_fp32(
    stored: CheckpointReader,
    out: str,
    max_bytes: int = DEFAULT_SHARD_BYTES,
    exclude_frozen: bool = False,
    replace: bool = False,
    progress: Progress = lambda name: None,
) -> dict[str, Any]:
    """Write fp32 weights: ``model.safetensors``, or several files and an index if one would exceed ``max_bytes``.

    Tied parameters are written under each name, so a strict ``load_state_dict`` accepts the files. Memory: twice one file.

    Returns:
        files, tensors, bytes: their numbers.
    Raises:
        CheckpointError: the checkpoint cannot be read, or ``out`` must not be replaced.
    """
    shards: list[dict[str, Callable[[], torch.Tensor]]] = [{}]
    used = total = 0
    for name, (spec, read) in weights(stored, exclude_frozen).items():
        size = math.prod(spec.shape) * spec.dtype.itemsize
        if shards[-1] and used + size > max_bytes:
            shards.append({})
            used = 0
        shards[-1][name] = read
        used, total = used + size, total + size
    index: dict[str, str] = {}
    with _output_folder(out, replace, stored.folder, WEIGHT_FILES) as folder:
        for i, shard in enumerate(shards):
            name = "model.safetensors" if len(shards) == 1 else f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
            tensors = {}
            for n, read in shard.items():
                tensors[n] = read()
                progress(n)
            save_tensors(folder, name, tensors, {"format": "pt"})
            index |= dict.fromkeys(shard, name)
        if len(shards) > 1:
            write_text(
                os.path.join(folder, "model.safetensors.index.json"),
                json.dumps({"metadata": {"total_size": total}, "weight_map": index}, indent=2, sort_keys=True) + "\n",
            )
    return {"files": len(shards), "tensors": len(index), "bytes": total}


# ---- this package's own -----------------------------------------------------------------------------------------------------
def write_cyclic(
    stored: CheckpointReader,
    out: str,
    max_bytes: int = DEFAULT_SHARD_BYTES,
    replace: bool = False,
    progress: Progress = lambda name: None,
) -> dict[str, Any]:
    """Write this package's own format, with stage files of about ``max_bytes``.

    Returns:
        files, parameters: their numbers.
    Raises:
        CheckpointError: the checkpoint cannot be read, or ``out`` must not be replaced.
    """
    files: dict[str, Any] = {}
    with _output_folder(out, replace, stored.folder) as folder:
        tensors: dict[str, torch.Tensor] = {}
        trees: dict[str, Any] = {}

        def write_stage() -> None:
            name = f"stage_{sum(n.startswith('stage_') for n in files):03d}.safetensors"
            files[name] = save_tensors(folder, name, tensors, {"state": json.dumps(trees)})
            tensors.clear()
            trees.clear()

        for name in (*stored.trained, *stored.frozen):
            tensors[("param/" if name in stored.trained else "frozen/") + name] = stored.value(name)
            if name in stored.trained and stored.groups is not None:
                trees[name] = {k: pack_state(v, f"state/{name}/{k}", tensors) for k, v in stored.state(name).items()}
            progress(name)
            if sum(t.numel() * t.itemsize for t in tensors.values()) >= max_bytes:
                write_stage()
        if tensors or not files:
            write_stage()
        for rank in range(stored.ranks):
            name = f"buffers_{rank:03d}.safetensors"
            files[name] = save_tensors(folder, name, {n: stored.buffer(n, rank) for n in stored.buffers}, {})
        client = {"client_state": stored.client_state, "lr_scheduler": stored.lr_scheduler}
        if stored.data_sampler is not None:
            client["data_sampler"] = stored.data_sampler
        files["client.pt"] = save_plain(folder, "client.pt", client, "client_state")
        groups = stored.groups or []
        manifest = {
            "deepspeed_cdp": __version__,
            "ranks": stored.ranks,
            "rule": None,
            "stages": None,
            "dtype": str(stored.dtype).removeprefix("torch."),
            "groups": [g["params"] for g in groups],
            "options": [plain_options({k: v for k, v in g.items() if k != "params"}) for g in groups],
            "shared": stored.shared,
            "frozen_left_out": stored.frozen_left_out,
            "counters": stored.counters,
            "loss_scale": stored.loss_scale,
            "files": files,
        }
        write_text(os.path.join(folder, MANIFEST), manifest_text(manifest))
    return {"files": len(files) + 1, "parameters": len(stored.trained) + len(stored.frozen)}


# ---- DeepSpeed's formats ----------------------------------------------------------------------------------------------------
def _optimizer_groups(stored: CheckpointReader) -> list[dict[str, Any]]:
    """The optimizer's param groups with trained parameters only; each trained parameter must be in one."""
    if not stored.groups:
        raise CheckpointError(f"{stored.folder} has no optimizer state, which DeepSpeed's formats need; use to-fp32")
    groups = [{**g, "params": [n for n in g["params"] if n in stored.trained]} for g in stored.groups]
    if outside := set(stored.trained) - {n for g in groups for n in g["params"]}:
        raise CheckpointError(f"parameter {min(outside)!r} of {stored.folder} is in none of the optimizer's groups")
    return [{k: tuple(v) if k == "betas" and isinstance(v, list) else v for k, v in g.items()} for g in groups]


def _flat_states(
    stored: CheckpointReader, names: list[str], progress: Progress
) -> Iterator[tuple[str, dict[str, torch.Tensor], dict[str, Any]]]:
    """Optimizer state for DeepSpeed's flat groups.

    Yields:
        Per parameter: its name; tensors of its shape by key, with the fp32 master under ``fp32``; and all other state.
    Raises:
        CheckpointError: the other state differs between ``names``, or is not one number per key.
    """
    first: tuple[str, dict[str, Any]] | None = None
    for name in names:
        state, shape = stored.state(name), stored.trained[name].shape
        flat = {"fp32": stored.value(name).float()}
        flat |= {k: v for k, v in state.items() if isinstance(v, torch.Tensor) and v.shape == shape and (v.dim() or k != "step")}
        rest = {k: v for k, v in state.items() if k not in flat}
        for key, value in rest.items():
            if isinstance(value, (dict, list, tuple)) or isinstance(value, torch.Tensor) and value.numel() != 1:
                raise CheckpointError(
                    f"state {key!r} of parameter {name!r} has not its shape, and DeepSpeed's formats hold "
                    "flat groups; use to-fp32, or to-cyclic"
                )
        plain = {k: v.item() if isinstance(v, torch.Tensor) else v for k, v in rest.items()}
        first = first or (name, {"keys": sorted(state), **plain})
        if not same(first[1], {"keys": sorted(state), **plain}):
            raise CheckpointError(
                f"the optimizer's state of {name!r} and of {first[0]!r} differ, and DeepSpeed's formats keep "
                f"one for all ({plain} is not {first[1]}); use to-fp32, or to-cyclic"
            )
        yield name, flat, rest
        progress(name)


def _model_states(stored: CheckpointReader, shapes: list[dict[str, tuple]], rank: int, ranks: int) -> dict[str, Any]:
    """The contents of DeepSpeed's model-state file of ``rank``, one of ``ranks``."""

    def part(name: str) -> torch.Tensor:
        value = stored.value(name).reshape(-1)
        size = -(-value.numel() // ranks)
        return torch.cat([value, value.new_zeros(size * ranks - value.numel())])[rank * size : (rank + 1) * size].clone()

    names = (*stored.trained, *stored.frozen, *stored.shared)
    from deepspeed import __version__ as deepspeed_version

    return {
        "module": {
            **{n: torch.empty(0, dtype=stored.dtype) for n in names},
            **{n: stored.buffer(n, rank) for n in stored.buffers},
        },
        "buffer_names": list(stored.buffers),
        "optimizer": None,
        "param_shapes": [{n: torch.Size(s) for n, s in group.items()} for group in shapes],
        "frozen_param_shapes": None if stored.frozen_left_out else {n: torch.Size(k.shape) for n, k in stored.frozen.items()},
        "frozen_param_fragments": None if stored.frozen_left_out else {n: part(n) for n in stored.frozen},
        "shared_params": stored.shared,
        "lr_scheduler": stored.lr_scheduler,
        "random_ltd": None,
        "skipped_steps": stored.counters.get("skipped_steps", 0),
        "global_steps": stored.counters.get("global_steps", 0),
        "global_samples": stored.counters.get("global_samples", 0),
        "dp_world_size": ranks,
        "mp_world_size": 1,
        "ds_config": {},
        "ds_version": deepspeed_version,
        **stored.client_state,
    }


def _optimizer_state(
    ranks: int, state: dict[int, Any], groups: list[dict[str, Any]], members: list[list[int]], loss_scale: dict[str, Any] | None
) -> dict[str, Any]:
    """The part of DeepSpeed's optimizer-state file that both of its formats share.

    Args:
        state: by sub-group; members: numbers of the sub-groups of each of ``groups``.
    """
    from deepspeed.runtime.zero.config import ZeroStageEnum

    from deepspeed_cdp.optim.loss_scale import scaler_of

    scaler = scaler_of(loss_scale)
    return {
        "zero_stage": ZeroStageEnum.weights,
        "loss_scaler": scaler,
        "dynamic_loss_scale": scaler.dynamic,
        "overflow": False,
        "partition_count": ranks,
        "optimizer_state_dict": {"state": state, "param_groups": [{**g, "params": m} for g, m in zip(groups, members)]},
    }


def _sub_groups(
    stored: CheckpointReader, groups: list[dict[str, Any]], ranks: int, size: int
) -> tuple[list[list[str]], list[list[int]]]:
    """Cut param groups into sub-groups as ZeRO-3 does: one ends once a rank's shard has ``size`` elements.

    Returns:
        Parameter names by sub-group, and the numbers of each group's sub-groups.
    """
    subs: list[list[str]] = []
    members: list[list[int]] = []
    for group in groups:
        parts = {n: -(-math.prod(stored.trained[n].shape) // ranks) for n in group["params"]}
        cut: list[list[str]] = [[]] if parts else []
        used = 0
        for name, part in parts.items():
            if used >= size:
                cut.append([])
                used = 0
            cut[-1].append(name)
            used += part
        members.append(list(range(len(subs), len(subs) + len(cut))))
        subs += cut
    return subs, members


def _flat_groups(
    stored: CheckpointReader, subs: list[list[str]], rank: int, ranks: int, progress: Progress
) -> tuple[list[torch.Tensor], dict[int, Any]]:
    """One rank's flat fp32 masters by sub-group, and the optimizer's state by number of the sub-group."""
    flats: list[torch.Tensor] = []
    states: dict[int, Any] = {}
    for i, names in enumerate(subs):
        size = sum(-(-math.prod(stored.trained[n].shape) // ranks) for n in names)
        own: dict[str, torch.Tensor] = {}
        offset, rest = 0, {}
        for _, tensors, others in _flat_states(stored, names, progress):
            rest = others  # the same for all names
            part = -(-tensors["fp32"].numel() // ranks)
            for key, value in tensors.items():
                shard = value.reshape(-1)[rank * part : (rank + 1) * part]  # the last ranks' may be shorter, or empty
                if key not in own:
                    own[key] = torch.zeros(size, dtype=value.dtype)
                own[key][offset : offset + shard.numel()] = shard
            offset += part
        flats.append(own.pop("fp32"))
        if own or rest:
            states[i] = {**{k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in rest.items()}, **own}
    return flats, states


def write_zero3(
    stored: CheckpointReader,
    out: str,
    ranks: int,
    sub_group_size: int = 10**9,
    replace: bool = False,
    progress: Progress = lambda name: None,
) -> dict[str, Any]:
    """Write the checkpoint that stock ZeRO-3 on ``ranks`` ranks loads. Memory: one rank's shards and one parameter.

    Args:
        sub_group_size: ``zero_optimization.sub_group_size``, in elements, of the run that will load the checkpoint.
    Returns:
        ranks, files, parameters: their numbers.
    Raises:
        CheckpointError: the optimizer's state does not fit the format, or ``out`` must not be replaced.
    """
    from deepspeed import __version__ as deepspeed_version

    groups = _optimizer_groups(stored)
    subs, members = _sub_groups(stored, groups, ranks, sub_group_size)
    shapes = [{n: stored.trained[n].shape for n in sub} for sub in subs]
    prefix = "bf16_" if stored.dtype == torch.bfloat16 else ""
    with _output_folder(out, replace, stored.folder) as folder:
        for rank in range(ranks):
            flats, state = _flat_groups(stored, subs, rank, ranks, progress)
            optim = {**_optimizer_state(ranks, state, groups, members, stored.loss_scale), "fp32_flat_groups": flats}
            torch.save(
                {"optimizer_state_dict": optim, "ds_config": {}, "ds_version": deepspeed_version},
                os.path.join(folder, f"{prefix}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"),
            )
            torch.save(
                _model_states(stored, shapes, rank, ranks),
                os.path.join(folder, f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt"),
            )
            del optim, flats, state  # before the next rank's
    return {"ranks": ranks, "files": 2 * ranks, "parameters": len(stored.trained) + len(stored.frozen)}


def write_universal(
    stored: CheckpointReader, out: str, replace: bool = False, progress: Progress = lambda name: None
) -> dict[str, Any]:
    """Write the universal format that ``ds_to_universal.py`` makes from ZeRO-3's checkpoints. Memory: one parameter.

    Returns:
        parameters: their number; warnings: what stock DeepSpeed will not load from it.
    Raises:
        CheckpointError: the optimizer's state or a parameter's name does not fit the format, or ``out`` must not be replaced.
    """
    groups = _optimizer_groups(stored)
    if homeless := [n for n in stored.trained if os.path.basename(n) != n or n in ("", ".", "..") or "\0" in n]:
        raise CheckpointError(
            f"parameter {homeless[0]!r} of {stored.folder} cannot be the name of a folder, which the universal "
            "format has for each; use to-zero3"
        )
    if any("exp_avg" not in stored.state(n) or "exp_avg_sq" not in stored.state(n) for n in list(stored.trained)[:1]):
        raise CheckpointError(
            f"the optimizer's state in {stored.folder} is not Adam's, and the universal format of ZeRO-3 is "
            "for Adam only; use to-zero3"
        )
    subs, members = _sub_groups(stored, groups, 1, sum(math.prod(k.shape) for k in stored.trained.values()) + 1)
    state: dict[int, Any] = {}
    with _output_folder(out, replace, stored.folder) as folder:
        for i, sub in enumerate(subs):
            for name, flat, state[i] in _flat_states(stored, sub, progress):
                home = os.path.join(folder, "zero", name)
                os.makedirs(home)
                for key, value in flat.items():
                    torch.save({"param": value.clone()}, os.path.join(home, f"{key}.pt"))
        optim = _optimizer_state(1, state, groups, members, stored.loss_scale)
        torch.save(
            {**optim, "param_groups": optim["optimizer_state_dict"]["param_groups"]},
            os.path.join(folder, "zero", "optimizer_state.pt"),
        )
        torch.save(
            _model_states(stored, [{n: stored.trained[n].shape for n in sub} for sub in subs], 0, 1),
            os.path.join(folder, "zero_pp_rank_0_mp_rank_00_model_states.pt"),
        )
    options = [{k: v for k, v in g.items() if k != "params"} for g in groups]
    warnings = []
    if any(o != options[0] for o in options):
        warnings.append(
            "the parameter groups have different options, but stock DeepSpeed gives all groups those of the first "
            "when it loads a universal checkpoint of ZeRO-3; use to-zero3"
        )
    if stored.frozen or stored.buffers:
        warnings.append(
            "stock DeepSpeed does not load frozen parameters and buffers from a universal checkpoint of ZeRO-3; use to-zero3"
        )
    return {"parameters": len(stored.trained), "warnings": warnings}
