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
    configs = [config for module in walking.modules(model) if (config := getattr(module, "config", None))]
    both_ways = any(
        getattr(config, "is_causal", True) is False or getattr(config, "use_bidirectional_attention", False)
        for config in configs
    )
    return None if both_ways else True


# Text, both ways.
_BERT_SELF = Attention("attention.self", "query key value", "attention.output.dense", "num_attention_heads")
# Of the content. Scores have terms of positions too; values and output do give the branch from P.
_DEBERTA_SELF = replace(_BERT_SELF, projections="query_proj key_proj value_proj")
BERT = Layout(
    "post",
    "attention.output.LayerNorm output.LayerNorm",
    _BERT_SELF,
    "intermediate output.dense",
    cross=("crossattention.self", "crossattention.output.LayerNorm", "crossattention.output.dense"),
    causal="is_decoder",
)
# Whether BLIP's text tower is causal, and whether it attends to the image, is a matter of each call of its model. Its
# blocks say neither: a remedy is careful then, and what stands after a cross-attention that may not run is hidden.
BLIP_TEXT = replace(BERT, causal="")
BLIP_READER = replace(BLIP_TEXT, hides=" ".join((*CROSS, "ffn_input")))
DEBERTA = Layout("post", BERT.norms, _DEBERTA_SELF, BERT.ffn)
_ALBERT_SELF = Attention("attention", "query key value", "attention.dense", "num_attention_heads")
ALBERT = Layout("post", "attention.LayerNorm full_layer_layer_norm", _ALBERT_SELF, "ffn ffn_output")
XLNET = Layout(
    "post",
    "rel_attn.layer_norm ff.layer_norm",
    Attention("rel_attn"),
    "ff.layer_1 ff.layer_2",
    hides="attention_branch",
)  # its branch is an einsum inside a method
_DISTILBERT_SELF = Attention("attention", "q_lin k_lin v_lin", "attention.out_lin", "n_heads")
DISTILBERT = Layout("post", "sa_layer_norm output_layer_norm", _DISTILBERT_SELF, "ffn")
_MPNET_SELF = Attention("attention.attn", "q k v", "attention.attn.o", "num_attention_heads")
MPNET = Layout("post", "attention.LayerNorm output.LayerNorm", _MPNET_SELF, BERT.ffn)
_MODERNBERT_SELF = Attention("attn", "Wqkv", "attn.Wo", "config.num_attention_heads", fused="stacked")
MODERNBERT = Layout("pre", "attn_norm mlp_norm", _MODERNBERT_SELF, "mlp", "attn.out_drop")  # block 1 has no first norm

# Pictures and sound.
_VIT_SELF = Attention("attention", "q_proj k_proj v_proj", "attention.o_proj", "num_attention_heads")
_DATA2VEC_SELF = replace(_BERT_SELF, module="attention.attention")
_CLIP_SELF = Attention("self_attn", "q_proj k_proj v_proj", "self_attn.out_proj")
_BLIP_SELF = Attention("self_attn", "qkv", "self_attn.projection", fused="stacked")
_WAV2VEC2_SELF = Attention("attention", "q_proj k_proj v_proj", "attention.out_proj")
VIT = Layout("pre", "layernorm_before layernorm_after", _VIT_SELF, "mlp")
DINOV2 = Layout("pre", "norm1 norm2", _VIT_SELF, "mlp layer_scale2", attention_branch="layer_scale1")
DATA2VEC_VISION = Layout("pre", VIT.norms, _DATA2VEC_SELF, "intermediate output")
INTERN_VISION = replace(VIT, attention=Attention("attention", "q_proj k_proj v_proj", "attention.projection_layer"))
SWIN = replace(VIT, attention_branch="drop_path")
CLIP = Layout("pre", "layer_norm1 layer_norm2", _CLIP_SELF, "mlp")
BLIP_VISION = replace(CLIP, attention=_BLIP_SELF)
WAV2VEC2 = Layout("post", "layer_norm final_layer_norm", _WAV2VEC2_SELF, "feed_forward")
WAV2VEC2_PRE = replace(WAV2VEC2, placement="pre")
# An adapter stands between the FFN's sum, which is not seen, and the end.
WAV2VEC2_ADAPTED = replace(WAV2VEC2_PRE, hides="after_ffn ffn_branch")

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
    _CLIP_SELF,
    "fc1 fc2",
    cross=("encoder_attn", "encoder_attn_layer_norm", "encoder_attn.out_proj"),
    causal="self_attn.is_decoder",
)
BART_PRE = replace(BART, placement="pre")
TORCH = Layout("pre", "norm1 norm2", Attention("self_attn"), "linear1 linear2", "dropout1", "dropout2")
TORCH_CROSS = ("multihead_attn", "norm2", "dropout2")
TORCH_DECODER = replace(TORCH, norms="norm1 norm3", ffn_branch="dropout3", cross=TORCH_CROSS)

