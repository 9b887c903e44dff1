"""Reads files of ``torch.save`` that a stranger may have written. Neither ``pickle`` nor ``torch.load`` sees them.

``PlainPickle`` executes the few opcodes that ``torch.save`` writes. A name in the pickle calls nothing by itself: ``_BUILDERS``
has a function of this module for each allowed name, which checks every argument. Tensors are views of the mapped file. Memory is
at most a multiple of the file's size.
"""

import math
import mmap
import os
import pickletools
import stat
import sys
import zipfile
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any, BinaryIO

import numpy
import torch

from deepspeed_cdp.checkpoint.manifest import dtype_of, is_count
from deepspeed_cdp.errors import CheckpointError

ROOM = 64 << 20  # bytes that a small file may take beyond TIMES its size
TIMES = 16
MAX_DEPTH = 100  # of containers in each other
_STORAGES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
    "ComplexFloatStorage": torch.complex64,
    "ComplexDoubleStorage": torch.complex128,
}
_UNTYPED = ("torch.storage.UntypedStorage", "torch.UntypedStorage")
_DTYPES = {  # of tensors: one number per element, in whole bytes
    *_STORAGES.values(),
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.float8_e4m3fn,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2,
    torch.float8_e5m2fnuz,
}
_NUMPY = {numpy.dtype(code).str[1:]: numpy.dtype(code) for code in "?bBhHiIlLqQefd"}  # keys such as "f8"
_NUMPY |= {code: numpy.dtype(code) for code in "?bBhHiIlLqQefd"}


class NotPlainError(ValueError):
    """The file holds something else than plain data, tensors and numpy arrays of numbers."""


class UnknownNamesError(NotPlainError):
    """The file holds objects of classes that are not read; ``names`` are theirs."""

    def __init__(self, names: list[str]):
        super().__init__(", ".join(names))
        self.names = names


def open_regular(path: str) -> BinaryIO:
    """Open a regular file for reading; symbolic links are followed. A FIFO or device is refused and never waited for.

    Raises:
        OSError: it cannot be opened.
        CheckpointError: it is no regular file.
    """
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise CheckpointError(f"{path} is no regular file; remove it, or choose another checkpoint")
    return open(handle, "rb")


def read_archive(path: str, allowed: Mapping[str, Callable[..., Any]]) -> tuple[Any, str]:
    """The value in a file of ``torch.save``, and the name of the archive: the file's name when it was written, or ``archive``.

    Args:
        allowed: further names in the pickle, each with the function that builds its object from the pickle's arguments.
    Raises:
        NotPlainError, ValueError, OSError, zipfile.BadZipFile, ...: any exception; the file is damaged or hostile.
    """
    with open_regular(path) as file, zipfile.ZipFile(file) as archive:
        size = os.fstat(file.fileno()).st_size
        entries = {entry.filename: entry for entry in archive.infolist()}
        if len(entries) != len(archive.infolist()):
            raise NotPlainError("two parts have one name")
        for entry in entries.values():
            if entry.compress_type != zipfile.ZIP_STORED or entry.file_size != entry.compress_size or entry.file_size > size:
                raise NotPlainError(f"its part {entry.filename!r} is compressed")
        roots = [name.removesuffix("/data.pkl") for name in entries if name.endswith("/data.pkl") and name.count("/") == 1]
        if len(roots) != 1:
            raise NotPlainError("it has no data.pkl")
        order = entries.get(f"{roots[0]}/byteorder")
        if order is not None and archive.read(order).decode("ascii") != sys.byteorder:
            raise NotPlainError("it is of a machine of the other byte order")
        data = archive.read(f"{roots[0]}/data.pkl")
        whole = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)

        def part(key: str) -> torch.UntypedStorage:
            entry = entries.get(f"{roots[0]}/data/{key}")
            if entry is None:
                raise NotPlainError(f"it has no part data/{key}")
            if not entry.file_size:
                return torch.UntypedStorage(0)
            header = whole[entry.header_offset : entry.header_offset + 30]
            first = entry.header_offset + 30 + int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
            if first % 16 or first + entry.file_size > size:
                raise NotPlainError(f"its part data/{key} is not in the place where torch.save puts it")
            return torch.frombuffer(whole, dtype=torch.uint8, count=entry.file_size, offset=first).untyped_storage()

        return PlainPickle(data, part, size, allowed).load(), roots[0]


