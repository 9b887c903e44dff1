"""One rank of the GPU checks of everything around a step: several engines, compile, checkpointing, evaluation, saving, dtypes.

Started by tests/gpu/test_gpu.py, or by hand: torchrun --nproc-per-node N tests/gpu/rank_cases.py [CASE ...]
Each case returns whether it is good, and figures that say how good.
"""

import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

from deepspeed_cdp.analysis import reference  # noqa: E402
from deepspeed_cdp.errors import HandoffError  # noqa: E402
from deepspeed_cdp.plan.schedule import threshold  # noqa: E402
from support.engine_work import explicit  # noqa: E402
from support.gpu_runs import LR, STEPS, Verdict, apart, same, steps_of  # noqa: E402
from support.rank_tools import Tools, finish, models, parsed, parser, run_cases  # noqa: E402


def run(
    tools: Tools,
    kind: str = "llama",
    rule: str = "cdp-v2",
    rounds: int = 1,
    module: torch.nn.Module | None = None,
    config: dict[str, Any] | None = None,
    prepare: Callable[[Any], None] = lambda engine: None,
    after: Callable[[Any, int], None] = lambda engine, step: None,
    dtype: torch.dtype | None = None,
) -> dict[str, Any]:
    """A run from the start: weights, losses, stages."""
    module = models.build(kind) if module is None else module
    config = {"gradient_accumulation_steps": rounds, **(config or {})}
    engine = tools.engine(module if dtype is None else module.to(dtype), rule, config, LR)
    prepare(engine)
    losses = steps_of(engine, kind, tools.batches(kind, STEPS, rounds, dtype), after=lambda step: after(engine, step))
    state = engine.module_state_dict()
    stages = engine.cyclic_plan.stages
    tools.destroy(engine)
    return {"state": state, "losses": torch.stack(losses).float(), "stages": stages}


def against_oracle(
    tools: Tools,
    kind: str = "llama",
    rule: str = "cdp-v2",
    rounds: int = 1,
    clip: float = 0.0,
    bf16: bool = False,
    fp32_sums: bool = False,
    flush_after: tuple[int, ...] = (),
    any_order: bool | str = "auto",
) -> Verdict:
    """A run beside the single-process reference on the same device."""
    dtype = torch.bfloat16 if bf16 else None
    config: dict[str, Any] = {"gradient_clipping": clip, "cyclic": {"any_order": any_order}}
    if fp32_sums:  # sums inside products are rounded otherwise, and Adam makes a whole step of the least gradient
        config["cyclic"]["gradient_accumulation_fusion"] = False
    if bf16:
        config["bf16"] = {"enabled": True}
    if fp32_sums:
        config["data_types"] = {"grad_accum_dtype": "fp32"}

    def after(engine: Any, step: int) -> None:
        if step in flush_after:
            engine.flush()

    got = run(tools, kind, rule, rounds, config=config, after=after, dtype=dtype)
    template = models.build(kind).to(tools.device)
    template = template.to(dtype) if dtype is not None else template

    def place(x: torch.Tensor) -> torch.Tensor:
        x = x.to(tools.device)
        return x.to(dtype) if dtype is not None and x.is_floating_point() else x

    want = reference.train(
        template,
        got["stages"],
        threshold(rule, tools.size),
        lambda t, m, r: place(models.batch(kind, t, m, r)),
        lambda call, x: models.loss(call, kind, x),
        lambda named: torch.optim.AdamW([p for _, p in named], lr=LR, foreach=True),
        STEPS,
        rounds=rounds,
        clip=clip,
        flush_after=set(flush_after),
        grad_dtype=torch.float32 if fp32_sums else None,
        delay_correction=explicit("predict"),  # as cyclic.delay_correction "auto"
    )
    mine = [want.losses[t, m, tools.rank] for t in range(STEPS) for m in range(rounds)]
    figures = apart(
        {"state": {n: got["state"][n] for n in want.masters}, "losses": got["losses"]},
        {
            "state": {n: p.to(got["state"][n].dtype) for n, p in want.masters.items()},
            "losses": torch.tensor(mine, device=tools.device),
        },
    )
    # kernels of another shape may sum in another order; in bf16 a weight may round to its neighbour (2^-8 of itself)
    return figures["weights"] < (4e-3 if bf16 else 1e-6) and figures["losses"] < (1e-3 if bf16 else 2e-6), figures


