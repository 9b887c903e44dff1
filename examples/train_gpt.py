"""Trains a small byte-level GPT with DeepSpeed on the sources of Python's standard library.

    deepspeed --num_gpus 2 examples/train_gpt.py --deepspeed --deepspeed_config examples/ds_config.json
    python examples/train_gpt.py --simulate-ranks 2 --deepspeed_config examples/ds_config.json

The second learns the same with all ranks in one process, on one GPU or none.
"""

import argparse
import json
import math
import time
from pathlib import Path

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.lr_schedules import WarmupLR
from gpt import GPT, read_text, sample
from tqdm import tqdm


def evaluate(model, text: torch.Tensor, args: argparse.Namespace, batch: int, device: torch.device) -> float:
    """Mean held-out loss; every rank reads the same windows."""
    generator = torch.Generator().manual_seed(args.seed)
    model.eval()
    with torch.no_grad():
        losses = [model(*sample(text, batch, args.length, generator, device)).item() for _ in range(args.eval_batches)]
    model.train()
    return sum(losses) / len(losses)


def windows(args: argparse.Namespace, rank: int) -> torch.Generator:
    """What a rank draws its windows with."""
    return torch.Generator().manual_seed(args.seed + 1000 * (rank + 1))


def simulate(args: argparse.Namespace, model: GPT, train: torch.Tensor, held_out: torch.Tensor) -> float:
    """All ranks in this process, by the same config; the held-out loss after training."""
    from deepspeed_cdp.analysis.learning_simulator import Simulator, stages_of

    config = json.loads(Path(args.deepspeed_config).read_text())
    options = {k: v for k, v in config["optimizer"]["params"].items() if k != "torch_adam"}
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    optimizer = torch.optim.AdamW(model.to(device).parameters(), **options)
    scheduler = WarmupLR(optimizer, **config["scheduler"]["params"])
    batch, rounds = args.batch or config["train_micro_batch_size_per_gpu"], config.get("gradient_accumulation_steps", 1)
    ring = Simulator(
        model,
        optimizer,
        stages_of(model, args.simulate_ranks),
        config["cyclic"].get("rule", "cdp-v2"),
        clip=config["gradient_clipping"],
        delay_correction=config["cyclic"].get("delay_correction", "auto"),
    )
    generators = [windows(args, rank) for rank in range(args.simulate_ranks)]
    before = evaluate(model, held_out, args, batch, device)
    for _ in tqdm(range(args.steps), desc="train", unit="step", mininterval=2):
        ring.step(
            [sample(train, batch, args.length, g, device) for _ in range(rounds) for g in generators],
            lambda model, tokens: model(*tokens),
        )
        scheduler.step()
    after = evaluate(model, held_out, args, batch, device)
    print(improvement(before, after))
    return after


def improvement(before: float, after: float) -> str:
    return (
        f"held-out loss {before:.3f} -> {after:.3f} nats per byte ({before / math.log(2):.2f} -> {after / math.log(2):.2f} bits)"
    )


def main(argv: list[str] | None = None) -> float:
    """The held-out loss after training."""
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
    parser.add_argument("--simulate-ranks", type=int, default=0, help="simulate so many ranks in this process; no launcher")
    args = deepspeed.add_config_arguments(parser).parse_args(argv)

    train, held_out = read_text(args.megabytes)
    torch.manual_seed(args.seed)
    model = GPT(args.layers, args.width, args.heads, args.length)
    if args.simulate_ranks:
        return simulate(args, model, train, held_out)
    deepspeed.init_distributed(get_accelerator().communication_backend_name())
    parameters = sum(parameter.numel() for parameter in model.parameters())
    engine, *_ = deepspeed.initialize(args=args, model=model, model_parameters=model.parameters())
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    batch = args.batch or engine.train_micro_batch_size_per_gpu()
    accumulation = engine.gradient_accumulation_steps()
    if rank == 0:
        print(
            f"GPT of {parameters:,} parameters on {ranks} ranks ({engine.device}); {len(train) / 1e6:.1f} MB of Python to "
            f"learn from, {len(held_out) / 1e6:.1f} MB held out",
            flush=True,
        )

    before = evaluate(engine, held_out, args, batch, engine.device)
    generator = windows(args, rank)
    progress = tqdm(range(args.steps), desc="train", unit="step", mininterval=2, disable=rank != 0)
    start = time.perf_counter()
    for step in progress:
        for _ in range(accumulation):
            loss = engine(*sample(train, batch, args.length, generator, engine.device))
            engine.backward(loss)
            engine.step()
        if rank == 0 and (step % 10 == 9 or step + 1 == args.steps):
            tokens = (step + 1) * accumulation * batch * args.length * ranks
            progress.set_postfix(
                loss=f"{loss.item():.3f}", tokens_per_s=f"{tokens / (time.perf_counter() - start):,.0f}", refresh=False
            )
    seconds = time.perf_counter() - start
    after = evaluate(engine, held_out, args, batch, engine.device)

    report = getattr(engine, "report", None)
    text = report() if callable(report) else f"engine: {type(engine).__name__}"
    if rank == 0:
        tokens = args.steps * accumulation * batch * args.length * ranks
        print(
            f"\n{text}\n{args.steps} steps in {seconds:.1f} s, {tokens / seconds:,.0f} tokens/s\n{improvement(before, after)}",
            flush=True,
        )
    engine.destroy()
    torch.distributed.destroy_process_group()
    return after


if __name__ == "__main__":
    main()
