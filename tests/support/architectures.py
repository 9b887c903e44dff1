"""Small Hugging Face models of many kinds, made from their configurations: nothing is fetched.

The table of docs/models.md is made from ARCHITECTURES (tests/clients/test_architectures.py).
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import transformers as hf
from torch import Tensor, nn

VOCABULARY, IMAGE_TOKEN = 64, 60  # random tokens are 3 to 49: special ones are others
BATCH, LENGTH = 2, 12

Batch = dict[str, Any]


class Architecture(NamedTuple):
    """A model and its batches.

    Attributes:
        kind: its row in the table of docs.
        build: makes the model, with weights from torch's generator.
        batch: keyword arguments of a training forward whose output has a loss.
        fails: why it does not train under the cyclic engine as it does under stock ZeRO-3; empty if it does.
        alike: all ranks get the same batch, since stock ZeRO-3 cannot train it otherwise.
    """

    kind: str
    build: Callable[[], nn.Module]
    batch: Callable[[torch.Generator], Batch]
    fails: str = ""
    alike: bool = False


ARCHITECTURES: dict[str, Architecture] = {}

LEFT_OUT = {"xLSTM": "its backward fails in plain PyTorch (a tensor is changed in place)"}


def add(kind: str, name: str, *rest: Any, **more: Any) -> None:
    """Put one into the table."""
    assert name not in ARCHITECTURES, name
    ARCHITECTURES[name] = Architecture(kind, *rest, **more)


# ---- batches ------------------------------------------------------------------------------------------------------------
def tokens(g: torch.Generator, *shape: int, low: int = 3, high: int = 50) -> Tensor:
    return torch.randint(low, high, shape or (BATCH, LENGTH), generator=g)


def image(g: torch.Generator, side: int = 16, batch: int = BATCH) -> Tensor:
    return torch.randn(batch, 3, side, side, generator=g)


def sound(g: torch.Generator, samples: int = 800) -> Tensor:
    return torch.randn(BATCH, samples, generator=g)


def same_labels(g: torch.Generator) -> Batch:
    """Labels are the inputs: causal and masked language models."""
    ids = tokens(g)
    return {"input_ids": ids, "labels": ids.clone()}


def classes(g: torch.Generator) -> Batch:
    return {"input_ids": tokens(g), "attention_mask": torch.ones(BATCH, LENGTH, dtype=torch.long), "labels": torch.tensor([0, 1])}


def token_classes(g: torch.Generator) -> Batch:
    return {"input_ids": tokens(g), "labels": tokens(g, low=0, high=2)}


def answers(g: torch.Generator) -> Batch:
    return {"input_ids": tokens(g), "start_positions": torch.tensor([1, 2]), "end_positions": torch.tensor([3, 5])}


def translation(g: torch.Generator) -> Batch:
    return {"input_ids": tokens(g), "labels": tokens(g, BATCH, LENGTH - 3)}


def boxes(g: torch.Generator) -> Tensor:
    corner = torch.randint(0, 20, (BATCH, LENGTH, 2), generator=g)
    return torch.cat([corner, corner + 5], -1)


def documents(g: torch.Generator) -> Batch:
    return {**token_classes(g), "bbox": boxes(g)}


def images(side: int = 16, labels: Callable[[], Tensor] = lambda: torch.tensor([0, 1])) -> Callable[[torch.Generator], Batch]:
    return lambda g: {"pixel_values": image(g, side), "labels": labels()}


def segmented(side: int) -> Callable[[torch.Generator], Batch]:
    return lambda g: {"pixel_values": image(g, side), "labels": torch.randint(0, 2, (BATCH, side, side), generator=g)}


def found_objects(side: int) -> Callable[[torch.Generator], Batch]:
    def batch(g: torch.Generator) -> Batch:
        def one() -> Batch:
            return {"class_labels": torch.tensor([0, 1]), "boxes": torch.rand(2, 4, generator=g) * 0.4 + 0.2}

        return {"pixel_values": image(g, side), "labels": [one() for _ in range(BATCH)]}

    return batch


def masks(side: int) -> Callable[[torch.Generator], Batch]:
    def batch(g: torch.Generator) -> Batch:
        halves = [torch.rand(2, side, side, generator=g).round() for _ in range(BATCH)]
        return {
            "pixel_values": image(g, side),
            "mask_labels": halves,
            "class_labels": [torch.tensor([0, 1]) for _ in range(BATCH)],
        }

    return batch


def spoken(g: torch.Generator) -> Batch:
    return {"input_values": sound(g), "labels": tokens(g, BATCH, 3)}


def captioned(g: torch.Generator) -> Batch:
    return {"input_ids": tokens(g), "pixel_values": image(g), "return_loss": True}


def with_image(count: int, **more: Callable[[torch.Generator], Tensor]) -> Callable[[torch.Generator], Batch]:
    """Text with ``count`` places for an image's patches."""

    def batch(g: torch.Generator) -> Batch:
        ids = tokens(g, BATCH, LENGTH + count)
        ids[:, 2 : 2 + count] = IMAGE_TOKEN
        labels = ids.masked_fill(ids == IMAGE_TOKEN, -100)
        return {"input_ids": ids, "labels": labels, **{name: make(g) for name, make in more.items()}}

    return batch


