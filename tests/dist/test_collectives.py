"""No collective in a steady step, counted where torch.distributed would run it; bytes and memory against the plan."""

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from engine_work import Job, start, train

PUBLIC = ("all_reduce", "all_reduce_coalesced", "all_gather", "all_gather_object", "all_gather_into_tensor", "all_gather_coalesced",
          "_all_gather_base", "reduce", "reduce_scatter", "reduce_scatter_tensor", "_reduce_scatter_base", "broadcast",
          "broadcast_object_list", "barrier", "monitored_barrier", "gather", "gather_object", "scatter", "scatter_object_list",
          "all_to_all", "all_to_all_single")
METHODS = ("allreduce", "allreduce_coalesced", "allgather", "allgather_coalesced", "allgather_into_tensor_coalesced",
           "_allgather_base", "_reduce_scatter_base", "reduce", "reduce_scatter", "reduce_scatter_tensor_coalesced", "broadcast",
           "barrier", "monitored_barrier", "gather", "scatter", "alltoall", "alltoall_base")
COLLECTIVE = ("allreduce", "all_reduce", "allgather", "all_gather", "reduce_scatter", "broadcast", "barrier", "alltoall",
              "all_to_all", "gather", "scatter", "reduce")


@contextlib.contextmanager
def counting() -> Iterator[list[str]]:
    """The names of all collectives that run meanwhile: at torch.distributed, at process groups' methods, in the profiler's trace
    (c10d and gloo record there what reaches them from anywhere, C++ included).
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
    for group in (dist.ProcessGroup, dist.ProcessGroupGloo):
        for name in METHODS:
            wrap(group, name, group.__name__)
    try:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
            yield seen
    finally:
        for owner, name, stock in reversed(undo):
            setattr(owner, name, stock)
    for event in profiler.events():
        kind = event.name.lower().removeprefix("c10d::").removeprefix("gloo:").rstrip("_")
        if event.name.lower().startswith(("c10d::", "gloo:")) and kind.startswith(COLLECTIVE):
            seen.append(event.name)


def steady(rank: int, world: int, job: Job) -> dict[str, Any]:
    """Count over four steps after two; and that each of the three nets catches a collective that is there."""
    import torch.distributed as dist
    with counting() as caught:
        dist.all_reduce(torch.ones(1))
        dist.distributed_c10d._get_default_group().broadcast([torch.ones(1)], dist.BroadcastOptions()).wait()
    engine = start(job, world)
    train(engine, job, rank, 0, 2)
    ours = hasattr(engine, "cyclic_plan")
    before = dict(engine._transport.bytes_received) if ours else {}
    with counting() as seen:
        train(engine, job, rank, 2, 6)
    result: dict[str, Any] = {"caught": caught, "seen": seen}
    if ours:
        after, form = dict(engine._transport.bytes_received), engine.cyclic_plan.received_bytes(rank)
        by_kind = {"F + B": ("P", "P0", "H", "H0"), "G": ("G", "GH"), "O": ("O",)}
        got = {kind: sum(n - before.get(edge, 0) for edge, n in after.items() if edge[0] in streams)
               for kind, streams in by_kind.items()}
        scalars = sum(n - before.get(edge, 0) for edge, n in after.items() if edge[0] in ("S", "T"))
        assert sum(got.values()) + scalars == sum(after.values()) - sum(before.values()), "a stream that the closed form leaves out"
        result |= {"bytes": got, "form": {"F + B": 4 * (form["F"] + form["B"]), "G": 4 * form["G"], "O": 4 * form["O"]},
                   "scalars": scalars, "counter": engine._runtime.collectives_in_steps}
    engine.destroy()
    return result


CASES = [("mlp", "cdp-v2", 1), ("llama-tied", "cdp-v1", 2), ("llama-tied", "cdp-v2", 2), ("llama", "dp", 1), ("routed", 3, 1)]


def several(rank: int, world: int, jobs: list[Job]) -> list[dict[str, Any]]:
    return [steady(rank, world, job) for job in jobs]


def test_no_collective_in_steady_steps_and_bytes_equal_the_closed_form(pool):
    jobs = [Job(kind, rule, rounds, clip=0.3, schedule="lambda") for kind, rule, rounds in CASES]
    stock = Job("mlp", None, 1, clip=0.3, schedule="lambda")
    for rank, results in enumerate(pool.run(3, several, [*jobs, stock], timeout=120)):
        for job, result in zip(jobs, results):
            # in steps so few, flush and plan-making collectives lie outside; none may be inside
            assert result["seen"] == [] and result["counter"] == 0, (job, rank, result["seen"])
            assert result["bytes"] == result["form"] and result["form"]["F + B"] > 0, (job, rank)
            assert 0 < result["scalars"] <= 4 * 8 * (3 + 5 + 1), "a few numbers per step"
        for result in results:  # the harness sees what is there
            assert {"dist.all_reduce", "ProcessGroup.broadcast"} <= set(result["caught"])
            assert any(name.startswith("gloo:") or name.startswith("c10d::") for name in result["caught"]), result["caught"]
        assert len(results[-1]["seen"]) > 20, "stock ZeRO-3 gathers and scatters"


def memory(rank: int, world: int, job: Job) -> dict[str, Any]:
    """Bytes this rank keeps between steps and the parameters' memory between and during steps."""
    engine = start(job, world)
    runtime = engine._runtime
    live: list[int] = []
    seen_in_forward: dict[str, int] = {}

    def parameters_alive(*_: Any) -> int:
        return sum({p.data.untyped_storage().data_ptr(): p.data.untyped_storage().nbytes() for p in engine.module.parameters()}
                   .values())

    regions = {t.untyped_storage().data_ptr() for t in runtime.handoff.buffers.regions.values()}
    small = {n: p.untyped_storage().nbytes() for n, p in engine.module.named_parameters()}

    def check(*_: Any) -> None:
        """Whatever a parameter points to now is a hand-off buffer or its own one-element placeholder."""
        for name, p in engine.module.named_parameters():
            storage = p.data.untyped_storage()
            if storage.data_ptr() in regions:
                seen_in_forward[name] = 1
            else:
                assert storage.nbytes() == p.element_size(), (name, storage.nbytes())
        live.append(1)

    handles = [m.register_forward_hook(check) for m in engine.module.modules() if not list(m.children())]
    train(engine, job, rank)
    for handle in handles:
        handle.remove()
    optimizer = {(t.data_ptr(), t.numel()): t.numel() * t.element_size() for s in runtime.owner.optimizer.state.values()
                 for t in s.values() if isinstance(t, torch.Tensor)}
    result = {"buffers": runtime.handoff.buffers.nbytes(), "plan": engine.cyclic_plan.memory(rank),
              "masters": sum(m.numel() * m.element_size() for m in runtime.owner.masters.values()),
              "grads": sum(m.grad.numel() for m in runtime.owner.masters.values() if m.grad is not None),
              "optimizer": sum(optimizer.values()), "owned": sum(engine.cyclic_plan.unit(i).p_bytes for i in
                                                                 engine.cyclic_plan.members(runtime.plan.schedule.owned(rank))),
              "placeholders": small, "alive": parameters_alive(), "checks": len(live), "bound": len(seen_in_forward),
              "psi": sum(p.numel() * 4 for p in engine.module.parameters()), "count": len(small)}
    engine.destroy()
    return result


