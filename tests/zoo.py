"""A tiny model of every family that the probe knows, with random weights and inputs it takes.

A line of `ZOO` puts a family under all tests of families: what they must know of it stands in that line.
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import transformers as hf
from torch import nn

from depthscope.inputs import batches
from depthscope.models import BlockConfig, CausalLM, Encoder, VisionTransformer, pre_norm
from depthscope.stations import Placement
from depthscope_lab.models import CarriedMean, TransformerXL, TransformerXLConfig
from samples import seeded

SMALL = {"hidden_size": 16, "num_attention_heads": 4, "num_hidden_layers": 3, "intermediate_size": 24}
TEXT = SMALL | {"vocab_size": 50}
IMAGE = SMALL | {"image_size": 8, "patch_size": 2}
GROUPED = TEXT | {"num_key_value_heads": 2, "max_position_embeddings": 64}
IDS = torch.randint(5, 50, (2, 7), generator=seeded(0))
MASK = torch.tensor([[1] * 7, [1] * 4 + [0] * 3])
TOKENS = torch.randn(2, 7, 16, generator=seeded(1))
IMAGES = torch.randn(2, 3, 8, 8, generator=seeded(2))
SOUND = torch.randn(2, 60, generator=seeded(3))
FEATURES = torch.randn(2, 8, 14, generator=seeded(4))  # 8 mel bins, 14 frames
BART = {
    "vocab_size": 50,
    "d_model": 16,
    "encoder_layers": 3,
    "decoder_layers": 3,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 0,
}
SPEECH = TEXT | {
    "num_feat_extract_layers": 2,
    "conv_dim": (8, 8),
    "conv_kernel": (4, 4),
    "conv_stride": (4, 2),
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
    "apply_spec_augment": False,
    "layerdrop": 0.0,
}
CLIP_TEXT = TEXT | {"max_position_embeddings": 32, "bos_token_id": 1, "eos_token_id": 49, "pad_token_id": 0}
TWO_TOWERS = {"blocks": 6, "modules": 6, "starts": (1, 4), "placement": "pre"}
ENCODER_DECODER = {"blocks": 6, "modules": 6, "starts": (1, 4), "crosses": (4, 5, 6), "causal": None}
XL = TransformerXLConfig(50, 3, 16, 4, 24, cutoffs=(20,))


def text() -> dict[str, torch.Tensor]:
    return {"input_ids": IDS, "attention_mask": MASK}


def both_sides() -> dict[str, torch.Tensor]:
    return text() | {"decoder_input_ids": IDS.flip(0), "decoder_attention_mask": MASK}


def image_and_text() -> dict[str, torch.Tensor]:
    return {"pixel_values": IMAGES} | text()


def source_and_target(axis: int = 1) -> dict[str, torch.Tensor]:
    """What `nn.Transformer` reads: the padding of the target is masked, and later tokens are not hidden."""
    turned = [x if axis == 1 else x.transpose(0, 1).contiguous() for x in (TOKENS.flip(1), TOKENS)]
    return {"src": turned[0], "tgt": turned[1], "tgt_key_padding_mask": MASK == 0}


def llava() -> nn.Module:
    """16 patches of the picture (its class token is left out) take the places of the ids 4."""
    vision = hf.CLIPVisionConfig(**IMAGE)
    config = hf.LlavaConfig(
        vision_config=vision,
        text_config=hf.LlamaConfig(**GROUPED),
        image_token_id=4,
        vision_feature_layer=-1,
    )
    model = hf.LlavaModel(config)
    model(**picture_in_text())  # at its first call it hangs up hooks of its own, which stay
    return model


PICTURE_MASK = torch.cat([torch.ones(2, 16, dtype=torch.int64), MASK], dim=1)


def picture_in_text() -> dict[str, torch.Tensor]:
    ids = torch.cat([torch.full((2, 16), 4), IDS], dim=1)
    return {"pixel_values": IMAGES, "input_ids": ids, "attention_mask": PICTURE_MASK}


def clip() -> nn.Module:
    return hf.CLIPModel(hf.CLIPConfig(text_config=CLIP_TEXT, vision_config=IMAGE, projection_dim=8))


def siglip() -> nn.Module:
    return hf.SiglipModel(hf.SiglipConfig(text_config=CLIP_TEXT, vision_config=IMAGE))


def torch_encoder(**options: Any) -> nn.Module:
    layer = nn.TransformerEncoderLayer(16, 4, 24, dropout=0.1, **options)
    return nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)


@dataclass(frozen=True)
class Specimen:
    """A model of a family, and what is true of it: known here by hand, so that the anatomy can be wrong."""

    build: Callable[[], nn.Module]
    inputs: Callable[[], Any]
    placement: Placement = "post"
    causal: bool | None = False  # None: each call, or each half of the model, decides
    blocks: int = 3  # that run in a pass
    tokens: int = 7
    modules: int = 3  # fewer than blocks if these share their weights
    hides: frozenset[str] = frozenset()  # stations, "values", "context": what is no module's input or output
    norms: int = 2  # in a block
    attending: tuple[int, ...] | None = None  # the blocks that have attention; None: all
    hidden_states: bool = False  # whether `output_hidden_states=True` gives the tokens between its blocks
    crosses: tuple[int, ...] = ()  # blocks that attend to an encoder
    starts: tuple[int, ...] = (1,)  # blocks with which a part begins
    causal_parts: frozenset[str] = frozenset({"decoder"})  # of those that it has
    pickles: bool = True  # wav2vec 2.0 has parametrised weights, LLaVA hooks of transformers: these do not
    masks: tuple[torch.Tensor | None, ...] | None = None  # of these parts; None: of the real tokens in the inputs
    final_norm: bool = False  # whether it stands in the last of its hidden states

    def mask_of(self, block: int) -> torch.Tensor | None:
        """(2, n) true for the real tokens of a block."""
        if self.masks is not None:
            return self.masks[sum(start <= block for start in self.starts) - 1]
        inputs = self.inputs()
        return MASK if isinstance(inputs, dict) and any("mask" in key for key in inputs) else None


def decoder(
    name: str,
    *,
    placement: Placement = "pre",
    hides: Any = (),
    norms: int = 2,
    attending: tuple[int, ...] | None = None,
    **config: Any,
) -> Specimen:
    """A causal language model of transformers, with its head."""
    kinds: Any = (getattr(hf, f"{name}ForCausalLM"), getattr(hf, f"{name}TextConfig", getattr(hf, f"{name}Config")))
    hidden = frozenset(hides) | (frozenset({"after_attention"}) if placement == "parallel" else frozenset())
    return Specimen(
        lambda: kinds[0](kinds[1](**config)),
        text,
        placement,
        True,
        hides=hidden,
        norms=norms,
        attending=attending,
        hidden_states=attending != (),
        final_norm=True,
    )


EXPERTS = GROUPED | {"num_experts_per_tok": 2, "pad_token_id": 0, "experts_implementation": "eager"}  # in float64 too
LATENT = {"kv_lora_rank": 6, "q_lora_rank": 8, "qk_rope_head_dim": 2, "qk_nope_head_dim": 4, "v_head_dim": 3}
OF_EXPERTS = {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 16}
DEEPSEEK: Any = EXPERTS | LATENT | OF_EXPERTS | {"num_key_value_heads": 4, "first_k_dense_replace": 1}
DEEPSEEK["hides"] = ("values",)
NO_PAD = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
MIXER: Any = {
    "placement": "mixer",
    "norms": 1,
    "hides": ("after_attention", "ffn_input", "after_ffn", "ffn_branch", "values", "context"),
    "attending": (),
}
MAMBA = {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 3, "state_size": 4, "residual_in_fp32": False}
FUSED = frozenset({"values", "context"})  # query, key and value in one module, and attention inside PyTorch's function
ZOO: dict[str, Specimen] = {
    "encoder": Specimen(lambda: Encoder(3, BlockConfig(16, 4)), lambda: {"x": TOKENS, "mask": MASK}),
    "encoder-pre": Specimen(
        lambda: Encoder(3, BlockConfig(16, 4, placement=pre_norm)), lambda: {"x": TOKENS, "mask": MASK}, placement="pre"
    ),
    "vision-transformer": Specimen(
        lambda: VisionTransformer(3, BlockConfig(16, 4), image_size=8), lambda: IMAGES, tokens=5
    ),
    "causal-lm": Specimen(
        lambda: CausalLM(3, BlockConfig(16, 4), vocabulary=50), lambda: {"ids": IDS, "mask": MASK}, causal=True
    ),
    "transformer-xl": Specimen(lambda: TransformerXL(XL), lambda: {"ids": IDS}, causal=True),
    "transformer-xl-pre": Specimen(
        lambda: TransformerXL(replace(XL, placement="pre", final_norm=True)),
        lambda: {"ids": IDS},
        placement="pre",
        causal=True,
    ),
    "transformer-xl-deescalated": Specimen(
        lambda: TransformerXL(replace(XL, carried_mean=CarriedMean())), lambda: {"ids": IDS}, causal=True
    ),
    "torch": Specimen(
        lambda: torch_encoder(batch_first=True),
        lambda: {"src": TOKENS, "src_key_padding_mask": MASK == 0},
        causal=None,
        hides=FUSED,
    ),
    "torch-tokens-first": Specimen(
        lambda: torch_encoder(norm_first=True),
        lambda: {"src": TOKENS.transpose(0, 1).contiguous(), "src_key_padding_mask": MASK == 0},
        placement="pre",
        causal=None,
        hides=FUSED,
    ),
    "bert": Specimen(lambda: hf.BertModel(hf.BertConfig(**TEXT)), text, hidden_states=True),
    "roberta": Specimen(lambda: hf.RobertaModel(hf.RobertaConfig(**TEXT, pad_token_id=1)), text, hidden_states=True),
    "albert": Specimen(
        lambda: hf.AlbertModel(hf.AlbertConfig(**TEXT, embedding_size=8)), text, modules=1, hidden_states=True
    ),
    "xlnet": Specimen(
        lambda: hf.XLNetModel(hf.XLNetConfig(vocab_size=50, d_model=16, n_layer=3, n_head=4, d_inner=24)),
        text,
        hides=frozenset({"attention_branch"}),
        hidden_states=True,
    ),
    "distilbert": Specimen(
        lambda: hf.DistilBertModel(hf.DistilBertConfig(vocab_size=50, dim=16, n_layers=3, n_heads=4, hidden_dim=24)),
        text,
        hidden_states=True,
    ),
    "mpnet": Specimen(lambda: hf.MPNetModel(hf.MPNetConfig(**TEXT)), text, hidden_states=True),
    "vit": Specimen(
        lambda: hf.ViTModel(hf.ViTConfig(**IMAGE)), lambda: IMAGES, placement="pre", tokens=17, hidden_states=True
    ),
    "deit": Specimen(
        lambda: hf.DeiTModel(hf.DeiTConfig(**IMAGE)), lambda: IMAGES, placement="pre", tokens=18, hidden_states=True
    ),
    "gpt2": Specimen(
        lambda: hf.GPT2LMHeadModel(hf.GPT2Config(vocab_size=50, n_embd=16, n_layer=3, n_head=4, n_positions=32)),
        text,
        placement="pre",
        causal=True,
        hides=frozenset({"values"}),
        hidden_states=True,
        final_norm=True,
    ),
    "opt": Specimen(
        lambda: hf.OPTForCausalLM(
            hf.OPTConfig(
                vocab_size=50,
                hidden_size=16,
                num_hidden_layers=3,
                ffn_dim=24,
                num_attention_heads=4,
                word_embed_proj_dim=16,
                max_position_embeddings=32,
            )
        ),
        text,
        placement="pre",
        causal=True,
        hidden_states=True,
        final_norm=True,
    ),
    "llama": Specimen(
        lambda: hf.LlamaModel(hf.LlamaConfig(**GROUPED)),
        text,
        placement="pre",
        causal=True,
        hidden_states=True,
        final_norm=True,
    ),
    "qwen2": Specimen(
        lambda: hf.Qwen2Model(hf.Qwen2Config(**GROUPED)),
        text,
        placement="pre",
        causal=True,
        hidden_states=True,
        final_norm=True,
    ),
    "mistral": Specimen(
        lambda: hf.MistralModel(hf.MistralConfig(**GROUPED)),
        text,
        placement="pre",
        causal=True,
        hidden_states=True,
        final_norm=True,
    ),
    "gemma": Specimen(
        lambda: hf.GemmaModel(hf.GemmaConfig(**GROUPED, head_dim=4)),
        text,
        placement="pre",
        causal=True,
        hidden_states=True,
        final_norm=True,
    ),
    "qwen3": decoder("Qwen3", **GROUPED, head_dim=6),
    "smollm3": decoder("SmolLM3", **GROUPED, **NO_PAD),
    "starcoder2": decoder("Starcoder2", **GROUPED),
    "granite": decoder("Granite", **GROUPED),
    "granite-weighted": decoder(
        "Granite", hides=("attention_branch", "ffn_branch"), **GROUPED, residual_multiplier=0.5
    ),
    "stablelm": decoder("StableLm", **GROUPED),
    "stablelm-parallel": decoder("StableLm", placement="parallel", norms=1, **GROUPED, use_parallel_residual=True),
    "mixtral": decoder("Mixtral", **EXPERTS, num_local_experts=4),
    "qwen2-moe": decoder(
        "Qwen2Moe", **EXPERTS, num_experts=4, moe_intermediate_size=16, shared_expert_intermediate_size=16
    ),
    "qwen3-moe": decoder("Qwen3Moe", **EXPERTS, num_experts=4, moe_intermediate_size=16, head_dim=6),
    "gpt-oss": decoder("GptOss", **EXPERTS, num_local_experts=4, head_dim=4, sliding_window=4),
    "phi3": decoder("Phi3", hides=("values",), **GROUPED, **NO_PAD),
    "deepseek": decoder("DeepseekV3", **DEEPSEEK),
    "deepseek-v2": decoder("DeepseekV2", **DEEPSEEK),
    "gemma2": decoder("Gemma2", placement="sandwich", norms=4, **GROUPED, head_dim=6, sliding_window=4),
    "gemma3": decoder("Gemma3", placement="sandwich", norms=4, **GROUPED, head_dim=6, sliding_window=4),
    "olmo2": decoder("Olmo2", placement="branch", **GROUPED, **NO_PAD),
    "olmo3": decoder("Olmo3", placement="branch", **GROUPED, **NO_PAD, sliding_window=4),
    "cohere": decoder("Cohere", placement="parallel", norms=1, **GROUPED, **NO_PAD),
    "cohere2": decoder("Cohere2", placement="parallel", norms=1, **GROUPED, **NO_PAD, sliding_window=4),
    "phi": decoder("Phi", placement="parallel", norms=1, **GROUPED),
    "gpt-neox": decoder("GPTNeoX", placement="parallel", hides=("values",), **TEXT),
    "gpt-neox-one-by-one": decoder("GPTNeoX", hides=("values",), **TEXT, use_parallel_residual=False),
    "gptj": decoder("GPTJ", placement="parallel", norms=1, vocab_size=50, n_embd=16, n_layer=3, n_head=4, rotary_dim=2),
    "falcon": decoder("Falcon", placement="parallel", norms=1, hides=("values",), **TEXT),
    "falcon-new": decoder(
        "Falcon", placement="parallel", hides=("values",), **TEXT, new_decoder_architecture=True, num_kv_heads=2
    ),
    "falcon-one-by-one": decoder(
        "Falcon", hides=("values",), **TEXT, parallel_attn=False, multi_query=False, alibi=True, bias=True
    ),
    "mpt": decoder("Mpt", hides=("values",), vocab_size=50, d_model=16, n_layers=3, n_heads=4, max_seq_len=32),
    "bloom": decoder("Bloom", hides=("values",), vocab_size=50, hidden_size=16, n_layer=3, n_head=4),
    "mamba": decoder("Mamba", **MIXER, **MAMBA),
    "mamba2": decoder("Mamba2", **MIXER, **MAMBA, num_heads=4, head_dim=8, n_groups=1),
    "falcon-mamba": decoder("FalconMamba", **MIXER, **MAMBA),
    "jamba": decoder(
        "Jamba",
        attending=(2,),
        **EXPERTS,
        attn_layer_period=2,
        attn_layer_offset=1,
        num_experts=2,
        mamba_d_state=4,
        mamba_dt_rank=2,
    ),
    "t5-encoder": Specimen(
        lambda: hf.T5EncoderModel(hf.T5Config(vocab_size=50, d_model=16, d_kv=4, d_ff=24, num_layers=3, num_heads=4)),
        text,
        placement="pre",
        hidden_states=True,
        final_norm=True,
    ),
    "t5": Specimen(
        lambda: hf.T5Model(hf.T5Config(vocab_size=50, d_model=16, d_kv=4, d_ff=24, num_layers=3, num_heads=4)),
        both_sides,
        placement="pre",
        **ENCODER_DECODER,
    ),
    "electra": Specimen(lambda: hf.ElectraModel(hf.ElectraConfig(**TEXT, embedding_size=8)), text, hidden_states=True),
    "modernbert": Specimen(
        lambda: hf.ModernBertModel(hf.ModernBertConfig(**TEXT, pad_token_id=0, cls_token_id=1, sep_token_id=2)),
        text,
        placement="pre",
        hides=frozenset({"values"}),
        hidden_states=True,
        final_norm=True,
    ),
    "deberta": Specimen(
        lambda: hf.DebertaV2Model(
            hf.DebertaV2Config(**TEXT, relative_attention=True, pos_att_type=["c2p", "p2c"], max_position_embeddings=32)
        ),
        text,
        hidden_states=True,
    ),
    "dinov2": Specimen(
        lambda: hf.Dinov2Model(hf.Dinov2Config(**IMAGE, mlp_ratio=2, layerscale_value=0.5)),
        lambda: IMAGES,
        placement="pre",
        tokens=17,
        hidden_states=True,
    ),
    "swin": Specimen(  # one window is the whole image: attention is seen
        lambda: hf.SwinModel(
            hf.SwinConfig(image_size=8, patch_size=2, embed_dim=16, depths=[3], num_heads=[4], window_size=4)
        ),
        lambda: IMAGES,
        placement="pre",
        tokens=16,
        hides=FUSED,
    ),
    "wav2vec2": Specimen(lambda: hf.Wav2Vec2Model(hf.Wav2Vec2Config(**SPEECH)), lambda: SOUND, tokens=6, pickles=False),
    "wav2vec2-stable": Specimen(
        lambda: hf.HubertModel(hf.HubertConfig(**SPEECH, do_stable_layer_norm=True, feat_extract_norm="layer")),
        lambda: SOUND,
        placement="pre",
        tokens=6,
        pickles=False,
    ),
    "torch-decoder": Specimen(
        lambda: nn.TransformerDecoder(nn.TransformerDecoderLayer(16, 4, 24, batch_first=True), 3),
        lambda: {"tgt": TOKENS, "memory": TOKENS.flip(1), "tgt_key_padding_mask": MASK == 0},
        causal=None,
        crosses=(1, 2, 3),
        hides=FUSED,
    ),
    "torch-transformer": Specimen(
        lambda: nn.Transformer(16, 4, 3, 3, 24, norm_first=True, custom_encoder=torch_encoder(norm_first=True)),
        lambda: source_and_target(0),
        hides=FUSED,
        placement="pre",
        masks=(None, MASK),
        causal_parts=frozenset(),
        **ENCODER_DECODER,
    ),
    "bart": Specimen(lambda: hf.BartModel(hf.BartConfig(**BART)), both_sides, **ENCODER_DECODER),
    "mbart": Specimen(lambda: hf.MBartModel(hf.MBartConfig(**BART)), both_sides, placement="pre", **ENCODER_DECODER),
    "whisper": Specimen(
        lambda: hf.WhisperModel(
            hf.WhisperConfig(**BART, num_mel_bins=8, max_source_positions=7, max_target_positions=32)
        ),
        lambda: {"input_features": FEATURES, "decoder_input_ids": IDS, "decoder_attention_mask": MASK},
        placement="pre",
        masks=(None, MASK),
        **ENCODER_DECODER,
    ),
    "clip": Specimen(
        clip, image_and_text, tokens=17, causal=None, masks=(None, MASK), causal_parts=frozenset({"text"}), **TWO_TOWERS
    ),
    "siglip": Specimen(siglip, image_and_text, tokens=16, causal=False, masks=(None, MASK), **TWO_TOWERS),
    "llava": Specimen(
        llava,
        picture_in_text,
        tokens=17,
        causal=None,
        masks=(None, PICTURE_MASK),
        causal_parts=frozenset({"language"}),
        pickles=False,
        **TWO_TOWERS,
    ),
}
KIN: dict[str, Specimen] = {  # further models of the same layouts: under the tests of anatomy
    "marian": Specimen(lambda: hf.MarianModel(hf.MarianConfig(**BART)), both_sides, **ENCODER_DECODER),
    "blenderbot-small": Specimen(
        lambda: hf.BlenderbotSmallModel(hf.BlenderbotSmallConfig(**BART)), both_sides, **ENCODER_DECODER
    ),
    "plbart": Specimen(lambda: hf.PLBartModel(hf.PLBartConfig(**BART)), both_sides, **ENCODER_DECODER),
    "pegasus": Specimen(
        lambda: hf.PegasusModel(hf.PegasusConfig(**BART)), both_sides, placement="pre", **ENCODER_DECODER
    ),
    "pegasus-x": Specimen(  # its decoder; the encoder is of no known family
        lambda: hf.PegasusXModel(hf.PegasusXConfig(**BART, num_global_tokens=4, block_size=4)),
        both_sides,
        placement="pre",
        causal=True,
        crosses=(1, 2, 3),
    ),
    "m2m100": Specimen(lambda: hf.M2M100Model(hf.M2M100Config(**BART)), both_sides, placement="pre", **ENCODER_DECODER),
    "blenderbot": Specimen(
        lambda: hf.BlenderbotModel(hf.BlenderbotConfig(**BART)), both_sides, placement="pre", **ENCODER_DECODER
    ),
    "speech2text": Specimen(
        lambda: hf.Speech2TextModel(
            hf.Speech2TextConfig(
                **BART, input_feat_per_channel=8, conv_channels=16, max_source_positions=32, max_target_positions=32
            )
        ),
        lambda: {"input_features": FEATURES.mT.contiguous(), "decoder_input_ids": IDS},
        placement="pre",
        **ENCODER_DECODER,
    ),
    "bart-decoder": Specimen(lambda: hf.BartForCausalLM(hf.BartConfig(**BART)), text, causal=True),
    "bert to bert": Specimen(
        lambda: hf.EncoderDecoderModel(
            encoder=hf.BertModel(hf.BertConfig(**TEXT)),
            decoder=hf.BertLMHeadModel(hf.BertConfig(**TEXT, is_decoder=True, add_cross_attention=True)),
        ),
        both_sides,
        **ENCODER_DECODER,
    ),
    "clip-vision": Specimen(lambda: hf.CLIPVisionModel(hf.CLIPVisionConfig(**IMAGE)), lambda: IMAGES, placement="pre"),
    "clip-text": Specimen(lambda: hf.CLIPTextModel(hf.CLIPTextConfig(**CLIP_TEXT)), text, placement="pre", causal=True),
    "dinov2-registers": Specimen(
        lambda: hf.Dinov2WithRegistersModel(
            hf.Dinov2WithRegistersConfig(**IMAGE, mlp_ratio=2, layerscale_value=0.5, num_register_tokens=2)
        ),
        lambda: IMAGES,
        placement="pre",
    ),
    "blip-vision": Specimen(
        lambda: hf.BlipVisionModel(hf.BlipVisionConfig(**IMAGE)),
        lambda: IMAGES,
        placement="pre",
        hides=frozenset({"values"}),
    ),
    "blip2-vision": Specimen(
        lambda: hf.Blip2VisionModel(hf.Blip2VisionConfig(**IMAGE)),
        lambda: IMAGES,
        placement="pre",
        hides=frozenset({"values"}),
    ),
    "hubert": Specimen(lambda: hf.HubertModel(hf.HubertConfig(**SPEECH)), lambda: SOUND),
    "unispeech": Specimen(lambda: hf.UniSpeechModel(hf.UniSpeechConfig(**SPEECH)), lambda: SOUND),
    "torch-decoder-pre": Specimen(
        lambda: nn.TransformerDecoder(nn.TransformerDecoderLayer(16, 4, 24, norm_first=True), 3),
        lambda: {"tgt": TOKENS.transpose(0, 1).contiguous(), "memory": TOKENS.flip(1).transpose(0, 1).contiguous()},
        placement="pre",
        causal=None,
        crosses=(1, 2, 3),
        hides=FUSED,
    ),
}
NEWER: dict[str, dict[str, Any]] = {  # decoders with the layout of a family in the zoo
    "Ministral3": {},
    "Glm4Moe": OF_EXPERTS | EXPERTS | {"first_k_dense_replace": 1, "head_dim": 4, "use_qk_norm": True},
    "SeedOss": NO_PAD | {"head_dim": 6},
    "Nemotron": NO_PAD,
    "Arcee": NO_PAD,
    "Exaone4": NO_PAD | {"placement": "branch", "sliding_window": 4, "sliding_window_pattern": 2},
    "Llama4": EXPERTS
    | {"head_dim": 4, "num_local_experts": 4, "interleave_moe_layer_step": 2, "intermediate_size_mlp": 24},
}
KIN |= {name.lower(): decoder(name, **(GROUPED | options)) for name, options in NEWER.items()}
KIN |= {
    "gpt-bigcode": decoder("GPTBigCode", hides=("values",), vocab_size=50, n_embd=16, n_layer=3, n_head=4),
    "gpt-bigcode-many": decoder(
        "GPTBigCode", hides=("values",), vocab_size=50, n_embd=16, n_layer=3, n_head=4, multi_query=False
    ),
    "beit": Specimen(
        lambda: hf.BeitModel(hf.BeitConfig(**IMAGE, layer_scale_init_value=0.5)),
        lambda: IMAGES,
        placement="pre",
        tokens=17,
        hides=frozenset({"attention_branch", "ffn_branch"}),
    ),
}
for _model in ("Data2VecVision", "InternVLVision"):  # as BEiT
    _config, _kind = getattr(hf, f"{_model}Config"), getattr(hf, f"{_model}Model")
    KIN[_model.lower()] = replace(
        KIN["beit"], build=lambda kind=_kind, config=_config: kind(config(**IMAGE, layer_scale_init_value=0.5))
    )
for _model in ("CLIPSeg", "MetaClip2", "OwlViT", "Owlv2", "Siglip2"):  # their text towers
    _config, _kind = (getattr(hf, f"{_model}{name}") for name in ("TextConfig", "TextModel"))
    KIN[f"{_model.lower()}-text"] = Specimen(
        lambda kind=_kind, config=_config: kind(config(**CLIP_TEXT)),
        text,
        placement="pre",
        causal=_model != "Siglip2",
    )
ANATOMIES = ZOO | KIN
HAS_HIDDEN_STATES = [name for name, specimen in ZOO.items() if specimen.hidden_states]


def make(name: str) -> tuple[nn.Module, Any]:
    """The model, with weights large enough that every block does something, and its inputs."""
    specimen = ANATOMIES[name]
    with torch.random.fork_rng(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*torch.jit.script", DeprecationWarning)  # DeBERTa, of transformers
        torch.manual_seed(0)
        model = specimen.build()
        for parameter in model.parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=0.3)
    return model, specimen.inputs()


def shortened(model: nn.Module) -> nn.Module:
    """With two blocks to a stack, a first and a later one: for what takes its time with every block."""
    for child in model.children():
        if isinstance(child, nn.ModuleList):
            del child[2:]
        else:
            shortened(child)
    return model


def run(model: nn.Module, inputs: Any) -> torch.Tensor:
    """What the model returns, or the first of it."""
    batch = next(batches(model, inputs))
    output = model(*batch.args, **batch.kwargs)
    return output if isinstance(output, torch.Tensor) else output[0]


def doubled(inputs: Any) -> Any:
    """The same with its floats in float64."""
    if isinstance(inputs, torch.Tensor):
        return inputs.double() if inputs.is_floating_point() else inputs
    return {key: doubled(value) for key, value in inputs.items()}
