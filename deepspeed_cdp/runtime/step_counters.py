"""Messages, bytes and waits of a rank's last step, from the transport's counters."""

import time
from typing import NamedTuple

from deepspeed_cdp.plan.cross_ring import across_bytes
from deepspeed_cdp.runtime.state import RankState
from deepspeed_cdp.runtime.step_metrics import StepMetrics
from deepspeed_cdp.transport.wait_timing import EdgeTimes

STREAMS = {"F + B": ("P", "P0", "W0"), "G": ("G0",), "O": ("G",), "X": ("X", "Y")}  # by kind of traffic


class _Snapshot(NamedTuple):
    """The transport's counters at the end of a step."""

    nbytes: dict[tuple[str, int], int]
    messages: dict[tuple[str, int], int]
    collectives: int
    waited: tuple[dict[tuple[str, int], float], dict[tuple[str, int], float]]  # for received messages, for sent ones
    steps: int  # since the last flush


class StepCounters:
    """Differences between the ends of the last two steps (a flush between them counts)."""

    def __init__(self, state: RankState, metrics: StepMetrics):
        self._state, self._transport, self._metrics = state, state.transport, metrics
        self._snapshots: list[_Snapshot] = []  # at the ends of the last two steps
        self._ended: tuple[float, float] | None = None  # when the last step ended, and the seconds waited until then

    def begin(self) -> None:
        """After a flush, whose time is not a step's."""
        self._ended = None
        if self._transport.timing:
            self._transport.timing.discard_step()

    def end_step(self, step: int) -> None:
        """A step has ended on this rank."""
        t = self._transport
        waited = dict(t.waited), dict(t.waited_sent)
        self._snapshots.append(_Snapshot(dict(t.bytes_received), dict(t.received), t.collectives, waited, self._state.step))
        del self._snapshots[:-2]
        self._note_busy(step)

    def _note_busy(self, step: int) -> None:
        """Compute the seconds since the last step's end that this rank did not wait."""
        timing = self._transport.timing
        if timing:
            if timing.end_step(step) and timing.latest:
                self._metrics.busy = timing.latest.busy
            return
        now, waited = time.perf_counter(), sum((*self._transport.waited.values(), *self._transport.waited_sent.values()))
        if self._ended is not None:
            self._metrics.busy = max(now - self._ended[0] - (waited - self._ended[1]), 1e-9)
        self._ended = now, waited

    def traffic(self) -> dict[str, dict[str, int]]:
        """Bytes received in the last step, by kind, beside the closed form: F + B, G, O (see ``Plan.received_bytes``), and
        with several rings X, from other rings. Empty before two steps have ended."""
        if len(self._snapshots) < 2:
            return {}
        before, after = self._snapshots
        seen = {edge: n - before.nbytes.get(edge, 0) for edge, n in after.nbytes.items()}
        plan, rank = self._state.plan, self._state.rank
        form = plan.received_bytes(rank)
        forms = {"F + B": form["F"] + form["B"], "G": form["G"], "O": form["O"]}
        if plan.rings > 1:
            forms["X"] = across_bytes(plan, rank, self._transport.ring)
        return {
            k: {"counted": sum(n for (stream, _), n in seen.items() if stream in STREAMS[k]), "closed form": nbytes}
            for k, nbytes in forms.items()
        }

    def waited(self) -> tuple[EdgeTimes | None, EdgeTimes | None]:
        """Seconds by (stream, peer) that the host was blocked in the last step: for received messages, for sent ones.

        On GPUs: seconds that the passes' CUDA stream waited in the latest timed step. None before the first such step.
        """
        if self._transport.timing:
            timed = self._transport.timing.latest
            return (timed.receive_waits, timed.send_waits) if timed else (None, None)
        if not self._snapshots:
            return None, None
        before = self._snapshots[-2].waited if len(self._snapshots) > 1 else ({}, {})
        received, sent = (
            {edge: t - old.get(edge, 0.0) for edge, t in now.items()} for now, old in zip(self._snapshots[-1].waited, before)
        )
        return received, sent

    def messages(self) -> int:
        """Messages received in the last step, scalars included."""
        if len(self._snapshots) < 2:
            return 0
        before, after = self._snapshots
        return sum(after.messages.values()) - sum(before.messages.values())

    def collectives(self) -> int:
        """Collective calls of the transport in the last step."""
        return self._snapshots[-1].collectives - self._snapshots[0].collectives if self._snapshots else 0
