"""A loop of one's own with Accelerate under stock ZeRO-3 and under the cyclic engine."""

import json
import math
import sysconfig
from pathlib import Path

import pytest
import torch
from accelerate.data_loader import prepare_data_loader
from accelerate.utils import set_seed
from safetensors.torch import load_file
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM, get_linear_schedule_with_warmup

from deepspeed_cdp.analysis import reference
from deepspeed_cdp.plan.schedule import threshold
from support.client_results import same
from support.engine_work import explicit

pytestmark = pytest.mark.slow

RANKS, BATCH, ROUNDS, EPOCHS, LENGTH, WINDOWS = 2, 2, 2, 3, 32, 28
PER_EPOCH = 4  # 7 micro-batches per rank and epoch: the fourth step has one only
STEPS = EPOCHS * PER_EPOCH
ARGUMENTS = f"""--layers 3 --hidden 32 --length {LENGTH} --windows {WINDOWS} --batch {BATCH} --accumulate {ROUNDS}
--epochs {EPOCHS} --lr 3e-3""".split()


@pytest.fixture(scope="module")
def runs(launcher, ds_config, tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("accelerate")

    def job(name: str, rule: str | None, *more: str) -> tuple[str, list[str], dict[str, str]]:
        return (
            "accelerate_loop.py",
            ["--output_dir", str(folder / name), *ARGUMENTS, *more],
            {"ACCELERATE_DEEPSPEED_CONFIG_FILE": ds_config("accelerate_ds_config.json", rule, gradient_clipping=0.5)},
        )

    launcher.run(
        [
            job("stock", None),
            job("dp", "dp"),
            job("cdp-v1", "cdp-v1"),
            job("cdp-v2", "cdp-v2"),
            job("resumed", "cdp-v2", "--resume", str(folder / "cdp-v2/state_1")),
        ],
        "accelerate",
    )
    return {path.name: path for path in folder.iterdir()}


def history(run: Path, key: str) -> list[float]:
    return [entry[key] for entry in json.loads((run / "history.json").read_text())]


def weights(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / "model.safetensors")


def test_dp_equals_zero3(runs):
    stock, dp = runs["stock"], runs["dp"]
    assert len(history(stock, "loss")) == STEPS
    assert history(dp, "loss") == pytest.approx(history(stock, "loss"), rel=1e-6)
    assert history(dp, "lr") == history(stock, "lr")
    same(weights(dp), weights(stock), 1e-6)
    late, now = history(dp, "grad_norm"), history(stock, "grad_norm")
    for epoch in range(EPOCHS):  # saving flushes: rank 0 then knows all but the last step's
        assert late[epoch * PER_EPOCH + 1 : (epoch + 1) * PER_EPOCH] == pytest.approx(
            now[epoch * PER_EPOCH : (epoch + 1) * PER_EPOCH - 1], rel=1e-5
        )
    assert math.isnan(late[0])


def build() -> LlamaForCausalLM:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256,
            hidden_size=32,
            intermediate_size=128,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=4,
        )
    )


def oracle(rule: str, stages: list[list[str]]) -> reference.Trained:
    text = b"".join(path.read_bytes() for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:20])
    data = list(torch.tensor(list(text[: LENGTH * WINDOWS])).view(-1, LENGTH))
    set_seed(1)
    model = build()
    batches = {}
    for rank in range(RANKS):  # the shuffled batches that Accelerate gives each rank
        set_seed(1)
        build()  # as in the script: the loader's seed is drawn after the model's weights
        loader = prepare_data_loader(
            DataLoader(data, BATCH, shuffle=True), torch.device("cpu"), RANKS, rank, use_seedable_sampler=True
        )
        for epoch in range(EPOCHS):
            loader.set_epoch(epoch)
            for at, batch in enumerate(loader):
                batches[epoch * PER_EPOCH + at // ROUNDS, at % ROUNDS, rank] = batch
    schedulers = []

    def make(named):
        optimizer = torch.optim.AdamW([p for _, p in named], lr=3e-3)
        schedulers.append(get_linear_schedule_with_warmup(optimizer, 4, STEPS * RANKS))
        return optimizer

    def loss(call, place):  # Accelerate divides by the number of rounds, also where one is missing
        batch = batches.get(place)
        return call(input_ids=batch, labels=batch).loss if batch is not None else call(input_ids=data[0][None]).logits.sum() * 0

    def advance(step, _):  # Accelerate steps the schedule once per rank
        for _ in range(RANKS if step else 0):
            schedulers[0].step()

    return reference.train(
        model,
        stages,
        threshold(rule, RANKS),
        lambda *place: place,
        loss,
        make,
        STEPS,
        rounds=ROUNDS,
        clip=0.5,
        flush_after=range(PER_EPOCH - 1, STEPS, PER_EPOCH),
        on_step=advance,
        delay_correction=explicit("predict"),  # cyclic.delay_correction is "auto"
    )


@pytest.mark.parametrize("rule", ["cdp-v1", "cdp-v2"])
def test_weights_and_losses_equal_the_oracle(runs, rule):
    run = runs[rule]
    stages = json.loads((run / "state_0/pytorch_model/cyclic.json").read_text())["stages"]
    want = oracle(rule, stages)
    last = [max(m for m in range(ROUNDS) if step % PER_EPOCH < PER_EPOCH - 1 or m == 0) for step in range(STEPS)]
    losses = [sum(want.losses[step, last[step], r] for r in range(RANKS)) / RANKS for step in range(STEPS)]
    assert history(run, "loss") == pytest.approx(losses, rel=1e-6)
    same(weights(run), want.masters, 1e-6)


def test_load_state_is_bitwise_continuing(runs):
    whole, resumed = runs["cdp-v2"], runs["resumed"]
    assert history(resumed, "loss") == history(whole, "loss")[2 * PER_EPOCH :]
    assert history(resumed, "lr") == history(whole, "lr")[2 * PER_EPOCH :]
    same(weights(resumed), weights(whole), 0.0)
    assert LlamaForCausalLM.from_pretrained(whole).lm_head.weight.equal(weights(whole)["lm_head.weight"])
