"""One rank of the transport contract on GPUs: tests/support/transport_contract.py over ``nccl`` and ``peer``, and more.

Started by tests/gpu/test_gpu.py, or by hand: torchrun --nproc-per-node N tests/gpu/rank_contract.py [nccl|peer ...]

Scenarios for 2 and 3 ranks run on the first GPUs (nccl) or where there are just as many (peer, and whatever broadcasts). What is
left out, because on a device a wait holds up a stream and not the host, or because the transport promises less than gloo:

- sender_waits_for_the_copy, counters: they measure how long the host waits. silent_peer, nobody_takes: ``device_waits_in_vain``
  is here for them. alone: without edges there is nothing of a device's in it.
- closed_peer: a peer that has closed is only noticed by the timeout. size_mismatch: neither NCCL nor a copy engine checks sizes.
- peer: reset_forgets, many_resets, close_drops_what_nobody_takes and close_without_linger (only pulls may be left over at its
  reset), zero_bytes (plans have none), bad_peers (the plan names peers).
"""

import faulthandler
import functools
import os
import sys
import time
import traceback
from pathlib import Path

import torch

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]
faulthandler.dump_traceback_later(120, exit=True)

import torch.distributed as dist  # noqa: E402

from deepspeed_cdp.errors import HandoffError  # noqa: E402
from deepspeed_cdp.transport.base import PULLED  # noqa: E402
from deepspeed_cdp.transport.nccl import NcclTransport  # noqa: E402
from support import transport_contract as contract  # noqa: E402
from support import transport_endings as endings  # noqa: E402
from support.gpu_places import take_gpu  # noqa: E402
from support.transport_helpers import W, agree, empty, full, is_full, untouched  # noqa: E402

SECONDS = 40  # for one scenario
SLOTS, SLOT_BYTES = 8, 300000
RENAMED = {"free": "P", "blocked": "G", "stuck": "X", "early": "P", "late": "G"}  # peer knows the plan's streams only


class Placed:
    """Lets scenarios use any tensor over the peer transport, which moves bytes between places of its allocations."""

    def __init__(self, inner, streams):
        self.inner, self.streams, self.counts, self.sources = inner, streams, {}, []
        self.arena = inner.allocate(len(streams) * inner.size**2 * SLOTS * SLOT_BYTES)

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def slot(self, stream, src, dst):
        edge = (stream, src, dst)
        self.counts[edge] = number = self.counts.get(edge, -1) + 1
        index = (self.streams.index(stream) * self.inner.size + src) * self.inner.size + dst
        return (index * SLOTS + number % SLOTS) * SLOT_BYTES

    def post(self, stream, src, into, after=(), where="", remote_offset=-1):
        self.inner.work_enqueued()  # scenarios compute between messages without saying so, as hooks do
        stream = RENAMED.get(stream, stream)
        at = self.slot(stream, src, self.inner.rank)
        place = self.arena[at : at + into.numel()]
        return Landing(self.inner.post(stream, src, place, [t.ticket for t in after], where, at), place, into)

    def push(self, stream, dst, source, after=None, remote_offset=-1):
        self.inner.work_enqueued()
        stream = RENAMED.get(stream, stream)
        at = self.slot(stream, self.inner.rank, dst)
        if stream in PULLED:
            self.arena[at : at + source.numel()].copy_(source)
        if after is not None:
            source = after.place
        self.sources.append(source)  # a plan's buffers stay; scenarios drop theirs
        ticket = self.inner.push(stream, dst, source, after and after.ticket, at)
        return Landing(ticket, source, source)


class Landing:
    def __init__(self, ticket, place, into):
        self.ticket, self.place, self.into, self.waited = ticket, place, into, False

    def wait(self, where):
        self.ticket.wait(where)
        if not self.waited and self.into is not self.place:
            self.into.copy_(self.place)
        self.waited = True

    def done(self):
        return self.waited or self.ticket.done()


