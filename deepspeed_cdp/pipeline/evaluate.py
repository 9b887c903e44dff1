"""Evaluation of a cyclic pipeline: forwards only, after a flush."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from deepspeed_cdp.pipeline import wire
from deepspeed_cdp.pipeline.runtime import PipeRuntime
from deepspeed_cdp.pipeline.state import MicroBatchReader
from deepspeed_cdp.plan.pipeline_schedule import Instruction


@torch.no_grad()
def evaluate(
    runtime: PipeRuntime, batches: Iterator[Any] | None, count: int, loss: bool = True, share: bool = True
) -> tuple[list[Any], Any]:
    """Collective: flush, and the forward of ``count`` micro-batches.

    Args:
        loss: apply the loss to the outputs.
        share: tell every rank the losses (of one number each).
    Returns:
        (by micro-batch the loss, or the outputs; the last outputs). Ranks without the last stage have ([losses], None) if
        they were shared, else ([], None).
    """
    runtime.flush()
    schedule, last = runtime.schedule, runtime.schedule.stages - 1
    runtime.forget_shapes(False)
    feed, results, outputs, sent = MicroBatchReader(batches, count), [], None, []
    for q in range(count):
        for s in sorted(runtime.local_stages):
            if schedule.rank_of(0, q, s) != runtime.rank:
                continue
            where = f"rank {runtime.rank}, evaluation, stage {s}, micro-batch {q}"
            if s == 0:
                inputs = runtime.read_inputs(feed.get(q)[0])
            elif (peer := schedule.rank_of(0, q, s - 1)) != runtime.rank:
                inputs, tickets = runtime.receive_output(Instruction("recv_activation", s, 0, q, peer=peer), False)
                for ticket in tickets:
                    ticket.wait(where)
            else:
                inputs = outputs
            outputs = runtime.local_stages[s].run(inputs, q)
            if s == last:
                results.append(runtime.loss_fn(outputs, runtime.read_labels(feed.get(q)[1])) if loss else outputs)
            elif (peer := schedule.rank_of(0, q, s + 1)) != runtime.rank:
                sent += runtime.send_output(Instruction("send_activation", s, 0, q, peer=peer), outputs, False)
    if runtime.local_stages.keys() & {0, last}:
        feed.finish()
    if share and schedule.ranks > 1:
        results = _share(runtime, results, count)
    for ticket in sent:
        ticket.wait(f"rank {runtime.rank}, evaluation")
    return results, outputs if last in runtime.local_stages else None


def _share(runtime: PipeRuntime, results: list[Tensor], count: int) -> list[Tensor]:
    src = runtime.schedule.replicas(runtime.schedule.stages - 1)[0]
    where = f"rank {runtime.rank}, evaluation, losses"
    if runtime.rank == src:
        packed = torch.stack([r.detach().reshape(()).to(torch.float64) for r in results])
        others = [p for p in range(runtime.schedule.ranks) if p != src]
        for ticket in [runtime.link.push("losses", p, wire.as_bytes(packed)) for p in others]:
            ticket.wait(where)
        return list(packed)  # in float64, as on the other ranks, so that all means round alike
    into = torch.zeros(count, dtype=torch.float64, device=runtime.device)
    runtime.link.post("losses", src, wire.as_bytes(into)).wait(where)
    return list(into)