# ---- cases --------------------------------------------------------------------------------------------------------------
def two_engines(tools: Tools) -> Verdict:
    """Steps of two engines in turn; one is destroyed while the other goes on; a third is made. Each equals itself alone."""
    kinds = (("llama", "cdp-v2"), ("mlp", "cdp-v1"), ("routed", "dp"))
    alone = [run(tools, kind, rule) for kind, rule in kinds]
    data = [tools.batches(kind, STEPS) for kind, _ in kinds]
    engines = [tools.engine(models.build(kind), rule, None, LR) for kind, rule in kinds[:2]]
    losses: list[list[torch.Tensor]] = [[], [], []]
    for step in range(STEPS):
        for i, engine in enumerate(engines):
            losses[i] += steps_of(engine, kinds[i][0], data[i], step, step + 1)
            if step % 2 and i == step // 2 % 2:
                losses[i][-1].item()
        if step == 2:  # both are in the middle of things
            states = [None, engines[1].module_state_dict(), None]
            tools.destroy(engines.pop())
    states[0] = engines[0].module_state_dict()
    third = tools.engine(models.build("routed"), "dp", None, LR)
    losses[2] = steps_of(third, "routed", data[2])
    losses[0] += steps_of(engines[0], "llama", data[0], 0, 2)  # the first still works
    states[2] = third.module_state_dict()
    tools.destroy(engines[0])
    tools.destroy(third)
    first = same(alone[0], {"state": states[0], "losses": torch.stack(losses[0][:STEPS])})
    second = torch.equal(alone[1]["losses"][:3], torch.stack(losses[1]))
    last = same(alone[2], {"state": states[2], "losses": torch.stack(losses[2])})
    return first and second and last, {"first": first, "second": second, "third": last}


def after_destroy(tools: Tools) -> Verdict:
    """Engines come and go; what the third to fifth leave behind beyond the second."""
    seen = []
    for i in range(5):
        engine = tools.engine(models.build("llama"), ("cdp-v2", "cdp-v1", "dp")[i % 3], None, LR)
        steps_of(engine, "llama", tools.batches("llama", 4))
        tools.destroy(engine)
        del engine
        seen.append(tools.settled_memory())
    left = {k: seen[-1][k] - seen[1][k] for k in seen[0]}
    # rss: gloo's threads and torch's own caches; gpu: granules of 2 MiB
    room = {"allocated": 1 << 16, "reserved": 2 << 20, "gpu": 8 << 20, "rss": 24 << 20, "fds": 6, "threads": 2}
    return all(v <= room[k] for k, v in left.items()), left


def compiled(tools: Tools) -> Verdict:
    """Blocks compiled before deepspeed.initialize, and engine.compile() after it, beside the eager run."""
    backend = "inductor" if tools.cuda else "aot_eager"  # the CPU's inductor needs minutes
    eager = run(tools)
    torch._dynamo.reset()
    module = models.build("llama")
    for block in module.model.layers:
        block.compile(backend=backend)
    blocks = apart(run(tools, module=module), eager)
    torch._dynamo.reset()
    whole = apart(run(tools, prepare=lambda engine: engine.compile(backend=backend)), eager)
    torch._dynamo.reset()
    good = all(x["weights"] < 2e-2 and x["losses"] < 1e-3 for x in (blocks, whole))  # Adam's first steps amplify rounding
    return good, {"blocks": blocks, "engine": whole}


def checkpointed(tools: Tools, reentrant: bool) -> Verdict:
    """Activation checkpointing of each block, as Hugging Face does it, beside none."""
    module = models.build("llama")
    module.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    module.train()
    plain = models.build("llama")
    plain.train()
    want, ran = run(tools, module=plain), [0]
    module.model.layers[0].mlp.register_forward_pre_hook(lambda *_: ran.__setitem__(0, ran[0] + 1))
    got = run(tools, module=module)
    figures = {**apart(got, want), "bitwise": same(got, want), "forwards": ran[0]}
    return figures["weights"] < 1e-6 and figures["losses"] < 1e-6 and ran[0] >= 2 * STEPS, figures


def eval_between(tools: Tools) -> Verdict:
    """Rank r evaluates r + 1 batches after two of the steps; training equals a run that flushes there."""
    where, values = (1, 3), []

    def evaluate(engine: Any, step: int) -> None:
        if step in where:
            engine.eval()
            with torch.no_grad():
                for i in range(tools.rank + 1):
                    values.append(models.loss(engine, "llama", models.batch("llama", 900 + i, 0, 0).to(tools.device)).item())
            engine.train()

    got = run(tools, after=evaluate)
    want = run(tools, after=lambda engine, step: engine.flush() if step in where else None)
    import torch.distributed as dist

    firsts: list[Any] = [None] * tools.size
    dist.all_gather_object(firsts, values[0])
    good = same(got, want) and len(set(firsts)) == 1
    return good, {"bitwise": same(got, want), "first evaluation": values[0], "equal on all ranks": len(set(firsts)) == 1}


