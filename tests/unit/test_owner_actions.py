"""What an owner waits for before it writes a published copy: on CPUs there is one stream, so no result would tell."""

from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch

from deepspeed_cdp.plan.actions import Kind
from deepspeed_cdp.plan.plan import Plan
from deepspeed_cdp.plan.program import build
from deepspeed_cdp.plan.schedule import Schedule
from deepspeed_cdp.plan.unit_schedule import Unit
from deepspeed_cdp.runtime import executor as executor
from deepspeed_cdp.runtime.owner_executor import OwnerExecutor
from support import runtime_runs

STEP = 7


class Noted(OwnerExecutor):
    """A walk at an REDUCE_GRAD, whose surroundings only take notes."""

    def __init__(self, plan: Plan, rank: int):
        self.notes: list[tuple] = []
        self.plan, self.schedule, self.rank, self.step, self.global_step = plan, plan.schedule, rank, STEP, STEP
        self.transport = SimpleNamespace(after=lambda mark: self.notes.append(("after", mark)), mark=lambda: "published")
        self.owner = SimpleNamespace(updates_eagerly=True, advance=self._advance)
        self.together, self._flushing, self._own_read_end = (), False, "own reads"
        self._norms, self._published_at = {}, {}
        self._readers = self._read_by

    def _ticket(self, name: str) -> SimpleNamespace:
        return SimpleNamespace(wait=lambda where: self.notes.append(("wait", name)))

    def _read_by(self, region: str, offset: int, nbytes: int) -> list[SimpleNamespace]:
        self.notes.append(("readers", region, offset, nbytes))
        return [self._ticket("reader 1"), self._ticket("reader 2")]

    def _advance(self, step: int, unit: int, slot: int) -> torch.Tensor:
        self.notes.append(("write", step, unit, slot))
        return torch.zeros(())


@pytest.mark.parametrize(("threshold", "copies"), [(2, 1), (3, 2)])
def test_a_unit_is_written_when_its_sum_is_there_and_nobody_reads_its_copy(threshold, copies):
    units = tuple(Unit(f"u{i}", i // 2, (f"w{i}",), (), 256 * (i + 1), 512) for i in range(6))
    plan = Plan(Schedule(3, threshold), units)
    assert plan.copies == copies
    for rank in (0, 1):
        for a in (a for a in build(plan, rank, False) if a.kind == Kind.REDUCE_GRAD):
            walk = Noted(plan, rank)
            walk._arrivals = {("O", STEP + a.version, 0, a.unit, True): walk._ticket("sum")}
            walk._average(a)
            slot = (STEP + a.version + 1) % copies
            where = plan.copy_layout(plan.schedule.owned(rank))[0][a.unit]
            assert walk.notes == [
                ("wait", "sum"),
                ("readers", f"V{slot}", where, plan.unit(a.unit).p_bytes),
                ("wait", "reader 1"),
                ("wait", "reader 2"),
                ("after", "own reads"),
                ("write", STEP + a.version, a.unit, slot),
            ]
            assert walk._published_at == {(a.unit, slot): "published"} and not walk._arrivals


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
        kept[walk.rank].append(sum(map(len, walk._reading.values())))

    monkeypatch.setattr(executor.Executor, "end_step", end)
    runtime_runs.check(kind, rule, size, steps=12, rounds=rounds, least=0, clip=clip)
    assert len(kept) == size and any(map(any, kept.values()))
    for rank, counts in kept.items():
        assert max(counts[6:]) <= max(counts[:6]), (rank, counts)
