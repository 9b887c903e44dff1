"""Checkpoints of the ring engine: one safetensors file per stage owner, keyed by parameter name, and a manifest.

::

    DIR/latest                              the newest tag
    DIR/zero_to_fp32.py                     exports the weights, for people and tools that look for it
    DIR/TAG/cyclic.json                     manifest: files (size, SHA-256, tensors), groups, stages, counters; written last
    DIR/TAG/stage_000.safetensors ...       param/NAME (fp32 masters), frozen/NAME, state/NAME/KEY (optimizer), scalars
    DIR/TAG/buffers_000.safetensors ...     each rank's buffers
    DIR/TAG/client.pt                       client_state, lr scheduler, curriculum; read by checkpoint/pickles.py
    DIR/TAG/tensor_00_of_02/cyclic.json ... with tensor parallelism: as DIR/TAG, of the ranks with the same shards

Saving flushes first, so the files hold an ordinary synchronous state, and resuming is bitwise equal to continuing. Files are
keyed by name, so any number of ranks, partition or rule can read them. Loading reads DeepSpeed's own formats, too
(checkpoint/deepspeed_formats.py). See docs/checkpoints.md.
"""

import os
from typing import TYPE_CHECKING, Any, Protocol

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
from deepspeed_cdp.checkpoint.files import existing_folder
from deepspeed_cdp.checkpoint.format import CheckpointReader, plain_options
from deepspeed_cdp.checkpoint.saving import Files, Pending, Saving, save_location, save_on_all_ranks
from deepspeed_cdp.errors import CheckpointError
from deepspeed_cdp.version import __version__

if TYPE_CHECKING:
    from deepspeed_cdp.runtime.runtime import Runtime

_FIX = "load it into the model it was saved from, or pass load_module_strict=False"


class RingEngine(EngineState, Protocol):
    """What a ring's checkpoint needs of the engine.

    Attributes:
        optimizer_group_names: names of the trained parameters of each param group, on every rank all of them.
        curriculum_sampler: its state is saved and loaded (integration/curriculum.py); None without curriculum learning.
    """

    optimizer_group_names: list[list[str]]
    curriculum_sampler: Any

    def gradient_accumulation_steps(self) -> int:
        """Micro-batches per step."""

    def load_universal_checkpoint(self) -> bool:
        """Whether the config asks for DeepSpeed's universal format."""


# ---- saving -----------------------------------------------------------------------------------------------------------------
def save(
    engine: RingEngine,
    runtime: "Runtime",
    save_dir: str,
    tag: str | None,
    client_state: dict,
    save_latest: bool,
    exclude_frozen: bool,
    later: bool,
) -> Pending | None:
    """Collective; see ``CyclicEngine.save_checkpoint``, and ``save_on_all_ranks`` for ``later``."""
    save_dir, tag = save_location(save_dir, tag, engine.global_steps)
    runtime.flush()
    transport, member = runtime.transport, _member(runtime)
    where = f"rank {transport.world_rank}, step {runtime.executor.global_step}, saving checkpoint {tag!r}"

    def save_shards(name: str, latest: bool) -> Pending | None:
        return save_on_all_ranks(
            Saving(save_dir, name, transport.data_rank, transport.gather_data, where, latest, not member),
            lambda files: _write(engine, runtime, files, client_state, exclude_frozen),
            lambda everyone: _manifest(engine, runtime, everyone, exclude_frozen),
            (transport.size * transport.rings, transport.timeout_seconds) if later else None,
        )

    if not member:
        return save_shards(tag, save_latest)
    whole = Saving(save_dir, tag, transport.world_rank, transport.gather, where, save_latest)
    whole.on_all_ranks(lambda: save_shards(f"{tag}/{member}", False))
    whole.on_all_ranks(whole.name_latest)
    return None


def _member(runtime: "Runtime") -> str:
    """The folder, in DIR/TAG, of the ranks that hold the same shards; empty without tensor parallelism."""
    transport, size = runtime.transport, runtime.transport.ring_map.tensor
    return f"tensor_{transport.world_rank % size:02d}_of_{size:02d}" if size > 1 else ""


def _manifest(engine: RingEngine, runtime: "Runtime", everyone: list[dict], exclude_frozen: bool) -> dict[str, Any]:
    """The manifest, from what ``_write`` returned on each rank."""
    groups = range(len(everyone[0]["options"]))
    # An optimizer may keep a step count in a group's options, and update it only if the rank owns parameters of the group.
    options = [next((x for x in everyone if x["owns"][g]), everyone[0])["options"][g] for g in groups]
    return {
        "deepspeed_cdp": __version__,
        "ranks": runtime.plan.schedule.ranks,
        "rule": runtime.settings.rule,
        "stages": runtime.plan.stages,
        "dtype": str(next(runtime.module.parameters()).dtype).removeprefix("torch."),
        "groups": engine.optimizer_group_names,
        "options": options,
        "shared": _tied_names(runtime.module),
        "frozen_left_out": exclude_frozen,
        "counters": counters_of(engine),
        "loss_scale": runtime.scale.state_dict(),
    }


