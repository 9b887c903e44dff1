"""AutoTP through the Hugging Face Trainer: the script is stock ZeRO-3's."""

import pytest

from support.client_results import Results
from support.client_results import same as same_weights
from support.sequence_clients import dp_is_stock, tensor_trainer
from support.trainer_jobs import STEPS, trainer_arguments

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def runs(pool, tmp_path_factory) -> dict[str, Results]:
    """The last run resumes the one before from its checkpoint of step 3."""
    folder, rules = tmp_path_factory.mktemp("trainer"), {"stock": None, "dp": "dp", "cdp-v2": "cdp-v2", "resumed": "cdp-v2"}
    jobs = [trainer_arguments(folder, name, rule, tensor_parallel={"autotp_size": 2}) for name, rule in rules.items()]
    jobs[-1] += ["--resume_from_checkpoint", f"{folder}/cdp-v2/checkpoint-3"]
    pool.run(4, tensor_trainer, jobs, timeout=400)
    return {name: Results(folder / name) for name in rules}


def test_trainer_under_dp_equals_zero3(runs):
    dp_is_stock(runs["dp"], runs["stock"])


def test_trainer_resumes_from_its_checkpoint(runs):
    run, resumed = runs["cdp-v2"], runs["resumed"]
    assert resumed.log("loss") == run.log("loss") and run.log("loss")[2:] != runs["dp"].log("loss")[2:], "the rules differ"
    same_weights(resumed.weights(STEPS), run.weights(STEPS), 0.0)
