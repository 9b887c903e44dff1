"""How many message rounds follow one another between two time steps, from logs of what every rank did. Pure, no torch.

A time step is the pass of one stage (the paper's Table 1, last column). A log is a rank's messages in the order in which its
program came to them, each with the time step before which it lies. What is *counted* are operations: hand-offs, and calls of
collectives. That a collective over n ranks takes log2 n rounds is the paper's *model*.
"""

from collections import defaultdict, deque
from collections.abc import Sequence
from typing import NamedTuple

from deepspeed_cdp.analysis.paper_costs import collective_steps


class Event(NamedTuple):
    """One message or collective.

    Attributes:
        at: the number of the rank's time step that it comes before; never falls within a log.
        kind: ``push``, ``land`` (the rank goes on with what has come) or ``collective``.
        nbytes: of the message; for a collective what is handed to a rank (see ``benchmarks.table1``).
        stream: of a message: what orders it among those to the same peer.
        peer: of a message: the other rank; of a collective: how many ranks take part.
    """

    at: int
    kind: str
    nbytes: int
    stream: str
    peer: int


class Rounds(NamedTuple):
    """The longest chain between two time steps: message rounds, and the operations that it is made of."""

    rounds: int = 0
    handoffs: int = 0
    collectives: int = 0


def longest(logs: Sequence[Sequence[Event]], since: Sequence[int], common: bool, least: int = 0) -> Rounds:
    """The longest chain of messages, each sent after the one before has come, that no time step interrupts.

    Args:
        logs: by rank.
        common: time steps are numbered alike on all ranks, so a message that is awaited in a later one than it was sent in had a
            whole time step to come; else only what a rank does itself tells how long ago something was.
        since: by rank, the first time step that counts; what comes earlier is only followed.
        least: smaller messages are taken for what they are, a few numbers, and left out.
    Raises:
        ValueError: a message was awaited that nobody has sent.
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
