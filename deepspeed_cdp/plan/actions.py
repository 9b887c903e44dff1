"""A rank's actions and the credits that it grants, as data."""

from enum import Enum
from typing import NamedTuple

from deepspeed_cdp.plan.constants import PERSISTENT


class _Properties(NamedTuple):
    """The value of a ``Kind``; its fields become attributes of the member, which documents them."""

    label: str
    of_pass: bool = False
    of_owner: bool = False
    carries: str = ""
    incoming: bool = False
    initiates: bool = False
    names_unit: bool = True
    relayed: bool = False


class Kind(Enum):
    """The kinds of actions.

    At equal time and phase, a program runs actions in the order of this list.

    Attributes:
        label: the name in traces and error messages.
        of_pass: belongs to a forward or backward of this rank; the executor stops behind the last such action of a pass.
        of_owner: belongs to the owner's optimizer step and its publication, independent of this rank's passes.
        carries: the bytes that the action names: ``"param"``, ``"grad"``, or ``""`` for none.
        incoming: the action's ``peer`` is the sender of a message to this rank (else its receiver).
        initiates: with a peer, this rank initiates that message: it pushes it, or pulls a published unit.
        names_unit: the action is about one unit.
        relayed: a rank only begins the action, which happens beside its other actions, after all that it began before.
    """

    # End of a pass
    RELEASE_PARAM = _Properties("release", of_pass=True)  # the pass is over: its parameters may be overwritten
    SEND_GRAD = _Properties("send grad", of_pass=True, carries="grad", initiates=True)  # add this rank's gradients, push the sum
    RECV_PERSISTENT_GRAD = _Properties("recv persistent grad", of_pass=True, carries="grad", incoming=True)
    SEND_PERSISTENT_GRAD = _Properties("send persistent grad", of_pass=True, carries="grad", initiates=True)
    RELEASE_PERSISTENT_PARAM = _Properties("release persistent", of_pass=True)
    # Owner of a stage, and the credits in between
    OFFER_GRAD = _Properties("offer", carries="grad", relayed=True)  # the sum is back: let the next rank pull it
    PREDICT_PARAM = _Properties("predict", of_owner=True, carries="param", relayed=True)  # the next version, from the sum so far
    REDUCE_GRAD = _Properties("average", of_owner=True, incoming=True)  # receive and average one unit's finished sum
    GRAD_NORM = _Properties("norm", of_owner=True, incoming=True, names_unit=False)  # send the norms to the next owner
    SEND_NORM = _Properties("total", of_owner=True, names_unit=False)  # the last owner sends the global norm to all others
    OPTIMIZER_STEP = _Properties("update", of_owner=True, incoming=True, names_unit=False)
    GRANT_CREDIT = _Properties("credit", names_unit=False, relayed=True)  # only posts
    PUBLISH_PARAM = _Properties("publish", of_owner=True, carries="param")  # offer a new version to a reader
    # Start of a pass
    PULL_PARAM = _Properties("pull", of_owner=True, incoming=True, initiates=True)  # from the owner's published copy
    PULL_GRAD = _Properties("pull grad", incoming=True, initiates=True)  # the running sum of the ranks before, from the owner
    REFRESH_PARAM = _Properties("refresh", carries="param", incoming=True)  # a replica's unit gets its next version
    WAIT_PARAM = _Properties("wait", of_pass=True, carries="param", incoming=True)
    FORWARD_PARAM = _Properties("forward", of_pass=True, carries="param", initiates=True)  # replicas: to the ring neighbour
    RECV_GRAD = _Properties("recv grad", of_pass=True, carries="grad", incoming=True)  # the running sum is here
    # The other side of a peer's message, for transports whose two sides wait for each other (program.with_rendezvous)
    START_RECV = _Properties("start recv", incoming=True)
    START_SEND = _Properties("start send")

    __hash__ = object.__hash__  # Enum's hash is a Python function, and the executor looks up a kind at every action

    def __init__(
        self,
        label: str,
        of_pass: bool,
        of_owner: bool,
        carries: str,
        incoming: bool,
        initiates: bool,
        names_unit: bool,
        relayed: bool,
    ):
        self.label, self.of_pass, self.of_owner, self.carries = label, of_pass, of_owner, carries
        self.incoming, self.initiates, self.names_unit, self.relayed = incoming, initiates, names_unit, relayed

    def __str__(self) -> str:
        return self.name


_ORDER = {kind: place for place, kind in enumerate(Kind)}


class Post(NamedTuple):
    """A *credit*: the next message of an edge (stream, src) may land in this region.

    Attributes:
        stream, src: the edge; its destination is this rank.
        region, offset, nbytes: where the message lands.
        ahead: 0 for a message of this step, 1 for one of the next step.
        round, unit, backward: the pass that the message is for.
        origin: on the streams P0, W0 and G0, region and offset from which it is pulled.
        version: the version published there, relative to the message's step; 0 for sums.
    """

    stream: str
    src: int
    region: str
    offset: int
    nbytes: int
    ahead: int
    round: int
    unit: int
    backward: bool
    origin: tuple[str, int] = ("", 0)
    version: int = 0


class Action(NamedTuple):
    """One action of a rank.

    Attributes:
        time, phase: logical time in ticks; END or START.
        round, unit, backward: the pass that it belongs to.
        peer, stream: of its message, if any.
        region, offset, nbytes: its bytes on this rank.
        version: of parameters, relative to the program's step.
        into: where a pushed message lands: region, offset, round of the reader.
        posts: credits granted once the action is done.
    """

    time: int
    phase: int
    kind: Kind
    round: int
    unit: int
    backward: bool
    peer: int | None = None
    stream: str = ""
    region: str = ""
    offset: int = 0
    nbytes: int = 0
    version: int = 0
    into: tuple[str, int, int] = ("", 0, 0)
    posts: tuple[Post, ...] = ()

    @property
    def relayed(self) -> bool:
        """As of ``Kind``; predictions are published so, too."""
        return self.kind.relayed or self.kind is Kind.PUBLISH_PARAM and self.stream == "W0"

    @property
    def order(self) -> int:
        """Place among actions of equal time and phase."""
        return _ORDER[self.kind]

    @property
    def key(self) -> tuple[int, int]:
        """Logical time and phase; within a step, an action waits only for actions with smaller keys."""
        return self.time, self.phase

    def __str__(self) -> str:
        unit = "persistent" if self.unit == PERSISTENT else f"unit {self.unit}"
        arrow = "" if self.peer is None else f" {'<-' if self.kind.incoming else '->'} rank {self.peer}"
        where = f" {'backward' if self.backward else 'forward'} {unit}" if self.kind.names_unit else ""
        return f"{self.kind}{where}{arrow} (stream {self.stream or '-'}, round {self.round}, logical time {self.time})"
