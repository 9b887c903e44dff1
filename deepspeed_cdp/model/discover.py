"""Finds the units of any nn.Module: modules that run once per forward, with parameters that no other module reads.

- The children of the outermost ModuleLists, Sequentials and ModuleDicts are units; containers inside a unit are not opened.
- A module above such a container is a wrapper. It is opened, and parameters directly on it are persistent.
- Every other module with parameters is one unit.
- Parameters shared between units, or between a unit and its surroundings, are persistent.

A forward of an example batch on fake tensors refines this. It gives the execution order and the cost. It also shows modules that
run twice, and parameters that are read outside their module (MultiheadAttention reads out_proj.weight itself).
"""

import itertools
import logging
import random
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cache
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.nn.utils import parametrize
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from deepspeed_cdp.plan.partition import assign, by_memory
from deepspeed_cdp.plan.unit_schedule import Unit

logger = logging.getLogger("deepspeed_cdp")
_fakes_logger = logging.getLogger("torch._subclasses.fake_tensor")

_OWN = vars(nn.Module()).keys()  # the attributes every module has
_MOST_KNOWN = 2**20  # elements of a tensor that a trace computes


def _grouped_mm_flops(a: torch.Size, b: torch.Size, *_: Any, **__: Any) -> int:
    """Of products of groups, as of experts: rows are in one group each, and so is the dimension that a product sums over."""
    return 2 * a[-2] * a[-1] * b[-1] * (a[0] if len(a) == len(b) == 3 else 1)


# What FlopCounterMode does not count: the CPU's attention kernel, and products of groups.
_MORE_FLOPS: dict[Any, Any] = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: lambda q, k, v, *_, **__: sdpa_flop_count(q, k, v)
}
if hasattr(torch.ops.aten, "_grouped_mm"):  # not in torch 2.6
    _MORE_FLOPS[torch.ops.aten._grouped_mm] = _grouped_mm_flops


@dataclass(frozen=True)
class FoundUnit:
    """A unit of the model.

    Attributes:
        name: its path in named_modules().
        parameters: its names from named_parameters(), in that order.
        cost_parameters: number of their elements.
        flops: operations in the example's forward from this unit's start to the next unit's. So work on persistent parameters
            (such as a tied head's) counts where it is done. 0 if the unit is never called, None without a trace.
        type_name: class of the module.
    """

    name: str
    parameters: tuple[str, ...]
    cost_parameters: int
    flops: int | None
    type_name: str


@dataclass(frozen=True)
class FoundUnits:
    """The units of a model in execution order, and its persistent parameters.

    Attributes:
        persistent: their names, in the order of named_parameters().
        persistent_cost: number of their elements.
        any_order: units may run in any order, several times, and their parameters may be read outside.
    """

    units: tuple[FoundUnit, ...]
    persistent: tuple[str, ...]
    persistent_cost: int = 0
    any_order: bool = False


@dataclass
class Example:
    """Arguments of one forward: module(*args, **kwargs)."""

    args: tuple = ()
    kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Trace:
    """Record of one forward, by path in named_modules(); modules that are never called are absent.

    Attributes:
        order: position of the module's first call.
        calls: number of calls.
        flops: operations inside the module.
        before: operations of the model before the module's first call.
        inside: for each parameter that is read, the modules that are running at every read of it.
    """

    order: dict[str, int] = field(default_factory=dict)
    calls: dict[str, int] = field(default_factory=dict)
    flops: dict[str, int] = field(default_factory=dict)
    before: dict[str, int] = field(default_factory=dict)
    inside: dict[str, frozenset[str]] = field(default_factory=dict)

    def packed(self) -> list[Any]:
        """As JSON."""
        return [self.order, self.calls, self.flops, self.before, {name: sorted(paths) for name, paths in self.inside.items()}]

    @classmethod
    def unpacked(cls, packed: list[Any]) -> "Trace":
        """The inverse of ``packed``."""
        order, calls, flops, before, inside = packed
        return cls(order, calls, flops, before, {name: frozenset(paths) for name, paths in inside.items()})


