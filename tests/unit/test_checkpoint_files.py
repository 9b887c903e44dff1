"""Names, links and steps of saving: what a save may touch, what an odd ``latest`` means, and what an error or a kill leaves."""

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from deepspeed_cdp.checkpoint import common, files, saving
from deepspeed_cdp.checkpoint.files import existing_folder, read_latest, write_text
from deepspeed_cdp.checkpoint.format import MANIFEST
from deepspeed_cdp.errors import CheckpointError


def save(folder: Path, tag: str, content: str, save_latest: bool = True) -> None:
    """A save of one rank, as the engines do it."""

    place, tag = saving.save_location(str(folder), tag, 0)
    one = saving.Saving(place, tag, 0, lambda value, where: [value], "here", save_latest)

    def write(files: saving.Files) -> dict[str, Any]:
        write_text(os.path.join(one.working, "data"), content)
        return {}

    saving.save_on_all_ranks(one, write, lambda everyone: {"content": content})


def content(folder: Path, tag: str | None = None) -> tuple[str, str]:
    """(tag, content) of the checkpoint that a load without a tag, or with one, reads."""
    tag = tag or read_latest(str(folder))
    assert tag
    found = Path(existing_folder(str(folder / tag)))
    assert f'"{(found / "data").read_text()}"' in (found / MANIFEST).read_text(), "a complete checkpoint"
    return tag, (found / "data").read_text()


def tree(folder: Path) -> dict[str, Any]:
    """Everything in a folder: contents of files, targets of links."""
    return {
        str(p.relative_to(folder)): os.readlink(p) if p.is_symlink() else p.read_bytes() if p.is_file() else None
        for p in sorted(folder.rglob("*"))
    }


@pytest.mark.parametrize(
    "tag",
    ["latest", "latest_universal", "zero_to_fp32.py", "zero_to_torch.py", "latest/x", ".t.saving", ".t.old", ".latest.0.new"],
)
def test_names_of_the_folders_own_files_are_no_tags(tmp_path, tag):
    with pytest.raises(ValueError, match=r"is a name that save_checkpoint writes itself; use a name such as 'step100'"):
        save(tmp_path, tag, "a")
    assert not list(tmp_path.iterdir())


def link(at: Path, to: str) -> Callable[[], None]:
    return lambda: at.symlink_to(to)


@pytest.mark.parametrize(
    "what", ["link", "dangling link", "link above", "file", "inside another", "around others", "latest folder"]
)
def test_tags_that_would_write_or_delete_elsewhere_are_refused(tmp_path, what):
    """At the first save, in one sentence, and nothing changes."""
    folder, elsewhere = tmp_path / "in", tmp_path / "out"
    (elsewhere / "deep").mkdir(parents=True)
    (elsewhere / "mine").write_text("mine")
    folder.mkdir()
    tag, text = "t", "is a symbolic link, and only a folder is replaced"
    if what in ("link", "dangling link"):
        (folder / "t").symlink_to(elsewhere if what == "link" else tmp_path / "nowhere")
    elif what == "link above":
        (folder / "runs").symlink_to(elsewhere)
        tag = "runs/t"
    elif what == "file":
        (folder / "t").write_text("notes")
        text = "is no folder, and only a folder is replaced"
    elif what == "latest folder":
        (folder / "latest").mkdir()
        text = "latest is a folder, and save_checkpoint writes a file of this name"
    elif what == "inside another":
        save(folder, "t", "a")
        tag, text = "t/x", "is a checkpoint, and no other is saved inside it"
    else:
        save(folder, "t/x", "a")
        text = "holds the checkpoint 'x', which would be lost"
    before = tree(tmp_path)
    for _ in range(2):
        with pytest.raises(CheckpointError, match=text) as caught:
            save(folder, tag, "b")
        assert "the one before is untouched" in str(caught.value) and "\n" not in str(caught.value)
    assert tree(tmp_path) == before


def test_planted_links_are_not_followed(tmp_path):
    """Links with the names of temporary files and folders, and ``latest`` itself as a link out of the folder."""
    folder, victim = tmp_path / "in", tmp_path / "out"
    victim.mkdir()
    (victim / "file").write_text("mine")
    folder.mkdir()
    for name in ("latest", "latest.new", "zero_to_fp32.py", "zero_to_fp32.py.new", f".latest.{'0' * 16}.new"):
        (folder / name).symlink_to(victim / "file")
    for name in (".t.saving", ".t.old"):
        (folder / name).symlink_to(victim)
    save(folder, "t", "a")
    save(folder, "t", "b")
    assert content(folder) == ("t", "b") and tree(victim) == {"file": b"mine"}
    assert not (folder / "latest").is_symlink() and not (folder / "zero_to_fp32.py").is_symlink()
    left = {p.name for p in folder.iterdir()}
    assert left == {"latest", "zero_to_fp32.py", "t", "latest.new", "zero_to_fp32.py.new"}, "the last two are not ours"


def test_a_planted_file_of_the_random_name_is_not_opened(tmp_path, monkeypatch):
    monkeypatch.setattr(files.secrets, "token_hex", lambda n: "g" * 2 * n)  # not removed as remains
    (tmp_path / "mine").write_text("mine")
    (tmp_path / f".latest.{'g' * 16}.new").symlink_to(tmp_path / "mine")
    with pytest.raises(FileExistsError):
        write_text(str(tmp_path / "latest"), "t")
    assert (tmp_path / "mine").read_text() == "mine"


