"""The activation tracker: exact bytes of models that can be counted by hand, the same on every device; Figure 4's trend."""

import pytest
import torch
from torch import nn

from deepspeed_cdp.analysis.activations import Profile, track
from deepspeed_cdp.model.discover import Example

WIDTH, BATCH = 32, 4


def chain(blocks: int = 4, device: str = "meta") -> tuple[nn.Module, Example]:
    with torch.device(device):
        module = nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.Tanh()) for _ in range(blocks)])
        return module, Example((torch.zeros(BATCH, WIDTH),))


@pytest.mark.parametrize("device", ["meta", "cpu"])
@pytest.mark.parametrize("blocks", [1, 4])
def test_a_chain_keeps_its_input_and_each_output_once(device, blocks):
    profile = track(*chain(blocks, device))
    # each Linear keeps its input, each Tanh its output, which is the next one's input: blocks + 1 tensors
    assert profile.peak == (blocks + 1) * BATCH * WIDTH * 4
    assert profile.live[-1] == 0 and profile.times[0] == 0 and profile.times[-1] == 1
    assert 0 < profile.turn < 1


def test_meta_and_cpu_agree_at_every_time():
    a, b = track(*chain(3, "meta")), track(*chain(3, "cpu"))
    assert (a.times, a.live) == (b.times, b.live)


def test_parameters_are_not_activations_and_gradients_are_dropped():
    module, example = chain(2, "cpu")
    module.eval()
    track(module, example)
    assert not module.training and all(p.grad is None for p in module.parameters())


def test_checkpointing_keeps_less():
    from torch.utils.checkpoint import checkpoint

    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = chain(8, "cpu")[0]

        def forward(self, x):
            for block in (self.inner[:4], self.inner[4:]):
                x = checkpoint(block, x, use_reentrant=False)
            return x

    with_it = track(Checkpointed(), Example((torch.zeros(BATCH, WIDTH, requires_grad=True),)))
    without = track(*chain(8, "cpu"))
    assert with_it.peak < without.peak


def test_workers_in_turn_follow_the_papers_formula_for_a_triangle():
    n = 64
    # equal steps up and down: the paper's stages
    times = tuple(i / (2 * n) for i in range(2 * n + 1))
    live = tuple([*range(1, n + 1), *range(n - 1, -1, -1), 0])
    profile = Profile(times, live, 0.5, "flops", 1.0)
    for workers in (2, 4, 8, 32):
        assert max(profile.in_turn(workers)) == pytest.approx(workers * n / 2, rel=0.02)
        assert profile.together(workers) == workers * n
    assert profile.saving(1) == 0 and profile.saving(32) == pytest.approx(0.5, abs=0.01)


def test_a_flat_curve_saves_nothing():
    profile = Profile((0.0, 1.0), (10, 10), 0.5, "flops", 1.0)
    assert profile.saving(8) == 0


def image(name: str, size: int = 64, attention: str | None = None):
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, f"{name}Config")(image_size=size, num_labels=10)
    if attention:
        config._attn_implementation = attention
    with torch.device("meta"):
        module = getattr(transformers, f"{name}ForImageClassification")(config)
        x = torch.zeros(1, 3, size, size)
    return track(module, Example(kwargs={"pixel_values": x}))


def test_figure_4_the_saving_grows_with_workers_and_a_vit_saves_more_than_a_resnet():
    resnet, vit = image("ResNet", 224), image("ViT", 224)
    for profile in (resnet, vit):
        savings = [profile.saving(n) for n in (1, 2, 4, 8, 32)]
        assert savings == sorted(savings) and savings[0] == 0
    assert resnet.saving(32) == pytest.approx(0.30, abs=0.02)  # the paper: 30 percent
    assert 0.42 <= vit.saving(32) <= 0.51  # the paper: 42 percent; half is the most there is
    assert image("ViT", 224, "eager").peak > vit.peak  # which keeps attention's weights


@pytest.mark.parametrize("clock", ["minutes", "seconds"])
def test_a_clock_that_cannot_be_is_refused(clock):
    with pytest.raises(ValueError, match="clock is"):
        track(*chain(), clock=clock)


def test_an_output_without_gradient_is_refused():
    class Constant(nn.Module):
        def __init__(self):
            super().__init__()
            self.unused = nn.Parameter(torch.zeros(1))

        def forward(self, x):
            return x * 2

    with pytest.raises(ValueError, match="depends on its parameters"):
        track(Constant(), Example((torch.zeros(2),)))
