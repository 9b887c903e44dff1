"""Builds extensions at their first use, and keeps each by its sources' digest among torch's other extensions.

One process of a host builds, and the others wait for it. The lock ends with the process that holds it, and the result is moved
into place at once: nothing that a killed process leaves behind is in the way.
"""

import fcntl
import hashlib
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import torch

OFF = "DEEPSPEED_CDP_NATIVE"  # environment variable; 0: Python does everything; 1: C++ has autograd's part on CPUs, too
SECONDS = 240.0  # for the compiler, and for another process that builds
_FOLDER = Path(__file__).parent
_loaded: dict[Path, ModuleType] = {}


class Extension(NamedTuple):
    """An extension of this folder.

    Attributes:
        name: of the module.
        source: the file that is compiled.
        headers: other files that it includes.
        libraries: of torch that it calls.
    """

    name: str
    source: str
    headers: tuple[str, ...] = ()
    libraries: tuple[str, ...] = ()


MESSAGES = Extension("deepspeed_cdp_native", "module.cpp", tuple(sorted(p.name for p in _FOLDER.glob("*.h"))))
AUTOGRAD = Extension("deepspeed_cdp_autograd", "autograd.cpp", libraries=("torch_python", "torch_cpu", "c10"))


def library(extension: Extension = MESSAGES) -> Path:
    """Where the extension of this version, Python and torch is, or will be."""
    digest = hashlib.sha256(f"{platform.machine()} {sys.version} {torch.__version__}".encode())
    for name in (*extension.headers, extension.source):
        digest.update((_FOLDER / name).read_bytes())
    root = os.environ.get("TORCH_EXTENSIONS_DIR") or "~/.cache/torch_extensions"
    return Path(root).expanduser() / extension.name / f"{digest.hexdigest()[:16]}.so"


def load(extension: Extension = MESSAGES) -> ModuleType:
    """The extension, built if it is not there.

    Raises:
        RuntimeError: it cannot be built or loaded, or is switched off; the message is one line.
    """
    if os.environ.get(OFF) == "0":
        raise RuntimeError(f"{OFF} is 0")
    path = library(extension)
    if path not in _loaded:
        if not path.exists():
            with _alone(path.parent):
                if not path.exists():
                    _build(extension, path)
        spec = importlib.util.spec_from_file_location(extension.name, path)
        assert spec is not None and spec.loader is not None
        try:
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
        except ImportError as error:
            raise RuntimeError(f"{path} does not load: {str(error).splitlines()[0]}") from error
        _loaded[path] = module
    return _loaded[path]


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """One process at a time; after ``SECONDS`` all the same, since two builds do not disturb one another."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = open(folder / "lock", "w")
    except OSError as error:
        raise RuntimeError(f"{folder} cannot be written: {error}") from error
    with lock:
        deadline = time.monotonic() + SECONDS
        while time.monotonic() < deadline:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(0.1)
            except OSError:  # a file system without locks
                break
        yield


def _build(extension: Extension, path: Path) -> None:
    # not torch.utils.cpp_extension, which needs setuptools and ninja: torch's headers hold pybind11
    of_torch = Path(torch.__file__).parent
    folders = [of_torch / "include", of_torch / "include/torch/csrc/api/include", sysconfig.get_paths()["include"]]
    compiler = os.environ.get("CXX") or next((c for c in ("c++", "g++") if shutil.which(c)), "c++")
    flags = ["-O2", "-shared", "-fPIC", "-std=c++17", "-fvisibility=hidden", f"-DTORCH_EXTENSION_NAME={extension.name}"]
    links = ["-ldl", f"-L{of_torch / 'lib'}", *(f"-l{x}" for x in extension.libraries)]
    try:
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            made = Path(folder) / path.name
            command = [
                compiler,
                *flags,
                *(f"-isystem{x}" for x in folders),
                str(_FOLDER / extension.source),
                "-o",
                str(made),
                *links,
            ]
            done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
            if done.returncode:
                lines = [x for x in done.stderr.splitlines() if "error" in x] or done.stderr.splitlines() or ["no message"]
                raise RuntimeError(f"{compiler} failed: {lines[0]}")
            os.replace(made, path)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise RuntimeError(f"{compiler} cannot be run: {error}") from error
