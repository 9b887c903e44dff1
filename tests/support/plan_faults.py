"""Plans made wrong on purpose: every fault is a function that yields wrong programs."""

import re
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, NamedTuple

import pytest

from deepspeed_cdp.plan.actions import Action, Kind, Post
from deepspeed_cdp.plan.builder import after_passes
from deepspeed_cdp.plan.plan import Plan
from deepspeed_cdp.plan.program import PULLS, build, initial_posts
from deepspeed_cdp.plan.replicated import ReplicatedPlan
from deepspeed_cdp.plan.schedule import Schedule
from deepspeed_cdp.plan.unit_schedule import Unit
from deepspeed_cdp.verify.check import validate
from deepspeed_cdp.verify.dry_run import DryRun
from deepspeed_cdp.verify.replicated import ReplicaDryRun
from deepspeed_cdp.verify.state import Key, Landing, Push, Rank
from deepspeed_cdp.verify.well_formed import PlanError
from support.sampling import chosen

Program = tuple[Action, ...]
Fault = Callable[[Plan, int, Program, int], Iterator[Program]]  # plan, rank, program, index of the action -> wrong programs
NAMED = re.compile(r"(?:nothing moves any more: )?rank \d+, step \d+: (?:nothing |)([A-Z_]+|before the first action)")
STARTS = (Kind.GRAD_NORM, Kind.SEND_NORM, Kind.OPTIMIZER_STEP)
OFFERS = (Kind.PUBLISH_PARAM, Kind.OFFER_GRAD)
PUSHES = (*OFFERS, Kind.FORWARD_PARAM, Kind.SEND_GRAD)


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
    """(the action made wrong, its rank, whether of the first step, the program), everywhere (larger plans: every third place)."""
    some = 3 if name in ("v2", "p2", "four", "keep", "r-v2", "r-p2", "r-four") else 1
    for rank in range(plan(name).schedule.ranks):
        for first in (True, False):
            good = program(name, rank, first)
            for index, action in enumerate(good):
                if action.kind == kind or kind is None and (index + rank + first) % some == 0:
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
        if good[i].peer not in (None, peer):
            yield put(good, i, good[i]._replace(peer=peer))


def wrong_stream(p: Plan, rank: int, good: Program, i: int) -> Iterator[Program]:
    for stream in {"P0": ("P", "W0", "G0"), "W0": ("P0", "G"), "G0": ("P0", "G")}.get(good[i].stream, ("P0", "G0")):
        if good[i].peer is not None and (good[i].nbytes or good[i].kind in PULLS) and stream != good[i].stream:
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
            Kind.RECV_GRAD,
            Kind.SEND_GRAD,
            Kind.OFFER_GRAD,
            *STARTS,
        ):
            yield put(good, i, good[i]._replace(version=version))


def wrong_copy(p: Plan, rank: int, good: Program, i: int) -> Iterator[Program]:
    """The correction in the place of the version, or the other way round."""
    region, stage = good[i].region, p.schedule.owned(rank)
    if region and region[0] in "VW" and p.corrected_copies(stage):
        yield put(good, i, good[i]._replace(region=p.published_region(int(region[0] == "V"), stage)))


def wrong_pass(p: Plan, rank: int, good: Program, i: int) -> Iterator[Program]:
    """Another unit, the other direction, another round."""
    a = good[i]
    if a.kind not in STARTS:
        others = [a._replace(unit=(a.unit + 1) % len(p.units)), a._replace(unit=(a.unit - 1) % len(p.units))]
        others += [a._replace(round=a.round + 1), a._replace(backward=not a.backward)]
        yield from (put(good, i, other) for other in others)


def swap_pushes(p: Plan, rank: int, good: Program, i: int) -> Iterator[Program]:
    """With the next push on the same edge; each takes the other's logical time."""
    a = good[i]
    for j in range(i + 1, len(good)):
        b = good[j]
        if a.peer is not None and a.kind in PUSHES and (b.kind, b.stream, b.peer) == (a.kind, a.stream, a.peer):
            early, late = (x._replace(time=y.time, phase=y.phase) for x, y in ((b, a), (a, b)))
            if (a.unit, a.nbytes) != (b.unit, b.nbytes):
                yield put(put(good, i, early), j, late)
            return


def out_of_order(p: Plan, rank: int, good: Program, i: int) -> Iterator[Program]:
    if i and good[i - 1].key != good[i].key:
        yield put(put(good, i - 1, good[i]), i, good[i - 1])


