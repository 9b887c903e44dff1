"""Masters and optimizer state in host memory: the same weights as without, bit for bit, and nothing of it in hand-off buffers."""

import pytest
import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam
from deepspeed.ops.op_builder import CPUAdamBuilder

from deepspeed_cdp.model.make_plan import Settings
from deepspeed_cdp.optim.offload import OffloadedOwner
from support import models
from support.local_ring import train
from support.optimizers import muon, sgd, two_groups
from support.runtime_runs import oracle, schedule

CASES = {
    "v2": dict(rule="cdp-v2"),
    "v1": dict(rule="cdp-v1"),
    "dp": dict(rule="dp"),
    "one rank": dict(rule="cdp-v2", size=1, clip=0.3),
    "four ranks": dict(rule="cdp-v2", size=4, clip=0.3, rounds=2),
    "accumulation": dict(rule="cdp-v2", rounds=3),
    "accumulation, v1": dict(rule="cdp-v1", rounds=2, clip=0.3, kind="rooted"),
    "clipping": dict(rule="cdp-v2", clip=0.3),
    "clipping by the exact norm": dict(rule="dp", clip=0.3),
    "frozen and persistent parameters": dict(rule="cdp-v2", kind="rooted", clip=0.2),
    "units that a rank skips": dict(rule="cdp-v2", kind="routed", make=sgd, steps=8),
    "bf16": dict(rule="cdp-v2", kind="llama-tied", dtype=torch.bfloat16, clip=0.5),
    "bf16, v1": dict(rule="cdp-v1", kind="llama-tied", dtype=torch.bfloat16),
    "bf16 with fp32 sums": dict(rule="dp", kind="llama-tied", dtype=torch.bfloat16, sum_dtype=torch.float32, clip=0.5),
    "whole matrices": dict(rule="cdp-v2", make=muon),
}


@pytest.fixture(scope="module")
def cpu_adam() -> None:
    """Loaded before ranks on threads do it all at once, which has given one of them a module with nothing in it."""
    CPUAdamBuilder().load(verbose=False)


def both(rule, size=3, kind="mlp", make=two_groups, steps=6, rounds=1, clip=0.0, dtype=None, sum_dtype=None):
    """Train without and with offloading, flushing after the third step; the learning rate moves."""
    if make is muon and not hasattr(torch.optim, "Muon"):
        pytest.skip("torch has no Muon before 2.9")
    return [
        train(
            kind,
            size,
            Settings(rule, "parameters", rounds=rounds, clip=clip, sum_dtype=sum_dtype, offload=offload),
            make,
            steps,
            {2},
            schedule,
            dtype,
        )
        for offload in (False, True)
    ]


@pytest.mark.parametrize("case", CASES)
def test_offloaded_equals_not_offloaded(case):
    plain, offloaded = both(**CASES[case])
    assert all(isinstance(r.owner, OffloadedOwner) == (run is offloaded) for run in (plain, offloaded) for r in run["runtimes"])
    assert plain["losses"] == offloaded["losses"]
    start = dict(models.build(CASES[case].get("kind", "mlp")).named_parameters())
    moved = {n for n, x in plain["state"].items() if not torch.equal(x, start.get(n, x).to(x.dtype))}
    assert moved, "nothing was trained"
    for a, b in zip(plain["states"], offloaded["states"]):
        assert a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)
    for a, b in zip(plain["runtimes"], offloaded["runtimes"]):
        assert a.executor.metrics.kept.equal(b.executor.metrics.kept)
        for n, master in a.owner.masters.items():
            state, other = a.owner.optimizer.state[master], b.owner.optimizer.state[b.owner.masters[n]]
            assert state.keys() == other.keys() and all(
                torch.equal(torch.as_tensor(state[k]), torch.as_tensor(other[k])) for k in state
            )


