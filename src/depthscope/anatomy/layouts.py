"""Layouts that many decoders share: where the norms stand, by the names that a block gives its parts.

A family that is known by its class is described by the layout that it is known to have. Of a block of no known family
a layout is a guess, which `passes.by_structure` tries before any number is taken from it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from depthscope.anatomy.structure import (
    BlockAnatomy,
    Projections,
    Spot,
    branch_norm_spots,
    branch_spots,
    linear_projections,
    parallel_spots,
    post_norm_spots,
    pre_norm_spots,
)
from depthscope.stations import Placement


@dataclass(frozen=True)
class Layout:
    """The norms of a block by name: before attention and behind its branch, before the FFN and behind its branch.

    "" where there is none; in post-norm those "before" are the norms on the trunk, behind each sum. Parallel branches
    may read one norm.
    """

    placement: Placement
    attention_norm: str = ""
    ffn_norm: str = ""
    behind_attention: str = ""
    behind_ffn: str = ""

    @property
    def norms(self) -> tuple[str, ...]:
        """In the order in which they are called."""
        order = (self.attention_norm, self.behind_attention, self.ffn_norm, self.behind_ffn)
        return tuple(name for name in order if name)


LLAMA = Layout("pre", "input_layernorm", "post_attention_layernorm")
GEMMA2 = Layout(
    "sandwich",
    "input_layernorm",
    "pre_feedforward_layernorm",
    "post_attention_layernorm",
    "post_feedforward_layernorm",
)
GLM4 = Layout(
    "sandwich", "input_layernorm", "post_attention_layernorm", "post_self_attn_layernorm", "post_mlp_layernorm"
)
AFMOE = Layout("sandwich", "input_layernorm", "pre_mlp_layernorm", "post_attention_layernorm", "post_mlp_layernorm")
OLMO2 = Layout("branch", "", "", "post_attention_layernorm", "post_feedforward_layernorm")
ONE_NORM = tuple(Layout("parallel", name) for name in ("input_layernorm", "ln_1", "norm"))
PAIRS = (
    ("input_layernorm", "post_attention_layernorm"),
    ("input_layernorm", "pre_ff_layernorm"),
    ("input_layernorm", "pre_feedforward_layernorm"),
    ("attention_layernorm", "feedforward_layernorm"),
    ("ln_1", "ln_2"),
    ("ln1", "ln2"),
    ("ln_attn", "ln_mlp"),
    ("norm_1", "norm_2"),
    ("norm1", "norm2"),
    ("attention_norm", "ffn_norm"),
    ("attn_norm", "ffn_norm"),
    ("attn_norm", "mlp_norm"),
    ("self_attn_layer_norm", "final_layer_norm"),
    ("layer_norm1", "layer_norm2"),
    ("layernorm_before", "layernorm_after"),
)
KINDS: tuple[Placement, ...] = ("pre", "parallel", "post")  # what a pair of norms may be
LAYOUTS = (GEMMA2, GLM4, AFMOE, OLMO2, *ONE_NORM, *(Layout(kind, *pair) for pair in PAIRS for kind in KINDS))

ATTENTIONS = ("self_attn", "self_attention", "attention", "attn")
FFNS = ("mlp", "feed_forward", "feedforward", "ffn", "ff", "block_sparse_moe", "moe")


def decoder_block(
    name: str,
    layer: Any,
    layout: Layout,
    attention: Any,
    ffn: nn.Module,
    projections: Callable[[], Projections] | None = None,
    **others: Any,
) -> BlockAnatomy:
    """A block that has its norms as the layout says; `others` are further fields of its anatomy."""

    def norm(name: str) -> Any:
        return getattr(layer, name) if name else None

    first = norm(layout.attention_norm)
    if layout.placement == "branch":
        spots = branch_norm_spots(layer, ffn)
    else:
        spots = _SPOTS[layout.placement](layer, first, norm(layout.ffn_norm) or first)  # parallel branches may share it
    spots |= branch_spots(norm(layout.behind_attention) or attention, norm(layout.behind_ffn) or ffn)
    return BlockAnatomy(
        name,
        layer,
        spots=spots,
        placement=layout.placement,
        attention=attention,
        norms=tuple(map(norm, layout.norms)),
        ffn=(ffn,),
        projections=projections,
        **others,
    )


_SPOTS: dict[Placement, Callable[[nn.Module, nn.Module, nn.Module], dict[str, Spot]]] = {
    "post": post_norm_spots,
    "pre": pre_norm_spots,
    "sandwich": pre_norm_spots,
    "parallel": parallel_spots,
}


def separate_projections(attention: Any, output: nn.Linear) -> dict[str, Any]:
    """What attention shows that has `q_proj`, `k_proj` and `v_proj`, as fields of a block's anatomy."""
    config = attention.config
    return {
        "values": Spot(attention.v_proj, "out"),
        "context": Spot(output, "in"),
        "projections": lambda: linear_projections(
            attention.q_proj,
            attention.k_proj,
            attention.v_proj,
            output,
            config.num_attention_heads,
            getattr(config, "num_key_value_heads", None),
        ),
    }


def guesses(block: BlockAnatomy) -> Iterator[BlockAnatomy]:
    """What a block may be by the names of its parts, in the order in which it is to be tried.

    What the branches read is heard where it enters them, so that a norm that is not called there does no harm.
    """
    layer = block.module
    parts = dict(layer.named_children())
    attention, ffn = (_only(parts, names) for names in (ATTENTIONS, FFNS))
    if attention is None or ffn is None:
        return
    norms = {name for name, part in parts.items() if "norm" in type(part).__name__.lower()}
    for layout in LAYOUTS:
        if set(layout.norms) == norms:
            guess = decoder_block(block.name, layer, layout, attention, ffn, part=block.part, causal=block.causal)
            reads = {"attention_input": Spot(attention, "in")}
            if layout.placement != "post":
                reads["ffn_input"] = Spot(ffn, "in")
            yield replace(guess, spots={**guess.spots, **reads})


def _only(parts: dict[str, nn.Module], names: tuple[str, ...]) -> nn.Module | None:
    found = [parts[name] for name in names if name in parts]
    return found[0] if len(found) == 1 else None
