"""Counts consecutive message rounds between two time steps, from logs of all ranks' messages. It needs no torch.

A time step is the pass of one stage (the paper's Table 1, last column). A log holds a rank's messages in program order, each
with the time step before which it lies. The counted operations are messages and calls of collectives. That a collective over n
ranks takes log2 n rounds is the paper's model, not a measurement.
"""

from collections import defaultdict, deque
from collections.abc import Sequence
from typing import NamedTuple

from deepspeed_cdp.analysis.paper_costs import collective_steps


class Event(NamedTuple):
    """One message or collective.

    Attributes:
        at: the number of the rank's time step that follows it; it never decreases within a log.
        kind: ``push``, ``land`` (the rank has waited for a message) or ``collective``.
        nbytes: size of the message; of a collective, the bytes that a rank receives (see ``benchmarks.table1``).
        stream: of a message; messages of one stream to one peer keep their order.
        peer: of a message: the other rank; of a collective: the number of ranks.
    """

    at: int
    kind: str
    nbytes: int
    stream: str
    peer: int


class Rounds(NamedTuple):
    """The longest chain between two time steps: its message rounds, and its operations."""

    rounds: int = 0
    handoffs: int = 0
    collectives: int = 0


def longest(logs: Sequence[Sequence[Event]], since: Sequence[int], common: bool, least: int = 0) -> Rounds:
    """The longest chain of messages within one time step, where each is sent after the one before has arrived.

    Args:
        logs: by rank.
        common: time steps have the same numbers on all ranks. So a message that is awaited in a later time step than the one in
            which it was sent had a whole time step to arrive. If False, only a rank's own time steps interrupt a chain.
        since: by rank, the first time step that counts.
        least: smaller messages, which hold a few scalars, are left out.
    Raises:
        ValueError: a rank waited for a message that no rank has sent.
    """
    events = [deque(e for e in log if e.nbytes >= least) for log in logs]
    under_way: dict[tuple[int, int, str], deque[tuple[int, Rounds]]] = defaultdict(deque)
    chain, at, most = [Rounds()] * len(logs), [0] * len(logs), Rounds()
    moved = True
    while moved:
        moved = False
        for rank, log in enumerate(events):
            while log and (log[0].kind != "land" or under_way[log[0].peer, rank, log[0].stream]):
                e, moved = log.popleft(), True
                if e.at != at[rank]:
                    at[rank], chain[rank] = e.at, Rounds()
                if e.kind == "push":
                    under_way[rank, e.peer, e.stream].append((e.at, chain[rank]))
                    continue
                before = chain[rank]
                if e.kind == "land":
                    when, sent = under_way[e.peer, rank, e.stream].popleft()
                    sent = Rounds() if common and when < e.at else sent
                    chain[rank] = max(before, Rounds(sent.rounds + 1, sent.handoffs + 1, sent.collectives))
                else:
                    chain[rank] = Rounds(before.rounds + collective_steps(e.peer), before.handoffs, before.collectives + 1)
                if e.at >= since[rank]:
                    most = max(most, chain[rank])
    for rank, log in enumerate(events):
        if log:
            e = log[0]
            raise ValueError(
                f"rank {rank} waits for a message of rank {e.peer} (stream {e.stream}, step {e.at}) that no log "
                "has; give the logs of all ranks, from their first message on"
            )
    return most
