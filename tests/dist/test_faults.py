"""Faults, each with real processes: who survives ends in time and says where it was and for whom, the last checkpoint is intact,
and a restart resumes bit by bit. The results go to $FAULT_RESULTS, from which tests/support/fault_table.py makes docs/faults.md.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from deepspeed_cdp.errors import CheckpointError
from deepspeed_cdp.transport import connect
from support import fault_table, models
from support.engine_work import Job, pack, same, start, train, unpack, whole
from support.faulty import (
    BEGIN,
    END,
    PATIENT,
    SAVED,
    SECONDS,
    SLACK,
    Faulty,
    Stubborn,
    act,
    goes_on,
    impatient,
    job_of,
    kill_in_save,
    ready,
    stop,
)
from support.patience import patience
from support.workers import Failure, Pool


# ---- ranks ------------------------------------------------------------------------------------------------------------------
def meets(rank: int, world: int, fault: str, who: int, rule: str, folder: str) -> None:
    """Train, save, train; then the fault on rank ``who``. Errors carry how long they took."""
    ready()
    torch.manual_seed(7)
    job, module = job_of(fault, rule), Faulty()
    engine = start(job, world, module)
    train(engine, job, rank, 0, SAVED)
    engine.save_checkpoint(folder, tag="good")
    impatient(engine)
    began = time.monotonic()
    try:
        train(engine, job, rank, SAVED, BEGIN)  # the guilty rank may be a step ahead
        if fault == "killed_saving":
            (kill_in_save if rank == who else lambda e, f: e.save_checkpoint(f, tag="good"))(engine, folder)
        if rank == who:
            act(fault, engine, module, folder)
        train(engine, job, rank, BEGIN, 40)
    except BaseException as error:
        engine.destroy()  # as the interpreter does at exit
        error.add_note(f"seconds with destroy: {time.monotonic() - began:.2f}")
        raise
    finally:
        Stubborn.armed = False


# ---- what must be ---------------------------------------------------------------------------------------------------------
WHERE = re.compile(
    r"HandoffError: rank (\d+), step \d+, "
    r"(stage \d+, (forward|backward|average|norm|update|total)|flush|saving|gather)"
    r".*(stream \w+|rank\(s\) \[\d+\] missing|closed)"
)
PEER = re.compile(r"stream \w+: rank \d|on stream \w+ (from|for) rank \d|stream \w+: the connection to rank \d|rank\(s\) \[\d\]")


def named(failure: Any, rank: int) -> tuple[float, str]:
    """Seconds and text of a survivor's last error, which names rank, step, stage, stream and peer, and came in time."""
    assert isinstance(failure, Failure), (rank, failure)
    line = [x for x in failure.splitlines() if "HandoffError: " in x][-1]
    found = WHERE.search(line)
    assert found and int(found.group(1)) == rank and PEER.search(line), line
    assert "seconds with destroy" in failure, failure
    seconds = float(re.search(r"seconds with destroy: ([\d.]+)", failure).group(1))
    assert seconds < SECONDS + SLACK, (rank, seconds, line)
    return seconds, line.split("HandoffError: ")[1]


def children(pid: int) -> list[str]:
    return [c for task in Path(f"/proc/{pid}/task").glob("*/children") for c in task.read_text().split()]


@pytest.fixture
def record(request: pytest.FixtureRequest) -> Callable[..., None]:
    return partial(fault_table.record, test=request.node.nodeid.split("::")[-1])


@pytest.fixture(scope="module")
def calm(pool, tmp_path_factory) -> Callable[..., dict[str, torch.Tensor]]:
    """The state of an undisturbed run with the same flush."""
    known: dict[tuple, dict[str, torch.Tensor]] = {}

    def state(fault: str, rule: str, world: int) -> dict[str, torch.Tensor]:
        key = job_of(fault, rule).optimizer, rule, world
        if key not in known:
            folder = str(tmp_path_factory.mktemp("calm"))
            known[key] = unpack(pool.run(world, goes_on, fault, rule, folder, True, timeout=120)[0])
        return known[key]

    return state


