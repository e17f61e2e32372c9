"""A layout: the parts of a block by the names that it gives them, and how its anatomy is read from them.

A family that is known by its class is described by the layout that it is known to have (`families`). Of a block of no
known family a layout is a guess, which `passes.by_structure` tries before any number is taken from it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

from depthscope.anatomy import projections as made_of
from depthscope.anatomy.structure import BlockAnatomy, FusedValues, Projections, Side, Spot, is_named_norm
from depthscope.stations import Placement


@dataclass(frozen=True)
class Layout:
    """The names of a block's parts, dotted; "" where there is none. Called with a block, it gives its anatomy.

    Norms stand before attention and behind its branch, before the FFN and behind its branch; in post-norm those
    "before" are the norms on the trunk, behind each sum. Parallel branches may read one norm.
    """

    placement: Placement
    attention_norm: str = ""
    ffn_norm: str = ""
    behind_attention: str = ""
    behind_ffn: str = ""
    attention: str = ""
    projections: str = ""  # of queries, keys and values, by their names in attention; one name if one layer makes all:
    fused: Literal["", "thirds", "thirds of columns", "stacked", "interleaved", "latent"] = ""  # in this order
    output: str = ""  # the output projection
    heads: str = "num_heads"  # by its name in attention
    groups: str = ""  # of keys and values, by its name in attention, which may lack it; "": as many as heads
    ffn: str = ""  # its modules, in the order in which they are called
    attention_branch: str = ""  # what gives it; "": the norm behind it, else the output projection, else attention
    ffn_branch: str = ""  # what gives it; "": the norm behind it, else the last module of the FFN
    cross: tuple[str, str, str] | None = None  # cross-attention, its norm, what gives its branch; a block may lack them
    causal: str = ""  # the attribute that says whether a block is; one without it is not. "": blocks do not say

    @property
    def norms(self) -> tuple[str, ...]:
        """In the order in which they are called."""
        order = (self.attention_norm, self.behind_attention, self.ffn_norm, self.behind_ffn)
        return tuple(name for name in order if name)

    def __call__(self, name: str, block: Any) -> BlockAnatomy:
        """The anatomy of a block."""
        attention = _part(block, self.attention) if self.attention else None
        separate = bool(self.projections) and not self.fused
        return BlockAnatomy(
            name,
            block,
            spots=self._spots(block),
            placement=self.placement,
            attention=attention,
            cross_attention=self._cross_attention(block),
            norms=tuple(_part(block, norm) for norm in self.norms),
            ffn=tuple(_part(block, module) for module in self.ffn.split()),
            causal=bool(_part_if_there(block, self.causal)) if self.causal else None,
            values=Spot(_part(attention, self.projections.split()[2]), "out") if separate else None,
            fused_values=self._fused_values(attention) if self.fused else None,
            context=Spot(_part(block, self.output), "in") if self.output else None,
            projections=partial(self._projections, block) if self.projections else None,
        )

    def _cross_attention(self, block: Any) -> Any:
        return _part_if_there(block, self.cross[0]) if self.cross else None

    def _spots(self, block: Any) -> dict[str, Spot]:
        ffn = self.ffn.split() or [""]
        parts = {
            "block": "",
            "attention_norm": self.attention_norm,
            "ffn_norm": self.ffn_norm or self.attention_norm,  # parallel branches may share it
            "ffn": ffn[0],
            "attention_branch": self.attention_branch or self.behind_attention or self.output or self.attention,
            "ffn_branch": self.ffn_branch or self.behind_ffn or ffn[-1],
        }
        seen = TRUNKS[self.placement] | BRANCHES
        if not self.ffn:
            del seen["ffn_branch"]
        if self.cross and self._cross_attention(block) is not None:
            parts |= {"cross_norm": self.cross[1], "cross_branch": self.cross[2]}
            seen |= CROSS["post" if self.placement == "post" else "pre"]
        return {station: Spot(_part(block, parts[part]), side) for station, (part, side) in seen.items()}

    def _heads(self, attention: Any) -> dict[str, int]:
        heads = _part(attention, self.heads)
        groups = _part_if_there(attention, self.groups) if self.groups else None
        return {"heads": heads, "groups": groups or heads}

    def _fused_values(self, attention: Any) -> FusedValues:
        layer = Spot(_part(attention, self.projections), "out")
        if self.fused == "latent":
            width = attention.v_head_dim
            return FusedValues(layer, partial(made_of.latent_values, heads=_part(attention, self.heads), width=width))
        values = made_of.interleaved_values if self.fused == "interleaved" else made_of.stacked_values
        return FusedValues(layer, partial(values, **self._heads(attention)))

    def _projections(self, block: Any) -> Projections:
        attention, output = _part(block, self.attention), _part(block, self.output)
        layers = [_part(attention, name) for name in self.projections.split()]
        heads, groups = self._heads(attention).values()
        if self.fused == "latent":
            return made_of.latent_projections(attention)
        if self.fused == "stacked":
            return made_of.stacked_projections(*layers, output, heads, groups)
        if self.fused == "interleaved":
            return made_of.interleaved_projections(*layers, output, heads, groups)
        if not self.fused:
            return made_of.linear_projections(*layers, output, heads, groups)
        (layer,), linear = layers, self.fused == "thirds"
        return made_of.fused_projections(layer.weight, layer.bias, output.weight, output.bias, heads, linear=linear)


def _part(block: Any, name: str) -> Any:
    """What a dotted name leads to; a number in it counts the modules of a list. The block itself: ""."""
    for word in name.split(".") if name else ():
        block = block[int(word)] if word.removeprefix("-").isdigit() else getattr(block, word)
    return block


def _part_if_there(block: Any, name: str) -> Any:
    try:
        return _part(block, name)
    except AttributeError:
        return None


# Where the tokens of a station are seen: the part, and whether they go in or come out.
Seen = dict[str, tuple[str, Side]]
PRE: Seen = {
    "input": ("block", "in"),
    "attention_input": ("attention_norm", "out"),
    "after_attention": ("ffn_norm", "in"),
    "ffn_input": ("ffn_norm", "out"),
    "after_ffn": ("block", "out"),
    "output": ("block", "out"),
}
TRUNKS: dict[Placement, Seen] = {
    "pre": PRE,
    "sandwich": PRE,
    "post": {  # X, Y₁ → LN → Y₂, Y₃ → LN → Y₄
        "input": ("block", "in"),
        "attention_input": ("block", "in"),
        "after_attention": ("attention_norm", "in"),
        "ffn_input": ("attention_norm", "out"),
        "after_ffn": ("ffn_norm", "in"),
        "output": ("block", "out"),
    },
    "branch": {  # both branches read the trunk itself
        "input": ("block", "in"),
        "attention_input": ("block", "in"),
        "after_attention": ("ffn", "in"),
        "ffn_input": ("ffn", "in"),
        "after_ffn": ("block", "out"),
        "output": ("block", "out"),
    },
    "parallel": {station: seen for station, seen in PRE.items() if station != "after_attention"},
    "mixer": {station: PRE[station] for station in ("input", "attention_input", "output")},
}
BRANCHES: Seen = {"attention_branch": ("attention_branch", "out"), "ffn_branch": ("ffn_branch", "out")}
CROSS: dict[Placement, Seen] = {  # between self-attention and FFN in a decoder that reads an encoder
    "pre": {
        "after_attention": ("cross_norm", "in"),
        "cross_attention_input": ("cross_norm", "out"),
        "after_cross_attention": ("ffn_norm", "in"),
        "cross_attention_branch": ("cross_branch", "out"),
    },
    "post": {
        "cross_attention_input": ("attention_norm", "out"),
        "after_cross_attention": ("cross_norm", "in"),
        "cross_attention_branch": ("cross_branch", "out"),
        "ffn_input": ("cross_norm", "out"),
    },
}

# Norms that many decoders share.
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


def guesses(block: BlockAnatomy) -> Iterator[BlockAnatomy]:
    """What a block may be by the names of its parts, in the order in which it is to be tried.

    What the branches read is heard where it enters them, so that a norm that is not called there does no harm.
    """
    parts = dict(block.module.named_children())
    attention, ffn = (_only(parts, names) for names in (ATTENTIONS, FFNS))
    if not attention or not ffn:
        return
    norms = {name for name, part in parts.items() if is_named_norm(part)}
    for layout in LAYOUTS:
        if set(layout.norms) == norms:
            guess = replace(layout, attention=attention, ffn=ffn)(block.name, block.module)
            reads = {"attention_input": Spot(parts[attention], "in")}
            if layout.placement != "post":
                reads["ffn_input"] = Spot(parts[ffn], "in")
            yield replace(guess, part=block.part, causal=block.causal, spots={**guess.spots, **reads})


def _only(parts: dict[str, Any], names: tuple[str, ...]) -> str:
    found = [name for name in names if name in parts]
    return found[0] if len(found) == 1 else ""
