"""Checkpoints of the engine: one safetensors file per owner, keyed by parameter name, and a manifest. Written atomically.

::

    DIR/latest                              the newest tag
    DIR/zero_to_fp32.py                     exports the weights, for people and tools that look for it
    DIR/TAG/cyclic.json                     manifest: files (size, SHA-256, tensors), groups, stages, counters; written last
    DIR/TAG/stage_000.safetensors ...       param/NAME (fp32 masters), frozen/NAME, state/NAME/KEY (optimizer), scalars
    DIR/TAG/buffers_000.safetensors ...     each rank's buffers
    DIR/TAG/client.pt                       client_state, lr scheduler; read with weights_only

Saving flushes, so what is written is an ordinary synchronous state, and resuming is bitwise equal to continuing. Because files
are keyed by name, any number of ranks, partition or rule can read them. Loading takes DeepSpeed's own formats too
(checkpoint/deepspeed_formats.py).
"""

import os
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
from deepspeed_cdp.checkpoint.files import save_plain, save_tensors, there
from deepspeed_cdp.checkpoint.format import COUNTERS, Stored, plain_options
from deepspeed_cdp.errors import CheckpointError
from deepspeed_cdp.version import __version__

if TYPE_CHECKING:
    from deepspeed_cdp.integration.engine import CyclicEngine
    from deepspeed_cdp.runtime.runtime import Runtime


# ---- saving -----------------------------------------------------------------------------------------------------------------
def save(
    engine: "CyclicEngine",
    runtime: "Runtime",
    save_dir: str,
    tag: str | None,
    client_state: dict,
    save_latest: bool,
    exclude_frozen: bool,
) -> bool:
    """Collective; see ``CyclicEngine.save_checkpoint``."""
    save_dir, tag = place_of(save_dir, tag, engine.global_steps)
    runtime.flush()
    rank = runtime.transport.label
    save_together(
        save_dir,
        tag,
        rank,
        runtime.transport.gather,
        f"rank {rank}, step {runtime.executor.global_step}, saving checkpoint {tag!r}",
        save_latest,
        lambda folder: _write(engine, runtime, folder, client_state, exclude_frozen),
        lambda everyone: _manifest(engine, runtime, everyone, exclude_frozen),
    )
    return True


def _manifest(engine: "CyclicEngine", runtime: "Runtime", everyone: list[dict], exclude_frozen: bool) -> dict[str, Any]:
    groups = range(len(everyone[0]["options"]))
    # An optimizer may keep a count in its groups, and leave those alone in which this rank owns nothing.
    options = [next((x for x in everyone if x["owns"][g]), everyone[0])["options"][g] for g in groups]
    return {
        "deepspeed_cdp": __version__,
        "ranks": runtime.plan.schedule.ranks,
        "rule": runtime.settings.rule,
        "stages": runtime.plan.stages,
        "dtype": str(next(runtime.module.parameters()).dtype).removeprefix("torch."),
        "groups": engine.optimizer_group_names,
        "options": options,
        "shared": _shared(runtime.module),
        "frozen_left_out": exclude_frozen,
        "counters": {c: getattr(engine, c) for c in COUNTERS},
        "loss_scale": runtime.scale.state_dict(),
        "files": {name: entry for x in everyone for name, entry in x["files"].items()},
    }


def _write(engine: "CyclicEngine", runtime: "Runtime", folder: str, client_state: dict, exclude_frozen: bool) -> dict[str, Any]:
    """This rank's files; their entries in the manifest, and the options of its groups."""
    owner, rank = runtime.owner, runtime.transport.label
    files = {} if runtime.transport.ring else _write_stage(runtime, folder, exclude_frozen)
    buffers = f"buffers_{rank:03d}.safetensors"  # those of batch norm, say, differ between all ranks
    files[buffers] = save_tensors(folder, buffers, saved_buffers(runtime.module), {})
    if rank == 0:
        scheduler = engine.lr_scheduler.state_dict() if hasattr(engine.lr_scheduler, "state_dict") else None
        files["client.pt"] = save_plain(
            folder,
            "client.pt",
            {"client_state": client_state, "lr_scheduler": scheduler},
            "client_state or the lr scheduler's state",
        )
    return {
        "files": files,
        "options": [plain_options({k: v for k, v in g.items() if k != "params"}) for g in owner.optimizer.param_groups],
        "owns": [bool(g["params"]) for g in owner.optimizer.param_groups],
    }


def _write_stage(runtime: "Runtime", folder: str, exclude_frozen: bool) -> dict[str, Any]:
    """The owned stage's file and its entry; with several rings all have the same, and ring 0 writes it."""
    owner = runtime.owner
    stage = f"stage_{runtime.plan.schedule.owned(runtime.executor.rank):03d}.safetensors"
    tensors, about = pack_stage(owner.masters, {} if exclude_frozen else owner.frozen, owner.optimizer)
    if stage == "stage_000.safetensors":
        tensors["scalars"] = runtime.executor.metrics.kept
    return {stage: save_tensors(folder, stage, tensors, about)}


def _shared(module: torch.nn.Module) -> dict[str, str]:
    """Other names of tied parameters, to the first."""
    first: dict[torch.nn.Parameter, str] = {}
    names = [(n, first.setdefault(p, n)) for n, p in module.named_parameters(remove_duplicate=False)]
    return {n: known for n, known in names if n != known}


