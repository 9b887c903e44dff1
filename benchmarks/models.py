"""Models that benchmarks train: Hugging Face Llamas of several sizes, random weights."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

SIZES = {  # layers, hidden, intermediate, heads
    "llama-tiny": (4, 64, 128, 4),
    "llama-125m": (12, 768, 2048, 12),
    "llama-1.3b": (24, 2048, 5504, 16),
    "llama-3b": (26, 3072, 8192, 24),
    "llama-8b": (32, 4096, 14336, 32),
}
VOCABULARY = 32000


def build(name: str, device: torch.device, dtype: torch.dtype) -> torch.nn.Module:
    """The model with weights that depend on its name only (seeded on ``device``)."""
    layers, hidden, intermediate, heads = SIZES[name]
    vocabulary = 256 if name == "llama-tiny" else VOCABULARY
    config = LlamaConfig(vocab_size=vocabulary, hidden_size=hidden, intermediate_size=intermediate, num_hidden_layers=layers,
                         num_attention_heads=heads, num_key_value_heads=heads, max_position_embeddings=4096, use_cache=False,
                         tie_word_embeddings=False, attn_implementation="sdpa")
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            return LlamaForCausalLM(config)
    finally:
        torch.set_default_dtype(before)


def flops_per_token(model: torch.nn.Module, sequence: int) -> float:
    """Operations of forward and backward per token: 6 per parameter of the products, and attention's 12 l h s / 2 (causal)."""
    config = model.config
    products = sum(p.numel() for n, p in model.named_parameters() if p.dim() == 2 and "embed_tokens" not in n)
    return 6 * products + 6 * config.num_hidden_layers * config.hidden_size * sequence
