"""How one rank's program of one step is made from the plan. Pure, no torch."""

from collections.abc import Iterator

from deepspeed_cdp.plan.actions import Action, Kind, Post
from deepspeed_cdp.plan.buffer_layout import update_in_round
from deepspeed_cdp.plan.constants import END, PERSISTENT, RELEASES, START
from deepspeed_cdp.plan.plan import Plan


class Builder:
    """Makes one rank's program of one step since the last flush."""

    def __init__(self, plan: Plan, rank: int, step: int):
        self.plan, self.schedule, self.rank, self.step = plan, plan.schedule, rank, step
        self.inbox, self.sums, finished = plan.layouts[rank]
        self.layouts = {"P": self.inbox, "G": self.sums, "O": finished}

    def initial_posts(self) -> tuple[Post, ...]:
        """See the function of this name."""
        posts = [*self.posts("P", -1, None), *self.posts("G", -1, None)]
        for c in (0, 1):
            posts += self.persistent_posts(c)
        return tuple(posts + self.sum_posts(0))

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
            yield from self._takes(step)
        for version in range(max(self.step - 1, 0), self.step + 2):
            yield from self._publish(version)

    def _action(self, kind: Kind, time: int, phase: int, round: int = 0, unit: int = 0, backward: bool = False, **rest) -> Action:
        return Action(time, phase, kind, round, unit, backward, **rest)

    # ---- this rank's own passes -----------------------------------------------------------------------------------------
    def _passes(self) -> Iterator[Action]:
        plan, s = self.plan, self.schedule
        at, over = update_in_round(plan, self.rank) if plan.sums_between else (0, -1)  # (a release that there is not)
        for m in range(s.rounds):
            begin = s.start(self.step, m, self.rank) * plan.scale
            end = begin + 2 * s.ranks * plan.scale
            if plan.persistent:
                yield from self._read(begin, m, PERSISTENT, False, 0)
            for number, (i, backward) in enumerate(plan.visits):
                start, stop = (begin + x for x in plan.spans[i, backward])
                yield from self._read(start, m, i, backward, self.inbox.offsets.get((i, backward), 0))
                if backward or not plan.kept(i):
                    yield self._action(Kind.RELEASE_PARAM, stop, END, m, i, backward, posts=tuple(self.done_posts(m, number)))
                if backward and plan.units[i].g_bytes:
                    yield from self._sum(Kind.RECV_GRAD, start, START, m, i)
                    yield from self._pass(Kind.SEND_GRAD, stop, m, i, tuple(self.in_flight(m, RELEASES * number + 2)))
            if posts := tuple(self.in_flight(m, RELEASES * over)):
                yield self._action(Kind.GRANT_CREDIT, begin + at, START, m, posts=posts)
            if plan.persistent:
                if plan.persistent.g_bytes:
                    yield from self._sum(Kind.RECV_PERSISTENT_GRAD, end, END, m, PERSISTENT)
                    yield from self._pass(
                        Kind.SEND_PERSISTENT_GRAD, end, m, PERSISTENT, tuple(self._persistent_grad_posts(m + 1))
                    )
                yield self._action(
                    Kind.RELEASE_PERSISTENT_PARAM,
                    end,
                    END,
                    m,
                    PERSISTENT,
                    True,
                    posts=tuple(self.persistent_posts(self.step * s.rounds + m + 2)),
                )

    def _read(self, time: int, m: int, i: int, backward: bool, offset: int) -> Iterator[Action]:
        s, unit = self.schedule, self.plan.unit(i)
        src = s.source(self.step, m, self.rank, unit.stage)
        stream = ("H" if i == PERSISTENT else "P") + ("0" if s.is_first(self.step, m, self.rank, unit.stage) else "")
        version = s.version(self.step, m, self.rank, unit.stage) - self.step
        place = dict(region="H" if i == PERSISTENT else "PG", offset=offset)
        if src is None:
            place = dict(region="V", offset=self.plan.v_layout(unit.stage)[0][i])
        if backward and self.plan.kept(i):  # it is still there from the forward
            yield self._action(Kind.WAIT_PARAM, time, START, m, i, True, nbytes=unit.p_bytes, version=version, **place)
            return
        yield self._action(
            Kind.WAIT_PARAM,
            time,
            START,
            m,
            i,
            backward,
            peer=src,
            stream=stream if src is not None else "",
            nbytes=unit.p_bytes,
            version=version,
            **place,
        )
        if s.relays(self.step, m, self.rank, unit.stage):
            after = (self.rank + 1) % s.ranks
            there = 0 if i == PERSISTENT else self.plan.p_layouts[after].offsets[i, backward]
            into = ("H" if i == PERSISTENT else "PG", there, m + (self.rank == s.ranks - 1))
            yield self._action(
                Kind.FORWARD_PARAM,
                time,
                START,
                m,
                i,
                backward,
                peer=after,
                stream="H" if i == PERSISTENT else "P",
                nbytes=unit.p_bytes,
                version=version,
                into=into,
                **place,
            )

    def _sum(self, kind: Kind, time: int, phase: int, m: int, i: int) -> Iterator[Action]:
        s, nbytes = self.schedule, self.plan.unit(i).g_bytes
        if s.ranks == 1:  # nobody to hand it to: sum in place
            yield self._action(
                kind, time, phase, m, i, True, region=self.plan.o_region, offset=self.plan.o_layout(0)[i], nbytes=nbytes
            )
            return
        src = None if m == 0 and self.rank == 0 else (self.rank - 1) % s.ranks
        stream = "" if src is None else "GH" if i == PERSISTENT else "G"
        yield self._action(kind, time, phase, m, i, True, peer=src, stream=stream, nbytes=nbytes, **self._running(i))

    def _running(self, i: int) -> dict[str, str | int]:
        """Where the unit's running sum lies on this rank."""
        if i == PERSISTENT:
            return dict(region="GH", offset=0)
        return dict(region=self.plan.g_region, offset=self.sums.offsets[i, True])

    def _pass(self, kind: Kind, time: int, m: int, i: int, posts: tuple[Post, ...]) -> Iterator[Action]:
        s, unit = self.schedule, self.plan.unit(i)
        if s.ranks == 1:
            return
        peer = (self.rank + 1) % s.ranks
        stream, region, offset = (
            ("GH", "GH", 0) if i == PERSISTENT else ("G", self.plan.g_region, self.plan.g_layouts[peer].offsets[i, True])
        )
        if m == s.rounds - 1 and self.rank == s.ranks - 1:
            stream, peer, region, offset = "O", s.owner(unit.stage), self.plan.o_region, self.plan.o_layout(unit.stage)[i]
        yield self._action(
            kind,
            time,
            END,
            m,
            i,
            True,
            peer=peer,
            stream=stream,
            nbytes=unit.g_bytes,
            posts=posts,
            into=(region, offset, m),
            **self._running(i),
        )

    def _takes(self, step: int) -> Iterator[Action]:
        """As a first reader, let the owner's offers in: two positions before they are read, but not before they are made."""
        s, plan = self.schedule, self.plan
        for m in range(s.rounds):
            for i, backward in ([(PERSISTENT, False)] if plan.persistent else []) + list(plan.messages):
                stage = plan.unit(i).stage
                src, first = self._origin(step - self.step, m, stage)
                if src is None or not first:
                    continue
                begin = 0 if i == PERSISTENT else plan.spans[i, backward][0]
                time = (s.start(step, m, self.rank) - 2) * plan.scale + begin
                version = s.version(step, m, self.rank, stage)
                if step:  # (version 0 is there earlier, but all later steps are to have one program)
                    made = s.update_time(version - 1, stage)
                    time = max(time, made * plan.scale + 1)
                    if made >= s.start(step, 0, src):  # in the owner's same step: this rank must have begun it too
                        time = max(time, s.start(step, 0, self.rank) * plan.scale)
                stream, region, offset = ("H0", "H", 0) if i == PERSISTENT else ("P0", "PG", self.inbox.offsets[i, backward])
                post = Post(
                    stream,
                    src,
                    region,
                    offset,
                    plan.unit(i).p_bytes,
                    step - self.step,
                    m,
                    i,
                    backward,
                    plan.v_layout(stage)[0][i],
                    version - step,
                )
                yield self._action(Kind.PULL_PARAM, time, START, m, i, backward, peer=src, stream=post.stream, posts=(post,))

    # ---- this rank as an owner ------------------------------------------------------------------------------------------
    def _publish(self, version: int) -> Iterator[Action]:
        """How ``version`` of the owned stage comes to be (0: it is there from the start), and to whom it is offered."""
        s, scale, stage = self.schedule, self.plan.scale, self.schedule.owned(self.rank)
        time, base = -(10**18), version - 1 - self.step  # of the parameters that the update starts from
        if version:
            step, time = version - 1, s.update_time(version - 1, stage) * scale
            norm, phase, high = s.norm_time(step, stage) * scale, START, s.start(version, 0, self.rank) * scale
            if s.stalls and norm >= high:  # owners later in the ring are between steps when they need this rank's norm
                norm, phase = high, END
            for i in self.plan.averaged(self.rank):
                yield self._action(Kind.REDUCE_GRAD, self.plan.summed(step, i), START, s.rounds - 1, i, True, version=base)
            # the scalars come from the owner before; rank 0 takes up what rank N-1 sent after the step before, or at the start
            src = (self.rank - 1) % s.ranks if s.ranks > 1 else None
            yield self._action(Kind.GRAD_NORM, norm, phase, peer=src, stream="S", version=base)
            if s.exact_norm and self.rank == s.ranks - 1 and s.ranks > 1:
                yield self._action(Kind.SEND_NORM, norm, phase, stream="T", version=base)
            waits = s.exact_norm and self.rank < s.ranks - 1
            yield self._action(
                Kind.OPTIMIZER_STEP,
                time,
                START,
                peer=s.ranks - 1 if waits else None,
                stream="T" if waits else "",
                version=base,
                posts=tuple(self.sum_posts(version)),
            )
        yield from self._offered(version, time)

    def _offered(self, version: int, time: int) -> Iterator[Action]:
        s, stage = self.schedule, self.schedule.owned(self.rank)
        for step in (version, version + 1):
            for v, m, reader in s.first_readers(step, stage):
                if v == version:
                    yield from self._offers(time, m, reader, version - self.step)

    def _offers(self, time: int, m: int, reader: int, version: int) -> Iterator[Action]:
        offsets = self.plan.v_layout(self.schedule.owned(self.rank))[0]
        messages = [v for v in self.plan.messages if v[0] in offsets]
        for i, backward in ([(PERSISTENT, False)] if PERSISTENT in offsets else []) + messages:
            yield self._action(
                Kind.PUBLISH_PARAM,
                time,
                START,
                m,
                i,
                backward,
                peer=reader,
                stream="H0" if i == PERSISTENT else "P0",
                region="V",
                offset=offsets[i],
                nbytes=self.plan.unit(i).p_bytes,
                version=version,
            )

    # ---- what a release lets in -----------------------------------------------------------------------------------------
    def done_posts(self, m: int, number: int) -> Iterator[Post]:
        """What may land once the parameters of visit ``number`` of round ``m`` are out of use."""
        return self.in_flight(m, RELEASES * number + 1)

    def in_flight(self, m: int, release: int) -> Iterator[Post]:
        """Parameters and sums that may land after this release of round ``m`` (``StreamLayout.lets``)."""
        for stream in ("P", "G", "O"):
            yield from self.posts(stream, m, release)

    def _place(self, m: int) -> tuple[int, int]:
        """(steps ahead, round) of round number m counted from this step's first."""
        return divmod(m, self.schedule.rounds)

    def posts(self, stream: str, m: int, release: int | None) -> Iterator[Post]:
        """Its messages that may land after this release of round ``m``; with m = -1 and None, once everything is free."""
        items, offsets, lets, _ = self.layouts[stream]
        allowed = lets.get(release, ()) if release is not None else sorted(x for v in lets.values() for x in v if x >= len(items))
        for x in allowed:
            ahead, round = self._place(m + x // len(items) - (stream == "O"))  # what a round has are sums of the round before
            i, backward = items[x % len(items)]
            unit = self.plan.unit(i)
            if stream == "O":
                nbytes, region, last = unit.g_bytes, self.plan.o_region, self.schedule.ranks - 1
                src = last if self.rank != last and round == self.schedule.rounds - 1 else None
            elif stream == "P":
                (src, first), nbytes, region = self._origin(ahead, round, unit.stage), unit.p_bytes, "PG"
                src = None if first else src  # offers are taken, see _takes
            else:
                nbytes, region = unit.g_bytes, self.plan.g_region
                src = None if (round == 0 and self.rank == 0) or not nbytes else (self.rank - 1) % self.schedule.ranks
            if src is not None:
                yield Post(stream, src, region, offsets[i, backward], nbytes, ahead, round, i, backward)

    def _origin(self, ahead: int, round: int, stage: int) -> tuple[int | None, bool]:
        at = (self.step + ahead, round, self.rank, stage)
        return self.schedule.source(*at), self.schedule.is_first(*at)

    def persistent_posts(self, number: int) -> list[Post]:
        """The persistent parameters of round ``number`` since the flush; their slot is the number's parity."""
        if not self.plan.persistent:
            return []
        ahead, round = self._place(number - self.step * self.schedule.rounds)
        src, first = self._origin(ahead, round, 0)
        posts = (
            []
            if src is None or first
            else [Post("H", src, "H", 0, self.plan.persistent.p_bytes, ahead, round, PERSISTENT, False)]
        )
        return posts + (list(self._persistent_grad_posts(0)) if number == 0 else [])

    def _persistent_grad_posts(self, m: int) -> Iterator[Post]:
        ahead, round = self._place(m)
        if self.plan.persistent.g_bytes and self.schedule.ranks > 1 and (round or self.rank):
            src = (self.rank - 1) % self.schedule.ranks
            yield Post("GH", src, "GH", 0, self.plan.persistent.g_bytes, ahead, round, PERSISTENT, True)

    def sum_posts(self, step: int) -> list[Post]:
        """The finished sums of the owned stage in ``step`` that have a place of their own, as rank N-1 finishes them."""
        stage, last = self.schedule.owned(self.rank), self.schedule.ranks - 1
        if self.rank == last or self.plan.sums_between:
            return []
        places, ahead, round = self.plan.o_layout(stage), step - self.step, self.schedule.rounds - 1
        return [
            Post("O", last, self.plan.o_region, places[i], self.plan.unit(i).g_bytes, ahead, round, i, True)
            for i in reversed(self.plan.members(stage))
            if self.plan.unit(i).g_bytes
        ]
