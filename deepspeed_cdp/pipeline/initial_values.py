"""Replicas and tied copies start with the same values: those of the lowest rank that has them."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from deepspeed_cdp.pipeline import wire
from deepspeed_cdp.pipeline.state import PipelineStage
from deepspeed_cdp.pipeline.weights import UnitWeights
from deepspeed_cdp.plan.pipeline_schedule import PipeSchedule
from deepspeed_cdp.transport.base import Ticket, Transport


@torch.no_grad()
def broadcast_initial_values(
    schedule: PipeSchedule,
    rank: int,
    units: Mapping[int, UnitWeights],
    stages: Mapping[int, PipelineStage],
    transport: Transport | None,
) -> None:
    """Collective: every unit gets its lowest holder's values, frozen parameters and buffers the first replica's."""
    tickets: list[Ticket] = []

    def broadcast(ranks: tuple[int, ...], flat: torch.Tensor, what: str, then: Callable[[], Any] = lambda: None) -> None:
        if flat.numel() == 0 or rank not in ranks or transport is None:
            return
        if rank == ranks[0]:
            tickets.extend(transport.push("first", peer, flat) for peer in ranks[1:])
        else:
            transport.post("first", ranks[0], flat).wait(f"rank {rank}, {what}")
            then()

    for u, unit in units.items():
        broadcast(schedule.holders(u), unit.flats[0], f"first values of unit {u}")
    for s, stage in sorted(stages.items()):
        for name, tensor in sorted(stage.fixed.items()):
            whole = tensor.detach().contiguous()
            broadcast(schedule.replicas(s), wire.as_bytes(whole), f"first value of {name}", partial(tensor.detach().copy_, whole))
    for ticket in tickets:
        ticket.wait(f"rank {rank}, sharing first values")
