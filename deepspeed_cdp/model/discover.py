"""Finds the units (§2) of any nn.Module: called once per forward, as a whole, with parameters that are read nowhere else.

- the children of the outermost ModuleLists, Sequentials and ModuleDicts are units (a ModuleList inside one is not opened);
- a module with such a container below it is a wrapper: it is opened, and parameters directly on it are persistent (§4);
- every other module with parameters is one unit;
- parameters shared between units, or between a unit and its surroundings, are persistent.
An example batch refines this: a fake-tensor forward tells the order, the cost, what runs twice, and which parameters are
read outside their module (MultiheadAttention reads out_proj.weight itself).
"""

import logging
import random
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.utils import parametrize
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from deepspeed_cdp.plan.partition import assign

logger = logging.getLogger("deepspeed_cdp")

_OWN = vars(nn.Module()).keys()  # the attributes every module has
# FlopCounterMode knows the CUDA attention kernels; the CPU's is the same product
_MORE_FLOPS = {torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: lambda q, k, v, *_, **__: sdpa_flop_count(q, k, v)}


@dataclass(frozen=True)
class FoundUnit:
    """`name` is its path in named_modules(), `parameters` the named_parameters() names it carries, in that order;
    `cost_parameters` counts their elements. `flops` counts the example's forward from this unit's start to the next one's
    (so work on persistent parameters, such as a tied head's, counts where it is done); 0 if never called, None without a trace.
    """

    name: str
    parameters: tuple[str, ...]
    cost_parameters: int
    flops: int | None
    type_name: str


@dataclass(frozen=True)
class FoundUnits:
    """Units in execution order, and the persistent parameters' names in named_parameters() order; `persistent_cost` counts their
    elements."""

    units: tuple[FoundUnit, ...]
    persistent: tuple[str, ...]
    persistent_cost: int = 0


@dataclass
class Example:
    """Arguments of one forward: module(*args, **kwargs)."""

    args: tuple = ()
    kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Trace:
    """What one forward does. Modules are keyed by their path in named_modules(); those never called are absent.

    `order` is the position of the first call, `calls` their number, `flops` the operations inside, `before` those done by
    the model before the first call. `inside` maps each parameter that is read to the modules running at every read of it.
    """

    order: dict[str, int] = field(default_factory=dict)
    calls: dict[str, int] = field(default_factory=dict)
    flops: dict[str, int] = field(default_factory=dict)
    before: dict[str, int] = field(default_factory=dict)
    inside: dict[str, frozenset[str]] = field(default_factory=dict)


def example_of(module: nn.Module) -> Example | None:
    """The example a module carries: Lightning's `example_input_array` or HF's `dummy_inputs`; None when it has none."""
    try:
        given = getattr(module, "example_input_array", None)
        if isinstance(given, Mapping):
            return Example(kwargs=dict(given))
        if given is not None:
            return Example(args=tuple(given) if isinstance(given, (tuple, list)) else (given,))
        config = getattr(module, "config", None)
        if getattr(module, "main_input_name", None) == "pixel_values" and isinstance(getattr(config, "image_size", None), int):
            # transformers' default dummy_inputs are token ids even for vision models
            return Example(kwargs={"pixel_values": torch.zeros(1, config.num_channels, config.image_size, config.image_size)})
        given = getattr(module, "dummy_inputs", None)
        return Example(kwargs=dict(given)) if isinstance(given, Mapping) else None
    except Exception as error:  # both are properties with arbitrary code behind them
        logger.info("no example batch: %s: %s", type(error).__name__, error)
        return None


