"""Plans under which every rank keeps all parameters, made wrong on purpose: each is rejected, and the message names the place."""

import re
from collections.abc import Iterator

import pytest

from deepspeed_cdp.plan.actions import Kind
from deepspeed_cdp.plan.constants import END, PERSISTENT, START
from deepspeed_cdp.plan.plan import Plan
from deepspeed_cdp.plan.program import initial_posts
from deepspeed_cdp.verify.check import validate
from support.plan_faults import (
    FAULTS,
    NAMED,
    Program,
    drop,
    early_update,
    everywhere,
    mutations,
    plan,
    program,
    put,
    rejected,
    retimed,
    untimely,
    wrong_posts,
)

NAMES = ["r-v2", "r-v1", "r-p2", "r-p1", "r-dp", "r-four", "r-one"]


@pytest.mark.parametrize("name", NAMES)
def test_the_plans_themselves_pass(name: str) -> None:
    validate(plan(name), programs=lambda r, f: program(name, r, f), posts=lambda r: initial_posts(plan(name), r))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("fault", FAULTS)
def test_fault_is_rejected_and_named(name: str, fault) -> None:
    for action, rank, message in everywhere(name, fault, one_in=4):
        assert NAMED.match(message), (action, rank, message)


KINDS = {  # what the message names first where this kind is missing
    Kind.REFRESH_PARAM: "WAIT_PARAM|FORWARD_PARAM|RELEASE_PARAM",
    Kind.WAIT_PARAM: "WAIT_PARAM|FORWARD_PARAM|RELEASE_PARAM|RECV_GRAD",
    Kind.FORWARD_PARAM: "FORWARD_PARAM|WAIT_PARAM|REFRESH_PARAM|PULL_PARAM",
    Kind.PUBLISH_PARAM: "PUBLISH_PARAM|REFRESH_PARAM",
    Kind.PULL_PARAM: "PUBLISH_PARAM|REFRESH_PARAM",
    Kind.PULL_GRAD: "OFFER_GRAD|RECV_GRAD|GRANT_CREDIT",
    Kind.OFFER_GRAD: "OFFER_GRAD|GRANT_CREDIT",
    Kind.REDUCE_GRAD: "GRAD_NORM",
    Kind.OPTIMIZER_STEP: "PUBLISH_PARAM|WAIT_PARAM|REFRESH_PARAM|PREDICT_PARAM",
    Kind.RELEASE_PARAM: "SEND_GRAD|RECV_PERSISTENT_GRAD|PULL_PARAM",
    Kind.RELEASE_PERSISTENT_PARAM: "RELEASE_PARAM|REFRESH_PARAM",
}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_missing_action_is_named_by_itself_or_by_what_suffers(name: str, kind: str) -> None:
    found = list(everywhere(name, drop, kind, one_in=4))
    assert bool(found) == any(a.kind == kind for r in range(plan(name).schedule.ranks) for a in program(name, r, False))
    for action, _, message in found:
        assert re.match(KINDS[kind], NAMED.match(message)[1]), (action, message)


@pytest.mark.parametrize("name", NAMES[:-1])
def test_wrong_posts_are_rejected(name: str) -> None:
    messages = list(everywhere(name, wrong_posts, one_in=4))
    assert len(list(mutations(name, wrong_posts))) > 200
    for action, rank, message in messages:
        assert NAMED.match(message), (action, rank, message)


# ---- too early: what is still read would be overwritten -------------------------------------------------------------------
@pytest.mark.parametrize("rank", range(3))
def test_a_copy_before_the_old_version_is_out_of_use_is_rejected(rank: int) -> None:
    """Into the replica, a tick before the old version's last backward is over."""
    p, good, tried = plan("r-v1"), program("r-v1", rank, False), 0
    for i, a in enumerate(good):
        ends = (Kind.RELEASE_PERSISTENT_PARAM if a.unit == PERSISTENT else Kind.RELEASE_PARAM, a.unit)
        last = max((x.time for x in good[:i] if (x.kind, x.unit) == ends), default=None)
        if a.kind == Kind.REFRESH_PARAM and a.region != "R" and last is not None:
            message = rejected("r-v1", rank, False, retimed(p, rank, good, a, (last - 1, END)))
            assert re.match(rf"rank {rank}, step 1: REFRESH_PARAM ", message), (a, message)
            tried += 1
    assert tried


def early_credit(p: Plan, rank: int, good: Program, i: int) -> Iterator[Program]:
    """Credits for stages from 1 on come one visit earlier, while stage 1's first unit is still in its backward."""
    if good[i].kind == Kind.RELEASE_PARAM and any(
        x.unit == good[i].unit for x in good[i].posts
    ):  # not on the rank that owns stage 1
        before = max(j for j in range(i) if good[j].phase == END)
        wrong = put(good, i, good[i]._replace(posts=()))
        yield put(wrong, before, good[before]._replace(posts=(*good[before].posts, *good[i].posts)))


@pytest.mark.parametrize("name", ["r-v2", "r-v1", "r-dp", "r-four"])
def test_landing_in_what_is_still_read_is_rejected(name: str) -> None:
    messages = list(everywhere(name, early_credit, Kind.RELEASE_PARAM))
    assert len(messages) >= 2
    for _, rank, message in messages:
        assert message.startswith(f"rank {rank}, step") and "is still in use" in message, message


@pytest.mark.parametrize("rank", range(3))
def test_an_update_in_place_before_the_last_read_is_rejected(rank: int) -> None:
    """The owner's own OPTIMIZER_STEP (and what it is made of) moved before the RELEASE_PARAM of its last unit that reads the
    old version."""
    good, p = program("r-dp", rank, False), plan("r-dp")
    update = next(a for a in good if a.kind == Kind.OPTIMIZER_STEP)
    own = p.members(p.schedule.owned(rank))
    last = next(a for a in good if a.kind == Kind.RELEASE_PARAM and a.unit in own)
    message = rejected("r-dp", rank, False, retimed(p, rank, good, update, (last.time - 1, END)))
    assert re.match(rf"rank {rank}, step 1: (OPTIMIZER_STEP|SEND_NORM|GRAD_NORM) |nothing moves", message), message


def test_a_read_of_what_has_landed_but_was_not_waited_for_is_rejected() -> None:
    """The message may have come by chance; without REFRESH_PARAM no action has made sure."""
    count = 0
    for name in ("r-v2", "r-four"):
        for rank in range(plan(name).schedule.ranks):
            good = program(name, rank, False)
            for i, a in enumerate(good):
                if a.kind == Kind.REFRESH_PARAM and a.region == "R" and a.phase == START:
                    message = rejected(name, rank, False, put(good, i))
                    count += "but the replica has version" in message or "the schedule says" in message
                    assert re.match(r"rank \d+, step \d: (WAIT_PARAM|FORWARD_PARAM|REFRESH_PARAM)", message), message
    assert count > 4


@pytest.mark.parametrize("name", NAMES[:-1])
def test_what_is_not_earlier_than_what_needs_it_is_rejected(name: str) -> None:
    found = set()
    for when, a, rank, wrong in untimely(name):
        assert NAMED.match(rejected(name, rank, False, wrong)), (when, a)
        found.add((when, a.kind))
    assert found >= {("early", Kind.REFRESH_PARAM), ("early", Kind.GRANT_CREDIT), ("late", Kind.OFFER_GRAD)}
    assert name not in ("r-v2", "r-p2", "r-four") or ("early", Kind.FORWARD_PARAM) in found
    assert list(everywhere(name, early_update, Kind.OPTIMIZER_STEP))
