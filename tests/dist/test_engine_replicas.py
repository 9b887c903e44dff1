"""ZeRO stages 0, 1 and 2 with the cyclic engine, in real processes: against the oracle, stock DeepSpeed, and stage 3."""

import os

import pytest
import torch

from support import models
from support.collectives import several
from support.engine_work import Job, evaluate, farthest, oracle, pack, run_jobs, same, start, train, unpack, whole


def at(stage: int | None, kind: str = "mlp", rule="cdp-v2", rounds: int = 1, **more) -> Job:
    """A job under this ZeRO stage; None for a config without the block."""
    return Job(kind, rule, rounds, config={"zero_optimization": {} if stage is None else {"stage": stage}}, **more)


COVER: dict[int, list[Job]] = {
    1: [
        at(2, "mlp", "cdp-v2", 2, clip=0.3, optimizer="groups", schedule="lambda"),
        at(0, "llama-tied", "cdp-v1", clip=0.5, bf16=True),
    ],
    2: [
        at(2, clip=0.3, optimizer="sgd", schedule="lambda", flush_after=(2,), correction="predict"),
        at(1, "mlp", "cdp-v1", 2, optimizer="muon", style="accelerate", correction="extrapolate"),
        at(0, "rooted", 2, 2, clip=0.2, schedule="warmup", style="accelerate", eval_after=(1, 3), correction="predict"),
        at(None, "conv", "cdp-v1", clip=0.3, optimizer="groups", schedule="lambda", eval_after=(2,)),
        at(2, "routed", "cdp-v2", 2, optimizer="sgd", style="loss"),
        at(1, "llama", "dp", 2, clip=0.3, optimizer="callable"),
        at(0, "llama-tied", "cdp-v2", 2, clip=0.5, bf16=True, style="accelerate", correction="predict"),
        at(1, "llama-tied", "cdp-v1", 2, clip=0.5, bf16=True, sum_fp32=True, optimizer="groups"),
    ],
    3: [
        at(0, "mlp", "dp", clip=0.3, optimizer="muon", style="loss", flush_after=(3,)),
        at(2, "rooted", "cdp-v1", 2, clip=0.2, optimizer="groups", schedule="lambda", flush_after=(1,)),
        at(1, "conv", "cdp-v2", 2, clip=0.3, optimizer="sgd", schedule="warmup", eval_after=(1,), correction="extrapolate"),
        at(2, "routed", 3, optimizer="callable", steps=8, correction="predict"),
        at(1, "llama-tied", 3, 2, clip=0.3, optimizer="groups"),
    ],
    4: [
        at(1, "mlp", 4, clip=0.3, optimizer="groups", schedule="lambda", barriers=True),
        at(2, "mlp", "dp", 2, optimizer="sgd", style="accelerate", barriers=True),
        at(1, "routed", "cdp-v2", optimizer="sgd", clip=0.3, barriers=True),
        at(2, "llama", "cdp-v1", 2, clip=0.3, barriers=True),
        at(0, "llama-tied", "cdp-v2", clip=0.3, optimizer="sgd", eval_after=(2,), flush_after=(4,)),
        at(2, "rooted", "cdp-v2", optimizer="groups", correction="predict"),
        at(1, "mlp", 1, correction="predict"),
    ],
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("world", [pytest.param(n, marks=pytest.mark.slow) if n == 4 else n for n in COVER])
def test_every_weight_and_loss_equals_the_oracle(pool, world):
    """Bitwise, as under stage 3."""
    jobs = COVER[world]
    results = pool.run(world, run_jobs, jobs, timeout=400)
    for i, job in enumerate(jobs):
        ranks = [result[i] for result in results]
        want = oracle(job, ranks[0]["stages"], world)
        assert {r["class"] for r in ranks} == {"CyclicEngine"}
        assert {place: value for r in ranks for place, value in r["losses"].items()} == want.losses, job
        for rank, result in enumerate(ranks):
            same(unpack(result["state"]), {**want.masters, **(want.buffers[rank] if job.kind == "conv" else {})})
        assert ranks[-1]["norm"] == pytest.approx(want.norms[-1], rel=1e-5), job
        if job.kind == "routed":
            assert len({tuple(r["visited"]) for r in ranks}) > 1, "the test needs ranks that use different experts"


STOCK = [
    ("mlp", 1, 1, False),
    ("mlp", 2, 2, False),
    ("mlp", 0, 1, False),
    ("llama-tied", 2, 1, False),
    ("llama-tied", 1, 2, True),
]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("world", [2, 3])
def test_dp_equals_stock_deepspeed(pool, world):
    """ZeRO-0, 1 and 2: fp32 to 1e-5 (it divides before it sums), bf16 to its own rounding of sums; other rules differ from it."""
    jobs = [
        at(stage, kind, rule, rounds, clip=0.3, bf16=bf16, optimizer="sgd", schedule="lambda")
        for kind, stage, rounds, bf16 in STOCK
        for rule in ("dp", None)
    ]
    jobs += [at(1, rule=rule, clip=0.3, optimizer="sgd", schedule="lambda") for rule in ("cdp-v1", "cdp-v2")]
    results = pool.run(world, run_jobs, jobs, timeout=400)
    states = [unpack(x["state"]) for x in results[0]]
    for i, (*_, bf16) in enumerate(STOCK):
        ours, stock = states[2 * i : 2 * i + 2]
        assert (results[0][2 * i]["class"], results[0][2 * i + 1]["class"]) == ("CyclicEngine", "DeepSpeedEngine")
        same(ours, {k: v for k, v in stock.items() if k in ours}, *((2e-2, 2e-3) if bf16 else (1e-5, 1e-7)))
    plain = states[0]
    for other in states[-2:]:
        assert farthest(plain, other) > 1e-4


def test_bytes_are_two_psi_and_there_is_no_collective(pool):
    """F: all but the owned stage, once a step, whatever the rounds; G: every round; O: the owned stage. B: nothing."""
    jobs = [
        at(1, clip=0.3, schedule="lambda"),
        at(2, "llama-tied", "cdp-v1", 2, clip=0.3),
        at(0, "llama", "dp", clip=0.3),
        at(1, "routed", 3),
        at(2, "llama-tied", "cdp-v2", 2),
    ]
    for rank, results in enumerate(pool.run(3, several, jobs, timeout=240)):
        for job, result in zip(jobs, results):
            assert result["seen"] == [] and result["counter"] == 0, (job, rank, result["seen"])
            assert result["bytes"] == result["form"] and result["form"]["F + B"] > 0, (job, rank)
            assert any(name.startswith("c10d.") for name in result["caught"]), "the harness sees what is there"


def crosses(rank: int, world: int, kinds: list[dict], folder: str) -> None:
    """What one stage saves the other continues bit by bit, as the one that saved does."""
    for number, given in enumerate(kinds):
        for first, then in ((3, 1), (2, 3), (0, 2)):
            path = os.path.join(folder, f"{number}-{first}-{then}")
            one = start(at(first, **given), world)
            job = at(then, **given)
            train(one, job, rank, 0, 3)
            assert one.save_checkpoint(path)
            losses, norm = train(one, job, rank, 3, 6), one.get_global_grad_norm()
            want = whole(one)
            one.destroy()
            other = start(job, world)
            train(other, job, rank, 0, 2)  # what it did before loading leaves no trace
            assert other.load_checkpoint(path)[0] and other.global_steps == 3
            assert other._runtime.plan.replicated == (then < 3)
            assert train(other, job, rank, 3, 6) == losses and other.get_global_grad_norm() == norm
            same(whole(other), want)
            other.destroy()


@pytest.mark.slow
def test_checkpoints_cross_between_stages(pool, tmp_path):
    kinds = [
        dict(kind="mlp", rule="cdp-v2", rounds=2, optimizer="sgd", schedule="lambda", clip=0.3),
        dict(kind="llama-tied", rule="cdp-v1", optimizer="groups", bf16=True),
    ]
    pool.run(3, crosses, kinds, str(tmp_path), timeout=300)


def surface(rank: int, world: int, jobs: list[Job]) -> list[bytes]:
    """A script that reads and writes parameters in all of DeepSpeed's ways while it trains."""
    import deepspeed
    from deepspeed.utils import (
        safe_get_full_fp32_param,
        safe_get_local_fp32_param,
        safe_set_full_fp32_param,
        safe_set_local_fp32_param,
    )

    states = []
    for job in jobs:
        engine = start(job, world)
        parameters = dict(engine.module.named_parameters())
        first, last = list(parameters)[0], list(parameters)[-1]
        train(engine, job, rank, 0, 2)
        with deepspeed.zero.GatheredParameters([parameters[first]], modifier_rank=0):
            if rank == 0:
                parameters[first].data.mul_(0.5)
        train(engine, job, rank, 2, 3)
        value = safe_get_full_fp32_param(parameters[last])
        assert safe_set_full_fp32_param(parameters[last], value * 2) is not False
        train(engine, job, rank, 3, 4)
        part = safe_get_local_fp32_param(parameters[first])
        safe_set_local_fp32_param(parameters[first], part + 0.01)
        evaluate(engine, job, rank, rank + 1)
        seen = {n: p.detach().clone() for n, p in parameters.items()} if engine._runtime.plan.replicated else None
        train(engine, job, rank, 4, 6)
        state = whole(engine)
        if seen is not None:
            plain = engine.module.state_dict()
            assert all(torch.equal(plain[n], state[n]) for n in state) and any(not torch.equal(seen[n], state[n]) for n in seen)
            assert all(torch.equal(p, state[n]) for n, p in parameters.items())
        states.append(pack(state))
        engine.destroy()
    return states


@pytest.mark.parametrize("rule", ["cdp-v2", "cdp-v1", "dp"])
def test_parameters_are_read_and_written_as_under_stage_3(pool, rule):
    jobs = [at(3, rule=rule, optimizer="sgd"), at(1, rule=rule, optimizer="sgd")]
    for states in pool.run(3, surface, jobs, timeout=120):
        want, got = map(unpack, states)
        same(got, want)


def mistakes(rank: int, world: int) -> list[str]:
    """What a script gets that trains without a flush and then uses the module by itself."""
    job, texts = at(1), []
    job.cyclic["any_order"] = False
    engine = start(job, world)
    train(engine, job, rank, 0, 2)
    for call in (
        lambda: engine.module(models.batch("mlp", 0, 0, 0)),
        lambda: engine.module.load_state_dict(engine.module_state_dict()),
    ):
        with pytest.raises(ValueError) as error:
            call()
        texts.append(str(error.value))
    train(engine, job, rank, 2, 4)
    models.loss(engine, "mlp", models.batch("mlp", 4, 0, rank))
    torch.distributed.barrier()
    engine.destroy()  # in the middle of a step
    for call in (lambda: engine.module(models.batch("mlp", 0, 0, 0)), lambda: engine.module.state_dict()):
        with pytest.raises(ValueError) as error:
            call()
        texts.append(str(error.value))
    states = []
    for look in (whole, lambda engine: None):
        ended = start(job, world)
        train(ended, job, rank, 0, 2)
        look(ended)
        ended.destroy()
        states.append(ended.module.state_dict())
    same(*states)
    return texts


def test_parameters_of_several_versions_are_not_used_in_silence(pool):
    for texts in pool.run(2, mistakes):
        assert "the module itself was called, while its parameters are of several versions; call the engine" in texts[0]
        assert "would not reach the masters" in texts[1]
        assert all("used after its engine failed, or was destroyed in the middle of a step" in text for text in texts[2:])
