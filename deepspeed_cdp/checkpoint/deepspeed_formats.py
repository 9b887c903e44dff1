"""Readers of DeepSpeed's own checkpoints: ZeRO-3's, and universal checkpoints made from ZeRO-3's.

The files are torch pickles. ``checkpoint/pickles.py`` reads them; three classes of DeepSpeed are built here from plain data. The
files are memory-mapped, so reading one parameter reads that parameter's bytes only. Everything in them is checked against the
other files before any value is read, since a stranger may have written them.
"""

import math
import os
import re
import zipfile
import zlib
from collections.abc import Callable, Iterable
from typing import Any

import torch

from deepspeed_cdp.checkpoint.files import load_archive, load_plain
from deepspeed_cdp.checkpoint.format import COUNTERS, MANIFEST, CheckpointReader, CyclicReader, TensorSpec
from deepspeed_cdp.checkpoint.manifest import is_count, scale_fault
from deepspeed_cdp.checkpoint.pickles import NotPlainError, Unbuilt, open_regular
from deepspeed_cdp.errors import CheckpointError
from deepspeed_cdp.optim.options import same

_FILE_NAME = re.compile(r"(bf16_)?zero_pp_rank_([0-9]+)_mp_rank_([0-9]+)_(model|optim)_states\.pt")
_MODEL_KEYS = ("module", "buffer_names", "param_shapes", "shared_params", "dp_world_size", "global_steps")
# Keys that DeepSpeed writes itself; all others come from client_state.
_DEEPSPEED_KEYS = {
    *_MODEL_KEYS,
    "optimizer",
    "frozen_param_shapes",
    "frozen_param_fragments",
    "lr_scheduler",
    "data_sampler",
    "random_ltd",
    "skipped_steps",
    "global_samples",
    "mp_world_size",
    "ds_config",
    "ds_version",
    "checkpoint_parallel_dimensions",
    "universal_checkpoint_info",
    "num_experts",
    "ds_autoep_layers",
    "autoep_layers",
}


def open_checkpoint(folder: str) -> CheckpointReader:
    """Open the checkpoint in ``folder`` (DIR/TAG), and detect its format: this package's own, ZeRO-3 or universal.

    Raises:
        CheckpointError: the folder holds no readable checkpoint; the message names the file.
    """
    try:
        return _detect(folder)
    except CheckpointError:
        raise
    except (LookupError, TypeError, AttributeError, ValueError, ArithmeticError, RuntimeError) as error:
        what = f"{type(error).__name__}: {ascii(str(error))[1:201]}"
        raise CheckpointError(f"{folder} holds no checkpoint that makes sense ({what})") from error


def _detect(folder: str) -> CheckpointReader:
    names = set(os.listdir(folder)) if os.path.isdir(folder) else set()
    if MANIFEST in names or not names:
        return CyclicReader(folder)  # its error names the missing file
    if os.path.isdir(os.path.join(folder, "zero")):
        return UniversalReader(folder)
    if any(_FILE_NAME.fullmatch(name) for name in names):
        return Zero3Reader(folder)
    if any(name.endswith("_states.pt") for name in names):
        raise CheckpointError(
            f"{folder} is a DeepSpeed checkpoint, but not of ZeRO-3; load its weights "
            "(DeepSpeed's zero_to_fp32 reads them) into the model before deepspeed.initialize()"
        )
    return CyclicReader(folder)