def save_load(tools: Tools) -> Verdict:
    """Save, go on, load, go on: the same twice, and a new engine that loads does the same."""
    run_id = os.environ.get("TORCHELASTIC_RUN_ID", "")  # the same on all ranks, and no one else's
    folder = os.path.join(tempfile.gettempdir(), f"cyclic-{os.environ['MASTER_PORT']}-{run_id}")
    data, ends = tools.batches("llama", STEPS), []
    engine = tools.engine(models.build("llama"), "cdp-v2", None, LR)
    steps_of(engine, "llama", data, 0, 3)
    engine.save_checkpoint(folder, "t")
    for attempt in range(3):
        if attempt == 2:
            tools.destroy(engine)
            engine = tools.engine(models.build("llama"), "cdp-v2", None, LR)
        if attempt:
            engine.load_checkpoint(folder, "t")
        losses = torch.stack(steps_of(engine, "llama", data, 3))
        ends.append({"losses": losses, "state": engine.module_state_dict()})
    tools.destroy(engine)
    tools.agree(True)
    if tools.rank == 0:
        shutil.rmtree(folder)
    figures = {"loaded": same(ends[0], ends[1]), "new engine": same(ends[0], ends[2])}
    return all(figures.values()), figures


def first_use(tools: Tools) -> Verdict:
    """Kernels never used before, on one rank after the other, while streams wait for peers: loading them may synchronize."""
    ops = [
        torch.special.bessel_j0,
        torch.erfinv,
        torch.special.i1e,
        lambda x: torch.sort(x).values,
        torch.digamma,
        lambda x: torch.fft.rfft(x).real,
        lambda x: x.cumprod(0),
        torch.lgamma,
        lambda x: x.median(),
        torch.special.ndtri,
    ]

    def meddle(engine: Any, step: int) -> None:
        for k in range(2):
            x = torch.linspace(0.1, 0.9, 1000 + step, device=tools.device)
            ops[(2 * step + k + 3 * tools.rank) % len(ops)](x)

    return same(run(tools), run(tools, after=meddle)), {}


def pressure(tools: Tools) -> Verdict:
    """Memory is taken, filled with nan and given back around each step, to the allocator or to the driver; nothing is in it."""

    def meddle(engine: Any, step: int) -> None:
        for k in range(8):
            torch.full(((1 + (step * 7 + k * 3 + tools.rank) % 11) << 18,), float("nan"), device=tools.device)
        if tools.cuda and step % 2:
            torch.cuda.empty_cache()

    return same(run(tools), run(tools, after=meddle)), {}


def watched(tools: Tools) -> Verdict:
    """With every instrument on, each of which synchronizes in its way, the run is the same; steps are timed on the device."""
    import deepspeed

    seen: dict[str, Any] = {}

    def look(engine: Any, step: int) -> None:
        if step == 1:  # DeepSpeed times from the third step on
            tools.synchronize()
            seen["started"] = time.perf_counter()
        if step == STEPS - 1:
            tools.synchronize()
            if tools.cuda:
                engine.tput_timer._collect()
            seen.update(
                engine.cyclic_metrics,
                wall=time.perf_counter() - seen["started"],
                timed=engine.tput_timer.total_elapsed_time,
                timer=type(engine.tput_timer).__name__,
            )

    with tempfile.TemporaryDirectory() as folder:
        instruments = {
            "wall_clock_breakdown": True,
            "steps_per_print": 2,
            "csv_monitor": {"enabled": True, "output_path": folder, "job_name": "csv"},
            "flops_profiler": {"enabled": True, "profile_step": 3, "output_file": f"{folder}/flops.txt"},
            "comms_logger": {"enabled": True, "prof_all": True},
        }
        watching = run(tools, config=instruments, after=look)
    deepspeed.comm.configure(enabled=False)
    good = {
        "same": same(watching, run(tools)),
        "timed": 0 < seen["timed"] <= 1.01 * seen["wall"],
        "timer": seen["timer"] == ("StreamThroughputTimer" if tools.cuda else "ThroughputTimer"),
        "waited": (seen["waited_total"] is None) == tools.cuda,  # (on devices the eighth step is the first that is timed)
        "step": seen["step"] == STEPS - 1 - seen["lag"] == (STEPS - 2 if tools.rank == tools.size - 1 else STEPS - 3),
    }
    return all(good.values()), {**good, "ms timed": round(1e3 * seen["timed"]), "ms by the clock": round(1e3 * seen["wall"])}


