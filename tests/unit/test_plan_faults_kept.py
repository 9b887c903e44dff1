"""As test_plan_faults.py: parameters that are kept from forward to backward are freed, read or sent as if they were not."""

import re
from collections.abc import Iterator

import pytest

from deepspeed_cdp.plan.actions import Action, Kind
from support.plan_faults import NAMED, plan, program, put, rejected

KEPT = [(name, rank) for name in ("v1", "dp", "four", "keep") for rank in range(plan(name).schedule.ranks)]


def kept_reads(name: str, rank: int, backward: bool) -> Iterator[tuple[int, Action]]:
    """The reads of parameters that came from another rank and are kept (in the backward none comes)."""
    good = program(name, rank, False)
    came = {a.unit for a in good if a.kind == Kind.WAIT_PARAM and a.peer is not None and plan(name).kept(a.unit)}
    return ((i, a) for i, a in enumerate(good) if a.kind == Kind.WAIT_PARAM and a.unit in came and a.backward == backward)


@pytest.mark.parametrize(("name", "rank"), KEPT)
def test_kept_parameters_freed_after_the_forward_are_missed(name: str, rank: int) -> None:
    """A release after the forward, which the program must not have, with the credits of the backward's release or without."""
    good, count = program(name, rank, False), 0
    for i, read in kept_reads(name, rank, False):
        end = next(j for j, a in enumerate(good) if a.kind == Kind.RELEASE_PARAM and a.unit == read.unit and a.backward)
        after = next(j for j in range(i + 1, len(good)) if good[j].time > read.time)
        done = good[end]._replace(time=good[after].time, phase=good[after].phase, backward=False)
        for posts in ((), good[end].posts):
            wrong = put(good, end, good[end]._replace(posts=() if posts else good[end].posts))
            message = rejected(name, rank, False, put(wrong, after, done._replace(posts=posts), good[after]))
            count += (
                re.match(
                    rf"rank {rank}, step 1: WAIT_PARAM backward unit {read.unit} .* does not read the place of its forward",
                    message,
                )
                is not None
            )
            assert NAMED.search(message), message
    assert count


@pytest.mark.parametrize(("name", "rank"), KEPT)
def test_kept_parameters_are_read_where_they_came(name: str, rank: int) -> None:
    p, good, count = plan(name), program(name, rank, False), 0
    for i, read in kept_reads(name, rank, True):
        for offset in {0, p.p_layouts[rank].nbytes - read.nbytes} - {read.offset}:
            message = rejected(name, rank, False, put(good, i, read._replace(offset=offset)))
            wanted = "does not read the place of its forward|where the schedule says"
            assert re.match(rf"rank {rank}, step 1: WAIT_PARAM backward unit {read.unit} .*({wanted})", message), message
            count += 1
    assert count


@pytest.mark.parametrize(("name", "rank"), KEPT)
def test_kept_parameters_sent_again_are_refused(name: str, rank: int) -> None:
    """A second message for the backward, as there is for units that are not kept."""
    good = program(name, rank, False)
    forwards = {a.unit: a for a in good if a.kind == Kind.FORWARD_PARAM and plan(name).kept(a.unit)}
    assert bool(forwards) == (rank < plan(name).schedule.ranks - 1)
    for i, read in enumerate(good):
        if read.kind == Kind.WAIT_PARAM and read.backward and read.unit in forwards:
            forward = forwards[read.unit]._replace(time=read.time, backward=True)
            message = rejected(name, rank, False, put(good, i, read, forward))
            assert re.search(r"rank \d+, step \d+: FORWARD_PARAM|is never received|nothing moves", message), message
