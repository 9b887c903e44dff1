"""Makes the plan of a module: units, stages and layouts."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from deepspeed_cdp.model import discover
from deepspeed_cdp.model.flat_layout import FlatLayout, lay_out, plan_unit
from deepspeed_cdp.plan.constants import PERSISTENT
from deepspeed_cdp.plan.delay_correction import DelayCorrection
from deepspeed_cdp.plan.partition import merged
from deepspeed_cdp.plan.plan import Plan
from deepspeed_cdp.plan.replicated import ReplicatedPlan
from deepspeed_cdp.plan.schedule import Schedule, threshold
from deepspeed_cdp.plan.unit_schedule import Unit

STATE = 5  # of an owner, in sizes of its bf16 parameters: the masters' lower halves and Adam's state


@dataclass(frozen=True)
class Settings:
    """The runtime's settings, from ds_config.json.

    Attributes:
        rule, partition_method, units, keep_after_forward, prefetch_units, warmup_steps, gradient_accumulation_fusion: of the
            ``cyclic`` block.
        delay_correction: of the ``cyclic`` block, with "auto" already decided.
        any_order: of the ``cyclic`` block: True, False or "auto".
        min_unit_bytes: its ``min_unit_mb`` in bytes.
        rounds: gradient_accumulation_steps.
        clip: gradient_clipping; 0: no clipping.
        sum_dtype: data_types.grad_accum_dtype, or None.
        loss_scale: for fp16, the fixed scale or DeepSpeed's ``dynamic_loss_args``; None: no scaling.
        offload: masters and optimizer state are in host memory.
        pin: that memory is page-locked, for asynchronous copies.
        check_divergence: of the ``cyclic`` block: steps from one comparison of ranks to the next; 0: none.
        replicated: every rank keeps all parameters, under ZeRO stages 0, 1 and 2 (plan/replicated.py).
        summed_ranks: the sum of all ranks' gradients is divided by the number of ranks over this (sequence parallelism).
        uncounted: names of parameters whose gradients' norm another rank counts (tensor parallelism).
    """

    rule: str | int = "cdp-v2"
    partition_method: str = "auto"
    units: Sequence[str] | None = None
    rounds: int = 1
    clip: float = 0.0
    sum_dtype: torch.dtype | None = None
    keep_after_forward: bool = False
    min_unit_bytes: int = 0
    loss_scale: float | Mapping[str, Any] | None = None
    warmup_steps: int = 0
    offload: bool = False
    pin: bool = True
    replicated: bool = False
    gradient_accumulation_fusion: bool | str = "auto"
    check_divergence: int = 1
    delay_correction: DelayCorrection = DelayCorrection()
    any_order: bool | str = "auto"
    prefetch_units: int = 2
    summed_ranks: int = 1
    uncounted: frozenset[str] = frozenset()


def find(module: torch.nn.Module, ranks: int, settings: Settings, seen: discover.Trace | None = None) -> discover.FoundUnits:
    """The module's units. If a plan cannot serve enough of them in order, they are units of ``any_order``, if the setting allows.

    Args:
        seen: a trace, in the place of the module's own example.
    Raises:
        ValueError: as ``discover.find_units``.
    """
    if settings.any_order is True:
        return discover.find_units(module, ranks, names=settings.units, any_order=True)
    try:
        return discover.find_units(module, ranks, discover.example_of(module), settings.units, seen)
    except ValueError:
        if settings.any_order is False or settings.units is not None:
            raise
        return discover.find_units(module, ranks, any_order=True)


def find_for_batch(
    module: torch.nn.Module, trained: frozenset[str], ranks: int, settings: Settings, seen: discover.Trace | None
) -> tuple[discover.FoundUnits, str]:
    """The units that the engine has after a first batch like ``seen``, and why they are not those of the start; else empty.

    Raises:
        ValueError: as ``find``.
    """
    found = find(module, ranks, settings)
    if seen is None or found.any_order:
        return found, ""
    why = discover.misfit(make_plan(module, trained, settings, ranks, found=found)[0].units, seen)
    return (find(module, ranks, settings, seen), why) if why else (found, "")


def make_plan(
    module: torch.nn.Module,
    trained: frozenset[str],
    settings: Settings,
    ranks: int,
    rings: int = 1,
    found: discover.FoundUnits | None = None,
) -> tuple[Plan, dict[int, FlatLayout]]:
    """The plan for a module on a ring, and the layout of each unit (PERSISTENT included).

    Args:
        trained: names of the parameters that the optimizer updates.
        ranks: number of ranks in each of the ``rings``.
        found: the module's units, if they are known; else they are searched for.
    Raises:
        ValueError: too few units, or a wrong rule, partition method or unit name.
    """
    if found is None:
        found = find(module, ranks, settings)

    def arrange(weights: Sequence[int] | None) -> tuple[Plan, dict[int, FlatLayout]]:
        return _arranged(module, trained, settings, ranks, rings, found, weights)

    plan, layouts = arrange(None)
    kept = [plan.kept_by_owner(stage) + (0 if settings.offload else STATE) for stage in range(ranks)]
    return (plan, layouts) if len(set(kept)) == 1 else arrange(kept)


def _arranged(
    module: torch.nn.Module,
    trained: frozenset[str],
    settings: Settings,
    ranks: int,
    rings: int,
    found: discover.FoundUnits,
    weights: Sequence[int] | None,
) -> tuple[Plan, dict[int, FlatLayout]]:
    """As ``make_plan``; ``weights`` as of ``discover.stages``."""
    groups = discover.stages(found, ranks, settings.partition_method, weights)
    parameters = dict(module.named_parameters())
    layouts: dict[int, FlatLayout] = {}
    units: list[Unit] = []
    for stage, members in enumerate(groups):
        inside = [[(n, parameters[n]) for n in found.units[i].parameters] for i in members]
        sizes = [sum(p.numel() * p.element_size() for _, p in named) for named in inside]
        for group in merged(sizes, settings.min_unit_bytes):
            layout = lay_out(itertools.chain(*(inside[j] for j in group)), trained, settings.sum_dtype)
            layouts[len(units)] = layout
            units.append(plan_unit(tuple(found.units[members[j]].name for j in group), stage, layout))
    persistent = None
    if found.persistent:
        layouts[PERSISTENT] = lay_out([(n, parameters[n]) for n in found.persistent], trained, settings.sum_dtype)
        persistent = plan_unit((), 0, layouts[PERSISTENT])
    make = ReplicatedPlan if settings.replicated else Plan
    return make(
        Schedule(ranks, threshold(settings.rule, ranks), settings.rounds),
        tuple(units),
        persistent,
        settings.keep_after_forward,
        rings,
        settings.prefetch_units,
        delay_corrected=bool(settings.delay_correction),
        predicts=settings.delay_correction.method == "predict",
    ), layouts
