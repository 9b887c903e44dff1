"""``CheckpointReader`` reads whole tensors by parameter name, from any format; ``CyclicReader`` reads this package's own."""

import json
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from safetensors import safe_open

from deepspeed_cdp.checkpoint.files import load_plain, sha256_of_file, sha256_of_json
from deepspeed_cdp.checkpoint.manifest import COUNTERS, check_manifest, dtype_of
from deepspeed_cdp.errors import CheckpointError

__all__ = [
    "COUNTERS",
    "MANIFEST",
    "CheckpointReader",
    "CyclicReader",
    "TensorSpec",
    "manifest_text",
    "pack_state",
    "plain_options",
    "unpack_state",
]
MANIFEST, FORMAT = "cyclic.json", 1


class TensorSpec(NamedTuple):
    """A tensor's shape and dtype, known before the tensor is read."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class CheckpointReader(ABC):
    """One checkpoint, open for reading. Opening reads the metadata; each tensor is read on demand, onto the CPU.

    Attributes:
        format: the format's name.
        folder: the checkpoint's folder, DIR/TAG; tag: set by the command line.
        trained: specs of trained parameters by name, in the order of the optimizer's groups; their values are fp32.
        frozen: specs of frozen parameters by name.
        buffers: specs of buffers by name.
        shared: further names of tied parameters, each with the name that holds the value.
        frozen_left_out: the checkpoint was saved with ``exclude_frozen_parameters``.
        groups: the optimizer's param groups, with parameter names under ``params``; None: no optimizer state.
        counters: those of ``COUNTERS`` that were saved.
        client_state: as given to ``save_checkpoint``; set by ``verify`` in this package's own format.
        lr_scheduler: the scheduler's state dict, or None; set by ``verify`` in this package's own format.
        data_sampler: state of the curriculum's sampler, or None; set by ``verify`` in this package's own format.
        ranks: number of ranks that saved their buffers.
        dtype: dtype of the model's parameters in training.
        loss_scale: ``LossScale.state_dict()`` of an fp16 run; None if unknown.
    """

    format: str
    folder: str
    tag: str
    trained: dict[str, TensorSpec]
    frozen: dict[str, TensorSpec]
    buffers: dict[str, TensorSpec]
    shared: dict[str, str]
    frozen_left_out: bool
    groups: list[dict[str, Any]] | None
    counters: dict[str, int]
    client_state: dict[str, Any]
    lr_scheduler: Any
    ranks: int
    dtype: torch.dtype
    loss_scale: dict[str, Any] | None = None
    data_sampler: dict[str, Any] | None = None

    def __enter__(self) -> "CheckpointReader":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def close(self) -> None:  # noqa: B027
        """Close the open files, if any."""

    def name_of(self, name: str) -> str | None:
        """The name under which parameter ``name`` is stored; None: the checkpoint does not have it."""
        name = name if name in self.trained or name in self.frozen else self.shared.get(name, name)
        return name if name in self.trained or name in self.frozen else None

    @abstractmethod
    def verify(self, rank: int, ranks: int, names: Iterable[str]) -> None:
        """Check the contents of files: every ``ranks``-th one, and all files that hold parameters ``names``.

        Raises:
            CheckpointError: a file is damaged.
        """

    @abstractmethod
    def value(self, name: str) -> torch.Tensor:
        """A whole parameter: fp32 if trained, in its own dtype if frozen."""

    @abstractmethod
    def state(self, name: str) -> dict[str, Any]:
        """The optimizer's state of a trained parameter, as in ``optimizer.state[p]``; {} if none was saved."""

    @abstractmethod
    def buffer(self, name: str, rank: int) -> torch.Tensor:
        """A buffer, as rank ``rank % ranks`` saved it."""

    def scalars(self, stages: Any) -> torch.Tensor | None:
        """Norms and losses of the last steps (float64, 1-D); None unless they were saved with exactly these ``stages``."""
        return None


# ---- optimizer state as tensors and JSON --------------------------------------------------------------------------------------
def pack_state(value: Any, path: str, tensors: dict[str, torch.Tensor]) -> Any:
    """Convert optimizer state to a JSON tree that refers to its tensors by name.

    Args:
        path: prefix of the tensors' names.
        tensors: receives the tensors.
    Raises:
        ValueError: ``value`` holds anything but tensors, numbers, strings, None, lists, tuples and dicts of these.
    """
    if isinstance(value, torch.Tensor):
        tensors[path] = value.detach()
        return {"tensor": path}
    if isinstance(value, dict):
        return {"dict": [[k, pack_state(v, f"{path}/{k}", tensors)] for k, v in value.items()]}
    if isinstance(value, (list, tuple)):
        return {
            "tuple" if isinstance(value, tuple) else "list": [pack_state(v, f"{path}/{i}", tensors) for i, v in enumerate(value)]
        }
    if value is None or isinstance(value, (bool, int, float, str)):
        return {"plain": value}
    raise ValueError(
        f"the optimizer's state {path!r} is a {type(value).__name__}; only tensors, numbers, strings and containers "
        "of these are saved; use an optimizer that keeps such state"
    )


