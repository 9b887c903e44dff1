"""Checkpoints of the engine: one safetensors file per owner, keyed by parameter name, and a manifest. Written atomically.

::

    DIR/latest                              the newest tag
    DIR/zero_to_fp32.py                     exports the weights, for people and tools that look for it
    DIR/TAG/cyclic.json                     manifest: files (size, SHA-256, tensors), groups, stages, counters; written last
    DIR/TAG/stage_000.safetensors ...       param/NAME (fp32 masters), frozen/NAME, state/NAME/KEY (optimizer), scalars
    DIR/TAG/buffers_000.safetensors ...     each rank's buffers
    DIR/TAG/client.pt                       client_state, lr scheduler; read with weights_only

Saving flushes, so what is written is an ordinary synchronous state, and resuming is bitwise equal to continuing. Because files
are keyed by name, any number of ranks, partition or rule can read them. Loading takes DeepSpeed's own formats too (foreign.py).
"""

import copy
import json
import os
import shutil
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from deepspeed.utils import logger

from . import __version__
from .files import (
    CheckpointError,
    beside,
    check_tag,
    read_latest,
    replace_folder,
    save_plain,
    save_tensors,
    there,
    write_text,
)
from .foreign import open_stored
from .stored import COUNTERS, MANIFEST, Stored, manifest_text, pack_state, plain_options

if TYPE_CHECKING:
    from .engine import CyclicEngine
    from .runtime import Runtime

ELEMENTWISE = {"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer"}  # state that has its parameter's shape

SCRIPT = '''"""Writes a checkpoint's weights in fp32: python zero_to_fp32.py CHECKPOINT_DIR OUTPUT_DIR [--tag TAG] (--help)."""

import sys

from deepspeed_cdp.convert import main

if __name__ == "__main__":
    sys.exit(main(["to-fp32", *sys.argv[1:]]))
'''


# ---- saving -----------------------------------------------------------------------------------------------------------------
def save(engine: "CyclicEngine", runtime: "Runtime", save_dir: str, tag: str | None, client_state: dict, save_latest: bool,
         exclude_frozen: bool) -> bool:
    """Collective; see ``CyclicEngine.save_checkpoint``."""
    if not save_dir:
        raise ValueError(f"save_dir is {save_dir!r}; it must name a folder; give one to save_checkpoint()")
    save_dir = os.fspath(save_dir)
    tag = check_tag(str(tag if tag is not None else f"global_step{engine.global_steps}"))
    runtime.flush()
    rank = runtime.transport.label
    where = f"rank {rank}, step {runtime.handoff.global_step}, saving checkpoint {tag!r}"
    tags = runtime.transport.gather(tag, where)
    if len(set(tags)) > 1:
        raise CheckpointError(f"tag is {tag!r} on rank {rank} but the ranks have {sorted(set(tags))}; give the same tag on every "
                              "rank (nothing was saved)")
    final = os.path.join(save_dir, tag)
    working = beside(final, "saving")

    def together(action: Callable[[], Any]) -> list[Any]:
        """Do it on every rank; all of them go on, or all of them raise what went wrong on one."""
        result, problem = None, None
        try:
            result = action()
        except Exception as error:
            problem = _words(error)
        everyone = runtime.transport.gather([result, problem], where)
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
            write_text(os.path.join(working, MANIFEST), manifest_text(_manifest(engine, runtime, everyone, exclude_frozen)))
            write_text(os.path.join(save_dir, "zero_to_fp32.py"), SCRIPT)
            replace_folder(working, final)
            if save_latest:
                write_text(os.path.join(save_dir, "latest"), tag)

    together(prepare)
    everyone = together(lambda: _write(engine, runtime, working, client_state, exclude_frozen))
    together(finish)  # no rank goes on before the checkpoint is there
    return True


def _words(error: Exception) -> str:
    return str(error) if isinstance(error, (CheckpointError, ValueError)) else f"{type(error).__name__}: {error}"