# ---- configurations -----------------------------------------------------------------------------------------------------
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
DROPS = (
    "hidden_dropout_prob",
    "attention_probs_dropout_prob",
    "hidden_dropout",
    "attention_dropout",
    "activation_dropout",
    "dropout",
    "dropout_rate",
    "classifier_dropout",
    "embd_pdrop",
    "resid_pdrop",
    "attn_pdrop",
    "layerdrop",
    "encoder_layerdrop",
    "decoder_layerdrop",
    "feat_proj_dropout",
    "final_dropout",
    "drop_path_rate",
    "qa_dropout",
    "local_attention_probs_dropout_prob",
    "lsh_attention_probs_dropout_prob",
    "seq_classif_dropout",
)
TINY = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
TEXT = {**TINY, "vocab_size": VOCABULARY, "max_position_embeddings": 64, **SPECIAL}
DECODER = {**TEXT, "num_key_value_heads": 2}
VISION = {**TINY, "image_size": 16, "patch_size": 8, "num_channels": 3}
BART = {
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "max_position_embeddings": 64,
    "decoder_start_token_id": 2,
    **SPECIAL,
}
T5 = {
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 64,
    "num_layers": 2,
    "num_heads": 4,
    "decoder_start_token_id": 0,
}
T5 |= {"pad_token_id": 0, "eos_token_id": 1}
SOUND = {
    **TINY,
    "vocab_size": VOCABULARY,
    "conv_dim": (16, 16),
    "conv_kernel": (8, 4),
    "conv_stride": (8, 4),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 2,
    "mask_time_length": 2,
    "pad_token_id": 0,
    "ctc_loss_reduction": "mean",
}
SWIN = {"image_size": 32, "patch_size": 2, "embed_dim": 16, "depths": [1, 1], "num_heads": [2, 4], "window_size": 4}


def config(name: str, **given: Any) -> Any:
    """A configuration by its class, with every probability of dropping zero."""
    kind = getattr(hf, name + "Config")
    made = kind(**given)
    for drop in DROPS:
        if isinstance(getattr(made, drop, None), float):
            setattr(made, drop, 0.0)
    return made


def model(cls: str, name: str, **given: Any) -> Callable[[], nn.Module]:
    return lambda: getattr(hf, cls)(config(name, **given))


# ---- text decoders ------------------------------------------------------------------------------------------------------
KIND = "text decoder"
GPT = {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "n_inner": 64}
add(KIND, "Llama", model("LlamaForCausalLM", "Llama", **DECODER), same_labels)
add(KIND, "Llama, tied", model("LlamaForCausalLM", "Llama", tie_word_embeddings=True, **DECODER), same_labels)
add(KIND, "GPT-2", model("GPT2LMHeadModel", "GPT2", **GPT, **SPECIAL), same_labels)
add(KIND, "GPT-NeoX", model("GPTNeoXForCausalLM", "GPTNeoX", **TEXT), same_labels)
add(
    KIND,
    "OPT",
    model(
        "OPTForCausalLM",
        "OPT",
        vocab_size=VOCABULARY,
        hidden_size=32,
        ffn_dim=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
        word_embed_proj_dim=16,
        **SPECIAL,
    ),
    same_labels,
)
add(
    KIND,
    "BLOOM",
    model("BloomForCausalLM", "Bloom", vocab_size=VOCABULARY, hidden_size=32, n_layer=2, n_head=4, **SPECIAL),
    same_labels,
)
add(KIND, "Falcon", model("FalconForCausalLM", "Falcon", **TEXT), same_labels)
add(KIND, "Phi", model("PhiForCausalLM", "Phi", **TEXT), same_labels)
add(KIND, "Gemma 2", model("Gemma2ForCausalLM", "Gemma2", head_dim=8, sliding_window=4, **DECODER), same_labels)
add(
    KIND,
    "Gemma 3n",
    model(
        "Gemma3nForCausalLM",
        "Gemma3nText",
        head_dim=8,
        sliding_window=4,
        vocab_size_per_layer_input=VOCABULARY,
        hidden_size_per_layer_input=8,
        altup_num_inputs=2,
        laurel_rank=4,
        num_kv_shared_layers=0,
        activation_sparsity_pattern=[0.0, 0.0],
        layer_types=["sliding_attention", "full_attention"],
        **DECODER,
    ),
    same_labels,
)
add(KIND, "Qwen3", model("Qwen3ForCausalLM", "Qwen3", head_dim=8, **DECODER), same_labels)
add(KIND, "OLMo 2", model("Olmo2ForCausalLM", "Olmo2", **DECODER), same_labels)
add(KIND, "ModernBERT decoder", model("ModernBertDecoderForCausalLM", "ModernBertDecoder", **TEXT), same_labels)

