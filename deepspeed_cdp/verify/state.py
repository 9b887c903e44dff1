"""State of a dry-run (dry_run.py): each simulated rank, and the messages on their way."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from deepspeed_cdp.plan.actions import Action, Post

# (step, after the step's passes, logical time, phase, place among predictions of one tick), compared lexicographically
Key = tuple[int, bool, int, int, int]
Tag = tuple  # ("p" or "corrected", unit, version) or ("g", unit, step, micro-batches summed)
Place = tuple[str, int]  # region and offset; slots of H have offsets 0 and 1, published copies are regions V0, V1, W0, W1
BEFORE: Key = (-1, False, 0, 0, 0)  # earlier than the first action


class Push(NamedTuple):
    """A message on its way."""

    rank: int
    step: int
    key: Key
    action: Action
    place: Place
    tag: Tag


class Landing(NamedTuple):
    """A credit: a region that is free for the next message of its edge.

    Attributes:
        step: the step in which the message is read.
        by: the action that granted the credit; None before the first action.
    """

    key: Key
    step: int
    post: Post
    offset: int
    by: Action | None


@dataclass
class Rank:
    """State of one simulated rank.

    Attributes:
        acted: the action at ``cursor`` is done, except for its posts.
        reads: WAIT_PARAMs of this step.
        normed: number of steps whose GRAD_NORM is done.
        averaged: units of the next of these steps with a REDUCE_GRAD done; their published copies may be half written.
        version: number of updates applied.
        predicted: owned unit -> the version that was predicted last.
        content: what each place holds.
        busy: region -> offset -> bytes, from the post to the last use.
        using: passes under way -> the place that they read.
        relays: relays under way: [step, index, program, done except for its posts].
        adding: (round, unit) of the sums that this rank adds to.
        landed: awaited message -> key of its push, and its place.
        reading: region -> (offset, bytes) of each push that still reads there.
        pulled: place of an offered unit or sum -> latest key at which another rank pulled it.
        blocked: pushes on their way, without published units.
        scalars: (stream, source) -> (key, step) of messages that have arrived.
    """

    number: int
    program: Sequence[Action]
    step: int = 0
    cursor: int = 0
    acted: bool = False
    reads: int = 0
    normed: int = 0
    averaged: list[int] = field(default_factory=list)
    version: int = 0
    predicted: dict[int, int] = field(default_factory=dict)
    content: dict[Place, Tag] = field(default_factory=dict)
    busy: dict[str, dict[int, int]] = field(default_factory=dict)
    using: dict[tuple[int, int, bool], Place] = field(default_factory=dict)
    relays: deque[list] = field(default_factory=deque)
    adding: set[tuple[int, int]] = field(default_factory=set)
    landed: dict[tuple, tuple[Key, Place]] = field(default_factory=dict)
    reading: dict[str, list[tuple[int, int]]] = field(default_factory=dict)
    pulled: dict[Place, Key] = field(default_factory=dict)
    blocked: int = 0
    scalars: dict[tuple[str, int], deque[tuple[Key, int]]] = field(default_factory=dict)
