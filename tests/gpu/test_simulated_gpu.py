"""The simulator on a GPU: a captured step does what an eager one does. Needs no DeepSpeed:

python -m pytest --noconftest tests/gpu/test_simulated_gpu.py
"""

import os
import sys
from pathlib import Path

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]

import pytest  # noqa: E402
import torch  # noqa: E402

from deepspeed_cdp.analysis.learning_simulator import Simulator, stages_of  # noqa: E402
from support.models import build  # noqa: E402

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU is here")
STEPS = 12


def batches(kind: str, step: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    shape = (4, 3, 6, 6) if kind == "conv" else (5, 8)
    return [torch.randn(*shape, generator=generator).cuda() for _ in range(3)]


def plain(module, batch):
    return module(batch).square().mean()


def mixed(module, batch):
    with torch.autocast("cuda", torch.bfloat16):
        return module(batch).float().square().mean()


def train(
    kind: str, rule: str, loss, warmup: int, clip: float, capture: bool, correction: str = "none"
) -> tuple[list, dict[str, torch.Tensor]]:
    """Losses by step and rank, and the weights at the end."""
    module = build(kind).cuda()
    ring = Simulator(
        module,
        torch.optim.AdamW(module.parameters(), lr=0.01),
        stages_of(module, 3),
        rule,
        warmup_steps=warmup,
        clip=clip,
        delay_correction=correction,
    )
    captured, delayed, losses = None, None, []
    for step in range(STEPS):
        for group in ring.optimizer.param_groups:  # a captured step must obey it
            group["lr"] = 0.01 / (1 + step)
        if capture and step >= 3 and delayed != ring.delayed:
            captured, delayed = ring.captured(batches(kind, 0), loss), ring.delayed
        losses.append((captured or (lambda some: ring.step(some, loss)))(batches(kind, step)).tolist())
    return losses, module.state_dict()


@pytest.mark.parametrize("kind, loss", [("mlp", plain), ("mlp", mixed), ("conv", plain)])
@pytest.mark.parametrize(
    "rule, warmup, clip, correction",
    [
        ("dp", 0, 0.0, "none"),
        ("cdp-v1", 0, 0.1, "none"),
        ("cdp-v1", 0, 0.1, "extrapolate"),
        ("cdp-v2", 0, 0.1, "predict"),
        ("cdp-v2", 6, 0.0, "predict"),
    ],
)
def test_captured_equals_eager(kind, loss, rule, warmup, clip, correction) -> None:
    torch.backends.cudnn.deterministic = True
    eager, weights = train(kind, rule, loss, warmup, clip, False, correction)
    captured, again = train(kind, rule, loss, warmup, clip, True, correction)
    for a, b in zip(eager, captured):
        assert a == pytest.approx(b, rel=1e-5, abs=1e-7)
    for name, value in weights.items():
        assert torch.allclose(value.float(), again[name].float(), rtol=1e-4, atol=1e-6), name


def test_rules_differ_when_captured() -> None:
    dp, v2 = (train("mlp", rule, plain, 0, 0.0, True)[0] for rule in ("dp", "cdp-v2"))
    assert dp[0] == v2[0] and dp[-1] != v2[-1]


def test_a_captured_step_of_the_warm_up_ends_with_it() -> None:
    module = build("mlp").cuda()
    ring = Simulator(module, torch.optim.SGD(module.parameters(), lr=0.01), stages_of(module, 3), "cdp-v2", warmup_steps=4)
    for step in range(3):
        ring.step(batches("mlp", step), plain)
    captured = ring.captured(batches("mlp", 0), plain)
    captured(batches("mlp", 3))
    with pytest.raises(ValueError, match="the warm-up is over"):
        captured(batches("mlp", 4))
