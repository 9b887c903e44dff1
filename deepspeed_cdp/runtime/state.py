"""A rank's position in training, shared by the parts of its runtime."""

from dataclasses import dataclass, field

from deepspeed_cdp.plan.plan import Plan
from deepspeed_cdp.plan.schedule import Schedule
from deepspeed_cdp.transport.base import Transport
from deepspeed_cdp.transport.buffers import Buffers


@dataclass
class RankState:
    """One rank's position, and the memory it works in.

    Attributes:
        plan: steps follow it until the next flush; ``schedule`` is ``plan.schedule``.
        rank: in its ring; errors name ``transport.world_rank``.
        step: steps since the last flush; global_step: since the start of training.
        round: the round of gradient accumulation that is next or under way.
    """

    plan: Plan
    rank: int
    transport: Transport
    buffers: Buffers
    step: int = 0
    round: int = 0
    global_step: int = 0
    schedule: Schedule = field(init=False)

    def __post_init__(self) -> None:
        self.schedule = self.plan.schedule

    def follow(self, plan: Plan) -> None:
        """After a flush: the next steps follow this plan."""
        self.plan, self.schedule = plan, plan.schedule
        self.step = self.round = 0

    @property
    def owned_stage(self) -> int:
        """The stage that this rank owns."""
        return self.schedule.owned(self.rank)
