"""A branch against the trunk that it is added to, token by token: how large it is, and in which direction it goes.

Medians over the tokens, not norms of whole matrices: one attention sink of a hundred times the others' norm would rule
a Frobenius norm. After Csordás, Manning & Potts 2025 (arXiv 2505.13898) and Hu et al. 2025 (arXiv 2512.14064).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from depthscope.measures.norms import norm_of_rows, with_arithmetic

_SAFE = (1e-15, 1e15)  # norms whose squares and products float32 holds with all its digits


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
    branch, trunk = with_arithmetic(branch), with_arithmetic(trunk)
    wide = torch.promote_types(torch.promote_types(branch.dtype, trunk.dtype), torch.float32)
    b, x = branch.to(wide), trunk.to(wide)
    # As a product of a row and a column per token: nothing of the tokens' size is made.
    inner = torch.matmul(b.unsqueeze(-2), x.unsqueeze(-1)).flatten(-3).double()  # (…, n)
    size, base = (torch.linalg.vector_norm(values, dim=-1).double() for values in (b, x))
    if not (_safe(size) and _safe(base)):
        size, base = norm_of_rows(b), norm_of_rows(x)
        b, x = (values.double() / _or_one(norm).unsqueeze(-1) for values, norm in ((b, size), (x, base)))
        cosine = (b * x).sum(dim=-1)
    else:
        cosine = inner / (size * base)
    finite = size.isfinite() & base.isfinite() & (base > 0)
    return AgainstTrunk(
        ratio=torch.where(finite, size / base, torch.nan),
        cosine=torch.where(finite & (size > 0), cosine.clamp(-1, 1), torch.nan),
    )


def median(values: Tensor, real: Tensor | None = None) -> Tensor:
    """The median of all real values that are numbers, float64, (); nan if there is none."""
    chosen = values if real is None else torch.where(real.to(values.device), values, torch.nan)
    return torch.nanquantile(chosen.flatten().double(), 0.5) if chosen.numel() else chosen.new_full((), torch.nan)


def _safe(norms: Tensor) -> bool:
    """Whether every token came through the squares unharmed; false for zeros, for what is not finite, and on another
    device than the CPU, which is not asked."""
    low, high = _SAFE
    return norms.device.type == "cpu" and bool(((norms > low) & (norms < high)).all())


def _or_one(norms: Tensor) -> Tensor:
    return torch.where(norms > 0, norms, 1.0)