def _manifest(engine: "CyclicEngine", runtime: "Runtime", everyone: list[dict], exclude_frozen: bool) -> dict[str, Any]:
    groups = range(len(everyone[0]["options"]))
    # An optimizer may keep a count in its groups, and leave those alone in which this rank owns nothing.
    options = [next((x for x in everyone if x["owns"][g]), everyone[0])["options"][g] for g in groups]
    return {"deepspeed_cdp": __version__, "ranks": runtime.plan.schedule.ranks, "rule": runtime.settings.rule,
            "stages": runtime.plan.stages, "dtype": str(next(runtime.module.parameters()).dtype).removeprefix("torch."),
            "groups": engine.optimizer_group_names, "options": options, "shared": _shared(runtime.module),
            "frozen_left_out": exclude_frozen, "counters": {c: getattr(engine, c) for c in COUNTERS},
            "loss_scale": runtime.scale.state_dict(),
            "files": {name: entry for x in everyone for name, entry in x["files"].items()}}


def _write(engine: "CyclicEngine", runtime: "Runtime", folder: str, client_state: dict, exclude_frozen: bool) -> dict[str, Any]:
    """This rank's files; their entries in the manifest, and the options of its groups."""
    owner, rank = runtime.owner, runtime.transport.label
    files = {} if runtime.transport.ring else _write_stage(runtime, folder, exclude_frozen)
    buffers = f"buffers_{rank:03d}.safetensors"  # those of batch norm, say, differ between all ranks
    files[buffers] = save_tensors(folder, buffers, saved_buffers(runtime.module), {})
    if rank == 0:
        scheduler = engine.lr_scheduler.state_dict() if hasattr(engine.lr_scheduler, "state_dict") else None
        files["client.pt"] = save_plain(folder, "client.pt", {"client_state": client_state, "lr_scheduler": scheduler},
                                        "client_state or the lr scheduler's state")
    return {"files": files, "options": [plain_options({k: v for k, v in g.items() if k != "params"})
                                        for g in owner.optimizer.param_groups],
            "owns": [bool(g["params"]) for g in owner.optimizer.param_groups]}


def _write_stage(runtime: "Runtime", folder: str, exclude_frozen: bool) -> dict[str, Any]:
    """The owned stage's file and its entry; with several rings all have the same, and ring 0 writes it."""
    owner = runtime.owner
    stage = f"stage_{runtime.plan.schedule.owned(runtime.handoff.rank):03d}.safetensors"
    tensors: dict[str, torch.Tensor] = {f"param/{n}": p.detach() for n, p in owner.masters.items()}
    if not exclude_frozen:
        tensors |= {f"frozen/{n}": t for n, t in owner.frozen.items()}
    names = {p: n for n, p in owner.masters.items()}
    _spread_counts(owner.optimizer)
    trees = {names[p]: {k: pack_state(v, f"state/{names[p]}/{k}", tensors) for k, v in state.items()}
             for p, state in owner.optimizer.state.items()}
    tensors["scalars"] = runtime.handoff.scalars.kept
    if stage != "stage_000.safetensors":
        del tensors["scalars"]
    return {stage: save_tensors(folder, stage, tensors, {"state": json.dumps(trees)})}


def _spread_counts(optimizer: torch.optim.Optimizer) -> None:
    """DeepSpeed's FusedAdam counts steps in the state of a group's last parameter only; on another ring another one is last."""
    for group in optimizer.param_groups if type(optimizer).__name__ == "FusedAdam" else ():
        states = [optimizer.state[p] for p in group["params"] if "step" in optimizer.state.get(p, ())]
        for state in states:
            state["step"] = max(s["step"] for s in states)


