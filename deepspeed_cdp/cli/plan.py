"""``deepspeed-cdp plan``: the stages, memory, traffic and predicted step time of a model, without a GPU."""

import argparse
from typing import Any, NamedTuple

from deepspeed_cdp.analysis.activations import track
from deepspeed_cdp.analysis.timing import waves
from deepspeed_cdp.analysis.timing.baselines import baselines
from deepspeed_cdp.analysis.timing.events import Run, simulate
from deepspeed_cdp.analysis.timing.times import Work
from deepspeed_cdp.cli import prediction
from deepspeed_cdp.cli.output import UserError, columns, complain, human, milliseconds, show
from deepspeed_cdp.cli.prediction import Prediction, predict
from deepspeed_cdp.plan.actions import Kind
from deepspeed_cdp.plan.constants import PERSISTENT
from deepspeed_cdp.plan.cross_ring import across_bytes
from deepspeed_cdp.plan.plan import Plan
from deepspeed_cdp.plan.program import build, few_rounds, with_rounds
from deepspeed_cdp.plan.warmup import Phases
from deepspeed_cdp.verify.summary import check_rings
from deepspeed_cdp.verify.well_formed import PlanError

MOST_ROUNDS = 18  # that are simulated; the figures of more rounds are extrapolated


def add(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    prediction.add(parser)
    parser.add_argument(
        "--check", action="store_true", help="only dry-run the plan: all ranks' programs, checked for hangs and mixed versions"
    )


def run(args: argparse.Namespace) -> int:
    """Print the plan, or the result of its dry-run."""
    if args.check:
        return check(args)
    p = predict(args)
    result = figures(p, args.device_memory)
    show(result, text(result), args.json)
    return 0


def check(args: argparse.Namespace) -> int:
    """Dry-run the plan and print one line; exit code 1 if the dry-run fails."""
    planned = prediction.planned_in_order(args)
    try:
        plans = Phases(planned.plan, planned.config.settings.warmup_steps).plans
        summary = check_rings(plans, planned.config.sequence, planned.config.tensor)
    except PlanError as error:
        complain(f"the plan fails its dry-run: {error}", args.json)
        return 1
    show(summary._asdict(), str(summary), args.json)
    return 0


def figures(p: Prediction, device_memory: int) -> dict[str, Any]:
    """All printed figures as plain data, in bytes and seconds."""
    plan, s = p.plan, p.plan.schedule
    stages, run = _stages(p), _simulated(p)
    activations, trouble = _activations(p)
    persistent = plan.persistent
    psi = sum(plan.unit(i).p_bytes for i in plan.every_unit)
    time = _time(p, run)
    result: dict[str, Any] = {
        "model": {
            "name": p.loaded.name,
            "parameters": sum(x.numel() for x in p.loaded.module.parameters()),
            "bytes": psi,
            "dtype": str(p.config.dtype).removeprefix("torch."),
            "batch": p.loaded.batch,
            "flops": 3 * sum(w.forward for w in p.work),
        },
        "rule": p.config.settings.rule,
        "threshold": s.threshold,
        "delay_correction": p.config.settings.delay_correction.method if plan.corrects else "none",
        "ranks": s.ranks,
        "rounds": s.rounds,
        "rings": plan.rings,
        "sequence_parallel": p.config.sequence,
        "tensor_parallel": p.config.tensor,
        "across": [across_bytes(plan, r, plan.rings // 2) for r in range(s.ranks)],
        "exchange": max(p.exchange()) if plan.rings > 1 else 0.0,
        "units": [{"name": u.name, "stage": u.stage, "bytes": u.p_bytes, "flops": w.forward} for u, w in zip(plan.units, p.work)],
        "persistent": persistent and {"bytes": persistent.p_bytes, "names": [*persistent.trainable, *persistent.frozen]},
        "stages": stages,
        "memory": _memory(p, stages, activations),
        "activations": activations,
        "traffic": _traffic(p, time["step"]),
        "time": time,
        "others": _baselines(p, activations),
        "hardware": p.hardware.__dict__,
    }
    parts = time["parts"]
    result["dominates"] = max((k for k in parts if k != "passes"), key=parts.__getitem__)
    result["warnings"] = p.warnings + trouble + warnings(result, device_memory)
    return result


def _stages(p: Prediction) -> list[dict[str, Any]]:
    plan, total = p.plan, sum(w.forward for w in p.work) or 1.0
    stages = []
    for stage in range(plan.schedule.ranks):
        members = [i for i in plan.members(stage) if i != PERSISTENT]
        persistent = plan.persistent if plan.persistent and stage == 0 else None
        stages.append(
            {
                "stage": stage,
                "owner": plan.schedule.owner(stage),
                "units": len(members),
                "from": plan.units[members[0]].modules[0],
                "to": plan.units[members[-1]].modules[-1],
                "parameter_bytes": sum(plan.units[i].p_bytes for i in members) + (persistent.p_bytes if persistent else 0),
                "trained": sum(p.work[i].parameters for i in members) + (p.persistent if persistent else 0),
                "flops_fraction": sum(p.work[i].forward for i in members) / total,
                "seconds": sum(p.times.passes[i, b] for i in members for b in (False, True)),
            }
        )
    return stages


class Extrapolated(NamedTuple):
    """The figures of a ``Run`` with many rounds, from two runs with fewer: from there on each round takes as long as the next."""

    seconds: float
    busy: list[float]
    delays: list[float]

    @classmethod
    def of(cls, one: Run, other: Run, rounds: int) -> "Extrapolated":
        """The figures for ``rounds`` rounds."""
        few, more = one.plan.schedule.rounds, other.plan.schedule.rounds

        def at(a: float, b: float) -> float:
            return a + (b - a) * (rounds - few) / (more - few)

        busy = [[(1 - idle) * run.period() for idle in run.idle()] for run in (one, other)]
        return cls(at(one.period(), other.period()), list(map(at, *busy)), other.offsets())

    def period(self) -> float:
        """As ``Run.period``."""
        return self.seconds

    def idle(self) -> list[float]:
        """As ``Run.idle``."""
        return [max(0.0, 1 - busy / self.seconds) for busy in self.busy]

    def offsets(self) -> list[float]:
        """As ``Run.offsets``."""
        return self.delays


def _simulated(p: Prediction) -> Any:
    """The simulated run, with ``period``, ``idle`` and ``offsets``."""
    plan, s, clipped = p.plan, p.plan.schedule, p.config.settings.clip > 0
    if plan.rings == 1:

        def run(rounds: int) -> Run:
            return simulate(with_rounds(plan, rounds), p.times, steps=10, clipped=clipped)

        return run(s.rounds) if s.rounds <= MOST_ROUNDS else Extrapolated.of(run(MOST_ROUNDS - 2), run(MOST_ROUNDS), s.rounds)
    if s.rounds == 1:
        return waves.simulate(s, waves.of_plan(plan, p.times), 16, plan.rings, p.exchange(), clipped=clipped)
    raise UserError("gradient accumulation on several rings cannot be simulated; plan one ring, or accumulate 1")


def _time(p: Prediction, run: Any) -> dict[str, Any]:
    period = run.period()
    return {
        "step": period,
        "parts": {
            "passes": p.times.compute,
            "adding gradients": p.times.adds,
            "memory traffic beside the passes": p.times.contention,
            "waiting": max(0.0, period - sum(p.times.passes.values()) * p.plan.schedule.rounds),
        },
        "compute_only": p.times.compute,
        "from": p.source,
        "of_compute": p.times.compute / period,
        "idle": run.idle(),
        "offsets": run.offsets(),
    }


def _traffic(p: Prediction, period: float) -> dict[str, Any]:
    ranks = range(p.plan.schedule.ranks)
    received = [p.plan.received_bytes(r) for r in ranks]
    busy = max(sum(x.values()) for x in received) / p.hardware.bandwidth / period
    return {"received": received, "messages": [messages(p.plan, r) for r in ranks], "link_busy": busy}


def _baselines(p: Prediction, activations: int) -> list[dict[str, Any]]:
    """Lower bounds for ZeRO-3, FSDP2 and DDP on as many ranks."""
    plan, s = p.plan, p.plan.schedule
    units = [*plan.units, *([plan.persistent] if plan.persistent else [])]
    others = baselines(
        [*p.work, *([Work(0.0, p.persistent)] if plan.persistent else [])],
        [u.p_bytes for u in units],
        [u.g_bytes for u in units],
        s.ranks * plan.rings,
        p.hardware,
        p.times.compute,
        s.rounds,
        4 + 4 * p.config.states,
    )
    return [
        {"name": o.name, "memory": o.memory(activations), "received": o.received, "messages": o.messages, "step": o.seconds}
        for o in others
    ]


def _activations(p: Prediction) -> tuple[int, list[str]]:
    """Bytes that one micro-batch saves for its backward; 0 and a warning if they are unknown."""
    try:
        return track(p.loaded.module, p.loaded.example).peak // p.config.sequence, []
    except Exception as error:  # a user's model may raise anything
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        return 0, [
            f"activations are unknown, since a forward and backward with this batch fails ({reason[:120]}); give a "
            "batch that works"
        ]


def messages(plan: Plan, rank: int) -> int:
    """Messages that a rank receives in a steady step: parameters, running sums, norms."""
    few = few_rounds(plan)
    count, more = _messages(few, rank), plan.schedule.rounds - few.schedule.rounds
    return count + more // 2 * (_messages(with_rounds(plan, few.schedule.rounds + 2), rank) - count) if more else count


def _messages(plan: Plan, rank: int) -> int:
    norms = (Kind.GRAD_NORM, Kind.OPTIMIZER_STEP)
    return sum(len(a.posts) + (a.kind in norms and a.peer is not None) for a in build(plan, rank, False))


def _memory(p: Prediction, stages: list[dict], activations: int) -> list[dict[str, int]]:
    """Bytes by use, in rank order."""
    rows = []
    for rank in range(p.plan.schedule.ranks):
        ours, stage = p.plan.memory(rank), stages[p.plan.schedule.owned(rank)]
        master = 2 if p.config.halves else 4
        state = 0 if p.config.offload else (master + 4 * p.config.states) * stage["trained"]
        row = {
            "in flight": ours["in flight"],
            "sums": ours["sums"],
            "published": ours["published"],
            "masters and optimizer": state,
            "activations": activations,
        }
        rows.append({**row, "total": sum(row.values())})
    return rows


def warnings(r: dict[str, Any], device_memory: int) -> list[str]:
    """Warnings, one sentence each, with a remedy."""
    found, stages, n = [], r["stages"], r["ranks"]
    sizes, times = [x["parameter_bytes"] for x in stages], [x["seconds"] for x in stages]
    big = max(stages, key=lambda x: x["parameter_bytes"])
    if max(sizes) > 1.25 * sum(sizes) / n:
        found.append(
            f"stage {big['stage']} holds {max(sizes) / (sum(sizes) / n):.2f} times the mean stage's bytes, and every "
            "rank allocates buffers for the largest; set cyclic.partition_method to 'parameters', or split its largest "
            "module with cyclic.units"
        )
    if max(times) > 1.25 * sum(times) / n:
        slow = max(stages, key=lambda x: x["seconds"])["stage"]
        found.append(
            f"stage {slow} takes {max(times) / (sum(times) / n):.2f} times the mean stage's time, which leaves "
            "stragglers less slack; set cyclic.partition_method to 'flops', or list finer modules in cyclic.units"
        )
    if r["persistent"] and r["persistent"]["bytes"] > 0.1 * r["model"]["bytes"]:
        names = ", ".join([*r["persistent"]["names"][:2], *(["..."] if len(r["persistent"]["names"]) > 2 else [])])
        found.append(
            f"persistent parameters ({names}) are "
            f"{100 * r['persistent']['bytes'] / r['model']['bytes']:.0f} % of the model and stay on every rank through each "
            "micro-batch, twice; untie them (tie_word_embeddings), or call their modules once"
        )
    if n > 1 and min(x["units"] for x in stages) < 2:
        fewer = len(r["units"]) // 2
        found.append(
            "a stage has a single unit, so buffers take whole stages and hand-offs begin late; list finer modules in "
            "cyclic.units" + (f", or use at most {fewer} ranks" if 0 < fewer < n else "")
        )
    if len(r["units"]) > 1 and r["model"]["bytes"] / len(r["units"]) < 2**20 and n > 1:
        found.append(
            "units hold less than 1 MiB on average, so the host's work per message will weigh more than predicted; set "
            "cyclic.min_unit_mb to 4"
        )
    if r["traffic"]["link_busy"] > 0.5:
        found.append(
            f"a rank's link is busy {100 * r['traffic']['link_busy']:.0f} % of the time; set "
            "cyclic.keep_after_forward to true, raise cyclic.prefetch_units, or use a larger micro-batch"
        )
    most = max(row["total"] for row in r["memory"])
    if most > device_memory:
        found.append(
            f"a rank needs {human(most)} of {human(device_memory)}; use more ranks, a smaller micro-batch, activation "
            "checkpointing, offload_optimizer"
            + (', or cyclic.delay_correction "none"' if r["delay_correction"] != "none" else "")
        )
    if r["rings"] > 1 and r["exchange"] > 0.05 * r["time"]["step"] and r["threshold"] == n - 1:
        found.append(
            f"the last rank of each ring waits up to {milliseconds(r['exchange'])} a step for stage 0's sums to come "
            f"along {r['rings']} rings and back; use larger rings, finer units, or cyclic.rule 'cdp-v1', which hides it"
        )
    if r["threshold"] < n - 1:
        found.append(
            f"rule {r['rule']} (K = {r['threshold']}) stalls in every step, since it reads versions before they exist; "
            "use cdp-v2 if a delay of one update is allowed"
        )
    return found


def text(r: dict[str, Any]) -> str:
    """The figures as text."""
    m, time, h = r["model"], r["time"], r["hardware"]
    persistent = f" and {human(r['persistent']['bytes'])} persistent" if r["persistent"] else ""
    rings = f" in each of {r['rings']} rings" if r["rings"] > 1 else ""
    groups = f" ({r['sequence_parallel']} ranks work on a sequence)" if r["sequence_parallel"] > 1 else ""
    shards = ""
    if (tensor := r["tensor_parallel"]) > 1:
        groups, shards = f" ({tensor} ranks share the layers, and have as many such rings)", " in the shards of a rank's ring"
    lines = [
        f"{m['name']}: {m['parameters']:,} parameters{shards}, {human(m['bytes'])} in {m['dtype']}, {len(r['units'])} units"
        f"{persistent}; micro-batch {m['batch']}",
        f"{r['ranks']} ranks{rings}{groups}, rule {r['rule']} (K = {r['threshold']}), delay correction {r['delay_correction']}, "
        f"{r['rounds']} micro-batch(es) per rank and step",
        "",
    ]
    rows: list[tuple] = [("stage", "owner", "units", "parameters", "of FLOPs", "passes", "from", "to")]
    rows += [
        (
            x["stage"],
            f"rank {x['owner']}",
            x["units"],
            human(x["parameter_bytes"]),
            f"{100 * x['flops_fraction']:.1f} %",
            milliseconds(x["seconds"]),
            x["from"],
            x["to"],
        )
        for x in r["stages"]
    ]
    lines += columns(rows) + ["", "memory per rank:"]
    kinds = list(r["memory"][0])
    lines += columns([("rank", *kinds)] + [(i, *(human(row[k]) for k in kinds)) for i, row in enumerate(r["memory"])])
    received = r["traffic"]["received"]
    mean = {k: sum(x[k] for x in received) / len(received) for k in received[0]}
    lines += [
        "",
        f"received per rank and step, on average: {human(sum(mean.values()))} ("
        + ", ".join(f"{k} {human(v)}" for k, v in mean.items())
        + f"; F, B parameters, G running sums, O those that come back to their owner) in up to {max(r['traffic']['messages'])} "
        f"messages; a rank's link is busy {100 * r['traffic']['link_busy']:.0f} % of a step",
        *(
            [
                f"from other rings: up to {human(max(r['across']))} more; a unit's sums take {milliseconds(r['exchange'])} "
                "along all rings and back"
            ]
            if r["rings"] > 1
            else []
        ),
        *(["the collectives of a group's ranks are not in the step's time"] if groups else []),
        "",
        f"predicted step: {milliseconds(time['step'])}, {time['of_compute']:.3f} of compute-only speed; beyond the passes, "
        f"{r['dominates']} is most",
    ]
    rows = [(k, milliseconds(v), f"{100 * v / time['step']:.1f} %") for k, v in time["parts"].items()]
    lines += columns([(f"  {a}", b, c) for a, b, c in rows])
    lines += [
        f"  (passes: {time['from']}; hand-offs at {h['bandwidth'] / 1e9:.0f} GB/s and {h['latency'] * 1e6:.0f} us, device "
        f"memory at {h['memory'] / 1e9:.0f} GB/s; the host's time is not in it)",
        "",
    ]
    most = max(row["total"] for row in r["memory"])
    rows = [
        ("engine", "most memory", "most received", "messages", "step"),
        (
            "cyclic",
            human(most),
            human(max(sum(x.values()) for x in received)),
            max(r["traffic"]["messages"]),
            milliseconds(time["step"]),
        ),
    ]
    rows += [
        (o["name"], human(o["memory"]), human(o["received"]), o["messages"], f">= {milliseconds(o['step'])}") for o in r["others"]
    ]
    lines += columns(rows)
    lines += [f"  (collectives at {h['collective'] / 1e9:.0f} GB/s beside the passes: lower bounds)"]
    lines += [""] + [f"warning: {w}" for w in r["warnings"]] if r["warnings"] else []
    return "\n".join(lines)