# ---- values that the pickle names -----------------------------------------------------------------------------------------
class _Name:
    """A name in the pickle.

    Attributes:
        build: (machine, *arguments) -> the object; None: the name cannot be called.
    """

    __slots__ = ("build", "name")

    def __init__(self, name: str, build: Callable[..., Any] | None):
        self.name, self.build = name, build


class _Storage:
    __slots__ = ("dtype", "untyped")

    def __init__(self, untyped: torch.UntypedStorage, dtype: torch.dtype | None):
        self.untyped, self.dtype = untyped, dtype


class Unbuilt:
    """An object between its creation in the pickle and the opcode BUILD, which has its state.

    Attributes:
        build: (state) -> the object.
        memo: where the pickle keeps it for later use.
    """

    __slots__ = ("build", "memo")

    def __init__(self, build: Callable[[Any], Any]):
        self.build = build
        self.memo: list[int] = []


def _need(condition: bool, what: str) -> None:
    if not condition:
        raise NotPlainError(f"it asks for {what}")


def _tensor(machine: "PlainPickle", storage: Any, offset: Any, size: Any, stride: Any, *more: Any) -> torch.Tensor:
    """``_rebuild_tensor_v2``; ``more``: requires_grad, hooks, and maybe metadata."""
    _need(isinstance(storage, _Storage) and storage.dtype is not None, "a tensor without a typed storage")
    return _view(machine, storage, storage.dtype, offset, size, stride, *more)


def _tensor_of_dtype(
    machine: "PlainPickle",
    storage: Any,
    offset: Any,
    size: Any,
    stride: Any,
    grad: Any,
    hooks: Any,
    dtype: Any,
    metadata: Any = None,
) -> torch.Tensor:
    """``_rebuild_tensor_v3``."""
    _need(isinstance(storage, _Storage) and storage.dtype is None, "a tensor without an untyped storage")
    return _view(machine, storage, dtype, offset, size, stride, grad, hooks, metadata)


