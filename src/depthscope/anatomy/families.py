"""The families that are known: for each the classes of its blocks, and the names that these give their parts.

What no name says is in `odd_families`: a function there takes the layout, and returns the anatomy of a block.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn

from depthscope import walking
from depthscope.anatomy import layout
from depthscope.anatomy import odd_families as odd
from depthscope.anatomy.layout import Attention, Layout
from depthscope.anatomy.structure import BlockAnatomy, Family
from depthscope.stations import CROSS


def always(_model: nn.Module) -> bool:
    """Causal, whatever the configuration says."""
    return True


def never(_model: nn.Module) -> bool:
    """Not causal, whatever the configuration says."""
    return False


def as_blocks_say(_model: nn.Module) -> None:
    """Every block says it of itself, or an argument of each call does."""


def causal_unless_configured(model: nn.Module) -> bool | None:
    """Causal, but for a configuration, of the model or a part of it, that asks for attention both ways (embedding
    models): None, to be tried."""
    configs = {id(config): config for module in walking.modules(model) if (config := getattr(module, "config", None))}
    hints = [
        getattr(config, "is_causal", True) is False or bool(getattr(config, "use_bidirectional_attention", False))
        for config in configs.values()
    ]
    return None if any(hints) else True


# Text, both ways.
BERT = Layout(
    "post",
    "attention.output.LayerNorm output.LayerNorm",
    Attention("attention.self", "query key value", "attention.output.dense", "num_attention_heads"),
    "intermediate output.dense",
    cross=("crossattention.self", "crossattention.output.LayerNorm", "crossattention.output.dense"),
    causal="is_decoder",
)
# Whether BLIP's text tower is causal, and whether it attends to the image, is a matter of each call of its model. Its
# blocks say neither: a remedy is careful then, and what stands after a cross-attention that may not run is hidden.
BLIP_TEXT = replace(BERT, causal="")
BLIP_READER = replace(BLIP_TEXT, hides=" ".join((*CROSS, "ffn_input")))
DEBERTA = Layout(
    "post",
    BERT.norms,
    # Those of the content. Scores have terms of positions too; values and output do give the branch from P.
    Attention("attention.self", "query_proj key_proj value_proj", "attention.output.dense", "num_attention_heads"),
    BERT.ffn,
)
ALBERT = Layout(
    "post",
    "attention.LayerNorm full_layer_layer_norm",
    Attention("attention", "query key value", "attention.dense", "num_attention_heads"),
    "ffn ffn_output",
)
XLNET = Layout(
    "post",
    "rel_attn.layer_norm ff.layer_norm",
    Attention("rel_attn"),
    "ff.layer_1 ff.layer_2",
    hides="attention_branch",  # an einsum inside a method
)
DISTILBERT = Layout(
    "post",
    "sa_layer_norm output_layer_norm",
    Attention("attention", "q_lin k_lin v_lin", "attention.out_lin", "n_heads"),
    "ffn",
)
MPNET = Layout(
    "post",
    "attention.LayerNorm output.LayerNorm",
    Attention("attention.attn", "q k v", "attention.attn.o", "num_attention_heads"),
    "intermediate output.dense",
)
MODERNBERT = Layout(
    "pre",
    "attn_norm mlp_norm",  # no norm before the first block's attention
    Attention("attn", "Wqkv", "attn.Wo", "config.num_attention_heads", fused="stacked"),
    "mlp",
    attention_branch="attn.out_drop",
)

# Pictures and sound.
VIT = Layout(
    "pre",
    "layernorm_before layernorm_after",
    Attention("attention", "q_proj k_proj v_proj", "attention.o_proj", "num_attention_heads"),
    "mlp",
)
DINOV2 = Layout("pre", "norm1 norm2", VIT.attention, "mlp layer_scale2", attention_branch="layer_scale1")
DATA2VEC_VISION = Layout(
    "pre",
    VIT.norms,
    Attention("attention.attention", "query key value", "attention.output.dense", "num_attention_heads"),
    "intermediate output",
)
INTERN_VISION = replace(VIT, attention=Attention("attention", "q_proj k_proj v_proj", "attention.projection_layer"))
SWIN = replace(VIT, attention_branch="drop_path")
CLIP = Layout(
    "pre",
    "layer_norm1 layer_norm2",
    Attention("self_attn", "q_proj k_proj v_proj", "self_attn.out_proj"),
    "mlp",
)
BLIP_VISION = replace(CLIP, attention=Attention("self_attn", "qkv", "self_attn.projection", fused="stacked"))
WAV2VEC2 = Layout(
    "post",
    "layer_norm final_layer_norm",
    Attention("attention", "q_proj k_proj v_proj", "attention.out_proj"),
    "feed_forward",
)
WAV2VEC2_PRE = replace(WAV2VEC2, placement="pre")

ADAPTED = "after_ffn ffn_branch"  # an adapter stands between the FFN's sum, which is not seen, and the end

# Encoders with decoders.
T5 = Layout(
    "pre",
    "layer.0.layer_norm layer.-1.layer_norm",
    Attention("layer.0.SelfAttention", "q k v", "layer.0.SelfAttention.o", "n_heads"),
    "layer.-1.DenseReluDense",
    attention_branch="layer.0.SelfAttention",
    cross=("layer.1.EncDecAttention", "layer.1.layer_norm", "layer.1.EncDecAttention"),
    causal="is_decoder",
)
BART = Layout(
    "post",
    "self_attn_layer_norm final_layer_norm",
    CLIP.attention,
    "fc1 fc2",
    cross=("encoder_attn", "encoder_attn_layer_norm", "encoder_attn.out_proj"),
    causal="self_attn.is_decoder",
)
TORCH = Layout(
    "pre",
    "norm1 norm2",
    Attention("self_attn"),
    "linear1 linear2",
    attention_branch="dropout1",
    ffn_branch="dropout2",
)
TORCH_DECODER = replace(
    TORCH, norms="norm1 norm3", ffn_branch="dropout3", cross=("multihead_attn", "norm2", "dropout2")
)

# Decoders.
GPT2 = Layout(
    "pre",
    "ln_1 ln_2",
    Attention("attn", "c_attn", "attn.c_proj", fused="stacked columns"),
    "mlp",
    cross=("crossattention", "ln_cross_attn", "crossattention.c_proj"),
)
OPT = replace(BART, placement="pre", cross=None, causal="")  # the FFN works on flattened tokens
OPT_POST = replace(OPT, placement="post")  # the 350m model
GPT_BIGCODE = Layout(
    "pre",
    "ln_1 ln_2",
    # With one key and value for all heads, interleaved rows are all queries, then the key, then the value.
    Attention("attn", "c_attn", "attn.c_proj", groups="kv_heads", fused="interleaved"),
    "mlp",
    cross=GPT2.cross,
)
BLOOM = Layout(
    "pre",
    layout.LLAMA,
    Attention("self_attention", "query_key_value", "self_attention.dense", fused="interleaved"),
    "mlp.dense_h_to_4h mlp.dense_4h_to_h",
)
MPT = Layout(
    "pre",
    "norm_1 norm_2",
    Attention("attn", "Wqkv", "attn.out_proj", "n_heads", fused="stacked"),
    "ffn.up_proj ffn.down_proj",
    attention_branch="resid_attn_dropout",
)
GPTJ = Layout(
    "parallel",
    "ln_1",
    Attention("attn", "q_proj k_proj v_proj", "attn.out_proj", "config.num_attention_heads"),
    "mlp",
    attention_branch="attn",
)
GPT_NEOX = Layout(
    "parallel",
    layout.LLAMA,
    Attention("attention", "query_key_value", "attention.dense", "config.num_attention_heads", fused="interleaved"),
    "mlp",
    attention_branch="post_attention_dropout",
    ffn_branch="post_mlp_dropout",
)
FALCON = Layout(
    "pre",
    layout.LLAMA,
    Attention("self_attention", "query_key_value", "self_attention.dense", groups="num_kv_heads", fused="interleaved"),
    "mlp",
    attention_branch="self_attention",
)
FALCON_ONE_NORM = replace(FALCON, placement="parallel", norms="input_layernorm")
FALCON_TWO_NORMS = replace(FALCON, placement="parallel", norms="ln_attn ln_mlp")
GROUPED = Attention(
    "self_attn",
    "q_proj k_proj v_proj",
    "self_attn.o_proj",
    heads="config.num_attention_heads",
    groups="config.num_key_value_heads",
)
LLAMA = Layout("pre", layout.LLAMA, GROUPED, "mlp", attention_branch="self_attn")
STABLE_LM = replace(LLAMA, placement="parallel", norms="input_layernorm")
GEMMA2 = Layout("sandwich", layout.GEMMA2, GROUPED, "mlp")
OLMO2 = Layout("branch", layout.OLMO2, GROUPED, "mlp")
PHI = replace(STABLE_LM, attention=replace(GROUPED, output="self_attn.dense"))
DEEPSEEK = replace(LLAMA, attention=replace(GROUPED, projections="kv_b_proj", fused="latent"))
PHI3 = Layout(
    "pre",
    layout.LLAMA,
    replace(GROUPED, projections="qkv_proj", fused="stacked"),
    "mlp",
    attention_branch="resid_attn_dropout",
    ffn_branch="resid_mlp_dropout",
)
LLAMA4 = replace(LLAMA, ffn="feed_forward")
JAMBA = replace(LLAMA, norms="input_layernorm pre_ff_layernorm", ffn="feed_forward")
JAMBA_MIXER = replace(JAMBA, attention=None, attention_branch="mamba")
MAMBA = Layout("mixer", "norm", None, attention_branch="mixer")


def _family(
    name: str,
    classes: str,
    describe: Callable[[str, Any], BlockAnatomy],
    causal: Callable[[nn.Module], bool | None] = causal_unless_configured,
    library: str = "transformers",
    **others: Any,
) -> Family:
    """A family of Hugging Face's, unless said otherwise; `classes` with a space between them."""
    return Family(name, library, tuple(classes.split()), describe, causal, **others)


