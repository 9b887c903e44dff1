"""Micro-batches of samples of given lengths (benchmarks/lengths.py), as arguments of Hugging Face's models."""

from collections.abc import Sequence

import torch

IGNORED = -100  # label of padding, for which Hugging Face computes no loss


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
