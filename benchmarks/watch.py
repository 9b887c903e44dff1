"""Measures a rank's training from outside: live activation bytes, parameter bytes, bytes received, and the order of its messages.

It uses saved-tensor hooks, a dispatch mode that sees torch.distributed's operators, the transport's counters, and the actions
of the executor. It computes none of the reported figures from a plan.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.rounds import Event
from deepspeed_cdp.analysis.activations import Tracker

# operators of torch.distributed: the argument with the size of a rank's result, and how many times each rank receives it
_PAYLOAD = {
    "allreduce_": (0, 2),
    "allreduce_coalesced_": (0, 2),
    "allgather_": (0, 1),
    "_allgather_base_": (0, 1),
    "allgather_coalesced_": (0, 1),
    "allgather_into_tensor_coalesced_": (0, 1),
    "reduce_scatter_": (1, 1),
    "_reduce_scatter_base_": (1, 1),
    "reduce_scatter_tensor_coalesced_": (1, 1),
    "broadcast_": (0, 1),
    "reduce_": (0, 1),
}
_WITHOUT_PAYLOAD = ("barrier", "monitored_barrier_")


class Live(Tracker):
    """Bytes of tensors saved by autograd, without parameters, wherever these are at the time.

    Args:
        saving: called whenever a tensor is saved.
    Attributes:
        most: the maximum since it was last set.
    """

    def __init__(self, parameters: Iterable[Tensor], saving: Callable[[], None] = lambda: None):
        super().__init__((), lambda: 0.0)
        self._parameters, self._saving, self.most = list(parameters), saving, 0

    def _pack(self, tensor: Tensor) -> Any:
        self._saving()
        key = self._key(tensor)
        return tensor if any(key == self._key(p) for p in self._parameters) else super()._pack(tensor)

    def _change(self, nbytes: int) -> None:
        self.live += nbytes
        self.most = max(self.most, self.live)


class Log:
    """A rank's messages.

    Attributes:
        at: the time step that comes next, or is under way.
        events: in program order.
    """

    def __init__(self) -> None:
        self.at = 0
        self.events: list[Event] = []

    def next_pass(self) -> None:
        """Count a pass as a time step, for engines without a plan."""
        self.at += 1

    def note(self, kind: str, nbytes: int, stream: str, peer: int) -> None:
        self.events.append(Event(self.at, kind, nbytes, stream, peer))

    # ---- this package's engines -----------------------------------------------------------------------------------------
    def follow_transport(self, transport: Any) -> None:
        """Record the messages that the transport sends, and those that it counts as landed, once a rank has waited for them."""
        push = transport.push
        for kind, count, nbytes in (
            ("push", transport.sent, transport.bytes_sent),
            ("land", transport.received, transport.bytes_received),
        ):
            for (stream, peer), messages in count.items():  # until now: so that the n-th sent is the n-th to land
                for _ in range(messages):
                    self.note(kind, nbytes[stream, peer] // messages, stream, peer)

        def pushed(stream: str, dst: int, source: Tensor, *args: Any, **kwargs: Any) -> Any:
            self.note("push", source.numel(), stream, dst)
            return push(stream, dst, source, *args, **kwargs)

        done = SimpleNamespace(wait=lambda where: None)
        transport.push = pushed
        transport.relay = lambda work, edge=None: work() or done  # in the order of the program, not beside it
        transport.bytes_received = _Counted(transport.bytes_received, self)

    def follow_ring(self, runtime: Any) -> None:
        """Time steps are the plan's logical time of the rank's present action."""
        executor = runtime.executor
        schedule, scale = executor.schedule, executor.plan.scale

        def around(do: Callable[[Any], None]) -> Callable[[Any], None]:
            def done(a: Any) -> None:
                written_for = min(executor.state.step, 1)  # all later steps run the program of step 1
                self.at = (executor.state.step - written_for) * schedule.period + a.time // scale
                do(a)

            return done

        executor.actions = {kind: around(do) for kind, do in executor.actions.items()}
        self.follow_transport(runtime.transport)

    def follow_pipe(self, runtime: Any) -> None:
        """Time steps are the position of the rank's present instruction."""
        places: dict[Any, int] = {}
        seen: set[tuple[Any, int]] = set()
        do = runtime._do

        def done(i: Any) -> None:
            if (runtime.schedule, i.step) not in seen:
                seen.add((runtime.schedule, i.step))
                places.update({x: key[0] for key, x in runtime.schedule.program(runtime.rank, i.step)})
            self.at = places[i]
            do(i)

        runtime._do = done
        if runtime.transport is not None:
            self.follow_transport(runtime.transport)

    # ---- stock engines ----------------------------------------------------------------------------------------------------
    def operators(self) -> TorchDispatchMode:
        """A context that records torch.distributed's operators."""
        return _Operators(self)


class _Counted(Counter):
    """The transport's counter of bytes by (stream, peer), which also reports each message."""

    def __init__(self, before: Counter, log: Log):
        super().__init__(before)
        self.log = log

    def __setitem__(self, edge: tuple[str, int], nbytes: int) -> None:
        if hasattr(self, "log"):
            self.log.note("land", nbytes - self[edge], *edge)
        super().__setitem__(edge, nbytes)


class _Operators(TorchDispatchMode):
    def __init__(self, log: Log):
        super().__init__()
        self.log = log

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.namespace == "c10d":
            self._note(func._schema.name.removeprefix("c10d::"), args)
        return out

    def _note(self, name: str, args: tuple) -> None:
        if name in ("send", "recv_"):
            self.log.note("push" if name == "send" else "land", _bytes(args[0]), "p2p", args[2])
            return
        if name not in _PAYLOAD and name not in _WITHOUT_PAYLOAD:
            raise ValueError(f"torch.distributed's {name} is not known here; say in benchmarks/watch.py what it hands to a rank")
        size = next(ProcessGroup.unbox(a).size() for a in args if isinstance(a, torch.ScriptObject) and _is_group(a))
        if size > 1:
            where, times = _PAYLOAD.get(name, (0, 0))
            self.log.note("collective", times * _bytes(args[where]), name, size)


def _is_group(value: torch.ScriptObject) -> bool:
    return "ProcessGroup" in str(value._type())


def _bytes(tensors: Any) -> int:
    return sum(t.numel() * t.element_size() for t in tree_leaves(tensors) if isinstance(t, Tensor))
