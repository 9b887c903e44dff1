"""Builds one rank's program for one step from the plan."""

from collections.abc import Iterator
from typing import Any

from deepspeed_cdp.plan.actions import Action, Kind, Post
from deepspeed_cdp.plan.constants import END, PERSISTENT, START
from deepspeed_cdp.plan.plan import Plan


class Builder:
    """Builds one rank's program for one step since the last flush.

    It yields actions in any order, and ``build`` sorts them. ``m`` is a round of the step, ``i`` the index of a unit. ``ahead``
    counts steps after this one; a round past this step's last one belongs to the next step.
    """

    def __init__(self, plan: Plan, rank: int, step: int):
        self.plan, self.schedule, self.rank, self.step = plan, plan.schedule, rank, step
        self.stage = plan.schedule.owned(rank)

    def initial_posts(self) -> tuple[Post, ...]:
        """See ``program.initial_posts``."""
        return tuple(self._first_sum_posts(0))

    def build(self) -> tuple[Action, ...]:
        """The actions, in logical order."""
        s, scale = self.schedule, self.plan.scale
        low = (s.start(self.step, 0, self.rank) * scale, START)
        high = (s.start(self.step + 1, 0, self.rank) * scale, START)
        actions = [a for a in self._all() if a.key < high and (self.step == 0 or a.key >= low)]
        actions += self._visits_of_sums()
        return tuple(sorted(actions, key=lambda a: (after_passes(self.plan, self.rank, self.step, a), a.time, a.phase, a.order)))

    def _all(self) -> Iterator[Action]:
        yield from self._passes()
        for step in (self.step, self.step + 1):
            yield from self._pulls(step)
        for version in range(max(self.step - 1, 0), self.step + 2):
            yield from self._update(version)

    # ---- this rank's own passes -----------------------------------------------------------------------------------------
    def _passes(self) -> Iterator[Action]:
        plan, s = self.plan, self.schedule
        for m in range(s.rounds):
            begin = s.start(self.step, m, self.rank) * plan.scale
            if plan.persistent:
                yield from self._read(begin, m, PERSISTENT, False)
            for i, backward in plan.visits:
                start, end = (begin + x for x in plan.spans[i, backward])
                yield from self._read(start, m, i, backward)
                if backward or not plan.kept(i):
                    yield Action(end, END, Kind.RELEASE_PARAM, m, i, backward, posts=tuple(self._release_posts(m, i, backward)))
                if backward and plan.units[i].g_bytes:
                    yield from self._add_grad(Kind.RECV_GRAD, Kind.SEND_GRAD, (start, START), end, m, i)
            if plan.persistent:
                end = begin + plan.round_ticks
                if plan.persistent.g_bytes:
                    kinds = Kind.RECV_PERSISTENT_GRAD, Kind.SEND_PERSISTENT_GRAD
                    yield from self._add_grad(*kinds, (end, END), end, m, PERSISTENT)
                yield Action(end, END, Kind.RELEASE_PERSISTENT_PARAM, m, PERSISTENT, True)

    def _release_posts(self, m: int, i: int, backward: bool) -> Iterator[Post]:
        """Credits once the parameters of this visit are out of use."""
        return iter(())

    def _read(self, time: int, m: int, i: int, backward: bool) -> Iterator[Action]:
        """Get the parameters of a pass."""
        plan, s, unit = self.plan, self.schedule, self.plan.unit(i)
        version = s.version(self.step, m, self.rank, unit.stage) - self.step
        message: dict[str, Any] = {}
        if self.stage == unit.stage:
            place: dict[str, Any] = dict(
                region=plan.published_region(-version, unit.stage), offset=plan.published_offsets(unit.stage, -version)[i]
            )
        else:
            place = dict(zip(("region", "offset"), self._window(i, backward)))
            if not (backward and plan.kept(i)):  # else still there from the forward
                message = dict(peer=s.owner(unit.stage), stream=plan.published_stream(unit.stage, -version))
        yield Action(time, START, Kind.WAIT_PARAM, m, i, backward, nbytes=unit.p_bytes, version=version, **message, **place)

    def _window(self, i: int, backward: bool) -> tuple[str, int]:
        """Region and offset of the parameters of a pass on a rank that does not own them."""
        return ("H", 0) if i == PERSISTENT else ("PG", self.plan.windows.params[i, backward])

    def _pulls(self, step: int) -> Iterator[Action]:
        """Pull the parameters of passes from their owners, but not before the version is published."""
        s, plan = self.schedule, self.plan
        for m in range(s.rounds):
            for i, backward in ([(PERSISTENT, False)] if plan.persistent else []) + list(plan.messages):
                stage = plan.unit(i).stage
                if stage == self.stage:
                    continue
                version = s.version(step, m, self.rank, stage)
                time = s.start(step, m, self.rank) * plan.scale + plan.pull_ticks(i, backward)
                if step or m:  # version 0 is published before step 0
                    time = self._not_before_published(time, step, m, version, i, backward)
                stream = plan.published_stream(stage, step - version)
                place = (stream, s.owner(stage), *self._window(i, backward), plan.unit(i).p_bytes)
                origin = plan.published_region(step - version, stage), plan.published_offsets(stage, step - version)[i]
                post = Post(*place, step - self.step, m, i, backward, origin, version - step)
                yield Action(time, START, Kind.PULL_PARAM, m, i, backward, post.src, post.stream, posts=(post,))

    def _published(self, version: int, i: int, lag: int, m: int, backward: bool = False) -> int:
        """Ticks at which the owner publishes a unit's version for round ``m``, ``lag`` steps later; for backwards last.

        It does so for the first two rounds at once, and then for one more round in each; for the next step after those.
        """
        plan, s, stage = self.plan, self.schedule, self.plan.unit(i).stage
        round = 2 * s.ranks * plan.scale
        later = max(m - 1, 0) * round
        if lag and plan.is_predicted(stage):
            return later + max(plan.predict_time(version, j) for j in plan.members(stage) if backward or m or j <= i)
        return s.update_time(version - 1, stage) * plan.scale + later + lag * (s.rounds - 1) * round

    def _not_before_published(self, time: int, step: int, m: int, version: int, i: int, backward: bool) -> int:
        """``time``, but not before the version is published, nor in the step before if the owner's passes of it are over.

        Predictions are pulled in the tick in which they are made: there, the order of kinds decides.
        """
        s, scale, stage = self.schedule, self.plan.scale, self.plan.unit(i).stage
        published = self._published(version, i, step - version, m, backward)
        if step > version and self.plan.is_predicted(stage):
            return max(time, published)
        time = max(time, published + 1)
        for begin in ((step, 0), (step - 1, s.rounds)):  # the latter is the end of the step before, which may stall in between
            if published >= s.start(*begin, s.owner(stage)) * scale:
                return max(time, s.start(*begin, self.rank) * scale)
        return time

    # ---- running sums ---------------------------------------------------------------------------------------------------
    def _add_grad(self, recv: Kind, send: Kind, start: tuple[int, int], end: int, m: int, i: int) -> Iterator[Action]:
        """Take a unit's running sum, and give it back with this rank's gradients. The first micro-batch of a step starts it."""
        plan, s, stage = self.plan, self.schedule, self.plan.unit(i).stage
        before, owner = s.neighbor(m, self.rank, -1), s.owner(stage)
        mine, rest = owner == self.rank, ("O", plan.o_layout(stage)[i])
        where = rest if mine else ("GH", 0) if i == PERSISTENT else ("PG", plan.windows.sums[i])
        place: dict[str, Any] = dict(region=where[0], offset=where[1], nbytes=plan.unit(i).g_bytes)
        message: dict[str, Any] = {}
        if before is not None and (not mine or before[1] != owner):  # the owner gets it from the rank before
            came = dict(peer=before[1], stream="G", into=("", before[1], before[0]))
            message = came if mine else dict(peer=owner, stream="G0")
        yield Action(start[0], start[1], recv, m, i, True, **message, **place)
        back: dict[str, Any] = {} if mine else dict(peer=owner, stream="G", into=(*rest, m))
        yield Action(end, END, send, m, i, True, **back, **place)

    def _visits_of_sums(self) -> Iterator[Action]:
        """Sums of this step on their way: this rank's pulls, and what it does as the owner for those of others.

        All of it belongs to this step, even if it comes after this rank's passes.
        """
        plan, s = self.plan, self.schedule
        for m in range(s.rounds):
            begin = s.start(self.step, m, self.rank) * plan.scale
            for i in reversed(plan.every_unit):
                unit = plan.unit(i)
                if unit.g_bytes and unit.stage != self.stage and s.neighbor(m, self.rank, -1):
                    where = ("GH", 0) if i == PERSISTENT else ("PG", plan.windows.sums[i])
                    origin = "O", plan.o_layout(unit.stage)[i]
                    post = Post("G0", s.owner(unit.stage), *where, unit.g_bytes, 0, m, i, True, origin)
                    time = begin + plan.grad_ticks(i)[0]
                    yield Action(time, START, Kind.PULL_GRAD, m, i, True, post.src, "G0", posts=(post,))
            for r in range(s.ranks):
                for i in reversed(plan.members(self.stage)):
                    if plan.unit(i).g_bytes:
                        yield from self._host_sum(m, r, i)
        if plan.is_predicted(self.stage):
            yield from self._predict(self.step)
            yield from self._publish(self.step, predicted=True)

    def _host_sum(self, m: int, r: int, i: int) -> Iterator[Action]:
        """As the owner: let rank ``r`` push the unit's sum back in round ``m``, and offer it to the rank after it."""
        plan, s = self.plan, self.schedule
        begin, (_, start, end) = s.start(self.step, m, r) * plan.scale, plan.grad_ticks(i)
        if r != self.rank and s.neighbor(m, r, -1):  # it has pulled the sum; the first one's credit comes with the update
            yield Action(begin + start + 1, START, Kind.GRANT_CREDIT, m, i, True, posts=(self._sum_post(m, r, i, 0),))
        after = s.neighbor(m, r, 1)
        if after and after[1] != self.rank:
            place: dict[str, Any] = dict(region="O", offset=plan.o_layout(self.stage)[i], nbytes=plan.unit(i).g_bytes)
            yield Action(begin + end, START, Kind.OFFER_GRAD, m, i, True, after[1], "G0", into=("", r, m), **place)

    def _sum_post(self, m: int, r: int, i: int, ahead: int) -> Post:
        return Post("G", r, "O", self.plan.o_layout(self.stage)[i], self.plan.unit(i).g_bytes, ahead, m, i, True)

    def _first_sum_posts(self, ahead: int) -> Iterator[Post]:
        """Credits for the sums that rank 0 starts in a step, in its order."""
        for i in reversed(self.plan.members(self.stage) if self.rank else ()):
            if self.plan.unit(i).g_bytes:
                yield self._sum_post(0, 0, i, ahead)

    def _predict(self, version: int) -> Iterator[Action]:
        """Predict the version after this one of the owned stage from the running sums of this step."""
        plan, s, stage = self.plan, self.schedule, self.stage
        region = plan.published_region(1, stage)
        for i, offset in plan.v_layout(stage)[0].items():
            place: dict[str, Any] = dict(region=region, offset=offset, nbytes=plan.unit(i).p_bytes, version=version - self.step)
            yield Action(plan.predict_time(version, i), START, Kind.PREDICT_PARAM, s.rounds - 1, i, True, **place)

    # ---- this rank as an owner ------------------------------------------------------------------------------------------
    def _update(self, version: int) -> Iterator[Action]:
        """Compute ``version`` of the owned stage (version 0 is there from the start), and publish it."""
        s, scale, stage, plan = self.schedule, self.plan.scale, self.stage, self.plan
        if version:
            step, time, base = version - 1, s.update_time(version - 1, stage) * scale, version - 1 - self.step
            norm, phase, next_step = s.norm_time(step, stage) * scale, START, s.start(version, 0, self.rank) * scale
            if s.stalls and norm >= next_step:  # later owners need this rank's norm before they begin their next step
                norm, phase = next_step, END
            for i in plan.eager_units(self.rank):
                finished = plan.sum_finished(step, i)
                yield Action(finished, START, Kind.REDUCE_GRAD, s.rounds - 1, i, True, version=base)
            # scalars come from the owner before; rank 0 receives those that rank N-1 sent after the step before, or at the start
            src = (self.rank - 1) % s.ranks if s.ranks > 1 else None
            posts = tuple(self._first_sum_posts(version - self.step))
            norm_posts, posts = (posts, ()) if plan.sums_apart else ((), posts)
            yield self._owner_action(norm, phase, Kind.GRAD_NORM, peer=src, stream="S", version=base, posts=norm_posts)
            if s.exact_norm and self.rank == s.ranks - 1 and s.ranks > 1:
                yield self._owner_action(norm, phase, Kind.SEND_NORM, stream="T", version=base)
            waits = dict(peer=s.ranks - 1, stream="T") if s.exact_norm and self.rank < s.ranks - 1 else {}
            yield self._owner_action(time, START, Kind.OPTIMIZER_STEP, version=base, posts=posts, **waits)
        yield from self._publish(version)

    def _owner_action(self, time: int, phase: int, kind: Kind, **rest: Any) -> Action:
        """An action about the whole stage."""
        return Action(time, phase, kind, 0, 0, False, **rest)

    def _publish(self, version: int, predicted: bool = False) -> Iterator[Action]:
        """Offer a version of the owned stage to all its readers.

        Args:
            predicted: only its prediction for the first rounds, which belongs to the step of its sums; else all the rest.
        """
        for step in (version, version + 1):
            for v, m, reader in self.schedule.readers(step, self.stage):
                if v == version and predicted == (step > version and m < 2 and self.plan.is_predicted(self.stage)):
                    yield from self._publish_to(m, reader, version, step - version)

    def _publish_to(self, m: int, reader: int, version: int, lag: int) -> Iterator[Action]:
        region, offsets = self.plan.published_region(lag, self.stage), self.plan.published_offsets(self.stage, lag)
        stream = self.plan.published_stream(self.stage, lag)
        messages = [v for v in self.plan.messages if v[0] in offsets]
        for i, backward in ([(PERSISTENT, False)] if PERSISTENT in offsets else []) + messages:
            place = (region, offsets[i], self.plan.unit(i).p_bytes, version - self.step)
            there = version == lag == 0 and m < 2  # from the start
            time = -(10**18) if there else self._published(version, i, lag, m, backward)
            yield Action(time, START, Kind.PUBLISH_PARAM, m, i, backward, reader, stream, *place)


def after_passes(plan: Plan, rank: int, step: int, a: Action) -> bool:
    """Whether an owner's action, about a step that is over on its rank, comes after the other actions of the rank's program.

    Predictions come before these, and so do sums on their way: passes of ranks that are later in the same step need them.
    """
    of_owner = a.kind.of_owner or a.kind == Kind.REFRESH_PARAM and a.peer is None
    return of_owner and not a.relayed and a.time >= plan.schedule.start(step, plan.schedule.rounds, rank) * plan.scale
