"""The recorder: every pass and hand-off once, on one axis, without a trace of itself in the training; merging of ranks' files."""

import json
import time
from collections import Counter

import deepspeed
import pytest
import torch

from deepspeed_cdp.cli.main import main
from deepspeed_cdp.cli.plan import messages
from deepspeed_cdp.cli.timeline import pairs, read
from deepspeed_cdp.integration.optimizer import CyclicOptimizer
from deepspeed_cdp.model.make_plan import Settings
from deepspeed_cdp.plan.actions import Kind
from deepspeed_cdp.runtime import trace
from deepspeed_cdp.runtime.runtime import Runtime
from deepspeed_cdp.transport.ring_view import RingView
from support import models
from support.local_ring import run_ranks, train
from support.optimizers import sgd

STEPS = 4


def record(
    kind: str, ranks: int, settings: Settings, device: str = "cpu", ring_size: int | None = None
) -> tuple[list[dict], list[Runtime], list[dict]]:
    """Traces of STEPS steps after a first one, the runtimes, and what each rank ended with."""
    built = [models.build(kind) for _ in range(ranks)]

    def work(rank, transport):
        module = built[rank]
        transport = RingView(transport, ring_size) if ring_size else transport
        runtime = Runtime(module, sgd(list(module.named_parameters())), settings, transport, torch.device("cpu"))
        recorder = None
        for step in range(1 + STEPS):
            if step == 1:
                recorder = trace.Recorder(runtime.executor, torch.device(device))
            for m in range(settings.rounds):
                with runtime.forward():
                    loss = models.loss(module, kind, models.batch(kind, step, m, rank))
                CyclicOptimizer(runtime).scale_if_loss(loss / settings.rounds).backward()
                runtime.end_backward()
            runtime.step()
        found = recorder.stop()
        received = runtime.counters.messages()
        state = {k: v.clone() for k, v in runtime.whole_state().items()}
        runtime.close(True)
        return found, runtime, state, received

    results = run_ranks(ranks, work)
    for rank, (_, runtime, _, received) in enumerate(results if ring_size is None else ()):
        assert received == messages(runtime.plan, rank)  # what ``plan`` prints is what the transport counts
    return [r[0] for r in results], [r[1] for r in results], [r[2] for r in results]


@pytest.mark.parametrize(
    "kind, settings",
    [
        ("mlp", Settings()),
        ("mlp", Settings(rule="cdp-v1", rounds=2)),
        ("rooted", Settings(rule="dp")),
        ("mlp", Settings(keep_after_forward=True)),
        ("rooted", Settings(rounds=9)),
    ],
)
def test_every_pass_and_message_once_and_training_is_the_same(kind, settings):
    ranks = 3
    traces, runtimes, states = record(kind, ranks, settings)
    plan = runtimes[0].plan
    for rank, found in enumerate(traces):
        passes = [e for e in found["traceEvents"] if e.get("cat") == "passes"]
        seen = sorted(tuple(e["args"][k] for k in ("step", "round", "backward", "unit")) for e in passes)
        assert seen == sorted(
            (step, m, backward, i) for step in range(1, 1 + STEPS) for m in range(settings.rounds) for i, backward in plan.visits
        )
        passes.sort(key=lambda e: e["ts"])
        assert all(a["ts"] + a["dur"] <= b["ts"] for a, b in zip(passes, passes[1:]))
        for e in passes:
            s = plan.schedule
            assert e["args"]["version"] == s.version(e["args"]["step"], e["args"]["round"], rank, e["args"]["stage"])
        owner = [e["name"] for e in found["traceEvents"] if e.get("cat") == "owner"]
        assert owner.count("norm") == owner.count("update") == STEPS
        averaged = [e["args"]["unit"] for e in found["traceEvents"] if e.get("cat") == "owner" and e["name"] == "average"]
        assert averaged == list(plan.eager_units(rank)) * STEPS
        # sums: those that others bring back, but for the finished ones, which the update waits for; and those pulled from owners
        sums = [i for i in plan.every_unit if plan.unit(i).g_bytes]
        owned = sum(plan.unit(i).stage == plan.schedule.owned(rank) for i in sums)
        came = Counter(m["stream"] for m in found["deepspeed_cdp"]["messages"] if m["side"] == "receive" and m["step"] < STEPS)
        assert came["G"] == (STEPS - 1) * owned * (settings.rounds * (ranks - 1) - (rank < ranks - 1))
        assert came["G0"] == (STEPS - 1) * (len(sums) - owned) * (settings.rounds - (rank == 0))
        executor = runtimes[rank].executor
        assert "release" not in vars(executor) and executor.actions[Kind.WAIT_PARAM] == executor.residency.wait
        assert "offer" not in vars(executor.messages)
    plain = train(kind, ranks, settings, sgd, 1 + STEPS)
    assert all(torch.equal(states[0][k], v) for k, v in plain["state"].items())


def test_a_recording_ends_by_itself(monkeypatch):
    said = []
    monkeypatch.setattr(deepspeed.utils.logger, "warning", lambda text, *_: said.append(text))
    whole, *_ = record("mlp", 2, Settings())
    assert not said and [x["deepspeed_cdp"]["ended_at_step"] for x in whole] == [None, None]
    monkeypatch.setattr(trace, "MOST_EVENTS", 2 * trace.EVENTS_PER_PASS * 12)  # of two steps of six units
    traces, *_ = record("mlp", 2, Settings())
    assert [x["deepspeed_cdp"]["ended_at_step"] for x in traces] == [3, 3]
    for found, full in zip(traces, whole):
        events = [e for e in found["traceEvents"] if "args" in e and "step" in e["args"]]
        assert {e["args"]["step"] for e in events} == {m["step"] for m in found["deepspeed_cdp"]["messages"]} == {1, 2}
        assert len(events) == sum("args" in e and e["args"].get("step") in (1, 2) for e in full["traceEvents"])
        assert len(events) + len(found["deepspeed_cdp"]["messages"]) <= trace.MOST_EVENTS
    assert len(said) == 1 and said[0].startswith("engine.cyclic_trace() has recorded 2 steps and records no more; leave ")


