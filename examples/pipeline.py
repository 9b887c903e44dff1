"""Trains a small byte-level GPT as a pipeline with DeepSpeed on the sources of Python's standard library.

    deepspeed --num_gpus 2 examples/pipeline.py --deepspeed --deepspeed_config examples/pipeline_ds_config.json

An ordinary PipelineModule script: the config's "cyclic" block alone makes it a cyclic pipeline. ``--stages 2`` also runs on one
rank ("single") and on three ("pyramid").
"""

import argparse
import sysconfig
import time
from pathlib import Path

import deepspeed
import torch
import torch.nn.functional as F
from deepspeed.accelerator import get_accelerator
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from torch import nn

VOCABULARY = 256  # bytes


class Embedding(nn.Module):
    """Token plus position embedding: (batch, length) -> (batch, length, width)."""

    def __init__(self, width: int, length: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(VOCABULARY, width) * 0.02)
        self.position = nn.Parameter(torch.zeros(length, width))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return F.embedding(tokens, self.weight) + self.position[: tokens.shape[1]]


class Block(nn.Module):
    """One pre-norm transformer layer: (batch, length, width) -> (batch, length, width)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.attention_norm(x)).view(batch, length, 3, self.heads, width // self.heads)
        attended = F.scaled_dot_product_attention(*qkv.permute(2, 0, 3, 1, 4), is_causal=True)
        x = x + self.proj(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x))))


def head(embedding: Embedding, x: torch.Tensor) -> torch.Tensor:
    """The embedding's weight again: logits of the next byte."""
    return x @ embedding.weight.t()


def loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def text(limit: int) -> torch.Tensor:
    """Sources of the standard library as bytes."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    raw = b"".join(file.read_bytes() for file in files)[:limit]
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8).long()


def batches(data: torch.Tensor, size: int, length: int, seed: int):
    """Endless (inputs, targets); the same on every rank that reads it."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(len(data) - length - 1, (size,), generator=generator).tolist()
        rows = torch.stack([data[s : s + length + 1] for s in starts])
        yield rows[:, :-1], rows[:, 1:]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=-1, help="set by the launcher")
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--save", help="folder for a checkpoint at the end")
    deepspeed.add_config_arguments(parser)
    args = parser.parse_args()

    deepspeed.init_distributed(dist_backend=get_accelerator().communication_backend_name())
    torch.manual_seed(0)
    layers = [
        TiedLayerSpec("embed", Embedding, args.width, args.length),
        *(LayerSpec(Block, args.width, 4) for _ in range(args.layers)),
        LayerSpec(nn.LayerNorm, args.width),
        TiedLayerSpec("embed", Embedding, args.width, args.length, forward_fn=head),
    ]
    net = PipelineModule(layers, num_stages=args.stages, loss_fn=loss, partition_method="type:Block")
    trained = [p for p in net.parameters() if p.requires_grad]
    engine, _, _, _ = deepspeed.initialize(args=args, model=net, model_parameters=trained)

    data = text(2_000_000)
    size = engine.train_micro_batch_size_per_gpu()
    train = batches(data[:-100_000], size, args.length, 1)
    before = engine.eval_batch(batches(data[-100_000:], size, args.length, 2))
    began = time.time()
    for step in range(args.steps):
        value = engine.train_batch(data_iter=train)
        if engine.global_rank == 0 and (step + 1) % 20 == 0:
            print(f"step {step + 1}: loss {value.item():.3f}", flush=True)
    seconds = time.time() - began
    after = engine.eval_batch(batches(data[-100_000:], size, args.length, 2))
    if args.save:
        engine.save_checkpoint(args.save)
    if engine.global_rank == 0:
        ranks = torch.distributed.get_world_size()
        print(
            f"{type(engine).__name__}, {args.stages} stages on {ranks} rank(s): {args.steps} steps in {seconds:.1f} s, held-out"
            f" loss {before.item():.3f} -> {after.item():.3f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
