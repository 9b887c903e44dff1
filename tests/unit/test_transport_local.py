"""The transport contract with ranks as threads."""

import threading
import time
from collections.abc import Callable

import pytest

from deepspeed_cdp.errors import HandoffError
from deepspeed_cdp.transport.base import Transport
from deepspeed_cdp.transport.delayed import Delayed
from deepspeed_cdp.transport.local import Hub, LocalTransport
from support.transport_contract import DELAYED, SCENARIOS, names
from support.transport_helpers import Make, empty, full


def run_ranks(scenario: Callable[[Make], None], world: int, seconds: float = 0.0) -> None:
    """Run ``scenario`` in one thread per rank; raise the first rank's error."""
    lock, hubs, errors = threading.Lock(), {}, {}

    def main(rank: int) -> None:
        def make(timeout_seconds: float = 20.0, name: str = "a") -> Transport:
            with lock:
                hub = hubs.setdefault(name, Hub(world, timeout_seconds))
            transport = LocalTransport(hub, rank)
            return Delayed(transport, seed=1, max_seconds=seconds) if seconds else transport

        try:
            scenario(make)
        except BaseException as error:  # told by the main thread
            errors[rank] = error
            for hub in list(hubs.values()):
                hub.fail(rank, f"failed: {error!r}")

    threads = [threading.Thread(target=main, args=(rank,), daemon=True) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    if errors:
        raise errors[min(errors)]
    assert not any(thread.is_alive() for thread in threads)


@pytest.mark.parametrize(("scenario", "world"), SCENARIOS, ids=names(SCENARIOS))
def test_contract(scenario, world):
    run_ranks(scenario, world)


@pytest.mark.parametrize(("scenario", "world"), DELAYED, ids=names(DELAYED))
def test_contract_with_delays(scenario, world):
    run_ranks(scenario, world, seconds=0.003)


def test_a_size_mismatch_names_both_sizes_on_both_sides():
    hub = Hub(2, 5)
    zero, one = LocalTransport(hub, 0), LocalTransport(hub, 1)
    for ticket in (zero.push("P", 1, full(0, 50)), one.post("P", 0, empty(100))):
        with pytest.raises(HandoffError, match="here: stream P: rank 0 pushed 50 bytes to rank 1, which posted for 100 bytes"):
            ticket.wait("here")


def test_a_failed_rank_wakes_its_peers_at_once():
    hub = Hub(3, 30)
    zero, one = LocalTransport(hub, 0), LocalTransport(hub, 1)
    threading.Timer(0.2, hub.fail, (2, "crashed")).start()
    started = time.perf_counter()
    with pytest.raises(HandoffError, match="step 3: stream P: rank 2 crashed"):
        zero.post("P", 2, empty()).wait("step 3")
    with pytest.raises(HandoffError, match="step 3: rank 2 crashed"):
        one.gather(0, "step 3")
    assert time.perf_counter() - started < 5
    box = empty()
    tickets = [zero.push("P", 1, full(4)), one.post("P", 0, box)]  # the others are as they were
    for ticket in tickets:
        ticket.wait("here")
    assert (box == 4).all()
