"""LoRA adapters under the Trainer, with gradient checkpointing of both kinds, under stock ZeRO-3 and the cyclic engine."""

import json
import sysconfig
from pathlib import Path

import pytest
import torch
from deepspeed.runtime.lr_schedules import WarmupLR
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors import safe_open
from transformers import LlamaConfig, LlamaForCausalLM, set_seed

from deepspeed_cdp.analysis import reference
from deepspeed_cdp.plan.schedule import threshold
from support.client_results import Results, same, same_run
from support.engine_work import explicit

pytestmark = pytest.mark.slow

RANKS, BATCH, ROUNDS, STEPS, LENGTH, WINDOWS = 2, 2, 2, 6, 32, 32
PER_EPOCH = WINDOWS // (RANKS * BATCH * ROUNDS)
ARGUMENTS = f"""--use_cpu --report_to none --disable_tqdm true --length {LENGTH} --windows {WINDOWS} --max_steps {STEPS}
 --per_device_train_batch_size {BATCH} --gradient_accumulation_steps {ROUNDS} --logging_steps 1
--save_steps {STEPS} --warmup_steps 3 --learning_rate 3e-3 --max_grad_norm 0.1 --gradient_checkpointing""".split()
REENTRANT = ["--gradient_checkpointing_kwargs", json.dumps({"use_reentrant": True})]
ADAPTER = "adapter_model.safetensors"


@pytest.fixture(scope="module")
def runs(launcher, ds_config, tmp_path_factory) -> dict[str, Results]:
    folder = tmp_path_factory.mktemp("peft")
    base().save_pretrained(folder / "base")  # the script's from_pretrained partitions it with zero.Init, as under ZeRO-3

    def job(name: str, rule: str | None, *more: str) -> tuple[str, list[str]]:
        return "peft_lora.py", [
            "--deepspeed",
            ds_config("hf_ds_config.json", rule),
            "--output_dir",
            str(folder / name),
            "--model",
            str(folder / "base"),
            *ARGUMENTS,
            *more,
        ]

    launcher.run(
        [
            job("stock", None),
            job("dp", "dp"),
            job("reentrant", "dp", *REENTRANT),
            job("cdp-v2", "cdp-v2", "--train_sampling_strategy", "sequential"),
        ]
    )
    return {name: Results(folder / name) for name in ("stock", "dp", "reentrant", "cdp-v2")}


@pytest.mark.parametrize("checkpointing", ["dp", "reentrant"])
def test_dp_equals_zero3(runs, checkpointing):
    same_run(runs[checkpointing], runs["stock"], STEPS)
    same(runs[checkpointing].weights(file=ADAPTER), runs["stock"].weights(file=ADAPTER), 1e-6)


def base() -> LlamaForCausalLM:
    set_seed(1)
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
    model = base()
    set_seed(42)
    model = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "up_proj"])).train()
    text = b"".join(path.read_bytes() for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:20])
    data, schedulers = torch.tensor(list(text[: LENGTH * WINDOWS])).view(-1, LENGTH), []

    def batch(step: int, rnd: int, rank: int) -> torch.Tensor:
        first = ((step % PER_EPOCH * ROUNDS + rnd) * RANKS + rank) * BATCH
        return data[first : first + BATCH]

    def make(named):
        optimizer = torch.optim.AdamW([p for _, p in named], lr=3e-3, weight_decay=0.0)
        schedulers.append(WarmupLR(optimizer, warmup_min_lr=0, warmup_max_lr=3e-3, warmup_num_steps=3))
        return optimizer

    return reference.train(
        model,
        stages,
        threshold(rule, RANKS),
        batch,
        lambda call, x: call(input_ids=x, labels=x).loss,
        make,
        STEPS,
        rounds=ROUNDS,
        clip=0.1,
        on_step=lambda step, _: schedulers[0].step() if step else None,
        delay_correction=explicit("predict"),  # cyclic.delay_correction is "auto"
    )


def test_adapters_and_losses_equal_the_oracle(runs):
    run = runs["cdp-v2"]
    want = oracle("cdp-v2", run.stages(STEPS))
    losses = [
        sum(want.losses[step, m, r] for m in range(ROUNDS) for r in range(RANKS)) / (RANKS * ROUNDS) for step in range(STEPS)
    ]
    assert run.log("loss") == pytest.approx(losses, rel=1e-6)
    same(run.weights(file=ADAPTER), {n.replace(".default", ""): w for n, w in want.masters.items()}, 1e-6)


def test_only_adapters_are_trained_and_saved(runs):
    run = runs["cdp-v2"]
    assert all("lora_" in name for name in run.weights(file=ADAPTER))
    step = run.folder / f"checkpoint-{STEPS}/global_step{STEPS}"
    keys = {key for file in step.glob("stage_*.safetensors") for key in safe_open(file, "pt").keys()}
    assert {key for key in keys if key.startswith(("param/", "state/"))} and not any(
        "lora_" not in key for key in keys if key.startswith(("param/", "state/"))
    )


def test_adapters_load_into_the_base(runs):
    run = runs["cdp-v2"]
    model = PeftModel.from_pretrained(base(), str(run.folder))
    loaded = {n.replace(".default", ""): p.detach() for n, p in model.named_parameters() if "lora_" in n}
    same(loaded, run.weights(file=ADAPTER), 0.0)