# ---- loading ----------------------------------------------------------------------------------------------------------------
def load(
    engine: "CyclicEngine",
    runtime: "Runtime",
    load_dir: str,
    tag: str | None,
    strict: bool,
    optimizer_states: bool,
    scheduler_states: bool,
    module_only: bool,
    custom_load_fn: Any,
) -> tuple[str | None, dict | None]:
    """Collective; see ``CyclicEngine.load_checkpoint``. All files are checked on every rank before anything is changed."""
    refuse_custom_load(custom_load_fn)
    rank, gather, load_dir = runtime.transport.label, runtime.transport.gather, os.fspath(load_dir)
    where = f"rank {rank}, step {runtime.executor.global_step}, loading a checkpoint from {load_dir!r}"
    optimizer_states, scheduler_states = optimizer_states and not module_only, scheduler_states and not module_only
    latest = "latest_universal" if engine.load_universal_checkpoint() else "latest"
    folder = found_together(load_dir, tag, latest, rank, gather, where)
    if folder is None:
        return None, None
    found, problem = None, None
    try:
        with open_stored(there(folder)) as stored:
            found = _read(engine, runtime, stored, strict, optimizer_states, scheduler_states)
    except Exception as error:
        problem = words(error)
    raise_together(folder, gather(problem, where))
    runtime.scatter()
    runtime.flush()
    _apply(engine, runtime, found, optimizer_states, scheduler_states, module_only)
    runtime.transport.reset(where)
    runtime.restart()
    return folder, found["client_state"]


def _read(
    engine: "CyclicEngine", runtime: "Runtime", stored: Stored, strict: bool, optimizer_states: bool, scheduler_states: bool
) -> dict[str, Any]:
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
        fits(folder, f"parameter {name!r}", kinds[homes[name]], mine)
    buffers = saved_buffers(runtime.module)
    if strict and (different := buffers.keys() ^ stored.buffers.keys()):
        where = "the model" if min(different) in buffers else folder
        raise CheckpointError(f"buffer {min(different)!r} is only in {where}; {fix}")
    common = buffers.keys() & stored.buffers.keys()
    for name in common:
        fits(folder, f"buffer {name!r}", stored.buffers[name], buffers[name])
    groups = owner.optimizer.param_groups
    if optimizer_states and (stored.groups is None or len(stored.groups) != len(groups)):
        raise CheckpointError(
            f"{folder} has {len(stored.groups or ())} parameter groups and the optimizer {len(groups)}; build "
            "the optimizer as it was, or pass load_optimizer_states=False"
        )
    mine = {homes[n] for n in own}
    ranks = runtime.transport.size * runtime.transport.rings
    stored.verify(rank, ranks, [*mine, *(n for n, home in tied.items() if home in mine)])
    for name, home in tied.items():
        if home in mine and not torch.equal(stored.value(name), stored.value(home)):
            raise CheckpointError(f"{folder} has two values for {name!r} and {home!r}, one parameter in the model; {fix}")
    found = {
        "values": {n: stored.value(homes[n]) for n in own},
        "buffers": {n: stored.buffer(n, rank) for n in common},
        "state": {n: stored.state(homes[n]) for n in owner.masters if optimizer_states and homes[n] in stored.trained},
        "groups": stored.groups,
        "scalars": stored.scalars(runtime.plan.stages),
        "counters": stored.counters,
        "client_state": stored.client_state,
        "lr_scheduler": stored.lr_scheduler,
        "loss_scale": stored.loss_scale,
    }
    fit_states(folder, owner.optimizer, owner.masters, found["state"])
    for mine, theirs in zip(groups, stored.groups if optimizer_states else ()):
        options_like(folder, theirs, mine)
    if scheduler_states and hasattr(engine.lr_scheduler, "load_state_dict") and found["lr_scheduler"] is not None:
        try_scheduler(engine.lr_scheduler, found["lr_scheduler"], folder)
    return found


def _apply(
    engine: "CyclicEngine",
    runtime: "Runtime",
    found: dict[str, Any],
    optimizer_states: bool,
    scheduler_states: bool,
    module_only: bool,
) -> None:
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
        for name, master in owner.masters.items():
            owner.optimizer.state.pop(master, None)
            if state := found["state"].get(name):
                owner.put_state(name, state)
        vector = runtime.executor.metrics.kept
        vector.zero_() if found["scalars"] is None else vector.copy_(found["scalars"])
    if scheduler_states and found["lr_scheduler"] is not None and hasattr(engine.lr_scheduler, "load_state_dict"):
        engine.lr_scheduler.load_state_dict(found["lr_scheduler"])
    if not module_only:
        for counter, value in found["counters"].items():
            setattr(engine, counter, value)
        micro = engine.gradient_accumulation_steps()  # a step begins anew, whatever number of micro-batches it had
        engine.micro_steps = found["counters"].get("micro_steps", engine.global_steps * micro) // micro * micro
        runtime.executor.global_step = engine.global_steps
    runtime.executor.metrics.resume(runtime.executor.global_step, optimizer_states and found["scalars"] is not None)
    runtime.scale.restart(runtime.executor.global_step, found["loss_scale"] if optimizer_states else None)
