"""Records when a rank's passes, waits, messages and updates happen; off by default (``engine.cyclic_trace``).

A recorder wraps the executor's actions while it is on. On CPUs it reads ``perf_counter``. On GPUs it records CUDA events on the
stream that does the work, and reads them when it stops: inside a step nothing waits for the device. It synchronizes with the
device before the first recorded step and after the last.

A recording ends by itself after a number of steps that follows from the plan, so that its memory is bounded. All ranks end at
the same step.

Each rank's file holds its monotonic clock and its wall clock at the start. Processes of one host (same boot id) share the
monotonic clock, which aligns them exactly. Hosts are aligned by their wall clocks. CUDA events are placed relative to an event
that the host recorded at the start, with the device idle.
"""

import json
import os
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

from deepspeed_cdp.errors import HandoffError
from deepspeed_cdp.plan.actions import Action, Kind
from deepspeed_cdp.plan.constants import PERSISTENT
from deepspeed_cdp.runtime.executor import Executor
from deepspeed_cdp.transport.choose import host

RECEIVES = (Kind.REFRESH_PARAM, Kind.WAIT_PARAM, Kind.RECV_GRAD, Kind.RECV_PERSISTENT_GRAD)
SENDS = (Kind.FORWARD_PARAM, Kind.SEND_GRAD, Kind.SEND_PERSISTENT_GRAD, Kind.PUBLISH_PARAM)
OWNER = (Kind.REDUCE_GRAD, Kind.GRAD_NORM, Kind.OPTIMIZER_STEP)
BEGINS = (Kind.WAIT_PARAM, Kind.FORWARD_PARAM, Kind.RECV_GRAD)
TRACKS = {"passes": 0, "waits": 1, "owner": 2}
MOST_EVENTS = 200_000  # per rank
EVENTS_PER_PASS = 8  # of a unit: the pass, its waits and messages, and a share of the owner's actions


class _Noted:
    """A ticket, or an event, or None; ``note`` is called once it is waited for."""

    def __init__(self, ticket: Any, note: Callable[[], None]):
        self._ticket, self._note = ticket, note

    def wait(self, where: Any) -> None:
        if self._ticket is not None:
            self._ticket.wait(where)
        self._note()


