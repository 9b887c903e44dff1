"""No collective in a steady step, counted where torch.distributed would run it; bytes and memory against the plan."""

from typing import Any

import pytest
import torch

from deepspeed_cdp.plan.constants import DIFFERENCE, OPTIONS
from deepspeed_cdp.runtime.param_hooks import REHEARSAL
from support import models
from support.collectives import several
from support.engine_work import Job, start, train

KEEP = {"keep_after_forward": True}
CASES = [("mlp", "cdp-v2", 1), ("llama-tied", "cdp-v1", 2), ("llama-tied", "cdp-v2", 2), ("llama", "dp", 1), ("routed", 3, 1)]


def test_no_collective_in_steady_steps_and_bytes_equal_the_closed_form(pool):
    jobs = [Job(kind, rule, rounds, clip=0.3, schedule="lambda") for kind, rule, rounds in CASES]
    stock = Job("mlp", None, 1, clip=0.3, schedule="lambda")
    for rank, results in enumerate(pool.run(3, several, [*jobs, stock], timeout=240)):
        for job, result in zip(jobs, results):
            # in steps so few, flush and plan-making collectives lie outside; none may be inside
            assert result["seen"] == [] and result["counter"] == 0, (job, rank, result["seen"])
            assert result["bytes"] == result["form"] and result["form"]["F + B"] > 0, (job, rank)
            assert 0 < result["scalars"] <= 4 * 8 * (2 * 3 + 5 + DIFFERENCE + OPTIONS + 1), "a few numbers per step"
        for result in results:  # the harness sees what is there
            assert {"dist.all_reduce", "ProcessGroup.broadcast", "Backend.broadcast"} <= set(result["caught"]), result["caught"]
            assert any(name.startswith("c10d.") for name in result["caught"]), result["caught"]
        assert len(results[-1]["seen"]) >= 4 * 3, "stock ZeRO-3 gathers and scatters"


def memory(rank: int, world: int, job: Job) -> dict[str, Any]:
    """Bytes this rank keeps between steps and the parameters' memory between and during steps."""
    torch.manual_seed(7)
    engine = start(job, world, models.MLP(width=8, blocks=16) if job.kind == "mlp" else None)
    runtime = engine._runtime
    live: list[int] = []
    seen_in_forward: dict[str, int] = {}

    def parameters_alive(*_: Any) -> int:
        return sum(
            {p.data.untyped_storage().data_ptr(): p.data.untyped_storage().nbytes() for p in engine.module.parameters()}.values()
        )

    storages = [t.untyped_storage() for t in runtime.executor.buffers.regions.values()]
    regions = [range(s.data_ptr(), s.data_ptr() + s.nbytes()) for s in storages]
    small = {n: p.untyped_storage().nbytes() for n, p in engine.module.named_parameters()}

    def check(*_: Any) -> None:
        """Whatever a parameter points to now is a hand-off buffer or its own one-element placeholder."""
        if runtime.param_hooks.mode == REHEARSAL:
            return
        for name, p in engine.module.named_parameters():
            storage = p.data.untyped_storage()
            if any(storage.data_ptr() in region for region in regions):
                seen_in_forward[name] = 1
            else:
                assert storage.nbytes() == p.element_size(), (name, storage.nbytes())
        live.append(1)

    handles = [m.register_forward_hook(check) for m in engine.module.modules() if not list(m.children())]
    train(engine, job, rank)
    for handle in handles:
        handle.remove()
    optimizer = {
        (t.data_ptr(), t.numel()): t.numel() * t.element_size()
        for s in runtime.owner.optimizer.state.values()
        for t in s.values()
        if isinstance(t, torch.Tensor)
    }
    result = {
        "buffers": runtime.executor.buffers.nbytes(),
        "plan": engine.cyclic_plan.memory(runtime.executor.rank),
        "masters": sum(m.numel() * m.element_size() for m in runtime.owner.masters.values()),
        "grads": sum(m.grad.numel() for m in runtime.owner.masters.values() if m.grad is not None),
        "optimizer": sum(optimizer.values()),
        "owned": sum(engine.cyclic_plan.unit(i).p_bytes for i in engine.cyclic_plan.members(runtime.plan.schedule.owned(rank))),
        "placeholders": small,
        "alive": parameters_alive(),
        "checks": len(live),
        "bound": len(seen_in_forward),
        "psi": sum(p.numel() * 4 for p in engine.module.parameters()),
        "count": len(small),
        "kept": len(runtime.owner.masters),
    }
    engine.destroy()
    return result


def test_with_keep_after_forward_fewer_bytes_come_and_they_equal_the_closed_form(pool):
    jobs = [Job("mlp", "cdp-v2", 2, cyclic=cyclic) for cyclic in ({}, KEEP)]
    results = pool.run(4, several, jobs, timeout=240)
    for rank, (usual, keeping) in enumerate(results):
        assert usual["bytes"] == usual["form"] and keeping["bytes"] == keeping["form"], rank
        assert keeping["seen"] == [] and keeping["bytes"]["F + B"] < usual["bytes"]["F + B"]
        others = [{k: v for k, v in one["bytes"].items() if k != "F + B"} for one in (keeping, usual)]
        assert others[0] == others[1]


@pytest.mark.parametrize(
    ("world", "kind", "cyclic"), [(2, "mlp", {}), (2, "llama", {}), (4, "mlp", {}), (4, "llama", {}), (4, "mlp", KEEP)]
)
def test_memory_is_the_plans_and_about_one_nth(pool, world, kind, cyclic):
    """Replicated AdamW keeps 5 Psi: parameters, sums, masters, two states. Here a rank keeps those of its stage, a second
    published copy, and some units that visit it, at most 4 of these stages of one or two units: 10 stages, so with even stages
    2 * 5 Psi / N, Psi and stages counted with each parameter's alignment to 64 bytes.
    """
    results = pool.run(world, memory, Job(kind, "cdp-v2", steps=3, cyclic=cyclic), timeout=180)
    psi, largest = sum(r["owned"] for r in results), max(r["owned"] for r in results)
    rounding = 4 * results[0]["count"] + results[0]["plan"]["scalars"]  # Adam's step counts, and the few numbers that ride along
    for rank, r in enumerate(results):
        assert r["buffers"] == sum(r["plan"].values()), rank
        assert all(nbytes == 4 for nbytes in r["placeholders"].values()), "a released parameter keeps one element"
        assert r["alive"] == 4, "between steps all parameters share one element"
        assert r["checks"] > 0 and r["bound"] > 0 and r["grads"] == 0
        assert r["masters"] <= r["owned"] and r["optimizer"] == 2 * r["masters"] + 4 * r["kept"], rank
        total = r["buffers"] + r["masters"] + r["optimizer"]
        print(f"{kind} world {world} rank {rank}: {total / largest:.2f} stages, {total / (5 * psi / world):.2f} of 5 Psi / N")
        assert total <= 6 * largest + r["plan"]["in flight"] + rounding
        if kind == "mlp":  # even stages
            assert total <= 2 * 5 * psi / world + rounding, rank
    assert sum(r["masters"] for r in results) == results[0]["psi"], "each master is kept once"
