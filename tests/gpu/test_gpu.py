"""GPU checks, skipped without CUDA: ``python -m pytest tests/gpu`` on a host with GPUs that reach each other's memory.

Their recorded runs are in benchmarks/results/*/parity.log and stress.log.
"""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0


def torchrun(ranks: int, script: str, *arguments: str) -> str:
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={ranks}",
        str(Path(__file__).parent / script),
        *arguments,
    ]
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
    assert "passed" in torchrun(ranks, "rank_stress.py", "--steps", "500", "--budget", "280")


def needs(ranks: int) -> None:
    """Skip on a host with fewer GPUs."""
    if ranks > GPUS:
        pytest.skip(f"needs {ranks} GPUs, has {GPUS}")


def launched(command: list[str], seconds: float, **environment: str) -> str:
    """The command's output, whose last line says passed; what is left of it after its time is killed."""
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env={**os.environ, **environment},
    )
    try:
        output, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGTERM)  # torchrun ends its ranks, which are in sessions of their own
        output, _ = process.communicate(timeout=60)
        pytest.fail(f"not done in {seconds} s\n{output}")
    assert process.returncode == 0 and ("passed" in output or "skipped" in output), output
    return output


def ranks_run(ranks: int, script: str, *arguments: str, seconds: float = 300, **environment: str) -> str:
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={ranks}",
        str(Path(__file__).parent / script),
        "--budget",
        str(seconds),
        *arguments,
    ]
    return launched(command, seconds + 45, **environment)


@pytest.mark.parametrize("transport", ["peer", "nccl"])
def test_rings_of_rings_and_the_warm_up(transport):
    needs(4)
    ranks_run(4, "rank_rings.py", "--transport", transport)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("transport", ["peer", "nccl"])
def test_groups_experts_and_a_curriculum(ranks, transport):
    needs(ranks)
    ranks_run(ranks, "rank_groups.py", "--transport", transport)


@pytest.mark.parametrize("ranks", [2, 4])
def test_synchronize_read_and_empty_cache_in_every_step(ranks):
    needs(ranks)
    ranks_run(ranks, "rank_stress.py", "--steps", "60", "--always-sync")


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(
    "case",
    [
        "first_use",
        "pressure",
        "two_engines",
        "after_destroy",
        "after_error",
        "compile",
        "checkpoint_reentrant",
        "checkpoint_nonreentrant",
        "eval_between",
        "save_load",
        "clip",
        "clip_v1",
        "accumulate",
        "bf16",
        "fp32_sums",
        "watched",
    ],
)
def test_case(case, ranks):
    needs(ranks)
    ranks_run(ranks, "rank_cases.py", case)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("variable", ["CUDA_LAUNCH_BLOCKING", "CUDA_DEVICE_MAX_CONNECTIONS"])
def test_cases_on_a_host_that_enqueues_otherwise(variable, ranks):
    needs(ranks)
    ranks_run(ranks, "rank_cases.py", "accumulate", "clip_v1", "save_load", "two_engines", **{variable: "1"})


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_rank_that_is_killed_stopped_or_raises(ranks):
    needs(ranks)
    script = str(Path(__file__).parent / "rank_failures.py")
    launched([sys.executable, script, "--ranks", str(ranks), "--budget", "500"], 560)


@pytest.mark.parametrize("reads", ["synchronize", "empty", "none"])
def test_a_rank_that_is_killed_while_the_others_block_elsewhere(reads):
    needs(2)
    script = str(Path(__file__).parent / "rank_failures.py")
    launched([sys.executable, script, "--reads", reads, "--budget", "240", "killed", "raises"], 300)


def test_memcheck():
    needs(2)
    output = launched(["bash", str(Path(__file__).parent / "sanitize.sh")], 360)
    if "skipped" in output:
        pytest.skip("no compute-sanitizer")


def test_driver_calls_are_measured():
    needs(1)
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.driver_calls"],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == 0 and "| write |" in done.stdout, done.stdout + done.stderr


def test_phases_of_steps_are_told():
    needs(2)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "benchmarks.phases"]
    done = subprocess.run(
        command + ["--model", "llama-tiny", "--sequence", "64", "--steps", "8", "--seconds", "200"],
        capture_output=True,
        text=True,
        timeout=240,
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == 0 and "cdp-v2, driver: " in done.stdout, done.stdout + done.stderr
