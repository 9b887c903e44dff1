"""Saving: all ranks write into one folder, which gets the checkpoint's name once it is complete.

``save_checkpoint`` returns when that is done. With DeepSpeed's ``"checkpoint": {"writer": {"decoupled": true}}`` it returns once
every rank has copied its part into host memory. A thread writes the files then, and training goes on.
"""

import json
import os
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from deepspeed.utils import logger

from deepspeed_cdp.checkpoint.common import Gather, error_text
from deepspeed_cdp.checkpoint.files import (
    NotRestoredError,
    check_new_tag,
    check_replaceable,
    discard_quietly,
    hidden_sibling,
    make_working,
    on_host,
    replace_folder,
    save_plain,
    save_tensors,
    sync_folder,
    write_aside,
    write_tensors,
    write_text,
)
from deepspeed_cdp.checkpoint.format import MANIFEST, manifest_text
from deepspeed_cdp.errors import CheckpointError

SCRIPT = '''"""Writes a checkpoint's weights in fp32: python zero_to_fp32.py CHECKPOINT_DIR OUTPUT_DIR [--tag TAG] (--help)."""

import sys

from deepspeed_cdp.convert import main

if __name__ == "__main__":
    sys.exit(main(["to-fp32", *sys.argv[1:]]))
'''

POLL = 0.05  # seconds between looks for other ranks' parts


class Files:
    """The files that this rank writes into a folder.

    Args:
        later: keep copies of tensors in host memory until ``write``.
    Attributes:
        entries: of the files written, for the manifest, by name.
    """

    def __init__(self, folder: str, later: bool = False):
        self._folder, self._later, self._waiting = folder, later, list[tuple[str, dict[str, torch.Tensor], dict[str, str]]]()
        self.entries: dict[str, dict[str, Any]] = {}

    def add_tensors(self, name: str, tensors: dict[str, torch.Tensor], metadata: dict[str, str]) -> None:
        """As ``files.save_tensors``."""
        if self._later:
            self._waiting.append((name, on_host(tensors), metadata))
        else:
            self.entries[name] = save_tensors(self._folder, name, tensors, metadata)

    def add_plain(self, name: str, value: Any, what: str) -> None:
        """As ``files.save_plain``, at once: the script may change the value."""
        self.entries[name] = save_plain(self._folder, name, value, what)

    def write(self) -> None:
        """Write what waits, and free its memory."""
        while self._waiting:
            name, tensors, metadata = self._waiting.pop(0)
            self.entries[name] = write_tensors(self._folder, name, tensors, metadata)