@contextmanager
def _unchanged(module: nn.Module) -> Iterator[None]:
    """Puts back every attribute of every submodule, what its dicts, lists and sets hold, and the random states."""
    attributes = [(m, dict(m.__dict__)) for m in module.modules()]
    inner = [
        (v, v.items() if isinstance(v, dict) else v)
        for _, saved in attributes
        for v in saved.values()
        if isinstance(v, (dict, list, set))
    ]
    contents = [(value, content, list(content)) for value, content in inner]
    python, numpy = random.getstate(), sys.modules["numpy"].random if "numpy" in sys.modules else None
    legacy = numpy and numpy.get_state()
    try:
        with torch.random.fork_rng(devices=[torch.cuda.current_device()] if torch.cuda.is_initialized() else []):
            yield
    finally:
        for m, saved in attributes:
            for name in m.__dict__.keys() - saved.keys():
                del m.__dict__[name]
            m.__dict__.update(saved)
        for value, content, then in contents:
            if [id(x) for x in tree_leaves(list(content))] != [id(x) for x in tree_leaves(then)]:
                value.clear()
                (value.extend if isinstance(value, list) else value.update)(then)
        random.setstate(python)
        if numpy:
            numpy.set_state(legacy)


class _Recorder(TorchDispatchMode):
    """Records module calls (through hooks) and which modules are running when an operator reads a parameter."""

    def __init__(self, names: dict[int, str], flops: FlopCounterMode) -> None:
        super().__init__()
        self.names, self.counter = names, flops
        self.running: list[tuple[str, int]] = []  # (path, flops so far when it was entered)
        self.trace = Trace()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        for leaf in tree_leaves((args, kwargs)):
            if (name := self.names.get(id(leaf))) is not None:
                now = frozenset(path for path, _ in self.running)
                self.trace.inside[name] = self.trace.inside.get(name, now) & now
        return func(*args, **kwargs)

    def hook(self, path: str, module: nn.Module) -> None:
        def enter(*_: Any) -> None:
            self.trace.order.setdefault(path, len(self.trace.order))
            self.trace.calls[path] = self.trace.calls.get(path, 0) + 1
            self.trace.before.setdefault(path, self.counter.get_total_flops())
            self.running.append((path, self.counter.get_total_flops()))

        def leave(*_: Any) -> None:
            while self.running:  # more than one only when the model caught an exception of a submodule
                name, before = self.running.pop()
                if name == path:
                    self.trace.flops[path] = self.trace.flops.get(path, 0) + self.counter.get_total_flops() - before
                    return

        module.register_forward_pre_hook(enter, prepend=True)
        module.register_forward_hook(leave)


def trace(module: nn.Module, example: Example) -> Trace | None:
    """One forward in training mode on fake tensors: no memory, no arithmetic, and the module comes out as it went in.

    Returns None, and logs why at info level, when the forward fails or depends on the data.
    """
    with _unchanged(module):
        try:
            return _trace(module, example)
        except Exception as error:  # whatever a user's forward raises
            reason = str(error).strip().partition("\n")[0]
            logger.info("no trace of %s: %s: %s", type(module).__name__, type(error).__name__, reason)
            return None


