"""The simulation against recorded GPU runs (benchmarks/predict.py): within 10 percent, or the reason why not.

Not predicted, and said so in docs/cli.md:

- 1.35B at micro-batch 1, where the host is the limit: it enqueues hand-offs slower than the GPU works, which the simulation does
  not know. It is 14 to 52 percent too fast there, and the test holds it to being too fast;
- 8B, which has no compute-only row: from operations at 40 percent of the peak, the default, it is 6 and 18 percent too slow;
- the first run's ``cdp-v1``, which came after another engine's leftovers in the same process (that run's README).
"""

import statistics

import pytest

pytest.importorskip("transformers")
from benchmarks.predict import memory, predicted, recorded  # noqa: E402

ROWS = recorded()
SOUND = [row for row in ROWS if row.setting["micro_batch"] != "1"]
HOST_BOUND = [row for row in ROWS if row.setting["micro_batch"] == "1" and row.setting["model"] == "llama-1.3b"]
WITHOUT_COMPUTE = [row for row in ROWS if row.setting["model"] == "llama-8b" and row.compute is None]


def name(row) -> str:
    return f"{row.run}: {row.name}"


def test_the_rows_are_there():
    assert len(SOUND) >= 11 and len(HOST_BOUND) >= 2 and len(WITHOUT_COMPUTE) >= 1
    assert {row.setting["ranks"] for row in SOUND} >= {"2", "4"}
    assert any(float(row.setting["jitter_ms"]) for row in SOUND)


@pytest.mark.parametrize("row", SOUND, ids=name)
def test_within_ten_percent(row):
    assert row.compute is not None
    assert predicted(row) == pytest.approx(row.measured, rel=0.10)


def test_better_than_compute_alone():
    """The simulation must earn its keep: its mean error is well below that of saying "as long as the passes"."""

    def errors(guess):
        return statistics.mean(abs(guess(row) / row.measured - 1) for row in SOUND)

    assert errors(predicted) < 0.5 * errors(lambda row: row.compute)


@pytest.mark.parametrize("row", [r for r in ROWS if r not in HOST_BOUND], ids=name)
def test_memory_within_six_percent(row):
    assert memory(row) == pytest.approx(row.peak, rel=0.06)


@pytest.mark.parametrize("row", HOST_BOUND, ids=name)
def test_where_the_host_is_the_limit_it_is_too_fast(row):
    assert (row.compute or 0) < predicted(row) < 0.9 * row.measured


@pytest.mark.parametrize("row", WITHOUT_COMPUTE, ids=name)
def test_without_a_compute_row_operations_come_within_a_fifth(row):
    assert predicted(row) == pytest.approx(row.measured, rel=0.20)


def test_more_ranks_are_expected_to_need_less_memory_and_no_more_time():
    from benchmarks import scaling

    two, eight = (scaling.expected("llama-1.3b", 4, n) for n in (2, 8))
    rings = scaling.two_rings("llama-1.3b", 4)
    assert eight.memory < 0.8 * two.memory and eight.passes < eight.step < two.step < two.late
    assert eight.step < rings.step < 1.02 * eight.step, "the exchange between rings of one host is short"
