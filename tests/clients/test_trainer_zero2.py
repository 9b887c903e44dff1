"""A Hugging Face Trainer script under ZeRO-2 and under the cyclic engine with ZeRO stage 2, by DeepSpeed's launcher."""

import pytest

from support.client_results import Results, same, same_run
from support.client_trainer import ARGUMENTS, EVERY, SEQUENTIAL, STEPS, WORST, oracle

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def runs(launcher, ds_config, tmp_path_factory) -> dict[str, Results]:
    folder = tmp_path_factory.mktemp("hf_replicas")

    def job(name: str, rule: str | None, *more: str) -> tuple[str, list[str]]:
        config = ds_config("hf_ds_config.json", rule, zero_optimization={"stage": 2})
        return "hf_trainer.py", ["--deepspeed", config, "--output_dir", str(folder / name), *ARGUMENTS, *more]

    launcher.run(
        [
            job("stock", None, *WORST),
            job("dp", "dp", *WORST),
            job("cdp-v2", "cdp-v2", *SEQUENTIAL),
            job("resumed", "cdp-v2", *SEQUENTIAL, "--resume_from_checkpoint", str(folder / f"cdp-v2/checkpoint-{EVERY}")),
        ]
    )
    return {name: Results(folder / name) for name in ("stock", "dp", "cdp-v2", "resumed")}


def test_dp_equals_zero2(runs):
    """Losses, evaluations, and what the Trainer saves through ``module.state_dict()``, which it does under ZeRO-2."""
    same_run(runs["dp"], runs["stock"], STEPS)
    same(runs["dp"].weights(STEPS), runs["stock"].weights(STEPS), 1e-6)
    same(runs["dp"].weights(), runs["dp"].weights(EVERY), 0.0)  # the "best" is loaded at the end


def test_v2_equals_the_oracle_and_resumes_bitwise(runs):
    run, resumed = runs["cdp-v2"], runs["resumed"]
    want = oracle("cdp-v2", run.stages(STEPS))
    same(run.weights(STEPS), want.masters, 1e-6)
    assert resumed.log("loss") == run.log("loss") and resumed.log("eval_loss") == run.log("eval_loss")
    same(resumed.weights(STEPS), run.weights(STEPS), 0.0)
