"""Readers of DeepSpeed's own checkpoints: ZeRO-3's, and universal checkpoints made from ZeRO-3's.

The files are torch pickles. ``torch.load(weights_only=True)`` reads them and allows three classes of DeepSpeed that run no code.
The files are memory-mapped, so reading one parameter reads that parameter's bytes only.
"""

import math
import os
import pickle
import re
import zipfile
from collections.abc import Iterable
from typing import Any

import torch

from deepspeed_cdp.checkpoint.files import load_plain
from deepspeed_cdp.checkpoint.format import COUNTERS, MANIFEST, CheckpointReader, CyclicReader, TensorSpec
from deepspeed_cdp.errors import CheckpointError

_FILE_NAME = re.compile(r"(bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_(model|optim)_states\.pt")
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
    except (LookupError, TypeError, AttributeError, ValueError) as error:
        raise CheckpointError(f"{folder} holds no checkpoint that makes sense ({type(error).__name__}: {error})") from error


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


def _allowed() -> list[Any]:
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum

    def member(kind: Any, name: Any) -> Any:
        """Stands in for ``getattr``, with which Python before 3.11.4 pickles enum members; allows members of one enum only."""
        if kind is not ZeroStageEnum or name not in ZeroStageEnum.__members__:
            raise pickle.UnpicklingError(f"getattr of {kind!r} and {name!r}")
        return ZeroStageEnum[name]

    return [ZeroStageEnum, LossScaler, DynamicLossScaler, (member, "builtins.getattr")]


def _load(path: str, keys: Iterable[str]) -> dict[str, Any]:
    if not os.path.isfile(path):
        raise CheckpointError(f"{path} is missing")
    value = load_plain(path, _allowed())
    lacking = [key for key in keys if not isinstance(value, dict) or key not in value]
    if lacking:
        raise CheckpointError(f"{path} has no {lacking[0]!r}: it is not a file of a ZeRO-3 checkpoint")
    return value


