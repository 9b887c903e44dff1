"""Dry-run of all ranks: shows that a plan neither deadlocks, nor mixes versions, nor overwrites bytes in use.

Messages carry tags instead of bytes: unit and version of parameters, or unit and number of micro-batches of a gradient sum. The
run checks that

- an action waits only for actions of an earlier step, or of the same step and a smaller logical time. So no cycle of waits can
  form, not even with a user's barrier between two steps (docs/algorithm.md#why-it-cannot-deadlock);
- each rank runs its actions in logical order;
- posts and pushes of each edge match in order, size, place and content, and none is left over at the end;
- each pass runs once a round and reads the version that the schedule says;
- each owner updates once a step, with the gradients of all N k micro-batches, in order;
- a sum is offered once it is back and complete, it may come back only once it has been pulled, and predictions are made of a sum
  that cannot change meanwhile;
- no region is posted or overwritten while its content is still to be read or forwarded;
- the run ends under all ``CONDITIONS``.
"""

import itertools
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from deepspeed_cdp.plan.actions import Action, Kind, Post
from deepspeed_cdp.plan.builder import after_passes
from deepspeed_cdp.plan.constants import PERSISTENT
from deepspeed_cdp.plan.plan import Plan
from deepspeed_cdp.plan.program import backward_end, build, forward_ends, initial_posts
from deepspeed_cdp.verify.state import BEFORE, Key, Landing, Place, Push, Rank, Tag
from deepspeed_cdp.verify.well_formed import PlanError

OFFERS = (Kind.PUBLISH_PARAM, Kind.OFFER_GRAD)  # the receiver pulls
Result = TypeVar("Result")
Programs = Callable[[int, bool], Sequence[Action]]
Posts = Callable[[int], Sequence[Post]]

CONDITIONS: tuple[dict[str, bool], ...] = (
    {},
    {"blocking": True},
    {"barrier": True},
)  # arguments of DryRun under which a plan must end


