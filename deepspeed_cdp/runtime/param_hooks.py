"""Hooks on the module: they execute the program as units are used, and point parameters at the buffers.

Order of a unit's backward: autograd runs nodes in the reverse order of their creation. So when the gradient of unit u's output
arrives, every node of the units after it has run, and their gradients are complete. Acquiring u there also ends u+1.
"""

import itertools
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from operator import is_
from types import ModuleType, NoneType
from typing import Any, Protocol

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from deepspeed_cdp.errors import SET_ANY_ORDER
from deepspeed_cdp.model.flat_layout import FlatLayout, Slot
from deepspeed_cdp.model.lookup import holds, links
from deepspeed_cdp.model.placeholders import Placeholders, SavedView, UserPacked, is_placeholder, refuse_use
from deepspeed_cdp.plan.constants import PERSISTENT
from deepspeed_cdp.runtime.events import Events
from deepspeed_cdp.runtime.executor import Executor
from deepspeed_cdp.runtime.grad_accumulation import AFTER_DESTROY, GradAccumulation
from deepspeed_cdp.runtime.program import OutOfOrder

IDLE, FORWARD, BACKWARD, FAILED, REHEARSAL = "idle", "forward", "backward", "failed", "rehearsal"
MOST_NODES = 1000  # of a loss's graph that are searched
_innermost = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)  # not in older versions of torch
_next_node = torch.autograd._get_sequence_nr  # the number of the node that autograd creates next


def _read_elsewhere(whose: str = "") -> str:
    return (
        f"a backward read parameters{whose} that are not there: it is the second over a graph, or does not begin at the outputs "
        "of their module, or reads a tensor kept from its forward; " + SET_ANY_ORDER
    )


class Views(Protocol):
    """Tensors for parameters to point at. In C++ with ``native``."""

    def show(self) -> None:
        """Point the parameters at them."""

    def has_grads(self) -> bool:
        """Whether a parameter has a gradient."""


class Memory(Protocol):
    """Bytes of a unit whose address changes, in C++: views of them, which autograd has saved, follow."""

    bytes: torch.Tensor

    def move_to(self, flat: torch.Tensor) -> None:
        """They are those of ``flat``."""

    def take_away(self) -> None:
        """They are nowhere: reading them raises RuntimeError."""


class _Views:
    def __init__(self, parameters: list[torch.nn.Parameter], values: list[torch.Tensor]):
        self._pairs = list(zip(parameters, values))

    def show(self) -> None:
        for p, value in self._pairs:
            p.data = value

    def has_grads(self) -> bool:
        return any(p.grad is not None for p, _ in self._pairs)


def _address(x: torch.Tensor) -> int:
    """Where the values of a tensor begin, which may be sparse."""
    if x.layout is torch.sparse_coo:
        return x._values().data_ptr()
    return (x if x.layout in (torch.strided, torch.jagged) else x.values()).data_ptr()


class _Outputs:
    """Called by hooks on units' outputs, whose graph may stay longer than the engine."""

    def __init__(self, hooks: "ParamHooks"):
        self.hooks: ParamHooks | None = hooks  # None: they have been removed

    def on_grad(self, i: int) -> None:
        if self.hooks is None:
            raise ValueError(AFTER_DESTROY)
        self.hooks._on_output_grad(i)