# Decoders.
_GPT2_SELF = Attention("attn", "c_attn", "attn.c_proj", fused="stacked columns")
# With one key and value for all heads, interleaved rows are all queries, then the key, then the value.
_BIGCODE_SELF = replace(_GPT2_SELF, groups="kv_heads", fused="interleaved")
_BLOOM_SELF = Attention("self_attention", "query_key_value", "self_attention.dense", fused="interleaved")
_MPT_SELF = Attention("attn", "Wqkv", "attn.out_proj", "n_heads", fused="stacked")
_GPTJ_SELF = Attention("attn", "q_proj k_proj v_proj", "attn.out_proj", "config.num_attention_heads")
_NEOX_SELF = replace(_BLOOM_SELF, module="attention", output="attention.dense", heads="config.num_attention_heads")
_GROUPED = replace(
    _CLIP_SELF, output="self_attn.o_proj", heads="config.num_attention_heads", groups="config.num_key_value_heads"
)
GPT2 = Layout("pre", "ln_1 ln_2", _GPT2_SELF, "mlp", cross=("crossattention", "ln_cross_attn", "crossattention.c_proj"))
GPT_BIGCODE = replace(GPT2, attention=_BIGCODE_SELF)
OPT = replace(BART_PRE, cross=None, causal="")  # the FFN works on flattened tokens
OPT_POST = replace(OPT, placement="post")  # the 350m model
BLOOM = Layout("pre", layout.LLAMA, _BLOOM_SELF, "mlp.dense_h_to_4h mlp.dense_4h_to_h")
MPT = Layout("pre", "norm_1 norm_2", _MPT_SELF, "ffn.up_proj ffn.down_proj", "resid_attn_dropout")
GPTJ = Layout("parallel", "ln_1", _GPTJ_SELF, "mlp", attention_branch="attn")
GPT_NEOX = Layout("parallel", layout.LLAMA, _NEOX_SELF, "mlp", "post_attention_dropout", "post_mlp_dropout")
GPT_NEOX_PRE = replace(GPT_NEOX, placement="pre")
FALCON = Layout("pre", layout.LLAMA, replace(_BLOOM_SELF, groups="num_kv_heads"), "mlp", "self_attention")
FALCON_ONE_NORM = replace(FALCON, placement="parallel", norms="input_layernorm")
FALCON_TWO_NORMS = replace(FALCON, placement="parallel", norms="ln_attn ln_mlp")
LLAMA = Layout("pre", layout.LLAMA, _GROUPED, "mlp", attention_branch="self_attn")
LLAMA4 = replace(LLAMA, ffn="feed_forward")
STABLE_LM = replace(LLAMA, placement="parallel", norms="input_layernorm")
PHI = replace(STABLE_LM, attention=replace(_GROUPED, output="self_attn.dense"))
_PHI3_SELF = replace(_GROUPED, projections="qkv_proj", fused="stacked")
PHI3 = Layout("pre", layout.LLAMA, _PHI3_SELF, "mlp", "resid_attn_dropout", "resid_mlp_dropout")
GEMMA2 = Layout("sandwich", layout.GEMMA2, _GROUPED, "mlp")
OLMO2 = Layout("branch", layout.OLMO2, _GROUPED, "mlp")
DEEPSEEK = replace(LLAMA, attention=replace(_GROUPED, projections="kv_b_proj", fused="latent"))
JAMBA = replace(LLAMA4, norms="input_layernorm pre_ff_layernorm")
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


_WAV2VEC2S = "Wav2Vec2 Hubert UniSpeech UniSpeechSat"
_LLAMAS = (
    "Llama Qwen2 Qwen3 Qwen2Moe Qwen3Moe Mistral Ministral3 Mixtral Gemma StableLm Starcoder2 Granite SmolLM3 GptOss "
    "Glm4Moe SeedOss Nemotron Arcee"
)
# Named alike, so that the class alone tells where the norms stand: after the sums, or before the branches.
_BARTS = _each("Bart Marian BlenderbotSmall PLBart", "EncoderLayer", "DecoderLayer") + " TrOCRDecoderLayer"
_BARTS_PRE = _each("MBart Pegasus M2M100 Blenderbot Whisper Speech2Text", "EncoderLayer", "DecoderLayer")
_NO_MASK: dict[str, Any] = {"mask_argument": None}
_MIXERS = "no attention: each block has a mixer in its place, whose branch is at attention_branch"
_SOME_MIXERS = "some blocks have no attention, but a mixer in its place, whose branch is at attention_branch"
_TORCH: dict[str, Any] = {"causal": as_blocks_say, "library": "torch", "token_axis_of": odd.torch_token_axis}
_TORCH_ENCODER = _TORCH | {"mask_argument": "src_key_padding_mask"}
_TORCH_DECODER = _TORCH | {"mask_argument": "tgt_key_padding_mask"}