def test_gradients_and_values_go_through_buffers_of_their_own():
    """What the optimizer reads is not the sum, what it writes is not the published copy: on a GPU these are not the host's."""
    seen = []

    def watch(runtime):
        owner, step = runtime.owner, runtime.owner.optimizer.step
        arena = runtime.executor.buffers.arena.untyped_storage().data_ptr()

        def look():
            seen.append(
                [
                    (m.untyped_storage().data_ptr(), m.grad.untyped_storage().data_ptr(), m.grad.dtype)
                    for m in owner.masters.values()
                    if m.grad is not None
                ]
            )
            assert all(arena not in places for places in seen[-1])
            return step()

        owner.optimizer.step = look

    train("mlp", 2, Settings("cdp-v2", offload=True), sgd, 4, change=watch)
    assert all(dtype == torch.float32 for places in seen for *_, dtype in places)
    assert len(seen) == 2 * 3 * 4, "each of a rank's three units is stepped by itself, in each of four steps"


def test_a_step_whose_norm_is_not_finite_is_skipped():
    """And leaves nothing behind that the next update would apply or wait for."""
    plain, offloaded = (
        [train("mlp-nan", 2, Settings("cdp-v1", clip=0.3, offload=offload), two_groups, 6)] for offload in (False, True)
    )
    assert [r.executor.owner_executor.skipped for r in offloaded[0]["runtimes"]] == [1, 1]
    assert all(torch.equal(x, offloaded[0]["state"][n]) and x.isfinite().all() for n, x in plain[0]["state"].items())


@pytest.mark.sampled(6)
@pytest.mark.parametrize("rule", ["dp", "cdp-v1", "cdp-v2"])
@pytest.mark.parametrize("clip", [0.0, 0.3])
def test_deepspeed_cpu_adam(cpu_adam, rule, clip):
    """DeepSpeed's own C++ Adam steps units one by one, to its rounding what torch's does."""

    def make(named):
        return DeepSpeedCPUAdam([p for _, p in named], lr=1e-2, weight_decay=0.1)

    def plain(named):
        return torch.optim.AdamW([p for _, p in named], lr=1e-2, weight_decay=0.1)

    got = train("mlp", 3, Settings(rule, clip=clip, rounds=2, offload=True), make, 6, {2}, schedule)
    want = oracle(
        "mlp", got["runtimes"][0].plan.stages, rule, 3, plain, 6, rounds=2, clip=clip, flush_after={2}, on_step=schedule
    )
    for name, master in want.masters.items():
        torch.testing.assert_close(got["state"][name], master, rtol=1e-5, atol=1e-6)
    for runtime in got["runtimes"]:
        assert runtime.owner.updates_per_unit and not runtime.owner.updates_eagerly
        assert {s["step"] for s in runtime.owner.optimizer.state.values()} == {6}


@pytest.mark.parametrize(
    "first, then, kind", [(torch.optim.AdamW, DeepSpeedCPUAdam, int), (DeepSpeedCPUAdam, torch.optim.AdamW, torch.Tensor)]
)
def test_state_of_one_adam_for_the_other(cpu_adam, first, then, kind):
    """torch's counts its steps in a tensor, in place; DeepSpeed's in a number: taken over, each counts on in its own way."""

    def run(make, change=None):
        return train(
            "mlp", 2, Settings("cdp-v2", offload=True), lambda named: make([p for _, p in named], lr=1e-2), 3, {2}, change=change
        )["runtimes"]

    saved = [r.optimizer.state_dict()["state"] for r in run(first)]
    loaded = run(
        then,
        lambda r: r.optimizer.load_state_dict(
            {"state": saved[r.executor.rank], "param_groups": r.optimizer.state_dict()["param_groups"]}
        ),
    )
    steps = [s["step"] for r in loaded for s in r.owner.optimizer.state.values()]
    assert steps and all(isinstance(s, kind) and float(s) == 6 for s in steps)


def test_the_benchmark_of_its_cost_runs(capsys, cpu_adam):
    from benchmarks.offload import main

    threads = torch.get_num_threads()
    for clip in ("0", "1"):
        assert main(["--cpu", "--width", "16", "--layers", "2", "--repeats", "1", "--clip", clip]) == 0
    torch.set_num_threads(threads)
    assert capsys.readouterr().out.count("| in host memory |") == 6
