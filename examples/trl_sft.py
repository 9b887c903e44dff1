"""Supervised fine-tuning of a small Llama with TRL's SFTTrainer, on the lines of Python's standard library.

deepspeed --num_gpus 2 examples/trl_sft.py --deepspeed examples/hf_ds_config.json --output_dir out --max_steps 200
"""

import argparse
import sysconfig
from pathlib import Path

from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import HfArgumentParser, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed
from trl import SFTConfig, SFTTrainer


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, and one for padding and the end."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate([*letters, "<end>"])}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", pad_token="<end>")


def main() -> None:
    extra = argparse.ArgumentParser(add_help=False)
    extra.add_argument("--layers", type=int, default=4)
    extra.add_argument("--hidden", type=int, default=128)
    extra.add_argument("--examples", type=int, default=2000)
    extra.add_argument("--tie", action="store_true", help="share the embedding with the head")
    sizes, rest = extra.parse_known_args()
    (args,) = HfArgumentParser(SFTConfig).parse_args_into_dataclasses(rest)

    set_seed(args.seed)
    tokenizer = byte_tokenizer()
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=sizes.hidden,
            intermediate_size=4 * sizes.hidden,
            num_hidden_layers=sizes.layers,
            num_attention_heads=4,
            num_key_value_heads=4,
            tie_word_embeddings=sizes.tie,
            pad_token_id=tokenizer.pad_token_id,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
        )
    )
    folder = Path(sysconfig.get_paths()["stdlib"])
    lines = [line for path in sorted(folder.glob("*.py"))[:20] for line in path.read_text("utf-8").splitlines() if len(line) > 20]
    trainer = SFTTrainer(
        model, args, train_dataset=Dataset.from_dict({"text": lines[: sizes.examples]}), processing_class=tokenizer
    )
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    trainer.save_model()
    trainer.save_state()


if __name__ == "__main__":
    main()
