"""Dry-run of all ranks: proves that a plan neither hangs nor mixes versions nor overwrites what is in use (design §6, §7).

Every message carries a tag instead of bytes: which unit, which version, or how many micro-batches a sum holds. The run checks

- the logical-time rule: what an action waits for belongs to an earlier step, or to the same step and a smaller logical time, so no
  wait can close a cycle, not even through a barrier of the user's between two steps;
- that posts and pushes of each edge match in order and size, and nothing is left over at the end;
- that every pass reads the version the schedule says, and every owner updates with N k micro-batches, each once, in order;
- that no region is posted, or overwritten, while its former content is still to be read or relayed;
- that it ends, also when a push blocks its rank until it has landed, and also with a barrier after every step.

Pure, no torch.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from .plan import HELD, Action, Plan, Post
from .program import build, initial_posts

Programs = Callable[[int, bool], Sequence[Action]]
Key = tuple[int, bool, int, int]  # (step, after the step's passes, logical time, phase), compared lexicographically
BEFORE: Key = (-1, False, 0, 0)  # the first action


class PlanError(AssertionError):
    """A plan that breaks a rule; the message names rank, step and action."""


class _Push(NamedTuple):
    key: Key
    nbytes: int
    tag: tuple
    region: str
    offset: int
    text: str


class _Landing(NamedTuple):
    key: Key
    post: Post
    step: int


@dataclass
class _Rank:
    """What one simulated rank knows."""

    number: int
    cursor: int = 0
    step: int = 0
    program: Sequence[Action] = ()
    content: dict[tuple[str, int], tuple] = field(default_factory=dict)  # (region, offset) -> tag
    landed: dict[tuple, tuple[int, int]] = field(default_factory=dict)  # awaited message -> key of its push
    busy: dict[tuple[str, int], int] = field(default_factory=dict)  # regions posted or in use -> bytes
    outstanding: dict[str, list[tuple[int, int, int]]] = field(default_factory=dict)  # region -> (push, offset, bytes) reading it
    offers: dict[int, list[int]] = field(default_factory=dict)  # slot of a published copy -> numbers of its offers
    scalars: dict[tuple[str, int], deque] = field(default_factory=dict)


def validate(plan: Plan, steps: int = 4, programs: Programs | None = None, posts: Callable[[int], Sequence[Post]] | None = None) -> None:
    """Dry-run ``steps`` steps in all three ways.

    Args:
        programs, posts: stand-ins for the plan's own, to show that a wrong one is found.
    Raises:
        PlanError: naming rank, step and action.
    """
    for blocking, barrier in ((False, False), (True, False), (False, True)):
        DryRun(plan, steps, programs, posts, blocking, barrier).run()


class DryRun:
    """One dry-run; ``log`` holds (rank, step, action) in the order in which they were done."""

    def __init__(self, plan: Plan, steps: int, programs: Programs | None = None,
                 posts: Callable[[int], Sequence[Post]] | None = None, blocking: bool = False, barrier: bool = False):
        self.plan, self.schedule, self.steps = plan, plan.schedule, steps
        self.blocking, self.barrier = blocking, barrier
        n = self.schedule.ranks
        programs = programs or (lambda rank, first: build(plan, rank, first))
        self.first = [programs(r, True) for r in range(n)]
        self.steady = [programs(r, False) for r in range(n)]
        self.ranks = [_Rank(r, program=self.first[r]) for r in range(n)]
        self.pushes: dict[tuple[str, int, int], deque[tuple[int, _Push]]] = {}
        self.landings: dict[tuple[str, int, int], deque[_Landing]] = {}
        self.taken: dict[int, Key] = {}  # number of a push -> key of the post that took it
        self.count = 0
        self.log: list[tuple[int, int, Action]] = []
        for r in range(n):
            for i, offset in plan.v_layout(self.schedule.owned(r))[0].items():
                self.ranks[r].content["V", offset] = ("p", i, 0)
            for post in (posts or (lambda rank: initial_posts(plan, rank)))(r):
                self._post(r, BEFORE, post, 0, "before the first action")
        if n > 1:
            self.ranks[0].scalars["S", n - 1] = deque([BEFORE])

    def run(self) -> None:
        """Raises PlanError, or returns with every rank at the end of its last step."""
        n = self.schedule.ranks
        while True:
            moved = False
            floor = min(rank.step for rank in self.ranks)
            for r, rank in enumerate(self.ranks):
                while rank.step <= self.steps and not (self.barrier and rank.step > floor):
                    if rank.cursor == len(rank.program):
                        rank.step, rank.cursor, rank.program, moved = rank.step + 1, 0, self.steady[r], True
                    elif self._try(r, rank, rank.program[rank.cursor]):
                        self.log.append((r, rank.step, rank.program[rank.cursor]))
                        rank.cursor, moved = rank.cursor + 1, True
                    else:
                        break
            if all(rank.step >= self.steps for rank in self.ranks):
                return  # (ranks may be a step ahead: a push may wait for a reader's next step)
            if not moved:
                stuck = "; ".join(self._where(r) for r in range(n) if self.ranks[r].step <= self.steps and
                                  self.ranks[r].cursor < len(self.ranks[r].program))
                raise PlanError(f"nothing moves any more: {stuck}")

    # ---- one action -----------------------------------------------------------------------------------------------------
    def _where(self, r: int) -> str:
        rank = self.ranks[r]
        return f"rank {r}, step {rank.step}: {rank.program[rank.cursor]}"

    def _check(self, ok: bool, r: int, reason: str) -> None:
        if not ok:
            raise PlanError(f"{self._where(r)}: {reason}")

    def _key(self, rank: _Rank, action: Action) -> Key:
        repeats = max(rank.step - 1, 0)  # programs of later steps are those of step 1
        time = action.time + repeats * self.schedule.period * self.plan.scale
        late = action.kind in ("NORM", "TOTAL", "UPDATE", "OFFER") and time >= self._passes_end(rank.number, rank.step)
        return rank.step, late, time, action.phase

    def _passes_end(self, r: int, step: int) -> int:
        return (self.schedule.start(step, self.schedule.rounds - 1, r) + 2 * self.schedule.ranks) * self.plan.scale

    def _pending(self, rank: _Rank, region: str, offset: int = 0, nbytes: int | None = None) -> bool:
        """Whether a push still reads from these bytes of the region (of any, without a size)."""
        left = rank.outstanding[region] = [x for x in rank.outstanding.get(region, ()) if x[0] not in self.taken]
        return any(nbytes is None or _overlap(region, at, size, offset, nbytes) for _, at, size in left)

    def _try(self, r: int, rank: _Rank, a: Action) -> bool:
        """Do the action if everything it waits for has happened."""
        if self.blocking and any(self._pending(rank, region) for region in list(rank.outstanding)
                                 if not region.startswith("offer")):
            return False
        if a.kind == "READ" and not self._read(r, rank, a):
            return False
        if a.kind in ("SUM", "SUM_HELD") and not self._sum(r, rank, a):
            return False
        if a.kind in ("NORM", "TOTAL", "UPDATE") and not self._own(r, rank, a):
            return False
        if a.kind in ("RELAY", "OFFER", "PASS", "PASS_HELD"):
            self._push(r, rank, a)
        if any(self._pending(rank, p.region, self._landing_offset(p, rank.step), p.nbytes) for p in a.posts):
            if a.kind in ("PASS", "PASS_HELD"):  # pushed above; wait in a second visit
                rank.program = [*rank.program[:rank.cursor + 1], a._replace(kind="POSTS"), *rank.program[rank.cursor + 1:]]
                return True
            return False
        if a.kind in ("DONE", "DONE_HELD"):
            self._free(rank, "H" if a.kind == "DONE_HELD" else "P", self._offset(rank, a))
        if a.kind in ("PASS", "PASS_HELD", "POSTS"):
            self._free(rank, "GH" if a.unit == HELD else "G", self._offset(rank, a))
        for post in a.posts:
            self._post(r, self._key(rank, a), post, rank.step, str(a))
        return True

    def _offset(self, rank: _Rank, a: Action) -> int:
        if a.kind == "DONE":
            return self.plan.p_layout[0][a.unit, a.backward]
        if a.kind == "DONE_HELD" or (a.region == "H"):
            return (rank.step * self.schedule.rounds + a.round) % 2
        if a.region == "V":
            return a.offset + ((rank.step + a.version) % self.plan.copies << 40)
        return a.offset

    def _free(self, rank: _Rank, region: str, offset: int) -> None:
        rank.busy.pop((region, offset), None)

    def _version(self, r: int, rank: _Rank, a: Action) -> int:
        return self.schedule.version(rank.step, a.round, r, self.plan.unit(a.unit).stage)

    def _arrived(self, r: int, rank: _Rank, a: Action, message: tuple) -> bool:
        if message not in rank.landed:
            return False
        self._check(rank.landed.pop(message) < self._key(rank, a), r, "waits for a push that is not earlier in logical time")
        return True

    def _read(self, r: int, rank: _Rank, a: Action) -> bool:
        if a.peer is not None and not self._arrived(r, rank, a, (a.stream, rank.step, a.round, a.unit, a.backward)):
            return False
        want = ("p", a.unit, self._version(r, rank, a))
        got = rank.content.get((a.region, self._offset(rank, a)))
        self._check(got == want, r, f"reads {got} where the schedule says {want}")
        return True

    def _sum(self, r: int, rank: _Rank, a: Action) -> bool:
        q = a.round * self.schedule.ranks + r
        if a.peer is not None and not self._arrived(r, rank, a, (a.stream, rank.step, a.round, a.unit, True)):
            return False
        place = (a.region, self._offset(rank, a))
        if q:
            want = ("g", a.unit, rank.step, q)
            self._check(rank.content.get(place) == want, r, f"adds to {rank.content.get(place)} where it should find {want}")
        elif a.region != "O":
            if self._pending(rank, *place, a.nbytes):
                return False
            self._claim(r, rank, a.region, place[1], a.nbytes)
        rank.content[place] = ("g", a.unit, rank.step, q + 1)
        return True

    def _own(self, r: int, rank: _Rank, a: Action) -> bool:
        step, stage, last = rank.step + a.version, self.schedule.owned(r), self.schedule.ranks - 1
        offsets = self.plan.o_layout(stage)[0]
        summed = [i for i in offsets if self.plan.unit(i).g_bytes]
        if a.kind == "NORM":
            for i in summed if r != last else ():
                if not any(m == ("O", step, self.schedule.rounds - 1, i, True) for m in rank.landed):
                    return False
            if a.peer is not None and not self._scalar(r, rank, a, "S"):
                return False
            for i in summed:
                if r != last:
                    self._arrived(r, rank, a, ("O", step, self.schedule.rounds - 1, i, True))
                want = ("g", i, step, self.schedule.ranks * self.schedule.rounds)
                got = rank.content.get(("O", offsets[i]))
                self._check(got == want, r, f"finds {got} where the finished sum {want} should be")
            self._send_scalar(r, rank, a, "S", (r + 1) % self.schedule.ranks)
        if a.kind == "TOTAL":
            for peer in range(last):
                self._send_scalar(r, rank, a, "T", peer)
        if a.kind == "UPDATE":
            if a.peer is not None and ("T", a.peer) not in rank.scalars:
                return False
            slot = (step + 1) % self.plan.copies
            if self._pending(rank, f"offer{slot}") or self._pending(rank, f"V{slot}"):
                return False
            if a.peer is not None and not self._scalar(r, rank, a, "T"):
                return False
            for number in rank.offers.pop(slot, []):
                self._check(self.taken[number] < self._key(rank, a), r, "waits for a reader that is not earlier in logical time")
            for i, offset in self.plan.v_layout(stage)[0].items():
                rank.content["V", offset + (slot << 40)] = ("p", i, step + 1)
        return True

    def _scalar(self, r: int, rank: _Rank, a: Action, stream: str) -> bool:
        queue = rank.scalars.get((stream, a.peer if a.peer is not None else -1))
        if not queue:
            return False
        self._check(queue[0] < self._key(rank, a), r, f"waits for scalars ({stream}) that are not earlier in logical time")
        queue.popleft()
        if not queue:
            del rank.scalars[stream, a.peer]  # type: ignore[arg-type]
        return True

    def _send_scalar(self, r: int, rank: _Rank, a: Action, stream: str, peer: int) -> None:
        self.ranks[peer].scalars.setdefault((stream, r), deque()).append(self._key(rank, a))

    # ---- messages -------------------------------------------------------------------------------------------------------
    def _landing_offset(self, post: Post, step: int) -> int:
        return ((step + post.ahead) * self.schedule.rounds + post.round) % 2 if post.region == "H" else post.offset

    def _claim(self, r: int, rank: _Rank, region: str, offset: int, nbytes: int) -> None:
        for (other, at), size in rank.busy.items():
            clash = other == region and _overlap(region, at, size, offset, nbytes)
            self._check(not clash, r, f"region {region}[{offset}:{offset + nbytes}] is still in use")
        rank.busy[region, offset] = nbytes

    def _post(self, r: int, key: Key, post: Post, step: int, text: str) -> None:
        rank, number, offset = self.ranks[r], step + post.ahead, self._landing_offset(post, step)
        if post.region == "O":
            rank.busy.pop(("O", offset), None)
        self._claim(r, rank, post.region, offset, post.nbytes)
        self.landings.setdefault((post.stream, post.src, r), deque()).append(_Landing(key, post._replace(offset=offset), number))
        self._match((post.stream, post.src, r))

    def _push(self, r: int, rank: _Rank, a: Action) -> None:
        assert a.peer is not None
        place = (a.region, self._offset(rank, a))
        tag = rank.content.get(place)
        self._check(tag is not None, r, "sends a region that holds nothing")
        assert tag is not None
        if a.kind == "OFFER":
            want = ("p", a.unit, rank.step + a.version)
            self._check(tag == want, r, f"sends {tag} where the schedule says {want}")
        if a.peer == r:  # the last rank owns stage 0: its finished sum stays here
            self._check(a.stream == "O", r, "sends to itself")
            rank.content["O", self.plan.o_layout(0)[0][a.unit]] = tag
            return
        self.count += 1
        slot = (rank.step + a.version) % self.plan.copies
        source = f"offer{slot}" if a.kind == "OFFER" else f"V{slot}" if a.region == "V" else a.region
        rank.outstanding.setdefault(source, []).append((self.count, place[1], a.nbytes))
        if a.kind == "OFFER":
            rank.offers.setdefault(slot, []).append(self.count)
        edge = (a.stream, r, a.peer)
        self.pushes.setdefault(edge, deque()).append((self.count, _Push(self._key(rank, a), a.nbytes, tag, *place, self._where(r))))
        self._match(edge)

    def _match(self, edge: tuple[str, int, int]) -> None:
        pushes, landings = self.pushes.get(edge), self.landings.get(edge)
        while pushes and landings:
            (number, push), landing = pushes.popleft(), landings.popleft()
            post, receiver = landing.post, self.ranks[edge[2]]
            if push.nbytes != post.nbytes:
                raise PlanError(f"{push.text}: sends {push.nbytes} bytes where rank {edge[2]} expects {post.nbytes}")
            if edge[0] not in ("P0", "H0") and not landing.key < push.key:
                raise PlanError(f"{push.text}: needs a credit of rank {edge[2]} that is not earlier in logical time")
            if self.ranks[edge[1]].content.get((push.region, push.offset)) != push.tag:
                raise PlanError(f"{push.text}: the region was overwritten before rank {edge[2]} took it")
            self.taken[number] = landing.key
            receiver.content[post.region, post.offset] = push.tag
            receiver.landed[post.stream, landing.step, post.round, post.unit, post.backward] = push.key


def _overlap(region: str, at: int, size: int, offset: int, nbytes: int) -> bool:
    if region == "H":  # two slots, told apart by number
        return at == offset
    return bool(size and nbytes) and at < offset + nbytes and offset < at + size
