"""Images to learn from: CIFAR-10's archive, a folder of ImageNet, the bundled digits. Nothing in a data file is executed."""

import io
import math
import pickle
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset

Batch = tuple[torch.Tensor, torch.Tensor]  # images (batch, channels, size, size) fp32, labels (batch,) int64


def rank_order(count: int, seed: int, epoch: int, rank: int, ranks: int, micro_batch: int) -> torch.Tensor:
    """Which of ``count`` images a rank takes in an epoch, (steps, micro_batch); together the ranks take none twice."""
    steps = count // (ranks * micro_batch)
    order = torch.randperm(count, generator=torch.Generator().manual_seed(1000 * seed + epoch))
    return order[: steps * ranks * micro_batch].view(steps, ranks, micro_batch)[:, rank]


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
            top, left = torch.randint(2 * self.pad + 1, (2, count), generator=generator).to(x.device)
            each, channel, along = (torch.arange(n, device=x.device) for n in (count, x.shape[1], size))
            x = F.pad(x, [self.pad] * 4)[
                each[:, None, None, None],
                channel[:, None, None],
                (top[:, None] + along)[:, None, :, None],
                (left[:, None] + along)[:, None, None, :],
            ]
        if self.flip:
            mirrored = (torch.rand(count, generator=generator) < 0.5).to(x.device)
            x = torch.where(mirrored[:, None, None, None], x.flip(-1), x)
        return x, labels[index]

    def epoch(self, seed: int, epoch: int, rank: int, ranks: int, micro_batch: int) -> Iterator[Batch]:
        """A rank's micro-batches; what they are depends on the arguments only."""
        generator = torch.Generator().manual_seed((1000 * seed + epoch) * 1000 + rank)
        for index in rank_order(len(self), seed, epoch, rank, ranks, micro_batch):
            yield self.training(index, generator)

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
        raise ValueError(
            f"--data {path} has {len(names)} of CIFAR-10's six data files; give cifar-10-python.tar.gz or "
            "cifar-10-binary.tar.gz from https://www.cs.toronto.edu/~kriz/cifar.html, or the unpacked folder"
        )
    try:
        parts = {name: _cifar_batch(name, files[name]) for name in names}
    except (pickle.UnpicklingError, EOFError, KeyError, ValueError, AttributeError, IndexError, TypeError) as error:
        raise ValueError(f"--data {path} has a damaged file ({error}); fetch the archive again") from None
    test = parts.pop(names[-1])
    train = tuple(np.concatenate(column) for column in zip(*parts.values()))
    return Images(
        tuple(map(torch.tensor, train)),
        tuple(map(torch.tensor, test)),
        (0.4914, 0.4822, 0.4465),
        (0.2470, 0.2435, 0.2616),
        pad=4,
        flip=True,
    )


def digits() -> Images:
    """scikit-learn's digits (examples/data), 8 x 8: 1437 to learn from and 360 to test with, always the same."""
    with np.load(Path(__file__).parent / "data" / "digits.npz", allow_pickle=False) as file:
        images = torch.tensor(file["images"])[:, None] * 15  # 0..16 -> 0..240
        labels = torch.tensor(file["labels"]).long()
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    train, test = order[360:], order[:360]
    pixels = images[train].float() / 255
    return Images(
        (images[train], labels[train]),
        (images[test], labels[test]),
        (pixels.mean().item(),),
        (pixels.std().item(),),
        pad=1,
        flip=False,
    )


class _Folder(Dataset):
    """Images below FOLDER/CLASS/, as (3, 224, 224) fp32; classes are numbered by name."""

    def __init__(self, folder: Path, key: int | None):
        """
        Args:
            key: crop and flip at random, by this number and the image's; None: the middle of the image resized to 256.
        Raises:
            ValueError: there are no images.
        """
        classes = sorted(p for p in folder.iterdir() if p.is_dir()) if folder.is_dir() else []
        self.files = [
            (path, label)
            for label, kind in enumerate(classes)
            for path in sorted(kind.iterdir())
            if path.suffix.lower() in (".jpeg", ".jpg", ".png")
        ]
        self.classes, self.key = len(classes), key
        if not self.files:
            raise ValueError(f"{folder} has no images; ImageNet must be unpacked into DATA/train/CLASS/ and DATA/val/CLASS/")

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
        from PIL import Image

        path, label = self.files[i]
        with Image.open(path) as file:
            image = file.convert("RGB")
        wide, high = image.size
        if self.key is None:
            scale = min(wide, high) / 256
            side = 224 * scale
            box = ((wide - side) / 2, (high - side) / 2, (wide + side) / 2, (high + side) / 2)
        else:
            draw = torch.rand(5, generator=torch.Generator().manual_seed(self.key * 10_000_019 + i)).tolist()
            area, ratio = wide * high * (0.08 + 0.92 * draw[0]), math.exp((2 * draw[1] - 1) * math.log(4 / 3))
            across, down = min(wide, math.sqrt(area * ratio)), min(high, math.sqrt(area / ratio))
            left, top = draw[2] * (wide - across), draw[3] * (high - down)
            box = (left, top, left + across, top + down)
        pixels = np.asarray(image.resize((224, 224), Image.Resampling.BILINEAR, box=box), np.float32) / 255
        if self.key is not None and draw[4] < 0.5:
            pixels = pixels[:, ::-1]
        mean, deviation = np.float32([0.485, 0.456, 0.406]), np.float32([0.229, 0.224, 0.225])
        return torch.from_numpy(np.ascontiguousarray(((pixels - mean) / deviation).transpose(2, 0, 1))), label


class ImageNet:
    """ImageNet as unpacked by everybody: PATH/train/CLASS/*.JPEG and PATH/val/CLASS/*.JPEG, decoded in ``workers`` processes."""

    def __init__(self, path: str, workers: int = 8):
        self.path, self.workers, self.device = Path(path), workers, torch.device("cpu")
        self.count = len(_Folder(self.path / "train", 0))

    def to(self, device: torch.device | str) -> "ImageNet":
        self.device = torch.device(device)
        return self

    def __len__(self) -> int:
        return self.count

    def epoch(self, seed: int, epoch: int, rank: int, ranks: int, micro_batch: int) -> Iterator[Batch]:
        order = rank_order(self.count, seed, epoch, rank, ranks, micro_batch)
        return self._batches(_Folder(self.path / "train", 1000 * seed + epoch), order.tolist())

    def testing(self, batch: int) -> Iterator[Batch]:
        folder = _Folder(self.path / "val", None)
        return self._batches(folder, [list(range(i, min(i + batch, len(folder)))) for i in range(0, len(folder), batch)])

    def _batches(self, folder: _Folder, order: list[list[int]]) -> Iterator[Batch]:
        for pixels, labels in DataLoader(
            folder, batch_sampler=order, num_workers=self.workers, pin_memory=self.device.type == "cuda"
        ):
            yield pixels.to(self.device, non_blocking=True), labels.to(self.device, non_blocking=True)