@pytest.mark.parametrize(
    "what", ["folder", "fifo", "dangling", "circle", "empty", "binary", "leaves", "unreadable", "device", "no folder"]
)
def test_an_odd_latest_is_an_error(tmp_path, what, monkeypatch):
    """Only if nothing of the name is there, there is no checkpoint."""
    at, folder = tmp_path / "latest", tmp_path
    assert read_latest(str(tmp_path)) is None and read_latest(str(tmp_path / "nowhere")) is None
    if what == "fifo":
        os.mkfifo(at)
    elif what == "no folder":
        at.write_text("t")
        folder = at
    elif what == "unreadable":
        at.write_text("t")

        def refuse(*_: Any) -> int:
            raise PermissionError(13, "Permission denied")

        monkeypatch.setattr(os, "open", refuse)  # root may read everything
    else:
        {
            "folder": at.mkdir,
            "dangling": link(at, "nowhere"),
            "circle": link(at, "latest"),
            "empty": lambda: at.write_text(" \n"),
            "binary": lambda: at.write_bytes(b"\xff\xfe"),
            "leaves": lambda: at.write_text("../t"),
            "device": link(at, "/dev/zero"),
        }[what]()
    with pytest.raises(CheckpointError, match="latest"):
        read_latest(str(folder))
    with pytest.raises(CheckpointError, match="was not loaded, and nothing was changed"):
        common.find_on_all_ranks(str(folder), None, "latest", 0, lambda value, where: [value], "here")


def test_latest_may_be_a_link_to_a_file(tmp_path):
    (tmp_path / "name").write_text("t\n")
    (tmp_path / "latest").symlink_to("name")
    assert read_latest(str(tmp_path)) == "t"


# ---- errors and kills at every step -----------------------------------------------------------------------------------------
STEPS = ("mkdir", "rename", "replace", "fsync", "unlink", "rmdir", "open")


def at_step(number: int, act: Callable[[], Any]) -> None:
    """From now on, call ``act`` before the ``number``-th change of a file system; a process of its own."""
    left = [number]

    def counted(stock: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            left[0] -= 1
            if left[0] == 0:
                act()
            return stock(*arguments, **options)

        return call

    for name in STEPS:
        setattr(os, name, counted(getattr(os, name)))


def in_process(work: Callable[[], Any]) -> int:
    """The exit status of a forked process: 0 done, 1 CheckpointError or OSError, -9 killed."""
    pid = os.fork()
    if not pid:
        code = 2
        try:
            work()
            code = 0
        except (CheckpointError, OSError) as error:
            print(error, file=sys.stderr)
            code = 1 if "the one before is untouched" in str(error) else 3
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def fail() -> None:
    raise OSError(5, "Input/output error")


@pytest.mark.sampled(2)
@pytest.mark.parametrize("tag", ["a", "b"])
@pytest.mark.parametrize("how", [kill, fail])
def test_any_step_of_a_save_may_fail(tmp_path, tag, how):
    """A kill leaves a complete checkpoint; an error leaves the one before as it was, byte by byte. The next save works."""
    statuses = []
    for number in range(1, 200):
        folder = tmp_path / str(number)
        save(folder, "a", "old")
        before = tree(folder)

        statuses.append(in_process(lambda number=number, folder=folder: (at_step(number, how), save(folder, tag, "new"))))
        if statuses[-1] == 0 and how is kill:
            break
        if statuses[-1] == 1:
            assert tree(folder) == before, number
        assert statuses[-1] in ((-signal.SIGKILL,) if how is kill else (0, 1)), (number, statuses[-1])
        now = content(folder)
        assert now in ((("a", "old"), (tag, "new")) if how is kill or statuses[-1] == 0 else (("a", "old"),)), (number, now)
        save(folder, tag, "newer")
        assert content(folder) == (tag, "newer")
        assert {p.name for p in folder.iterdir()} == {"a", tag, "latest", "zero_to_fp32.py"}, number
        if how is fail and number > 60:
            break
    assert len(statuses) > 15 and statuses.count(0) < len(statuses), statuses


def test_latest_that_cannot_be_replaced_undoes_the_save(tmp_path, monkeypatch):
    """The tag's folder was already replaced: it gets its old content back, and the message is true."""
    save(tmp_path, "t", "old")
    before, stock = tree(tmp_path), os.replace

    def refuse(source: str, target: str) -> None:
        if os.path.basename(target) == "latest":
            assert content(tmp_path, tag)[1] == "new", "the folder is the new one by now"
            raise OSError(28, "No space left on device")
        stock(source, target)

    monkeypatch.setattr(os, "replace", refuse)
    for tag in ("t", "u"):
        with pytest.raises(CheckpointError, match="No space left on device.*; the one before is untouched"):
            save(tmp_path, tag, "new")
        assert tree(tmp_path) == before


def test_what_cannot_be_undone_is_told(tmp_path, monkeypatch):
    save(tmp_path, "t", "old")
    stock, done = os.rename, []

    def rename(source: str, target: str) -> None:
        done.append(target)
        if len(done) > 1:
            raise OSError(5, "Input/output error")
        stock(source, target)

    monkeypatch.setattr(os, "rename", rename)
    with pytest.raises(CheckpointError, match=r"the checkpoint before is in .*\.t\.old") as caught:
        save(tmp_path, "t", "new")
    assert "untouched" not in str(caught.value)
    assert content(tmp_path) == ("t", "old"), "and loading finds it there"
