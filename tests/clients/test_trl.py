"""TRL's SFTTrainer, whose fused head and loss read the head's weight outside its module, head tied and not."""

import runpy
import sysconfig
from pathlib import Path

import pytest
import torch
from deepspeed.runtime.lr_schedules import WarmupLR
from transformers import LlamaConfig, LlamaForCausalLM, set_seed

from deepspeed_cdp.analysis import reference
from deepspeed_cdp.plan.schedule import threshold
from support.client_results import Results, same, same_run
from support.engine_work import explicit
from support.trainer_jobs import EXAMPLES

pytestmark = pytest.mark.slow

RANKS, BATCH, ROUNDS, EXAMPLES_USED = 2, 2, 2, 40
STEPS = 6
ARGUMENTS = f"""--use_cpu --bf16 false --report_to none --disable_tqdm true --layers 3 --hidden 32 --examples 40
--max_steps {STEPS} --per_device_train_batch_size 2 --gradient_accumulation_steps 2 --logging_steps 1
--save_steps {STEPS} --warmup_steps 3 --learning_rate 3e-3 --max_grad_norm 0.5""".split()
PAIRS = {"untied": [], "tied": ["--tie"]}


@pytest.fixture(scope="module")
def runs(launcher, ds_config, tmp_path_factory) -> dict[str, Results]:
    folder = tmp_path_factory.mktemp("trl")

    def job(name: str, rule: str | None, *more: str) -> tuple[str, list[str]]:
        return "trl_sft.py", [
            "--deepspeed",
            ds_config("hf_ds_config.json", rule),
            "--output_dir",
            str(folder / name),
            *ARGUMENTS,
            *more,
        ]

    sequential = ["--train_sampling_strategy", "sequential"]
    launcher.run(
        [
            job(f"{kind} {rule}", rule, *more, *(sequential if rule == "cdp-v2" else []))
            for kind, more in PAIRS.items()
            for rule in (None, "dp", "cdp-v2")
        ]
    )
    return {path.name: Results(path) for path in folder.iterdir()}


@pytest.mark.parametrize("kind", PAIRS)
def test_dp_equals_zero3(runs, kind):
    same_run(runs[f"{kind} dp"], runs[f"{kind} None"], STEPS)
    same(runs[f"{kind} dp"].weights(), runs[f"{kind} None"].weights(), 1e-6)


def oracle(tied: bool, rule: str, stages: list[list[str]]) -> reference.Trained:
    set_seed(42)
    tokenizer = runpy.run_path(str(EXAMPLES / "trl_sft.py"))["byte_tokenizer"]()
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=257,
            hidden_size=32,
            intermediate_size=128,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=4,
            tie_word_embeddings=tied,
            pad_token_id=tokenizer.pad_token_id,
        )
    ).train()
    lines = [
        line
        for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:20]
        for line in path.read_text("utf-8").splitlines()
        if len(line) > 20
    ][:EXAMPLES_USED]
    rows = [tokenizer(line)["input_ids"] + [tokenizer.eos_token_id] for line in lines]
    each, schedulers = RANKS * BATCH * ROUNDS, []

    def batch(step: int, rnd: int, rank: int) -> tuple[torch.Tensor, torch.Tensor, int]:
        """Padded tokens, labels, and how many labels the whole step has."""
        first = step % (EXAMPLES_USED // each) * each
        tokens = sum(len(row) - 1 for row in rows[first : first + each])
        mine = [torch.tensor(row) for row in rows[first + (rnd * RANKS + rank) * BATCH :][:BATCH]]
        pad = torch.nn.utils.rnn.pad_sequence
        return pad(mine, True, tokenizer.pad_token_id), pad(mine, True, -100), tokens

    def loss(call, b) -> torch.Tensor:
        logits = call(input_ids=b[0]).logits[:, :-1].flatten(0, 1)
        return torch.nn.functional.cross_entropy(logits, b[1][:, 1:].flatten(), reduction="sum") / b[2] * RANKS * ROUNDS

    def make(named):
        optimizer = torch.optim.AdamW([p for _, p in named], lr=3e-3, weight_decay=0.0)
        schedulers.append(WarmupLR(optimizer, warmup_min_lr=0, warmup_max_lr=3e-3, warmup_num_steps=3))
        return optimizer

    return reference.train(
        model,
        stages,
        threshold(rule, RANKS),
        batch,
        loss,
        make,
        STEPS,
        rounds=ROUNDS,
        clip=0.5,
        on_step=lambda step, _: schedulers[0].step() if step else None,
        delay_correction=explicit("predict"),  # cyclic.delay_correction is "auto"
    )


@pytest.mark.parametrize("kind", PAIRS)
def test_weights_and_losses_equal_the_oracle(runs, kind):
    run = runs[f"{kind} cdp-v2"]
    want = oracle(kind == "tied", "cdp-v2", run.stages(STEPS))
    losses = [
        sum(want.losses[step, m, r] for m in range(ROUNDS) for r in range(RANKS)) / (RANKS * ROUNDS) for step in range(STEPS)
    ]
    assert run.log("loss") == pytest.approx(losses, rel=1e-6)
    same(run.weights(), want.masters, 1e-6)