def _trace(module: nn.Module, example: Example) -> Trace:
    parameters, mode = dict(module.named_parameters()), FakeTensorMode(allow_non_fake_inputs=True)
    fakes: dict[str, torch.Tensor] = {name: mode.from_tensor(p) for name, p in parameters.items()}
    with mode:
        for name, p in parameters.items():
            if hasattr(p, "ds_shape"):  # partitioned by deepspeed.zero.Init: the local shape is [0]
                fakes[name] = nn.Parameter(torch.empty(p.ds_shape, dtype=p.dtype, device=p.device), p.requires_grad)
    counter = FlopCounterMode(display=False, custom_mapping=_MORE_FLOPS)
    recorder = _Recorder({id(fake): name for name, fake in fakes.items()}, counter)
    buffers = {name: mode.from_tensor(b) for name, b in module.named_buffers()}
    devices, dtypes = {p.device for p in parameters.values()}, {p.dtype for p in parameters.values() if p.is_floating_point()}

    def place(t: torch.Tensor) -> torch.Tensor:
        """The example where a loader or engine would put it: on the model's device, in its floating-point type."""
        fake = mode.from_tensor(t)
        with mode:
            dtype = next(iter(dtypes)) if t.is_floating_point() and len(dtypes) == 1 else t.dtype
            return fake.to(next(iter(devices)) if len(devices) == 1 else t.device, dtype)

    args, kwargs = tree_map_only(torch.Tensor, place, (tuple(example.args), dict(example.kwargs)))
    compiled = any(hasattr(m, "_orig_mod") or getattr(m, "_compiled_call_impl", None) for m in module.modules())
    eager = torch.compiler.set_stance("force_eager") if compiled else nullcontext()
    vars(module).update({h: type(vars(module)[h])() for h in ("_forward_pre_hooks", "_forward_hooks")})  # an engine's, not up yet
    for path, m in module.named_modules():  # what is done to the modules here, _unchanged undoes
        recorder.hook(path, m)
        m.training |= not module.training  # from_pretrained returns eval mode, where layers may take other paths
        for name in vars(m).keys() - _OWN:  # tensors that are neither parameters nor buffers, such as LSTM's _flat_weights
            if isinstance(vars(m)[name], (torch.Tensor, list, dict, tuple)):
                m.__dict__[name] = tree_map_only(torch.Tensor, mode.from_tensor, vars(m)[name])
    with eager, torch.enable_grad(), mode, counter, recorder:
        torch.func.functional_call(module, {**fakes, **buffers}, args, kwargs)
    return recorder.trace


