"""Checkpoints of cyclic pipelines, in the format of ``deepspeed_cdp.checkpoint``: one file per stage, keyed by parameter name.

A PipelineModule names parameters by the number of the layer in the whole model, so any number of stages and any placement can
read what another wrote. Saving flushes; resuming is bitwise equal to continuing.
"""

import json
import os
import shutil
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from deepspeed.utils import logger

from deepspeed_cdp import __version__
from deepspeed_cdp.checkpoint import (
    SCRIPT,
    _fit_counts,
    _fits,
    _moved,
    _raise_together,
    _spread_counts,
    _try_scheduler,
    _words,
    saved_buffers,
)
from deepspeed_cdp.files import (
    CheckpointError,
    beside,
    check_tag,
    load_plain,
    read_latest,
    replace_folder,
    save_plain,
    save_tensors,
    there,
    write_text,
)
from deepspeed_cdp.foreign import open_stored
from deepspeed_cdp.stored import COUNTERS, MANIFEST, manifest_text, pack_state, plain_options

from .module import bounds_of, layers_of
from .parts import Known
from .runtime import PipeRuntime

if TYPE_CHECKING:
    from .engine import CyclicPipelineEngine


def _gather(runtime: PipeRuntime) -> Callable[[Any, str], list[Any]]:
    return runtime.transport.gather if runtime.transport is not None else lambda value, where: [value]


def _mine(engine: "CyclicPipelineEngine", stage: int) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Frozen parameters and saved buffers of a stage, by their names in the whole model."""
    names = {id(t): n for n, t in (*engine.module.named_parameters(), *saved_buffers(engine.module).items())}
    layers = layers_of(engine.module, bounds_of(engine.module), stage)
    frozen = {names[id(p)]: p for layer in layers for p in layer.parameters() if not p.requires_grad}
    return frozen, {names[id(b)]: b for layer in layers for b in layer.buffers() if id(b) in names}


# ---- saving -----------------------------------------------------------------------------------------------------------------
def save(engine: "CyclicPipelineEngine", runtime: PipeRuntime, save_dir: str, tag: str | None, client_state: dict,
         save_latest: bool, exclude_frozen: bool) -> bool:
    """Collective; see ``CyclicPipelineEngine.save_checkpoint``."""
    if not save_dir:
        raise ValueError(f"save_dir is {save_dir!r}; it must name a folder; give one to save_checkpoint()")
    save_dir, rank, gather = os.fspath(save_dir), runtime.rank, _gather(runtime)
    tag = check_tag(str(tag if tag is not None else f"global_step{engine.global_steps}"))
    runtime.flush()
    where = f"rank {rank}, saving checkpoint {tag!r}"
    tags = sorted(set(gather(tag, where)))
    if len(tags) > 1:
        raise CheckpointError(f"tag is {tag!r} on rank {rank} but the ranks have {tags}; give the same tag on every rank "
                              "(nothing was saved)")
    final = os.path.join(save_dir, tag)
    working = beside(final, "saving")

    def together(action: Callable[[], Any]) -> list[Any]:
        """Do it on every rank; all of them go on, or all of them raise what went wrong on one."""
        result, problem = None, None
        try:
            result = action()
        except Exception as error:
            problem = _words(error)
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
            write_text(os.path.join(working, MANIFEST), manifest_text(_manifest(engine, runtime, everyone, exclude_frozen)))
            write_text(os.path.join(save_dir, "zero_to_fp32.py"), SCRIPT)
            replace_folder(working, final)
            if save_latest:
                write_text(os.path.join(save_dir, "latest"), tag)

    together(prepare)
    everyone = together(lambda: _write(engine, runtime, working, client_state, exclude_frozen))
    together(finish)
    return True


def _manifest(engine: "CyclicPipelineEngine", runtime: PipeRuntime, everyone: list[dict], exclude_frozen: bool) -> dict[str, Any]:
    schedule = runtime.schedule
    stages = sorted((int(s), stage) for x in everyone for s, stage in x["stages"].items())
    return {"deepspeed_cdp": __version__, "ranks": schedule.ranks, "rule": schedule.threshold,
            "stages": [stage["names"] for _, stage in stages], "dtype": str(engine.get_data_types()[0]).removeprefix("torch."),
            "groups": [names for _, stage in stages for names in stage["groups"]],
            "options": [options for _, stage in stages for options in stage["options"]],
            "shared": {}, "frozen_left_out": exclude_frozen, "counters": {c: getattr(engine, c) for c in COUNTERS},
            "loss_scale": None, "pipeline": {"placement": schedule.placement, "bounds": bounds_of(engine.module)},
            "files": {name: entry for x in everyone for name, entry in x["files"].items()}}


def _write(engine: "CyclicPipelineEngine", runtime: PipeRuntime, folder: str, client_state: dict,
           exclude_frozen: bool) -> dict[str, Any]:
    """This rank's files, and what the manifest says of its stages."""
    files, stages = {}, {}
    for s, owner in runtime.owners.items():
        frozen, buffers = _mine(engine, s)
        tensors: dict[str, torch.Tensor] = {f"param/{n}": p.detach() for n, p in owner.masters.items()}
        if not exclude_frozen:
            tensors |= {f"frozen/{n}": t for n, t in frozen.items()}
        names = {p: n for n, p in owner.masters.items()}
        _spread_counts(owner.optimizer)
        trees = {names[p]: {k: pack_state(v, f"state/{names[p]}/{k}", tensors) for k, v in state.items()}
                 for p, state in owner.optimizer.state.items()}
        name = f"stage_{s:03d}.safetensors"
        files[name] = save_tensors(folder, name, tensors, {"state": json.dumps(trees)})
        name = f"buffers_{s:03d}.safetensors"
        files[name] = save_tensors(folder, name, buffers, {})
        groups = [(g, user) for g, user in zip(owner.optimizer.param_groups, runtime.user_optimizer.param_groups) if g["params"]]
        stages[s] = {"names": list(owner.masters), "groups": [[names[p] for p in g["params"]] for g, _ in groups],
                     "options": [plain_options({k: v for k, v in {**g, **user}.items() if k != "params"}) for g, user in groups]}
    if runtime.rank == 0:
        scheduler = engine.lr_scheduler.state_dict() if hasattr(engine.lr_scheduler, "state_dict") else None
        known = runtime.known
        last = None if known is None else {"step": known.step, "loss": known.loss.cpu(), "squares": known.squares.cpu()}
        content = {"client_state": client_state, "lr_scheduler": scheduler, "known": last}
        files["client.pt"] = save_plain(folder, "client.pt", content, "client_state or the lr scheduler's state")
    return {"files": files, "stages": stages}


