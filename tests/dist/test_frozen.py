"""A rank whose process freezes (SIGSTOP), or whose host disappears, in any meeting of all ranks: the others raise in time.

Rank 0 hosts the store through which ranks meet, and a client of torch's TCPStore waits for a frozen server without a timeout.
"""

import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from benchmarks.two_hosts import ADDRESS, LINK, Unable, two_hosts
from support import fault_table
from support.frozen import SECONDS, frozen, meetings
from support.patience import Patience
from support.processes import of_two

SLACK = 6.0  # closing, on two shared cores

COMMON = ["gloo's connections", "comparing settings between ranks", "a stream's number", "waiting for the dry-run of the plan"]
CHECKPOINT = ["saving checkpoint 'good'", "loading a checkpoint from 'saved'"]
RING = [
    *("connecting the {} ranks", "connecting the {} ranks of 'deepspeed_cdp'", *COMMON, "looking for rings"),
    "comparing what ranks do in a forward",
    *("flush", "broadcast, gathering parameters", *CHECKPOINT, "engine.report(), which every rank must call"),
]
MEETINGS = {"ring": RING, "rings": RING, "pipe": ["connecting the {} ranks of 'deepspeed_cdp_pipe'", *COMMON, *CHECKPOINT]}
ALWAYS = [  # tests that a commit runs: (job, frozen rank, meeting)
    *(("ring", 0, m) for m in ("connecting the {} ranks", "comparing settings between ranks", "a stream's number", "flush")),
    *(("ring", 0, m) for m in ("broadcast, gathering parameters", *CHECKPOINT, "gloo's connections")),
    *(("ring", 1, m) for m in ("comparing settings between ranks", "flush")),
    *(("pipe", 0, m) for m in ("comparing settings between ranks", CHECKPOINT[0])),
]
ALL = [(job, guilty, m) for job in ("ring", "pipe") for guilty in (0, 1) for m in MEETINGS[job]]
LARGER = [
    *(("ring", 3, g, m) for g, m in ((0, "flush"), (1, "flush"), (2, CHECKPOINT[0]), (0, CHECKPOINT[1]), (0, COMMON[0]))),
    *(("rings", 4, g, m) for g, m in ((0, "flush"), (3, "flush"), (0, CHECKPOINT[0]), (0, "looking for rings"))),
    *(("pipe", 3, g, m) for g, m in ((0, CHECKPOINT[0]), (2, COMMON[1]), (0, COMMON[1]))),
]
RECORDED = {  # rows of docs/faults.md
    ("ring", 0, COMMON[1]): "frozen_start",
    ("ring", 0, "flush"): "frozen_flush",
    ("ring", 0, "broadcast, gathering parameters"): "frozen_evaluate",
    ("ring", 0, CHECKPOINT[0]): "frozen_save",
    ("ring", 0, CHECKPOINT[1]): "frozen_load",
    ("pipe", 0, CHECKPOINT[0]): "frozen_pipeline",
    ("ring", 1, "flush"): "frozen_other",
}


def record(fault: str, seconds: float, told: str, then: str) -> None:
    told = re.sub(r"'[^']*/saved'", "'DIR/saved'", told.split("HandoffError: ")[-1])
    fault_table.record(fault, "test_frozen.py", ranks=2, rule="cdp-v2", seconds=seconds, told=told, then=then)


def check(pool: Any, job: str, world: int, guilty: int, meeting: str, folder: str) -> None:
    meeting = meeting.format(world)
    outcomes = pool.run(world, frozen, job, guilty, meeting, folder, timeout=100)
    for rank in [r for r in range(world) if r != guilty]:
        text, raised, ended = outcomes[rank]
        print(f"rank {rank}: {raised:.1f} s, with destroy {ended:.1f} s: {text}")
        assert re.match(rf"rank {rank}, ", text), text
        host = "rank 0, which hosts the store, does not answer"
        late = (
            rf"({host}|rank\(s\) \[{guilty}\] missing after|no connection|(from|for) rank {guilty}|broadcast from rank \d failed)"
        )
        gone = rf"(rank {guilty}|rank \d has closed its transport|rank \d closed the connection)"  # another survivor was first
        pattern = rf"{late}.* {SECONDS} s" if world == 2 else rf"({late}.* {SECONDS} s|{gone})"
        assert re.search(pattern, text), text
        messages = ("broadcast, gathering parameters", "a stream's number")  # the other may wait for a message by then
        if guilty == 0 and world == 2 and meeting not in messages:
            assert host in text, text
        before = 3.0 if meeting in messages else 1.5  # how long it may have waited when the other froze
        assert SECONDS - before < raised < SECONDS + SLACK or world > 2 and raised < SECONDS + SLACK, (rank, raised, text)
        assert ended < SECONDS + SLACK + 4.0, (rank, ended, text)
        if world == 2 and (fault := RECORDED.get((job, guilty, meeting))):
            assert ended - raised < 1.5, (raised, ended)
            record(fault, ended, text, "`destroy()` returns at once")


