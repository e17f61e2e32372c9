"""Siblings of Algorithm 1 for many trials at once: pre-norm, without an FFN, causal.

Tokens are (trials, streams, n, d) and weights have a leading axis of trials, as in `blocks.py`.
Equal to `depthscope.models.Block` with the same weights, scores over √d.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from depthscope_lab.papers.simulation.blocks import attend, feed_forward, layer_norm
from depthscope_lab.papers.simulation.weights import Weights


class PreNorm(NamedTuple):
    """What eq. 19 is made of; (trials, streams, …)."""

    normed: Tensor  # X̂ = LN(X)
    attention: Tensor  # P(X̂) (trials, streams, h, n, n)
    branch: Tensor  # P(X̂)X̂W
    after_attention: Tensor  # Y
    ffn_branch: Tensor  # φ(LN(Y)W₁)W₂
    output: Tensor  # Z


def pre_norm_block(weights: Weights, x: Tensor, *, heads: int) -> PreNorm:
    """Yu & Zhang 2024, eq. 19: norms on the branches, an untouched trunk."""
    normed = layer_norm(x)
    branch, p = attend(weights, normed, heads)
    y = x + branch
    fed = feed_forward(weights, layer_norm(y))
    return PreNorm(normed, p, branch, y, fed, y + fed)


def attention_half(
    weights: Weights, x: Tensor, *, heads: int, alpha: float | Tensor = 1.0, causal: bool = False
) -> Tensor:
    """Steps 1 and 2 of Algorithm 1, LN(X + αP(X)XW); `alpha` may differ between streams, (streams, 1, 1)."""
    attended, _ = attend(weights, x, heads, causal=causal)
    return layer_norm(x + alpha * attended)


def ffn_half(weights: Weights, x: Tensor) -> Tensor:
    """Steps 3 and 4 of Algorithm 1, LN(X + φ(XW₁)W₂)."""
    return layer_norm(x + feed_forward(weights, x))
