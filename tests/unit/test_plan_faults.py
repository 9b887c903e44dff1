"""A plan made wrong on purpose, in every way we could think of, is rejected, and the message names rank, step and action.

Faults are tried at each action of each program (first and steady step) of each rank; under v2, at every second one of them. On
three ranks the units of stages 1 and 2 are kept from forward to backward, those of stage 0 not; on four ("four") those of
stages 0 and 1 are not, or with keep_after_forward ("keep") those of stage 0 alone.
"""

import re
from collections.abc import Callable, Iterator
from functools import cache

import pytest

from deepspeed_cdp.plan.actions import Action, Kind, Post
from deepspeed_cdp.plan.constants import END
from deepspeed_cdp.plan.plan import Plan
from deepspeed_cdp.plan.program import build, initial_posts
from deepspeed_cdp.plan.replicated import ReplicatedPlan
from deepspeed_cdp.plan.schedule import Schedule
from deepspeed_cdp.plan.unit_schedule import Unit
from deepspeed_cdp.verify.check import validate
from deepspeed_cdp.verify.well_formed import PlanError

Program = tuple[Action, ...]
Fault = Callable[[Plan, int, Program, int], Iterator[Program]]  # plan, rank, program, index of the action -> wrong programs
NAMED = re.compile(r"rank \d+, step \d+: (?:nothing |)([A-Z_]+|before the first action)")
STARTS = (Kind.GRAD_NORM, Kind.SEND_NORM, Kind.OPTIMIZER_STEP)


@cache
def plan(name: str) -> Plan:
    """v2 with two rounds, persistent and frozen parameters; v1 and dp, which have a SEND_NORM; v2 on four ranks; one rank alone.

    "r-NAME" is the same with all parameters on every rank (tests in test_replica_faults.py).
    """
    make, name = (ReplicatedPlan, name[2:]) if name.startswith("r-") else (Plan, name)
    counts, k, rounds = {
        "v2": ((1, 2, 1), 2, 2),
        "v1": ((1, 2, 1), 5, 1),
        "dp": ((1, 2, 1), 0, 1),
        "one": ((2,), 0, 2),
        "four": ((1, 2, 1, 1), 3, 1),
        "keep": ((1, 2, 1, 1), 3, 1),
    }[name]
    stages = [stage for stage, count in enumerate(counts) for _ in range(count)]
    units = tuple(
        Unit(f"u{i}", stage, (f"w{i}",), (), 256 * (3 + i), 0 if (name, i) == ("v2", 1) else 128 * (3 + i))
        for i, stage in enumerate(stages)
    )
    persistent = None if name in ("dp", "four") else Unit("", 0, ("tied",), (), 512, 256)
    return make(Schedule(len(counts), k, rounds), units, persistent, name == "keep")


@cache
def program(name: str, rank: int, first: bool) -> Program:
    return build(plan(name), rank, first)


@cache
def before(name: str, rank: int) -> tuple[Post, ...]:
    return initial_posts(plan(name), rank)


def rejected(name: str, rank: int, first: bool, wrong: Program) -> str:
    """The message with which the dry-run refuses this program."""
    with pytest.raises(PlanError) as error:
        validate(
            plan(name),
            programs=lambda r, f: wrong if (r, f) == (rank, first) else program(name, r, f),
            posts=lambda r: before(name, r),
        )
    return str(error.value)


def everywhere(name: str, fault: Fault, kind: str | None = None) -> Iterator[tuple[Action, int, str]]:
    """(the action made wrong, its rank, the message), for every place where the fault can be made (half of them under v2)."""
    some = name in ("v2", "four", "keep", "r-v2", "r-four")
    for rank in range(plan(name).schedule.ranks):
        for first in (True, False):
            good = program(name, rank, first)
            for index, action in enumerate(good):
                if action.kind == kind or kind is None and (not some or (index + rank + first) % 2):
                    for wrong in fault(plan(name), rank, good, index):
                        assert wrong != good
                        yield action, rank, rejected(name, rank, first, wrong)


def put(good: Program, index: int, *actions: Action) -> Program:
    return good[:index] + actions + good[index + 1 :]


# ---- faults -------------------------------------------------------------------------------------------------------------
def drop(p: Plan, rank: int, good: Program, i: int) -> Iterator[Program]:
    yield put(good, i)


def duplicate(p: Plan, rank: int, good: Program, i: int) -> Iterator[Program]:
    yield put(good, i, good[i], good[i])