def _write(engine: RingEngine, runtime: "Runtime", files: Files, client_state: dict, exclude_frozen: bool) -> dict[str, Any]:
    """Add this rank's files.

    Returns:
        options: of each param group; owns: whether this rank owns parameters of the group.
    """
    owner, rank = runtime.owner, runtime.transport.data_rank
    if runtime.transport.ring == 0:  # several rings have equal stages
        _add_stage(runtime, files, exclude_frozen)
    # every rank's own buffers: batch norm's statistics, say, differ between ranks
    files.add_tensors(f"buffers_{rank:03d}.safetensors", saved_buffers(runtime.module), {})
    if rank == 0:
        content = {"client_state": client_state, "lr_scheduler": scheduler_state(engine)}
        if engine.curriculum_sampler is not None:
            content["data_sampler"] = engine.curriculum_sampler.state_dict()
        files.add_plain("client.pt", content, "client_state or the lr scheduler's state")
    return {
        "options": [plain_options({k: v for k, v in g.items() if k != "params"}) for g in owner.optimizer.param_groups],
        "owns": [bool(g["params"]) for g in owner.optimizer.param_groups],
    }


def _add_stage(runtime: "Runtime", files: Files, exclude_frozen: bool) -> None:
    """Add the owned stage's file."""
    owner = runtime.owner
    stage = f"stage_{runtime.plan.schedule.owned(runtime.executor.rank):03d}.safetensors"
    tensors, metadata = pack_stage(owner.masters, {} if exclude_frozen else owner.frozen, owner.optimizer)
    if stage == "stage_000.safetensors":
        tensors["scalars"] = runtime.executor.metrics.kept
    files.add_tensors(stage, tensors, metadata)


def _tied_names(module: torch.nn.Module) -> dict[str, str]:
    """Further names of tied parameters, each with the parameter's first name."""
    first: dict[torch.nn.Parameter, str] = {}
    names = [(n, first.setdefault(p, n)) for n, p in module.named_parameters(remove_duplicate=False)]
    return {n: known for n, known in names if n != known}


# ---- loading ----------------------------------------------------------------------------------------------------------------
def load(
    engine: RingEngine,
    runtime: "Runtime",
    load_dir: str,
    tag: str | None,
    strict: bool,
    optimizer_states: bool,
    scheduler_states: bool,
    module_only: bool,
    custom_load_fn: Any,
) -> tuple[str | None, dict | None]:
    """Collective; see ``CyclicEngine.load_checkpoint``. All ranks check all files before any rank changes anything."""
    refuse_custom_load(custom_load_fn)
    options = LoadOptions.of(strict, optimizer_states, scheduler_states, module_only)
    rank, gather, load_dir = runtime.transport.world_rank, runtime.transport.gather, os.fspath(load_dir)
    where = f"rank {rank}, step {runtime.executor.global_step}, loading a checkpoint from {load_dir!r}"
    latest = "latest_universal" if engine.load_universal_checkpoint() else "latest"
    folder = find_on_all_ranks(load_dir, tag, latest, rank, gather, where)
    if folder is None:
        return None, None
    found: dict[str, Any] = {}
    problem, member = None, _member(runtime)
    try:
        shards = existing_folder(os.path.join(folder, member) if member else folder)
        if member and not os.path.isdir(shards):
            raise CheckpointError(
                f"{folder} has no folder {member!r}, so it was saved without tensor parallelism or with another size; load "
                "weights into the model before deepspeed.initialize(), and save with this size"
            )
        with open_checkpoint(shards) as stored:
            found = _read(engine, runtime, stored, options)
    except Exception as error:
        problem = error_text(error)
    everyone = gather([problem, found.get("counters")], where)
    raise_on_all_ranks(folder, [x for x, _ in everyone])
    other = next((r for r, (_, counters) in enumerate(everyone) if counters != everyone[0][1]), None)
    if member and other is not None:
        raise CheckpointError(f"{folder} has shards of two saves, those of rank 0 and of rank {other}; load another tag")
    runtime.scatter()
    runtime.flush()
    _apply(engine, runtime, found, options)
    runtime.transport.reset(where)
    runtime.restart()
    return folder, found["client_state"]


