"""fp16 with loss scaling, and autocast: the engine against the oracle (bitwise), and under ``dp`` against stock ZeRO-3."""

import types
from contextlib import nullcontext
from typing import Any
from unittest import mock

import deepspeed.runtime.fp16.loss_scaler as ds
import pytest
import torch

from deepspeed_cdp.analysis import reference
from deepspeed_cdp.plan.schedule import threshold
from support import models
from support.engine_work import ORACLES, SCHEDULES, Job, explicit, farthest, pack, same, start, train, unpack, whole


def fp16(power: int = 18, window: int = 2, **more: Any) -> dict[str, Any]:
    return {
        "fp16": {
            "enabled": True,
            "auto_cast": True,
            "initial_scale_power": power,
            "loss_scale_window": window,
            "hysteresis": 1,
            **more,
        }
    }


def autocast(dtype: str = "bfloat16", **more: Any) -> dict[str, Any]:
    return {"torch_autocast": {"enabled": True, "dtype": dtype}, **more}


FP16 = {
    1: [Job("mlp", "dp", 1, steps=9, schedule="lambda", config=fp16()), Job("mlp", "cdp-v1", 1, steps=9, config=fp16())],
    2: [
        Job("mlp", "cdp-v1", 2, steps=12, clip=0.3, schedule="lambda", config=fp16(), flush_after=(4,), correction="predict"),
        Job("mlp", "dp", 1, steps=10, optimizer="sgd", schedule="lambda", config=fp16(hysteresis=2), style="scaled"),
        Job(
            "llama-tied",
            "cdp-v1",
            1,
            steps=8,
            clip=0.5,
            sum_fp32=True,
            config=fp16(auto_cast=False, loss_scale_window=3),
            correction="extrapolate",
        ),
        Job(
            "mlp",
            "cdp-v1",
            1,
            steps=8,
            clip=0.3,
            optimizer="sgd",
            config={**fp16(), "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}},
        ),
        Job("mlp", "cdp-v1", 1, optimizer="sgd", config=fp16(loss_scale=384.0)),
    ],
    3: [
        Job("mlp", "cdp-v1", 1, steps=12, schedule="warmup", config=fp16(consecutive_hysteresis=True), eval_after=(3,)),
        Job("mlp", "dp", 2, steps=10, clip=0.3, config=fp16(), flush_after=(1, 5)),
    ],
}
AUTOCAST = {
    2: [
        Job("llama-tied", "cdp-v2", 2, clip=0.3, config=autocast()),
        Job("mlp", "cdp-v1", 1, config=autocast(), eval_after=(2,)),
        Job("conv", "dp", 1, optimizer="sgd", config=autocast()),
        Job("mlp", "cdp-v2", 2, style="outer", config=autocast()),
        Job("mlp", "cdp-v1", 1, steps=9, clip=0.3, config=autocast("float16", fp16={"initial_scale_power": 20, "hysteresis": 1})),
    ],
    3: [
        Job("llama", "cdp-v2", 1, clip=0.3, style="accelerate", config=autocast()),
        Job("routed", "cdp-v2", 2, optimizer="sgd", config=autocast(), cyclic={"keep_after_forward": True}),
    ],
}


class Heard:
    """DeepSpeed's scaler, and what it has been told."""

    def __init__(self, config: dict[str, Any]):
        from deepspeed.runtime.precision_config import DeepSpeedFP16Config

        parsed = DeepSpeedFP16Config(**config)
        self.scaler = ds.CreateLossScaler(torch.half, parsed.loss_scale, parsed.loss_scale == 0, parsed.dynamic_loss_scale_args())
        self.overflows: list[bool] = []

    @property
    def loss_scale(self) -> float:
        return self.scaler.loss_scale

    def update_scale(self, overflow: bool) -> None:
        self.overflows.append(overflow)
        with mock.patch.object(ds, "dist", types.SimpleNamespace(get_rank=lambda: 1)):  # it asks for the rank before it logs
            self.scaler.update_scale(overflow)


def oracle(job: Job, stages: Any, world: int) -> reference.Trained:
    """As in engine_work, in fp16 or under autocast; the learning rate stands still where DeepSpeed is told of a skipped step."""
    module, half, cast = models.build(job.kind), "enabled" in job.config.get("fp16", {}), job.config.get("torch_autocast")
    for p in module.parameters() if half else ():
        p.data = p.data.half()
    scaler = Heard(job.config["fp16"]) if "fp16" in job.config else None
    lag = 0 if job.rule == "dp" and world > 1 else 1
    schedulers: list[Any] = []

    def make(named):
        optimizer = ORACLES[job.optimizer](named)
        schedulers.extend([SCHEDULES[job.schedule](optimizer)] if job.schedule else [])
        return optimizer

    def on_step(step: int, optimizer: torch.optim.Optimizer) -> None:
        told = scaler is not None and step - 1 - lag >= 0 and scaler.overflows[step - 1 - lag]
        if step and schedulers and not told:
            schedulers[0].step()

    def loss(call, x):
        def inside(*args, **kwargs):
            if half and job.config["fp16"]["auto_cast"]:
                args = [a.half() for a in args]
            if not cast:
                return call(*args, **kwargs)
            with torch.autocast("cpu", dtype=getattr(torch, cast["dtype"])):
                return call(*args, **kwargs)

        return models.loss(inside, job.kind, x)

    with _outer(job):
        return reference.train(
            module,
            stages,
            threshold(job.rule, world),
            lambda t, m, r: models.batch(job.kind, t, m, r),
            loss,
            make,
            job.steps,
            rounds=job.rounds,
            clip=job.clip,
            flush_after={*job.flush_after, *job.eval_after},
            on_step=on_step,
            scaler=scaler,
            delay_correction=explicit(job.correction),
            grad_dtype=torch.float32 if job.sum_fp32 else None,
        )


def _outer(job: Job) -> Any:
    """For style "outer": the script has an autocast of its own around its whole loop, whose cache outlives forwards."""
    return torch.autocast("cpu", dtype=torch.bfloat16) if job.style == "outer" else nullcontext()


def fp16_on_cpus() -> Any:
    """DeepSpeed refuses fp16 on CPUs without instructions for it; torch computes it all the same."""
    from deepspeed.accelerator import get_accelerator

    return mock.patch.object(type(get_accelerator()), "is_fp16_supported", lambda self: True)


def steps_of(engine: Any, job: Job, rank: int, first: int = 0, last: int | None = None) -> dict[str, Any]:
    """Train step by step, and note what a script can see of scales and overflows."""
    losses, scales, overflows, rates = {}, [], [], []
    for step in range(first, job.steps if last is None else last):
        scales.append(engine.optimizer.cur_scale)
        if job.style == "scaled":  # by hand
            loss = models.loss(engine, job.kind, models.batch(job.kind, step, 0, rank))
            losses[step, 0, rank] = loss.item()
            engine.scale(loss).backward()
            engine.step()
        else:
            train(engine, job, rank, step, step + 1, losses)
        overflows.append(engine.optimizer.overflow)
        rates.append(engine.get_lr()[0])
    return {
        "losses": losses,
        "scales": scales,
        "overflows": overflows,
        "rates": rates,
        "skipped": engine.skipped_steps,
        "mean": engine.cyclic_metrics["loss"] if job.rule is not None else None,
    }


def run_jobs(rank: int, world: int, jobs: list[Job]) -> list[dict[str, Any]]:
    results = []
    with fp16_on_cpus():
        for job in jobs:
            engine = start(job, world)
            with _outer(job):
                seen = steps_of(engine, job, rank)
            state = whole(engine)
            results.append(
                {
                    **seen,
                    "state": pack(state),
                    "class": type(engine).__name__,
                    "stages": engine.cyclic_plan.stages if job.rule is not None else None,
                }
            )
            engine.destroy()
    return results


def compare(jobs: list[Job], results: list[list[dict[str, Any]]], world: int) -> list[reference.Trained]:
    wanted = []
    for at, job in enumerate(jobs):
        ranks = [result[at] for result in results]
        want = oracle(job, ranks[0]["stages"], world)
        wanted.append(want)
        assert {r["class"] for r in ranks} == {"CyclicEngine"}
        assert {place: value for r in ranks for place, value in r["losses"].items()} == want.losses, job
        for result in ranks:
            same(unpack(result["state"]), want.masters)
    return wanted


@pytest.mark.parametrize("world", FP16)
def test_fp16_equals_the_oracle(pool, world):
    """Weights, losses, scales as DeepSpeed shows them, skipped steps and learning rates."""
    jobs = FP16[world]
    results = pool.run(world, run_jobs, jobs, timeout=240)
    for at, (job, want) in enumerate(zip(jobs, compare(jobs, results, world), strict=True)):
        lag = 0 if job.rule == "dp" and world > 1 else 1
        told = [False] * lag + want.overflows[: job.steps - lag]
        dynamic = "loss_scale" not in job.config["fp16"]
        assert want.overflows[0] == any(want.overflows) == dynamic and not all(want.overflows), job
        for result in (r[at] for r in results):
            assert result["overflows"] == told and result["skipped"] == sum(told), job
            shown = result["scales"]
            if job.rule == "dp" and world == 1:  # known in the next forward
                shown, want.scales = shown[2:], want.scales[1:-1]
            assert shown == want.scales, job
            if job.style != "scaled":  # where the engine does not see the loss
                assert 0 < result["mean"] < 100, "the losses that are reported are not scaled"


@pytest.mark.parametrize("world", AUTOCAST)
def test_autocast_equals_the_oracle(pool, world):
    jobs = AUTOCAST[world]
    wanted = compare(jobs, pool.run(world, run_jobs, jobs, timeout=240), world)
    plain = [oracle(Job(**{**vars(job), "config": {}}), models_stages(job, world), world) for job in jobs[:1]]
    assert farthest(plain[0].masters, wanted[0].masters) > 1e-4, "autocast changes something"


def models_stages(job: Job, world: int) -> list[list[str]]:
    """Any partition: without accumulation or clipping by stage it is only compared roughly."""
    names = [n for n, _ in models.build(job.kind).named_parameters()]
    return [names, *([] for _ in range(world - 1))]


# one micro-batch is nan; sums overflow sooner here, where they are divided last, so the scales stay away from that
STOCK = [
    Job("mlp-nan", None, 1, steps=6, optimizer="sgd", clip=0.3, schedule="lambda", config=fp16(8)),
    Job("mlp", None, 2, steps=6, optimizer="sgd", config=fp16(loss_scale=256.0)),
    Job("mlp", None, 1, steps=6, optimizer="sgd", clip=0.3, config=autocast()),
    Job("llama-tied", None, 1, steps=4, optimizer="sgd", config=autocast()),
]


def test_dp_equals_stock_zero3(pool):
    """Within the rounding of sums in 16 bits, in which ZeRO-3 divides first; same scales, skipped steps and learning rates."""
    jobs = [Job(**{**vars(job), "rule": rule}) for job in STOCK for rule in ("dp", None)]
    result = pool.run(2, run_jobs, jobs, timeout=240)[0]
    for job, ours, stock in zip(STOCK, result[::2], result[1::2]):
        assert stock["class"] == "DeepSpeedEngine"
        print(
            f"{job.kind} {list(job.config)}: largest difference {farthest(unpack(ours['state']), unpack(stock['state'])):.2e}, "
            f"scales {stock['scales']} {ours['scales']}"
        )
        same(unpack(ours["state"]), unpack(stock["state"]), 2e-2, 2e-3)
        assert ours["skipped"] == (job.kind == "mlp-nan")
        for key in ("rates", "skipped", "overflows", "scales"):
            assert ours[key] == stock[key], (job, key)


RESUME = [
    Job("mlp", "cdp-v1", 2, steps=7, schedule="lambda", clip=0.3, config=fp16(hysteresis=2)),
    Job("mlp", "dp", 1, steps=6, schedule="lambda", optimizer="sgd", config=fp16()),
]


def resumes(rank: int, world: int, jobs: list[Job], folder: str) -> None:
    """From every early step: saving and loading is bitwise going on, the scale and skipped steps included."""
    with fp16_on_cpus():
        for at, job in enumerate(jobs):
            for cut in (1, 3):
                path = f"{folder}/{at}-{cut}"
                one = start(job, world)
                steps_of(one, job, rank, 0, cut)
                one.save_checkpoint(path)
                seen, state = steps_of(one, job, rank, cut), whole(one)
                one.destroy()
                other = start(job, world)
                other.load_checkpoint(path)
                assert steps_of(other, job, rank, cut) == seen, (job, cut)
                same(whole(other), state)
                saved = other.optimizer.state_dict()
                assert saved["loss_scale"]["cur_scale"] == other.optimizer.loss_scale
                other.destroy()


def test_fp16_resumes_bitwise(pool, tmp_path):
    pool.run(2, resumes, RESUME, str(tmp_path), timeout=240)


def unscaled(rank: int, world: int, more: dict[str, Any]) -> str:
    job = Job("mlp", "cdp-v1", config=fp16(**more))
    with fp16_on_cpus():
        engine = start(job, world)
        loss = models.loss(engine, job.kind, models.batch(job.kind, 0, 0, rank))
        try:
            loss.backward()
            return "nothing"
        except RuntimeError as error:
            return str(error)
        finally:
            engine.destroy()


@pytest.mark.parametrize("more", [{}, {"loss_scale": 384.0}])
def test_a_loss_that_is_not_scaled_is_an_error(pool, more):
    assert "Loss scaling is required" in pool.run(1, unscaled, more)[0]


def scaler_after(rank: int, world: int, rule: str | None, load: str, save: str) -> dict[str, Any]:
    """DeepSpeed's scaler after loading (if told to), and three steps later, when it is saved (if told to)."""
    job = Job("mlp", rule, optimizer="sgd", config=fp16(19, window=5))
    with fp16_on_cpus():
        engine = start(job, world)
        first = 0
        if load:
            path, _ = engine.load_checkpoint(load)
            assert path
            first = engine.global_steps
        loaded = dict(vars(engine.optimizer.loss_scaler))
        steps_of(engine, job, rank, first, first + 3)
        if save:
            engine.save_checkpoint(save)
        end = dict(vars(engine.optimizer.loss_scaler))
        engine.destroy()
    return {"loaded": loaded, "end": end}


def test_the_scaler_goes_to_zero3_and_back(pool, tmp_path):
    from deepspeed_cdp.cli import convert

    ours, theirs, stocks = (str(tmp_path / x) for x in ("ours", "theirs", "stocks"))
    ours_was = pool.run(2, scaler_after, "cdp-v1", "", ours)[0]["end"]
    assert ours_was["cur_scale"] < 2.0**19 and ours_was["cur_iter"] == 3
    assert convert.main(["to-zero3", ours, theirs, "--ranks", "2", "--json"]) == 0
    stock = pool.run(2, scaler_after, None, theirs, stocks)[0]
    assert stock["loaded"] == ours_was
    again = pool.run(2, scaler_after, "dp", stocks, "")[0]
    assert again["loaded"] == stock["end"] and again["loaded"]["cur_iter"] == 6
