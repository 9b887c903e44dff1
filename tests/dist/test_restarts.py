"""torchrun's restarts: the engine warns where they fail, and its advice works. Files left in /dev/shm are DeepSpeed's."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from deepspeed_cdp.integration.engine_base import restart_warning
from support.patience import patience
from support.processes import free_port

SHARED = {"TORCHELASTIC_MAX_RESTARTS": "2", "TORCHELASTIC_USE_AGENT_STORE": "True"}


@pytest.mark.parametrize(
    "environment, warned",
    [
        ({}, False),
        (SHARED, True),
        (SHARED | {"TORCHELASTIC_MAX_RESTARTS": "0"}, False),
        (SHARED | {"TORCHELASTIC_USE_AGENT_STORE": "False"}, False),
    ],
)
def test_the_warning_is_for_restarts_with_a_shared_store(environment, warned):
    assert bool(restart_warning(environment)) == warned
    assert not warned or "--max-restarts is 2" in restart_warning(environment)


def torchrun(folder: Path, what: str, *options: str, **environment: str) -> str:
    """Output of two ranks."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--max-restarts=1", *options]
    command += [str(Path(__file__).parents[1] / "support" / "restarted_rank.py"), str(folder), what]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=patience(120))
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    return done.stdout + done.stderr


def ranks(output: str) -> list[tuple[str, ...]]:
    """(rank, attempt, first step, last step) of each rank that ended."""
    return sorted(re.findall(r"rank (\d): attempt (\d), begun at (\d), ended at (\d)", output))


@pytest.mark.slow
def test_a_restart_with_a_store_of_its_own_goes_on(operators, tmp_path):
    options = ("--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{free_port()}")
    output = torchrun(tmp_path, "kill", *options, TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")
    assert ranks(output) == [("0", "1", "2", "3"), ("1", "1", "2", "3")] and "--max-restarts is" not in output


@pytest.mark.slow
def test_static_rendezvous_is_warned_of_once(operators, tmp_path):
    """LOCAL_SIZE is of the ``deepspeed`` launcher: with it DeepSpeed makes files in /dev/shm, which it never removes."""
    output = torchrun(tmp_path, "calm", f"--master-port={free_port()}", LOCAL_SIZE="2")
    files = {Path(name) for name in re.findall(r"/dev/shm/[\w.]+", output)}
    left = [file for file in files if file.exists()]
    for file in left:
        file.unlink()
    assert ranks(output) == [("0", "0", "0", "3"), ("1", "0", "0", "3")]
    assert output.count("--max-restarts is 1, but torchrun's ranks share a store") == 1
    assert left and all(file.name.startswith("deepspeed_allreduce_buffer") for file in files), "the engine has none of its own"