# fault: (ranks, guilty rank, rule, what the guilty rank says itself)
ENDS = {
    "forward": (3, 1, "cdp-v2", "raised on purpose"),
    "backward": (2, 1, "cdp-v2", "raised on purpose"),
    "loader": (3, 2, "cdp-v1", "raised on purpose"),
    "loader_dp": (3, 0, "dp", "raised on purpose"),
    "optimizer": (2, 1, "cdp-v2", "raised on purpose"),
    "memory": (2, 0, "cdp-v2", "can't allocate memory"),
    "size": (2, 1, "cdp-v2", "HandoffError"),
    "stopped": (3, 1, "cdp-v2", "HandoffError"),
    "killed": (3, 1, "cdp-v2", -signal.SIGKILL),
    "killed_first": (3, 0, "cdp-v1", -signal.SIGKILL),
    "killed_saving": (2, 1, "cdp-v2", -signal.SIGKILL),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("fault", ENDS)
def test_a_rank_that_fails_ends_the_others_in_time(pool, calm, tmp_path, record, fault):
    world, who, rule, says = ENDS[fault]
    outcomes = pool.run_failing(world, meets, fault, who, rule, str(tmp_path), timeout=120)
    told = {rank: named(outcome, rank) for rank, outcome in enumerate(outcomes) if rank != who}
    assert outcomes[who] == says if isinstance(says, int) else says in outcomes[who], outcomes[who]
    assert not [c for worker in pool._workers if worker.process.is_alive() for c in children(worker.process.pid)], "zombies"
    state = unpack(pool.run(world, goes_on, fault, rule, str(tmp_path), False, timeout=120)[0])
    same(state, calm(fault, rule, world))
    record(
        fault,
        ranks=world,
        rule=rule,
        seconds=max(s for s, _ in told.values()),
        told=next(iter(told.values()))[1],
        then="the checkpoint resumes bit by bit",
    )


# ---- what all ranks survive -------------------------------------------------------------------------------------------------
def survives(rank: int, world: int, fault: str, folder: str) -> tuple[bytes, str]:
    """Something happens to rank 1 that is no failure."""
    ready()
    torch.manual_seed(7)
    job, text = job_of(fault, "cdp-v2", 4 * SECONDS if fault == "late" else PATIENT), ""
    if fault == "late" and rank == 1:
        time.sleep(SECONDS)
    engine = start(job, world, Faulty())
    train(engine, job, rank, 0, SAVED)
    engine.save_checkpoint(folder, tag="good")
    train(engine, job, rank, SAVED, BEGIN)
    if fault == "paused":
        impatient(engine)
        if rank == 1:
            stop(SECONDS / 2)
    if fault == "disk_full":
        return full_disk(engine, job, rank, folder)
    train(engine, job, rank, BEGIN, END)
    state = pack(whole(engine))
    engine.destroy()
    return state, text


def full_disk(engine: Any, job: Job, rank: int, folder: str) -> tuple[bytes, str]:
    """The save fails on all ranks; then the disk has room again, and the old checkpoint is what it was."""
    if rank == 1:
        with open(os.path.join(folder, "ballast"), "wb", buffering=0) as file, pytest.raises(OSError, match="No space left"):
            while True:
                file.write(bytes(4096))
    engine._transport.gather(None, "test")
    with pytest.raises(CheckpointError) as caught:
        engine.save_checkpoint(folder, tag="good")
    engine._transport.gather(None, "test")
    if rank == 1:
        os.unlink(os.path.join(folder, "ballast"))
    engine.load_checkpoint(folder)
    assert engine.global_steps == SAVED
    train(engine, job, rank, SAVED, END)
    state = pack(whole(engine))
    engine.destroy()
    return state, str(caught.value)


@pytest.mark.parametrize("fault", ["paused", "late"])
def test_a_pause_shorter_than_the_timeout_changes_nothing(pool, calm, tmp_path, record, fault):
    for state, _ in pool.run(2, survives, fault, str(tmp_path), timeout=60):
        same(unpack(state), calm(fault, "cdp-v2", 2))
    record(fault, ranks=2, rule="cdp-v2", then="all ranks go on; weights are those of an undisturbed run, bit by bit")


@pytest.fixture
def small_disk(tmp_path) -> Iterator[Path]:
    """A file system of 256 KiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(folder)], capture_output=True).returncode:
        pytest.skip("only root can mount a small file system; test_checkpoint_safety.py has the same with a limit on files")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_full_disk_while_saving(pool, calm, small_disk, record):
    texts = []
    for state, text in pool.run(2, survives, "disk_full", str(small_disk), timeout=60):
        same(unpack(state), calm("disk_full", "cdp-v2", 2))
        assert "No space left on device" in text and "the one before is untouched" in text, text
        texts.append(re.sub(r"'[^']*small", "'DIR", text).split("; rank 1")[0])
    record("disk_full", ranks=2, rule="cdp-v2", told=texts[0], then="the checkpoint before loads and continues bit by bit")


SHIM = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <sys/time.h>
#include <time.h>
#include <pthread.h>
#define SKEW 3600
int clock_gettime(clockid_t clock, struct timespec *t) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
    int result = real(clock, t);
    if (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE) t->tv_sec += SKEW;
    return result;
}
int gettimeofday(struct timeval *t, void *zone) {
    struct timespec now;
    int result = clock_gettime(CLOCK_REALTIME, &now);
    t->tv_sec = now.tv_sec;
    t->tv_usec = now.tv_nsec / 1000;
    return result;
}
time_t time(time_t *t) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (t) *t = now.tv_sec;
    return now.tv_sec;
}
int pthread_cond_timedwait(pthread_cond_t *c, pthread_mutex_t *m, const struct timespec *until) {
    /* the kernel does not know of this process's wrong clock (a really wrong one it would) */
    static int (*real)(pthread_cond_t *, pthread_mutex_t *, const struct timespec *);
    struct timespec right = *until;
    if (!real) real = dlvsym(RTLD_NEXT, "pthread_cond_timedwait", "GLIBC_2.3.2");
    if (right.tv_sec > 1000000000) right.tv_sec -= SKEW;  /* of the clock, not of the time since the system started */
    return real(c, m, &right);
}
"""


def skewed(rank: int, world: int, folder: str) -> tuple[float, bytes, str]:
    """This rank's time of day; what ``survives`` gives; how long it waits for a peer that does not come."""
    clock = time.time()
    state, _ = survives(rank, world, "clock", folder)
    job = job_of("clock", "cdp-v2")
    engine = start(job, world, Faulty())
    began, text = time.monotonic(), ""
    try:
        train(engine, job, rank, 0, 2)
        impatient(engine)
        began = time.monotonic()
        if rank == 0:
            time.sleep(SECONDS + 2)
        train(engine, job, rank, 2, 4)
    except RuntimeError as error:
        text = f"{time.monotonic() - began:.1f} {error}"
    engine.destroy()
    return clock, state, text


@pytest.mark.slow
def test_clocks_that_differ(calm, tmp_path, record):
    """The clock of rank 1's whole process, C libraries included, is an hour ahead."""
    (tmp_path / "skew.c").write_text(SHIM)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(tmp_path / "skew.so"), str(tmp_path / "skew.c"), "-ldl"], check=True)
    want, pool = calm("clock", "cdp-v2", 2), Pool()
    try:
        pool.start(2, {1: {"LD_PRELOAD": str(tmp_path / "skew.so")}})
        first, second = pool.run(2, skewed, str(tmp_path), timeout=100)
    finally:
        pool.close()
    assert 3500 < second[0] - first[0] < 3700
    for _, state, _ in (first, second):
        same(unpack(state), want)
    seconds, text = second[2].split(" ", 1)
    assert SECONDS - 0.5 < float(seconds) < SECONDS + SLACK and "rank 1, step" in text, second[2]
    record("clock", ranks=2, rule="cdp-v2", then="nothing changes, bit by bit, and timeouts last as long as they say")