class _Tree:
    """The module tree, by paths. All lists of parameters are first names in named_parameters() order."""

    def __init__(self, module: nn.Module, seen: Trace | None) -> None:
        self.seen, self.calls = seen, {} if seen is None else seen.calls
        self.modules = dict(module.named_modules())
        self.parameters = dict(module.named_parameters())
        self.path = {id(m): path for path, m in self.modules.items()}
        self.first = {id(p): name for name, p in self.parameters.items()}
        self.index = {name: i for i, name in enumerate(self.parameters)}
        self.aliases: dict[str, list[str]] = {path: [] for path in self.modules}  # every path of the same module object
        for path, m in module.named_modules(remove_duplicate=False):
            self.aliases[self.path[id(m)]].append(path)
        self.names: dict[str, list[str]] = {name: [] for name in self.parameters}  # every name of the same parameter
        for name, p in module.named_parameters(remove_duplicate=False):
            self.names[self.first[id(p)]].append(name)
        self.below, self.children, self.widest = cache(self._below), cache(self._children), cache(self._widest)

    def _below(self, path: str) -> tuple[str, ...]:
        """Parameters of the module at `path`, shared ones included."""
        return tuple(sorted((self.first[id(p)] for p in self.modules[path].parameters()), key=self.index.__getitem__))

    def _children(self, path: str) -> tuple[str, ...]:
        """Child modules with parameters. ParameterList and ParameterDict count as parameters of `path`."""
        paths = (self.path[id(m)] for _, m in self.modules[path].named_children())
        return tuple(p for p in paths if self.below(p) and (self.callable(p) or self.children(p)))

    def own(self, path: str) -> bool:  # whether parameters sit directly on the module
        return bool(set(self.below(path)) - {name for child in self.children(path) for name in self.below(child)})

    def callable(self, path: str) -> bool:
        m = self.modules[path]
        return type(m).forward is not nn.Module.forward or "forward" in m.__dict__

    def container(self, path: str) -> bool:
        m = self.modules[path]
        return isinstance(m, (nn.Sequential, nn.ModuleList, nn.ModuleDict)) and not isinstance(m, parametrize.ParametrizationList)

    def atomic(self, path: str) -> bool:
        """Modules known to use their children's parameters themselves."""
        m = self.modules[path]
        return isinstance(m, nn.MultiheadAttention) or parametrize.is_parametrized(m) or not self.children(path)

    def _widest(self, path: str) -> int:
        """The largest number of blocks in a container below `path`; 0 when there is none."""
        if self.atomic(path):
            return 0
        return max(max(len(self.children(kid)) * self.container(kid), self.widest(kid)) for kid in self.children(path))

    def collect(self, path: str, whole: bool = False) -> list[str]:
        """Candidate units at or below `path`. whole: it is inside an outermost container, so opened only if it must be."""
        calls, wide = self.calls.get(path, 0), self.widest(path)
        if not self.below(path) or calls > 1:
            return []
        bypassed = calls == 0 and any(inner.startswith(path + ".") for inner in self.calls)
        opened = not self.callable(path) or bypassed  # never called itself: it cannot be a unit
        if not whole and not self.atomic(path):
            opened |= self.container(path) or (wide > 0 and (wide > 1 or not self.own(path)))
        return self.inner(path, whole or self.container(path)) if opened else [path]

    def inner(self, path: str, whole: bool) -> list[str]:
        return list(dict.fromkeys(u for kid in self.children(path) for u in self.collect(kid, whole)))

    def finer(self, path: str) -> list[str]:
        """The pieces of one unit: its children, or those of its only child, and so on; [] when it cannot be opened."""
        pieces = [] if self.atomic(path) else self.inner(path, True)
        return self.finer(pieces[0]) if len(pieces) == 1 else pieces

    def settle(self, paths: Iterable[str]) -> dict[str, tuple[str, ...]]:
        """The parameters each unit may carry: named nowhere outside it and read nowhere outside it. Empty units vanish."""
        chosen = {}
        for path in paths:
            if self.calls.get(path, 0) > 1 or (self.seen is None and len(self.aliases[path]) > 1):
                continue  # runs twice, or may (the same object under two names)
            prefixes, inside = tuple(a and a + "." for a in self.aliases[path]), {} if self.seen is None else self.seen.inside
            keep = [n for n in self.below(path) if all(name.startswith(prefixes) for name in self.names[n])]
            chosen[path] = tuple(n for n in keep if n not in inside or path in inside[n])
        return {path: keep for path, keep in chosen.items() if keep}

    def size(self, names: Iterable[str]) -> int:
        """Elements; ds_numel is the whole size of a parameter partitioned by zero.Init."""
        return sum(int(getattr(p, "ds_numel", None) or p.numel()) for p in map(self.parameters.__getitem__, names))

    def split(self, chosen: dict[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]] | None:
        """Opens the largest unit that gives more units; one that leaves no parameter persistent if there is any. None: no
        such unit."""
        fallback = None
        for path in sorted(chosen, key=lambda p: -self.size(chosen[p])):
            finer = self.settle(piece for p in chosen for piece in (self.finer(p) if p == path else [p]))
            if len(finer) > len(chosen):
                if sum(map(len, finer.values())) == sum(map(len, chosen.values())):
                    return finer
                fallback = fallback or finer
        return fallback

    def named(self, names: Sequence[str]) -> dict[str, tuple[str, ...]]:
        """The user's `cyclic.units`, checked."""
        known = {alias: path for path, aliases in self.aliases.items() for alias in aliases}
        paths: list[str] = []
        for name in names:
            path, wrong = known.get(name, name), None
            clash = [p for p in paths if p == path or not p or not path or p.startswith(path + ".") or path.startswith(p + ".")]
            if name not in known:
                wrong = "which is no module of this model: use paths from named_modules()"
            elif not self.below(path):
                wrong = "which has no parameters: remove it"
            elif not self.callable(path):
                wrong = f"a {type(self.modules[path]).__name__}, which is never called as such: list its children instead"
            elif clash:
                wrong = f"which overlaps {clash[0]!r}: keep one of them"
            elif not self.settle([path]):
                wrong = "whose parameters are all shared with other modules or used several times: remove it"
            if wrong:
                raise ValueError(f"cyclic.units has {name!r}, {wrong}")
            paths.append(path)
        return self.settle(paths)

    def ordered(self, chosen: dict[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
        """By first call; a unit that was not called stays right behind its predecessor in registration order."""
        last, keys = -1, {}
        for path in chosen:
            last = keys[path] = last if self.seen is None else self.seen.order.get(path, last)
        return {path: chosen[path] for path in sorted(keys, key=keys.__getitem__)}

    def units(self, chosen: dict[str, tuple[str, ...]]) -> FoundUnits:
        flops = dict.fromkeys(chosen, None if self.seen is None else 0)
        if self.seen is not None:
            called = sorted(self.calls.keys() & chosen.keys(), key=self.seen.order.__getitem__)
            ends = [self.seen.before[p] for p in called[1:]] + [self.seen.flops[""]]
            starts = [0] + ends[:-1]  # what runs before the first unit is the first unit's
            flops |= {p: end - start for p, start, end in zip(called, starts, ends, strict=True)} if called else {}
        units = [FoundUnit(p, n, self.size(n), flops[p], type(self.modules[p]).__name__) for p, n in chosen.items()]
        carried = {name for unit in units for name in unit.parameters}
        persistent = tuple(name for name in self.parameters if name not in carried)
        return FoundUnits(tuple(units), persistent, self.size(persistent))


def find_units(
    module: nn.Module, at_least: int, example: Example | None = None, names: Sequence[str] | None = None
) -> FoundUnits:
    """The units of a model, in execution order (registration order without an example), and its persistent parameters.

    Every parameter is in exactly one unit or in `persistent`. The model is not changed; parameters may be frozen or empty.

    Args:
        at_least: the number of stages; with fewer units, the largest are split into their children until there are enough.
        example: one batch, for a trace; see `example_of`.
        names: `cyclic.units`, module paths in execution order; parameters below none of them are persistent.

    Raises:
        ValueError: not enough units, or a wrong entry in `names`.
    """
    assert at_least >= 1, f"at_least is {at_least}"
    tree = _Tree(module, None if example is None else trace(module, example))
    chosen = tree.settle(tree.collect("")) if names is None else tree.named(names)
    if names is None and list(chosen) == [""]:  # the model as one unit: opened if it has several children
        chosen = max(chosen, tree.settle(tree.finer("")), key=len)
    while names is None and len(chosen) < at_least:
        finer = tree.split(chosen)
        if finer is None:
            break
        chosen = finer
    if (count := len(chosen)) < at_least:
        kind, fix = type(module).__name__, f"use at most {count} ranks, or a model with more layers"
        if names is not None:
            fix = f"use at most {count} ranks, or list more modules in cyclic.units"
        elif count == 0:
            fix = "name modules that run once per forward and share no parameters in cyclic.units"
        raise ValueError(f"this {kind} has {count} units for {at_least} ranks: {fix}")
    return tree.units(chosen if names is not None else tree.ordered(chosen))


def stages(units: FoundUnits, parts: int, method: str) -> tuple[tuple[int, ...], ...]:
    """Unit indices of each stage.

    Args:
        method: `cyclic.partition_method`: `parameters` (persistent ones count as stage 0's), `uniform`, `type:REGEX` (searched in
            class names), `flops` (needs a trace), or `auto`: flops when the units have them, else parameters.

    Raises:
        ValueError: unknown method, flops without a trace, fewer units than stages.
    """
    word = method.strip().lower()
    if word == "auto":
        word = method = "flops" if any(unit.flops for unit in units.units) else "parameters"
    if word == "flops":
        if any(unit.flops is None for unit in units.units):
            raise ValueError("cyclic.partition_method is 'flops', which needs a traced example batch: use 'parameters'")
        costs = [unit.flops for unit in units.units]
    else:
        costs = [unit.cost_parameters + (units.persistent_cost if i == 0 else 0) for i, unit in enumerate(units.units)]
    return assign([unit.type_name for unit in units.units], costs, parts, method)
