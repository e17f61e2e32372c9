"""What a model is made of: its blocks, stations, projections, token axis, mask, causality. A table of
families (`families`), and families of other packages (`register_family`).
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

from torch import nn

from depthscope import walking
from depthscope.anatomy.families import FAMILIES as OWN_FAMILIES
from depthscope.anatomy.parts import in_parts
from depthscope.anatomy.structure import (
    Addition,
    Anatomy,
    BlockAnatomy,
    Family,
    Path,
    Projections,
    Side,
    Spot,
    check_family,
)
from depthscope.anatomy.unknown import left_out, named_blocks, repeated_blocks
from depthscope.registry import Registry

FAMILIES: Registry[Family] = Registry("family", "depthscope.families", OWN_FAMILIES, check=check_family)

__all__ = [
    "FAMILIES",
    "Addition",
    "Anatomy",
    "BlockAnatomy",
    "Family",
    "Path",
    "Projections",
    "Side",
    "Spot",
    "anatomy_of",
    "list_families",
    "register_family",
]


def list_families() -> tuple[str, ...]:
    """The families of models whose blocks are known.

    Returns:
        Their names.

    Example:
        >>> import depthscope
        >>> "gpt2" in depthscope.list_families()
        True
    """
    return tuple(FAMILIES)


def register_family(family: Family) -> Family:
    """Adds a family of models, so that `probe`, `apply` and the rest know its blocks; returns it.

    An installed package does the same with an entry point in the group `depthscope.families`.

    Args:
        family: an object with a `name`, a `library` and a way to describe a block: see `depthscope.anatomy.Family`.

    Returns:
        The family.

    Example:
        >>> import depthscope
        >>> gpt2 = depthscope.anatomy.FAMILIES["gpt2"]
        >>> depthscope.register_family(gpt2) is gpt2  # as it is there already
        True
    """
    return FAMILIES.register(family, owner=getattr(family, "library", None))


def anatomy_of(model: nn.Module, blocks: str | None = None) -> Anatomy:
    """The anatomy of a model. `blocks`, a glob of module names, overrides what is found.

    A model of several trunks (encoder and decoder, vision and text) has them all, one after the other, each block with
    the name of its part; they may be of different families.
    """
    everything = walking.named_modules(model)
    if blocks is not None:
        anatomy = named_blocks(model, blocks)
        named = {id(block.module) for block in anatomy.blocks}
        if None in {_family_of(type(block.module)) for block in anatomy.blocks}:  # type: ignore[arg-type]
            return anatomy
        return _assembled(model, [(name, module) for name, module in everything if id(module) in named])
    known = {kind: _family_of(kind) is not None for kind in {type(module) for _, module in everything}}
    found = [(name, module) for name, module in everything if known[type(module)]]
    if not found:
        return repeated_blocks(model)
    anatomy = _assembled(model, found)
    return replace(anatomy, notes=anatomy.notes + left_out(everything, anatomy.blocks))


def _assembled(model: nn.Module, found: list[tuple[str, nn.Module]]) -> Anatomy:
    """Of modules of known families. Those that stand inside others belong to these."""
    names = {name for name, _ in found}
    families: dict[str, Family] = {}
    described: list[BlockAnatomy] = []
    for name, module in found:
        if names.isdisjoint(walking.paths_around(name)):
            family = _family_of(type(module))  # type: ignore[arg-type]
            assert family is not None
            families[family.name] = family
            axis = family.token_axis_of(module) if family.token_axis_of else family.token_axis
            described.append(replace(family.describe(name, module), family=family.name, token_axis=axis))
    several = len(families) > 1
    axes = {block.token_axis for block in described}
    if len(axes) == 1:
        described = [replace(block, token_axis=None) for block in described]
    if several:
        described = [_with_causality(model, block, families[block.family]) for block in described]
    blocks = in_parts(described)
    # The blocks themselves know more than what stands around them; not known if they differ.
    hints = {block.causal for block in blocks}
    alone = None if several else next(iter(families.values())).causal(model)
    masks = dict.fromkeys(family.mask_argument for family in families.values())
    unusual = [name for name in masks if name not in (None, "attention_mask")]  # the usual one is looked for anyway
    return Anatomy(
        " + ".join(dict.fromkeys(block.family for block in blocks)),
        blocks,
        token_axis=axes.pop() or 0,
        mask_argument=next(iter([*unusual, *masks])),
        causal=alone if hints == {None} else hints.pop() if len(hints) == 1 else None,
        notes=tuple(note for family in families.values() for note in family.notes),
        streams=any(family.streams for family in families.values()),
    )


def _with_causality(model: nn.Module, block: BlockAnatomy, family: Family) -> BlockAnatomy:
    """A block beside those of other families cannot rely on what is true of the whole model."""
    if block.causal is not None or block.causal_arguments:
        return block
    configured = [module for module in walking.way_to(model, block.name)[:-1] if hasattr(module, "config")]
    return replace(block, causal=family.causal(configured[-1] if configured else model))


def _family_of(kind: Any) -> Family | None:
    len(FAMILIES)  # families of other packages are found before the first question is answered
    return _looked_up(kind, FAMILIES.version)


@cache
def _looked_up(kind: Any, _version: int) -> Family | None:
    """The family whose block a class is: by name, since transformers may be absent, and only of its library.

    A subclass with a forward of its own is of none: nobody knows what that does, or whether it hides later tokens.
    """
    for parent in kind.__mro__:
        for family in FAMILIES.values():
            if parent.__name__ in family.block_classes and parent.__module__.split(".")[0] == family.library:
                return family if kind.forward is parent.forward else None
    return None
