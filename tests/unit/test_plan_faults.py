"""A plan made wrong on purpose, in every way we could think of, is rejected, and the message names rank, step and action.

Faults are tried at each action of each program (first and steady step) of each rank; under v2, at every second one of them. On
three ranks the units of stages 1 and 2 are kept from forward to backward, those of stage 0 not; on four ("four") those of
stages 0 and 1 are not, or with keep_after_forward ("keep") those of stage 0 alone.
"""

import re
from collections.abc import Iterator

import pytest

from deepspeed_cdp.plan.actions import Kind
from deepspeed_cdp.plan.constants import END
from deepspeed_cdp.plan.plan import Plan
from deepspeed_cdp.plan.program import initial_posts
from deepspeed_cdp.verify.check import validate
from deepspeed_cdp.verify.well_formed import PlanError
from support.plan_faults import (
    FAULTS,
    NAMED,
    Fault,
    Program,
    before,
    drop,
    duplicate,
    early_update,
    everywhere,
    late_push,
    moved,
    mutations,
    plan,
    post_changes,
    program,
    put,
    rejected,
    swap_pushes,
    wrong_copy,
    wrong_landing,
    wrong_peer,
    wrong_posts,
    wrong_size,
    wrong_stream,
    wrong_version,
)

# ---- faults -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["v2", "v1", "p2", "p1", "dp", "four", "keep", "one"])
@pytest.mark.parametrize("fault", FAULTS)
def test_fault_is_rejected_and_named(name: str, fault: Fault) -> None:
    messages = list(everywhere(name, fault, one_in=4))
    uncorrected = fault is wrong_copy and name not in ("v2", "v1", "p2", "p1")
    assert messages or uncorrected or (name == "one" and fault in (wrong_peer, wrong_stream, swap_pushes, wrong_landing))
    for action, rank, message in messages:
        assert NAMED.search(message), (action, rank, message)


KINDS = {  # what the message names where this kind is missing: the kind itself, or those that suffer
    Kind.WAIT_PARAM: "WAIT_PARAM|FORWARD_PARAM|RELEASE_PARAM|RELEASE_PERSISTENT_PARAM|RECV_GRAD|RECV_PERSISTENT_GRAD",
    Kind.FORWARD_PARAM: "FORWARD_PARAM|WAIT_PARAM",
    Kind.RECV_GRAD: "SEND_GRAD|RECV_GRAD|REDUCE_GRAD|GRAD_NORM|SEND_EARLY_GRAD",
    Kind.SEND_GRAD: "SEND_GRAD|RECV_GRAD|REDUCE_GRAD|GRAD_NORM|RELEASE_PARAM|FORWARD_PARAM|WAIT_PARAM|PULL_PARAM|GRANT_CREDIT",
    Kind.RELEASE_PARAM: "RELEASE_PARAM|WAIT_PARAM|FORWARD_PARAM|PUBLISH_PARAM|PULL_PARAM|RECV_GRAD|SEND_GRAD|"
    "REDUCE_GRAD|OPTIMIZER_STEP|RECV_PERSISTENT_GRAD|RELEASE_PERSISTENT_PARAM|GRANT_CREDIT",
    Kind.RECV_PERSISTENT_GRAD: "SEND_EARLY_PERSISTENT_GRAD|SEND_PERSISTENT_GRAD|RECV_PERSISTENT_GRAD|GRAD_NORM",
    Kind.SEND_PERSISTENT_GRAD: "SEND_PERSISTENT_GRAD|RECV_PERSISTENT_GRAD|GRAD_NORM|SEND_GRAD",
    Kind.RELEASE_PERSISTENT_PARAM: "RELEASE_PARAM|WAIT_PARAM|PULL_PARAM|FORWARD_PARAM",
    Kind.SEND_EARLY_GRAD: "PREDICT_PARAM|SEND_EARLY_GRAD|SEND_EARLY_PERSISTENT_GRAD",
    Kind.SEND_EARLY_PERSISTENT_GRAD: "PREDICT_PARAM|SEND_EARLY_PERSISTENT_GRAD",
    Kind.PREDICT_PARAM: "PREDICT_PARAM|PUBLISH_PARAM|WAIT_PARAM|GRANT_CREDIT",
    Kind.PUBLISH_PARAM: "PUBLISH_PARAM|WAIT_PARAM",
    Kind.PULL_PARAM: "PUBLISH_PARAM|WAIT_PARAM",
    Kind.REDUCE_GRAD: "REDUCE_GRAD|GRAD_NORM",
    Kind.GRAD_NORM: "GRAD_NORM|OPTIMIZER_STEP|SEND_NORM",
    Kind.SEND_NORM: "OPTIMIZER_STEP",
    Kind.OPTIMIZER_STEP: "OPTIMIZER_STEP|PUBLISH_PARAM|WAIT_PARAM|REDUCE_GRAD|GRAD_NORM|GRANT_CREDIT|PREDICT_PARAM",
    Kind.GRANT_CREDIT: "GRANT_CREDIT|SEND_GRAD|FORWARD_PARAM|WAIT_PARAM|RECV_GRAD|REDUCE_GRAD|GRAD_NORM",
}