def unpack_state(tree: Any, read: Any) -> Any:
    """The inverse of ``pack_state``.

    Args:
        read: (name) -> tensor.
    Raises:
        ValueError, TypeError: ``tree`` does not come from ``pack_state``.
    """
    pairs: list[tuple[Any, Any]] = list(tree.items()) if isinstance(tree, dict) else [(None, None)]
    ((kind, content),) = pairs
    if kind == "tensor":
        return read(content)
    if kind == "dict":
        return {k: unpack_state(v, read) for k, v in content}
    if kind in ("list", "tuple"):
        return (tuple if kind == "tuple" else list)(unpack_state(v, read) for v in content)
    if kind != "plain" or isinstance(content, (dict, list)):
        raise ValueError(f"{ascii(tree)[:80]} is no state of an optimizer")
    return content


def plain_options(group: dict[str, Any]) -> dict[str, Any]:
    """The options of a param group that JSON can represent. Others, such as functions, are left out: the script sets them."""
    result = {}
    for key, value in group.items():
        value = value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value
        try:
            json.dumps(value)
        except (TypeError, ValueError):
            continue
        result[key] = value
    return result


# ---- this package's own format ------------------------------------------------------------------------------------------------
def manifest_text(manifest: dict[str, Any]) -> str:
    """The text of ``cyclic.json``: the manifest, its format number and its SHA-256."""
    manifest = json.loads(json.dumps({"format": FORMAT, **manifest}))
    return json.dumps({**manifest, "sha256": sha256_of_json(manifest)}, indent=1)


