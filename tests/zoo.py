"""A tiny model of every family that the probe knows, with random weights and inputs it takes."""

from collections.abc import Callable
from dataclasses import replace
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


ZOO: dict[str, tuple[Callable[[], nn.Module], Callable[[], Any]]] = {
    "encoder": (lambda: Encoder(3, BlockConfig(16, 4)), lambda: {"x": TOKENS, "mask": MASK}),
    "encoder-pre": (lambda: Encoder(3, BlockConfig(16, 4, placement=pre_norm)), lambda: {"x": TOKENS, "mask": MASK}),
    "vision-transformer": (lambda: VisionTransformer(3, BlockConfig(16, 4), image_size=8), lambda: IMAGES),
    "causal-lm": (lambda: CausalLM(3, BlockConfig(16, 4), vocabulary=50), lambda: {"ids": IDS, "mask": MASK}),
    "transformer-xl": (lambda: TransformerXL(XL), lambda: {"ids": IDS}),
    "transformer-xl-pre": (
        lambda: TransformerXL(replace(XL, placement="pre", final_norm=True)),
        lambda: {"ids": IDS},
    ),
    "transformer-xl-deescalated": (
        lambda: TransformerXL(replace(XL, carried_mean=CarriedMean())),
        lambda: {"ids": IDS},
    ),
    "torch": (
        lambda: torch_encoder(batch_first=True),
        lambda: {"src": TOKENS, "src_key_padding_mask": MASK == 0},
    ),
    "torch-tokens-first": (
        lambda: torch_encoder(norm_first=True),
        lambda: {"src": TOKENS.transpose(0, 1).contiguous(), "src_key_padding_mask": MASK == 0},
    ),
    "bert": (lambda: hf.BertModel(hf.BertConfig(**TEXT)), text),
    "roberta": (lambda: hf.RobertaModel(hf.RobertaConfig(**TEXT, pad_token_id=1)), text),
    "albert": (lambda: hf.AlbertModel(hf.AlbertConfig(**TEXT, embedding_size=8)), text),
    "xlnet": (
        lambda: hf.XLNetModel(hf.XLNetConfig(vocab_size=50, d_model=16, n_layer=3, n_head=4, d_inner=24)),
        text,
    ),
    "distilbert": (
        lambda: hf.DistilBertModel(hf.DistilBertConfig(vocab_size=50, dim=16, n_layers=3, n_heads=4, hidden_dim=24)),
        text,
    ),
    "mpnet": (lambda: hf.MPNetModel(hf.MPNetConfig(**TEXT)), text),
    "vit": (lambda: hf.ViTModel(hf.ViTConfig(**IMAGE)), lambda: IMAGES),
    "deit": (lambda: hf.DeiTModel(hf.DeiTConfig(**IMAGE)), lambda: IMAGES),
    "gpt2": (
        lambda: hf.GPT2LMHeadModel(hf.GPT2Config(vocab_size=50, n_embd=16, n_layer=3, n_head=4, n_positions=32)),
        text,
    ),
    "opt": (
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
    ),
    "llama": (lambda: hf.LlamaModel(hf.LlamaConfig(**GROUPED)), text),
    "qwen2": (lambda: hf.Qwen2Model(hf.Qwen2Config(**GROUPED)), text),
    "mistral": (lambda: hf.MistralModel(hf.MistralConfig(**GROUPED)), text),
    "gemma": (lambda: hf.GemmaModel(hf.GemmaConfig(**GROUPED, head_dim=4)), text),
    "t5-encoder": (
        lambda: hf.T5EncoderModel(hf.T5Config(vocab_size=50, d_model=16, d_kv=4, d_ff=24, num_layers=3, num_heads=4)),
        text,
    ),
    "t5": (
        lambda: hf.T5Model(hf.T5Config(vocab_size=50, d_model=16, d_kv=4, d_ff=24, num_layers=3, num_heads=4)),
        lambda: text() | {"decoder_input_ids": IDS.flip(0), "decoder_attention_mask": MASK},
    ),
}
HAS_HIDDEN_STATES = [name for name in ZOO if name in ("bert", "roberta", "albert", "xlnet", "distilbert", "mpnet")]
HAS_HIDDEN_STATES += ["vit", "deit", "gpt2", "opt", "llama", "qwen2", "mistral", "gemma", "t5-encoder"]


def make(name: str) -> tuple[nn.Module, Any]:
    """The model, with weights large enough that every block does something, and its inputs."""
    build, inputs = ZOO[name]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = build()
        for parameter in model.parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=0.3)
    return model, inputs()


def run(model: nn.Module, inputs: Any) -> torch.Tensor:
    """What the model returns, or the first of it."""
    batch = next(batches(model, inputs))
    output = model(*batch.args, **batch.kwargs)
    return output if isinstance(output, torch.Tensor) else output[0]
