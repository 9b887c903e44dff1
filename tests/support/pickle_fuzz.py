"""Hostile files of ``torch.save``, opcode by opcode, and a seeded grammar of them.

``python -m support.pickle_fuzz DIR`` reads each of ``hostile()`` and prints the names of those that were not refused, as JSON.
``python -m support.pickle_fuzz DIR SEED COUNT`` reads files of the grammar and uses all that it got. Either may crash, so
it is a process of its own, with little memory.
"""

import contextlib
import copy
import io
import json
import os
import pickle
import random
import resource
import struct
import sys
import zipfile
from collections.abc import Callable
from typing import Any

import numpy
import torch

from deepspeed_cdp.checkpoint.deepspeed_formats import _allowed
from deepspeed_cdp.checkpoint.files import load_plain
from deepspeed_cdp.errors import CheckpointError

MEMORY = 1 << 30  # bytes that reading may add to the process
ROOT = "archive"


# ---- opcodes --------------------------------------------------------------------------------------------------------------
class Raw(bytes):
    """Opcodes that leave one value on the stack."""


def put(value: Any) -> Raw:
    """A plain value, or opcodes as they are."""
    if isinstance(value, Raw):
        return value
    if value is None:
        return Raw(b"N")
    if isinstance(value, bool):
        return Raw(b"\x88" if value else b"\x89")
    if isinstance(value, int):
        data = pickle.encode_long(value)
        return Raw(b"\x8a" + bytes([len(data)]) + data) if len(data) < 256 else Raw(b"K\x00")
    if isinstance(value, float):
        return Raw(b"G" + struct.pack(">d", value))
    if isinstance(value, str):
        text = value.encode("utf-8", "surrogatepass")
        return Raw(b"X" + struct.pack("<I", len(text)) + text)
    if isinstance(value, bytes):
        return call("_codecs encode", value.decode("latin1"), "latin1")
    if isinstance(value, tuple):
        return Raw(b"(" + b"".join(map(put, value)) + b"t")
    if isinstance(value, list):
        return Raw(b"](" + b"".join(map(put, value)) + b"e")
    if isinstance(value, dict):
        return Raw(b"}(" + b"".join(put(x) for pair in value.items() for x in pair) + b"u")
    raise TypeError(value)


def items(*values: Any) -> Raw:
    """A dict of keys and values in turn; any of them may be unhashable."""
    return Raw(b"}(" + b"".join(map(put, values)) + b"u")


def name(full: str) -> Raw:
    """``module name``."""
    return Raw(b"c" + full.replace(" ", "\n").encode() + b"\n")


def call(function: str | Raw, *arguments: Any, new: bool = False) -> Raw:
    return Raw((function if isinstance(function, Raw) else name(function)) + put(tuple(arguments)) + (b"\x81" if new else b"R"))


def build(value: Raw, state: Any) -> Raw:
    return Raw(value + put(state) + b"b")


def storage(count: Any, kind: str = "torch FloatStorage", key: Any = "0", *more: Any) -> Raw:
    return Raw(put(("storage", name(kind), key, "cpu", count, *more)) + b"Q")


def tensor(offset: Any = 0, size: Any = (4,), stride: Any = (1,), grad: Any = False, hooks: Any = None, *more: Any) -> Raw:
    hooks = call("collections OrderedDict") if hooks is None else hooks
    return call("torch._utils _rebuild_tensor_v2", storage(16), offset, size, stride, grad, hooks, *more)


def dtype(code: Any = "f8", state: Any = (3, "<", None, None, None, -1, -1, 0)) -> Raw:
    return build(call("numpy dtype", code, False, True), state)


def array(kind: Any = None, shape: Any = (2,), raw: Any = b"\x00" * 16) -> Raw:
    made = call("numpy._core.multiarray _reconstruct", name("numpy ndarray"), (0,), b"b")
    return build(made, (1, shape, dtype() if kind is None else kind, False, raw))


