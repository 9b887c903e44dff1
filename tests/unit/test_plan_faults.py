"""A plan made wrong on purpose, in every way we could think of, is rejected, and the message names rank, step and action.

Faults are tried at each action of each program (first and steady step) of each rank; of the larger ones, at every third. Of all
parameters only those of the last unit are kept from forward to backward, or with keep_after_forward ("keep") those of all
stages but stage 0.
"""

import re
from collections import Counter
from collections.abc import Iterator

import pytest

from deepspeed_cdp.plan.actions import Action, Kind
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
    moved,
    mutations,
    plan,
    post_changes,
    program,
    put,
    rejected,
    retimed,
    swap_pushes,
    untimely,
    wrong_copy,
    wrong_landing,
    wrong_peer,
    wrong_posts,
    wrong_size,
    wrong_stream,
    wrong_version,
)

RINGS = ["v2", "v1", "p2", "p1", "dp", "four", "keep"]  # of more than one rank

# ---- faults -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*RINGS, "one"])
@pytest.mark.parametrize("fault", FAULTS)
def test_fault_is_rejected_and_named(name: str, fault: Fault) -> None:
    messages = list(everywhere(name, fault, one_in=4))
    uncorrected = fault is wrong_copy and name not in ("v2", "v1", "p2", "p1")
    assert messages or uncorrected or (name == "one" and fault in (wrong_peer, wrong_stream, swap_pushes, wrong_landing))
    for action, rank, message in messages:
        assert NAMED.match(message), (action, rank, message)


KINDS = {  # what the message names first where this kind is missing: what comes next on this rank, or what needs it
    Kind.WAIT_PARAM: "WAIT_PARAM|RELEASE_PARAM|RECV_GRAD",
    Kind.RELEASE_PARAM: "SEND_GRAD|RECV_PERSISTENT_GRAD|RELEASE_PARAM|PULL_PARAM|PULL_GRAD|RECV_GRAD|OPTIMIZER_STEP",
    Kind.PULL_GRAD: "OFFER_GRAD|RECV_GRAD|GRANT_CREDIT",
    Kind.RECV_GRAD: "SEND_GRAD",
    Kind.SEND_GRAD: "SEND_GRAD|SEND_PERSISTENT_GRAD|OFFER_GRAD|RECV_GRAD|PULL_GRAD|PULL_PARAM|REDUCE_GRAD|GRAD_NORM|"
    "PREDICT_PARAM",
    Kind.RECV_PERSISTENT_GRAD: "SEND_PERSISTENT_GRAD",
    Kind.SEND_PERSISTENT_GRAD: "SEND_GRAD|OFFER_GRAD|RECV_PERSISTENT_GRAD|PULL_GRAD|GRAD_NORM",
    Kind.RELEASE_PERSISTENT_PARAM: "RELEASE_PARAM|PULL_PARAM",
    Kind.OFFER_GRAD: "OFFER_GRAD|GRANT_CREDIT",
    Kind.GRANT_CREDIT: "SEND_GRAD|OFFER_GRAD|RECV_GRAD|RECV_PERSISTENT_GRAD|REDUCE_GRAD|GRAD_NORM|PREDICT_PARAM",
    Kind.PREDICT_PARAM: "PREDICT_PARAM|PUBLISH_PARAM",
    Kind.PUBLISH_PARAM: "PUBLISH_PARAM|WAIT_PARAM",
    Kind.PULL_PARAM: "PUBLISH_PARAM|WAIT_PARAM|REDUCE_GRAD",  # the last writes the one copy that nobody has pulled
    Kind.REDUCE_GRAD: "GRAD_NORM",
    Kind.GRAD_NORM: "GRAD_NORM|OPTIMIZER_STEP|SEND_NORM|RECV_GRAD",
    Kind.SEND_NORM: "OPTIMIZER_STEP",
    Kind.OPTIMIZER_STEP: "PUBLISH_PARAM|WAIT_PARAM|PREDICT_PARAM",
}


@pytest.mark.parametrize(("name", "kind"), [(n, k) for n in (*RINGS, "one") for k in KINDS])
def test_a_missing_action_is_named_by_itself_or_by_what_suffers(name: str, kind: str) -> None:
    found = list(everywhere(name, drop, kind, one_in=4))
    present = {a.kind for r in range(plan(name).schedule.ranks) for a in program(name, r, False)}
    assert bool(found) == (kind in present)
    for action, _, message in found:
        assert re.match(KINDS[kind], NAMED.match(message)[1]), (action, message)


