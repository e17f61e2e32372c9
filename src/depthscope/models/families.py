"""A family by name, in its base shape, with random weights: what a model is before it has learned anything.

Hugging Face's classes and initialisers, with the shapes of the published base models; the Llama-likes, which have no
base size, take 12 blocks of width 768 with their own ratio of FFN to width. `encoder` is ours. A family is one line in
`FAMILIES`; another package names its own in the entry-point group `depthscope.models`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, ClassVar, Protocol

import torch
from torch import nn

from depthscope.extras import require
from depthscope.memory import count_parameters, counting, require_memory
from depthscope.models.block import BlockConfig
from depthscope.models.encoder import Encoder
from depthscope.models.initialisers import xavier
from depthscope.registry import Registry


@dataclass(frozen=True)
class Shape:
    """How deep and wide a model is."""

    depth: int = 12
    width: int = 768
    heads: int = 12
    ffn_width: int = 3072


class ModelFamily(Protocol):
    """A family that can be built in any shape."""

    @property
    def name(self) -> str: ...
    @property
    def library(self) -> str: ...  # the package that has the models' classes, as it is imported; "": its own
    @property
    def base(self) -> Shape: ...  # the shape of its base model
    @property
    def causal(self) -> bool: ...  # whether it has a causal language model, with a loss

    def check(self, shape: Shape) -> None:
        """Refuses, with a ValueError, a shape that it cannot have."""

    def build(self, shape: Shape, language_model: bool, dtype: torch.dtype) -> nn.Module:
        """The model of this shape and dtype on torch's default device, which may be the meta device."""

    def draw(self, shape: Shape, language_model: bool, dtype: torch.dtype, seed: int) -> nn.Module:
        """The same on the CPU with random weights, a function of `seed`. The global seed is set to it, too."""


# What configuration classes call the parts of a shape, unless their family says otherwise.
USUAL = {
    "depth": "num_hidden_layers",
    "width": "hidden_size",
    "heads": "num_attention_heads",
    "ffn_width": "intermediate_size",
}