class CyclicReader(CheckpointReader):
    """A checkpoint that the cyclic engine saved."""

    format = "cyclic"

    def __init__(self, folder: str):
        """
        Raises:
            CheckpointError: the manifest is missing or damaged, or a file is missing, outside the folder, or of another size.
        """
        self.folder = folder
        self._stack = ExitStack()
        self._opened: dict[str, Any] = {}
        self._manifest = manifest = self._read_manifest()
        self._files: dict[str, dict] = manifest["files"]
        for name, entry in self._files.items():
            path = os.path.join(folder, name)
            if not os.path.isfile(path):
                raise CheckpointError(f"{path} is missing")
            if os.path.getsize(path) != entry["nbytes"]:
                raise CheckpointError(
                    f"{path} is damaged: it has {os.path.getsize(path)} bytes and the manifest says {entry['nbytes']}"
                )
        self._file_of = {
            key: name for name, entry in self._files.items() if name.startswith("stage_") for key in entry["tensors"]
        }
        specs = {key: _spec(self._files[name]["tensors"][key]) for key, name in self._file_of.items()}
        order = [n for group in manifest["groups"] for n in group]
        known = {key[len("param/") :]: spec for key, spec in specs.items() if key.startswith("param/")}
        self.trained = {n: known[n] for n in (*order, *known) if n in known}
        self.frozen = {key[len("frozen/") :]: spec for key, spec in specs.items() if key.startswith("frozen/")}
        self._buffer_files = sorted(name for name in self._files if name.startswith("buffers_"))
        # In a pipeline, the stages' buffer files hold different buffers.
        self.buffers = {k: _spec(v) for name in self._buffer_files for k, v in self._files[name]["tensors"].items()}
        self.pipeline: dict[str, Any] = manifest.get("pipeline", {})
        self.shared, self.frozen_left_out = manifest["shared"], manifest["frozen_left_out"]
        self.counters, self.ranks = manifest["counters"], len(self._buffer_files)
        self.dtype, self.loss_scale = getattr(torch, manifest["dtype"]), manifest.get("loss_scale")
        self.groups = [{**options, "params": list(names)} for options, names in zip(manifest["options"], manifest["groups"])]
        self._trees: dict[str, Any] = {}

    def _read_manifest(self) -> dict[str, Any]:
        path = os.path.join(self.folder, MANIFEST)
        if not os.path.isfile(path):
            raise CheckpointError(f"{path} is missing: not a finished checkpoint of the cyclic engine")
        try:
            with open(path, encoding="utf-8") as file:
                manifest = json.load(file)
            whole = manifest.pop("sha256") == sha256_of_json(manifest)
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):  # not JSON, not UTF-8, or not an object
            whole = False
        if not whole:
            raise CheckpointError(f"{path} is damaged: it is not what was written")
        if manifest.get("format") != FORMAT:
            raise CheckpointError(
                f"{path} has format {manifest.get('format')!r} and this version reads {FORMAT}; load it with "
                f"deepspeed_cdp {manifest.get('deepspeed_cdp')}"
            )
        check_manifest(manifest, path)
        return manifest

    def close(self) -> None:
        self._stack.close()
        self._opened.clear()

    def verify(self, rank: int, ranks: int, names: Iterable[str]) -> None:
        read = {self._file_of[key] for n in names for key in (f"param/{n}", f"frozen/{n}") if key in self._file_of}
        read |= {self._buffer_file(rank), "client.pt"}
        for i, name in enumerate(sorted(self._files)):
            path = os.path.join(self.folder, name)
            if (name in read or i % ranks == rank) and sha256_of_file(path) != self._files[name]["sha256"]:
                raise CheckpointError(f"{path} is damaged: its SHA-256 differs from the manifest's")
        path = os.path.join(self.folder, "client.pt")
        client = load_plain(path)
        if not (isinstance(client, dict) and isinstance(client.get("client_state"), dict) and "lr_scheduler" in client):
            raise CheckpointError(f"{path} has no client_state and lr_scheduler: it is not what save_checkpoint writes")
        self.client_state, self.lr_scheduler = client["client_state"], client["lr_scheduler"]
        self.data_sampler = client.get("data_sampler")

    def _buffer_file(self, rank: int) -> str:
        return self._buffer_files[rank % len(self._buffer_files)]

    def _open(self, name: str) -> Any:
        """An open safetensors file; its header agrees with the manifest."""
        if name not in self._opened:
            path = os.path.join(self.folder, name)
            try:
                file = self._stack.enter_context(safe_open(path, "pt"))
                slices = {key: file.get_slice(key) for key in file.keys()}
                found = {key: (tuple(x.get_shape()), _SAFETENSORS.get(x.get_dtype())) for key, x in slices.items()}
            except Exception as error:
                raise CheckpointError(f"{path} is damaged ({error})") from error
            if found != {key: _spec(entry) for key, entry in self._files[name]["tensors"].items()}:
                raise CheckpointError(f"{path} does not hold the tensors that the manifest says")
            self._opened[name] = file
        return self._opened[name]

    def _tensor(self, key: str) -> torch.Tensor:
        return self._open(self._file_of[key]).get_tensor(key)

    def value(self, name: str) -> torch.Tensor:
        return self._tensor(f"param/{name}" if name in self.trained else f"frozen/{name}")

    def state(self, name: str) -> dict[str, Any]:
        file = self._file_of[f"param/{name}"]
        try:
            if file not in self._trees:
                self._trees[file] = json.loads(self._open(file).metadata()["state"])
            return {k: unpack_state(v, self._tensor) for k, v in self._trees[file].get(name, {}).items()}
        except (LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
            raise CheckpointError(
                f"{os.path.join(self.folder, file)} has no state of an optimizer that makes sense for {name!r} "
                f"({type(error).__name__}: {ascii(error)[:80]})"
            ) from error

    def buffer(self, name: str, rank: int) -> torch.Tensor:
        own = self._buffer_file(rank)
        file = next(f for f in (own, *self._buffer_files) if name in self._files[f]["tensors"])
        return self._open(file).get_tensor(name)

    def scalars(self, stages: Any) -> torch.Tensor | None:
        if json.loads(json.dumps(stages)) != self._manifest["stages"] or "scalars" not in self._file_of:
            return None
        found, wanted = (
            _spec(self._files[self._file_of["scalars"]]["tensors"]["scalars"]),
            TensorSpec((len(stages) + 5,), torch.float64),
        )
        if found != wanted:
            raise CheckpointError(
                f"{os.path.join(self.folder, self._file_of['scalars'])} has norms and losses of "
                f"{found.shape} {found.dtype}, which must be {wanted.shape} {wanted.dtype}"
            )
        return self._tensor("scalars")


def _spec(entry: Sequence[Any]) -> TensorSpec:
    """The spec of a manifest's [dtype, shape], which ``check_manifest`` has validated."""
    name, shape = entry
    dtype = dtype_of(name)
    assert dtype is not None, "check_manifest lets no other name pass"
    return TensorSpec(tuple(shape), dtype)


_SAFETENSORS: dict[str, Any] = {  # torch dtypes by their names in safetensors headers
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "BOOL": torch.bool,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
}
