"""Files of checkpoints: each is written completely or not at all, and reading one never executes code from it."""

import hashlib
import json
import os
import re
import secrets
import shutil
import stat
from collections.abc import Callable, Mapping
from typing import Any

import torch
from safetensors.torch import save_file

from deepspeed_cdp.checkpoint.pickles import NotPlainError, UnknownNamesError, open_regular, read_archive
from deepspeed_cdp.errors import CheckpointError


class NotRestoredError(CheckpointError):
    """A folder was replaced, saving failed afterwards, and the older folder could not get its name back."""


# Names in a checkpoint directory that this package or DeepSpeed writes, beside the tags' folders.
RESERVED = ("latest", "latest_universal", "zero_to_fp32.py", "zero_to_torch.py")
_TEMPORARY = re.compile(r"\..*\.(saving|old|new)")
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
    return write_tensors(folder, name, on_host(tensors), metadata)


def on_host(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Contiguous CPU copies."""
    return {k: v.detach().to("cpu", copy=True, memory_format=torch.contiguous_format) for k, v in tensors.items()}


def write_tensors(folder: str, name: str, tensors: dict[str, torch.Tensor], metadata: dict[str, str]) -> dict[str, Any]:
    """As ``save_tensors``, of what ``on_host`` returns."""
    path = os.path.join(folder, name)
    save_file(tensors, path, metadata or None)  # safetensors cannot read what it writes for empty metadata and no tensors
    with open(path, "rb+") as file:
        sync(file)
    return {**file_entry(path), "tensors": {k: [str(v.dtype).removeprefix("torch."), list(v.shape)] for k, v in tensors.items()}}


def save_plain(folder: str, name: str, value: Any, what: str) -> dict[str, Any]:
    """Write plain data and tensors with ``torch.save`` and wait until the file is on the disk.

    Args:
        what: names the value in the error.
    Returns:
        The file's entry in a manifest, without tensors.
    Raises:
        CheckpointError: ``load_plain`` cannot read the file back.
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
    new = write_aside(path, text)
    try:
        os.replace(new, path)
    except BaseException:
        discard_quietly(new)
        raise
    sync_folder(os.path.dirname(path))


def write_aside(path: str, text: str) -> str:
    """Write the text that ``path`` is to have into a new file beside it, and sync it; returns the new file's path.

    The new file has a random name and never exists before, so a planted link or file is neither followed nor overwritten.
    Remains of earlier writes that were killed are removed.
    """
    folder, name = os.path.split(path)
    for other in os.listdir(folder or "."):
        if re.fullmatch(rf"\.{re.escape(name)}\.[0-9a-f]{{16}}\.new", other):
            os.unlink(os.path.join(folder, other))
    new = os.path.join(folder, f".{name}.{secrets.token_hex(8)}.new")
    handle = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    try:
        with open(handle, "w", encoding="utf-8") as file:
            file.write(text)
            sync(file)
    except BaseException:
        os.unlink(new)
        raise
    return new


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


def make_working(final: str) -> str:
    """Create the folder in which checkpoint ``final`` is written, empty, and return its path.

    ``mkdir`` fails if the name exists, so a planted link is removed and never followed.
    """
    working = hidden_sibling(final, "saving")
    os.makedirs(os.path.dirname(os.path.abspath(working)), exist_ok=True)
    discard(working)
    os.mkdir(working)
    return working


def discard(path: str) -> None:
    """Remove a folder, file or link, if it exists. Links are not followed."""
    try:
        if stat.S_ISDIR(os.lstat(path).st_mode):
            shutil.rmtree(path)
        else:
            os.unlink(path)
    except FileNotFoundError:
        pass


def discard_quietly(path: str) -> None:
    """``discard``; an error is ignored, since another one is about to be raised."""
    try:
        discard(path)
    except OSError:
        pass


def check_replaceable(final: str) -> None:
    """Raise CheckpointError if ``final`` exists and is no folder, or is a symbolic link: only folders are replaced."""
    try:
        mode = os.lstat(final).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISDIR(mode):
        kind = "a symbolic link" if stat.S_ISLNK(mode) else "no folder"
        raise CheckpointError(f"{final} is {kind}, and only a folder is replaced; remove it, or choose another name")


def replace_folder(working: str, final: str, commit: Callable[[], Any] = lambda: None) -> None:
    """Rename ``working`` to ``final``, replacing an older folder of that name.

    A crash at any point leaves one of the two complete, and ``existing_folder`` finds it.

    Args:
        commit: called when ``final`` is the new folder. If it raises, the older folder gets its name back.
    Raises:
        CheckpointError: that failed, too; the message says where the older folder is.
    """
    old = hidden_sibling(final, "old")
    check_replaceable(final)
    sync_folder(working)
    had = os.path.exists(final)
    if had:
        discard(old)
        os.rename(final, old)
    try:
        os.rename(working, final)
        commit()
    except BaseException as error:
        try:
            if os.path.exists(final):
                os.rename(final, working)
            if had:
                os.rename(old, final)
        except OSError as second:
            raise NotRestoredError(f"{error}; then {second}; the checkpoint before is in {old}") from error
        raise
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


def check_new_tag(tag: str) -> str:
    """Return ``tag`` if a checkpoint may be saved under it.

    Raises:
        ValueError: ``check_tag`` refuses it, or a part of it is a name that this package or DeepSpeed writes itself.
    """
    for part in check_tag(tag).split("/"):
        if part in RESERVED or _TEMPORARY.fullmatch(part):
            raise ValueError(
                f"tag is {tag!r}; {part!r} is a name that save_checkpoint writes itself; use a name such as 'step100'"
            )
    return tag


def read_latest(folder: str, name: str = "latest") -> str | None:
    """The tag in ``folder``/``name``; None if nothing of that name is there.

    Raises:
        CheckpointError: it is there, but is no readable file that holds a valid tag.
    """
    path = os.path.join(folder, name)
    try:
        os.lstat(path)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error}); make it readable, or pass tag=") from error
    try:
        with open_regular(path) as file:
            return check_tag(file.read(4096).decode("utf-8").strip())
    except ValueError:  # not UTF-8, too
        raise CheckpointError(f"{path} does not hold the name of a checkpoint; write one into it, or pass tag=") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error}); make it readable, or pass tag=") from error