def write(path: str, value: Any, parts: dict[str, bytes] | None = None) -> None:
    """A file of ``torch.save``: the pickle of ``value``, and storages; part ``0`` has 64 bytes unless said otherwise."""
    with zipfile.ZipFile(path, "w") as file:
        for part, data in {
            "data.pkl": b"\x80\x02" + put(value) + b".",
            "version": b"3\n",
            "byteorder": sys.byteorder.encode(),
            **{f"data/{key}": content for key, content in (parts or {"0": bytes(range(64))}).items()},
        }.items():
            info = zipfile.ZipInfo(f"{ROOT}/{part}")
            at = file.fp.tell() + 30 + len(info.filename) + 4  # type: ignore[union-attr]
            info.extra = b"FB" + struct.pack("<H", -at % 64) + bytes(-at % 64)
            file.writestr(info, data)


# ---- the grammar ------------------------------------------------------------------------------------------------------------
NAMES = [
    *("collections OrderedDict", "collections Counter", "torch Size", "torch device", "torch Tensor", "torch float32"),
    *("torch.nn.parameter Parameter", "torch FloatStorage", "torch LongStorage", "torch.storage UntypedStorage", "torch qint8"),
    *("torch._utils _rebuild_tensor_v2", "torch._utils _rebuild_tensor_v3", "torch._utils _rebuild_parameter"),
    *("torch._utils _rebuild_parameter_with_state", "torch._tensor _rebuild_from_type_v2", "torch int64", "torch complex64"),
    *("numpy ndarray", "numpy dtype", "numpy._core.multiarray _reconstruct", "numpy.core.multiarray scalar"),
    *("_codecs encode", "__builtin__ set", "__builtin__ bytearray", "__builtin__ complex", "__builtin__ bytes"),
    *("__builtin__ getattr", "deepspeed.runtime.zero.config ZeroStageEnum", "deepspeed.runtime.fp16.loss_scaler LossScaler"),
]
FOREIGN = [  # torch.load(weights_only=True) would call these
    *("torch._utils _rebuild_tensor", "torch._utils _rebuild_sparse_tensor", "torch._utils _rebuild_qtensor"),
    *("torch._utils _rebuild_nested_tensor", "torch._utils _rebuild_wrapper_subclass", "torch FloatTensor"),
    *("torch._utils _rebuild_device_tensor_from_numpy", "torch._utils _rebuild_meta_tensor_no_storage", "posix mkdir"),
]
INTEGERS = [0, 1, 2, 3, 4, 16, 17, -1, -5, 2**31, 2**40, 2**62, 2**63, 2**64, -(2**63), 10**300]
STRINGS = [
    "",
    "f8",
    "O",
    "|O8",
    "V8",
    "U4",
    "i1",
    "M8[ns]",
    "<",
    ">",
    "latin1",
    "rot13",
    "zlib",
    "cpu",
    "cuda:0",
    "meta",
    "0",
    "1",
]
STRINGS += [
    "storage",
    "_metadata",
    "__array_interface__",
    "data",
    "items",
    "__class__",
    "f8,O",
    "(2,3)f8",
    "\ud800",
    "float32",
    "weights",
]


