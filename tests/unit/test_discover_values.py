"""Forwards whose course depends on numbers in the batch: a trace computes those that are known."""

import logging

import pytest
import torch
from torch import nn

from deepspeed_cdp.model import discover
from deepspeed_cdp.model.discover import Example, observe, trace


class Net(nn.Module):
    """Three layers after an embedding, in an order that ``run`` chooses."""

    def __init__(self, run):
        super().__init__()
        self.run = run
        self.embedding = nn.Embedding(16, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, **batch):
        return self.run(self, **batch)


def called(seen: discover.Trace | None) -> list[str]:
    assert seen is not None
    return [path for path in seen.order if path.startswith("layers.")]


def checks(m, ids):
    """As Hugging Face models do: a look for padding, a check of the largest label."""
    if 0 in ids[:, [-1, 0]] or ids.max() >= 16:
        raise ValueError("wrong ids")
    return m.layers[0](m.embedding(ids))


def by_sizes(m, ids, sizes):
    """Whole numbers choose the layers, through division and a sum with numbers that the forward makes itself."""
    x = m.embedding(ids)
    for at in ((sizes + torch.arange(len(sizes))) / 2).long().tolist():
        x = m.layers[at](x)
    return x


def writes(m, ids):
    """Changes its inputs."""
    ids += 1
    ids[ids > 9] = 0
    return m.layers[int(ids[0, 0])](m.embedding(ids))


def mixes(m, ids):
    """Writes numbers that are not known among known ones; nothing depends on them."""
    x = m.embedding(ids)
    places = torch.zeros(ids.shape, dtype=torch.long)
    places += x.argmax(-1)
    return m.layers[1](m.embedding(places))


def masks(m, ids):
    """A mask over tokens takes some rows of the activations and writes others (Qwen3-VL)."""
    x = m.embedding(ids)
    picked = x[ids > 1, :] + 1
    x[ids == 1] = 0.0
    return m.layers[len(picked)](x)


def parts(m, ids):
    """A part of a parameter is an argument of a module (DeBERTa's relative embeddings)."""
    return m.layers[2](m.embedding.weight[:4].unsqueeze(0)).sum() + m.embedding(ids).sum()


IDS = torch.full((2, 3), 1)
CASES = {
    "checks": (checks, {"ids": IDS}, ["layers.0"]),
    "sizes": (by_sizes, {"ids": IDS, "sizes": torch.tensor([4, 1, 0])}, ["layers.2", "layers.1"]),
    "writes": (writes, {"ids": IDS}, ["layers.2"]),
    "mixes": (mixes, {"ids": IDS}, ["layers.1"]),
    "masks": (masks, {"ids": torch.tensor([[1, 2, 1]])}, ["layers.1"]),
    "parts": (parts, {"ids": IDS}, ["layers.2"]),
}


@pytest.mark.parametrize("name", CASES)
def test_a_trace_follows_known_numbers_and_changes_no_input(name):
    run, batch, expected = CASES[name]
    module, before = Net(run), {k: v.clone() for k, v in batch.items()}
    traced, observed = trace(module, Example(kwargs=batch)), observe(module, Example(kwargs=batch))
    assert called(traced) == called(observed) == expected
    assert (traced.order, traced.calls, traced.inside) == (observed.order, observed.calls, observed.inside)
    assert all(torch.equal(batch[k], before[k]) for k in batch)


def by_activations(m, ids):
    return m.layers[int(m.embedding(ids).sum() > 0)](m.embedding(ids))


def by_chance(m, ids):
    return m.layers[int(torch.randint(3, ()))](m.embedding(ids))


@pytest.mark.parametrize("run", [by_activations, by_chance])
def test_a_forward_that_depends_on_what_is_unknown_has_no_trace(run, caplog, capfd):
    module = Net(run)
    with caplog.at_level(logging.INFO, "deepspeed_cdp"):
        assert trace(module, Example(kwargs={"ids": IDS})) is None
    assert "no trace of Net: DataDependentOutputException" in caplog.text
    assert len(called(observe(module, Example(kwargs={"ids": IDS})))) == 1
    assert not capfd.readouterr().err


def test_large_masks_are_not_computed(monkeypatch):
    """A mask over all pairs of tokens would take memory."""
    monkeypatch.setattr(discover, "_MOST_KNOWN", 100)
    made = []

    def run(m, ids):
        at = torch.arange(ids.shape[1])
        made.append(type(at[:, None] >= at[None]))
        return m.layers[0](m.embedding(ids))

    assert called(trace(Net(run), Example(kwargs={"ids": torch.ones(1, 50, dtype=torch.long)}))) == ["layers.0"]
    assert made == [discover.FakeTensor]
