"""Saving, loading and comparing inside worker processes."""

import os
from typing import Any

import torch

from support.engine_work import Job, same, start, train, whole


def snapshot(engine: Any) -> dict[str, Any]:
    """Everything that a failed load must leave alone."""
    runtime = engine._runtime
    return {
        "masters": {n: m.detach().clone() for n, m in runtime.owner.masters.items()},
        "state": {
            (n, k): torch.as_tensor(v).clone()
            for n, m in runtime.owner.masters.items()
            for k, v in runtime.owner.optimizer.state.get(m, {}).items()
        },
        "buffers": {n: b.clone() for n, b in engine.module.named_buffers()},
        "steps": torch.tensor([engine.global_steps, engine.micro_steps, engine.global_samples]),
        "lr": torch.tensor(engine.get_lr()),
        "scalars": runtime.executor.metrics.kept.clone(),
    }


def equal(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[k], b[k]) for k in a)
    return torch.equal(a, b)


def resumes(rank: int, world: int, jobs: list[Job], folder: str) -> list[bool]:
    """By job: train on after saving; a new engine that loads and trains on comes to the same, bit by bit."""
    for at, job in enumerate(jobs):
        path = os.path.join(folder, str(at))
        one = start(job, world)
        train(one, job, rank, 0, 3)
        client = {"epoch": 4, "words": ["a", "b"], "tensor": torch.arange(3)}
        assert one.save_checkpoint(path, client_state=client)
        losses = train(one, job, rank, 3, 6)
        norm = one.get_global_grad_norm()
        want, kept = whole(one), snapshot(one)
        one.destroy()

        other = start(job, world)
        train(other, job, rank, 0, 2)  # what it did before loading leaves no trace
        found, state = other.load_checkpoint(path)
        assert found == os.path.join(path, "global_step3"), found
        assert state["epoch"] == 4 and state["words"] == ["a", "b"] and torch.equal(state["tensor"], torch.arange(3))
        assert other.global_steps == 3
        assert train(other, job, rank, 3, 6) == losses, job
        assert other.get_global_grad_norm() == norm
        same(whole(other), want)
        now = snapshot(other)
        assert equal(now, kept), (job, [k for k in kept if not equal(now[k], kept[k])])
        other.destroy()
    return []
