"""A family by name, in its base shape, with random weights: what a model is before it has learned anything.

Hugging Face's classes and initialisers, with the shapes of the published base models; the Llama-likes,
which have no base size, take 12 blocks of width 768 with their own ratio of FFN to width. `encoder` is
ours, after Yu & Zhang's Algorithm 1 with Xavier weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

import torch
from torch import nn

from depthscope.extras import require
from depthscope.machine import count_parameters, require_memory
from depthscope.models.block import BlockConfig
from depthscope.models.encoder import Encoder
from depthscope.models.initialisers import xavier


@dataclass(frozen=True)
class Shape:
    """How deep and wide a model is."""

    depth: int = 12
    width: int = 768
    heads: int = 12
    ffn_width: int = 3072


@dataclass(frozen=True)
class Fields:
    """What a configuration class calls the parts of a shape. Several names: all of them get the value."""

    depth: tuple[str, ...] = ("num_hidden_layers",)
    width: tuple[str, ...] = ("hidden_size",)
    heads: tuple[str, ...] = ("num_attention_heads",)
    ffn_width: tuple[str, ...] = ("intermediate_size",)
    head_width: tuple[str, ...] = ()  # where it is set apart from width ÷ heads
    vocabulary: str | None = "vocab_size"


@dataclass(frozen=True)
class HuggingFaceFamily:
    """A configuration class, its field names, and its base shape."""

    config: str
    fields: Fields = Fields()
    base: Shape = Shape()
    vocabulary: int | None = None  # None: the class's own
    causal: bool = False  # has a causal language model with a loss
    rotary: bool = False  # turns pairs of entries, so heads have an even width
    others: Mapping[str, Any] = field(default_factory=dict)


_LLAMA = Fields(heads=("num_attention_heads", "num_key_value_heads"), head_width=("head_dim",))
_QWEN2 = Fields(heads=("num_attention_heads", "num_key_value_heads"))
_XLNET = Fields(("n_layer",), ("d_model",), ("n_head",), ("d_inner",), ("d_head",))
_GPT2 = Fields(("n_layer",), ("n_embd",), ("n_head",), ("n_inner",))
_OPT = Fields(width=("hidden_size", "word_embed_proj_dim"), ffn_width=("ffn_dim",))
_T5 = Fields(("num_layers", "num_decoder_layers"), ("d_model",), ("num_heads",), ("d_ff",), ("d_kv",))
_DISTILBERT = Fields(("n_layers",), ("dim",), ("n_heads",), ("hidden_dim",))
_VIT = Fields(vocabulary=None)
_POSITIONS = {"max_position_embeddings": 514}  # 512 tokens: two positions are spent on padding

HUGGING_FACE: dict[str, HuggingFaceFamily] = {
    "bert": HuggingFaceFamily("BertConfig"),
    "roberta": HuggingFaceFamily("RobertaConfig", others=_POSITIONS),
    "albert": HuggingFaceFamily("AlbertConfig", others={"embedding_size": 128}),
    "distilbert": HuggingFaceFamily("DistilBertConfig", _DISTILBERT, Shape(depth=6)),
    "mpnet": HuggingFaceFamily("MPNetConfig", others=_POSITIONS),
    "xlnet": HuggingFaceFamily("XLNetConfig", _XLNET),
    "gpt2": HuggingFaceFamily("GPT2Config", _GPT2, causal=True),
    "opt": HuggingFaceFamily("OPTConfig", _OPT, causal=True),
    "llama": HuggingFaceFamily("LlamaConfig", _LLAMA, Shape(ffn_width=2048), 32000, causal=True, rotary=True),
    "qwen2": HuggingFaceFamily("Qwen2Config", _QWEN2, Shape(ffn_width=4096), 32000, causal=True, rotary=True),
    "mistral": HuggingFaceFamily("MistralConfig", _LLAMA, Shape(ffn_width=2688), 32000, causal=True, rotary=True),
    "gemma": HuggingFaceFamily("GemmaConfig", _LLAMA, Shape(ffn_width=6144), 32000, causal=True, rotary=True),
    "t5": HuggingFaceFamily("T5Config", _T5),
    "vit": HuggingFaceFamily("ViTConfig", _VIT),
    "deit": HuggingFaceFamily("DeiTConfig", _VIT),
}
ENCODER_SHAPE = Shape(12, 512, 8, 2048)
FAMILY_NAMES = (*HUGGING_FACE, "encoder")


def build_family(
    name: str,
    depth: int | None = None,
    width: int | None = None,
    heads: int | None = None,
    *,
    language_model: bool = False,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
) -> nn.Module:
    """The family's base model with random weights on the CPU, in eval mode; what is given replaces the base shape.

    The FFN keeps its ratio to the width. Without `heads`, another width keeps the width of a head (64) if
    it divides, else the number of heads. `language_model=True` adds the head that gives a causal loss. The
    weights are a function of `seed`; the global random state stays as it was.
    """
    if name not in FAMILY_NAMES:
        nearest = get_close_matches(name, FAMILY_NAMES, n=1)
        meant = f"did you mean {nearest[0]!r}? " if nearest else ""
        raise ValueError(f"unknown family {name!r}: {meant}expected one of {', '.join(FAMILY_NAMES)}")
    family = HUGGING_FACE.get(name)
    if language_model and not (family and family.causal):
        able = ", ".join(other for other, its in HUGGING_FACE.items() if its.causal)
        raise ValueError(f"expected a family with a causal language model ({able}), got {name!r}")
    shape = _reshape(family.base if family else ENCODER_SHAPE, depth, width, heads)
    if family and family.rotary and (shape.width // shape.heads) % 2:
        raise ValueError(
            f"expected heads of an even width for {name!r} (rotary positions turn pairs), "
            f"got {shape.width // shape.heads}: width {shape.width} and {shape.heads} heads"
        )

    def on_meta(depth: int) -> nn.Module:
        of_depth = Shape(depth, shape.width, shape.heads, shape.ffn_width)
        with torch.device("meta"):
            return _hugging_face(family, of_depth, language_model, dtype) if family else _encoder(of_depth, None)

    require_memory(_parameters(on_meta, shape.depth), dtype)
    with torch.random.fork_rng(devices=[]):  # also for nn.Linear, which draws before our initialisers do
        torch.default_generator.manual_seed(seed)
        if family is None:
            return _encoder(shape, torch.Generator().manual_seed(seed)).to(dtype).eval()
        model: Any = on_meta(shape.depth).to_empty(device="cpu")
        model.init_weights()  # the only time that numbers are drawn: 100 blocks are 3 GB
        return model.eval()


def _reshape(base: Shape, depth: int | None, width: int | None, heads: int | None) -> Shape:
    """The base shape with what was asked for."""
    depth = base.depth if depth is None else depth
    width = base.width if width is None else width
    if heads is None:
        head_width = base.width // base.heads
        heads = base.heads if width % head_width else width // head_width
    if depth < 1:
        raise ValueError(f"expected a depth of at least 1 block, got {depth}")
    if width < 1 or heads < 1 or width % heads:
        raise ValueError(f"expected heads that divide the width, got width {width} and {heads} heads")
    return Shape(depth, width, heads, max(1, base.ffn_width * width // base.width))


def _parameters(on_meta: Callable[[int], nn.Module], depth: int) -> int:
    """Parameters of `depth` blocks, from one and two blocks: no time is spent on a depth that cannot be had."""
    one, two = (count_parameters(on_meta(blocks)) for blocks in (1, 2))
    return one + (depth - 1) * (two - one)


def _encoder(shape: Shape, generator: torch.Generator | None) -> Encoder:
    block = BlockConfig(shape.width, shape.heads, shape.ffn_width, initialise=xavier)
    return Encoder(shape.depth, block, generator=generator)


def _hugging_face(family: HuggingFaceFamily, shape: Shape, language_model: bool, dtype: torch.dtype) -> nn.Module:
    transformers: Any = require("transformers", "huggingface")
    fields = family.fields
    values = dict(family.others)
    for names, value in (
        (fields.depth, shape.depth),
        (fields.width, shape.width),
        (fields.heads, shape.heads),
        (fields.ffn_width, shape.ffn_width),
        (fields.head_width, shape.width // shape.heads),
        ((fields.vocabulary,) if fields.vocabulary and family.vocabulary else (), family.vocabulary),
    ):
        values.update(dict.fromkeys(names, value))
    config = getattr(transformers, family.config)(**values)
    auto = transformers.AutoModelForCausalLM if language_model else transformers.AutoModel
    model: nn.Module = auto.from_config(config, dtype=dtype)
    for parameter in model.parameters():  # XLNet makes some in float32 whatever the dtype
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)
    return model
