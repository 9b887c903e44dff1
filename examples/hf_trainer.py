"""Pretrains a small Llama with the Hugging Face Trainer, on the bytes of Python's standard library.

    deepspeed --num_gpus 2 examples/hf_trainer.py --deepspeed examples/hf_ds_config.json --output_dir out --bf16 \
        --max_steps 200 --eval_strategy steps --eval_steps 50 --save_steps 50 --load_best_model_at_end

On four GPUs with sequence groups of two (docs/parallelism.md; the position ids are for this):

    export ACCELERATE_USE_PARALLELISM_CONFIG=true PARALLELISM_CONFIG_SP_SIZE=2 PARALLELISM_CONFIG_DP_SHARD_SIZE=2 \
        PARALLELISM_CONFIG_SP_ATTN_IMPLEMENTATION=sdpa
    deepspeed --num_gpus 4 examples/hf_trainer.py --per_device_train_batch_size 1 ...
"""

import argparse
import sysconfig
from pathlib import Path

from datasets import Dataset
from transformers import HfArgumentParser, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed


def windows(folder: Path, length: int, count: int) -> Dataset:
    """The first ``count`` windows of ``length`` bytes."""
    text = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py"))[:20])
    ids = [list(text[i * length : (i + 1) * length]) for i in range(count)]
    return Dataset.from_dict({"input_ids": ids, "labels": ids, "position_ids": [list(range(length))] * count})


def main() -> None:
    extra = argparse.ArgumentParser(add_help=False)
    extra.add_argument("--layers", type=int, default=4)
    extra.add_argument("--hidden", type=int, default=128)
    extra.add_argument("--length", type=int, default=128, help="bytes per sequence")
    extra.add_argument("--windows", type=int, default=4000)
    extra.add_argument("--held_out", type=int, default=101, help="windows kept for evaluation")
    sizes, rest = extra.parse_known_args()
    (args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses(rest)

    set_seed(args.seed)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256,
            hidden_size=sizes.hidden,
            intermediate_size=4 * sizes.hidden,
            num_hidden_layers=sizes.layers,
            num_attention_heads=4,
            num_key_value_heads=4,
            bos_token_id=None,
            eos_token_id=None,
        )
    )
    data = windows(Path(sysconfig.get_paths()["stdlib"]), sizes.length, sizes.windows + sizes.held_out)
    trainer = Trainer(
        model,
        args,
        train_dataset=data.select(range(sizes.windows)),
        eval_dataset=data.select(range(sizes.windows, sizes.windows + sizes.held_out)),
    )
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    trainer.save_model()
    trainer.save_state()


if __name__ == "__main__":
    main()
