"""Predicts a model under a ds_config: the engine's own plan, and the durations of its parts."""

import argparse
import contextlib
import io
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import NamedTuple

import torch

from deepspeed_cdp.analysis.timing import waves
from deepspeed_cdp.analysis.timing.times import Hardware, Times, Work, changed, times
from deepspeed_cdp.cli import models, settings
from deepspeed_cdp.cli.output import UserError, positive, rule, size, whole
from deepspeed_cdp.model import discover
from deepspeed_cdp.model.flat_layout import FlatLayout
from deepspeed_cdp.model.make_plan import find_for_batch, make_plan
from deepspeed_cdp.plan.constants import PERSISTENT
from deepspeed_cdp.plan.plan import Plan
from deepspeed_cdp.runtime.grad_accumulation import fusible


class Prediction(NamedTuple):
    """The prediction that ``plan`` and ``simulate`` print.

    Attributes:
        work: of each unit.
        persistent: number of trained persistent parameters.
        source: origin of the compute-only time of a step, in words.
        ring_bandwidth: bytes per second between the owners of a stage in different rings.
    """

    loaded: models.Loaded
    config: settings.Config
    plan: Plan
    work: list[Work]
    persistent: int
    times: Times
    hardware: Hardware
    source: str
    warnings: list[str]
    ring_bandwidth: float

    def exchange(self) -> list[float]:
        """Per stage, seconds for a unit's sum to travel along the owners of all rings and back."""
        stages = range(self.plan.schedule.ranks)
        sums = [sum(self.plan.unit(i).g_bytes for i in self.plan.members(s)) for s in stages]
        units = len(self.plan.units) / len(stages)
        return [waves.chain(self.plan.rings, b, units, self.ring_bandwidth, self.hardware.latency) for b in sums]


def add_hardware(parser: argparse.ArgumentParser) -> None:
    """Options for speeds; the defaults are those of an H100 host."""
    h = Hardware()
    parser.add_argument(
        "--step-ms",
        type=positive,
        metavar="MS",
        help="measured time of a step's passes alone (forward and "
        "backward, no communication, no optimizer); default: from operations and --tflops",
    )
    parser.add_argument(
        "--tflops",
        type=positive,
        metavar="T",
        help=f"what passes reach; default: {h.flops / 1e12:.0f}, 40 %% of an H100's dense bf16",
    )
    parser.add_argument(
        "--bandwidth",
        type=positive,
        metavar="GB/S",
        help=f"of a hand-off; default: {h.bandwidth / 1e9:.0f}, copy engines over NVLink",
    )
    parser.add_argument("--latency-us", type=positive, metavar="US", help=f"of a hand-off; default: {h.latency * 1e6:.0f}")
    parser.add_argument("--memory-bandwidth", type=positive, metavar="GB/S", help=f"of the device; default: {h.memory / 1e9:.0f}")
    parser.add_argument(
        "--collective-bandwidth",
        type=positive,
        metavar="GB/S",
        help=f"of an all-gather, for ZeRO-3, FSDP2 and DDP; default: {h.collective / 1e9:.0f}",
    )


def hardware_of(args: argparse.Namespace, update_bytes: float | None = None) -> Hardware:
    """The speeds from the options."""

    def scaled(name: str, factor: float) -> float | None:
        value = getattr(args, name)
        return None if value is None else value * factor

    return changed(
        Hardware(),
        flops=scaled("tflops", 1e12),
        bandwidth=scaled("bandwidth", 1e9),
        latency=scaled("latency_us", 1e-6),
        memory=scaled("memory_bandwidth", 1e9),
        collective=scaled("collective_bandwidth", 1e9),
        update_bytes=update_bytes,
    )


def add(parser: argparse.ArgumentParser, required: bool = True) -> None:
    """Options of every command that plans a model."""
    models.add(parser, required)
    parser.add_argument("--ranks", type=whole, required=True, metavar="N", help="ranks of all rings")
    parser.add_argument(
        "--ring-size",
        type=whole,
        metavar="R",
        help="ranks per ring, in the place of cyclic.ring_size; default: all ranks are one ring, or one per member of a "
        "sequence or tensor group",
    )
    parser.add_argument(
        "--sequence-parallel",
        type=whole,
        metavar="S",
        help="ranks that work on one sequence, in the place of sequence_parallel_size; --sequence is the whole length",
    )
    parser.add_argument(
        "--tensor-parallel",
        type=whole,
        metavar="T",
        help="ranks that share the layers, in the place of tensor_parallel.autotp_size",
    )
    parser.add_argument(
        "--ring-bandwidth",
        type=positive,
        default=50.0,
        metavar="GB/S",
        help="between the owners of a stage in different rings; default: 50, a network card of 400 Gbit/s",
    )
    parser.add_argument("--config", metavar="FILE", help="ds_config.json; default: bf16, AdamW, no clipping")
    parser.add_argument("--rule", type=rule, help="in the place of cyclic.rule: dp, cdp-v1, cdp-v2 or K")
    add_hardware(parser)
    parser.add_argument("--device-memory", type=size, default=size("80GiB"), metavar="SIZE", help="of a rank; default: 80GiB")


class Planned(NamedTuple):
    """A model's plan.

    Attributes:
        trace: of the model's batch; None if its forward cannot be followed.
        found, made_anew: the units after such a batch, and why they are not those of the start; else empty.
    """

    config: settings.Config
    loaded: models.Loaded
    trace: discover.Trace | None
    found: discover.FoundUnits
    made_anew: str
    plan: Plan
    layouts: dict[int, FlatLayout]


