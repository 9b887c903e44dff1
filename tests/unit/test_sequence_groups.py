"""Sequence groups on threads: members meet in every unit, as in attention layers. Every weight is the oracle's, bitwise."""

import threading
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from deepspeed_cdp.analysis import reference
from deepspeed_cdp.integration.optimizer import CyclicOptimizer
from deepspeed_cdp.model.make_plan import Settings
from deepspeed_cdp.plan.delay_correction import DelayCorrection
from deepspeed_cdp.plan.schedule import threshold
from deepspeed_cdp.runtime import trace
from deepspeed_cdp.runtime.runtime import Runtime
from deepspeed_cdp.transport.base import Transport
from deepspeed_cdp.transport.ring_map import RingMap
from deepspeed_cdp.transport.ring_view import RingView
from support import models
from support.gloo_pairs import GlooPairs
from support.local_ring import run_ranks, traced_once
from support.optimizers import sgd

STEPS = 5


def lock_step(module: torch.nn.Module, meet: Callable[[], object]) -> None:
    """Meet in each block's forward and backward."""

    def forward(layer: torch.nn.Module, inputs: object, output: torch.Tensor) -> None:
        meet()
        if output.requires_grad:
            output.register_hook(backward)

    def backward(gradient: torch.Tensor) -> None:
        meet()

    for block in module.blocks:
        block[0].register_forward_hook(forward)


def check(
    ring_map: RingMap,
    rule: str,
    rounds: int = 1,
    delay: float = 0.0,
    connect: Callable[[int], Transport] | None = None,
    **options: object,
) -> None:
    ranks, size, sequence, _ = ring_map
    firsts = range(0, ranks, sequence)
    barriers = {first: threading.Barrier(sequence, timeout=20) for first in firsts}
    modules = [models.build("mlp") for _ in range(ranks)]

    def work(rank: int, transport: Transport) -> tuple[dict[str, torch.Tensor], dict[tuple[int, int, int], float]]:
        module, losses = modules[rank], {}
        meet = barriers[ring_map.group(rank)[0]].wait
        lock_step(module, meet)
        settings = Settings(rule, rounds=rounds, **options)
        named = list(module.named_parameters())
        runtime = Runtime(module, sgd(named), settings, RingView(transport, size, sequence), torch.device("cpu"))
        optimizer, recorder = CyclicOptimizer(runtime), trace.Recorder(runtime.executor, torch.device("cpu"))
        for step in range(STEPS):
            for m in range(rounds):
                meet()  # the data loader
                with runtime.forward():
                    loss = models.loss(module, "mlp", models.batch("mlp", step, m, rank))
                losses[step, m, rank] = loss.item()
                meet()  # the loss
                optimizer.scale_if_loss(loss / rounds).backward()
                runtime.end_backward()
            runtime.step()
        state = {k: v.clone() for k, v in runtime.whole_state().items()}
        stages.append(runtime.plan.stages)
        recording = recorder.stop()["deepspeed_cdp"]
        place = ring_map.place(rank)
        assert recording["before"] == (rank - sequence if place else None)
        peers = {x["peer"] for x in recording["messages"]}
        assert peers and peers <= {w for w in range(ranks) if ring_map.ring(w) == ring_map.ring(rank)} or size == 1
        runtime.close(True)
        return state, losses

    stages: list = []
    with traced_once("mlp", None):
        results = run_ranks(ranks, work, delay=delay, connect=connect)
    correction = options.get("delay_correction", DelayCorrection())
    assert isinstance(correction, DelayCorrection)
    want = reference.train(
        models.build("mlp"),
        stages[0],
        threshold(rule, size),
        lambda t, m, w: models.batch("mlp", t, m, ring_map.rank(*divmod(w, size))),
        lambda call, x: models.loss(call, "mlp", x),
        sgd,
        STEPS,
        rounds=rounds,
        rings=ring_map.rings,
        delay_correction=correction,
        clip=options.get("clip", 0.0),
    )
    known = {(t, m, ring_map.rank(*divmod(w, size))): loss for (t, m, w), loss in want.losses.items()}
    assert {place: loss for _, losses in results for place, loss in losses.items()} == known
    for state, _ in results:
        assert all(torch.equal(state[name], value) for name, value in want.masters.items())


@pytest.mark.parametrize("rule", ["dp", "cdp-v1", "cdp-v2"])
@pytest.mark.parametrize(
    "ring_map", [RingMap(4, 2, 2), RingMap(8, 2, 2), RingMap(6, 2, 3), RingMap(6, 3, 2), RingMap(4, 1, 2)], ids=str
)
def test_every_weight_is_the_oracles(ring_map: RingMap, rule: str):
    check(ring_map, rule, rounds=2 if rule == "cdp-v2" else 1, clip=0.3)


@pytest.mark.parametrize("rounds", [1, 2])
@pytest.mark.parametrize("method", ["extrapolate", "predict"])
@pytest.mark.parametrize("size", [(4, 2, 2), (6, 3, 2)])
def test_with_delay_correction(size: tuple[int, int, int], method: str, rounds: int):
    """Each ring predicts from its own members' gradients."""
    check(RingMap(*size), "cdp-v2", rounds, delay_correction=DelayCorrection(method, weight=1.5))


@pytest.mark.parametrize("rule", ["dp", "cdp-v1", "cdp-v2"])
def test_random_delays_change_nothing(rule: str):
    check(RingMap(6, 3, 2), rule, delay=0.003, delay_correction=DelayCorrection("extrapolate"))


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize(("size", "rule"), [((4, 2, 2), "cdp-v2"), ((6, 3, 2), "dp"), ((8, 2, 2), "cdp-v1")])
def test_where_both_sides_of_a_message_wait_for_each_other(size: tuple[int, int, int], rule: str, strict: bool):
    """As over NCCL; strictly: a rank stops at each message until the other side is at it."""
    store, ranks = dist.HashStore(), size[0]
    check(
        RingMap(*size),
        rule,
        connect=lambda rank: GlooPairs(rank, ranks, 20.0, store, strict=strict),
        keep_after_forward=True,
        delay_correction=DelayCorrection("predict" if rule != "dp" else "none"),
    )