class Saving:
    """One checkpoint that all ranks save; constructed by each of them.

    Args:
        gather: collective.
        where: what the rank is doing, for errors.
        save_latest: write DIR/latest, too.
        script: write DIR/zero_to_fp32.py.
    """

    def __init__(self, save_dir: str, tag: str, rank: int, gather: Gather, where: str, save_latest: bool, script: bool = True):
        self.save_dir, self.tag, self.rank, self.gather, self.where = save_dir, tag, rank, gather, where
        self.save_latest, self.script, self.final = save_latest, script, os.path.join(save_dir, tag)
        self.working = hidden_sibling(self.final, "saving")

    def on_all_ranks(self, action: Callable[[], Any]) -> list[Any]:
        """All ranks' results of ``action``; if it fails on one rank, every rank raises that error."""
        result, problem, untouched = None, None, True
        try:
            result = action()
        except Exception as error:
            problem, untouched = error_text(error), not isinstance(error, NotRestoredError)
        everyone = self.gather([result, problem, untouched], self.where)
        problems = [f"rank {r}: {x[1]}" for r, x in enumerate(everyone) if x[1]]
        if problems:
            if self.rank == 0:
                discard_quietly(self.working)
            raise self.failed("; ".join(problems), all(x[2] for x in everyone))
        return [x[0] for x in everyone]

    def failed(self, problem: str, untouched: bool) -> CheckpointError:
        """The error for a checkpoint that was not saved."""
        so = "; the one before is untouched" if untouched else ""
        return CheckpointError(f"checkpoint {self.final!r} was not saved ({problem}){so}")

    def prepare(self) -> None:
        """Rank 0 makes the folder."""
        if self.rank == 0:
            _check_place(self.save_dir, self.tag, self.save_latest)
            make_working(self.final)

    def name_latest(self) -> None:
        """Rank 0 writes DIR/latest, of a checkpoint whose parts are saved."""
        if self.rank == 0 and self.save_latest:
            write_text(os.path.join(self.save_dir, "latest"), self.tag)

    def finish(self, manifest: dict[str, Any]) -> None:
        """Rank 0 gives the complete folder its name."""
        if self.rank:
            return
        write_text(os.path.join(self.working, MANIFEST), manifest_text(manifest))
        if self.script:
            write_text(os.path.join(self.save_dir, "zero_to_fp32.py"), SCRIPT)
        latest = os.path.join(self.save_dir, "latest")
        aside = write_aside(latest, self.tag) if self.save_latest else None

        def commit() -> None:
            if aside is not None:
                sync_folder(os.path.dirname(self.final))
                os.replace(aside, latest)

        try:
            replace_folder(self.working, self.final, commit)
        except BaseException:
            if aside is not None:
                discard_quietly(aside)
            raise
        sync_folder(self.save_dir)


class Pending:
    """A checkpoint whose files a thread of each rank writes. The interpreter waits for the thread before it ends.

    Ranks tell each other by files in the folder, since training uses the transport: rank r writes ``.part_RRR`` with its entries
    or its error. Rank 0 waits for all of them, at most ``timeout_seconds`` behind its own.
    """

    def __init__(self, saving: Saving, files: Files, manifest: dict[str, Any], ranks: int, timeout_seconds: float):
        self._saving, self._files, self._manifest = saving, files, manifest
        self._ranks, self._timeout_seconds = ranks, timeout_seconds
        self._problem: str | None = None
        self._untouched = True
        self._thread = threading.Thread(target=self._run, name=f"checkpoint {saving.tag}")
        self._thread.start()

    def wait(self, gather: Gather) -> None:
        """Collective: until the checkpoint is saved.

        Raises:
            CheckpointError: it was not; on every rank.
        """
        self._thread.join()
        everyone = gather([self._problem, self._untouched], self._saving.where)
        if problems := [x[0] for x in everyone if x[0]]:
            raise self._saving.failed(problems[0], all(x[1] for x in everyone))

    def _run(self) -> None:
        saving = self._saving
        try:
            self._files.write()
            if saving.rank:
                self._tell({"entries": self._files.entries})
            else:
                self._manifest["files"] |= self._files.entries | self._others()
                saving.finish(self._manifest)
        except Exception as error:
            self._problem, self._untouched = f"rank {saving.rank}: {error_text(error)}", not isinstance(error, NotRestoredError)
            logger.error(str(saving.failed(self._problem, self._untouched)))
            if saving.rank == 0:
                discard_quietly(saving.working)
            else:
                self._tell({"problem": error_text(error)})

    def _part(self, rank: int) -> str:
        return os.path.join(self._saving.working, f".part_{rank:03d}")

    def _tell(self, part: dict[str, Any]) -> None:
        try:
            write_text(self._part(self._saving.rank), json.dumps(part))
        except OSError:  # the folder is gone: rank 0 has given up, and says why
            pass

    def _others(self) -> dict[str, Any]:
        """Manifest entries of the other ranks' files.

        Raises:
            CheckpointError: a rank failed, or has not written its part in time.
        """
        found: dict[str, Any] = {}
        deadline, missing = time.monotonic() + self._timeout_seconds, set(range(1, self._ranks))
        while missing:
            for rank in [r for r in missing if os.path.exists(self._part(r))]:
                with open(self._part(rank), encoding="utf-8") as file:
                    part = json.load(file)
                if "problem" in part:
                    raise CheckpointError(f"rank {rank}: {part['problem']}")
                os.unlink(self._part(rank))
                found |= part["entries"]
                missing.remove(rank)
            if missing and time.monotonic() > deadline:
                raise CheckpointError(f"rank(s) {sorted(missing)} have not written their files {self._timeout_seconds} s later")
            time.sleep(POLL if missing else 0)
        return found


