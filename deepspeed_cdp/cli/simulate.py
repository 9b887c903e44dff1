"""``deepspeed-cdp simulate``: simulated step time of a model, or of equal stages, on up to thousands of ranks."""

import argparse
import random
from collections.abc import Callable
from functools import cache
from typing import Any

from deepspeed_cdp.analysis.timing import waves
from deepspeed_cdp.analysis.timing.events import simulate
from deepspeed_cdp.analysis.timing.times import Hardware, Times, Work, times
from deepspeed_cdp.cli import prediction
from deepspeed_cdp.cli.output import UserError, at_least, columns, milliseconds, positive, several, show, whole
from deepspeed_cdp.cli.prediction import hardware_of
from deepspeed_cdp.plan.plan import Plan
from deepspeed_cdp.plan.schedule import Schedule, threshold
from deepspeed_cdp.plan.unit_schedule import Unit

EXACT = 8192  # the most passes of units per step for the exact simulation (events.py)
STEPS = 24


def add(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    prediction.add(parser, required=False)
    parser.add_argument(
        "--parameters",
        type=positive,
        metavar="COUNT",
        help="without a model: parameters of a model of equal stages (1.35e9); --step-ms gives its time",
    )
    parser.add_argument("--bytes-per-parameter", type=positive, default=2.0, help="without a model; default: 2")
    parser.add_argument("--units", type=whole, default=4, help="without a model: units per stage; default: 4")
    parser.add_argument(
        "--jitter-ms",
        type=several(at_least(0)),
        default=None,
        metavar="MS,...",
        help="each rank begins each step late by a time between 0 and this, uniform; default: 5, 10 and 20 %% of a step",
    )
    parser.add_argument(
        "--steps", type=at_least(4, True), default=None, help=f"steps to simulate; default: {STEPS}, fewer for large rings"
    )
    parser.add_argument("--seed", type=at_least(0, True), default=0, help="of the delays; default: 0")
    parser.add_argument(
        "--method",
        choices=("auto", "events", "waves"),
        default="auto",
        help="events: every action of the plan; waves: whole stages, for large rings; default: auto",
    )


def run(args: argparse.Namespace) -> int:
    """Simulate and print."""
    sequence, tensor = args.sequence_parallel or 1, args.tensor_parallel or 1
    groups = args.ranks // (sequence * tensor)
    ring = args.ring_size or groups or 1
    if args.ranks % (sequence * tensor * ring):
        raise UserError(
            f"--ring-size is {ring}, which does not divide --ranks {args.ranks}"
            + (f" by groups of {sequence * tensor}" if sequence * tensor > 1 else "")
            + "; choose a divisor"
        )
    rings = args.ranks // ring // tensor
    if args.model:
        p = prediction.predict(args)
        plan, given, hardware, clipped = p.plan, p.times, p.hardware, p.config.settings.clip > 0
        schedule, stages, source = plan.schedule, waves.of_plan(plan, given), f"{p.loaded.name}, passes {p.source}"
        ring, rings, exchange = schedule.ranks, plan.rings, p.exchange()
        visits = 2 * len(plan.units) * ring * schedule.rounds
    else:
        if args.step_ms is None or args.parameters is None:
            raise UserError("without --model, --parameters and --step-ms must say what to simulate; give both")
        hardware, clipped = hardware_of(args), False
        schedule = Schedule(ring, threshold(args.rule if args.rule is not None else "cdp-v2", ring))
        nbytes = args.parameters * args.bytes_per_parameter
        stages = waves.equal(ring, args.step_ms / 1e3, args.parameters, nbytes, hardware, args.units)
        exchange = [waves.chain(rings, nbytes / ring, args.units, args.ring_bandwidth * 1e9, hardware.latency)] * ring
        visits = 2 * args.units * ring * ring
        if _exact(args.method, visits, rings, schedule):
            plan, given = _equal_plan(args, schedule, hardware)
        source = f"{args.parameters:.3g} parameters in {ring} equal stages of {args.units} units"
    exact = _exact(args.method, visits, rings, schedule)
    steps = args.steps or (STEPS if ring <= 512 else 4)

    @cache
    def go(jitter: float = 0.0, late: float = 0.0, steps: int = steps) -> Any:
        victim = (ring // 2, steps // 2, late) if late else None
        if exact:
            return simulate(plan, given, steps, _delays(jitter, args.seed, victim), clipped=clipped)
        return waves.simulate(schedule, stages, steps, rings, exchange if rings > 1 else None, jitter, args.seed, victim, clipped)

    result = figures(args, go, schedule, rings, stages, exact, ring)
    result["source"], result["hardware"] = source, hardware.__dict__
    result["exchange"] = max(exchange) if rings > 1 else 0.0
    show(result, text(result), args.json)
    return 0


def _exact(method: str, visits: int, rings: int, schedule: Schedule) -> bool:
    exact = method == "events" or (method == "auto" and visits <= EXACT and rings == 1)
    if exact and rings > 1:
        raise UserError("--method events simulates one ring; use waves, or leave out --ring-size")
    if exact and visits > 8 * EXACT:
        raise UserError(f"--method events would simulate {visits} passes per step; use waves, fewer ranks or fewer units")
    if not exact and schedule.rounds > 1:
        raise UserError("gradient accumulation is simulated with --method events only; use fewer ranks, or accumulate 1")
    return exact


def _equal_plan(args: argparse.Namespace, schedule: Schedule, hardware: Hardware) -> tuple[Plan, Times]:
    count = schedule.ranks * args.units
    each = args.parameters / count
    nbytes = max(int(each * args.bytes_per_parameter) // 256, 1) * 256
    units = tuple(Unit(f"unit {i}", i // args.units, (f"w{i}",), (), nbytes, nbytes) for i in range(count))
    plan = Plan(schedule, units)
    forward = args.step_ms / 1e3 / 3 / count * hardware.flops  # the forward takes a third of the time, the backward the rest
    return plan, times(plan, [Work(forward, int(each))] * count, hardware, compute=args.step_ms / 1e3)


def _delays(jitter: float, seed: int, victim: tuple[int, int, float] | None) -> Callable[[int, int], float]:
    def delay(rank: int, step: int) -> float:
        x = random.Random(f"{seed} {rank} {step}").uniform(0, jitter) if jitter else 0.0
        return x + (victim[2] if victim and victim[:2] == (rank, step) else 0.0)

    return delay


def figures(
    args: argparse.Namespace, go: Callable[..., Any], schedule: Schedule, rings: int, stages: waves.Stages, exact: bool, ring: int
) -> dict[str, Any]:
    """All printed figures as plain data, in seconds."""
    calm = go()
    period, once = calm.period(), sum(stages.forward) + sum(stages.backward)
    busy, pass_time = once * schedule.rounds, once / (2 * ring)
    jitters = [j / 1e3 for j in args.jitter_ms] if args.jitter_ms is not None else [f * period for f in (0.05, 0.1, 0.2)]
    disturbed = []
    for jitter in jitters if ring <= 1024 else ():
        got = go(jitter=jitter, steps=max(args.steps or 60, 8) if ring <= 128 else args.steps or 8).period()
        n = ring * rings
        disturbed.append(
            {
                "jitter": jitter,
                "period": got,
                "longer": max(0.0, got - period),
                "own_delay": jitter / 2,
                "with_barrier": jitter * n / (n + 1),
            }
        )
    late = []
    for x in [f * pass_time for f in sorted({0.25, 0.5, 1, 2, 4, ring, 2 * ring})] if ring <= 512 else ():
        after = go(late=x)
        lost = [b - a for a, b in zip(_ends(calm, exact), _ends(after, exact))]
        late.append({"late": x, "others_end_later": max(lost[: ring // 2] + lost[ring // 2 + 1 :], default=lost[0])})
    felt = [e["late"] for e in late if e["others_end_later"] < 0.1 * e["late"]]
    return {
        "ranks": args.ranks,
        "ring_size": ring,
        "rings": rings,
        "threshold": schedule.threshold,
        "rounds": schedule.rounds,
        "method": "events" if exact else "waves",
        "period": period,
        "busy": busy,
        "pass": pass_time,
        "idle": calm.idle(),
        "offsets": calm.offsets(),
        "jitter": disturbed,
        "late_once": late,
        "slack": max(felt, default=0.0),
    }


def _ends(run: Any, exact: bool) -> list[float]:
    """The end of the last step of each rank of the first ring."""
    return list(run.ends[-1]) if exact else run.ends[-1][0].tolist()


def _spread(values: list[float], form: Callable[[float], str]) -> str:
    if len(values) <= 8:
        return " ".join(map(form, values))
    return f"{form(min(values))} to {form(max(values))}, mean {form(sum(values) / len(values))}"


def text(r: dict[str, Any]) -> str:
    """The figures as text."""
    where = f"{r['ranks']} ranks" + (f" in {r['rings']} rings of {r['ring_size']}" if r["rings"] > 1 else "")
    how = "every action of the plan" if r["method"] == "events" else "whole stages, by logical time"
    lines = [
        f"{r['source']}",
        f"{where}, K = {r['threshold']}; simulated: {how}",
        "",
        f"period          {milliseconds(r['period'])} per step; a rank's passes take {milliseconds(r['busy'])} of it",
        f"idle            {_spread([100 * x for x in r['idle']], lambda x: f'{x:.1f} %')}",
        f"delay D         {_spread([1e3 * x for x in r['offsets']], lambda x: f'{x:.1f}')} ms behind the rank before; a "
        f"stage's pass takes {milliseconds(r['pass'])}"
        if r["offsets"]
        else "delay D         one rank",
    ]
    if r["exchange"]:
        lines.append(f"between rings   {milliseconds(r['exchange'])} until a unit's sums have been along all rings and back")
    if r["jitter"]:
        lines += ["", "every rank late in every step, uniformly:"]
        rows = [("  up to", "period", "longer by", "mean own delay", "longer with a barrier per step")]
        rows += [
            (
                f"  {milliseconds(e['jitter'])}",
                milliseconds(e["period"]),
                milliseconds(e["longer"]),
                milliseconds(e["own_delay"]),
                milliseconds(e["with_barrier"]),
            )
            for e in r["jitter"]
        ]
        lines += columns(rows)
    if r["late_once"]:
        lines += [
            "",
            f"rank {r['ring_size'] // 2} late once; the last step of the other ranks of its ring then ends later by up to:",
        ]
        late = [("  late by", "others end later by")]
        lines += columns(late + [(f"  {milliseconds(e['late'])}", milliseconds(e["others_end_later"])) for e in r["late_once"]])
        lines.append(f"slack: others feel less than a tenth of a single delay of up to {milliseconds(r['slack'])}")
    return "\n".join(lines)
