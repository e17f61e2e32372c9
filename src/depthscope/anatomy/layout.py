"""A layout: the parts of a block by the names that it gives them, and how its anatomy is read from them.

A family that is known by its class is described by the layout that it is known to have (`families`). Of a block of no
known family a layout is a guess, which `discovery.by_structure` tries before any number is taken from it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

from depthscope.anatomy import projections
from depthscope.anatomy.projections import Order
from depthscope.anatomy.structure import BlockAnatomy, FusedValues, Projections, Spot, is_named_norm
from depthscope.stations import Placement


@dataclass(frozen=True)
class Attention:
    """The names of attention and of what it is made of. `projections`, `heads` and `groups` are names in attention.

    Where one layer makes queries, keys and values, `fused` says in which order they are among its rows: "stacked" (or
    "stacked columns", where it is a Conv1D) or "interleaved", as in `projections`, or "latent" as in DeepSeek.
    """

    module: str
    projections: str = ""  # of queries, keys and values, or the one layer that makes them; "": none is shown
    output: str = ""  # the output projection, by its name in the block
    heads: str = "num_heads"
    groups: str = ""  # of keys and values, if it has them; "": as many as heads
    fused: Literal["", "stacked", "stacked columns", "interleaved", "latent"] = ""

    def shown_in(self, block: Any) -> dict[str, Any]:
        """What a block shows of its attention, as fields of its anatomy."""
        attention = find(block, self.module)
        if not self.projections:
            return {"attention": attention}
        last = Spot(find(attention, self.projections.split()[-1]), "out")  # that of the values, or of all
        heads, groups = counts = self._heads_and_groups(attention)
        values: dict[str, Any] = {"values": last}
        if self.fused == "latent":
            cut = partial(projections.latent_values, heads=heads, width=attention.v_head_dim)
            values = {"fused_values": FusedValues(last, cut)}
        elif self.fused:
            cut = partial(projections.fused_values, order=_order(self.fused), heads=heads, groups=groups)
            values = {"fused_values": FusedValues(last, cut)}
        made = partial(self._projections, attention, find(block, self.output), counts)
        return {"attention": attention, "context": Spot(find(block, self.output), "in"), "projections": made, **values}

    def _heads_and_groups(self, attention: Any) -> tuple[int, int]:
        heads = find(attention, self.heads)
        return heads, (find_if_there(attention, self.groups) if self.groups else None) or heads

    def _projections(self, attention: Any, output: Any, counts: tuple[int, int]) -> Projections:
        if self.fused == "latent":
            return projections.latent_projections(attention)
        layers = [find(attention, name) for name in self.projections.split()]
        if not self.fused:
            query, key, value = layers
            return projections.linear_projections(query, key, value, output, *counts)
        read, write, (heads, groups) = layers[0], output, counts
        order, columns = _order(self.fused), self.fused == "stacked columns"
        make = partial(projections.fused_projections, heads=heads, groups=groups, order=order, columns=columns)
        found = make(*projections.weight_and_bias(read), *projections.weight_and_bias(write))
        if not any(hasattr(layer, "base_layer") for layer in (read, write)):
            return found
        plain, last = (getattr(layer, "base_layer", layer) for layer in (read, write))
        # Roles are of parameters, not of what they make.
        return replace(found, roles=make(plain.weight, plain.bias, last.weight, last.bias).roles)


def _order(fused: str) -> Order:
    return "interleaved" if fused == "interleaved" else "stacked"


@dataclass(frozen=True)
class Layout:
    """The names of a block's parts, dotted, with spaces between several. Called with a block, it gives its anatomy.

    Norms are named in the order in which they are called: those of attention and of the FFN, and in "sandwich" before
    and after each. Parallel branches may read one norm.
    """

    placement: Placement
    norms: str
    attention: Attention | None
    ffn: str = ""  # its modules, in the order in which they are called
    attention_branch: str = ""  # what gives it; "": the norm after it, else the output projection, else attention
    ffn_branch: str = ""  # what gives it; "": the norm after it, else the last module of the FFN
    cross: tuple[str, str, str] | None = None  # cross-attention, its norm, what gives its branch; a block may lack them
    causal: str = ""  # the attribute that says whether a block is; "": blocks do not say
    hides: str = ""  # stations that no module shows

    def __call__(self, name: str, block: Any) -> BlockAnatomy:
        """The anatomy of a block."""
        cross = find_if_there(block, self.cross[0]) if self.cross else None
        return BlockAnatomy(
            name,
            block,
            spots=self._spots(block, cross is not None),
            placement=self.placement,
            cross_attention=cross,
            norms=tuple(find(block, norm) for norm in self.norms.split()),
            ffn=tuple(find(block, module) for module in self.ffn.split()),
            causal=bool(find(block, self.causal)) if self.causal else None,
            **(self.attention.shown_in(block) if self.attention else {}),
        ).without(self.hides.split())

    def _spots(self, block: Any, crosses: bool) -> dict[str, Spot]:
        norms, ffn, own = self.norms.split(), self.ffn.split() or [""], self.attention or Attention("")
        before, after = {
            "sandwich": (norms[::2], norms[1::2]),
            "branch": (["", ""], norms),
        }.get(self.placement, (norms, ["", ""]))
        names = {
            "block": "",
            "attention-norm": before[0],
            "ffn-norm": before[-1],
            "ffn": ffn[0],
            "attention-branch": self.attention_branch or after[0] or own.output or own.module,
            "ffn-branch": self.ffn_branch or after[1] or ffn[-1],
        }
        seen = dict(zip(STATIONS, PLACES[self.placement].split(" | "), strict=True)) | BRANCHES
        if crosses:
            assert self.cross is not None
            names |= {"cross-norm": self.cross[1], "cross-branch": self.cross[2]}
            seen |= CROSSING["post" if self.placement == "post" else "pre"]
        if not self.ffn:
            del seen["ffn_branch"]
        places: Any = ((station, *place.split()) for station, place in seen.items() if place != "-")
        return {station: Spot(find(block, names[name]), side) for station, name, side in places}


def find(block: Any, name: str) -> Any:
    """What a dotted name leads to; a number in it counts the modules of a list. The block itself: ""."""
    for step in name.split(".") if name else ():
        block = block[int(step)] if step.removeprefix("-").isdigit() else getattr(block, step)
    return block


def find_if_there(block: Any, name: str) -> Any:
    """None where a block has no such part."""
    try:
        return find(block, name)
    except AttributeError:
        return None


# Where the tokens of a station are seen: the part of the block, and whether they go in or come out.
STATIONS = ("input", "attention_input", "after_attention", "ffn_input", "after_ffn", "output")
PRE = "block in | attention-norm out | ffn-norm in | ffn-norm out | block out | block out"
PLACES: dict[Placement, str] = {
    "pre": PRE,
    "sandwich": PRE,
    "post": "block in | block in | attention-norm in | attention-norm out | ffn-norm in | block out",
    "branch": "block in | block in | ffn in | ffn in | block out | block out",
    "parallel": "block in | attention-norm out | - | ffn-norm out | block out | block out",
    "mixer": "block in | attention-norm out | - | - | - | block out",
}
BRANCHES = {"attention_branch": "attention-branch out", "ffn_branch": "ffn-branch out"}
CROSSING: dict[Placement, dict[str, str]] = {  # between self-attention and FFN in a decoder that reads an encoder
    "pre": {
        "after_attention": "cross-norm in",
        "cross_attention_input": "cross-norm out",
        "after_cross_attention": "ffn-norm in",
        "cross_attention_branch": "cross-branch out",
    },
    "post": {
        "cross_attention_input": "attention-norm out",
        "after_cross_attention": "cross-norm in",
        "cross_attention_branch": "cross-branch out",
        "ffn_input": "cross-norm out",
    },
}

# The norms of decoders, by which a block of no known family is guessed at.
LLAMA = "input_layernorm post_attention_layernorm"
GEMMA2 = "input_layernorm post_attention_layernorm pre_feedforward_layernorm post_feedforward_layernorm"
GLM4 = "input_layernorm post_self_attn_layernorm post_attention_layernorm post_mlp_layernorm"
AFMOE = "input_layernorm post_attention_layernorm pre_mlp_layernorm post_mlp_layernorm"
OLMO2 = "post_attention_layernorm post_feedforward_layernorm"
PAIRS = (
    LLAMA,
    "input_layernorm pre_ff_layernorm",
    "input_layernorm pre_feedforward_layernorm",
    "attention_layernorm feedforward_layernorm",
    "ln_1 ln_2",
    "ln1 ln2",
    "ln_attn ln_mlp",
    "norm_1 norm_2",
    "norm1 norm2",
    "attention_norm ffn_norm",
    "attn_norm ffn_norm",
    "attn_norm mlp_norm",
    "self_attn_layer_norm final_layer_norm",
    "layer_norm1 layer_norm2",
    "layernorm_before layernorm_after",
)
GUESSES: tuple[tuple[Placement, str], ...] = (
    *(("sandwich", norms) for norms in (GEMMA2, GLM4, AFMOE)),
    ("branch", OLMO2),
    *(("parallel", norm) for norm in ("input_layernorm", "ln_1", "norm")),
    *((placement, norms) for norms in PAIRS for placement in ("pre", "parallel", "post")),
)
ATTENTIONS = ("self_attn", "self_attention", "attention", "attn")
FFNS = ("mlp", "feed_forward", "feedforward", "ffn", "ff", "block_sparse_moe", "moe")


def guesses(block: BlockAnatomy) -> Iterator[BlockAnatomy]:
    """What a block may be by the names of its parts, in the order in which it is to be tried.

    What the branches read is heard where it enters them, so that a norm that is not called there does no harm. Where a
    vector multiplies the branches last (LayerScale), two modules of it give them, or what drops a scaled branch where
    the vectors are the block's own parameters.
    """
    parts = dict(block.module.named_children())
    attentions, ffns = ([name for name in names if name in parts] for names in (ATTENTIONS, FFNS))
    if len(attentions) != 1 or len(ffns) != 1:
        return
    (attention,), (ffn,) = attentions, ffns
    scales = [name for name, part in parts.items() if "layerscale" in type(part).__name__.lower().replace("_", "")]
    vectors = [weights for weights in block.module._parameters.values() if weights is not None and weights.ndim == 1]
    drops = [name for name in parts if name.startswith("drop_path")]
    ends = scales or (drops if len(vectors) == 2 else [])
    own = {name for name, module in parts.items() if is_named_norm(module)}
    for placement, norms in GUESSES:
        if set(norms.split()) == own:
            layout = Layout(placement, norms, Attention(attention), ffn, *(ends if len(ends) == 2 else ()))
            guess = layout(block.name, block.module)
            reads = {"attention_input": Spot(parts[attention], "in")}
            if placement != "post":
                reads["ffn_input"] = Spot(parts[ffn], "in")
            yield replace(guess, part=block.part, causal=block.causal, spots={**guess.spots, **reads})
