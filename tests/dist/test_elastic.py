"""torchrun restarts with fewer ranks: training goes on from the newest checkpoint, as a fresh start of as many ranks would.

TORCH_DISABLE_SHARE_RDZV_TCP_STORE gives ranks a store of their own in every round. In the agents' store they look for each other
under the number of the agent's restarts, which differ between an agent whose rank failed and one that has only seen another go;
then ``init_process_group`` hangs.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from support.engine_work import unpack
from support.patience import Patience
from support.processes import free_port, remove_unheld_buffers

STEPS = 14


def torchrun(nodes: str, port: int, first: bool, log: Path, *arguments: str) -> subprocess.Popen:
    """An agent with one rank; agents that meet at the port, which the first one keeps, are one job."""
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nnodes",
        nodes,
        "--nproc-per-node",
        "1",
        "--max-restarts",
        "3",
        "--monitor-interval",
        "0.3",
        "--rdzv-backend",
        "c10d",
        "--rdzv-endpoint",
        f"localhost:{port}",
        "--rdzv-id",
        "elastic",
        "--rdzv-conf",
        f"is_host={int(first)},last_call_timeout=3,join_timeout=120",
        "--local-addr",
        "localhost",
        str(Path(__file__).parents[1] / "support" / "elastic_rank.py"),
        *arguments,
    ]
    return subprocess.Popen(
        command,
        stdout=log.open("w"),
        stderr=subprocess.STDOUT,
        start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
    )


def finish(agents: list[subprocess.Popen], logs: list[Path], seconds: float) -> None:
    """All agents end well, in time."""
    limit = Patience(seconds)
    for agent, log in zip(agents, logs):
        while (code := agent.poll()) is None and limit.left() > 0:
            time.sleep(0.05)
        assert code == 0, f"{'not done in time' if code is None else code}\n{log.read_text()[-6000:]}"


def kill(agent: subprocess.Popen) -> None:
    """The agent and its rank, as when a host goes away; a rank is in a session of its own."""
    children = subprocess.run(["ps", "-o", "pid=", "--ppid", str(agent.pid)], capture_output=True, text=True).stdout.split()
    for pid in (agent.pid, *map(int, children)):
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
    agent.wait(10)
    remove_unheld_buffers()


@pytest.mark.slow
def test_three_ranks_then_two(tmp_path):
    folder, port = tmp_path / "checkpoints", free_port()
    folder.mkdir()
    logs = [tmp_path / f"agent{n}.log" for n in range(3)]
    agents = [torchrun("2:3", port, log is logs[0], log, str(folder), str(STEPS)) for log in logs]
    try:
        limit = Patience(150)
        while not (folder / "global_step3").exists():
            assert limit.left() > 0 and all(a.poll() is None for a in agents), logs[0].read_text()[-4000:]
            time.sleep(0.05)
        kill(agents[2])
        finish(agents[:2], logs[:2], 240)
    finally:
        for agent in agents:
            if agent.poll() is None:
                kill(agent)
    world, begun = map(int, (folder / "how-elastic").read_text().split())
    assert world == 2 and 3 <= begun < STEPS, (world, begun)

    port = free_port()
    agents = [torchrun("2", port, log is logs[0], log, str(folder), str(STEPS), f"global_step{begun}") for log in logs[:2]]
    try:
        finish(agents, logs[:2], 150)
    finally:
        for agent in agents:
            if agent.poll() is None:
                kill(agent)
    assert (folder / "how-reference").read_text() == f"2 {begun}"
    ends = [unpack((folder / f"end-{how}").read_bytes()) for how in ("elastic", "reference")]
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])
