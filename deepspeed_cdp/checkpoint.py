"""Checkpoints: one safetensors file per owner, keyed by parameter name, and a manifest. Written atomically.

::

    DIR/latest                              the newest tag
    DIR/TAG/cyclic.json                     manifest: files with their SHA-256, stages, other names of tied parameters,
                                            counters; there only if all is there
    DIR/TAG/stage_000.safetensors ...       param/NAME (fp32 masters), frozen/NAME, state/NAME/KEY (optimizer), scalars
    DIR/TAG/buffers_000.safetensors ...     each rank's buffers
    DIR/TAG/client.pt                       client_state, lr scheduler; read with weights_only

Saving flushes, so what is written is an ordinary synchronous state, and resuming is bitwise equal to continuing. Because files
are keyed by name, any number of ranks, partition or rule can read them.
"""

import hashlib
import json
import os
import shutil
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from . import __version__

if TYPE_CHECKING:
    from .engine import CyclicEngine
    from .runtime import Runtime

MANIFEST = "cyclic.json"
COUNTERS = ("global_steps", "global_samples", "skipped_steps", "micro_steps")


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be read; the message names the file. Nothing was loaded."""


# ---- saving -----------------------------------------------------------------------------------------------------------------
def save(engine: "CyclicEngine", runtime: "Runtime", save_dir: str, tag: str | None, client_state: dict, save_latest: bool,
         exclude_frozen: bool) -> bool:
    """Collective; see ``CyclicEngine.save_checkpoint``."""
    if not save_dir:
        raise ValueError(f"save_dir is {save_dir!r}; it must name a folder; give one to save_checkpoint()")
    runtime.flush()
    tag = str(tag if tag is not None else f"global_step{engine.global_steps}")
    rank, gather = runtime.handoff.rank, runtime.transport.gather
    where = f"rank {rank}, saving checkpoint {tag!r}"
    final, working = os.path.join(save_dir, tag), os.path.join(save_dir, f".{tag}.saving")
    if rank == 0:
        shutil.rmtree(working, ignore_errors=True)
        os.makedirs(working)
    tags = gather(tag, where)
    if len(set(tags)) > 1:
        raise ValueError(f"tag is {tag!r} on rank {rank} but the ranks have {sorted(set(tags))}; give the same tag on every rank")
    files, problem = {}, None
    try:
        files = _write(engine, runtime, working, client_state, exclude_frozen)
    except Exception as error:  # all ranks must learn of it
        problem = f"{type(error).__name__}: {error}"
    everyone = gather({"files": files, "problem": problem}, where)
    failed = [f"rank {r}: {x['problem']}" for r, x in enumerate(everyone) if x["problem"]]
    if failed:
        raise CheckpointError(f"checkpoint {final!r} was not saved ({'; '.join(failed)}); the one before is untouched")
    if rank == 0:
        manifest = {"deepspeed_cdp": __version__, "ranks": runtime.plan.schedule.ranks, "rule": runtime.settings.rule,
                    "stages": runtime.plan.stages, "aliases": aliases(runtime.module),
                    "counters": {c: getattr(engine, c) for c in COUNTERS}, "loss_scale": runtime.scale.state_dict(),
                    "files": {name: entry for x in everyone for name, entry in x["files"].items()}}
        _write_text(os.path.join(working, MANIFEST), json.dumps({**manifest, "sha256": _manifest_digest(manifest)}, indent=1))
        _replace(working, final)
        if save_latest:
            _write_text(os.path.join(save_dir, "latest"), tag)
    gather(None, where)  # no rank goes on before the checkpoint is there
    return True


def _write(engine: "CyclicEngine", runtime: "Runtime", folder: str, client_state: dict, exclude_frozen: bool) -> dict[str, dict]:
    owner, rank = runtime.owner, runtime.handoff.rank
    stage = runtime.plan.schedule.owned(rank)
    tensors: dict[str, torch.Tensor] = {f"param/{n}": p.detach() for n, p in owner.masters.items()}
    if not exclude_frozen:
        tensors |= {f"frozen/{n}": t for n, t in owner.frozen.items()}
    plain: dict[str, dict[str, Any]] = {}
    names = {p: n for n, p in owner.masters.items()}
    for p, state in owner.optimizer.state.items():
        for key, value in state.items():
            if isinstance(value, torch.Tensor):
                tensors[f"state/{names[p]}/{key}"] = value.detach()
            else:
                plain.setdefault(names[p], {})[key] = value
    tensors["scalars"] = runtime.handoff.scalars.vector
    groups = [{**{k: v for k, v in g.items() if k != "params"}, "params": [names[p] for p in g["params"]]}
              for g in owner.optimizer.param_groups]
    metadata = {"plain": json.dumps(plain), "groups": json.dumps(groups, default=_plain)}
    files = {f"stage_{stage:03d}.safetensors": _save_tensors(folder, f"stage_{stage:03d}.safetensors", tensors, metadata)}
    buffers = {n: b for n, b in runtime.module.named_buffers() if n not in _not_saved(runtime.module)}
    files[f"buffers_{rank:03d}.safetensors"] = _save_tensors(folder, f"buffers_{rank:03d}.safetensors", buffers, {})
    if rank == 0:
        scheduler = engine.lr_scheduler.state_dict() if hasattr(engine.lr_scheduler, "state_dict") else None
        path = os.path.join(folder, "client.pt")
        with open(path, "wb") as file:
            torch.save({"client_state": client_state, "lr_scheduler": scheduler}, file)
            _sync(file)
        files["client.pt"] = {"sha256": _digest(path), "names": []}
    return files


def _not_saved(module: torch.nn.Module) -> set[str]:
    """Names of the buffers that a state dict leaves out."""
    return {f"{path}.{name}".lstrip(".") for path, m in module.named_modules() for name in m._non_persistent_buffers_set}


def aliases(module: torch.nn.Module) -> dict[str, str]:
    """Other names of tied parameters -> the name under which they are saved."""
    first = {id(p): n for n, p in module.named_parameters()}
    return {n: first[id(p)] for n, p in module.named_parameters(remove_duplicate=False) if n != first[id(p)]}


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else str(value)


def _save_tensors(folder: str, name: str, tensors: dict[str, torch.Tensor], metadata: dict[str, str]) -> dict:
    path = os.path.join(folder, name)
    save_file({k: v.detach().cpu().clone(memory_format=torch.contiguous_format) for k, v in tensors.items()}, path,
              metadata or None)  # safetensors cannot read what it writes for empty metadata and no tensors
    with open(path, "rb+") as file:
        _sync(file)
    return {"sha256": _digest(path), "names": sorted(tensors)}


def _sync(file: Any) -> None:
    file.flush()
    os.fsync(file.fileno())


def _digest(path: str) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() if hasattr(hashlib, "file_digest") else _digest_by_parts(file)


def _digest_by_parts(file: Any) -> str:  # Python 3.10
    digest = hashlib.sha256()
    while part := file.read(1 << 22):
        digest.update(part)
    return digest.hexdigest()


def _manifest_digest(manifest: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _write_text(path: str, text: str) -> None:
    with open(path + ".new", "w") as file:
        file.write(text)
        _sync(file)
    os.replace(path + ".new", path)


def _replace(working: str, final: str) -> None:
    """The finished folder takes the place of an older one of its name."""
    old = working[:-len(".saving")] + ".old"
    shutil.rmtree(old, ignore_errors=True)
    if os.path.exists(final):
        os.rename(final, old)
    os.rename(working, final)
    shutil.rmtree(old, ignore_errors=True)


# ---- loading ----------------------------------------------------------------------------------------------------------------
def load(engine: "CyclicEngine", runtime: "Runtime", load_dir: str, tag: str | None, strict: bool, optimizer_states: bool,
         scheduler_states: bool, module_only: bool, custom_load_fn: Any) -> tuple[str | None, dict | None]:
    """Collective; see ``CyclicEngine.load_checkpoint``. All files are checked on every rank before anything is loaded."""
    if custom_load_fn is not None:
        raise ValueError("custom_load_fn is given, but the cyclic engine loads by parameter name; leave it out of "
                         "load_checkpoint()")
    rank, gather = runtime.handoff.rank, runtime.transport.gather
    where = f"rank {rank}, loading a checkpoint from {load_dir!r}"
    if tag is None:
        latest = os.path.join(load_dir, "latest")
        tag = open(latest).read().strip() if os.path.isfile(latest) else ""
        if not all(gather(bool(tag), where)):
            return None, None
    folder = os.path.join(load_dir, str(tag))
    found, problem = None, None
    try:
        found = _read(runtime, folder, strict, optimizer_states and not module_only)
    except Exception as error:
        problem = str(error) if isinstance(error, (CheckpointError, ValueError)) else f"{type(error).__name__}: {error}"
    problems = [f"rank {r}: {x}" for r, x in enumerate(gather(problem, where)) if x]
    if problems:
        raise CheckpointError(f"checkpoint {folder!r} was not loaded, and nothing was changed ({'; '.join(problems)})")
    runtime.scatter()
    runtime.flush()
    _apply(engine, runtime, found, optimizer_states and not module_only, scheduler_states and not module_only, module_only)
    runtime.transport.reset(where)
    runtime.restart()
    return folder, found["client"]["client_state"]


def _read(runtime: "Runtime", folder: str, strict: bool, optimizer_states: bool) -> dict[str, Any]:
    """What this rank needs, checked; nothing is changed."""
    path = os.path.join(folder, MANIFEST)
    if not os.path.isfile(path):
        raise CheckpointError(f"{path} is missing: not a finished checkpoint of the cyclic engine")
    try:
        with open(path) as file:
            manifest = json.load(file)
        whole = manifest.pop("sha256") == _manifest_digest(manifest)
    except (ValueError, LookupError, TypeError, AttributeError):  # not JSON, not UTF-8, not a manifest
        whole = False
    if not whole:
        raise CheckpointError(f"{path} is damaged: it is not what was written")
    for name, entry in manifest["files"].items():
        if not os.path.isfile(os.path.join(folder, name)):
            raise CheckpointError(f"{os.path.join(folder, name)} is missing")
        if _digest(os.path.join(folder, name)) != entry["sha256"]:
            raise CheckpointError(f"{os.path.join(folder, name)} is damaged: its SHA-256 differs from the manifest's")
    owner, saved_ranks, tied = runtime.owner, manifest["ranks"], manifest.get("aliases", {})
    wanted = {f"param/{n}": n for n in owner.masters} | {f"frozen/{n}": n for n in owner.frozen}
    homes = {key: name for name, entry in manifest["files"].items() for key in entry["names"] if not name.startswith("buffers_")}
    values: dict[str, torch.Tensor] = {}
    state: dict[str, dict[str, Any]] = {n: {} for n in owner.masters}
    groups, scalars = None, None
    with ExitStack() as stack:
        files = {name: stack.enter_context(safe_open(os.path.join(folder, name), "pt"))
                 for name in manifest["files"] if name.startswith("stage_")}
        for key, name in wanted.items():
            there = [k for n in (name, tied.get(name)) for k in (f"param/{n}", f"frozen/{n}") if k in homes]  # as it was then
            key = there[0] if there else key
            if key not in homes:
                if strict and name not in owner.frozen:  # these may have been left out
                    raise CheckpointError(f"{folder} has no parameter {name!r}; load the model it was saved from, or pass "
                                          "load_module_strict=False")
                continue
            values[name] = files[homes[key]].get_tensor(key)
            expected = (owner.masters.get(name) if name in owner.masters else owner.frozen[name]).shape
            if values[name].shape != expected:
                raise CheckpointError(f"parameter {name!r} is {tuple(values[name].shape)} in {folder} and {tuple(expected)} in "
                                      "the model")
        for file in files.values() if optimizer_states else ():
            metadata = file.metadata()
            for name, plain in json.loads(metadata["plain"]).items():
                if name in state:
                    state[name].update(plain)
            for key in file.keys():
                if key.startswith("state/"):
                    name, field = key[len("state/"):].rsplit("/", 1)
                    if name in state:
                        state[name][field] = file.get_tensor(key)
            groups = groups or json.loads(metadata["groups"])
        if f"stage_{0:03d}.safetensors" in files and saved_ranks == runtime.plan.schedule.ranks:
            scalars = files[f"stage_{0:03d}.safetensors"].get_tensor("scalars")
    from safetensors.torch import load_file
    buffers = load_file(os.path.join(folder, f"buffers_{runtime.handoff.rank % saved_ranks:03d}.safetensors"))
    try:
        client = torch.load(os.path.join(folder, "client.pt"), weights_only=True, map_location="cpu")
    except Exception as error:
        raise CheckpointError(f"{os.path.join(folder, 'client.pt')} holds more than plain data and tensors, or is damaged "
                              f"({str(error).splitlines()[0]}); save client_state made of these only") from error
    if groups is not None and len(groups) != len(owner.optimizer.param_groups):
        raise CheckpointError(f"{folder} has {len(groups)} parameter groups and the optimizer "
                              f"{len(owner.optimizer.param_groups)}; build the optimizer as it was, or pass "
                              "load_optimizer_states=False")
    return {"manifest": manifest, "values": values, "state": state, "groups": groups, "scalars": scalars, "buffers": buffers,
            "client": client}


def _apply(engine: "CyclicEngine", runtime: "Runtime", found: dict[str, Any], optimizer_states: bool, scheduler_states: bool,
           module_only: bool) -> None:
    owner = runtime.owner
    with torch.no_grad():
        for name, value in found["values"].items():
            (owner.masters if name in owner.masters else owner.frozen)[name].copy_(value)
        own = dict(runtime.module.named_buffers())
        for name, value in found["buffers"].items():
            if name in own:
                own[name].copy_(value)
    if optimizer_states:
        for group, saved in zip(owner.optimizer.param_groups, found["groups"]):
            for key, value in saved.items():
                if key != "params" and key in group:
                    group[key] = tuple(value) if isinstance(group[key], tuple) else value
                elif key != "params":
                    group[key] = value
        for name, state in found["state"].items():
            master = owner.masters[name]
            if state:
                owner.optimizer.state[master] = {k: v.to(master.device) if isinstance(v, torch.Tensor) and v.dim() else v
                                                 for k, v in state.items()}
        if found["scalars"] is not None:
            runtime.handoff.scalars.vector.copy_(found["scalars"])
    scheduler = found["client"]["lr_scheduler"]
    if scheduler_states and scheduler is not None and engine.lr_scheduler is not None:
        engine.lr_scheduler.load_state_dict(scheduler)
    if not module_only:
        for counter, value in found["manifest"]["counters"].items():
            setattr(engine, counter, value)
        runtime.handoff.global_step = engine.global_steps
    runtime.scale.restart(runtime.handoff.global_step, found["manifest"].get("loss_scale") if optimizer_states else None)
