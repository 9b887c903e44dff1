"""The oracle: cyclic data parallelism as one straight-line loop in one process.

It shares no code with the runtime, sends no messages and keeps two versions of the parameters. So a reader can compare it with
the paper's definition line by line::

    theta_{t+1} = opt(theta_t, 1/N sum_r grad f_r(theta_hat_{r,t}))

where stage s of theta_hat_{r,t} is theta_t^s if r + s >= K and theta_{t-1}^s otherwise. K = 0 is plain data parallelism,
K = N-1 is CDP-v2, K = 2N-1 is CDP-v1. All indices count from 0 (the paper's i = rank + 1, j = stage + 1).

With a delay correction, stale readers of theta_{t-1} read an estimate of theta_t instead: ``_predicted``, made from the sums that
rank s has of stage s in step t-1, or theta_{t-1} moved on by its last update.
"""

import copy
import functools
import itertools
import math
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from deepspeed_cdp.plan.delay_correction import DelayCorrection

_EPSILON = 1e-6  # as in DeepSpeed's ZeRO-3 (stage3.py, unscale_and_clip_grads)


@dataclass
class Trained:
    """The result of ``train``.

    Attributes:
        masters: fp32 parameters after the last update, by name.
        losses: the loss (not divided by ``rounds``) of each micro-batch, by (step, round, rank).
        norms: by step, the global norm of the averaged gradient before clipping.
        clip_norms: by step and stage, the norm that clips the stage: the global one, or the lagged one.
        buffers: by rank, the module's buffers (batch statistics) at the end.
        optimizer: the optimizer, with its state.
        scales: by step, the loss scale.
        overflows: by step, whether it was skipped.
    """

    masters: dict[str, Tensor]
    losses: dict[tuple[int, int, int], float]
    norms: list[float]
    clip_norms: list[list[float]]
    buffers: list[dict[str, Tensor]]
    optimizer: torch.optim.Optimizer
    scales: list[float] = field(default_factory=list)
    overflows: list[bool] = field(default_factory=list)


@dataclass
class _Versions:
    """Masters after ``number`` updates (fresh), their correction, and that of one update less (stale).

    After a flush, all three are the same. Without a delay correction, a version is its own correction.
    """

    fresh: dict[str, Tensor]
    corrected: dict[str, Tensor]
    stale: dict[str, Tensor]
    number: int = 0
    flushed_at: int = 0


def version(threshold: int, ranks: int, step: int, rnd: int, rank: int, stage: int, flushed_at: int = 0) -> int:
    """The version of ``stage`` that ``rank`` reads in forward and backward of round ``rnd`` of ``step``.

    Args:
        threshold: K: 0 for dp, N-1 for cdp-v2, 2N-1 for cdp-v1.
        ranks: N, also the number of stages.
        flushed_at: the version of all ranks after the last flush: t + 1 for a flush at the end of step t, 0 at the start.
    """
    fresh = threshold < 2 * ranks - 1 and (rnd > 0 or rank + stage >= threshold)
    return step if fresh else max(step - 1, flushed_at)