def _either(flag: str, one: odd.Describe, other: odd.Describe) -> odd.Describe:
    return partial(odd.either, flag, one, other)


def _each(models: str, *layers: str) -> str:
    """The classes of these layers in each of these models."""
    return " ".join(model + layer for model in models.split() for layer in layers)


WAV2VEC2S = "Wav2Vec2 Hubert UniSpeech UniSpeechSat"
BOTH = ("EncoderLayer", "DecoderLayer")
NO_MASK: dict[str, Any] = {"mask_argument": None}

FAMILIES = (
    _family("depthscope", "Block", odd.ours, odd.ours_causal, "depthscope", mask_argument="mask"),
    _family(
        *("torch", "TransformerEncoderLayer", partial(odd.torch_encoder, TORCH), as_blocks_say, "torch"),
        mask_argument="src_key_padding_mask",
        token_axis_of=odd.torch_token_axis,
    ),
    _family(
        *(
            "torch-decoder",
            "TransformerDecoderLayer",
            partial(odd.torch_decoder, TORCH_DECODER),
            as_blocks_say,
            "torch",
        ),
        mask_argument="tgt_key_padding_mask",
        token_axis_of=odd.torch_token_axis,
    ),
    _family("bert", _each("Bert Roberta XLMRoberta Electra", "Layer"), BERT, as_blocks_say),
    _family("albert", "AlbertLayer", ALBERT, never),
    _family("xlnet", "XLNetLayer", partial(odd.xlnet, XLNET), odd.xlnet_causal, token_axis=0),
    _family("distilbert", "TransformerBlock", DISTILBERT, never),
    _family("mpnet", "MPNetLayer", MPNET, never),
    _family("modernbert", "ModernBertEncoderLayer", MODERNBERT, never),
    _family("deberta", "DebertaV2Layer", DEBERTA, never),
    _family("vit", "ViTLayer DeiTLayer", VIT, never, **NO_MASK),
    _family("dinov2", "Dinov2Layer Dinov2WithRegistersLayer", partial(odd.dinov2, DINOV2), never, **NO_MASK),
    _family("beit", "BeitLayer", partial(odd.beit, VIT), never, **NO_MASK),
    _family("data2vec-vision", "Data2VecVisionLayer", partial(odd.beit, DATA2VEC_VISION), never, **NO_MASK),
    _family("internvl-vision", "InternVLVisionLayer", partial(odd.beit, INTERN_VISION), never, **NO_MASK),
    _family("swin", "SwinLayer", partial(odd.swin, SWIN), never, **NO_MASK, notes=(odd.WINDOWS,)),
    _family(
        "clip", _each("CLIP CLIPSeg MetaClip2 OwlViT Owlv2", "EncoderLayer"), partial(odd.clip, CLIP), as_blocks_say
    ),
    _family("siglip", _each("Siglip Siglip2", "EncoderLayer"), CLIP, never),
    _family("blip-vision", _each("Blip Blip2", "EncoderLayer"), BLIP_VISION, never, **NO_MASK),
    _family("blip-text", "BlipTextLayer", _either("crossattention", BLIP_READER, BLIP_TEXT), as_blocks_say),
    _family("wav2vec2", _each(WAV2VEC2S, "EncoderLayer"), WAV2VEC2, never),
    _family(
        "wav2vec2-stable",
        _each(WAV2VEC2S, "EncoderLayerStableLayerNorm"),
        _either("adapter_layer", replace(WAV2VEC2_PRE, hides=ADAPTED), WAV2VEC2_PRE),
        never,
    ),
    _family("t5", _each("T5 MT5 UMT5", "Block"), partial(odd.t5, T5), as_blocks_say),
    # Named alike, so that the class alone tells where the norms stand: after the sums, or before the branches.
    _family(
        "bart",
        _each("Bart Marian BlenderbotSmall PLBart", *BOTH) + " TrOCRDecoderLayer",
        partial(odd.bart, BART),
        as_blocks_say,
    ),
    _family(
        "bart-pre",
        _each("MBart Pegasus M2M100 Blenderbot Whisper Speech2Text", *BOTH) + " PegasusXDecoderLayer",
        partial(odd.bart, replace(BART, placement="pre")),
        as_blocks_say,
    ),
    _family("gpt2", "GPT2Block", GPT2, always),
    _family("gpt-bigcode", "GPTBigCodeBlock", GPT_BIGCODE, always),
    _family("opt", "OPTDecoderLayer", _either("do_layer_norm_before", OPT, OPT_POST), always),
    _family("bloom", "BloomBlock", partial(odd.bloom, BLOOM)),
    _family("mpt", "MptBlock", partial(odd.mpt, MPT)),
    _family("gptj", "GPTJBlock", GPTJ),
    _family("gpt-neox", "GPTNeoXLayer", _either("use_parallel_residual", GPT_NEOX, replace(GPT_NEOX, placement="pre"))),
    _family(
        "falcon",
        "FalconDecoderLayer",
        _either("ln_attn", FALCON_TWO_NORMS, _either("post_attention_layernorm", FALCON, FALCON_ONE_NORM)),
    ),
    _family(
        "llama",
        _each(
            "Llama Qwen2 Qwen3 Qwen2Moe Qwen3Moe Mistral Ministral3 Mixtral Gemma StableLm Starcoder2 Granite SmolLM3 "
            "GptOss Glm4Moe SeedOss Nemotron Arcee",
            "DecoderLayer",
        ),
        _either("use_parallel_residual", STABLE_LM, partial(odd.llama, LLAMA)),
    ),
    _family("llama4", "Llama4TextDecoderLayer", LLAMA4),
    _family("doge", "DogeDecoderLayer", partial(odd.doge, LLAMA)),
    _family("phi3", "Phi3DecoderLayer", PHI3),
    _family("gemma2", _each("Gemma2 Gemma3", "DecoderLayer"), GEMMA2),
    _family("olmo2", _each("Olmo2 Olmo3 Exaone4", "DecoderLayer"), OLMO2),
    _family("cohere", _each("Cohere Cohere2 Phi", "DecoderLayer"), _either("self_attn.dense", PHI, STABLE_LM)),
    _family("deepseek-v4", _each("DeepseekV4 HYV4", "DecoderLayer"), odd.streamed, streams=True),
    _family("deepseek", _each("DeepseekV2 DeepseekV3", "DecoderLayer"), DEEPSEEK),
    _family(
        "mamba",
        _each("Mamba Mamba2 FalconMamba", "Block"),
        MAMBA,
        always,
        notes=("no attention: each block has a mixer in its place, whose branch is at attention_branch",),
    ),
    _family(
        "jamba",
        _each("JambaAttention JambaMamba", "DecoderLayer"),
        _either("self_attn", JAMBA, JAMBA_MIXER),
        always,
        notes=("some blocks have no attention, but a mixer in its place, whose branch is at attention_branch",),
    ),
)
