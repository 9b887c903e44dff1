"""Arguments and oracle of the Hugging Face Trainer tests."""

import sysconfig
from pathlib import Path

import torch
from deepspeed.runtime.lr_schedules import WarmupLR
from transformers import LlamaConfig, LlamaForCausalLM, set_seed

from deepspeed_cdp.analysis import reference
from deepspeed_cdp.plan.schedule import threshold
from support.engine_work import explicit

RANKS, BATCH, ROUNDS, STEPS, LENGTH, WINDOWS, HELD_OUT = 2, 2, 2, 10, 32, 44, 11
EVERY, PER_EPOCH = 4, 6  # 11 micro-batches per rank and epoch: the sixth step has one only
ARGUMENTS = f"""--use_cpu --report_to none --disable_tqdm true --layers 3 --hidden 32 --length {LENGTH} --windows {WINDOWS}
--held_out {HELD_OUT} --max_steps {STEPS} --per_device_train_batch_size {BATCH} --per_device_eval_batch_size {BATCH}
--gradient_accumulation_steps {ROUNDS} --logging_steps 1 --eval_strategy steps --eval_steps {EVERY} --save_steps {EVERY}
--load_best_model_at_end --warmup_steps 3 --learning_rate 3e-3 --max_grad_norm 0.5
--adam_epsilon 1e-2""".split()
WORST = ["--metric_for_best_model", "loss", "--greater_is_better", "true"]  # so that the "best" is not simply the last
SEQUENTIAL = ["--train_sampling_strategy", "sequential"]


def windows() -> torch.Tensor:
    folder = Path(sysconfig.get_paths()["stdlib"])
    text = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py"))[:20])
    return torch.tensor(list(text[: LENGTH * (WINDOWS + HELD_OUT)])).view(-1, LENGTH)


def model() -> LlamaForCausalLM:
    """The example's, with its seed."""
    set_seed(42)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256,
            hidden_size=32,
            intermediate_size=128,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=4,
        )
    ).train()


def oracle(rule: str, stages: list[list[str]]) -> reference.Trained:
    data, schedulers = windows(), []

    def batch(step: int, rnd: int, rank: int) -> tuple[torch.Tensor, float]:
        """The micro-batch and what its mean loss counts: there is no second one in an epoch's last step."""
        epoch, step = divmod(step, PER_EPOCH)
        last = step == PER_EPOCH - 1
        first = 0 if last and rnd else ((step * ROUNDS + rnd) * RANKS + rank) * BATCH
        return data[first : first + BATCH], (2.0 if rnd == 0 else 0.0) if last else 1.0

    def make(named):
        optimizer = torch.optim.AdamW([p for _, p in named], lr=3e-3, eps=1e-2, weight_decay=0.0)  # else scales cancel
        schedulers.append(WarmupLR(optimizer, warmup_min_lr=0, warmup_max_lr=3e-3, warmup_num_steps=3))
        return optimizer

    return reference.train(
        model(),
        stages,
        threshold(rule, RANKS),
        batch,
        lambda call, b: call(input_ids=b[0], labels=b[0]).loss * b[1],
        make,
        STEPS,
        rounds=ROUNDS,
        clip=0.5,
        flush_after=(3, 7),
        on_step=lambda step, _: schedulers[0].step() if step else None,
        delay_correction=explicit("predict"),  # cyclic.delay_correction is "auto"
    )
