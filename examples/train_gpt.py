"""Trains a small byte-level GPT with DeepSpeed on the sources of Python's standard library.

    deepspeed --num_gpus 2 examples/train_gpt.py --deepspeed --deepspeed_config examples/ds_config.json
"""

import argparse
import math
import time

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from gpt import GPT, read_text, sample
from tqdm import tqdm


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
