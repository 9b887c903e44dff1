"""Sizes of the benchmarks' models; apart from models.py, so that the command line needs no torch to check them."""

from typing import NamedTuple

SIZES = {  # layers, hidden, intermediate, heads
    "llama-tiny": (4, 64, 128, 4),
    "llama-6m": (8, 256, 688, 4),
    "llama-125m": (12, 768, 2048, 12),
    "llama-1.3b": (24, 2048, 5504, 16),
    "llama-3b": (26, 3072, 8192, 24),
    "llama-8b": (32, 4096, 14336, 32),
    "vit-tiny": (4, 64, 128, 4),
    "vit-200": (200, 384, 1536, 6),
}


class Images(NamedTuple):
    """What a vision transformer sees: square images in square patches, ``side`` and ``patch`` in pixels."""

    side: int
    patch: int
    classes: int

    @property
    def tokens(self) -> int:
        """Of an image: its patches and the class token."""
        return (self.side // self.patch) ** 2 + 1


IMAGES = {"vit-tiny": Images(32, 8, 10), "vit-200": Images(224, 16, 1000)}  # all other models read text
