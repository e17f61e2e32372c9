"""What the weights of a block are for: queries and keys, values and output, the FFN, norms, and what is none of these.

Each number of a block's weights has one role. A layer that makes queries, keys and values at once is cut, so that its
rows go where they belong; what a family does not say is `other`, and is named, never guessed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import get_args

from depthscope.anatomy.projections import HiddenWeights
from depthscope.anatomy.structure import BlockAnatomy, Piece, Role, is_named_norm

ROLES: tuple[Role, ...] = get_args(Role)

RolePieces = dict[Role, list[Piece]]  # every role is there; its list may be empty


def roles_of(block: BlockAnatomy) -> RolePieces:
    """All parameters of a block by role, each number once.

    `queries_keys` and `values_output` are what the projections of self-attention say, biases with them. `norms` are all
    modules that are norms, also those of queries and keys and inside the FFN. `other` is the rest: cross-attention,
    positions, gates, mixers in the place of attention, and attention itself where the family shows no projections.
    """
    shown: Mapping[Role, tuple[Piece, ...]] = {}
    if block.projections is not None:
        try:
            shown = block.projections().roles
        except HiddenWeights as hidden:
            shown = hidden.roles
    found: RolePieces = {role: [] for role in ROLES}
    taken: Counter[int] = Counter()  # numbers of a parameter that have a role
    for role, pieces in shown.items():
        for piece in pieces:
            key = id(piece.parameter)
            if piece.cut is None and taken[key]:
                continue  # one matrix for two things, as where queries are their own keys
            found[role].append(piece)
            taken[key] += sum(part.numel() for part in piece.of(piece.parameter.detach()))
    for parameter in {id(p.parameter): p.parameter for pieces in found.values() for p in pieces}.values():
        if taken[id(parameter)] != parameter.numel():
            raise ValueError(
                f"the roles of block {block.name!r} take {taken[id(parameter)]} of the {parameter.numel()} numbers of "
                "a parameter: its family must cut it so that each has one role"
            )
    norms = (*block.norms, *filter(is_named_norm, block.module.modules()))
    for role, modules in (("norms", norms), ("ffn", block.ffn), ("other", (block.module,))):
        for module in modules:
            fresh = [parameter for parameter in module.parameters() if not taken[id(parameter)]]
            found[role] += map(Piece, fresh)
            taken.update({id(parameter): 1 for parameter in fresh})
    return found


def names_of_others(block: BlockAnatomy, roles: RolePieces) -> list[str]:
    """The parameters of a block that have no role, by their names in it."""
    others = {id(piece.parameter) for piece in roles["other"]}
    return [name for name, parameter in block.module.named_parameters() if id(parameter) in others]


def shared_parameters(blocks: Iterable[BlockAnatomy]) -> set[int]:
    """The ids of parameters that more than one block module has."""
    counts = Counter(key for block in blocks for key in {id(parameter) for parameter in block.module.parameters()})
    return {key for key, count in counts.items() if count > 1}