def wrong_peer(p: Plan, rank: int, good: Program, i: int) -> Iterator[Program]:
    for peer in range(p.schedule.ranks):
        if good[i].peer not in (None, peer) and good[i].kind != Kind.PULL_PARAM:  # whose post says all
            yield put(good, i, good[i]._replace(peer=peer))


def wrong_stream(p: Plan, rank: int, good: Program, i: int) -> Iterator[Program]:
    for stream in ("P", "O"):
        if good[i].peer is not None and good[i].nbytes and stream != good[i].stream:
            yield put(good, i, good[i]._replace(stream=stream))


def wrong_offset(p: Plan, rank: int, good: Program, i: int) -> Iterator[Program]:
    for offset in {0, good[i].offset + 64} - {good[i].offset}:
        if good[i].nbytes:
            yield put(good, i, good[i]._replace(offset=offset))


def wrong_size(p: Plan, rank: int, good: Program, i: int) -> Iterator[Program]:
    for nbytes in (good[i].nbytes - 64, good[i].nbytes + 64):
        if good[i].nbytes:
            yield put(good, i, good[i]._replace(nbytes=nbytes))


def wrong_version(p: Plan, rank: int, good: Program, i: int) -> Iterator[Program]:
    for version in (good[i].version - 1, good[i].version + 1):
        if good[i].kind in (
            Kind.WAIT_PARAM,
            Kind.REFRESH_PARAM,
            Kind.FORWARD_PARAM,
            Kind.PUBLISH_PARAM,
            Kind.REDUCE_GRAD,
            *STARTS,
        ):
            yield put(good, i, good[i]._replace(version=version))


def wrong_pass(p: Plan, rank: int, good: Program, i: int) -> Iterator[Program]:
    """Another unit, the other direction, another round."""
    a = good[i]
    if a.kind not in (*STARTS, Kind.PULL_PARAM, Kind.GRANT_CREDIT):
        others = [a._replace(unit=(a.unit + 1) % len(p.units)), a._replace(unit=(a.unit - 1) % len(p.units))]
        if not a.kind.endswith("PERSISTENT") and a.unit >= 0:
            others.append(a._replace(backward=not a.backward))
        if a.kind != Kind.PUBLISH_PARAM:  # which is known by its order alone
            others.append(a._replace(round=a.round + 1))
        yield from (put(good, i, other) for other in others)


def swap_pushes(p: Plan, rank: int, good: Program, i: int) -> Iterator[Program]:
    """With the next push on the same edge; each takes the other's logical time."""
    a = good[i]
    for j in range(i + 1, len(good)):
        b = good[j]
        if a.kind in (Kind.FORWARD_PARAM, Kind.PUBLISH_PARAM, Kind.SEND_GRAD) and (b.kind, b.stream, b.peer) == (
            a.kind,
            a.stream,
            a.peer,
        ):
            early, late = (x._replace(time=y.time, phase=y.phase) for x, y in ((b, a), (a, b)))
            if (a.unit, a.nbytes) != (b.unit, b.nbytes):
                yield put(put(good, i, early), j, late)
            return


def out_of_order(p: Plan, rank: int, good: Program, i: int) -> Iterator[Program]:
    if i and good[i - 1].key != good[i].key:
        yield put(put(good, i - 1, good[i]), i, good[i - 1])


def wrong_landing(p: Plan, rank: int, good: Program, i: int) -> Iterator[Program]:
    """Where a one-sided push goes."""
    region, offset, round = good[i].into
    if region and good[i].kind != Kind.REFRESH_PARAM:
        yield put(good, i, good[i]._replace(into=(region, offset + 64, round)))
        yield put(good, i, good[i]._replace(into=("V", offset, round)))
        if region == "H":
            yield put(good, i, good[i]._replace(into=(region, offset, round + 1)))


FAULTS = [
    duplicate,
    wrong_peer,
    wrong_stream,
    wrong_offset,
    wrong_size,
    wrong_version,
    wrong_pass,
    swap_pushes,
    wrong_landing,
    out_of_order,
]


@pytest.mark.parametrize("name", ["v2", "v1", "dp", "four", "keep", "one"])
@pytest.mark.parametrize("fault", FAULTS)
def test_fault_is_rejected_and_named(name: str, fault: Fault) -> None:
    messages = list(everywhere(name, fault))
    assert messages or (name == "one" and fault in (wrong_peer, wrong_stream, swap_pushes, wrong_landing))
    for action, rank, message in messages:
        assert NAMED.search(message), (action, rank, message)