def _read(engine: RingEngine, runtime: "Runtime", stored: CheckpointReader, options: LoadOptions) -> dict[str, Any]:
    """This rank's part of the checkpoint, checked and in memory; changes nothing."""
    owner, rank, folder = runtime.owner, runtime.transport.data_rank, stored.folder
    sources, duplicates = _match_names(runtime, stored, options.strict)
    own = {n: p for n, p in {**owner.masters.parameters, **owner.frozen}.items() if n in sources}
    specs = {**stored.trained, **stored.frozen}
    for name, mine in own.items():
        check_tensor(folder, f"parameter {name!r}", specs[sources[name]], mine)
    common = _match_buffers(runtime, stored, options.strict)
    groups = owner.optimizer.param_groups
    if options.optimizer and (stored.groups is None or len(stored.groups) != len(groups)):
        raise CheckpointError(
            f"{folder} has {len(stored.groups or ())} parameter groups and the optimizer {len(groups)}; build "
            "the optimizer as it was, or pass load_optimizer_states=False"
        )
    read = {sources[n] for n in own}
    ranks = runtime.transport.size * runtime.transport.rings
    stored.verify(rank, ranks, [*read, *(n for n, source in duplicates.items() if source in read)])
    for name, source in duplicates.items():
        if source in read and not torch.equal(stored.value(name), stored.value(source)):
            raise CheckpointError(f"{folder} has two values for {name!r} and {source!r}, one parameter in the model; {_FIX}")
    found = {
        "values": {n: stored.value(sources[n]) for n in own},
        "buffers": {n: stored.buffer(n, rank) for n in common},
        "state": {n: stored.state(sources[n]) for n in owner.masters if options.optimizer and sources.get(n) in stored.trained},
        "groups": stored.groups,
        "scalars": stored.scalars(runtime.plan.stages),
        "counters": stored.counters,
        "client_state": stored.client_state,
        "lr_scheduler": stored.lr_scheduler,
        "loss_scale": stored.loss_scale,
    }
    adapt_states(folder, owner.optimizer, owner.masters.parameters, found["state"])
    for group, saved in zip(groups, stored.groups or ()) if options.optimizer else ():
        check_group_options(folder, saved, group)
    if options.scheduler:
        check_scheduler(engine, found["lr_scheduler"], folder)
    if options.counters and engine.curriculum_sampler is not None:
        found["load_sampler"] = engine.curriculum_sampler.prepare(stored.data_sampler, folder)
    return found


def _match_names(runtime: "Runtime", stored: CheckpointReader, strict: bool) -> tuple[dict[str, str], dict[str, str]]:
    """Match the model's parameters with those of the checkpoint.

    Returns:
        sources: names in the checkpoint of the model's parameters, without those that it does not have.
        duplicates: names that the checkpoint holds as separate parameters but the model ties, each with the name that is loaded.
    Raises:
        CheckpointError: ``strict``, and the names differ.
    """
    every = {n for n, _ in runtime.module.named_parameters()}
    trained = {n for stage in runtime.plan.stages for n in stage}
    sources = {n: source for n in every if (source := stored.name_of(n)) is not None}
    missing = {n for n in every if n not in sources and not (stored.frozen_left_out and n not in trained)}
    unexpected = ({*stored.trained, *stored.frozen} - set(sources.values())) if strict else set()
    tied = _tied_names(runtime.module).items()
    duplicates = {n: sources[known] for n, known in tied if n in unexpected and known in sources}
    unexpected -= duplicates.keys()
    if strict and missing:
        raise CheckpointError(f"{stored.folder} has no parameter {min(missing)!r} ({len(missing)} missing); {_FIX}")
    if unexpected:
        raise CheckpointError(f"{stored.folder} has {min(unexpected)!r}, which the model lacks ({len(unexpected)} such); {_FIX}")
    return sources, duplicates


def _match_buffers(runtime: "Runtime", stored: CheckpointReader, strict: bool) -> set[str]:
    """Names of the buffers to load.

    Raises:
        CheckpointError: a buffer's shape or dtype differs, or ``strict`` and the names differ.
    """
    buffers = saved_buffers(runtime.module)
    if strict and (different := buffers.keys() ^ stored.buffers.keys()):
        where = "the model" if min(different) in buffers else stored.folder
        raise CheckpointError(f"buffer {min(different)!r} is only in {where}; {_FIX}")
    common = buffers.keys() & stored.buffers.keys()
    for name in common:
        check_tensor(stored.folder, f"buffer {name!r}", stored.buffers[name], buffers[name])
    return common


def _apply(engine: RingEngine, runtime: "Runtime", found: dict[str, Any], options: LoadOptions) -> None:
    """Copy what ``_read`` found into the masters, buffers, optimizer, scheduler and counters."""
    owner = runtime.owner
    with torch.no_grad():
        for name, value in found["values"].items():
            owner.put(name, value)
        buffers = dict(runtime.module.named_buffers())
        for name, value in found["buffers"].items():
            buffers[name].copy_(value)
    if options.optimizer:
        for group, saved in zip(owner.optimizer.param_groups, found["groups"]):
            restore_options(saved, group)
        for name, master in owner.masters.parameters.items():
            owner.optimizer.state.pop(master, None)
            if state := found["state"].get(name):
                owner.put_state(name, state)
        vector = runtime.executor.metrics.kept
        vector.zero_() if found["scalars"] is None else vector.copy_(found["scalars"])
    if options.scheduler:
        load_scheduler(engine, found["lr_scheduler"])
    if "load_sampler" in found:
        found["load_sampler"]()
    if options.counters:
        for counter, value in found["counters"].items():
            setattr(engine, counter, value)
        micro = engine.gradient_accumulation_steps()  # the next step starts with its first micro-batch
        engine.micro_steps = found["counters"].get("micro_steps", engine.global_steps * micro) // micro * micro
        runtime.executor.global_step = engine.global_steps
    runtime.executor.metrics.resume(runtime.executor.global_step, options.optimizer and found["scalars"] is not None)
    runtime.scale.restart(runtime.executor.global_step, found["loss_scale"] if options.optimizer else None)
