"""What a rank does, as data. Pure, no torch."""

from enum import Enum
from typing import NamedTuple

from deepspeed_cdp.plan.constants import PERSISTENT


class Kind(Enum):
    """What an action does.

    Members are listed in the order that they take at equal time and phase: first what ends a pass, then what starts one.

    Attributes:
        of_pass: part of this rank's own passes; the executor stops behind the last such action of a pass.
        of_owner: part of what an owner does, or of what a first reader takes from it; not tied to a pass of this rank.
        carries: ``"param"`` or ``"grad"`` if the action names the bytes of a unit that a message carries, else ``""``.
        incoming: with a peer, the message comes from it.
        names_unit: the action is about one unit.
    """

    # ends                      of_pass of_owner carries  incoming names_unit
    RELEASE_PARAM = "release", True, False, "", False, True  # the pass is over: parameters may be overwritten
    SEND_GRAD = "send grad", True, False, "grad", False, True  # add this rank's gradients to the running sum and pass it on
    RECV_PERSISTENT_GRAD = "recv persistent grad", True, False, "grad", True, True  # the same two for persistent parameters
    SEND_PERSISTENT_GRAD = "send persistent grad", True, False, "grad", False, True
    RELEASE_PERSISTENT_PARAM = "release persistent", True, False, "", False, True
    # starts
    REDUCE_GRAD = "average", False, True, "", True, True  # one owned unit's finished sum becomes an averaged gradient
    GRAD_NORM = "norm", False, True, "", True, False  # reduce what is left; the norms travel on to the next owner
    SEND_NORM = "total", False, True, "", False, False  # the last owner tells everyone the finished norm
    OPTIMIZER_STEP = "update", False, True, "", True, False
    GRANT_CREDIT = "credit", False, False, "", False, False  # nothing but posts
    PUBLISH_PARAM = "publish", False, True, "param", False, True  # offer a new version to its first reader
    PULL_PARAM = "pull", False, True, "", True, True  # as a first reader: let an offer in
    REFRESH_PARAM = "refresh", False, False, "param", True, True  # a replica gets its next version (replicated.py)
    WAIT_PARAM = "wait", True, False, "param", True, True
    FORWARD_PARAM = "forward", True, False, "param", False, True  # hand the parameters on to the ring neighbour
    RECV_GRAD = "recv grad", True, False, "grad", True, True  # wait for the running sum of the ranks before
    START_RECV = "start recv", False, False, "", True, True  # meet a message that a peer initiates (program.with_rendezvous)
    START_SEND = "start send", False, False, "", False, True

    __hash__ = object.__hash__  # Enum's own goes through Python, and the executor looks kinds up at every action

    def __init__(self, label: str, of_pass: bool, of_owner: bool, carries: str, incoming: bool, names_unit: bool):
        self.label, self.of_pass, self.of_owner = label, of_pass, of_owner
        self.carries, self.incoming, self.names_unit = carries, incoming, names_unit

    def __str__(self) -> str:
        return self.name


_ORDER = {kind: place for place, kind in enumerate(Kind)}


class Post(NamedTuple):
    """A region that an action has freed, and the message that may land in it next."""

    stream: str
    src: int
    region: str
    offset: int
    nbytes: int
    ahead: int  # 0: a message of this step, 1: of the next
    round: int
    unit: int
    backward: bool
    origin: int = -1  # where it lies in the owner's published copy, on the streams P0 and H0
    version: int = 0  # which version that is, relative to the message's step


class Action(NamedTuple):
    """One thing a rank does."""

    time: int
    phase: int  # END or START
    kind: Kind
    round: int
    unit: int
    backward: bool
    peer: int | None = None
    stream: str = ""
    region: str = ""
    offset: int = 0
    nbytes: int = 0
    version: int = 0  # relative to the program's step
    into: tuple[str, int, int] = ("", 0, 0)  # where a push lands: region, offset, round of the reader
    posts: tuple[Post, ...] = ()

    @property
    def order(self) -> int:
        """Place among actions of equal time and phase."""
        return _ORDER[self.kind]

    @property
    def key(self) -> tuple[int, int]:
        """Logical time with the phase; within a step, every wait refers to a smaller one."""
        return self.time, self.phase

    def __str__(self) -> str:
        unit = "persistent" if self.unit == PERSISTENT else f"unit {self.unit}"
        arrow = "" if self.peer is None else f" {'<-' if self.kind.incoming else '->'} rank {self.peer}"
        where = f" {'backward' if self.backward else 'forward'} {unit}" if self.kind.names_unit else ""
        return f"{self.kind}{where}{arrow} (stream {self.stream or '-'}, round {self.round}, logical time {self.time})"