@pytest.mark.parametrize(("job", "world"), [("ring", 2), pytest.param("rings", 4, marks=pytest.mark.slow), ("pipe", 2)])
def test_these_are_all_meetings(pool, tmp_path, job, world):
    for names in pool.run(world, meetings, job, str(tmp_path), timeout=100):
        assert set(names) == {m.format(world) for m in MEETINGS[job]}


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    ("job", "guilty", "meeting"), [pytest.param(*c, marks=[] if c in ALWAYS else pytest.mark.slow) for c in ALL]
)
def test_a_rank_that_freezes_in_a_meeting(pool, tmp_path, job, guilty, meeting):
    check(pool, job, 2, guilty, meeting, str(tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize(("job", "world", "guilty", "meeting"), LARGER)
def test_one_of_several_ranks_that_freezes_in_a_meeting(pool, tmp_path, job, world, guilty, meeting):
    check(pool, job, world, guilty, meeting, str(tmp_path))


# ---- scripts ----------------------------------------------------------------------------------------------------------------
@contextmanager
def scripts(how: str, folder: Path, prefixes: list[list[str]], address: str, env: dict[str, str]) -> Iterator[list]:
    """Both ranks of support/frozen_script.py, after their two steps."""
    shared = of_two(address, **env)
    processes = []
    try:
        for rank, prefix in enumerate(prefixes):
            with (folder / f"log-{rank}").open("w") as log:
                processes.append(
                    subprocess.Popen(
                        [*prefix, sys.executable, "-m", "support.frozen_script", how, str(folder)],
                        env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                        stdout=log,
                        stderr=log,
                    )
                )
        limit = Patience(90)
        while not all((folder / f"ready-{rank}").exists() for rank in (0, 1)):
            assert limit.left() > 0 and all(p.poll() is None for p in processes), [
                (folder / f"log-{rank}").read_text()[-3000:] for rank in (0, 1)
            ]
            time.sleep(0.05)
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.wait()


def last_error(folder: Path, rank: int) -> str:
    lines = (folder / f"log-{rank}").read_text().splitlines()
    return next((line for line in reversed(lines) if "HandoffError: " in line), "no error: " + "\n".join(lines[-30:]))


@pytest.mark.slow
@pytest.mark.parametrize("how", ["flushes", "destroys", "ends"])
def test_a_script_ends_although_rank_0_is_frozen(operators, tmp_path, how):
    with scripts(how, tmp_path, [[], []], "127.0.0.1", {}) as (first, second):
        state = Path(f"/proc/{first.pid}/stat")
        while state.read_text().rsplit(")", 1)[1].split()[0] != "T":
            time.sleep(0.05)
        (tmp_path / "frozen").touch()
        began = time.monotonic()
        code = second.wait(SECONDS + 10.0)
        seconds = time.monotonic() - began
        first.send_signal(signal.SIGKILL)
    print(f"{how}: rank 1 ended after {seconds:.1f} s with {code}")
    if how == "ends":
        assert code == 0, (tmp_path / "log-1").read_text()[-3000:]
    else:
        assert code == 1
        error = last_error(tmp_path, 1)
        assert "rank 1, step 2, flush: rank 0, which hosts the store, does not answer within 4.0 s" in error
        if how == "flushes":
            record("frozen_exit", seconds, error, "the process ends with code 1, its interpreter and torch's exit included")


@pytest.mark.slow
def test_a_host_that_disappears(operators, tmp_path):
    """Each rank has a host (a network namespace) of its own; the link between them goes down while rank 1 is in a flush."""
    hosts = two_hosts(1000)
    try:
        prefixes = hosts.__enter__()
    except Unable as error:
        pytest.skip(f"two hosts cannot be had here: {error}")
    try:
        with scripts("loses", tmp_path, prefixes, ADDRESS.format(1), {"GLOO_SOCKET_IFNAME": LINK}) as processes:
            time.sleep(0.5)  # rank 1 is in its flush
            subprocess.run([*prefixes[0], "ip", "link", "set", LINK, "down"], check=True)
            (tmp_path / "down").touch()
            began = time.monotonic()
            codes = [process.wait(SECONDS + 10.0) for process in processes]
            seconds = time.monotonic() - began
    finally:
        hosts.__exit__(None, None, None)
    errors = [last_error(tmp_path, rank) for rank in (0, 1)]
    print(f"{seconds:.1f} s", *errors, sep="\n")
    assert codes == [1, 1], errors
    assert "rank 1, step 2, flush: rank 0, which hosts the store, does not answer within 4.0 s" in errors[1]
    assert re.search(
        r"HandoffError: rank 0, step 2, .*(rank\(s\) \[1\] missing after|(from|for) rank 1 within) .*4.0 s", errors[0]
    )
    record("host_lost", seconds, errors[1], "both hosts' processes end")
