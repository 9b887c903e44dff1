"""Counts the collectives and bytes of steady training steps."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from support.engine_work import Job, start, train

PUBLIC = (
    "all_reduce",
    "all_reduce_coalesced",
    "all_gather",
    "all_gather_object",
    "all_gather_into_tensor",
    "all_gather_coalesced",
    "_all_gather_base",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "_reduce_scatter_base",
    "broadcast",
    "broadcast_object_list",
    "barrier",
    "monitored_barrier",
    "gather",
    "gather_object",
    "scatter",
    "scatter_object_list",
    "all_to_all",
    "all_to_all_single",
)
METHODS = (
    "allreduce",
    "allreduce_coalesced",
    "allgather",
    "allgather_coalesced",
    "allgather_into_tensor_coalesced",
    "_allgather_base",
    "_reduce_scatter_base",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor_coalesced",
    "broadcast",
    "barrier",
    "monitored_barrier",
    "gather",
    "scatter",
    "alltoall",
    "alltoall_base",
)


class _Operators(TorchDispatchMode):
    """Notes every c10d operator: the engine's transport has no other than its own backend, which the wrapped methods see."""

    def __init__(self, seen: list[str]):
        super().__init__()
        self.seen = seen

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def counting() -> Iterator[list[str]]:
    """The names of all collectives that run meanwhile: at torch.distributed, at the methods of process groups and backends, and
    at the dispatcher, where a ProcessGroup's methods arrive as c10d operators. (Not torch.profiler: it crashes when a gloo
    message is under way as it ends, as hand-offs are.)
    """
    import torch.distributed as dist
    from torch.distributed import distributed_c10d as c10d

    seen: list[str] = []
    undo: list[tuple[Any, str, Any]] = []

    def wrap(owner: Any, name: str, label: str) -> None:
        if name not in vars(owner):  # what a class inherits is wrapped where it is defined
            return
        stock = getattr(owner, name)

        def counted(*args: Any, **kwargs: Any) -> Any:
            seen.append(f"{label}.{name}")
            return stock(*args, **kwargs)

        undo.append((owner, name, vars(owner)[name]))
        setattr(owner, name, counted)

    for module in (dist, c10d):
        for name in PUBLIC:
            wrap(module, name, "dist")
    for group in (dist.ProcessGroup, torch._C._distributed_c10d.Backend, dist.ProcessGroupGloo):
        for name in METHODS:
            wrap(group, name, group.__name__)
    try:
        with _Operators(seen):
            yield seen
    finally:
        for owner, name, stock in reversed(undo):
            setattr(owner, name, stock)


def steady(rank: int, world: int, job: Job) -> dict[str, Any]:
    """Count over four steps after two; and that each of the three nets catches a collective that is there."""
    import torch.distributed as dist

    with counting() as caught:
        dist.all_reduce(torch.ones(1))
        group = dist.distributed_c10d._get_default_group()
        group.broadcast([torch.ones(1)], dist.BroadcastOptions()).wait()
        group._get_backend(torch.device("cpu")).broadcast(torch.ones(1), 0).wait()
    engine = start(job, world)
    train(engine, job, rank, 0, 3)
    ours = hasattr(engine, "cyclic_plan")
    before = dict(engine._transport.bytes_received) if ours else {}
    with counting() as seen:
        train(engine, job, rank, 3, 7)
    result: dict[str, Any] = {"caught": caught, "seen": seen}
    if ours:
        after, form = dict(engine._transport.bytes_received), engine.cyclic_plan.received_bytes(rank)
        by_kind = {"F + B": ("P", "P0", "W0"), "G": ("G0",), "O": ("G",)}
        got = {
            kind: sum(n - before.get(edge, 0) for edge, n in after.items() if edge[0] in streams)
            for kind, streams in by_kind.items()
        }
        scalars = sum(n - before.get(edge, 0) for edge, n in after.items() if edge[0] in ("S", "T"))
        assert sum(got.values()) + scalars == sum(after.values()) - sum(before.values()), "a stream the closed form lacks"
        result |= {
            "bytes": got,
            "form": {"F + B": 4 * (form["F"] + form["B"]), "G": 4 * form["G"], "O": 4 * form["O"]},
            "scalars": scalars,
            "counter": engine._runtime.counters.collectives(),
        }
    engine.destroy()
    return result


def several(rank: int, world: int, jobs: list[Job]) -> list[dict[str, Any]]:
    return [steady(rank, world, job) for job in jobs]