def _allowed() -> dict[str, Callable[..., Any]]:
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum

    def stage(number: Any) -> ZeroStageEnum:
        if type(number) is not int:
            raise NotPlainError("it asks for a ZeroStageEnum of something else than a number")
        return ZeroStageEnum(number)

    def member(kind: Any, name: Any) -> ZeroStageEnum:
        """``getattr``, with which Python before 3.11.4 pickles enum members; allows members of one enum only."""
        if getattr(kind, "name", None) != stage_name or not isinstance(name, str) or name not in ZeroStageEnum.__members__:
            raise NotPlainError(f"it asks for the attribute {ascii(name)[:80]} of a class")
        return ZeroStageEnum[name]

    def scaler(kind: Any) -> Callable[..., Unbuilt]:
        def build(state: Any) -> Any:
            if not isinstance(state, dict) or not all(
                isinstance(k, str) and (v is None or isinstance(v, (bool, int, float, str, torch.dtype)))
                for k, v in state.items()
            ):
                raise NotPlainError("it asks for a loss scaler of something else than numbers")
            result = kind.__new__(kind)
            result.__dict__.update(state)
            return result

        return lambda: Unbuilt(build)

    stage_name = f"{ZeroStageEnum.__module__}.{ZeroStageEnum.__qualname__}"
    scalers = {f"{kind.__module__}.{kind.__qualname__}": scaler(kind) for kind in (LossScaler, DynamicLossScaler)}
    return {stage_name: stage, "builtins.getattr": member, **scalers}


def _load(path: str, keys: Iterable[str]) -> dict[str, Any]:
    if not os.path.lexists(path):
        raise CheckpointError(f"{path} is missing")
    value, written = load_archive(path, _allowed())
    lacking = [key for key in keys if not isinstance(value, dict) or key not in value]
    if lacking:
        raise CheckpointError(f"{path} has no {lacking[0]!r}: it is not a file of a ZeRO-3 checkpoint")
    then, now = _FILE_NAME.fullmatch(f"{written}.pt"), _FILE_NAME.fullmatch(os.path.basename(path))
    if then and now and then.groups()[1:] != now.groups()[1:]:
        raise CheckpointError(f"{path} was written as {written}.pt; give the files their own names back")
    return value


def _check_model(path: str, model: dict[str, Any]) -> None:
    """Raise CheckpointError unless a model-state file has the types that DeepSpeed writes."""

    def names(value: Any) -> bool:
        return isinstance(value, (list, tuple)) and all(isinstance(n, str) for n in value)

    def shapes(value: Any) -> bool:
        return isinstance(value, dict) and names(list(value)) and all(map(shape, value.values()))

    def shape(value: Any) -> bool:
        return isinstance(value, (list, tuple)) and all(map(is_count, value)) and math.prod(value) < 2**62

    def group_shapes(value: Any) -> bool:
        return isinstance(value, list) and all(map(shapes, value)) and _distinct([n for group in value for n in group])

    def tensors(value: Any) -> bool:
        return isinstance(value, dict) and names(list(value)) and all(isinstance(t, torch.Tensor) for t in value.values())

    shared, frozen = model["shared_params"], model.get("frozen_param_shapes")
    parts = model.get("frozen_param_fragments")
    for key, good in {
        "module": isinstance(model["module"], dict),
        "buffer_names": names(model["buffer_names"]) and all(n in model["module"] for n in model["buffer_names"]),
        "param_shapes": group_shapes(model["param_shapes"] or []),
        "shared_params": not shared or names([x for pair in dict(shared).items() for x in pair]),
        "dp_world_size": is_count(model["dp_world_size"]),
        "frozen_param_shapes": frozen is None or shapes(frozen),
        "frozen_param_fragments": not frozen or tensors(parts) and set(frozen) <= set(parts or ()),
        **{c: model.get(c) is None or is_count(model[c]) for c in COUNTERS},
    }.items():
        if not good:
            raise CheckpointError(f"{path} has a {key} that ZeRO-3 never writes; save the checkpoint again")


def _distinct(names: list[str]) -> bool:
    return len(set(names)) == len(names)


def _number(value: Any) -> Any:
    """A number or one-element tensor as a number; None: it is neither."""
    value = value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value
    return value if isinstance(value, (bool, int, float)) else None


def _spec_of(value: Any) -> TensorSpec | None:
    return TensorSpec(tuple(value.shape), value.dtype) if isinstance(value, torch.Tensor) else None


