"""Mistakes in the config, the script or the model: one sentence says what is wrong and what to do, and doing it helps."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from support import models
from support.engine_work import Job, start, told, train


def built(kind: type[nn.Module]) -> nn.Module:
    torch.manual_seed(7)
    return kind()


# what is added to a good config -> words that the one sentence must hold
CONFIGS: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    ({"cyclic": {"rul": "cdp-v2"}}, ("cyclic.rul is 'cdp-v2'", "no such key", "did you mean cyclic.rule?")),
    ({"cyclic": {"rule": "cdp-v3"}}, ("cyclic.rule is 'cdp-v3'", '"cdp-v2"', "use")),
    ({"cyclic": {"rule": 4}}, ("cyclic.rule is 4", "from 0 to 3 with 2 ranks", "choose")),
    ({"cyclic": {"timeout_seconds": 0}}, ("cyclic.timeout_seconds is 0", "from 0.01", "use 600")),
    ({"cyclic": {"units": ["blocks.0", "blocks.9"]}}, ("cyclic.units has 'blocks.9'", "no module of this model")),
    ({"cyclic": {"units": ["blocks"]}}, ("cyclic.units has 'blocks'", "never called", "list its children")),
    ({"cyclic": {"units": ["blocks.0"]}}, ("1 units for 2 ranks", "list more modules in cyclic.units")),
    ({"cyclic": {"partition_method": "type:Conv"}}, ("cyclic.partition_method is 'type:Conv'", "matches no unit", "Sequential")),
    ({"fp16": {"enabled": True}}, ("fp16.enabled is true under cyclic.rule cdp-v2", "use bf16")),
    ({"zero_optimization": {"stage": 2, "zero_quantized_gradients": True}}, ("zero_quantized_gradients is true", "remove it")),
    ({"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}}, ("offload_param is cpu", "remove it")),
    ({"zero_optimization": {"stage": 3, "zero_quantized_weights": True}}, ("zero_quantized_weights is true", "remove it")),
    ({"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 2}}, ("zero_hpz_partition_size is 2", "remove it")),
    ({"zero_optimization": {"stage": 3, "zenflow": {}}}, ("zero_optimization.zenflow is set", "remove it")),
    ({"hybrid_engine": {"enabled": True}}, ("hybrid_engine.enabled is true", "remove it")),
    ({"optimizer": None, "zero_optimization": {"stage": 2}}, ("optimizer is missing", "set the stage to 3")),
]


def configs(rank: int, world: int) -> list[str]:
    texts = []
    for extra, _ in CONFIGS:
        rest = {k: v for k, v in extra.items() if k not in ("cyclic", "optimizer")}
        job = Job("mlp", config=rest, cyclic=extra.get("cyclic", {}), optimizer="none" if "optimizer" in extra else "adamw")
        texts.append(told(lambda job=job: start(job, world)))
    two = models.MLP(blocks=1)
    two.blocks[0] = nn.Linear(8, 8)
    texts.append(told(lambda: start(Job(), world, two)))
    engine = start(Job("mlp"), world)  # after all these, a good one works
    train(engine, Job("mlp"), rank, 0, 2)
    engine.destroy()
    return texts


def test_wrong_settings(pool):
    wanted = [words for _, words in CONFIGS] + [("has 1 units for 2 ranks", "use at most 1 ranks, or a model with more layers")]
    for texts in pool.run(2, configs, timeout=180):
        assert len(texts) == len(wanted)
        for text, words in zip(texts, wanted):
            assert text.startswith("ValueError: ") and "\n" not in text, (words, text)
            for word in words:
                assert word in text, (word, text)


def wrong_order(rank: int, world: int) -> dict[str, str]:
    """Each mistake on one rank's engine of its own, all ranks making it alike."""
    texts: dict[str, str] = {}

    def note(name: str, job: Job, mistake: Callable[[Any, Callable[[], torch.Tensor]], Any]) -> None:
        engine = start(job, world)
        train(engine, job, rank, 0, 1)
        texts[name] = told(lambda: mistake(engine, lambda: models.loss(engine, "mlp", models.batch("mlp", 1, 0, rank))))
        torch.distributed.barrier()  # a rank that has failed hangs up on destroy: let the others make the mistake first
        engine.destroy()

    one, two = Job("mlp", timeout=10.0), Job("mlp", rounds=2, timeout=10.0)
    planned = Job("mlp", timeout=10.0, cyclic={"any_order": False})
    note("two forwards", planned, lambda e, forward: (forward(), forward()))
    note("second backward", one, lambda e, forward: [e.backward(x) for x in [forward()] for _ in range(2)])

    def retained(e: Any, forward: Callable[[], torch.Tensor]) -> None:
        loss = forward()
        e.backward(loss, retain_graph=True)
        e.backward(loss)

    note("retained", one, retained)

    note("many numbers", one, lambda e, forward: e.backward(forward().expand(2)))
    note("one number in a row", one, lambda e, forward: (e.backward(forward().reshape(1)), e.step()))

    def too_many(e: Any, forward: Callable[[], torch.Tensor]) -> None:
        for _ in range(3):
            e.backward(forward())

    note("too many", two, too_many)
    note("step first", one, lambda e, forward: (forward(), e.step()))
    note("flush inside", one, lambda e, forward: (forward(), e.flush()))

    def half(e: Any, forward: Callable[[], torch.Tensor]) -> None:
        e.backward(forward())
        e.flush()

    note("flush in a step", two, half)

    def no_graph(e: Any, forward: Callable[[], torch.Tensor]) -> None:
        e.eval()
        e.backward(forward())

    note("backward in eval", one, no_graph)
    return texts