@pytest.mark.parametrize(("name", "kind"), [(n, k) for n in ("v2", "v1", "p2", "p1", "dp", "four", "keep", "one") for k in KINDS])
def test_a_missing_action_is_named_by_itself_or_by_what_suffers(name: str, kind: str) -> None:
    found = list(everywhere(name, drop, kind, one_in=4))
    present = {a.kind for r in range(plan(name).schedule.ranks) for a in program(name, r, False)}
    assert bool(found) == (kind in present)
    for action, _, message in found:
        assert re.search(rf"rank \d+, step \d+: ({KINDS[kind]})\b", message), (action, message)


@pytest.mark.parametrize("kind", [Kind.RECV_GRAD, Kind.RELEASE_PARAM, Kind.OPTIMIZER_STEP, Kind.RELEASE_PERSISTENT_PARAM])
def test_a_repeated_action_is_named_itself(kind: str) -> None:
    """A round's gradient summed twice, a buffer freed twice, an update applied twice."""
    for action, rank, message in everywhere("v2", duplicate, kind):
        assert f"rank {rank}, step" in message and f": {kind}" in message, (action, message)


@pytest.mark.parametrize("kind", [Kind.WAIT_PARAM, Kind.FORWARD_PARAM, Kind.PUBLISH_PARAM, Kind.RECV_GRAD, Kind.SEND_GRAD])
def test_a_wrong_size_names_the_place(kind: str) -> None:
    for action, rank, message in everywhere("v2", wrong_size, kind):
        assert re.match(rf"rank {rank}, step [01]: {kind} ", message) and "bytes" in message, (action, message)


def test_a_wrong_version_names_the_place() -> None:
    for kind in (Kind.WAIT_PARAM, Kind.FORWARD_PARAM, Kind.PUBLISH_PARAM):
        for action, rank, message in everywhere("v2", wrong_version, kind):
            assert re.match(rf"rank {rank}, step \d+: {kind} ", message) and "schedule says" in message, (action, message)


# ---- posts --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["v2", "v1", "p2", "p1", "dp", "four", "keep"])
def test_wrong_posts_are_rejected_and_named(name: str) -> None:
    messages = list(everywhere(name, wrong_posts, one_in=4))
    assert len(list(mutations(name, wrong_posts))) > 240
    for action, rank, message in messages:
        assert NAMED.search(message), (action, rank, message)


@pytest.mark.parametrize("rank", range(3))
def test_wrong_posts_before_the_first_action_are_rejected(rank: int) -> None:
    p, good = plan("v2"), before("v2", rank)
    for i, post in enumerate(good):
        for changed in post_changes(p, post):
            wrong = {r: before("v2", r) for r in range(3)} | {rank: good[:i] + changed + good[i + 1 :]}
            with pytest.raises(PlanError, match=NAMED):
                validate(p, posts=wrong.__getitem__)


