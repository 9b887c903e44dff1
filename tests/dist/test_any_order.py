"""``cyclic.any_order``: scripts whose forwards and backwards no plan can follow."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from support import models
from support.engine_work import Job, oracle, pack, same, start, told, unpack, whole
from support.sampling import some


class Parts(models.MLP):
    """Its first block alone, on demand."""

    def forward(self, x, part=False):
        return self.blocks[0](x) if part else super().forward(x)


class Wanders(models.MLP):
    """The order of use depends on the data."""

    def forward(self, x):
        for at in range(6) if x.sum().item() > 0 else (5, 1, 3, 1):
            x = x + self.blocks[at](x)
        return x


Call = Callable[..., torch.Tensor]


def two_forwards(call: Call, x: torch.Tensor, module: nn.Module | None) -> torch.Tensor:
    return call(x).pow(2).mean() + call(-x).pow(2).mean()


def dropped(call: Call, x: torch.Tensor, module: nn.Module | None) -> torch.Tensor:
    call(x)
    return call(x).pow(2).mean()


def reference_between(call: Call, x: torch.Tensor, module: nn.Module | None) -> torch.Tensor:
    y = call(x)
    with torch.no_grad():
        other = (module or call)(2 * x)
    return (y - other).pow(2).mean()


def reference_by_engine(call: Call, x: torch.Tensor, module: nn.Module | None) -> torch.Tensor:
    y = call(x)
    with torch.no_grad():
        other = call(2 * x)
    return (y - other).pow(2).mean()


def part(call: Call, x: torch.Tensor, module: Any) -> torch.Tensor:
    """A submodule is called directly."""
    y = call(x)
    return (y - (module.blocks[0](x) if module else call(x, part=True))).pow(2).mean()


def once(call: Call, x: torch.Tensor, module: nn.Module | None) -> torch.Tensor:
    return call(x).pow(2).mean()


def later(script: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def strays(call: Call, x: torch.Tensor, module: nn.Module | None) -> torch.Tensor:
        return (once if models.is_first(x) or x.sum() < 0 else script)(call, x, module)

    return strays


def parts_only(call: Call, x: torch.Tensor, module: Any) -> torch.Tensor:
    """The engine's forward is never called."""
    if module is None:
        return call(x).pow(2).mean()
    for block in module.blocks:
        x = x + block(x)
    return x.pow(2).mean()


SCRIPTS: list[tuple[Callable[..., torch.Tensor], type[nn.Module], bool | str]] = [
    (two_forwards, Parts, "auto"),
    (dropped, Parts, "auto"),
    (reference_between, Parts, "auto"),
    (reference_by_engine, Parts, "auto"),
    (part, Parts, "auto"),
    (once, Wanders, True),
    (once, Parts, True),
    (parts_only, Parts, True),
    (parts_only, Parts, "auto"),
    (once, models.Strays, "auto"),
    (once, models.Strays, "auto"),
    (once, models.Strays, "auto"),
    (later(two_forwards), Parts, "auto"),
    (later(dropped), models.Strays, "auto"),
    (later(reference_between), Parts, "auto"),
    (later(reference_by_engine), models.Strays, "auto"),
    (later(part), Parts, "auto"),
]


def built(kind: type[nn.Module]) -> nn.Module:
    torch.manual_seed(7)
    return kind()


def job_of(at: int, stage: int, world: int) -> Job:
    """Scripts differ in what else they have: rounds, rule, clipping, a flush, a warm-up."""
    config = {"zero_optimization": {"stage": stage}} if stage < 3 else {}
    rule = ("cdp-v2", "cdp-v1", "dp")[at % 3]
    cyclic = {"any_order": SCRIPTS[at][2]}
    flush = (2,) if at in (0, 5) else ()
    if at == 6:
        cyclic["warmup_steps"] = 2
    return Job(
        "mlp", rule, 1 + at % 2, clip=0.3 * (at % 2), correction="predict", flush_after=flush, config=config, cyclic=cyclic
    )


