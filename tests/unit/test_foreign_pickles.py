"""Pickles of strangers: plain data, tensors and arrays of numbers are read; all else is refused, and nothing crashes."""

import json
import math
import os
import subprocess
import sys
import warnings
import zipfile
from collections import Counter, OrderedDict
from pathlib import Path

import numpy
import pytest
import torch
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum

from deepspeed_cdp.checkpoint.deepspeed_formats import _load
from deepspeed_cdp.checkpoint.files import load_archive, load_plain
from deepspeed_cdp.errors import CheckpointError
from support import pickle_fuzz
from support.pickle_fuzz import Raw, call, put, tensor

TESTS = Path(__file__).parent.parent


class Asks:
    def __init__(self, kind, name):
        self.kind, self.name = kind, name

    def __reduce__(self):
        return getattr, (self.kind, self.name)


def test_members_are_read(tmp_path):
    torch.save({"zero_stage": Asks(ZeroStageEnum, "weights")}, tmp_path / "x.pt")
    assert _load(str(tmp_path / "x.pt"), ["zero_stage"])["zero_stage"] is ZeroStageEnum.weights


@pytest.mark.parametrize(("kind", "name"), [(ZeroStageEnum, "mro"), (ZeroStageEnum, "__class__"), (torch.Tensor, "backward")])
def test_other_attributes_are_not(tmp_path, kind, name):
    torch.save({"zero_stage": Asks(kind, name)}, tmp_path / "x.pt")
    with pytest.raises(CheckpointError, match="x.pt"):
        _load(str(tmp_path / "x.pt"), ["zero_stage"])


def same(a, b):
    assert type(a) is type(b), (a, b)
    if isinstance(a, torch.Tensor):
        assert (a.dtype, a.stride(), a.requires_grad) == (b.dtype, b.stride(), b.requires_grad)
        assert torch.equal(a.to(torch.float64) if not a.is_complex() else a, b.to(torch.float64) if not b.is_complex() else b)
    elif isinstance(a, numpy.ndarray):
        assert a.dtype == b.dtype and a.flags.f_contiguous == b.flags.f_contiguous and numpy.array_equal(a, b)
    elif isinstance(a, dict):
        assert list(a) == list(b)
        for x, y in zip([*a.values(), getattr(a, "_metadata", 0)], [*b.values(), getattr(b, "_metadata", 0)]):
            same(x, y)
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b)
        for x, y in zip(a, b):
            same(x, y)
    else:
        assert a == b or math.isnan(a)


def test_what_torch_save_writes_is_read(tmp_path):
    """As torch.load reads it, for all kinds of values that are allowed."""
    module = torch.nn.Linear(2, 3)
    base = torch.arange(12.0).reshape(3, 4)
    marked = torch.arange(3.0)
    marked.ds_note = "x"
    value = {
        "plain": [None, True, 3, -(2**40), 10**30, 2.5, math.nan, "word", "\ud800", b"\xff\x00", b"", bytearray(b"ab"), 1 + 2j],
        "containers": ({1, "a"}, (), [[]], {"k": (1,), (1, "x"): 2}, Counter(a=2), OrderedDict(x=1), torch.Size([2, 3])),
        "torch": [torch.device("cuda", 1), torch.device("cpu"), torch.bfloat16, module.state_dict(), module.weight],
        "tensors": [torch.zeros(2, dtype=d) for d in (torch.float64, torch.bfloat16, torch.int8, torch.bool, torch.complex64)],
        "newer": [torch.zeros(3, dtype=d) for d in (torch.uint16, torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2)],
        "views": [base, base.t(), base[1:, ::2], base[0, 0], torch.empty(0), torch.empty(3, 0), torch.ones(1).expand(50)],
        "grad": torch.ones(2, requires_grad=True),
        "marked": marked,
        "numpy": [numpy.arange(6, dtype=d).reshape(2, 3) for d in "bBhHiIlLqQefd"],
        "more of numpy": [numpy.ones((2, 3), order="F"), numpy.arange(3, dtype=">i4"), numpy.zeros(()), numpy.zeros(0)],
        "scalars": [numpy.float64(0.5), numpy.int32(3), numpy.bool_(True), numpy.dtype("f4")],
        "random": [
            numpy.random.RandomState(0).get_state(),
            numpy.random.default_rng(0).bit_generator.state,
            torch.get_rng_state(),
        ],
    }
    value["again"] = value["views"]
    torch.save(value, tmp_path / "name.pt")
    want = torch.load(tmp_path / "name.pt", weights_only=False)
    got, written = load_archive(str(tmp_path / "name.pt"))
    assert written == "name" and got["again"] is got["views"] and got["marked"].ds_note == "x"
    same(got, want)
    assert got["views"][0].data_ptr() == got["views"][1].data_ptr(), "views of one storage stay so"
    got["views"][0].add_(1)
    same(load_plain(str(tmp_path / "name.pt")), want)
    torch.save(DynamicLossScaler(8.0, 2.0, 5, 1.0, 1, False, False), tmp_path / "scaler.pt")
    with pytest.raises(CheckpointError, match="DynamicLossScaler"):
        load_plain(str(tmp_path / "scaler.pt"))


