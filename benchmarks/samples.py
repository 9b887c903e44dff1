"""Micro-batches as arguments of Hugging Face's models: samples alike, or of given lengths (benchmarks/lengths.py)."""

from collections.abc import Sequence

import torch

from benchmarks import models

IGNORED = -100  # label of padding, for which Hugging Face computes no loss


def alike(
    config: models.Config, count: int, sequence: int, batches: int, seed: int, device: torch.device
) -> list[dict[str, torch.Tensor]]:
    """Micro-batches of ``count`` random samples: rows of ``sequence`` tokens, or labelled images of the config's size."""
    generator, seen = torch.Generator().manual_seed(seed), models.images(config)

    def one() -> dict[str, torch.Tensor]:
        if seen is None:
            ids = torch.randint(0, config.vocab_size, (count, sequence), generator=generator).to(device)
            return {"input_ids": ids, "labels": ids}
        pixels = torch.randn(count, config.num_channels, seen.side, seen.side, generator=generator)
        labels = torch.randint(0, seen.classes, (count,), generator=generator)
        return {"pixel_values": pixels.to(device), "labels": labels.to(device)}

    return [one() for _ in range(batches)]


def micro_batch(lengths: Sequence[int], packed: bool, vocabulary: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Random tokens: int64 [samples, longest] with padding on the right, or [1, sum of lengths] if packed.

    A causal model needs no attention mask for padding on the right: no sample reads it.
    """
    if packed:
        ids = torch.randint(0, vocabulary, (1, sum(lengths)), generator=generator)
        starts = torch.cat([torch.arange(n) for n in lengths])[None]
        return {"input_ids": ids, "labels": ids.masked_fill(starts == 0, IGNORED), "position_ids": starts}
    ids = torch.randint(0, vocabulary, (len(lengths), max(lengths)), generator=generator)
    padding = torch.arange(max(lengths))[None] >= torch.tensor(lengths)[:, None]
    return {"input_ids": ids, "labels": ids.masked_fill(padding, IGNORED)}
