"""The documents' computed tables of memory are those of today's plans."""

import itertools
import re
from pathlib import Path

import pytest

from deepspeed_cdp.model.make_plan import STATE
from deepspeed_cdp.plan.partition import by_memory
from deepspeed_cdp.plan.plan import Plan
from deepspeed_cdp.plan.schedule import Schedule, threshold
from deepspeed_cdp.plan.unit_schedule import Unit
from support.plans import make

DOCS = Path(__file__).parents[2] / "docs"
BYTES = 2**20
CASES = {  # first cell of a row -> rule, correction, units a stage, rounds, keep_after_forward
    "`cdp-v2` without correction, or with accumulation": ("cdp-v2", "none", 16, 1, False),
    "`cdp-v2` with `predict`": ("cdp-v2", "predict", 16, 1, False),
    "`cdp-v2` with `predict`, the default": ("cdp-v2", "predict", 16, 1, False),
    "the same with accumulation, or without correction": ("cdp-v2", "predict", 16, 2, False),
    "`cdp-v2` with `extrapolate`": ("cdp-v2", "extrapolate", 16, 1, False),
    "`cdp-v1` without correction": ("cdp-v1", "none", 16, 1, False),
    "`cdp-v1` with `predict`": ("cdp-v1", "predict", 16, 1, False),
    "`dp`": ("dp", "none", 16, 1, False),
    "`cdp-v2` without correction, `keep_after_forward`": ("cdp-v2", "none", 16, 1, True),
    "the same without it, 4 units a stage": ("cdp-v2", "none", 4, 1, False),
    "the same, 1 unit a stage": ("cdp-v2", "none", 1, 1, False),
}


def most(ranks: int, rule: str, correction: str, per_stage: int, rounds: int, keep: bool) -> float:
    """Bytes per parameter of the model on the rank that needs most: buffers, masters in halves and Adam's state, all bf16."""
    ones = [1] * (ranks * per_stage)

    def plan(weights: list[int] | None) -> Plan:
        groups = by_memory(ones, ones, ranks, weights)
        units = tuple(Unit(f"u{i}", stage, (f"u{i}",), (), BYTES, BYTES) for stage, group in enumerate(groups) for i in group)
        kind = dict(delay_corrected=correction != "none", predicts=correction == "predict")
        return Plan(Schedule(ranks, threshold(rule, ranks), rounds), units, None, keep, 1, 2, **kind)

    first = plan(None)
    balanced = plan([first.kept_by_owner(stage) + STATE for stage in range(ranks)])
    needs = [
        sum(balanced.memory(r).values()) + STATE * BYTES * len(balanced.members(balanced.schedule.owned(r))) for r in range(ranks)
    ]
    return 2 * max(needs) / (BYTES * ranks * per_stage)


@pytest.mark.parametrize(
    ("page", "head"), [("architecture.md", "| N | 2 | 3 | 4 | 8 | 16 |"), ("limits.md", "| ranks | 2 | 4 | 8 |")]
)
def test_bytes_per_parameter(page, head):
    text = (DOCS / page).read_text()
    table = text[text.index("ytes per parameter of the model on the rank") :]
    lines = table[table.index(head) :].split("\n\n")[0].splitlines()
    ranks = [int(x) for x in re.findall(r"\d+", head)]
    for line in lines[2:]:
        name, *cells = [cell.strip() for cell in line.strip("|").split("|")]
        for n, cell in zip(ranks, cells, strict=True):
            assert f"{most(n, *CASES[name]):.2f}" == cell, (name, n)
    assert len(lines) > 5


def test_copies_of_each_stage():
    """The table of docs/algorithm.md#published-copies, with eight units a stage."""
    for n, rounds in itertools.product(range(2, 9), (1, 2)):
        two = (n - 1) // 2 if rounds == 1 else 0  # stages with two predictions
        for rule, correction, others, last in (
            ("dp", "", [(1, 0)] * (n - 1), (1, 0)),
            ("cdp-v2", "", [(2, 0)] * (n - 1), (1, 0)),
            ("cdp-v2", "extrapolate", [(1, 2)] * (n - 1), (1, 0)),
            ("cdp-v2", "predict", [(1, 2)] * two + [(1, 1)] * (n - 1 - two), (1, 0)),
            ("cdp-v1", "", [(2, 0)] * (n - 1), (2, 0)),
            ("cdp-v1", "extrapolate", [(1, 2)] * (n - 1), (1, 2)),
            ("cdp-v1", "predict", [(1, 2)] * (n - 1), (1, 1)),
        ):
            plan = make(n, threshold(rule, n), rounds, 8, corrected=bool(correction), predicts=correction == "predict")
            found = [(plan.copies(s), plan.corrected_copies(s)) for s in range(n)]
            assert found == [*others, last], (n, rounds, rule, correction)
