"""``deepspeed-cdp timeline``: the paper's Figure 1 for N ranks and a rule, or a recorded run of all ranks on one time axis."""

import argparse
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

from deepspeed_cdp.cli.output import UserError, columns, rule, show, whole
from deepspeed_cdp.cli.pictures import Arrow, Bar, draw
from deepspeed_cdp.plan.schedule import Schedule, grid, threshold

SUFFIXES = (".png", ".svg", ".json", ".txt")


def add(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.add_argument("--ranks", type=whole, metavar="N", help="of a schedule")
    parser.add_argument("--rule", type=rule, default="cdp-v2", help="dp, cdp-v1, cdp-v2 or K; default: cdp-v2")
    parser.add_argument("--rounds", type=whole, default=1, help="micro-batches per rank and step; default: 1")
    parser.add_argument("--steps", type=whole, default=2, help="number of steps; default: 2; of a recording: the last ones")
    parser.add_argument("--from", dest="files", nargs="+", metavar="FILE", help="files of engine.cyclic_trace, one of every rank")
    parser.add_argument(
        "--out",
        nargs="+",
        default=[],
        metavar="FILE",
        help=f"also write it as {', '.join(SUFFIXES)}; .json is a Chrome trace (chrome://tracing, ui.perfetto.dev)",
    )


def run(args: argparse.Namespace) -> int:
    """Print the timeline, and write the files."""
    for path in args.out:
        if Path(path).suffix not in SUFFIXES:
            raise UserError(f"--out is {path!r}, whose ending is unknown; allowed are {', '.join(SUFFIXES)}; use one of these")
    if bool(args.files) == bool(args.ranks):
        raise UserError("give either --ranks for a schedule or --from for a recording")
    if args.files:
        result, text, trace, picture = recorded(args.files, args.steps)
    else:
        result, text, trace, picture = planned(args)
    for path in args.out:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        if path.endswith(".json"):
            Path(path).write_text(json.dumps(trace))
        elif path.endswith(".txt"):
            Path(path).write_text(text + "\n")
    drawn = [p for p in args.out if p.endswith((".png", ".svg"))]
    if drawn:
        draw(paths=drawn, **picture)
    result["files"] = args.out
    show(result, text + (f"\n\nwritten: {', '.join(args.out)}" if args.out else ""), args.json)
    return 0


def planned(args: argparse.Namespace) -> tuple[dict[str, Any], str, dict[str, Any], dict[str, Any]]:
    """The timeline of a schedule, in logical time, which is an order and not a clock."""
    if args.ranks * args.ranks * args.steps > 40_000:
        raise UserError(
            f"--ranks {args.ranks} with --steps {args.steps} is too large to look at; use fewer (simulate has no limit)"
        )
    schedule = Schedule(args.ranks, threshold(args.rule, args.ranks), args.rounds)
    reads = sorted(schedule.reads(args.steps))
    bars = [
        Bar(x.rank, x.time, x.time + 1, x.stage, x.backward, x.version < x.step, f"{'B' if x.backward else 'F'}{x.stage}")
        for x in reads
    ]
    title = f"{args.rule} (K = {schedule.threshold}), {args.ranks} ranks: who computes what when"
    text = "\n".join(
        [
            title,
            f"F, B: forward and backward of a stage; ': one update behind; a step takes {schedule.period} logical times",
            "",
            grid(schedule, args.steps),
        ]
    )
    events = [{"ph": "M", "name": "process_name", "pid": r, "args": {"name": f"rank {r}"}} for r in range(args.ranks)]
    events += [
        {
            "ph": "X",
            "name": b.text + ("'" if b.stale else ""),
            "pid": b.rank,
            "tid": 0,
            "ts": 1000 * b.begin,
            "dur": 1000,
            "args": {"stage": b.stage, "backward": b.backward, "step": x.step, "version": x.version},
        }
        for b, x in zip(bars, reads)
    ]
    result = {
        "ranks": args.ranks,
        "rule": args.rule,
        "threshold": schedule.threshold,
        "period": schedule.period,
        "passes": [x._asdict() for x in reads],
    }
    picture = {"bars": bars, "ranks": args.ranks, "title": title, "axis": "logical time", "labels": args.ranks <= 12}
    return result, text, {"traceEvents": events, "displayTimeUnit": "ms"}, picture


def read(files: list[str]) -> list[dict[str, Any]]:
    """The recordings of all ranks, on one time axis from 0, in rank order.

    Raises:
        UserError: a file is missing or is no recording; a rank is missing or there twice.
    """
    found = []
    for path in files:
        try:
            one = json.loads(Path(path).read_text())
            assert {"rank", "ranks", "host", "monotonic_us", "wall_us"} <= one["deepspeed_cdp"].keys()
        except OSError as error:
            raise UserError(f"{path!r} cannot be read ({error.strerror}); give files that engine.cyclic_trace wrote") from None
        except (ValueError, KeyError, TypeError, AttributeError, AssertionError):
            raise UserError(f"{path!r} is no recording; give files that engine.cyclic_trace has written") from None
        found.append(one)
    found.sort(key=lambda x: x["deepspeed_cdp"]["rank"])
    ranks, total = [x["deepspeed_cdp"]["rank"] for x in found], found[0]["deepspeed_cdp"]["ranks"]
    if ranks != list(range(total)):
        raise UserError(f"the files are of ranks {ranks}, but the run had {total} ranks; give each rank's file once")
    base = found[0]["deepspeed_cdp"]
    for one in found:
        about = one["deepspeed_cdp"]
        # processes of one host share the monotonic clock; other hosts are placed by their wall clocks
        apart = (about["wall_us"] - about["monotonic_us"]) - (base["wall_us"] - base["monotonic_us"])
        shift = 0.0 if about["host"] == base["host"] else apart
        about["shift_us"] = shift
        for event in one["traceEvents"]:
            if "ts" in event:
                event["ts"] += shift
        for message in about["messages"]:
            message["ts"] += shift
    begin = min(e["ts"] for one in found for e in one["traceEvents"] if "ts" in e)
    for one in found:
        for item in [e for e in one["traceEvents"] if "ts" in e] + one["deepspeed_cdp"]["messages"]:
            item["ts"] -= begin
    return found


def pairs(found: list[dict[str, Any]]) -> list[tuple[dict[str, Any], int, dict[str, Any], int]]:
    """(sent, from, received, to): each received message, with the latest message sent before it on the same edge and unit.

    Sums are of one step on both sides: rank 0 may send the next step's before the owner comes to the last one.
    """
    sent: dict[tuple, list[dict[str, Any]]] = defaultdict(list)
    for one in found:
        rank = one["deepspeed_cdp"]["rank"]
        for m in one["deepspeed_cdp"]["messages"]:
            if m["side"] == "send":
                sent[m["stream"], rank, m["peer"], m["unit"], m["backward"]].append(m)
    matched = []
    for one in found:
        rank = one["deepspeed_cdp"]["rank"]
        for m in one["deepspeed_cdp"]["messages"]:
            if m["side"] == "receive":
                sums = m["stream"] in ("G", "G0")
                earlier = [
                    x
                    for x in sent[m["stream"], m["peer"], rank, m["unit"], m["backward"]]
                    if x["ts"] <= m["ts"] and (x["step"] == m["step"] or not sums)
                ]
                if earlier:
                    matched.append((earlier[-1], m["peer"], m, rank))
    return matched


def recorded(files: list[str], steps: int) -> tuple[dict[str, Any], str, dict[str, Any], dict[str, Any]]:
    """The timeline of a recorded run, merged from all ranks."""
    found = read(files)
    passes = [[e for e in one["traceEvents"] if e.get("cat") == "passes"] for one in found]
    if not all(passes):
        raise UserError("a rank's file holds no pass; record at least one step")
    ranks, matched = _per_rank(found, passes), pairs(found)
    last, earliest = (choose(e["args"]["step"] for e in passes[0]) for choose in (max, min))
    hosts = len({one["deepspeed_cdp"]["host"] for one in found})
    about = found[0]["deepspeed_cdp"]
    rows = [("rank", "steps", "ms per step", "passes", "waits", "owner", "behind the rank before")]
    for r in ranks:
        offset = "" if r["offset_ms"] is None else f"{r['offset_ms']:.2f} ms"
        rows.append((r["rank"], r["steps"], *(f"{r[k + '_ms']:.2f}" for k in ("period", "passes", "waits", "owner")), offset))
    text = "\n".join(
        [
            f"{len(found)} ranks, K = {about['threshold']}, steps {earliest} to {last}; "
            f"{len(matched)} hand-offs; clock: {about['clock']}; "
            + ("one host, one clock" if hosts == 1 else f"{hosts} hosts, aligned by their wall clocks"),
            "",
            *columns(rows),
            "(ms per step, by the host's or device's clock)",
        ]
    )
    result = {"ranks": len(found), "threshold": about["threshold"], "hosts": hosts, "per_rank": ranks, "handoffs": len(matched)}
    trace = {"traceEvents": _flows(found, matched), "displayTimeUnit": "ms"}
    return result, text, trace, _picture(found, passes, matched, max(last - steps + 1, earliest), last)


def _per_rank(found: list[dict[str, Any]], passes: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Each rank's mean milliseconds per step, by category."""
    ranks: list[dict[str, Any]] = []
    starts: list[dict[int, float]] = []
    for rank, one in enumerate(found):
        mine = passes[rank]
        by_step = {t: min(e["ts"] for e in mine if e["args"]["step"] == t) for t in sorted({e["args"]["step"] for e in mine})}
        starts.append(by_step)
        t = list(by_step)
        period = (by_step[t[-1]] - by_step[t[0]]) / max(len(t) - 1, 1)
        sums = {
            cat: sum(e["dur"] for e in one["traceEvents"] if e.get("cat") == cat) / len(t) for cat in ("passes", "waits", "owner")
        }
        before = one["deepspeed_cdp"].get("before", rank - 1 if rank else None)  # in its ring
        both = [] if before is None else [by_step[x] - starts[before][x] for x in t if x in starts[before]]
        ranks.append(
            {
                "rank": rank,
                "steps": len(t),
                "period_ms": period / 1e3,
                "offset_ms": sum(both) / len(both) / 1e3 if both else None,
                **{f"{k}_ms": v / 1e3 for k, v in sums.items()},
            }
        )
    return ranks


def _flows(found: list[dict[str, Any]], matched: list[tuple]) -> list[dict[str, Any]]:
    """All events of a Chrome trace, with an arrow for each message."""
    events = [e for one in found for e in one["traceEvents"]]
    for number, (a, src, b, dst) in enumerate(matched):
        flow = {"cat": "hand-off", "name": a["stream"], "id": number}
        events += [
            {**flow, "ph": "s", "pid": src, "tid": 0, "ts": a["ts"]},
            {**flow, "ph": "f", "bp": "e", "pid": dst, "tid": 0, "ts": b["ts"]},
        ]
    return events


def _picture(
    found: list[dict[str, Any]], passes: list[list[dict[str, Any]]], matched: list[tuple], first: int, last: int
) -> dict[str, Any]:
    """Arguments of ``draw`` for the steps from ``first`` on."""

    def span(e: dict[str, Any]) -> tuple[float, float]:
        return e["ts"] / 1e3, (e["ts"] + e["dur"]) / 1e3

    bars = [
        Bar(rank, *span(e), e["args"]["stage"], e["args"]["backward"], e["args"]["version"] < e["args"]["step"], "")
        for rank, mine in enumerate(passes)
        for e in mine
        if first <= e["args"]["step"]
    ]
    low = min(b.begin for b in bars)
    waits = [
        (rank, *span(e))
        for rank, one in enumerate(found)
        for e in one["traceEvents"]
        if e.get("cat") == "waits" and first <= e["args"]["step"]
    ]
    arrows = [
        Arrow(src, a["ts"] / 1e3, dst, b["ts"] / 1e3) for a, src, b, dst in matched if a["ts"] / 1e3 >= low and first <= b["step"]
    ]
    return {
        "bars": bars,
        "ranks": len(found),
        "title": f"recorded: steps {first} to {last}",
        "axis": "ms",
        "waits": waits,
        "arrows": arrows if len(arrows) <= 400 else [],
        "labels": False,
    }
