"""What the name of an argument says about a mask: which tokens it is of, and whether it is true for padding."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, NamedTuple

Side = Literal["", "source", "encoder", "decoder", "cross"]

_SIDES: dict[str, Side] = {
    **dict.fromkeys(("src", "source"), "source"),
    **dict.fromkeys(("encoder", "enc"), "encoder"),
    **dict.fromkeys(("decoder", "dec", "tgt", "trg", "target"), "decoder"),
    **dict.fromkeys(("memory", "cross"), "cross"),
}  # type: ignore[assignment]


def looks_like_a_mask(name: str) -> bool:
    """Whether an argument may say which tokens are real: a mask, a padding, the lengths of the sequences."""
    return "mask" in name or "pad" in name or any(word.startswith("len") for word in name.split("_"))


def is_padding(name: str) -> bool:
    """Whether it is true for padding, as in PyTorch."""
    return name.endswith("key_padding_mask")


def side_of(name: str) -> Side:
    """Whose tokens a name says that it is of; "cross" for what a decoder reads."""
    return next((_SIDES[word] for word in name.split("_") if word in _SIDES), "")


def is_cross(name: str) -> bool:
    """Whether a decoder's argument of this name is of the tokens that it reads, not of its own."""
    return side_of(name) in ("cross", "encoder")


class Names(NamedTuple):
    """The arguments of a module that are masks of real tokens: of a block's own, and of others."""

    own: frozenset[str]
    others: frozenset[str]


def meant_for(names: Iterable[str], argument: str, below: str, has_encoder: bool) -> Names:
    """Which of the arguments that a module takes are masks of real tokens of the block `below` it.

    `attention_mask` and `key_padding_mask` are known, with or without a side before them, and the family's own
    `argument`. A module that takes a mask of its decoder takes, without a side or as a source, that of its encoder.
    `has_encoder`: an encoder stands beside the decoder that the block is in.
    """
    usual = ("attention_mask", "key_padding_mask", argument)
    sided = {name: name.partition("_")[2] if name.partition("_")[0] in _SIDES else name for name in names}
    known = {name for name, rest in sided.items() if rest in usual and (name == argument or name.endswith(usual[:2]))}
    sides = {side_of(name) for name in known}
    inside = next((word for word in below.split(".") if word in ("encoder", "decoder")), "")
    own: set[Side]
    if inside == "" and "decoder" in sides and sides & {"", "source"}:  # nothing says on which side the block is
        return Names(frozenset(), frozenset())
    if inside == "decoder":
        own = {"decoder"} if "decoder" in sides else set() if has_encoder else {""}
    elif inside == "encoder":
        own = {"", "source", "encoder"} if "decoder" in sides else {"", "source"}
    else:
        own = {"decoder"} if "decoder" in sides else {"", "source"}
    mine = frozenset(name for name in known if side_of(name) in own)
    return Names(mine, frozenset(known) - mine)
