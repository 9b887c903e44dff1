"""Jobs of the Hugging Face Trainer's example with groups of two ranks, on CPUs and on GPUs. (GPU hosts may lack pytest.)"""

import json
from pathlib import Path
from typing import Any

EXAMPLES = Path(__file__).parents[2] / "examples"
ROUNDS, STEPS = 2, 6
PARALLELISM = {  # what `accelerate launch` sets for --parallelism_config_...
    "ACCELERATE_USE_PARALLELISM_CONFIG": "true",
    "PARALLELISM_CONFIG_SP_SIZE": "2",
    "PARALLELISM_CONFIG_DP_SHARD_SIZE": "2",
    "PARALLELISM_CONFIG_SP_ATTN_IMPLEMENTATION": "sdpa",
}


def trainer_arguments(folder: Path, name: str, rule: str | None, cpu: bool = True, **config: Any) -> list[str]:
    """Of the Trainer's example, which writes to ``folder``/``name``; its config is written, too.

    Args:
        rule: None for stock ZeRO-3.
        config: added to the example's config.
    """
    whole = json.loads((EXAMPLES / "hf_ds_config.json").read_text()) | config
    whole["optimizer"]["params"]["torch_adam"] = True
    whole.pop("cyclic")
    if rule is not None:
        whole["cyclic"] = {"enabled": True, "rule": rule, "timeout_seconds": 60, "delay_correction": "extrapolate"}
    (folder / f"{name}.json").write_text(json.dumps(whole))
    return f"""--deepspeed {folder}/{name}.json --output_dir {folder}/{name} {"--use_cpu" if cpu else ""} --report_to none
        --disable_tqdm true --layers 3 --hidden 32 --length 32 --windows 48 --held_out 8 --max_steps {STEPS}
        --per_device_train_batch_size 1 --per_device_eval_batch_size 1 --gradient_accumulation_steps {ROUNDS} --logging_steps 1
        --eval_strategy steps --eval_steps 3 --save_steps 3 --warmup_steps 2 --learning_rate 3e-3 --max_grad_norm 0.5
        --adam_epsilon 1e-2 --train_sampling_strategy sequential""".split()
