"""Checkpoints of cyclic pipelines, in the format of ``deepspeed_cdp.checkpoint.save_load``: one file per stage, keyed by
parameter name.

A PipelineModule names parameters by the number of the layer in the whole model, so any number of stages and any placement can
read what another wrote. Saving flushes; resuming is bitwise equal to continuing.
"""

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from deepspeed_cdp.checkpoint.common import (
    fit_states,
    fits,
    found_together,
    options_like,
    pack_stage,
    place_of,
    raise_together,
    refuse_custom_load,
    save_together,
    saved_buffers,
    try_scheduler,
    words,
)
from deepspeed_cdp.checkpoint.deepspeed_formats import open_stored
from deepspeed_cdp.checkpoint.files import load_plain, save_plain, save_tensors, there
from deepspeed_cdp.checkpoint.format import COUNTERS, plain_options
from deepspeed_cdp.errors import CheckpointError
from deepspeed_cdp.integration.pipe_module import bounds_of, layers_of
from deepspeed_cdp.optim.state import moved
from deepspeed_cdp.pipeline.parts import Known
from deepspeed_cdp.pipeline.runtime import PipeRuntime
from deepspeed_cdp.version import __version__

if TYPE_CHECKING:
    from deepspeed_cdp.integration.pipe_engine import CyclicPipelineEngine


def _gather(runtime: PipeRuntime) -> Callable[[Any, str], list[Any]]:
    return runtime.transport.gather if runtime.transport is not None else lambda value, where: [value]


def _mine(engine: "CyclicPipelineEngine", stage: int) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Frozen parameters and saved buffers of a stage, by their names in the whole model."""
    names = {id(t): n for n, t in (*engine.module.named_parameters(), *saved_buffers(engine.module).items())}
    layers = layers_of(engine.module, bounds_of(engine.module), stage)
    frozen = {names[id(p)]: p for layer in layers for p in layer.parameters() if not p.requires_grad}
    return frozen, {names[id(b)]: b for layer in layers for b in layer.buffers() if id(b) in names}


# ---- saving -----------------------------------------------------------------------------------------------------------------
def save(
    engine: "CyclicPipelineEngine",
    runtime: PipeRuntime,
    save_dir: str,
    tag: str | None,
    client_state: dict,
    save_latest: bool,
    exclude_frozen: bool,
) -> bool:
    """Collective; see ``CyclicPipelineEngine.save_checkpoint``."""
    save_dir, tag = place_of(save_dir, tag, engine.global_steps)
    runtime.flush()
    save_together(
        save_dir,
        tag,
        runtime.rank,
        _gather(runtime),
        f"rank {runtime.rank}, saving checkpoint {tag!r}",
        save_latest,
        lambda folder: _write(engine, runtime, folder, client_state, exclude_frozen),
        lambda everyone: _manifest(engine, runtime, everyone, exclude_frozen),
    )
    return True


def _manifest(engine: "CyclicPipelineEngine", runtime: PipeRuntime, everyone: list[dict], exclude_frozen: bool) -> dict[str, Any]:
    schedule = runtime.schedule
    stages = sorted((int(s), stage) for x in everyone for s, stage in x["stages"].items())
    return {
        "deepspeed_cdp": __version__,
        "ranks": schedule.ranks,
        "rule": schedule.threshold,
        "stages": [stage["names"] for _, stage in stages],
        "dtype": str(engine.get_data_types()[0]).removeprefix("torch."),
        "groups": [names for _, stage in stages for names in stage["groups"]],
        "options": [options for _, stage in stages for options in stage["options"]],
        "shared": {},
        "frozen_left_out": exclude_frozen,
        "counters": {c: getattr(engine, c) for c in COUNTERS},
        "loss_scale": None,
        "pipeline": {"placement": schedule.placement, "bounds": bounds_of(engine.module)},
        "files": {name: entry for x in everyone for name, entry in x["files"].items()},
    }


def _write(
    engine: "CyclicPipelineEngine", runtime: PipeRuntime, folder: str, client_state: dict, exclude_frozen: bool
) -> dict[str, Any]:
    """This rank's files, and what the manifest says of its stages."""
    files, stages = {}, {}
    for s, owner in runtime.owners.items():
        frozen, buffers = _mine(engine, s)
        tensors, about = pack_stage(owner.masters, {} if exclude_frozen else frozen, owner.optimizer)
        names = {p: n for n, p in owner.masters.items()}
        name = f"stage_{s:03d}.safetensors"
        files[name] = save_tensors(folder, name, tensors, about)
        name = f"buffers_{s:03d}.safetensors"
        files[name] = save_tensors(folder, name, buffers, {})
        groups = [(g, user) for g, user in zip(owner.optimizer.param_groups, runtime.user_optimizer.param_groups) if g["params"]]
        stages[s] = {
            "names": list(owner.masters),
            "groups": [[names[p] for p in g["params"]] for g, _ in groups],
            "options": [plain_options({k: v for k, v in {**g, **user}.items() if k != "params"}) for g, user in groups],
        }
    if runtime.rank == 0:
        scheduler = engine.lr_scheduler.state_dict() if hasattr(engine.lr_scheduler, "state_dict") else None
        known = runtime.known
        last = None if known is None else {"step": known.step, "loss": known.loss.cpu(), "squares": known.squares.cpu()}
        content = {"client_state": client_state, "lr_scheduler": scheduler, "known": last}
        files["client.pt"] = save_plain(folder, "client.pt", content, "client_state or the lr scheduler's state")
    return {"files": files, "stages": stages}