def join(module: nn.Module, traces: Sequence[Trace]) -> Trace:
    """What forwards of several ranks do: some may skip modules, such as a vision tower without images.

    A module comes after those that it follows in some forward. Where no forward tells, the order is that of ``named_modules()``.
    """
    calls, flops, inside = dict[str, int](), dict[str, int](), dict[str, frozenset[str]]()
    follows: dict[str, set[str]] = {path: set() for path, _ in module.named_modules() if any(path in t.order for t in traces)}
    reached: dict[str, int] = {}
    for seen in traces:
        called = sorted(seen.order, key=seen.order.__getitem__)
        for path, following in zip(called, called[1:]):
            follows[following].add(path)
        for path in called:
            calls[path] = max(calls.get(path, 0), seen.calls[path])
            flops[path] = max(flops.get(path, 0), seen.flops.get(path, 0))
            reached[path] = max(reached.get(path, 0), seen.before[path])
        for name, running in seen.inside.items():
            inside[name] = inside.get(name, running) & running
    order: dict[str, int] = {}
    before: dict[str, int] = {}
    latest = 0
    while follows:
        path = next((p for p, earlier in follows.items() if not earlier - order.keys()), next(iter(follows)))  # else a circle
        order[path] = len(order)
        before[path] = latest = max(latest, reached.pop(path))
        del follows[path]
    return Trace(order, calls, flops, before, inside)


def misfit(units: Sequence[Unit], seen: Trace) -> str:
    """Why a forward like this cannot run by a plan with these units; empty if it can."""
    before, latest = "", -1
    for unit in units:
        for path in unit.modules:
            if (calls := seen.calls.get(path, 0)) > 1:
                return f"{path!r} is called {calls} times in a forward"
            if calls and seen.order[path] < latest:
                return f"{path!r} is called before {before!r}"
            if calls:
                before, latest = path, seen.order[path]
        for name in (*unit.trainable, *unit.frozen):
            if name in seen.inside and not seen.inside[name] & {*unit.modules}:
                return f"parameter {name!r} is read outside {unit.name!r}"
    return ""


def example_of(module: nn.Module) -> Example | None:
    """The module's own example: Lightning's `example_input_array` or Hugging Face's `dummy_inputs`; None if it has none."""
    try:
        given = getattr(module, "example_input_array", None)
        if isinstance(given, Mapping):
            return Example(kwargs=dict(given))
        if given is not None:
            return Example(args=tuple(given) if isinstance(given, (tuple, list)) else (given,))
        config: Any = getattr(module, "config", None)
        if getattr(module, "main_input_name", None) == "pixel_values" and isinstance(getattr(config, "image_size", None), int):
            # transformers' default dummy_inputs are token ids even for vision models
            return Example(kwargs={"pixel_values": torch.zeros(1, config.num_channels, config.image_size, config.image_size)})
        given = getattr(module, "dummy_inputs", None)
        return Example(kwargs=dict(given)) if isinstance(given, Mapping) else None
    except Exception as error:  # both may be properties, which run arbitrary code
        logger.info("no example batch: %s: %s", type(error).__name__, error)
        return None


@contextmanager
def _unchanged(module: nn.Module) -> Iterator[None]:
    """Restores every attribute of every submodule, the contents of its dicts, lists and sets, and the random states."""
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


class UnknownValueError(Exception):
    """A trace cannot keep what it knows apart from what it does not know; it is made again without known values."""


def _tensors(given: Any) -> Iterator[torch.Tensor]:
    """The tensors among an operator's arguments or results."""
    if isinstance(given, torch.Tensor):
        yield given
    elif isinstance(given, (tuple, list)):
        for x in given:
            yield from _tensors(x)