# ---- loading ----------------------------------------------------------------------------------------------------------------
def load(engine: "CyclicPipelineEngine", runtime: PipeRuntime, load_dir: str, tag: str | None, strict: bool,
         optimizer_states: bool, scheduler_states: bool, module_only: bool,
         custom_load_fn: Any) -> tuple[str | None, dict | None]:
    """Collective; see ``CyclicPipelineEngine.load_checkpoint``. Everything is read on every rank before anything is changed."""
    if custom_load_fn is not None:
        raise ValueError("custom_load_fn is given, but the cyclic engine loads by parameter name; leave it out of "
                         "load_checkpoint()")
    rank, gather, load_dir = runtime.rank, _gather(runtime), os.fspath(load_dir)
    where = f"rank {rank}, loading a checkpoint from {load_dir!r}"
    optimizer_states, scheduler_states = optimizer_states and not module_only, scheduler_states and not module_only
    found, problem = None, None
    try:
        tag = check_tag(str(tag)) if tag is not None else read_latest(load_dir, "latest")
    except Exception as error:
        tag, problem = None, _words(error)
    everyone = gather([tag, problem], where)
    _raise_together(load_dir, [x for _, x in everyone])
    tags = {x for x, _ in everyone}
    if len(tags) > 1:
        raise CheckpointError(f"tag is {tag!r} on rank {rank} but the ranks have {sorted(map(str, tags))} (None: no file "
                              f"{os.path.join(load_dir, 'latest')}); give every rank the same tag and folder (nothing was "
                              "changed)")
    if tag is None:
        if rank == 0:
            logger.warning(f"nothing was loaded: there is no file {os.path.join(load_dir, 'latest')} that names the checkpoint "
                           "to load; write one, or pass tag=")
        return None, None
    folder = os.path.join(load_dir, tag)
    mine = sorted(_here(engine, runtime))
    wanted = {name for names in gather(mine, where) for name in names}
    try:
        found = _read(engine, runtime, there(folder), wanted, strict, optimizer_states, scheduler_states)
    except Exception as error:
        problem = _words(error)
    _raise_together(folder, gather(problem, where))
    runtime.flush()
    _apply(engine, runtime, found, optimizer_states, scheduler_states, module_only)
    return folder, found["client_state"]


def _here(engine: "CyclicPipelineEngine", runtime: PipeRuntime) -> dict[str, torch.Tensor]:
    """Parameters of this rank, trained and frozen, by name."""
    trained = {n: p for unit in runtime.units.values() for n, p in zip(unit.names, unit.params)}
    return trained | {n: p for s in runtime.parts for n, p in _mine(engine, s)[0].items()}


