"""A Hugging Face Trainer script under stock ZeRO-3 and under the cyclic engine."""

import pytest
import torch
from transformers import LlamaForCausalLM

from support.client_results import Results, same, same_run
from support.client_trainer import (
    ARGUMENTS,
    BATCH,
    EVERY,
    HELD_OUT,
    RANKS,
    ROUNDS,
    SEQUENTIAL,
    STEPS,
    WINDOWS,
    WORST,
    oracle,
    windows,
)

pytestmark = pytest.mark.slow


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