def train(
    module: nn.Module,
    stages: Sequence[Sequence[str]],
    threshold: int,
    batches: Callable[[int, int, int], Any],
    loss: Callable[[Callable[..., Any], Any], Tensor],
    make_optimizer: Callable[[list[tuple[str, nn.Parameter]]], torch.optim.Optimizer],
    steps: int,
    *,
    rounds: int = 1,
    clip: float = 0.0,
    flush_after: Container[int] = (),
    grad_dtype: torch.dtype | None = None,
    on_step: Callable[[int, torch.optim.Optimizer], None] | None = None,
    scaler: Any = None,
    warmup_steps: int = 0,
    rings: int = 1,
    delay_correction: DelayCorrection | None = None,
) -> Trained:
    """Train as N = len(stages) ranks (times ``rings``) do under threshold K, one micro-batch after the other.

    Gradient sums are made in the order in which the running sum travels: round by round, rank 0 first. The sum is then cast to
    fp32 and divided by N. A parameter without any gradient gets zeros.

    Args:
        module: a template with the initial parameters and buffers; it is not changed.
        stages: the parameter names of each stage; each parameter with a gradient once.
        threshold: K (see ``version``).
        batches: ``batches(step, round, rank)`` is a micro-batch.
        loss: ``loss(call, batch)`` is the scalar loss; ``call`` is the module with the parameters and buffers to use.
        make_optimizer: makes the optimizer over (name, fp32 master) in the module's order.
        steps: the number of updates.
        rounds: micro-batches per rank and step (gradient accumulation); each loss is divided by it before its backward.
        clip: the largest gradient norm; 0: no clipping. With K = 0 or K = 2N-1 the norm is that of the whole gradient. Otherwise
            stage s is clipped by this step's norms of stages >= s and last step's norms of stages < s: zero in the first step,
            and behind a flush if they were not finite.
        flush_after: the steps at whose end the engine flushes; the next step reads one version everywhere.
        grad_dtype: the dtype in which micro-batch gradients are summed; default: each parameter's own.
        on_step: called with (step, optimizer) before each update, to set the learning rate.
        scaler: for fp16, DeepSpeed's loss scaler (``loss_scale``, ``update_scale(overflow)``); K = 0 or 2N-1 only. The scale of
            step t depends on the overflows of steps <= t - 1 with K = 0, of steps <= t - 2 with K = 2N-1. The step after a flush
            sees all overflows before it.
        rings: number of rings of N ranks. World rank w is rank w % N of ring w // N and reads that rank's versions; ``batches``
            and the result have world ranks. The sums of the rings are added in order, then divided by N times ``rings``.
        warmup_steps: number of first steps with K = 0; a flush follows, then steps with ``threshold``.
        delay_correction: what stale readers read; default: the old version. ``predict`` uses the sum that rank s of the
            ring has after its last backward of stage s.
    """
    trained = {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
    listed = [name for stage in stages for name in stage if name in trained]
    if sorted(listed) != sorted(trained):
        odd = sorted(set(listed) ^ set(trained)) or sorted({name for name in listed if listed.count(name) > 1})
        raise ValueError(f"each parameter must be in exactly one stage; look at {odd}")
    ranks = len(stages)
    stage_of = {name: index for index, stage in enumerate(stages) for name in stage}
    dtypes = {name: parameter.dtype for name, parameter in trained.items()}
    masters = {name: nn.Parameter(parameter.detach().float().clone()) for name, parameter in trained.items()}
    optimizer = make_optimizer(list(masters.items()))
    buffers = [{name: buffer.detach().clone() for name, buffer in module.named_buffers()} for _ in range(ranks * rings)]
    start = _snapshot(masters)
    versions = _Versions(start, start, start)
    predicts = delay_correction is not None and delay_correction.method == "predict"
    predicted: list[dict[str, Tensor]] = []  # by ring, what stale readers read; empty: the version itself
    applied: list[dict[str, Any]] = []  # the groups' options in the last update since a flush
    factors = [1.0] * ranks  # of the last update, by stage
    last_squares = [0.0] * ranks
    result = Trained({}, {}, [], [], buffers, optimizer)

    unheard: list[bool] = []  # overflows that the scaler does not know yet
    configured = threshold
    for step in range(steps):
        threshold = configured if step >= warmup_steps else 0
        while scaler is not None and len(unheard) > (0 if threshold == 0 or step == versions.flushed_at else 1):
            scaler.update_scale(unheard.pop(0))
        scale = 1.0 if scaler is None else scaler.loss_scale
        by_ring: list[dict[str, Tensor]] = [{} for _ in range(rings)]
        early_sums: list[dict[str, Tensor]] = [{} for _ in range(rings)]
        for ring, rnd, rank in itertools.product(range(rings), range(rounds), range(ranks)):
            world, sums = ring * ranks + rank, by_ring[ring]
            leaves = {}
            for name in trained:
                read = version(threshold, ranks, step, rnd, rank, stage_of[name], versions.flushed_at)
                stale = predicted[ring] if predicted else versions.stale
                source = versions.fresh if read == versions.number else stale
                leaves[name] = source[name].to(dtypes[name], copy=True).requires_grad_()

            def call(*args: Any, leaves: dict[str, Tensor] = leaves, rank: int = world, **kwargs: Any) -> Any:
                return functional_call(module, {**buffers[rank], **leaves}, args, kwargs)

            value = loss(call, batches(step, rnd, world))
            result.losses[step, rnd, world] = float(value.detach())
            value = value / rounds if scaler is None else value / rounds * scale
            gradients = torch.autograd.grad(value, list(leaves.values()), allow_unused=True)
            for name, gradient in zip(leaves, gradients, strict=True):
                if gradient is not None:
                    gradient = gradient.to(grad_dtype or dtypes[name])
                    sums[name] = sums[name] + gradient if name in sums else gradient
            if rnd == rounds - 1:
                early_sums[ring] |= {name: sums[name] for name in sums if stage_of[name] == rank}
        total = functools.reduce(_added, by_ring)
        averaged = {
            name: total[name].float() / (ranks * rings * scale) if name in total else torch.zeros_like(master)
            for name, master in masters.items()
        }
        squares = [
            math.fsum(float(averaged[name].double().square().sum()) for name in stage if name in averaged) for stage in stages
        ]
        clip_norms, new_factors = _clip_norms(threshold, squares, last_squares), [1.0] * ranks
        predicted = []
        if predicts and threshold > 0 and applied:
            for sums in early_sums:
                averages = {}
                for name, master in masters.items():
                    count = (rounds - 1) * ranks + stage_of[name] + 1
                    early_sum = sums[name].float() if name in sums else torch.zeros_like(master)
                    averages[name] = early_sum / (scale * (count / rounds)) * factors[stage_of[name]]
                predicted.append(_predicted(delay_correction, optimizer, masters, averages, applied))
        for name, master in masters.items():
            factor = max(1.0, (clip_norms[stage_of[name]] + _EPSILON) / clip) if clip > 0 else 1.0
            master.grad = averaged[name].mul_(1.0 / factor) if factor > 1.0 else averaged[name]
            new_factors[stage_of[name]] = 1.0 / factor
        result.norms.append(math.sqrt(math.fsum(squares)))
        result.clip_norms.append(clip_norms)
        last_squares = squares

        if on_step is not None:
            on_step(step, optimizer)
        overflow = not math.isfinite(sum(squares)) and threshold in (0, 2 * ranks - 1)
        if not overflow:  # a step without a finite norm is skipped, as in ZeRO-3
            optimizer.step()
            factors = new_factors
        applied = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
        before, versions.stale = versions.fresh, versions.corrected
        versions.fresh = versions.corrected = _snapshot(masters)
        versions.number = step + 1
        if delay_correction and not predicts and not overflow:
            versions.corrected = {n: p + (p - before[n]) * delay_correction.updates for n, p in versions.fresh.items()}
        unheard.append(overflow)
        result.scales.append(scale)
        result.overflows.append(overflow)
        optimizer.zero_grad(set_to_none=True)
        if step in flush_after or step == warmup_steps - 1:
            versions.stale = versions.corrected = versions.fresh
            versions.flushed_at = step + 1
            last_squares = [x if math.isfinite(x) else 0.0 for x in last_squares]
            predicted, applied, factors = [], [], [1.0] * ranks

    result.masters = {name: master.detach().clone() for name, master in masters.items()}
    return result


@torch.no_grad()
def _predicted(
    correction: DelayCorrection | None,
    optimizer: torch.optim.Optimizer,
    masters: dict[str, nn.Parameter],
    averages: dict[str, Tensor],
    options: list[dict[str, Any]],
) -> dict[str, Tensor]:
    """A copy of the optimizer makes the step with m + w (g - m), where m is the momentum as an average of gradients."""
    assert correction is not None
    trial, theta = copy.deepcopy((optimizer, masters))
    for group, given in zip(trial.param_groups, options):
        group.update(given)
        for p in group["params"]:
            name = next(n for n in theta if theta[n] is p)
            g, state = averages[name], trial.state.get(p) or {}
            if "exp_avg" in state:
                beta1 = group["betas"][0]
                m = state["exp_avg"] / (1.0 - beta1 ** float(state["step"]))
            else:
                beta1 = group.get("momentum", 0.0)
                m = None if state.get("momentum_buffer") is None else state["momentum_buffer"] * (1.0 - beta1)
            if m is None:
                p.grad = g
                continue
            decoupled = isinstance(trial, torch.optim.AdamW) or group.get("decoupled_weight_decay")
            sign, decay = -1.0 if group.get("maximize") else 1.0, 0.0 if decoupled else group["weight_decay"]
            # in the terms of m, of which a coupled decay is a part; the optimizer adds the decay itself
            lead = torch.lerp(m, torch.add(g * sign, theta[name], alpha=decay), min(correction.weight, 1.0 / (1.0 - beta1)))
            p.grad = torch.sub(lead, theta[name], alpha=decay) * sign
    with torch.enable_grad():
        trial.step()
    return {n: torch.where(p.isfinite(), p, masters[n]).detach() for n, p in theta.items()}


def _clip_norms(threshold: int, now: Sequence[float], last: Sequence[float]) -> list[float]:
    """The norm that clips each stage, from the stages' squared norms in this step and the one before."""
    stages = range(len(now))
    if threshold in (0, 2 * len(now) - 1):
        return [math.sqrt(math.fsum(now))] * len(now)
    return [math.sqrt(math.fsum((*now[stage:], *last[:stage]))) for stage in stages]


def _added(a: dict[str, Tensor], b: dict[str, Tensor]) -> dict[str, Tensor]:
    """The gradient sums of two rings, added in this order; a parameter may have none in one of them."""
    return {name: a[name] + b[name] if name in a and name in b else (a if name in a else b)[name] for name in {**a, **b}}


def _snapshot(masters: dict[str, nn.Parameter]) -> dict[str, Tensor]:
    return {name: master.detach().clone() for name, master in masters.items()}