class _DeepSpeedReader(CheckpointReader):
    """The part that ZeRO-3 and universal checkpoints share: the model-state files."""

    def _read_models(self, folder: str, paths: list[str]) -> None:
        """Read the metadata of the model-state files.

        Args:
            paths: of the model-state files, by rank.
        """
        self.folder, self.ranks, self._paths = folder, len(paths), list(paths)
        self._models = [_load(path, _MODEL_KEYS) for path in paths]
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
            lacking += [n for n in first["buffer_names"] if not isinstance(model["module"].get(n), torch.Tensor)]
            if [dict(x) for x in model["param_shapes"]] != [dict(x) for x in first["param_shapes"]]:
                lacking.append("param_shapes")
            if lacking:
                raise CheckpointError(f"{path} does not belong to {paths[0]}: {lacking[0]} differs")
            for name, (shape, _) in self.frozen.items():
                if model["frozen_param_fragments"][name].numel() * len(paths) < math.prod(shape):
                    raise CheckpointError(f"{path} has too little of parameter {name!r}")
        self.buffers = {n: TensorSpec(tuple(first["module"][n].shape), first["module"][n].dtype) for n in first["buffer_names"]}
        dtypes = {t.dtype for n, t in first["module"].items() if n in self.trained and isinstance(t, torch.Tensor)}
        self.dtype = next(iter(dtypes)) if len(dtypes) == 1 else torch.float32
        self.counters = {c: first[c] for c in COUNTERS if isinstance(first.get(c), int)}
        self.client_state = {k: v for k, v in first.items() if k not in _DEEPSPEED_KEYS}
        self.lr_scheduler = first.get("lr_scheduler")

    def _read_groups(self, path: str, optimizer: dict[str, Any]) -> None:
        """Set ``groups``: the optimizer's param groups hold numbers of sub-groups; replace those by parameter names."""
        self.groups = []
        for group in optimizer["param_groups"]:
            if not all(isinstance(i, int) and 0 <= i < len(self._shapes) for i in group["params"]):
                raise CheckpointError(f"{path} has parameter groups that do not fit its model states")
            self.groups.append({**group, "params": [n for i in group["params"] for n in self._shapes[i]]})

    def _read_scaler(self, scaler: Any) -> None:
        from deepspeed_cdp.optim.loss_scale import plain

        self.loss_scale = plain(scaler) if scaler is not None else None

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
        with zipfile.ZipFile(path) as file:
            bad = file.testzip()
    except (OSError, zipfile.BadZipFile) as error:
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
        for path, optim in zip(optims, self._optims):
            self._check_optimizer(path, optim, ranks, sizes)
        self._read_groups(optims[0], self._optims[0]["optimizer_state_dict"])
        self._read_scaler(self._optims[0].get("loss_scaler"))

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
        ranks = _load(any_model, _MODEL_KEYS)["dp_world_size"]
        for kind, paths in found.items():
            if extra := [paths[r] for r in paths if r >= ranks]:
                raise CheckpointError(f"{extra[0]} is of another checkpoint: this one has {ranks} ranks")
            if lacking := [r for r in range(ranks) if r not in paths]:
                prefix = "" if kind == "model" else "[bf16_]"
                raise CheckpointError(f"{folder}/{prefix}zero_pp_rank_{lacking[0]}_mp_rank_00_{kind}_states.pt is missing")
        return [found["model"][r] for r in range(ranks)], [found["optim"][r] for r in range(ranks)]

    @staticmethod
    def _check_optimizer(path: str, optim: dict[str, Any], ranks: int, sizes: list[int]) -> None:
        if optim.get("zero_stage") != 3 or optim.get("ds_zero_partition_groups"):
            raise CheckpointError(
                f"{path} is of ZeRO stage {optim.get('zero_stage')} or has expert groups; only plain ZeRO-3 is read"
            )
        if optim.get("partition_count") != ranks:
            raise CheckpointError(f"{path} is of {optim.get('partition_count')} ranks, and the model states are of {ranks}")
        flat = optim.get("fp32_flat_groups")
        if not isinstance(flat, (list, tuple)) or [t.numel() for t in flat] != sizes:
            raise CheckpointError(
                f"{path} has flat groups of other sizes than its model states say (states offloaded to NVMe are not read)"
            )
        if not isinstance(optim.get("optimizer_state_dict"), dict) or "param_groups" not in optim["optimizer_state_dict"]:
            raise CheckpointError(f"{path} has no state of an optimizer")

    def _cut(self, name: str, flats: list[torch.Tensor]) -> torch.Tensor:
        _, offset, part = self._places[name]
        shape = self.trained[name].shape
        return torch.cat([flat.detach().reshape(-1)[offset : offset + part] for flat in flats])[: math.prod(shape)].view(shape)

    def value(self, name: str) -> torch.Tensor:
        if name in self.frozen:
            return self._frozen(name)
        group = self._places[name][0]
        return self._cut(name, [optim["fp32_flat_groups"][group] for optim in self._optims])

    def state(self, name: str) -> dict[str, Any]:
        group = self._places[name][0]
        states = [optim["optimizer_state_dict"]["state"].get(group, {}) for optim in self._optims]
        size = self._optims[0]["fp32_flat_groups"][group].numel()
        result = {}
        for key, value in states[0].items():
            if isinstance(value, torch.Tensor) and value.dim() and value.numel() == size:
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
        if not isinstance(optim.get("state"), dict) or "param_groups" not in optim:
            raise CheckpointError(f"{path} has no state of an optimizer")
        self._paths.append(path)
        self._read_groups(path, optim)
        self._read_scaler(whole.get("loss_scaler"))
        group = {n: i for i, names in enumerate(self._shapes) for n in names}
        plain = [
            {k: v for k, v in optim["state"].get(i, {}).items() if not isinstance(v, torch.Tensor) or v.numel() == 1}
            for i in range(len(self._shapes))
        ]
        self._plain = {n: plain[i] for n, i in group.items()}
        self._files: dict[str, dict[str, str]] = {}
        for name in self.trained:
            home = os.path.join(folder, "zero", name)
            files = {n[:-3]: os.path.join(home, n) for n in os.listdir(home) if n.endswith(".pt")} if os.path.isdir(home) else {}
            if os.path.basename(name) != name or "fp32" not in files:
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
            return value
        if not isinstance(value, torch.Tensor) or value.numel() != math.prod(shape) or not value.is_floating_point():
            raise CheckpointError(f"{path} does not hold {shape} numbers of parameter {name!r}")
        return value.reshape(shape).clone()

    def value(self, name: str) -> torch.Tensor:
        return self._frozen(name) if name in self.frozen else self._read(name, "fp32")

    def state(self, name: str) -> dict[str, Any]:
        plain = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in self._plain[name].items()}
        return {**plain, **{key: self._read(name, key) for key in self._files[name] if key != "fp32"}}
