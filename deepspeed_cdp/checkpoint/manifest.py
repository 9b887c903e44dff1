"""Validation of a checkpoint's manifest, ``cyclic.json``.

The manifest's SHA-256 detects damage; this module detects contents that ``save_checkpoint`` never writes. Validation runs before
any other file is opened and before memory is allocated, so readers may rely on the types checked here.
"""

import math
import os
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from deepspeed_cdp.errors import CheckpointError

COUNTERS = ("global_steps", "global_samples", "skipped_steps", "micro_steps")
MAX_COUNT = 2**62  # upper bound of every count and size


def check_manifest(manifest: Mapping[str, Any], path: str) -> None:
    """Validate every key.

    Args:
        manifest: the parsed JSON object.
        path: the manifest's path, for the message.
    Raises:
        CheckpointError: a key is missing, or its value is not of the type that ``save_checkpoint`` writes.
    """
    wrong = next(_faults(manifest), None)
    if wrong:
        key, value, wanted = wrong
        raise CheckpointError(f"{path} says {key} is {ascii(value)[:80]}, which is not {wanted}; save the checkpoint again")


def is_count(value: Any) -> bool:
    """Whether ``value`` is an int from 0 to ``MAX_COUNT``."""
    return type(value) is int and 0 <= value <= MAX_COUNT


def dtype_of(name: Any) -> torch.dtype | None:
    """The torch dtype of a name such as ``"bfloat16"``; None if there is none."""
    dtype = getattr(torch, name, None) if isinstance(name, str) and name.isidentifier() else None
    return dtype if isinstance(dtype, torch.dtype) else None


Fault = tuple[str, Any, str]  # key, value, required type


def _faults(m: Mapping[str, Any]) -> Iterator[Fault]:
    files = m.get("files")
    if not isinstance(files, dict):
        yield "files", files, "an object"
        return
    for name, entry in files.items():
        yield from _file(name, entry)
    if "client.pt" not in files:
        yield "files", sorted(files), "a list with 'client.pt' in it"
    buffers = [files[name]["tensors"] for name in sorted(files) if name.startswith("buffers_")]
    if not buffers or any(b != buffers[0] for b in buffers):
        yield "files", sorted(files), "a list with each rank's buffers, of the same shapes"
    keys = [key for name, entry in files.items() if name.startswith("stage_") for key in entry["tensors"]]
    if len(keys) != len(set(keys)):
        yield "files", max(keys, key=keys.count), "in one file only"
    if dtype_of(m.get("dtype")) is None:
        yield "dtype", m.get("dtype"), "a dtype"
    groups, options, stages = m.get("groups"), m.get("options"), m.get("stages")
    if not isinstance(groups, list) or not all(map(_names, groups)):
        yield "groups", groups, "a list of lists of names"
    elif not isinstance(options, list) or len(options) != len(groups) or not all(isinstance(o, dict) for o in options):
        yield "options", options, "a list of objects, one for each group"
    if stages is not None and not (isinstance(stages, list) and all(map(_names, stages))):
        yield "stages", stages, "a list of lists of names"
    shared, counters = m.get("shared"), m.get("counters")
    if not isinstance(shared, dict) or not _names(list(shared.values())):
        yield "shared", shared, "an object of names"
    if not isinstance(m.get("frozen_left_out"), bool):
        yield "frozen_left_out", m.get("frozen_left_out"), "true or false"
    if not isinstance(counters, dict):
        yield "counters", counters, "an object"
        return
    for key, value in counters.items():
        if key not in COUNTERS or not is_count(value):
            yield f"counters.{key}", value, f"a whole number, of {', '.join(COUNTERS)}"
    yield from _scale(m.get("loss_scale"))


def _file(name: str, entry: Any) -> Iterator[Fault]:
    if os.path.basename(name) != name or name in ("", ".", "..") or "\\" in name or "\0" in name:
        yield "the file", name, "in its folder"
        return
    if not isinstance(entry, dict) or not is_count(entry.get("nbytes")) or not isinstance(entry.get("sha256"), str):
        yield f"files.{name}", entry, "an object with nbytes and sha256"
        return
    tensors = entry.get("tensors")
    if not isinstance(tensors, dict):
        yield f"files.{name}.tensors", tensors, "an object"
        return
    total = 0
    for key, kind in tensors.items():
        dtype = dtype_of(kind[0]) if isinstance(kind, list) and len(kind) == 2 else None
        if dtype is None or not isinstance(kind[1], list) or not all(map(is_count, kind[1])):
            yield f"files.{name}.tensors.{key}", kind, "a dtype and a shape"
            return
        total += math.prod(kind[1]) * dtype.itemsize
    if total > entry["nbytes"]:
        yield f"files.{name}.nbytes", entry["nbytes"], f"enough for its tensors, of {total} bytes"


def _names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def scale_fault(scale: Any) -> bool:
    """Whether ``scale`` is not what ``LossScale.state_dict()`` returns."""
    return next(_scale(scale), None) is not None


def _scale(scale: Any) -> Iterator[Fault]:
    """``LossScale.state_dict()``: of a fixed scale, or of a dynamic scale with its counters."""
    if scale is None:
        return
    if not isinstance(scale, dict) or not all(type(v) in (bool, int, float) for v in scale.values()):
        yield "loss_scale", scale, "null or an object of numbers"
        return
    needed = (
        (
            "cur_scale",
            "cur_iter",
            "last_overflow_iter",
            "cur_hysteresis",
            "scale_window",
            "min_scale",
            "delayed_shift",
            "consecutive_hysteresis",
        )
        if scale.get("dynamic")
        else ("cur_scale",)
    )
    if "dynamic" not in scale or not all(key in scale for key in needed) or not 0 < scale["cur_scale"] <= MAX_COUNT:
        yield "loss_scale", scale, f"an object with dynamic, {', '.join(needed)}"