# ---- mixture of experts -------------------------------------------------------------------------------------------------
KIND = "mixture of experts"
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
add(
    KIND,
    "Mixtral",
    model("MixtralForCausalLM", "Mixtral", num_local_experts=4, output_router_logits=True, **DECODER),
    same_labels,
)
add(
    KIND,
    "Qwen2-MoE",
    model("Qwen2MoeForCausalLM", "Qwen2Moe", shared_expert_intermediate_size=32, **EXPERTS, **DECODER),
    same_labels,
)
add(KIND, "OLMoE", model("OlmoeForCausalLM", "Olmoe", **EXPERTS, **DECODER), same_labels)
add(
    KIND,
    "GPT-OSS",
    model("GptOssForCausalLM", "GptOss", head_dim=8, num_local_experts=4, num_experts_per_tok=2, **DECODER),
    same_labels,
)
add(
    KIND,
    "DeepSeek-V3",
    model(
        "DeepseekV3ForCausalLM",
        "DeepseekV3",
        n_routed_experts=4,
        n_shared_experts=1,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=1,
        moe_intermediate_size=16,
        kv_lora_rank=8,
        q_lora_rank=8,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=8,
        **(DECODER | {"num_key_value_heads": 4}),
    ),
    same_labels,
)
add(
    KIND,
    "JetMoE",
    model(
        "JetMoeForCausalLM",
        "JetMoe",
        num_local_experts=4,
        num_experts_per_tok=2,
        kv_channels=8,
        **(DECODER | {"num_key_value_heads": 2}),
    ),
    same_labels,
)
add(
    KIND,
    "NLLB-MoE",
    model("NllbMoeForConditionalGeneration", "NllbMoe", **BART, num_experts=4, encoder_sparse_step=2, decoder_sparse_step=2),
    translation,
    alike=True,
)
add(
    KIND,
    "Switch Transformers",
    model(
        "SwitchTransformersForConditionalGeneration",
        "SwitchTransformers",
        **T5,
        num_sparse_encoder_layers=1,
        num_sparse_decoder_layers=1,
        num_experts=4,
        router_jitter_noise=0.0,
    ),
    translation,
    alike=True,
)

# ---- state spaces and recurrent networks --------------------------------------------------------------------------------
KIND = "state space, recurrent"
MAMBA = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 8, **SPECIAL}
add(KIND, "Mamba", model("MambaForCausalLM", "Mamba", **MAMBA), same_labels)
add(
    KIND, "Mamba 2", model("Mamba2ForCausalLM", "Mamba2", **MAMBA, num_heads=8, head_dim=8, n_groups=2, chunk_size=4), same_labels
)
add(
    KIND,
    "RWKV",
    model("RwkvForCausalLM", "Rwkv", vocab_size=VOCABULARY, context_length=64, hidden_size=32, num_hidden_layers=2, **SPECIAL),
    same_labels,
)
add(
    KIND,
    "RecurrentGemma",
    model(
        "RecurrentGemmaForCausalLM",
        "RecurrentGemma",
        lru_width=32,
        attention_window_size=8,
        block_types=("recurrent", "attention"),
        **DECODER,
    ),
    same_labels,
)
add(
    KIND,
    "Jamba",
    model(
        "JambaForCausalLM",
        "Jamba",
        attn_layer_offset=1,
        attn_layer_period=2,
        expert_layer_offset=1,
        expert_layer_period=2,
        num_experts=2,
        mamba_d_state=8,
        mamba_d_conv=2,
        use_mamba_kernels=False,
        **DECODER,
    ),
    same_labels,
)
add(
    KIND,
    "Zamba 2",
    model(
        "Zamba2ForCausalLM",
        "Zamba2",
        **(DECODER | {"num_hidden_layers": 4, "num_key_value_heads": 4}),
        mamba_d_state=8,
        mamba_ngroups=1,
        n_mamba_heads=8,
        mamba_headdim=8,
        num_mem_blocks=1,
        chunk_size=4,
        use_mamba_kernels=False,
        layers_block_type=["mamba", "hybrid", "mamba", "hybrid"],
    ),
    same_labels,
)
add(
    KIND,
    "Qwen3-Next",
    model(
        "Qwen3NextForCausalLM",
        "Qwen3Next",
        head_dim=8,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        layer_types=["linear_attention", "full_attention"],
        shared_expert_intermediate_size=16,
        **EXPERTS,
        **DECODER,
    ),
    same_labels,
)
add(
    KIND,
    "LFM2",
    model("Lfm2ForCausalLM", "Lfm2", layer_types=["conv", "full_attention"], block_multiple_of=8, **DECODER),
    same_labels,
)