@pytest.mark.parametrize("world", [2, 4])
def test_memory_is_the_plans_and_about_one_nth(pool, world):
    """Masters and Adam's two states are 12 bytes per owned parameter; buffers are what the plan says."""
    results = pool.run(world, memory, Job("llama", "cdp-v2", steps=3), timeout=60)
    psi = results[0]["psi"]
    for rank, r in enumerate(results):
        assert r["buffers"] == sum(r["plan"].values())
        assert all(nbytes == 4 for nbytes in r["placeholders"].values()), "a released parameter keeps one element"
        assert r["alive"] == 4 * r["count"], "between steps no parameter has memory"
        assert r["checks"] > 0 and r["bound"] > 0 and r["grads"] == 0
        steps = 4 * 64  # Adam's step counts, and alignment
        assert abs(r["masters"] - r["owned"]) <= steps and abs(r["optimizer"] - 2 * r["owned"]) <= steps, rank
    # replicated: parameters, sums, masters, two states. Here: what is owned once each, plus the hand-off buffers in the plan.
    assert sum(r["masters"] for r in results) == psi
    largest = max(r["owned"] for r in results)
    for rank, r in enumerate(results):
        total = r["buffers"] + r["masters"] + r["optimizer"]
        own = 5 * largest  # sum, published copy, master, two states
        in_flight = r["plan"]["P"] + r["plan"]["G"] + r["plan"]["H"]
        assert total <= own + in_flight + 4096
        assert in_flight <= 8 * largest, (rank, in_flight / largest)  # two to three stages each of P and G, a few units more
        assert total < 5 * psi
