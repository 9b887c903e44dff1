"""One owner's end of the chain between rings (plan/cross_ring.py)."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from deepspeed_cdp.plan.cross_ring import PAIR, LinkKind, chain, first_posts
from deepspeed_cdp.plan.interval_alloc import aligned
from deepspeed_cdp.plan.plan import Plan
from deepspeed_cdp.transport.base import Ticket, Where
from deepspeed_cdp.transport.buffers import Buffers
from deepspeed_cdp.transport.ring_view import RingView

SumViews = Callable[[int], tuple[list[torch.Tensor], list[torch.Tensor]]]


class CrossRing:
    """Adds a stage's finished sums of all rings, ring by ring, and brings the total back.

    Messages of other rings land in region ``X``. It ends with the total, which the owner averages. The place of the own ring's
    finished sums ends with the sum of this ring and all rings before it.

    Attributes:
        total: float64: after ``exchange``, loss sum and count over all rings; and ``rows``, by ring, of numbers to compare.
    """

    def __init__(self, plan: Plan, transport: RingView, buffers: Buffers, order: Sequence[int], views: SumViews):
        """
        Args:
            order: the owned units that have sums, in the order of ``plan.cross_ring.finishing``.
            views: of a unit, its sums in region X and those of the own ring, in their own dtypes.
        """
        self._views = views
        self.transport, ring = transport.inner, transport.ring
        # by stream: world rank of the receiver
        self._peer = {s: transport.world_rank_of(transport.rank, there) for s, there in (("X", ring + 1), ("Y", ring - 1))}
        self._last, self._posts = ring == plan.rings - 1, first_posts(ring, order)
        self._links = chain(ring, plan.rings, order)
        stage = plan.schedule.owned(transport.rank)
        offsets, own = plan.x_layout(stage)[0], plan.o_layout(stage)
        end = plan.regions(transport.rank)["X"] - aligned(plan.across_nbytes)
        self._x, self._o, self._at = {}, {}, {}
        for i, offset, nbytes in [*((i, offsets[i], plan.unit(i).g_bytes) for i in order), (PAIR, end, plan.across_nbytes)]:
            self._x[i], self._at[i] = buffers.view("X", offset, nbytes), buffers.address(transport.rank, "X", offset)
            if i != PAIR:
                self._o[i] = buffers.view("O", own[i], nbytes)
        self.total = self._x[PAIR].view(torch.float64)
        self.rows = self.total[2:].view(plan.rings, -1)
        self._own = torch.zeros_like(self.total)  # this rank's loss sum and count, and its row
        self._row = self._own[2:].view(plan.rings, -1)[ring]
        self._o[PAIR] = self._own.view(torch.uint8)
        self._posted: dict[tuple[str, int], Ticket] = {}

    def begin(self) -> None:
        """Region X is free: post receives for the next step."""
        for stream, i in self._posts:
            self._post(stream, i)

    def _post(self, stream: str, i: int) -> None:
        self._posted[stream, i] = self.transport.post(stream, self._from(stream), self._x[i])

    def _from(self, stream: str) -> int:
        return self._peer["Y" if stream == "X" else "X"]

    def exchange(
        self,
        ready: Callable[[int], Any],
        losses: Callable[[], tuple[torch.Tensor, int]],
        where: Where,
        write_row: Callable[[torch.Tensor], None],
    ) -> Iterator[int]:
        """Add one step's finished sums over all rings; yield each unit when its total in region X may be overwritten.

        Args:
            ready: waits for a unit's sum of the own ring.
            losses: this rank's loss sum and count of the step.
            write_row: writes this ring's numbers to compare into a row of zeros.
        Raises:
            HandoffError: an owner in another ring is gone or late.
        """
        transport, sent = self.transport, {}
        for _, kind, i, stream in self._links:
            if kind == LinkKind.WAIT_OWN and i == PAIR:
                self._own.zero_()
                self._own[0], self._own[1] = losses()
                write_row(self._row)
            elif kind == LinkKind.WAIT_OWN:
                ready(i)
            elif kind == LinkKind.START_RECV:
                transport.start_peer(stream, self._from(stream), True)
            elif kind == LinkKind.RECV:
                self._posted.pop((stream, i)).wait(where)
            elif kind == LinkKind.ADD:
                total, own = self._views(i) if i != PAIR else ([self.total], [self._own])
                if self._last:
                    torch._foreach_add_(total, own)
                else:
                    torch._foreach_add_(own, total)
            elif kind == LinkKind.SEND:
                transport.work_enqueued()
                sent[stream, i] = transport.push(
                    stream, self._peer[stream], (self._o if stream == "X" else self._x)[i], None, self._at[i]
                )
            elif kind == LinkKind.GRANT_CREDIT:
                self._post(stream, i)
            elif kind == LinkKind.WAIT_SENT:
                sent.pop((stream, i)).wait(where)
            elif i != PAIR:  # FINISHED
                yield i