@pytest.mark.parametrize(
    "kind",
    [Kind.RECV_GRAD, Kind.SEND_GRAD, Kind.GRANT_CREDIT, Kind.RELEASE_PARAM, Kind.OPTIMIZER_STEP, Kind.RELEASE_PERSISTENT_PARAM],
)
def test_a_repeated_action_is_named_itself(kind: str) -> None:
    """A round's gradient summed twice, a buffer freed twice, an update applied twice."""
    for action, rank, message in everywhere("v2", duplicate, kind):
        assert f"rank {rank}, step" in message and f": {kind}" in message, (action, message)


@pytest.mark.parametrize("kind", [Kind.WAIT_PARAM, Kind.PUBLISH_PARAM, Kind.RECV_GRAD, Kind.SEND_GRAD, Kind.OFFER_GRAD])
def test_a_wrong_size_names_the_place(kind: str) -> None:
    for action, rank, message in everywhere("v2", wrong_size, kind):
        assert re.match(rf"rank {rank}, step [01]: {kind} ", message) and "bytes" in message, (action, message)


def test_a_wrong_version_names_the_place() -> None:
    for kind in (Kind.WAIT_PARAM, Kind.PUBLISH_PARAM):
        for action, rank, message in everywhere("v2", wrong_version, kind):
            assert re.match(rf"rank {rank}, step \d+: {kind} .*(schedule says|expects)", message), (action, message)


# ---- posts --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", RINGS)
def test_wrong_posts_are_rejected_and_named(name: str) -> None:
    messages = list(everywhere(name, wrong_posts, one_in=4))
    assert len(list(mutations(name, wrong_posts))) > 240
    for action, rank, message in messages:
        assert NAMED.match(message), (action, rank, message)


@pytest.mark.parametrize("rank", range(3))
def test_wrong_posts_before_the_first_action_are_rejected(rank: int) -> None:
    p, good = plan("v2"), before("v2", rank)
    for i, post in enumerate(good):
        for changed in post_changes(p, post):
            wrong = {r: before("v2", r) for r in range(3)} | {rank: good[:i] + changed + good[i + 1 :]}
            with pytest.raises(PlanError, match=NAMED):
                validate(p, posts=wrong.__getitem__)


def in_use(good: Program, i: int) -> Action | None:
    """The action before the pull ``good[i]`` that sets the pull's window free."""
    post, reads = good[i].posts[0], {(a.round, a.unit, a.backward): a for a in good if a.kind == Kind.WAIT_PARAM}
    for a in reversed(good[:i]):
        x = reads[a.round, a.unit, a.backward] if a.kind == Kind.RELEASE_PARAM else a
        if a.kind in (Kind.RELEASE_PARAM, Kind.SEND_GRAD) and x.region == post.region:
            if x.offset < post.offset + post.nbytes and post.offset < x.offset + x.nbytes:
                return a
    return None


@pytest.mark.parametrize("name", RINGS)
def test_a_pull_into_a_window_that_is_in_use_is_rejected(name: str) -> None:
    found: Counter = Counter()
    for rank in range(plan(name).schedule.ranks):
        good = program(name, rank, False)
        for i, a in enumerate(good):
            end = in_use(good, i) if a.kind in (Kind.PULL_PARAM, Kind.PULL_GRAD) else None
            if end:
                message = rejected(name, rank, False, retimed(plan(name), rank, good, a, (end.time - 1, END)))
                assert NAMED.match(message), (a, message)
                found[a.kind, "is still in use" in message] += 1
    assert found[Kind.PULL_PARAM, True] > 1 and (found[Kind.PULL_GRAD, True] or name in ("v1", "p1", "dp")), found


# ---- time ---------------------------------------------------------------------------------------------------------------
UNTIMELY = {  # when, kind -> what the dry-run says
    ("early", Kind.PULL_PARAM): "is pulled by rank|is still in use|where rank . expects",
    ("late", Kind.PUBLISH_PARAM): "is pulled by rank|where rank . expects",
    ("early", Kind.OFFER_GRAD): "waits for a push that is not earlier",
    ("late", Kind.OFFER_GRAD): "is pulled by rank|where rank . expects",
    ("early", Kind.PULL_GRAD): "is pulled by rank|where rank . expects",
    ("early", Kind.RECV_GRAD): "waits",
    ("early", Kind.SEND_GRAD): "where the schedule says|still adds to",
    ("early", Kind.GRANT_CREDIT): "before it has pulled|or what comes next",
    ("late", Kind.GRANT_CREDIT): "needs a credit of rank . that is not earlier|where rank . expects",
    ("early", Kind.GRAD_NORM): "waits for scalars .S. that is not earlier",
}


