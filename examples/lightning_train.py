"""Pretrains a small Llama with Lightning's DeepSpeedStrategy, on the bytes of Python's standard library.

python examples/lightning_train.py --config examples/ds_config.json --devices 2 --steps 100
"""

import argparse
import json
import sysconfig
from pathlib import Path

import lightning
import torch
from lightning.pytorch.strategies import DeepSpeedStrategy
from transformers import LlamaConfig, LlamaForCausalLM


class Windows(torch.utils.data.Dataset):
    """[length] int64 windows of a text's bytes."""

    def __init__(self, text: bytes, length: int, count: int):
        self.ids = torch.tensor(list(text[: length * count])).view(count, length)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.ids[index]


class Model(lightning.LightningModule):
    """A Llama over bytes."""

    def __init__(self, lr: float):
        super().__init__()
        self.lr, self.seen, self.held_out = lr, [], []
        self.model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=256,
                hidden_size=128,
                intermediate_size=512,
                num_hidden_layers=4,
                num_attention_heads=4,
                num_key_value_heads=4,
            )
        )

    def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
        loss = self.model(input_ids=batch, labels=batch).loss
        self.seen.append(loss.detach())
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: torch.Tensor, _: int) -> None:
        loss = self.model(input_ids=batch, labels=batch).loss
        self.held_out.append(loss.detach())
        self.log("val_loss", loss, sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--config", required=True, help="ds_config.json")
    arguments.add_argument("--devices", type=int, default=2)
    arguments.add_argument("--steps", type=int, default=100)
    arguments.add_argument("--windows", type=int, default=3600, help="sequences of an epoch, of 128 bytes")
    arguments.add_argument("--in_order", action="store_true", help="the same on every rank, not shuffled")
    arguments.add_argument("--validate_every", type=int, default=50, help="steps")
    arguments.add_argument("--lr", type=float, default=1e-3)
    arguments.add_argument("--precision", default="bf16-true")
    arguments.add_argument("--out", type=Path, default=Path("out"), help="checkpoints, and losses by rank")
    arguments.add_argument("--resume", help="a checkpoint of an earlier run")
    options = arguments.parse_args()
    lightning.seed_everything(0)
    text = b"".join(path.read_bytes() for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:20])
    data = Windows(text, 128, options.windows + 100)
    train, held_out = torch.utils.data.random_split(data, [options.windows, 100])
    strategy = DeepSpeedStrategy(config=json.loads(Path(options.config).read_text()))
    trainer = lightning.Trainer(
        accelerator="gpu",
        devices=options.devices,
        strategy=strategy,
        precision=options.precision,
        max_steps=options.steps,
        default_root_dir=options.out,
        log_every_n_steps=1,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        val_check_interval=options.validate_every,
        limit_val_batches=3,
        logger=False,
        use_distributed_sampler=not options.in_order,
    )
    model = Model(options.lr)
    trainer.fit(
        model,
        torch.utils.data.DataLoader(train, batch_size=4, shuffle=not options.in_order),
        torch.utils.data.DataLoader(held_out, batch_size=4),
        ckpt_path=options.resume,
    )
    trainer.save_checkpoint(options.out / "last.ckpt")
    (options.out / f"losses_{trainer.global_rank}.json").write_text(
        json.dumps({"training": torch.stack(model.seen).tolist(), "held out": torch.stack(model.held_out).tolist()})
    )


if __name__ == "__main__":
    main()
