"""What an owner waits for before it writes a published copy: on CPUs there is one stream, so no result would tell."""

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from deepspeed_cdp.plan.actions import Action, Kind
from deepspeed_cdp.plan.plan import Plan
from deepspeed_cdp.plan.program import build
from deepspeed_cdp.plan.schedule import Schedule
from deepspeed_cdp.plan.unit_schedule import Unit
from deepspeed_cdp.runtime import executor
from deepspeed_cdp.runtime.owner_executor import OwnerExecutor
from deepspeed_cdp.runtime.state import RankState
from support import runtime_runs

STEP = 7


class Noted:
    """Stands for all that surrounds an owner's REDUCE_GRAD, and takes notes."""

    updates_eagerly = True

    def __init__(self):
        self.notes: list[tuple] = []
        self.reads = self

    def wait_event(self, event: Any) -> None:
        self.notes.append(("after", event))

    def record_event(self) -> str:
        return "published"

    def wait_finished(self, a: Action, unit: int) -> None:
        self.notes.append(("wait", "sum", a.unit, unit))

    def take(self, region: str, offset: int, nbytes: int) -> list[SimpleNamespace]:
        self.notes.append(("readers", region, offset, nbytes))
        return [SimpleNamespace(wait=lambda where, k=k: self.notes.append(("wait", f"reader {k}"))) for k in (1, 2)]

    def push(self, a: Action) -> None:
        raise AssertionError("nothing is published here")

    def advance(self, step: int, unit: int, slot: int) -> torch.Tensor:
        self.notes.append(("write", step, unit, slot))
        return torch.zeros(())


@pytest.mark.parametrize(("threshold", "copies"), [(2, 1), (3, 2)])
def test_a_unit_is_written_when_its_sum_is_there_and_nobody_reads_its_copy(threshold, copies):
    units = tuple(Unit(f"u{i}", i // 2, (f"w{i}",), (), 256 * (i + 1), 512) for i in range(6))
    plan = Plan(Schedule(3, threshold), units)
    assert plan.copies == copies
    for rank in (0, 1):
        for a in (a for a in build(plan, rank, False) if a.kind == Kind.REDUCE_GRAD):
            noted = Noted()
            state = RankState(plan, rank, noted, None, step=STEP, global_step=STEP)
            part = OwnerExecutor(state, noted, noted, None, None, None)
            part._reduced_late, part._own_read_end, part._norms, part._published_at = (), "own reads", {}, {}
            part._written = [plan.written(copy, plan.schedule.owned(rank)) for copy in range(copies)]
            part.reduce(a)
            slot = (STEP + a.version + 1) % copies
            where = plan.copy_offsets(plan.schedule.owned(rank))[a.unit]
            assert noted.notes == [
                ("wait", "sum", a.unit, a.unit),
                ("readers", f"V{slot}", where, plan.unit(a.unit).p_bytes),
                ("wait", "reader 1"),
                ("wait", "reader 2"),
                ("after", "own reads"),
                ("write", STEP + a.version, a.unit, slot),
            ]
            assert part._published_at == {(a.unit, slot): "published"}


@pytest.mark.parametrize(
    ("kind", "rule", "size", "rounds", "clip"),
    [
        ("rooted", "cdp-v2", 3, 1, 0.0),
        ("rooted", "cdp-v2", 3, 1, 1.0),
        ("mlp", "cdp-v2", 2, 2, 0.0),
        ("mlp", "cdp-v1", 4, 1, 0.0),
        ("llama-tied", "cdp-v2", 4, 2, 0.0),
        ("mlp", "dp", 3, 1, 0.0),
    ],
)
def test_pushes_are_forgotten(kind, rule, size, rounds, clip, monkeypatch):
    """Whoever writes where they read from takes them off the list; of frozen units, which nobody writes, the owner does."""
    kept, end_step = defaultdict(list), executor.Executor.end_step

    def end(walk: executor.Executor) -> None:
        end_step(walk)
        kept[walk.rank].append(walk.messages.reads.count())

    monkeypatch.setattr(executor.Executor, "end_step", end)
    runtime_runs.check(kind, rule, size, steps=12, rounds=rounds, least=0, clip=clip)
    assert len(kept) == size and any(map(any, kept.values()))
    for rank, counts in kept.items():
        assert max(counts[6:]) <= max(counts[:6]), (rank, counts)
