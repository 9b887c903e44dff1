"""``Messages`` and the executor's loop over a program in C++ (native/*.h), over transport "peer".

The program stays one: here its actions become numbers. Places in buffers alternate from step to step, so each action has two.
"""

from collections.abc import Mapping
from typing import Any

import torch

from deepspeed_cdp.plan.actions import Action, Kind, Post
from deepspeed_cdp.plan.plan import Plan
from deepspeed_cdp.plan.program import Program
from deepspeed_cdp.runtime.messages import Messages
from deepspeed_cdp.runtime.program import ActionLocation
from deepspeed_cdp.runtime.state import RankState
from deepspeed_cdp.transport.base import Ticket, Where
from deepspeed_cdp.transport.ring_view import RingView

MESSAGES = {  # by kind: what C++ does (native/program.h), in the place of the executor's handler
    Kind.PULL_PARAM: "pull",
    Kind.PULL_GRAD: "posts",
    Kind.GRANT_CREDIT: "relayed posts",
    Kind.PUBLISH_PARAM: "publish",
    Kind.OFFER_GRAD: "offer",
    Kind.PREDICT_PARAM: "predict",
    Kind.REDUCE_GRAD: "reduce",
    Kind.RECV_GRAD: "recv grad",
    Kind.RECV_PERSISTENT_GRAD: "recv grad",
    Kind.SEND_GRAD: "send grad",
    Kind.SEND_PERSISTENT_GRAD: "send grad",
}
PASSES = {  # the same where parameters reach passes by messages
    Kind.WAIT_PARAM: "wait param",
    Kind.RELEASE_PARAM: "release param",
    Kind.RELEASE_PERSISTENT_PARAM: "release param",
}


def native_transport(state: RankState) -> Any:
    """The transport of all ranks (a ``NativePeerTransport``), if C++ has its messages; else None."""
    transport = state.transport.inner if isinstance(state.transport, RingView) else state.transport
    return transport if transport.native is not None else None