class Grammar:
    """Random values of a pickle; valid constructions with random arguments are frequent."""

    def __init__(self, seed: int):
        self.random = random.Random(seed)

    def pick(self, options: Any) -> Any:
        return self.random.choice(options)

    def value(self, depth: int = 0) -> Any:
        if depth > 3 or self.random.random() < 0.25:
            return self.pick([lambda: self.pick(INTEGERS), lambda: self.pick(STRINGS), lambda: None, self.boolean, lambda: 0.5])()
        return self.pick([self.container, self.made, self.made, self.called, self.raw_name, self.again])(depth + 1)

    def boolean(self) -> bool:
        return self.random.random() < 0.5

    def container(self, depth: int) -> Any:
        inside = [self.value(depth) for _ in range(self.random.randrange(4))]
        return self.pick([tuple(inside), inside, items(*inside[: len(inside) // 2 * 2])])

    def raw_name(self, depth: int) -> Raw:
        return name(self.pick(NAMES if self.random.random() < 0.9 else FOREIGN))

    def again(self, depth: int) -> Raw:
        """Keep a value, and use it twice or in itself."""
        number = bytes([self.random.randrange(3)])
        if self.random.random() < 0.2:
            return Raw(b"]q" + number + b"h" + number + b"a")
        kept = put(self.value(depth))
        return Raw(b"(" + kept + b"q" + number + b"h" + number + b"t")

    def called(self, depth: int) -> Raw:
        function = self.raw_name(depth)
        made = call(function, *(self.value(depth) for _ in range(self.random.randrange(5))), new=self.random.random() < 0.3)
        return build(made, self.value(depth)) if self.random.random() < 0.4 else made

    def made(self, depth: int) -> Raw:
        """What torch.save writes, with some arguments replaced."""

        def maybe(valid: Any) -> Any:
            return self.value(depth) if self.random.random() < 0.12 else valid

        def number(valid: int) -> Any:
            return self.pick(INTEGERS) if self.random.random() < 0.25 else valid

        def numbers(*valid: int) -> Any:
            return maybe(tuple(number(n) for n in valid))

        def of_tensor() -> Raw:
            return tensor(number(0), numbers(2, 2), numbers(2, 1), maybe(False), maybe(call("collections OrderedDict")))

        def of_dtype() -> Raw:
            fields = tuple(maybe(x) for x in (3, "<", None, None, None, -1, -1, 0))
            return dtype(maybe(self.pick(["f8", "i4", "b1", "O", "V8"])), fields)

        choices: list[Callable[[], Raw]] = [
            of_tensor,
            of_dtype,
            lambda: array(maybe(of_dtype()), numbers(2), maybe(b"\x01" * self.pick([16, 16, 8, 0]))),
            lambda: call("numpy._core.multiarray scalar", maybe(of_dtype()), maybe(b"\x01" * 8)),
            lambda: call(
                "torch._utils _rebuild_tensor_v3",
                storage(number(64), maybe_kind(), maybe("0")),
                number(0),
                numbers(4),
                numbers(1),
                maybe(False),
                maybe(call("collections OrderedDict")),
                maybe(name(self.pick(["torch float32", "torch uint16", "torch float8_e5m2", "torch bits8", "torch quint8"]))),
            ),
            lambda: call(
                "torch._tensor _rebuild_from_type_v2",
                maybe(name("torch._utils _rebuild_tensor_v2")),
                maybe(name("torch Tensor")),
                maybe((storage(16), number(0), numbers(4), numbers(1), False, call("collections OrderedDict"))),
                maybe(items(maybe("ds_id"), maybe(3))),
            ),
            lambda: call(
                "torch._utils _rebuild_parameter", maybe(of_tensor()), maybe(True), maybe(call("collections OrderedDict"))
            ),
            lambda: build(call("collections OrderedDict"), items(maybe("_metadata"), self.value(depth))),
            lambda: call("collections Counter", maybe(items(maybe("a"), number(1)))),
            lambda: call("collections OrderedDict", maybe([[maybe("a"), maybe(1)]])),
            lambda: call("torch Size", numbers(2, 3)),
            lambda: call("torch device", maybe("cuda"), number(1)),
            lambda: call("__builtin__ set", maybe([maybe(1), maybe("a")])),
            lambda: call("__builtin__ bytearray", maybe(b"abc")),
            lambda: call("_codecs encode", maybe("abc"), maybe("latin1")),
            lambda: build(call("deepspeed.runtime.fp16.loss_scaler LossScaler", new=True), items(maybe("cur_scale"), maybe(1.0))),
            lambda: call("deepspeed.runtime.zero.config ZeroStageEnum", number(3)),
            lambda: call("__builtin__ getattr", name("deepspeed.runtime.zero.config ZeroStageEnum"), maybe("weights")),
        ]

        def maybe_kind() -> str:
            return self.pick(["torch.storage UntypedStorage", "torch.storage UntypedStorage", "torch FloatStorage"])

        return self.pick(choices)()


def use(value: Any) -> None:
    """Read all that there is, as loading, converting and saving do."""
    with contextlib.suppress(TypeError):  # DeepSpeed's own, of a loss scaler with a dtype
        ascii(value)
    torch.save(copy.deepcopy(value), io.BytesIO())

    def visit(x: Any, depth: int = 0) -> None:
        if isinstance(x, torch.Tensor):
            assert x.layout is torch.strided and x.device.type == "cpu" and x.untyped_storage().nbytes() <= 64
            torch.cat([x.detach().reshape(-1), x.detach().reshape(-1)]).to(torch.complex128).sum().item()
        elif isinstance(x, (numpy.ndarray, numpy.generic)):
            assert not x.dtype.hasobject and x.dtype.kind in "biuf"
            numpy.array(x).astype(float).sum()
        elif isinstance(x, dict):
            for part in (*x, *x.values(), *getattr(x, "__dict__", {}).values()):
                visit(part, depth + 1)
        elif isinstance(x, (list, tuple, set)):
            for part in x:
                visit(part, depth + 1)

    visit(value)


def hostile(folder: str) -> dict[str, Raw]:
    """Pickles that must be refused, by name."""
    empty = call("collections OrderedDict")
    bomb = b"K\x01q\x00"
    for i in range(60):  # a tuple of two tuples of two ...
        bomb += b"h" + bytes([i]) + b"\x86q" + bytes([i + 1])
    laughs = b"](K\x01eq\x00"
    for i in range(60):
        laughs += b"](h" + bytes([i]) + b"h" + bytes([i]) + b"eq" + bytes([i + 1])
    pointer = {"shape": (1,), "typestr": "<f8", "data": (4096, False), "version": 3}
    view = (storage(16), 0, (4,), (1,), False, empty)
    return {
        "array over a buffer": call("numpy ndarray", (1,), "O", b"\x01" * 8),
        "array over a buffer, made anew": call("numpy ndarray", (1,), "O", b"\x01" * 8, new=True),
        "view of objects": array(dtype("O"), (1,), b"\x01" * 8),
        "dtype of objects in the state": array(dtype("V8", (3, "|", None, ("a",), items("a", (dtype("O"), 0)), 8, 8, 27)), (1,)),
        "dtype of objects in an array": array(dtype("V16", (3, "|", (dtype("O"), (2,)), None, None, 16, 8, 27)), (1,)),
        "fields of a plain dtype": array(dtype("f8", (3, "<", None, ("a",), items("a", (dtype("f8"), 0)), 8, 8, 0)), (2,)),
        "flags of a plain dtype": array(dtype("f8", (3, "<", None, None, None, -1, -1, 63)), (2,)),
        "dtype by a string of fields": call("numpy dtype", "O,f8", False, True),
        "dtype by a list": call("numpy dtype", [("a", "O")], False, True),
        "dtype of bytes": array(dtype("S8"), (2,)),
        "array beyond its bytes": array(shape=(3,)),
        "array without an end": array(shape=(2**40,)),
        "array of an array": array(array(), (2,)),
        "state of an array, again": build(array(), (1, (1,), dtype("f8"), False, b"\x00" * 8)),
        "number of objects": call("numpy._core.multiarray scalar", dtype("O"), b"\x01" * 8),
        "number beyond its bytes": call("numpy._core.multiarray scalar", dtype("f8"), b"\x01" * 7),
        "tensor beyond its storage": tensor(size=(17,)),
        "tensor beyond by stride": tensor(size=(2,), stride=(16,)),
        "tensor beyond by offset": tensor(offset=13),
        "tensor before its storage": tensor(offset=-1),
        "tensor backwards": tensor(offset=4, stride=(-1,)),
        "tensor repeated without end": tensor(size=(2**40,), stride=(0,)),
        "tensor that overflows": tensor(offset=2**62, size=(2,), stride=(2**62,)),
        "tensor with hooks": tensor(hooks=items(0, 1)),
        "tensor with metadata": tensor(0, (4,), (1,), False, None, items("conj", True)),
        "storage larger than its part": Raw(storage(2**40) + b"q\x00"),
        "storage of a name": tensor_of(storage(16, "torch Tensor")),
        "storage without a part": tensor_of(storage(16, "torch FloatStorage", "1")),
        "storage by size": call("torch.storage UntypedStorage", 2**40),
        "storage of numbers": call("torch FloatStorage", 2**40),
        "tensor by size": call("torch Tensor", 2**20, 2**20),
        "tensor set again": build(tensor(), (storage(16), 99, (4,), (1,))),
        "parameter by size": call("torch.nn.parameter Parameter", new=True),
        "pointer in an attribute": attributes(view, items("__array_interface__", pointer)),
        "method in an attribute": attributes(view, items("reshape", 1)),
        "data in an attribute": attributes(view, items("data", tensor())),
        "function in a tensor's place": call(
            "torch._tensor _rebuild_from_type_v2", name("_codecs encode"), name("torch Tensor"), ("a", "rot13"), None
        ),
        "sparse tensor": call("torch._utils _rebuild_sparse_tensor", name("torch sparse_coo"), (tensor(), tensor(), (2**40,))),
        "nested tensor": call("torch._utils _rebuild_nested_tensor", tensor(), tensor(), tensor(), tensor()),
        "tensor of numpy": call("torch._utils _rebuild_device_tensor_from_numpy", array(), name("torch float32"), "cpu", False),
        "bytes of a size": call("__builtin__ bytearray", 2**40),
        "bytes by another codec": call("_codecs encode", "a" * 9, "zlib"),
        "bytes again and again": Raw(
            b"(" + put("a" * 2**20) + b"q\x00" + call("_codecs encode", Raw(b"h\x00"), "latin1") * 400 + b"t"
        ),
        "methods of a dict": build(empty, items("items", 1)),
        "keys without end": Raw(bomb + b"}(h\x3cK\x01u"),
        "set without end": Raw(b"(" + bomb + call("__builtin__ set", Raw(b"](h\x3ce")) + b"t"),
        "values without end": Raw(b"(" + laughs + b"t"),
        "list in itself": Raw(b"]q\x00h\x00a"),
        "deep list": Raw(b"]" * 5000 + b"a" * 4999),
        "function as a value": name("_codecs encode"),
        "array without a state": call("numpy._core.multiarray _reconstruct", name("numpy ndarray"), (0,), b"b"),
        "attribute of a class": call("__builtin__ getattr", name("torch Tensor"), "backward"),
        "enum by another class": call("__builtin__ getattr", name("deepspeed.runtime.zero.config ZeroStageEnum"), "mro"),
        "scaler of a tensor": build(
            call("deepspeed.runtime.fp16.loss_scaler LossScaler", new=True), items("cur_scale", tensor())
        ),
        "execution": call("posix mkdir", os.path.join(folder, "executed")),
        "execution by a trusted name of torch": call("torch.nested._internal.nested_tensor _rebuild_njt", empty),
        "another opcode": Raw(b"\x8c\x02os\x8c\x05mkdir\x93"),
    }


def tensor_of(kept: Raw) -> Raw:
    return call("torch._utils _rebuild_tensor_v2", kept, 0, (4,), (1,), False, call("collections OrderedDict"))


def attributes(view: tuple[Any, ...], state: Raw) -> Raw:
    return call("torch._tensor _rebuild_from_type_v2", name("torch._utils _rebuild_tensor_v2"), name("torch Tensor"), view, state)


def limit_memory() -> None:
    torch.set_num_threads(1)
    with open("/proc/self/statm", encoding="ascii") as file:
        now = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + MEMORY, now + MEMORY))


def refused(path: str) -> bool:
    """Read a file; use it if it is read. Memory must not be why it is refused."""
    try:
        value = load_plain(path, _allowed())
    except CheckpointError as error:
        text = str(error)
        assert "\n" not in text and "emory" not in text.replace("more memory than a file of its size", ""), text
        return True
    use(value)
    return False


def main(folder: str, seed: str = "", count: str = "") -> None:
    path = os.path.join(folder, "x.pt")
    limit_memory()
    if not seed:
        read = []
        for what, value in hostile(folder).items():
            with open(os.path.join(folder, "now"), "w", encoding="ascii") as file:
                file.write(what)
            write(path, value)
            if not refused(path):
                read.append(what)
        print(json.dumps(read))
        return
    results = []
    for i in range(int(count)):
        grammar = Grammar(int(seed) + i)
        with open(os.path.join(folder, "now"), "w", encoding="ascii") as file:
            file.write(str(int(seed) + i))
        write(path, grammar.value() if i % 2 else grammar.made(1))
        results.append(refused(path))
    print(json.dumps([results.count(False), results.count(True)]))


if __name__ == "__main__":
    main(*sys.argv[1:])