class ParamHooks:
    """Points a module's parameters at the buffers while their unit is in use. Otherwise they are placeholders.

    Attributes:
        mode: IDLE between micro-batches and in evaluation, FORWARD inside ``engine.forward``, BACKWARD after it; FAILED from the
            first forward that raised; REHEARSAL while a forward is followed without values, when hooks do nothing.
        in_pass: the unit in whose forward or backward the model is, in training. Fused layers read it. None with ``any_order``.
        visited, called: units used in this forward, and their modules.
        accumulation: adds gradients to the running sums.
        any_order: every unit's forward is executed before the module's, and every unit's backward after it. Parameters have
            memory of their own from the first forward of a step to its end, so the script may use them as it likes. Or from
            ``hold`` to the end of the micro-batch.
        holds: it is so for this micro-batch only.
        always_resident: parameters are never placeholders.
    """

    always_resident = False
    _elsewhere = "is not there"  # a parameter outside its unit's passes

    def __init__(
        self,
        module: torch.nn.Module,
        executor: Executor,
        layouts: Mapping[int, FlatLayout],
        events: Events,
        borrowed: Container[torch.nn.Parameter] = (),
        native: ModuleType | None = None,
    ):
        """
        Args:
            layouts: by unit index, PERSISTENT included.
            borrowed: parameters that GatheredParameters has given out.
            native: what C++ does (native/autograd.cpp); None: Python does all.
        """
        self.executor, self.layouts, self.events, self.mode, self.any_order = executor, layouts, events, IDLE, False
        parameters = dict(module.named_parameters())
        self.slots: dict[int, list[tuple[torch.nn.Parameter, Slot]]] = {
            i: [(parameters[s.name], s) for s in layout.slots] for i, layout in layouts.items()
        }
        self.visited: set[int] = set()
        self._native = native
        self.accumulation = GradAccumulation(self.slots, executor.grad_sums, executor.empty_sums, self, native)
        self.called: set[str] = set()
        self._part_handles: dict[torch.nn.Module, list[Any]] = {}  # of modules that ran without gradients in a forward
        self.in_pass: int | None = None
        self._unit_of = {p: i for i, pairs in self.slots.items() for p, _ in pairs}
        self._borrowed_units: set[int] = set()  # acquired by GatheredParameters inside this forward
        self._bound: dict[int, torch.Tensor] = {}
        self._copies: dict[int, torch.Tensor] = {}  # with any_order, each unit's parameters
        self.holds = self._stays = self._has_held = False  # the last: this micro-batch, or the one before
        self._cache: dict[tuple[int, int], Views] = {}  # by unit and address
        self._rebuilt: dict[tuple[SavedView, int], torch.Tensor] = {}
        self._current, self._low, self._high = PERSISTENT, 0, 0  # the unit bound last; while tensors are saved, its addresses
        self._saving = torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)
        self._forbids = False  # reads of placeholders
        self._is_saving = self._saving_borrowed = False  # the second: ``borrow`` pushed them
        # by module, how many of autograd's nodes it creates behind its outputs; None: it needs hooks of saved tensors
        self._behind: dict[str, int | None] = {}
        # numbers of autograd's nodes: the one after the last that saved a parameter, or a view of one; the one after the newest
        # output's; the module's first, if it runs without hooks
        self._last_saved, self._after_outputs, self._first_node = 0, 0, -1
        self._lasting: dict[int, torch.Tensor] = {}  # copies of units' parameters, until their backward in this micro-batch
        self._outer: tuple[Callable[..., Any], Callable[..., Any]] | None = None  # the user's own, while ours are innermost
        self._memory: dict[int, Memory] = {}
        if native is not None and not self.always_resident:
            units = {i: executor.plan.unit(i) for i in layouts if i != PERSISTENT}
            self._memory = {
                i: native.Memory(unit.p_bytes, executor.buffers.arena, _read_elsewhere(f" of {unit.name!r}"))
                for i, unit in units.items()
            }
        self._moving = {i: self._views_of(i, memory.bytes) for i, memory in self._memory.items()}
        empty = Placeholders()
        self._empty = {p: empty(p) for pairs in self.slots.values() for p, _ in pairs}
        self._forbidden = empty.elements  # to be read in a backward, with ``_memory``
        # the same by unit: looking up a parameter calls a function of Python, its hash
        self._placeholders = {i: self._views(i, [self._empty[p] for p, _ in pairs]) for i, pairs in self.slots.items()}
        self._without_sums = {i for i, layout in layouts.items() if not layout.g_bytes}
        self._outputs = _Outputs(self)
        self._output_nodes: list[Any] = []  # of the last forward's outputs in the graph
        self._root, self.borrowed = module, borrowed
        self._handles = [module.register_forward_pre_hook(self._root_pre, prepend=True)]
        for m in module.modules():
            if m is module or m._parameters:
                self._handles += [
                    m.register_state_dict_pre_hook(self._state_dict_pre),
                    m.register_load_state_dict_pre_hook(self._load_state_dict_pre),
                ]
        self._handles.append(module.register_forward_hook(self._root_post))
        modules = dict(module.named_modules())
        self._find_links()
        persistent = {id(p) for p, _ in self.slots.get(PERSISTENT, ())}
        self._handles += [
            m.register_forward_pre_hook(self._root_pre, prepend=True)
            for m in modules.values()
            if m is not module and any(id(p) in persistent for p in m.parameters(recurse=False))
        ]
        for i in layouts:
            if i != PERSISTENT:
                paths = executor.plan.unit(i).modules
                for path in paths:
                    # before all other hooks, which may read the parameters (torch.nn.utils.weight_norm)
                    self._handles += [
                        modules[path].register_forward_pre_hook(self._pre(i, path), prepend=True),
                        modules[path].register_forward_hook(self._post(i, path, path == paths[-1]), with_kwargs=True),
                    ]

    def remove(self, refuse: bool = True) -> None:
        """Remove the hooks. Parameters that are placeholders stay so, and using them raises.

        Args:
            refuse: False if no parameter is one.
        """
        for handle in (*self._handles, *itertools.chain(*self._part_handles.values())):
            handle.remove()
        self.accumulation.remove()
        self._allow_reads()
        self._output_nodes.clear()
        self._outputs.hooks = None
        if self._handles and refuse:
            refuse_use([m for m in self._root.modules() if m is self._root or m._parameters], self._empty)
        self._handles.clear()

    def released(self, p: torch.nn.Parameter) -> bool:
        """Whether the parameter is a placeholder now."""
        return is_placeholder(p, self._empty)

    def __deepcopy__(self, memo: Any) -> Any:
        raise ValueError(
            "the module was copied while it belongs to a cyclic engine, which keeps its parameters; copy it before "
            "deepspeed.initialize(), and fill the copy with load_state_dict(engine.module_state_dict()) or inside "
            "deepspeed.zero.GatheredParameters"
        )

    def _state_dict_pre(self, module: torch.nn.Module, *_: Any) -> None:
        if self.holds or any(self.released(p) for p in module.parameters(recurse=module is self._root)):
            self.events.used_outside("was asked for its state_dict()")

    def _load_state_dict_pre(self, module: torch.nn.Module, *_: Any) -> None:
        if not all(p in self.borrowed for p in module.parameters(recurse=module is self._root)):
            self.events.used_outside("was given a state dict")

    # ---- parameters -----------------------------------------------------------------------------------------------------
    def bind(self, i: int, flat: torch.Tensor, moves: bool = False) -> None:
        """Make the unit's parameters views of ``flat`` (uint8, 1-D).

        Args:
            moves: another ``flat`` takes its place in the same micro-batch; views that autograd saves then follow, in C++.
        """
        if self._bound.get(i) is flat:
            return
        if moves and i in self._memory:
            self._memory[i].move_to(flat)
            views = self._moving[i]
        else:
            key = i, flat.data_ptr()
            views = self._cache.get(key) or self._cache.setdefault(key, self._views_of(i, flat))
        views.show()
        self._bound[i] = flat
        if i != PERSISTENT:  # persistent parameters stay where they are until the backward is over
            self._current = i
            if self._is_saving:
                self._find_current()

    def _find_current(self) -> None:
        """Find the addresses of the unit bound last, which saved tensors are compared with."""
        flat = self._bound.get(self._current) if self._current != PERSISTENT else None
        self._low = self._high = 0
        if flat is not None:
            self._low, self._high = flat.data_ptr(), flat.data_ptr() + flat.numel()

    def _views_of(self, i: int, flat: torch.Tensor) -> Views:
        return self._views(i, [s.value(flat) for _, s in self.slots[i]])

    def _views(self, i: int, values: list[torch.Tensor]) -> Views:
        parameters = [p for p, _ in self.slots[i]]
        if self._native is None or any(type(p) is not torch.nn.Parameter for p in parameters):
            return _Views(parameters, values)
        return self._native.Views(parameters, values)

    def unbind(self, i: int) -> None:
        """Make the unit's parameters placeholders: right shape and dtype, no memory, cannot be written, nan if read."""
        if not self.any_order and self._bound.pop(i, None) is not None:
            if i == self.in_pass:
                self.in_pass = None
            if i == self._current and self._is_saving:
                self._low = self._high = 0
            if self.mode == FORWARD and i in self._lasting:
                self._memory[i].move_to(self._lasting[i])
            else:
                self._take_away(i)
        if i in self._without_sums:
            self._drop_untrained_grads(i)

    def _take_away(self, i: int) -> None:
        if i in self._memory:
            self._memory[i].take_away()
        self._placeholders[i].show()

    def _drop_untrained_grads(self, i: int) -> None:
        """Clear the gradients of a unit without sums: the optimizer has none of its parameters."""
        for p, _ in self.slots[i]:
            p.grad = None

    def release_all(self) -> None:
        """Make every parameter a placeholder."""
        for views in self._placeholders.values():
            views.show()
        for memory in self._memory.values():
            memory.take_away()
        self.drop_grads()
        self._bound.clear()
        self._lasting.clear()
        self._low = self._high = 0
        self.in_pass = None

    def forget_views(self) -> None:
        """Drop cached views, whose memory may have been freed."""
        self._cache.clear()
        self.accumulation.forget_views()
        self._rebuilt.clear()

    def add_grads(self, i: int, grad_sum: torch.Tensor, empty: bool) -> None:
        """Add the unit's gradients, now complete, to its running sum; see ``Events.grads_complete``."""
        if i != PERSISTENT and i not in self.visited and not self.any_order:
            self._check_unused(i)
        self.accumulation.add(i, grad_sum, empty)

    def _check_unused(self, i: int) -> None:
        """Raises ValueError if parameters of the unit, whose modules were not called, have gradients."""
        for p, s in self.slots[i]:
            if p.grad is not None and s.sum_offset >= 0:
                raise ValueError(
                    f"parameter {s.name!r} got a gradient in step {self.executor.global_step}, but its module was not called, so "
                    f"it was read outside the module's forward, where it {self._elsewhere}; {SET_ANY_ORDER}"
                )

    # ---- a micro-batch --------------------------------------------------------------------------------------------------
    @contextmanager
    def rehearsal(self) -> Iterator[None]:
        """Around a forward of the module without values: hooks do nothing."""
        assert self.mode == IDLE
        self.mode = REHEARSAL
        try:
            yield
        finally:
            self.mode = IDLE

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Around the module's forward in training.

        Raises:
            ValueError: the forward before has had no backward, or a parameter has been replaced.
        """
        self._check_links()
        if self.mode == BACKWARD and not self.any_order:
            self.events.order_needed(
                "engine.forward() came again before the backward of the forward before it (if that raised an error, restart from "
                "the last checkpoint)"
            )
        if self.mode == FAILED:
            raise ValueError(
                f"a forward of step {self.executor.global_step} ended in an exception, and its neighbours wait for "
                "the rest of it; start again from the last checkpoint instead of catching the exception"
            )
        if self.mode == IDLE:
            self._begin_forward()
        self.mode = FORWARD
        try:
            with nullcontext() if _innermost else self._saving:
                yield
        except BaseException:
            self.mode = FAILED
            raise
        finally:
            self._end_saving()
            self.in_pass = None
        self.executor.end_forward()
        self.mode = BACKWARD

    def check_late_gradients(self) -> None:
        """Raises ValueError if a backward has gone on after a held micro-batch was over: its hooks could not tell."""
        if not self._has_held:
            return
        self._has_held = False
        for pairs in self.slots.values():
            for p, s in pairs:
                if s.sum_offset >= 0 and p.grad is not None:
                    raise ValueError(
                        f"parameter {s.name!r} got a gradient in step {self.executor.global_step} after the micro-batch's "
                        "backward was over: each forward has one backward (add up losses, and call engine.backward() once)"
                    )

    def _begin_forward(self) -> None:
        self.check_late_gradients()
        self.executor.begin_round()
        if self.any_order:
            self._receive_all()
        elif PERSISTENT in self.layouts:
            self.bind(PERSISTENT, self.executor.params[PERSISTENT])
        self.visited.clear()
        self.called.clear()

    def drop_grads(self) -> None:
        """Drop the gradients that have not been added to sums."""
        for pairs in self.slots.values():
            for p, _ in pairs:
                p.grad = None

    def begin_outside(self) -> None:
        """Begin a micro-batch without a forward of the root: the script calls its parts. With ``any_order``, or ``hold`` next."""
        assert self.mode == IDLE
        self._begin_forward()
        self.executor.end_forward()
        self.mode = BACKWARD

    def _receive_all(self) -> None:
        """Execute every unit's forward, and copy its parameters."""
        for i in self.layouts:
            if i != PERSISTENT:  # it has arrived
                self.executor.acquire(i, False)
            self._copies[i].copy_(self.executor.params[i])
            if i != PERSISTENT:
                self.executor.release(i, False)
            self.bind(i, self._copies[i])

    def keep_all(self, values: Mapping[int, torch.Tensor] | None = None) -> None:
        """From now on ``any_order``.

        Args:
            values: in the middle of a micro-batch, memory with each unit's parameters (uint8, 1-D), of the version that it reads.
        """
        self.any_order, self.in_pass = True, None
        for i in self.layouts:
            nbytes, device = self.executor.plan.unit(i).p_bytes, self.executor.buffers.arena.device
            self._copies[i] = torch.empty(nbytes, dtype=torch.uint8, device=device) if values is None else values[i]
            if values is not None:
                self.bind(i, values[i], moves=True)

    def hold(self, stays: bool) -> None:
        """``any_order`` to the end of this micro-batch, from inside its forward or after it. Other ranks do not notice.

        Args:
            stays: ``keep_all`` then, for later micro-batches.
        """
        self._stays = stays
        self._end_saving()
        self.executor.end_forward()
        self.any_order, self.holds, self.in_pass = True, True, None
        self._bind_for_backward()

    def _bind_for_backward(self) -> None:
        for i, flat in self.executor.pull_backward().items():
            self.bind(i, flat, moves=True)

    def _end_hold(self) -> None:
        self.any_order = self.holds = False
        self._has_held = True
        for i in list(self._bound):
            self.unbind(i)
        self.forget_views()
        if self._stays:
            self.keep_all()

    @property
    def all_there(self) -> bool:
        """Whether every parameter is there, in the middle of a step."""
        return self.any_order and bool(self._bound)

    def _find_links(self) -> None:
        self._links = tuple(zip(*links(self._root))) or ((), (), ())

    def _check_links(self) -> None:
        places, names, values = self._links
        if all(map(is_, map(dict.get, places, names), values)):
            return
        for name, p in self._root.named_parameters():
            if p not in self._empty:
                raise ValueError(
                    f"parameter {name!r} was put into the model after deepspeed.initialize(), so it would not be "
                    "trained; do that (resize_token_embeddings(), say) before"
                )
        self._find_links()  # only rearranged

    def end_backward(self) -> None:
        """The micro-batch's gradients are complete: send the rest of the sums.

        Raises:
            ValueError: there was no forward, or this is its second backward.
        """
        self.check_forward()
        self._allow_reads()
        self._output_nodes.clear()  # they keep hooks of this object alive, and Python does not see that circle
        self.executor.end_round()
        self.mode, self.in_pass = IDLE, None
        if self.holds:
            self._end_hold()
        for i in self._lasting:  # perhaps no pass of the backward was theirs
            if i not in self._bound:
                self._take_away(i)
        self._lasting.clear()
        for i in self.visited:  # autograd's order excludes it, but a gradient must not be lost silently
            for p, s in self.slots[i] if self._placeholders[i].has_grads() else ():
                if s.sum_offset >= 0 and p.grad is not None:
                    raise ValueError(
                        f"the gradient of {s.name!r} in step {self.executor.global_step} came after its sum had been "
                        f"passed on, so it would be lost; list modules in cyclic.units, and leave "
                        f"{self.executor.plan.unit(i).name!r} out"
                    )

    def absent_parameter(self, loss: torch.Tensor) -> str:
        """The name of a parameter that is not there now, and that the loss depends on other than through the forward's outputs.

        It may have been read while it was there. Empty if there is none among the first nodes of the loss's graph.
        """
        seen, ahead = {*self._output_nodes}, [loss.grad_fn]
        while ahead and len(seen) < MOST_NODES:
            node = ahead.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            p = getattr(node, "variable", None)
            if p in self._unit_of and self.released(p):
                return next(s.name for q, s in self.slots[self._unit_of[p]] if q is p)
            ahead += [following for following, _ in node.next_functions]
        return ""

    def check_forward(self) -> None:
        """Raises ValueError unless a forward waits for its backward."""
        if self.mode != BACKWARD:
            raise self._no_forward()

    def _no_forward(self) -> ValueError:
        return ValueError(
            f"a backward of step {self.executor.global_step} came without a training forward of its own: each "
            "forward has one backward (add up losses, and call engine.backward() once), and in eval() mode and "
            "under no_grad() there is none (call engine.train() and engine(...) first)"
        )

    def _enter_forward(self, i: int) -> None:
        self.visited.add(i)
        try:
            self.executor.acquire(i, False)
        except OutOfOrder as error:
            self.events.order_needed(str(error), alone=True)
        else:
            self.bind(i, self.executor.params[i], moves=True)

    def borrow(self, parameters: Iterable[torch.nn.Parameter]) -> bool:
        """Acquire parameters for a function other than their module's forward (a fused head and loss, for example).

        It executes that module's pass of the plan. Returns False, and does nothing, outside a training forward.

        Raises:
            ValueError: they belong to several units.
        """
        if self.mode == BACKWARD and not self.any_order and any(map(self.released, parameters := list(parameters))):
            self.events.order_needed("GatheredParameters came between a forward and its backward")
        if self.mode != FORWARD or self.any_order:
            return False
        parameters = list(parameters)
        units = sorted({self._unit_of[p] for p in parameters if self.released(p)} | self._borrowed_units)
        if len(units) > 1:
            names = " and ".join(repr(self.executor.plan.unit(i).name) for i in units[:2])
            raise ValueError(
                f"GatheredParameters inside the forward of step {self.executor.global_step} has parameters of "
                f"{names} at once; gather one module's at a time, or list the other modules in cyclic.units"
            )
        for i in set(units) - self._borrowed_units:
            self._enter_forward(i)
            self._borrowed_units.add(i)
        if units or any(self._unit_of[p] == self.in_pass for p in parameters):  # else it is between two modules of a merged unit
            # kept or not: no output of the parameters' module begins their backward, saved tensors do
            self._saving_borrowed = self._begin_saving() or self._saving_borrowed
        return True

    def give_back(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Undo ``borrow``. Gradients may come later."""
        if self._saving_borrowed:
            self._end_saving()
        for i in sorted(self._borrowed_units & {self._unit_of[p] for p in parameters}):
            self._borrowed_units.discard(i)
            self.executor.release(i, False)

    def begin_backward(self) -> None:
        """Until its end placeholders cannot be read, in C++: what autograd saves of units without hooks is not looked after."""
        if self._native is not None and self._memory and not self._forbids and not self.any_order:
            self._forbids = True
            for element in self._forbidden:
                self._native.forbid_reads(element, _read_elsewhere())

    def _allow_reads(self) -> None:
        if self._native is not None and self._forbids:
            self._forbids = False
            for element in self._forbidden:
                self._native.allow_reads(element)

    def _enter_backward(self, i: int) -> None:
        if self.mode != BACKWARD or self.any_order or self.in_pass == i:
            return
        self.begin_backward()
        self.executor.acquire(i, True)
        self.bind(i, self.executor.params[i], moves=True)
        self.in_pass = i

    def prepare_backward_read(self, i: int) -> None:
        """A backward reads the unit's parameters.

        Raises:
            ValueError: it is the second over a graph that was retained.
        """
        if self.in_pass == i:
            return
        self._enter_backward(i)
        if i not in self._bound:
            raise self._no_forward()

    def _on_output_grad(self, i: int) -> None:
        if self.mode == IDLE:  # a second backward over a graph that was retained
            raise self._no_forward()
        if self.mode == FORWARD:  # torch.autograd.grad inside it
            self.begin_backward()
        self._enter_backward(i)

    def _begin_saving(self, path: str = "") -> bool:
        """Push the saved-tensor hooks, if they are not active, and the module needs them. Returns whether this call did."""
        if self._is_saving or not _innermost:
            return False
        self._outer, self._last_saved = _innermost(True), 0
        if not self._outer and self._behind.get(path) is not None:
            self._first_node = _next_node()
            return False
        if not self._outer or "checkpoint" not in (
            getattr(self._outer[0], "__module__", "") or ""
        ):  # a checkpoint, which saves nothing
            self._saving.__enter__()
            self._is_saving = True
            self._find_current()
        return self._is_saving

    def _end_saving(self) -> None:
        if self._is_saving:
            self._saving.__exit__(None, None, None)
            self._is_saving = self._saving_borrowed = False

    def _learn(self, i: int, path: str) -> None:
        """Find out whether gradients of the module's outputs come before any read of its parameters: then it needs no hooks.

        Autograd runs nodes in the reverse order of their creation. So an output comes first that is not older than the last
        node that saved a parameter. Views do not count: if one is changed in place, its node leaves the graph.

        A later forward without hooks may create other nodes behind its outputs. Then the parameters stay for this micro-batch,
        and the module has hooks from the next one on.
        """
        if self._native is None:
            return
        behind, first, self._first_node = _next_node() - self._after_outputs, self._first_node, -1
        if self._is_saving:
            if self._after_outputs:
                self._behind.setdefault(path, behind if self._last_saved <= self._after_outputs else None)
        elif behind and first not in (-1, _next_node()) and behind != self._behind[path]:
            self._behind[path] = None
            self._lasting[i] = self._bound[i].clone()

    def _between_passes(self) -> bool:
        """Whether a forward waits for its backward, and this is not activation checkpointing, which calls modules in it."""
        return self.mode == BACKWARD and not self.any_order and torch._C._current_graph_task_id() == -1

    # torch.compile traces a module's hooks, too; these must run as Python
    @torch.compiler.disable
    def _root_pre(self, module: torch.nn.Module, args: Any) -> None:
        if self.mode == IDLE:
            self.events.used_outside("was called")
        elif self._between_passes():
            self.events.order_needed("the module was called between a forward and its backward")

    @torch.compiler.disable
    def _root_post(self, module: torch.nn.Module, args: Any, output: Any) -> Any:
        """With several rounds, give every output a tensor of its own.

        For ``loss.backward()`` DeepSpeed divides by the rounds in a hook on each output. A loss computed from another output, as
        in Hugging Face models, would be divided twice. So does ZeRO-3.
        """
        if self.mode != FORWARD:
            return None
        leaves, spec = tree_flatten(output)
        self._output_nodes = [x.grad_fn for x in leaves if isinstance(x, torch.Tensor)]
        if self.executor.schedule.rounds == 1:
            return None
        own = [x.view_as(x) if isinstance(x, torch.Tensor) and x.grad_fn is not None else x for x in leaves]
        return tree_unflatten(own, spec)

    def _pre(self, i: int, path: str) -> Callable[..., None]:
        kept = self.executor.plan.kept(i)

        @torch.compiler.disable
        def hook(module: torch.nn.Module, args: Any) -> None:
            if self.any_order and self.mode != IDLE:
                return
            if self.mode == FORWARD:
                if self.in_pass != i or path in self.called:
                    self._enter_forward(i)
                    self.in_pass = None if self.any_order else i
                self.called.add(path)
                if self.any_order:  # from now on
                    return
                if not kept:
                    self._begin_saving(path)
                if not torch.is_grad_enabled():
                    self._enter_through_parts(i, module)
            elif self.mode == IDLE:
                self.events.used_outside("was called")
            elif self._between_passes():
                self.events.order_needed(f"{path!r} was called between a forward and its backward")
            else:
                self._enter_backward(i)  # activation checkpointing runs the forward again
                if handles := self._part_handles.get(module):  # through the module itself, so its parts need no hooks
                    for handle in handles:
                        handle.remove()
                    handles.clear()

        return hook

    def _enter_through_parts(self, i: int, module: torch.nn.Module) -> None:
        """Let each part of the module begin the unit's backward: an autograd.Function may call parts alone (Reformer's does)."""
        if module in self._part_handles:
            return

        @torch.compiler.disable
        def hook(part: torch.nn.Module, args: Any) -> None:
            self._enter_backward(i)  # nothing unless this is a backward

        parts = [m for m in module.modules() if m is not module]
        self._part_handles[module] = [m.register_forward_pre_hook(hook, prepend=True) for m in parts]

    def _post(self, i: int, path: str, last: bool) -> Callable[..., Any]:
        @torch.compiler.disable
        def hook(module: torch.nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
            if self.any_order or self.mode in (IDLE, REHEARSAL):
                return None
            output = self._hook_outputs(i, (args, kwargs), output)
            if self.mode == FORWARD:
                self._learn(i, path)
                self._end_saving()
                if last:
                    self.executor.release(i, False)
                    self.in_pass = None
            return output

        return hook

    def _hook_outputs(self, i: int, args: Any, output: Any) -> Any:
        """Hook the unit's outputs, so that their gradients begin its backward; copy outputs that lie in its buffer."""
        flat, on_grad = self._bound[i], self._outputs.on_grad
        if self._native is not None:
            self._after_outputs = self._native.hook_output(output, args, flat, on_grad, i)
            if self._after_outputs >= 0:
                return output
        low, high = flat.data_ptr(), flat.data_ptr() + flat.numel()
        leaves, spec = ([output], None) if isinstance(output, torch.Tensor) else tree_flatten(output)
        copied, after, unknown = False, 0, False
        for at, x in enumerate(leaves):
            if not isinstance(x, torch.Tensor):
                unknown |= not (isinstance(x, (int, float, str, NoneType)) or holds(args, x))
            elif not holds(args, x):
                if low <= _address(x) < high:
                    leaves[at] = x = x.clone()
                    copied = True
                if not x.requires_grad:
                    continue
                if self._native is None or x.is_leaf:  # a hook of C++ on a leaf drops the hooks that it has
                    x.register_hook(lambda grad: on_grad(i))
                    continue
                self._native.before_grad(x, on_grad, i)
                if (node := x.grad_fn) is not None and not x._is_view():
                    after = max(after, 1 + node._sequence_nr())
        self._after_outputs = 0 if unknown else after  # tensors inside of unknown objects have no hooks
        return output if not copied else leaves[0] if spec is None else tree_unflatten(leaves, spec)

    # ---- tensors that autograd saves, of units that are not kept after the forward -----------------------------------------
    def _pack(self, x: torch.Tensor) -> torch.Tensor | SavedView | UserPacked:
        pointer = _address(x)
        if self._low <= pointer < self._high:
            self._last_saved = _next_node()
            if x.layout is not torch.strided:
                return x.clone()
            return SavedView(self._current, pointer - self._low, x.shape, x.stride(), x.dtype)
        return UserPacked(self._outer[0](x), self._outer[1]) if self._outer else x

    def _unpack(self, x: torch.Tensor | SavedView | UserPacked) -> torch.Tensor:
        if isinstance(x, UserPacked):
            return x.unpack(x.packed)
        if not isinstance(x, SavedView):
            return x
        self.prepare_backward_read(x.unit)
        flat = self._bound[x.unit]
        key = (x, flat.data_ptr())
        view = self._rebuilt.get(key)
        if view is None:
            size = x.dtype.itemsize
            typed = flat[x.offset : x.offset + (flat.numel() - x.offset) // size * size].view(x.dtype)
            view = self._rebuilt[key] = torch.as_strided(typed, x.shape, x.stride)
        return view