def early_post(p: Plan, rank: int, good: Program, i: int) -> Iterator[Program]:
    """Let a message in at the action before the one that frees its bytes."""
    reads = {(a.round, a.unit, a.backward): a for a in good if a.kind == Kind.WAIT_PARAM and a.peer is not None}
    came = good[i].round, good[i].unit, good[i].backward and not (good[i].kind == Kind.RELEASE_PARAM and p.kept(good[i].unit))
    freed = [reads.get(came) if good[i].kind == Kind.RELEASE_PARAM else good[i]]
    if good[i].kind == Kind.GRANT_CREDIT:  # which finished sums in use may have held up, if there is an update just before
        owned = (
            p.o_layout(p.schedule.owned(rank))
            if any(a.kind == Kind.OPTIMIZER_STEP and a.key == good[i].key for a in good)
            else {}
        )
        freed = [good[i]._replace(region=p.o_region, offset=at, nbytes=p.unit(u).g_bytes) for u, at in owned.items()]
    for j, post in enumerate(good[i].posts):
        if any(
            x and x.region == post.region and post.offset < x.offset + x.nbytes and x.offset < post.offset + post.nbytes
            for x in freed
        ):
            before = max(
                (b for b in range(i) if good[b].phase == END and good[b].kind != Kind.SEND_PERSISTENT_GRAD), default=None
            )
            if before is not None:
                wrong = put(good, i, good[i]._replace(posts=good[i].posts[:j] + good[i].posts[j + 1 :]))
                yield put(wrong, before, good[before]._replace(posts=(*good[before].posts, post)))


@pytest.mark.parametrize("name", ["v2", "v1", "p2", "p1", "dp", "four", "keep"])
def test_a_post_before_its_gate_is_rejected(name: str) -> None:
    messages = [
        x
        for kind in (Kind.RELEASE_PARAM, Kind.SEND_GRAD, Kind.SEND_PERSISTENT_GRAD, Kind.GRANT_CREDIT)
        for x in everywhere(name, early_post, kind)
    ]
    places = {"v2": 37, "v1": 18, "p2": 37, "p1": 18, "dp": 6, "four": 52, "keep": 41}
    assert len(messages) == places[name] and any(a.kind == Kind.RELEASE_PARAM and plan(name).kept(a.unit) for a, _, _ in messages)
    assert all(NAMED.search(m) for _, _, m in messages), messages
    assert sum("still in use" in m for _, _, m in messages) > len(messages) // 2


# ---- time ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["v2", "v1", "p2", "p1", "dp", "four", "keep"])
def test_a_push_after_the_time_it_is_needed_is_rejected(name: str) -> None:
    messages = [x for kind in (Kind.FORWARD_PARAM, Kind.SEND_GRAD) for x in everywhere(name, late_push, kind)]
    kinds = (
        {Kind.FORWARD_PARAM} if name in ("v1", "p1") else {Kind.FORWARD_PARAM, Kind.SEND_GRAD}
    )  # v1's programs end two positions after the first sum is passed on
    assert len(messages) > 12 and {a.kind for a, _, _ in messages} == kinds
    assert all(
        re.search(r"rank \d+, step \d+: (WAIT_PARAM|FORWARD_PARAM|RECV_GRAD|SEND_GRAD|RELEASE_PARAM|GRANT_CREDIT)", m)
        for _, _, m in messages
    ), messages


@pytest.mark.parametrize("name", ["v2", "v1", "p2", "p1", "dp", "four", "keep"])
def test_an_update_before_its_sums_are_complete_is_rejected(name: str) -> None:
    messages = list(everywhere(name, early_update))
    assert messages
    assert all(re.search(r"rank \d+, step \d+: (GRAD_NORM|OPTIMIZER_STEP)", m) for _, _, m in messages), messages