def gradients(rank: int, world: int, value: float, rule: str) -> tuple[int, bool, bytes]:
    """In step 2 rank 1's loss is not finite; steps skipped, whether the norm said so, the state at the end."""
    ready()
    job = Job("mlp", rule, steps=5, timeout=30.0)
    engine, told = start(job, world), []
    for step in range(5):
        loss = models.loss(engine, "mlp", models.batch("mlp", step, 0, rank))
        engine.backward(loss * value if (rank, step) == (1, 2) else loss)
        engine.step()
        told.append(engine.cyclic_metrics)
    state = pack(whole(engine))
    skipped = engine._runtime.executor.owner_executor.skipped
    engine.destroy()
    norms = {m["step"]: m["grad_norm"] for m in told if m["step"] is not None}
    return skipped, 2 in norms and not torch.isfinite(torch.tensor(norms[2])), state


@pytest.mark.parametrize("rule", ["dp", "cdp-v1", "cdp-v2"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_gradients_that_are_not_finite(pool, record, value, rule):
    """dp and v1 skip the step on every rank; v2 cannot know in time, and its docs say so."""
    results = pool.run(2, gradients, value, rule, timeout=60)
    finite = [all(bool(torch.isfinite(t).all()) for t in unpack(state).values()) for _, _, state in results]
    assert all(told for _, told, _ in results)
    assert [skipped for skipped, _, _ in results] == [int(rule != "cdp-v2")] * 2 and finite == [rule != "cdp-v2"] * 2
    record(
        f"{value}_{rule}",
        ranks=2,
        rule=rule,
        then="the step is skipped on all ranks, weights stay finite; `grad_norm` shows it"
        if rule != "cdp-v2"
        else "it goes into the weights ([limits](limits.md#clipping-loss-and-norm)); `grad_norm` shows it",
    )


# ---- what is refused at the start -------------------------------------------------------------------------------------------
def begins(rank: int, world: int, fault: str) -> tuple[float, str]:
    """Rank 1 comes too late, or with another version of the package; seconds and error."""
    ready()
    began, version, observe = time.monotonic(), connect.__version__, connect.observe
    if fault == "late_long" and rank == 1:
        time.sleep(SECONDS + 3)
        began = time.monotonic()
    if fault == "old_version" and rank == 1:  # which knows other facts, too

        class Old:
            def as_dict(self) -> dict[str, Any]:
                return {"machine": "x"}

        connect.__version__, connect.observe = "0.0.9", lambda device: Old()
    try:
        start(job_of(fault, "cdp-v2", SECONDS if fault == "late_long" else PATIENT), world)
        return 0.0, "no error"
    except Exception as error:
        return time.monotonic() - began, f"{type(error).__name__}: {error}"
    finally:
        connect.__version__, connect.observe = version, observe


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("late_long", "HandoffError: rank 0, connecting the 2 ranks.*rank.s. .1. missing"),
        (
            "old_version",
            "ValueError: deepspeed_cdp version is '0.1.0' on rank 0 but '0.0.9' on rank 1; start every rank with the same",
        ),
    ],
)
def test_ranks_that_do_not_fit_are_told_at_the_start(pool, record, fault, words):
    (seconds, text), (other_seconds, other) = pool.run(2, begins, fault, timeout=60)
    assert re.match(words, text), text
    assert "Error: " in other and max(seconds, other_seconds) < SECONDS + SLACK, (other, seconds, other_seconds)
    record(fault, ranks=2, rule="cdp-v2", seconds=seconds, told=text.split(": ", 1)[1], then="nothing has begun")


