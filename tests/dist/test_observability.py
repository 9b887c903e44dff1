"""What users watch a run by: ``cyclic_metrics``, monitors, timers, profilers; each as under stock ZeRO-3, none a collective."""

import contextlib
import csv
import importlib.util
import io
import logging
import math
import time
from pathlib import Path
from typing import Any

import pytest

from support import models
from support.collectives import counting
from support.engine_work import Job, oracle, pack, same, start, train, unpack, whole

# ---- cyclic_metrics ---------------------------------------------------------------------------------------------------------


def metrics(rank: int, world: int, jobs: list[Job], slow: int = -1) -> list[dict[str, Any]]:
    """By job: what ``cyclic_metrics`` says at the end of each step; in step ``slow`` rank 0 comes late."""
    results = []
    for job in jobs:
        engine = start(job, world)
        told, collectives, losses = [engine.cyclic_metrics], [], {}
        for step in range(job.steps):
            if step == slow and rank == 0:
                time.sleep(0.4)
            with contextlib.nullcontext([]) if step in job.flush_after else counting() as seen:
                train(engine, job, rank, step, step + 1, losses)
                told.append(engine.cyclic_metrics)
                norm = engine.get_global_grad_norm()
            collectives += seen
            assert norm == told[-1]["grad_norm"] or math.isnan(norm)
        results.append(
            {
                "told": told,
                "stages": engine.cyclic_plan.stages,
                "collectives": collectives,
                "losses": losses,
                "received": set(engine._transport.received),
                "sent": set(engine._transport.sent),
            }
        )
        engine.destroy()
    return results


RULES = (("dp", 0), ("cdp-v1", 1), ("cdp-v2", 1))  # and the last rank's lag; the others' is one more


def test_metrics_are_of_the_step_they_name(pool):
    jobs = [Job("mlp", rule, 2, clip=0.3, steps=5, flush_after=(2,)) for rule, _ in RULES]
    results = pool.run(3, metrics, jobs, timeout=120)
    for at, (job, (_, lag)) in enumerate(zip(jobs, RULES)):
        ranks = [r[at] for r in results]
        want = oracle(job, ranks[0]["stages"], 3)
        mean = {t: sum(want.losses[t, m, r] for m in range(2) for r in range(3)) / 6 for t in range(job.steps)}
        for rank, result in enumerate(ranks):
            assert result["collectives"] == [], (job, rank)
            first, *told = result["told"]
            assert len(first) == 10 and set(first.values()) == {None}
            for t, m in enumerate(told):
                late = (0 if t == 2 else lag) + (rank != 2)  # after a flush all is in
                if t < late:
                    assert (m["step"], m["lag"], m["loss"], m["grad_norm"]) == (None,) * 4, (job, rank, t)
                else:
                    assert (m["step"], m["lag"]) == (t - late, late), (job, rank, t)
                    assert m["loss"] == pytest.approx(mean[t - late], rel=1e-6)
                    assert m["grad_norm"] == pytest.approx(want.norms[t - late], rel=1e-5)


def test_waited_tells_where_a_step_was_held_up(pool):
    results = pool.run(2, metrics, [Job("mlp", "cdp-v2", steps=5)], 3, timeout=60)
    for rank, (result,) in enumerate(results):
        for m in result["told"][1:]:
            assert m["waited"] and set(m["waited"]) <= result["received"] and set(m["waited_sent"]) <= result["sent"]
            times = [*m["waited"].values(), *m["waited_sent"].values()]
            assert m["waited_total"] == pytest.approx(sum(times)) and min(times) >= 0
        slow = result["told"][4]["waited_total"]
        assert slow > 0.35 if rank == 1 else slow < 0.35, (rank, [m["waited_total"] for m in result["told"]])


def slow_rank(rank: int, world: int, slow: int, rules: list[str]) -> list[list[dict[str, Any]]]:
    """By rule: metrics at the end of each step; rank ``slow`` sleeps in every step, in the place of a data loader."""
    results = []
    for rule in rules:
        engine, told = start(Job("mlp", rule, steps=7, flush_after=(3,)), world), []
        for step in range(7):
            if rank == slow:
                time.sleep(0.25)
            train(engine, Job("mlp", rule, flush_after=(3,)), rank, step, step + 1)
            told.append(engine.cyclic_metrics)
        engine.destroy()
        results.append(told)
    return results


@pytest.mark.parametrize("slow", [0, 1])
def test_the_slow_rank_is_named_on_every_rank(pool, slow):
    """Everybody waits for somebody on a ring, and mostly not for the one who is to blame; so each tells how busy it was."""
    for rank, by_rule in enumerate(pool.run(3, slow_rank, slow, ["dp", "cdp-v2"], timeout=120)):
        for told in by_rule:
            assert told[0]["slowest"] is None and told[0]["busy"] is None, "no step is over that began with another's end"
            assert [m["slowest"] for m in told[4:]] == [slow] * 3, (rank, told)
            for m in told[4:]:
                assert len(m["busy"]) == 3 and m["busy"][slow] > 0.24 and min(m["busy"]) > 0


