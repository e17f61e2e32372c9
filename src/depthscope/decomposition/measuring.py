"""How much a term is of the whole: its norm, its part along the whole, its direction, how far it is from rank one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from depthscope.measures import TokenMatrix, composite_residual

CONSTANT = -1  # in the place of a length: what does not depend on the tokens that entered


class Row(NamedTuple):
    """Numbers of one measure, by length and sample."""

    table: str  # "output", "block" or "head"
    block: int
    head: int  # -1: all
    measure: str
    first_sample: int
    values: Tensor  # (1 + lengths, batch) float64, the constant part first


def measured(terms: Sequence[Tensor], whole: Tensor, real: Tensor | None) -> dict[str, Tensor]:
    """Of k terms (batch, n, d) in a whole Y (batch, n, d), over real tokens: (k, batch) float64 each.

    | measure            | of a term A                                                                     |
    | ------------------ | ------------------------------------------------------------------------------- |
    | `norm_share`       | ‖A‖_F/‖Y‖_F; terms may cancel, so that these add up to 1 or more                 |
    | `projection_share` | ⟨A, Y⟩/‖Y‖_F²; these add up to exactly 1                                         |
    | `cosine`           | ⟨A, Y⟩/(‖A‖_F‖Y‖_F); nan where A = 0                                             |
    """
    if real is not None:
        terms, whole = [term * real.unsqueeze(-1) for term in terms], whole * real.unsqueeze(-1)
    norms = torch.stack([_norm(term) for term in terms])
    dots = torch.stack([torch.einsum("bnd,bnd->b", term, whole) for term in terms]).double()
    norm = _norm(whole)
    return {
        "norm_share": norms / norm,
        "projection_share": dots / norm.square(),
        "cosine": (dots / (norms * norm)).clamp(-1, 1),
    }


def _norm(tokens: Tensor) -> Tensor:
    return torch.linalg.vector_norm(tokens, dim=(-2, -1), dtype=torch.float64)


def share_rows(split: Tensor, whole: Tensor, real: Tensor | None, block: int, first_sample: int) -> list[Row]:
    """Of the terms of the output, lengths first and the constant part last, (L + 2, batch, n, d).

    Beside what is measured of every block, `composite_residual`, ‖A − 1aᵀ‖_{1,∞}/‖A‖_{1,∞} of the term by itself: 0 for
    a term of equal tokens, and nan for one that is 0.
    """
    turned = [split[-1].double(), *split[:-1].double()]
    found = measured(turned, whole.double(), real)
    found["composite_residual"] = torch.stack([composite_residual(TokenMatrix.of(term, real)) for term in turned])
    return [Row("output", block, -1, name, first_sample, values) for name, values in found.items()]
