"""Activation memory of N micro-batches interleaved on one device, seen by hooks on what autograd saves (the paper's Table 1)."""

import pytest
import torch
from torch import nn

from deepspeed_cdp.pipeline.runtime import PipeRuntime
from deepspeed_cdp.pipeline.state import PipelineStage
from deepspeed_cdp.plan.pipeline_schedule import PipeSchedule
from support.optimizers import two_groups
from support.pipe_threads import loss

WIDTH = 32


class Tracker:
    """Bytes of distinct saved tensors alive, in what runs inside it; parameters do not count."""

    def __init__(self, parameters):
        self.own = {p.untyped_storage().data_ptr() for p in parameters}
        self.alive: dict[int, list] = {}  # storage -> [bytes, uses]
        self.now = self.most = 0
        self.seen: list[int] = []

    def hooks(self):
        return torch.autograd.graph.saved_tensors_hooks(self.pack, lambda kept: kept.tensor)

    def pack(self, tensor):
        return Kept(self, tensor)


class Kept:
    def __init__(self, tracker, tensor):
        self.tracker, self.tensor, self.key = tracker, tensor, tensor.untyped_storage().data_ptr()
        self.counts = not isinstance(tensor, nn.Parameter) and tensor.dim() == 2 and tensor.shape[0] != WIDTH
        if self.counts:
            entry = tracker.alive.setdefault(self.key, [tensor.untyped_storage().nbytes(), 0])
            if not entry[1]:
                tracker.now += entry[0]
                tracker.most = max(tracker.most, tracker.now)
            entry[1] += 1

    def __del__(self):
        if self.counts:
            entry = self.tracker.alive[self.key]
            entry[1] -= 1
            if not entry[1]:
                self.tracker.now -= entry[0]
                del self.tracker.alive[self.key]


def rows(step: int, q: int):
    generator = torch.Generator().manual_seed(step * 100 + q)
    return torch.randn(4, WIDTH, generator=generator), torch.randn(4, WIDTH, generator=generator)


def layer() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh())


@pytest.mark.parametrize("stages", [2, 3, 4, 6])
def test_activations_of_one_device_are_constant_at_half(stages):
    torch.manual_seed(0)
    layers = [layer() for _ in range(stages)]
    tracker = Tracker(p for x in layers for p in x.parameters())
    marks: list[int] = []

    def run(s):
        def forward(x, number):
            with tracker.hooks():
                return layers[s](x)

        return forward

    named = {s: [(f"{s}.{n}", p) for n, p in layers[s].named_parameters()] for s in range(stages)}
    every = [x for s in range(stages) for x in named[s]]
    runtime = PipeRuntime(
        PipeSchedule(stages, stages - 1, placement="single"),
        0,
        {s: PipelineStage(run(s), {s: named[s]}, {}) for s in range(stages)},
        loss,
        two_groups(every),
        {p: n for n, p in every},
        None,
        torch.device("cpu"),
    )
    do = runtime._do

    def watched(i):
        do(i)
        if i.name in ("forward", "backward") and i.step >= 2:
            marks.append(tracker.now)

    runtime._do = watched
    for step in range(5):
        runtime.train(rows(step, q) for q in range(stages))
    steady, most = list(marks), tracker.most
    runtime.flush()
    assert tracker.now == 0, "the tracker loses count"

    with tracker.hooks():  # one micro-batch through the whole model
        x = rows(9, 0)[0]
        for one in layers:
            x = one(x)
    unit = tracker.now
    del x
    simultaneous = stages * unit
    assert most <= (stages + 1) / 2 * unit * 1.001, (most, unit)
    assert max(steady) - min(steady) <= (1 + stages) * unit / stages  # within a position at most one stage per micro-batch
    assert unit < most < simultaneous  # plain accumulation, one micro-batch after the other, holds one unit
    assert min(steady) > 0.5 * stages / 2 * unit  # it really holds about half of what all at once would
