"""A checkpoint, whatever its format, as a source of whole tensors by parameter name; and the reader of this package's own."""

import json
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from safetensors import safe_open

from deepspeed_cdp.checkpoint.files import digest, digest_json, load_plain
from deepspeed_cdp.checkpoint.manifest import COUNTERS, check, dtype_of
from deepspeed_cdp.errors import CheckpointError

__all__ = ["COUNTERS", "MANIFEST", "Cyclic", "Kind", "Stored", "manifest_text", "pack_state", "plain_options", "unpack_state"]
MANIFEST, FORMAT = "cyclic.json", 1


class Kind(NamedTuple):
    """What is known of a tensor before it is read."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class Stored(ABC):
    """One checkpoint. Opening it reads what is small; tensors are read one by one, on demand, on the CPU.

    Attributes:
        folder: where it lies; format: a word for messages.
        trained, frozen: kinds by parameter name; trained ones in the order of the groups, fp32.
        buffers: kinds by name; shared: other names of tied parameters, to the name they are stored under.
        frozen_left_out: it was saved with ``exclude_frozen_parameters``.
        groups: the optimizer's groups, options and, as ``params``, names; None if there is no optimizer state.
        loss_scale: ``LossScale.state_dict()`` of an fp16 run, if it is known.
        counters: some of COUNTERS; client_state, lr_scheduler: as saved. ranks: how many wrote it.
        dtype: of the model's parameters.
    """

    format: str
    folder: str
    trained: dict[str, Kind]
    frozen: dict[str, Kind]
    buffers: dict[str, Kind]
    shared: dict[str, str]
    frozen_left_out: bool
    groups: list[dict[str, Any]] | None
    counters: dict[str, int]
    client_state: dict[str, Any]
    lr_scheduler: Any
    ranks: int
    dtype: torch.dtype
    loss_scale: dict[str, Any] | None = None

    def __enter__(self) -> "Stored":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def close(self) -> None:  # noqa: B027
        """Close its files, if it keeps any open."""

    def name_of(self, name: str) -> str | None:
        """The name that a parameter is stored under, None if it is not there."""
        name = name if name in self.trained or name in self.frozen else self.shared.get(name, name)
        return name if name in self.trained or name in self.frozen else None

    @abstractmethod
    def verify(self, rank: int, ranks: int, names: Iterable[str]) -> None:
        """Check the contents of this rank's share of the files, and of those that ``names`` are read from.

        Raises:
            CheckpointError: a file is damaged.
        """

    @abstractmethod
    def value(self, name: str) -> torch.Tensor:
        """A parameter, trained (fp32) or frozen."""

    @abstractmethod
    def state(self, name: str) -> dict[str, Any]:
        """The optimizer's state of a trained parameter; tensors of the parameter's shape, others, and plain values."""

    @abstractmethod
    def buffer(self, name: str, rank: int) -> torch.Tensor:
        """A buffer as ``rank`` had it (modulo the number of ranks that wrote it)."""

    def scalars(self, stages: Any) -> torch.Tensor | None:
        """Norms and losses of the last steps, if they were kept for these very stages."""
        return None


# ---- optimizer state as tensors and JSON --------------------------------------------------------------------------------------
def pack_state(value: Any, path: str, tensors: dict[str, torch.Tensor]) -> Any:
    """A JSON tree of ``value``, whose tensors go into ``tensors`` under names that start with ``path``.

    Raises:
        ValueError: it holds something else than tensors, numbers, strings, None, lists, tuples and dicts of these.
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
    """The value of ``pack_state``'s tree; ``read`` gives a tensor by name.

    Raises:
        ValueError, TypeError: it is no such tree.
    """
    ((kind, content),) = tree.items() if isinstance(tree, dict) else [(None, None)]
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
    """A group's options as JSON can carry them. Others (functions, say) are the script's to give again, and left out."""
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
    """The manifest's file: what it says, and a digest of it."""
    manifest = json.loads(json.dumps({"format": FORMAT, **manifest}))
    return json.dumps({**manifest, "sha256": digest_json(manifest)}, indent=1)