def load_plain(path: str, allowed: Mapping[str, Callable[..., Any]] | None = None) -> Any:
    """The value in a file of ``torch.save``: plain data, CPU tensors and numpy arrays of numbers. Nothing in it is executed.

    Args:
        allowed: further names in the pickle, each with the function that builds its object.
    Raises:
        CheckpointError: the file is damaged, or holds other classes; the message names them.
    """
    return load_archive(path, allowed)[0]


def load_archive(path: str, allowed: Mapping[str, Callable[..., Any]] | None = None) -> tuple[Any, str]:
    """As ``load_plain``; also the name of the archive: the file's name, without ``.pt``, when ``torch.save`` wrote it."""
    try:
        return read_archive(path, allowed or {})
    except CheckpointError:
        raise
    except UnknownNamesError as error:
        raise CheckpointError(
            f"{path} holds objects of {', '.join(error.names)}, and only plain data, tensors and "
            "numpy arrays are read; leave them out, or allow classes of your own that you trust with "
            "torch.serialization.add_safe_globals()"
        ) from None
    except NotPlainError as error:
        raise CheckpointError(
            f"{path} is refused, since {ascii(str(error))[1:201]}; only plain data, tensors and numpy arrays are read"
        ) from error
    except Exception as error:  # of the zip format, of the pickle, or of torch and numpy about its values
        first = ascii(str(error))[1:201]
        raise CheckpointError(f"{path} is damaged or no file of torch.save ({type(error).__name__}: {first})") from error