def trained(rank: int, world: int, stage: int, which: list[int]) -> list[tuple]:
    results = []
    for at in which:
        (script, kind, _), job = SCRIPTS[at], job_of(at, stage, world)
        engine, losses = start(job, world, built(kind)), {}
        for step in range(job.steps):
            for m in range(job.rounds):
                loss = script(engine, models.batch("mlp", step, m, rank), engine.module)
                losses[step, m, rank] = loss.item()
                engine.backward(loss)
                engine.step()
            if step in job.flush_after:
                engine.flush()
        results.append((pack(whole(engine)), engine.cyclic_plan.stages, losses, engine._runtime._told_of_holding))
        engine.destroy()
    return results


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("world", "stage"), [(2, 3), (3, 3), (2, 2)])
def test_they_train_as_the_oracle_does(pool, world, stage, monkeypatch):
    """Bitwise."""
    which = some(range(len(SCRIPTS)), 3, "scripts")
    results = pool.run(world, trained, stage, which, timeout=400)
    for place, at in enumerate(which):
        script, kind, setting = SCRIPTS[at]
        job, strays = job_of(at, stage, world), kind is models.Strays or script.__name__ == "strays"
        strays |= script is parts_only and setting == "auto"
        monkeypatch.setattr(models, "loss", lambda call, _, x, script=script: script(call, x, None))
        of_ranks = [ranks[place] for ranks in results]
        want = oracle(job, of_ranks[0][1], world, build=lambda kind=kind: built(kind))
        for state, *_ in of_ranks:
            same(unpack(state), want.masters)
        assert any(told_of_holding for *_, told_of_holding in of_ranks) == strays, (kind, script)
        assert {step: loss for _, _, losses, _ in of_ranks for step, loss in losses.items()} == want.losses, script


def between_rounds(rank: int, world: int) -> bool:
    job = Job("mlp", "cdp-v2", 2, cyclic={"any_order": True})
    engine = start(job, world)
    for step in range(3):
        for m in range(2):
            x = models.batch("mlp", step, m, rank)
            y = engine(x)
            engine.backward(y.pow(2).mean())
            with torch.no_grad():
                same({"y": engine.module(x) if m else engine(x)}, {"y": y})  # of the version that the micro-batch has read
                penalty = sum(float(p.sum()) for p in engine.module.parameters())
            assert penalty == penalty
            engine.step()
    engine.destroy()
    return True


def test_a_forward_without_gradients_may_come_between_micro_batches(pool):
    assert all(pool.run(2, between_rounds, timeout=60))


def ended(engine: Any, run: Callable[[], None]) -> str:
    """The script's error, once all ranks have theirs: a rank that has failed hangs up on destroy."""
    text = told(run)
    dist.barrier()
    engine.destroy()
    return text


def late(rank: int, world: int, setting: bool | str, first: int) -> str:
    engine = start(Job("mlp", timeout=10.0, cyclic={"any_order": setting}), world, built(Parts))

    def run() -> None:
        for step in range(3):
            loss = (two_forwards if step >= first else once)(engine, models.batch("mlp", step, 0, rank), None)
            engine.backward(loss)
            engine.step()

    return ended(engine, run)


@pytest.mark.parametrize("first", [0, 1])
def test_if_the_setting_forbids_it_it_is_told(pool, first):
    for text in pool.run(2, late, False, first, timeout=60):
        assert text.startswith(
            "ValueError: engine.forward() came again before the backward of the forward before it (if that raised an error, "
            f'restart from the last checkpoint) in step {first}; set "cyclic": {{"any_order": true}}'
        )


def penalty(rank: int, world: int, stage: int, any_order: bool) -> str:
    config = {"zero_optimization": {"stage": stage}} if stage < 3 else {}
    engine = start(Job("mlp", timeout=4.0, config=config, cyclic={"any_order": any_order}), world, built(Parts))

    def run() -> None:
        for step in range(3):
            loss = engine(models.batch("mlp", step, 0, rank), part=stage < 3).pow(2).mean()
            if step:
                loss = loss + 0.1 * sum(p.pow(2).sum() for p in engine.module.parameters())
            assert torch.isfinite(loss) or not any_order
            engine.backward(loss)
            engine.step()

    return ended(engine, run)


@pytest.mark.parametrize("stage", [2, 3])
def test_parameters_read_outside_their_module_in_a_later_step(pool, stage):
    name = r"parameter 'blocks\..*'"
    expected = f"{name} got a gradient in step 1, but" if stage < 3 else f"the loss of step 1 is nan, and reads {name} after"
    for text in pool.run(2, penalty, stage, False, timeout=60):  # a rank may wait for one that has failed
        assert re.match(f"ValueError: {expected}|HandoffError: ", text), text
    assert pool.run(2, penalty, stage, True, timeout=60) == ["no error"] * 2


def fused(rank: int, world: int) -> str:
    return told(lambda: start(Job("mlp", cyclic={"any_order": True, "gradient_accumulation_fusion": True}), world))


