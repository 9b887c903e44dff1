"""AutoTP through the Hugging Face Trainer: the script is stock ZeRO-3's."""

import json

import pytest

from support.client_results import EXAMPLES, Results
from support.client_results import same as same_weights
from support.tensor_work import trainer

ROUNDS, STEPS = 2, 6


@pytest.fixture(scope="module")
def runs(pool, tmp_path_factory) -> dict[str, Results]:
    """The last run resumes the one before from its checkpoint of step 3."""
    folder, jobs = tmp_path_factory.mktemp("trainer"), []
    for name in ("stock", "dp", "cdp-v2", "resumed"):
        config = json.loads((EXAMPLES / "hf_ds_config.json").read_text())
        config["optimizer"]["params"]["torch_adam"] = True
        config["tensor_parallel"] = {"autotp_size": 2}
        config.pop("cyclic")
        if name != "stock":
            rule = "dp" if name == "dp" else "cdp-v2"
            config["cyclic"] = {"enabled": True, "rule": rule, "timeout_seconds": 60, "delay_correction": "extrapolate"}
        (folder / f"{name}.json").write_text(json.dumps(config))
        arguments = f"""--deepspeed {folder}/{name}.json --output_dir {folder}/{name} --use_cpu --report_to none
        --disable_tqdm true --layers 3 --hidden 32 --length 32 --windows 48 --held_out 8 --max_steps {STEPS}
        --per_device_train_batch_size 1 --per_device_eval_batch_size 1 --gradient_accumulation_steps {ROUNDS} --logging_steps 1
        --eval_strategy steps --eval_steps 3 --save_steps 3 --warmup_steps 2 --learning_rate 3e-3 --max_grad_norm 0.5
        --adam_epsilon 1e-2 --train_sampling_strategy sequential"""
        more = f" --resume_from_checkpoint {folder}/cdp-v2/checkpoint-3" if name == "resumed" else ""
        jobs.append((arguments + more).split())
    pool.run(4, trainer, jobs, timeout=400)
    return {name: Results(folder / name) for name in ("stock", "dp", "cdp-v2", "resumed")}


def test_trainer_under_dp_equals_zero3(runs):
    dp, stock = runs["dp"], runs["stock"]
    for key in ("loss", "eval_loss", "learning_rate"):
        assert len(stock.log(key)) == len(dp.log(key)) > 1 and dp.log(key) == pytest.approx(stock.log(key), rel=1e-5), key
    same_weights(dp.weights(STEPS), stock.weights(STEPS), 1e-5)


def test_trainer_resumes_from_its_checkpoint(runs):
    run, resumed = runs["cdp-v2"], runs["resumed"]
    assert resumed.log("loss") == run.log("loss") and run.log("loss")[2:] != runs["dp"].log("loss")[2:], "the rules differ"
    same_weights(resumed.weights(STEPS), run.weights(STEPS), 0.0)
