"""Models that unit discovery is tested on."""

import torch
import transformers as hf
from torch import nn

from deepspeed_cdp.model.discover import Example

SMALL = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32}


def llama(tie=False, layers=3):
    config = hf.LlamaConfig(vocab_size=64, num_hidden_layers=layers, num_key_value_heads=2, tie_word_embeddings=tie, **SMALL)
    return hf.LlamaForCausalLM(config)


def vit():
    return hf.ViTForImageClassification(hf.ViTConfig(num_hidden_layers=2, image_size=16, patch_size=8, **SMALL))


def mlp():
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))


X8, IMAGE = Example((torch.zeros(3, 8),)), Example((torch.zeros(2, 3, 8, 8),))
