"""Small models and data that several tests use; every one works in a spawned worker."""

import torch
from torch import nn


class MLP(nn.Module):
    """Six blocks: plain, no example at hand, so units come in registration order."""

    def __init__(self, width: int = 8, blocks: int = 6):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(blocks))

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return x


class Strays(MLP):
    """The first batch runs in order. Later ones, each rank by itself, leave the order early or late, or use blocks again."""

    def forward(self, x):
        orders = ((0, 1, 2, 3, 4, 5), (5, 1, 3, 1), (1, 0, 2, 3, 5, 4), (0, 1, 2, 3, 4, 5, 0, 3), (3,))
        for at in orders[0 if is_first(x) else int(abs(x[0, 0].item()) * 1000) % 5]:
            x = x + self.blocks[at](x)
        return x


def is_first(x: torch.Tensor) -> bool:
    """Whether it is the first batch of a rank (of "mlp")."""
    return x[0, 0].item() in {batch("mlp", 0, 0, rank)[0, 0].item() for rank in range(8)}


class Rooted(nn.Module):
    """Parameters on the root, used first and last; a frozen block."""

    def __init__(self, width: int = 8, blocks: int = 5):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))
        self.shift = nn.Parameter(torch.zeros(width))
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(blocks))
        self.blocks[1].requires_grad_(False)

    def forward(self, x):
        x = x * self.scale
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return x + self.shift


class ConvNet(nn.Module):
    """Convolutions with batch norm."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(3 if i == 0 else 4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU()) for i in range(4)
        )
        self.head = nn.Linear(4, 5)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)))


class Routed(nn.Module):
    """Blocks of experts of which each micro-batch uses one, chosen by its data: ranks skip different units."""

    def __init__(self, width: int = 8, experts: int = 3, blocks: int = 3):
        super().__init__()
        self.blocks = nn.ModuleList(nn.ModuleList(nn.Linear(width, width) for _ in range(experts)) for _ in range(blocks))

    def forward(self, x):
        for block in self.blocks:
            chosen = int(x.sum().abs().item() * 1000) % len(block)
            x = x + torch.tanh(block[chosen](x))
        return x


class DeepSpeedMoE(nn.Module):
    """Blocks with DeepSpeed's MoE layer: whole experts on every rank, a router's loss, and room for few tokens per expert."""

    def __init__(self):
        from deepspeed.moe.layer import MoE

        super().__init__()
        options = {"num_experts": 4, "k": 2, "min_capacity": 1, "top2_2nd_expert_sampling": False}
        experts = (nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 8)) for _ in range(3))
        self.blocks = nn.ModuleList(MoE(8, expert, **options) for expert in experts)

    def forward(self, x):
        for block in self.blocks:
            out, loss, _ = block(x)
            x = x + out + 0.01 * loss
        return x


def llama(tied: bool, layers: int = 4):
    """A tiny Hugging Face Llama."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=layers,
            num_attention_heads=2,
            num_key_value_heads=2,
            max_position_embeddings=32,
            tie_word_embeddings=tied,
            pad_token_id=0,
        )
    )


def mixtral(implementation: str):
    """A tiny Hugging Face Mixtral. Its experts are two parameters per layer, of which a micro-batch uses some slices."""
    from transformers import MixtralConfig, MixtralForCausalLM

    return MixtralForCausalLM(
        MixtralConfig(
            vocab_size=64,
            hidden_size=16,
            intermediate_size=8,
            num_hidden_layers=3,
            num_attention_heads=2,
            num_key_value_heads=2,
            max_position_embeddings=32,
            num_local_experts=16,
            num_experts_per_tok=2,
            pad_token_id=0,
            experts_implementation=implementation,
        )
    )


def build(kind: str) -> nn.Module:
    """A model with weights that depend on ``kind`` only."""
    torch.manual_seed(7)
    makers = {
        "mlp": MLP,
        "mlp-nan": MLP,
        "strays": Strays,
        "rooted": Rooted,
        "conv": ConvNet,
        "routed": Routed,
        "llama": lambda: llama(False),
        "llama-tied": lambda: llama(True),
        "moe": DeepSpeedMoE,
        "mixtral": lambda: mixtral("grouped_mm"),
        "mixtral-eager": lambda: mixtral("eager"),
    }
    return makers[kind]()


def batch(kind: str, step: int, round: int, rank: int) -> torch.Tensor:
    """The micro-batch of this place, the same in every process."""
    generator = torch.Generator().manual_seed(1000 * step + 100 * round + rank)
    if kind.startswith(("llama", "mixtral")):
        return torch.randint(1, 64, (2, 9), generator=generator)
    if kind == "conv":
        return torch.randn(4, 3, 6, 6, generator=generator)
    x = torch.randn(4, 8, generator=generator)
    return x * float("nan") if kind == "mlp-nan" and (step, rank) == (2, 0) else x


def loss(call, kind: str, x: torch.Tensor) -> torch.Tensor:
    """The scalar loss of a micro-batch."""
    if kind.startswith(("llama", "mixtral")):
        return call(input_ids=x, labels=x).loss
    if kind == "conv":
        return nn.functional.cross_entropy(call(x), torch.arange(4))
    return (call(x) - x.roll(1, 1)).pow(2).mean()
