"""The models that benchmarks train, and the options that change how."""

from contextlib import nullcontext

import pytest
import torch
import transformers.masking_utils as masking
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig

from benchmarks import engines, models, samples
from benchmarks.sizes import IMAGES

CPU = torch.device("cpu")


def loss_and_gradients(host_sync: bool) -> tuple[torch.Tensor, list[torch.Tensor]]:
    model = models.build(models.configuration("llama-tiny", host_sync), CPU, torch.float32)
    batch = torch.randint(0, 256, (2, 40), generator=torch.Generator().manual_seed(0))
    loss = model(input_ids=batch, labels=batch).loss
    loss.backward()
    return loss, [p.grad for p in model.parameters()]


def test_no_host_sync_is_the_same_computation_without_the_search(monkeypatch):
    searches, attention = [], []
    real_search, real_attention = masking.find_packed_sequence_indices, torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(masking, "find_packed_sequence_indices", lambda p: searches.append(1) or real_search(p))

    def spy(*args, **kwargs):
        attention.append((kwargs["attn_mask"], kwargs["is_causal"]))
        return real_attention(*args, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", spy)

    loss, gradients = loss_and_gradients(True)
    assert len(searches) == 1, "Hugging Face searches no longer, so --no-host-sync has nothing to skip"
    unmasked_loss, unmasked_gradients = loss_and_gradients(False)
    assert len(searches) == 1
    assert attention == [(None, True)] * 8, "four layers each: the kernel without a mask"
    assert torch.equal(loss, unmasked_loss)
    assert all(torch.equal(a, b) for a, b in zip(gradients, unmasked_gradients))


@pytest.mark.parametrize(
    "name, host_sync, reads",
    [("llama-tiny", False, False), ("llama-tiny", True, True), ("vit-tiny", False, False), ("vit-tiny", True, False)],
)
def test_no_host_sync_reads_no_value(monkeypatch, name, host_sync, reads):
    model = models.build(models.configuration(name, host_sync), CPU, torch.float32)
    (batch,) = samples.alike(model.config, 2, 8, 1, 0, CPU)

    def told(self):
        raise RuntimeError("the host wants to know a tensor's value")

    with monkeypatch.context() as patched, pytest.raises(RuntimeError, match="wants to know") if reads else nullcontext():
        for name in ("item", "tolist", "__bool__", "__int__", "__float__", "nonzero"):
            patched.setattr(torch.Tensor, name, told)
        model(**batch).loss.backward()


def test_a_vision_transformer_reads_whole_images(monkeypatch):
    """Attention is not causal, with either name of the attention function, and a sample differs by rank and by place."""
    attention, real = [], torch.nn.functional.scaled_dot_product_attention

    def spy(query, *args, **kwargs):
        attention.append((query.shape, kwargs["attn_mask"], kwargs["is_causal"]))
        return real(query, *args, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", spy)
    losses = []
    for host_sync in (True, False):
        model = models.build(models.configuration("vit-tiny", host_sync), CPU, torch.float32)
        a, b = samples.alike(model.config, 2, 0, 2, 0, CPU)
        assert a["pixel_values"].shape == (2, 3, 32, 32) and a["labels"].shape == (2,)
        assert not torch.equal(a["pixel_values"], b["pixel_values"])
        (other,) = samples.alike(model.config, 2, 0, 1, 1, CPU)
        assert not torch.equal(a["pixel_values"], other["pixel_values"])
        losses.append(model(**a).loss)
    assert torch.equal(*losses)
    assert attention == [((2, 4, IMAGES["vit-tiny"].tokens, 16), None, False)] * 8


def test_operations_are_six_per_parameter_of_a_product_and_token():
    config = models.configuration("llama-tiny")
    model = models.build(config, torch.device("meta"), torch.float32)
    products = sum(m.weight.numel() for m in model.modules() if isinstance(m, torch.nn.Linear))
    assert models.flops_per_token(config, 100) == 6 * products + 6 * 4 * 64 * 100
    sizes = {
        name: models.build(models.configuration(name), torch.device("meta"), torch.float32).num_parameters() / 1e9
        for name in ("llama-1.3b", "llama-3b", "llama-8b", "vit-200")
    }
    want = {"llama-1.3b": 1.3, "llama-3b": 3.1, "llama-8b": 8.0, "vit-200": 0.4}
    assert {n: round(s, 1) for n, s in sizes.items()} == want


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", ["vit-tiny", "vit-200"])
def test_operations_of_an_image_are_those_that_torch_counts(name):
    """But for the first layer's gradient by its input, which the pixels do not need."""
    model = models.build(models.configuration(name), torch.device("meta"), torch.float32)
    (batch,), tokens = samples.alike(model.config, 2, 0, 1, 0, torch.device("meta")), IMAGES[name].tokens
    model.set_attn_implementation("eager")  # torch counts fused attention's recomputation, too
    with FlopCounterMode(display=False) as counter:
        model(**batch).loss.backward()
    unneeded = 2 * (tokens - 1) * model.vit.embeddings.patch_embeddings.projection.weight.numel()
    assert counter.get_total_flops() == 2 * (round(models.flops_per_token(model.config, tokens) * tokens) - unneeded)


def test_what_zero3_leaves_behind_is_undone():
    config = LlamaConfig()
    torch.nn.functional.linear = lambda *args: None
    try:
        with pytest.raises(AssertionError, match="the engine before has left its own"):
            engines.make(engines.Job("compute", config, CPU, torch.float32, 1))
    finally:
        engines.restore()
    assert torch.nn.functional.linear is engines.LINEAR
    assert torch.nn.functional.linear(torch.ones(1, 2), torch.ones(3, 2)).tolist() == [[2, 2, 2]]