def _fit_counts(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """torch's Adam counts in a tensor, DeepSpeed's FusedAdam and CPUAdam in an int: a checkpoint of one is taken by the other."""
    step = state.get("step")
    if type(optimizer).__module__.startswith("torch.optim") and "exp_avg" in state and isinstance(step, int):
        state["step"] = torch.tensor(float(step), device="cpu")
    elif type(optimizer).__name__ in ("FusedAdam", "DeepSpeedCPUAdam") and isinstance(step, torch.Tensor):
        state["step"] = int(step)


def saved_buffers(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The buffers that a state dict holds."""
    left_out = {f"{path}.{name}".lstrip(".") for path, m in module.named_modules() for name in m._non_persistent_buffers_set}
    return {n: b for n, b in module.named_buffers() if n not in left_out}


def _shared(module: torch.nn.Module) -> dict[str, str]:
    """Other names of tied parameters, to the first."""
    first: dict[torch.nn.Parameter, str] = {}
    names = [(n, first.setdefault(p, n)) for n, p in module.named_parameters(remove_duplicate=False)]
    return {n: known for n, known in names if n != known}


# ---- loading ----------------------------------------------------------------------------------------------------------------
def load(engine: "CyclicEngine", runtime: "Runtime", load_dir: str, tag: str | None, strict: bool, optimizer_states: bool,
         scheduler_states: bool, module_only: bool, custom_load_fn: Any) -> tuple[str | None, dict | None]:
    """Collective; see ``CyclicEngine.load_checkpoint``. All files are checked on every rank before anything is changed."""
    if custom_load_fn is not None:
        raise ValueError("custom_load_fn is given, but the cyclic engine loads by parameter name; leave it out of "
                         "load_checkpoint()")
    rank, gather, load_dir = runtime.transport.label, runtime.transport.gather, os.fspath(load_dir)
    where = f"rank {rank}, step {runtime.handoff.global_step}, loading a checkpoint from {load_dir!r}"
    optimizer_states, scheduler_states = optimizer_states and not module_only, scheduler_states and not module_only
    latest = "latest_universal" if engine.load_universal_checkpoint() else "latest"
    found, problem = None, None
    try:
        tag = check_tag(str(tag)) if tag is not None else read_latest(load_dir, latest)
    except Exception as error:
        tag, problem = None, _words(error)
    everyone = gather([tag, problem], where)
    _raise_together(load_dir, [x for _, x in everyone])
    tags = [x for x, _ in everyone]
    if len(set(tags)) > 1:
        raise CheckpointError(f"tag is {tag!r} on rank {rank} but the ranks have {sorted(set(map(str, tags)))} (None: no file "
                              f"{os.path.join(load_dir, latest)}); give every rank the same tag and folder (nothing was changed)")
    if tag is None:
        if rank == 0:
            logger.warning(f"nothing was loaded: there is no file {os.path.join(load_dir, latest)} that names the checkpoint to "
                           "load; write one, or pass tag=")
        return None, None
    folder = os.path.join(load_dir, tag)
    try:
        with open_stored(there(folder)) as stored:
            found = _read(engine, runtime, stored, strict, optimizer_states, scheduler_states)
    except Exception as error:
        problem = _words(error)
    _raise_together(folder, gather(problem, where))
    runtime.scatter()
    runtime.flush()
    _apply(engine, runtime, found, optimizer_states, scheduler_states, module_only)
    runtime.transport.reset(where)
    runtime.restart()
    return folder, found["client_state"]


def _raise_together(folder: str, problems: list[str | None]) -> None:
    told = [f"rank {r}: {x}" for r, x in enumerate(problems) if x]
    if told:
        raise CheckpointError(f"checkpoint {folder!r} was not loaded, and nothing was changed ({'; '.join(told)})")


def _read(engine: "CyclicEngine", runtime: "Runtime", stored: Stored, strict: bool, optimizer_states: bool,
          scheduler_states: bool) -> dict[str, Any]:
    """What this rank needs, checked and in memory; nothing is changed."""
    owner, rank, folder = runtime.owner, runtime.transport.label, stored.folder
    every = {n for n, _ in runtime.module.named_parameters()}
    trained = {n for stage in runtime.plan.stages for n in stage}
    homes = {n: stored.name_of(n) for n in every}
    missing = {n for n in every if homes[n] is None and not (stored.frozen_left_out and n not in trained)}
    unexpected = ({*stored.trained, *stored.frozen} - set(homes.values())) if strict else set()
    tied = {n: homes[known] for n, known in _shared(runtime.module).items() if n in unexpected and homes.get(known)}
    unexpected -= tied.keys()
    fix = "load it into the model it was saved from, or pass load_module_strict=False"
    if strict and missing:
        raise CheckpointError(f"{folder} has no parameter {min(missing)!r} ({len(missing)} missing); {fix}")
    if unexpected:
        raise CheckpointError(f"{folder} has {min(unexpected)!r}, which the model lacks ({len(unexpected)} such); {fix}")
    own = {n: owner.masters.get(n, owner.frozen.get(n)) for n in (*owner.masters, *owner.frozen) if homes[n] is not None}
    kinds = {**stored.trained, **stored.frozen}
    for name, mine in own.items():
        _fits(folder, f"parameter {name!r}", kinds[homes[name]], mine)
    buffers = saved_buffers(runtime.module)
    if strict and (different := buffers.keys() ^ stored.buffers.keys()):
        where = "the model" if min(different) in buffers else folder
        raise CheckpointError(f"buffer {min(different)!r} is only in {where}; {fix}")
    common = buffers.keys() & stored.buffers.keys()
    for name in common:
        _fits(folder, f"buffer {name!r}", stored.buffers[name], buffers[name])
    groups = owner.optimizer.param_groups
    if optimizer_states and (stored.groups is None or len(stored.groups) != len(groups)):
        raise CheckpointError(f"{folder} has {len(stored.groups or ())} parameter groups and the optimizer {len(groups)}; build "
                              "the optimizer as it was, or pass load_optimizer_states=False")
    mine = {homes[n] for n in own}
    ranks = runtime.transport.size * runtime.transport.rings
    stored.verify(rank, ranks, [*mine, *(n for n, home in tied.items() if home in mine)])
    for name, home in tied.items():
        if home in mine and not torch.equal(stored.value(name), stored.value(home)):
            raise CheckpointError(f"{folder} has two values for {name!r} and {home!r}, one parameter in the model; {fix}")
    found = {"values": {n: stored.value(homes[n]) for n in own}, "buffers": {n: stored.buffer(n, rank) for n in common},
             "state": {n: stored.state(homes[n]) for n in owner.masters if optimizer_states and homes[n] in stored.trained},
             "groups": stored.groups, "scalars": stored.scalars(runtime.plan.stages), "counters": stored.counters,
             "client_state": stored.client_state, "lr_scheduler": stored.lr_scheduler, "loss_scale": stored.loss_scale}
    for name, state in found["state"].items():
        _fit_counts(owner.optimizer, state)
        for key in ELEMENTWISE & state.keys():
            value = state[key]
            if value is not None and (not isinstance(value, torch.Tensor) or value.shape != owner.masters[name].shape):
                raise CheckpointError(f"the optimizer's {key!r} of parameter {name!r} in {folder} has not the parameter's shape; "
                                      "pass load_optimizer_states=False")
    for mine, theirs in zip(groups, stored.groups if optimizer_states else ()):
        for key in theirs.keys() & mine.keys() - {"params"}:
            _like(folder, key, theirs[key], mine[key])
    if scheduler_states and hasattr(engine.lr_scheduler, "load_state_dict") and found["lr_scheduler"] is not None:
        _try_scheduler(engine.lr_scheduler, found["lr_scheduler"], folder)
    return found


def _fits(folder: str, what: str, kind: Any, mine: torch.Tensor) -> None:
    """Told from the file's header, before anything is allocated."""
    if tuple(kind.shape) != tuple(mine.shape):
        raise CheckpointError(f"{what} is {tuple(kind.shape)} in {folder} and {tuple(mine.shape)} in the model")
    if kind.dtype.is_floating_point != mine.is_floating_point():
        raise CheckpointError(f"{what} is {kind.dtype} in {folder} and {mine.dtype} in the model")


def _like(folder: str, key: str, value: Any, mine: Any) -> None:
    """A group's option is of the kind that the optimizer has, so that no step fails on it later."""
    def number(x: Any) -> bool:
        return isinstance(x, (int, float, torch.Tensor)) and not isinstance(x, bool)
    if isinstance(mine, (list, tuple)):
        good = isinstance(value, (list, tuple)) and len(value) == len(mine) and all(map(number, value)) == all(map(number, mine))
    else:
        good = mine is None or value is None or (number(value) if number(mine) else isinstance(value, type(mine)))
    if not good:
        raise CheckpointError(f"the optimizer's {key!r} is {ascii(value)[:80]} in {folder} and {mine!r} in the optimizer; "
                              "build it as it was, or pass load_optimizer_states=False")


def _try_scheduler(scheduler: Any, state: Any, folder: str) -> None:
    """A scheduler may refuse a state only while it loads it: so load it, and put the old one back."""
    before = copy.deepcopy(scheduler.state_dict())
    try:
        scheduler.load_state_dict(copy.deepcopy(state))
    except Exception as error:
        raise CheckpointError(f"the lr scheduler's state in {folder} does not fit a {type(scheduler).__name__} "
                              f"({type(error).__name__}: {error}); use the scheduler it was saved with, or pass "
                              "load_lr_scheduler_states=False") from error
    finally:
        scheduler.load_state_dict(before)


def _apply(engine: "CyclicEngine", runtime: "Runtime", found: dict[str, Any], optimizer_states: bool, scheduler_states: bool,
           module_only: bool) -> None:
    owner = runtime.owner
    with torch.no_grad():
        for name, value in found["values"].items():
            (owner.masters if name in owner.masters else owner.frozen)[name].copy_(value)
        own = dict(runtime.module.named_buffers())
        for name, value in found["buffers"].items():
            own[name].copy_(value)
    if optimizer_states:
        for group, saved in zip(owner.optimizer.param_groups, found["groups"]):
            for key, value in saved.items():
                if key != "params":
                    group[key] = tuple(value) if isinstance(group.get(key), tuple) else value
        steps_on_device = {p for g in owner.optimizer.param_groups if g.get("fused") or g.get("capturable") for p in g["params"]}
        for name, master in owner.masters.items():
            owner.optimizer.state.pop(master, None)
            if state := found["state"].get(name):
                owner.optimizer.state[master] = {k: _moved(v, master.device, master in steps_on_device)
                                                 for k, v in state.items()}
        vector = runtime.handoff.scalars.kept
        vector.zero_() if found["scalars"] is None else vector.copy_(found["scalars"])
    if scheduler_states and found["lr_scheduler"] is not None and hasattr(engine.lr_scheduler, "load_state_dict"):
        engine.lr_scheduler.load_state_dict(found["lr_scheduler"])
    if not module_only:
        for counter, value in found["counters"].items():
            setattr(engine, counter, value)
        micro = engine.gradient_accumulation_steps()  # a step begins anew, whatever number of micro-batches it had
        engine.micro_steps = found["counters"].get("micro_steps", engine.global_steps * micro) // micro * micro
        runtime.handoff.global_step = engine.global_steps
    runtime.handoff.scalars.resume(runtime.handoff.global_step, optimizer_states and found["scalars"] is not None)
    runtime.scale.restart(runtime.handoff.global_step, found["loss_scale"] if optimizer_states else None)


def _moved(value: Any, device: torch.device, scalars_too: bool) -> Any:
    """Tensors on the device; those of one number stay on the CPU, as torch's optimizers keep their counts."""
    if isinstance(value, torch.Tensor):
        return value.to(device) if value.dim() or scalars_too else value
    if isinstance(value, dict):
        return {k: _moved(v, device, scalars_too) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_moved(v, device, scalars_too) for v in value)
    return value
