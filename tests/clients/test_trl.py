"""TRL's SFTTrainer, whose fused head and loss read the head's weight outside its module, head tied and not."""

import pytest
from results import Results, same, same_run

STEPS = 6
ARGUMENTS = f"""--use_cpu --bf16 false --report_to none --disable_tqdm true --layers 3 --hidden 32 --examples 40 --max_steps {STEPS}
--per_device_train_batch_size 2 --gradient_accumulation_steps 2 --logging_steps 1 --save_steps {STEPS} --warmup_steps 3
--learning_rate 3e-3 --max_grad_norm 0.5""".split()
PAIRS = {"untied": [], "tied": ["--tie"]}


@pytest.fixture(scope="module")
def runs(launcher, ds_config, tmp_path_factory) -> dict[str, Results]:
    folder = tmp_path_factory.mktemp("trl")

    def job(name: str, rule: str | None, *more: str) -> tuple[str, list[str]]:
        return "trl_sft.py", ["--deepspeed", ds_config("hf_ds_config.json", rule), "--output_dir", str(folder / name),
                              *ARGUMENTS, *more]

    launcher.run([job(f"{kind} {rule}", rule, *more) for kind, more in PAIRS.items() for rule in (None, "dp", "cdp-v2")])
    return {path.name: Results(path) for path in folder.iterdir()}


@pytest.mark.parametrize("kind", PAIRS)
def test_dp_equals_zero3(runs, kind):
    same_run(runs[f"{kind} dp"], runs[f"{kind} None"], STEPS)
    same(runs[f"{kind} dp"].weights(), runs[f"{kind} None"].weights(), 1e-6)
