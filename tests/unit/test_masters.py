"""optim/masters.py: masters in halves, the upper of which are the newest published copy. Rings equal the oracle with them."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deepspeed_cdp.optim.masters import Masters
from support.optimizers import adamw, foreign, two_groups
from support.runtime_runs import EXTRAPOLATE, NONE, PREDICT, check, named_rule, schedule

BITS = st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=40)


def halved(values: torch.Tensor, copies: int = 2) -> Masters:
    """One master, ``x``, split; every published copy has its rounded values."""
    published = [{"x": values.to(torch.bfloat16)} for _ in range(copies)]
    masters = Masters({"x": torch.nn.Parameter(values.clone())}, published, ["x"])
    masters.split(["x"], copies - 1)
    return masters


@given(BITS)
def test_halves_hold_every_bit_but_a_tie_s_last(bits):
    """Numbers, infinities, and numbers that round to infinity; a nan stays one."""
    values = torch.tensor(bits, dtype=torch.int64).to(torch.int32).view(torch.float32)
    masters = halved(values)
    assert masters.parameters["x"].isnan().all() and masters.lows["x"].dtype == torch.int16
    before, after = values.view(torch.int32), masters["x"].detach().view(torch.int32)
    tie = (before & 0x1FFFF) == 0x8000  # half way, and the value below is even
    assert torch.equal(after[~tie & ~values.isnan()], before[~tie & ~values.isnan()])
    assert torch.equal(after[tie & ~values.isnan()], before[tie & ~values.isnan()] - 1)
    assert masters["x"][values.isnan()].isnan().all()


@given(BITS)
def test_a_second_split_changes_nothing(bits):
    values = torch.tensor(bits, dtype=torch.int64).to(torch.int32).view(torch.float32).nan_to_num()
    masters = halved(values)
    once = masters["x"].detach().clone()
    assert torch.equal(masters.rounded("x").to(torch.bfloat16), values.to(torch.bfloat16))
    masters.split(["x"], 0)
    assert torch.equal(masters["x"], once) and masters.newest == {"x": 0}


def test_what_is_read_and_not_published_is_forgotten():
    masters = halved(torch.tensor([1.0, 1.0001]))
    with torch.no_grad():
        masters["x"].add_(1)
    masters.forget(masters)
    assert torch.equal(masters["x"], torch.tensor([1.0, 1.0001]))
    assert "x" in masters and "y" not in masters and dict(masters).keys() == {"x"}


def with_halves(*corrupt):
    """For ``check``: every rank's masters at the end, and that they are in halves before."""
    found = {}

    def change(runtime):
        owner, rank, close = runtime.owner, runtime.transport.world_rank, runtime.close
        assert owner.masters.parameters.keys() == owner.masters.lows.keys() == owner.masters.newest.keys()
        assert all(p.untyped_storage().nbytes() == 4 for p in owner.masters.parameters.values())

        def kept(*arguments):
            found[rank] = {n: p.detach().clone() for n, p in owner.masters.items()}
            close(*arguments)

        runtime.close = kept
        for change in corrupt:
            change(runtime)

    return found, change


def run(rule, size, make=two_groups, *corrupt, **options):
    found, change = with_halves(*corrupt)
    _, want = check("llama-tied", named_rule(rule, size), size, make, dtype=torch.bfloat16, change=change, **options)
    masters = {n: p for rank in found.values() for n, p in rank.items()}
    assert masters.keys() == want.masters.keys()
    moved = 0
    for name, master in want.masters.items():
        torch.testing.assert_close(masters[name], master, rtol=1e-5, atol=1e-12, msg=lambda m, name=name: f"{name}: {m}")
        moved += int((masters[name] != master).sum())
    assert moved <= 4, "of 11000 masters few are half way, once in 130000 updates"


@pytest.fixture(autouse=True)
def on_cpus(monkeypatch):
    monkeypatch.setattr(Masters, "suit_halves", staticmethod(lambda device: True))


@pytest.mark.parametrize("correction", [NONE, PREDICT, EXTRAPOLATE])
@pytest.mark.parametrize("rule", ["dp", "cdp-v1", "cdp-v2", "between"])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_rings_equal_the_oracle(size, rule, correction):
    run(rule, size, correction=correction, on_step=schedule)


@pytest.mark.parametrize("correction", [NONE, PREDICT])
@pytest.mark.parametrize("options", [dict(rounds=2, keep=True), dict(clip=0.05), dict(flush_after={0, 2, 3}, clip=0.05)])
@pytest.mark.parametrize("rule", ["cdp-v1", "cdp-v2"])
def test_rounds_clipping_and_flushes(rule, options, correction):
    run(rule, 3, adamw, correction=correction, **options)


def test_an_optimizer_that_steps_everything_at_once():
    """One that is not torch's: its units are not updated one by one."""
    run("cdp-v2", 2, foreign, correction=EXTRAPOLATE, clip=0.05)


def reads(runtime):
    """Between steps the script looks at masters, as ``safe_get_full_fp32_param`` does, and sets one."""
    step, owner = runtime.step, runtime.owner

    def and_reads():
        step()
        runtime.flush()
        before = {n: p.detach().clone() for n, p in owner.masters.items()}
        if runtime.executor.global_step % 2:
            with torch.no_grad():
                for name, p in owner.masters.items():
                    p.copy_(before[name])
            runtime.publish()
        assert all(torch.equal(p, before[n]) for n, p in owner.masters.items())

    runtime.step = and_reads


@pytest.mark.parametrize("correction", [NONE, PREDICT])
def test_masters_that_scripts_read_and_set(correction):
    run("cdp-v2", 2, adamw, reads, correction=correction, flush_after=range(6))


def wrong_copy(runtime):
    """Broken on purpose: the lower halves are added to the other copy."""
    split = runtime.owner.masters.split
    runtime.owner.masters.split = lambda names, copy: split(names, 1 - copy)


def stays_in_copy(runtime):
    """Broken on purpose: the newest copy is not remembered."""
    split, masters = runtime.owner.masters.split, runtime.owner.masters

    def forgetful(names, copy):
        split(names, copy)
        masters.newest.update(dict.fromkeys(names, 0))

    masters.split = forgetful


@pytest.mark.parametrize("broken", [wrong_copy, stays_in_copy])
def test_a_wrong_copy_is_noticed(broken):
    with pytest.raises((AssertionError, IndexError)):
        run("cdp-v2", 3, adamw, broken)


def test_checksums_tell_one_bit():
    """The checksum reads halves as they are."""
    sums = []

    def change(runtime):
        low = next(iter(runtime.owner.masters.lows.values()))
        before = runtime.owner.checksum()
        low.view(-1)[-1] += 1
        sums.append((before, runtime.owner.checksum()))
        low.view(-1)[-1] -= 1

    run("cdp-v2", 2, adamw, change)
    assert len(sums) == 2 and all(not torch.equal(a, b) for a, b in sums)
