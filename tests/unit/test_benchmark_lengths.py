"""Samples of unlike lengths in the benchmarks: the draws, the micro-batches made of them, and FSDP2's variants by name."""

import statistics

import pytest
import torch

from benchmarks import fsdp, lengths, models, samples

CPU = torch.device("cpu")


def test_draws_depend_on_seed_rank_step_and_micro_batch_only():
    some = lengths.Lengths(2048, 1.0, 16384)
    at = [(rank, step, m) for rank in range(2) for step in range(8) for m in range(4)]
    first = [some.draw(*place) for place in at]
    assert [some.draw(*place) for place in reversed(at)] == first[::-1], "in whatever order"
    assert len({tuple(x) for x in first}) > 20 and some._replace(seed=1).draw(*at[0]) != first[0]
    assert len(some.draw(0, 0, 0, 3)) == 3 and some.draw(0, 0, 0, 3)[:1] == first[0]


def test_draws_are_log_normal_in_multiples_up_to_the_longest():
    some = lengths.Lengths(2048, 0.8, 8192)
    drawn = [n for step in range(4000) for n in some.draw(0, step, 0)]
    assert all(0 < n <= 8192 and n % 128 == 0 for n in drawn)
    assert statistics.median(drawn) == pytest.approx(2048, rel=0.08)
    assert sum(n <= 2048 * 2.23 for n in drawn) / len(drawn) == pytest.approx(0.841, abs=0.02), "a sigma above the median"
    assert 0.02 < sum(n == 8192 for n in drawn) / len(drawn) < 0.07
    assert {n for step in range(9) for n in lengths.Lengths(64, 0, 64).draw(0, step, 0)} == {64}


def test_packs_are_as_full_as_their_samples_allow():
    some = lengths.Lengths(512, 1.0, 4096, packed=True)
    packs = [some.draw(1, step, 0) for step in range(500)]
    assert all(0 < sum(p) <= 4096 for p in packs) and statistics.mean(map(sum, packs)) > 0.95 * 4096
    assert statistics.mean(map(len, packs)) > 3
    unpacked = [sum(some._replace(packed=False).draw(1, step, 0)) for step in range(500)]
    assert statistics.stdev(map(sum, packs)) < 0.3 * statistics.stdev(unpacked), "packs are more alike than samples"
    assert lengths.computed([3, 5], False) == [5, 5] and lengths.computed([3, 5], True) == [8]


@pytest.mark.parametrize("packed", [False, True])
def test_a_micro_batch_is_its_samples_and_nothing_else(packed):
    """Padding and neighbours change no sample's loss: the micro-batch's is their mean by predicted token."""
    model = models.build(models.configuration("llama-tiny"), CPU, torch.float32)
    wanted = [9, 4, 12]
    batch = samples.micro_batch(wanted, packed, 256, torch.Generator().manual_seed(3))
    assert batch["input_ids"].shape == ((1, 25) if packed else (3, 12))
    rows = batch["input_ids"][0].split(wanted) if packed else [r[:n] for r, n in zip(batch["input_ids"], wanted)]
    alone = [model(input_ids=r[None], labels=r[None]).loss * (n - 1) for r, n in zip(rows, wanted)]
    assert model(**batch).loss.item() == pytest.approx(sum(x.item() for x in alone) / (sum(wanted) - 3), abs=1e-5)


@pytest.mark.parametrize(
    "name, told",
    [
        ("fsdp2-keep-symm", "is no variant of FSDP2; allowed are fsdp2"),
        ("fsdp2-symm", "gathers over symmetric memory, which needs CUDA; use fsdp2 or fsdp2-prefetch2 here"),
    ],
)
def test_variants_of_fsdp2_that_cannot_be_are_told(name, told, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match=told):
        fsdp.variant(name)


def test_zero_cta_needs_a_torch_that_has_it(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.delattr(fsdp.FSDPModule, "set_symm_mem_for_comm", raising=False)
    with pytest.raises(ValueError, match="does not have; take torch 2.13 or newer, or fsdp2-symm"):
        fsdp.variant("fsdp2-prefetch2-zerocta")


class Handle:
    """One process's view of symmetric memory: the buffers of all ranks, in order of their gathers."""

    world_size = 2

    def __init__(self, rank: int, buffers: list[torch.Tensor]):
        self.rank, self.buffers, self.barriers = rank, buffers, 0

    def barrier(self, timeout_ms: int) -> None:
        self.barriers += timeout_ms > 0

    def get_buffer(self, peer: int, sizes: tuple[int], dtype: torch.dtype, storage_offset: int) -> torch.Tensor:
        return self.buffers[peer].narrow(0, storage_offset, *sizes)


def test_a_symmetric_all_gather_pulls_each_peers_part_and_reuses_its_places(monkeypatch):
    from torch.distributed import _symmetric_memory as symmetric

    ranks: list[list[torch.Tensor]] = [[], []]
    gathers = [fsdp.SymmetricAllGather(None) for _ in ranks]
    made: list[Handle] = []
    monkeypatch.setattr(symmetric, "empty", lambda n, dtype, device: torch.full((n,), -1, dtype=dtype))
    monkeypatch.setattr(symmetric, "rendezvous", lambda tensor, group: made.append(Handle(0, [])) or made[-1])
    for turn in range(2 * fsdp.PLACES):
        outputs = [g.allocate((6,), dtype=torch.float32, device=CPU) for g in gathers]
        for rank, (output, gather) in enumerate(zip(outputs, gathers)):
            output[3 * rank : 3 * rank + 3] = 10 * turn + rank
            handle = gather.handles[output.data_ptr()]
            handle.rank, handle.buffers = rank, outputs
        for output, gather, rank in zip(outputs, gathers, range(2)):
            gather(output, output[3 * rank : 3 * rank + 3], None)
            ranks[rank].append(output)
            assert output.tolist() == [10 * turn] * 3 + [10 * turn + 1] * 3
    assert len(made) == 2 * fsdp.PLACES, "one per rank and place"
    assert all(h.barriers == 2 * 2 for h in made), "before and after each of two gathers"
    assert len({o.data_ptr() for o in ranks[0][: fsdp.PLACES]}) == fsdp.PLACES
    assert gathers[0].outside_nbytes() == fsdp.PLACES * 24
