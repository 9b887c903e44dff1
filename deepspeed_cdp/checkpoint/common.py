"""What checkpoints of rings (checkpoint/save_load.py) and pipelines (checkpoint/save_load.py) share: collective, atomic,
checked before use."""

import copy
import json
import os
import shutil
from collections.abc import Callable, Mapping
from typing import Any

import torch
from deepspeed.utils import logger

from deepspeed_cdp.checkpoint.files import beside, check_tag, read_latest, replace_folder, write_text
from deepspeed_cdp.checkpoint.format import MANIFEST, manifest_text, pack_state
from deepspeed_cdp.errors import CheckpointError
from deepspeed_cdp.optim.state import fit_counts, spread_counts

Gather = Callable[[Any, str], list[Any]]

ELEMENTWISE = {"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer"}  # state that has its parameter's shape

SCRIPT = '''"""Writes a checkpoint's weights in fp32: python zero_to_fp32.py CHECKPOINT_DIR OUTPUT_DIR [--tag TAG] (--help)."""

import sys

from deepspeed_cdp.convert import main

if __name__ == "__main__":
    sys.exit(main(["to-fp32", *sys.argv[1:]]))
'''


# ---- saving -----------------------------------------------------------------------------------------------------------------
def save_together(
    save_dir: str,
    tag: str,
    rank: int,
    gather: Gather,
    where: str,
    save_latest: bool,
    write: Callable[[str], dict[str, Any]],
    manifest: Callable[[list[dict[str, Any]]], dict[str, Any]],
) -> None:
    """Collective: every rank writes into a folder beside the final one, which takes its place once all is there.

    Args:
        gather: (value, where) -> the values of all ranks.
        write: (folder) -> what this rank has to say for the manifest; manifest: of what all ranks have said.
    Raises:
        CheckpointError: on every rank, with what went wrong on which; the checkpoint before is untouched.
    """
    tags = sorted(set(gather(tag, where)))
    if len(tags) > 1:
        raise CheckpointError(
            f"tag is {tag!r} on rank {rank} but the ranks have {tags}; give the same tag on every rank (nothing was saved)"
        )
    final = os.path.join(save_dir, tag)
    working = beside(final, "saving")

    def together(action: Callable[[], Any]) -> list[Any]:
        """Do it on every rank; all of them go on, or all of them raise what went wrong on one."""
        result, problem = None, None
        try:
            result = action()
        except Exception as error:
            problem = words(error)
        everyone = gather([result, problem], where)
        problems = [f"rank {r}: {x[1]}" for r, x in enumerate(everyone) if x[1]]
        if problems:
            if rank == 0:
                shutil.rmtree(working, ignore_errors=True)
            raise CheckpointError(f"checkpoint {final!r} was not saved ({'; '.join(problems)}); the one before is untouched")
        return [x[0] for x in everyone]

    def prepare() -> None:
        if rank == 0:
            shutil.rmtree(working, ignore_errors=True)
            os.makedirs(working)

    def finish() -> None:
        if rank == 0:
            write_text(os.path.join(working, MANIFEST), manifest_text(manifest(everyone)))
            write_text(os.path.join(save_dir, "zero_to_fp32.py"), SCRIPT)
            replace_folder(working, final)
            if save_latest:
                write_text(os.path.join(save_dir, "latest"), tag)

    together(prepare)
    everyone = together(lambda: write(working))
    together(finish)  # no rank goes on before the checkpoint is there


def place_of(save_dir: str | None, tag: str | None, global_steps: int) -> tuple[str, str]:
    """(folder, tag) of a checkpoint to be saved, checked."""
    if not save_dir:
        raise ValueError(f"save_dir is {save_dir!r}; it must name a folder; give one to save_checkpoint()")
    return os.fspath(save_dir), check_tag(str(tag if tag is not None else f"global_step{global_steps}"))