class _DeepSpeedReader(CheckpointReader):
    """The part that ZeRO-3 and universal checkpoints share: the model-state files."""

    def _read_models(self, folder: str, paths: list[str]) -> None:
        """Read the metadata of the model-state files.

        Args:
            paths: of the model-state files, by rank.
        """
        self.folder, self.ranks, self._paths = folder, len(paths), list(paths)
        self._models = [_load(path, _MODEL_KEYS) for path in paths]
        for path, model in zip(paths, self._models):
            _check_model(path, model)
        first = self._models[0]
        if first.get("ds_autoep_layers") or first.get("autoep_layers") or first.get("num_experts"):
            raise CheckpointError(f"{paths[0]} holds expert-parallel layers, which are not read; keep experts whole")
        self._shapes = [{n: tuple(s) for n, s in group.items()} for group in first["param_shapes"] or []]  # by sub-group
        self.trained = {n: TensorSpec(s, torch.float32) for group in self._shapes for n, s in group.items()}
        self.shared, fragments = dict(first["shared_params"] or {}), first.get("frozen_param_fragments") or {}
        self.frozen_left_out = first.get("frozen_param_shapes") is None
        self.frozen = {n: TensorSpec(tuple(s), fragments[n].dtype) for n, s in (first.get("frozen_param_shapes") or {}).items()}
        for path, model in zip(paths, self._models):
            lacking = [n for n in self.frozen if not isinstance((model.get("frozen_param_fragments") or {}).get(n), torch.Tensor)]
            lacking += [n for n in first["buffer_names"] if _spec_of(model["module"].get(n)) != _spec_of(first["module"][n])]
            lacking += [c for c in COUNTERS if model.get(c) != first.get(c)]
            if [dict(x) for x in model["param_shapes"]] != [dict(x) for x in first["param_shapes"]]:
                lacking.append("param_shapes")
            if lacking:
                raise CheckpointError(f"{path} does not belong to {paths[0]}: {lacking[0]} differs")
            for name, (shape, _) in self.frozen.items():
                part = model["frozen_param_fragments"][name]
                if part.numel() * len(paths) < math.prod(shape) or part.dtype != self.frozen[name].dtype:
                    raise CheckpointError(f"{path} does not have its part of parameter {name!r}")
        self.buffers = {n: TensorSpec(tuple(first["module"][n].shape), first["module"][n].dtype) for n in first["buffer_names"]}
        if not _distinct([*self.trained, *self.frozen]):
            raise CheckpointError(f"{paths[0]} has a parameter that is both trained and frozen")
        dtypes = {t.dtype for n, t in first["module"].items() if n in self.trained and isinstance(t, torch.Tensor)}
        self.dtype = next(iter(dtypes)) if len(dtypes) == 1 else torch.float32
        self.counters = {c: first[c] for c in COUNTERS if first.get(c) is not None}
        self.client_state = {k: v for k, v in first.items() if k not in _DEEPSPEED_KEYS}
        self.lr_scheduler, self.data_sampler = first.get("lr_scheduler"), first.get("data_sampler")

    def _read_groups(self, path: str, optimizer: dict[str, Any]) -> None:
        """Set ``groups``: the optimizer's param groups hold numbers of sub-groups; replace those by parameter names."""
        self.groups = named = []
        groups = optimizer["param_groups"]
        for group in groups if isinstance(groups, list) else [None]:
            members = group.get("params") if isinstance(group, dict) else None
            if (
                group is None
                or not isinstance(members, list)
                or not all(type(i) is int and 0 <= i < len(self._shapes) for i in members)
            ):
                raise CheckpointError(f"{path} has parameter groups that do not fit its model states")
            named.append({**group, "params": [n for i in members for n in self._shapes[i]]})
        if not _distinct([n for group in named for n in group["params"]]):
            raise CheckpointError(f"{path} has a parameter in two parameter groups")

    def _read_scaler(self, path: str, scaler: Any) -> None:
        from deepspeed.runtime.fp16.loss_scaler import LossScalerBase

        from deepspeed_cdp.optim.loss_scale import plain

        self.loss_scale = plain(scaler) if isinstance(scaler, LossScalerBase) else None
        if scaler is not None and (self.loss_scale is None or scale_fault(self.loss_scale)):
            raise CheckpointError(f"{path} has a loss scaler that DeepSpeed never writes; save the checkpoint again")

    def verify(self, rank: int, ranks: int, names: Iterable[str]) -> None:
        """Check the CRCs that the zip format keeps per tensor; DeepSpeed saves no other checksums."""
        for i, path in enumerate(sorted(self._paths)):
            if i % ranks == rank:
                _check_crc(path)

    def buffer(self, name: str, rank: int) -> torch.Tensor:
        return self._models[rank % self.ranks]["module"][name].clone()

    def _frozen(self, name: str) -> torch.Tensor:
        shape = self.frozen[name].shape
        parts = [model["frozen_param_fragments"][name].reshape(-1) for model in self._models]
        return torch.cat(parts)[: math.prod(shape)].view(shape)