class Own:
    def __init__(self, number):
        self.number = number

    def __eq__(self, other):
        return self.number == other.number


def test_classes_that_the_script_allows_are_read(tmp_path):
    torch.save({"x": [Own(3), torch.ones(2)]}, tmp_path / "x.pt")
    with pytest.raises(CheckpointError, match=r"objects of .*test_foreign_pickles\.Own, and"):
        load_plain(str(tmp_path / "x.pt"))
    with torch.serialization.safe_globals([Own]):
        assert load_plain(str(tmp_path / "x.pt"))["x"][0] == Own(3)
    pickle_fuzz.write(str(tmp_path / "y.pt"), call("numpy ndarray", (1,), "f8", b"\x01" * 8))
    with torch.serialization.safe_globals([numpy.ndarray]), pytest.raises(CheckpointError, match="a call of numpy.ndarray"):
        load_plain(str(tmp_path / "y.pt"))


def fuzz(folder: Path, *arguments: str) -> list:
    done = subprocess.run(
        [sys.executable, "-m", "support.pickle_fuzz", str(folder), *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=TESTS,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(TESTS.parent), str(TESTS)])},
    )
    at = (folder / "now").read_text() if (folder / "now").exists() else "no file"
    assert done.returncode == 0, f"exit code {done.returncode} at {at}: {done.stderr[-2000:]}"
    return json.loads(done.stdout.splitlines()[-1])


def test_hostile_pickles_are_refused(tmp_path):
    assert fuzz(tmp_path) == [], "these were read"
    assert not (tmp_path / "executed").exists()


@pytest.mark.slow
def test_a_grammar_of_pickles_never_crashes(tmp_path):
    """Arbitrary calls and states of every allowed name, in a process with little memory; what is read is used."""
    read, refused = fuzz(tmp_path, "1", "6000")
    assert read > 1500 and refused > 1500, (read, refused)
    assert not (tmp_path / "0").exists(), "no folder was made"


@pytest.mark.parametrize("what", ["fifo", "folder", "empty", "text", "two parts", "compressed", "cut", "no pickle"])
def test_files_that_are_no_archives(tmp_path, what):
    path = tmp_path / "x.pt"
    pickle_fuzz.write(str(path), tensor())
    data = path.read_bytes()
    path.unlink()
    if what == "fifo":
        os.mkfifo(path)
    elif what == "folder":
        path.mkdir()
    elif what in ("two parts", "compressed", "no pickle"):
        with (
            warnings.catch_warnings(),
            zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED if what == "compressed" else zipfile.ZIP_STORED) as file,
        ):
            warnings.simplefilter("ignore")
            for name in {"two parts": ["data.pkl"] * 2, "compressed": ["data.pkl"], "no pickle": ["data"]}[what]:
                file.writestr(f"archive/{name}", b"\x80\x02" + put([0] * 99) + b".")
    else:
        path.write_bytes({"empty": b"", "text": b"text" * 99, "cut": data[:-9]}[what])
    with pytest.raises(CheckpointError, match=r"x\.pt"):
        load_plain(str(path))


def test_memory_is_bounded_by_the_files_size(tmp_path):
    """The same bytes copied again and again: a file of 50 kB asks for 400 MiB."""
    copies = call("__builtin__ bytearray", Raw(b"h\x00")) * 400
    pickle_fuzz.write(str(tmp_path / "x.pt"), Raw(b"(" + put(b"a" * 2**20) + b"q\x00" + copies + b"t"))
    with pytest.raises(CheckpointError, match="more memory than a file of its size needs"):
        load_plain(str(tmp_path / "x.pt"))