class Recorder:
    """Times the actions of one rank.

    Args:
        executor: between two steps.
        device: whose work is timed.

    Attributes:
        steps: how many steps are recorded at most.
    """

    def __init__(self, executor: Executor, device: torch.device):
        self.executor, self.cuda = executor, device.type == "cuda"
        self.rank = executor.transport.world_rank
        self._world_rank_of = executor.transport.world_rank_of
        self.steps = max(1, MOST_EVENTS // (EVENTS_PER_PASS * len(executor.plan.visits) * executor.schedule.rounds))
        self._until, self._full = executor.global_step + self.steps, False
        self._slices: list[tuple[str, str, Any, Any, dict[str, Any]]] = []  # track, name, begin, end, args
        self._messages: list[tuple[str, Any, dict[str, Any]]] = []  # "send" or "receive", time, args
        self._begun: dict[tuple[int, int, bool], Any] = {}
        if self.cuda:
            torch.cuda.synchronize(device)
            self._zero = torch.cuda.Event(enable_timing=True)
            self._zero.record()
        self._device, self._start, self._wall = device, time.perf_counter_ns(), time.time_ns()
        self._actions, self._release = executor.actions, executor.release
        executor.actions = {kind: self._timed(kind, do) for kind, do in self._actions.items()}
        executor.release = self._released  # type: ignore[method-assign]
        self._offer = executor.messages.offer
        executor.messages.offer = self._offered  # type: ignore[method-assign]
        owner = executor.owner_executor.owner
        self._predict = owner.predict
        owner.predict = self._predicted  # type: ignore[method-assign]

    def _timestamp(self) -> Any:
        if not self.cuda:
            return time.perf_counter_ns()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _args(self, a: Action) -> dict[str, Any]:
        executor = self.executor
        own = a.kind in (Kind.GRAD_NORM, Kind.OPTIMIZER_STEP, Kind.SEND_NORM)
        unit = None if own else executor.plan.unit(a.unit)
        return {
            "step": executor.global_step,
            "round": executor.round_of(a),
            "unit": None if own else a.unit,
            "stage": executor.schedule.owned(executor.rank) if unit is None else unit.stage,
            "backward": a.backward,
            "peer": None if a.peer is None else self._world_rank_of(a.peer),
            "stream": a.stream,
            "bytes": a.nbytes,
            "version": executor.global_step + a.version,
            "name": a.kind.label if unit is None else unit.name or "persistent parameters",
        }

    def _timed(self, kind: Kind, do: Callable[[Action], None]) -> Callable[[Action], None]:
        def timed(a: Action) -> None:
            if self.executor.global_step >= self._until:
                self._end_recording()
                return do(a)
            visit = (self.executor.round_of(a), a.unit, a.backward)
            if kind in (Kind.RELEASE_PARAM, Kind.SEND_GRAD) and a.backward:
                self._end(visit)
            if kind in OWNER:
                with self.executor.transport.owner_stream():
                    before = self._timestamp()
                    do(a)
                    self._slices.append(("owner", kind.label, before, self._timestamp(), self._args(a)))
                return
            before = self._timestamp() if kind in RECEIVES and a.peer is not None or kind in SENDS and not a.relayed else None
            do(a)
            if before is not None and kind in RECEIVES:
                after = self._timestamp()
                self._slices.append(("waits", f"wait {a.stream}", before, after, self._args(a)))
                self._messages.append(("receive", after, self._args(a)))
            elif before is not None and a.peer is not None:
                self._messages.append(("send", before, self._args(a)))
            if kind in BEGINS and a.unit != PERSISTENT:
                self._begun[visit] = (self._timestamp(), self._args(a) if kind == Kind.WAIT_PARAM else self._begun[visit][1])

        return timed

    def _offered(self, a: Action, back: Any = None) -> None:
        """Beside the passes: a prediction, or a sum that has come back unless this rank has added to it, may be pulled."""
        if self.executor.global_step >= self._until:
            self._offer(a, back)
            return
        offer, source = self._args(a), a.into[1]
        came = {**offer, "stream": "G", "peer": self._world_rank_of(source)}
        comes_back = a.kind == Kind.OFFER_GRAD and source != self.executor.rank

        def note() -> None:
            now = self._timestamp()
            self._messages.extend([("receive", now, came)] if comes_back else [])
            self._messages.append(("send", now, offer))

        self._offer(a, _Noted(back, note))

    def _predicted(self, step: int, unit: int, copy: int) -> None:
        """The owner predicts, beside the passes."""
        if step >= self._until:
            self._predict(step, unit, copy)
            return
        executor, before = self.executor, self._timestamp()
        self._predict(step, unit, copy)
        args = {
            "step": step,
            "round": executor.schedule.rounds - 1,
            "unit": unit,
            "stage": executor.schedule.owned(executor.rank),
            "backward": True,
            "peer": None,
            "stream": "",
            "bytes": executor.plan.unit(unit).p_bytes,
            "version": step,
            "name": executor.plan.unit(unit).name or "persistent parameters",
        }
        self._slices.append(("owner", Kind.PREDICT_PARAM.label, before, self._timestamp(), args))

    def _end_recording(self) -> None:
        if not self._full and self.rank == 0:
            from deepspeed.utils import logger

            logger.warning(
                f"engine.cyclic_trace() has recorded {self.steps} steps and records no more; leave the context earlier, and "
                "trace a part of the training"
            )
        self._full = True

    def _end(self, visit: tuple[int, int, bool]) -> None:
        begun = self._begun.pop(visit, None)
        if begun is not None:
            args = begun[1]
            self._slices.append(
                ("passes", f"{'B' if args['backward'] else 'F'}{args['stage']}", begun[0], self._timestamp(), args)
            )

    def _released(self, unit: int, backward: bool) -> None:
        if not backward:
            self._end((self.executor.state.round, unit, False))
        self._release(unit, backward)

    def stop(self) -> dict[str, Any]:
        """Remove the recorder. Returns a Chrome trace, with times in microseconds of the monotonic clock."""
        self.executor.actions = self._actions
        # the classes' own
        del self.executor.release, self.executor.messages.offer, self.executor.owner_executor.owner.predict
        executor, pid = self.executor, self.rank
        if executor.between_steps:  # else an error ends it, and nobody may come
            with suppress(HandoffError):  # who waits for it in training raises it
                executor.transport.finish_relays(f"rank {pid}, step {executor.global_step}, ending a recording")
        if self.cuda:
            torch.cuda.synchronize(self._device)
        events: list[dict[str, Any]] = [{"ph": "M", "name": "process_name", "pid": pid, "args": {"name": f"rank {pid}"}}]
        events += [
            {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": track}} for track, tid in TRACKS.items()
        ]
        for track, name, begin, end, args in self._slices:
            a, b = self._microseconds(begin), self._microseconds(end)
            events.append(
                {
                    "ph": "X",
                    "name": name,
                    "cat": track,
                    "pid": pid,
                    "tid": TRACKS[track],
                    "ts": a,
                    "dur": max(b - a, 0.0),
                    "args": args,
                }
            )
        messages = [{"side": side, "ts": self._microseconds(when), **args} for side, when, args in self._messages]
        about = {
            "rank": pid,
            "before": self._world_rank_of(executor.rank - 1) if executor.rank else None,
            "ranks": executor.schedule.ranks * executor.plan.rings,
            "threshold": executor.schedule.threshold,
            "rounds": executor.schedule.rounds,
            "host": host(),
            "ended_at_step": self._until if self._full else None,
            "monotonic_us": self._start / 1e3,
            "wall_us": self._wall / 1e3,
            "clock": "cuda events" if self.cuda else "perf_counter",
            "messages": messages,
        }
        return {"traceEvents": events, "displayTimeUnit": "ms", "deepspeed_cdp": about}

    def _microseconds(self, timestamp: Any) -> float:
        return self._start / 1e3 + self._zero.elapsed_time(timestamp) * 1e3 if self.cuda else timestamp / 1e3


def file_of(path: str, rank: int) -> str:
    """``trace.json`` -> ``trace.rank3.json``."""
    base, suffix = os.path.splitext(path)
    return f"{base}.rank{rank}{suffix or '.json'}"


def write(path: str, trace: dict[str, Any]) -> None:
    """One rank's trace, as a file that trace viewers and ``deepspeed-cdp timeline --from`` read."""
    os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
    with open(path, "w") as file:
        json.dump(trace, file)
