"""Fine-tunes LoRA adapters (PEFT) of a Llama with the Hugging Face Trainer, on the bytes of Python's standard library.

    deepspeed --num_gpus 2 examples/peft_lora.py --deepspeed examples/hf_ds_config.json --output_dir out --bf16 \
        --model FOLDER --max_steps 200 --gradient_checkpointing

FOLDER is what examples/hf_trainer.py has written, or any causal language model of 256 tokens or more.
"""

import argparse
import sysconfig
from pathlib import Path

from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, HfArgumentParser, Trainer, TrainingArguments, set_seed


def windows(length: int, count: int) -> Dataset:
    """The first ``count`` windows of ``length`` bytes."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    text = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py"))[:20])
    ids = [list(text[i * length : (i + 1) * length]) for i in range(count)]
    return Dataset.from_dict({"input_ids": ids, "labels": ids})


def main() -> None:
    extra = argparse.ArgumentParser(add_help=False)
    extra.add_argument("--model", required=True)
    extra.add_argument("--length", type=int, default=128, help="bytes per sequence")
    extra.add_argument("--windows", type=int, default=4000)
    options, rest = extra.parse_known_args()
    (args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses(rest)

    model = AutoModelForCausalLM.from_pretrained(options.model)
    set_seed(args.seed)  # the adapters start alike on all ranks
    model = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "up_proj"]))
    model.print_trainable_parameters()
    trainer = Trainer(model, args, train_dataset=windows(options.length, options.windows))
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    trainer.save_model()
    trainer.save_state()


if __name__ == "__main__":
    main()