class _Recorder(TorchDispatchMode):
    """Records module calls (through hooks), operations, and the modules that are running when an operator reads a parameter."""

    def __init__(self, names: dict[int, str], known: bool = False) -> None:
        """
        Args:
            known: among fake tensors, compute what follows from real ones.
        """
        super().__init__()
        self.names, self.known = names, known
        self.formulas = FlopCounterMode(display=False, custom_mapping=_MORE_FLOPS).flop_registry
        self.operations = 0
        self.running: list[tuple[str, int]] = []  # (path, operations before it was entered)
        self.trace = Trace()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.prim.device.default:  # most of what a trace asks
            return func(*args, **kwargs)
        inputs = [*_tensors(args), *_tensors(tuple(kwargs.values()))]
        for x in inputs:
            if (name := self.names.get(id(x))) is not None:
                now = frozenset(path for path, _ in self.running)
                self.trace.inside[name] = self.trace.inside.get(name, now) & now
        formula = self.formulas.get(func._overloadpacket)
        if formula is None and _composite(func):
            with self:
                return func.decompose(*args, **kwargs)
        made = self.computed(func, args, kwargs, inputs) if self.known else func(*args, **kwargs)
        if formula is not None:
            self.operations += formula(*args, **kwargs, out_val=made)
        return made

    def computed(self, func: Any, args: tuple, kwargs: dict, inputs: list[torch.Tensor]) -> Any:
        """The operator's result: a real one if it follows from known numbers, such as token ids and sizes of images."""
        if inputs and not any(map(_known, inputs)):
            return func(*args, **kwargs)
        given = [*zip(func._schema.arguments, args), *((a, kwargs.get(a.name)) for a in func._schema.arguments[len(args) :])]
        written = [x for a, x in given if a.alias_info is not None and a.alias_info.is_write and isinstance(x, torch.Tensor)]
        if torch.Tag.nondeterministic_seeded in func.tags or not all(map(_known, inputs)):  # a trace draws other random numbers
            if any(map(_known, written)):
                raise UnknownValueError(f"{func} writes unknown values among known ones")
            if func is torch.ops.aten.index.Tensor:  # a known mask tells the result's shape
                args = (args[0], [place for at in args[1] for place in _places(at)])
            return func(*args, **kwargs)
        if not written:
            try:
                made = func(*args, **kwargs)
            except Exception:  # the result, or its shape, depends on the values
                made = None
            if any(x.numel() > _MOST_KNOWN or x.is_meta or not (_whole(x) or inputs) for x in _tensors(made)):
                return made
        with unset_fake_temporarily():
            return func(*args, **kwargs)

    def watch(self, module: nn.Module) -> None:
        """Hook every module; ``_unchanged`` restores them."""
        vars(module).update(
            {h: type(vars(module)[h])() for h in ("_forward_pre_hooks", "_forward_hooks")}
        )  # an engine's hooks: it is not ready yet
        for path, m in module.named_modules():
            self.hook(path, m)
            m.training |= not module.training  # from_pretrained returns eval mode, where layers may take other paths

    def hook(self, path: str, module: nn.Module) -> None:
        def enter(*_: Any) -> None:
            self.trace.order.setdefault(path, len(self.trace.order))
            self.trace.calls[path] = self.trace.calls.get(path, 0) + 1
            self.trace.before.setdefault(path, self.operations)
            self.running.append((path, self.operations))

        def leave(*_: Any) -> None:
            while self.running:  # pops more than one only after the model caught an exception of a submodule
                name, before = self.running.pop()
                if name == path:
                    self.trace.flops[path] = self.trace.flops.get(path, 0) + self.operations - before
                    return

        module.register_forward_pre_hook(enter, prepend=True)
        module.register_forward_hook(leave)


def trace(module: nn.Module, example: Example) -> Trace | None:
    """One forward in training mode on fake tensors, which takes no memory and no arithmetic; the module is left unchanged.

    If the forward fails or depends on the data, this returns None and logs the reason at info level.
    """
    reason = ""
    for known in (True, False):
        with _unchanged(module), _silenced(_fakes_logger):
            try:
                return _trace(module, example, known)
            except Exception as error:  # a user's forward may raise anything
                reason = reason or f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
    logger.info("no trace of %s: %s", type(module).__name__, reason)
    return None


def observe(module: nn.Module, example: Example) -> Trace:
    """As ``trace``, by a real forward without gradients: parameters must have their values. It follows any model.

    Buffers, attributes and random states are restored.
    """
    buffers = [(b, b.clone()) for b in module.buffers()]
    names = {id(p): name for name, p in module.named_parameters()}
    kinds = {(p.device, p.dtype) for p in module.parameters() if p.is_floating_point()}

    def place(t: torch.Tensor) -> torch.Tensor:
        device, dtype = next(iter(kinds)) if len(kinds) == 1 else (t.device, t.dtype)
        return t.to(device, dtype if t.is_floating_point() else None, copy=True)  # a forward may write into its inputs

    args, kwargs = tree_map_only(torch.Tensor, place, (tuple(example.args), dict(example.kwargs)))
    recorder = _Recorder(names)
    with _unchanged(module), torch.no_grad():
        try:
            recorder.watch(module)
            with _eager(), recorder:
                module(*args, **kwargs)
        finally:
            for buffer, value in buffers:
                buffer.copy_(value)
    return recorder.trace


def _eager() -> Any:
    """A context in which compiled code runs as it is written: torch gives up for good what does not compile with fake tensors."""
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()