def test_calls_in_the_wrong_order(pool):
    wanted = {
        "two forwards": ("engine.forward() came again before the backward", "in step 1; set", '{"any_order": true}'),
        "second backward": ("a backward of step 1", "each forward has one backward", "call engine.backward() once"),
        "retained": ("step 1", "each forward has one backward"),
        "many numbers": ("the loss of step 1 is a tensor of shape (2,)", "of one number, such as loss.mean()"),
        "one number in a row": ("no error",),  # as stock ZeRO-3 takes it
        "too many": ("gradient_accumulation_steps is 2", "micro-batch 3", "call engine.step()"),
        "step first": ("engine.step() of step 1", "call engine.backward(loss) first"),
        "flush inside": ("engine.flush()", "step 1", "call engine.backward(loss) first"),
        "flush in a step": ("engine.flush() came in the middle of step 1", "1 of 2 micro-batches", "call engine.step() first"),
        "backward in eval": ("eval() mode", "engine.train()"),
    }
    for texts in pool.run(2, wrong_order, timeout=180):
        for name, words in wanted.items():
            for word in words:
                assert word in texts[name], (name, texts[name])


class Breaks(models.MLP):
    """Raises in the forward of its last block, or in the backward of block 2, where told to."""

    where = ""

    def forward(self, x):
        for i, block in enumerate(self.blocks):
            if self.where == "forward" and i == 5:
                raise RuntimeError("broken on purpose\nwith more lines")
            x = x + block(x)
            if self.where == "backward" and i == 2:
                x.register_hook(self.refuse)
        return x

    def refuse(self, grad: torch.Tensor) -> None:
        raise RuntimeError("broken on purpose")


def calls_after_a_caught_failure(rank: int, world: int) -> dict[str, dict[str, str]]:
    """What each further call says. All ranks fail in the same step."""
    results: dict[str, dict[str, str]] = {}
    for where in ("forward", "backward", "loss.backward", "message"):
        engine = start(Job("mlp", timeout=4.0), world, built(Breaks))
        train(engine, Job("mlp"), rank, 0, 1)
        engine.module.where = where.removeprefix("loss.")
        batch = models.batch("mlp", 1, 0, rank)

        def fail(engine=engine, where=where, batch=batch) -> None:
            loss = models.loss(engine, "mlp", batch)
            if where == "loss.backward":
                loss.backward()
            if where == "message":
                engine._runtime.executor.messages.push = broken_push
                loss.backward()  # an error in a hook, of which no method of the engine knows
            engine.backward(loss)

        texts = {"first": told(fail)}
        engine.module.where = ""
        spent = torch.zeros((), requires_grad=True) * 1
        texts["forward"] = told(lambda engine=engine, batch=batch: models.loss(engine, "mlp", batch))
        if where != "loss.backward":
            texts["backward"] = told(lambda engine=engine, spent=spent: engine.backward(spent))
        texts["step"] = told(engine.step)
        texts["flush"] = told(engine.flush)
        texts["state"] = told(engine.module_state_dict)
        texts["save"] = told(lambda engine=engine: engine.save_checkpoint("nowhere"))
        torch.distributed.barrier()
        engine.destroy()
        results[where] = texts
    return results


def broken_push(*_: Any) -> None:
    raise RuntimeError("broken on purpose")


@pytest.mark.slow
def test_calls_after_a_failure_tell_of_it(pool):
    """No advice that cannot help: they name the first error, and say to restart."""
    for rank, results in enumerate(pool.run(2, calls_after_a_caught_failure, timeout=180)):
        assert results.keys() == {"forward", "backward", "loss.backward", "message"}
        for where, texts in results.items():
            first = texts.pop("first").split("\n")[0]
            own = first == "RuntimeError: broken on purpose"
            assert own or rank == 1 and first.startswith("HandoffError: rank 1, step 1"), (
                "rank 1 waits for rank 0 before it fails"
            )
            if own and where == "loss.backward":  # autograd tells nobody that this backward raised an error
                assert "if that raised an error, restart from the last checkpoint" in texts["forward"]
                assert "restart from the last checkpoint if it raised an error" in texts["step"]
                continue
            for call, text in texts.items():
                told_before = f"ValueError: this engine failed in step 1 with {first}; it cannot go on"
                assert text.startswith(told_before) and text.endswith("restart from the last checkpoint"), (where, call, text)
