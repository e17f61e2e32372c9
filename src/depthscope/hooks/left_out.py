"""What can be left out of a model's blocks, by name, and what of it a model's anatomy allows.

Dong, Cordonnier & Loukas 2021 (arXiv 2103.03404) compare a network of attention alone with ones that also have skips
or MLPs. What "without an MLP" means has several readings; each has a name here:

| name                   | what is left out                                                                           |
| ---------------------- | ------------------------------------------------------------------------------------------ |
| `skips`                | every skip below: a branch takes the place of trunk + branch                               |
| `attention_skip`       | that of attention; what leaves the sum is attention's branch alone                         |
| `cross_attention_skip` | that of attention to an encoder                                                            |
| `ffn_skip`             | that of the FFN                                                                            |
| `ffn`                  | the FFN's branch: the trunk passes on as it is; in post-norm the norm behind it stays      |
| `ffn_step`             | the FFN's branch, skip and norm: what enters the FFN leaves the block (the authors' BERT   |
|                        | and XLNet). Where no norm stands on the trunk it is the same as `ffn`                      |
| `ffn_linears`          | the FFN's linear layers alone: its activation, skip and norm stay (the authors' ALBERT)    |
| `norms`                | the norms of trunk and branches, gain and bias included: each passes on what it is given.  |
|                        | Norms inside attention (of queries and keys) and behind the last block stay                |

A step without its FFN has nothing but its skip: `skips` leaves that one in, and `ffn` with `ffn_skip` is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import nn

from depthscope.anatomy import Anatomy, BlockAnatomy
from depthscope.naming import unknown_name

SKIPS = ("attention_skip", "cross_attention_skip", "ffn_skip")
WITHOUT_FFN = ("ffn", "ffn_step")  # readings that leave nothing of the FFN
READINGS = (*WITHOUT_FFN, "ffn_linears")
IN_WORDS = {
    "skips": "skips",
    "attention_skip": "attention's skip",
    "cross_attention_skip": "cross-attention's skip",
    "ffn_skip": "the FFN's skip",
    "ffn": "FFNs",
    "ffn_step": "FFNs and the norms behind them",
    "ffn_linears": "the FFNs' linear layers",
    "norms": "norms",
}


def choose_parts(without: str | Iterable[str]) -> tuple[str, ...]:
    """The names of what is left out, each once, in the order of the table; refuses what does not go together."""
    names = without.split(",") if isinstance(without, str) else list(without)
    asked = {name.strip() for name in names if name.strip()}
    for name in sorted(asked - IN_WORDS.keys()):
        raise unknown_name("part of a block", name, IN_WORDS)
    if names and not asked:
        raise ValueError(f"expected at least one of {', '.join(IN_WORDS)} to leave out, got none")
    if len(both := [name for name in READINGS if name in asked]) > 1:
        raise ValueError(f"{' and '.join(both)} are two readings of a model without its FFNs: name one")
    if "ffn_skip" in asked and (gone := asked.intersection(WITHOUT_FFN)):
        raise ValueError(f"without {gone.pop()} and ffn_skip nothing is left of the FFN's step: leave ffn_skip out")
    return tuple(name for name in IN_WORDS if name in asked)


def in_words(parts: Sequence[str]) -> str:
    """What is left out, for a sentence: "skips and FFNs"."""
    named = [IN_WORDS.get(name, name) for name in parts if not (name in SKIPS and "skips" in parts)]
    return named[0] if len(named) == 1 else f"{', '.join(named[:-1])} and {named[-1]}"


def removed_skips(parts: Sequence[str]) -> frozenset[str]:
    """The skips that are left out, one by one: that of an FFN which is gone stays."""
    chosen = {*SKIPS} if "skips" in parts else {name for name in SKIPS if name in parts}
    return frozenset(chosen - ({"ffn_skip"} if {*parts}.intersection(WITHOUT_FFN) else set()))


def refuse_what_cannot_be(anatomy: Anatomy, parts: Sequence[str]) -> None:
    """Refuses, in one line, what the anatomy of a model does not allow to be left out."""
    for block in anatomy.blocks:
        why = _why_not(block, parts)
        if why is not None:
            raise ValueError(f"without {', '.join(parts)}: {why}")
    if "cross_attention_skip" in parts and not any(block.cross_attention is not None for block in anatomy.blocks):
        raise ValueError("without cross_attention_skip: no block of this model attends to an encoder")


def _why_not(block: BlockAnatomy, parts: Sequence[str]) -> str | None:
    if not block.all_additions:
        return f"where {block.name!r} adds its branches to the trunk is not known (no known family or structure)"
    asked = {*parts}
    if block.placement == "parallel" and (one := asked.intersection(SKIPS)):
        return f"the branches of {block.name!r} are parallel and share one skip: say skips instead of {one.pop()}"
    if block.placement == "mixer" and (ffn := asked.intersection((*READINGS, "ffn_skip", "attention_skip"))):
        return f"{block.name!r} is a mixer with one skip and no FFN, so that there is no {ffn.pop()}"
    if any(spot.added_to is not None for spot in block.spots.values()):
        return f"the additions of {block.name!r} stand outside its module, where nothing can be left out"
    if asked - {"norms", "ffn_linears"}:
        needed = dict.fromkeys(name for sum_ in block.all_additions for name in (sum_.trunk, sum_.result))
        if missing := [station for station in needed if station not in block.spots]:
            return f"{block.name!r} does not show its {', '.join(missing)}"
    if "norms" in asked and not block.norms:
        return f"{block.name!r} does not show its norms"
    if "ffn_linears" in asked and not linears_of(block):
        return f"the FFN of {block.name!r} is not made of linear layers and activations alone"
    return None


def norms_of(block: BlockAnatomy) -> list[nn.Module]:
    """The norms of a block's trunk and branches, that before or behind attention to an encoder included."""
    found = {id(norm): norm for norm in block.norms}
    if block.cross_attention is not None:
        post = block.placement == "post"
        spot = block.spots.get("after_cross_attention" if post else "cross_attention_input")
        if spot is not None and spot.side == ("in" if post else "out"):
            found.setdefault(id(spot.module), spot.module)
    return list(found.values())


def linears_of(block: BlockAnatomy) -> list[nn.Module]:
    """The linear layers of a block's FFN; none if it has weights that are no linear layer's."""
    leaves = [part for module in block.ffn for part in module.modules() if not any(True for _ in part.children())]
    linears = [leaf for leaf in leaves if width_read(leaf) is not None]
    others = {id(weight) for module in block.ffn for weight in module.parameters()}
    others -= {id(weight) for layer in linears for weight in layer.parameters()}
    return [] if others else linears


def width_read(module: nn.Module) -> int | None:
    """How wide the tokens are that a linear layer reads; None: it is no linear layer."""
    if isinstance(module, nn.Linear):
        return module.in_features
    if type(module).__name__ == "Conv1D":  # GPT-2's, of transformers: stored as (in, out)
        return int(module.get_parameter("weight").shape[0])
    return None