def test_a_skipped_step_shows_its_norm(pool):
    """It once showed None, as if no step were known."""
    for rank, (result,) in enumerate(pool.run(2, metrics, [Job("mlp-nan", "dp", steps=5)], timeout=60)):
        by_step = {m["step"]: m for m in result["told"]}
        assert math.isnan(by_step[2]["loss"]) and math.isnan(by_step[2]["grad_norm"])
        assert by_step[3 if rank else 1]["grad_norm"] > 0


def resumed(rank: int, world: int, job: Job, folder: str) -> list[list[Any]]:
    """(step, lag, loss is known, norm is known) after loading and after a step: with the optimizer's state, and without."""
    engine = start(job, world)
    train(engine, job, rank, 0, 3)
    engine.save_checkpoint(folder)
    saved, out = engine.cyclic_metrics, []
    engine.destroy()
    for states in (True, False):
        engine = start(job, world)
        engine.load_checkpoint(folder, load_optimizer_states=states)
        out.append(engine.cyclic_metrics)
        train(engine, job, rank, 3, 5)
        out.append(engine.cyclic_metrics)
        engine.destroy()
    return [saved, *out]


def test_metrics_go_on_after_loading(pool, tmp_path):
    results = pool.run(2, resumed, Job("mlp", "cdp-v2"), str(tmp_path), timeout=60)
    last = results[1][0]
    assert (last["step"], last["lag"]) == (2, 0)
    for rank, (_, with_states, after, without, later) in enumerate(results):
        assert {k: with_states[k] for k in ("step", "lag", "loss", "grad_norm")} == {
            k: last[k] for k in ("step", "lag", "loss", "grad_norm")
        }
        assert (without["step"], without["grad_norm"]) == (None, None)
        assert after["step"] == (3 if rank else 2) and after["lag"] == (1 if rank else 2) and after["grad_norm"] > 0
        assert later["step"] == (3 if rank else None) and (later["loss"] is None) == (rank == 0)


# ---- DeepSpeed's own instruments --------------------------------------------------------------------------------------------


TENSORBOARD = importlib.util.find_spec("tensorboard") is not None


def instruments(folder: str) -> dict[str, Any]:
    """All of them at once. DeepSpeed's own linear function is left out: the flops profiler counts it and the matmul in it."""
    return {
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0, "memory_efficient_linear": False},
        "wall_clock_breakdown": True,
        "steps_per_print": 2,
        "memory_breakdown": False,
        "csv_monitor": {"enabled": True, "output_path": folder, "job_name": "csv"},
        "tensorboard": {"enabled": TENSORBOARD, "output_path": folder, "job_name": "tb"},
        "flops_profiler": {"enabled": True, "profile_step": 3, "detailed": True, "output_file": f"{folder}/flops.txt"},
        "comms_logger": {"enabled": True, "prof_all": True, "verbose": False},
    }


class _Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def plain_flops(kind: str) -> dict[str, int]:
    """What DeepSpeed's profiler counts in one forward of the model on its own."""
    from deepspeed.profiling.flops_profiler import FlopsProfiler

    module = models.build(kind)
    profiler = FlopsProfiler(module)
    profiler.start_profile()
    models.loss(module, kind, models.batch(kind, 0, 0, 0))
    profiler.stop_profile()
    counted = {"flops": profiler.get_total_flops(), "macs": profiler.get_total_macs(), "params": profiler.get_total_params()}
    profiler.end_profile()
    return counted


def watched(rank: int, world: int, jobs: list[Job]) -> list[dict[str, Any]]:
    """By job: what the instruments said on this rank, and what was trained."""
    import deepspeed
    from deepspeed.utils import logger

    results = []
    plain = plain_flops(jobs[0].kind)
    for job in jobs:
        deepspeed.comm.comm.comms_logger.comms_dict.clear()
        handler, out, level = _Lines(), io.StringIO(), logger.level
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        try:
            with contextlib.redirect_stdout(out):
                engine = start(job, world)
                made = {k: dict(v) for k, v in deepspeed.comm.comm.comms_logger.comms_dict.items()}
                train(engine, job, rank)
                after = deepspeed.comm.comm.comms_logger.comms_dict
                in_steps = {k for k, v in after.items() if made.get(k) != dict(v)}
                summary = deepspeed.comm.log_summary(return_dict=True) if job.config else None
                deepspeed.comm.comm.comms_logger.enabled = False  # of the whole process
        finally:
            logger.removeHandler(handler)
            logger.setLevel(level)
        profiler = engine.__dict__.get("flops_profiler")
        results.append(
            {
                "state": pack(whole(engine)),
                "plain": plain,
                "printed": out.getvalue(),
                "logged": handler.lines,
                "in_steps": in_steps,
                "summary": summary,
                "timers": dict(engine.get_wall_clock_timers()),
                "flops": profiler and {k: getattr(profiler, k, None) for k in ("flops", "macs", "params")},
                "parameters": sum(getattr(p, "ds_numel", p.numel()) for p in engine.module.parameters()),
            }
        )
        engine.destroy()
    return results


def read_csv(folder: Path) -> dict[str, list[list[str]]]:
    return {path.name: list(csv.reader(path.open())) for path in sorted((folder / "csv").glob("*.csv"))}