def wrong_landing(p: Plan, rank: int, good: Program, i: int) -> Iterator[Program]:
    """Where a one-sided push goes, or which message it is that a sum's owner waits for."""
    (region, offset, round), kind = good[i].into, good[i].kind
    if kind == Kind.OFFER_GRAD or kind == Kind.RECV_GRAD and good[i].stream == "G":
        yield put(good, i, good[i]._replace(into=("O", offset, round)))
        yield put(good, i, good[i]._replace(into=("", (offset + 1) % p.schedule.ranks, round)))
        yield put(good, i, good[i]._replace(into=("", offset, round + 1)))
    elif region and kind != Kind.REFRESH_PARAM:
        yield put(good, i, good[i]._replace(into=(region, offset + 64, round)))
        yield put(good, i, good[i]._replace(into=("V", offset, round)))
        yield put(good, i, good[i]._replace(into=("", offset, round)))


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
    if post.stream == "G":
        yield (post._replace(origin=("O", post.offset)),)
    if post.origin[0]:
        yield (post._replace(origin=(post.origin[0], post.origin[1] + 64)),)
        yield (post._replace(origin=("X", post.origin[1])),)
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


# ---- time ---------------------------------------------------------------------------------------------------------------
class Need(NamedTuple):
    """What an action of one rank's steady program needs of another one's, in the same step.

    Attributes:
        rank, action: the later one.
        too_early: its logical time and phase if it comes no later than the earlier one.
        earlier, too_late: the earlier one and its rank, where the dry-run tells; and the time that is too late for it.
    """

    rank: int
    action: Action
    too_early: tuple[int, int]
    earlier: tuple[int, Action] | None
    too_late: tuple[int, int]


class Recorder(DryRun):
    """A dry-run that notes who needs whom in step 2."""

    def __init__(self, *args: Any, **kwargs: Any):
        self.needs: list[Need] = []
        super().__init__(*args, **kwargs)

    def _note(self, rank: int, key: Key, action: Action, before: Key, earlier: tuple[int, Action] | None = None) -> None:
        if key[0] == before[0] == 2 and key[1] == before[1]:
            tick = bool(key[4] or before[4])  # predictions: in one tick, the order of kinds counts
            time, late = before[2] - self.period - tick, key[2] - self.period + tick
            self.needs.append(Need(rank, action, (time, before[3]), earlier, (late, key[3])))

    def _earlier(self, rank: Rank, a: Action, key: Key, what: str) -> None:
        super()._earlier(rank, a, key, what)
        self._note(rank.number, self._key(rank, a), a, key)

    def _mismatch(self, to: int, push: Push, landing: Landing) -> str:
        if landing.by is not None and push.action.kind in OFFERS:
            self._note(to, landing.key, landing.by, push.key, (push.rank, push.action))
        elif landing.by is not None:
            self._note(push.rank, push.key, push.action, landing.key, (to, landing.by))
        return super()._mismatch(to, push, landing)

    def _check_pulled(self, rank: Rank, key: Key, post: Post, offset: int) -> None:
        pulled = rank.pulled.get((post.region, offset))
        super()._check_pulled(rank, key, post, offset)
        assert pulled
        self._note(rank.number, key, rank.program[rank.cursor], pulled)


class ReplicaRecorder(Recorder, ReplicaDryRun):
    pass


@cache
def needs(name: str) -> tuple[Need, ...]:
    kind = ReplicaRecorder if plan(name).replicated else Recorder
    run = kind(plan(name), 4, lambda r, first: program(name, r, first))
    run.run()
    return tuple(run.needs)


def retimed(p: Plan, rank: int, good: Program, a: Action, key: tuple[int, int]) -> Program:
    """Action ``a`` of the steady program at another logical time."""

    def place(x: Action) -> tuple:
        return after_passes(p, rank, 1, x), *x.key, x.order

    changed = a._replace(time=key[0], phase=key[1])
    return tuple(sorted((changed if x is a else x for x in good), key=place))


def untimely(name: str) -> Iterator[tuple[str, Action, int, Program]]:
    """(what, the action, its rank, the program): actions no later than what they need, or no earlier than what needs them."""
    p, seen = plan(name), set()
    for x in needs(name):
        early, late = (x.rank, x.action, x.too_early), (*(x.earlier or (-1, None)), x.too_late)
        for what, (rank, action, key) in (("early", early), ("late", late)):
            if action is not None and (rank, id(action), key) not in seen and action.key != key:
                seen.add((rank, id(action), key))
                yield what, action, rank, retimed(p, rank, program(name, rank, False), action, key)


def early_update(p: Plan, rank: int, good: Program, i: int) -> Iterator[Program]:
    """An update before its norm."""
    norm = next((j for j in range(i) if good[j].kind == Kind.GRAD_NORM), None)
    if good[i].kind == Kind.OPTIMIZER_STEP and norm is not None:
        yield moved(good, i, norm)
