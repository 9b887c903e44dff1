"""Sizes of the benchmarks' models; apart from models.py, so that the command line needs no torch to check them."""

SIZES = {  # layers, hidden, intermediate, heads
    "llama-tiny": (4, 64, 128, 4),
    "llama-6m": (8, 256, 688, 4),
    "llama-125m": (12, 768, 2048, 12),
    "llama-1.3b": (24, 2048, 5504, 16),
    "llama-3b": (26, 3072, 8192, 24),
    "llama-8b": (32, 4096, 14336, 32),
}
