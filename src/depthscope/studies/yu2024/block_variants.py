"""Siblings of Algorithm 1 for many trials at once: pre-norm, without an FFN, causal.

Tokens are (trials, streams, n, d) and weights have a leading axis of trials, as in `batched_block.py`.
Equal to `depthscope.models.Block` with the same weights, scores over √d.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from depthscope.studies.yu2024.batched_block import NORM_EPS, apply_linear, attend
from depthscope.studies.yu2024.weights import Weights


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
    attended, _ = attend_causally(weights, x, heads) if causal else attend(weights, x, heads)
    return layer_norm(x + alpha * attended)


def ffn_half(weights: Weights, x: Tensor) -> Tensor:
    """Steps 3 and 4 of Algorithm 1, LN(X + φ(XW₁)W₂)."""
    return layer_norm(x + feed_forward(weights, x))


def attend_causally(weights: Weights, x: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    """`attend` where a token sees itself and what stands before it."""
    q, k, v = (
        apply_linear(linear, x).unflatten(-1, (heads, -1)).transpose(-3, -2)  # (trials, streams, h, n, d/h)
        for linear in (weights.query, weights.key, weights.value)
    )
    n, d = x.shape[-2:]
    later = torch.ones(n, n, dtype=torch.bool).triu(1)
    p = torch.softmax((q @ k.mT * d**-0.5).masked_fill(later, -math.inf), dim=-1)  # (trials, streams, h, n, n)
    y = (p @ v).transpose(-3, -2).flatten(-2)
    return (y if weights.output is None else apply_linear(weights.output, y)), p


def feed_forward(weights: Weights, x: Tensor) -> Tensor:
    """φ(XW₁ + b₁)W₂ + b₂, φ = ReLU."""
    return apply_linear(weights.contract, apply_linear(weights.expand, x).relu_())


def layer_norm(x: Tensor) -> Tensor:
    """LN without gain and bias, which are 1 and 0 at initialisation."""
    return F.layer_norm(x, x.shape[-1:], eps=NORM_EPS)