# ---- more scenarios -----------------------------------------------------------------------------------------------------------
def relay_and_offers(make):
    """A message is passed on as it came, without a wait in between; offers are taken later than they are made."""
    t = make()
    after, before = (t.rank + 1) % t.size, (t.rank - 1) % t.size
    for k in range(20):
        if t.rank == 0:
            box, source = empty(200000), full(k, 200000)
            first = t.push("P", 1, source)
            t.post("P", before, box).wait(W)
            first.wait(W)
        else:
            box = empty(200000)
            came = t.post("P", before, box)
            gone = t.push("P", after, box, came)
            came.wait(W)
            gone.wait(W)
        assert is_full(box, k), f"relay {k}"
        offered, box = full(k + 100 + t.rank, 5000), empty(5000)
        offer = t.push("P0", after, offered)
        take = t.post("P0", before, box)
        take.wait(W)
        offer.wait(W)
        assert is_full(box, k + 100 + before), f"offer {k}"
    agree(t)
    t.close(drain=True)


def streams_keep_the_order(make):
    """The host runs ahead of a busy device: nothing is sent before it is computed, nothing overwritten before it is used."""
    t = make()
    after, before = (t.rank + 1) % t.size, (t.rank - 1) % t.size
    out, into, sums = empty(100000), empty(100000), []
    begun, push = time.perf_counter(), None
    for k in range(10):
        torch.cuda._sleep(int(2e7))  # about 10 ms
        if push is not None:
            push.wait(W)
        out.fill_(k + t.rank)
        push = t.push("G", after, out)
        post = t.post("G", before, into)
        post.wait(W)
        torch.cuda._sleep(int(1e6))
        sums.append(into.sum(dtype=torch.int64))
        into.fill_(255)
    host = time.perf_counter() - begun
    torch.cuda.synchronize()
    device = time.perf_counter() - begun
    assert [int(s) for s in sums] == [(k + before) * 100000 for k in range(10)]
    assert host < device / 2, f"the host took {host:.3f} s of {device:.3f}"
    t.close(drain=True)


def device_waits_in_vain(make):
    """A message that never comes: the device is let go after the timeout, and the next call says what was waited for."""
    t = make(timeout_seconds=5)
    if t.rank == 0:
        t.post("P", 1, empty()).wait("rank 0, step 7")
        t.record_event()
        later, begun = t.post("P", 1, empty()), time.perf_counter()
        torch.cuda.synchronize()
        assert 1 < time.perf_counter() - begun < 15, time.perf_counter() - begun
        try:
            later.wait("later")
            raise AssertionError("no error")
        except HandoffError as error:
            assert "rank 0, step 7: no message on stream P from rank 1 within 5" in str(error), str(error)
    else:
        time.sleep(9)
    t.close(drain=False)


def what_did_not_come_is_nan(make):
    """Whoever was let go after the timeout finds 0xFF, of which nan is made, and nothing of older messages."""
    t, sizes = make(timeout_seconds=5), (8, 4000, 60000, 140000, SLOT_BYTES)
    memory = t.allocate(sum(sizes)).split(sizes)
    if t.rank == 0:
        for _ in range(20):
            for place in memory:
                t.post("P", 1, place).wait(W)
        torch.cuda.synchronize()
        assert all(is_full(place, 3) for place in memory)
        found = []
        for place in memory:
            t.post("P", 1, place).wait("rank 0, step 7")
            found.append(place.clone())
        torch.cuda.synchronize()
        assert all(untouched(copy) for copy in found), [copy.unique().tolist() for copy in found]
    else:
        for _ in range(20):
            for size in sizes:
                t.push("P", 0, full(3, size))
        time.sleep(9)
    t.close(drain=False)


