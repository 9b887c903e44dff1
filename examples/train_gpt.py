"""Trains a small byte-level GPT with DeepSpeed on the sources of Python's standard library.

    deepspeed --num_gpus 2 examples/train_gpt.py --deepspeed --deepspeed_config examples/ds_config.json
"""

import argparse
import math
import sysconfig
import time
from pathlib import Path

import deepspeed
import torch
import torch.nn.functional as F
from deepspeed.accelerator import get_accelerator
from torch import nn
from tqdm import tqdm

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


def sample(text: torch.Tensor, batch: int, length: int, generator: torch.Generator,
           device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Random windows of the text and the same shifted by one: two (batch, length) tensors."""
    starts = torch.randint(len(text) - length - 1, (batch, 1), generator=generator)
    windows = text[starts + torch.arange(length + 1)].long().to(device)
    return windows[:, :-1], windows[:, 1:]


def evaluate(engine, text: torch.Tensor, args: argparse.Namespace, batch: int) -> float:
    """Mean held-out loss; every rank reads the same windows."""
    generator = torch.Generator().manual_seed(args.seed)
    engine.eval()
    with torch.no_grad():
        losses = [engine(*sample(text, batch, args.length, generator, engine.device)).item() for _ in range(args.eval_batches)]
    engine.train()
    return sum(losses) / len(losses)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--local_rank", type=int, default=-1, help="set by the launcher")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--length", type=int, default=128, help="bytes per sequence")
    parser.add_argument("--batch", type=int, default=None, help="sequences per rank; the config's micro batch by default")
    parser.add_argument("--eval_batches", type=int, default=8)
    parser.add_argument("--megabytes", type=float, default=8.0, help="how much text to read")
    parser.add_argument("--seed", type=int, default=1)
    args = deepspeed.add_config_arguments(parser).parse_args()

    deepspeed.init_distributed(get_accelerator().communication_backend_name())
    torch.manual_seed(args.seed)
    model = GPT(args.layers, args.width, args.heads, args.length)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    engine, *_ = deepspeed.initialize(args=args, model=model, model_parameters=model.parameters())
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    batch = args.batch or engine.train_micro_batch_size_per_gpu()
    accumulation = engine.gradient_accumulation_steps()
    train, held_out = read_text(args.megabytes)
    if rank == 0:
        print(f"GPT of {parameters:,} parameters on {ranks} ranks ({engine.device}); {len(train) / 1e6:.1f} MB of Python to "
              f"learn from, {len(held_out) / 1e6:.1f} MB held out", flush=True)

    before = evaluate(engine, held_out, args, batch)
    generator = torch.Generator().manual_seed(args.seed + 1000 * (rank + 1))  # every rank draws its own windows
    progress = tqdm(range(args.steps), desc="train", unit="step", mininterval=2, disable=rank != 0)
    start = time.perf_counter()
    for step in progress:
        for _ in range(accumulation):
            loss = engine(*sample(train, batch, args.length, generator, engine.device))
            engine.backward(loss)
            engine.step()
        if rank == 0 and (step % 10 == 9 or step + 1 == args.steps):
            tokens = (step + 1) * accumulation * batch * args.length * ranks
            progress.set_postfix(loss=f"{loss.item():.3f}", tokens_per_s=f"{tokens / (time.perf_counter() - start):,.0f}",
                                 refresh=False)
    seconds = time.perf_counter() - start
    after = evaluate(engine, held_out, args, batch)

    report = getattr(engine, "report", None)
    text = report() if callable(report) else f"engine: {type(engine).__name__}"
    if rank == 0:
        tokens = args.steps * accumulation * batch * args.length * ranks
        print(f"\n{text}\n{args.steps} steps in {seconds:.1f} s, {tokens / seconds:,.0f} tokens/s\nheld-out loss {before:.3f} -> "
              f"{after:.3f} nats per byte ({before / math.log(2):.2f} -> {after / math.log(2):.2f} bits)", flush=True)
    engine.destroy()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