def pack_stage(
    masters: Mapping[str, torch.Tensor], frozen: Mapping[str, torch.Tensor], optimizer: torch.optim.Optimizer
) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """(tensors, metadata) of a stage's file."""
    tensors: dict[str, torch.Tensor] = {f"param/{n}": p.detach() for n, p in masters.items()}
    tensors |= {f"frozen/{n}": t for n, t in frozen.items()}
    names = {p: n for n, p in masters.items()}
    spread_counts(optimizer)
    trees = {
        names[p]: {k: pack_state(v, f"state/{names[p]}/{k}", tensors) for k, v in state.items()}
        for p, state in optimizer.state.items()
    }
    return tensors, {"state": json.dumps(trees)}


def saved_buffers(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The buffers that a state dict holds."""
    left_out = {f"{path}.{name}".lstrip(".") for path, m in module.named_modules() for name in m._non_persistent_buffers_set}
    return {n: b for n, b in module.named_buffers() if n not in left_out}


def words(error: Exception) -> str:
    return str(error) if isinstance(error, (CheckpointError, ValueError)) else f"{type(error).__name__}: {error}"


# ---- loading ----------------------------------------------------------------------------------------------------------------
def found_together(load_dir: str, tag: str | None, latest: str, rank: int, gather: Gather, where: str) -> str | None:
    """Collective: the checkpoint's folder, or None if no tag is given and there is no file that names the newest."""
    problem = None
    try:
        tag = check_tag(str(tag)) if tag is not None else read_latest(load_dir, latest)
    except Exception as error:
        tag, problem = None, words(error)
    everyone = gather([tag, problem], where)
    raise_together(load_dir, [x for _, x in everyone])
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


def refuse_custom_load(custom_load_fn: Any) -> None:
    if custom_load_fn is not None:
        raise ValueError(
            "custom_load_fn is given, but the cyclic engine loads by parameter name; leave it out of load_checkpoint()"
        )


def raise_together(folder: str, problems: list[str | None]) -> None:
    told = [f"rank {r}: {x}" for r, x in enumerate(problems) if x]
    if told:
        raise CheckpointError(f"checkpoint {folder!r} was not loaded, and nothing was changed ({'; '.join(told)})")


def fits(folder: str, what: str, kind: Any, mine: torch.Tensor) -> None:
    """Told from the file's header, before anything is allocated."""
    if tuple(kind.shape) != tuple(mine.shape):
        raise CheckpointError(
            f"{what} is {tuple(kind.shape)} in {folder} and {tuple(mine.shape)} in the model; load it into the "
            "model it was saved from"
        )
    if kind.dtype.is_floating_point != mine.is_floating_point():
        raise CheckpointError(f"{what} is {kind.dtype} in {folder} and {mine.dtype} in the model")


def fit_states(
    folder: str, optimizer: torch.optim.Optimizer, masters: Mapping[str, torch.Tensor], states: Mapping[str, dict[str, Any]]
) -> None:
    """Make saved states those of this optimizer, or raise CheckpointError, so that no step fails on them later."""
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


def options_like(folder: str, theirs: Mapping[str, Any], mine: Mapping[str, Any]) -> None:
    """Every option of a saved group is of the kind that the optimizer's group has."""
    for key in theirs.keys() & mine.keys() - {"params"}:
        _like(folder, key, theirs[key], mine[key])


def _like(folder: str, key: str, value: Any, mine: Any) -> None:
    """A group's option is of the kind that the optimizer has, so that no step fails on it later."""

    def number(x: Any) -> bool:
        return isinstance(x, (int, float, torch.Tensor)) and not isinstance(x, bool)

    if isinstance(mine, (list, tuple)):
        good = isinstance(value, (list, tuple)) and len(value) == len(mine) and all(map(number, value)) == all(map(number, mine))
    else:
        good = mine is None or value is None or (number(value) if number(mine) else isinstance(value, type(mine)))
    if not good:
        raise CheckpointError(
            f"the optimizer's {key!r} is {ascii(value)[:80]} in {folder} and {mine!r} in the optimizer; "
            "build it as it was, or pass load_optimizer_states=False"
        )


def try_scheduler(scheduler: Any, state: Any, folder: str) -> None:
    """A scheduler may refuse a state only while it loads it: so load it, and put the old one back."""
    before = copy.deepcopy(scheduler.state_dict())
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