def read_tensorboard(folder: Path) -> dict[str, list[tuple[int, float]]]:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tb"))
    events.Reload()
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


@pytest.fixture(scope="module")
def runs(pool, tmp_path_factory) -> dict[Any, tuple[Path, list[dict[str, Any]], list[dict[str, Any]]]]:
    """By rule: folder, each rank's results with the instruments, and without."""
    rules = ("dp", "cdp-v2", None)
    folders = [tmp_path_factory.mktemp(f"watched-{rule}") for rule in rules]
    jobs = [
        Job("conv", rule, 2, clip=0.3, optimizer="sgd", schedule="lambda", steps=5, config=instruments(str(folder)))
        for rule, folder in zip(rules, folders)
    ]
    bare = [Job("conv", rule, 2, clip=0.3, optimizer="sgd", schedule="lambda", steps=5) for rule in rules]
    results = pool.run(2, watched, [*jobs, *bare], timeout=170)
    return {
        rule: (folder, [r[at] for r in results], [r[at + 3] for r in results])
        for at, (rule, folder) in enumerate(zip(rules, folders))
    }


def test_instruments_change_nothing(runs):
    for _, watching, bare in runs.values():
        for a, b in zip(watching, bare):
            same(unpack(a["state"]), unpack(b["state"]))


def test_csv_monitor_writes_what_it_writes_under_stock_zero3(runs):
    stock = read_csv(runs[None][0])
    assert {"Train_Samples_lr.csv", "Train_Samples_elapsed_time_ms_forward.csv"} <= set(stock) and len(stock) == 6
    assert stock["Train_Samples_lr.csv"][0] == ["step", "lr"] and len(stock["Train_Samples_lr.csv"]) == 6
    for rule in ("dp", "cdp-v2"):
        ours = read_csv(runs[rule][0])
        assert ours["Train_Samples_lr.csv"] == stock["Train_Samples_lr.csv"]  # samples and values
        assert ours.keys() == stock.keys()
        for name, rows in ours.items():
            assert [row[0] for row in rows] == [row[0] for row in stock[name]], name
            assert all(float(value) >= 0 for _, value in rows[1:]), name


def test_tensorboard_gets_what_it_gets_under_stock_zero3(runs):
    stock = read_tensorboard(runs[None][0])
    assert len(stock) == 6
    for rule in ("dp", "cdp-v2"):
        ours = read_tensorboard(runs[rule][0])
        assert ours.keys() == stock.keys() and ours["Train/Samples/lr"] == stock["Train/Samples/lr"]
        for name in ("forward", "backward", "backward_inner", "step"):
            assert all(ms > 0 for _, ms in ours[f"Train/Samples/elapsed_time_ms_{name}"]), name
        for tag, values in ours.items():
            assert [step for step, _ in values] == [step for step, _ in stock[tag]], tag


def test_timers_and_throughput_are_printed_as_under_stock_zero3(runs):
    def shape(result: dict[str, Any], of: str) -> list[str]:
        """The words of such lines; stock ZeRO-3 times parts of its optimizer's step as well."""
        return [
            " ".join(word.rstrip(":") for word in line.split(of)[-1].split() if not any(c.isdigit() for c in word))
            for line in [*result["printed"].splitlines(), *result["logged"]]
            if of in line
        ]

    for rule in ("dp", "cdp-v2"):
        ours, stock = runs[rule][1][0], runs[None][1][0]
        for of, count in (("time (ms) | fwd", 15), ("RunningAvgSamplesPerSec", 1), ("step=", 3)):
            assert shape(ours, of) == shape(stock, of) and len(shape(stock, of)) >= count, of
        assert ours["timers"].keys() == stock["timers"].keys() and len(ours["timers"]) == 10
        assert ours["timers"]["fwd"] > 0 and ours["timers"]["bwd"] >= ours["timers"]["bwd_inner"] > 0


def test_flops_profiler_counts_what_it_counts_in_the_model_alone(runs):
    """And under stock ZeRO-3, but for the parameters, of which that has none when it is asked."""
    stock = runs[None][1][0]["flops"]
    assert stock["params"] == 0
    for rule in ("dp", "cdp-v2"):
        folder, (ours, other), _ = runs[rule]
        assert ours["flops"] == ours["plain"] and ours["flops"]["params"] == ours["parameters"] > 0
        assert (ours["flops"]["flops"], ours["flops"]["macs"]) == (stock["flops"], stock["macs"]) and stock["macs"] > 0
        assert other["flops"] == dict.fromkeys(other["flops"])  # only rank 0 profiles
        text = (folder / "flops.txt").read_text()
        assert "Detailed Profile per GPU" in text and "Conv2d" in text and "BatchNorm2d" in text


def test_comms_logger_sees_no_collective_in_steps(runs):
    for rule in ("dp", "cdp-v2"):
        for rank, result in enumerate(runs[rule][1]):
            assert result["in_steps"] == set(), (rule, rank)
            assert isinstance(result["summary"], dict)
    assert runs[None][1][0]["in_steps"], "stock ZeRO-3 gathers and scatters"