@contextmanager
def _silenced(log: logging.Logger) -> Iterator[None]:
    """torch logs a traceback where a fake tensor does not work; a trace has another way."""
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


def _whole(x: torch.Tensor) -> bool:
    return not (x.is_floating_point() or x.is_complex() or x.is_meta)


def _places(at: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    """An index; positions in the place of a mask that is known."""
    if at is None or at.dtype is not torch.bool or not _known(at):
        return (at,)
    with unset_fake_temporarily():
        return at.nonzero(as_tuple=True)


@cache
def _composite(func: Any) -> bool:
    """Whether the operator is made of others, which autograd calls; only in inference mode it arrives as it is."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), torch._C.DispatchKey.CompositeImplicitAutograd)


def _known(x: torch.Tensor) -> bool:
    return not (isinstance(x, FakeTensor) or x.is_meta)


def _trace(module: nn.Module, example: Example, known: bool = True) -> Trace:
    """
    Args:
        known: compute what follows from the example's whole numbers. A forward that writes other numbers among them cannot.
    """
    parameters, mode = dict(module.named_parameters()), FakeTensorMode(allow_non_fake_inputs=True)
    fakes: dict[str, torch.Tensor] = {name: mode.from_tensor(p) for name, p in parameters.items()}
    with mode:
        for name, p in parameters.items():
            if hasattr(p, "ds_shape") or 0 in p.stride():  # of zero.Init, whose local shape is [0]; a placeholder
                shape = getattr(p, "ds_shape", p.shape)
                fakes[name] = nn.Parameter(torch.empty(shape, dtype=p.dtype, device=p.device), p.requires_grad)
    recorder = _Recorder({id(fake): name for name, fake in fakes.items()}, known)
    buffers = {name: mode.from_tensor(b) for name, b in module.named_buffers()}
    devices, dtypes = {p.device for p in parameters.values()}, {p.dtype for p in parameters.values() if p.is_floating_point()}

    def place(t: torch.Tensor) -> torch.Tensor:
        """A tensor of the example, moved as a data loader or engine would: to the model's device and floating-point dtype.

        Whole numbers stay real: sizes and masks are computed from them.
        """
        if _whole(t):
            return t.to(next(iter(devices)) if len(devices) == 1 else t.device, copy=True)
        fake = mode.from_tensor(t)
        with mode:
            dtype = next(iter(dtypes)) if t.is_floating_point() and len(dtypes) == 1 else t.dtype
            return fake.to(next(iter(devices)) if len(devices) == 1 else t.device, dtype)

    args, kwargs = tree_map_only(torch.Tensor, place, (tuple(example.args), dict(example.kwargs)))
    recorder.watch(module)
    for m in module.modules():
        for name in vars(m).keys() - _OWN:  # tensors that are neither parameters nor buffers, such as LSTM's _flat_weights
            if isinstance(vars(m)[name], (torch.Tensor, list, dict, tuple)):
                m.__dict__[name] = tree_map_only(torch.Tensor, mode.from_tensor, vars(m)[name])
    with _eager(), torch.enable_grad(), mode, recorder:
        torch.func.functional_call(module, {**fakes, **buffers}, args, kwargs)
    return recorder.trace


class _Tree:
    """The module tree, by paths. Lists of parameters hold their first names, in the order of named_parameters()."""

    def __init__(self, module: nn.Module, seen: Trace | None, any_order: bool = False) -> None:
        self.seen, self.calls, self.any_order = seen, {} if seen is None else seen.calls, any_order
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
        """Child modules with parameters. A ParameterList or ParameterDict is no child: its parameters are those of `path`."""
        paths = (self.path[id(m)] for _, m in self.modules[path].named_children())
        return tuple(p for p in paths if self.below(p) and (self.callable(p) or self.children(p)))

    def own(self, path: str) -> bool:
        """Whether the module has parameters that belong to none of its children."""
        return bool(set(self.below(path)) - {name for child in self.children(path) for name in self.below(child)})

    def callable(self, path: str) -> bool:
        m = self.modules[path]
        return type(m).forward is not nn.Module.forward or "forward" in m.__dict__

    def container(self, path: str) -> bool:
        m = self.modules[path]
        return isinstance(m, (nn.Sequential, nn.ModuleList, nn.ModuleDict)) and not isinstance(m, parametrize.ParametrizationList)

    def atomic(self, path: str) -> bool:
        """Whether the module cannot be opened: it has no children, or is known to use its children's parameters itself."""
        m = self.modules[path]
        return isinstance(m, nn.MultiheadAttention) or parametrize.is_parametrized(m) or not self.children(path)

    def _widest(self, path: str) -> int:
        """The largest number of blocks in a container below `path`; 0 when there is none."""
        if self.atomic(path):
            return 0
        return max(max(len(self.children(kid)) * self.container(kid), self.widest(kid)) for kid in self.children(path))

    def collect(self, path: str, whole: bool = False) -> list[str]:
        """Candidate units at or below `path`.

        Args:
            whole: the module is inside an outermost container, so it is opened only if it cannot be a unit.
        """
        calls, wide = self.calls.get(path, 0), self.widest(path)
        if not self.below(path) or calls > 1:
            return []
        bypassed = calls == 0 and any(inner.startswith(path + ".") for inner in self.calls)
        opened = not self.callable(path) or bypassed  # a module that is never called cannot be a unit
        if not whole and not self.atomic(path):
            opened |= self.container(path) or (wide > 0 and (wide > 1 or not self.own(path)))
        return self.inner(path, whole or self.container(path)) if opened else [path]

    def inner(self, path: str, whole: bool) -> list[str]:
        return list(dict.fromkeys(u for kid in self.children(path) for u in self.collect(kid, whole)))

    def finer(self, path: str) -> list[str]:
        """The parts of one unit: its children, or those of its only child, and so on; [] if it cannot be opened."""
        pieces = [] if self.atomic(path) else self.inner(path, True)
        return self.finer(pieces[0]) if len(pieces) == 1 else pieces

    def settle(self, paths: Iterable[str]) -> dict[str, tuple[str, ...]]:
        """The parameters of each unit: those with no name and no read outside it. Units without parameters are dropped."""
        chosen = {}
        for path in paths:
            if self.calls.get(path, 0) > 1 or (self.seen is None and len(self.aliases[path]) > 1 and not self.any_order):
                continue  # it runs twice, or may run twice (one object under two names)
            prefixes, inside = tuple(a and a + "." for a in self.aliases[path]), {} if self.seen is None else self.seen.inside
            keep = [n for n in self.below(path) if all(name.startswith(prefixes) for name in self.names[n])]
            chosen[path] = tuple(n for n in keep if n not in inside or path in inside[n])
        return {path: keep for path, keep in chosen.items() if keep}

    def size(self, names: Iterable[str]) -> int:
        """Number of elements; ds_numel is the whole size of a parameter partitioned by zero.Init."""
        return sum(int(getattr(p, "ds_numel", None) or p.numel()) for p in map(self.parameters.__getitem__, names))

    def split(self, chosen: dict[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]] | None:
        """Opens the largest unit whose opening gives more units; None if there is none.

        Units whose opening makes no parameter persistent are preferred.
        """
        fallback = None
        for path in sorted(chosen, key=lambda p: -self.size(chosen[p])):
            finer = self.settle(piece for p in chosen for piece in (self.finer(p) if p == path else [p]))
            if len(finer) > len(chosen):
                if sum(map(len, finer.values())) == sum(map(len, chosen.values())):
                    return finer
                fallback = fallback or finer
        return fallback

    def matching(self, name: str) -> list[str]:
        """The paths that an entry of `cyclic.units` stands for: `*` and other wildcards match within one part of a path."""
        if not set(name) & set("*?["):
            return [name]
        parts = name.split(".")
        paths = [
            path
            for path in self.modules
            if self.below(path) and len(path.split(".")) == len(parts) and all(map(fnmatchcase, path.split("."), parts))
        ]
        if not paths:
            raise ValueError(f"cyclic.units has {name!r}, which fits no module with parameters: use paths from named_modules()")
        return paths

    def named(self, names: Sequence[str]) -> dict[str, tuple[str, ...]]:
        """Checks the user's `cyclic.units`."""
        known = {alias: path for path, aliases in self.aliases.items() for alias in aliases}
        paths: list[str] = []
        for name in itertools.chain(*(self.matching(name) for name in names)):
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
        """Units by first call; a unit that was not called stays behind its predecessor in registration order."""
        last, keys = -1, {}
        for path in chosen:
            last = keys[path] = last if self.seen is None else self.seen.order.get(path, last)
        return {path: chosen[path] for path in sorted(keys, key=keys.__getitem__)}

    def units(self, chosen: dict[str, tuple[str, ...]]) -> FoundUnits:
        flops = dict.fromkeys(chosen, None if self.seen is None else 0)
        if self.seen is not None:
            called = sorted(self.calls.keys() & chosen.keys(), key=self.seen.order.__getitem__)
            ends = [self.seen.before[p] for p in called[1:]] + [self.seen.flops[""]]
            starts = [0] + ends[:-1]  # the first unit counts the operations before it
            flops |= {p: end - start for p, start, end in zip(called, starts, ends, strict=True)} if called else {}
        units = [FoundUnit(p, n, self.size(n), flops[p], type(self.modules[p]).__name__) for p, n in chosen.items()]
        carried = {name for unit in units for name in unit.parameters}
        persistent = tuple(name for name in self.parameters if name not in carried)
        return FoundUnits(tuple(units), persistent, self.size(persistent), self.any_order)


def find_units(
    module: nn.Module,
    at_least: int,
    example: Example | None = None,
    names: Sequence[str] | None = None,
    seen: Trace | None = None,
    any_order: bool = False,
) -> FoundUnits:
    """The units of a model, in execution order (registration order without an example), and its persistent parameters.

    Every parameter is in exactly one unit or in `persistent`. The model is not changed; parameters may be frozen or empty.

    Args:
        at_least: the number of stages; the largest units are split into their children until there are as many units.
        example: one batch, for a trace (see `example_of`).
        names: `cyclic.units`, module paths or patterns in execution order; parameters of other modules are persistent.
        seen: a trace, in the place of the example's.
        any_order: units may run in any order, several times, and their parameters may be read outside.

    Raises:
        ValueError: not enough units, or a wrong entry in `names`.
    """
    assert at_least >= 1, f"at_least is {at_least}"
    tree = _Tree(module, trace(module, example) if seen is None and example is not None else seen, any_order)
    chosen = tree.settle(tree.collect("")) if names is None else tree.named(names)
    if names is None and list(chosen) == [""]:  # the model is one unit: open it if it has several children
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
    return tree.units(chosen if names is not None and seen is None else tree.ordered(chosen))


def why_persistent(module: nn.Module, found: FoundUnits, seen: Trace | None = None) -> dict[str, str]:
    """For each persistent parameter the reason, in words, by its name."""
    tree, reasons = _Tree(module, seen), {}
    for name in found.persistent:
        path = name.rpartition(".")[0]
        above = [path[:end] for end in range(len(path), 0, -1) if path[end : end + 1] in ("", ".")]
        others = [other for other in tree.names[name] if other != name]
        often = next((p for p in above if tree.calls.get(p, 0) > 1), None)
        if others:
            reasons[name] = f"it is also {' and '.join(map(repr, others))}"
        elif often is not None:
            reasons[name] = f"{often!r} is called {tree.calls[often]} times in a forward"
        elif seen is not None and name in seen.inside and path not in seen.inside[name]:
            reader = max(seen.inside[name], key=len, default="")
            reasons[name] = f"it is read outside {path!r}, in {reader!r}" if reader else f"it is read outside {path!r}"
        else:
            reasons[name] = f"it lies directly on {path!r}, whose parts are units" if path else "it lies directly on the model"
    return reasons


def stages(units: FoundUnits, parts: int, method: str, weights: Sequence[int] | None = None) -> tuple[tuple[int, ...], ...]:
    """Unit indices of each stage.

    Args:
        method: `cyclic.partition_method`:

            ============  =====================================================================
            `parameters`  number of elements; persistent parameters count as stage 0's
            `uniform`     number of units
            `type:REGEX`  number of units whose class name matches
            `flops`       operations of the traced example
            `auto`        `parameters`, but with a trace the first stages have enough operations (`by_memory`)
            ============  =====================================================================

        weights: for ``auto``, as of `by_memory`.
    Raises:
        ValueError: unknown method, flops without a trace, fewer units than stages.
    """
    word = method.strip().lower()
    sizes = [unit.cost_parameters + (units.persistent_cost if i == 0 else 0) for i, unit in enumerate(units.units)]
    if word == "auto":
        return by_memory(sizes, [unit.flops or 0 for unit in units.units], parts, weights)
    if word == "flops":
        if any(unit.flops is None for unit in units.units):
            raise ValueError("cyclic.partition_method is 'flops', which needs a traced example batch: use 'parameters'")
        costs = [unit.flops or 0 for unit in units.units]
    else:
        costs = sizes
    return assign([unit.type_name for unit in units.units], costs, parts, method)
