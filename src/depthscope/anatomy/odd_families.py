"""Families whose layout is not the whole truth: it depends on the block, or something in the block has no name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor, nn

from depthscope import walking
from depthscope.anatomy.layout import Layout, find_if_there
from depthscope.anatomy.projections import fused_projections, linear_projections
from depthscope.anatomy.structure import BlockAnatomy, Piece, Projections, Spot
from depthscope.models.block import Block
from depthscope.stations import BRANCHES

WINDOWS = (
    "windows: similarity is over all tokens of an image, attention mixes within a window; between two stages patches "
    "are merged, so every stage is a part of its own"
)


Describe = Callable[[str, Any], BlockAnatomy]


def either(flag: str, one: Describe, other: Describe, name: str, block: Any) -> BlockAnatomy:
    """The one where a dotted name leads to something true in the block, and the other elsewhere."""
    return (one if find_if_there(block, flag) else other)(name, block)


def ours(name: str, block: Any) -> BlockAnatomy:
    """Of our own `Block` every station is a module of its own."""
    attention = block.attention
    norms = (getattr(block, norm) for norm in block.wiring.norms)  # those that the wiring calls, in their order
    # Where a norm follows the values (a Linear with a forward of its own), they are no linear map of what is read.
    is_plain = not isinstance(attention.value, nn.Linear) or type(attention.value).forward is nn.Linear.forward
    output = attention.output if isinstance(attention.output, nn.Linear) else None
    read = attention.query, attention.key, attention.value
    return BlockAnatomy(
        name,
        block,
        # The output is taken after any hook on the block itself.
        spots={station: Spot(module, "out") for station, module in block.stations.items()}
        | {"output": Spot(block, "out")},
        placement=block.wiring.placement,
        attention=attention,
        norms=tuple(norm for norm in norms if norm is not None),
        values=Spot(attention.value, "out"),
        context=Spot(attention.output, "in"),
        ffn=(block.ffn,),
        projections=partial(linear_projections, *read, output, attention.heads) if is_plain else None,
    )


def ours_causal(model: nn.Module) -> bool:
    """As attention says."""
    return any(module.attention.causal for module in walking.modules(model) if isinstance(module, Block))


def bart(layout: Layout, name: str, layer: Any) -> BlockAnatomy:
    """A decoder that is a language model by itself has its cross-attention too, and never calls it."""
    config = getattr(layer.self_attn, "config", None)
    reads = getattr(config, "is_encoder_decoder", True) or getattr(config, "add_cross_attention", False)
    return (layout if reads else replace(layout, cross=None))(name, layer)


def bloom(layout: Layout, name: str, layer: Any) -> BlockAnatomy:
    """The trunk may be what a norm gives, or the last layers are never called: what is certain is left."""
    attention, block = layer.self_attention, layout(name, layer)
    if layer.apply_residual_connection_post_layernorm or (attention.pretraining_tp > 1 and attention.slow_but_exact):
        ends = {station: block.spots[station] for station in ("input", "output")}
        return BlockAnatomy(name, layer, ends, norms=block.norms)
    return block


def clip(layout: Layout, name: str, layer: Any) -> BlockAnatomy:
    """The text tower is causal, the vision tower is not."""
    return replace(layout(name, layer), causal="Text" in type(layer.self_attn.config).__name__)


def beit(layout: Layout, name: str, layer: Any) -> BlockAnatomy:
    """Each branch is multiplied by a parameter before it is added: no module shows what is added."""
    scaled = isinstance(layer.lambda_1, Tensor)  # without LayerScale it is 1
    return _scaled(layout(name, layer), layer.lambda_1).without(BRANCHES) if scaled else layout(name, layer)


def dinov2(layout: Layout, name: str, layer: Any) -> BlockAnatomy:
    """Each branch is multiplied by a vector (LayerScale)."""
    return _scaled(layout(name, layer), layer.layer_scale1.lambda1)


def _scaled(block: BlockAnatomy, scale: Tensor) -> BlockAnatomy:
    """With the vector (d) that attention's branch is multiplied by in the output projection."""

    def projections() -> Projections:
        assert block.projections is not None
        plain, factor = block.projections(), scale.detach()
        assert plain.output is not None
        bias = None if plain.output_bias is None else plain.output_bias * factor
        return replace(plain, output=plain.output * factor, output_bias=bias)

    return replace(block, projections=projections)


def doge(layout: Layout, name: str, layer: Any) -> BlockAnatomy:
    """The trunk is multiplied by a vector before a branch is added: no placement of norms says so, and what stands
    before the FFN's norm is a copy of the trunk."""
    return replace(layout(name, layer), placement=None).without(("after_attention", "ffn_input", "after_ffn"))