@pytest.mark.parametrize("name", RINGS)
def test_what_is_not_earlier_than_what_needs_it_is_rejected(name: str) -> None:
    """All that the dry-run has seen one action need of another: the later one comes as early, or the earlier one as late."""
    found: Counter = Counter()
    for when, a, rank, wrong in untimely(name):
        message = rejected(name, rank, False, wrong)
        assert NAMED.match(message) and re.search(UNTIMELY.get((when, a.kind), ""), message), (when, a, message)
        found[when, a.kind] += 1
    assert not set(UNTIMELY) - set(found)
    more = {"v1": Kind.OPTIMIZER_STEP, "p2": Kind.PREDICT_PARAM, "p1": Kind.PREDICT_PARAM, "dp": Kind.OPTIMIZER_STEP}
    assert found["early", more.get(name, Kind.GRAD_NORM)]


@pytest.mark.parametrize("name", ["p2", "p1"])
def test_a_prediction_from_a_sum_that_may_change_is_rejected(name: str) -> None:
    """It comes, with all that waits for it, a tick after its owner lets the next rank's sum in, or adds to it itself."""
    p, found = plan(name), 0
    for rank in range(3):
        good, src = program(name, rank, False), p.schedule.predictor(p.schedule.owned(rank))
        for a in good:
            if a.kind == Kind.PREDICT_PARAM and p.unit(a.unit).g_bytes:
                late = next(
                    (
                        x.time + 1
                        for x in good
                        if (x.unit, x.round) == (a.unit, p.schedule.rounds - 1)
                        and (x.kind == Kind.GRANT_CREDIT and x.posts[0].src == src + 1 or x.kind == Kind.RECV_GRAD)
                        and x.time > a.time
                    ),
                    None,
                )
                if late:
                    wrong = retimed(p, rank, good, a, (late, a.phase))
                    for x in good:
                        if x.kind == Kind.PUBLISH_PARAM and x.region[0] == "W" and x.unit == a.unit:
                            wrong = retimed(p, rank, wrong, x, (late, x.phase))
                    message = rejected(name, rank, False, wrong)
                    assert NAMED.match(message), message
                    found += f"rank {rank}, step 1: PREDICT_PARAM" in message and "or what comes next" in message
    assert found >= 1, "elsewhere another rule is broken first"


def early_offer(p: Plan, rank: int, good: Program, i: int) -> Iterator[Program]:
    """An owner offers its own sum before it has added to it."""
    if good[i].kind == Kind.OFFER_GRAD and good[i].into[1] == rank:
        ends = Kind.SEND_GRAD, Kind.SEND_PERSISTENT_GRAD
        own = next(x for x in good if x.kind in ends and (x.unit, x.round) == (good[i].unit, good[i].round))
        yield moved(good, i, good.index(own))


@pytest.mark.parametrize("name", RINGS)
def test_an_offer_of_a_sum_that_its_owner_still_adds_to_is_rejected(name: str) -> None:
    messages = list(everywhere(name, early_offer, Kind.OFFER_GRAD))
    assert messages
    for _, rank, message in messages:
        assert re.match(rf"rank {rank}, step \d: OFFER_GRAD .*(still adds to|where the schedule says)", message), message


@pytest.mark.parametrize("name", RINGS)
def test_an_update_before_its_norm_is_rejected(name: str) -> None:
    messages = list(everywhere(name, early_update, Kind.OPTIMIZER_STEP))
    assert messages
    assert all(re.search(r"rank \d+, step \d+: (GRAD_NORM|OPTIMIZER_STEP)", m) for _, _, m in messages), messages


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


@pytest.mark.parametrize("name", [*RINGS, "one"])
def test_the_plans_themselves_pass(name: str) -> None:
    validate(plan(name))
    validate(plan(name), programs=lambda r, f: program(name, r, f), posts=lambda r: initial_posts(plan(name), r))
