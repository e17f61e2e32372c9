"""How much of a writer's gradient is the tokens' mean: a matrix that writes into the trunk (W_O, the FFN's last).

For Y that the matrix reads and Δ, the gradient of what it writes, ∂W = YᵀΔ = Σ over sequences of n·ȳδ̄ᵀ + Σ_i (y_i −
ȳ)(δ_i − δ̄)ᵀ. The first part is what all tokens of a sequence ask for together. It spikes before a deep Transformer
collapses in training (MV-Split, arXiv 2605.06169, on diffusion Transformers).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from depthscope.measures.norms import with_arithmetic


@dataclass(frozen=True)
class TokenSum:
    """Σ of the real tokens of each sequence (batch, d), and how many there are (batch)."""

    total: Tensor
    count: Tensor


def token_sum(tokens: Tensor, mask: Tensor | None = None) -> TokenSum:
    """All that has to be kept of Y or of Δ (batch, n, d): O(nd). Half precision is summed in float32."""
    tokens, (batch, n) = with_arithmetic(tokens), tokens.shape[:2]
    wide = torch.promote_types(tokens.dtype, torch.float32)
    if mask is None:
        return TokenSum(tokens.sum(dim=1, dtype=wide), torch.full((batch,), n, device=tokens.device))
    real = mask.to(tokens.device).bool()
    return TokenSum(torch.where(real.unsqueeze(-1), tokens, 0.0).sum(dim=1, dtype=wide), real.sum(dim=1))


def mean_coherent_share(weight_gradient: Tensor, read: TokenSum, gradient: TokenSum) -> Tensor:
    """‖M‖²/(‖M‖² + ‖∂W − M‖²) ∈ [0, 1], M = Σ over sequences of n·ȳδ̄ᵀ; ∂W (a, d) for row vectors,
    `read` the sums of Y and `gradient` those of Δ.

    Where M and the rest are orthogonal it is the share of ‖∂W‖². 1 if every token of a sequence has the same gradient
    (or reads the same), 0 if the gradients of a sequence cancel; nan if there is no gradient at all, or one that is not
    finite. It does not depend on the size of the loss. The rest is computed as a difference, and costs as much as one
    token per sequence does in the backward pass.
    """
    means = read.total / read.count.clamp(min=1).unsqueeze(-1)
    mean_part = means.mT @ gradient.total.to(means.dtype)  # (a, d)
    rest = weight_gradient.to(mean_part.dtype) - mean_part
    largest = torch.maximum(mean_part.abs().amax(), rest.abs().amax())  # squares of small gradients would underflow
    scale = torch.where(largest > 0, largest, 1.0)
    shared, other = (torch.linalg.matrix_norm(part / scale).double().square() for part in (mean_part, rest))
    return shared / (shared + other)