def _read(engine: "CyclicPipelineEngine", runtime: PipeRuntime, folder: str, wanted: set[str], strict: bool,
          optimizer_states: bool, scheduler_states: bool) -> dict[str, Any]:
    """What this rank needs, checked and in memory; nothing is changed."""
    here = _here(engine, runtime)
    masters = {n: m for owner in runtime.owners.values() for n, m in owner.masters.items()}
    buffers = {n: b for s in runtime.parts for n, b in _mine(engine, s)[1].items()}
    trained = {n for unit in runtime.units.values() for n in unit.names}
    fix = "load it into the model it was saved from, or pass load_module_strict=False"
    with open_stored(folder) as stored:
        kinds = {**stored.trained, **stored.frozen}
        missing = {n for n in here if n not in kinds and not (stored.frozen_left_out and n not in trained)}
        if strict and missing:
            raise CheckpointError(f"{folder} has no parameter {min(missing)!r} ({len(missing)} missing); {fix}")
        if strict and (more := kinds.keys() - wanted):
            raise CheckpointError(f"{folder} has {min(more)!r}, which the model lacks ({len(more)} such); {fix}")
        for name in here.keys() & kinds.keys():
            _fits(folder, f"parameter {name!r}", kinds[name], here[name])
        if strict and (gone := buffers.keys() - stored.buffers.keys()):
            raise CheckpointError(f"buffer {min(gone)!r} is only in the model; {fix}")
        for name in buffers.keys() & stored.buffers.keys():
            _fits(folder, f"buffer {name!r}", stored.buffers[name], buffers[name])
        names = here.keys() & kinds.keys()
        stored.verify(runtime.rank, runtime.schedule.ranks, names)
        options = {n: {k: v for k, v in group.items() if k != "params"} for group in stored.groups or () for n in group["params"]}
        found = {"values": {n: stored.value(n) for n in names},
                 "buffers": {n: stored.buffer(n, 0) for n in buffers.keys() & stored.buffers.keys()},
                 "state": {n: stored.state(n) for n in masters if optimizer_states and n in stored.trained},
                 "options": options, "counters": stored.counters, "client_state": stored.client_state,
                 "lr_scheduler": stored.lr_scheduler, "known": None}
        same = getattr(stored, "pipeline", {}).get("bounds") == bounds_of(engine.module)
    if same:
        found["known"] = load_plain(os.path.join(folder, "client.pt")).get("known")
    for owner in runtime.owners.values():
        for name in owner.masters.keys() & found["state"].keys():
            _fit_counts(owner.optimizer, found["state"][name])
    if scheduler_states and hasattr(engine.lr_scheduler, "load_state_dict") and found["lr_scheduler"] is not None:
        _try_scheduler(engine.lr_scheduler, found["lr_scheduler"], folder)
    return found


@torch.no_grad()
def _apply(engine: "CyclicPipelineEngine", runtime: PipeRuntime, found: dict[str, Any], optimizer_states: bool,
           scheduler_states: bool, module_only: bool) -> None:
    values = found["values"]
    for name, p in _here(engine, runtime).items():  # trained ones are views of version 0: a flush came before
        if name in values:
            p.data.copy_(values[name])
    for s in runtime.parts:
        for name, buffer in _mine(engine, s)[1].items():
            if name in found["buffers"]:
                buffer.copy_(found["buffers"][name])
    for owner in runtime.owners.values():
        for name, master in owner.masters.items():
            if name in values:
                master.copy_(values[name])
        if optimizer_states:
            _apply_state(owner.optimizer, owner.masters, runtime.user_optimizer, found)
    if scheduler_states and found["lr_scheduler"] is not None and hasattr(engine.lr_scheduler, "load_state_dict"):
        engine.lr_scheduler.load_state_dict(found["lr_scheduler"])
    if not module_only:
        for counter, value in found["counters"].items():
            setattr(engine, counter, value)
        runtime.global_step = engine.global_steps
    known = found["known"] if optimizer_states else None
    runtime.known = known and Known(known["step"], known["loss"].to(runtime.device), known["squares"].to(runtime.device))


def _apply_state(part: torch.optim.Optimizer, masters: dict[str, torch.nn.Parameter], user: torch.optim.Optimizer,
                 found: dict[str, Any]) -> None:
    names = {m: n for n, m in masters.items()}
    for group, users in zip(part.param_groups, user.param_groups):
        saved = next((found["options"][names[p]] for p in group["params"] if names[p] in found["options"]), {})
        for key, value in saved.items():
            value = tuple(value) if isinstance(group.get(key), tuple) else value
            group[key] = value
            if key in users:
                users[key] = value
    on_device = {p for g in part.param_groups if g.get("fused") or g.get("capturable") for p in g["params"]}
    for name, master in masters.items():
        part.state.pop(master, None)
        if state := found["state"].get(name):
            part.state[master] = {k: _moved(v, master.device, master in on_device) for k, v in state.items()}
