"""Checkpoints of cyclic pipelines, in the format of ``deepspeed_cdp.checkpoint.save_load``: one file per stage.

A PipelineModule names parameters by the number of the layer in the whole model, so any number of stages and any placement can
read any pipeline's checkpoint. Saving flushes first; resuming is bitwise equal to continuing.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from deepspeed_cdp.checkpoint.common import (
    EngineState,
    LoadOptions,
    adapt_states,
    check_group_options,
    check_scheduler,
    check_tensor,
    counters_of,
    error_text,
    find_on_all_ranks,
    load_scheduler,
    pack_stage,
    raise_on_all_ranks,
    refuse_custom_load,
    restore_options,
    saved_buffers,
    scheduler_state,
)
from deepspeed_cdp.checkpoint.deepspeed_formats import open_checkpoint
from deepspeed_cdp.checkpoint.files import existing_folder, load_plain
from deepspeed_cdp.checkpoint.format import CheckpointReader, plain_options
from deepspeed_cdp.checkpoint.saving import Files, Pending, Saving, save_location, save_on_all_ranks
from deepspeed_cdp.errors import CheckpointError
from deepspeed_cdp.optim.state import moved
from deepspeed_cdp.pipeline.runtime import PipeRuntime
from deepspeed_cdp.pipeline.state import FinishedStep
from deepspeed_cdp.version import __version__

_FIX = "load it into the model it was saved from, or pass load_module_strict=False"


class PipelineEngine(EngineState, Protocol):
    """What a pipeline's checkpoint needs of the engine.

    Attributes:
        module: the PipelineModule; it names parameters by the number of the layer in the whole model.
    """

    module: torch.nn.Module

    def get_data_types(self) -> tuple[torch.dtype, torch.dtype]:
        """(dtype of the parameters, dtype of the gradients)."""


@dataclass(frozen=True)
class StageModules:
    """How the model is cut into stages, and the layers of this rank's stages.

    Attributes:
        bounds: number of each stage's first layer in the whole model, then the number of layers.
        layers: by stage of this rank.
    """

    bounds: list[int]
    layers: Mapping[int, Sequence[torch.nn.Module]]

    def frozen(self, module: torch.nn.Module, stage: int) -> dict[str, torch.Tensor]:
        """Frozen parameters of a stage, by their names in ``module``."""
        names = {id(p): n for n, p in module.named_parameters()}
        return {names[id(p)]: p for layer in self.layers[stage] for p in layer.parameters() if not p.requires_grad}

    def buffers(self, module: torch.nn.Module, stage: int) -> dict[str, torch.Tensor]:
        """Persistent buffers of a stage, by their names in ``module``."""
        names = {id(b): n for n, b in saved_buffers(module).items()}
        return {names[id(b)]: b for layer in self.layers[stage] for b in layer.buffers() if id(b) in names}


def _gather(runtime: PipeRuntime) -> Callable[[Any, str], list[Any]]:
    return runtime.transport.gather if runtime.transport is not None else lambda value, where: [value]


# ---- saving -----------------------------------------------------------------------------------------------------------------
def save(
    engine: PipelineEngine,
    stages: StageModules,
    runtime: PipeRuntime,
    save_dir: str,
    tag: str | None,
    client_state: dict,
    save_latest: bool,
    exclude_frozen: bool,
    later: bool,
) -> Pending | None:
    """Collective; see ``CyclicPipelineEngine.save_checkpoint``, and ``save_on_all_ranks`` for ``later``."""
    save_dir, tag = save_location(save_dir, tag, engine.global_steps)
    runtime.flush()
    where = f"rank {runtime.rank}, saving checkpoint {tag!r}"
    transport = runtime.transport
    ranks, timeout = (1, 0.0) if transport is None else (transport.size, transport.timeout_seconds)
    return save_on_all_ranks(
        Saving(save_dir, tag, runtime.rank, _gather(runtime), where, save_latest),
        lambda files: _write(engine, stages, runtime, files, client_state, exclude_frozen),
        lambda everyone: _manifest(engine, stages, runtime, everyone, exclude_frozen),
        (ranks, timeout) if later else None,
    )


def _manifest(
    engine: PipelineEngine, stages: StageModules, runtime: PipeRuntime, everyone: list[dict], exclude_frozen: bool
) -> dict[str, Any]:
    """The manifest, from what ``_write`` returned on each rank."""
    schedule = runtime.schedule
    written = [stage for _, stage in sorted((int(s), stage) for x in everyone for s, stage in x["stages"].items())]
    return {
        "deepspeed_cdp": __version__,
        "ranks": schedule.ranks,
        "rule": schedule.threshold,
        "stages": [stage["names"] for stage in written],
        "dtype": str(engine.get_data_types()[0]).removeprefix("torch."),
        "groups": [names for stage in written for names in stage["groups"]],
        "options": [options for stage in written for options in stage["options"]],
        "shared": {},
        "frozen_left_out": exclude_frozen,
        "counters": counters_of(engine),
        "loss_scale": None,
        "pipeline": {"placement": schedule.placement, "bounds": stages.bounds},
    }


def _write(
    engine: PipelineEngine, stages: StageModules, runtime: PipeRuntime, files: Files, client_state: dict, exclude_frozen: bool
) -> dict[str, Any]:
    """Add the files of the stages that this rank owns.

    Returns:
        stages: by stage, its parameters' names, and its param groups' names and options.
    """
    written = {}
    for s, owner in runtime.owners.items():
        tensors, metadata = pack_stage(owner.masters, {} if exclude_frozen else stages.frozen(engine.module, s), owner.optimizer)
        names = {p: n for n, p in owner.masters.items()}
        for name, content, text in (
            (f"stage_{s:03d}.safetensors", tensors, metadata),
            (f"buffers_{s:03d}.safetensors", stages.buffers(engine.module, s), {}),
        ):
            files.add_tensors(name, content, text)
        groups = [(g, user) for g, user in zip(owner.optimizer.param_groups, runtime.user_optimizer.param_groups) if g["params"]]
        written[s] = {
            "names": list(owner.masters),
            "groups": [[names[p] for p in g["params"]] for g, _ in groups],
            "options": [plain_options({k: v for k, v in {**g, **user}.items() if k != "params"}) for g, user in groups],
        }
    if runtime.rank == 0:
        known = runtime.finished
        last = None if known is None else {"step": known.step, "loss": known.loss.cpu(), "squares": known.squares.cpu()}
        client = {"client_state": client_state, "lr_scheduler": scheduler_state(engine), "known": last}
        files.add_plain("client.pt", client, "client_state or the lr scheduler's state")
    return {"stages": written}


# ---- loading ----------------------------------------------------------------------------------------------------------------
def load(
    engine: PipelineEngine,
    stages: StageModules,
    runtime: PipeRuntime,
    load_dir: str,
    tag: str | None,
    strict: bool,
    optimizer_states: bool,
    scheduler_states: bool,
    module_only: bool,
    custom_load_fn: Any,
) -> tuple[str | None, dict | None]:
    """Collective; see ``CyclicPipelineEngine.load_checkpoint``. All ranks check all files before any rank changes anything."""
    refuse_custom_load(custom_load_fn)
    options = LoadOptions.of(strict, optimizer_states, scheduler_states, module_only)
    rank, gather, load_dir = runtime.rank, _gather(runtime), os.fspath(load_dir)
    where = f"rank {rank}, loading a checkpoint from {load_dir!r}"
    folder = find_on_all_ranks(load_dir, tag, "latest", rank, gather, where)
    if folder is None:
        return None, None
    found: dict[str, Any] = {}
    problem = None
    model_names = {name for names in gather(sorted(_local_parameters(engine, stages, runtime)), where) for name in names}
    try:
        with open_checkpoint(existing_folder(folder)) as stored:
            found = _read(engine, stages, runtime, stored, model_names, options)
    except Exception as error:
        problem = error_text(error)
    raise_on_all_ranks(folder, gather(problem, where))
    runtime.flush()
    _apply(engine, stages, runtime, found, options)
    return folder, found["client_state"]


def _local_parameters(engine: PipelineEngine, stages: StageModules, runtime: PipeRuntime) -> dict[str, torch.Tensor]:
    """Parameters of this rank, trained and frozen, by name."""
    trained = {n: p for unit in runtime.units.values() for n, p in zip(unit.names, unit.params)}
    return trained | {n: p for s in runtime.local_stages for n, p in stages.frozen(engine.module, s).items()}


def _local_buffers(engine: PipelineEngine, stages: StageModules, runtime: PipeRuntime) -> dict[str, torch.Tensor]:
    """Persistent buffers of this rank, by name."""
    return {n: b for s in runtime.local_stages for n, b in stages.buffers(engine.module, s).items()}


def _read(
    engine: PipelineEngine,
    stages: StageModules,
    runtime: PipeRuntime,
    stored: CheckpointReader,
    model_names: set[str],
    options: LoadOptions,
) -> dict[str, Any]:
    """This rank's part of the checkpoint, checked and in memory; changes nothing.

    Args:
        model_names: parameters of the whole model, of all ranks.
    """
    names, buffer_names = _match_names(engine, stages, runtime, stored, model_names, options.strict)
    stored.verify(runtime.rank, runtime.schedule.ranks, names)
    masters = {n: m for owner in runtime.owners.values() for n, m in owner.masters.items()}
    group_of = {n: group for group in stored.groups or () for n in group["params"]}
    found = {
        "values": {n: stored.value(n) for n in names},
        "buffers": {n: stored.buffer(n, 0) for n in buffer_names},
        "state": {n: stored.state(n) for n in masters if options.optimizer and n in stored.trained},
        "group_of": group_of,
        "counters": stored.counters,
        "client_state": stored.client_state,
        "lr_scheduler": stored.lr_scheduler,
        "known": None,
    }
    if getattr(stored, "pipeline", {}).get("bounds") == stages.bounds:
        found["known"] = load_plain(os.path.join(stored.folder, "client.pt")).get("known")
    for owner in runtime.owners.values():
        adapt_states(stored.folder, owner.optimizer, owner.masters, found["state"])
        name_of = {p: n for n, p in owner.masters.items()}
        for group in owner.optimizer.param_groups if options.optimizer else ():
            for p in group["params"]:
                check_group_options(stored.folder, group_of.get(name_of[p], {}), group)
    if options.scheduler:
        check_scheduler(engine, found["lr_scheduler"], stored.folder)
    return found


def _match_names(
    engine: PipelineEngine,
    stages: StageModules,
    runtime: PipeRuntime,
    stored: CheckpointReader,
    model_names: set[str],
    strict: bool,
) -> tuple[set[str], set[str]]:
    """Names of this rank's parameters and buffers to load.

    Raises:
        CheckpointError: a shape or dtype differs, or ``strict`` and the names differ.
    """
    folder, here, buffers = stored.folder, _local_parameters(engine, stages, runtime), _local_buffers(engine, stages, runtime)
    trained = {n for unit in runtime.units.values() for n in unit.names}
    specs = {**stored.trained, **stored.frozen}
    missing = {n for n in here if n not in specs and not (stored.frozen_left_out and n not in trained)}
    if strict and missing:
        raise CheckpointError(f"{folder} has no parameter {min(missing)!r} ({len(missing)} missing); {_FIX}")
    if strict and (more := specs.keys() - model_names):
        raise CheckpointError(f"{folder} has {min(more)!r}, which the model lacks ({len(more)} such); {_FIX}")
    names = here.keys() & specs.keys()
    for name in names:
        check_tensor(folder, f"parameter {name!r}", specs[name], here[name])
    if strict and (gone := buffers.keys() - stored.buffers.keys()):
        raise CheckpointError(f"buffer {min(gone)!r} is only in the model; {_FIX}")
    buffer_names = buffers.keys() & stored.buffers.keys()
    for name in buffer_names:
        check_tensor(folder, f"buffer {name!r}", stored.buffers[name], buffers[name])
    return names, buffer_names


@torch.no_grad()
def _apply(
    engine: PipelineEngine, stages: StageModules, runtime: PipeRuntime, found: dict[str, Any], options: LoadOptions
) -> None:
    """Copy what ``_read`` found into the parameters, buffers, masters, optimizer, scheduler and counters."""
    values = found["values"]
    for name, p in _local_parameters(engine, stages, runtime).items():  # after a flush trained ones are views of version 0
        if name in values:
            p.data.copy_(values[name])
    for name, buffer in _local_buffers(engine, stages, runtime).items():
        if name in found["buffers"]:
            buffer.copy_(found["buffers"][name])
    for owner in runtime.owners.values():
        for name, master in owner.masters.items():
            if name in values:
                master.copy_(values[name])
        if options.optimizer:
            _apply_state(owner.optimizer, owner.masters.parameters, runtime.user_optimizer, found)
    if options.scheduler:
        load_scheduler(engine, found["lr_scheduler"])
    if options.counters:
        for counter, value in found["counters"].items():
            setattr(engine, counter, value)
        runtime.global_step = engine.global_steps
    known = found["known"] if options.optimizer else None
    runtime.finished = known and FinishedStep(
        known["step"], known["loss"].to(runtime.device), known["squares"].to(runtime.device)
    )


def _apply_state(
    optimizer: torch.optim.Optimizer,
    masters: dict[str, torch.nn.Parameter],
    user_optimizer: torch.optim.Optimizer,
    found: dict[str, Any],
) -> None:
    """Load a stage's part of the optimizer: the options of its groups, here and in the user's optimizer, and its state."""
    name_of = {m: n for n, m in masters.items()}
    for group, user_group in zip(optimizer.param_groups, user_optimizer.param_groups):
        saved = (found["group_of"][name_of[p]] for p in group["params"] if name_of[p] in found["group_of"])
        restore_options(next(saved, {}), group, user_group)
    on_device = {p for g in optimizer.param_groups if g.get("fused") or g.get("capturable") for p in g["params"]}
    for name, master in masters.items():
        optimizer.state.pop(master, None)
        if state := found["state"].get(name):
            optimizer.state[master] = {k: moved(v, master.device, master in on_device) for k, v in state.items()}
