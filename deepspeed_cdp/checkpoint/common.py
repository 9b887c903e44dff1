"""What checkpoints of rings (``save_load``) and of pipelines (``pipeline``) share.

Saving and loading are collective. Saving is atomic: a checkpoint gets its name once it is complete. Loading checks everything on
all ranks before any rank changes anything.
"""

import copy
import json
import os
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import torch
from deepspeed.utils import logger

from deepspeed_cdp.checkpoint.files import (
    NotRestoredError,
    check_new_tag,
    check_replaceable,
    check_tag,
    discard_quietly,
    hidden_sibling,
    make_working,
    read_latest,
    replace_folder,
    sync_folder,
    write_aside,
    write_text,
)
from deepspeed_cdp.checkpoint.format import MANIFEST, TensorSpec, manifest_text, pack_state
from deepspeed_cdp.checkpoint.manifest import COUNTERS
from deepspeed_cdp.errors import CheckpointError
from deepspeed_cdp.optim.masters import Masters
from deepspeed_cdp.optim.state import fit_counts, spread_counts

Gather = Callable[[Any, str], list[Any]]  # collective: (this rank's value, where for the error) -> all ranks' values, in order

ELEMENTWISE = {"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer"}  # state with the shape of its parameter

SCRIPT = '''"""Writes a checkpoint's weights in fp32: python zero_to_fp32.py CHECKPOINT_DIR OUTPUT_DIR [--tag TAG] (--help)."""

import sys

from deepspeed_cdp.convert import main

if __name__ == "__main__":
    sys.exit(main(["to-fp32", *sys.argv[1:]]))
'''


class EngineState(Protocol):
    """What a checkpoint saves and restores of an engine.

    Attributes:
        global_steps, global_samples, skipped_steps, micro_steps: DeepSpeed's counters (``COUNTERS``).
        lr_scheduler: its state is saved if it has ``state_dict``, and loaded if it has ``load_state_dict``; may be None.
    """

    global_steps: int
    global_samples: int
    skipped_steps: int
    micro_steps: int
    lr_scheduler: Any


class LoadOptions(NamedTuple):
    """The flags of ``load_checkpoint``.

    Attributes:
        strict: parameters and buffers of checkpoint and model must have the same names.
        optimizer: load the optimizer's state, norms, losses and loss scale.
        scheduler: load the lr scheduler's state.
        counters: load the engine's counters.
    """

    strict: bool
    optimizer: bool
    scheduler: bool
    counters: bool

    @classmethod
    def of(cls, strict: bool, optimizer_states: bool, scheduler_states: bool, module_only: bool) -> "LoadOptions":
        """From the arguments of ``load_checkpoint``; ``module_only`` overrides the other flags."""
        return cls(strict, optimizer_states and not module_only, scheduler_states and not module_only, not module_only)


def counters_of(engine: EngineState) -> dict[str, int]:
    """The counters that a manifest holds."""
    return {c: getattr(engine, c) for c in COUNTERS}


def scheduler_state(engine: EngineState) -> Any:
    """The lr scheduler's state dict, or None."""
    return engine.lr_scheduler.state_dict() if hasattr(engine.lr_scheduler, "state_dict") else None


# ---- saving -----------------------------------------------------------------------------------------------------------------
def save_on_all_ranks(
    save_dir: str,
    tag: str,
    rank: int,
    gather: Gather,
    where: str,
    save_latest: bool,
    write: Callable[[str], dict[str, Any]],
    manifest: Callable[[list[dict[str, Any]]], dict[str, Any]],
) -> None:
    """Collective: every rank writes into a temporary folder, which is renamed to DIR/TAG once all files are on the disk.

    Args:
        write: (folder) -> this rank's contribution to the manifest.
        manifest: (contributions of all ranks, in rank order) -> the manifest.
        save_latest: write DIR/latest, too.
    Raises:
        CheckpointError: on every rank; it names the failed rank and its error. The previous checkpoint, and ``latest``, are
            as before: until ``latest`` is replaced, last of all, an error undoes every step. If undoing fails, the message says
            where the previous checkpoint is.
    """
    tags = sorted(set(gather(tag, where)))
    if len(tags) > 1:
        raise CheckpointError(
            f"tag is {tag!r} on rank {rank} but the ranks have {tags}; give the same tag on every rank (nothing was saved)"
        )
    final = os.path.join(save_dir, tag)
    working = hidden_sibling(final, "saving")

    def run_on_all_ranks(action: Callable[[], Any]) -> list[Any]:
        """All ranks' results of ``action``; if it fails on one rank, every rank raises that error."""
        result, problem, untouched = None, None, True
        try:
            result = action()
        except Exception as error:
            problem, untouched = error_text(error), not isinstance(error, NotRestoredError)
        everyone = gather([result, problem, untouched], where)
        problems = [f"rank {r}: {x[1]}" for r, x in enumerate(everyone) if x[1]]
        if problems:
            if rank == 0:
                discard_quietly(working)
            so = "; the one before is untouched" if all(x[2] for x in everyone) else ""
            raise CheckpointError(f"checkpoint {final!r} was not saved ({'; '.join(problems)}){so}")
        return [x[0] for x in everyone]

    def prepare() -> None:
        if rank == 0:
            _check_place(save_dir, tag, save_latest)
            make_working(final)

    def finish() -> None:
        if rank == 0:
            write_text(os.path.join(working, MANIFEST), manifest_text(manifest(contributions)))
            write_text(os.path.join(save_dir, "zero_to_fp32.py"), SCRIPT)
            latest = os.path.join(save_dir, "latest")
            aside = write_aside(latest, tag) if save_latest else None

            def commit() -> None:
                if aside is not None:
                    sync_folder(os.path.dirname(final))
                    os.replace(aside, latest)

            try:
                replace_folder(working, final, commit)
            except BaseException:
                if aside is not None:
                    discard_quietly(aside)
                raise
            sync_folder(save_dir)

    run_on_all_ranks(prepare)
    contributions = run_on_all_ranks(lambda: write(working))
    run_on_all_ranks(finish)  # no rank returns before the checkpoint has its name


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