class Cyclic(Stored):
    """What ``save_checkpoint`` of the cyclic engine wrote."""

    format = "cyclic"

    def __init__(self, folder: str):
        """
        Raises:
            CheckpointError: no manifest, or a damaged one; a file is missing, outside, or has the wrong size.
        """
        self.folder = folder
        self._stack, self._opened = ExitStack(), {}
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
        self._homes = {key: name for name, entry in self._files.items() if name.startswith("stage_") for key in entry["tensors"]}
        kinds = {key: _kind(self._files[name]["tensors"][key]) for key, name in self._homes.items()}
        order = [n for group in manifest["groups"] for n in group]
        known = {key[len("param/") :]: kind for key, kind in kinds.items() if key.startswith("param/")}
        self.trained = {n: known[n] for n in (*order, *known) if n in known}
        self.frozen = {key[len("frozen/") :]: kind for key, kind in kinds.items() if key.startswith("frozen/")}
        self._buffer_files = sorted(name for name in self._files if name.startswith("buffers_"))
        # (a pipeline's stages have different ones)
        self.buffers = {k: _kind(v) for name in self._buffer_files for k, v in self._files[name]["tensors"].items()}
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
            whole = manifest.pop("sha256") == digest_json(manifest)
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):  # not JSON, not UTF-8, not a manifest
            whole = False
        if not whole:
            raise CheckpointError(f"{path} is damaged: it is not what was written")
        if manifest.get("format") != FORMAT:
            raise CheckpointError(
                f"{path} has format {manifest.get('format')!r} and this version reads {FORMAT}; load it with "
                f"deepspeed_cdp {manifest.get('deepspeed_cdp')}"
            )
        check(manifest, path)
        return manifest

    def close(self) -> None:
        self._stack.close()
        self._opened.clear()

    def verify(self, rank: int, ranks: int, names: Iterable[str]) -> None:
        read = {self._homes[key] for n in names for key in (f"param/{n}", f"frozen/{n}") if key in self._homes}
        read |= {self._buffer_file(rank), "client.pt"}
        for i, name in enumerate(sorted(self._files)):
            path = os.path.join(self.folder, name)
            if (name in read or i % ranks == rank) and digest(path) != self._files[name]["sha256"]:
                raise CheckpointError(f"{path} is damaged: its SHA-256 differs from the manifest's")
        path = os.path.join(self.folder, "client.pt")
        client = load_plain(path)
        if not (isinstance(client, dict) and isinstance(client.get("client_state"), dict) and "lr_scheduler" in client):
            raise CheckpointError(f"{path} has no client_state and lr_scheduler: it is not what save_checkpoint writes")
        self.client_state, self.lr_scheduler = client["client_state"], client["lr_scheduler"]

    def _buffer_file(self, rank: int) -> str:
        return self._buffer_files[rank % len(self._buffer_files)]

    def _open(self, name: str) -> Any:
        """A safetensors file whose header says what the manifest says."""
        if name not in self._opened:
            path = os.path.join(self.folder, name)
            try:
                file = self._stack.enter_context(safe_open(path, "pt"))
                slices = {key: file.get_slice(key) for key in file.keys()}
                kinds = {key: Kind(tuple(x.get_shape()), _SAFETENSORS.get(x.get_dtype())) for key, x in slices.items()}
            except Exception as error:
                raise CheckpointError(f"{path} is damaged ({error})") from error
            if kinds != {key: _kind(entry) for key, entry in self._files[name]["tensors"].items()}:
                raise CheckpointError(f"{path} does not hold the tensors that the manifest says")
            self._opened[name] = file
        return self._opened[name]

    def _tensor(self, key: str) -> torch.Tensor:
        return self._open(self._homes[key]).get_tensor(key)

    def value(self, name: str) -> torch.Tensor:
        return self._tensor(f"param/{name}" if name in self.trained else f"frozen/{name}")

    def state(self, name: str) -> dict[str, Any]:
        home = self._homes[f"param/{name}"]
        try:
            if home not in self._trees:
                self._trees[home] = json.loads(self._open(home).metadata()["state"])
            return {k: unpack_state(v, self._tensor) for k, v in self._trees[home].get(name, {}).items()}
        except (LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
            raise CheckpointError(
                f"{os.path.join(self.folder, home)} has no state of an optimizer that makes sense for {name!r} "
                f"({type(error).__name__}: {ascii(error)[:80]})"
            ) from error

    def buffer(self, name: str, rank: int) -> torch.Tensor:
        own = self._buffer_file(rank)
        home = next(f for f in (own, *self._buffer_files) if name in self._files[f]["tensors"])
        return self._open(home).get_tensor(name)

    def scalars(self, stages: Any) -> torch.Tensor | None:
        if json.loads(json.dumps(stages)) != self._manifest["stages"] or "scalars" not in self._homes:
            return None
        found, wanted = _kind(self._files[self._homes["scalars"]]["tensors"]["scalars"]), Kind((len(stages) + 5,), torch.float64)
        if found != wanted:
            raise CheckpointError(
                f"{os.path.join(self.folder, self._homes['scalars'])} has norms and losses of "
                f"{found.shape} {found.dtype}, which must be {wanted.shape} {wanted.dtype}"
            )
        return self._tensor("scalars")


def _kind(entry: Sequence[Any]) -> Kind:
    """Of an entry that ``check`` has seen."""
    dtype, shape = entry
    return Kind(tuple(shape), dtype_of(dtype))


_SAFETENSORS = {  # dtypes as safetensors' headers name them
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