def _check_crc(path: str) -> None:
    try:
        with open_regular(path) as file, zipfile.ZipFile(file) as archive:
            bad = archive.testzip()
    except (OSError, ValueError, NotImplementedError, EOFError, RuntimeError, zipfile.BadZipFile, zlib.error) as error:
        raise CheckpointError(f"{path} is damaged ({error})") from error
    if bad:
        raise CheckpointError(f"{path} is damaged: the CRC of its part {bad!r} is wrong")


class Zero3Reader(_DeepSpeedReader):
    """A checkpoint of stock ZeRO-3. A parameter's shard has the same offset and size in the flat groups of every rank."""

    format = "zero3"

    def __init__(self, folder: str):
        """
        Raises:
            CheckpointError: a file is missing or damaged, or belongs to another checkpoint.
        """
        models, optims = self._find_files(folder)
        ranks = len(models)
        self._read_models(folder, models)
        self._paths += optims
        self._optims = [_load(path, ("optimizer_state_dict",))["optimizer_state_dict"] for path in optims]
        self._places: dict[str, tuple[int, int, int]] = {}  # name -> sub-group, offset and number of elements of a rank's shard
        sizes = []
        for i, group in enumerate(self._shapes):
            offset = 0
            for name, shape in group.items():
                part = -(-math.prod(shape) // ranks)
                self._places[name] = (i, offset, part)
                offset += part
            sizes.append(offset)
        for path, model in zip(models, self._models):
            if model["dp_world_size"] != ranks:
                raise CheckpointError(f"{path} is of {model['dp_world_size']} ranks, and there are files of {ranks}")
        for path, optim in zip(optims, self._optims):
            self._check_optimizer(path, optim, ranks, sizes)
            self._check_belongs(path, optim, optims[0])
        self._read_groups(optims[0], self._optims[0]["optimizer_state_dict"])
        self._read_scaler(optims[0], self._optims[0].get("loss_scaler"))

    @staticmethod
    def _find_files(folder: str) -> tuple[list[str], list[str]]:
        """Paths of the model-state and of the optimizer-state files, by rank."""
        found: dict[str, dict[int, str]] = {"model": {}, "optim": {}}
        for name in sorted(os.listdir(folder)):
            if match := _FILE_NAME.fullmatch(name):
                _, rank, slice_, kind = match.groups()
                path = os.path.join(folder, name)
                if int(slice_):
                    raise CheckpointError(f"{path} is of tensor parallel training, which is not read")
                if int(rank) in found[kind]:
                    raise CheckpointError(f"{path} and {found[kind][int(rank)]} are of two checkpoints in one folder; remove one")
                found[kind][int(rank)] = path
        any_model = next(iter(found["model"].values()), None)
        if any_model is None:
            raise CheckpointError(f"{os.path.join(folder, 'zero_pp_rank_0_mp_rank_00_model_states.pt')} is missing")
        first = _load(any_model, _MODEL_KEYS)
        _check_model(any_model, first)
        ranks = first["dp_world_size"]  # what a file says: nothing is as large as that before the files are counted
        for kind, paths in found.items():
            if extra := [paths[r] for r in paths if r >= ranks]:
                raise CheckpointError(f"{extra[0]} is of another checkpoint: this one has {ranks} ranks")
            lacking = next((r for r in range(ranks) if r not in paths), None)
            if lacking is not None:
                prefix = "" if kind == "model" else "[bf16_]"
                raise CheckpointError(f"{folder}/{prefix}zero_pp_rank_{lacking}_mp_rank_00_{kind}_states.pt is missing")
        return [found["model"][r] for r in range(ranks)], [found["optim"][r] for r in range(ranks)]

    @staticmethod
    def _check_optimizer(path: str, optim: dict[str, Any], ranks: int, sizes: list[int]) -> None:
        if not isinstance(optim, dict):
            raise CheckpointError(f"{path} has no state of an optimizer")
        if optim.get("zero_stage") != 3 or optim.get("ds_zero_partition_groups"):
            raise CheckpointError(
                f"{path} is of ZeRO stage {ascii(optim.get('zero_stage'))[:80]} or has expert groups; only plain ZeRO-3 is read"
            )
        if not is_count(count := optim.get("partition_count")) or count != ranks:
            raise CheckpointError(f"{path} is of {ascii(count)[:80]} ranks, and the model states are of {ranks}")
        flat = optim.get("fp32_flat_groups")
        flat = flat if isinstance(flat, (list, tuple)) else [None]
        good = all(isinstance(t, torch.Tensor) and t.is_floating_point() for t in flat)
        if not good or [t.numel() for t in flat] != sizes:
            raise CheckpointError(
                f"{path} has flat groups of other sizes than its model states say (states offloaded to NVMe are not read)"
            )
        own = optim.get("optimizer_state_dict")
        states = own.get("state") if isinstance(own, dict) and "param_groups" in own else None
        if not isinstance(states, dict) or not all(isinstance(state, dict) for state in states.values()):
            raise CheckpointError(f"{path} has no state of an optimizer")

    def _check_belongs(self, path: str, optim: dict[str, Any], first_path: str) -> None:
        """Compare with the first rank's file all that is equal on all ranks: shards' sizes, counts, options of groups."""
        own, first = optim["optimizer_state_dict"], self._optims[0]["optimizer_state_dict"]

        def kinds(states: dict[Any, Any]) -> Any:
            return {
                i: {k: v.numel() if self._is_shard(v, i) else _number(v) for k, v in state.items()} for i, state in states.items()
            }

        def options(groups: Any) -> Any:
            return [{k: _number(v) for k, v in group.items()} for group in groups]

        for what, mine, theirs in (
            ("state", kinds(own["state"]), kinds(first["state"])),
            ("param_groups", options(own["param_groups"]), options(first["param_groups"])),
        ):
            if not same(mine, theirs):
                raise CheckpointError(f"{path} does not belong to {first_path}: the optimizer's {what} differs")

    def _is_shard(self, value: Any, group: Any) -> bool:
        """Whether a value of the optimizer's state has an element for each of a sub-group's own."""
        flats = self._optims[0]["fp32_flat_groups"]
        known = type(group) is int and 0 <= group < len(flats)
        return isinstance(value, torch.Tensor) and value.dim() > 0 and known and value.numel() == flats[group].numel()

    def _cut(self, name: str, flats: list[torch.Tensor]) -> torch.Tensor:
        _, offset, part = self._places[name]
        shape = self.trained[name].shape
        return torch.cat([flat.detach().reshape(-1)[offset : offset + part] for flat in flats])[: math.prod(shape)].view(shape)

    def value(self, name: str) -> torch.Tensor:
        if name in self.frozen:
            return self._frozen(name)
        group = self._places[name][0]
        return self._cut(name, [optim["fp32_flat_groups"][group] for optim in self._optims]).float()

    def state(self, name: str) -> dict[str, Any]:
        group = self._places[name][0]
        states = [optim["optimizer_state_dict"]["state"].get(group, {}) for optim in self._optims]
        result = {}
        for key, value in states[0].items():
            if self._is_shard(value, group):
                result[key] = self._cut(name, [state[key] for state in states])
            else:
                result[key] = value.clone() if isinstance(value, torch.Tensor) else value
        return result


class UniversalReader(_DeepSpeedReader):
    """A universal checkpoint that DeepSpeed's ``ds_to_universal.py`` made from ZeRO-3's: one folder per trained parameter."""

    format = "universal"

    def __init__(self, folder: str):
        """
        Raises:
            CheckpointError: a file is missing or damaged, or belongs to another checkpoint.
        """
        names = sorted((int(m[2]), n) for n in os.listdir(folder) if (m := _FILE_NAME.fullmatch(n)) and m[4] == "model")
        if not names:
            raise CheckpointError(
                f"{os.path.join(folder, 'zero_pp_rank_0_mp_rank_00_model_states.pt')} is missing (of universal "
                "checkpoints only those made from ZeRO-3 are read)"
            )
        self._read_models(folder, [os.path.join(folder, n) for _, n in names])
        path = os.path.join(folder, "zero", "optimizer_state.pt")
        whole = _load(path, ("optimizer_state_dict",))
        optim = whole["optimizer_state_dict"]
        state = optim.get("state") if isinstance(optim, dict) and "param_groups" in optim else None
        if not isinstance(state, dict) or not all(isinstance(s, dict) for s in state.values()):
            raise CheckpointError(f"{path} has no state of an optimizer")
        self._paths.append(path)
        self._read_groups(path, optim)
        self._read_scaler(path, whole.get("loss_scaler"))
        group = {n: i for i, names in enumerate(self._shapes) for n in names}
        plain = [
            {k: v for k, v in state.get(i, {}).items() if not isinstance(v, torch.Tensor) or v.numel() == 1}
            for i in range(len(self._shapes))
        ]
        self._plain = {n: plain[i] for n, i in group.items()}
        self._files: dict[str, dict[str, str]] = {}
        for name in self.trained:
            home = os.path.join(folder, "zero", name)
            if os.path.basename(name) != name or name in ("", ".", "..") or "\0" in name:
                raise CheckpointError(f"{path} has a parameter {name!r}, which is not the name of a folder")
            files = {n[:-3]: os.path.join(home, n) for n in os.listdir(home) if n.endswith(".pt")} if os.path.isdir(home) else {}
            if "fp32" not in files:
                raise CheckpointError(f"{os.path.join(home, 'fp32.pt')} is missing")
            self._files[name] = files

    def verify(self, rank: int, ranks: int, names: Iterable[str]) -> None:
        super().verify(rank, ranks, names)
        for name in names:
            for path in self._files.get(name, {}).values():
                _check_crc(path)

    def _read(self, name: str, key: str) -> Any:
        path = self._files[name][key]
        value = load_plain(path)
        value = value.get("param") if isinstance(value, dict) else value
        shape = self.trained[name].shape
        if key == "step":
            if _number(value) is None:
                raise CheckpointError(f"{path} does not hold a number of steps")
            return value
        if not isinstance(value, torch.Tensor) or value.numel() != math.prod(shape) or not value.is_floating_point():
            raise CheckpointError(f"{path} does not hold {shape} numbers of parameter {name!r}")
        value = value.detach().reshape(shape)
        return value.float() if key == "fp32" and value.dtype != torch.float32 else value.clone()

    def value(self, name: str) -> torch.Tensor:
        return self._frozen(name) if name in self.frozen else self._read(name, "fp32")

    def state(self, name: str) -> dict[str, Any]:
        plain = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in self._plain[name].items()}
        return {**plain, **{key: self._read(name, key) for key in self._files[name] if key != "fp32"}}