def pack_stage(
    masters: Masters, frozen: Mapping[str, torch.Tensor], optimizer: torch.optim.Optimizer
) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """(tensors, metadata) of a stage's file.

    Args:
        masters: ``optimizer.state`` is keyed by their parameters. Values go to the host one by one: those of halves are copies.
        frozen: frozen parameters by name.
    """
    tensors: dict[str, torch.Tensor] = {f"param/{n}": masters.value(n).cpu() for n in masters}
    tensors |= {f"frozen/{n}": t for n, t in frozen.items()}
    names: dict[torch.Tensor, str] = {p: n for n, p in masters.parameters.items()}
    spread_counts(optimizer)
    trees = {
        names[p]: {k: pack_state(v, f"state/{names[p]}/{k}", tensors) for k, v in state.items()}
        for p, state in optimizer.state.items()
    }
    return tensors, {"state": json.dumps(trees)}


def saved_buffers(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The persistent buffers, by name."""
    left_out = {f"{path}.{name}".lstrip(".") for path, m in module.named_modules() for name in m._non_persistent_buffers_set}
    return {n: b for n, b in module.named_buffers() if n not in left_out}


def error_text(error: Exception) -> str:
    """An error for the message to all ranks; unexpected types are named."""
    return str(error) if isinstance(error, (CheckpointError, ValueError)) else f"{type(error).__name__}: {error}"


# ---- loading ----------------------------------------------------------------------------------------------------------------
def find_on_all_ranks(load_dir: str, tag: str | None, latest: str, rank: int, gather: Gather, where: str) -> str | None:
    """Collective: the folder of the checkpoint to load, the same on all ranks.

    Args:
        tag: None: the tag in file DIR/``latest``.
    Returns:
        DIR/TAG; None if there is neither a tag nor anything named ``latest``.
    Raises:
        CheckpointError: on every rank: the tag is invalid or differs between ranks, or ``latest`` is no readable file with a tag.
    """
    problem = None
    try:
        tag = check_tag(str(tag)) if tag is not None else read_latest(load_dir, latest)
    except Exception as error:
        tag, problem = None, error_text(error)
    everyone = gather([tag, problem], where)
    raise_on_all_ranks(load_dir, [x for _, x in everyone])
    tags = {x for x, _ in everyone}
    if len(tags) > 1:
        raise CheckpointError(
            f"tag is {tag!r} on rank {rank} but the ranks have {sorted(map(str, tags))} (None: no file "
            f"{os.path.join(load_dir, latest)}); give every rank the same tag and folder (nothing was changed)"
        )
    if tag is None and rank == 0:
        logger.warning(
            f"nothing was loaded: there is no file {os.path.join(load_dir, latest)} that names the checkpoint to "
            "load; write one, or pass tag="
        )
    return None if tag is None else os.path.join(load_dir, tag)


def raise_on_all_ranks(folder: str, problems: list[str | None]) -> None:
    """Raise CheckpointError if any rank has a problem.

    Args:
        problems: by rank; None: no problem. Every rank passes the same list.
    """
    told = [f"rank {r}: {x}" for r, x in enumerate(problems) if x]
    if told:
        raise CheckpointError(f"checkpoint {folder!r} was not loaded, and nothing was changed ({'; '.join(told)})")


def refuse_custom_load(custom_load_fn: Any) -> None:
    """Raise ValueError if the script passes ``custom_load_fn``."""
    if custom_load_fn is not None:
        raise ValueError(
            "custom_load_fn is given, but the cyclic engine loads by parameter name; leave it out of load_checkpoint()"
        )


def check_tensor(folder: str, what: str, saved: TensorSpec, mine: torch.Tensor) -> None:
    """Raise CheckpointError unless shapes agree and both dtypes are floating point, or neither is. Reads no tensor."""
    if tuple(saved.shape) != tuple(mine.shape):
        raise CheckpointError(
            f"{what} is {tuple(saved.shape)} in {folder} and {tuple(mine.shape)} in the model; load it into the "
            "model it was saved from"
        )
    if saved.dtype.is_floating_point != mine.is_floating_point():
        raise CheckpointError(f"{what} is {saved.dtype} in {folder} and {mine.dtype} in the model")


def adapt_states(
    folder: str, optimizer: torch.optim.Optimizer, masters: Mapping[str, torch.Tensor], states: Mapping[str, dict[str, Any]]
) -> None:
    """Convert saved states, in place, to the types that this optimizer's ``step()`` takes.

    Args:
        masters: the optimizer's parameters by name; states: of each, by name.
    Raises:
        CheckpointError: elementwise state does not have its parameter's shape.
    """
    for name in masters.keys() & states.keys():
        state = states[name]
        fit_counts(optimizer, state)
        for key in ELEMENTWISE & state.keys():
            value = state[key]
            if value is not None and (not isinstance(value, torch.Tensor) or value.shape != masters[name].shape):
                raise CheckpointError(
                    f"the optimizer's {key!r} of parameter {name!r} in {folder} has not the parameter's shape; "
                    "pass load_optimizer_states=False"
                )


def check_group_options(folder: str, saved: Mapping[str, Any], mine: Mapping[str, Any]) -> None:
    """Raise CheckpointError unless each option of a saved param group has the type of the optimizer's own option."""
    for key in saved.keys() & mine.keys() - {"params"}:
        if not _same_type(saved[key], mine[key]):
            raise CheckpointError(
                f"the optimizer's {key!r} is {ascii(saved[key])[:80]} in {folder} and {mine[key]!r} in the optimizer; "
                "build it as it was, or pass load_optimizer_states=False"
            )


def _same_type(value: Any, mine: Any) -> bool:
    """Whether ``value`` can take the place of ``mine``: both numbers, both sequences of one length, or of one class."""

    def number(x: Any) -> bool:
        return isinstance(x, (int, float, torch.Tensor)) and not isinstance(x, bool)

    if isinstance(mine, (list, tuple)):
        return isinstance(value, (list, tuple)) and len(value) == len(mine) and all(map(number, value)) == all(map(number, mine))
    return mine is None or value is None or (number(value) if number(mine) else isinstance(value, type(mine)))


def check_scheduler(engine: EngineState, state: Any, folder: str) -> None:
    """Raise CheckpointError if the lr scheduler rejects ``state``. A trial load tells; the scheduler's own state is put back."""
    scheduler = engine.lr_scheduler
    if state is None or not hasattr(scheduler, "load_state_dict"):
        return
    before = copy.deepcopy(scheduler.state_dict())
    if (key := _method(scheduler, state)) is not None:
        raise CheckpointError(
            f"the lr scheduler's state in {folder} would replace {key!r} of a {type(scheduler).__name__}; "
            "pass load_lr_scheduler_states=False"
        )
    try:
        scheduler.load_state_dict(copy.deepcopy(state))
    except Exception as error:
        raise CheckpointError(
            f"the lr scheduler's state in {folder} does not fit a {type(scheduler).__name__} "
            f"({type(error).__name__}: {error}); use the scheduler it was saved with, or pass "
            "load_lr_scheduler_states=False"
        ) from error
    finally:
        scheduler.load_state_dict(before)


def _method(scheduler: Any, state: Any) -> str | None:
    """A key of the state that names a method or the optimizer: torch's schedulers write any key into their ``__dict__``."""
    for key, value in state.items() if isinstance(state, dict) else ():
        if isinstance(key, str) and (key == "optimizer" or callable(getattr(scheduler, key, None))):
            return key
        if key == "_schedulers" and isinstance(value, (list, tuple)):  # of ChainedScheduler and SequentialLR
            for inner, part in zip(getattr(scheduler, key, ()), value):
                if (found := _method(inner, part)) is not None:
                    return found
    return None


def load_scheduler(engine: EngineState, state: Any) -> None:
    """Load the lr scheduler's state, if there are both."""
    if state is not None and hasattr(engine.lr_scheduler, "load_state_dict"):
        engine.lr_scheduler.load_state_dict(state)


def restore_options(saved: Mapping[str, Any], group: dict[str, Any], *others: dict[str, Any]) -> None:
    """Write saved options into a param group, except ``params``; a tuple stays a tuple.

    Args:
        others: further groups that take those options that they have.
    """
    for key, value in saved.items():
        if key == "params":
            continue
        group[key] = value = tuple(value) if isinstance(group.get(key), tuple) else value
        for other in others:
            if key in other:
                other[key] = value
