"""As test_plan_faults.py: parameters that are kept from forward to backward are freed, read or pulled as if they were not."""

import re
from collections.abc import Iterator

import pytest

from deepspeed_cdp.plan.actions import Action, Kind
from support.plan_faults import NAMED, plan, program, put, rejected, retimed

# (rank 0 owns the last unit, which alone is kept by default)
KEPT = [(name, rank) for name in ("v1", "dp", "four", "keep") for rank in range(name != "keep", plan(name).schedule.ranks)]


def kept_reads(name: str, rank: int, backward: bool) -> Iterator[tuple[int, Action]]:
    """The reads of parameters that came from another rank and are kept (in the backward none comes)."""
    good = program(name, rank, False)
    came = {a.unit for a in good if a.kind == Kind.WAIT_PARAM and a.peer is not None and plan(name).kept(a.unit)}
    return ((i, a) for i, a in enumerate(good) if a.kind == Kind.WAIT_PARAM and a.unit in came and a.backward == backward)


@pytest.mark.parametrize(("name", "rank"), KEPT)
def test_kept_parameters_freed_after_the_forward_are_missed(name: str, rank: int) -> None:
    """A release after the forward, which the program must not have."""
    good, count = program(name, rank, False), 0
    for i, read in kept_reads(name, rank, False):
        end = next(a for a in good if a.kind == Kind.RELEASE_PARAM and a.unit == read.unit and a.backward)
        after = next(j for j in range(i + 1, len(good)) if good[j].time > read.time)
        done = end._replace(time=good[after].time, phase=good[after].phase, backward=False)
        message = rejected(name, rank, False, put(good, after, done, good[after]))
        wanted = rf"rank {rank}, step 1: WAIT_PARAM backward unit {read.unit} .* does not read the place of its forward"
        count += re.match(wanted, message) is not None
        assert NAMED.match(message), message
    assert count


@pytest.mark.parametrize(("name", "rank"), KEPT)
def test_kept_parameters_are_read_where_they_came(name: str, rank: int) -> None:
    p, good, count = plan(name), program(name, rank, False), 0
    for i, read in kept_reads(name, rank, True):
        for offset in {0, p.windows.nbytes - read.nbytes} - {read.offset}:
            message = rejected(name, rank, False, put(good, i, read._replace(offset=offset)))
            wanted = "does not read the place of its forward|where the schedule says"
            assert re.match(rf"rank {rank}, step 1: WAIT_PARAM backward unit {read.unit} .*({wanted})", message), message
            count += 1
    assert count


@pytest.mark.parametrize(("name", "rank"), KEPT)
def test_kept_parameters_pulled_or_offered_again_are_refused(name: str, rank: int) -> None:
    """A second message for the backward, as there is for units that are not kept: one side of it, on each of the two ranks."""
    p, good = plan(name), program(name, rank, False)
    pulls = {a.unit: a for a in good if a.kind == Kind.PULL_PARAM and p.kept(a.unit)}
    assert pulls
    for _, read in kept_reads(name, rank, True):
        pull = pulls[read.unit]
        again = pull._replace(backward=True, posts=(pull.posts[0]._replace(backward=True, ahead=0),))
        wrong = retimed(p, rank, (again, *good), again, (read.time - p.scale, pull.phase))
        message = rejected(name, rank, False, wrong)
        assert NAMED.match(message), message
        offers = program(name, pull.peer, False)
        for i, offer in enumerate(offers):
            if offer.kind == Kind.PUBLISH_PARAM and (offer.unit, offer.peer) == (read.unit, rank):
                message = rejected(name, pull.peer, False, put(offers, i, offer, offer._replace(backward=True)))
                # nobody pulls it, so the owner of one copy waits before it writes the next version
                stuck = rf".*rank {pull.peer}, step \d: REDUCE_GRAD backward unit {read.unit} .*: waits"
                assert re.match(rf"rank {pull.peer}, step \d: PUBLISH_PARAM|{stuck}", message), message
