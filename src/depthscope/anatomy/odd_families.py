"""Families whose layout is not the whole truth: it depends on the block, or something in the block has no name."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import nn

from depthscope.anatomy.layout import Layout
from depthscope.anatomy.projections import fused_projections
from depthscope.anatomy.structure import BlockAnatomy, Piece, Projections
from depthscope.stations import BRANCHES, CROSS

WINDOWS = (
    "windows: similarity is over all tokens of an image, attention mixes within a window; between two stages patches "
    "are merged, so every stage is a part of its own"
)


def without(block: BlockAnatomy, *stations: str) -> BlockAnatomy:
    """The same, but for stations that no module shows."""
    return replace(block, spots={station: spot for station, spot in block.spots.items() if station not in stations})


def bart(layout: Layout, name: str, layer: Any) -> BlockAnatomy:
    """A decoder that is a language model by itself has its cross-attention too, and never calls it."""
    config = getattr(layer.self_attn, "config", None)
    reads = getattr(config, "is_encoder_decoder", True) or getattr(config, "add_cross_attention", False)
    return (layout if reads else replace(layout, cross=None))(name, layer)


def blip_text(layout: Layout, name: str, layer: Any) -> BlockAnatomy:
    """Whether the text tower is causal, and whether it attends to the image, is a matter of each call of its model. Its
    blocks say neither: a remedy is careful then, and what stands behind a cross-attention that may not run is hidden.
    """
    block = layout(name, layer)
    return block if block.cross_attention is None else without(block, *CROSS, "ffn_input")


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


def siglip(layout: Layout, name: str, layer: Any) -> BlockAnatomy:
    """Neither tower is causal."""
    return replace(layout(name, layer), causal=False)


def cohere(layout: Layout, name: str, layer: Any) -> BlockAnatomy:
    """Phi has another name for its output projection."""
    if hasattr(layer.self_attn, "dense"):
        assert layout.attention is not None
        layout = replace(layout, attention=replace(layout.attention, output="self_attn.dense"))
    return layout(name, layer)


def dinov2(layout: Layout, name: str, layer: Any) -> BlockAnatomy:
    """Each branch is multiplied by a vector (LayerScale)."""
    block = layout(name, layer)

    def projections() -> Projections:
        assert block.projections is not None
        plain, scale = block.projections(), layer.layer_scale1.lambda1.detach()  # (d)
        assert plain.output is not None
        bias = None if plain.output_bias is None else plain.output_bias * scale
        return replace(plain, output=plain.output * scale, output_bias=bias)

    return replace(block, projections=projections)


def falcon(layout: Layout, name: str, layer: Any) -> BlockAnatomy:
    """Parallel branches with two norms or with one, or one after the other."""
    if hasattr(layer, "ln_attn"):
        layout = replace(layout, placement="parallel", norms="ln_attn ln_mlp")
    elif not hasattr(layer, "post_attention_layernorm"):
        layout = replace(layout, placement="parallel", norms="input_layernorm")
    return layout(name, layer)


def gpt_neox(layout: Layout, name: str, layer: Any) -> BlockAnatomy:
    """Parallel branches, each with a norm of its own, or one after the other."""
    return replace(layout, placement="parallel" if layer.use_parallel_residual else "pre")(name, layer)


def jamba(layout: Layout, name: str, layer: Any) -> BlockAnatomy:
    """Most blocks have a Mamba mixer in the place of attention."""
    if not hasattr(layer, "self_attn"):
        layout = replace(layout, attention=None, attention_branch="mamba")
    return layout(name, layer)


def llama(layout: Layout, name: str, layer: Any) -> BlockAnatomy:
    """StableLM may run its branches in parallel. The sink of gpt-oss is a last column of attention's softmax. Granite
    multiplies its branches by a number before it adds them: where that is not 1, no module shows what is added (the use
    of depth takes it from the trunk before and after)."""
    if getattr(layer, "use_parallel_residual", False):
        layout = replace(layout, placement="parallel", norms="input_layernorm")
    block = replace(layout(name, layer), extra_keys=1 if hasattr(layer.self_attn, "sinks") else 0)
    return block if getattr(layer, "residual_multiplier", 1) == 1 else without(block, *BRANCHES)


def mpt(layout: Layout, name: str, layer: Any) -> BlockAnatomy:
    """Queries, keys and values that are clipped are no linear maps of tokens."""
    block = layout(name, layer)
    return replace(block, fused_values=None, projections=None) if layer.attn.clip_qkv else block


def opt(layout: Layout, name: str, layer: Any) -> BlockAnatomy:
    """Post-norm in the 350m model."""
    return replace(layout, placement="pre" if layer.do_layer_norm_before else "post")(name, layer)


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
            linear=True,
        ),
    )


def torch_token_axis(layer: Any) -> int:
    """By default tokens come first."""
    return 1 if layer.self_attn.batch_first else 0


def wav2vec2(layout: Layout, name: str, layer: Any) -> BlockAnatomy:
    """An adapter stands between the FFN's sum, which is not seen, and the end."""
    block = layout(name, layer)
    return block if getattr(layer, "adapter_layer", None) is None else without(block, "after_ffn", "ffn_branch")


def xlnet(layout: Layout, name: str, layer: Any) -> BlockAnatomy:
    """Projections are bare parameters (d, h, k). The attention branch is an einsum inside a method, and no module's
    output: that station is not seen."""
    attention = layer.rel_attn

    def projections() -> Projections:
        parameters = (attention.q, attention.k, attention.v, attention.o)
        q, k, v, o = (weight.detach().transpose(0, 1) for weight in parameters)
        pieces = tuple(map(Piece, parameters))
        return Projections(q, k, v, o.mT, roles={"queries_keys": pieces[:2], "values_output": pieces[2:]})

    return without(replace(layout(name, layer), projections=projections), "attention_branch")


def xlnet_causal(model: Any) -> bool:
    """As the configuration says."""
    return getattr(getattr(model, "config", None), "attn_type", "bi") == "uni"