class NativeMessages(Messages):
    """The same methods, and programs for C++.

    Attributes:
        peer: the transport of all ranks.
        native: the object of C++ with the messages.
    """

    def __init__(self, state: RankState, peer: Any, by_offset: frozenset[str] = frozenset()):
        super().__init__(state, by_offset)
        self.peer, native = peer, peer.native
        names = sorted(self.buffers.regions)
        self._codes = {name: k for k, name in enumerate(names)}
        self.reads = native.Reads(names, [name in by_offset for name in names])
        last = state.rank == state.schedule.ranks - 1
        self.native = native.Messages(peer.links, self.reads, state, _locator(state), last)
        self._places: dict[int, tuple[Any, int, Action]] = {}  # by id: an action's program and its index there, and the action

    # ---- programs as numbers --------------------------------------------------------------------------------------------
    def program(self, plan: Plan, program: Program, passes: bool) -> Any:
        """The program for C++, which is this object's own.

        Args:
            passes: ``PASSES`` are done in C++.
        """
        does = MESSAGES | PASSES if passes else MESSAGES
        actions = [self._action(plan, a, does) for a in program.held]
        stage = self.state.owned_stage
        rounds = program.begin, program.end, program.per_round, program.repeats
        made = self.peer.native.Program(actions, *rounds, plan.slots(stage), plan.corrected_copies(stage), plan.predicts)
        for index, a in enumerate(program.held):
            self._places[id(a)] = (made, index, a)
        return made

    def _spots(
        self, plan: Plan, region: str, offset: int, nbytes: int, round: int, version: int
    ) -> list[tuple[int, int, int, torch.Tensor]]:
        """By parity of the step: region, offset, address and bytes."""
        spots = []
        for step in (0, 1):
            name = self._named(plan, region, step, round, version)
            view = self.buffers.view(name, offset, nbytes)
            spots.append((self._codes[name], offset, view.data_ptr(), view))
        return spots

    @staticmethod
    def _named(plan: Plan, region: str, step: int, round: int, version: int) -> str:
        """As ``Messages._region``, for all steps of this parity: versions count from four steps later."""
        names = {
            f"H{(later * plan.schedule.rounds + round) % 2}" if region == "H" else plan.region_of(region, later + version)
            for later in (step + 4, step + 6)
        }
        assert len(names) == 1, (region, "has more than two places")
        return names.pop()

    def _addresses(self, plan: Plan, peer: int, region: str, offset: int, round: int, version: int) -> list[int]:
        """By parity of the step: offsets in the peer's allocation; -1 without a region."""
        if not region:
            return [-1, -1]
        return [self.buffers.address(peer, self._named(plan, region, step, round, version), offset) for step in (0, 1)]

    def _stream(self, stream: str) -> int:
        return self.peer.streams_by_name.get(stream, -1)

    def _post(self, plan: Plan, p: Post) -> tuple[Any, ...]:
        origin = self._addresses(plan, p.src, p.origin[0], p.origin[1], 0, p.version)
        spots = self._spots(plan, p.region, p.offset, p.nbytes, p.round, 0)
        return self._stream(p.stream), self._world(p.src), spots, p.nbytes, origin, p.ahead, bool(p.round % 2), p.unit, p.backward

    def _action(self, plan: Plan, a: Action, does: Mapping[Kind, str]) -> tuple[Any, ...]:
        spots = self._spots(plan, a.region, a.offset, a.nbytes, a.round, a.version) if a.region else []
        comes_from = self._comes_from(plan, a)
        region, offset, round = ("", 0, 0) if comes_from else a.into
        total, overwritten = self._of_owner(plan, a)
        return (
            a,
            does.get(a.kind, ""),
            self._stream(a.stream),
            -1 if a.peer is None else self._world(a.peer),
            a.unit,
            bool(a.round % 2),
            a.round == 0,
            a.backward,
            a.relayed,
            spots,
            a.nbytes,
            a.version,
            self._addresses(plan, -1 if a.peer is None else a.peer, region, offset, round, 0),
            self._world(comes_from[0]) if comes_from else -1,
            bool(comes_from[1] % 2) if comes_from else False,
            [self._post(plan, p) for p in a.posts],
            total,
            overwritten,
        )

    @staticmethod
    def _comes_from(plan: Plan, a: Action) -> tuple[int, int] | None:
        """The rank and the round that the sum of the action comes from; None if it needs none."""
        if a.kind in (Kind.PREDICT_PARAM, Kind.REDUCE_GRAD):
            return plan.schedule.ranks - 1, plan.schedule.rounds - 1
        if a.kind == Kind.OFFER_GRAD or a.kind in (Kind.RECV_GRAD, Kind.RECV_PERSISTENT_GRAD) and a.stream == "G":
            return a.into[1:]
        return None

    def _of_owner(self, plan: Plan, a: Action) -> tuple[tuple[int, int, int], list[list[tuple[int, int, int]]]]:
        """Bytes (region, offset, number) of the sum of PREDICT_PARAM or REDUCE_GRAD; of the latter, by slot, what it writes."""
        stage = self.state.owned_stage
        offset = plan.o_layout(stage).get(a.unit) if a.kind in (Kind.PREDICT_PARAM, Kind.REDUCE_GRAD) else None
        if offset is None:
            return (-1, 0, 0), []
        unit, slots = plan.unit(a.unit), range(plan.slots(stage) if a.kind == Kind.REDUCE_GRAD else 0)
        written = [[(self._codes[r], at[a.unit], unit.p_bytes) for r, at in plan.written(slot, stage)] for slot in slots]
        return (self._codes["O"], offset, unit.g_bytes), written

    def _at(self, a: Action) -> tuple[Any, int]:
        return self._places[id(a)][:2]

    # ---- as in Messages -------------------------------------------------------------------------------------------------
    def clear(self) -> None:
        self.native.clear()

    def drain(self) -> None:
        pass  # closing waits for all steps of all ranks

    def post(self, post: Post, where: Where, relayed: bool = False, into: torch.Tensor | None = None) -> None:
        self.native.post(self._post(self.state.plan, post), where, relayed, 0 if into is None else into.data_ptr())

    def post_all(self, a: Action, relayed: bool = False) -> None:
        if a.posts:
            self.native.post_all(*self._at(a), relayed)

    def offer(self, a: Action, back: Any = None) -> None:
        if back is None or isinstance(back, self.peer.native.Ticket):
            self.native.offer(*self._at(a), back)
            return

        def begin() -> None:  # somebody watches
            back.wait(ActionLocation(self.state, a))
            self.native.offer(*self._at(a), None)

        self.transport.relay(begin)

    def push(self, a: Action, after: Ticket | None = None) -> None:
        self.native.push(*self._at(a), after)

    def wait(self, a: Action) -> Ticket | None:
        return self.native.wait(*self._at(a))

    def wait_ahead(self, a: Action) -> None:
        self.native.wait_ahead(*self._at(a))

    def back(self, a: Action, unit: int, source: int, round: int) -> Ticket:
        nbytes = self.state.plan.unit(unit).g_bytes
        return self.native.back(self.state.step + a.version, unit, self._world(source), bool(round % 2), nbytes)

    def coming_back(self, a: Action, unit: int) -> Ticket | None:
        odd = bool((self.state.schedule.rounds - 1) % 2)
        return self.native.coming_back(self.state.step + a.version, unit, odd)

    def wait_readers(self, a: Action, region: str, offset: int, nbytes: int) -> None:
        self.native.wait_readers(*self._at(a), region, offset, nbytes)


def _locator(state: RankState) -> Any:
    def locate(a: Action, step: int) -> ActionLocation:
        location = ActionLocation(state, a)
        location.step = step
        return location

    return locate