def planned(
    args: argparse.Namespace,
    ranks: int,
    rule: str | int | None = None,
    ring_size: int | None = None,
    sequence: int | None = None,
    tensor: int | None = None,
) -> Planned:
    """The config and the model of the options, and the engine's plan after a batch of the model.

    Args:
        ranks: of all rings.
        rule, ring_size, sequence, tensor: in the place of the config's.
    Raises:
        UserError, ValueError: the model or config cannot be planned.
    """
    with contextlib.redirect_stdout(io.StringIO()):
        config = settings.read(args.config, ranks, rule, ring_size, sequence, tensor)
        ring = ranks // config.members if config.cyclic.ring_size == "auto" else config.cyclic.ring_size
        micro_batch = args.micro_batch or config.micro_batch or 1
        loaded = models.load(args.model, config.dtype, micro_batch, args.sequence, args.class_name)
        if config.tensor > 1:
            from deepspeed_cdp.integration.tensor_parallel import shard_alone

            shard_alone(loaded.module, config.tensor_parallel)
        trained = frozenset(n for n, p in loaded.module.named_parameters() if p.requires_grad)
        trace = discover.trace(loaded.module, loaded.example)
        rings = ranks // ring // config.tensor  # that average
        found, made_anew = find_for_batch(loaded.module, trained, ring, config.settings, trace)
        plan, layouts = make_plan(loaded.module, trained, config.settings, ring, rings, found)
        return Planned(config, loaded, trace, found, made_anew, plan, layouts)


def planned_in_order(args: argparse.Namespace) -> Planned:
    """As ``planned``, by the options; raises UserError for ``any_order``, of which times and memory are not predicted."""
    result = planned(args, args.ranks, args.rule, args.ring_size, args.sequence_parallel, args.tensor_parallel)
    if result.found.any_order:
        raise UserError(
            "with cyclic.any_order, which this model or its ds_config needs, times and memory are not predicted; "
            "deepspeed-cdp doctor --model shows the plan"
        )
    return result


def predict(args: argparse.Namespace) -> Prediction:
    """Plan the model of the options, and predict its parts' times.

    Raises:
        UserError, ValueError: the model or config cannot be planned.
    """
    config, loaded, trace, _, _, plan, layouts = planned_in_order(args)
    flops = {} if trace is None else by_path(trace, [path for unit in plan.units for path in unit.modules])
    traced = any(flops.values())
    if not traced and args.step_ms is None:
        raise UserError(
            "the model's forward could not be followed with this batch, so its operations are not known; give a "
            "measured time with --step-ms, or a batch that works"
        )
    hardware = hardware_of(args, config.whole_update_bytes)
    fused = fused_bytes(loaded.module, layouts) if config.cyclic.gradient_accumulation_fusion else Counter[int]()
    work = []
    for i, unit in enumerate(plan.units):
        elements = sum(s.shape.numel() for s in layouts[i].trained)
        every = sum(s.shape.numel() for s in layouts[i].slots)
        forward = sum(flops.get(p, 0) for p in unit.modules) if traced else 2.0 * every
        work.append(Work(forward / config.sequence, elements, fused[i]))
    persistent = sum(s.shape.numel() for s in layouts[PERSISTENT].trained) if plan.persistent else 0
    compute = None if args.step_ms is None else args.step_ms / 1e3
    writes = plan.corrects and not plan.predicts  # the update writes corrections, too
    ours = replace(hardware, update_bytes=config.update_bytes + 2 * writes, prediction_bytes=config.prediction_bytes)
    given = times(plan, work, ours, persistent, compute)
    total = sum(w.forward for w in work) * 3
    what = "measured" if compute else f"{total / 1e12:.2f} TFLOP at {hardware.flops / 1e12:.0f} TFLOP/s"
    assumed = [k for k in config.assumed if k != "train_micro_batch_size_per_gpu" or args.micro_batch is None]
    warnings = (
        [
            f'{" and ".join(assumed)} {"are" if assumed[1:] else "is"} "auto" in the ds_config; this command uses 1; '
            "write the values of your training"
        ]
        if assumed
        else []
    )
    if config.dtype == torch.float32 and args.tflops is None and compute is None:
        warnings.append("the ds_config trains in fp32, but the passes' speed is assumed to be bf16's; give --tflops or --step-ms")
    return Prediction(loaded, config, plan, work, persistent, given, hardware, what, warnings, args.ring_bandwidth * 1e9)


def fused_bytes(module: torch.nn.Module, layouts: Mapping[int, FlatLayout]) -> Counter[int]:
    """By unit, the bytes of its gradient sums that matrix products add to on a GPU."""
    parameters, found = dict(module.named_parameters()), Counter[int]()
    slots = {i: [(parameters[s.name], s) for s in layout.slots] for i, layout in layouts.items()}
    for layer, i, k in fusible(module, slots, cuda=True):
        found[i] += layer.weight.numel() * slots[i][k][1].sum_dtype.itemsize
    return found


def by_path(trace: discover.Trace, paths: Iterable[str]) -> dict[str, int]:
    """Operations from each unit's first call to the next unit's, as in ``discover.FoundUnit.flops``."""
    called = sorted((p for p in paths if p in trace.before), key=trace.order.__getitem__)
    ends = [trace.before[p] for p in called[1:]] + [trace.flops.get("", 0)]
    return {p: end - start for p, start, end in zip(called, [0, *ends], ends)}
