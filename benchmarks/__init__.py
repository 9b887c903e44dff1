"""Benchmarks against stock ZeRO-3, FSDP2, DDP and the compute ceiling: ``python -m benchmarks.run --help``."""