# scenario, ranks, streams, over peer too, broadcasts
SCENARIOS = [
    (contract.order_on_an_edge, 2, "P", True, False),
    (contract.edges_are_independent, 2, "free blocked stuck", True, False),
    (contract.edges_are_independent, 3, "free blocked stuck", True, False),
    (contract.push_before_post, 2, "P", True, False),
    (contract.post_before_push, 2, "P", True, False),
    (contract.ring_with_reused_buffers, 2, "G", True, False),
    (contract.ring_with_reused_buffers, 4, "G", True, False),
    (contract.relays_beside_the_host, 2, "G G0", True, False),
    (contract.relays_beside_the_host, 4, "G G0", True, False),
    (contract.zero_bytes, 2, "P", False, False),
    (contract.gather_and_broadcast, 2, "", True, True),
    (contract.gather_and_broadcast, 4, "", True, True),
    (contract.reset_forgets, 2, "P Q", False, False),
    (contract.reset_forgets, 4, "P Q", False, False),
    (contract.many_resets, 2, "P Q", False, False),
    (endings.close_lingers, 2, "early late", True, False),
    (endings.close_drops_what_nobody_takes, 3, "P Q", False, False),
    (endings.close_without_linger, 2, "P Q", False, False),
    (endings.late_gather, 3, "", True, False),
    (contract.two_at_once, 3, "P", True, False),
    (contract.bad_peers, 2, "P", False, False),
    (relay_and_offers, 2, "P P0", True, False),
    (relay_and_offers, 4, "P P0", True, False),
    (streams_keep_the_order, 2, "G", True, False),
    (streams_keep_the_order, 4, "G", True, False),
    (device_waits_in_vain, 2, "P", True, False),
    (what_did_not_come_is_nan, 2, "P", False, False),
]


def make(kind, streams, rank, world, device, timeout_seconds=20.0, name="a"):
    if kind == "peer":
        from deepspeed_cdp.transport import peer_native
        from deepspeed_cdp.transport.peer import STREAMS

        transport = peer_native.make(rank, world, timeout_seconds, device, f"contract/{name}")
        by = "C++" if transport.native else f"Python ({transport.why_not_native})"
        print(f"     rank {rank}: {transport.stream_report}; messages by {by}", flush=True)
        return Placed(transport, STREAMS)
    transport = NcclTransport(rank, world, timeout_seconds, device, name=f"contract/{world}/{name}")
    transport.prepare([(s, a, b) for s in streams for a in range(world) for b in range(world) if a != b], deferred=False)
    return transport


def main() -> None:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device, backend = take_gpu()
    dist.init_process_group(backend, device_id=device if backend == "nccl" else None)
    store = dist.distributed_c10d._get_default_store()
    torch.set_default_device(device)
    # kernels are loaded at their first use, which may wait for the device, and scenarios hold some of its streams (design §6)
    untouched(empty(200000)), is_full(full(1), 1), is_full(empty(200000), 1), empty().sum(dtype=torch.int64).item()
    empty().copy_(full(2))
    free = torch.cuda.mem_get_info()[0]
    number = 0
    for kind in sys.argv[1:] or ["nccl", "peer"]:
        for scenario, world, streams, by_peer, broadcasts in SCENARIOS:
            title = f"{kind} {scenario.__name__}-{world}"
            if world > size or (kind == "peer" or broadcasts) and world != size or kind == "peer" and not by_peer:
                continue
            faulthandler.cancel_dump_traceback_later()
            faulthandler.dump_traceback_later(SECONDS, exit=True)
            begun = time.time()
            try:
                if rank < world:
                    scenario(functools.partial(make, kind, streams.split(), rank, world, device))
                torch.cuda.synchronize()
            except BaseException:
                print(f"BAD  rank {rank}: {title}\n{traceback.format_exc()}", flush=True)
                os._exit(1)
            number += 1
            arrived = store.add(f"contract done/{number}", 1)
            while arrived < size:  # not a barrier of NCCL's: a broken transport must not hide behind it
                time.sleep(0.01)
                arrived = store.add(f"contract done/{number}", 0)
            if rank == 0:
                print(f"ok   {title} {time.time() - begun:.1f} s", flush=True)
    if rank == 0:
        print(f"device memory not given back: {(free - torch.cuda.mem_get_info()[0]) / 2**20:.0f} MiB (torch's cache included)")
        print("passed", flush=True)
    faulthandler.cancel_dump_traceback_later()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