KINDS = {  # what the message names where this kind is missing: the kind itself, or those that suffer
    Kind.WAIT_PARAM: "WAIT_PARAM|FORWARD_PARAM|RELEASE_PARAM|RELEASE_PERSISTENT_PARAM|RECV_GRAD|RECV_PERSISTENT_GRAD",
    Kind.FORWARD_PARAM: "FORWARD_PARAM|WAIT_PARAM",
    Kind.RECV_GRAD: "SEND_GRAD|RECV_GRAD|REDUCE_GRAD|GRAD_NORM",
    Kind.SEND_GRAD: "SEND_GRAD|RECV_GRAD|REDUCE_GRAD|GRAD_NORM|RELEASE_PARAM|FORWARD_PARAM|WAIT_PARAM|PULL_PARAM|GRANT_CREDIT",
    Kind.RELEASE_PARAM: "RELEASE_PARAM|WAIT_PARAM|FORWARD_PARAM|PUBLISH_PARAM|PULL_PARAM|RECV_GRAD|SEND_GRAD|"
    "REDUCE_GRAD|OPTIMIZER_STEP|RECV_PERSISTENT_GRAD|RELEASE_PERSISTENT_PARAM|GRANT_CREDIT",
    Kind.RECV_PERSISTENT_GRAD: "SEND_PERSISTENT_GRAD|RECV_PERSISTENT_GRAD|GRAD_NORM",
    Kind.SEND_PERSISTENT_GRAD: "SEND_PERSISTENT_GRAD|RECV_PERSISTENT_GRAD|GRAD_NORM|SEND_GRAD",
    Kind.RELEASE_PERSISTENT_PARAM: "RELEASE_PARAM|WAIT_PARAM|PULL_PARAM|FORWARD_PARAM",
    Kind.PUBLISH_PARAM: "PUBLISH_PARAM|WAIT_PARAM",
    Kind.PULL_PARAM: "PUBLISH_PARAM|WAIT_PARAM",
    Kind.REDUCE_GRAD: "REDUCE_GRAD|GRAD_NORM",
    Kind.GRAD_NORM: "GRAD_NORM|OPTIMIZER_STEP|SEND_NORM",
    Kind.SEND_NORM: "OPTIMIZER_STEP",
    Kind.OPTIMIZER_STEP: "OPTIMIZER_STEP|PUBLISH_PARAM|WAIT_PARAM|REDUCE_GRAD|GRAD_NORM|GRANT_CREDIT",
    Kind.GRANT_CREDIT: "GRANT_CREDIT|SEND_GRAD|FORWARD_PARAM|WAIT_PARAM|RECV_GRAD|REDUCE_GRAD|GRAD_NORM",
}


@pytest.mark.parametrize(("name", "kind"), [(n, k) for n in ("v2", "v1", "dp", "four", "keep", "one") for k in KINDS])
def test_a_missing_action_is_named_by_itself_or_by_what_suffers(name: str, kind: str) -> None:
    found = list(everywhere(name, drop, kind))
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
def post_changes(p: Plan, post: Post) -> Iterator[tuple[Post, ...]]:
    """Missing, repeated, and each field wrong."""
    yield ()
    yield post, post
    yield from ((post._replace(src=src),) for src in range(p.schedule.ranks) if src != post.src)
    yield (post._replace(nbytes=post.nbytes + 64),)
    yield (post._replace(offset=post.offset + 64),)
    yield (post._replace(ahead=1 - post.ahead),)
    yield (post._replace(round=post.round + 1),)
    yield (post._replace(backward=not post.backward),)
    yield (post._replace(unit=(post.unit + 1) % len(p.units)),)
    if post.origin >= 0:
        yield (post._replace(origin=post.origin + 64),)
        yield (post._replace(version=post.version + 1),)


def wrong_posts(p: Plan, rank: int, good: Program, i: int) -> Iterator[Program]:
    posts = good[i].posts
    for j, post in enumerate(posts):
        for changed in post_changes(p, post):
            yield put(good, i, good[i]._replace(posts=posts[:j] + changed + posts[j + 1 :]))


@pytest.mark.parametrize("name", ["v2", "v1", "dp", "four", "keep"])
def test_wrong_posts_are_rejected_and_named(name: str) -> None:
    messages = list(everywhere(name, wrong_posts))
    assert len(messages) > 240
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


