"""Messages held to a rate: the limited transport keeps the contract, takes as long as it should, and ends."""

import threading
import time
from collections.abc import Iterator

import pytest
import torch

from benchmarks.limited import Limited
from deepspeed_cdp.transport.local import Hub, LocalTransport


@pytest.fixture
def pair() -> Iterator[list[Limited]]:
    """Two ranks whose streams carry 10 MB/s each."""
    hub = Hub(2, 20)
    made = [Limited(LocalTransport(hub, rank), 0.01) for rank in range(2)]
    yield made
    for transport in made:
        transport.close(False)


def test_messages_take_their_time_and_come_in_order(pair):
    a, b = pair
    sources = [torch.full((1_000_000,), i, dtype=torch.uint8) for i in range(3)]
    targets = [torch.empty_like(s) for s in sources]
    begun = time.monotonic()
    posted = [b.post("P", 0, t) for t in targets]
    pushed = [a.push("P", 1, s) for s in sources]
    assert time.monotonic() - begun < 0.3, "neither blocks"
    posted[0].wait("first")
    assert time.monotonic() - begun >= 0.1
    for ticket in posted[1:]:
        ticket.wait("rest")
    assert time.monotonic() - begun >= 0.3
    for ticket in pushed:
        ticket.wait("sent")
    assert all(torch.equal(s, t) for s, t in zip(sources, targets))
    assert b.bytes_received["P", 0] == 3_000_000


def test_streams_do_not_share_the_rate(pair):
    a, b = pair
    begun = time.monotonic()
    posted = [b.post(stream, 0, torch.empty(3_000_000, dtype=torch.uint8)) for stream in "PGO"]
    for stream in "PGO":
        a.push(stream, 1, torch.zeros(3_000_000, dtype=torch.uint8))
    for ticket in posted:
        ticket.wait("")
    assert 0.3 <= time.monotonic() - begun < 0.8, "one after the other they would take 0.9 s"


def test_closing_lets_waiting_messages_go_first_and_may_be_repeated(pair):
    a, b = pair
    into = torch.zeros(500_000, dtype=torch.uint8)
    ticket = b.post("P", 0, into)
    a.push("P", 1, torch.ones(500_000, dtype=torch.uint8))
    closing = threading.Thread(target=a.close, args=(True,), daemon=True)
    closing.start()
    ticket.wait("")
    assert into.min() == 1
    closing.join(10)
    assert not closing.is_alive()
    for _ in range(2):  # DeepSpeed's engine destroys itself again when it is collected
        a.close(True)
        b.close(True)
    assert not [t for t in threading.enumerate() if t.name == "limited link" and t.is_alive()]
