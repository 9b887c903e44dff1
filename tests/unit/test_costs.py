"""Table 1's closed forms against brute force over the schedule, and against a table worked out by hand."""

from collections import Counter

import pytest

from deepspeed_cdp.analysis.paper_costs import Sizes, cyclic_activations, table
from deepspeed_cdp.plan.schedule import Schedule


def live_stages(n: int) -> list[dict[int, list[int]]]:
    """By logical time of a settled step: stage -> ranks that hold its activations, from forward to backward."""
    reads = list(Schedule(n, n - 1).reads(6))
    forward = {(x.rank, x.step, x.stage): x.time for x in reads if not x.backward}
    spans = [(forward[x.rank, x.step, x.stage], x.time, x.rank, x.stage) for x in reads if x.backward]
    times = []
    for tau in range(2 * n * 3, 2 * n * 4):
        live: dict[int, list[int]] = {}
        for begin, end, rank, stage in spans:
            if begin <= tau <= end:
                live.setdefault(stage, []).append(rank)
        times.append(live)
    return times


@pytest.mark.parametrize("n", [1, 2, 3, 4, 7])
def test_cyclic_activations_are_constant_and_as_the_schedule_has_them(n):
    totals = [sum(map(len, live.values())) for live in live_stages(n)]
    # N micro-batches each hold 1..N..1 stages: at any time N (N+1)/2 stages, up to the one that begins as another ends
    assert max(totals) - min(totals) <= n
    assert min(totals) <= cyclic_activations(n) * n <= max(totals)


@pytest.mark.parametrize("n", [1, 2, 3, 4, 7])
def test_cyclic_model_parallelism_needs_as_many_devices_as_stages_are_held(n):
    most: Counter[int] = Counter()
    for live in live_stages(n):
        for stage, ranks in live.items():
            most[stage] = max(most[stage], len(ranks))
    row = next(r for r in table(Sizes(n, 1, 1, 1)) if r.figure == "2.c.ii")
    assert [most[s] for s in range(n)] == [n - s for s in range(n)]
    assert row.devices == sum(most.values()) == n * (n + 1) // 2


def test_the_nine_rows_for_four():
    rows = table(Sizes(4, psi_p=400, psi_a=1000, psi_int=10))
    assert [(r.figure, r.devices, r.activations, r.parameters, r.volume, r.steps) for r in rows] == [
        ("2.a.i", 1, 4000, 400, 0, 0),
        ("2.a.ii", 1, 2500, 400, 0, 0),
        ("2.b.i", 4, 1000, 400, 800, 2),
        ("2.b.ii", 4, 1000, 400, 800, 1),
        ("2.c.i", 16, 250, 100, 220, 2),
        ("2.c.ii", 10, 250, 100, 220, 1),
        ("2.c.iii", 4, 1000, 100, 80, 1),
        ("2.d.i", 4, 1000, 100, 1200, 2),
        ("2.d.ii", 4, 1000, 100, 1200, 1),
    ]
    assert all(set(r.forms) == {"devices", "activations", "parameters", "volume", "steps"} for r in rows)


def test_forms_say_what_the_numbers_are():
    for n in (2, 3, 8, 64):
        names = {"N": n, "Psi_P": 7.0, "Psi_A": 11.0, "Psi_int": 3.0}
        for row in table(Sizes(n, 7.0, 11.0, 3.0)):
            for column, form in row.forms.items():
                if column == "steps":
                    continue
                text = form.removesuffix(" (first stage)").replace("N^2", "N * N")
                text = text.replace("N(N+1)/2", "N * (N + 1) / 2")
                text = text.replace("(N+1)/2 ", "(N + 1) / 2 * ").replace("2 N ", "2 * N * ").replace("N Psi", "N * Psi")
                text = text.replace("2 Psi", "2 * Psi").replace("3 Psi", "3 * Psi")
                assert getattr(row, column) == pytest.approx(eval(text, {}, names)), (row.figure, column, form)


def test_one_worker_sends_nothing():
    assert all(r.volume == 0 and r.steps == 0 for r in table(Sizes(1, 5, 5, 5)))


@pytest.mark.parametrize(
    "sizes, word", [(Sizes(0, 1, 1), "N is 0"), (Sizes(2, -1, 1), "psi_p is -1"), (Sizes(2, 1, -1), "psi_a")]
)
def test_wrong_sizes_are_refused(sizes, word):
    with pytest.raises(ValueError, match=word):
        table(sizes)