def test_a_reader_must_take_a_unit_before_its_owner_may_write_the_next_version() -> None:
    """Rank 0 pulls the last published unit of stage 1 only when its owner averages that unit again (unit by unit)."""
    p, good = plan("four"), program("four", 0, False)
    owner = p.schedule.owner(1)
    i, a = max((i, a) for i, a in enumerate(good) if a.kind == Kind.PULL_PARAM and a.peer == owner and a.backward)
    assert a.unit in p.eager_units(owner)
    average = next(x for x in program("four", owner, False) if x.kind == Kind.REDUCE_GRAD and x.unit == a.unit)
    late = next(j for j in range(i + 1, len(good)) if good[j].key >= average.key)
    assert not any(
        x.kind == Kind.WAIT_PARAM and (x.unit, x.backward) == (a.unit, True) for x in good[i:late]
    )  # in time for its reader
    message = rejected("four", 0, False, moved(good, i, late))
    assert re.match(rf"rank {owner}, step \d: REDUCE_GRAD backward unit {a.unit} .* waits for a reader that is not", message), (
        message
    )


def test_what_is_enqueued_at_a_time_must_not_wait_for_the_same_time() -> None:
    """The logical-time rule itself: a WAIT_PARAM moved to the time of its push waits for something that is not earlier."""
    good = program("v2", 1, False)
    i = next(j for j, a in enumerate(good) if a.kind == Kind.WAIT_PARAM and a.peer == 0 and a.stream == "P")
    wrong = put(good, i, good[i]._replace(time=good[i].time - 2 * plan("v2").scale))
    wrong = tuple(sorted(wrong, key=lambda a: a.key))
    message = rejected("v2", 1, False, wrong)
    assert re.match(r"rank 1, step 1: WAIT_PARAM .* waits for a push that is not earlier in logical time", message), message


@pytest.mark.parametrize(("name", "rank", "positions"), [("v2", 2, 1), ("four", 2, 6), ("keep", 1, 1), ("keep", 3, 1)])
def test_a_credit_must_be_earlier_than_its_push(name: str, rank: int, positions: int) -> None:
    """A rank whose logical times all run late frees regions in time for its neighbour, but not in logical time. (So many
    positions late that no other wait on this rank is found first.)"""
    late = tuple(a._replace(time=a.time + positions * plan(name).scale) for a in program(name, rank, False))
    message = rejected(name, rank, False, late)
    wanted = rf"rank {rank - 1}, step \d+: (FORWARD_PARAM|SEND_GRAD) .* needs a credit of rank {rank} that is not earlier"
    assert re.match(wanted, message), message


@pytest.mark.parametrize("name", ["v1", "four"])
def test_a_read_of_a_freed_region_with_the_same_content_is_rejected(name: str) -> None:
    """The backward read where the forward's copy lay: what is there is right by chance."""
    found = []
    for rank in range(plan(name).schedule.ranks):
        good = program(name, rank, False)
        reads = {(a.unit, a.backward): (i, a) for i, a in enumerate(good) if a.kind == Kind.WAIT_PARAM and a.region == "PG"}
        for (unit, backward), (i, a) in reads.items():
            if backward and (unit, False) in reads and reads[unit, False][1].offset != a.offset:
                assert not plan(name).kept(unit)
                found.append(rejected(name, rank, False, put(good, i, a._replace(offset=reads[unit, False][1].offset))))
    assert any("but its message landed at" in message for message in found), found


@pytest.mark.parametrize("name", ["v2", "v1", "p2", "p1", "dp", "four", "keep", "one"])
def test_the_plans_themselves_pass(name: str) -> None:
    validate(plan(name))
    validate(plan(name), programs=lambda r, f: program(name, r, f), posts=lambda r: initial_posts(plan(name), r))