def slow_rank(tools: Tools) -> Verdict:
    """The last rank's data come 50 ms late: everybody names it, and the others' waits show it."""
    told: list[dict[str, Any]] = []
    engine = tools.engine(models.build("llama"), "cdp-v2", None, LR)

    def late(step: int) -> None:
        told.append(engine.cyclic_metrics)
        if tools.rank == tools.size - 1:
            time.sleep(0.05)

    steps_of(engine, "llama", tools.batches("llama", 1).expand(28, -1, -1, -1), after=late)
    tools.destroy(engine)
    last, guilty = told[-1], tools.rank == tools.size - 1
    good = {
        "named": last["slowest"] == tools.size - 1,
        "busy": last["busy"] is not None and last["busy"][-1] > 0.045,
        "waited": guilty or last["waited_total"] > 0.03,
        "early": not tools.cuda or told[2]["busy"] is None,
    }
    waits = {way: {str(edge): round(t, 4) for edge, t in last[way].items() if t > 0.001} for way in ("waited", "waited_sent")}
    return all(good.values()), {**good, "busy": last["busy"], **waits, "step": last["waited_step"]}


def three_steps(tools: Tools) -> Verdict:
    """For slow tools: three steps of a small model, then the whole state."""
    engine = tools.engine(models.build("mlp"), "cdp-v2", {"gradient_clipping": 0.5}, LR)
    losses = steps_of(engine, "mlp", tools.batches("mlp", 3))
    finite = all(bool(torch.isfinite(v).all()) for v in engine.module_state_dict().values())
    tools.destroy(engine)
    return finite and all(bool(torch.isfinite(x)) for x in losses), {"losses": [round(x.item(), 4) for x in losses]}


def after_error(tools: Tools) -> Verdict:
    """An engine whose forward raised is destroyed, on every rank; the next one works."""

    class Odd(RuntimeError):
        pass

    def refuse(*_: Any) -> None:
        raise Odd

    engine = tools.engine(models.build("llama"), "cdp-v2", None, LR)
    steps_of(engine, "llama", tools.batches("llama", 3))
    engine.module.model.layers[2].register_forward_pre_hook(refuse)
    raised = False
    try:
        steps_of(engine, "llama", tools.batches("llama", 1))
    except (Odd, HandoffError):  # the second if another rank was first
        raised = True
    tools.destroy(engine)
    return raised and same(run(tools, "mlp"), run(tools, "mlp")), {"raised": raised}


def collective_between(tools: Tools) -> Verdict:
    """A script's own collective between forward and backward changes nothing."""
    shared = torch.ones(1, device=tools.device)

    def train(meets: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        engine, losses = tools.engine(models.build("llama"), "cdp-v2", None, LR), []
        for x in tools.batches("llama", STEPS)[:, 0]:
            loss = models.loss(engine, "llama", x)
            if meets:
                torch.distributed.all_reduce(shared)
            engine.backward(loss)
            engine.step()
            losses.append(loss.detach())
        tools.destroy(engine)
        return losses

    return all(map(torch.equal, train(False), train(True))), {}


CASES: dict[str, Callable[[Tools], Verdict]] = {
    "three_steps": three_steps,
    "first_use": first_use,  # before others use what it loads
    "pressure": pressure,
    "two_engines": two_engines,
    "after_destroy": after_destroy,
    "checkpoint_reentrant": lambda tools: checkpointed(tools, True),
    "checkpoint_nonreentrant": lambda tools: checkpointed(tools, False),
    "eval_between": eval_between,
    "save_load": save_load,
    "clip": lambda tools: against_oracle(tools, clip=0.1),
    "clip_v1": lambda tools: against_oracle(tools, rule="cdp-v1", clip=0.1),
    "accumulate": lambda tools: against_oracle(tools, rounds=3, flush_after=(2,)),
    "bf16": lambda tools: against_oracle(tools, bf16=True),
    "fp32_sums": lambda tools: against_oracle(tools, bf16=True, fp32_sums=True, rounds=2),
    "any_order": lambda tools: against_oracle(tools, any_order=True, rounds=2, clip=0.1),
    "later_order": lambda tools: against_oracle(tools, "strays", rounds=2),
    "collective_between": collective_between,
    "watched": watched,
    "slow_rank": slow_rank,
    "after_error": after_error,
    "compile": compiled,
}


def main() -> None:
    options = parsed(parser(__doc__, 600), CASES, 200)
    tools = Tools(options)
    finish(tools, run_cases(tools, options.cases, options.limit))


if __name__ == "__main__":
    main()