def _view(
    machine: "PlainPickle",
    storage: _Storage,
    dtype: Any,
    offset: Any,
    size: Any,
    stride: Any,
    grad: Any = False,
    hooks: Any = None,
    metadata: Any = None,
) -> torch.Tensor:
    _need(isinstance(dtype, torch.dtype) and dtype in _DTYPES, f"a tensor of {dtype}")
    _need(type(grad) is bool and not hooks and not metadata, "a tensor with hooks or metadata")
    _need(is_count(offset) and isinstance(size, tuple) and isinstance(stride, tuple), "a tensor without a place")
    _need(len(size) == len(stride) <= 64 and all(map(is_count, (*size, *stride))), "a tensor without a shape")
    _need(math.prod(n for n in size if n) < 2**62, "a tensor that is too large")
    last = offset + sum((n - 1) * step for n, step in zip(size, stride)) if all(size) else offset - 1
    _need(last < storage.untyped.nbytes() // dtype.itemsize, "a tensor that exceeds its storage")
    machine.spend(math.prod(size) * dtype.itemsize)
    return torch.empty(0, dtype=dtype).set_(storage.untyped, offset, size, stride).requires_grad_(grad)


def _parameter(machine: "PlainPickle", data: Any, grad: Any, hooks: Any, state: Any = None) -> torch.nn.Parameter:
    _need(type(data) is torch.Tensor and type(grad) is bool and not hooks, "a parameter with hooks or without a tensor")
    result = torch.nn.Parameter(data.detach(), grad)
    _set_attributes(result, state)
    return result


def _with_attributes(machine: "PlainPickle", function: Any, kind: Any, arguments: Any, state: Any) -> torch.Tensor:
    """``_rebuild_from_type_v2``: DeepSpeed's flat groups are tensors with attributes."""
    _need(isinstance(function, _Name) and function.build in (_tensor, _tensor_of_dtype, _parameter), "a tensor of a strange kind")
    _need(isinstance(kind, _Name) and isinstance(arguments, tuple), "a tensor of a strange kind")
    result = function.build(machine, *arguments)
    _need(kind.name == ("torch.Tensor" if type(result) is torch.Tensor else "torch.nn.parameter.Parameter"), "another kind")
    _set_attributes(result, state)
    return result


def _set_attributes(tensor: torch.Tensor, state: Any) -> None:
    """Set attributes that Tensor does not have. Names such as ``__array_interface__`` would let numpy read any memory."""
    _need(state is None or isinstance(state, dict), "attributes of a tensor that are no dict")
    for name, value in (state or {}).items():
        _need(isinstance(name, str) and name.isidentifier() and name[0] != "_", f"a tensor's attribute {name!r}")
        _need(not hasattr(torch.Tensor, name), f"a tensor's attribute {name!r}")
        setattr(tensor, name, value)


def _array(machine: "PlainPickle", kind: Any, shape: Any, code: Any) -> Unbuilt:
    """``numpy._core.multiarray._reconstruct``; the state has the content."""
    _need(isinstance(kind, _Name) and kind.name == "numpy.ndarray", "another array than numpy.ndarray")

    def build(state: Any) -> numpy.ndarray:
        _need(isinstance(state, tuple) and len(state) == 5, "an array without a state")
        _, shape, dtype, fortran, raw = state
        _need(isinstance(shape, tuple) and len(shape) <= 32 and all(map(is_count, shape)), "an array without a shape")
        _need(isinstance(raw, bytes) and len(raw) == math.prod(shape) * _itemsize(dtype), "an array that exceeds its bytes")
        machine.spend(len(raw))
        flat = numpy.frombuffer(raw, dtype).astype(dtype.newbyteorder("="))  # a copy, as numpy itself reads it
        return flat.reshape(shape, order="F") if fortran is True else flat.reshape(shape)

    return Unbuilt(build)


def _itemsize(dtype: Any) -> int:
    dtype = dtype.build(None) if isinstance(dtype, Unbuilt) else dtype
    _need(isinstance(dtype, numpy.dtype) and dtype.str[1:] in _NUMPY, "an array of something else than numbers")
    return dtype.itemsize


def _numpy_dtype(machine: "PlainPickle", code: Any, *flags: Any) -> Unbuilt:
    """``numpy.dtype``; the state has the byte order, and must have nothing else."""
    _need(isinstance(code, str) and code in _NUMPY and all(type(x) is bool or type(x) is int for x in flags), f"numpy's {code!r}")

    def build(state: Any) -> numpy.dtype:
        _need(isinstance(state, tuple) and len(state) == 8, "a dtype without a state")
        _need(state[1] in ("<", ">", "|", "=") and state[2:] == (None, None, None, -1, -1, 0), "a dtype of several fields")
        return _NUMPY[code].newbyteorder(state[1])

    return Unbuilt(build)


def _numpy_scalar(machine: "PlainPickle", dtype: Any, raw: Any) -> Any:
    _need(isinstance(raw, bytes) and len(raw) == _itemsize(dtype), "a number that is none")
    return numpy.frombuffer(raw, dtype)[0]


def _bytes(machine: "PlainPickle", text: Any, encoding: Any) -> bytes:
    _need(isinstance(text, str) and encoding in ("latin1", "latin-1"), "bytes in another encoding than latin1")
    machine.spend(len(text))
    return text.encode("latin1")


def _bytearray(machine: "PlainPickle", content: Any = b"", encoding: Any = None) -> bytearray:
    content = _bytes(machine, content, encoding) if encoding is not None else content
    _need(isinstance(content, bytes), "a bytearray of something else than bytes")
    machine.spend(len(content))
    return bytearray(content)


def _set(machine: "PlainPickle", items: Any = ()) -> set[Any]:
    _need(isinstance(items, (list, tuple)) and all(machine.hashable(x) for x in items), "a set of something else than values")
    machine.spend(64 * len(items))
    return set(items)


def _ordered(machine: "PlainPickle", items: Any = ()) -> OrderedDict[Any, Any]:
    _need(isinstance(items, (list, tuple)) and all(isinstance(x, (list, tuple)) and len(x) == 2 for x in items), "no OrderedDict")
    _need(all(machine.hashable(k) for k, _ in items), "keys that are no values")
    machine.spend(128 * len(items))
    return OrderedDict(items)


def _counter(machine: "PlainPickle", counts: Any = None) -> Counter[Any]:
    _need(counts is None or type(counts) is dict and all(type(n) is int for n in counts.values()), "a Counter without counts")
    machine.spend(128 * len(counts or ()))
    return Counter(counts or {})


def _shape(machine: "PlainPickle", sizes: Any) -> torch.Size:
    _need(isinstance(sizes, tuple) and len(sizes) <= 64 and all(map(is_count, sizes)), "a torch.Size without sizes")
    return torch.Size(sizes)


def _device(machine: "PlainPickle", kind: Any, index: Any = None) -> torch.device:
    _need(isinstance(kind, str) and (index is None or type(index) is int and 0 <= index < 128), "a device without a name")
    return torch.device(kind) if index is None else torch.device(kind, index)


def _complex(machine: "PlainPickle", real: Any, imaginary: Any) -> complex:
    _need(type(real) is float and type(imaginary) is float, "a complex number of something else than numbers")
    return complex(real, imaginary)


def _no_bytes(machine: "PlainPickle") -> bytes:
    return b""


_BUILDERS: dict[str, Callable[..., Any] | None] = {
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_tensor_v3": _tensor_of_dtype,
    "torch._utils._rebuild_parameter": _parameter,
    "torch._utils._rebuild_parameter_with_state": _parameter,
    "torch._tensor._rebuild_from_type_v2": _with_attributes,
    "torch.Tensor": None,
    "torch.nn.parameter.Parameter": None,
    "torch.Size": _shape,
    "torch.device": _device,
    "numpy._core.multiarray._reconstruct": _array,
    "numpy.core.multiarray._reconstruct": _array,
    "numpy._core.multiarray.scalar": _numpy_scalar,
    "numpy.core.multiarray.scalar": _numpy_scalar,
    "numpy.dtype": _numpy_dtype,
    "numpy.ndarray": None,
    "collections.OrderedDict": _ordered,
    "collections.Counter": _counter,
    "_codecs.encode": _bytes,
    "builtins.bytes": _no_bytes,
    "builtins.bytearray": _bytearray,
    "builtins.set": _set,
    "builtins.complex": _complex,
    **{f"torch.{name}": None for name in _STORAGES},
    **dict.fromkeys(_UNTYPED),
}
_NUMBERS = (int, float, complex, torch.device, torch.dtype, numpy.ndarray, numpy.generic, numpy.dtype)


def _trusted() -> dict[str, Any]:
    """What the script allows by ``torch.serialization.add_safe_globals``, by name. torch itself adds some, which are left out."""
    named = [
        x if isinstance(x, tuple) else (x, f"{x.__module__}.{x.__qualname__}") for x in torch.serialization.get_safe_globals()
    ]
    return {name: x for x, name in named if name.split(".")[0] not in ("torch", "numpy")}


class PlainPickle:
    """One pickle of ``torch.save``, read opcode by opcode."""

    def __init__(
        self, data: bytes, part: Callable[[str], torch.UntypedStorage], size: int, allowed: Mapping[str, Callable[..., Any]]
    ):
        """
        Args:
            part: (key) -> the bytes of a storage in the archive.
            size: of the whole file; memory is at most ``TIMES`` its size and ``ROOM``.
            allowed: further names, each with its builder: (arguments of the pickle) -> object or ``Unbuilt``.
        """
        self._data, self._part, self._room = data, part, TIMES * size + ROOM
        self._names = {name: _Name(name, build) for name, build in _BUILDERS.items()}
        for name, build in allowed.items():
            self._names[name] = _Name(name, lambda machine, *arguments, build=build: build(*arguments))
        self._trusted = {name: x for name, x in _trusted().items() if name not in self._names}
        self._storages: dict[str, _Storage] = {}

    def spend(self, nbytes: int) -> None:
        """Count memory that does not come byte by byte from the pickle.

        Raises:
            NotPlainError: it is more than the file's size can explain.
        """
        self._room -= nbytes
        _need(self._room >= 0, "more memory than a file of its size needs")

    def hashable(self, value: Any, depth: int = 0) -> bool:
        """Whether a value may be a key: a number, a string, or a small tuple of such. Hashing others may take for ever."""
        if isinstance(value, tuple):
            self.spend(64 * len(value))
            return depth < 3 and all(self.hashable(x, depth + 1) for x in value)
        return value is None or isinstance(value, (int, float, complex, str, bytes, torch.dtype, torch.device))

    def load(self) -> Any:
        """The value.

        Raises:
            NotPlainError: it is not plain.
        """
        value = self._execute()
        self._check(value)
        return value

    def _execute(self) -> Any:
        stack: list[Any] = []
        marked: list[list[Any]] = []
        memo: dict[int, Any] = {}
        argument: Any
        for opcode, argument, _ in pickletools.genops(self._data):
            name = opcode.name
            if name in ("BINUNICODE", "BININT", "BININT1", "BININT2", "BINFLOAT", "LONG1"):
                stack.append(argument)
            elif name in ("BINGET", "LONG_BINGET"):
                stack.append(memo[argument])
            elif name in ("BINPUT", "LONG_BINPUT"):
                memo[argument] = stack[-1]
                if isinstance(stack[-1], Unbuilt):
                    stack[-1].memo.append(argument)
            elif name in _CONSTANTS:
                stack.append(_CONSTANTS[name])
            elif name in _CONTAINERS:
                self.spend(64)
                stack.append(_CONTAINERS[name]())
            elif name == "SHORT_BINSTRING":  # of Python 2
                stack.append(argument.encode("latin1"))
            elif name == "MARK":
                self.spend(64)
                marked.append(stack)
                stack = []
            elif name in ("TUPLE1", "TUPLE2", "TUPLE3"):
                self.spend(64)
                count = int(name[-1])
                items = tuple(stack[-count:])
                _need(len(items) == count, "a tuple of nothing")
                stack[-count:] = [items]
            elif name in ("TUPLE", "APPENDS", "SETITEMS"):
                items, stack = tuple(stack), marked.pop()
                if name == "TUPLE":
                    stack.append(items)
                elif name == "APPENDS":
                    self._append(stack[-1], items)
                else:
                    self._set_items(stack[-1], items)
            elif name == "APPEND":
                item = stack.pop()
                self._append(stack[-1], (item,))
            elif name == "SETITEM":
                item = stack.pop()
                key = stack.pop()
                self._set_items(stack[-1], (key, item))
            elif name == "GLOBAL":
                stack.append(self._find(argument))
            elif name in ("REDUCE", "NEWOBJ"):
                arguments, function = stack.pop(), stack.pop()
                stack.append(self._call(function, arguments, new=name == "NEWOBJ"))
            elif name == "BUILD":
                state = stack.pop()
                before = stack.pop()
                stack.append(self._build(before, state))
                for index in before.memo if isinstance(before, Unbuilt) else ():
                    memo[index] = stack[-1]
            elif name == "BINPERSID":
                stack.append(self._storage(stack.pop()))
            elif name == "STOP":
                return stack.pop()
            else:
                _need(name == "PROTO", f"the pickle's {name}")
        raise NotPlainError("its pickle has no end")

    @staticmethod
    def _append(target: Any, items: tuple[Any, ...]) -> None:
        _need(type(target) is list, f"appending to a {type(target).__name__}")
        target.extend(items)

    def _set_items(self, target: Any, items: tuple[Any, ...]) -> None:
        _need(type(target) in (dict, OrderedDict, Counter) and len(items) % 2 == 0, f"items of a {type(target).__name__}")
        for key, value in zip(items[::2], items[1::2]):
            _need(self.hashable(key), f"a {type(key).__name__} as a key")
            target[key] = value

    def _find(self, argument: str) -> Any:
        name = _full_name(argument)
        if name in self._names:
            return self._names[name]
        if name.startswith("torch.") and name.count(".") == 1 and (dtype := dtype_of(name[len("torch.") :])) is not None:
            return dtype
        if name in self._trusted:
            return self._trusted[name]
        raise UnknownNamesError(sorted({*self._unknown()}))

    def _unknown(self) -> Iterator[str]:
        """All names in the pickle that are not read, for the message."""
        for opcode, argument, _ in pickletools.genops(self._data):
            if opcode.name == "GLOBAL":
                name = _full_name(str(argument))
                if name not in self._names and name not in self._trusted and dtype_of(name.removeprefix("torch.")) is None:
                    yield name

    def _call(self, function: Any, arguments: Any, new: bool) -> Any:
        _need(isinstance(arguments, tuple), "a call without arguments")
        self.spend(256)
        if isinstance(function, _Name):
            _need(function.build is not None, f"a call of {function.name}")
            return function.build(self, *arguments)  # type: ignore[misc]
        _need(any(function is x for x in self._trusted.values()), f"a call of a {type(function).__name__}")
        self._check(arguments)
        return function.__new__(function, *arguments) if new else function(*arguments)

    def _build(self, value: Any, state: Any) -> Any:
        if isinstance(value, Unbuilt):
            return value.build(state)
        if type(value) is OrderedDict:  # state_dict() keeps the versions of modules so
            _need(isinstance(state, dict) and set(state) <= {"_metadata"}, "attributes of an OrderedDict")
            value.__dict__.update(state)
            return value
        _need(any(type(value) is x for x in self._trusted.values()), f"the state of a {type(value).__name__}")
        self._check(state)
        if hasattr(value, "__setstate__"):
            value.__setstate__(state)
        else:
            _need(isinstance(state, dict), "a state that is no dict")
            value.__dict__.update(state)
        return value

    def _storage(self, key: Any) -> _Storage:
        _need(isinstance(key, tuple) and len(key) == 5 and key[0] == "storage", "a strange storage")
        _, kind, key, _, count = key
        _need(isinstance(kind, _Name) and isinstance(key, str) and is_count(count), "a strange storage")
        if key not in self._storages:
            kept = kind.name.removeprefix("torch.")
            _need(kept in _STORAGES or kind.name in _UNTYPED, f"a storage of {kind.name}")
            dtype = _STORAGES.get(kept)
            self._storages[key] = _Storage(self._part(key), dtype)
            self.spend(256)
        storage = self._storages[key]
        _need(storage.untyped.nbytes() == count * (storage.dtype.itemsize if storage.dtype else 1), "a storage of another size")
        return storage

    def _check(self, root: Any) -> None:
        """Refuse values that are not plain, that hold themselves, or that would be endless when written out."""
        done: dict[int, tuple[int, int]] = {}
        limit = 8 * len(self._data) + 1_000_000

        def visit(value: Any, depth: int) -> tuple[int, int]:
            """(its size when written out, the depth of its containers)."""
            if id(value) in done:
                return done[id(value)]
            _need(depth < MAX_DEPTH, f"containers {MAX_DEPTH} deep, or in themselves")
            inside: list[Any] = []
            cost = 1
            if isinstance(value, (str, bytes, bytearray)):
                cost += len(value)
            elif isinstance(value, dict):
                inside = [*value.keys(), *value.values(), *getattr(value, "__dict__", {}).values()]
            elif isinstance(value, (list, tuple, set)):
                inside = list(value)
            elif isinstance(value, torch.Tensor):
                inside = list(value.__dict__.values())
            elif not (value is None or isinstance(value, _NUMBERS)):
                _need(not isinstance(value, (_Name, _Storage, Unbuilt)), "a class or function as a value")
                _need(not any(value is x for x in self._trusted.values()), "a class or function as a value")
            height = 0
            for x in inside:
                size, deep = visit(x, depth + 1)
                cost, height = cost + size, max(height, deep + 1)
                _need(cost <= limit and depth + height < MAX_DEPTH, "the same values again and again")
            if inside:
                done[id(value)] = (cost, height)
            return cost, height

        visit(root, 0)


_CONSTANTS: dict[str, Any] = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
_CONTAINERS: dict[str, Callable[[], Any]] = {"EMPTY_LIST": list, "EMPTY_DICT": dict, "EMPTY_SET": set}


def _full_name(argument: str) -> str:
    """The dotted name of GLOBAL's argument; Python 2's names of modules are replaced."""
    module, _, name = argument.partition(" ")
    return f"{_MODULES.get(module, module)}.{name}"


_MODULES = {"__builtin__": "builtins", "copy_reg": "copyreg"}
