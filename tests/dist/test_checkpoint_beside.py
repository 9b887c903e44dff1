"""``checkpoint.writer.decoupled``: threads write a checkpoint beside training."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from deepspeed_cdp.checkpoint import saving
from deepspeed_cdp.errors import CheckpointError
from support.checkpoint_work import resumes
from support.engine_work import Job, pack, same, start, train, unpack, whole

BESIDE = {"checkpoint": {"writer": {"type": "python", "decoupled": True}}}
RESUME = [
    Job("mlp", "cdp-v2", 2, optimizer="sgd", schedule="lambda", clip=0.3, correction="predict", config=BESIDE),
    Job("llama-tied", "cdp-v1", 1, bf16=True, correction="extrapolate", config=BESIDE),
    Job("mlp", "cdp-v2", config={**BESIDE, "zero_optimization": {"stage": 2}}),
]
JOB = Job("mlp", "cdp-v2", config=BESIDE, timeout=6.0)


def test_resuming_is_bitwise_continuing(pool, tmp_path):
    """The state is that of the save, whatever training does meanwhile."""
    pool.run(2, resumes, RESUME, str(tmp_path), timeout=240)


def replaced(write: Any) -> Any:
    """Let threads write tensors with ``write``. Returns the function that did before."""
    stock, saving.write_tensors = saving.write_tensors, write
    return stock


def slow(rank: int, world: int, folder: str) -> tuple[bytes, bytes]:
    """Rank 1 cannot write before a file says so. Returns the state of the save, and what a load brings back."""
    engine = start(JOB, world)
    train(engine, JOB, rank, 0, 2)
    engine.save_checkpoint(folder, tag="a")
    engine._finish_saving()
    go = Path(folder, "go")

    def held(*arguments: Any) -> dict[str, Any]:
        while rank == 1 and not go.exists():
            time.sleep(0.01)
        return stock(*arguments)

    stock = replaced(held)
    engine.save_checkpoint(folder, tag="b")
    assert Path(folder, "latest").read_text() == "a"
    saved = pack(whole(engine))
    train(engine, JOB, rank, 2, 5)
    assert Path(folder, "latest").read_text() == "a" and not Path(folder, "b").exists()
    if rank == 0:
        go.touch()
    engine.load_checkpoint(folder)  # waits for "b"
    saving.write_tensors = stock
    loaded = pack(whole(engine))
    assert not any(name.startswith(".part") for name in os.listdir(os.path.join(folder, "b")))
    engine.destroy()
    return saved, loaded


def test_training_goes_on_while_files_are_written(pool, tmp_path):
    for saved, loaded in pool.run(3, slow, str(tmp_path), timeout=120):
        same(unpack(saved), unpack(loaded))


def fails(rank: int, world: int, folder: str, how: str) -> str:
    """Rank 1 cannot write. All learn of it in the next save, training goes on, and a third save is well."""
    engine = start(JOB, world)
    train(engine, JOB, rank, 0, 1)
    engine.save_checkpoint(folder, tag="good")
    engine._finish_saving()

    def write(*arguments: Any) -> dict[str, Any]:
        if rank == 1 and how == "full disk":
            raise OSError(28, "No space left on device")
        if rank == 1:
            time.sleep(JOB.timeout + 1)
        return stock(*arguments)

    stock = replaced(write)
    engine.save_checkpoint(folder, tag="bad")
    train(engine, JOB, rank, 1, 3)
    with pytest.raises(CheckpointError) as caught:
        engine.save_checkpoint(folder, tag="never") if how == "full disk" else engine.load_checkpoint(folder)
    saving.write_tensors = stock
    assert Path(folder, "latest").read_text() == "good" and not Path(folder, "bad").exists()
    train(engine, JOB, rank, 3, 4)
    engine.save_checkpoint(folder, tag="better")
    engine.destroy()
    assert Path(folder, "latest").read_text() == "better"
    return str(caught.value)


@pytest.mark.parametrize(
    ("how", "text"), [("full disk", "rank 1: OSError: [Errno 28] No space left"), ("too slow", "rank(s) [1] have not written")]
)
def test_a_rank_that_cannot_write(pool, tmp_path, how, text):
    for told in pool.run(2, fails, str(tmp_path), how, timeout=120):
        assert text in told and "the one before is untouched" in told, told


def lost_at_the_end(rank: int, world: int, folder: str) -> str:
    """The last checkpoint of a script fails: ``destroy`` says so."""
    engine = start(JOB, world)
    train(engine, JOB, rank, 0, 1)

    def full(*_: Any) -> dict[str, Any]:
        raise OSError(28, "No space left on device")

    stock = replaced(full)
    engine.save_checkpoint(folder)
    try:
        with pytest.raises(CheckpointError) as caught:
            engine.destroy()
    finally:
        saving.write_tensors = stock
    with pytest.raises(ValueError, match="this engine is destroyed"):
        engine.save_checkpoint(folder)
    return str(caught.value)


def test_destroy_tells_of_a_checkpoint_that_was_lost(pool, tmp_path):
    assert all("rank 0: OSError" in told for told in pool.run(2, lost_at_the_end, str(tmp_path), timeout=120))


def killed(rank: int, world: int, folder: str) -> None:
    """Rank 1 dies in the middle of writing over the tag that is there."""
    engine = start(JOB, world)
    train(engine, JOB, rank, 0, 1)
    engine.save_checkpoint(folder, tag="good")
    engine._finish_saving()

    def kill(*arguments: Any) -> dict[str, Any]:
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return stock(*arguments)

    stock = replaced(kill)
    engine.save_checkpoint(folder, tag="good")
    train(engine, JOB, rank, 1, 50)


def loads(rank: int, world: int, folder: str) -> int:
    engine = start(JOB, world)
    engine.load_checkpoint(folder)
    steps = engine.global_steps
    engine.destroy()
    return steps


def test_a_rank_killed_while_it_writes_leaves_the_last_good_checkpoint(pool, tmp_path):
    pool.run_failing(2, killed, str(tmp_path), timeout=120)
    assert pool.run(2, loads, str(tmp_path), timeout=120) == [1, 1]
