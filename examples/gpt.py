"""A small byte-level GPT, and Python's standard library as text to learn from."""

import sysconfig
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

VOCABULARY = 256  # bytes


class Block(nn.Module):
    """One pre-norm transformer layer: (batch, length, width) -> (batch, length, width)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.attention_norm(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x))))


class Embedding(nn.Module):
    """Token plus position embedding: (batch, length) -> (batch, length, width)."""

    def __init__(self, width: int, length: int) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, width)
        self.position = nn.Embedding(length, width)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.token(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))


class GPT(nn.Module):
    """model(tokens, targets) -> mean cross-entropy in nats per byte."""

    def __init__(self, layers: int, width: int, heads: int, length: int) -> None:
        super().__init__()
        self.embedding = Embedding(width, length)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


def read_text(megabytes: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Training and held-out bytes: every tenth file of the standard library is held out."""
    parts: tuple[list[bytes], list[bytes]] = ([], [])
    size = 0
    for number, path in enumerate(sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))):
        if size > megabytes * 1e6:
            break
        source = path.read_bytes()
        size += len(source)
        parts[number % 10 == 9].append(source)
    train, held_out = (torch.frombuffer(bytearray(b"\n".join(part)), dtype=torch.uint8) for part in parts)
    return train, held_out


def sample(
    text: torch.Tensor, batch: int, length: int, generator: torch.Generator, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Random windows of the text and the same shifted by one: two (batch, length) tensors."""
    starts = torch.randint(len(text) - length - 1, (batch, 1), generator=generator)
    windows = text[starts + torch.arange(length + 1)].long().to(device)
    return windows[:, :-1], windows[:, 1:]