# ---- the launcher -----------------------------------------------------------------------------------------------------------
@pytest.mark.slow
def test_torchrun_restarts_a_killed_run_and_leaves_no_process(operators, tmp_path, record):
    """tests/long/run.py in short: one rank kills itself, torchrun starts all anew, the end is that of an undisturbed run."""
    repository, mark = Path(__file__).parents[2], uuid.uuid4().hex
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        "--max-restarts=1",
        "tests/long/run.py",
        "--cpu",
        "--steps",
        "60",
        "--save",
        "20",
        "--evaluate",
        "15",
        "--sample",
        "5",
        "--out",
        str(tmp_path / "out"),
    ]
    environment = {
        **os.environ,
        "PYTHONPATH": str(repository),
        "OMP_NUM_THREADS": "1",
        "FAULT_MARK": mark,
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }
    done = subprocess.run(command, cwd=repository, env=environment, capture_output=True, text=True, timeout=patience(300))
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["passed"] and summary["killed in step"] == "33" and summary["restarts"] == 1 and summary["equal bitwise"]
    left = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            left += [process.name] if mark.encode() in (process / "environ").read_bytes() else []
        except OSError:
            pass
    assert not left, "processes are left"
    record(
        "torchrun",
        ranks=2,
        rule="cdp-v2",
        then="torchrun starts all ranks anew, they load the last checkpoint and end bit by bit "
        "as if nothing had happened; no process is left",
    )


def test_the_table_in_the_docs_lists_every_fault():
    assert set(fault_table.listed()) == set(fault_table.FAULTS), (
        "FAULT_RESULTS=DIR pytest tests/dist/test_faults.py tests/dist/test_frozen.py; python tests/support/fault_table.py DIR"
    )
