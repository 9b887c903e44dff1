"""What a dry-run (verify/dry_run.py) knows: each simulated rank, and messages on their way. Pure, no torch."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from deepspeed_cdp.plan.actions import Action, Post

Key = tuple[int, bool, int, int]  # (step, after the step's passes, logical time, phase), compared lexicographically
Tag = tuple  # ("p", unit, version) or ("g", unit, step, micro-batches summed)
Place = tuple[str, int]  # region and offset; slots of H are offsets 0 and 1, copies of V are regions V0 and V1
BEFORE: Key = (-1, False, 0, 0)  # the first action


class Push(NamedTuple):  # a message on its way
    rank: int
    step: int
    key: Key
    action: Action
    place: Place
    tag: Tag


class Landing(NamedTuple):  # a region that is free for the next message of its edge
    key: Key
    step: int  # in which the message is read
    post: Post
    offset: int
    by: Action | None  # before the first action


@dataclass
class Rank:
    """What one simulated rank knows."""

    number: int
    program: Sequence[Action]
    step: int = 0
    cursor: int = 0
    acted: bool = False  # the action at the cursor is done, except for its posts
    reads: int = 0  # READs of this step
    normed: int = 0  # steps whose finished sums were measured
    averaged: list[int] = field(default_factory=list)  # units of the next of them, whose published copies may be half written
    version: int = 0  # updates applied
    content: dict[Place, Tag] = field(default_factory=dict)
    busy: dict[str, dict[int, int]] = field(default_factory=dict)  # region -> offset -> bytes, from the post to the last use
    using: dict[tuple[int, int, bool], Place] = field(default_factory=dict)  # passes under way -> where they read
    landed: dict[tuple, tuple[Key, Place]] = field(default_factory=dict)  # awaited message -> key of its push, place
    reading: dict[str, list[tuple[int, int]]] = field(default_factory=dict)  # region -> (offset, bytes) of each push from it
    offers: dict[Place, Key] = field(default_factory=dict)  # published unit -> latest key at which a reader let its offer in
    blocked: int = 0  # pushes on their way, offers apart
    scalars: dict[tuple[str, int], deque[tuple[Key, int]]] = field(default_factory=dict)  # (stream, source) -> (key, step)