def save_on_all_ranks(
    saving: Saving,
    write: Callable[[Files], dict[str, Any]],
    manifest: Callable[[list[dict[str, Any]]], dict[str, Any]],
    later: tuple[int, float] | None = None,
) -> Pending | None:
    """Collective: every rank writes into a temporary folder, which is renamed to DIR/TAG once all files are on the disk.

    Args:
        write: adds this rank's files, and returns its contribution to the manifest.
        manifest: (contributions of all ranks, in rank order) -> the manifest without its files.
        later: (number of ranks, timeout in seconds): the files are written beside training.
    Returns:
        with ``later`` what is to be waited for.
    Raises:
        CheckpointError: on every rank; it names the failed rank and its error. The previous checkpoint, and ``latest``, are
            as before: until ``latest`` is replaced, last of all, an error undoes every step. If undoing fails, the message says
            where the previous checkpoint is.
    """
    tags = sorted(set(saving.gather(saving.tag, saving.where)))
    if len(tags) > 1:
        raise CheckpointError(
            f"tag is {saving.tag!r} on rank {saving.rank} but the ranks have {tags}; give the same tag on every rank "
            "(nothing was saved)"
        )
    saving.on_all_ranks(saving.prepare)
    files = Files(saving.working, later is not None)
    parts = saving.on_all_ranks(lambda: [write(files), files.entries])
    whole = {**manifest([x[0] for x in parts]), "files": {name: entry for x in parts for name, entry in x[1].items()}}
    if later:
        return Pending(saving, files, whole, *later)
    saving.on_all_ranks(lambda: saving.finish(whole))  # no rank returns before the checkpoint has its name
    return None


def _check_place(save_dir: str, tag: str, save_latest: bool) -> None:
    """Raise CheckpointError unless DIR/TAG is free, or a folder that may be replaced as a whole.

    Links below ``save_dir`` are refused: through them a save would write, and delete, elsewhere.
    """
    parts = tag.split("/")
    for i in range(1, len(parts) + 1):
        path = os.path.join(save_dir, *parts[:i])
        check_replaceable(path)
        if i < len(parts) and os.path.lexists(os.path.join(path, MANIFEST)):
            raise CheckpointError(f"{path} is a checkpoint, and no other is saved inside it; choose another tag than {tag!r}")
    inside = os.listdir(path) if os.path.isdir(path) else []
    if lost := [name for name in inside if os.path.lexists(os.path.join(path, name, MANIFEST))]:
        raise CheckpointError(f"{path} holds the checkpoint {min(lost)!r}, which would be lost; choose another tag than {tag!r}")
    for name in ("zero_to_fp32.py", *(["latest"] if save_latest else [])):
        if os.path.isdir(file := os.path.join(save_dir, name)) and not os.path.islink(file):
            raise CheckpointError(f"{file} is a folder, and save_checkpoint writes a file of this name; remove it")


def save_location(save_dir: str | None, tag: str | None, global_steps: int) -> tuple[str, str]:
    """The validated (folder, tag) of a checkpoint to be saved; the default tag is ``global_stepN``.

    Raises:
        ValueError: ``save_dir`` is empty, or the tag leaves the folder or is a name of the folder's own files.
    """
    if not save_dir:
        raise ValueError(f"save_dir is {save_dir!r}; it must name a folder; give one to save_checkpoint()")
    return os.fspath(save_dir), check_new_tag(str(tag if tag is not None else f"global_step{global_steps}"))
