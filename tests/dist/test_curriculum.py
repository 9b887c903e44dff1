"""Curriculum learning: DeepSpeed's batches on every rank without its broadcast, in training and across checkpoints."""

import pytest

from deepspeed_cdp.cli import convert
from support.curriculum_work import CURRICULA, ROUNDS, SAVED_AFTER, STEPS, analyze, draw, refused, train
from support.engine_work import same, unpack


@pytest.fixture(scope="module")
def indices(tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("indices"))
    analyze(folder)
    return folder


@pytest.mark.parametrize("curriculum", CURRICULA)
def test_every_batch_is_deepspeeds(pool, tmp_path, indices, curriculum):
    """Over changes of difficulty and reshuffled clusters; and from a state of either sampler."""
    batches = 120
    ranks = pool.run(2, draw, curriculum, indices, str(tmp_path / "clusters"), 3, batches, timeout=120)
    for r in ranks:
        assert r["ours"] == r["stock"] and all(len(batch) == 3 for batch in r["ours"])
        rest = r["ours"][batches // 2 + 1 :]
        assert r["from stock"] == r["from ours"] == rest
        assert r["reshuffled"] and (r["changes"] > 3 or curriculum == "one cluster")
    assert ranks[0]["ours"] != ranks[1]["ours"]


def test_training_equals_stock_and_goes_on_from_both_checkpoints(pool, tmp_path, indices):
    saved = {rule: str(tmp_path / f"saved-{rule}") for rule in (None, "dp", "cdp-v2")}
    common = indices, str(tmp_path), "bytes"
    stock, dp, v2 = (pool.run(2, train, rule, *common, "", saved[rule], timeout=120) for rule in saved)
    for theirs, ours, late in zip(stock, dp, v2):
        assert (theirs["class"], ours["class"]) == ("DeepSpeedEngine", "CyclicEngine")
        assert ours["samples"] == theirs["samples"] == late["samples"]
        assert len({shape for _, shape in ours["samples"]}) > 3, "the test needs difficulties that change"
        assert ours["losses"] == pytest.approx(theirs["losses"], rel=1e-5)
        same(unpack(ours["state"]), unpack(theirs["state"]), 1e-5, 1e-5)  # ZeRO-3 divides before it sums
        assert late["losses"] != ours["losses"]
    done = SAVED_AFTER * ROUNDS
    for before, rule, loaded in ((dp, "dp", "dp"), (v2, "cdp-v2", "cdp-v2"), (dp, "dp", None)):
        for whole, rest in zip(before, pool.run(2, train, rule, *common, saved[loaded], timeout=120)):
            assert rest["samples"] == whole["samples"][done:] and len(rest["losses"]) == STEPS * ROUNDS - done
            if loaded:
                assert rest["losses"] == whole["losses"][done:]
                same(unpack(rest["state"]), unpack(whole["state"]))
            else:
                assert rest["losses"] == pytest.approx(whole["losses"][done:], rel=1e-5)


def test_converted_checkpoints(pool, tmp_path, indices):
    """``to-cyclic`` keeps the sampler's state. ``to-zero3`` leaves it out, and stock DeepSpeed begins the curriculum anew."""
    ours, zero3, saved = (str(tmp_path / name) for name in ("ours", "zero3", "saved"))
    before = pool.run(2, train, "dp", indices, str(tmp_path), "bytes", "", saved, timeout=120)
    assert convert.main(["to-cyclic", saved, ours]) == convert.main(["to-zero3", saved, zero3, "--ranks", "2"]) == 0
    again = pool.run(2, train, "dp", indices, str(tmp_path), "bytes", ours, timeout=120)
    stock = pool.run(2, train, None, indices, str(tmp_path), "bytes", zero3, timeout=120)
    for whole, rest, anew in zip(before, again, stock):
        assert rest["samples"] == whole["samples"][SAVED_AFTER * ROUNDS :]
        assert anew["samples"] == whole["samples"][: len(anew["samples"])]


def test_a_new_plan_does_not_rewind_the_data(pool, tmp_path, indices):
    """The first forward after ``load_checkpoint`` loads it again, into the new plan's runtime; its batch has been drawn."""
    whole = pool.run(2, train, "dp", indices, str(tmp_path), "backwards", "", str(tmp_path / "saved"), timeout=120)
    again = pool.run(2, train, "dp", indices, str(tmp_path), "backwards", str(tmp_path / "saved"), timeout=120)
    for before, rest in zip(whole, again):
        assert rest["samples"] == before["samples"][SAVED_AFTER * ROUNDS :]
        assert rest["losses"] == before["losses"][SAVED_AFTER * ROUNDS :]


def test_curricula_that_cannot_be_followed_are_refused(pool, tmp_path, indices):
    for easy, metrics, samples, seed in pool.run(2, refused, indices, str(tmp_path), timeout=60):
        assert "no sample of training_data is that easy; raise min_difficulty" in easy
        assert "has a curriculum of ['kinds'] and the config one of ['seqlen']" in metrics
        assert "has a curriculum with sample 150, and training_data has 150 samples" in samples
        assert seed.startswith("ValueError: data_efficiency.seed is ") and "on rank 1" in seed