# ---- text encoders ------------------------------------------------------------------------------------------------------
KIND = "text encoder"
add(KIND, "BERT", model("BertForMaskedLM", "Bert", **TEXT), same_labels)
add(KIND, "RoBERTa", model("RobertaForSequenceClassification", "Roberta", **TEXT), classes)
add(
    KIND,
    "DistilBERT",
    model(
        "DistilBertForQuestionAnswering",
        "DistilBert",
        vocab_size=VOCABULARY,
        dim=32,
        hidden_dim=64,
        n_layers=2,
        n_heads=4,
        max_position_embeddings=64,
    ),
    answers,
)
add(KIND, "ALBERT", model("AlbertForMaskedLM", "Albert", embedding_size=16, **TEXT), same_labels)
add(
    KIND,
    "DeBERTa",
    model("DebertaForMaskedLM", "Deberta", relative_attention=True, pos_att_type=["c2p", "p2c"], **TEXT),
    same_labels,
)
add(
    KIND,
    "DeBERTa-v2",
    model(
        "DebertaV2ForTokenClassification",
        "DebertaV2",
        relative_attention=True,
        pos_att_type=["c2p", "p2c"],
        share_att_key=True,
        **TEXT,
    ),
    token_classes,
)
add(KIND, "MPNet", model("MPNetForMaskedLM", "MPNet", **TEXT), same_labels)
add(
    KIND,
    "XLNet",
    model("XLNetLMHeadModel", "XLNet", vocab_size=VOCABULARY, d_model=32, n_layer=2, n_head=4, d_inner=64, **SPECIAL),
    same_labels,
)
add(KIND, "FNet", model("FNetForMaskedLM", "FNet", **TEXT), same_labels)
add(
    KIND,
    "Funnel",
    model(
        "FunnelForMaskedLM",
        "Funnel",
        vocab_size=VOCABULARY,
        d_model=32,
        n_head=4,
        d_head=8,
        d_inner=64,
        block_sizes=[1, 1],
        num_decoder_layers=1,
    ),
    same_labels,
)
add(KIND, "Longformer", model("LongformerForMaskedLM", "Longformer", attention_window=4, **TEXT), same_labels)
add(KIND, "ConvBERT", model("ConvBertForMaskedLM", "ConvBert", embedding_size=16, **TEXT), same_labels)
add(
    KIND,
    "MobileBERT",
    model("MobileBertForMaskedLM", "MobileBert", embedding_size=16, true_hidden_size=32, intra_bottleneck_size=32, **TEXT),
    same_labels,
)
add(KIND, "ModernBERT", model("ModernBertForMaskedLM", "ModernBert", **TEXT), same_labels)
add(
    KIND,
    "CANINE",
    model(
        "CanineForSequenceClassification",
        "Canine",
        **(TEXT | {"max_position_embeddings": 128}),
        num_hash_functions=2,
        num_hash_buckets=32,
        downsampling_rate=2,
        local_transformer_stride=8,
        upsampling_kernel_size=4,
    ),
    lambda g: {"input_ids": tokens(g, BATCH, 32), "labels": torch.tensor([0, 1])},
)
add(KIND, "ESM", model("EsmForMaskedLM", "Esm", mask_token_id=4, position_embedding_type="rotary", **TEXT), same_labels)
add(
    KIND,
    "Perceiver",
    model(
        "PerceiverForMaskedLM",
        "Perceiver",
        vocab_size=VOCABULARY,
        d_model=32,
        d_latents=32,
        num_latents=8,
        num_blocks=2,
        num_self_attends_per_block=2,
        num_self_attention_heads=2,
        num_cross_attention_heads=2,
        qk_channels=16,
        v_channels=32,
        max_position_embeddings=16,
    ),
    lambda g: (lambda i: {"inputs": i, "labels": i})(tokens(g, BATCH, 16)),
)
add(
    KIND,
    "Reformer",
    model(
        "ReformerForMaskedLM",
        "Reformer",
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_attention_heads=2,
        attention_head_size=16,
        feed_forward_size=64,
        attn_layers=["local", "local"],
        axial_pos_embds=False,
        max_position_embeddings=64,
        is_decoder=False,
        local_attn_chunk_length=4,
        **SPECIAL,
    ),
    same_labels,
)

# ---- documents ----------------------------------------------------------------------------------------------------------
KIND = "documents"
add(KIND, "LayoutLM", model("LayoutLMForTokenClassification", "LayoutLM", max_2d_position_embeddings=64, **TEXT), documents)
add(
    KIND,
    "LayoutLMv3",
    model(
        "LayoutLMv3ForTokenClassification",
        "LayoutLMv3",
        max_2d_position_embeddings=64,
        coordinate_size=4,
        shape_size=8,
        input_size=16,
        patch_size=8,
        **TEXT,
    ),
    lambda g: {**documents(g), "pixel_values": image(g)},
)
add(
    KIND,
    "LiLT",
    model(
        "LiltForTokenClassification",
        "Lilt",
        channel_shrink_ratio=4,
        max_2d_position_embeddings=64,
        **(TEXT | {"hidden_size": 48}),
    ),
    documents,
)
add(
    KIND,
    "UDOP",
    model("UdopForConditionalGeneration", "Udop", **T5, max_2d_position_embeddings=64, image_size=16, patch_size=8),
    lambda g: {**translation(g), "bbox": boxes(g).float() / 64, "pixel_values": image(g)},
)
add(KIND, "TAPAS", model("TapasForSequenceClassification", "Tapas", type_vocab_sizes=[3, 8, 8, 2, 8, 8, 2], **TEXT), classes)

# ---- encoder-decoders ---------------------------------------------------------------------------------------------------
KIND = "encoder-decoder"
add(KIND, "T5", model("T5ForConditionalGeneration", "T5", **T5), translation)
add(
    KIND,
    "LongT5",
    model(
        "LongT5ForConditionalGeneration",
        "LongT5",
        **T5,
        encoder_attention_type="transient-global",
        local_radius=3,
        global_block_size=4,
    ),
    translation,
)
add(KIND, "BART", model("BartForConditionalGeneration", "Bart", **BART), translation)
add(KIND, "Pegasus", model("PegasusForConditionalGeneration", "Pegasus", **BART), translation)
add(
    KIND,
    "ProphetNet",
    model(
        "ProphetNetForConditionalGeneration",
        "ProphetNet",
        vocab_size=VOCABULARY,
        hidden_size=32,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        num_encoder_layers=2,
        num_decoder_layers=2,
        num_encoder_attention_heads=4,
        num_decoder_attention_heads=4,
        max_position_embeddings=64,
        ngram=2,
        num_buckets=8,
        relative_max_distance=16,
        disable_ngram_loss=False,
        **SPECIAL,
    ),
    translation,
)
add(
    KIND,
    "BERT to BERT",
    lambda: hf.EncoderDecoderModel(
        hf.EncoderDecoderConfig(
            encoder=config("Bert", **TEXT).to_dict(),
            decoder=config("Bert", is_decoder=True, add_cross_attention=True, **TEXT).to_dict(),
            decoder_start_token_id=1,
            pad_token_id=0,
        )
    ),
    translation,
)

