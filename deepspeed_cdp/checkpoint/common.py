"""What checkpoints of rings (``save_load``) and of pipelines (``pipeline``) share; ``saving`` has the rest of saving.

Saving and loading are collective. Loading checks everything on all ranks before any rank changes anything.
"""

import copy
import json
import os
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import torch
from deepspeed.utils import logger

from deepspeed_cdp.checkpoint.files import check_tag, read_latest
from deepspeed_cdp.checkpoint.format import TensorSpec, pack_state
from deepspeed_cdp.checkpoint.manifest import COUNTERS
from deepspeed_cdp.errors import CheckpointError
from deepspeed_cdp.optim.masters import Masters
from deepspeed_cdp.optim.state import fit_counts, spread_counts

Gather = Callable[[Any, str], list[Any]]  # collective: (this rank's value, where for the error) -> all ranks' values, in order

ELEMENTWISE = {"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer"}  # state with the shape of its parameter


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