def llama(layout: Layout, name: str, layer: Any) -> BlockAnatomy:
    """The sink of gpt-oss is a last column of attention's softmax. Granite multiplies its branches by a number before
    it adds them: where that is not 1, no module shows what is added (the use of depth takes it from the trunk before
    and after)."""
    block = replace(layout(name, layer), extra_keys=int(hasattr(layer.self_attn, "sinks")))
    return block if getattr(layer, "residual_multiplier", 1) == 1 else block.without(BRANCHES)


def mpt(layout: Layout, name: str, layer: Any) -> BlockAnatomy:
    """Queries, keys and values that are clipped are no linear maps of tokens."""
    block = layout(name, layer)
    return replace(block, fused_values=None, projections=None) if layer.attn.clip_qkv else block


def streamed(name: str, layer: Any) -> BlockAnatomy:
    """Hyper-connections (DeepSeek-V4): the trunk has several streams (batch, n, streams, d). Each branch reads a
    mixture of them, and is added to them, by weights that depend on the token."""
    spots = {
        "input": Spot(layer, "in", (0, 0)),
        "attention_input": Spot(layer.input_layernorm, "out"),
        "ffn_input": Spot(layer.post_attention_layernorm, "out"),
        "output": Spot(layer, "out"),
    }
    norms = layer.input_layernorm, layer.post_attention_layernorm
    return BlockAnatomy(name, layer, spots, "streams", attention=layer.self_attn, norms=norms, ffn=(layer.mlp,))


def swin(layout: Layout, name: str, layer: Any) -> BlockAnatomy:
    """A stage is no block: between two stages patches are merged, so that tokens become fewer and wider. Each stage is
    a part of its own. Its tokens are those of the whole image, and so are the similarities; attention mixes them within
    a window only, and the windows are shifted from block to block. What stands inside the windows (values, context) has
    another layout, and attention is seen where one window is the whole image."""
    numbers = [int(word) for word in name.split(".") if word.isdigit()]  # layers.STAGE.blocks.BLOCK
    stage = f"stage {numbers[-2] + 1}" if len(numbers) > 1 else ""
    return replace(layout(name, layer), values=None, context=None, part=stage)


def t5(layout: Layout, name: str, block: Any) -> BlockAnatomy:
    """A block says which half of the model it is of."""
    return replace(layout(name, block), part="decoder" if block.is_decoder else "encoder")


def torch_encoder(layout: Layout, name: str, layer: Any) -> BlockAnatomy:
    # forward(src, src_mask, src_key_padding_mask, is_causal)
    return _of_torch(layout, name, layer, nn.TransformerEncoderLayer, {"src_mask": 1, "is_causal": 3})


def torch_decoder(layout: Layout, name: str, layer: Any) -> BlockAnatomy:
    # forward(tgt, memory, tgt_mask, memory_mask, tgt_key_padding_mask, memory_key_padding_mask, tgt_is_causal, …)
    return _of_torch(layout, name, layer, nn.TransformerDecoderLayer, {"tgt_mask": 2, "tgt_is_causal": 6})


def _of_torch(layout: Layout, name: str, layer: Any, plain: type, arguments: dict[str, int]) -> BlockAnatomy:
    """The call says whether it is causal, unless attention may have a mask of its own. One parameter makes queries,
    keys and values."""
    attention = layer.self_attn
    is_own = getattr(type(layer), "_sa_block", None) is getattr(plain, "_sa_block", None)
    return replace(
        replace(layout, placement="pre" if layer.norm_first else "post")(name, layer),
        causal_arguments=arguments if is_own and type(attention) is nn.MultiheadAttention else {},
        projections=lambda: fused_projections(
            attention.in_proj_weight,
            attention.in_proj_bias,
            attention.out_proj.weight,
            attention.out_proj.bias,
            attention.num_heads,
        ),
    )


def torch_token_axis(layer: Any) -> int:
    """By default tokens come first."""
    return 1 if layer.self_attn.batch_first else 0


def xlnet(layout: Layout, name: str, layer: Any) -> BlockAnatomy:
    """Projections are bare parameters (d, h, k). The attention branch is an einsum inside a method, and no module's
    output: that station is not seen."""
    attention = layer.rel_attn

    def projections() -> Projections:
        parameters = (attention.q, attention.k, attention.v, attention.o)
        q, k, v, o = (weight.detach().transpose(0, 1) for weight in parameters)
        pieces = tuple(map(Piece, parameters))
        return Projections(q, k, v, o.mT, roles={"queries_keys": pieces[:2], "values_output": pieces[2:]})

    return replace(layout(name, layer), projections=projections)


def xlnet_causal(model: Any) -> bool:
    """As the configuration says."""
    return getattr(getattr(model, "config", None), "attn_type", "bi") == "uni"
