"""Table 1: every system of the paper is trained for a few steps and measured from outside, and compared with the closed forms.

Where the engines need more (or less) than the closed form, what they need is written here by hand, with the reason.
"""

import pytest

from benchmarks import table1

P = table1.sizes(3).psi_p / 3  # bytes of a stage
INT = table1.sizes(3).psi_int
THIRD = 1 / 3
# figure: (activations in Psi_A, parameters in Psi_P, bytes received, hand-offs, collectives); None: as the closed form has it
SEEN = {
    "2.a.i": (None, None, None, 0, 0),
    # one device does one pass after the other, so that a stage is let go of before another is begun: ceil(N^2/2) stages, not
    # N(N+1)/2; and two versions of all stages but the last
    "2.a.ii": (5 * THIRD, 5 * THIRD, None, 0, 0),
    "2.b.i": (None, None, None, 0, 1),
    "2.b.ii": (None, 4 * THIRD, None, 1, 0),  # new versions of a stage land beside the replica
    # a rank of stage 1 has N/2 micro-batches in a step, each with an activation and a gradient; an update is made by one owner,
    # so a sum that ends elsewhere goes to it and the version comes back, between the same two passes
    "2.c.ii": (None, 2 * THIRD, 2 * P + 3 * INT, 2, 0),
    "2.c.iii": (None, 2 * THIRD, None, 1, 0),
    # a stage is whole while it computes; the sums are scattered and the next step's first stage is gathered between two passes
    "2.d.i": (None, 2 * THIRD, None, 0, 2),
    # windows of four units, here whole stages, and two published copies; rank 0 pulls no sums, but gets those of its stage back
    "2.d.ii": (None, 6 * THIRD, 7 * P, 1, 0),
}


@pytest.mark.parametrize("figure", SEEN)
def test_what_is_measured_is_what_the_closed_form_says(pool, figure):
    check(pool, figure, 3, *SEEN[figure])


def test_model_parallelism_without_the_cyclic_schedule(pool):
    """N^2 devices, so N is 2 here (N = 3 and 4 are recorded, see tests/unit/test_rounds.py). With two stages there is none in the
    middle, which would receive 2 Psi_int, and an all-reduce of two takes one round, as a hand-off does, which is named first."""
    s = table1.sizes(2)
    check(pool, "2.c.i", 2, None, None, 2 * s.psi_p / 2 + s.psi_int, 1, 0)


def check(pool, figure, n, activations, parameters, volume, handoffs, collectives):
    form, s = table1.cost(figure, n), table1.sizes(n)
    rows = table1.rows_of(figure, n, pool.run(form.devices, table1.watch, figure, n, timeout=90))
    most = table1.most(rows, figure, n)
    assert most["devices"] == form.devices
    assert most["activations"] == pytest.approx(form.activations if activations is None else activations * s.psi_a, rel=1e-12)
    assert most["activations"] <= form.activations * (1 + 1e-12), "never more than the closed form"
    assert most["parameters"] == pytest.approx(form.parameters if parameters is None else parameters * s.psi_p, rel=1e-12)
    payload = max(r["volume"] - r["scalars"] for r in rows)  # losses and norms are in volume, and in no closed form
    assert payload == pytest.approx(form.volume if volume is None else volume, rel=1e-12)
    assert most["scalars"] <= table1.SCALARS
    assert (most["handoffs"], most["collectives"]) == (handoffs, collectives)
    assert most["rounds"] == handoffs + collectives * table1.cost("2.b.i", n).steps