# ---- vision -------------------------------------------------------------------------------------------------------------
KIND = "vision"
add(KIND, "ViT", model("ViTForImageClassification", "ViT", **VISION), images())
add(KIND, "BEiT", model("BeitForImageClassification", "Beit", use_relative_position_bias=True, **VISION), images())
add(KIND, "DINOv2", model("Dinov2ForImageClassification", "Dinov2", **VISION), images())
add(
    KIND,
    "ViT-MAE",
    model(
        "ViTMAEForPreTraining",
        "ViTMAE",
        decoder_hidden_size=16,
        decoder_num_hidden_layers=1,
        decoder_num_attention_heads=2,
        decoder_intermediate_size=32,
        mask_ratio=0.5,
        **VISION,
    ),
    lambda g: {"pixel_values": image(g)},
)
add(KIND, "Swin", model("SwinForImageClassification", "Swin", **SWIN), images(32))
add(KIND, "Swin v2", model("Swinv2ForImageClassification", "Swinv2", **SWIN), images(32))
add(
    KIND,
    "ConvNeXt",
    model("ConvNextForImageClassification", "ConvNext", hidden_sizes=[16, 32], depths=[1, 2], num_stages=2),
    images(16),
)
add(
    KIND,
    "ResNet",
    model("ResNetForImageClassification", "ResNet", embedding_size=16, hidden_sizes=[16, 32], depths=[1, 2]),
    images(32),
)
add(
    KIND,
    "MobileNetV2",
    model("MobileNetV2ForImageClassification", "MobileNetV2", depth_multiplier=0.25, image_size=32),
    images(32),
)
add(
    KIND,
    "PoolFormer",
    model(
        "PoolFormerForImageClassification",
        "PoolFormer",
        hidden_sizes=[16, 32],
        depths=[1, 1],
        num_encoder_blocks=2,
        patch_sizes=[3, 3],
        strides=[2, 2],
        padding=[1, 1],
    ),
    images(16),
)
add(
    KIND,
    "VideoMAE",
    model("VideoMAEForVideoClassification", "VideoMAE", num_frames=4, tubelet_size=2, **VISION),
    lambda g: {"pixel_values": torch.randn(BATCH, 4, 3, 16, 16, generator=g), "labels": torch.tensor([0, 1])},
)