@dataclass(frozen=True)
class HuggingFaceFamily:
    """A configuration class of Hugging Face, and its base shape.

    `fields`: what it calls the parts of a shape where that is not as usual, several names with a space between them;
    "head_width" where it is set apart from width ÷ heads. `sees_answer`: whether its language model reads the token
    that it predicts, unless told otherwise.
    """

    name: str
    config: str
    fields: Mapping[str, str] = field(default_factory=dict)
    base: Shape = Shape()
    vocabulary: int | None = None  # None: the class's own
    causal: bool = False
    rotary: bool = False  # turns pairs of entries, so heads have an even width
    sees_answer: bool = False
    others: Mapping[str, Any] = field(default_factory=dict)
    library: ClassVar[str] = "transformers"

    def check(self, shape: Shape) -> None:
        if self.rotary and (shape.width // shape.heads) % 2:
            raise ValueError(
                f"expected heads of an even width for {self.name!r} (rotary positions turn pairs), "
                f"got {shape.width // shape.heads}: width {shape.width} and {shape.heads} heads"
            )

    def build(self, shape: Shape, language_model: bool, dtype: torch.dtype) -> nn.Module:
        transformers: Any = require("transformers", "huggingface")
        parts = asdict(shape) | {"head_width": shape.width // shape.heads}
        values = {own: parts[part] for part, names in {**USUAL, **self.fields}.items() for own in names.split()}
        if self.vocabulary is not None:
            values["vocab_size"] = self.vocabulary
        auto = transformers.AutoModelForCausalLM if language_model else transformers.AutoModel
        model: nn.Module = auto.from_config(getattr(transformers, self.config)(**self.others, **values), dtype=dtype)
        for parameter in model.parameters():  # XLNet makes some in float32 whatever the dtype
            if parameter.is_floating_point():
                parameter.data = parameter.data.to(dtype)
        return model

    def draw(self, shape: Shape, language_model: bool, dtype: torch.dtype, seed: int) -> nn.Module:
        with torch.device("meta"):
            model: Any = self.build(shape, language_model, dtype)
        model = model.to_empty(device="cpu")
        model.init_weights()  # the only time that numbers are drawn: 100 blocks are 3 GB
        return model


@dataclass(frozen=True)
class EncoderFamily:
    """Our own encoder, after Yu & Zhang's Algorithm 1, with Xavier weights."""

    name: str = "encoder"
    base: Shape = Shape(12, 512, 8, 2048)
    causal: bool = False
    library: ClassVar[str] = "depthscope"

    def check(self, shape: Shape) -> None: ...

    def build(
        self, shape: Shape, language_model: bool, dtype: torch.dtype, generator: torch.Generator | None = None
    ) -> nn.Module:
        block = BlockConfig(shape.width, shape.heads, shape.ffn_width, initialise=xavier)
        return Encoder(shape.depth, block, generator=generator).to(dtype)

    def draw(self, shape: Shape, language_model: bool, dtype: torch.dtype, seed: int) -> nn.Module:
        return self.build(shape, language_model, dtype, torch.Generator().manual_seed(seed))


_GROUPED = {"heads": "num_attention_heads num_key_value_heads"}
_LLAMA = _GROUPED | {"head_width": "head_dim"}
_GPT2 = {"depth": "n_layer", "width": "n_embd", "heads": "n_head", "ffn_width": "n_inner"}
_XLNET = {"depth": "n_layer", "width": "d_model", "heads": "n_head", "ffn_width": "d_inner", "head_width": "d_head"}
_OPT = {"width": "hidden_size word_embed_proj_dim", "ffn_width": "ffn_dim"}
_T5 = {"depth": "num_layers num_decoder_layers", "width": "d_model", "heads": "num_heads", "ffn_width": "d_ff"}
_T5 |= {"head_width": "d_kv"}
_DISTILBERT = {"depth": "n_layers", "width": "dim", "heads": "n_heads", "ffn_width": "hidden_dim"}
_BLOOM = {"depth": "n_layer", "heads": "n_head", "ffn_width": ""}  # its FFN is always four times as wide
_BART = {"depth": "encoder_layers decoder_layers", "width": "d_model"}
_BART |= {"heads": "encoder_attention_heads decoder_attention_heads", "ffn_width": "encoder_ffn_dim decoder_ffn_dim"}
_DINOV2 = {"ffn_width": ""}  # its FFN is given as a ratio
_V3 = {"relative_attention": True, "position_buckets": 256, "pos_att_type": ["p2c", "c2p"], "share_att_key": True}
_V3 |= {"norm_rel_ebd": "layer_norm", "position_biased_input": False, "type_vocab_size": 0}  # DeBERTa's third version
_NO_PAD = {"pad_token_id": 0}  # some name one beyond a small vocabulary
_POSITIONS = {"max_position_embeddings": 514}  # 512 tokens: two positions are spent on padding

FAMILIES: Registry[ModelFamily] = Registry(
    "family",
    "depthscope.models",
    [
        HuggingFaceFamily("bert", "BertConfig"),
        HuggingFaceFamily("roberta", "RobertaConfig", others=_POSITIONS),
        HuggingFaceFamily("albert", "AlbertConfig", others={"embedding_size": 128}),
        HuggingFaceFamily("distilbert", "DistilBertConfig", _DISTILBERT, Shape(depth=6)),
        HuggingFaceFamily("mpnet", "MPNetConfig", others=_POSITIONS),
        HuggingFaceFamily("electra", "ElectraConfig", others={"embedding_size": 768}),
        HuggingFaceFamily("modernbert", "ModernBertConfig", base=Shape(22, ffn_width=1152), rotary=True),
        HuggingFaceFamily("deberta", "DebertaV2Config", others=_V3),
        HuggingFaceFamily("xlnet", "XLNetConfig", _XLNET, sees_answer=True),
        HuggingFaceFamily("gpt2", "GPT2Config", _GPT2, causal=True),
        HuggingFaceFamily("opt", "OPTConfig", _OPT, causal=True),
        HuggingFaceFamily("llama", "LlamaConfig", _LLAMA, Shape(ffn_width=2048), 32000, causal=True, rotary=True),
        HuggingFaceFamily("qwen2", "Qwen2Config", _GROUPED, Shape(ffn_width=4096), 32000, causal=True, rotary=True),
        HuggingFaceFamily("mistral", "MistralConfig", _LLAMA, Shape(ffn_width=2688), 32000, causal=True, rotary=True),
        HuggingFaceFamily("gemma", "GemmaConfig", _LLAMA, Shape(ffn_width=6144), 32000, causal=True, rotary=True),
        HuggingFaceFamily("qwen3", "Qwen3Config", _LLAMA, Shape(ffn_width=2304), 32000, causal=True, rotary=True),
        HuggingFaceFamily("gemma2", "Gemma2Config", _LLAMA, Shape(ffn_width=3072), 32000, causal=True, rotary=True),
        HuggingFaceFamily("gemma3", "Gemma3TextConfig", _LLAMA, Shape(ffn_width=4608), 32000, causal=True, rotary=True),
        HuggingFaceFamily("olmo2", "Olmo2Config", _GROUPED, Shape(), 32000, True, True, others=_NO_PAD),
        HuggingFaceFamily("phi3", "Phi3Config", _GROUPED, Shape(ffn_width=2048), 32000, True, True, others=_NO_PAD),
        HuggingFaceFamily("cohere", "CohereConfig", _GROUPED, Shape(ffn_width=2112), 32000, True, True, others=_NO_PAD),
        HuggingFaceFamily("gpt-neox", "GPTNeoXConfig", causal=True, rotary=True, others=_NO_PAD),
        HuggingFaceFamily(
            "falcon", "FalconConfig", {"ffn_width": "ffn_hidden_size"}, Shape(), 32000, True, True, others=_NO_PAD
        ),
        HuggingFaceFamily("bloom", "BloomConfig", _BLOOM, Shape(), 32000, causal=True),
        HuggingFaceFamily("t5", "T5Config", _T5),
        HuggingFaceFamily("bart", "BartConfig", _BART, Shape(depth=6)),
        HuggingFaceFamily("pegasus", "PegasusConfig", _BART, Shape(depth=12)),
        HuggingFaceFamily("vit", "ViTConfig"),
        HuggingFaceFamily("deit", "DeiTConfig"),
        HuggingFaceFamily("dinov2", "Dinov2Config", _DINOV2),
        EncoderFamily(),
    ],
)


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
    family = FAMILIES[name]
    if language_model and not family.causal:
        able = ", ".join(other for other, its in FAMILIES.items() if its.causal)
        raise ValueError(f"expected a family with a causal language model ({able}), got {name!r}")
    base = family.base
    depth, width = base.depth if depth is None else depth, base.width if width is None else width
    if heads is None:
        own, rest = divmod(width, base.width // base.heads)
        heads = base.heads if rest else own
    if depth < 1:
        raise ValueError(f"expected a depth of at least 1 block, got {depth}")
    if width < 1 or heads < 1 or width % heads:
        raise ValueError(f"expected heads that divide the width, got width {width} and {heads} heads")
    shape = Shape(depth, width, heads, max(1, base.ffn_width * width // base.width))
    family.check(shape)
    what = f"{name} of depth {depth}, width {width}"
    with counting(what), torch.device("meta"):
        # From one and two blocks: no time is spent on a depth that cannot be had.
        small = (family.build(replace(shape, depth=few), language_model, dtype) for few in (1, 2))
        one, two = map(count_parameters, small)
    require_memory(one + (depth - 1) * (two - one), dtype, what=what, blocks=depth)
    with torch.random.fork_rng(devices=[]):  # also for nn.Linear, which draws before our initialisers do
        torch.default_generator.manual_seed(seed)
        return family.draw(shape, language_model, dtype, seed).eval()


def has_causal_loss(config: Any) -> bool:
    """Whether the language model of a Hugging Face configuration predicts every token from earlier ones alone.

    Only then its loss says something: a BERT head would see the answer. Of a family that is not among ours,
    Hugging Face's list of causal models and the configuration's `is_decoder` decide.
    """
    transformers: Any = require("transformers", "huggingface")
    causal = type(config) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING and getattr(config, "is_decoder", True)
    known = (family for family in FAMILIES.values() if isinstance(family, HuggingFaceFamily))
    return bool(causal) and not any(f.sees_answer for f in known if f.config == type(config).__name__)
