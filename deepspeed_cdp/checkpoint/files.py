"""Files of checkpoints: each is written completely or not at all, and reading one never executes code from it."""

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
    """Write a safetensors file and wait until it is on the disk.

    Args:
        tensors: on any device, contiguous or not; they are written as contiguous CPU copies.
        metadata: text by key, for the file's header.
    Returns:
        The file's entry in a manifest: ``nbytes``, ``sha256``, and ``tensors`` ([dtype, shape] by name). A reader checks
        dtypes and shapes against it before it allocates memory.
    """
    path = os.path.join(folder, name)
    whole = {k: v.detach().cpu().clone(memory_format=torch.contiguous_format) for k, v in tensors.items()}
    save_file(whole, path, metadata or None)  # safetensors cannot read what it writes for empty metadata and no tensors
    with open(path, "rb+") as file:
        sync(file)
    return {**file_entry(path), "tensors": {k: [str(v.dtype).removeprefix("torch."), list(v.shape)] for k, v in whole.items()}}


def save_plain(folder: str, name: str, value: Any, what: str) -> dict[str, Any]:
    """Write plain data and tensors with ``torch.save`` and wait until the file is on the disk.

    Args:
        what: names the value in the error.
    Returns:
        The file's entry in a manifest, without tensors.
    Raises:
        CheckpointError: ``torch.load(weights_only=True)`` cannot read the file back.
    """
    path = os.path.join(folder, name)
    with open(path, "wb") as file:
        torch.save(value, file)
        sync(file)
    try:
        load_plain(path)
    except CheckpointError as error:
        raise CheckpointError(f"{what} cannot be saved so that it can be loaded: {error}") from None
    return {**file_entry(path), "tensors": {}}


def file_entry(path: str) -> dict[str, Any]:
    """A file's size in bytes (``nbytes``) and hexadecimal SHA-256 (``sha256``)."""
    return {"nbytes": os.path.getsize(path), "sha256": sha256_of_file(path)}


def write_text(path: str, text: str) -> None:
    """Write a small UTF-8 file and rename it into place, so that readers see the old text or the new, never a part."""
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
    """Wait until a folder's directory entries are on the disk, if the file system supports it."""
    try:
        handle = os.open(path or ".", os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(handle)
    except OSError:  # some network file systems cannot sync a folder
        pass
    finally:
        os.close(handle)


def hidden_sibling(final: str, suffix: str) -> str:
    """The path DIR/.TAG.SUFFIX for DIR/TAG. Suffix ``saving``: the folder being written; ``old``: the one being replaced."""
    return os.path.join(os.path.dirname(final), f".{os.path.basename(final)}.{suffix}")


def replace_folder(working: str, final: str) -> None:
    """Rename ``working`` to ``final``, replacing an older folder of that name.

    A crash at any point leaves one of the two complete, and ``existing_folder`` finds it.
    """
    old = hidden_sibling(final, "old")
    sync_folder(working)
    if os.path.exists(final):
        shutil.rmtree(old, ignore_errors=True)
        os.rename(final, old)
    os.rename(working, final)
    sync_folder(os.path.dirname(final))
    shutil.rmtree(old, ignore_errors=True)


def existing_folder(final: str) -> str:
    """The folder that holds checkpoint ``final``: its ``.old`` sibling if a crash interrupted ``replace_folder``, else itself."""
    old = hidden_sibling(final, "old")
    return old if not os.path.exists(final) and os.path.isdir(old) else final


# ---- reading ----------------------------------------------------------------------------------------------------------------
def sha256_of_file(path: str) -> str:
    """Hexadecimal SHA-256 of a file's bytes."""
    result = hashlib.sha256()
    with open(path, "rb") as file:
        while part := file.read(CHUNK):
            result.update(part)
    return result.hexdigest()


def sha256_of_json(value: Any) -> str:
    """Hexadecimal SHA-256 of a JSON value; the order of keys does not matter."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def check_tag(tag: str) -> str:
    """Return ``tag`` if it names a folder inside the checkpoint directory.

    Raises:
        ValueError: the tag is empty, absolute, or contains ``..``.
    """
    parts = tag.split("/")
    if not tag.strip() or os.path.isabs(tag) or "\0" in tag or any(part in ("", ".", "..") for part in parts):
        raise ValueError(f"tag is {tag!r}; it must name a folder inside the checkpoint directory; use a name such as 'step100'")
    return tag


def read_latest(folder: str, name: str = "latest") -> str | None:
    """The tag in ``folder``/``name``; None if there is no such file.

    Raises:
        CheckpointError: the file holds no valid tag.
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
    """The classes that unpickling numpy arrays and scalars needs, for example numpy's random state in ``client_state``."""
    import numpy

    core = getattr(numpy, "_core", None) or numpy.core
    kinds = {type(numpy.dtype(kind)) for kind in "?bBhHiIlLqQefd"}
    return [numpy.ndarray, numpy.dtype, core.multiarray._reconstruct, core.multiarray.scalar, *kinds]


@contextmanager
def _allowing(allowed: Iterable[Any]) -> Iterator[None]:
    with torch.serialization.safe_globals([*_numpy_globals(), *allowed]):
        yield


def load_plain(path: str, allowed: Iterable[Any] = ()) -> Any:
    """``torch.load(weights_only=True, mmap=True)`` on the CPU: plain data, tensors and numpy arrays.

    Args:
        allowed: further classes, for ``torch.serialization.safe_globals``.
    Raises:
        CheckpointError: the file is damaged, or holds other classes; the message names them.
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