KIND = "segmentation, detection, depth"
add(
    KIND,
    "SegFormer",
    model(
        "SegformerForSemanticSegmentation",
        "Segformer",
        num_encoder_blocks=2,
        depths=[1, 1],
        sr_ratios=[2, 1],
        hidden_sizes=[16, 32],
        patch_sizes=[3, 3],
        strides=[2, 2],
        num_attention_heads=[1, 2],
        decoder_hidden_size=16,
    ),
    segmented(16),
)
add(
    KIND,
    "DPT",
    model(
        "DPTForSemanticSegmentation",
        "DPT",
        **(VISION | {"num_hidden_layers": 4, "image_size": 32}),
        backbone_out_indices=[0, 1, 2, 3],
        neck_hidden_sizes=[8, 8, 16, 16],
        fusion_hidden_size=16,
        num_labels=2,
        use_batch_norm_in_fusion_residual=True,
    ),
    segmented(32),
)
RESNET = {"embedding_size": 8, "hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 1, 1], "layer_type": "basic"}
DETR = {
    "d_model": 32,
    "encoder_layers": 1,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "num_labels": 2,
}
add(
    KIND,
    "DETR",
    lambda: hf.DetrForObjectDetection(
        config(
            "Detr",
            use_timm_backbone=False,
            use_pretrained_backbone=False,
            backbone=None,
            backbone_config=config("ResNet", out_features=["stage4"], **RESNET),
            num_queries=5,
            auxiliary_loss=True,
            **DETR,
        )
    ),
    found_objects(64),
)
add(
    KIND,
    "YOLOS",
    model("YolosForObjectDetection", "Yolos", **(VISION | {"image_size": [32, 32]}), num_detection_tokens=4, num_labels=2),
    found_objects(32),
)
add(
    KIND,
    "Mask2Former",
    lambda: hf.Mask2FormerForUniversalSegmentation(
        config(
            "Mask2Former",
            backbone_config=config(
                "Swin",
                **(SWIN | {"depths": [1, 1, 1, 1], "num_heads": [1, 2, 4, 4], "embed_dim": 8, "image_size": 64}),
                out_features=["stage1", "stage2", "stage3", "stage4"],
            ),
            feature_size=32,
            mask_feature_size=32,
            hidden_dim=32,
            encoder_feedforward_dim=32,
            dim_feedforward=64,
            encoder_layers=1,
            decoder_layers=2,
            num_attention_heads=4,
            num_queries=5,
            num_labels=2,
            train_num_points=64,
        )
    ),
    masks(64),
)

# ---- speech -------------------------------------------------------------------------------------------------------------
KIND = "speech and sound"
STABLE = {"do_stable_layer_norm": True, "feat_extract_norm": "layer"}
add(KIND, "wav2vec2", model("Wav2Vec2ForCTC", "Wav2Vec2", **SOUND), spoken)
add(KIND, "wav2vec2, stable layer norm", model("Wav2Vec2ForCTC", "Wav2Vec2", **SOUND, **STABLE), spoken)
add(
    KIND,
    "wav2vec2, adapter",
    model("Wav2Vec2ForCTC", "Wav2Vec2", **SOUND, add_adapter=True, num_adapter_layers=1, output_hidden_size=32),
    spoken,
)
add(KIND, "HuBERT", model("HubertForCTC", "Hubert", **SOUND), spoken)
add(KIND, "HuBERT, stable layer norm", model("HubertForCTC", "Hubert", **SOUND, **STABLE), spoken)
add(KIND, "WavLM", model("WavLMForCTC", "WavLM", **SOUND), spoken)
add(KIND, "SEW", model("SEWForCTC", "SEW", squeeze_factor=2, **SOUND), spoken)
add(
    KIND,
    "wav2vec2-Conformer",
    model("Wav2Vec2ConformerForCTC", "Wav2Vec2Conformer", **SOUND, conv_depthwise_kernel_size=5),
    spoken,
)
add(
    KIND,
    "wav2vec2-BERT",
    model(
        "Wav2Vec2BertForCTC",
        "Wav2Vec2Bert",
        **{k: v for k, v in SOUND.items() if not k.startswith(("conv", "num_"))},
        num_hidden_layers=2,
        num_attention_heads=4,
        feature_projection_input_dim=16,
        conv_depthwise_kernel_size=5,
    ),
    lambda g: {"input_features": torch.randn(BATCH, 20, 16, generator=g), "labels": tokens(g, BATCH, 3)},
)
WHISPER = {**BART, "num_mel_bins": 16, "max_source_positions": 20, "max_target_positions": 32}
add(
    KIND,
    "Whisper",
    model("WhisperForConditionalGeneration", "Whisper", **WHISPER),
    lambda g: {"input_features": torch.randn(BATCH, 16, 40, generator=g), "labels": tokens(g)},
)
add(
    KIND,
    "Speech2Text",
    model(
        "Speech2TextForConditionalGeneration",
        "Speech2Text",
        **(
            WHISPER
            | {
                "max_source_positions": 64,
                "conv_channels": 16,
                "num_conv_layers": 2,
                "conv_kernel_sizes": [3, 3],
                "input_feat_per_channel": 16,
            }
        ),
    ),
    lambda g: {"input_features": torch.randn(BATCH, 40, 16, generator=g), "labels": tokens(g)},
)
add(
    KIND,
    "AST",
    model(
        "ASTForAudioClassification",
        "AST",
        **TINY,
        patch_size=8,
        frequency_stride=8,
        time_stride=8,
        max_length=32,
        num_mel_bins=16,
    ),
    lambda g: {"input_values": torch.randn(BATCH, 32, 16, generator=g), "labels": torch.tensor([0, 1])},
)
add(
    KIND,
    "Moonshine",
    model(
        "MoonshineForConditionalGeneration",
        "Moonshine",
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        encoder_num_hidden_layers=2,
        decoder_num_hidden_layers=2,
        encoder_num_attention_heads=4,
        decoder_num_attention_heads=4,
        decoder_start_token_id=1,
        **SPECIAL,
    ),
    lambda g: {"input_values": sound(g, 4000), "labels": tokens(g)},
)
add(
    KIND,
    "SpeechT5",
    model(
        "SpeechT5ForSpeechToText",
        "SpeechT5",
        **{k: v for k, v in SOUND.items() if k not in TINY},
        hidden_size=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        decoder_start_token_id=2,
        max_speech_positions=64,
        max_text_positions=64,
    ),
    spoken,
)

# ---- several modalities -------------------------------------------------------------------------------------------------
KIND = "several modalities"


def both(name: str, **more: Any) -> dict[str, Any]:
    """Text and vision configurations of a contrastive model."""
    vision = {**VISION, "projection_dim": 16, **more}
    return {"text_config": {**TEXT, "projection_dim": 16, **more}, "vision_config": vision, "projection_dim": 16}


add(KIND, "CLIP", model("CLIPModel", "CLIP", **both("CLIP")), captioned)
add(KIND, "SigLIP", model("SiglipModel", "Siglip", text_config={**TEXT, "projection_size": 32}, vision_config=VISION), captioned)
add(
    KIND,
    "BLIP",
    model(
        "BlipForConditionalGeneration",
        "Blip",
        text_config={**TEXT, "encoder_hidden_size": 32, "bos_token_id": 1, "sep_token_id": 2},
        vision_config=VISION,
        projection_dim=16,
    ),
    lambda g: {**same_labels(g), "pixel_values": image(g)},
)
add(
    KIND,
    "BLIP-2",
    lambda: hf.Blip2ForConditionalGeneration(
        hf.Blip2Config(
            vision_config={**VISION, "attention_dropout": 0.0},
            qformer_config={**TEXT, "encoder_hidden_size": 32, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
            text_config={
                "model_type": "opt",
                "vocab_size": VOCABULARY,
                "hidden_size": 32,
                "ffn_dim": 64,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "max_position_embeddings": 64,
                "word_embed_proj_dim": 32,
                "dropout": 0.0,
                **SPECIAL,
            },
            num_query_tokens=4,
            image_token_id=IMAGE_TOKEN,
        )
    ),
    with_image(4, pixel_values=image),
)
add(
    KIND,
    "LLaVA",
    lambda: hf.LlavaForConditionalGeneration(
        hf.LlavaConfig(
            vision_config={"model_type": "clip_vision_model", **VISION, "projection_dim": 16},
            text_config={"model_type": "llama", **DECODER},
            image_token_index=IMAGE_TOKEN,
            image_seq_length=4,
            vision_feature_layer=-2,
        )
    ),
    with_image(4, pixel_values=image),
)


def qwen_vl(name: str, **vision: Any) -> Callable[[], nn.Module]:
    """With a video and image tower that takes patches of 4 x 4 pixels in pairs of frames."""
    sections = {"rope_type": "default", "type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4}
    tower = {"depth": 2, "num_heads": 4, "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2, **vision}
    words = {**DECODER, "head_dim": 8, "rope_scaling": sections, "rope_parameters": sections}
    special = {"image_token_id": IMAGE_TOKEN, "video_token_id": 61, "vision_start_token_id": 62, "vision_end_token_id": 63}
    return lambda: getattr(hf, name + "ForConditionalGeneration")(
        getattr(hf, name + "Config")(text_config=words, vision_config=tower, **special)
    )


def patches(g: torch.Generator) -> Batch:
    """One image of 4 x 4 patches a sample: 4 tokens."""
    many = torch.randn(BATCH * 16, 3 * 2 * 4 * 4, generator=g)
    batch = with_image(4)(g)
    kinds = (batch["input_ids"] == IMAGE_TOKEN).long()
    return {**batch, "mm_token_type_ids": kinds, "pixel_values": many, "image_grid_thw": torch.tensor([[1, 4, 4]] * BATCH)}


add(KIND, "Qwen2-VL", qwen_vl("Qwen2VL", embed_dim=32, hidden_size=32, mlp_ratio=2), patches)
add(
    KIND,
    "Qwen2.5-VL",
    qwen_vl("Qwen2_5_VL", hidden_size=32, out_hidden_size=32, intermediate_size=64, window_size=16, fullatt_block_indexes=[1]),
    patches,
)
add(
    KIND,
    "Qwen3-VL",
    qwen_vl(
        "Qwen3VL",
        hidden_size=32,
        out_hidden_size=32,
        intermediate_size=64,
        num_position_embeddings=16,
        deepstack_visual_indexes=[0],
    ),
    patches,
)
add(
    KIND,
    "Idefics 3",
    lambda: hf.Idefics3ForConditionalGeneration(
        hf.Idefics3Config(
            vision_config={**VISION},
            text_config={"model_type": "llama", **DECODER},
            scale_factor=2,
            image_token_id=IMAGE_TOKEN,
            pad_token_id=0,
        )
    ),
    with_image(1, pixel_values=lambda g: image(g)[:, None]),
)
add(
    KIND,
    "Gemma 3",
    lambda: hf.Gemma3ForConditionalGeneration(
        hf.Gemma3Config(
            vision_config={"model_type": "siglip_vision_model", **VISION},
            text_config={"head_dim": 8, "sliding_window": 4, **DECODER},
            mm_tokens_per_image=4,
            image_token_id=IMAGE_TOKEN,
            image_token_index=IMAGE_TOKEN,
        )
    ),
    with_image(
        4,
        pixel_values=image,
        token_type_ids=lambda g: torch.zeros(BATCH, LENGTH + 4, dtype=torch.long).index_fill(1, torch.arange(2, 6), 1),
    ),
)
add(
    KIND,
    "Llama 3.2 Vision",
    lambda: hf.MllamaForConditionalGeneration(
        hf.MllamaConfig(
            vision_config={
                "hidden_size": 32,
                "intermediate_size": 64,
                "num_hidden_layers": 2,
                "num_global_layers": 1,
                "attention_heads": 4,
                "image_size": 16,
                "patch_size": 8,
                "max_num_tiles": 1,
                "supported_aspect_ratios": [[1, 1]],
                "intermediate_layers_indices": [0],
                "vision_output_dim": 64,
            },
            text_config={**DECODER, "cross_attention_layers": [1], "rope_scaling": {"rope_type": "default"}},
            image_token_index=IMAGE_TOKEN,
        )
    ),
    lambda g: {
        **same_labels(g),
        "pixel_values": image(g)[:, None, None],
        "aspect_ratio_ids": torch.ones(BATCH, 1, dtype=torch.long),
        "aspect_ratio_mask": torch.ones(BATCH, 1, 1, dtype=torch.long),
        "cross_attention_mask": torch.ones(BATCH, LENGTH, 1, 1, dtype=torch.long),
    },
)
add(
    KIND,
    "GIT",
    model("GitForCausalLM", "Git", vision_config=VISION, **TEXT),
    lambda g: {**same_labels(g), "pixel_values": image(g)},
)
add(
    KIND,
    "ViLT",
    model("ViltForQuestionAnswering", "Vilt", **TEXT, image_size=16, patch_size=8, num_labels=3),
    lambda g: {
        "input_ids": tokens(g),
        "pixel_values": image(g),
        "pixel_mask": torch.ones(BATCH, 16, 16, dtype=torch.long),
        "labels": torch.rand(BATCH, 3, generator=g),
    },
)
add(
    KIND,
    "LXMERT",
    model(
        "LxmertForQuestionAnswering", "Lxmert", **TEXT, num_qa_labels=2, l_layers=1, x_layers=1, r_layers=1, visual_feat_dim=16
    ),
    lambda g: {
        "input_ids": tokens(g),
        "visual_feats": torch.randn(BATCH, 4, 16, generator=g),
        "visual_pos": torch.rand(BATCH, 4, 4, generator=g),
        "labels": torch.tensor([0, 1]),
    },
)
add(
    KIND,
    "CLAP",
    model(
        "ClapModel",
        "Clap",
        text_config={**TEXT, "projection_dim": 16, "projection_hidden_size": 16},
        audio_config={
            "spec_size": 32,
            "num_mel_bins": 8,
            "patch_size": 4,
            "patch_stride": [4, 4],
            "window_size": 4,
            "patch_embeds_hidden_size": 16,
            "hidden_size": 32,
            "depths": [1, 1],
            "num_attention_heads": [2, 4],
            "projection_dim": 16,
            "projection_hidden_size": 16,
            "drop_path_rate": 0.0,
            "enable_fusion": False,
        },
        projection_dim=16,
    ),
    lambda g: {"input_ids": tokens(g), "input_features": torch.randn(BATCH, 1, 128, 8, generator=g), "return_loss": True},
)
add(
    KIND,
    "ViT to GPT-2",
    lambda: hf.VisionEncoderDecoderModel(
        hf.VisionEncoderDecoderConfig(
            encoder=config("ViT", **VISION).to_dict(),
            decoder=config("GPT2", **GPT, add_cross_attention=True, **SPECIAL).to_dict(),
            decoder_start_token_id=1,
            pad_token_id=0,
        )
    ),
    lambda g: {"pixel_values": image(g), "labels": tokens(g)},
)
add(
    KIND,
    "Pix2Struct",
    model(
        "Pix2StructForConditionalGeneration",
        "Pix2Struct",
        vision_config={
            "hidden_size": 32,
            "patch_embed_hidden_size": 24,
            "d_ff": 64,
            "d_kv": 8,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "seq_len": 16,
            "dropout_rate": 0.0,
        },
        text_config={
            "vocab_size": VOCABULARY,
            "hidden_size": 32,
            "d_kv": 8,
            "d_ff": 64,
            "num_layers": 2,
            "num_heads": 4,
            "decoder_start_token_id": 0,
            "dropout_rate": 0.0,
        },
    ),
    lambda g: {
        "flattened_patches": torch.cat(
            [torch.arange(1, 9).view(1, 8, 1).expand(BATCH, 8, 2).float(), torch.randn(BATCH, 8, 24, generator=g)], -1
        ),
        "labels": tokens(g),
    },
)
add(
    KIND,
    "Qwen2-Audio",
    lambda: hf.Qwen2AudioForConditionalGeneration(
        hf.Qwen2AudioConfig(
            audio_config={
                "num_mel_bins": 16,
                "encoder_layers": 2,
                "encoder_attention_heads": 4,
                "encoder_ffn_dim": 64,
                "d_model": 32,
                "max_source_positions": 20,
            },
            text_config={"model_type": "qwen2", **DECODER},
            audio_token_index=IMAGE_TOKEN,
        )
    ),
    with_image(
        10,
        input_features=lambda g: torch.randn(BATCH, 16, 40, generator=g),
        feature_attention_mask=lambda g: torch.ones(BATCH, 40, dtype=torch.long),
    ),
)

# ---- time series --------------------------------------------------------------------------------------------------------
KIND = "time series, decisions"
add(
    KIND,
    "PatchTST",
    model(
        "PatchTSTForPrediction",
        "PatchTST",
        num_input_channels=2,
        context_length=32,
        patch_length=8,
        patch_stride=8,
        d_model=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        ffn_dim=64,
        prediction_length=4,
        ff_dropout=0.0,
        positional_dropout=0.0,
        path_dropout=0.0,
        head_dropout=0.0,
    ),
    lambda g: {"past_values": torch.randn(BATCH, 32, 2, generator=g), "future_values": torch.randn(BATCH, 4, 2, generator=g)},
)
add(
    KIND,
    "Informer",
    model(
        "InformerForPrediction",
        "Informer",
        prediction_length=4,
        context_length=12,
        lags_sequence=[1, 2],
        num_time_features=1,
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
    ),
    lambda g: {
        "past_values": torch.randn(BATCH, 14, generator=g),
        "past_time_features": torch.randn(BATCH, 14, 1, generator=g),
        "past_observed_mask": torch.ones(BATCH, 14),
        "future_values": torch.randn(BATCH, 4, generator=g),
        "future_time_features": torch.randn(BATCH, 4, 1, generator=g),
    },
)
