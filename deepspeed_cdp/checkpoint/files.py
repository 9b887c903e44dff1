"""Files of checkpoints: written whole or not at all, checked before they are read, never executed."""

import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from safetensors.torch import save_file

from deepspeed_cdp.errors import CheckpointError

CHUNK = 1 << 22  # bytes read at a time


# ---- writing ----------------------------------------------------------------------------------------------------------------
def save_tensors(folder: str, name: str, tensors: dict[str, torch.Tensor], metadata: dict[str, str]) -> dict[str, Any]:
    """Write a safetensors file and wait until it is on the disk; its entry for a manifest.

    The entry's ``tensors`` are dtype and shape by name, so that a reader knows them before it allocates anything.
    """
    path = os.path.join(folder, name)
    whole = {k: v.detach().cpu().clone(memory_format=torch.contiguous_format) for k, v in tensors.items()}
    save_file(whole, path, metadata or None)  # safetensors cannot read what it writes for empty metadata and no tensors
    with open(path, "rb+") as file:
        sync(file)
    return {**entry(path), "tensors": {k: [str(v.dtype).removeprefix("torch."), list(v.shape)] for k, v in whole.items()}}


def save_plain(folder: str, name: str, value: Any, what: str) -> dict[str, Any]:
    """Write plain data and tensors by ``torch.save``; its entry for a manifest.

    Raises:
        CheckpointError: it could not be read back with ``weights_only``; ``what`` names it.
    """
    path = os.path.join(folder, name)
    with open(path, "wb") as file:
        torch.save(value, file)
        sync(file)
    try:
        load_plain(path)
    except CheckpointError as error:
        raise CheckpointError(f"{what} cannot be saved so that it can be loaded: {error}") from None
    return {**entry(path), "tensors": {}}


def entry(path: str) -> dict[str, Any]:
    """Size and SHA-256 of a file."""
    return {"nbytes": os.path.getsize(path), "sha256": digest(path)}


def write_text(path: str, text: str) -> None:
    """Replace a small file at one blow."""
    with open(path + ".new", "w", encoding="utf-8") as file:
        file.write(text)
        sync(file)
    os.replace(path + ".new", path)
    sync_folder(os.path.dirname(path))


def sync(file: Any) -> None:
    """Wait until an open file's bytes are on the disk."""
    file.flush()
    os.fsync(file.fileno())


def sync_folder(path: str) -> None:
    """Wait until the names in a folder are on the disk, where the system can say so."""
    try:
        handle = os.open(path or ".", os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(handle)
    except OSError:  # some network file systems
        pass
    finally:
        os.close(handle)


def beside(final: str, suffix: str) -> str:
    """The hidden neighbour of a folder: ``.saving`` while it is written, ``.old`` while it is replaced."""
    return os.path.join(os.path.dirname(final), f".{os.path.basename(final)}.{suffix}")


def replace_folder(working: str, final: str) -> None:
    """The finished folder takes the place of an older one of its name. A crash at any point leaves one of them, see ``there``."""
    old = beside(final, "old")
    sync_folder(working)
    if os.path.exists(final):
        shutil.rmtree(old, ignore_errors=True)
        os.rename(final, old)
    os.rename(working, final)
    sync_folder(os.path.dirname(final))
    shutil.rmtree(old, ignore_errors=True)


def there(final: str) -> str:
    """Where a checkpoint lies: under its name, or, if a crash came while it was being replaced, beside it."""
    old = beside(final, "old")
    return old if not os.path.exists(final) and os.path.isdir(old) else final


# ---- reading ----------------------------------------------------------------------------------------------------------------
def digest(path: str) -> str:
    """SHA-256 of a file."""
    result = hashlib.sha256()
    with open(path, "rb") as file:
        while part := file.read(CHUNK):
            result.update(part)
    return result.hexdigest()


def digest_json(value: Any) -> str:
    """SHA-256 of plain data, whatever the order of its keys."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def check_tag(tag: str) -> str:
    """A tag that stays inside its folder.

    Raises:
        ValueError: it would leave it, or is empty.
    """
    parts = tag.split("/")
    if not tag.strip() or os.path.isabs(tag) or "\0" in tag or any(part in ("", ".", "..") for part in parts):
        raise ValueError(f"tag is {tag!r}; it must name a folder inside the checkpoint directory; use a name such as 'step100'")
    return tag


def read_latest(folder: str, name: str = "latest") -> str | None:
    """The tag in DIR/latest, None if there is no such file.

    Raises:
        CheckpointError: it holds no tag.
    """
    path = os.path.join(folder, name)
    if not os.path.isfile(path):
        return None
    try:
        with open(path, encoding="utf-8") as file:
            return check_tag(file.read(4096).strip())
    except ValueError:  # not UTF-8, too
        raise CheckpointError(f"{path} does not hold the name of a checkpoint; write one into it, or pass tag=") from None


def _numpy_globals() -> list[Any]:
    """What numpy arrays and numbers in a client_state need, such as the state of numpy's random numbers."""
    import numpy

    core = getattr(numpy, "_core", None) or numpy.core
    kinds = {type(numpy.dtype(kind)) for kind in "?bBhHiIlLqQefd"}
    return [numpy.ndarray, numpy.dtype, core.multiarray._reconstruct, core.multiarray.scalar, *kinds]


@contextmanager
def _allowing(allowed: Iterable[Any]) -> Iterator[None]:
    with torch.serialization.safe_globals([*_numpy_globals(), *allowed]):
        yield


def load_plain(path: str, allowed: Iterable[Any] = ()) -> Any:
    """``torch.load`` without executing anything: plain data, tensors (mapped, not read), numpy arrays, and ``allowed`` classes.

    Raises:
        CheckpointError: it is damaged, or holds other classes; the message names them.
    """
    with _allowing(allowed):
        try:
            return torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        except Exception as error:
            try:
                foreign = torch.serialization.get_unsafe_globals_in_checkpoint(path)
            except Exception:
                foreign = []
            if foreign:
                raise CheckpointError(
                    f"{path} holds objects of {', '.join(sorted(foreign))}, and only plain data, tensors and "
                    "numpy arrays are read; leave them out, or allow classes that you trust with "
                    "torch.serialization.add_safe_globals()"
                ) from None
            first = (str(error).splitlines() or [type(error).__name__])[0]
            raise CheckpointError(f"{path} is damaged or no file of torch.save ({first})") from error
