"""The experiments' data: CIFAR-10's archive in both versions, a folder of ImageNet, the digits; nothing is executed."""

import io
import pickle
import pickletools
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
import images  # noqa: E402

NAMES = [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]


def content(i: int) -> tuple[np.ndarray, list[int]]:
    rng = np.random.default_rng(i)
    return rng.integers(0, 256, (4, 3072), np.uint8), rng.integers(0, 10, 4).tolist()


def as_python_2_wrote(value: object) -> bytes:
    """A pickle with strings of bytes where Python 3 has opcodes of its own, as CIFAR-10's are."""
    raw = bytearray(pickle.dumps(value, protocol=3))
    opcodes = {"SHORT_BINBYTES": b"U", "BINBYTES": b"T"}
    for opcode, _, at in list(pickletools.genops(bytes(raw))):
        if opcode.name in opcodes:
            raw[at : at + 1] = opcodes[opcode.name]
    raw[1] = 2  # the protocol
    return bytes(raw)


def write(folder: Path, kind: str) -> Path:
    """CIFAR-10 as it is distributed, with 4 images per file."""
    for i, name in enumerate(NAMES):
        pixels, labels = content(i)
        if kind == "binary":
            rows = np.concatenate([np.array(labels, np.uint8)[:, None], pixels], 1)
            (folder / f"{name}.bin").write_bytes(rows.tobytes())
        else:
            (folder / name).write_bytes(as_python_2_wrote({b"batch_label": b"x", b"labels": labels, b"data": pixels}))
    (folder / "batches.meta").write_bytes(b"not looked at")
    return folder


@pytest.mark.parametrize("kind", ["python", "binary"])
@pytest.mark.parametrize("packed", [False, True])
def test_cifar10_from_either_version_packed_or_not(tmp_path, kind, packed) -> None:
    inside = tmp_path / "cifar-10-batches"
    inside.mkdir()
    path = write(inside, kind)
    if packed:
        path = tmp_path / "cifar-10.tar.gz"
        with tarfile.open(path, "w:gz") as archive:
            archive.add(inside, "cifar-10-batches")
    data = images.cifar10(str(path))
    pixels, labels = zip(*(content(i) for i in range(6)))
    assert torch.equal(data.train[0], torch.tensor(np.concatenate(pixels[:5])).view(20, 3, 32, 32))
    assert data.train[1].tolist() == sum(labels[:5], []) and data.test[1].tolist() == labels[5]
    assert torch.equal(data.test[0], torch.tensor(pixels[5]).view(4, 3, 32, 32))


class Evil:
    def __reduce__(self):
        return Path.touch, (Path("executed"),)


def test_a_pickle_that_would_run_something_is_refused(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path, "python")
    (tmp_path / "data_batch_3").write_bytes(pickle.dumps({b"data": Evil(), b"labels": [1]}))
    with pytest.raises(ValueError, match="damaged file .it names pathlib"):
        images.cifar10(str(tmp_path))
    assert not Path("executed").exists()


@pytest.mark.parametrize(
    "name, raw",
    [
        ("data_batch_1", b""),
        ("test_batch", pickle.dumps({"labels": [1]}, 2)),
        ("data_batch_2", pickle.dumps([1], 2)),
        ("data_batch_5", b"PK"),
    ],
)
def test_damaged_files_are_named_as_such(tmp_path, name, raw) -> None:
    write(tmp_path, "python")
    (tmp_path / name).write_bytes(raw)
    with pytest.raises(ValueError, match="damaged file"):
        images.cifar10(str(tmp_path))


def test_missing_files_are_counted(tmp_path) -> None:
    write(tmp_path, "python")
    (tmp_path / "test_batch").unlink()
    with pytest.raises(ValueError, match="has 5 of CIFAR-10's six data files"):
        images.cifar10(str(tmp_path))
    with pytest.raises(ValueError, match="has 0 of"):
        images.cifar10(str(tmp_path / "nowhere"))


def test_digits_are_scikit_learns() -> None:
    data = images.digits()
    assert len(data.train[1]) == 1437 and len(data.test[1]) == 360 and data.train[0].shape[1:] == (1, 8, 8)
    datasets = pytest.importorskip("sklearn.datasets")
    given = datasets.load_digits()
    order = torch.randperm(1797, generator=torch.Generator().manual_seed(0))
    assert np.array_equal(data.test[0][:, 0].numpy(), given.images[order[:360]] * 15)
    assert np.array_equal(data.test[1].numpy(), given.target[order[:360]])


def test_ranks_share_an_epoch_and_both_modes_see_the_same() -> None:
    every = torch.cat([images.rank_order(103, 1, 2, rank, 3, 5) for rank in range(3)], 1)
    assert every.shape == (6, 15) and len(set(every.flatten().tolist())) == 90
    assert not torch.equal(images.rank_order(103, 1, 3, 0, 3, 5), images.rank_order(103, 1, 2, 0, 3, 5))
    data = images.digits()
    one, two = (list(data.epoch(0, 0, 1, 2, 64)) for _ in range(2))
    assert len(one) == 11 and all(torch.equal(a, b) for x, y in zip(one, two) for a, b in zip(x, y))


def test_crops_and_mirrors_are_of_the_image() -> None:
    three = (torch.arange(3 * 36, dtype=torch.uint8).view(3, 1, 6, 6), torch.arange(3))
    data = images.Images(three, three, (0.0,), (1.0,), pad=2, flip=True)
    pixels, labels = data.training(torch.tensor([2, 0, 2, 1]), torch.Generator().manual_seed(3))
    assert pixels.shape == (4, 1, 6, 6) and labels.tolist() == [2, 0, 2, 1]
    for image, label in zip(pixels, labels):
        padded = torch.nn.functional.pad(data.normal(data.train[0][label]), [2] * 4)
        crops = [padded[:, i : i + 6, j : j + 6] for i in range(5) for j in range(5)]
        assert any(torch.equal(image, c) or torch.equal(image, c.flip(-1)) for c in crops)


def test_imagenet_from_a_folder(tmp_path) -> None:
    image = pytest.importorskip("PIL.Image")
    for part, count in (("train", 3), ("val", 1)):
        for label, kind in enumerate(["n01", "n02"]):
            folder = tmp_path / part / kind
            folder.mkdir(parents=True)
            for i in range(count):
                raw = io.BytesIO()
                image.new("RGB", (300, 260), (250 * label, 10, 10)).save(raw, "JPEG")
                (folder / f"{i}.JPEG").write_bytes(raw.getvalue())
    data = images.ImageNet(str(tmp_path), workers=0)
    assert len(data) == 6
    ((pixels, labels),) = data.testing(8)
    assert pixels.shape == (2, 3, 224, 224) and labels.tolist() == [0, 1] and pixels[1, 0].mean() > 2 > -1 > pixels[0, 0].mean()
    batches = [list(data.epoch(0, 1, rank, 2, 1)) for rank in range(2)]
    assert [len(b) for b in batches] == [3, 3] and sorted(int(y) for b in batches for _, y in b) == [0, 0, 0, 1, 1, 1]
    for a, b in zip(batches[0], data.epoch(0, 1, 0, 2, 1)):
        assert torch.equal(a[0], b[0])
    with pytest.raises(ValueError, match="has no images"):
        images.ImageNet(str(tmp_path / "train"))