def test_gradients_are_not_added_inside_products(pool):
    for text in pool.run(2, fused, timeout=60):
        assert text.startswith("ValueError: cyclic.gradient_accumulation_fusion is true, but with cyclic.any_order"), text


def gathers(rank: int, world: int, rounds: int, correction: str = "none") -> str:
    engine = start(Job("mlp", "cdp-v2", rounds, timeout=10.0, correction=correction), world)

    def run() -> None:
        for step in range(4):
            for m in range(rounds):
                loss = engine(models.batch("mlp", step, m, rank)).pow(2).mean()
                dist.all_reduce(loss.detach().clone())
                engine.backward(loss)
                engine.step()

    return ended(engine, run)


@pytest.mark.parametrize(("world", "rounds", "correction"), [(2, 1, "none"), (3, 1, "predict"), (3, 2, "predict")])
def test_a_collective_between_forward_and_backward_works(pool, world, rounds, correction):
    assert pool.run(world, gathers, rounds, correction, timeout=60) == ["no error"] * world


def strayed(rank: int, world: int, stage: int) -> tuple[str, ...]:
    """What comes wrong behind a micro-batch that has left the plan, and what others must not notice."""
    config = {"zero_optimization": {"stage": stage}} if stage < 3 else {}
    engine, said = start(Job("mlp", timeout=10.0, config=config), world, built(Parts)), []
    x = models.batch("mlp", 0, 0, rank)
    for step in range(3):
        engine(x) if step == 2 else None  # dropped
        loss = engine(x).pow(2).mean()
        if step == 2:
            said.append(told(lambda: engine.module.state_dict()) if stage == 3 else "")
        engine.backward(loss, retain_graph=step == 2)
        if step < 2:
            engine.step()
    said.append(told(lambda: (loss.backward(), engine.step())))
    dist.barrier()
    engine.destroy()
    return tuple(said)


@pytest.mark.parametrize("stage", [3, 2])
def test_behind_a_micro_batch_that_left_the_plan_mistakes_are_told(pool, stage):
    for state, late in pool.run(2, strayed, stage, timeout=60):
        assert stage < 3 or "the module itself was asked for its state_dict()" in state, state
        assert re.search(
            "parameter '.*' got a gradient in step 2 after the micro-batch's backward was over|without a training forward|"
            "is the second over a graph",
            late,
        ), late


def alone(rank: int, world: int) -> str:
    """In the first micro-batch, and in the first after an evaluation, one rank drops a forward."""
    engine, x = start(Job("mlp", timeout=10.0), world, built(Parts)), models.batch("mlp", 0, 0, rank)

    def run() -> None:
        for step in range(4):
            engine(x) if (step, rank) in ((0, 0), (2, 1)) else None
            engine.backward(engine(x).pow(2).mean())
            engine.step()
            if step == 1:
                engine.flush()

    return ended(engine, run)


def test_one_rank_may_leave_the_plan_in_the_first_micro_batch(pool):
    assert pool.run(2, alone, timeout=60) == ["no error"] * 2


class Turned(models.MLP):
    """The engine's forward follows no plan that is made from the order of definition."""

    def forward(self, x):
        for block in reversed(self.blocks):
            x = x + block(x)
        return x


def parts_first(rank: int, world: int) -> list[Any]:
    """Parts of the model alone train it for two steps, and then the engine, with and without the setting."""
    states = []
    for setting in ("auto", True):
        engine = start(Job("mlp", timeout=10.0, cyclic={"any_order": setting}), world, built(Turned))
        for step in range(4):
            x = models.batch("mlp", step, 0, rank)
            engine.backward((parts_only if step < 2 else once)(engine, x, engine.module))
            engine.step()
        states.append(pack(whole(engine)))
        engine.destroy()
    return states


def test_parts_alone_may_train_before_the_engine_does(pool):
    """No plan is made anew then."""
    for states in pool.run(2, parts_first, timeout=60):
        same(*map(unpack, states))


def gathers_behind(rank: int, world: int) -> str:
    engine = start(Job("mlp", "cdp-v2", 2, timeout=10.0, correction="predict"), world)

    def run() -> None:
        for step in range(4):
            for m in range(2):
                engine.backward(engine(models.batch("mlp", step, m, rank)).pow(2).mean())
                if m:
                    dist.barrier()
                engine.step()

    return ended(engine, run)


def test_a_collective_between_the_last_backward_and_the_step_works(pool):
    assert pool.run(3, gathers_behind, timeout=60) == ["no error"] * 3
