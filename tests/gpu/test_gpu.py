"""GPU checks, skipped without CUDA: ``python -m pytest tests/gpu`` on a host with GPUs that reach each other's memory.

Their recorded runs are in benchmarks/results/*/parity.log and stress.log.
"""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0


def torchrun(ranks: int, script: str, *arguments: str) -> str:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}",
               str(Path(__file__).parent / script), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("transport", ["nccl", "peer"])
def test_transport_contract(ranks, transport):
    if ranks > GPUS:
        pytest.skip(f"needs {ranks} GPUs, has {GPUS}")
    assert "passed" in torchrun(ranks, "rank_contract.py", transport)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("transport", ["peer", "nccl"])
def test_parity_with_the_oracle(ranks, transport):
    if ranks > GPUS:
        pytest.skip(f"needs {ranks} GPUs, has {GPUS}")
    assert "passed" in torchrun(ranks, "rank_parity.py", "--transport", transport)


@pytest.mark.parametrize("ranks", [2, 4])
def test_five_hundred_disturbed_steps(ranks):
    if ranks > GPUS:
        pytest.skip(f"needs {ranks} GPUs, has {GPUS}")
    assert "passed" in torchrun(ranks, "rank_stress.py", "500")
