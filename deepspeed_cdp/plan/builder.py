"""Builds one rank's program for one step from the plan."""

from collections.abc import Iterator
from typing import Any

from deepspeed_cdp.plan.actions import Action, Kind, Post
from deepspeed_cdp.plan.buffer_layout import update_in_round
from deepspeed_cdp.plan.constants import END, PERSISTENT, RELEASES, START
from deepspeed_cdp.plan.plan import Plan


class Builder:
    """Builds one rank's program for one step since the last flush.

    It yields actions in any order, and ``build`` sorts them. ``m`` is a round of the step, ``i`` the index of a unit. ``ahead``
    counts steps after this one; a round past this step's last one belongs to the next step.
    """

    def __init__(self, plan: Plan, rank: int, step: int):
        self.plan, self.schedule, self.rank, self.step = plan, plan.schedule, rank, step
        self.stage = plan.schedule.owned(rank)
        self.inbox, self.sums, finished = plan.layouts[rank]
        self.layouts = {"P": self.inbox, "G": self.sums, "O": finished}

    def initial_posts(self) -> tuple[Post, ...]:
        """See ``program.initial_posts``."""
        posts = [*self._stream_posts("P", -1, None), *self._stream_posts("G", -1, None)]
        for number in (0, 1):
            posts += self._persistent_posts(number)
        return tuple(posts + self._finished_sum_posts(0))

    def build(self) -> tuple[Action, ...]:
        """The actions, in logical order."""
        s, scale = self.schedule, self.plan.scale
        low = (s.start(self.step, 0, self.rank) * scale, START)
        high = (s.start(self.step + 1, 0, self.rank) * scale, START)
        actions = [a for a in self._all() if a.key < high and (self.step == 0 or a.key >= low)]
        return tuple(sorted(actions, key=lambda a: (a.time, a.phase, a.order)))  # stable

    def _all(self) -> Iterator[Action]:
        yield from self._passes()
        for step in (self.step, self.step + 1):
            yield from self._pulls(step)
        for version in range(max(self.step - 1, 0), self.step + 2):
            yield from self._update(version)
            yield from self._predict(version)
        if self.step and (posts := self._early_sum_posts()):
            yield Action(self._prediction_used(), START, Kind.GRANT_CREDIT, 0, 0, False, posts=tuple(posts))

    # ---- this rank's own passes -----------------------------------------------------------------------------------------
    def _passes(self) -> Iterator[Action]:
        plan, s = self.plan, self.schedule
        update, visits_before = update_in_round(plan, self.rank) if plan.sums_in_gaps else (0, -1)  # -1: no such release
        for m in range(s.rounds):
            begin = s.start(self.step, m, self.rank) * plan.scale
            if plan.persistent:
                yield from self._read(begin, m, PERSISTENT, False, 0)
            for number, (i, backward) in enumerate(plan.visits):
                start, end = (begin + x for x in plan.spans[i, backward])
                yield from self._read(start, m, i, backward, self.inbox.offsets.get((i, backward), 0))
                if backward or not plan.kept(i):
                    yield Action(end, END, Kind.RELEASE_PARAM, m, i, backward, posts=tuple(self._release_posts(m, number)))
                if backward and plan.units[i].g_bytes:
                    yield from self._recv_grad(Kind.RECV_GRAD, start, START, m, i)
                    yield from self._send_early(Kind.SEND_EARLY_GRAD, end, m, i)
                    yield from self._send_grad(Kind.SEND_GRAD, end, m, i, tuple(self._posts(m, RELEASES * number + 2)))
            if posts := tuple(self._posts(m, RELEASES * visits_before)):
                yield Action(begin + update, START, Kind.GRANT_CREDIT, m, 0, False, posts=posts)
            if plan.persistent:
                yield from self._end_persistent(begin + plan.round_ticks, m, plan.persistent.g_bytes > 0)

    def _end_persistent(self, end: int, m: int, has_grad: bool) -> Iterator[Action]:
        """The end of a round for persistent parameters."""
        if has_grad:
            posts = tuple(self._persistent_grad_posts(m + 1))
            yield from self._recv_grad(Kind.RECV_PERSISTENT_GRAD, end, END, m, PERSISTENT)
            yield from self._send_early(Kind.SEND_EARLY_PERSISTENT_GRAD, end, m, PERSISTENT)
            yield from self._send_grad(Kind.SEND_PERSISTENT_GRAD, end, m, PERSISTENT, posts)
        posts = tuple(self._persistent_posts(self.step * self.schedule.rounds + m + 2))
        yield Action(end, END, Kind.RELEASE_PERSISTENT_PARAM, m, PERSISTENT, True, posts=posts)

    def _read(self, time: int, m: int, i: int, backward: bool, offset: int) -> Iterator[Action]:
        """Get the parameters of a pass, and forward them to the ring neighbour if it needs them from this rank."""
        s, unit = self.schedule, self.plan.unit(i)
        src = s.source(self.step, m, self.rank, unit.stage)
        stream, region = ("H", "H") if i == PERSISTENT else ("P", "PG")
        place: dict[str, Any] = dict(region=region, offset=offset)
        version = s.version(self.step, m, self.rank, unit.stage) - self.step
        if src is None:
            place = dict(region=self.plan.published_region(-version), offset=self.plan.published_offsets(unit.stage, -version)[i])
        place |= dict(nbytes=unit.p_bytes, version=version)
        if backward and self.plan.kept(i):  # still there from the forward
            yield Action(time, START, Kind.WAIT_PARAM, m, i, True, **place)
            return
        first_hop = "0" if s.is_first(self.step, m, self.rank, unit.stage) else ""
        incoming: dict[str, Any] = dict(peer=src, stream="" if src is None else stream + first_hop)
        yield Action(time, START, Kind.WAIT_PARAM, m, i, backward, **incoming, **place)
        if s.forwards(self.step, m, self.rank, unit.stage):
            after = (self.rank + 1) % s.ranks
            there = 0 if i == PERSISTENT else self.plan.p_layouts[after].offsets[i, backward]
            into = (region, there, m + (self.rank == s.ranks - 1))
            yield Action(time, START, Kind.FORWARD_PARAM, m, i, backward, peer=after, stream=stream, into=into, **place)

    def _recv_grad(self, kind: Kind, time: int, phase: int, m: int, i: int) -> Iterator[Action]:
        s, nbytes = self.schedule, self.plan.unit(i).g_bytes
        if s.ranks == 1:  # no neighbour: the sum is finished where it is
            place: dict[str, Any] = dict(region=self.plan.o_region, offset=self.plan.o_layout(0)[i])
            yield Action(time, phase, kind, m, i, True, nbytes=nbytes, **place)
            return
        src = None if m == 0 and self.rank == 0 else (self.rank - 1) % s.ranks
        stream = "" if src is None else "GH" if i == PERSISTENT else "G"
        yield Action(time, phase, kind, m, i, True, src, stream, nbytes=nbytes, **self._running_sum(i))

    def _running_sum(self, i: int) -> dict[str, Any]:
        """Where the unit's running sum lies on this rank."""
        if i == PERSISTENT:
            return dict(region="GH", offset=0)
        return dict(region=self.plan.g_region, offset=self.sums.offsets[i, True])

    def _send_grad(self, kind: Kind, time: int, m: int, i: int, posts: tuple[Post, ...]) -> Iterator[Action]:
        """Send the running sum to the ring neighbour; rank N-1 sends the finished sum to its owner."""
        plan, s, unit = self.plan, self.schedule, self.plan.unit(i)
        if s.ranks == 1:
            return
        peer = (self.rank + 1) % s.ranks
        if m == s.rounds - 1 and self.rank == s.ranks - 1:
            stream, peer, into = "O", s.owner(unit.stage), (plan.o_region, plan.o_layout(unit.stage)[i], m)
        elif i == PERSISTENT:
            stream, into = "GH", ("GH", 0, m)
        else:
            stream, into = "G", (plan.g_region, plan.g_layouts[peer].offsets[i, True], m)
        rest = self._running_sum(i)
        yield Action(time, END, kind, m, i, True, peer, stream, nbytes=unit.g_bytes, into=into, posts=posts, **rest)

    def _send_early(self, kind: Kind, time: int, m: int, i: int) -> Iterator[Action]:
        """Send the running sum to its owner too, who predicts the next version from it; not in the first step."""
        plan, s, stage = self.plan, self.schedule, self.plan.unit(i).stage
        if self.step and s.ranks > 1 and plan.is_predicted(stage) and (m, self.rank) == (s.rounds - 1, s.predictor(stage)):
            into, rest = (*plan.early_place(i), m), self._running_sum(i)
            yield Action(time, END, kind, m, i, True, s.owner(stage), "E", nbytes=plan.unit(i).g_bytes, into=into, **rest)

    def _pulls(self, step: int) -> Iterator[Action]:
        """As a first reader, pull from the owner: two positions before the pass, but not before the version is published."""
        s, plan = self.schedule, self.plan
        for m in range(min(s.rounds, 2)):  # later rounds have no first reader
            for i, backward in ([(PERSISTENT, False)] if plan.persistent else []) + list(plan.messages):
                stage = plan.unit(i).stage
                src, first = self._source(step - self.step, m, stage)
                if src is None or not first:
                    continue
                version = s.version(step, m, self.rank, stage)
                time = self._pull_time(step, m, 0 if i == PERSISTENT else plan.spans[i, backward][0])
                if step:  # version 0 is published before step 0, but the later steps share one program
                    time = self._not_before_published(time, step, version, i, backward)
                place = ("H0", src, "H", 0) if i == PERSISTENT else ("P0", src, "PG", self.inbox.offsets[i, backward])
                origin, nbytes = plan.published_offsets(stage, step - version)[i], plan.unit(i).p_bytes
                post = Post(*place, nbytes, step - self.step, m, i, backward, origin, version - step)
                yield Action(time, START, Kind.PULL_PARAM, m, i, backward, src, post.stream, posts=(post,))

    def _pull_time(self, step: int, m: int, ticks: int) -> int:
        """Two positions before the pass that starts ``ticks`` after the round does."""
        return (self.schedule.start(step, m, self.rank) - 2) * self.plan.scale + ticks

    def _published(self, version: int, i: int, lag: int, backward: bool = False) -> int:
        """Ticks at which the owner publishes a unit's version for passes ``lag`` steps later; those for backwards come last."""
        stage = self.plan.unit(i).stage
        if lag and self.plan.is_predicted(stage):
            return max(self.plan.predict_time(version, j) for j in self.plan.members(stage) if backward or j <= i)
        return self.schedule.update_time(version - 1, stage) * self.plan.scale

    def _not_before_published(self, time: int, step: int, version: int, i: int, backward: bool) -> int:
        """``time``, but not before the version is published, nor before this step begins if the owner publishes in this step.

        Predictions are pulled in the tick in which they are made: there, the order of kinds decides.
        """
        s, scale, stage = self.schedule, self.plan.scale, self.plan.unit(i).stage
        published = self._published(version, i, step - version, backward)
        time = max(time, published + (not (step > version and self.plan.is_predicted(stage))))
        return max(time, s.start(step, 0, self.rank) * scale) if published >= s.start(step, 0, s.owner(stage)) * scale else time

    # ---- this rank as an owner ------------------------------------------------------------------------------------------
    def _update(self, version: int) -> Iterator[Action]:
        """Compute ``version`` of the owned stage (version 0 is there from the start), and publish it."""
        s, scale, stage = self.schedule, self.plan.scale, self.stage
        time = -(10**18)
        if version:
            step, time, base = version - 1, s.update_time(version - 1, stage) * scale, version - 1 - self.step
            norm, phase, next_step = s.norm_time(step, stage) * scale, START, s.start(version, 0, self.rank) * scale
            if s.stalls and norm >= next_step:  # later owners need this rank's norm before they begin their next step
                norm, phase = next_step, END
            for i in self.plan.eager_units(self.rank):
                finished = self.plan.sum_finished(step, i)
                yield Action(finished, START, Kind.REDUCE_GRAD, s.rounds - 1, i, True, version=base)
            # scalars come from the owner before; rank 0 receives those that rank N-1 sent after the step before, or at the start
            src = (self.rank - 1) % s.ranks if s.ranks > 1 else None
            yield self._owner_action(norm, phase, Kind.GRAD_NORM, peer=src, stream="S", version=base)
            if s.exact_norm and self.rank == s.ranks - 1 and s.ranks > 1:
                yield self._owner_action(norm, phase, Kind.SEND_NORM, stream="T", version=base)
            waits = dict(peer=s.ranks - 1, stream="T") if s.exact_norm and self.rank < s.ranks - 1 else {}
            posts = tuple(self._finished_sum_posts(version))
            yield self._owner_action(time, START, Kind.OPTIMIZER_STEP, version=base, posts=posts, **waits)
        yield from self._publish(version, time)

    def _predict(self, version: int) -> Iterator[Action]:
        """Predict the version after this one of the owned stage, from the early sums of the step that reads this one."""
        plan, s, stage = self.plan, self.schedule, self.stage
        offsets = plan.v_layout(stage)[0] if plan.is_predicted(stage) else {}
        for i in offsets:
            sent = plan.unit(i).g_bytes and s.predictor(stage) != self.rank
            message: dict[str, Any] = dict(peer=s.predictor(stage), stream="E") if sent else {}
            place: dict[str, Any] = dict(region="W", offset=offsets[i], nbytes=plan.unit(i).p_bytes, version=version - self.step)
            yield Action(plan.predict_time(version, i), START, Kind.PREDICT_PARAM, s.rounds - 1, i, True, **message, **place)

    def _prediction_used(self) -> int:
        """Ticks from which the next early sums may land in the place of the predictions that this step reads."""
        plan, s, stage = self.plan, self.schedule, self.stage
        begin, own = s.start(self.step, 0, 0) * plan.scale, s.start(self.step, 0, self.rank) * plan.scale
        if self.rank == 0:  # reads its own
            return begin + plan.spans[plan.members(stage)[0], True][1]
        reader = type(self)(plan, 0, self.step)
        pulls = [a.time for a in reader._pulls(self.step) if plan.unit(a.unit).stage == stage and a.round == 0]
        return max([own, *(time + 1 for time in pulls)])

    def _owner_action(self, time: int, phase: int, kind: Kind, **rest: Any) -> Action:
        """An action about the whole stage."""
        return Action(time, phase, kind, 0, 0, False, **rest)

    def _publish(self, version: int, time: int) -> Iterator[Action]:
        """Offer a version of the owned stage to all its first readers."""
        for step in (version, version + 1):
            for v, m, reader in self.schedule.first_readers(step, self.stage):
                if v == version:
                    yield from self._publish_to(time, m, reader, version, step - version)

    def _publish_to(self, time: int, m: int, reader: int, version: int, lag: int) -> Iterator[Action]:
        region, offsets = self.plan.published_region(lag), self.plan.published_offsets(self.stage, lag)
        messages = [v for v in self.plan.messages if v[0] in offsets]
        for i, backward in ([(PERSISTENT, False)] if PERSISTENT in offsets else []) + messages:
            stream, nbytes = "H0" if i == PERSISTENT else "P0", self.plan.unit(i).p_bytes
            place = (region, offsets[i], nbytes, version - self.step)
            when = self._published(version, i, lag, backward) if lag and self.plan.is_predicted(self.stage) else time
            yield Action(when, START, Kind.PUBLISH_PARAM, m, i, backward, reader, stream, *place)

    # ---- credits --------------------------------------------------------------------------------------------------------
    def _release_posts(self, m: int, number: int) -> Iterator[Post]:
        """Credits once the parameters of visit ``number`` of round ``m`` are out of use."""
        return self._posts(m, RELEASES * number + 1)

    def _posts(self, m: int, release: int) -> Iterator[Post]:
        """Credits for parameters and sums that this release of round ``m`` grants (``StreamLayout.credits``)."""
        for stream in ("P", "G", "O"):
            yield from self._stream_posts(stream, m, release)

    def _ahead(self, m: int) -> tuple[int, int]:
        """(steps ahead, round) of round number ``m``, counted from the first round of this step."""
        return divmod(m, self.schedule.rounds)

    def _stream_posts(self, stream: str, m: int, release: int | None) -> Iterator[Post]:
        """The same for one stream; with m = -1 and no release, for all of a round's messages, as every region is free."""
        items, offsets, credits, _ = self.layouts[stream]
        every = sorted(x for granted in credits.values() for x in granted if x >= len(items))
        for x in every if release is None else credits.get(release, ()):
            ahead, round = self._ahead(m + x // len(items) - (stream == "O"))  # finished sums in a round are of the round before
            i, backward = items[x % len(items)]
            unit = self.plan.unit(i)
            if stream == "O":
                nbytes, region, last = unit.g_bytes, self.plan.o_region, self.schedule.ranks - 1
                src = last if self.rank != last and round == self.schedule.rounds - 1 else None
            elif stream == "P":
                (src, first), nbytes, region = self._source(ahead, round, unit.stage), unit.p_bytes, "PG"
                src = None if first else src  # first readers pull instead
            else:
                nbytes, region = unit.g_bytes, self.plan.g_region
                src = None if (round == 0 and self.rank == 0) or not nbytes else (self.rank - 1) % self.schedule.ranks
            if src is not None:
                yield Post(stream, src, region, offsets[i, backward], nbytes, ahead, round, i, backward)

    def _source(self, ahead: int, round: int, stage: int) -> tuple[int | None, bool]:
        """The sender of the stage's parameters, and whether this rank is their first reader."""
        at = (self.step + ahead, round, self.rank, stage)
        return self.schedule.source(*at), self.schedule.is_first(*at)

    def _persistent_posts(self, number: int) -> list[Post]:
        """Credits for the persistent parameters of round ``number`` since the flush; rounds use the two slots in turn."""
        if not self.plan.persistent:
            return []
        ahead, round = self._ahead(number - self.step * self.schedule.rounds)
        src, first = self._source(ahead, round, 0)
        posts = list(self._persistent_grad_posts(0)) if number == 0 else []
        if src is not None and not first:
            posts.insert(0, Post("H", src, "H", 0, self.plan.persistent.p_bytes, ahead, round, PERSISTENT, False))
        return posts

    def _persistent_grad_posts(self, m: int) -> Iterator[Post]:
        """The credit for their running sum of round ``m``."""
        assert self.plan.persistent
        ahead, round = self._ahead(m)
        if self.plan.persistent.g_bytes and self.schedule.ranks > 1 and (round or self.rank):
            src = (self.rank - 1) % self.schedule.ranks
            yield Post("GH", src, "GH", 0, self.plan.persistent.g_bytes, ahead, round, PERSISTENT, True)

    def _finished_sum_posts(self, step: int) -> list[Post]:
        """Credits for the owned stage's finished sums of ``step``, if they have a place of their own; in rank N-1's order."""
        last, round = self.schedule.ranks - 1, self.schedule.rounds - 1
        if self.rank == last or self.plan.sums_in_gaps:
            return []
        offsets, region, ahead = self.plan.o_layout(self.stage), self.plan.o_region, step - self.step
        return [
            Post("O", last, region, offsets[i], self.plan.unit(i).g_bytes, ahead, round, i, True)
            for i in reversed(self.plan.members(self.stage))
            if self.plan.unit(i).g_bytes
        ]

    def _early_sum_posts(self) -> list[Post]:
        """Credits for this step's early sums of the owned stage, in the order in which the predictor sends them."""
        plan, s = self.plan, self.schedule
        src, units = s.predictor(self.stage), plan.members(self.stage) if plan.is_predicted(self.stage) else ()
        if src == self.rank:
            return []
        return [
            Post("E", src, *plan.early_place(i), plan.unit(i).g_bytes, 0, s.rounds - 1, i, True)
            for i in reversed(units)
            if plan.unit(i).g_bytes
        ]
