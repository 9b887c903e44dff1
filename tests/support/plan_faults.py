"""Plans made wrong on purpose: every fault is a function that yields wrong programs."""

import re
from collections.abc import Callable, Iterator
from functools import cache

import pytest

from deepspeed_cdp.plan.actions import Action, Kind, Post
from deepspeed_cdp.plan.plan import Plan
from deepspeed_cdp.plan.program import build, initial_posts
from deepspeed_cdp.plan.replicated import ReplicatedPlan
from deepspeed_cdp.plan.schedule import Schedule
from deepspeed_cdp.plan.unit_schedule import Unit
from deepspeed_cdp.verify.check import validate
from deepspeed_cdp.verify.well_formed import PlanError
from support.sampling import chosen

Program = tuple[Action, ...]
Fault = Callable[[Plan, int, Program, int], Iterator[Program]]  # plan, rank, program, index of the action -> wrong programs
NAMED = re.compile(r"rank \d+, step \d+: (?:nothing |)([A-Z_]+|before the first action)")
STARTS = (Kind.GRAD_NORM, Kind.SEND_NORM, Kind.OPTIMIZER_STEP)


@cache
def plan(name: str) -> Plan:
    """v2 with two rounds, persistent and frozen parameters; v1 and dp, which have a SEND_NORM; v2 on four ranks; one rank alone.

    Stale readers of the first two read corrections. "p2" and "p1" are as "v2" and "v1", but these are predictions.

    "r-NAME" is the same with all parameters on every rank (tests in test_replica_faults.py).
    """
    make, name = (ReplicatedPlan, name[2:]) if name.startswith("r-") else (Plan, name)
    counts, k, rounds = {
        "v2": ((1, 2, 1), 2, 2),
        "v1": ((1, 2, 1), 5, 1),
        "p2": ((1, 2, 1), 2, 2),
        "p1": ((1, 2, 1), 5, 1),
        "dp": ((1, 2, 1), 0, 1),
        "one": ((2,), 0, 2),
        "four": ((1, 2, 1, 1), 3, 1),
        "keep": ((1, 2, 1, 1), 3, 1),
    }[name]
    stages = [stage for stage, count in enumerate(counts) for _ in range(count)]
    units = tuple(
        Unit(f"u{i}", stage, (f"w{i}",), (), 256 * (3 + i), 0 if (name, i) in (("v2", 1), ("p2", 1)) else 128 * (3 + i))
        for i, stage in enumerate(stages)
    )
    persistent = None if name in ("dp", "four") else Unit("", 0, ("tied",), (), 512, 256)
    corrections = dict(delay_corrected=name in ("v2", "v1", "p2", "p1"), predicts=name in ("p2", "p1"))
    return make(Schedule(len(counts), k, rounds), units, persistent, name == "keep", **corrections)


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


def mutations(name: str, fault: Fault, kind: str | None = None) -> Iterator[tuple[Action, int, bool, Program]]:
    """(the action made wrong, its rank, whether of the first step, the program), for every place (under v2: every second)."""
    some = name in ("v2", "p2", "four", "keep", "r-v2", "r-p2", "r-four")
    for rank in range(plan(name).schedule.ranks):
        for first in (True, False):
            good = program(name, rank, first)
            for index, action in enumerate(good):
                if action.kind == kind or kind is None and (not some or (index + rank + first) % 2):
                    for wrong in fault(plan(name), rank, good, index):
                        assert wrong != good
                        yield action, rank, first, wrong


def everywhere(name: str, fault: Fault, kind: str | None = None, one_in: int = 1) -> Iterator[tuple[Action, int, str]]:
    """(the action made wrong, its rank, the message) of all mutations, or of a sample of ``one_in`` and the first."""
    for number, (action, rank, first, wrong) in enumerate(mutations(name, fault, kind)):
        if one_in == 1 or not number or chosen(f"{name} {fault.__name__} {number}", one_in):
            yield action, rank, rejected(name, rank, first, wrong)


def put(good: Program, index: int, *actions: Action) -> Program:
    return good[:index] + actions + good[index + 1 :]


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
            Kind.PREDICT_PARAM,
            Kind.REDUCE_GRAD,
            *STARTS,
        ):
            yield put(good, i, good[i]._replace(version=version))


def wrong_copy(p: Plan, rank: int, good: Program, i: int) -> Iterator[Program]:
    """The correction in the place of the version, or the other way round."""
    if p.corrects and good[i].region in ("V", "W"):
        yield put(good, i, good[i]._replace(region="W" if good[i].region == "V" else "V"))


def wrong_pass(p: Plan, rank: int, good: Program, i: int) -> Iterator[Program]:
    """Another unit, the other direction, another round."""
    a = good[i]
    if a.kind not in (*STARTS, Kind.PULL_PARAM, Kind.GRANT_CREDIT):
        others = [a._replace(unit=(a.unit + 1) % len(p.units)), a._replace(unit=(a.unit - 1) % len(p.units))]
        if "PERSISTENT" not in a.kind.name and a.unit >= 0:
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
    wrong_copy,
    wrong_pass,
    swap_pushes,
    wrong_landing,
    out_of_order,
]


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


def moved(good: Program, i: int, j: int) -> Program:
    """Action i where action j is, and at its logical time."""
    rest = list(put(good, i))
    rest.insert(j, good[i]._replace(time=good[j].time, phase=good[j].phase))
    return tuple(rest)


def late_push(p: Plan, rank: int, good: Program, i: int) -> Iterator[Program]:
    """Parameters forwarded, or a sum sent, more than two positions too late: after the neighbour needs them."""
    if good[i].kind in (Kind.FORWARD_PARAM, Kind.SEND_GRAD) and good[i].stream in ("P", "G"):
        later = [j for j in range(i + 1, len(good)) if good[j].time > good[i].time + 2 * p.scale]
        if later:
            yield moved(good, i, later[0])


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
