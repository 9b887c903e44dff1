"""Models of the benchmarks: Hugging Face's Llamas and vision transformers of several sizes with random weights."""

from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, ViTConfig, ViTForImageClassification

from benchmarks.sizes import IMAGES, SIZES, Images

VOCABULARY = 32000
SMALL = ("llama-tiny", "llama-6m")  # for CPUs: bytes as tokens
UNMASKED = "sdpa_unmasked"  # Hugging Face's sdpa under a name for which it prepares no mask

Config = LlamaConfig | ViTConfig


def configuration(name: str, host_sync: bool = True) -> Config:
    """The model's config.

    Args:
        host_sync: True is Hugging Face's behaviour: without an attention mask, each forward searches ``position_ids`` on the
            device for packed sequences, and the host waits for the result. False registers the same attention function under
            another name, for which Hugging Face prepares no mask and does not search. Sequences must not be packed then. The
            kernel is the same (``is_causal``). Vision transformers have no such search.
    """
    layers, hidden, intermediate, heads = SIZES[name]
    if not host_sync:
        from transformers import AttentionInterface
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        AttentionInterface.register(UNMASKED, sdpa_attention_forward)
    shape: dict[str, Any] = {
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "attn_implementation": "sdpa" if host_sync else UNMASKED,
    }
    if name in IMAGES:
        side, patch, classes = IMAGES[name]
        return ViTConfig(image_size=side, patch_size=patch, num_labels=classes, **shape)
    return LlamaConfig(
        vocab_size=256 if name in SMALL else VOCABULARY,
        num_key_value_heads=heads,
        max_position_embeddings=4096,
        use_cache=False,
        tie_word_embeddings=False,
        **shape,
    )


def images(config: Config) -> Images | None:
    """What the model sees; None: it reads text."""
    return Images(config.image_size, config.patch_size, config.num_labels) if isinstance(config, ViTConfig) else None


def build(config: Config, device: torch.device, dtype: torch.dtype) -> torch.nn.Module:
    """The model, with weights that depend on its config only (seeded on ``device``; none on "meta")."""
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            return ViTForImageClassification(config) if isinstance(config, ViTConfig) else LlamaForCausalLM(config)
    finally:
        torch.set_default_dtype(before)


def layers(model: torch.nn.Module) -> torch.nn.ModuleList:
    """The model's layers: its longest list of modules."""
    return max((m for m in model.modules() if isinstance(m, torch.nn.ModuleList)), key=len)


@torch.no_grad()
def randomize(parameters: list[tuple[torch.nn.Parameter, torch.Tensor]], rank: int) -> None:
    """Random weights for a model of which this rank holds shards: (parameter, this rank's part of it).

    They differ from ``build``'s and from those of other shardings, so losses differ too.
    """
    for p, mine in parameters:
        generator = torch.Generator(mine.device).manual_seed(1 + rank)
        if len(getattr(p, "ds_shape", p.shape)) < 2:
            mine.fill_(1)  # norms
        else:
            mine.normal_(0, 0.02, generator=generator)


def flops_per_token(config: Config, sequence: int) -> float:
    """Operations of forward and backward per token: 6 per parameter of the products, and attention's 12 l h s, half if causal.

    An image has ``sequence`` tokens. Its embedding makes one less, and its classifier reads one of them.
    """
    h, i, layers, seen = config.hidden_size, config.intermediate_size, config.num_hidden_layers, images(config)
    if seen is None:
        products = layers * (4 * h * h + 3 * h * i) + config.vocab_size * h
        return 6 * products + 6 * layers * h * sequence
    ends = h * (config.num_channels * seen.patch**2 * (sequence - 1) + seen.classes) / sequence
    return 6 * (layers * (4 * h * h + 2 * h * i) + ends) + 12 * layers * h * sequence
