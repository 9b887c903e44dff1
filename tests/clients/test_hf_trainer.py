"""A Hugging Face Trainer script under stock ZeRO-3 and under the cyclic engine."""

import sysconfig
from pathlib import Path

import pytest
import torch
from deepspeed.runtime.lr_schedules import WarmupLR
from results import Results, same, same_run
from transformers import LlamaConfig, LlamaForCausalLM, set_seed

from deepspeed_cdp.analysis import reference
from deepspeed_cdp.plan.schedule import threshold

RANKS, BATCH, ROUNDS, STEPS, LENGTH, WINDOWS, HELD_OUT = 2, 2, 2, 10, 32, 44, 11
EVERY, PER_EPOCH = 4, 6  # 11 micro-batches per rank and epoch: the sixth step has one only
ARGUMENTS = f"""--use_cpu --report_to none --disable_tqdm true --layers 3 --hidden 32 --length {LENGTH} --windows {WINDOWS}
--held_out {HELD_OUT} --max_steps {STEPS} --per_device_train_batch_size {BATCH} --per_device_eval_batch_size {BATCH}
--gradient_accumulation_steps {ROUNDS} --logging_steps 1 --eval_strategy steps --eval_steps {EVERY} --save_steps {EVERY}
--load_best_model_at_end --warmup_steps 3 --learning_rate 3e-3 --max_grad_norm 0.5
--adam_epsilon 1e-2""".split()
WORST = ["--metric_for_best_model", "loss", "--greater_is_better", "true"]  # so that the "best" is not simply the last
SEQUENTIAL = ["--train_sampling_strategy", "sequential"]


@pytest.fixture(scope="module")
def runs(launcher, ds_config, tmp_path_factory) -> dict[str, Results]:
    folder = tmp_path_factory.mktemp("hf_trainer")

    def job(name: str, rule: str | None, *more: str) -> tuple[str, list[str]]:
        return "hf_trainer.py", [
            "--deepspeed",
            ds_config("hf_ds_config.json", rule),
            "--output_dir",
            str(folder / name),
            *ARGUMENTS,
            *more,
        ]

    launcher.run(
        [
            job("stock", None, *WORST),
            job("dp", "dp", *WORST),
            *(job(rule, rule, *SEQUENTIAL) for rule in ("cdp-v1", "cdp-v2")),
            job("resumed", "cdp-v2", *SEQUENTIAL, "--resume_from_checkpoint", str(folder / "cdp-v2/checkpoint-4")),
        ]
    )
    return {name: Results(folder / name) for name in ("stock", "dp", "cdp-v1", "cdp-v2", "resumed")}


def test_dp_equals_zero3(runs):
    same_run(runs["dp"], runs["stock"], STEPS)
    assert len(runs["stock"].log("eval_loss")) == 3
    same(runs["dp"].weights(STEPS), runs["stock"].weights(STEPS), 1e-6)


def test_best_model_is_loaded_and_saved(runs):
    """The "best" is checkpoint-4: what save_model() wrote at the end is that, not the last."""
    dp = runs["dp"]
    same(dp.weights(), dp.weights(EVERY), 0.0)
    assert not torch.equal(dp.weights()["lm_head.weight"], dp.weights(STEPS)["lm_head.weight"])


def windows() -> torch.Tensor:
    folder = Path(sysconfig.get_paths()["stdlib"])
    text = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py"))[:20])
    return torch.tensor(list(text[: LENGTH * (WINDOWS + HELD_OUT)])).view(-1, LENGTH)


def oracle(rule: str, stages: list[list[str]]) -> reference.Trained:
    set_seed(42)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256,
            hidden_size=32,
            intermediate_size=128,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=4,
        )
    ).train()
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
        model,
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
    )


@pytest.mark.parametrize("rule", ["cdp-v1", "cdp-v2"])
def test_weights_and_losses_equal_the_oracle(runs, rule):
    run = runs[rule]
    want = oracle(rule, run.stages(STEPS))
    losses = [
        sum(want.losses[step, m, r] for m in range(ROUNDS) for r in range(RANKS)) / (RANKS * ROUNDS) for step in range(STEPS)
    ]
    assert run.log("loss") == pytest.approx(losses, rel=1e-6)
    same(run.weights(STEPS), want.masters, 1e-6)


def test_saved_model_loads_with_from_pretrained_and_gives_the_logged_loss(runs):
    run = runs["cdp-v2"]
    model = LlamaForCausalLM.from_pretrained(run.folder).eval()
    assert model.config.num_hidden_layers == 3
    held_out = windows()[WINDOWS:]
    rows = torch.cat([held_out, held_out[:1]])  # Accelerate fills the last batch up from the start
    with torch.no_grad():
        losses = [model(input_ids=x, labels=x).loss for x in rows.split(BATCH)]
    mean = float(torch.stack(losses).repeat_interleave(BATCH)[:HELD_OUT].mean())
    assert run.log("eval_loss")[-1] == pytest.approx(mean, rel=1e-6)


def test_resuming_is_bitwise_continuing(runs):
    whole, resumed = runs["cdp-v2"], runs["resumed"]
    assert resumed.log("loss") == whole.log("loss") and resumed.log("eval_loss") == whole.log("eval_loss")
    same(resumed.weights(STEPS), whole.weights(STEPS), 0.0)
