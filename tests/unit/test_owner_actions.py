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
from deepspeed_cdp.runtime.program import ActionLocation
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

    def back(self, a: Action, unit: int, source: int, round: int) -> SimpleNamespace:
        return SimpleNamespace(wait=lambda where: self.notes.append(("wait", "sum", unit, source, round)))

    def take(self, region: str, offset: int, nbytes: int) -> list[SimpleNamespace]:
        self.notes.append(("readers", region, offset, nbytes))
        return [SimpleNamespace(wait=lambda where, k=k: self.notes.append(("wait", f"reader {k}"))) for k in (1, 2)]

    def wait_readers(self, a: Action, region: str, offset: int, nbytes: int) -> None:
        self.notes.append(("wait", "predictions", region, offset, nbytes))

    def push(self, a: Action) -> None:
        raise AssertionError("nothing is published here")

    def advance(self, step: int, unit: int, slot: int) -> torch.Tensor:
        self.notes.append(("write", step, unit, slot))
        return torch.zeros(())


@pytest.mark.parametrize(
    ("ranks", "per_stage", "threshold", "copies", "corrected"),
    [(2, 1, 1, 1, False), (3, 2, 2, 2, False), (3, 2, 3, 2, False), (3, 2, 3, 2, True)],
)
def test_a_unit_is_written_when_its_sum_is_there_and_nobody_reads_its_copy(ranks, per_stage, threshold, copies, corrected):
    units = tuple(Unit(f"u{i}", i // per_stage, (f"w{i}",), (), 256 * (i + 1), 512) for i in range(ranks * per_stage))
    plan = Plan(Schedule(ranks, threshold, 2), units, delay_corrected=corrected)
    tried, most = 0, copies
    for rank in range(ranks - 1):
        for a in (a for a in build(plan, rank, False) if a.kind == Kind.REDUCE_GRAD):
            noted, tried, stage = Noted(), tried + 1, plan.schedule.owned(rank)
            copies = plan.slots(stage)
            state = RankState(plan, rank, noted, None, step=STEP, global_step=STEP)
            part = OwnerExecutor(state, noted, noted, None, None, None)
            part._reduced_late, part.own_read_end, part._norms, part.published_at = (), "own reads", {}, {}
            sums = plan.o_layout(stage)
            part._sum_places, part.eager = {i: (sums[i], plan.unit(i).g_bytes) for i in part.trained}, True
            part._slots, part._written = copies, [plan.written(copy, stage) for copy in range(copies)]
            part.reduce(a)
            slot = (STEP + a.version + 1) % copies
            where, nbytes = plan.copy_offsets(stage)[a.unit], plan.unit(a.unit).p_bytes
            regions = ["V0", f"W{slot}"] if corrected else [f"V{slot}"]  # nobody else reads the version itself longer
            assert noted.notes == [
                ("wait", "predictions", "O", sums[a.unit], plan.unit(a.unit).g_bytes),
                ("wait", "sum", a.unit, ranks - 1, 1),
                *(("readers", region, where, nbytes) for region in regions),
                *(("wait", f"reader {k}") for _ in regions for k in (1, 2)),
                ("after", "own reads"),
                ("write", STEP + a.version, a.unit, slot),
            ]
            assert part.published_at == {(a.unit, slot): "published"}
    assert tried == (ranks - 1) * per_stage and plan.slots(0) == most


def test_errors_of_relays_name_the_sum():
    """They are about other ranks' passes, so no pass of this rank is named."""
    units = tuple(Unit(f"u{i}", i, (f"w{i}",), (), 256, 512) for i in range(3))
    plan, found = Plan(Schedule(3, 2), units, Unit("", 0, ("tied",), (), 256, 512)), []
    for rank in range(3):
        state = RankState(plan, rank, SimpleNamespace(world_rank=rank), None, step=STEP, global_step=STEP)
        found += [
            (a.kind, str(ActionLocation(state, a)))
            for a in build(plan, rank, False)
            if a.kind in (Kind.OFFER_GRAD, Kind.GRANT_CREDIT)
        ]
    for kind in (Kind.OFFER_GRAD, Kind.GRANT_CREDIT):
        named = {text for of, text in found if of == kind}
        assert named == {
            f"rank {2 - stage}, step {STEP}, stage {stage}, running sum of {name}"
            for stage, name in [(0, "u0"), (0, "persistent parameters"), (1, "u1"), (2, "u2")]
        }


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
