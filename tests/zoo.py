"""A tiny model of every family that the probe knows, with random weights and inputs it takes.

A line of `ZOO` puts a family under all tests of families: what they must know of it stands in that line.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import transformers as hf
from torch import nn

from depthscope.models import (
    BlockConfig,
    CarriedMean,
    CausalLM,
    Encoder,
    TransformerXL,
    TransformerXLConfig,
    VisionTransformer,
    pre_norm,
)
from depthscope.passes import batches
from depthscope.stations import Placement
from samples import seeded

SMALL = {"hidden_size": 16, "num_attention_heads": 4, "num_hidden_layers": 3, "intermediate_size": 24}
TEXT = SMALL | {"vocab_size": 50}
IMAGE = SMALL | {"image_size": 8, "patch_size": 2}
GROUPED = TEXT | {"num_key_value_heads": 2, "max_position_embeddings": 64}
IDS = torch.randint(5, 50, (2, 7), generator=seeded(0))
MASK = torch.tensor([[1] * 7, [1] * 4 + [0] * 3])
TOKENS = torch.randn(2, 7, 16, generator=seeded(1))
IMAGES = torch.randn(2, 3, 8, 8, generator=seeded(2))
XL = TransformerXLConfig(50, 3, 16, 4, 24, cutoffs=(20,))


def text() -> dict[str, torch.Tensor]:
    return {"input_ids": IDS, "attention_mask": MASK}


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
    ),
    "llama": Specimen(
        lambda: hf.LlamaModel(hf.LlamaConfig(**GROUPED)), text, placement="pre", causal=True, hidden_states=True
    ),
    "qwen2": Specimen(
        lambda: hf.Qwen2Model(hf.Qwen2Config(**GROUPED)), text, placement="pre", causal=True, hidden_states=True
    ),
    "mistral": Specimen(
        lambda: hf.MistralModel(hf.MistralConfig(**GROUPED)), text, placement="pre", causal=True, hidden_states=True
    ),
    "gemma": Specimen(
        lambda: hf.GemmaModel(hf.GemmaConfig(**GROUPED, head_dim=4)),
        text,
        placement="pre",
        causal=True,
        hidden_states=True,
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
    ),
    "t5": Specimen(
        lambda: hf.T5Model(hf.T5Config(vocab_size=50, d_model=16, d_kv=4, d_ff=24, num_layers=3, num_heads=4)),
        lambda: text() | {"decoder_input_ids": IDS.flip(0), "decoder_attention_mask": MASK},
        placement="pre",
        causal=None,
        blocks=6,
        modules=6,
    ),
}
HAS_HIDDEN_STATES = [name for name, specimen in ZOO.items() if specimen.hidden_states]


def make(name: str) -> tuple[nn.Module, Any]:
    """The model, with weights large enough that every block does something, and its inputs."""
    specimen = ZOO[name]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = specimen.build()
        for parameter in model.parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=0.3)
    return model, specimen.inputs()


def run(model: nn.Module, inputs: Any) -> torch.Tensor:
    """What the model returns, or the first of it."""
    batch = next(batches(model, inputs))
    output = model(*batch.args, **batch.kwargs)
    return output if isinstance(output, torch.Tensor) else output[0]