def test_merged_files_are_on_one_axis_and_hand_offs_go_forward(tmp_path, capsys):
    traces, *_ = record("mlp", 3, Settings())
    files = []
    for rank, found in enumerate(traces):
        files.append(trace.file_of(str(tmp_path / "t.json"), rank))
        trace.write(files[-1], found)
    assert files[2].endswith("t.rank2.json")
    merged = read(files[::-1])
    assert [x["deepspeed_cdp"]["rank"] for x in merged] == [0, 1, 2]
    assert min(e["ts"] for x in merged for e in x["traceEvents"] if "ts" in e) == 0
    matched = pairs(merged)
    received = [m for x in merged for m in x["deepspeed_cdp"]["messages"] if m["side"] == "receive"]
    # those sent before the recording began have no beginning
    assert all(any(m is b for _, _, b, _ in matched) for m in received if m["step"] > 1)
    assert all(a["ts"] <= b["ts"] for a, _, b, _ in matched) and {a["stream"] for a, *_ in matched} == {"P0", "G", "G0"}
    assert all(a["step"] == b["step"] for a, _, b, _ in matched if a["stream"] != "P0")
    assert all(a["peer"] not in (None, src) for a, src, _, _ in matched)
    assert main(["timeline", "--from", *files, "--out", str(tmp_path / "all.json"), str(tmp_path / "all.png"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["ranks"] == 3 and found["hosts"] == 1 and [r["steps"] for r in found["per_rank"]] == [STEPS] * 3
    events = json.loads((tmp_path / "all.json").read_text())["traceEvents"]
    assert sum(e["ph"] == "s" for e in events) == sum(e["ph"] == "f" for e in events) == len(matched)
    assert (tmp_path / "all.png").read_bytes()[:4] == b"\x89PNG"
    assert main(["timeline", "--from", *files[:2]]) == 2
    assert "of ranks [0, 1], but the run had 3 ranks" in capsys.readouterr().err


def test_a_rank_that_is_ahead_has_sent_another_steps_sum():
    def sum_of(step: int, side: str, ts: float, peer: int) -> dict:
        return {"side": side, "stream": "G", "peer": peer, "unit": 2, "backward": True, "step": step, "ts": ts}

    sent, came = (
        [sum_of(3, "send", 1.0, 1), sum_of(4, "send", 2.0, 1)],
        [sum_of(3, "receive", 5.0, 0), sum_of(4, "receive", 6.0, 0)],
    )
    ranks = [{"deepspeed_cdp": {"rank": rank, "messages": messages}} for rank, messages in enumerate((sent, came))]
    assert pairs(ranks) == [(sent[0], 0, came[0], 1), (sent[1], 0, came[1], 1)]


def test_rings_have_the_worlds_numbers(tmp_path):
    traces, *_ = record("mlp", 4, Settings(), ring_size=2)
    files = [str(tmp_path / f"{r}.json") for r in range(4)]
    for path, found in zip(files, traces):
        trace.write(path, found)
    assert [x["deepspeed_cdp"]["rank"] for x in traces] == [0, 1, 2, 3]
    assert {(src // 2, dst // 2) for _, src, _, dst in pairs(read(files))} == {(0, 0), (1, 1)}  # hand-offs stay in their ring


def test_other_hosts_are_placed_by_their_wall_clocks(tmp_path):
    traces, *_ = record("mlp", 2, Settings())
    about = traces[1]["deepspeed_cdp"]
    ahead = 7e6  # this host's monotonic clock began seven seconds earlier, and its wall clock is right
    about["host"], about["monotonic_us"] = "elsewhere", about["monotonic_us"] + ahead
    for item in [e for e in traces[1]["traceEvents"] if "ts" in e] + about["messages"]:
        item["ts"] += ahead
    files = [str(tmp_path / f"{r}.json") for r in range(2)]
    for path, found in zip(files, traces):
        trace.write(path, found)
    merged = read(files)
    first = [min(e["ts"] for e in x["traceEvents"] if "ts" in e) for x in merged]
    assert max(first) < 2e6 and merged[1]["deepspeed_cdp"]["shift_us"] == pytest.approx(-ahead, abs=1e5)


def test_on_a_gpu_events_are_recorded_and_read_only_at_the_end(monkeypatch):
    log = []

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            self.at = time.perf_counter()
            log.append("record")

        def elapsed_time(self, end):
            log.append("read")
            return (end.at - self.at) * 1e3

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: log.append("wait"))
    traces, *_ = record("mlp", 1, Settings(), "cuda")
    assert log[0] == "wait" and log.count("wait") == 2
    end = len(log) - 1 - log[::-1].index("wait")
    assert "read" not in log[:end] and "record" not in log[end:]  # nothing is read, nothing waits, before the recording stops
    passes = [e for e in traces[0]["traceEvents"] if e.get("cat") == "passes"]
    assert len(passes) == STEPS * 12 and traces[0]["deepspeed_cdp"]["clock"] == "cuda events"
