"""The gradient of a block's weights, split by what the weights are for: one norm per role."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from depthscope.anatomy import Anatomy, BlockAnatomy
from depthscope.anatomy.roles import ROLES, RolePieces, names_of_others, roles_of, shared_parameters
from depthscope.anatomy.structure import Piece
from depthscope.transfers import fetched

MEASURES = {role: f"{role}_gradient" for role in ROLES}  # the name of each role's norm in a profile
COHERENT = "mean_coherent_share"  # of a writer's gradient, in `watch`
OF_GRADIENTS = frozenset({*MEASURES.values(), COHERENT})
# A block's attention can learn what to attend to if its queries and keys have this share of the gradient of its values
# and output: below it a step that is right for the latter moves the former by less than 1 %.
CAN_LEARN = 0.01
_NAMED = 6  # names in a note


class Roles:
    """The roles of all blocks of a model. Weights that several blocks have are in none of them: they have one gradient,
    not one per block."""

    def __init__(self, anatomy: Anatomy):
        self.shared = shared_parameters(anatomy.blocks)
        self._anatomy = anatomy
        self._blocks: dict[int, RolePieces] = {id(block.module): roles_of(block) for block in anatomy.blocks}

    def of(self, block: BlockAnatomy) -> RolePieces:
        """The roles of one block."""
        return self._blocks[id(block.module)]

    def norms(self, block: BlockAnatomy, gradients: Mapping[int, Tensor | None]) -> dict[str, list[Tensor]]:
        """By measure, the norms that make the gradient's of each role of a block; `gradients` by the parameter's id.

        The squares of all add up to the square of the whole block's.
        """
        found: dict[str, list[Tensor]] = {}
        for role, pieces in self.of(block).items():
            for piece in pieces:
                gradient = gradients.get(id(piece.parameter))
                if gradient is not None and id(piece.parameter) not in self.shared:
                    found.setdefault(MEASURES[role], []).extend(self.part_norms(piece, gradient))
        return {measure: norms for measure, norms in found.items() if norms}

    @staticmethod
    def part_norms(piece: Piece, gradient: Tensor) -> list[Tensor]:
        """The norms of the parts that a piece takes out of its parameter's gradient."""
        return [norm_of_gradient(part) for part in piece.of(gradient) if part.numel()]

    def notes(self, *, shared: bool) -> list[str]:
        """What a reader of the roles must know: what has none, and what is shared; `shared`: whole blocks are."""
        if shared:
            return ["blocks share their weights, which have one gradient, not one per block: none by block or by role"]
        blocks, found = self._anatomy.blocks, []
        if others := dict.fromkeys(name for block in blocks for name in names_of_others(block, self.of(block))):
            found.append(f"gradients by role: {_listed(list(others))} of the blocks have no role: other_gradient")
        named = [(f"{block.name}.{name}", p) for block in blocks for name, p in block.module.named_parameters()]
        if several := [name for name, parameter in named if id(parameter) in self.shared]:
            found.append(
                f"weights that several blocks share have one gradient, not one per block, and are left out of the "
                f"blocks' gradients: {_listed(several)}"
            )
        return found


def learning_ratios(queries_keys: Sequence[float], values_output: Sequence[float]) -> list[float]:
    """‖∂W_Q,K‖/‖∂W_V,O‖ block by block; nan where one of them was not taken, or values and output have no gradient.

    Attention of blocks with `CAN_LEARN` or more can learn what to attend to.
    """
    return [q / v if v > 0 else math.nan for q, v in zip(queries_keys, values_output, strict=True)]


def gradient_scalars(curves: Mapping[str, Mapping[str, Sequence[float]]]) -> dict[str, float]:
    """A handful of numbers for a tracker, of curves (station → measure → blocks 0..L) that have gradients.

    `depth/attention_learns` is the number of blocks whose attention can learn, `depth/coherent_share_max` the largest
    mean-coherent share of a writer.
    """
    found = {}
    output = curves.get("output", {})
    of_attention = [output.get(MEASURES[role]) for role in ("queries_keys", "values_output")]
    if of_attention[0] is not None and of_attention[1] is not None:
        ratios = learning_ratios(of_attention[0], of_attention[1])
        found["depth/attention_learns"] = float(sum(ratio >= CAN_LEARN for ratio in ratios))
    shares = [v for measures in curves.values() for v in measures.get(COHERENT, ()) if not math.isnan(v)]
    if shares:
        found["depth/coherent_share_max"] = max(shares)
    return found


def norm_of_gradient(gradient: Tensor) -> Tensor:
    """Its norm in float64, of any size and layout, where it is."""
    values = gradient.detach().double().flatten()
    if gradient.dtype != torch.float64:
        norm = torch.linalg.vector_norm(values)  # float64 can square what other formats hold
    else:
        largest = values.abs().amax()
        scale = torch.where((largest > 0) & largest.isfinite(), largest, 1.0)
        norm = scale * torch.linalg.vector_norm(values / scale)
    return norm.full_tensor() if hasattr(norm, "full_tensor") else norm


def norm_of_norms(norms: Sequence[Tensor]) -> float:
    """√Σ‖·‖², which neither over- nor underflows."""
    return hypotenuse([norm.item() for norm in fetched(list(norms))])


def hypotenuse(values: Sequence[float]) -> float:
    """√Σv²; nan if one is."""
    return math.nan if any(map(math.isnan, values)) else math.hypot(*values)


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:_NAMED]) + (f" and {len(names) - _NAMED} more" if len(names) > _NAMED else "")