class DryRun:
    """One dry-run; ``log`` holds (rank, step, action) in the order in which they were done.

    Args:
        programs, posts: replace the plan's own, in tests.
        blocking: a push blocks its rank until the message has landed.
        barrier: all ranks wait for each other after every step.
        meeting: all ranks wait for each other between the forward and the backward of every micro-batch, and behind a step's last
            backward.
    """

    def __init__(
        self,
        plan: Plan,
        steps: int,
        programs: Programs | None = None,
        posts: Posts | None = None,
        blocking: bool = False,
        barrier: bool = False,
        meeting: bool = False,
    ):
        self.plan, self.schedule, self.steps = plan, plan.schedule, steps
        self.blocking, self.barrier, self.meeting = blocking, barrier, meeting
        n, programs = self.schedule.ranks, programs or (lambda rank, first: build(plan, rank, first))
        self.ranks, self.steady = [Rank(r, programs(r, True)) for r in range(n)], [programs(r, False) for r in range(n)]
        self.o_layouts = [plan.o_layout(self.schedule.owned(r)) for r in range(n)]
        self.v_layouts = [plan.copy_offsets(self.schedule.owned(r)) for r in range(n)]
        self.written = [[plan.written(version, self.schedule.owned(r)) for version in (0, 1)] for r in range(n)]  # by parity
        self.pushes: dict[tuple[str, int, int], deque[Push]] = {}
        self.landings: dict[tuple[str, int, int], deque[Landing]] = {}
        self.period = self.schedule.period * plan.scale
        visits = ((PERSISTENT, False), *plan.visits) if plan.persistent else plan.visits
        self.order = [(m, *visit) for m in range(self.schedule.rounds) for visit in visits]
        self.log: list[tuple[int, int, Action]] = []
        self._meeting_places: dict[int, list[int]] = {}  # id of a program -> indices before which ranks meet
        self.handlers: dict[Kind, Callable[[Rank, Action], bool]] = {
            Kind.WAIT_PARAM: self._wait_param,
            Kind.FORWARD_PARAM: self._forward_param,
            Kind.RELEASE_PARAM: self._release,
            Kind.RELEASE_PERSISTENT_PARAM: self._release,
            Kind.RECV_GRAD: self._recv_grad,
            Kind.RECV_PERSISTENT_GRAD: self._recv_grad,
            Kind.SEND_GRAD: self._send_grad,
            Kind.SEND_PERSISTENT_GRAD: self._send_grad,
            Kind.OFFER_GRAD: self._offer_grad,
            Kind.PREDICT_PARAM: self._predict,
            Kind.REDUCE_GRAD: self._reduce_grad,
            Kind.GRAD_NORM: self._grad_norm,
            Kind.SEND_NORM: self._send_norm,
            Kind.OPTIMIZER_STEP: self._optimizer_step,
            Kind.PUBLISH_PARAM: self._publish_param,
            Kind.PULL_PARAM: self._only_posts,
            Kind.PULL_GRAD: self._only_posts,
            Kind.GRANT_CREDIT: self._only_posts,
        }
        for rank in self.ranks:
            self._new_version(rank, 0)
            if plan.is_predicted(owned := self.schedule.owned(rank.number)):
                for copy in range(plan.corrected_copies(owned)):
                    rank.content.update({(f"W{copy}", at): ("corrected", i, 0) for i, at in plan.v_layout(owned)[0].items()})
            for post in posts(rank.number) if posts else initial_posts(plan, rank.number):
                self._post(rank, BEFORE, post, None)
        if n > 1:
            self.ranks[0].scalars["S", n - 1] = deque([(BEFORE, -1)])

    def run(self) -> None:
        """Run all ranks to the end of their last step.

        Raises:
            PlanError: a rule is broken.
        """
        while True:
            moved, floor = False, min(rank.step for rank in self.ranks)
            for rank in self.ranks:
                moved |= self.advance(rank, floor)
            if all(rank.step >= self.steps and not (rank.relays and rank.relays[0][0] < self.steps) for rank in self.ranks):
                break  # some ranks may be a step ahead, since a push may wait for a reader's next step
            if not moved:
                stuck = "; ".join(text for _, text in sorted(self._waiting()))  # what the first one needs is missing
                raise PlanError(f"nothing moves any more: {stuck}")
        for push in itertools.chain(*self.pushes.values()):
            # the step that must receive it
            last = push.tag[2] + 1 if push.action.kind == Kind.PUBLISH_PARAM else push.step
            if last < self.steps:
                raise PlanError(f"rank {push.rank}, step {push.step}: {push.action}: is never received")
        for (_, _, to), landings in self.landings.items():
            for landing in landings:
                if landing.step < self.steps:
                    raise PlanError(f"rank {to}, step {landing.step}: {landing.by or 'before the first action'}: nothing comes")

    def advance(self, rank: Rank, floor: int) -> bool:
        """Do what the rank can do now. Returns whether that was anything.

        Args:
            floor: step of the rank that is furthest behind, for ``barrier``.
        """
        moved = False
        while rank.step <= self.steps and not (self.barrier and rank.step > floor):
            if rank.cursor == len(rank.program):
                self._end_step(rank)
            elif not self._may_act(rank) or not self._sensible(rank, lambda: self._try(rank, rank.program[rank.cursor])):
                break
            moved = True
        while rank.relays and self._relayed(rank):
            moved = True
        return moved

    def _waiting(self) -> Iterator[tuple[Key, str]]:
        """What ranks and relays wait for."""
        for rank in self.ranks:
            now = rank.step, rank.cursor, rank.program
            for place in ([now] if rank.cursor < len(rank.program) else []) + [x[:3] for x in list(rank.relays)[:1]]:
                rank.step, rank.cursor, rank.program = place
                yield self._key(rank, rank.program[rank.cursor]), str(self._error(rank, "waits"))
            rank.step, rank.cursor, rank.program = now

    def _may_act(self, rank: Rank) -> bool:
        """Whether all ranks that meet before the rank's next action have come there."""
        return not self.meeting or self._met(rank)

    def _met(self, rank: Rank) -> bool:
        """Whether all ranks have come to the last meeting that this rank has come to."""
        here = self._meetings(rank)
        return all(self._meetings(other) >= here for other in self.ranks if other.step < self.steps)

    def _meetings(self, rank: Rank) -> int:
        places = self._meeting_places.get(id(rank.program))
        if places is None:
            places = self._meeting_places[id(rank.program)] = [*forward_ends(rank.program).values(), backward_end(rank.program)]
        return rank.step * (self.schedule.rounds + 1) + sum(index <= rank.cursor for index in places)

    def _sensible(self, rank: Rank, do: Callable[[], Result]) -> Result:
        try:
            return do()
        except PlanError:
            raise
        except (LookupError, ValueError, TypeError, AssertionError) as error:  # an action with impossible fields
            raise self._error(rank, f"makes no sense ({type(error).__name__}: {error})") from error

    # ---- names -------------------------------------------------------------------------------------------------
    def _error(self, rank: Rank, reason: str) -> PlanError:
        return PlanError(f"rank {rank.number}, step {rank.step}: {rank.program[rank.cursor]}: {reason}")

    def _key(self, rank: Rank, a: Action) -> Key:
        time = a.time + max(rank.step - 1, 0) * self.period  # later steps run the program of step 1
        # a prediction is made, published, pulled and read in one tick, in the order of the kinds
        predicts = a.kind == Kind.PREDICT_PARAM or a.stream == "W0"
        return rank.step, after_passes(self.plan, rank.number, min(rank.step, 1), a), time, a.phase, a.order if predicts else 0

    def _at(self, rank: Rank, a: Action) -> Place:
        """Region and offset of an action's bytes in this step."""
        if a.region == "H":
            return "H", (rank.step * self.schedule.rounds + a.round) % 2
        return self.plan.region_of(a.region, rank.step + a.version), a.offset

    def _params(self, unit: int, step: int, version: int) -> Tag:
        """The parameters that a reader of this version needs in ``step``."""
        return "corrected" if self.plan.is_corrected(step - version) else "p", unit, version

    def _expected(self, r: int, step: int, post: Post) -> Tag:
        """The content that must land there by the schedule."""
        n, m = self.schedule.ranks, post.round
        if post.stream in ("P", "P0", "W0"):
            return self._params(post.unit, step, self.schedule.version(step, m, r, self.plan.unit(post.unit).stage))
        return "g", post.unit, step, m * n + (r if post.stream == "G0" else post.src + 1)

    # ---- one action -----------------------------------------------------------------------------------------------------
    def _try(self, rank: Rank, a: Action) -> bool:
        """Do the action, then its posts, if everything it waits for has happened."""
        if a.relayed:
            self._check_begun(rank, a)
            rank.relays.append([rank.step, rank.cursor, rank.program, False])
            rank.cursor += 1
            return True
        if not rank.acted and self.blocking and rank.blocked:
            return False
        rank.acted, done = self._perform(rank, a, rank.acted)
        if done:
            rank.acted, rank.cursor = False, rank.cursor + 1
        return done

    def _relayed(self, rank: Rank) -> bool:
        """Do the rank's next relay, then its posts, if everything it waits for has happened."""
        now, relay = (rank.step, rank.cursor, rank.program), rank.relays[0]
        rank.step, rank.cursor, rank.program, acted = relay
        try:
            relay[3], done = self._sensible(rank, lambda: self._perform(rank, rank.program[rank.cursor], acted))
        finally:
            rank.step, rank.cursor, rank.program = now
        if done:
            rank.relays.popleft()
        return done

    def _perform(self, rank: Rank, a: Action, acted: bool) -> tuple[bool, bool]:
        """Do the action unless it is done, then its posts. Returns whether the action is done, and whether all is."""
        if not acted:
            if not self._act(rank, a):
                return False, False
            self.log.append((rank.number, rank.step, a))
        if any(self._still_read(rank, x.region, self._slot(rank, x), x.nbytes) for x in a.posts):
            return True, False
        for post in a.posts:
            self._post(rank, self._key(rank, a), post, a)
        return True, True

    def _act(self, rank: Rank, a: Action) -> bool:
        return self.handlers[a.kind](rank, a)

    def _only_posts(self, rank: Rank, a: Action) -> bool:
        return True

    # ---- passes ---------------------------------------------------------------------------------------------------------
    def _release(self, rank: Rank, a: Action) -> bool:
        persistent = a.kind == Kind.RELEASE_PERSISTENT_PARAM
        place = rank.using.pop((a.round, a.unit, a.backward and not persistent), None)
        if place is None or persistent and not self._round_over(rank, a):
            raise self._error(rank, "ends a pass that is not under way, or too early")
        self._leave(rank, a, place)
        return True

    def _leave(self, rank: Rank, a: Action, place: Place) -> None:
        """The end of a pass that has read from this place."""
        if place[0][0] not in "VW":
            self._free(rank, *place)

    def _end_step(self, rank: Rank) -> None:
        if missing := list(rank.using) + self.order[rank.reads :]:
            raise PlanError(
                f"rank {rank.number}, step {rank.step}: RELEASE_PARAM is missing for (round, unit, backward) {missing}"
            )
        rank.step, rank.cursor, rank.reads, rank.program = rank.step + 1, 0, 0, self.steady[rank.number]

    def _round_over(self, rank: Rank, a: Action) -> bool:
        """Whether all passes of the round have ended, but for the persistent parameters."""
        return rank.reads * self.schedule.rounds == (a.round + 1) * len(self.order) and all(
            i == PERSISTENT for _, i, _ in rank.using
        )

    def _wait_param(self, rank: Rank, a: Action) -> bool:
        if a.peer is not None and not self._arrived(rank, a):
            return False
        place, version, stage = self._at(rank, a), rank.step + a.version, self.plan.unit(a.unit).stage
        got, want = rank.content.get(place), self.schedule.version(rank.step, a.round, rank.number, stage)
        if place[0][0] == "W" and self._predicting(rank, a.unit):
            return False
        if version != want or got != self._params(a.unit, rank.step, want):
            raise self._error(rank, f"reads {got} as version {version} where the schedule says {want}")
        if self.order[rank.reads : rank.reads + 1] != [(a.round, a.unit, a.backward)]:
            raise self._error(rank, f"is out of order; next is (round, unit, backward) {self.order[rank.reads : rank.reads + 1]}")
        if a.backward and self.plan.kept(a.unit) and rank.using.pop((a.round, a.unit, False), None) != place:
            raise self._error(rank, "does not read the place of its forward")
        rank.using[a.round, a.unit, a.backward] = place
        rank.reads += 1
        return True

    def _recv_grad(self, rank: Rank, a: Action) -> bool:
        if a.stream == "G" and a.into[:2] != ("", a.peer):
            raise self._error(rank, f"waits for a sum of rank {a.into[1]}")
        if a.region == "O" and (self._still_read(rank, a.region, a.offset, a.nbytes) or self._predicting(rank, a.unit)):
            return False
        if a.peer is not None and not self._arrived(rank, a, a.stream == "G"):
            return False
        if not (self._round_over(rank, a) if a.unit == PERSISTENT else (a.round, a.unit, a.backward) in rank.using):
            raise self._error(rank, "is not in the unit's backward")
        if any(i == a.unit for _, i in rank.adding):
            raise self._error(rank, "comes while this rank adds to the sum of a round before")
        q, place = a.round * self.schedule.ranks + rank.number, self._at(rank, a)
        if (place[0] == "O") != self._owns(rank, a) or place[0] == "O" and place[1] != self.o_layouts[rank.number].get(a.unit):
            raise self._error(rank, "adds to a sum in another place than its owner's")
        want = ("g", a.unit, rank.step, q)
        if q and rank.content.get(place) != want:
            raise self._error(rank, f"adds to {rank.content.get(place)} where it should find {want}")
        if not q:
            if self._still_read(rank, *place, a.nbytes):
                return False
            self._claim(rank, *place, a.nbytes)
        rank.content[place] = ("g", a.unit, rank.step, q + 1)
        rank.adding.add((a.round, a.unit))
        return True

    def _owns(self, rank: Rank, a: Action) -> bool:
        return self._stage(a) == self.schedule.owned(rank.number)

    def _offer_grad(self, rank: Rank, a: Action) -> bool:
        """The owner offers a sum, which has come back or which it has added to, to the next rank."""
        _, source, m = a.into
        if source != rank.number and not self._arrived(rank, a, True):
            return False
        after = self.schedule.neighbor(m, source, 1)
        if m != a.round or after is None or after[1] != a.peer:
            raise self._error(rank, "offers a sum to a rank that does not need it next")
        self._check_content(rank, a, ("g", a.unit, rank.step, m * self.schedule.ranks + source + 1))
        self._push(rank, a)
        return True

    def _check_begun(self, rank: Rank, a: Action) -> None:
        """What a relay needs of this rank's own passes, for which it does not wait, has happened when it begins."""
        if a.kind == Kind.OFFER_GRAD and a.into[1] == rank.number:
            self._check_content(rank, a, ("g", a.unit, rank.step, a.into[2] * self.schedule.ranks + rank.number + 1))
            if (a.into[2], a.unit) in rank.adding:
                raise self._error(rank, "offers a sum that this rank still adds to")
        if a.kind == Kind.PREDICT_PARAM:
            if (a.round, a.unit) in rank.adding:
                raise self._error(rank, "predicts from a sum that this rank still adds to")
            if self._at(rank, a) in rank.using.values():
                raise self._error(rank, "overwrites a prediction that a pass of this rank reads")

    def _predicting(self, rank: Rank, unit: int) -> bool:
        """Whether a prediction of the owned unit has begun and is not made yet."""
        under_way = (program[cursor] for _, cursor, program, _ in rank.relays)
        return any(a.kind == Kind.PREDICT_PARAM and a.unit == unit for a in under_way)

    # ---- owners ---------------------------------------------------------------------------------------------------------
    def _reduce_grad(self, rank: Rank, a: Action) -> bool:
        if a.unit not in self.o_layouts[rank.number] or (a.round, a.backward) != (self.schedule.rounds - 1, True):
            raise self._error(rank, "averages a sum that this rank does not own, or that is not finished")
        if not self._overwritable(rank, a, [a.unit]) or not self._take_sums(rank, a, [a.unit]):
            return False
        self._overwrite(rank, a, [a.unit])
        rank.averaged.append(a.unit)
        return True

    def _grad_norm(self, rank: Rank, a: Action) -> bool:
        step, r, s = rank.step + a.version, rank.number, self.schedule
        eager = self.plan.eager_units(r)
        together = [i for i in self.o_layouts[r] if i not in eager]
        if self._landed(rank, step, together) is None or not self._scalar(rank, a, "S", step if r else step - 1):
            return False
        self._take_sums(rank, a, together)
        if self.plan.sums_apart:  # copied
            self._sums_used(rank)
        if sorted(rank.averaged) != sorted(eager):
            raise self._error(rank, f"computes the norm of step {step}, but only units {rank.averaged} are averaged")
        rank.normed += 1
        self._send_scalar(rank, a, "S", (r + 1) % s.ranks, step)
        return True

    def _landed(self, rank: Rank, step: int, units: Sequence[int]) -> list[tuple] | None:
        """The messages with these units' finished sums; None before all have arrived, and while predictions need them."""
        last = self.schedule.ranks - 1
        messages = [("G", last, step, self.schedule.rounds - 1, i, True) for i in units if rank.number != last]
        there = all(m in rank.landed for m in messages) and not any(self._predicting(rank, i) for i in units)
        return messages if there else None

    def _take_sums(self, rank: Rank, a: Action, units: Sequence[int]) -> bool:
        """Take these units' finished sums, if all have arrived."""
        step, s = rank.step + a.version, self.schedule
        messages = self._landed(rank, step, units)
        if messages is None:
            return False
        if rank.normed != step or rank.version != step:
            raise self._error(rank, f"takes the sums of step {step} after {rank.normed} norms and {rank.version} updates")
        for message in messages:
            self._earlier(rank, a, rank.landed.pop(message)[0], "a push")
        for i in units:
            want, got = ("g", i, step, s.ranks * s.rounds), rank.content.get(("O", self.o_layouts[rank.number][i]))
            if got != want or (s.rounds - 1, i) in rank.adding:
                raise self._error(rank, f"finds {got} where the finished sum {want} should be")
        return True

    def _overwritable(self, rank: Rank, a: Action, units: Sequence[int]) -> bool:
        """Whether no push still reads from these units' next published copies."""
        places = self._written(rank, a)
        return not any(self._still_read(rank, copy, at[i], self.plan.unit(i).p_bytes) for copy, at in places for i in units)

    def _written(self, rank: Rank, a: Action) -> list[tuple[str, dict[int, int]]]:
        """The places that the update of ``a`` writes."""
        return self.written[rank.number][(rank.step + a.version + 1) % 2]

    def _overwrite(self, rank: Rank, a: Action, units: Sequence[int]) -> None:
        """From here to the end of the update, these copies hold neither the old version nor the new one."""
        for (copy, places), i in itertools.product(self._written(rank, a), units):
            place = copy, places[i]
            if copy[0] in "VW" and place in rank.using.values():
                raise self._error(rank, f"overwrites published copy {copy} of unit {i} while a pass of this rank reads it")
            self._earlier(rank, a, rank.pulled.pop(place, BEFORE), "a reader")
            rank.content.pop(place, None)

    def _predict(self, rank: Rank, a: Action) -> bool:
        step, place, owned = rank.step + a.version, self._at(rank, a), self.schedule.owned(rank.number)
        if a.version or (a.round, a.backward) != (self.schedule.rounds - 1, True):
            raise self._error(rank, "predicts from other sums than the schedule says")
        if (a.region[0], a.offset) != ("W", self.plan.v_layout(owned)[0].get(a.unit)):
            raise self._error(rank, "predicts into another place than its readers'")
        if rank.predicted.get(a.unit, 0) != step:
            raise self._error(rank, f"predicts version {step + 1} after version {rank.predicted.get(a.unit, 0)}")
        if step == 0:  # the correction of version 0 is version 0
            rank.predicted[a.unit] = 1
            return True
        if self.plan.unit(a.unit).g_bytes:
            src = self.schedule.predictor(owned)
            want = ("g", a.unit, step, a.round * self.schedule.ranks + src + 1)
            got = rank.content.get(("O", self.o_layouts[rank.number][a.unit]), ())
            if got[2:] > want[2:] or self._may_come(rank, a.unit, step, want[3] + 1):
                raise self._error(rank, f"predicts from {got}, or what comes next, where it should find {want}")
            message = ("G", src, step, a.round, a.unit, True)
            if got != want:
                return False
            if message in rank.landed:
                self._earlier(rank, a, rank.landed[message][0], "a push")
        if self._still_read(rank, *place, a.nbytes):
            return False
        if self.plan.unit(a.unit).g_bytes and (rank.version != step or a.unit in rank.averaged):
            raise self._error(rank, f"predicts version {step + 1} from version {rank.version}")
        self._earlier(rank, a, rank.pulled.pop(place, BEFORE), "a reader")
        rank.content[place] = ("corrected", a.unit, step)
        rank.predicted[a.unit] = step + 1
        return True

    def _may_come(self, rank: Rank, unit: int, step: int, count: int) -> bool:
        """Whether this rank lets a sum of so many micro-batches in."""
        round, src = divmod(count - 1, self.schedule.ranks)
        granted = self.landings.get(("G", src, rank.number), ())
        return any((x.step, x.post.unit, x.post.round) == (step, unit, round) for x in granted)

    def _stage(self, a: Action) -> int:
        return self.plan.unit(a.unit).stage

    def _send_norm(self, rank: Rank, a: Action) -> bool:
        if rank.normed != rank.step + a.version + 1:
            raise self._error(rank, f"comes after {rank.normed} norms")
        for peer in range(self.schedule.ranks - 1):
            self._send_scalar(rank, a, "T", peer, rank.normed - 1)
        return True

    def _optimizer_step(self, rank: Rank, a: Action) -> bool:
        step = rank.step + a.version
        together = [i for i in self.v_layouts[rank.number] if i not in rank.averaged]
        if not self._overwritable(rank, a, together) or not self._scalar(rank, a, "T", step):
            return False
        if rank.normed != step + 1 or rank.version != step:
            raise self._error(rank, f"updates {rank.version} to {step + 1} with the finished sums of {rank.normed} steps")
        self._overwrite(rank, a, together)
        rank.averaged.clear()
        if not self.plan.sums_apart:
            self._sums_used(rank)
        self._new_version(rank, step + 1)
        rank.version += 1
        return True

    def _sums_used(self, rank: Rank) -> None:
        for offset in self.o_layouts[rank.number].values():
            self._free(rank, "O", offset)

    def _new_version(self, rank: Rank, version: int) -> None:
        for lag, (copy, places) in enumerate(self.written[rank.number][version % 2]):
            rank.content.update({(copy, offset): self._params(i, version + lag, version) for i, offset in places.items()})

    def _scalar(self, rank: Rank, a: Action, stream: str, step: int) -> bool:
        if a.peer is None or not rank.scalars.get((stream, a.peer)):
            return a.peer is None
        key, sent = rank.scalars[stream, a.peer].popleft()
        self._earlier(rank, a, key, f"scalars ({stream})")
        if sent != step:
            raise self._error(rank, f"receives scalars ({stream}) of step {sent} where it needs those of step {step}")
        return True

    def _send_scalar(self, rank: Rank, a: Action, stream: str, peer: int, step: int) -> None:
        self.ranks[peer].scalars.setdefault((stream, rank.number), deque()).append((self._key(rank, a), step))

    # ---- messages -------------------------------------------------------------------------------------------------------
    def _arrived(self, rank: Rank, a: Action, back: bool = False) -> bool:
        """Whether the action's message has landed.

        Args:
            back: it is a sum that came back to this rank, its owner.
        """
        message = (a.stream, a.peer, rank.step, a.round, a.unit, a.backward)
        if back:
            message = ("G", a.into[1], rank.step, a.into[2], a.unit, True)
        if message not in rank.landed:
            return False
        key, place = rank.landed.pop(message)
        self._earlier(rank, a, key, "a push")
        if place != self._at(rank, a):
            raise self._error(rank, f"reads {self._at(rank, a)}, but its message landed at {place}")
        return True

    def _earlier(self, rank: Rank, a: Action, key: Key, what: str) -> None:
        if not key < self._key(rank, a):
            raise self._error(rank, f"waits for {what} that is not earlier in logical time")

    def _still_read(self, rank: Rank, region: str, offset: int = 0, nbytes: int = sys.maxsize) -> bool:
        """Whether a push still reads from these bytes of the region."""
        return any(_overlap(region, at, n, offset, nbytes) for at, n in rank.reading.get(region, ()))

    def _slot(self, rank: Rank, post: Post) -> int:
        return ((rank.step + post.ahead) * self.schedule.rounds + post.round) % 2 if post.region == "H" else post.offset

    def _claim(self, rank: Rank, region: str, offset: int, nbytes: int) -> None:
        busy = rank.busy.setdefault(region, {})
        for at, size in busy.items():
            if _overlap(region, at, size, offset, nbytes):
                raise self._error(rank, f"{region}[{offset}:{offset + nbytes}] is still in use")
        busy[offset] = nbytes

    def _free(self, rank: Rank, region: str, offset: int) -> None:
        if rank.busy.get(region, {}).pop(offset, None) is None:
            raise self._error(rank, f"frees {region}[{offset}], which is not in use")

    def _post(self, rank: Rank, key: Key, post: Post, by: Action | None) -> None:
        edge, offset = (post.stream, post.src, rank.number), self._slot(rank, post)
        if post.stream == "G" and (post.round, post.src) != (0, 0):
            self._check_pulled(rank, key, post, offset)
        else:
            self._claim(rank, post.region, offset, post.nbytes)
        self.landings.setdefault(edge, deque()).append(Landing(key, rank.step + post.ahead, post, offset, by))
        self._match(edge)

    def _check_pulled(self, rank: Rank, key: Key, post: Post, offset: int) -> None:
        """A sum comes back to where it was. Its credit needs what its rank adds to there, and that it has pulled it."""
        place, step = (post.region, offset), rank.step + post.ahead
        want, got = ("g", post.unit, step, post.round * self.schedule.ranks + post.src), rank.content.get(place)
        if got != want or not rank.pulled.pop(place, key) < key:
            raise self._error(rank, f"lets rank {post.src} push to {place}, with {got}, before it has pulled {want}")

    def _forward_param(self, rank: Rank, a: Action) -> bool:
        place, used = self._at(rank, a), rank.using.get((a.round, a.unit, a.backward))
        self._check_content(rank, a, self._params(a.unit, rank.step, rank.step + a.version))
        if not self._may_forward(rank, a, place, used):
            raise self._error(rank, "forwards parameters that this rank does not use")
        self._push(rank, a)
        return True

    def _publish_param(self, rank: Rank, a: Action) -> bool:
        version = rank.step + a.version
        self._check_content(rank, a, self._params(a.unit, version + (a.region[0] == "W"), version))
        self._push(rank, a)
        return True

    def _send_grad(self, rank: Rank, a: Action) -> bool:
        self._check_content(rank, a, ("g", a.unit, rank.step, a.round * self.schedule.ranks + rank.number + 1))
        if not a.backward or (a.round, a.unit, a.backward) in rank.using or (a.round, a.unit) not in rank.adding:
            raise self._error(rank, "sends a sum that this rank still adds to, or did not take")
        if (a.peer is None) != self._owns(rank, a):
            raise self._error(rank, "keeps a sum that it does not own, or sends one that it does")
        rank.adding.remove((a.round, a.unit))
        if a.peer is not None:
            self._push(rank, a)
            self._free(rank, *self._at(rank, a))
        return True

    def _check_content(self, rank: Rank, a: Action, want: Tag) -> None:
        tag = rank.content.get(self._at(rank, a))
        if tag != want:
            raise self._error(rank, f"sends {tag} where the schedule says {want}")

    def _may_forward(self, rank: Rank, a: Action, place: Place, used: Place | None) -> bool:
        return used == place

    def _push(self, rank: Rank, a: Action) -> None:
        assert a.peer is not None
        place = self._at(rank, a)
        rank.blocked += a.kind not in OFFERS
        rank.reading.setdefault(place[0], []).append((place[1], a.nbytes))
        edge = (a.stream, rank.number, a.peer)
        push = Push(rank.number, rank.step, self._key(rank, a), a, place, rank.content[place])
        self.pushes.setdefault(edge, deque()).append(push)
        self._match(edge)

    def _match(self, edge: tuple[str, int, int]) -> None:
        """Messages of this edge land where their receiver has granted a credit."""
        pushes, landings = self.pushes.get(edge), self.landings.get(edge)
        while pushes and landings:
            push, landing = pushes.popleft(), landings.popleft()
            sender, receiver, post, a = self.ranks[edge[1]], self.ranks[edge[2]], landing.post, push.action
            if wrong := self._mismatch(edge[2], push, landing):
                raise PlanError(f"rank {edge[1]}, step {push.step}: {a}: {wrong}")
            sender.reading[push.place[0]].remove((push.place[1], a.nbytes))
            if a.kind in OFFERS:
                sender.pulled[push.place] = max(sender.pulled.get(push.place, BEFORE), landing.key)
            else:
                sender.blocked -= 1
            place = (post.region, landing.offset)
            receiver.content[place] = push.tag
            receiver.landed[post.stream, edge[1], landing.step, post.round, post.unit, post.backward] = (push.key, place)

    def _mismatch(self, to: int, push: Push, landing: Landing) -> str:
        """The reason why this message must not land there; empty if it may."""
        post, a, published = landing.post, push.action, push.action.kind in OFFERS
        want = self._expected(to, landing.step, post)
        same_round = a.round == post.round or a.kind != Kind.PUBLISH_PARAM
        if (push.tag, a.backward, a.nbytes) != (want, post.backward, post.nbytes) or not same_round:
            return (
                f"sends {push.tag}, {a.nbytes} bytes, where rank {to} expects {want}, {post.nbytes} bytes, for its "
                f"{'backward' if post.backward else 'forward'} ({landing.by or 'before the first action'})"
            )
        if not published and not landing.key < push.key:
            return f"needs a credit of rank {to} that is not earlier in logical time"
        if published:
            same_place = ((a.region, a.offset), push.tag[2]) == (post.origin, landing.step + post.version) and not a.into[0]
        else:
            same_place = a.into[:2] == (post.region, post.offset) and not post.origin[0]
        if not same_place:
            return f"is not at {(post.origin, post.version)} or into {a.into}, as rank {to} has it in {post}"
        if published and not push.key < landing.key:
            return f"is pulled by rank {to} ({landing.by}) at a time that is not later in logical time"
        if self.ranks[push.rank].content.get(push.place) != push.tag:
            return f"the region was overwritten before rank {to} received it"
        return ""


def _overlap(region: str, at: int, size: int, offset: int, nbytes: int) -> bool:
    """Whether two pieces of a region share bytes; the two slots of H are numbered."""
    return at == offset if region == "H" else bool(size and nbytes) and at < offset + nbytes and offset < at + size
