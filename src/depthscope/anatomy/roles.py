"""What the weights of a block are for: queries and keys, values and output, the FFN, norms, and what is none of these.

Each number of a block's weights has one role. A layer that makes queries, keys and values at once is cut, so that its
rows go where they belong; what a family does not say is `other`, and is named, never guessed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import get_args

from torch import Tensor, nn

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
    found: RolePieces = {role: [] for role in ROLES}
    shown = _shown(block)
    claimed: set[int] = set()
    for role, pieces in shown.items():
        for piece in pieces:
            if piece.cut is None and id(piece.parameter) in claimed:
                continue  # one matrix for two things, as where queries are their own keys
            found[role].append(piece)
            claimed |= {id(piece.parameter)} if piece.cut is None else set()
    claimed |= {id(piece.parameter) for pieces in shown.values() for piece in pieces}
    _check_cuts(block, found)
    for role, modules in (("norms", _norms(block)), ("ffn", block.ffn), ("other", (block.module,))):
        for module in modules:
            fresh = [p for p in module.parameters() if id(p) not in claimed]
            found[role] += [Piece(parameter) for parameter in fresh]
            claimed |= {id(parameter) for parameter in fresh}
    return found


def names_of_others(block: BlockAnatomy, roles: RolePieces) -> list[str]:
    """The parameters of a block that have no role, by their names in it."""
    others = {id(piece.parameter) for piece in roles["other"]}
    return [name for name, parameter in block.module.named_parameters() if id(parameter) in others]


def shared_parameters(blocks: Iterable[BlockAnatomy]) -> set[int]:
    """The ids of parameters that more than one block module has."""
    seen: set[int] = set()
    shared: set[int] = set()
    for block in blocks:
        mine = {id(parameter) for parameter in block.module.parameters()}
        shared |= seen & mine
        seen |= mine
    return shared


def _shown(block: BlockAnatomy) -> Mapping[Role, tuple[Piece, ...]]:
    """What the projections of attention say."""
    if block.projections is None:
        return {}
    try:
        return block.projections().roles
    except HiddenWeights as hidden:
        return hidden.roles


def _norms(block: BlockAnatomy) -> Iterator[nn.Module]:
    yield from block.norms
    yield from filter(is_named_norm, block.module.modules())


def _check_cuts(block: BlockAnatomy, found: RolePieces) -> None:
    """Refuses cuts that leave numbers of a parameter without a role, or give them two."""
    sizes: dict[int, int] = {}
    whole: dict[int, Tensor] = {}
    for pieces in found.values():
        for piece in pieces:
            whole[id(piece.parameter)] = piece.parameter
            taken = sum(part.numel() for part in piece.of(piece.parameter.detach()))
            sizes[id(piece.parameter)] = sizes.get(id(piece.parameter), 0) + taken
    for key, taken in sizes.items():
        if taken != whole[key].numel():
            raise ValueError(
                f"the roles of block {block.name!r} take {taken} of the {whole[key].numel()} numbers of a parameter: "
                "its family must cut it so that each has one role"
            )