FAMILIES = (
    _family("depthscope", "Block", odd.ours, odd.ours_causal, "depthscope", mask_argument="mask"),
    _family("torch", "TransformerEncoderLayer", partial(odd.torch_encoder, TORCH), **_TORCH_ENCODER),
    _family("torch-decoder", "TransformerDecoderLayer", partial(odd.torch_decoder, TORCH_DECODER), **_TORCH_DECODER),
    _family("bert", _each("Bert Roberta XLMRoberta Electra", "Layer"), BERT, as_blocks_say),
    _family("albert", "AlbertLayer", ALBERT, never),
    _family("xlnet", "XLNetLayer", partial(odd.xlnet, XLNET), odd.xlnet_causal, token_axis=0),
    _family("distilbert", "TransformerBlock", DISTILBERT, never),
    _family("mpnet", "MPNetLayer", MPNET, never),
    _family("modernbert", "ModernBertEncoderLayer", MODERNBERT, never),
    _family("deberta", "DebertaV2Layer", DEBERTA, never),
    _family("vit", "ViTLayer DeiTLayer", VIT, never, **_NO_MASK),
    _family("dinov2", "Dinov2Layer Dinov2WithRegistersLayer", partial(odd.dinov2, DINOV2), never, **_NO_MASK),
    _family("beit", "BeitLayer", partial(odd.beit, VIT), never, **_NO_MASK),
    _family("data2vec-vision", "Data2VecVisionLayer", partial(odd.beit, DATA2VEC_VISION), never, **_NO_MASK),
    _family("internvl-vision", "InternVLVisionLayer", partial(odd.beit, INTERN_VISION), never, **_NO_MASK),
    _family("swin", "SwinLayer", partial(odd.swin, SWIN), never, **_NO_MASK, notes=(odd.WINDOWS,)),
    _family(
        "clip", _each("CLIP CLIPSeg MetaClip2 OwlViT Owlv2", "EncoderLayer"), partial(odd.clip, CLIP), as_blocks_say
    ),
    _family("siglip", _each("Siglip Siglip2", "EncoderLayer"), CLIP, never),
    _family("blip-vision", _each("Blip Blip2", "EncoderLayer"), BLIP_VISION, never, **_NO_MASK),
    _family("blip-text", "BlipTextLayer", _either("crossattention", BLIP_READER, BLIP_TEXT), as_blocks_say),
    _family("wav2vec2", _each(_WAV2VEC2S, "EncoderLayer"), WAV2VEC2, never),
    _family(
        "wav2vec2-stable",
        _each(_WAV2VEC2S, "EncoderLayerStableLayerNorm"),
        _either("adapter_layer", WAV2VEC2_ADAPTED, WAV2VEC2_PRE),
        never,
    ),
    _family("t5", _each("T5 MT5 UMT5", "Block"), partial(odd.t5, T5), as_blocks_say),
    _family("bart", _BARTS, partial(odd.bart, BART), as_blocks_say),
    _family("bart-pre", f"{_BARTS_PRE} PegasusXDecoderLayer", partial(odd.bart, BART_PRE), as_blocks_say),
    _family("gpt2", "GPT2Block", GPT2, always),
    _family("gpt-bigcode", "GPTBigCodeBlock", GPT_BIGCODE, always),
    _family("opt", "OPTDecoderLayer", _either("do_layer_norm_before", OPT, OPT_POST), always),
    _family("bloom", "BloomBlock", partial(odd.bloom, BLOOM)),
    _family("mpt", "MptBlock", partial(odd.mpt, MPT)),
    _family("gptj", "GPTJBlock", GPTJ),
    _family("gpt-neox", "GPTNeoXLayer", _either("use_parallel_residual", GPT_NEOX, GPT_NEOX_PRE)),
    _family(
        "falcon",
        "FalconDecoderLayer",
        _either("ln_attn", FALCON_TWO_NORMS, _either("post_attention_layernorm", FALCON, FALCON_ONE_NORM)),
    ),
    _family(
        "llama",
        _each(_LLAMAS, "DecoderLayer"),
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
    _family("mamba", _each("Mamba Mamba2 FalconMamba", "Block"), MAMBA, always, notes=(_MIXERS,)),
    _family(
        "jamba",
        _each("JambaAttention JambaMamba", "DecoderLayer"),
        _either("self_attn", JAMBA, JAMBA_MIXER),
        always,
        notes=(_SOME_MIXERS,),
    ),
)
