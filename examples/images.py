"""Images to learn from: CIFAR-10's archive, a folder of ImageNet, the bundled digits. Nothing in a data file is executed."""

import io
import pickle
import tarfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

Batch = tuple[torch.Tensor, torch.Tensor]  # images (batch, channels, size, size) fp32, labels (batch,) int64


class _PlainUnpickler(pickle.Unpickler):
    """Builds containers, numbers, bytes and numpy arrays of numbers; refuses all else."""

    def find_class(self, module: str, name: str) -> object:
        multiarray = getattr(np, "_core", None) or np.core
        known = {"_reconstruct": multiarray.multiarray._reconstruct, "ndarray": np.ndarray, "dtype": np.dtype}
        if module.split(".")[0] != "numpy" or name not in known:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which has no place in a file of images")
        return known[name]


def _cifar_files(path: Path) -> dict[str, bytes]:
    """The data files of CIFAR-10's archive or of the folder it unpacks into, python or binary version, by file name."""
    def wanted(name: str) -> bool:
        return name.removesuffix(".bin") in {"test_batch", *(f"data_batch_{i}" for i in range(1, 6))}
    if path.is_file():
        with tarfile.open(path) as archive:
            members = [m for m in archive.getmembers() if m.isfile() and wanted(Path(m.name).name)]
            return {Path(m.name).name: archive.extractfile(m).read() for m in members}
    return {p.name: p.read_bytes() for p in path.rglob("*") if p.is_file() and wanted(p.name)}


def _cifar_batch(name: str, raw: bytes) -> tuple[np.ndarray, np.ndarray]:
    """One data file: pixels (n, 3, 32, 32) uint8, labels (n,)."""
    if name.endswith(".bin"):
        rows = np.frombuffer(raw, np.uint8).reshape(-1, 1 + 3072)
        return rows[:, 1:].reshape(-1, 3, 32, 32), rows[:, 0].astype(np.int64)
    content = _PlainUnpickler(io.BytesIO(raw), encoding="bytes").load()
    return np.asarray(content[b"data"], np.uint8).reshape(-1, 3, 32, 32), np.asarray(content[b"labels"], np.int64)


@dataclass
class Images:
    """A training and a test set held in memory: uint8 images (n, channels, size, size) and labels (n,), and how to normalize."""

    train: tuple[torch.Tensor, torch.Tensor]
    test: tuple[torch.Tensor, torch.Tensor]
    mean: tuple[float, ...]
    deviation: tuple[float, ...]
    pad: int  # random crops out of images padded by so many pixels; 0 for none
    flip: bool  # mirror half of the images

    def to(self, device: torch.device | str) -> "Images":
        train, test = (tuple(t.to(device) for t in part) for part in (self.train, self.test))
        return Images(train, test, self.mean, self.deviation, self.pad, self.flip)

    def __len__(self) -> int:
        return len(self.train[1])

    def normal(self, images: torch.Tensor) -> torch.Tensor:
        """Pixels as numbers of mean 0 and deviation 1."""
        mean, deviation = (torch.tensor(v, device=images.device).view(-1, 1, 1) for v in (self.mean, self.deviation))
        return (images.float() / 255 - mean) / deviation

    def training(self, index: torch.Tensor, generator: torch.Generator) -> Batch:
        """The images of ``index``, each cropped and flipped at random by the (CPU) generator."""
        images, labels = self.train[0], self.train[1]
        index = index.to(images.device)
        x, count, size = self.normal(images[index]), len(index), images.shape[-1]
        if self.pad:
            top, left = (torch.randint(2 * self.pad + 1, (2, count), generator=generator).to(x.device))
            each, channel, along = (torch.arange(n, device=x.device) for n in (count, x.shape[1], size))
            x = F.pad(x, [self.pad] * 4)[each[:, None, None, None], channel[:, None, None],
                                         (top[:, None] + along)[:, None, :, None], (left[:, None] + along)[:, None, None, :]]
        if self.flip:
            mirrored = (torch.rand(count, generator=generator) < 0.5).to(x.device)
            x = torch.where(mirrored[:, None, None, None], x.flip(-1), x)
        return x, labels[index]

    def testing(self, batch: int) -> list[Batch]:
        """The test set in order."""
        return [(self.normal(x), y) for x, y in zip(self.test[0].split(batch), self.test[1].split(batch))]


def cifar10(path: str) -> Images:
    """CIFAR-10 from the archive (cifar-10-python.tar.gz or cifar-10-binary.tar.gz) or the folder it unpacks into.

    Raises:
        ValueError: something is missing there, or a file holds other things than images.
    """
    files = _cifar_files(Path(path)) if Path(path).exists() else {}
    names = sorted(files)
    if len(names) != 6:
        raise ValueError(f"--data {path} has {len(names)} of CIFAR-10's six data files; give cifar-10-python.tar.gz or "
                         "cifar-10-binary.tar.gz from https://www.cs.toronto.edu/~kriz/cifar.html, or the unpacked folder")
    try:
        parts = {name: _cifar_batch(name, files[name]) for name in names}
    except (pickle.UnpicklingError, EOFError, KeyError, ValueError, AttributeError, IndexError) as error:
        raise ValueError(f"--data {path} has a damaged file ({error}); fetch the archive again") from None
    test = parts.pop(names[-1])
    train = tuple(np.concatenate(column) for column in zip(*parts.values()))
    return Images(tuple(map(torch.tensor, train)), tuple(map(torch.tensor, test)), (0.4914, 0.4822, 0.4465),
                  (0.2470, 0.2435, 0.2616), pad=4, flip=True)


def digits() -> Images:
    """scikit-learn's digits (examples/data), 8 x 8: 1437 to learn from and 360 to test with, always the same."""
    with np.load(Path(__file__).parent / "data" / "digits.npz", allow_pickle=False) as file:
        images = torch.tensor(file["images"])[:, None] * 15  # 0..16 -> 0..240
        labels = torch.tensor(file["labels"]).long()
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    train, test = order[360:], order[:360]
    pixels = images[train].float() / 255
    return Images((images[train], labels[train]), (images[test], labels[test]), (pixels.mean().item(),), (pixels.std().item(),),
                  pad=1, flip=False)
