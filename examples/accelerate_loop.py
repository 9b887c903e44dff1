"""Trains a small Llama in a loop of one's own with Accelerate, on the bytes of Python's standard library.

    accelerate launch --use_deepspeed --num_processes 2 --deepspeed_config_file examples/accelerate_ds_config.json \
        examples/accelerate_loop.py --output_dir out
"""

import argparse
import json
import sysconfig
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM, get_linear_schedule_with_warmup


def windows(length: int, count: int) -> list[torch.Tensor]:
    """The first ``count`` windows of ``length`` bytes."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    text = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py"))[:20])
    return list(torch.frombuffer(bytearray(text[: length * count]), dtype=torch.uint8).long().view(count, length))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output_dir", type=Path, required=True)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--length", type=int, default=128, help="bytes per sequence")
    parser.add_argument("--windows", type=int, default=4000)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--accumulate", type=int, default=2)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--clip", type=float, default=1.0)
    parser.add_argument("--resume", help="a folder that --output_dir/state was")
    args = parser.parse_args()

    set_seed(1)
    accelerator = Accelerator(
        gradient_accumulation_steps=args.accumulate, dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True)
    )
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256,
            hidden_size=args.hidden,
            intermediate_size=4 * args.hidden,
            num_hidden_layers=args.layers,
            num_attention_heads=4,
            num_key_value_heads=4,
        )
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    loader = DataLoader(windows(args.length, args.windows), args.batch, shuffle=True)
    updates = args.epochs * -(-len(loader) // (args.accumulate * accelerator.num_processes))
    scheduler = get_linear_schedule_with_warmup(optimizer, 2 * accelerator.num_processes, updates * accelerator.num_processes)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)

    first = 0
    if args.resume:
        accelerator.load_state(args.resume)
        first = json.loads(Path(args.resume, "epoch.json").read_text()) + 1
    history = []
    for epoch in range(first, args.epochs):
        model.train()
        loader.set_epoch(epoch)
        for batch in loader:
            with accelerator.accumulate(model):
                loss = model(input_ids=batch, labels=batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    norm = accelerator.clip_grad_norm_(model.parameters(), args.clip)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                history.append(
                    {"loss": accelerator.gather(loss).mean().item(), "grad_norm": norm, "lr": float(scheduler.get_last_lr()[0])}
                )
                accelerator.print(f"epoch {epoch}: loss {history[-1]['loss']:.3f}, gradient norm {norm:.3f}")
        accelerator.save_state(args.output_dir / f"state_{epoch}")
        if accelerator.is_main_process:
            (args.output_dir / f"state_{epoch}" / "epoch.json").write_text(json.dumps(epoch))
    accelerator.save_model(model, args.output_dir)
    state = accelerator.get_state_dict(model)
    if accelerator.is_main_process:
        accelerator.unwrap_model(model).save_pretrained(args.output_dir, state_dict=state)
        (args.output_dir / "history.json").write_text(json.dumps(history))
    accelerator.end_training()


if __name__ == "__main__":
    main()
