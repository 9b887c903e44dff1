"""The benchmark of predictions with sequence groups, on a tiny model."""

import pytest

from benchmarks.sequence_predictions import VARIANTS, train

TINY = dict(steps=6, warmup=1, places=2, layers=2, width=8, length=8, batch=2, rate=0.05)


def test_variants_differ_and_a_group_of_one_is_its_ring():
    losses = {variant: train(variant, 0, sequence=2, **TINY) for variant in VARIANTS}
    assert len({round(loss, 5) for loss in losses.values()}) == len(VARIANTS), losses
    assert (
        train("ring", 0, sequence=1, **TINY) == train("group", 0, sequence=1, **TINY) == pytest.approx(losses["group"], rel=1e-4)
    )