# ---- loading ----------------------------------------------------------------------------------------------------------------
def load(
    engine: "CyclicPipelineEngine",
    runtime: PipeRuntime,
    load_dir: str,
    tag: str | None,
    strict: bool,
    optimizer_states: bool,
    scheduler_states: bool,
    module_only: bool,
    custom_load_fn: Any,
) -> tuple[str | None, dict | None]:
    """Collective; see ``CyclicPipelineEngine.load_checkpoint``. Everything is read on every rank before anything is changed."""
    refuse_custom_load(custom_load_fn)
    rank, gather, load_dir = runtime.rank, _gather(runtime), os.fspath(load_dir)
    where = f"rank {rank}, loading a checkpoint from {load_dir!r}"
    optimizer_states, scheduler_states = optimizer_states and not module_only, scheduler_states and not module_only
    folder = found_together(load_dir, tag, "latest", rank, gather, where)
    if folder is None:
        return None, None
    found, problem = None, None
    mine = sorted(_here(engine, runtime))
    wanted = {name for names in gather(mine, where) for name in names}
    try:
        found = _read(engine, runtime, there(folder), wanted, strict, optimizer_states, scheduler_states)
    except Exception as error:
        problem = words(error)
    raise_together(folder, gather(problem, where))
    runtime.flush()
    _apply(engine, runtime, found, optimizer_states, scheduler_states, module_only)
    return folder, found["client_state"]


def _here(engine: "CyclicPipelineEngine", runtime: PipeRuntime) -> dict[str, torch.Tensor]:
    """Parameters of this rank, trained and frozen, by name."""
    trained = {n: p for unit in runtime.units.values() for n, p in zip(unit.names, unit.params)}
    return trained | {n: p for s in runtime.parts for n, p in _mine(engine, s)[0].items()}


def _read(
    engine: "CyclicPipelineEngine",
    runtime: PipeRuntime,
    folder: str,
    wanted: set[str],
    strict: bool,
    optimizer_states: bool,
    scheduler_states: bool,
) -> dict[str, Any]:
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
            fits(folder, f"parameter {name!r}", kinds[name], here[name])
        if strict and (gone := buffers.keys() - stored.buffers.keys()):
            raise CheckpointError(f"buffer {min(gone)!r} is only in the model; {fix}")
        for name in buffers.keys() & stored.buffers.keys():
            fits(folder, f"buffer {name!r}", stored.buffers[name], buffers[name])
        names = here.keys() & kinds.keys()
        stored.verify(runtime.rank, runtime.schedule.ranks, names)
        options = {n: {k: v for k, v in group.items() if k != "params"} for group in stored.groups or () for n in group["params"]}
        found = {
            "values": {n: stored.value(n) for n in names},
            "buffers": {n: stored.buffer(n, 0) for n in buffers.keys() & stored.buffers.keys()},
            "state": {n: stored.state(n) for n in masters if optimizer_states and n in stored.trained},
            "options": options,
            "counters": stored.counters,
            "client_state": stored.client_state,
            "lr_scheduler": stored.lr_scheduler,
            "known": None,
        }
        same = getattr(stored, "pipeline", {}).get("bounds") == bounds_of(engine.module)
    if same:
        found["known"] = load_plain(os.path.join(folder, "client.pt")).get("known")
    for owner in runtime.owners.values():
        fit_states(folder, owner.optimizer, owner.masters, found["state"])
        named = {p: n for n, p in owner.masters.items()}
        for group in owner.optimizer.param_groups if optimizer_states else ():
            for p in group["params"]:
                options_like(folder, options.get(named[p], {}), group)
    if scheduler_states and hasattr(engine.lr_scheduler, "load_state_dict") and found["lr_scheduler"] is not None:
        try_scheduler(engine.lr_scheduler, found["lr_scheduler"], folder)
    return found


@torch.no_grad()
def _apply(
    engine: "CyclicPipelineEngine",
    runtime: PipeRuntime,
    found: dict[str, Any],
    optimizer_states: bool,
    scheduler_states: bool,
    module_only: bool,
) -> None:
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


def _apply_state(
    part: torch.optim.Optimizer, masters: dict[str, torch.nn.Parameter], user: torch.optim.Optimizer, found: dict[str, Any]
) -> None:
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
            part.state[master] = {k: moved(v, master.device, master in on_device) for k, v in state.items()}
