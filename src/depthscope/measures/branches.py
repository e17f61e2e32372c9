"""A branch against the trunk that it is added to, token by token: how large it is, and in which direction it goes.

Medians over the tokens, not norms of whole matrices: one attention sink of a hundred times the others' norm would rule
a Frobenius norm. After Csordás, Manning & Potts 2025 (arXiv 2505.13898) and Hu et al. 2025 (arXiv 2512.14064).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from depthscope.measures.norms import norm_of_rows, with_arithmetic


class AgainstTrunk(NamedTuple):
    """Per token, float64, (…, n)."""

    ratio: Tensor  # ‖b_i‖ / ‖x_i‖; nan where the trunk is zero
    cosine: Tensor  # cos(b_i, x_i): below 0 the branch erases, above 0 it strengthens; nan where either is zero


def against_trunk(branch: Tensor, trunk: Tensor) -> AgainstTrunk:
    """The size and the direction of a branch B (…, n, d) against the trunk X (…, n, d), for each token.

    A branch of zeros has the ratio 0 and no direction; a trunk of zeros has neither. What is not finite is nan.
    """
    if branch.shape != trunk.shape:
        shapes = f"{tuple(branch.shape)} and {tuple(trunk.shape)}"
        raise ValueError(f"expected a branch and a trunk of one shape, got {shapes}")
    b, x = with_arithmetic(branch), with_arithmetic(trunk)
    size, base = norm_of_rows(b), norm_of_rows(x)  # (…, n)
    units = [v.double() / torch.where(norm > 0, norm, 1.0).unsqueeze(-1) for v, norm in ((b, size), (x, base))]
    cosine = (units[0] * units[1]).sum(dim=-1)
    finite = size.isfinite() & base.isfinite() & (base > 0)
    return AgainstTrunk(
        ratio=torch.where(finite, size / base, torch.nan),
        cosine=torch.where(finite & (size > 0), cosine.clamp(-1, 1), torch.nan),
    )


def median(values: Tensor, real: Tensor | None = None) -> Tensor:
    """The median of all real values that are numbers, float64, (); nan if there is none."""
    chosen = values if real is None else torch.where(real.to(values.device), values, torch.nan)
    return torch.nanquantile(chosen.flatten().double(), 0.5) if chosen.numel() else chosen.new_full((), torch.nan)