@pytest.mark.parametrize("name", ["v2", "v1", "dp", "four", "keep"])
def test_a_post_before_its_gate_is_rejected(name: str) -> None:
    messages = [
        x
        for kind in (Kind.RELEASE_PARAM, Kind.SEND_GRAD, Kind.SEND_PERSISTENT_GRAD, Kind.GRANT_CREDIT)
        for x in everywhere(name, early_post, kind)
    ]
    places = {"v2": 37, "v1": 18, "dp": 6, "four": 52, "keep": 41}
    assert len(messages) == places[name] and any(a.kind == Kind.RELEASE_PARAM and plan(name).kept(a.unit) for a, _, _ in messages)
    assert all(NAMED.search(m) for _, _, m in messages), messages
    assert sum("still in use" in m for _, _, m in messages) > len(messages) // 2


# ---- time ---------------------------------------------------------------------------------------------------------------
def moved(good: Program, i: int, j: int) -> Program:
    """Action i where action j is, and at its logical time."""
    rest = list(put(good, i))
    rest.insert(j, good[i]._replace(time=good[j].time, phase=good[j].phase))
    return tuple(rest)


def late_push(p: Plan, rank: int, good: Program, i: int) -> Iterator[Program]:
    """A relay, or a sum, more than two positions later than planned: after the time at which the neighbour needs it."""
    if good[i].kind in (Kind.FORWARD_PARAM, Kind.SEND_GRAD) and good[i].stream in ("P", "G"):
        later = [j for j in range(i + 1, len(good)) if good[j].time > good[i].time + 2 * p.scale]
        if later:
            yield moved(good, i, later[0])


@pytest.mark.parametrize("name", ["v2", "v1", "dp", "four", "keep"])
def test_a_push_after_the_time_it_is_needed_is_rejected(name: str) -> None:
    messages = [x for kind in (Kind.FORWARD_PARAM, Kind.SEND_GRAD) for x in everywhere(name, late_push, kind)]
    kinds = (
        {Kind.FORWARD_PARAM} if name == "v1" else {Kind.FORWARD_PARAM, Kind.SEND_GRAD}
    )  # v1's programs end two positions after the first sum is passed on
    assert len(messages) > 12 and {a.kind for a, _, _ in messages} == kinds
    assert all(
        re.search(r"rank \d+, step \d+: (WAIT_PARAM|FORWARD_PARAM|RECV_GRAD|SEND_GRAD|RELEASE_PARAM|GRANT_CREDIT)", m)
        for _, _, m in messages
    ), messages


def early_update(p: Plan, rank: int, good: Program, i: int) -> Iterator[Program]:
    """An update, or its norm, before the sums are complete: where the last backward of the stage has yet to come."""
    if good[i].kind in (Kind.GRAD_NORM, Kind.OPTIMIZER_STEP):
        norm = (
            next((j for j in range(i) if good[j].kind == Kind.GRAD_NORM), None)
            if good[i].kind == Kind.OPTIMIZER_STEP
            else next(
                (j for j in range(i) if good[j].kind in (Kind.SEND_GRAD, Kind.SEND_PERSISTENT_GRAD) and good[j].peer == rank),
                None,
            )
        )
        if norm is not None:
            yield moved(good, i, norm)


@pytest.mark.parametrize("name", ["v2", "v1", "dp", "four", "keep"])
def test_an_update_before_its_sums_are_complete_is_rejected(name: str) -> None:
    messages = list(everywhere(name, early_update))
    assert messages
    assert all(re.search(r"rank \d+, step \d+: (GRAD_NORM|OPTIMIZER_STEP)", m) for _, _, m in messages), messages


def test_a_reader_must_take_a_unit_before_its_owner_may_write_the_next_version() -> None:
    """Rank 0 lets the last offer of stage 1, which is averaged unit by unit, in as late as its owner averages that unit."""
    p, good = plan("four"), program("four", 0, False)
    owner = p.schedule.owner(1)
    i, a = max((i, a) for i, a in enumerate(good) if a.kind == Kind.PULL_PARAM and a.peer == owner and a.backward)
    assert a.unit in p.averaged(owner)
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
    assert any("for what landed at" in message for message in found), found


@pytest.mark.parametrize("name", ["v2", "v1", "dp", "four", "keep", "one"])
def test_the_plans_themselves_pass(name: str) -> None:
    validate(plan(name))
    validate(plan(name), programs=lambda r, f: program(name, r, f), posts=lambda r: initial_posts(plan(name), r))
